//! Steps: their bodies run outside of the journal, at least once, and their results are recorded exactly once.

use std::future::{Future, IntoFuture};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Poll;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing::Instrument;

use crate::panic::message_of;
use crate::store::{Timestamp, Uuid};
use crate::workflow::ctx::beats::{Beats, BeatsEnd};
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::run::{Doing, OpEffect, Run, Stop, WaitEnd};
use crate::workflow::stored::kept::MessageBody;
use crate::workflow::stored::record::{Entry, EntryState, Intent, Kind, WaitsFor, failure_text};
use crate::workflow::{Boxed, Failure, Retry};

/// A step that is about to be awaited.
#[must_use = "a step does nothing until it is awaited"]
pub struct Step<'a, B> {
    ctx: &'a Ctx,
    name: Arc<str>,
    body: B,
    retry: Retry,
    timeout: Option<Duration>,
    total_timeout: Option<Duration>,
    silence: Option<Duration>,
    argument: u64,
}

impl<'a, B> Step<'a, B> {
    pub(crate) fn new(ctx: &'a Ctx, name: &str, body: B) -> Step<'a, B> {
        let (name, retry) = (name.into(), Retry::default());
        Step { ctx, name, body, retry, timeout: None, total_timeout: None, silence: None, argument: 0 }
    }

    /// Sets when the body is tried again after a failure. By default, it is tried twice more.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Retry};
    /// # async fn order(ctx: Ctx) -> Result<u32, Failure> {
    /// ctx.run("charge", async || Ok(7)).retry(Retry::exponential().max_attempts(5)).await
    /// # }
    /// ```
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Sets how long one attempt may take. A body that takes longer is dropped, and the attempt has failed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn order(ctx: Ctx) -> Result<u32, Failure> {
    /// ctx.run("charge", async || Ok(7)).timeout(Duration::from_secs(10)).await
    /// # }
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how long all attempts and the pauses between them may take together, including restarts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure, Retry};
    /// # async fn order(ctx: Ctx) -> Result<u32, Failure> {
    /// let charge = ctx.run("charge", async || Ok(7)).retry(Retry::exponential());
    /// charge.timeout(Duration::from_secs(10)).total_timeout(Duration::from_secs(3600)).await
    /// # }
    /// ```
    pub fn total_timeout(mut self, timeout: Duration) -> Self {
        self.total_timeout = Some(timeout);
        self
    }

    /// Sets how long an attempt may take without a heartbeat: see [`Attempt::heartbeat`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Attempt, Ctx, Failure};
    /// # async fn copy(ctx: Ctx) -> Result<u32, Failure> {
    /// let copy = ctx.run_with("copy", async |attempt: Attempt| {
    ///     let from: u32 = attempt.progress().unwrap_or(0);
    ///     for page in from..100 {
    ///         attempt.heartbeat(&(page + 1)).await?;
    ///     }
    ///     Ok(100)
    /// });
    /// copy.heartbeat_timeout(Duration::from_secs(30)).await
    /// # }
    /// ```
    pub fn heartbeat_timeout(mut self, silence: Duration) -> Self {
        self.silence = Some(silence);
        self
    }

    /// Sets the input of the body. A hash of it is recorded. If a replay passes another input, the execution is parked.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn order(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    /// ctx.run("charge", async || Ok(price)).input(&price).await
    /// # }
    /// ```
    pub fn input(mut self, input: &(impl Serialize + ?Sized)) -> Self {
        self.argument = hash(input);
        self
    }
}

/// The body of a step.
pub trait Body {
    /// The type of its result.
    type Output;

    /// True if the body commits the record of its result itself.
    #[doc(hidden)]
    const RECORDS: bool = false;

