//! Signals: messages to an execution. They are durable before the sender continues, and stored until they are received.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::lane::Part;
use crate::store::Timestamp;
use crate::workflow::ctx::child::outcome;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::ctx::update::UpdateReceipt;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::engine::handle::Handle;
use crate::workflow::engine::post::{Along, BeforeTry, SendOnce, Target};
use crate::workflow::engine::{Engine, EngineInner, check_name};
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::run::{OpEffect, Received, RunState, WaitEnd, largest};
use crate::workflow::stored::kept::{Delivered, MessageBody};
use crate::workflow::stored::record::{EntryState, Kind, WaitsFor};
use crate::workflow::{Boxed, ExecutionId, Failure, Result, WorkflowError};

/// A signal that is about to be sent.
#[must_use = "nothing is sent until this is awaited"]
pub struct SendSignal {
    pub(crate) engine: Arc<EngineInner>,
    pub(crate) id: ExecutionId,
    pub(crate) name: String,
    pub(crate) payload: Result<String>,
    pub(crate) signal_id: Option<String>,
}

impl Engine {
    /// A signal to an execution. Await it: when it returns, the signal is stored, and will be received once.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.signal("order-7", "paid", &42).await?;
    /// # Ok(()) }
    /// ```
    pub fn signal(&self, id: impl Into<ExecutionId>, name: &str, payload: &(impl Serialize + ?Sized)) -> SendSignal {
        SendSignal::new(self.inner.clone(), id.into(), name, payload)
    }
}

impl<O> Handle<O> {
    /// A signal to the execution. Await it: when it returns, the signal is stored, and will be received once.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// handle.signal("paid", &42).await?;
    /// # Ok(()) }
    /// ```
    pub fn signal(&self, name: &str, payload: &(impl Serialize + ?Sized)) -> SendSignal {
        SendSignal::new(self.engine.clone(), self.id().clone(), name, payload)
    }
}

/// Encodes a payload as JSON text.
pub(crate) fn written(engine: &EngineInner, what: &'static str, payload: &(impl Serialize + ?Sized)) -> Result<String> {
    let json = json::to_value(payload).map_err(|cause| WorkflowError::Payload { what, cause })?;
    let (text, limit) = (json.to_string(), largest(engine));
    match text.len() {
        length if length > limit => Err(WorkflowError::PayloadTooLong { what, length, limit }),
        _ => Ok(text),
    }
}

impl SendSignal {
    fn new(engine: Arc<EngineInner>, id: ExecutionId, name: &str, payload: &(impl Serialize + ?Sized)) -> SendSignal {
        let payload = written(&engine, "the payload of a signal", payload);
        SendSignal { engine, id, name: name.into(), payload, signal_id: None }
    }

    /// Sets an id: however often the signal is sent under it, it counts once.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// handle.signal("paid", &42).id("payment-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: impl Into<String>) -> SendSignal {
        self.signal_id = Some(id.into());
        self
    }

    pub(crate) async fn send(self) -> Result<()> {
        check_name("the name of a signal", &self.name)?;
        let payload = self.payload?;
        let delivered = Delivered::signal(&self.name, &payload);
        let body = MessageBody::Signal { name: self.name, payload };
        let Some(signal_id) = self.signal_id else {
            return self.engine.deliver(&self.id, body, Along::default()).await.map(drop);
        };
        check_name("the id of a signal", &signal_id)?;
        let once = SendOnce { message: &signal_id, delivered, body, is_new: false, listens: false };
        self.engine.deliver_once(&self.id, once, || async { Ok(BeforeTry::default()) }).await.map(drop)
    }
}

impl IntoFuture for SendSignal {
    type Output = Result<()>;
    type IntoFuture = Boxed<'static, Result<()>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.send())
    }
}

/// A signal that is about to be waited for.
#[must_use = "nothing is received until this is awaited"]
pub struct Receive<'a, T> {
    ctx: &'a Ctx,
    name: String,
    payload: PhantomData<fn() -> T>,
}

