//! Reviews: questions to people, with a list of options. A review is open as long as its key is in the space of open
//! reviews. The commit that opens it, decides it or gives it up also writes that key.

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::json;
use crate::lane::{Part, Tag};
use crate::record::Record;
use crate::store::{Check, Key, Order, Space, Timestamp, Uuid};
use crate::workflow::ctx::step::read_failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::engine::EngineInner;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::operate::valued::ValueSchema;
use crate::workflow::run::close::How;
use crate::workflow::run::{OpEffect, Received, Run, RunState, WaitEnd};
use crate::workflow::stored::kept::{MessageBody, ReviewRecord};
use crate::workflow::stored::keys::review_key;
use crate::workflow::stored::record::{EntryState, Kind, WaitsFor, failure_text};
use crate::workflow::{Boxed, ExecutionId, Failure, Result};

/// The review is open.
const OPEN: Tag = Tag("open");

/// The longest name and the longest option, in bytes; and how many options there can be.
const NAME_BYTES: usize = 256;
const OPTIONS: usize = 1000;

/// How many writes a commit that closes reviews has at most, if they do not fit into the commit that ends the
/// execution.
const CLOSED_AT_ONCE: usize = 1000;

/// Why a review is not valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum ReviewError {
    /// The name is not valid.
    #[error("{name:?} cannot be the name of a review: it must have 1 to 256 bytes")]
    Name { name: String },
    /// There are no options, or too many.
    #[error("review {name:?} has {count} options; it must have 1 to 1,000")]
    Options { name: String, count: usize },
    /// An option is not valid, or is listed twice.
    #[error("{option:?} cannot be an option of review {name:?}: {reason}")]
    Option { name: String, option: String, reason: String },
}

/// The decision of a review.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Decision {
    /// The option that was chosen.
    pub option: String,
    /// The person or program that decided.
    pub by: String,
    /// Why; empty if no reason was stated.
    pub reason: String,
    /// When.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
}

/// A review that is about to be opened.
#[derive(Clone)]
#[must_use = "nothing is asked until this is awaited"]
pub struct Review<'a> {
    ctx: &'a Ctx,
    name: String,
    question: Result<String, Failure>,
    options: Vec<String>,
    /// What the value of the decision has to fit.
    takes: Option<ValueSchema>,
    /// Called with the id of the review when it is opened for the first time.
    told: Option<OnOpen>,
}

type OnOpen = Arc<dyn Fn(&str) + Send + Sync>;

/// Like [`Review`], with a time limit.
#[derive(Clone)]
#[must_use = "nothing is asked until this is awaited"]
pub struct ReviewFor<'a> {
    review: Review<'a>,
    timeout: Duration,
}

/// A review that was opened, as the workflow that waits for it sees it.
#[must_use = "a review that is not waited for stays open until the execution ends"]
pub struct PendingReview {
    ctx: Ctx,
    name: String,
    token: Uuid,
    until: Option<Timestamp>,
    /// The place where it was opened.
    place: Place,
}

impl Ctx {
    /// A review: a question, and options of which one is chosen. Await it for the [`Decision`]. [`Engine::reviews`]
    /// lists open reviews, and [`Engine::review`] decides them.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let decision = ctx.review("refund", "Refund 80 EUR to order 7?", ["approve", "reject"]).await?;
    /// if decision.option == "approve" {
    ///     println!("{} has approved: {}", decision.by, decision.reason);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// [`Engine::reviews`]: crate::workflow::Engine::reviews
    /// [`Engine::review`]: crate::workflow::Engine::review
    pub fn review(
        &self,
        name: &str,
        question: &(impl Serialize + ?Sized),
        options: impl IntoIterator<Item = impl Into<String>>,
    ) -> Review<'_> {
        let question = self.run.text("the question of a review", question);
        let options = options.into_iter().map(Into::into).collect();
        Review { ctx: self, name: name.into(), question, options, takes: None, told: None }
    }
}

