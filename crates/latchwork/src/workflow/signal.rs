//! Signals: messages to an execution, durable before the sender goes on, buffered until they are received.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::lane::Part;
use crate::record::Record;
use crate::store::{Check, Timestamp, Write};
use crate::workflow::ctx::{Call, Ctx, hash};
use crate::workflow::engine::{Engine, Inner, check_name};
use crate::workflow::handle::Handle;
use crate::workflow::kept::{Delivered, Letter, Message};
use crate::workflow::place::Place;
use crate::workflow::post::Target;
use crate::workflow::record::{Entry, EntryState, Kind, WaitsFor, failure_text};
use crate::workflow::run::{Effect, Received, Waited, largest};
use crate::workflow::step::read_failure;
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// A signal that is about to be sent.
#[must_use = "nothing is sent until this is awaited"]
pub struct Signal {
    pub(crate) engine: Arc<Inner>,
    pub(crate) id: ExecutionId,
    pub(crate) name: String,
    pub(crate) payload: Result<String>,
    pub(crate) signal_id: Option<String>,
}

impl Engine {
    /// A signal to an execution. Await it: when that returns, the signal is stored, and is received once.
    pub fn signal(&self, id: impl Into<ExecutionId>, name: &str, payload: &impl Serialize) -> Signal {
        Signal::new(self.inner.clone(), id.into(), name, payload)
    }
}

impl<O> Handle<O> {
    /// A signal to the execution. Await it: when that returns, the signal is stored, and is received once.
    pub fn signal(&self, name: &str, payload: &impl Serialize) -> Signal {
        Signal::new(self.engine.clone(), self.id().clone(), name, payload)
    }
}

/// A payload as JSON text.
pub(crate) fn written(engine: &Inner, what: &'static str, payload: &impl Serialize) -> Result<String> {
    let json = json::to_value(payload).map_err(|cause| WorkflowError::Payload { what, cause })?;
    let (text, limit) = (json.to_string(), largest(engine));
    match text.len() {
        length if length > limit => Err(WorkflowError::PayloadTooLong { what, length, limit }),
        _ => Ok(text),
    }
}

impl Signal {
    fn new(engine: Arc<Inner>, id: ExecutionId, name: &str, payload: &impl Serialize) -> Signal {
        let payload = written(&engine, "the payload of a signal", payload);
        Signal { engine, id, name: name.into(), payload, signal_id: None }
    }

    /// Under this id: however often it is sent, it counts once.
    pub fn id(mut self, id: impl Into<String>) -> Signal {
        self.signal_id = Some(id.into());
        self
    }

    pub(crate) async fn send(self) -> Result<()> {
        check_name("the name of a signal", &self.name)?;
        let payload = self.payload?;
        let delivered = Delivered::signal(&self.name, &payload);
        let letter = Letter::Signal { name: self.name, payload };
        let Some(signal_id) = self.signal_id else {
            return self.engine.deliver(&self.id, letter, None).await.map(drop);
        };
        check_name("the id of a signal", &signal_id)?;
        let key = self.engine.kept(&self.id).signal(&signal_id);
        let write = Write::Put(key.clone(), delivered.encode());
        let mut item = self.engine.store.view().await?.get(&key).await?;
        if item.is_none() {
            let sent = self.engine.deliver(&self.id, letter, Some((vec![Check::Absent(key.clone())], write))).await;
            if let Ok(true) = sent {
                return Ok(());
            }
            item = self.engine.store.view().await?.get(&key).await?;
            // Somebody else may have sent it before the execution has ended.
            if let (Err(error), None) = (sent, &item) {
                return Err(error);
            }
        }
        // It was sent before, if it is the same.
        match item.map(|item| Delivered::decode(&item.value)) {
            Some(Ok(sent)) if sent == delivered => Ok(()),
            Some(Err(why)) if why.is_version() => Err(why.at(format!("signal {signal_id:?}")).into()),
            _ => Err(WorkflowError::MessageReused { id: self.id, message: signal_id }),
        }
    }
}