/// Like [`Receive`], with a time limit.
#[must_use = "nothing is received until this is awaited"]
pub struct ReceiveFor<'a, T> {
    receive: Receive<'a, T>,
    timeout: Duration,
}

impl Ctx {
    /// The next signal of this name. Signals of a name are received in the order in which they were stored, each once.
    /// A signal whose payload does not fit the type is received too, and is an error.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let cents = ctx.receive::<u64>("paid").await?;
    /// # Ok(()) }
    /// ```
    pub fn receive<T: DeserializeOwned>(&self, name: &str) -> Receive<'_, T> {
        Receive { ctx: self, name: name.into(), payload: PhantomData }
    }

    /// Sends a signal to an execution. The signal and the record that it was sent are one commit. If that execution has
    /// ended or does not exist, this is a failure.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.signal("order-7", "paid", &42).await?;
    /// # Ok(()) }
    /// ```
    pub async fn signal(
        &self,
        id: impl Into<ExecutionId>,
        name: &str,
        payload: &(impl Serialize + ?Sized),
    ) -> Result<(), Failure> {
        let id = id.into();
        let payload = written(&self.run.engine, "the payload of a signal", payload)?;
        let body = MessageBody::Signal { name: name.into(), payload };
        // A fork has another id, and has to find the same name in the journal.
        let what =
            if id == self.run.id { format!("signal {name} to itself") } else { format!("signal {name} to {id}") };
        let (id, argument) = (&id, hash(&body));
        self.send(&what, argument, |engine| {
            let body = body.clone();
            async move {
                // The execution knows its own state better than the store. Only its own part of the commit may write
                // its record, so the target is `Running`.
                let own = self.run.with(|state| state.known.rev()).filter(|_| *id == self.run.id);
                let target = match own {
                    Some(rev) => Target::Running(rev),
                    None => engine.target(id, true).await?,
                };
                Ok(Some(engine.deliveries(id, target, vec![body])))
            }
        })
        .await
    }
}

impl Ctx {
    /// Changes another execution in the commit that records this operation.
    pub(crate) async fn send<F>(
        &self,
        name: &str,
        argument: u64,
        mut part: impl FnMut(Arc<EngineInner>) -> F,
    ) -> Result<(), Failure>
    where
        F: Future<Output = Result<Option<Part>>>,
    {
        let call = OpCall { kind: Kind::Send, name, argument };
        self.replay(WaitsFor::Store, call, |operation| async move {
            let (run, doing) = (&self.run, &operation.doing);
            operation.unless_cancelled()?;
            // The target may be this execution, which then has to be stored.
            if run.with(|state| !state.known.is_stored()) {
                let _ = doing.flush().await;
            }
            loop {
                let part = match part(run.engine.clone()).await {
                    Ok(part) => part,
                    Err(WorkflowError::Store(error)) => return run.stop_for(run.failed(error)).await,
                    Err(error) => return Err(operation.gave(error.into())),
                };
                operation.done_with(&(), part.map(|part| OpEffect { op: doing.op, ..part.into() }));
                if doing.flush().await.is_ok() {
                    return Ok(());
                }
            }
        })
        .await
    }

    /// Waits for a message, with a time limit, and records its receipt. Returns its text; none when the time is up.
    pub(crate) async fn await_text(
        &self,
        call: OpCall<'_>,
        what: WaitsFor,
        timeout: Option<Duration>,
        is_it: impl Fn(&MessageBody) -> bool,
    ) -> Result<Option<String>, Failure> {
        let until = |now: Timestamp| timeout.map(|timeout| now.plus(timeout));
        let received = self.await_message(call, what, until, is_it, |text| Ok(text.into())).await?;
        Ok(received.map(|(_, text)| text))
    }

