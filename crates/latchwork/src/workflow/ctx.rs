//! What a workflow's function is given: every operation that is recorded.

use std::future::{Future, IntoFuture};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::panic::message_of;
use crate::store::{Timestamp, Uuid};
use crate::workflow::record::{Entry, EntryState, Kind, Status, failure_text};
use crate::workflow::run::{IDLE, Run, Stop};
use crate::workflow::{ExecutionId, Failure, Retry};

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

fn hash(value: &impl Serialize) -> u64 {
    let value = json::to_value(value).unwrap_or_default();
    xxhash_rust::xxh3::xxh3_64(value.to_string().as_bytes())
}

impl Ctx {
    /// The execution's id.
    pub fn id(&self) -> &ExecutionId {
        &self.run.id
    }

    /// A step: its body runs at least once, and its result is recorded exactly once. Await it, after saying how it is
    /// to be tried.
    pub fn run<F, Fut, T, E>(&self, name: &str, body: F) -> Step<'_, F>
    where
        F: Fn() -> Fut,
        Fut: Future<Output = std::result::Result<T, E>>,
    {
        Step { ctx: self, name: name.into(), body, retry: Retry::default(), timeout: None, deadline: None, argument: 0 }
    }

    /// Waits. A long wait costs no memory, and goes on after a restart for what is left of it.
    pub async fn sleep(&self, duration: Duration) -> std::result::Result<(), Failure> {
        let until = |now: Timestamp| now.plus(duration);
        self.wait(hash(&u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)), until).await;
        Ok(())
    }

    /// Waits until a time of day.
    pub async fn sleep_until(&self, time: Timestamp) -> std::result::Result<(), Failure> {
        self.wait(hash(&time.0), |_| time).await;
        Ok(())
    }

    async fn wait(&self, argument: u64, until: impl FnOnce(Timestamp) -> Timestamp) {
        let (place, found) = self.run.take(Kind::Sleep, "", argument).await;
        let is_new = found.is_none();
        let until = match found.map(|found| found.state) {
            Some(EntryState::Until(until)) => Timestamp(until),
            _ => until(self.run.env().now()),
        };
        if is_new {
            let state = EntryState::Until(until.0);
            self.run.put(place, Entry { kind: Kind::Sleep, name: String::new(), argument, attempts: 0, state });
        }
        let left = Duration::from_micros(until.0.saturating_sub(self.run.env().now().0));
        if left > IDLE {
            // What is to end before that is to be woken for its end.
            let deadline = self.run.execution().deadline_us.map_or(until, Timestamp);
            let timer = until.min(deadline);
            if let Err(stop) = self.run.commit(Some((Status::Waiting, Some(timer)))).await {
                return self.run.stop_for(stop).await;
            }
            self.run.engine.timers.set(timer);
            return self.run.stop_for(Stop::Suspended).await;
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
            Ok(Some(entry)) if (entry.kind, entry.name.as_str()) != (Kind::Version, change) => return *range.start(),
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
        let (name, state) = (name.to_string(), EntryState::Done(text));
        self.run.put(place, Entry { kind, name, argument, attempts: 0, state });
        value
    }
}

/// A step that is about to be awaited.
#[must_use = "a step does nothing until it is awaited"]
pub struct Step<'a, F> {
    ctx: &'a Ctx,
    name: String,
    body: F,
    retry: Retry,
    timeout: Option<Duration>,
    deadline: Option<Duration>,
    argument: u64,
}

impl<F> Step<'_, F> {
    /// When it is tried again if it fails: twice more, unless this is said.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// How long one attempt may take.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// How long all attempts and the pauses between them may take together, as this process sees it.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// What the body is given, so that a replay can tell when it is given something else.
    pub fn input(mut self, input: &impl Serialize) -> Self {
        self.argument = hash(input);
        self
    }
}

impl<'a, F, Fut, T, E> IntoFuture for Step<'a, F>
where
    F: Fn() -> Fut + Send + Sync + 'a,
    Fut: Future<Output = std::result::Result<T, E>> + Send + 'a,
    T: Serialize + DeserializeOwned + Send + 'a,
    E: Into<Failure> + Send + 'a,
{
    type Output = std::result::Result<T, Failure>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.execute())
    }
}

