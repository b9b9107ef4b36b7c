//! Changes under an idempotency key. The commit of the change writes its answer beside it, so a change that is asked
//! for again is made once, and answered as it was answered first. This file knows no change.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use crate::lane::kept::KeptAnswers;
use crate::lane::{Part, Tag};
use crate::record::{Record, Unreadable, stored};
use crate::store::{Check, Commit, ErrorKind, Key, Right, SpaceSpec, Store, StoreError, Timestamp, View, Write};

/// The check that the change was not made before, and those of the caller's right.
pub(crate) const ONCE: Tag = Tag("once");

/// The space of the answers. It is declared by the first change under a key.
const SPACE: &str = "once";
/// The longest key, in bytes.
const LONGEST: usize = 255;

/// The idempotency key of a change: the change is made once under it, and asking again returns the same answer, for a
/// day. The same key with another change or other arguments is an error. Take a new key for each change, for example a
/// UUID.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::time::Duration;
/// # use latchwork::store::Store;
/// # use latchwork::workflow::{Ctx, Engine, Schedule, workflow};
/// # let report = workflow("report").run(async |_: Ctx, region: String| Ok(region));
/// # let engine = Engine::on(&Store::memory().await?).register(&report).start().await?;
/// # let hourly = Schedule::every("hourly", Duration::from_secs(3600)).workflow(&report, "eu".to_string());
/// # engine.schedules().put(hourly).await?;
/// let first = engine.schedules().once("request-7").trigger("hourly").await?;
/// let again = engine.schedules().once("request-7").trigger("hourly").await?;
/// assert_eq!(first, again);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Once {
    key: Arc<str>,
    guard: Option<(Check, Arc<str>)>,
}

impl Once {
    /// A key of 1 to 255 bytes.
    ///
    /// ```
    /// # use latchwork::Once;
    /// let once = Once::new("request-7");
    /// ```
    pub fn new(key: impl Into<Arc<str>>) -> Once {
        Once { key: key.into(), guard: None }
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Makes the change only while the caller has this right. So a caller whose place another one has taken, and that
    /// goes on later, changes nothing.
    ///
    /// ```
    /// # use latchwork::Once;
    /// # use latchwork::store::Right;
    /// # fn example(right: &impl Right) {
    /// let once = Once::new("request-7").guard(right);
    /// # }
    /// ```
    pub fn guard(mut self, right: &impl Right) -> Once {
        self.guard = Some((right.check(), right.lost().into()));
        self
    }
}

impl From<&str> for Once {
    fn from(key: &str) -> Once {
        Once::new(key)
    }
}

impl From<String> for Once {
    fn from(key: String) -> Once {
        Once::new(key)
    }
}

/// Why a change under an idempotency key was not made.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum OnceError {
    /// The key has a wrong length.
    #[error("an idempotency key has 1 to 255 bytes, and this one has {length}")]
    Length { length: usize },
    /// The key was used before for another change, or with other arguments.
    #[error("idempotency key {key:?} was used before, for another change or with other arguments")]
    Reused { key: String },
    /// The caller has lost the right to make the change.
    #[error("{reason}")]
    Fenced { reason: String },
    /// The stored answer cannot be read.
    #[error("the answer under idempotency key {key:?} is damaged: it cannot be read")]
    Corrupt { key: String },
    /// The stored answer was written by a newer program.
    #[error("the answer under idempotency key {key:?} has version {found}, which this program does not know")]
    UnknownVersion { key: String, found: u8 },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl OnceError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::OnceError;
    /// # use latchwork::store::ErrorKind;
    /// assert_eq!(OnceError::Reused { key: "k".into() }.kind(), ErrorKind::Invalid);
    /// ```
    pub fn kind(&self) -> ErrorKind {
        match self {
            OnceError::Length { .. } | OnceError::Reused { .. } | OnceError::UnknownVersion { .. } => {
                ErrorKind::Invalid
            }
            OnceError::Fenced { .. } => ErrorKind::Conflict,
            OnceError::Corrupt { .. } => ErrorKind::Corrupt,
            OnceError::Store(error) => error.kind(),
        }
    }
}

/// A kept answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct OnceAnswer {
    /// Stands for the change and its arguments.
    fingerprint: u64,
    /// JSON text.
    answer: String,
}

stored!(OnceAnswer);

/// The space of the answers, once it is known.
#[derive(Default)]
pub(crate) struct OnceSpace(OnceCell<KeptAnswers>);