impl<'a> Review<'a> {
    /// Sets a time limit. Without a decision until then, the review is closed and the result is `None`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let review = ctx.review("refund", "Refund 80 EUR?", ["approve", "reject"]);
    /// match review.timeout(Duration::from_secs(3600)).await? {
    ///     Some(decision) => println!("{}", decision.option),
    ///     None => println!("not decided in time"),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn timeout(self, timeout: Duration) -> ReviewFor<'a> {
        ReviewFor { review: self, timeout }
    }

    /// Opens the review and continues, so that its id can be passed on before the code waits for it.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn mail(text: &str) -> std::io::Result<()> { Ok(()) }
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let review = ctx.review("refund", "Refund 80 EUR?", ["approve", "reject"]).open().await?;
    /// let id = review.id();
    /// ctx.run("ask", async || Ok(mail(&id).await?)).await?;
    /// let decision = review.decision().await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(self) -> Result<PendingReview, Failure> {
        self.opened(None).await
    }

    /// Calls `told` with the id when the review is opened for the first time, before the commit that opens it.
    pub(crate) fn telling(mut self, told: impl Fn(&str) + Send + Sync + 'static) -> Review<'a> {
        self.told = Some(Arc::new(told));
        self
    }

    /// Sets what the value of the decision has to fit.
    #[cfg(feature = "flow")]
    pub(crate) fn taking(mut self, takes: Option<ValueSchema>) -> Review<'a> {
        self.takes = takes;
        self
    }

    /// Opens the review, with or without a time limit.
    pub(crate) async fn open_for(self, timeout: Option<Duration>) -> Result<PendingReview, Failure> {
        self.opened(timeout).await
    }

    fn check(&self) -> Result<(), ReviewError> {
        let name = || self.name.clone();
        if !(1..=NAME_BYTES).contains(&self.name.len()) {
            return Err(ReviewError::Name { name: name() });
        }
        if !(1..=OPTIONS).contains(&self.options.len()) {
            return Err(ReviewError::Options { name: name(), count: self.options.len() });
        }
        let mut seen = BTreeSet::new();
        for option in &self.options {
            let reason = match option.len() {
                0 => "it is empty",
                length if length > NAME_BYTES => "it is longer than 256 bytes",
                _ if !seen.insert(option) => "it is listed twice",
                _ => continue,
            };
            return Err(ReviewError::Option { name: name(), option: option.clone(), reason: reason.into() });
        }
        Ok(())
    }

    async fn opened(self, timeout: Option<Duration>) -> Result<PendingReview, Failure> {
        self.check().map_err(|error| Failure::typed(error).not_retryable())?;
        let Review { ctx, name, question, options, takes, told } = self;
        let (name, question, options) = (&name, question?, &options);
        let timeout_us = timeout.map(|timeout| timeout.as_micros() as u64);
        let call = OpCall { kind: Kind::Review, name, argument: hash(&(&question, options, timeout_us)) };
        let again = |operation: &Journaled<'_>, text: &str| Ok((serde_json::from_str(text)?, operation.place.clone()));
        let opened = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            operation.unless_cancelled()?;
            let (run, place, opened) = (&ctx.run, operation.place.clone(), operation.since());
            let token = run.env().uuid();
            let until_us = timeout.map(|timeout| opened.plus(timeout).0);
            let record = ReviewRecord {
                workflow: run.definition.name.clone(),
                name: name.clone(),
                question,
                options: options.clone(),
                opened_us: opened.0,
                until_us,
                place: place.clone(),
                decision: None,
                takes: takes.as_ref().map(|takes| json::to_value(takes).unwrap_or_default().to_string()),
            };
            let part = Part::default().put(&run.kept().review(token, name), record.encode());
            let part = part.put(&run.review_key(name, token), Vec::new());
            run.with(|state| state.known.open_review());
            operation.done_with(&(token, until_us), Some(part.into()));
            told.iter().for_each(|told| told(&format!("{token}/{}", run.id)));
            // A branch that is given up while the commit is in flight closes the review, too.
            run.with(|state| state.reviews.open(&place, run.review_key(name, token)));
            // If the execution ended before this commit, its end would have to take the review back.
            let _ = operation.doing.flush().await;
            Ok(((token, until_us), place))
        });
        let ((token, until_us), place): ((Uuid, Option<u64>), Place) = opened.await?;
        let key = ctx.run.review_key(name, token);
        ctx.run.with(|state| state.reviews.open(&place, key));
        let until = until_us.map(Timestamp);
        Ok(PendingReview { ctx: ctx.clone(), name: name.clone(), token, until, place })
    }
}

