//! Steps: bodies that run outside, at least once, and whose results are recorded exactly once.

use std::future::{Future, IntoFuture};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::Instrument;

use crate::json;
use crate::panic::message_of;
use crate::store::{Timestamp, Uuid};
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::record::{Entry, EntryState, Kind, failure_text};
use crate::workflow::run::{IDLE, Run, Stop};
use crate::workflow::{Failure, Retry};

/// A step that is about to be awaited.
#[must_use = "a step does nothing until it is awaited"]
pub struct Step<'a, B> {
    ctx: &'a Ctx,
    name: Arc<str>,
    body: B,
    retry: Retry,
    timeout: Option<Duration>,
    deadline: Option<Duration>,
    argument: u64,
}

impl<'a, B> Step<'a, B> {
    pub(crate) fn new(ctx: &'a Ctx, name: &str, body: B) -> Step<'a, B> {
        Step { ctx, name: name.into(), body, retry: Retry::default(), timeout: None, deadline: None, argument: 0 }
    }

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

    /// How long all attempts and the pauses between them may take together, restarts included.
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

/// The body of a step.
pub trait Body {
    /// What it gives in the end.
    type Output;
    /// What it fails with.
    type Error;

    /// Runs it once.
    fn run(&self, attempt: Attempt) -> impl Future<Output = std::result::Result<Self::Output, Self::Error>> + Send;
}

/// A body that is given nothing.
pub struct Plain<F>(pub(crate) F);

/// A body that is given its attempt.
pub struct WithAttempt<F>(pub(crate) F);

impl<F, Fut, T, E> Body for Plain<F>
where
    F: Fn() -> Fut,
    Fut: Future<Output = std::result::Result<T, E>> + Send,
{
    type Output = T;
    type Error = E;

    fn run(&self, _: Attempt) -> impl Future<Output = std::result::Result<T, E>> + Send {
        (self.0)()
    }
}

impl<F, Fut, T, E> Body for WithAttempt<F>
where
    F: Fn(Attempt) -> Fut,
    Fut: Future<Output = std::result::Result<T, E>> + Send,
{
    type Output = T;
    type Error = E;

    fn run(&self, attempt: Attempt) -> impl Future<Output = std::result::Result<T, E>> + Send {
        (self.0)(attempt)
    }
}

/// One of the times that a step's body runs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Attempt {
    /// Counted from 1.
    pub number: u32,
    /// The same for every attempt at this step of this execution and for no other step ever: for receivers that do
    /// once what is sent under one key.
    pub idempotency_key: Uuid,
}

impl<'a, B> IntoFuture for Step<'a, B>
where
    B: Body + Send + Sync + 'a,
    B::Output: Serialize + DeserializeOwned + Send + 'a,
    B::Error: Into<Failure> + Send + 'a,
{
    type Output = std::result::Result<B::Output, Failure>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        // `execute` borrows: by value, the future would have room for the step twice.
        Box::pin(async move { self.ctx.run.operation(self.execute()).await })
    }
}

