//! Updates: requests to an execution that are answered. A validator may refuse an update before anything is recorded.
//! After that the update is durable and counts once, and so does its answer.

use std::future::IntoFuture;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lane::Part;
use crate::record::Record;
use crate::store::{Check, Key, Timestamp};
use crate::workflow::ctx::signal::written;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::engine::handle::{Handle, read_as};
use crate::workflow::engine::{Engine, EngineInner, News, check_name};
use crate::workflow::journal::replay::OpCall;
use crate::workflow::run::Stop;
use crate::workflow::stored::kept::{Delivered, MessageBody, Published};
use crate::workflow::stored::record::{Execution, Kind, WaitsFor, failure_text, fetch_execution};
use crate::workflow::{Boxed, ExecutionId, Failure, Result, WorkflowError};

/// What a validator sees of the execution: its published values.
#[derive(Debug)]
pub struct PublishedValues<'a>(pub(crate) &'a Published);

impl PublishedValues<'_> {
    /// The value under this name, if it exists and fits the type.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, workflow};
    /// let account = workflow("account").validate("take", |published, amount: &u64| {
    ///     let sum: u64 = published.get("sum").unwrap_or(0);
    ///     if *amount <= sum { Ok(()) } else { Err(Failure::new(format!("the sum is only {sum}"))) }
    /// });
    /// ```
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_str(self.0.0.get(name)?).ok()
    }
}

/// Decides whether an update may be sent.
pub(crate) type UpdateValidator = Arc<dyn Fn(&PublishedValues<'_>, &str) -> Result<(), Failure> + Send + Sync>;

/// An update that is about to be sent.
#[must_use = "nothing is sent until this is awaited"]
pub struct SendUpdate<A> {
    engine: Arc<EngineInner>,
    id: ExecutionId,
    name: String,
    request: Result<String>,
    update_id: Option<String>,
    answer: PhantomData<fn() -> A>,
}

/// An update that was sent, and may have been answered.
pub struct SentUpdate<A> {
    engine: Arc<EngineInner>,
    id: ExecutionId,
    update_id: String,
    answer: PhantomData<fn() -> A>,
}

impl Engine {
    /// An update of an execution. Await it for the answer. A caller that stops waiting can ask again under the same id.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let sum = engine.update::<u64>("account", "add", &4).await?;
    /// # Ok(()) }
    /// ```
    pub fn update<A: DeserializeOwned>(
        &self,
        id: impl Into<ExecutionId>,
        name: &str,
        request: &(impl Serialize + ?Sized),
    ) -> SendUpdate<A> {
        SendUpdate::new(self.inner.clone(), id.into(), name, request)
    }
}

impl<O> Handle<O> {
    /// An update of the execution. Await it for the answer. A caller that stops waiting can ask again under the same
    /// id.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// let sum = handle.update::<u64>("add", &4).await?;
    /// # Ok(()) }
    /// ```
    pub fn update<A: DeserializeOwned>(&self, name: &str, request: &(impl Serialize + ?Sized)) -> SendUpdate<A> {
        SendUpdate::new(self.engine.clone(), self.id().clone(), name, request)
    }
}

impl<A: DeserializeOwned> SendUpdate<A> {
    fn new(
        engine: Arc<EngineInner>,
        id: ExecutionId,
        name: &str,
        request: &(impl Serialize + ?Sized),
    ) -> SendUpdate<A> {
        let request = written(&engine, "an update", request);
        SendUpdate { engine, id, name: name.into(), request, update_id: None, answer: PhantomData }
    }

    /// Sets an id: however often the update is sent under it, it counts once, and all callers get the same answer.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// let sum = handle.update::<u64>("add", &4).id("deposit-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: impl Into<String>) -> SendUpdate<A> {
        self.update_id = Some(id.into());
        self
    }

    /// Sends the update without waiting for the answer. When this returns, the update is stored.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// let sent = handle.update::<u64>("add", &4).send().await?;
    /// let sum = sent.answer().await?;
    /// # Ok(()) }
    /// ```
    pub async fn send(self) -> Result<SentUpdate<A>> {
        let SendUpdate { engine, id, name, request, update_id, answer } = self;
        let update_id = engine.send_update(&id, name, request?, update_id).await?;
        Ok(SentUpdate { engine, id, update_id, answer })
    }
}

impl EngineInner {
    /// Stores an update, unless it was stored before. Returns its id.
    async fn send_update(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        name: String,
        request: String,
        update_id: Option<String>,
    ) -> Result<String> {
        check_name("the name of an update", &name)?;
        let update_id = update_id.unwrap_or_else(|| self.store.env().uuid().to_string());
        check_name("the id of an update", &update_id)?;
        let delivered = Delivered::update(&name, &request);
        let body = MessageBody::Update { name: name.clone(), id: update_id.clone(), payload: request.clone() };
        let check = || validated(self, id, &name, &request);
        self.deliver_once(id, &update_id, delivered, body, check).await?;
        Ok(update_id)
    }