impl IntoFuture for Signal {
    type Output = Result<()>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

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

/// The same, for so long at the most.
#[must_use = "nothing is received until this is awaited"]
pub struct ReceiveFor<'a, T> {
    receive: Receive<'a, T>,
    timeout: Duration,
}

impl Ctx {
    /// The next signal of this name. Signals of a name are received in the order in which they were stored, each once.
    /// One whose payload does not fit the type is received, too, and is an error.
    pub fn receive<T: DeserializeOwned>(&self, name: &str) -> Receive<'_, T> {
        Receive { ctx: self, name: name.into(), payload: PhantomData }
    }

    /// Sends a signal to an execution: it is stored in the same commit as the record that it was sent. To one that has
    /// ended, or is not there, is a failure.
    pub async fn signal(
        &self,
        id: impl Into<ExecutionId>,
        name: &str,
        payload: &impl Serialize,
    ) -> std::result::Result<(), Failure> {
        let id = id.into();
        let payload = written(&self.run.engine, "the payload of a signal", payload)?;
        let letter = Letter::Signal { name: name.into(), payload };
        // A fork has another id.
        let what =
            if id == self.run.id { format!("signal {name} to itself") } else { format!("signal {name} to {id}") };
        let (id, argument) = (&id, hash(&letter));
        self.send(&what, argument, |engine| {
            let letter = letter.clone();
            async move {
                // Of itself it knows more than the store; its record is written with its own commits only.
                let own = self.run.with(|state| state.rev).filter(|_| *id == self.run.id);
                let target = match own {
                    Some(rev) => Target::Running(rev),
                    None => engine.target(id, true).await?,
                };
                Ok(Some(engine.delivery(id, target, letter)))
            }
        })
        .await
    }
}

impl Ctx {
    /// Does something to another execution in the commit that records it.
    pub(crate) async fn send<F>(
        &self,
        name: &str,
        argument: u64,
        mut part: impl FnMut(Arc<Inner>) -> F,
    ) -> std::result::Result<(), Failure>
    where
        F: Future<Output = Result<Option<Part>>>,
    {
        self.operation(WaitsFor::Store, |doing| async move {
            let run = &self.run;
            let call = Call { kind: Kind::Send, name, argument };
            let (place, found) = self.take(&call).await;
            match found.map(|found| found.state) {
                Some(EntryState::Done(_)) => return Ok(()),
                Some(EntryState::Gave(text)) => return Err(read_failure(&text)),
                _ => {}
            }
            let entry = call.entry(run.env().now(), EntryState::Done("null".into()));
            if doing.is_cancelled() {
                return Err(self.cancelled(&place, entry));
            }
            // It may be meant itself, and has to be there.
            if run.with(|state| state.rev.is_none()) {
                let _ = doing.flush().await;
            }
            loop {
                let part = match part(run.engine.clone()).await {
                    Ok(part) => part,
                    Err(WorkflowError::Store(error)) => return run.stop_for(run.failed(error)).await,
                    Err(error) => {
                        let failure = Failure::from(error);
                        run.put(&place, Entry { state: EntryState::Gave(failure_text(&failure)), ..entry });
                        return Err(failure);
                    }
                };
                let effect = part.map(|part| Effect { op: doing.op, ..part.into() });
                run.put_with(&place, entry.clone(), effect);
                if doing.flush().await.is_ok() {
                    return Ok(());
                }
            }
        })
        .await
    }

