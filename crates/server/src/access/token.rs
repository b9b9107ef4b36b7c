//! Bearer tokens. A token is 256 random bits, so one round of SHA-256 protects it; only the hash is kept, and hashes
//! are compared in constant time.

use std::fmt;

use latchwork::store::Env;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::access::{AccessError, LOCAL_SUBJECT, Role};

/// What every token starts with, so that a token in a wrong place can be found.
const PREFIX: &str = "lw_";
/// The longest name of a token, in bytes.
const NAME_BYTES: usize = 128;

/// What is stored of a token: its name, the hash, and what it allows.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Token {
    name: String,
    /// SHA-256 in hexadecimal digits.
    hash: String,
    role: Role,
    /// Empty: all namespaces.
    #[serde(default)]
    namespaces: Vec<String>,
}

impl Token {
    /// A token of which the hash is known: SHA-256 of its text, in 64 hexadecimal digits.
    ///
    /// ```
    /// use latchwork_server::{Role, Token};
    ///
    /// let token = Token::new("billing", &"5e".repeat(32), Role::Operate).unwrap();
    /// assert_eq!(token.name(), "billing");
    /// ```
    pub fn new(name: &str, hash: &str, role: Role) -> Result<Token, AccessError> {
        let refuse = |reason| Err(AccessError::TokenName { name: name.into(), reason });
        match name.len() {
            0 => return refuse("it is empty"),
            length if length > NAME_BYTES => return refuse("it is longer than 128 bytes"),
            _ if name == LOCAL_SUBJECT => return refuse("it stands for callers without a token"),
            _ => {}
        }
        if hash.len() != 64 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(AccessError::Hash { name: name.into() });
        }
        Ok(Token { name: name.into(), hash: hash.to_ascii_lowercase(), role, namespaces: Vec::new() })
    }

    /// A token of which the text is known, for example because another program has made it.
    ///
    /// ```
    /// use latchwork_server::{Role, Token};
    ///
    /// let token = Token::of_secret("billing", "lw_5e5e…", Role::Read).unwrap();
    /// assert_eq!(token.hash().len(), 64);
    /// ```
    pub fn of_secret(name: &str, secret: &str, role: Role) -> Result<Token, AccessError> {
        Token::new(name, &hash(secret), role)
    }

    /// Restricts the token to these namespaces. Without any, it is valid in all.
    pub fn namespaces(mut self, namespaces: impl IntoIterator<Item = impl Into<String>>) -> Token {
        self.namespaces = namespaces.into_iter().map(Into::into).collect();
        self
    }

    /// The name, which stands in logs and in the history of entities.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the token allows.
    pub fn role(&self) -> Role {
        self.role
    }

    /// What is stored of its text, for the configuration of a server.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Where it is valid; empty if that is everywhere.
    pub fn valid_in(&self) -> &[String] {
        &self.namespaces
    }

    /// True if the token is valid in this namespace.
    pub(crate) fn covers(&self, namespace: &str) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|name| name == namespace)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Token { name, role, namespaces, .. } = self;
        f.debug_struct("Token").field("name", name).field("role", role).field("namespaces", namespaces).finish()
    }
}

/// A token that was just made. Its text is known only now.
pub struct NewToken {
    secret: String,
    token: Token,
}

impl NewToken {
    /// Makes a token of 256 random bits.
    ///
    /// ```
    /// use latchwork::store::Env;
    /// use latchwork_server::{NewToken, Role};
    ///
    /// let new = NewToken::generate("billing", Role::Operate, &Env::system());
    /// assert!(new.secret().starts_with("lw_"));
    /// ```
    pub fn generate(name: &str, role: Role, env: &Env) -> NewToken {
        let random: Vec<u8> = (0..4).flat_map(|_| env.random().to_be_bytes()).collect();
        let secret = format!("{PREFIX}{}", hex(&random));
        let token = Token { name: name.into(), hash: hash(&secret), role, namespaces: Vec::new() };
        NewToken { secret, token }
    }

    /// Restricts the token to these namespaces.
    pub fn namespaces(mut self, namespaces: impl IntoIterator<Item = impl Into<String>>) -> NewToken {
        self.token = self.token.namespaces(namespaces);
        self
    }

    /// The text that clients send. It cannot be found out later.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    /// What is stored.
    pub fn token(&self) -> Token {
        self.token.clone()
    }
}

impl fmt::Debug for NewToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewToken").field("token", &self.token).finish_non_exhaustive()
    }
}

/// The token with this text. Compares with every token, so that the time says nothing about which one it was.
pub(crate) fn find<'a>(tokens: &'a [Token], presented: &str) -> Option<&'a Token> {
    let presented = hash(presented);
    let mut found = 0_u64;
    let mut is_found = Choice::from(0);
    for (index, token) in tokens.iter().enumerate() {
        let is_same = token.hash.as_bytes().ct_eq(presented.as_bytes());
        found.conditional_assign(&(index as u64), is_same);
        is_found |= is_same;
    }
    let index = usize::try_from(found).ok()?;
    if bool::from(is_found) { tokens.get(index) } else { None }
}

fn hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_found_by_its_text_alone() {
        let env = Env::seeded(7).0;
        let new: Vec<NewToken> =
            ["a", "b", "c"].iter().map(|name| NewToken::generate(name, Role::Read, &env)).collect();
        let tokens: Vec<Token> = new.iter().map(NewToken::token).collect();
        for new in &new {
            assert_eq!(find(&tokens, new.secret()).map(Token::name), Some(new.token().name()));
        }
        for wrong in ["", "lw_", &tokens[0].hash, &new[0].secret()[..66], &new[0].secret().to_uppercase()] {
            assert!(find(&tokens, wrong).is_none());
        }
        assert!(find(&[], new[0].secret()).is_none());
    }

    #[test]
    fn neither_the_text_nor_the_hash_is_shown() {
        let new = NewToken::generate("a", Role::Read, &Env::seeded(7).0);
        let shown = format!("{new:?}");
        assert!(!shown.contains(new.secret()) && !shown.contains(&new.token().hash), "{shown}");
    }

    #[test]
    fn the_hash_is_that_of_sha_256() {
        assert_eq!(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(Token::new("a", "ba78", Role::Read).is_err());
        assert!(Token::new("", &hash("abc"), Role::Read).is_err());
    }
}