impl<F> Step<'_, F> {
    async fn execute<Fut, T, E>(self) -> std::result::Result<T, Failure>
    where
        F: Fn() -> Fut,
        Fut: Future<Output = std::result::Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: Into<Failure>,
    {
        let run = &self.ctx.run;
        let (place, found) = run.take(Kind::Step, &self.name, self.argument).await;
        let mut entry = match found {
            Some(Entry { state: EntryState::Done(text), .. }) => return self.recorded(place, &text).await,
            Some(Entry { state: EntryState::Gave(text), .. }) => return Err(read_failure(&text)),
            Some(entry) => entry,
            None => {
                let (name, state) = (self.name.clone(), EntryState::Begun);
                Entry { kind: Kind::Step, name, argument: self.argument, attempts: 0, state }
            }
        };
        let began = run.env().monotonic();
        loop {
            if let EntryState::Failed { next_us, .. } = entry.state {
                let left = Duration::from_micros(next_us.saturating_sub(run.env().now().0));
                run.env().sleep(left).await;
            } else if entry.attempts >= self.retry.attempts() {
                // Begun as often as it may be and never ended: it takes the process with it.
                let reason = format!("step {:?} was begun {} times and never ended", self.name, entry.attempts);
                return run.stop_for(Stop::Parked(reason)).await;
            }
            entry.attempts += 1;
            entry.state = EntryState::Begun;
            run.put(place, entry.clone());
            run.flush().await;
            let ended = self.attempt().await.and_then(|value| match json::to_value(&value) {
                Ok(json) => Ok((value, json.to_string())),
                Err(error) => Err(Failure::new(format!("the result: {error}")).not_retryable()),
            });
            let failure = match ended {
                Ok((value, text)) => {
                    entry.state = EntryState::Done(text);
                    run.put(place, entry);
                    return Ok(value);
                }
                Err(failure) => failure,
            };
            let spent = run.env().monotonic() - began;
            let pause = self.retry.pause_after(entry.attempts, &failure, run.env());
            let pause = pause.filter(|pause| self.deadline.is_none_or(|deadline| spent + *pause < deadline));
            let Some(pause) = pause else {
                entry.state = EntryState::Gave(failure_text(&failure));
                run.put(place, entry);
                return Err(failure);
            };
            let next_us = run.env().now().plus(pause).0;
            entry.state = EntryState::Failed { failure: failure_text(&failure), next_us };
            run.put(place, entry.clone());
            run.flush().await;
        }
    }

    async fn recorded<T: DeserializeOwned>(&self, place: u32, text: &str) -> std::result::Result<T, Failure> {
        match serde_json::from_str(text) {
            Ok(value) => Ok(value),
            Err(error) => {
                let reason =
                    format!("the result of step {:?} (operation {place}) does not fit its type: {error}", self.name);
                self.ctx.run.stop_for(Stop::Parked(reason)).await
            }
        }
    }

    /// Runs the body once.
    async fn attempt<Fut, T, E>(&self) -> std::result::Result<T, Failure>
    where
        F: Fn() -> Fut,
        Fut: Future<Output = std::result::Result<T, E>>,
        E: Into<Failure>,
    {
        if let Some(told) = &self.ctx.run.engine.on_step {
            told(&self.ctx.run.id, &self.name);
        }
        let body = match std::panic::catch_unwind(AssertUnwindSafe(|| (self.body)())) {
            Ok(body) => body,
            Err(panic) => return Err(panicked(&*panic)),
        };
        let mut body = std::pin::pin!(body);
        let mut limit = self.timeout.map(|timeout| self.ctx.run.env().sleep(timeout));
        std::future::poll_fn(|context| {
            match std::panic::catch_unwind(AssertUnwindSafe(|| body.as_mut().poll(context))) {
                Ok(Poll::Ready(ended)) => return Poll::Ready(ended.map_err(Into::into)),
                Ok(Poll::Pending) => {}
                Err(panic) => return Poll::Ready(Err(panicked(&*panic))),
            }
            match limit.as_mut().map(|limit| limit.as_mut().poll(context)) {
                Some(Poll::Ready(())) => Poll::Ready(Err(Failure::new("the attempt took too long"))),
                _ => Poll::Pending,
            }
        })
        .await
    }
}

pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    Failure::new(format!("it panicked: {}", message_of(panic)))
}

fn read_failure(text: &str) -> Failure {
    serde_json::from_str(text).unwrap_or_else(|_| Failure::new(text))
}
