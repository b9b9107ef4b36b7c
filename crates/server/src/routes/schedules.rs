//! Schedules over HTTP.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use latchwork::workflow::{ScheduleError, Schedules, WorkflowError};
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::wire::answers::NoSuchSchedule;
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer, json_answer_at};
use crate::wire::schedule::{
    NewBackfill, NewSchedule, RunWire, ScheduleBackfilled, ScheduleDeleted, SchedulePaused, ScheduleQuery,
    ScheduleResumed, ScheduleShown, ScheduleTriggered, ScheduleWire, ShowQuery,
};
use crate::wire::time::TimeWire;
use crate::wire::workflow::ask::Because;

/// How many next times and past runs are shown, by default and at most.
const NEXT: usize = 5;
const MOST_NEXT: usize = 1000;
const RUNS: usize = 10;
const MOST_RUNS: usize = 100;

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "schedules")
        .reads(routes!(list_schedules))
        .reads(routes!(get_schedule))
        .reads(routes!(schedule_runs))
        .changes(Role::Operate, routes!(put_schedule, delete_schedule))
        .changes(Role::Operate, routes!(pause_schedule))
        .changes(Role::Operate, routes!(resume_schedule))
        .changes(Role::Operate, routes!(trigger_schedule))
        .changes(Role::Operate, routes!(backfill_schedule))
}

/// The schedules, whose change is made once for the call.
fn schedules(namespace: &Namespace, call: &Call) -> Schedules {
    call.once().into_iter().fold(namespace.engine().schedules(), Schedules::once)
}

/// Lists schedules by their names.
#[utoipa::path(
    get,
    path = "/schedules",
    params(ScheduleQuery),
    responses((status = 200, description = "A page of schedules.", body = PageWire<ScheduleWire>))
)]
async fn list_schedules(
    State(namespace): State<Namespace>,
    QueryParams(ScheduleQuery { paused, after, limit }): QueryParams<ScheduleQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let (page, list) = (PageQuery { after, limit }, namespace.engine().schedules().list());
    let list = if paused { list.paused() } else { list };
    let found = list.limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, ScheduleWire::from))
}

/// Shows a schedule, the times when it fires next, and its last runs.
#[utoipa::path(
    get,
    path = "/schedules/{name}",
    params(("name" = String, Path), ShowQuery),
    responses(
        (status = 200, description = "The schedule.", body = ScheduleShown),
        NoSuchSchedule,
    )
)]
async fn get_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(ShowQuery { next, runs }): QueryParams<ShowQuery>,
) -> Result<Response, Problem> {
    let (next, runs) = (next.unwrap_or(NEXT), runs.unwrap_or(RUNS));
    if next > MOST_NEXT || runs > MOST_RUNS {
        let detail = format!("at most {MOST_NEXT} next times and {MOST_RUNS} past runs are shown");
        return Err(Problem::new(ProblemCode::InvalidQuery, detail));
    }
    let schedules = namespace.engine().schedules();
    let schedule = schedules.get(&name).await?.ok_or_else(|| missing(&name))?.into();
    let next = schedules.next(&name, next).await?.into_iter().map(TimeWire).collect();
    let runs = match runs {
        0 => Vec::new(),
        runs => schedules.runs(&name).limit(runs).await?.items.into_iter().map(RunWire::from).collect(),
    };
    Ok(json_answer(&ScheduleShown { schedule, next, runs }))
}

fn missing(name: &str) -> WorkflowError {
    ScheduleError::NotFound { name: name.into() }.into()
}

/// Lists the past runs of a schedule that are kept, the newest first.
#[utoipa::path(
    get,
    path = "/schedules/{name}/runs",
    params(("name" = String, Path), PageQuery),
    responses(
        (status = 200, description = "A page of past runs.", body = PageWire<RunWire>),
        NoSuchSchedule,
    )
)]
async fn schedule_runs(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let found = namespace.engine().schedules().runs(name).limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, RunWire::from))
}

/// Creates a schedule, or changes the schedule of this name.
///
/// Occurrences that were handled are not handled again, and a pause stays.
#[utoipa::path(
    put,
    path = "/schedules/{name}",
    params(("name" = String, Path)),
    request_body = NewSchedule,
    responses(
        (status = 200, description = "It was changed.", body = ScheduleWire),
        (status = 201, description = "It was created.", body = ScheduleWire),
        (status = 400, description = "It is not a schedule, or the input does not fit.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 404, description = "No workflow of this name is registered.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn put_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
    JsonBody(new): JsonBody<NewSchedule>,
) -> Result<Response, Problem> {
    let put = schedules(&namespace, &call).put(new.into_schedule(&name)?).await?;
    let status = if put.changed == put.created { StatusCode::CREATED } else { StatusCode::OK };
    Ok(json_answer_at(status, &ScheduleWire::from(put)))
}

/// Deletes a schedule and its past runs. Executions that it has started continue.
#[utoipa::path(
    delete,
    path = "/schedules/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "It was deleted.", body = ScheduleDeleted),
        NoSuchSchedule,
    )
)]
async fn delete_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    schedules(&namespace, &call).delete(&name).await?;
    Ok(json_answer(&ScheduleDeleted { name }))
}

/// Pauses a schedule: it starts nothing until it is resumed.
#[utoipa::path(
    post,
    path = "/schedules/{name}/pause",
    params(("name" = String, Path)),
    request_body = Because,
    responses(
        (status = 200, description = "It is paused.", body = SchedulePaused),
        NoSuchSchedule,
    )
)]
async fn pause_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
    JsonBody(because): JsonBody<Because>,
) -> Result<Response, Problem> {
    let paused = because.reason()?;
    schedules(&namespace, &call).pause(&name, &paused).await?;
    Ok(json_answer(&SchedulePaused { name, paused }))
}

/// Resumes a paused schedule, from the next occurrence.
#[utoipa::path(
    post,
    path = "/schedules/{name}/resume",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "It is not paused.", body = ScheduleResumed),
        NoSuchSchedule,
    )
)]
async fn resume_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    let next = schedules(&namespace, &call).resume(&name).await?.map(TimeWire);
    Ok(json_answer(&ScheduleResumed { name, next }))
}

/// Fires a schedule now, as its overlap policy says.
#[utoipa::path(
    post,
    path = "/schedules/{name}/trigger",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "It fires.", body = ScheduleTriggered),
        NoSuchSchedule,
        (status = 429, description = "Too many triggers wait.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn trigger_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    let id = schedules(&namespace, &call).trigger(&name).await?.to_string();
    Ok(json_answer(&ScheduleTriggered { name, id }))
}

/// Starts the occurrences of a past range, at most 10,000, as the overlap policy says.
#[utoipa::path(
    post,
    path = "/schedules/{name}/backfill",
    params(("name" = String, Path)),
    request_body = NewBackfill,
    responses(
        (status = 200, description = "They are started, one after the other.", body = ScheduleBackfilled),
        (status = 400, description = "The range is too large, or not in the past.", body = ProblemShape,
            content_type = "application/problem+json"),
        NoSuchSchedule,
        (status = 429, description = "Too many backfills wait.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn backfill_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
    JsonBody(NewBackfill { from, to }): JsonBody<NewBackfill>,
) -> Result<Response, Problem> {
    let occurrences = schedules(&namespace, &call).backfill(&name, from.0, to.0).await?;
    Ok(json_answer(&ScheduleBackfilled { name, occurrences }))
}

#[cfg(test)]
mod tests;
