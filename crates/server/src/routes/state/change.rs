//! Changes of containers and slots by a call. The library keeps the answer of each change under the id of the call, in
//! the commit of the change itself, for as long as the server keeps the call. So an attempt that follows a crash gets
//! the answer of the attempt that took effect.

use axum::http::header::ETAG;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use latchwork::Value;
use latchwork::state::{Changed, Container, MutationError, StateError};
use latchwork::store::Rev;

use crate::api::Namespace;
use crate::calls::Call;
use crate::wire::etag::{Condition, Tags, etag};
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::json_answer_at;
use crate::wire::state::{ChangedWire, FenceQuery, missing, no_match};

/// A container that a call changes.
pub(super) struct StateChange<'a> {
    container: Container,
    call: &'a Call,
}

/// The state does not exist.
struct Absent;

impl StateChange<'_> {
    pub(super) fn new<'a>(
        namespace: &Namespace,
        container: Container,
        call: &'a Call,
        fence: &FenceQuery,
    ) -> Result<StateChange<'a>, Problem> {
        let container = match (&fence.lock, fence.token) {
            (None, None) => container,
            (Some(lock), Some(token)) => {
                let is_named = (1..=256).contains(&lock.len());
                let wrong = || Problem::new(ProblemCode::InvalidQuery, "the name of a lock has 1 to 256 bytes");
                let token = is_named.then(|| namespace.engine().locks().token(lock.as_str(), token));
                container.guard(&token.ok_or_else(wrong)?)
            }
            _ => return Err(Problem::new(ProblemCode::InvalidQuery, "lock and token belong together")),
        };
        let container = match call.id() {
            Some(id) => container.once(id.to_string()),
            None => container,
        };
        Ok(StateChange { container, call })
    }

    /// Replaces the state, or creates it.
    pub(super) async fn put(&self, headers: &HeaderMap, state: Value) -> Result<Response, Problem> {
        let (status, changed) = match Condition::of(headers)? {
            Condition::Absent => {
                let created = self.container.clone().if_absent().set_state(state).await;
                (StatusCode::CREATED, created.map_err(precondition_failed)?)
            }
            Condition::Matches(Tags::Any) => {
                let put = self.existing(Some(state)).await?;
                (StatusCode::OK, put.ok_or_else(|| self.no_match(Rev::default()))?)
            }
            Condition::Matches(tags) => {
                (StatusCode::OK, self.at_revs(&tags, |container| container.set_state(&state)).await?)
            }
        };
        let tag = etag(changed.rev);
        Ok(([(ETAG, tag)], json_answer_at(status, &ChangedWire::bare(&changed))).into_response())
    }

    /// Removes the state.
    pub(super) async fn remove(&self, headers: &HeaderMap) -> Result<Response, Problem> {
        let changed = match Condition::of_existing(headers)? {
            Tags::Any => self.existing(None).await?.ok_or_else(|| missing(self.container.name(), Rev::default()))?,
            tags => self.at_revs(&tags, |container| container.delete_state()).await?,
        };
        Ok(json_answer_at(StatusCode::OK, &ChangedWire::bare(&changed)))
    }

    /// Carries out an operation that needs no condition, because operations of several callers do not undo each other.
    pub(super) async fn operate<Fut>(
        &self,
        headers: &HeaderMap,
        operation: impl Fn(Container) -> Fut,
    ) -> Result<Response, Problem>
    where
        Fut: Future<Output = Result<Changed, StateError>>,
    {
        let (changed, is_conditional) = match Condition::if_any(headers)? {
            None => (operation(self.container.clone()).await?, false),
            Some(Condition::Absent) => {
                (operation(self.container.clone().if_absent()).await.map_err(precondition_failed)?, true)
            }
            Some(Condition::Matches(Tags::Any)) => {
                let detail = "an operation takes the revs that it expects, If-Match: \"r42\", or no condition";
                return Err(Problem::new(ProblemCode::InvalidHeader, detail));
            }
            Some(Condition::Matches(tags)) => (self.at_revs(&tags, operation).await?, true),
        };
        let rev = changed.rev;
        let answer = json_answer_at(StatusCode::OK, &ChangedWire::with_value(changed));
        // Without a condition, the commit may hold changes of others, which the client has not seen.
        Ok(if is_conditional { ([(ETAG, etag(rev))], answer).into_response() } else { answer })
    }

    /// Replaces or removes a state that exists, whatever its rev. `None` if it does not exist.
    async fn existing(&self, after: Option<Value>) -> Result<Option<Changed>, Problem> {
        // An earlier attempt may have changed a state that another caller has removed since then.
        if self.call.repeated_since().is_none() && self.container.read().await?.1 == Rev::default() {
            return Ok(None);
        }
        // A mutator, because the kept answer of a change at a rev could only be found by that rev.
        let changed = self.container.atomic_state(move |state| {
            let after = state.map(|_| after.clone()).ok_or(Absent);
            std::future::ready(after)
        });
        match changed.await {
            Ok(changed) => Ok(Some(changed)),
            Err(MutationError::Refused(Absent)) => Ok(None),
            Err(MutationError::State(error)) => Err(error.into()),
        }
    }

    /// Changes the state if it is at one of these revs.
    async fn at_revs<Fut>(&self, tags: &Tags, operation: impl Fn(Container) -> Fut) -> Result<Changed, Problem>
    where
        Fut: Future<Output = Result<Changed, StateError>>,
    {
        let mut last = None;
        let expected: Vec<Rev> = match (tags.single(), self.call.repeated_since()) {
            (Some(rev), _) => vec![rev],
            // One of them is that at which an earlier attempt has changed it: only under that rev is its answer found.
            (None, Some(_)) => tags.revs().collect(),
            (None, None) => {
                let rev = self.container.read().await?.1;
                last = Some(rev);
                tags.revs().filter(|tag| *tag == rev).take(1).collect()
            }
        };
        for rev in expected {
            match operation(self.container.clone().if_rev(rev)).await {
                Ok(changed) => return Ok(changed),
                Err(StateError::RevisionConflict { actual, .. }) => last = Some(actual),
                Err(StateError::OnceReused { .. }) if self.call.repeated_since().is_some() => {}
                Err(error) => return Err(error.into()),
            }
        }
        let last = match last {
            Some(last) => last,
            None => self.container.read().await?.1,
        };
        Err(self.no_match(last))
    }

    fn no_match(&self, actual: Rev) -> Problem {
        no_match(self.container.name(), actual).at_status(StatusCode::PRECONDITION_FAILED)
    }
}

/// The problem of a change whose condition was a header.
fn precondition_failed(error: StateError) -> Problem {
    let is_condition = matches!(error, StateError::RevisionConflict { .. } | StateError::AlreadyExists { .. });
    let problem = Problem::from(error);
    if is_condition { problem.at_status(StatusCode::PRECONDITION_FAILED) } else { problem }
}