/// What is known of a change that is asked for.
pub(crate) enum OnceFound<A> {
    /// It was made before, and answered like this.
    Answered(A),
    /// It was not made yet.
    Anew(OnceCall),
}

/// A change that was not made yet. Without a key it adds nothing to the commit.
#[derive(Debug, Clone, Default)]
pub(crate) struct OnceCall(Option<KeyedChange>);

#[derive(Debug, Clone)]
struct KeyedChange {
    space: KeptAnswers,
    key: Key,
    fingerprint: u64,
    guard: Option<Check>,
    now: Timestamp,
}

impl OnceSpace {
    async fn get(&self, store: &Store) -> Result<&KeptAnswers, StoreError> {
        let space = async || store.space(SpaceSpec::new(SPACE).keys_used_once()).await.map(KeptAnswers);
        self.0.get_or_try_init(space).await
    }

    /// Looks for the answer of a change. `change` names it, with all arguments.
    pub(crate) async fn find<A: DeserializeOwned>(
        &self,
        store: &Store,
        once: Option<&Once>,
        change: &impl Serialize,
    ) -> Result<OnceFound<A>, OnceError> {
        let Some(once) = once else { return Ok(OnceFound::Anew(OnceCall::default())) };
        if !(1..=LONGEST).contains(&once.key.len()) {
            return Err(OnceError::Length { length: once.key.len() });
        }
        let (space, fingerprint) = (self.get(store).await?, fingerprint(change));
        let key = space.key(once.key.as_bytes());
        let view = store.view().await?;
        let name = || once.key.to_string();
        if let Some(item) = view.get(&key).await? {
            // An unreadable answer is an error: to make the change again would make it twice.
            let found = OnceAnswer::decode(&item.value).map_err(|why| match why {
                Unreadable::Damaged => OnceError::Corrupt { key: name() },
                Unreadable::Version { found, .. } => OnceError::UnknownVersion { key: name(), found },
            })?;
            if found.fingerprint != fingerprint {
                return Err(OnceError::Reused { key: name() });
            }
            let answer = serde_json::from_str(&found.answer).map_err(|_| OnceError::Corrupt { key: name() })?;
            return Ok(OnceFound::Answered(answer));
        }
        if let Some((check, lost)) = &once.guard
            && !holds(&view, check).await?
        {
            return Err(OnceError::Fenced { reason: lost.to_string() });
        }
        sweep(store, space, &view).await?;
        let guard = once.guard.as_ref().map(|(check, _)| check.clone());
        let (space, now) = (space.clone(), store.env().now());
        Ok(OnceFound::Anew(OnceCall(Some(KeyedChange { space, key, fingerprint, guard, now }))))
    }

    /// A change whose key was checked when it was begun, and is stored since then.
    pub(crate) async fn begun(&self, store: &Store, key: &str, fingerprint: u64) -> Result<OnceCall, StoreError> {
        let (space, now) = (self.get(store).await?.clone(), store.env().now());
        let key = space.key(key.as_bytes());
        Ok(OnceCall(Some(KeyedChange { space, key, fingerprint, guard: None, now })))
    }
}

impl OnceCall {
    /// The part that keeps the answer, with the check that there is none yet.
    pub(crate) fn answered(&self, answer: &impl Serialize) -> Part {
        let (checks, writes) = self.checks_and_writes(answer);
        let part = checks.into_iter().fold(Part::default(), |part, check| part.check(ONCE, check));
        writes.into_iter().fold(part, Part::write)
    }

    /// The same as the checks and writes alone.
    pub(crate) fn checks_and_writes(&self, answer: &impl Serialize) -> (Vec<Check>, Vec<Write>) {
        let Some(KeyedChange { space, key, fingerprint, now, .. }) = &self.0 else { return Default::default() };
        let answer = serde_json::to_string(answer).expect("an answer can be written as JSON");
        let record = OnceAnswer { fingerprint: *fingerprint, answer }.encode();
        let writes = space.put(key, *now, record).into();
        (self.checks(), writes)
    }

    /// The part of a commit that only begins the change: it was not made yet, and the caller has the right to make it.
    pub(crate) fn unanswered(&self) -> Part {
        self.checks().into_iter().fold(Part::default(), |part, check| part.check(ONCE, check))
    }

    fn checks(&self) -> Vec<Check> {
        let Some(KeyedChange { key, guard, .. }) = &self.0 else { return Vec::new() };
        [Check::Absent(key.clone())].into_iter().chain(guard.clone()).collect()
    }

