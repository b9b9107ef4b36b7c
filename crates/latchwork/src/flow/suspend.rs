//! Suspensions: questions of a block to a person or program, and their answers. A question is a review of the engine
//! with a schema; one answer wins. It does not know what blocks do with answers.

use std::future::IntoFuture;
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::ctx::BlockCtx;
use crate::flow::error::{BlockError, FlowError, Result, failed};
use crate::flow::request::shown;
use crate::flow::stream::FlowEvent;
use crate::json;
use crate::json::check_schema;
use crate::page::{Cursor, Page};
use crate::store::Timestamp;
use crate::workflow::operate::valued::ValueSchema;
use crate::workflow::{
    Boxed, Decision, Engine, ExecutionId, Failure, ReviewDescription, ReviewState, Reviews, WorkflowError,
};

/// The kind of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AnswerKind {
    /// Yes.
    Approve,
    /// No.
    Reject,
    /// A value.
    Submit,
    /// The question is passed over.
    Skip,
}

impl AnswerKind {
    fn word(self) -> &'static str {
        match self {
            AnswerKind::Approve => "approve",
            AnswerKind::Reject => "reject",
            AnswerKind::Submit => "submit",
            AnswerKind::Skip => "skip",
        }
    }

    fn read(word: &str) -> Option<AnswerKind> {
        use AnswerKind::{Approve, Reject, Skip, Submit};
        [Approve, Reject, Submit, Skip].into_iter().find(|kind| kind.word() == word)
    }
}

/// An answer, as the block that asked gets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Answer {
    /// What was answered.
    pub kind: AnswerKind,
    /// The value; null if none was given.
    pub value: Value,
    /// The person or program that answered.
    pub by: String,
    /// When it was given.
    pub at: Timestamp,
}

impl Answer {
    /// True if the answer is yes.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price");
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn is_approved(&self) -> bool {
        self.kind == AnswerKind::Approve
    }

    /// The value as a type.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// let asks = handler("asks").run(async |ctx, _: u64| {
    ///     ctx.suspend("price").schema_of::<u64>().allow([AnswerKind::Submit]).await?.read::<u64>()
    /// });
    /// ```
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        T::deserialize(&self.value).map_err(|error| Failure::misfit("the answer", &error))
    }
}

/// What a question says. It is the question of the review.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct Question {
    path: String,
    message: String,
    data: Value,
    schema: Option<Value>,
}

/// A question that is about to be asked.
#[must_use = "nothing is asked until this is awaited"]
pub struct Suspend<'a, P> {
    ctx: &'a BlockCtx<P>,
    reason: String,
    asked: Question,
    wrong: Option<Failure>,
    allow: Vec<AnswerKind>,
    timeout: Option<Duration>,
}

impl<P> BlockCtx<P> {
    /// Asks a question and waits for the answer. Meanwhile the request uses no memory. After an interruption the same
    /// question is still open, and a question that was answered is not asked again. By default approve and reject are
    /// allowed.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").message("Is this price right?").data(&price);
    ///     let answer = question.allow([AnswerKind::Approve, AnswerKind::Reject]).await?;
    ///     Ok(answer.is_approved())
    /// });
    /// ```
    pub fn suspend(&self, reason: &str) -> Suspend<'_, P> {
        let asked = Question { path: self.path(), ..Question::default() };
        let allow = vec![AnswerKind::Approve, AnswerKind::Reject];
        Suspend { ctx: self, reason: reason.into(), asked, wrong: None, allow, timeout: None }
    }
}