impl<B: Body> Step<'_, B>
where
    B::Output: Serialize + DeserializeOwned,
    B::Error: Into<Failure>,
{
    async fn execute(&self) -> std::result::Result<B::Output, Failure> {
        let run = &self.ctx.run;
        let (place, found) = run.take(Kind::Step, &self.name, self.argument).await;
        let mut entry = match found {
            Some(Entry { state: EntryState::Done(text), .. }) => return self.recorded(place, &text).await,
            Some(Entry { state: EntryState::Gave(text), .. }) => return Err(read_failure(&text)),
            Some(entry) => {
                run.effect().await;
                entry
            }
            None => Entry::new(Kind::Step, self.name.clone(), self.argument, run.env().now(), EntryState::Begun),
        };
        loop {
            if entry.attempts > 0 {
                Box::pin(self.wait_for_turn(&entry)).await;
            }
            if entry.attempts > 0 && self.ends(&entry).is_some_and(|end| run.env().now() >= end) {
                let failure = Failure::new("the deadline of all attempts has passed");
                entry.state = EntryState::Gave(failure_text(&failure));
                run.put(place, entry);
                return Err(failure);
            }
            entry.attempts += 1;
            entry.state = EntryState::Begun;
            run.put(place, entry.clone());
            run.flush().await;
            let failure = match self.attempt(place, &entry).await.and_then(|value| self.text(value)) {
                Ok((value, text)) => {
                    entry.state = EntryState::Done(text);
                    run.put(place, entry);
                    return Ok(value);
                }
                Err(failure) => failure,
            };
            let now = run.env().now();
            entry.failed(&failure, now);
            let pause = self.retry.pause_after(entry.attempts, &failure, run.env());
            let next = pause.map(|pause| now.plus(pause));
            let Some(next) = next.filter(|next| self.ends(&entry).is_none_or(|end| *next < end)) else {
                entry.state = EntryState::Gave(failure_text(&failure));
                run.put(place, entry);
                return Err(failure);
            };
            entry.state = EntryState::Failed { failure: failure_text(&failure), next_us: next.0 };
            run.put(place, entry.clone());
            if Duration::from_micros(next.0.saturating_sub(now.0)) <= IDLE {
                // In a box: everything that is kept over it would make the future of every step larger.
                Box::pin(run.flush()).await;
            }
        }
    }

    /// When all attempts are to be over.
    fn ends(&self, entry: &Entry) -> Option<Timestamp> {
        self.deadline.map(|deadline| Timestamp(entry.since_us).plus(deadline))
    }

    /// Waits until the next attempt is due. If the last one did not end, nobody knows what it did, and it counts.
    async fn wait_for_turn(&self, entry: &Entry) {
        let run = &self.ctx.run;
        if let EntryState::Failed { next_us, .. } = entry.state {
            let left = Duration::from_micros(next_us.saturating_sub(run.env().now().0));
            if left > IDLE {
                return run.suspend(Timestamp(next_us)).await;
            }
            return run.env().sleep(left).await;
        }
        if entry.attempts >= self.retry.attempts().saturating_add(run.resumes()) {
            let reason = format!("step {:?} was begun {} times and did not end", self.name, entry.attempts);
            run.stop_for(Stop::Parked(reason)).await
        }
    }

    /// The result with its JSON text.
    fn text(&self, value: B::Output) -> std::result::Result<(B::Output, String), Failure> {
        let json = json::to_value(&value);
        let json = json.map_err(|error| Failure::new(format!("the result: {error}")).not_retryable())?;
        let text = json.to_string();
        self.ctx.run.fits("the result", text.len())?;
        Ok((value, text))
    }

    async fn recorded(&self, place: u32, text: &str) -> std::result::Result<B::Output, Failure> {
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
    async fn attempt(&self, place: u32, entry: &Entry) -> std::result::Result<B::Output, Failure> {
        let run = &self.ctx.run;
        if let Some(told) = &run.engine.on_step {
            told(&run.id, &self.name);
        }
        if let Some(mock) = run.engine.mocks.get(&*self.name) {
            let value = mock(entry.attempts)?;
            return serde_json::from_value(value).map_err(|error| Failure::new(format!("the mock's result: {error}")));
        }
        let attempt = Attempt { number: entry.attempts, idempotency_key: idempotency_key(run, place) };
        let span = tracing::info_span!("step", name = &*self.name, attempt = entry.attempts);
        let body = match std::panic::catch_unwind(AssertUnwindSafe(|| self.body.run(attempt))) {
            Ok(body) => body,
            Err(panic) => return Err(panicked(&*panic)),
        };
        let mut body = std::pin::pin!(body);
        let left = self.ends(entry).map(|end| Duration::from_micros(end.0.saturating_sub(run.env().now().0)));
        let limit = [self.timeout, left].into_iter().flatten().min();
        let mut limit = limit.map(|limit| run.env().sleep(limit));
        let ended = std::future::poll_fn(|context| {
            match std::panic::catch_unwind(AssertUnwindSafe(|| body.as_mut().poll(context))) {
                Ok(Poll::Ready(ended)) => return Poll::Ready(ended.map_err(Into::into)),
                Ok(Poll::Pending) => {}
                Err(panic) => return Poll::Ready(Err(panicked(&*panic))),
            }
            match limit.as_mut().map(|limit| limit.as_mut().poll(context)) {
                Some(Poll::Ready(())) => Poll::Ready(Err(Failure::new("the attempt took too long"))),
                _ => Poll::Pending,
            }
        });
        ended.instrument(span).await
    }
}

/// The same for every attempt at a step of a run of an execution.
fn idempotency_key(run: &Run, place: u32) -> Uuid {
    let (started, number) = run.number();
    let text = format!("{}/{started}/{number}/{place}", run.id);
    let hash = xxhash_rust::xxh3::xxh3_128(text.as_bytes());
    // Version 8, which is for makers of their own.
    let hash = hash & !(0xf << 76) | 8 << 76;
    Uuid::from_u128(hash & !(0b11 << 62) | 0b10 << 62)
}

pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    Failure::new(format!("it panicked: {}", message_of(panic)))
}

pub(crate) fn read_failure(text: &str) -> Failure {
    serde_json::from_str(text).unwrap_or_else(|_| Failure::new(text))
}
