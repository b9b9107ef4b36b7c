//! Reviews from outside: the open ones, page by page, and their decisions. The commit that decides a review deletes its
//! key among the open ones, so only one caller can decide it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json;
use crate::node::{read_text, write_text};
use crate::page::{Asked, MOST, Page, mark, paged};
use crate::record::Record;
use crate::store::{Check, ErrorKind, Key, Order, Range, Space, Timestamp, Uuid, View, Write};
use crate::workflow::engine::post::Along;
use crate::workflow::engine::{Engine, EngineInner, EngineSpaces, check_name};
use crate::workflow::operate::executions::Executions;
use crate::workflow::operate::history::value;
use crate::workflow::operate::valued::ValueSchema;
use crate::workflow::stored::kept::{Kept, MessageBody, ReviewRecord};
use crate::workflow::stored::keys::review_key;
use crate::workflow::stored::record::next_page;
use crate::workflow::{Decision, ExecutionId, Result, WorkflowError};

/// The longest reason of a decision, in bytes.
const REASON_BYTES: usize = 64 << 10;

/// A review, as the store holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReviewDescription {
    /// Its id.
    pub id: String,
    /// The execution that opened it.
    pub execution: ExecutionId,
    /// The workflow of that execution.
    pub workflow: String,
    /// Its name.
    pub name: String,
    /// The question.
    pub question: Value,
    /// The options to choose from.
    pub options: Vec<String>,
    /// When it was opened.
    #[serde(rename = "opened_us")]
    pub opened: Timestamp,
    /// Until when the execution waits for it at most.
    #[serde(rename = "until_us")]
    pub until: Option<Timestamp>,
    /// Whether it can be decided.
    pub state: ReviewState,
}

/// The state of a review.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReviewState {
    /// It can be decided.
    Open,
    /// It was decided.
    Decided(Decision),
    /// The execution no longer waits for it, and it was not decided.
    Closed,
}

/// A page of open reviews that is about to be read: by workflow, then by name, then the oldest first.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Reviews {
    stored: Executions,
    workflow: Option<String>,
    name: Option<String>,
    asked: Asked,
}

paged!(Reviews => ReviewDescription, WorkflowError);

/// A review, as a caller sees it.
#[derive(Clone)]
pub struct ReviewHandle {
    engine: Arc<EngineInner>,
    id: String,
}

impl Engine {
    /// The open reviews. Await it for a page of them.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for review in engine.reviews().await? {
    ///     println!("{}: {} {:?}", review.id, review.question, review.options);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn reviews(&self) -> Reviews {
        self.inner.stored().reviews()
    }

    /// The review of this id.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for review in engine.reviews().name("refund").await? {
    ///     engine.review(&review.id).decide("approve", "ada@example.org", "the parcel was lost").await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn review(&self, id: impl Into<String>) -> ReviewHandle {
        ReviewHandle { engine: self.inner.clone(), id: id.into() }
    }
}

impl Executions {
    /// The open reviews, as [`Engine::reviews`] lists them.
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// for review in executions.reviews().await? {
    ///     println!("{}: {} {:?}", review.id, review.question, review.options);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn reviews(&self) -> Reviews {
        Reviews { stored: self.clone(), workflow: None, name: None, asked: Asked::of("reviews") }
    }

    /// The open reviews of an execution.
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// for review in executions.open_reviews(&"order-1".into()).await? {
    ///     println!("{}: {}", review.name, review.question);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn open_reviews(&self, id: &ExecutionId) -> Result<Vec<ReviewDescription>> {
        let Some((spaces, space)) = self.spaces.as_ref().and_then(|it| Some((it, it.reviews.as_ref()?))) else {
            return Ok(Vec::new());
        };
        let (view, kept) = (self.store.view().await?, Kept::new(&spaces.kept, id));
        let (mut rest, mut open) = (kept.reviews(), Vec::new());
        while let Some(page) = next_page(&view, &mut rest, MOST).await? {
            for (key, item) in page {
                let Some((token, name)) = kept.read_review(&key) else { continue };
                let shown = format!("{token}/{id}");
                let record = ReviewRecord::decode(&item.value).map_err(|why| why.at(format!("review {shown:?}")))?;
                let its = space.key(review_key(&record.workflow, name, token, id));
                if view.get(&its).await?.is_some() {
                    open.push(ReviewDescription::new(shown, id.clone(), record, true));
                }
            }
        }
        Ok(open)
    }

    /// A review, open or not. It is known as long as its execution is kept and has not continued as new.
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions, id: &str) -> Result<()> {
    /// let review = executions.review(id).await?;
    /// println!("{}: {:?}", review.question, review.state);
    /// # Ok(()) }
    /// ```
    pub async fn review(&self, id: &str) -> Result<ReviewDescription> {
        let unknown = || WorkflowError::UnknownReview { review: id.into() };
        let spaces = self.spaces.as_ref().ok_or_else(unknown)?;
        let view = self.store.view().await?;
        let found = FoundReview::read(spaces, &view, id).await?.ok_or_else(unknown)?;
        Ok(ReviewDescription::new(id.into(), found.execution, found.record, found.is_open))
    }
}