    /// True if the change has an idempotency key.
    pub(crate) fn has_key(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn fingerprint(&self) -> Option<u64> {
        self.0.as_ref().map(|keyed| keyed.fingerprint)
    }
}

fn fingerprint(change: &impl Serialize) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&serde_json::to_vec(change).unwrap_or_default())
}

async fn holds(view: &View, check: &Check) -> Result<bool, StoreError> {
    Ok(match check {
        Check::Present(key) => view.get(key).await?.is_some(),
        Check::Absent(key) => view.get(key).await?.is_none(),
        Check::AtRev(key, rev) => view.get(key).await?.is_some_and(|item| item.rev == *rev),
        // The commit checks it.
        Check::AtGeneration(_) | Check::Unchanged(..) => true,
    })
}

/// Removes some outdated answers, in a commit of its own. If it is refused, another caller has removed them.
async fn sweep(store: &Store, space: &KeptAnswers, view: &View) -> Result<(), StoreError> {
    let commit = space.sweep(view, store.env().now(), Commit::new()).await?;
    if commit.writes().is_empty() { Ok(()) } else { store.commit(commit).await.map(drop) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::kept::KEPT;
    use crate::store::{Env, Limits, Order};
    use std::time::Duration;

    async fn found(store: &Store, once: &Once, change: &str) -> Result<OnceFound<u32>, OnceError> {
        OnceSpace::default().find(store, Some(once), &change).await
    }

    async fn anew(store: &Store, once: &Once, change: &str) -> OnceCall {
        match found(store, once, change).await.unwrap() {
            OnceFound::Anew(call) => call,
            OnceFound::Answered(answer) => panic!("answered: {answer}"),
        }
    }

    async fn lands(store: &Store, call: &OnceCall, answer: u32) -> bool {
        store.commit(call.answered(&answer).place_whole(Commit::new()).0).await.unwrap().is_applied()
    }

    #[tokio::test]
    async fn of_callers_under_one_key_one_makes_the_change() {
        let store = Store::memory().await.unwrap();
        let once = Once::new("k");
        let (one, other) = (anew(&store, &once, "a").await, anew(&store, &once, "a").await);
        assert!(lands(&store, &one, 7).await);
        assert!(!lands(&store, &other, 8).await);
        assert!(matches!(found(&store, &once, "a").await, Ok(OnceFound::Answered(7))));
        assert!(matches!(found(&store, &once, "b").await, Err(OnceError::Reused { .. })));
        for wrong in [String::new(), "x".repeat(256)] {
            assert!(matches!(found(&store, &wrong.into(), "a").await, Err(OnceError::Length { .. })));
        }
    }

    #[tokio::test]
    async fn a_caller_that_has_lost_its_right_changes_nothing() {
        struct Mark(Key);
        impl Right for Mark {
            fn check(&self) -> Check {
                Check::Present(self.0.clone())
            }
        }
        let store = Store::memory().await.unwrap();
        let mark = Mark(store.space(SpaceSpec::new("marks")).await.unwrap().key("m"));
        assert!(store.commit(Commit::new().put(&mark.0, "")).await.unwrap().is_applied());
        let once = Once::new("k").guard(&mark);
        let call = anew(&store, &once, "a").await;
        assert!(store.commit(Commit::new().delete(&mark.0)).await.unwrap().is_applied());
        assert!(!lands(&store, &call, 7).await);
        assert!(matches!(found(&store, &once, "a").await, Err(OnceError::Fenced { .. })));
    }

    #[tokio::test]
    async fn an_answer_is_kept_for_a_day() {
        let (env, clock) = Env::seeded(7);
        let store = Store::memory_with(env, Limits::default()).await.unwrap();
        let once = Once::new("k");
        assert!(lands(&store, &anew(&store, &once, "a").await, 7).await);
        clock.advance(KEPT);
        assert!(matches!(found(&store, &once, "a").await, Ok(OnceFound::Answered(7))));
        clock.advance(Duration::from_secs(1));
        // Another change removes it.
        assert!(lands(&store, &anew(&store, &"other".into(), "a").await, 8).await);
        assert!(lands(&store, &anew(&store, &once, "b").await, 9).await);
        let space = OnceSpace::default().get(&store).await.unwrap().0.all();
        let left = store.view().await.unwrap().scan(&space, Order::Ascending, 10).await.unwrap();
        assert_eq!(left.len(), 4, "two answers and their places: {left:?}");
    }
}