    /// Runs it once. Bodies that do not need the attempt do not ask for it.
    fn run(&self, attempt: impl FnOnce() -> Attempt) -> impl Future<Output = Result<Self::Output, Failure>> + Send;
}

/// A body without parameters.
pub struct Plain<F>(pub(crate) F);

/// A body that gets its attempt.
pub struct WithAttempt<F>(pub(crate) F);

impl<F, Fut, T> Body for Plain<F>
where
    F: Fn() -> Fut,
    Fut: Future<Output = Result<T, Failure>> + Send,
{
    type Output = T;

    fn run(&self, _: impl FnOnce() -> Attempt) -> impl Future<Output = Result<T, Failure>> + Send {
        (self.0)()
    }
}

impl<F, Fut, T> Body for WithAttempt<F>
where
    F: Fn(Attempt) -> Fut,
    Fut: Future<Output = Result<T, Failure>> + Send,
{
    type Output = T;

    fn run(&self, attempt: impl FnOnce() -> Attempt) -> impl Future<Output = Result<T, Failure>> + Send {
        (self.0)(attempt())
    }
}

/// One run of a step's body.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// The number of the attempt, counted from 1.
    pub number: u32,
    /// The same for all attempts of this step of this execution, and different for every other step. A receiver can use
    /// it to handle repeated requests only once.
    pub idempotency_key: Uuid,
    /// The progress that earlier attempts reported; JSON text.
    progress: Option<String>,
    beats: Beats,
    /// For a body that commits the record of its result itself.
    pub(crate) recorder: Option<Recorder>,
}

/// What a body needs that commits the record of its result itself.
#[derive(Clone)]
pub(crate) struct Recorder {
    pub(crate) doing: Doing,
    pub(crate) place: Place,
    /// The entry of the step when the attempt began.
    pub(crate) entry: Entry,
    recording: Arc<AtomicU8>,
}

/// No commit with the record is on its way; one is; one has landed.
const OPEN: u8 = 0;
const COMMITTING: u8 = 1;
const RECORDED: u8 = 2;

impl Recorder {
    fn new(doing: &Doing, place: &Place, entry: &Entry) -> Recorder {
        let (doing, place, entry) = (doing.clone(), place.clone(), entry.clone());
        Recorder { doing, place, entry, recording: Arc::default() }
    }

    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.doing.run
    }

    fn is_at(&self, state: u8) -> bool {
        self.recording.load(Ordering::SeqCst) == state
    }

    /// The commit is on its way. Meanwhile the attempt cannot end otherwise.
    pub(crate) fn committing(&self) -> Committing<'_> {
        self.recording.store(COMMITTING, Ordering::SeqCst);
        Committing(self)
    }
}

shown!(Recorder, it => place: it.place);

/// The commit with the record of a step is on its way.
pub(crate) struct Committing<'a>(&'a Recorder);

impl Committing<'_> {
    pub(crate) fn recorded(self) {
        self.0.recording.store(RECORDED, Ordering::SeqCst);
    }
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        let _ = self.0.recording.compare_exchange(COMMITTING, OPEN, Ordering::SeqCst, Ordering::SeqCst);
    }
}

impl Attempt {
    /// Reports that the attempt is alive, and stores its progress. When this returns, the progress is durable, and the
    /// next attempt can continue from there. [`Step::heartbeat_timeout`] has an example.
    ///
    /// ```
    /// # use latchwork::workflow::{Attempt, Failure};
    /// # async fn example(attempt: Attempt) -> Result<(), Failure> {
    /// attempt.heartbeat(&40).await?;
    /// # Ok(()) }
    /// ```
    pub async fn heartbeat(&self, progress: &(impl Serialize + ?Sized)) -> Result<(), Failure> {
        self.beats.beat(progress).await
    }

    /// The progress from the last heartbeat of an earlier attempt, if there was one and it fits the type.
    ///
    /// ```
    /// # use latchwork::workflow::{Attempt, Failure};
    /// # async fn example(attempt: Attempt) -> Result<(), Failure> {
    /// let from: u32 = attempt.progress().unwrap_or(0);
    /// # Ok(()) }
    /// ```
    pub fn progress<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_str(self.progress.as_ref()?).ok()
    }
}

