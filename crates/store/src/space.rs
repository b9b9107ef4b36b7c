//! Spaces: separate sets of keys, each with its own rules for history. Their declarations are records in one of the
//! store's own spaces.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::codec::{Reader, put_number};
use crate::{Key, Range, Result, SpaceId, StoreError};

/// Declarations of spaces: name → [`SpaceRecord`].
pub(crate) const SPACES: SpaceId = SpaceId(0);
/// Receipts of commits with an id: id → receipt.
pub(crate) const RECEIPTS: SpaceId = SpaceId(1);
/// The number of the first declared space. Numbers below belong to the store's own spaces.
pub(crate) const FIRST_DECLARED: SpaceId = SpaceId(16);

/// How long a space keeps overwritten and deleted versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum History {
    /// Only as long as an open view can read them.
    #[default]
    None,
    /// For this number of the store's newest generations.
    Generations(u64),
    /// For this time, by the time of commits.
    For(Duration),
    /// Forever.
    Forever,
}

/// The name and the rules with which a space is declared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpaceSpec {
    pub(crate) name: String,
    history: Option<History>,
    pub(crate) used_once: bool,
}

impl SpaceSpec {
    /// Names a space. A new space keeps no history; an existing one keeps the history that it has.
    ///
    /// ```
    /// # use latchwork_store::SpaceSpec;
    /// let accounts = SpaceSpec::new("accounts");
    /// ```
    pub fn new(name: impl Into<String>) -> SpaceSpec {
        SpaceSpec { name: name.into(), history: None, used_once: false }
    }

    /// Sets how long history is kept, also for an existing space. A shorter history drops what it does not cover.
    ///
    /// ```
    /// # use latchwork_store::{History, SpaceSpec};
    /// let accounts = SpaceSpec::new("accounts").history(History::Generations(1_000));
    /// ```
    pub fn history(mut self, history: History) -> SpaceSpec {
        self.history = Some(history);
        self
    }

    /// Promises that no code relies on the rev of a key after the key is deleted, for example because the key is never
    /// created again. So a delete leaves no tombstone, and the revs of a key that is created again may start at 1.
    ///
    /// ```
    /// # use latchwork_store::SpaceSpec;
    /// let jobs = SpaceSpec::new("jobs").keys_used_once();
    /// ```
    pub fn keys_used_once(mut self) -> SpaceSpec {
        self.used_once = true;
        self
    }

    /// The rules of the space after this declaration. `stored` are the rules that it has, if it exists.
    pub(crate) fn rules(&self, stored: Option<Rules>) -> Rules {
        let history = self.history.or(stored.map(|rules| rules.history)).unwrap_or_default();
        Rules { history, used_once: self.used_once, expires: false }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let refuse = |reason| Err(StoreError::SpaceName { name: self.name.clone(), reason });
        match self.name.len() {
            0 => refuse("it is empty"),
            65.. => refuse("it is longer than 64 bytes"),
            _ => Ok(()),
        }
    }
}

/// The rules of a space, as retention applies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rules {
    /// How long history is kept.
    pub history: History,
    /// True if a delete leaves no tombstone.
    pub used_once: bool,
    /// True if records are removed together with their history. Only the store's receipts have this.
    pub expires: bool,
}

/// A declared space. It creates keys and ranges.
#[derive(Clone)]
pub struct Space {
    pub(crate) id: SpaceId,
    pub(crate) name: Arc<str>,
}

impl Space {
    /// The number of the space in its keys.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(accounts.id(), alice.space());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> SpaceId {
        self.id
    }

    /// The name under which it was declared.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(accounts.name(), "accounts");
    /// # Ok(()) }
    /// ```
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the key with these bytes. The key's length is checked when the key is used.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(accounts.key("alice").bytes(), b"alice");
    /// # Ok(()) }
    /// ```
    pub fn key(&self, bytes: impl AsRef<[u8]>) -> Key {
        Key::new(self.id, bytes.as_ref())
    }

    /// All keys of the space.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert!(accounts.all().contains(&alice));
    /// # Ok(()) }
    /// ```
    pub fn all(&self) -> Range {
        Range::of_space(self.id)
    }

    /// All keys that start with `prefix`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert!(accounts.prefix("al").contains(&alice));
    /// assert!(!accounts.prefix("bo").contains(&alice));
    /// # Ok(()) }
    /// ```
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        Range::of_prefix(self.id, prefix.as_ref())
    }

    /// The keys between two bounds.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert!(accounts.range("a".."b").contains(&alice));
    /// assert!(!accounts.range("b"..).contains(&alice));
    /// # Ok(()) }
    /// ```
    pub fn range<B: AsRef<[u8]>>(&self, bounds: impl RangeBounds<B>) -> Range {
        let start = bounds.start_bound().map(AsRef::as_ref);
        let end = bounds.end_bound().map(AsRef::as_ref);
        Range::between(self.id, start, end)
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, self.id)
    }
}

/// A space's declaration as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SpaceRecord {
    pub(crate) id: SpaceId,
    pub(crate) rules: Rules,
}

impl SpaceRecord {
    const VERSION: u8 = 1;

    pub(crate) fn encode(&self) -> Bytes {
        let (kind, amount) = match self.rules.history {
            History::None => (0, 0),
            History::Generations(count) => (1, count),
            History::For(duration) => (2, u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)),
            History::Forever => (3, 0),
        };
        let mut out = vec![Self::VERSION, kind, u8::from(self.rules.used_once)];
        put_number(&mut out, u64::from(self.id.0));
        put_number(&mut out, amount);
        out.into()
    }

    pub(crate) fn decode(bytes: &Bytes) -> Option<SpaceRecord> {
        let mut reader = Reader(bytes.clone());
        if reader.byte()? != Self::VERSION {
            return None;
        }
        let kind = reader.byte()?;
        let used_once = reader.byte()? != 0;
        let id = SpaceId(u32::try_from(reader.number()?).ok()?);
        let amount = reader.number()?;
        let history = match kind {
            0 => History::None,
            1 => History::Generations(amount),
            2 => History::For(Duration::from_micros(amount)),
            3 => History::Forever,
            _ => return None,
        };
        reader.end()?;
        Some(SpaceRecord { id, rules: Rules { history, used_once, expires: false } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declaration_is_read_back_as_it_was_stored() {
        let histories =
            [History::None, History::Generations(7), History::For(Duration::from_secs(9)), History::Forever];
        for (id, history) in (16..).zip(histories) {
            for used_once in [false, true] {
                let rules = Rules { history, used_once, expires: false };
                let record = SpaceRecord { id: SpaceId(id), rules };
                assert_eq!(SpaceRecord::decode(&record.encode()), Some(record));
            }
        }
        assert_eq!(SpaceRecord::decode(&Bytes::from_static(&[9, 0, 0, 16, 0])), None);
    }
}
