//! The decision on one request: who sends it, and whether it may. A pure function of the request and the access.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::ConnectInfo;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;

use crate::access::host::check_same_origin;
use crate::access::{Access, Role, token};
use crate::wire::problem::{Problem, ProblemCode};

/// Where a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The socket in the data directory, which only its owner can open.
    Owner,
    /// A process on this machine.
    Local,
    /// Another machine, or not known.
    Remote,
}

impl Peer {
    /// The other end of a TCP connection.
    pub(crate) fn at(address: SocketAddr) -> Peer {
        if address.ip().to_canonical().is_loopback() { Peer::Local } else { Peer::Remote }
    }

    /// In an application that serves the router itself, axum may know the address.
    fn of(parts: &Parts) -> Peer {
        let known = parts.extensions.get::<Peer>().copied();
        let told = || parts.extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| Peer::at(*address));
        known.or_else(told).unwrap_or(Peer::Remote)
    }
}

/// The subject of a caller that needs no token.
pub(crate) const LOCAL_SUBJECT: &str = "local";

/// Who sends a request that was admitted.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The name of the token, or `local`.
    pub(crate) subject: Arc<str>,
}

impl Access {
    /// Admits a request that needs this role in this namespace.
    pub(crate) fn admit(&self, parts: &Parts, role: Role, namespace: &str) -> Result<Caller, Problem> {
        let Some(presented) = bearer(parts)? else {
            check_same_origin(parts)?;
            return self.without_token(parts);
        };
        let unknown = || Problem::new(ProblemCode::Unauthenticated, "the token is not valid");
        let token = token::find(&self.tokens, presented).ok_or_else(unknown)?;
        if !token.covers(namespace) {
            return Err(Problem::new(ProblemCode::Forbidden, "the token is not valid in this namespace"));
        }
        if token.role() < role {
            let detail = format!("this needs the role {}; the token has {}", role.word(), token.role().word());
            return Err(Problem::new(ProblemCode::Forbidden, detail).with("role", role.word()));
        }
        Ok(Caller { subject: token.name().into() })
    }

    fn without_token(&self, parts: &Parts) -> Result<Caller, Problem> {
        let is_admitted = match Peer::of(parts) {
            Peer::Owner => true,
            Peer::Local => !self.has_tokens(),
            Peer::Remote => self.is_open && !self.has_tokens(),
        };
        match is_admitted {
            true => Ok(Caller { subject: LOCAL_SUBJECT.into() }),
            false => Err(Problem::new(ProblemCode::Unauthenticated, "send Authorization: Bearer and a token")),
        }
    }
}

/// The token that the request presents.
fn bearer(parts: &Parts) -> Result<Option<&str>, Problem> {
    let mut given = parts.headers.get_all(AUTHORIZATION).iter();
    let header = match (given.next(), given.next()) {
        (None, _) => return Ok(None),
        (Some(header), None) => header,
        (Some(_), Some(_)) => {
            return Err(Problem::new(ProblemCode::InvalidHeader, "a request has one Authorization header"));
        }
    };
    let token = header.to_str().ok().and_then(|text| {
        let (scheme, token) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
    });
    let wrong = || Problem::new(ProblemCode::Unauthenticated, "send Authorization: Bearer and a token");
    token.map(Some).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::NewToken;
    use axum::http::Request;
    use latchwork::store::Env;

    fn parts(peer: Option<Peer>, headers: &[(&str, &str)]) -> Parts {
        let request = headers.iter().fold(Request::builder(), |all, (name, value)| all.header(*name, *value));
        let (mut parts, ()) = request.header("host", "localhost").body(()).unwrap().into_parts();
        peer.into_iter().for_each(|peer| {
            parts.extensions.insert(peer);
        });
        parts
    }

    #[test]
    fn without_tokens_only_this_machine_is_admitted() {
        let access = Access::local();
        for (peer, is_admitted) in
            [(Some(Peer::Owner), true), (Some(Peer::Local), true), (Some(Peer::Remote), false), (None, false)]
        {
            assert_eq!(access.admit(&parts(peer, &[]), Role::Admin, "default").is_ok(), is_admitted, "{peer:?}");
            let open = access.clone().insecure();
            assert!(open.admit(&parts(peer, &[]), Role::Admin, "default").is_ok());
            let foreign = parts(peer, &[("origin", "https://evil.example")]);
            let refused = open.admit(&foreign, Role::Read, "default").unwrap_err();
            assert_eq!(refused.code(), ProblemCode::Origin);
        }
    }

    #[test]
    fn a_token_has_a_role_and_namespaces() {
        let env = Env::seeded(7).0;
        let new = NewToken::generate("billing", Role::Operate, &env).namespaces(["a"]);
        let access = Access::local().token(new.token()).unwrap();
        let header = format!("Bearer {}", new.secret());
        let with = parts(Some(Peer::Remote), &[("authorization", &header), ("origin", "https://page.example")]);
        let admit = |parts: &Parts, role, namespace| {
            access
                .admit(parts, role, namespace)
                .map(|caller| caller.subject.to_string())
                .map_err(|problem| problem.code())
        };
        assert_eq!(admit(&with, Role::Read, "a"), Ok("billing".into()));
        assert_eq!(admit(&with, Role::Operate, "a"), Ok("billing".into()));
        assert_eq!(admit(&with, Role::Admin, "a"), Err(ProblemCode::Forbidden));
        assert_eq!(admit(&with, Role::Read, "b"), Err(ProblemCode::Forbidden));
        for wrong in ["Bearer lw_0", "Bearer", "Basic YTpi", "", "Bearer "] {
            for peer in [Peer::Owner, Peer::Local, Peer::Remote] {
                let refused = admit(&parts(Some(peer), &[("authorization", wrong)]), Role::Read, "a");
                assert_eq!(refused, Err(ProblemCode::Unauthenticated), "{wrong:?}");
            }
        }
        assert_eq!(admit(&parts(Some(Peer::Local), &[]), Role::Read, "a"), Err(ProblemCode::Unauthenticated));
        assert_eq!(admit(&parts(Some(Peer::Owner), &[]), Role::Admin, "a"), Ok("local".into()));
        // Where there are tokens, they are needed, also without TLS.
        let open = access.clone().insecure();
        assert!(open.admit(&parts(Some(Peer::Remote), &[]), Role::Read, "a").is_err());
    }
}
