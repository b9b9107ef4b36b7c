//! What a workflow's function is given: every operation that is recorded.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::store::{Timestamp, Uuid};
use crate::workflow::record::{Entry, EntryState, Kind};
use crate::workflow::run::{IDLE, Next, Run, Stop, hash_text};
use crate::workflow::slots::CtxState;
use crate::workflow::step::{Attempt, Plain, Step, WithAttempt};
use crate::workflow::{ExecutionId, Failure};

/// The context of an execution.
#[derive(Clone)]
pub struct Ctx {
    pub(crate) run: Arc<Run>,
}

impl std::fmt::Debug for Ctx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ctx").field("id", &self.run.id).finish_non_exhaustive()
    }
}

pub(crate) fn hash(value: &impl Serialize) -> u64 {
    hash_text(&json::to_value(value).unwrap_or_default().to_string())
}

impl Ctx {
    /// The execution's id.
    pub fn id(&self) -> &ExecutionId {
        &self.run.id
    }

    /// A step: its body runs at least once, and its result is recorded exactly once. Await it, after saying how it is
    /// to be tried.
    pub fn run<F, Fut, T, E>(&self, name: &str, body: F) -> Step<'_, Plain<F>>
    where
        F: Fn() -> Fut,
        Fut: Future<Output = std::result::Result<T, E>>,
    {
        Step::new(self, name, Plain(body))
    }

    /// Like [`Ctx::run`], with a body that is told which attempt it is, and of its idempotency key.
    pub fn run_with<F, Fut, T, E>(&self, name: &str, body: F) -> Step<'_, WithAttempt<F>>
    where
        F: Fn(Attempt) -> Fut,
        Fut: Future<Output = std::result::Result<T, E>>,
    {
        Step::new(self, name, WithAttempt(body))
    }

    /// Slots of the store. What is done to them from here is one commit with the record that it was done, so neither a
    /// crash nor a replay does it twice.
    pub fn state(&self) -> CtxState {
        CtxState::new(self.run.clone())
    }

    /// Starts the execution anew with another input, under the same id and with an empty journal: so that a loop
    /// without end does not grow without end. Await it and return what it gives; it never does.
    pub async fn continue_as_new<T>(&self, input: impl Serialize) -> std::result::Result<T, Failure> {
        let input = json::to_value(&input).map_err(|error| Failure::new(format!("the next input: {error}")))?;
        let input = input.to_string();
        self.run.fits("the next input", input.len())?;
        match self.run.peek().await {
            Ok(None) => {}
            Ok(Some(entry)) => {
                let reason =
                    format!("the code continues as new, and the journal goes on with {} {:?}", entry.kind, entry.name);
                return self.run.stop_for(Stop::Parked(reason)).await;
            }
            Err(stop) => return self.run.stop_for(stop).await,
        }
        self.run.effect().await;
        self.run.ensure_stored().await;
        match self.run.commit(Next::Continues(input)).await {
            Ok(()) => self.run.stop_for(Stop::Continued).await,
            Err(stop) => self.run.stop_for(stop).await,
        }
    }

    /// Waits. A long wait costs no memory, and goes on after a restart for what is left of it.
    pub async fn sleep(&self, duration: Duration) -> std::result::Result<(), Failure> {
        let until = |now: Timestamp| now.plus(duration);
        let argument = hash(&u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
        self.run.operation(self.wait(argument, until)).await;
        Ok(())
    }

    /// Waits until a time of day.
    pub async fn sleep_until(&self, time: Timestamp) -> std::result::Result<(), Failure> {
        self.run.operation(self.wait(hash(&time.0), |_| time)).await;
        Ok(())
    }

    async fn wait(&self, argument: u64, until: impl FnOnce(Timestamp) -> Timestamp) {
        let (place, found) = self.run.take(Kind::Sleep, "", argument).await;
        let is_new = found.is_none();
        let now = self.run.env().now();
        let until = match found.map(|found| found.state) {
            Some(EntryState::Until(until)) => Timestamp(until),
            _ => until(now),
        };
        if is_new {
            self.run.put(place, Entry::new(Kind::Sleep, "", argument, now, EntryState::Until(until.0)));
        }
        if self.run.engine.replays {
            return;
        }
        let left = Duration::from_micros(until.0.saturating_sub(now.0));
        if left > IDLE {
            return self.run.suspend(until).await;
        }
        if is_new {
            self.run.flush().await;
        }
        if !left.is_zero() {
            self.run.env().sleep(left).await;
        }
    }

    /// The time of day, the same one on every replay.
    pub async fn now(&self) -> Timestamp {
        Timestamp(self.value(Kind::Now, "", 0, |run| run.env().now().0).await)
    }

    /// A new id, the same one on every replay.
    pub async fn uuid(&self) -> Uuid {
        let value: u128 =
            self.value(Kind::Uuid, "", 0, |run| run.env().uuid().as_u128().to_string()).await.parse().unwrap_or(0);
        Uuid::from_u128(value)
    }

    /// A random number, the same one on every replay.
    pub async fn random(&self) -> u64 {
        self.value(Kind::Random, "", 0, |run| run.env().random()).await
    }

    /// Which version of the code an execution goes by, for code that changes under running ones. Who comes by here for
    /// the first time gets the last of the range; who did before has the version it had then, or, if this was not asked
    /// at that time, the first.
    pub async fn version(&self, change: &str, range: std::ops::RangeInclusive<u32>) -> u32 {
        match self.run.peek().await {
            // It came by before there was anything to ask, and went on with something else.
            Ok(Some(entry)) if (entry.kind, &*entry.name) != (Kind::Version, change) => return *range.start(),
            Ok(_) => {}
            Err(stop) => return self.run.stop_for(stop).await,
        }
        let version = self.value(Kind::Version, change, 0, |_| *range.end()).await;
        if range.contains(&version) {
            return version;
        }
        let (first, last) = range.into_inner();
        let reason = format!("it goes by version {version} of {change:?}, and the code knows {first} to {last}");
        self.run.stop_for(Stop::Parked(reason)).await
    }

    /// Something that is chosen once. It leaves nothing behind, so it rides on the next commit.
    async fn value<T: Serialize + DeserializeOwned>(
        &self,
        kind: Kind,
        name: &str,
        argument: u64,
        choose: impl FnOnce(&Run) -> T,
    ) -> T {
        let chosen = async {
            let (place, found) = self.run.take(kind, name, argument).await;
            if let Some(EntryState::Done(text)) = found.map(|found| found.state) {
                return match serde_json::from_str(&text) {
                    Ok(value) => value,
                    Err(_) => {
                        let reason = format!("what operation {place} has chosen cannot be read: {text}");
                        self.run.stop_for(Stop::Parked(reason)).await
                    }
                };
            }
            let value = choose(&self.run);
            let text = serde_json::to_string(&value).expect("a number can be written as JSON");
            self.run.put(place, Entry::new(kind, name, argument, self.run.env().now(), EntryState::Done(text)));
            value
        };
        self.run.operation(chosen).await
    }
}
