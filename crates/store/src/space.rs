//! Spaces: separate runs of keys, each with its own rules for history. Their declarations are records of the store
//! itself, in a space of its own.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::codec::{Reader, put_number};
use crate::{Key, Range, Result, SpaceId, StoreError};

/// Declarations of spaces: name → [`SpaceRecord`].
pub(crate) const SPACES: SpaceId = SpaceId(0);
/// Receipts of commits with an id: id → what was answered.
pub(crate) const RECEIPTS: SpaceId = SpaceId(1);
/// The first number given to a declared space; those below are the store's own.
pub(crate) const FIRST_DECLARED: SpaceId = SpaceId(16);

/// How long a space remembers what was overwritten or deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum History {
    /// Only what open views hold on to.
    #[default]
    None,
    /// The last so many generations of the store.
    Generations(u64),
    /// This long, by commit time.
    For(Duration),
    /// Always.
    Forever,
}

/// What a space is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpaceSpec {
    pub(crate) name: String,
    history: Option<History>,
    pub(crate) used_once: bool,
}

impl SpaceSpec {
    /// The space of this name. A new one keeps no history, one that exists keeps the history it has.
    pub fn new(name: impl Into<String>) -> SpaceSpec {
        SpaceSpec { name: name.into(), history: None, used_once: false }
    }

    /// Sets how long history is kept, also of a space that exists: what a shorter history does not cover is dropped.
    pub fn history(mut self, history: History) -> SpaceSpec {
        self.history = Some(history);
        self
    }

    /// Promises that nobody goes by the rev of a key any more once it is deleted, as when it is never created again: so
    /// a delete need not leave its rev behind, and a key that is created again may start anew.
    pub fn keys_used_once(mut self) -> SpaceSpec {
        self.used_once = true;
        self
    }

    /// The rules that this asks for, of a space that has some already or has none yet.
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
    /// Whether a delete may leave nothing behind.
    pub used_once: bool,
    /// Whether records leave with their history: only of the store's own receipts.
    pub expires: bool,
}

/// A declared space: makes keys and ranges.
#[derive(Clone)]
pub struct Space {
    pub(crate) id: SpaceId,
    pub(crate) name: Arc<str>,
}

impl Space {
    /// The number that stands for the space in keys.
    pub fn id(&self) -> SpaceId {
        self.id
    }

    /// The name it was declared by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The key of this space with these bytes. Whether they are allowed is checked where the key is used.
    pub fn key(&self, bytes: impl AsRef<[u8]>) -> Key {
        Key::new(self.id, bytes.as_ref())
    }

    /// All keys of the space.
    pub fn all(&self) -> Range {
        Range::of_space(self.id)
    }

    /// All keys that start with `prefix`.
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        Range::of_prefix(self.id, prefix.as_ref())
    }

    /// The keys between two bounds.
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
    fn a_declaration_comes_back_as_it_was_stored() {
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