    /// Waits for the answer to an update, as JSON text.
    async fn answer(&self, id: &ExecutionId, update_id: &str) -> Result<String> {
        let key = self.kept(id).update(update_id);
        let look = |_| async {
            let ended = self.has_ended(id).await?;
            // The last answer was stored before the end was seen.
            match self.get(&key).await?.map(|item| Delivered::decode(&item.value)) {
                Some(Ok(Delivered::Update(_, Some(answer)))) => Ok(Some(answer)),
                Some(Err(why)) if why.is_version() => Err(why.at(format!("update {update_id:?}")).into()),
                _ if ended => Err(WorkflowError::Ended { id: id.clone() }),
                _ => Ok(None),
            }
        };
        let answer = self.listen(id, News::Answer(update_id.into()), look).await?;
        answer.map_err(|text| WorkflowError::UpdateRefused { id: id.clone(), failure: read_failure(&text) })
    }
}

/// Calls the validator, if there is one. Returns the check that the published values are unchanged.
async fn validated(engine: &EngineInner, id: &ExecutionId, name: &str, request: &str) -> Result<Option<Check>> {
    let view = engine.store.view().await?;
    let found = fetch_execution(&view, &engine.spaces.executions, id).await?;
    let (Execution { workflow, .. }, _) = found.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })?;
    let Some(definition) = engine.definition(&workflow) else {
        return match engine.node.known_elsewhere(&workflow) {
            None => Err(WorkflowError::NotRegistered { name: workflow }),
            Some(known) if known.validated.iter().any(|validated| validated == name) => {
                Err(WorkflowError::RulesElsewhere { name: workflow })
            }
            Some(_) => Ok(None),
        };
    };
    let Some(validator) = definition.validators.get(name) else { return Ok(None) };
    let key: Key = engine.kept(id).published();
    let (published, item) = engine.kept(id).fetch_published(&view).await?.unzip();
    let published = published.unwrap_or_default();
    if let Err(failure) = validator(&PublishedValues(&published), request) {
        return Err(WorkflowError::UpdateRefused { id: id.clone(), failure });
    }
    Ok(Some(item.map_or(Check::Absent(key.clone()), |item| Check::AtRev(key, item.rev))))
}

impl<A: DeserializeOwned> SentUpdate<A> {
    /// The id under which a caller can ask for the answer again.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, SentUpdate};
    /// # async fn example(sent: SentUpdate<u64>) -> Result<()> {
    /// println!("sent as {}", sent.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> &str {
        &self.update_id
    }

    /// Waits for the answer.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, SentUpdate};
    /// # async fn example(sent: SentUpdate<u64>) -> Result<()> {
    /// let sum = sent.answer().await?;
    /// # Ok(()) }
    /// ```
    pub async fn answer(&self) -> Result<A> {
        read_as(&self.id, &self.engine.answer(&self.id, &self.update_id).await?)
    }
}

impl<A: DeserializeOwned + Send + 'static> IntoFuture for SendUpdate<A> {
    type Output = Result<A>;
    type IntoFuture = Boxed<'static, Result<A>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.send().await?.answer().await })
    }
}

/// An update that a workflow has received and has to answer.
pub struct Request<R, A> {
    ctx: Ctx,
    id: String,
    name: String,
    /// The request.
    pub value: R,
    answer: PhantomData<fn(A)>,
}

/// An update that is about to be waited for.
#[must_use = "nothing is received until this is awaited"]
pub struct ReceiveUpdate<'a, R, A> {
    ctx: &'a Ctx,
    name: String,
    types: PhantomData<fn(A) -> R>,
}

/// Like [`ReceiveUpdate`], with a time limit.
#[must_use = "nothing is received until this is awaited"]
pub struct ReceiveUpdateFor<'a, R, A> {
    receive: ReceiveUpdate<'a, R, A>,
    timeout: Duration,
}

/// A receipt as it is recorded.
#[derive(Serialize, Deserialize)]
pub(crate) struct UpdateReceipt {
    id: String,
    request: Value,
}

impl UpdateReceipt {
    /// The receipt of an update with this request, both as JSON text.
    pub(crate) fn text(id: &str, request: &str) -> String {
        let receipt = UpdateReceipt { id: id.into(), request: serde_json::from_str(request).unwrap_or_default() };
        serde_json::to_string(&receipt).expect("a receipt can be written as JSON")
    }
}

impl Ctx {
    /// The next update of this name, to be answered. Updates are received in the order in which they were stored, each
    /// once. An update whose request does not fit the type is refused, and the next one is awaited.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let request = ctx.receive_update::<i64, u64>("add").await?;
    /// let sum = 100u64.saturating_add_signed(request.value);
    /// request.answer(&sum).await?;
    /// # Ok(()) }
    /// ```
    pub fn receive_update<R: DeserializeOwned, A: Serialize>(&self, name: &str) -> ReceiveUpdate<'_, R, A> {
        ReceiveUpdate { ctx: self, name: name.into(), types: PhantomData }
    }
}