impl ReviewFor<'_> {
    /// Opens the review and continues. The time limit counts from now on.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let review = ctx.review("refund", "Refund 80 EUR?", ["approve", "reject"]);
    /// let review = review.timeout(Duration::from_secs(3600)).open().await?;
    /// let decision = review.decision().await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(self) -> Result<PendingReview, Failure> {
        self.review.opened(Some(self.timeout)).await
    }
}

impl<'a> IntoFuture for Review<'a> {
    type Output = Result<Decision, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.open().await?.decision().await?.ok_or_else(Failure::time) })
    }
}

impl<'a> IntoFuture for ReviewFor<'a> {
    type Output = Result<Option<Decision>, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.open().await?.decision().await })
    }
}

impl PendingReview {
    /// Its id, for [`Engine::review`](crate::workflow::Engine::review).
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, PendingReview};
    /// # async fn example(review: PendingReview) -> Result<(), Failure> {
    /// println!("please decide {}", review.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> String {
        format!("{}/{}", self.token, self.ctx.run.id)
    }

    /// Waits until the review is decided. Returns `None` if its time is up before that.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, PendingReview};
    /// # async fn example(review: PendingReview) -> Result<(), Failure> {
    /// if let Some(decision) = review.decision().await? {
    ///     println!("{} has decided: {}", decision.by, decision.option);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn decision(self) -> Result<Option<Decision>, Failure> {
        self.answer().await
    }

    /// The same for a decision with a value, which another layer has stored.
    pub(crate) async fn answer<T: DeserializeOwned>(self) -> Result<Option<T>, Failure> {
        let (ctx, what) = (&self.ctx, WaitsFor::Review(self.name.clone()));
        let call = OpCall { kind: Kind::Decision, name: &self.name, argument: 0 };
        let decided = ctx.replay(what, call, |operation| self.wait(operation));
        let decided = decided.await;
        ctx.run.with(|state| state.reviews.decided(&self.place));
        match decided {
            Err(failure) if failure.is_time() => Ok(None),
            decided => decided.map(Some),
        }
    }

    async fn wait<T: DeserializeOwned>(&self, mut operation: Journaled<'_>) -> Result<T, Failure> {
        let (run, doing, since) = (&self.ctx.run, operation.doing.clone(), operation.since());
        run.effect().await;
        run.ensure_inbox().await;
        if let Some(until) = self.until.filter(|_| operation.is_new) {
            operation.put(EntryState::Until(until.0));
        }
        let its = self.token.as_u128();
        let is_it = |body: &MessageBody| matches!(body, MessageBody::Completed { token, .. } if *token == its);
        let look = |state: &mut RunState| match state.is_full() && state.inbox.holds(is_it) {
            true => Some(None),
            false => state.inbox.take(is_it).map(Some),
        };
        let Received { address, message } = loop {
            let gave = match doing.wait(WaitsFor::Review(self.name.clone()), since, self.until, look).await {
                WaitEnd::Got(Some(received)) => break received,
                WaitEnd::Got(None) => {
                    let _ = doing.flush().await;
                    continue;
                }
                WaitEnd::TimedOut => Failure::time(),
                WaitEnd::Cancelled => run.why_cancelled(&operation.place),
            };
            if self.close(&operation, &gave).await {
                return Err(gave);
            }
        };
        let received = message.body.text();
        let state = received.clone().map_or_else(EntryState::Gave, EntryState::Done);
        operation.ends(state, Some(OpEffect::receipt(address)));
        match received {
            Ok(text) => Ok(operation.fits(serde_json::from_str(&text)).await),
            Err(text) => Err(read_failure(&text)),
        }
    }

    /// Closes a review that the code no longer waits for. Returns whether it is closed. If it was decided at the same
    /// time, the decision is among the messages.
    async fn close(&self, operation: &Journaled<'_>, gave: &Failure) -> bool {
        let (run, doing) = (&self.ctx.run, &operation.doing);
        let key = run.review_key(&self.name, self.token);
        let part = Part::default().check(OPEN, Check::Present(key.clone())).delete(&key);
        let state = EntryState::Gave(failure_text(gave));
        operation.ends(state.clone(), Some(OpEffect { op: doing.op, ..part.into() }));
        if doing.flush().await.is_ok() {
            return true;
        }
        let record = run.kept().review(self.token, &self.name);
        let found = run.or_stop(run.engine.get(&record).await).await;
        let decided = found.and_then(|item| ReviewRecord::decode(&item.value).ok()).and_then(|it| it.decision);
        if decided.is_none() {
            operation.ends(state, None);
            return true;
        }
        match run.read_inbox().await {
            Ok(()) => false,
            Err(stop) => run.stop_for(stop).await,
        }
    }
}

