//! Schedules over HTTP.

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use latchwork::store::{Timestamp, Uuid};
use latchwork::workflow::{RunCause, ScheduleError, WorkflowError};
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
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
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
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
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
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
    JsonBody(new): JsonBody<NewSchedule>,
) -> Result<Response, Problem> {
    // A schedule that is put again is the same schedule: all attempts of a call have one effect.
    let schedules = namespace.engine().schedules();
    let is_new = schedules.get(&name).await?.is_none();
    let put = schedules.put(new.into_schedule(&name)?).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(json_answer_at(status, &ScheduleWire::from(put)))
}

/// Deletes a schedule and its past runs. Executions that it has started continue.
#[utoipa::path(
    delete,
    path = "/schedules/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "It was deleted.", body = ScheduleDeleted),
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn delete_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    match namespace.engine().schedules().delete(&name).await {
        // An earlier attempt has deleted it.
        Err(WorkflowError::Schedule(ScheduleError::NotFound { .. })) if call.repeated_since().is_some() => {}
        deleted => deleted?,
    }
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
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn pause_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    JsonBody(because): JsonBody<Because>,
) -> Result<Response, Problem> {
    // A second pause only sets the reason, which is the same for all attempts of a call.
    let paused = because.reason()?;
    namespace.engine().schedules().pause(&name, &paused).await?;
    Ok(json_answer(&SchedulePaused { name, paused }))
}

/// Resumes a paused schedule, from the next occurrence.
#[utoipa::path(
    post,
    path = "/schedules/{name}/resume",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "It is not paused.", body = ScheduleResumed),
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn resume_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
) -> Result<Response, Problem> {
    // A schedule that is not paused is left as it is, so a repeated attempt changes nothing.
    let schedules = namespace.engine().schedules();
    schedules.resume(&name).await?;
    let next = schedules.next(&name, 1).await?.first().copied().map(TimeWire);
    Ok(json_answer(&ScheduleResumed { name, next }))
}

/// Fires a schedule now, as its overlap policy says.
#[utoipa::path(
    post,
    path = "/schedules/{name}/trigger",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "It fires.", body = ScheduleTriggered),
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 409, description = "The first request was cut off, and the schedule was triggered meanwhile, by it \
            or by another: `outcome-unknown`.", body = ProblemShape, content_type = "application/problem+json"),
        (status = 429, description = "Too many triggers wait.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn trigger_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    if let (Some(id), Some(_)) = (call.id(), call.repeated_since()) {
        not_triggered_since(&namespace, &name, id).await?;
    }
    let id = namespace.engine().schedules().trigger(&name).await?.to_string();
    Ok(json_answer(&ScheduleTriggered { name, id }))
}

/// Fails if the schedule may have been triggered since a call began. The library has no idempotency key for triggers,
/// and each one fires: so a repeated attempt fires only if nothing has been triggered since the first one began.
async fn not_triggered_since(namespace: &Namespace, name: &str, call: Uuid) -> Result<(), Problem> {
    let schedules = namespace.engine().schedules();
    let found = schedules.get(name).await?.ok_or_else(|| missing(name))?;
    // The id of a call is a UUIDv7: it tells when the first attempt began. Without a time, any trigger may be its own.
    let began = call.get_timestamp().map_or(Timestamp::default(), |time| {
        let (seconds, nanos) = time.to_unix();
        Timestamp(seconds * 1_000_000 + u64::from(nanos) / 1000)
    });
    let runs = schedules.runs(name).limit(MOST_RUNS).await?.items;
    // If all runs that are kept are younger, older ones may be forgotten that are younger, too.
    let may_forget = runs.len() == MOST_RUNS && runs.iter().all(|run| run.at >= began);
    let triggered = runs.iter().filter(|run| run.cause == RunCause::Trigger && run.time >= began);
    let triggered: Vec<String> = triggered.map(|run| run.id.to_string()).collect();
    if triggered.is_empty() && found.waiting == 0 && !may_forget {
        return Ok(());
    }
    let detail = "the first request was cut off, and the schedule was triggered meanwhile, by it or by another; look \
                  at its runs, and use a new Idempotency-Key";
    Err(Problem::new(ProblemCode::OutcomeUnknown, detail).with("schedule", name).with("triggered", triggered))
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
        (status = 404, description = "There is no such schedule.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 429, description = "Too many backfills wait.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn backfill_schedule(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    JsonBody(NewBackfill { from, to }): JsonBody<NewBackfill>,
) -> Result<Response, Problem> {
    // The id of an occurrence's execution comes from its time, and one that exists is not started again. So a second
    // backfill of the same range starts nothing that the first one has started, as long as it is kept.
    let occurrences = namespace.engine().schedules().backfill(&name, from.0, to.0).await?;
    Ok(json_answer(&ScheduleBackfilled { name, occurrences }))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::routes::workflows::tests::{body, cut_off, namespace, read};
    use latchwork::json;

    async fn hourly() -> Namespace {
        let (namespace, _) = namespace().await;
        let hourly = body(json!({"workflow": "count", "input": 1, "every_ms": 3_600_000, "overlap": "allow"}));
        let put = put_schedule(State(namespace.clone()), PathParams("hourly".into()), hourly).await;
        assert_eq!(read(put).await.0, 201);
        namespace
    }

    fn trigger(namespace: &Namespace, call: Call) -> impl Future<Output = Result<Response, Problem>> + use<> {
        trigger_schedule(State(namespace.clone()), PathParams("hourly".into()), call)
    }

    #[tokio::test]
    async fn a_trigger_that_was_cut_off_does_not_fire_twice() {
        let namespace = hourly().await;
        let schedules = namespace.engine().schedules();
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        let fired = read(trigger(&namespace, call).await).await.1;
        drop(attempt);
        // Both while the trigger waits for the engine and afterwards.
        for _ in 0..2 {
            let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
            let unknown = trigger(&namespace, call).await.unwrap_err();
            assert_eq!(unknown.code(), ProblemCode::OutcomeUnknown);
            while schedules.get("hourly").await.unwrap().unwrap().counts.started == 0 {
                tokio::task::yield_now().await;
            }
        }
        let runs = schedules.runs("hourly").await.unwrap().items;
        assert_eq!((runs.len(), &json!(&*runs[0].id)), (1, &fired["id"]));
    }

    #[tokio::test]
    async fn a_trigger_that_was_cut_off_before_its_effect_fires() {
        let namespace = hourly().await;
        // An earlier trigger does not count.
        read(trigger(&namespace, Call::default()).await).await;
        let schedules = namespace.engine().schedules();
        while schedules.get("hourly").await.unwrap().unwrap().counts.started == 0 {
            tokio::task::yield_now().await;
        }
        namespace.env().sleep(std::time::Duration::from_millis(5)).await;
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        drop((call, attempt));
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        assert_eq!(read(trigger(&namespace, call).await).await.0, 200);
    }

    #[tokio::test]
    async fn a_deletion_that_was_cut_off_is_done() {
        let namespace = hourly().await;
        let delete = |call| delete_schedule(State(namespace.clone()), PathParams("hourly".into()), call);
        let [first, again] = cut_off(&namespace, 1, delete).await;
        assert_eq!((first.0, &first), (200, &again));
        assert_eq!(delete(Call::default()).await.unwrap_err().code(), ProblemCode::NotFound);
    }
}
