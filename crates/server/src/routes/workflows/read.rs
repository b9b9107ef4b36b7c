//! Reading executions over HTTP: their details, histories, results and published values.

use axum::extract::State;
use axum::http::header::RETRY_AFTER;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use latchwork::workflow::{Engine, ExecutionState, History, Operation, WorkflowError};
use latchwork::{Cursor, Value};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::api::Namespace;
use crate::routes::workflows::is_end;
use crate::wire::answers::NoSuchExecution;
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{PathParams, QueryParams, json_answer, json_answer_at, parse};
use crate::wire::wait::{asked, within};
use crate::wire::workflow::event::EventWire;
use crate::wire::workflow::{ExecutionWire, PublishedWire, StandingWire};

/// How many operations are read at once.
const READ: usize = 1000;
/// The number of events that are shown, by default and at most.
const SHOWN: usize = 10;
const MOST_SHOWN: usize = 1000;

/// How much of an execution is shown.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExecutionQuery {
    /// How many of the last events: 0 to 1000, by default 10. With 0, the history is not read.
    #[param(maximum = 1000)]
    events: Option<usize>,
}

/// Shows an execution with all its details.
#[utoipa::path(
    get,
    path = "/workflows/{id}",
    params(("id" = String, Path, description = "The id, with its special characters encoded."), ExecutionQuery),
    responses(
        (status = 200, description = "The execution.", body = ExecutionWire),
        NoSuchExecution,
    )
)]
pub(super) async fn get_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(ExecutionQuery { events }): QueryParams<ExecutionQuery>,
) -> Result<Response, Problem> {
    let most = events.unwrap_or(SHOWN);
    if most > MOST_SHOWN {
        let detail = format!("at most {MOST_SHOWN} events are shown; the history has all");
        return Err(Problem::new(ProblemCode::InvalidQuery, detail));
    }
    let found = namespace.engine().describe(id.as_str()).await?;
    let (last, count) = match most {
        0 => (Vec::new(), None),
        most => {
            let (last, count) = last(namespace.engine(), &id, most).await?;
            (last, Some(count))
        }
    };
    Ok(json_answer(&ExecutionWire::new(found, count, last.iter().map(EventWire::from).collect())))
}

/// The operations that were recorded last, oldest first, and the number of all.
async fn last(engine: &Engine, id: &str, most: usize) -> Result<(Vec<Operation>, usize), Problem> {
    let (mut last, mut count, mut after): (Vec<Operation>, usize, Option<Cursor>) = (Vec::new(), 0, None);
    loop {
        let page = engine.operations(id).limit(READ).after(after.take()).await?;
        count += page.items.len();
        last.extend(page.items);
        last.sort_by_key(|operation| operation.recorded);
        last.drain(..last.len().saturating_sub(most));
        after = page.next;
        if after.is_none() {
            return Ok((last, count));
        }
    }
}

/// Lists the events of an execution.
///
/// First those of the function itself, in the order of the code, then those of its branches.
#[utoipa::path(
    get,
    path = "/workflows/{id}/history",
    params(("id" = String, Path), PageQuery),
    responses(
        (status = 200, description = "A page of events.", body = PageWire<EventWire>),
        NoSuchExecution,
    )
)]
pub(super) async fn execution_history(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let found = namespace.engine().operations(id).limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, |operation| EventWire::from(&operation)))
}

/// Exports the whole history of an execution, for checking new code against it.
///
/// This is the JSON that `latch workflow history` writes to files, and that the library's replay test reads.
#[utoipa::path(
    get,
    path = "/workflows/{id}/history/export",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "The history.", body = Value),
        NoSuchExecution,
    )
)]
pub(super) async fn export_history(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
) -> Result<Response, Problem> {
    let found = History::of(namespace.engine().store(), id.as_str()).await?;
    let found = found.ok_or_else(|| WorkflowError::NotFound { id: id.into() })?;
    Ok(json_answer(&found))
}

/// How long a result is waited for.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ResultQuery {
    /// Waits for the end at most this long, such as `30s`; at most 60 s. Without it, the answer comes at once.
    wait: Option<String>,
    /// Waits also while the execution is parked, for an operator to resume it.
    #[serde(default)]
    #[param(required = false)]
    through_parks: bool,
    /// The number of an input in a batch, whose output is asked for.
    item: Option<u32>,
}

