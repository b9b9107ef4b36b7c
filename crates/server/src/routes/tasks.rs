//! Tasks over HTTP: put by any client, and done by workers that take them by long poll, give signs of life, and
//! complete or fail them.

use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use utoipa_axum::routes;

use crate::access::{Caller, Role};
use crate::api::Namespace;
use crate::calls::{Call, StoredAnswer};
use crate::group::Group;
use crate::routes::entities::encoded;
use crate::tasks::{Put, Take, Task, TaskCall};
use crate::wire::answers::{LeaseLost, NoSuchTask};
use crate::wire::page::{PageQuery, PageWire, listed};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};
use crate::wire::task::{
    CancelTask, CompleteTask, FailTask, Heartbeat, PutTask, TakeTasks, TakenTasks, TaskQuery, TaskWire,
};
use crate::wire::wait::{WaitQuery, asked, within};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "tasks")
        .reads(routes!(list_tasks))
        .reads(routes!(get_task))
        .changes(Role::Operate, routes!(put_task))
        .changes(Role::Operate, routes!(take_tasks))
        .changes(Role::Operate, routes!(heartbeat_task))
        .changes(Role::Operate, routes!(complete_task))
        .changes(Role::Operate, routes!(fail_task))
        .changes(Role::Operate, routes!(cancel_task))
}

/// Puts a task, once if it has an id.
#[utoipa::path(
    post,
    path = "/tasks",
    request_body = PutTask,
    responses(
        (status = 201, description = "It was put.", body = TaskWire, headers(("Location" = String))),
        (status = 200, description = "It was put before: this is how it is now.", body = TaskWire),
        (status = 409, description = "There is a task of this id with another kind, input or key.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
async fn put_task(
    State(namespace): State<Namespace>,
    call: Call,
    JsonBody(new): JsonBody<PutTask>,
) -> Result<Response, Problem> {
    // Without an id of the client, the id is the call: the next attempt finds the task that this one has put.
    let own = || call.id().unwrap_or_else(|| namespace.env().uuid()).to_string();
    let id = new.id().map_or_else(own, Into::into);
    Ok(match namespace.tasks().put(new.read(id)?, &TaskCall::of(&call, put)).await? {
        Put::New(task) => put(&[task]),
        Put::Known(task) => located(StatusCode::OK, &task),
    }
    .into_response())
}

fn put(tasks: &[Task]) -> StoredAnswer {
    tasks.first().map_or_else(|| changed(tasks), |task| located(StatusCode::CREATED, task))
}

fn located(status: StatusCode, task: &Task) -> StoredAnswer {
    let location = format!("tasks/{}", encoded(&task.id));
    StoredAnswer::json(status, &TaskWire::from(task.clone())).with(&LOCATION, location)
}

/// The answer to a change of one task.
fn changed(tasks: &[Task]) -> StoredAnswer {
    let task = tasks.first().map(|task| TaskWire::from(task.clone()));
    StoredAnswer::json(StatusCode::OK, &task)
}

/// The answer to a worker that has taken tasks.
fn taken(namespace: &Namespace, tasks: &[Task]) -> StoredAnswer {
    let tasks = tasks.iter().map(|task| TaskWire::taken(namespace.tasks(), task.clone())).collect();
    StoredAnswer::json(StatusCode::OK, &TakenTasks { tasks })
}

/// Takes tasks for a worker, the oldest first, and waits for one if there is none.
///
/// Each task is leased to the worker: no other worker gets it until the worker was silent for the length of the lease.
/// The `token` of the task rises with each lease. It is needed to complete the task, and receivers can use it to refuse
/// a worker whose lease was taken away. A task of a kind that no worker takes waits.
#[utoipa::path(
    post,
    path = "/tasks:take",
    params(WaitQuery),
    request_body = TakeTasks,
    responses((status = 200, description = "The tasks; none if the time is up.", body = TakenTasks))
)]
async fn take_tasks(
    State(namespace): State<Namespace>,
    QueryParams(WaitQuery { wait }): QueryParams<WaitQuery>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(take): JsonBody<TakeTasks>,
) -> Result<Response, Problem> {
    let of = namespace.clone();
    let answer = move |tasks: &[Task]| taken(&of, tasks);
    let call = TaskCall::of(&call, answer.clone());
    let (take, limit) = (take.read(&caller.subject)?, asked(&namespace, wait.as_deref())?);
    let tasks = match limit {
        None => namespace.tasks().take(&take, &call).await?,
        Some(limit) => wait_for_some(&namespace, &take, &call, limit).await?,
    };
    Ok(answer(&tasks).into_response())
}

/// A take that has begun is never given up: it may have landed, and its tasks would belong to a worker that does not
/// know them. So only the wait between two takes ends with the time.
async fn wait_for_some(
    namespace: &Namespace,
    take: &Take,
    call: &TaskCall,
    limit: Duration,
) -> Result<Vec<Task>, Problem> {
    let (tasks, env) = (namespace.tasks(), namespace.env());
    let until = env.monotonic() + limit;
    // What arrives from now on is noticed.
    let wait = tasks.waiting().worker(&take.kinds);
    loop {
        let taken = tasks.take(take, call).await?;
        if !taken.is_empty() {
            return Ok(taken);
        }
        if within(namespace, until.saturating_sub(env.monotonic()), wait.woken()).await.is_none() {
            return Ok(Vec::new());
        }
    }
}