impl Reviews {
    /// Only reviews of this workflow.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let page = engine.reviews().workflow("order").await?;
    /// # Ok(()) }
    /// ```
    pub fn workflow(mut self, workflow: impl Into<String>) -> Reviews {
        self.workflow = Some(workflow.into());
        self
    }

    /// Only reviews of this name.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let page = engine.reviews().workflow("order").name("refund").await?;
    /// # Ok(()) }
    /// ```
    pub fn name(mut self, name: impl Into<String>) -> Reviews {
        self.name = Some(name.into());
        self
    }

    async fn page(self) -> Result<Page<ReviewDescription>> {
        let mark = mark(&(&self.workflow, &self.name));
        let after = self.asked.position(mark)?;
        let view = self.stored.store.view().await?;
        let Some((spaces, space)) = self.stored.spaces.as_ref().and_then(|it| Some((it, it.reviews.as_ref()?))) else {
            return Ok(Page::default());
        };
        let mut rest = space.prefix(self.prefix());
        if let Some(after) = after.map(|after| space.key(after)) {
            if !rest.contains(&after) {
                return Err(self.asked.unknown().into());
            }
            rest = rest.after(&after);
        }
        let mut found: Vec<(Key, ReviewDescription)> = Vec::new();
        loop {
            let scanned = view.scan(&rest, Order::Ascending, self.asked.limit + 1).await?;
            let Some((end, _)) = scanned.last() else { break };
            rest = rest.after(end);
            for (key, _) in scanned {
                let Some(open) = OpenKey::read(&key) else { continue };
                if let Some(skipped) = self.skips(space, &open) {
                    rest = skipped;
                    break;
                }
                if let Some(review) = open.describe(spaces, &view).await? {
                    found.push((key, review));
                }
                if found.len() > self.asked.limit {
                    return Ok(self.reviews(mark, found));
                }
            }
        }
        Ok(self.reviews(mark, found))
    }

    fn reviews(&self, mark: u64, found: Vec<(Key, ReviewDescription)>) -> Page<ReviewDescription> {
        self.asked.page(mark, found.into_iter().map(|(key, review)| (key.bytes().to_vec(), review)).collect())
    }

    /// The prefix of the selected keys, as far as one range can express the selection.
    fn prefix(&self) -> Vec<u8> {
        let mut prefix = Vec::new();
        if let Some(workflow) = &self.workflow {
            write_text(&mut prefix, workflow);
            self.name.iter().for_each(|name| write_text(&mut prefix, name));
        }
        prefix
    }

    /// Where to continue if a review has another name: at the wanted name in the same workflow, or in the next
    /// workflow.
    fn skips(&self, space: &Space, open: &OpenKey<'_>) -> Option<Range> {
        let name = self.name.as_deref().filter(|name| *name != open.name)?;
        let (mut found, mut wanted, mut next) = (Vec::new(), Vec::new(), Vec::new());
        write_text(&mut found, open.name);
        write_text(&mut wanted, name);
        write_text(&mut next, open.workflow);
        // No text has such a length.
        let rest = if found < wanted { wanted } else { vec![0xff; 2] };
        next.extend(rest);
        Some(space.range(next..))
    }
}