/// Waits for the result of an execution.
///
/// A workflow that has failed has a result, too: `status` tells, and `failure` says why.
#[utoipa::path(
    get,
    path = "/workflows/{id}/result",
    params(("id" = String, Path), ResultQuery),
    responses(
        (status = 200, description = "It has ended: completed, failed, timed out or cancelled.", body = StandingWire),
        (status = 202, description = "It has not ended yet, or it is parked.", body = StandingWire,
            headers(("Retry-After" = u64))),
        NoSuchExecution,
    )
)]
pub(super) async fn execution_result(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(ResultQuery { wait, through_parks, item }): QueryParams<ResultQuery>,
) -> Result<Response, Problem> {
    let engine = namespace.engine();
    if let Some(wait) = asked(&namespace, wait.as_deref())? {
        let handle = engine.handle_by_id(id.as_str());
        let ended = async {
            match through_parks {
                true => handle.result_through_parks().await,
                false => handle.result().await,
            }
        };
        match within(&namespace, wait, ended).await {
            Some(Err(error)) if !is_end(&error) => return Err(error.into()),
            // The execution has more than the output.
            _ => {}
        }
    }
    let mut found = engine.describe(id.as_str()).await?;
    if let (Some(item), ExecutionState::Completed(output)) = (item, &mut found.state) {
        *output = item_of(&id, output, item)?;
    }
    standing_answer(&StandingWire::from(&found), found.status().is_end())
}

/// The output of one input of a batch.
fn item_of(id: &str, output: &mut Value, item: u32) -> Result<Value, Problem> {
    let found = output.get_mut(item as usize).map(Value::take);
    let missing = || Problem::new(ProblemCode::NotFound, format!("execution {id:?} has no output {item}"));
    found.ok_or_else(|| missing().with("id", id).with("item", item))
}

fn standing_answer(standing: &StandingWire, has_ended: bool) -> Result<Response, Problem> {
    match has_ended {
        true => Ok(json_answer(standing)),
        false => Ok(([(RETRY_AFTER, "1")], json_answer_at(StatusCode::ACCEPTED, standing)).into_response()),
    }
}

/// Shows the values that an execution has published, by their names.
#[utoipa::path(
    get,
    path = "/workflows/{id}/published",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "The values.", body = latchwork::Map<String, Value>),
        NoSuchExecution,
    )
)]
pub(super) async fn published_values(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
) -> Result<Response, Problem> {
    Ok(json_answer(&namespace.engine().describe(id).await?.published))
}

/// Which value is waited for.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PublishedQuery {
    /// Waits for a value at most this long, such as `30s`; at most 60 s. Without it, the answer comes at once.
    wait: Option<String>,
    /// Waits for another value than this one, which is JSON.
    other_than: Option<String>,
}

/// Reads a value that an execution has published.
#[utoipa::path(
    get,
    path = "/workflows/{id}/published/{name}",
    params(("id" = String, Path), ("name" = String, Path), PublishedQuery),
    responses(
        (status = 200, description = "The value.", body = PublishedWire),
        (status = 202, description = "There was no such value in time.", body = StandingWire,
            headers(("Retry-After" = u64))),
        (status = 404, description = "There is no such execution, or it has published no such value so far.",
            body = ProblemShape, content_type = "application/problem+json"),
        (status = 409, description = "The execution has ended without such a value.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn published_value(
    State(namespace): State<Namespace>,
    PathParams((id, name)): PathParams<(String, String)>,
    QueryParams(PublishedQuery { wait, other_than }): QueryParams<PublishedQuery>,
) -> Result<Response, Problem> {
    let engine = namespace.engine();
    let known: Option<Value> = match other_than {
        Some(text) => Some(parse(text.as_bytes(), namespace.limits().json_depth).map_err(|problem| {
            Problem::new(ProblemCode::InvalidQuery, format!("other_than is JSON: {}", problem.detail()))
        })?),
        None => None,
    };
    let Some(wait) = asked(&namespace, wait.as_deref())? else {
        let value = engine.query::<Value>(id.as_str(), &name).await?;
        let missing = || Problem::new(ProblemCode::NotFound, format!("execution {id:?} has published no {name:?}"));
        let value = value.ok_or_else(|| missing().with("id", &id).with("name", &name))?;
        return Ok(json_answer(&PublishedWire { name, value }));
    };
    let handle = engine.handle_by_id(id.as_str());
    let published = handle.wait_until(&name, |value: &Value| known.as_ref() != Some(value));
    match within(&namespace, wait, published).await {
        Some(value) => Ok(json_answer(&PublishedWire { value: value?, name })),
        None => standing_answer(&StandingWire::from(&engine.describe(id.as_str()).await?), false),
    }
}