impl<P> Suspend<'_, P> {
    /// The question in words.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").message("Is this price right?");
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn message(mut self, message: impl Into<String>) -> Self {
        self.asked.message = message.into();
        self
    }

    /// What the question is about.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").data(price);
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn data(mut self, data: impl Serialize) -> Self {
        match json::to_value(&data) {
            Ok(data) => self.asked.data = data,
            Err(error) => self.wrong = Some(Failure::no_json("the data of a question", &error)),
        }
        self
    }

    /// The JSON schema that the value of an answer must fit, unless it rejects or skips.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").schema(json!({"type": "integer"}));
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn schema(mut self, schema: Value) -> Self {
        let compiled = || jsonschema::validator_for(&schema).map(drop).map_err(|error| error.to_string());
        if let Err(error) = check_schema(&schema).and_then(|()| compiled()) {
            let message = format!("the schema of question {:?} is wrong: {error}", self.reason);
            self.wrong = Some(Failure::new(message).not_retryable());
        }
        self.asked.schema = Some(schema);
        self
    }

    /// The type that the value of an answer must fit.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").schema_of::<u64>().allow([AnswerKind::Submit]);
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn schema_of<T: JsonSchema>(self) -> Self {
        let schema = schemars::schema_for!(T).to_value();
        self.schema(schema)
    }

    /// The allowed answers.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").allow([AnswerKind::Approve, AnswerKind::Skip]);
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn allow(mut self, allow: impl IntoIterator<Item = AnswerKind>) -> Self {
        self.allow = allow.into_iter().collect();
        self
    }

    /// A time limit. Without an answer until then, the question is closed and the wait fails with
    /// [`BlockError::Unanswered`].
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, handler};
    /// # use latchwork::json;
    /// let approval = handler("approval").run(async |ctx, price: u64| {
    ///     let question = ctx.suspend("approve-price").timeout(std::time::Duration::from_secs(3600));
    ///     Ok(question.await?.is_approved())
    /// });
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    async fn ask(self) -> Result<Answer, Failure> {
        let Suspend { ctx, reason, asked, wrong, allow, timeout } = self;
        wrong.map_or(Ok(()), Err)?;
        let (frame, path) = (&ctx.frame, shown(&ctx.frame.path));
        let (request, takes) = (&frame.request, takes(asked.schema.as_ref()));
        let review = ctx.review(&reason, &asked, allow.iter().map(|kind| kind.word()));
        let (teller, its, why) = (request.clone(), path.clone(), reason.clone());
        let review = review.taking(takes.clone()).telling(move |id| {
            teller.tell(&FlowEvent::Suspension { id: id.into(), path: its.clone(), reason: why.clone() });
        });
        let pending = review.open_for(timeout).await?;
        let is_known = ctx.here().upcoming().is_some_and(|place| request.has_ended(&place));
        let given: Option<Given> = pending.answer().await?;
        if !is_known {
            let (answer, by) = given.as_ref().map(|given| (given.option.clone(), given.by.clone())).unzip();
            request.tell(&FlowEvent::Answer { path: path.clone(), reason: reason.clone(), answer, by });
        }
        let Some(Given { option, by, at_us, value }) = given else {
            return Err(failed(BlockError::Unanswered { path, reason }));
        };
        let misfit = |message: String| failed(BlockError::AnswerMisfit { path, reason, message });
        let Some(kind) = AnswerKind::read(&option) else { return Err(misfit(format!("{option:?} is no answer"))) };
        let value = value.unwrap_or_default();
        if let Some(Err(message)) = takes.map(|takes| takes.check(&option, &value)) {
            return Err(misfit(message));
        }
        Ok(Answer { kind, value, by, at: Timestamp(at_us) })
    }
}

/// An answer, as it is recorded.
#[derive(Deserialize)]
struct Given {
    option: String,
    by: String,
    at_us: u64,
    #[serde(default)]
    value: Option<Value>,
}

/// What an answer has to fit: a value is submitted, and may come with an approval.
fn takes(schema: Option<&Value>) -> Option<ValueSchema> {
    let options = [(AnswerKind::Submit, false), (AnswerKind::Approve, true)];
    let options = options.map(|(kind, may_be_missing)| (kind.word().to_string(), may_be_missing));
    schema.map(|schema| ValueSchema { schema: schema.clone(), options: options.into() })
}

impl<'a, P: 'static> IntoFuture for Suspend<'a, P> {
    type Output = Result<Answer, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.ask())
    }
}