    /// Waits for a message and records its receipt. `read` makes of it what is recorded; nothing if time is up.
    pub(crate) async fn await_message(
        &self,
        call: Call<'_>,
        what: WaitsFor,
        until: impl FnOnce(Timestamp) -> Option<Timestamp>,
        is_it: impl Fn(&Message) -> bool,
        read: impl Fn(&Letter) -> std::result::Result<String, String>,
    ) -> (Place, Timestamp, std::result::Result<Option<String>, Failure>) {
        let found = self.operation(what.clone(), |doing| async move {
            let run = &self.run;
            let (place, found) = self.take(&call).await;
            let now = run.env().now();
            let since = Timestamp(found.as_ref().map_or(now.0, |found| found.since_us));
            let mut entry = match found {
                Some(Entry { state: EntryState::Done(text), .. }) => return (place, since, Ok(Some(text))),
                Some(Entry { state: EntryState::Gave(text), .. }) => {
                    let failure = read_failure(&text);
                    return (place, since, if failure.is_time() { Ok(None) } else { Err(failure) });
                }
                Some(entry) => entry,
                None => {
                    let until = until(now).map(|until| EntryState::Until(until.0));
                    call.entry(now, until.unwrap_or(EntryState::Begun))
                }
            };
            if doing.is_cancelled() {
                let failure = self.cancelled(&place, entry);
                return (place, since, Err(failure));
            }
            run.effect().await;
            run.ensure_inbox().await;
            let until = match entry.state {
                EntryState::Until(until) => {
                    run.put(&place, entry.clone());
                    Some(Timestamp(until))
                }
                _ => None,
            };
            // Large messages to branches that wait side by side are more than a commit can hold.
            let look = |state: &mut crate::workflow::run::State| match state.is_full() && state.inbox().holds(&is_it) {
                true => Some(None),
                false => state.inbox().take(&is_it).map(Some),
            };
            let waited = loop {
                match doing.wait(what.clone(), Timestamp(entry.since_us), until, look).await {
                    Waited::Got(None) => drop(doing.flush().await),
                    Waited::Got(Some(received)) => break Waited::Got(received),
                    Waited::TimedOut => break Waited::TimedOut,
                    Waited::Cancelled => break Waited::Cancelled,
                }
            };
            let result = match waited {
                Waited::Got(Received { address, message }) => {
                    let read = read(&message.body);
                    entry.state = match &read {
                        Ok(text) => EntryState::Done(text.clone()),
                        Err(text) => EntryState::Gave(text.clone()),
                    };
                    run.put_with(&place, entry, Some(Effect::receipt(address)));
                    read.map(Some).map_err(|text| read_failure(&text))
                }
                Waited::TimedOut => {
                    run.put(&place, Entry { state: EntryState::Gave(failure_text(&Failure::time())), ..entry });
                    Ok(None)
                }
                Waited::Cancelled => Err(self.cancelled(&place, entry)),
            };
            (place, since, result)
        });
        found.await
    }
}

impl<'a, T: DeserializeOwned> Receive<'a, T> {
    /// For so long at the most: then there is none.
    pub fn timeout(self, timeout: Duration) -> ReceiveFor<'a, T> {
        ReceiveFor { receive: self, timeout }
    }

    async fn receive(&self, timeout: Option<Duration>) -> std::result::Result<Option<T>, Failure> {
        let argument = timeout.map_or(0, |timeout| hash(&(timeout.as_micros() as u64)));
        let call = Call { kind: Kind::Signal, name: &self.name, argument };
        let is_it = |message: &Message| matches!(&message.body, Letter::Signal { name, .. } if *name == self.name);
        let read = |letter: &Letter| match letter {
            Letter::Signal { payload, .. } => Ok(payload.clone()),
            _ => Ok("null".into()),
        };
        let what = WaitsFor::Signal(self.name.clone());
        let until = |now: Timestamp| timeout.map(|timeout| now.plus(timeout));
        let (.., received) = self.ctx.await_message(call, what, until, is_it, read).await;
        let Some(text) = received? else { return Ok(None) };
        let wrong = |error| Failure::misfit(format!("the payload of signal {:?}", self.name), &error);
        serde_json::from_str(&text).map(Some).map_err(wrong)
    }
}

impl<'a, T: DeserializeOwned + Send + 'a> IntoFuture for Receive<'a, T> {
    type Output = std::result::Result<T, Failure>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.receive(None).await?.ok_or_else(Failure::time) })
    }
}

impl<'a, T: DeserializeOwned + Send + 'a> IntoFuture for ReceiveFor<'a, T> {
    type Output = std::result::Result<Option<T>, Failure>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.receive.receive(Some(self.timeout)).await })
    }
}