/// The parts of the key of an open review.
pub(crate) struct OpenKey<'a> {
    pub(crate) workflow: &'a str,
    pub(crate) name: &'a str,
    pub(crate) token: Uuid,
    pub(crate) execution: ExecutionId,
}

impl<'a> OpenKey<'a> {
    pub(crate) fn read(key: &'a Key) -> Option<OpenKey<'a>> {
        let (workflow, rest) = read_text(key.bytes())?;
        let (name, rest) = read_text(rest)?;
        let (token, id) = rest.split_first_chunk::<16>()?;
        let execution = std::str::from_utf8(id).ok()?.into();
        Some(OpenKey { workflow, name, token: Uuid::from_bytes(*token), execution })
    }

    /// The review, in a view. A review that cannot be read is skipped, so that the others can still be listed.
    async fn describe(&self, spaces: &EngineSpaces, view: &View) -> Result<Option<ReviewDescription>> {
        let kept = Kept::new(&spaces.kept, &self.execution);
        let record = match view.get(&kept.review(self.token, self.name)).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => None,
            item => item?.and_then(|item| ReviewRecord::decode(&item.value).ok()),
        };
        let id = format!("{}/{}", self.token, self.execution);
        if record.is_none() {
            tracing::error!(review = %id, "a review cannot be read and is not listed");
        }
        Ok(record.map(|record| ReviewDescription::new(id, self.execution.clone(), record, true)))
    }
}

impl ReviewDescription {
    fn new(id: String, execution: ExecutionId, record: ReviewRecord, is_open: bool) -> ReviewDescription {
        let ReviewRecord { workflow, name, question, options, opened_us, until_us, decision, .. } = record;
        let state = match decision {
            Some(decision) => ReviewState::Decided(decision),
            None if is_open => ReviewState::Open,
            None => ReviewState::Closed,
        };
        let question = value(&question);
        let (opened, until) = (Timestamp(opened_us), until_us.map(Timestamp));
        ReviewDescription { id, execution, workflow, name, question, options, opened, until, state }
    }
}

/// A decision as the code that waits for it reads it.
#[derive(Serialize)]
struct Valued<'a> {
    #[serde(flatten)]
    decision: &'a Decision,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: &'a Option<Value>,
}

/// A review that was found by its id.
struct FoundReview {
    execution: ExecutionId,
    token: Uuid,
    record: ReviewRecord,
    /// The key of the record, and the key that exists while the review is open.
    key: Key,
    open: Key,
    is_open: bool,
}

impl FoundReview {
    async fn read(spaces: &EngineSpaces, view: &View, review: &str) -> Result<Option<FoundReview>> {
        let read = |(token, id): (&str, &'_ str)| Some((token.parse::<Uuid>().ok()?, ExecutionId::from(id)));
        let Some((token, execution)) = review.split_once('/').and_then(read) else { return Ok(None) };
        let Some(space) = &spaces.reviews else { return Ok(None) };
        let kept = Kept::new(&spaces.kept, &execution);
        let found = view.scan(&kept.review_of(token), Order::Ascending, 1).await?;
        let Some((key, item)) = found.into_iter().next() else { return Ok(None) };
        let record = ReviewRecord::decode(&item.value).map_err(|why| why.at(format!("review {review:?}")))?;
        let open = space.key(review_key(&record.workflow, &record.name, token, &execution));
        let is_open = view.get(&open).await?.is_some();
        Ok(Some(FoundReview { execution, token, record, key, open, is_open }))
    }
}

impl ReviewHandle {
    /// The review's id.
    ///
    /// ```
    /// # use latchwork::workflow::ReviewHandle;
    /// # fn example(review: ReviewHandle) {
    /// println!("please decide {}", review.id());
    /// # }
    /// ```
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Everything that is known of the review.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, ReviewHandle};
    /// # async fn example(review: ReviewHandle) -> Result<()> {
    /// let review = review.describe().await?;
    /// println!("{}: {:?}", review.question, review.options);
    /// # Ok(()) }
    /// ```
    pub async fn describe(&self) -> Result<ReviewDescription> {
        self.engine.stored().review(&self.id).await
    }