/// A question, as the store holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Suspension {
    /// Its id.
    pub id: String,
    /// The request.
    pub request: ExecutionId,
    /// The path of the block that asks.
    pub path: String,
    /// Why it asks.
    pub reason: String,
    /// The question in words.
    pub message: String,
    /// What it is about.
    pub data: Value,
    /// The schema of the answer's value.
    pub schema: Option<Value>,
    /// The allowed answers.
    pub allow: Vec<AnswerKind>,
    /// Since when it is open.
    pub opened: Timestamp,
    /// Until when it can be answered.
    pub until: Option<Timestamp>,
    /// The answer that it got, without its value.
    pub decision: Option<Decision>,
    /// True if it can be answered.
    pub is_open: bool,
}

impl Suspension {
    /// None if the review was not opened by a flow.
    pub(crate) fn of(review: ReviewDescription) -> Option<Suspension> {
        let Question { path, message, data, schema } = serde_json::from_value(review.question).ok()?;
        let allow = review.options.iter().filter_map(|word| AnswerKind::read(word)).collect();
        let is_open = review.state == ReviewState::Open;
        let decision = if let ReviewState::Decided(decision) = review.state { Some(decision) } else { None };
        let (id, request, reason) = (review.id, review.execution, review.name);
        let (opened, until) = (review.opened, review.until);
        Some(Suspension { id, request, path, reason, message, data, schema, allow, opened, until, decision, is_open })
    }
}

/// A page of open questions that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Suspensions {
    reviews: Result<Reviews>,
}

shown!(Suspensions, it => action_is_known: it.reviews.is_ok());

impl Suspensions {
    pub(crate) fn new(reviews: Result<Reviews>) -> Suspensions {
        Suspensions { reviews }
    }

    /// The size of a page: 100 by default, at least 1 and at most 1000. A page may have fewer, and still have a next
    /// one.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let page = flows.suspensions("refund").limit(10).await?;
    /// # Ok(()) }
    /// ```
    pub fn limit(self, limit: usize) -> Suspensions {
        Suspensions::new(self.reviews.map(|reviews| reviews.limit(limit)))
    }

    /// Continues after an earlier page: its `next`.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let first = flows.suspensions("refund").limit(10).await?;
    /// let second = flows.suspensions("refund").after(first.next).await?;
    /// # Ok(()) }
    /// ```
    pub fn after(self, cursor: impl Into<Option<Cursor>>) -> Suspensions {
        Suspensions::new(self.reviews.map(|reviews| reviews.after(cursor)))
    }
}

impl IntoFuture for Suspensions {
    type Output = Result<Page<Suspension>>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async {
            let Page { items, next } = self.reviews?.await?;
            Ok(Page { items: items.into_iter().filter_map(Suspension::of).collect(), next })
        })
    }
}

/// Reads a question.
pub(crate) async fn find(engine: &Engine, id: &str) -> Result<Suspension> {
    let unknown = || FlowError::UnknownQuestion { id: id.into() };
    match engine.review(id).describe().await {
        Ok(review) => Suspension::of(review).ok_or_else(unknown),
        Err(WorkflowError::UnknownReview { .. }) => Err(unknown()),
        Err(error) => Err(error.into()),
    }
}

/// Answers a question. One caller wins; a bad answer leaves the question open.
pub(crate) async fn answer(engine: &Engine, id: &str, kind: AnswerKind, value: Value, by: &str) -> Result<()> {
    let suspension = find(engine, id).await?;
    if !suspension.allow.contains(&kind) {
        let allowed = suspension.allow.iter().map(|kind| kind.word().into()).collect();
        return Err(FlowError::NotAllowed { answer: kind.word().into(), allowed });
    }
    if suspension.until.is_some_and(|until| until <= engine.store().env().now()) && suspension.decision.is_none() {
        return Err(FlowError::Closed { id: id.into() });
    }
    match engine.review(id).decide_with(kind.word(), by, "", Some(value.clone())).await {
        Ok(_) => Ok(()),
        Err(WorkflowError::ReviewDecided { decision, .. }) => Err(FlowError::Answered { decision }),
        Err(WorkflowError::DecisionValue { reason, .. }) => Err(FlowError::BadAnswer { reason, value }),
        Err(WorkflowError::ReviewClosed { .. }) => Err(FlowError::Closed { id: id.into() }),
        Err(error) => Err(error.into()),
    }
}