impl std::fmt::Debug for Review<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Review").field("name", &self.name).finish_non_exhaustive()
    }
}

shown!(PendingReview, it => id: it.id());

impl Run {
    /// The key of an open review of this execution.
    fn review_key(&self, name: &str, token: Uuid) -> Key {
        self.engine.open_reviews().key(review_key(&self.definition.name, name, token, &self.id))
    }

    /// Closes the reviews of branches that were dropped and have not run since the execution was loaded again: their
    /// code does not run, so it cannot report the reviews.
    pub(crate) async fn close_lost_reviews(self: &Arc<Run>, is_lost: &(impl Fn(&BranchPath) -> bool + Send + Sync)) {
        if self.engine.rehearsal.is_replay() || !self.with(|state| state.known.has_reviews()) {
            return;
        }
        let view = self.or_stop(self.engine.store.view().await).await;
        let kept = self.kept();
        let found = self.or_stop(view.scan(&kept.reviews(), Order::Ascending, usize::MAX).await).await;
        for (key, item) in found {
            let place = ReviewRecord::decode(&item.value).ok().map(|record| record.place);
            let is_lost = place.is_some_and(|place| is_lost(&place.branch));
            let Some((token, name)) = kept.read_review(&key).filter(|_| is_lost) else { continue };
            let open = self.review_key(name, token);
            if self.or_stop(view.get(&open).await).await.is_some() {
                self.with(|state| state.close_review(open));
            }
        }
    }
}

impl EngineInner {
    /// The space of open reviews.
    pub(crate) fn open_reviews(&self) -> &Space {
        self.spaces.reviews.as_ref().expect("an engine declares all spaces when it starts")
    }

    /// The parts that close an execution's reviews when it ends or continues as new. Continue-as-new also deletes their
    /// records.
    pub(crate) async fn closing_reviews(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        workflow: &str,
        is_end: bool,
        how: How,
    ) -> Result<Vec<Part>> {
        let kept = self.kept(id);
        let found = self.store.view().await?.scan(&kept.reviews(), Order::Ascending, usize::MAX).await?;
        let mut parts = Vec::new();
        for some in found.chunks(CLOSED_AT_ONCE / 2) {
            let mut part = Part::default();
            for (key, _) in some {
                if let Some((token, name)) = kept.read_review(key) {
                    part = part.delete(&self.open_reviews().key(review_key(workflow, name, token, id)));
                }
                if !is_end {
                    part = part.delete(key);
                }
            }
            parts.push(part);
        }
        if !how.is_large {
            return Ok(parts);
        }
        for part in parts {
            self.perform(part).await?;
        }
        Ok(Vec::new())
    }
}
