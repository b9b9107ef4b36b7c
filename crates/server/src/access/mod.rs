//! Who may do what: tokens and their roles, the hosts that are served, and the origins of browsers. Decided before a
//! route sees the request; no route asks again.

mod admit;
mod host;
mod token;

use latchwork::Value;
use serde::{Deserialize, Serialize};

pub(crate) use admit::{Caller, LOCAL_SUBJECT, Peer};
pub(crate) use host::check_host;
pub use token::{NewToken, Token};

use host::{HostName, Origin};

/// What a token allows. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Sees everything of a namespace, and changes nothing.
    Read,
    /// Does what programs do: changes entities and state, starts workflows, takes locks, fires claims.
    Operate,
    /// Does what operators do: forced releases, removal, back-up, declarations.
    Admin,
}

impl Role {
    /// The word on the wire and in configuration.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }
}

impl From<Role> for Value {
    fn from(role: Role) -> Value {
        role.word().into()
    }
}

/// Why a part of an [`Access`] cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The text is not the name of a host.
    #[error("{text:?} is not a host; write for example `example.org` or `example.org:8443`")]
    Host {
        /// What was given.
        text: String,
    },
    /// The text is not an origin.
    #[error("{text:?} is not an origin; write for example `https://console.example.org`")]
    Origin {
        /// What was given.
        text: String,
    },
    /// The text is not the hash of a token.
    #[error("the hash of token {name:?} is not valid; it has 64 hexadecimal digits")]
    Hash {
        /// The name of the token.
        name: String,
    },
    /// The name is empty, too long or taken.
    #[error("{name:?} cannot name a token: {reason}")]
    TokenName {
        /// The name.
        name: String,
        /// Why it cannot be used.
        reason: &'static str,
    },
}

/// Who may use an API. By default: the owner of the socket in the data directory, and any process on this machine, as
/// administrators. As soon as there is a [`Token`], requests over the network need one; the socket stays open to its
/// owner.
///
/// ```
/// use latchwork::store::Env;
/// use latchwork_server::{Access, NewToken, Role};
///
/// # fn example() -> Result<(), latchwork_server::AccessError> {
/// let new = NewToken::generate("billing", Role::Operate, &Env::system()).namespaces(["default"]);
/// println!("shown once: {}", new.secret());
/// let access = Access::local().token(new.token())?.host("latch.example.org")?;
/// # Ok(()) }
/// # example().unwrap();
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "it has no effect until an Api or a Server has it"]
pub struct Access {
    tokens: Vec<Token>,
    hosts: Vec<HostName>,
    origins: Vec<Origin>,
    is_open: bool,
}

impl Access {
    /// This machine only.
    pub fn local() -> Access {
        Access::default()
    }

    /// Lets requests of other machines in without TLS, and, if there is no token, without one, as administrators: for
    /// a router in an application that has checked its callers already, or for a network of which that is true. The
    /// checks of hosts and origins stay.
    pub fn insecure(mut self) -> Access {
        self.is_open = true;
        self
    }

    /// Adds a token.
    pub fn token(mut self, token: Token) -> Result<Access, AccessError> {
        if self.tokens.iter().any(|other| other.name() == token.name()) {
            return Err(AccessError::TokenName { name: token.name().into(), reason: "another token has this name" });
        }
        self.tokens.push(token);
        Ok(self)
    }

    /// Adds a name under which the server is reached: `example.org` with any port, or `example.org:8443`. The names of
    /// this machine, `localhost`, `127.0.0.1` and `[::1]`, are always served.
    pub fn host(mut self, host: &str) -> Result<Access, AccessError> {
        self.hosts.push(HostName::read(host).ok_or_else(|| AccessError::Host { text: host.into() })?);
        Ok(self)
    }

    /// Lets pages of another origin use the API from a browser (CORS). Such a page needs a token.
    pub fn origin(mut self, origin: &str) -> Result<Access, AccessError> {
        self.origins.push(Origin::read(origin).ok_or_else(|| AccessError::Origin { text: origin.into() })?);
        Ok(self)
    }

    /// True if requests over the network need a token.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    pub(crate) fn is_insecure(&self) -> bool {
        self.is_open
    }

    /// True if a name other than those of this machine is served.
    pub(crate) fn has_public_hosts(&self) -> bool {
        !self.hosts.is_empty()
    }

    pub(crate) fn origins(&self) -> impl Iterator<Item = &str> {
        self.origins.iter().map(Origin::as_str)
    }
}