impl<'a, B> IntoFuture for Step<'a, B>
where
    B: Body + Send + Sync + 'a,
    B::Output: Serialize + DeserializeOwned + Send + 'a,
{
    type Output = Result<B::Output, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        // `execute` borrows the step. If it took the step by value, the future would hold the step twice.
        Box::pin(async move {
            let what = WaitsFor::Step(self.name.to_string());
            let call = OpCall { kind: Kind::Step, name: &self.name, argument: self.argument };
            self.ctx.replay(what, call, |operation| self.execute(operation)).await
        })
    }
}

impl<B: Body> Step<'_, B>
where
    B::Output: Serialize + DeserializeOwned,
{
    async fn execute(&self, mut operation: Journaled<'_>) -> Result<B::Output, Failure> {
        let run = &self.ctx.run;
        run.effect().await;
        let mut is_counted = operation.is_counted();
        loop {
            if operation.entry.attempts > 0 {
                Box::pin(self.wait_for_turn(&operation)).await;
            }
            operation.unless_cancelled()?;
            let is_late = self.ends(&operation.entry).is_some_and(|end| run.env().now() >= end);
            if operation.entry.attempts > 0 && is_late {
                let failure = Failure::new("all attempts together took too long").with_code("latchwork.deadline");
                return Err(operation.gave(failure));
            }
            operation.entry.attempts += 1;
            operation.put(EntryState::Begun);
            // The body may start only after the commit that counts this attempt.
            if !std::mem::take(&mut is_counted) {
                let _ = operation.doing.flush().await;
            }
            // If this future is dropped, the attempt is over.
            let place = operation.place.clone();
            let _beats = BeatsEnd { run, place: &place };
            let attempted = self.attempt(&operation).await;
            let heard = run.with(|state| state.attempts.end(&place));
            let attempted = match attempted {
                AttemptEnd::By(attempted) => attempted,
                AttemptEnd::Recorded(value) => {
                    run.engine.metrics.stepped();
                    return Ok(value);
                }
                AttemptEnd::Cancelled => return Err(operation.cancelled()),
            };
            operation.entry.progress = heard.or(operation.entry.progress);
            let failure = match attempted.and_then(|value| self.text(value)) {
                Ok((value, text)) => {
                    // Large results of branches that end together may not fit in one commit.
                    while run.is_full() {
                        let _ = operation.doing.flush().await;
                    }
                    run.engine.metrics.stepped();
                    operation.entry.progress = None;
                    operation.ends(EntryState::Done(text), None);
                    return Ok(value);
                }
                Err(failure) => failure,
            };
            let now = run.env().now();
            operation.entry.failed(&failure, now);
            let pause = self.retry.pause_after(operation.entry.attempts, &failure, run.env());
            let next = pause.map(|pause| now.plus(pause));
            let Some(next) = next.filter(|next| self.ends(&operation.entry).is_none_or(|end| *next < end)) else {
                run.engine.metrics.stepped();
                return Err(operation.gave(failure));
            };
            operation.put(EntryState::Failed { failure: failure_text(&failure), next_us: next.0 });
        }
    }

    /// The end of the time for all attempts.
    fn ends(&self, entry: &Entry) -> Option<Timestamp> {
        self.total_timeout.map(|timeout| Timestamp(entry.since_us).plus(timeout))
    }

    /// Waits until the next attempt is due. An attempt that did not end counts, because its effects are not known.
    async fn wait_for_turn(&self, Journaled { doing, place, entry, .. }: &Journaled<'_>) {
        let run = &self.ctx.run;
        if let EntryState::Failed { next_us, .. } = entry.state {
            let next = Timestamp(next_us);
            if next <= run.env().now() {
                return;
            }
            run.ensure_inbox().await;
            let since = run.env().now();
            let what = WaitsFor::Retry(self.name.to_string());
            let is_now = |body: &MessageBody| matches!(body, MessageBody::RetryNow);
            let waited = doing.wait(what, since, Some(next), |state| state.inbox.take(is_now));
            if let WaitEnd::Got(received) = waited.await {
                run.put_with(place, entry.clone(), Some(OpEffect::receipt(received.address)));
            }
            return doing.does(WaitsFor::Step(self.name.to_string()));
        }
        if entry.attempts >= self.retry.attempts().saturating_add(run.with(|state| state.known.stored().resumes)) {
            let reason = format!("step {:?} was begun {} times and did not end", self.name, entry.attempts);
            run.park(reason).await
        }
    }

    /// Returns the result with its JSON text.
    fn text(&self, value: B::Output) -> Result<(B::Output, String), Failure> {
        let text = self.ctx.run.text("the result", &value).map_err(Failure::not_retryable)?;
        Ok((value, text))
    }

    /// Runs the body once.
    async fn attempt(&self, Journaled { doing, place, entry, .. }: &Journaled<'_>) -> AttemptEnd<B::Output> {
        let run = &self.ctx.run;
        if let Some(told) = &run.engine.on_step {
            told(&run.id, &self.name);
        }
        run.engine.metrics.attempted();
        if let Some(given) = run.engine.rehearsal.mocked(&self.name, entry.attempts) {
            let wrong = |error| Failure::misfit("the mock's result", &error);
            return AttemptEnd::By(given.and_then(|value| serde_json::from_value(value).map_err(wrong)));
        }
        run.with(|state| state.attempts.begin(place, entry.attempts));
        let beats = self.silence.map(|_| Beats::new(run, place, entry));
        let recorder = B::RECORDS.then(|| Recorder::new(doing, place, entry));
        let is_at = |state: u8| recorder.as_ref().is_some_and(|recorder| recorder.is_at(state));
        let attempt = || Attempt {
            number: entry.attempts,
            idempotency_key: idempotency_key(run, place),
            progress: entry.progress.as_deref().map(str::to_string),
            beats: beats.clone().unwrap_or_else(|| Beats::new(run, place, entry)),
            recorder: recorder.clone(),
        };
        let error = tracing::field::Empty;
        let span = tracing::info_span!("step", name = &*self.name, attempt = entry.attempts, error);
        let mut body = std::pin::pin!(caught(|| self.body.run(attempt)));
        let left = self.ends(entry).map(|end| Duration::from_micros(end.0.saturating_sub(run.env().now().0)));
        let limit = [self.timeout, left].into_iter().flatten().min();
        let mut limit = limit.map(|limit| run.env().sleep(limit));
        let mut silence = self.silence.map(|silence| run.env().sleep(silence));
        let ended = std::future::poll_fn(|context| {
            if let Poll::Ready(ended) = body.as_mut().poll(context) {
                return Poll::Ready(match ended {
                    Ok(value) if is_at(RECORDED) => AttemptEnd::Recorded(value),
                    ended => AttemptEnd::By(ended),
                });
            }
            if is_at(COMMITTING) {
                return Poll::Pending;
            }
            if doing.poll_cancelled(context) {
                return Poll::Ready(AttemptEnd::Cancelled);
            }
            if let Some(Poll::Ready(())) = limit.as_mut().map(|limit| limit.as_mut().poll(context)) {
                return Poll::Ready(AttemptEnd::By(Err(
                    Failure::new("the attempt took too long").with_code("latchwork.attempt.timeout")
                )));
            }
            while let Some(Poll::Ready(())) = silence.as_mut().map(|silence| silence.as_mut().poll(context)) {
                let silence_so_far = beats.as_ref().map(Beats::silence).unwrap_or_default();
                let left = self.silence.unwrap_or_default().saturating_sub(silence_so_far);
                if left.is_zero() {
                    return Poll::Ready(AttemptEnd::By(Err(Failure::new(
                        "the attempt sent no heartbeat for too long",
                    )
                    .with_code("latchwork.attempt.silent"))));
                }
                silence = Some(run.env().sleep(left));
            }
            Poll::Pending
        });
        let ended = ended.instrument(span.clone()).await;
        if let AttemptEnd::By(Err(failure)) = &ended {
            span.record("error", failure.message());
        }
        ended
    }
}