impl<'a, R: DeserializeOwned, A: Serialize> ReceiveUpdate<'a, R, A> {
    /// Sets a time limit. Without an update until then, the result is `None`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let request = ctx.receive_update::<i64, u64>("add").timeout(Duration::from_secs(60));
    /// if let Some(request) = request.await? {
    ///     request.answer(&7).await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn timeout(self, timeout: Duration) -> ReceiveUpdateFor<'a, R, A> {
        ReceiveUpdateFor { receive: self, timeout }
    }

    async fn receive(&self, timeout: Option<Duration>) -> Result<Option<Request<R, A>>, Failure> {
        // Refused requests do not extend the time limit.
        let mut end = None;
        loop {
            let call = OpCall::timed(Kind::Update, &self.name, timeout);
            let is_it = |body: &MessageBody| matches!(body, MessageBody::Update { name, .. } if *name == self.name);
            let what = WaitsFor::Update(self.name.clone());
            let until = |now: Timestamp| end.or(timeout.map(|timeout| now.plus(timeout)));
            let read = |text: &str| serde_json::from_str::<UpdateReceipt>(text);
            let received = self.ctx.await_message(call, what, until, is_it, read).await?;
            let Some((since, receipt)) = received else { return Ok(None) };
            end = end.or(timeout.map(|timeout| since.plus(timeout)));
            let (ctx, name) = (self.ctx.clone(), self.name.clone());
            match R::deserialize(receipt.request) {
                Ok(value) => return Ok(Some(Request { ctx, id: receipt.id, name, value, answer: PhantomData })),
                Err(error) => {
                    let refused: Request<(), A> = Request { ctx, id: receipt.id, name, value: (), answer: PhantomData };
                    refused.refuse(Failure::misfit("the request", &error)).await;
                }
            }
        }
    }
}

impl<R, A: Serialize> Request<R, A> {
    /// The id that the update was sent under.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Request};
    /// # async fn example(request: Request<i64, u64>) -> Result<(), Failure> {
    /// println!("received {}", request.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Answers the update. The answer is stored with the next commit, at the latest when the workflow waits.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Request};
    /// # async fn example(request: Request<i64, u64>) -> Result<(), Failure> {
    /// request.answer(&7).await?;
    /// # Ok(()) }
    /// ```
    pub async fn answer(self, answer: &A) -> Result<(), Failure> {
        let text = self.ctx.run.text("the answer", answer)?;
        self.record(Ok(text)).await;
        Ok(())
    }

    /// Refuses the update: the caller gets this failure.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Request};
    /// # async fn example(request: Request<i64, u64>) -> Result<(), Failure> {
    /// request.refuse("the account is closed").await;
    /// # Ok(()) }
    /// ```
    pub async fn refuse(self, failure: impl Into<Failure>) {
        let failure = failure.into();
        self.record(Err(failure_text(&failure))).await;
    }

    async fn record(self, answer: Result<String, String>) {
        let Request { ctx, id, name, .. } = &self;
        let call = OpCall { kind: Kind::Answer, name, argument: hash(&answer) };
        let answered = ctx.replay::<(), _>(WaitsFor::Store, call, |operation| async move {
            let run = &ctx.run;
            let key = run.kept().update(id);
            let sent = run.or_stop(run.engine.get(&key).await).await;
            let fingerprint = match sent.map(|item| Delivered::decode(&item.value)) {
                Some(Ok(Delivered::Update(sent, _))) => sent,
                Some(Err(why)) if why.is_version() => {
                    return run.stop_for(Stop::unknown_version(why.at(format!("update {id:?}")))).await;
                }
                _ => 0,
            };
            let part = Part::default().put(&key, Delivered::Update(fingerprint, Some(answer)).encode());
            let (engine, execution, update) = (run.engine.clone(), run.id.clone(), id.clone());
            let part = part.then(move |_| engine.tell(&execution, News::Answer(update)));
            operation.done_with(&(), Some(part.into()));
            Ok(())
        });
        // This operation cannot fail.
        let _ = answered.await;
    }
}

impl<'a, R: DeserializeOwned + Send + 'a, A: Serialize + Send + 'a> IntoFuture for ReceiveUpdate<'a, R, A> {
    type Output = Result<Request<R, A>, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.receive(None).await?.ok_or_else(Failure::time) })
    }
}

impl<'a, R: DeserializeOwned + Send + 'a, A: Serialize + Send + 'a> IntoFuture for ReceiveUpdateFor<'a, R, A> {
    type Output = Result<Option<Request<R, A>>, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.receive.receive(Some(self.timeout)).await })
    }
}