    /// Decides the review: one of its options, the person or program that chose it, and the reason. This is possible
    /// once; when it returns, the decision is stored. A later caller gets an error with the decision that was made.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, ReviewHandle};
    /// # async fn example(review: ReviewHandle) -> Result<()> {
    /// let decision = review.decide("approve", "ada@example.org", "the parcel was lost").await?;
    /// # Ok(()) }
    /// ```
    pub async fn decide(&self, option: &str, by: &str, reason: &str) -> Result<Decision> {
        self.decide_with(option, by, reason, None).await
    }

    /// The same, with a value for the code that waits. If the question has a schema, as those of flows may, a value
    /// that does not fit is refused, and the review stays open.
    ///
    /// ```
    /// # use latchwork::json;
    /// # use latchwork::workflow::{Result, ReviewHandle};
    /// # async fn example(review: ReviewHandle) -> Result<()> {
    /// let decision = review.decide_with("submit", "ada@example.org", "", Some(json!({"cents": 50}))).await?;
    /// # Ok(()) }
    /// ```
    pub async fn decide_with(&self, option: &str, by: &str, reason: &str, value: Option<Value>) -> Result<Decision> {
        check_name("the decider of a review", by)?;
        if reason.len() > REASON_BYTES {
            let what = "the reason of a decision";
            return Err(WorkflowError::PayloadTooLong { what, length: reason.len(), limit: REASON_BYTES });
        }
        let engine = &self.engine;
        let unknown = || WorkflowError::UnknownReview { review: self.id.clone() };
        let closed = || WorkflowError::ReviewClosed { review: self.id.clone() };
        loop {
            let view = engine.store.view().await?;
            let found = FoundReview::read(&engine.spaces, &view, &self.id).await?.ok_or_else(unknown)?;
            let FoundReview { execution, token, mut record, key, open, is_open } = found;
            if let Some(decision) = record.decision {
                return Err(WorkflowError::ReviewDecided { review: self.id.clone(), decision: Box::new(decision) });
            }
            if !record.options.iter().any(|offered| offered == option) {
                let (review, option, offered) = (self.id.clone(), option.into(), record.options);
                return Err(WorkflowError::NotOffered { review, option, offered });
            }
            if !is_open {
                return Err(closed());
            }
            check_value(&self.id, &record, option, value.as_ref())?;
            let at = engine.store.env().now();
            let decision = Decision { option: option.into(), by: by.into(), reason: reason.into(), at };
            let text = Valued { decision: &decision, value: &value };
            let text = serde_json::to_string(&text).expect("a decision can be written as JSON");
            record.decision = Some(decision.clone());
            let body = MessageBody::Completed { token: token.as_u128(), result: Ok(text) };
            let writes = vec![Write::Put(key, record.encode()), Write::Delete(open.clone())];
            match engine.deliver(&execution, body, Along::with((vec![Check::Present(open)], writes))).await {
                Ok(true) => return Ok(decision),
                // Another caller was faster, or the execution no longer waits: the next look finds out.
                Ok(false) => {}
                // The execution may have ended with the decision of another caller.
                Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {
                    let view = engine.store.view().await?;
                    let found = FoundReview::read(&engine.spaces, &view, &self.id).await?;
                    if found.is_none_or(|found| found.record.decision.is_none()) {
                        return Err(closed());
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Refuses a value that does not fit the schema of a review.
fn check_value(review: &str, record: &ReviewRecord, option: &str, value: Option<&Value>) -> Result<()> {
    let Some(takes) = &record.takes else { return Ok(()) };
    let damaged = || WorkflowError::corrupt(format!("review {review:?}"));
    let takes: ValueSchema = json::parse_stored(takes.as_bytes()).ok_or_else(damaged)?;
    takes.check(option, value.unwrap_or(&Value::Null)).map_err(|reason| WorkflowError::DecisionValue {
        review: review.into(),
        option: option.into(),
        reason,
    })
}

shown!(ReviewHandle, it => id: it.id);