impl Journaled<'_> {
    /// True if the commit that set the execution running has already counted the first attempt. If an earlier process
    /// made that commit, the attempt is over.
    fn is_counted(&mut self) -> bool {
        let is_first = self.is_new && self.place == BranchPath::default().at(0);
        let counted = self.ctx.run.with(|state| {
            let since = state.known.stored().intent.as_ref().filter(|_| is_first).and_then(Intent::since_of_first);
            since.map(|since| (since, state.residency.is_fresh()))
        });
        let Some((since_us, is_fresh)) = counted else { return false };
        (self.entry.since_us, self.entry.attempts) = (since_us, u32::from(!is_fresh));
        is_fresh
    }
}

impl Ctx {
    /// The idempotency key of the next step, which must have this name. Use it in a compensation that undoes what the
    /// step did under this key. If the next operation is not this step, the execution is parked. Call this between
    /// operations, not in the body of a step.
    ///
    /// ```
    /// # use latchwork::store::Uuid;
    /// # use latchwork::workflow::{Attempt, Ctx, Failure};
    /// # async fn charge(price: u64, key: Uuid) -> std::io::Result<()> { Ok(()) }
    /// # async fn refund(key: Uuid) -> Result<(), Failure> { Ok(()) }
    /// async fn order(ctx: Ctx, price: u64) -> Result<(), Failure> {
    ///     let code = ctx.saga(async |saga| {
    ///         let key = ctx.key("charge");
    ///         saga.compensate("refund", move || refund(key));
    ///         ctx.run_with("charge", async |attempt: Attempt| {
    ///             assert_eq!(attempt.idempotency_key, key);
    ///             Ok(charge(price, key).await?)
    ///         })
    ///         .await
    ///     });
    ///     code.await
    /// }
    /// ```
    pub fn key(&self, step: &str) -> Uuid {
        let Some(place) = self.here().announce(step) else {
            let reason = format!("the key of step {step:?} was requested while an operation was running");
            self.run.set_stop(Stop::Parked(reason));
            return Uuid::nil();
        };
        idempotency_key(&self.run, &place)
    }
}