    /// Waits for a message and records its receipt. Returns since when the operation waits, and the text decoded by
    /// `read`; none when the time is up.
    pub(crate) async fn await_message<T>(
        &self,
        call: OpCall<'_>,
        what: WaitsFor,
        until: impl FnOnce(Timestamp) -> Option<Timestamp>,
        is_it: impl Fn(&MessageBody) -> bool,
        read: impl Fn(&str) -> serde_json::Result<T>,
    ) -> Result<Option<(Timestamp, T)>, Failure> {
        let (run, read) = (&self.run, &read);
        let again = |operation: &Journaled<'_>, text: &str| Ok((operation.since(), read(text)?));
        let received = self.replay_as(what.clone(), call, again, |mut operation| async move {
            let (doing, since) = (operation.doing.clone(), operation.since());
            operation.unless_cancelled()?;
            run.effect().await;
            run.ensure_inbox().await;
            let until = match operation.entry.state {
                EntryState::Until(until) => Some(Timestamp(until)),
                _ => until(since).filter(|_| operation.is_new),
            };
            if let Some(until) = until {
                operation.put(EntryState::Until(until.0));
            }
            // Large messages to several waiting branches can exceed the size of one commit.
            let look = |state: &mut RunState| match state.is_full() && state.inbox.holds(&is_it) {
                true => Some(None),
                false => state.inbox.take(&is_it).map(Some),
            };
            let Received { address, message } = loop {
                match doing.wait(what.clone(), since, until, look).await {
                    WaitEnd::Got(None) => drop(doing.flush().await),
                    WaitEnd::Got(Some(received)) => break received,
                    WaitEnd::TimedOut => return Err(operation.gave(Failure::time())),
                    WaitEnd::Cancelled => return Err(operation.cancelled()),
                }
            };
            let received = message.body.text();
            let state = received.clone().map_or_else(EntryState::Gave, EntryState::Done);
            operation.ends(state, Some(OpEffect::receipt(address)));
            match received {
                Ok(text) => Ok((since, operation.fits(read(&text)).await)),
                Err(text) => Err(read_failure(&text)),
            }
        });
        match received.await {
            Err(failure) if failure.is_time() => Ok(None),
            received => received.map(Some),
        }
    }
}

impl MessageBody {
    /// What the receiver records of the message: JSON text, or a failure as JSON text.
    pub(crate) fn text(&self) -> Result<String, String> {
        match self {
            MessageBody::Signal { payload, .. } => Ok(payload.clone()),
            MessageBody::Update { id, payload, .. } => Ok(UpdateReceipt::text(id, payload)),
            MessageBody::Completed { result, .. } => result.clone(),
            MessageBody::Ended { child, status, .. } => outcome(child, status),
            MessageBody::RetryNow | MessageBody::Lock { .. } => Ok("null".into()),
        }
    }
}

impl<'a, T: DeserializeOwned> Receive<'a, T> {
    /// Sets a time limit. Without a signal until then, the result is `None`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// match ctx.receive::<u64>("paid").timeout(Duration::from_secs(3600)).await? {
    ///     Some(cents) => println!("{cents} were paid"),
    ///     None => println!("nothing was paid"),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn timeout(self, timeout: Duration) -> ReceiveFor<'a, T> {
        ReceiveFor { receive: self, timeout }
    }

    async fn receive(&self, timeout: Option<Duration>) -> Result<Option<T>, Failure> {
        let call = OpCall::timed(Kind::Signal, &self.name, timeout);
        let is_it = |body: &MessageBody| matches!(body, MessageBody::Signal { name, .. } if *name == self.name);
        let what = WaitsFor::Signal(self.name.clone());
        let received = self.ctx.await_text(call, what, timeout, is_it).await?;
        let read = |text: String| Failure::read(format!("the payload of signal {:?}", self.name), &text);
        received.map(read).transpose()
    }
}

impl<'a, T: DeserializeOwned + Send + 'a> IntoFuture for Receive<'a, T> {
    type Output = Result<T, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.receive(None).await?.ok_or_else(Failure::time) })
    }
}

impl<'a, T: DeserializeOwned + Send + 'a> IntoFuture for ReceiveFor<'a, T> {
    type Output = Result<Option<T>, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.receive.receive(Some(self.timeout)).await })
    }
}
