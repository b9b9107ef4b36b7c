//! Executions of workflows over HTTP: the group, starts, and the lists. Messages, operators' requests, waits and
//! streams have files of their own.

mod follow;
mod messages;
mod read;
mod steer;
#[cfg(test)]
pub(crate) mod tests;
mod why;

use std::time::Duration;

use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderValue, StatusCode, Uri};
use axum::response::Response;
use latchwork::Value;
use latchwork::workflow::{Handle, WorkflowError};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::routes::entities::encoded;
use crate::spans;
use crate::wire::page::{PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer, json_answer_at};
use crate::wire::wait::{WaitQuery, asked, within};
use crate::wire::workflow::ask::{NewExecution, call_tag};
use crate::wire::workflow::list::{ListOrder, ListQuery};
use crate::wire::workflow::{LimitWire, ListedWire, StandingWire, StartedWire};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "workflows")
        .reads(routes!(list_executions))
        .reads(routes!(read::get_execution))
        .reads(routes!(read::execution_history))
        .reads(routes!(read::export_history))
        .reads(routes!(read::execution_result))
        .reads(routes!(read::published_values))
        .reads(routes!(read::published_value))
        .reads(routes!(follow::follow_execution))
        .reads(routes!(why::why_execution))
        .reads(routes!(limit_use))
        .changes(Role::Operate, routes!(start_execution))
        .changes(Role::Operate, routes!(messages::signal_execution))
        .changes(Role::Operate, routes!(messages::update_execution))
        .changes(Role::Operate, routes!(steer::cancel_execution))
        .changes(Role::Operate, routes!(steer::terminate_execution))
        .changes(Role::Operate, routes!(steer::resume_execution))
        .changes(Role::Operate, routes!(steer::retry_execution))
        .changes(Role::Operate, routes!(steer::fork_execution))
}

/// Starts an execution, or joins one.
///
/// When it is answered, the execution is stored and survives any crash. With `wait`, the answer also has the result, if
/// there is one by then. Under an `Idempotency-Key`, the same answer is given again, also if it has no result.
#[utoipa::path(
    post,
    path = "/workflows",
    params(WaitQuery),
    request_body = NewExecution,
    responses(
        (status = 201, description = "It was started or joined.", body = StartedWire, headers(("Location" = String))),
        (status = 404, description = "No workflow of this name is registered.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 409, description = "The id is taken, or the key was used for another input.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 429, description = "The limits of the workflow do not admit it now.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn start_execution(
    State(namespace): State<Namespace>,
    call: Call,
    QueryParams(WaitQuery { wait }): QueryParams<WaitQuery>,
    JsonBody(new): JsonBody<NewExecution>,
) -> Result<Response, Problem> {
    let wait = asked(&namespace, wait.as_deref())?;
    let workflow = new.workflow.clone();
    // The library's idempotency key of the start is the call, or the key that the client gives: the next attempt joins
    // what this one has started. A start that supersedes can have no such key; it has a tag instead, by which the next
    // attempt finds that it has taken the place.
    still_kept(&namespace, &call, &new.workflow)?;
    let started = match has_superseded(&namespace, &call, &new).await? {
        true => namespace.engine().handle_by_id(new.id.unwrap_or_default()),
        false => new.into_start(namespace.engine(), call.id())?.await?,
    };
    spans::link_to_execution(namespace.engine(), started.id());
    let result = match wait {
        Some(wait) => result_of(&namespace, &started, &workflow, wait).await?,
        None => None,
    };
    let location = HeaderValue::try_from(format!("workflows/{}", encoded(started.id())));
    let mut answer = json_answer_at(StatusCode::CREATED, &StartedWire::new(&started, result));
    if let Ok(location) = location {
        answer.headers_mut().insert(LOCATION, location);
    }
    Ok(answer)
}

/// How an execution has ended, if it does within this time.
async fn result_of(
    namespace: &Namespace,
    started: &Handle<Value>,
    workflow: &str,
    wait: Duration,
) -> Result<Option<StandingWire>, Problem> {
    match within(namespace, wait, started.result()).await {
        None => Ok(None),
        Some(Ok(output)) => Ok(Some(StandingWire::completed(started.id(), workflow, output))),
        Some(Err(error)) if is_end(&error) => {
            let found = namespace.engine().describe(started.id().clone()).await?;
            Ok(found.status().is_end().then(|| StandingWire::from(&found)))
        }
        Some(Err(error)) => Err(error.into()),
    }
}

/// True if the error tells what has become of an execution that was waited for: the execution itself tells more.
fn is_end(error: &WorkflowError) -> bool {
    use WorkflowError::{Cancelled, Failed, Parked, TimedOut};

    matches!(error, Failed { .. } | TimedOut { .. } | Cancelled { .. } | Parked { .. })
}

/// Fails if the execution that an earlier attempt may have started could have ended and been removed since then: no
/// trace of it would be left, and it must not be started twice.
pub(crate) fn still_kept(namespace: &Namespace, call: &Call, workflow: &str) -> Result<(), Problem> {
    let (Some(began), Some(kept)) = (call.repeated_from(), namespace.engine().keeps(workflow)) else { return Ok(()) };
    if began.plus(kept) > namespace.env().now() {
        return Ok(());
    }
    let detail = "the first request was cut off, and an execution that it has started may have been removed since then";
    Err(Problem::new(ProblemCode::OutcomeUnknown, detail).with("workflow", workflow))
}

/// True if an earlier attempt at the call has started the execution that takes the place of another.
async fn has_superseded(namespace: &Namespace, call: &Call, new: &NewExecution) -> Result<bool, Problem> {
    let (Some(_), Some(call), Some(id)) = (call.repeated_since(), call.id(), new.superseded()) else {
        return Ok(false);
    };
    match namespace.engine().describe(id).await {
        Ok(found) => Ok(found.tags.contains(&call_tag(call))),
        Err(WorkflowError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Lists executions by their status, their waits and their labels.
///
/// If the filters select few of many executions, a page may have fewer items than requested although there are more:
/// its `next` tells.
#[utoipa::path(
    get,
    path = "/workflows",
    params(ListQuery),
    responses((status = 200, description = "A page of executions.", body = PageWire<ListedWire>))
)]
async fn list_executions(
    State(namespace): State<Namespace>,
    QueryParams(given): QueryParams<Vec<(String, String)>>,
    uri: Uri,
) -> Result<Response, Problem> {
    let query = ListQuery::read(given)?;
    let (page, list) = (query.page(), namespace.engine().list(query.filter(namespace.env().now())?));
    let list = match query.order()? {
        None => list,
        Some(ListOrder::Ascending) => list.ascending(),
        Some(ListOrder::Descending) => list.descending(),
    };
    let found = list.limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, ListedWire::from))
}

/// Which limit of a workflow is meant.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LimitQuery {
    /// The key of the limit. Without one, the limit of the workflow as a whole is meant.
    key: Option<String>,
}

/// Tells how much of a limit is used.
#[utoipa::path(
    get,
    path = "/workflow-limits/{name}",
    params(("name" = String, Path, description = "The name of the workflow."), LimitQuery),
    responses((status = 200, description = "The use of the limit.", body = LimitWire))
)]
async fn limit_use(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(LimitQuery { key }): QueryParams<LimitQuery>,
) -> Result<Response, Problem> {
    let found = namespace.engine().limit_use(&name, key.as_deref()).await?;
    Ok(json_answer(&LimitWire::new(name, key, found)))
}