/// How an attempt ended.
enum AttemptEnd<T> {
    By(Result<T, Failure>),
    /// The body has committed the record of its result.
    Recorded(T),
    Cancelled,
}

/// The same for all attempts of a step in a run of an execution.
fn idempotency_key(run: &Run, place: &Place) -> Uuid {
    let (started, number) = run.number();
    let text = format!("{}/{started}/{number}/{place}", run.id);
    let hash = xxhash_rust::xxh3::xxh3_128(text.as_bytes());
    // Version 8 of UUIDs: its content is defined by the application.
    let hash = hash & !(0xf << 76) | 8 << 76;
    Uuid::from_u128(hash & !(0b11 << 62) | 0b10 << 62)
}

/// Runs a body. A panic becomes a failure.
pub(crate) async fn caught<T, F>(body: impl FnOnce() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Failure>>,
{
    let body = std::panic::catch_unwind(AssertUnwindSafe(body)).map_err(|panic| panicked(&*panic))?;
    let mut body = std::pin::pin!(body);
    std::future::poll_fn(|context| match std::panic::catch_unwind(AssertUnwindSafe(|| body.as_mut().poll(context))) {
        Ok(polled) => polled,
        Err(panic) => Poll::Ready(Err(panicked(&*panic))),
    })
    .await
}

pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> Failure {
    Failure::new(format!("it panicked: {}", message_of(panic))).with_code("latchwork.panicked")
}

pub(crate) fn read_failure(text: &str) -> Failure {
    serde_json::from_str(text).unwrap_or_else(|_| Failure::new(text))
}
