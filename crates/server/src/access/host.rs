//! Names of hosts and origins. The check of `Host` protects from pages that reach this machine under a name of their
//! own (DNS rebinding); the check of `Origin` from pages that make the browser of a user send requests.

use axum::http::header::{HOST, ORIGIN};
use axum::http::request::Parts;
use axum::http::uri::Authority;

use crate::access::Access;
use crate::wire::problem::{Problem, ProblemCode};

/// The names of this machine, which are always served.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// A host, in lower case, and a port if it must be that one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostName {
    name: String,
    port: Option<u16>,
}

impl HostName {
    /// Reads a host. Names of users, paths and empty names are refused.
    pub(crate) fn read(text: &str) -> Option<HostName> {
        let authority: Authority = text.parse().ok()?;
        let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let port = match text.strip_prefix(authority.host())?.strip_prefix(':') {
            Some(port) => Some(port.parse().ok()?),
            None => None,
        };
        (!name.is_empty() && !text.contains('@')).then_some(HostName { name, port })
    }

    /// True if a request to `asked` is one to this host.
    fn serves(&self, asked: &HostName) -> bool {
        self.name == asked.name && (self.port.is_none() || self.port == asked.port)
    }
}

/// Refuses a request that is not for this server.
pub(crate) fn check_host(access: &Access, parts: &Parts) -> Result<(), Problem> {
    let asked = asked_host(parts)?;
    let is_served = LOCAL.contains(&asked.name.as_str()) || access.hosts.iter().any(|host| host.serves(&asked));
    match is_served {
        true => Ok(()),
        false => Err(Problem::new(ProblemCode::Host, "add the host to the allowed hosts of the server")),
    }
}

/// The host that the request names. There is exactly one.
fn asked_host(parts: &Parts) -> Result<HostName, Problem> {
    let wrong = |detail: &str| Problem::new(ProblemCode::InvalidHeader, detail);
    let mut named = parts.headers.get_all(HOST).iter();
    let header = match (named.next(), named.next()) {
        (Some(host), None) => host.to_str().ok().and_then(HostName::read),
        (Some(_), Some(_)) => return Err(wrong("a request has one Host header")),
        (None, _) => return Err(wrong("a request needs a Host header")),
    };
    let header = header.ok_or_else(|| wrong("the Host header is not the name of a host"))?;
    // A proxy may be asked for an absolute address. It must be the same host.
    let address = parts.uri.authority().map(|authority| HostName::read(authority.as_str()));
    match address {
        Some(address) if address.as_ref() != Some(&header) => Err(wrong("the address and the Host header differ")),
        _ => Ok(header),
    }
}

/// Where a page comes from: scheme, host and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    text: String,
    host: HostName,
}

impl Origin {
    pub(crate) fn read(text: &str) -> Option<Origin> {
        let text = text.to_ascii_lowercase();
        let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"))?;
        let host = HostName::read(host).filter(|_| !host.contains('/'))?;
        Some(Origin { text, host })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }
}

/// Refuses a request that a page of another origin has made a browser send. A program that is no browser sends neither
/// header.
pub(crate) fn check_same_origin(parts: &Parts) -> Result<(), Problem> {
    let foreign = || {
        let detail = "a page of another origin needs a token, and its origin among the allowed origins";
        Err(Problem::new(ProblemCode::Origin, detail))
    };
    let mut origins = parts.headers.get_all(ORIGIN).iter();
    if let Some(origin) = origins.next() {
        let origin = origin.to_str().ok().and_then(Origin::read);
        let is_same = origin.is_some_and(|origin| asked_host(parts).is_ok_and(|asked| asked == origin.host));
        if !is_same || origins.next().is_some() {
            return foreign();
        }
    }
    let mut sites = parts.headers.get_all("sec-fetch-site").iter();
    if sites.any(|site| site != "same-origin" && site != "none") {
        return foreign();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let request = headers.iter().fold(Request::builder().uri(uri), |all, (name, value)| all.header(*name, *value));
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_host_is_served_if_it_is_listed() {
        let access = Access::local().host("latch.example.org").unwrap().host("other.example:8443").unwrap();
        for (host, is_served) in [
            ("localhost", true),
            ("LOCALHOST:7420", true),
            ("127.0.0.1:1", true),
            ("[::1]:7420", true),
            ("latch.example.org", true),
            ("Latch.Example.org.:443", true),
            ("other.example:8443", true),
            ("other.example", false),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
        ] {
            assert_eq!(check_host(&access, &parts("/", &[("host", host)])).is_ok(), is_served, "{host}");
        }
    }

    #[test]
    fn a_request_names_one_host() {
        let check = |uri: &str, hosts: &[&str]| {
            let headers: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            check_host(&Access::local(), &parts(uri, &headers)).map_err(|problem| problem.code())
        };
        for hosts in [&[][..], &["localhost", "localhost"], &[""], &["user@localhost"], &["localhost/x"], &["a b"]] {
            assert_eq!(check("/", hosts), Err(ProblemCode::InvalidHeader), "{hosts:?}");
        }
        assert_eq!(check("http://localhost/", &["localhost"]), Ok(()));
        assert_eq!(check("http://evil.example/", &["localhost"]), Err(ProblemCode::InvalidHeader));
    }

    #[test]
    fn a_page_of_another_origin_is_refused() {
        for (headers, is_same) in [
            (&[][..], true),
            (&[("origin", "http://localhost:7420")], true),
            (&[("origin", "http://localhost:7421")], false),
            (&[("origin", "null")], false),
            (&[("origin", "https://evil.example")], false),
            (&[("sec-fetch-site", "same-origin")], true),
            (&[("sec-fetch-site", "none")], true),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "cross-site")], false),
        ] {
            let all: Vec<_> = headers.iter().copied().chain([("host", "localhost:7420")]).collect();
            assert_eq!(check_same_origin(&parts("/", &all)).is_ok(), is_same, "{headers:?}");
        }
    }
}