/// Tells that the worker is alive: it has a full lease again.
///
/// If the answer is 409 `lease-lost`, another worker may be at the task: stop.
#[utoipa::path(
    post,
    path = "/tasks/{id}/heartbeat",
    params(("id" = String, Path, description = "The id, with its special characters encoded.")),
    request_body = Heartbeat,
    responses(
        (status = 200, description = "The lease is renewed.", body = TaskWire),
        NoSuchTask,
        LeaseLost,
    )
)]
async fn heartbeat_task(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(beat): JsonBody<Heartbeat>,
) -> Result<Response, Problem> {
    let call = TaskCall::of(&call, changed);
    Ok(changed(&[namespace.tasks().renew(&id, beat.token, beat.lease()?, &call).await?]).into_response())
}

/// Completes a task. Its first result counts.
///
/// A worker that repeats its call is answered with what is recorded.
#[utoipa::path(
    post,
    path = "/tasks/{id}/complete",
    params(("id" = String, Path)),
    request_body = CompleteTask,
    responses(
        (status = 200, description = "It is done, now or before under the same token.", body = TaskWire),
        NoSuchTask,
        LeaseLost,
    )
)]
async fn complete_task(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(CompleteTask { token, output }): JsonBody<CompleteTask>,
) -> Result<Response, Problem> {
    let call = TaskCall::of(&call, changed);
    Ok(changed(&[namespace.tasks().complete(&id, token, &output, &call).await?]).into_response())
}

/// Tells that an attempt has failed. The task can be taken again after a pause, or has failed for good.
#[utoipa::path(
    post,
    path = "/tasks/{id}/fail",
    params(("id" = String, Path)),
    request_body = FailTask,
    responses(
        (status = 200, description = "It is `open` again, or `failed`.", body = TaskWire),
        NoSuchTask,
        LeaseLost,
    )
)]
async fn fail_task(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(failed): JsonBody<FailTask>,
) -> Result<Response, Problem> {
    let token = failed.token;
    let ((failure, again), call) = (failed.read()?, TaskCall::of(&call, changed));
    Ok(changed(&[namespace.tasks().fail(&id, token, &failure, again, &call).await?]).into_response())
}

/// Ends a task that shall not be done. A worker that is at it loses its lease.
#[utoipa::path(
    post,
    path = "/tasks/{id}/cancel",
    params(("id" = String, Path)),
    request_body = CancelTask,
    responses(
        (status = 200, description = "It is cancelled.", body = TaskWire),
        NoSuchTask,
        (status = 409, description = "`task-ended`: it has ended before.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn cancel_task(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(CancelTask { reason }): JsonBody<CancelTask>,
) -> Result<Response, Problem> {
    if reason.is_empty() {
        return Err(Problem::new(ProblemCode::InvalidBody, "reason: give one; it stays with the task"));
    }
    let call = TaskCall::of(&call, changed);
    Ok(changed(&[namespace.tasks().cancel(&id, &reason, &call).await?]).into_response())
}

/// Lists tasks by their ids.
///
/// If the filters select few of many tasks, a page may have fewer items than requested although there are more: its
/// `next` tells.
#[utoipa::path(
    get,
    path = "/tasks",
    params(TaskQuery),
    responses((status = 200, description = "A page of tasks.", body = PageWire<TaskWire>))
)]
async fn list_tasks(
    State(namespace): State<Namespace>,
    QueryParams(query): QueryParams<TaskQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let limit = PageQuery { after: None, limit: query.limit }.limit()?;
    let is_wanted = |task: &Task| {
        query.kind.as_ref().is_none_or(|kind| task.kind == *kind)
            && query.state.is_none_or(|state| task.word() == state.word())
    };
    let position = query.position()?;
    let (items, last) = namespace.tasks().list(position.as_deref(), limit, is_wanted).await?;
    let items = items.into_iter().map(TaskWire::from).collect();
    Ok(listed(&uri, PageWire { items, next: last.map(|id| query.next(&id)) }))
}

/// Shows a task. With `wait`, the answer comes when it has ended, or when the time is up.
#[utoipa::path(
    get,
    path = "/tasks/{id}",
    params(("id" = String, Path), WaitQuery),
    responses(
        (status = 200, description = "The task.", body = TaskWire),
        NoSuchTask,
    )
)]
async fn get_task(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(WaitQuery { wait }): QueryParams<WaitQuery>,
) -> Result<Response, Problem> {
    let tasks = namespace.tasks();
    let ended = match asked(&namespace, wait.as_deref())? {
        Some(limit) => within(&namespace, limit, tasks.ended(&id)).await.transpose()?,
        None => None,
    };
    let task = match ended {
        Some(task) => task,
        None => tasks.get(&id).await?,
    };
    Ok(json_answer(&TaskWire::from(task)))
}
