//! A stream of what happens to an execution: its events as they are recorded, and its status. The library tells of the
//! end of an execution and of its values, and not of its events, so this looks at the store when it has changed.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use latchwork::Cursor;
use latchwork::store::{Generation, Timestamp};
use latchwork::workflow::{Description, Operation, OperationState};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::api::Namespace;
use crate::wire::answers::NoSuchExecution;
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{PathParams, QueryParams};
use crate::wire::sse::{SseEvent, position, sse_answer};
use crate::wire::workflow::StandingWire;
use crate::wire::workflow::event::{EventWire, place};

/// How many operations are read at once.
const READ: usize = 200;
/// The pause between two looks: the shortest, and the longest while nothing changes.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Where a stream continues.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FollowQuery {
    /// Continues at this event, for clients that cannot set `Last-Event-ID`.
    after: Option<u64>,
}

/// Streams the events and the status of an execution, as server-sent events.
///
/// An event of type `event` is an operation in its present state; one of type `status` tells where the execution
/// stands. The stream ends after the status of an execution that has ended. The `id` of an event is the time of its
/// commit in microseconds: events of that time are sent again to a client that continues there, which knows them by
/// `place` and `recorded_at`. States of an operation that follow each other quickly may be told as one.
#[utoipa::path(
    get,
    path = "/workflows/{id}/events",
    params(
        ("id" = String, Path),
        FollowQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "Continues at this event."),
    ),
    responses(
        (status = 200, description = "The stream.", body = String, content_type = "text/event-stream"),
        (status = 204, description = "The execution has ended, and the client knows its end."),
        (status = 400, description = "The position does not exist yet.", body = ProblemShape,
            content_type = "application/problem+json"),
        NoSuchExecution,
    )
)]
pub(super) async fn follow_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(FollowQuery { after }): QueryParams<FollowQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let position = position(&headers, after)?;
    let found = namespace.engine().describe(id.as_str()).await?;
    let latest = namespace.env().now().max(found.changed);
    if position.is_some_and(|position| position > latest.0) {
        let detail = "no event has this id: it is a time in the future";
        return Err(Problem::new(ProblemCode::FutureEvent, detail).with("latest_us", latest.0));
    }
    if found.status().is_end() && position.is_some_and(|position| position >= found.changed.0) {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let follower = Follower::new(namespace.clone(), id, position.unwrap_or_default());
    Ok(sse_answer(&namespace, stream::unfold(follower, Follower::next)))
}

/// What a stream knows of its execution.
struct Follower {
    namespace: Namespace,
    id: String,
    /// The client knows what was recorded before this time.
    from: Timestamp,
    /// The run whose operations are followed: each run has operations of its own.
    run: u32,
    /// Where the first page begins that may still change.
    open: Option<Cursor>,
    /// When the operations on the pages that may change were recorded, as the client knows them.
    told: BTreeMap<String, Timestamp>,
    standing: Option<StandingWire>,
    /// The generation of the store at the last look.
    looked: Option<Generation>,
    ready: VecDeque<SseEvent>,
    has_ended: bool,
}

/// The operations that were recorded since the last look.
#[derive(Default)]
struct News {
    operations: Vec<Operation>,
    /// Everything that was recorded before this time is among them, or was told before.
    complete_to: Timestamp,
}

impl Follower {
    fn new(namespace: Namespace, id: String, from: u64) -> Follower {
        Follower {
            namespace,
            id,
            from: Timestamp(from),
            run: 0,
            open: None,
            told: BTreeMap::new(),
            standing: None,
            looked: None,
            ready: VecDeque::new(),
            has_ended: false,
        }
    }

    /// The next event, and the follower after it.
    async fn next(mut self) -> Option<(Result<SseEvent, Problem>, Follower)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some((Ok(event), self));
            }
            if self.has_ended {
                return None;
            }
            if let Err(problem) = self.look().await {
                self.has_ended = true;
                return Some((Err(problem), self));
            }
        }
    }

    /// Waits until the store has changed, and looks at the execution.
    async fn look(&mut self) -> Result<(), Problem> {
        let store = self.namespace.engine().store().clone();
        let mut pause = PAUSE;
        let generation = loop {
            match (store.generation().await?, self.looked) {
                (now, Some(before)) if now == before => {
                    self.namespace.env().sleep(pause).await;
                    pause = LONGEST_PAUSE.min(pause * 2);
                }
                (now, Some(_)) => {
                    // Commits that follow each other quickly are read together.
                    self.namespace.env().sleep(PAUSE).await;
                    break now;
                }
                (now, None) => break now,
            }
        };
        self.looked = Some(generation);
        let found = self.namespace.engine().describe(self.id.as_str()).await?;
        if found.run != self.run {
            (self.run, self.open) = (found.run, None);
            self.told.clear();
        }
        let news = self.news(&found).await?;
        self.tell(&found, news);
        Ok(())
    }

    /// Reads the operations from the first page that may still change.
    async fn news(&mut self, found: &Description) -> Result<News, Problem> {
        let now = self.namespace.env().now();
        let mut news = News { complete_to: self.from.max(found.changed), ..News::default() };
        let (mut after, mut is_first, mut is_settled) = (self.open.clone(), true, true);
        loop {
            let page = self.namespace.engine().operations(self.id.as_str()).limit(READ).after(after.take()).await?;
            if is_first {
                // What this view does not show is recorded at its latest time at the earliest.
                let latest = page.items.iter().map(|operation| operation.recorded).max();
                news.complete_to = news.complete_to.max(latest.unwrap_or_default());
            }
            is_first = false;
            // New operations of the function itself come before those of its branches.
            is_settled &= page.items.iter().all(|it| it.branch.is_empty() && is_settled_at(it, now));
            let places: Vec<String> = page.items.iter().map(place).collect();
            for (place, operation) in places.iter().zip(page.items) {
                let is_known = self.told.insert(place.clone(), operation.recorded) == Some(operation.recorded);
                if !is_known && operation.recorded >= self.from {
                    news.operations.push(operation);
                }
            }
            let Some(next) = page.next else { break };
            if is_settled {
                self.told.retain(|place, _| !places.contains(place));
                self.open = Some(next.clone());
            }
            after = Some(next);
        }
        news.operations.sort_by_key(|operation| operation.recorded);
        Ok(news)
    }

    /// Queues the events, and the status after them if it has changed.
    fn tell(&mut self, found: &Description, news: News) {
        let standing = StandingWire::from(found);
        self.has_ended = found.status().is_end();
        // Only the status of an execution that has ended has the time of the end as its position: a client that knows
        // this position knows everything.
        let most = if self.has_ended { found.changed.0.saturating_sub(1) } else { news.complete_to.0 };
        for operation in &news.operations {
            let position = operation.recorded.min(news.complete_to).0.min(most);
            let data = serde_json::to_value(EventWire::from(operation)).unwrap_or_default();
            self.ready.push_back(SseEvent { position, name: Some("event".into()), data });
        }
        if self.standing.as_ref() != Some(&standing) {
            let data = serde_json::to_value(&standing).unwrap_or_default();
            let position = if self.has_ended { found.changed.0 } else { news.complete_to.0 };
            self.ready.push_back(SseEvent { position, name: Some("status".into()), data });
            self.standing = Some(standing);
        }
    }
}

/// True if the record of an operation does not change any more.
fn is_settled_at(operation: &Operation, now: Timestamp) -> bool {
    match &operation.state {
        OperationState::Done(_) | OperationState::Failed(_) | OperationState::Saw { .. } => true,
        OperationState::Until(until) => *until <= now,
        _ => false,
    }
}
