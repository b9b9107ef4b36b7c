//! Updates: requests to an execution that are answered. A validator may refuse an update before anything is recorded.
//! After that the update is durable and counts once, and so does its answer.

use std::future::IntoFuture;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lane::{Part, as_found};
use crate::record::Record;
use crate::store::Timestamp;
use crate::workflow::ctx::signal::written;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::engine::handle::{Handle, read_as};
use crate::workflow::engine::listen::News;
use crate::workflow::engine::post::{BeforeTry, SendOnce, Target};
use crate::workflow::engine::{Engine, EngineInner, check_name};
use crate::workflow::journal::replay::OpCall;
use crate::workflow::stored::kept::{Delivered, MessageBody, Published, UpdateAnswer};
use crate::workflow::stored::record::{Kind, StoredStatus, WaitsFor, failure_text};
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
        let (sent, unsent) = self.checked()?;
        sent.engine.send_update(&sent, unsent, false).await?;
        Ok(sent)
    }

    /// The update as it will have been sent, and what is to be sent.
    fn checked(self) -> Result<(SentUpdate<A>, UnsentUpdate)> {
        let SendUpdate { engine, id, name, request, update_id, answer } = self;
        check_name("the name of an update", &name)?;
        let unsent = UnsentUpdate { name, request: request?, is_new: update_id.is_none() };
        let update_id = update_id.unwrap_or_else(|| engine.store.env().uuid().to_string());
        check_name("the id of an update", &update_id)?;
        Ok((SentUpdate { engine, id, update_id, answer }, unsent))
    }
}

/// What is to be sent of an update. The request is JSON text.
struct UnsentUpdate {
    name: String,
    request: String,
    /// True if its id was made for it.
    is_new: bool,
}

impl EngineInner {
    /// Stores an update, unless it was stored before. Returns whether it was stored by this call.
    async fn send_update<A>(
        self: &Arc<EngineInner>,
        SentUpdate { id, update_id, .. }: &SentUpdate<A>,
        UnsentUpdate { name, request, is_new }: UnsentUpdate,
        listens: bool,
    ) -> Result<bool> {
        let delivered = Delivered::update(&name, &request);
        let body = MessageBody::Update { name: name.clone(), id: update_id.clone(), payload: request.clone() };
        let once = SendOnce { message: update_id, delivered, body, is_new, listens };
        self.deliver_once(id, once, || validated(self, id, &name, &request)).await
    }

    /// The answer to an update, as JSON text, or as a failure in JSON text. None if there is none yet.
    async fn answered(&self, id: &ExecutionId, update_id: &str) -> Result<Option<Result<String, String>>> {
        let found = match self.get(&self.kept(id).answer(update_id)).await? {
            Some(item) => UpdateAnswer::decode(&item.value).map(Some),
            None => {
                match self.get(&self.kept(id).update(update_id)).await?.map(|item| Delivered::decode(&item.value)) {
                    Some(Ok(Delivered::Update(_, answer))) => Ok(answer),
                    Some(Err(why)) => Err(why),
                    _ => Ok(None),
                }
            }
        };
        match found {
            Err(why) if why.is_version() => Err(why.at(format!("update {update_id:?}")).into()),
            found => Ok(found.ok().flatten().map(|UpdateAnswer(answer)| answer)),
        }
    }

    /// Makes a call that sends an update, and waits for the answer as JSON text.
    async fn answer(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        update_id: &str,
        send: impl Future<Output = Result<bool>>,
    ) -> Result<String> {
        let look = |ended: Option<StoredStatus>| async move {
            match self.answered(id, update_id).await? {
                // The last answer was stored before the end was seen. Another execution may have the id now.
                None if ended.is_some() || self.has_ended(id).await? => {
                    let answer = self.answered(id, update_id).await?;
                    answer.map(Some).ok_or_else(|| WorkflowError::Ended { id: id.clone() })
                }
                answer => Ok(answer),
            }
        };
        let answer = self.listen_after(id, News::Answer(update_id.into()), send, look).await?;
        answer.map_err(|text| WorkflowError::UpdateRefused { id: id.clone(), failure: read_failure(&text) })
    }
}

/// Calls the validator, if there is one. Finds the check that the published values are unchanged.
async fn validated(engine: &EngineInner, id: &ExecutionId, name: &str, request: &str) -> Result<BeforeTry> {
    let resident = engine.resident(id).filter(|run| run.with(|state| state.known.is_stored()));
    let (workflow, target) = match resident {
        Some(run) => (run.definition.name.to_string(), None),
        None => {
            let (execution, rev) = engine.known(id).await?;
            (execution.workflow.clone(), Target::of(id, execution, rev).ok())
        }
    };
    let found = BeforeTry { check: None, target };
    let Some(definition) = engine.definition(&workflow) else {
        return match engine.node.known_elsewhere(&workflow) {
            None => Err(WorkflowError::NotRegistered { name: workflow }),
            Some(known) if known.validated.iter().any(|validated| validated == name) => {
                Err(WorkflowError::RulesElsewhere { name: workflow })
            }
            Some(_) => Ok(found),
        };
    };
    let Some(validator) = definition.validators.get(name) else { return Ok(found) };
    let key = engine.kept(id).published();
    let (published, item) = engine.kept(id).fetch_published(&engine.store.view().await?).await?.unzip();
    let published = published.unwrap_or_default();
    if let Err(failure) = validator(&PublishedValues(&published), request) {
        return Err(WorkflowError::UpdateRefused { id: id.clone(), failure });
    }
    Ok(BeforeTry { check: Some(as_found(key, item.map(|item| item.rev))), ..found })
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
        read_as(&self.id, &self.engine.answer(&self.id, &self.update_id, async { Ok(false) }).await?)
    }
}

impl<A: DeserializeOwned + Send + 'static> IntoFuture for SendUpdate<A> {
    type Output = Result<A>;
    type IntoFuture = Boxed<'static, Result<A>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (sent, unsent) = self.checked()?;
            let SentUpdate { engine, id, update_id, .. } = &sent;
            read_as(id, &engine.answer(id, update_id, engine.send_update(&sent, unsent, true)).await?)
        })
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
            let (engine, execution, update) = (ctx.run.engine.clone(), ctx.run.id.clone(), id.clone());
            let part = Part::default().put(&ctx.run.kept().answer(id), UpdateAnswer(answer).encode());
            let (part, is_told) = engine.with_news(part, &execution);
            let part = part.then(move |_| engine.tell(&execution, News::Answer(update), is_told));
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
