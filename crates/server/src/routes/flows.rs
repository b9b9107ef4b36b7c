//! Flows over HTTP: requests to actions, their results and checkpoints. `events.rs` streams what happens to a request,
//! `suspensions.rs` serves the questions that it asks.

mod events;
mod suspensions;

use axum::extract::State;
use axum::http::header::{HeaderValue, LOCATION, RETRY_AFTER};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use latchwork::Page;
use latchwork::flow::{FlowError, Flows};
use latchwork::workflow::{Description, WorkflowError};
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::routes::entities::encoded;
use crate::routes::workflows::still_kept;
use crate::spans;
use crate::wire::answers::{NoSuchAction, NoSuchRequest};
use crate::wire::flow::{CheckpointsWire, FlowWire, NewRequest, RequestResultWire, RequestWire, StartedWire};
use crate::wire::page::{PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer, json_answer_at};
use crate::wire::wait::{self, WaitQuery};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "flows")
        .reads(routes!(list_flows))
        .changes(Role::Operate, routes!(run_action))
        .reads(routes!(describe_request))
        .reads(routes!(request_result))
        .reads(routes!(request_checkpoints))
        .reads(routes!(events::stream_events))
        .reads(routes!(suspensions::list_suspensions))
        .reads(routes!(suspensions::request_suspensions))
        .reads(routes!(suspensions::show_suspension))
        .changes(Role::Operate, routes!(suspensions::answer_suspension))
}

/// A flow that the program has registered.
fn registered<'a>(namespace: &'a Namespace, flow: &str) -> Result<&'a Flows, Problem> {
    let known = || namespace.flows().keys().map(String::as_str).collect::<Vec<_>>();
    let missing = || Problem::new(ProblemCode::NotFound, format!("there is no flow {flow:?}")).with("known", known());
    namespace.flows().get(flow).ok_or_else(missing)
}

/// A request of this flow: the name of its action, and everything that is known of it.
async fn described(namespace: &Namespace, flow: &str, id: &str) -> Result<(String, Description), Problem> {
    registered(namespace, flow)?;
    let description = namespace.engine().describe(id).await?;
    let action = description.workflow.strip_prefix(&format!("flow:{flow}/")).map(str::to_string);
    let missing = || WorkflowError::NotFound { id: id.into() };
    Ok((action.ok_or_else(missing)?, description))
}

/// Lists the flows that the program has registered, with their actions.
#[utoipa::path(
    get,
    path = "/flows",
    responses((status = 200, description = "All flows.", body = PageWire<FlowWire>))
)]
async fn list_flows(State(namespace): State<Namespace>, uri: Uri) -> Result<Response, Problem> {
    let mut items = Vec::new();
    for (name, flows) in namespace.flows() {
        // No action has an empty name: the refusal names all of them.
        let actions = match flows.suspensions("").limit(1).await {
            Err(FlowError::UnknownAction { known, .. }) => known,
            Err(error) => return Err(error.into()),
            Ok(_) => Vec::new(),
        };
        items.push(FlowWire { name: name.clone(), actions });
    }
    Ok(page_answer(&uri, Page { items, next: None }, |flow| flow))
}

/// Makes a request to an action. When this is answered, the request is stored and survives any crash.
///
/// Under an Idempotency-Key, the id of the call is the idempotency key of the execution: another attempt finds the
/// request that the first one has made.
#[utoipa::path(
    post,
    path = "/flows/{flow}/actions/{action}",
    params(("flow" = String, Path), ("action" = String, Path)),
    request_body = NewRequest,
    responses(
        (status = 201, description = "The request is stored.", body = StartedWire, headers(("Location" = String))),
        (status = 400, description = "The input does not fit the action.", body = ProblemShape,
            content_type = "application/problem+json"),
        NoSuchAction,
        (status = 409, description = "The id is taken.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 429, description = "The session has another request of the action, and the flow rejects a second \
            one.", body = ProblemShape, content_type = "application/problem+json"),
    )
)]
async fn run_action(
    State(namespace): State<Namespace>,
    PathParams((flow, action)): PathParams<(String, String)>,
    call: Call,
    JsonBody(new): JsonBody<NewRequest>,
) -> Result<Response, Problem> {
    let NewRequest { input, id, session, user, org } = new;
    still_kept(&namespace, &call, &format!("flow:{flow}/{action}"))?;
    let mut run = registered(&namespace, &flow)?.run(&action, input);
    if let Some(session) = session {
        run = run.session(session);
    }
    if let Some(user) = user {
        run = run.user(user);
    }
    if let Some(org) = org {
        run = run.org(org);
    }
    if let Some(id) = id {
        run = run.id(id);
    }
    if let Some(call) = call.id() {
        run = run.idempotency_key(call.to_string());
    }
    let id = run.await?.id().to_string();
    spans::link_to_execution(namespace.engine(), &id);
    // Relative to the address of the request: it holds wherever the router is mounted.
    let location = HeaderValue::try_from(format!("../requests/{}", encoded(&id)));
    let mut answer = json_answer_at(StatusCode::CREATED, &StartedWire { id, flow, action });
    if let Ok(location) = location {
        answer.headers_mut().insert(LOCATION, location);
    }
    Ok(answer)
}

/// Describes a request.
#[utoipa::path(
    get,
    path = "/flows/{flow}/requests/{id}",
    params(("flow" = String, Path), ("id" = String, Path)),
    responses(
        (status = 200, description = "The request.", body = RequestWire),
        NoSuchRequest,
    )
)]
async fn describe_request(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
) -> Result<Response, Problem> {
    let (action, description) = described(&namespace, &flow, &id).await?;
    Ok(json_answer(&RequestWire::new(&flow, &action, description)))
}

/// Waits for the result of a request. A request that has failed has a result, too: see `status`. One that is parked
/// waits for an operator, and is answered at once.
#[utoipa::path(
    get,
    path = "/flows/{flow}/requests/{id}/result",
    params(("flow" = String, Path), ("id" = String, Path), WaitQuery),
    responses(
        (status = 200, description = "The request has ended.", body = RequestResultWire),
        (status = 202, description = "The request has not ended.", body = RequestResultWire,
            headers(("Retry-After" = String))),
        NoSuchRequest,
    )
)]
async fn request_result(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
    QueryParams(WaitQuery { wait }): QueryParams<WaitQuery>,
) -> Result<Response, Problem> {
    let time = wait::asked(&namespace, wait.as_deref())?;
    let (_, mut description) = described(&namespace, &flow, &id).await?;
    if let Some(time) = time.filter(|_| !description.status().is_end()) {
        let result = namespace.engine().handle_by_id(id.as_str()).result();
        // Whatever has ended the wait, the description tells how far the request is.
        wait::within(&namespace, time, result).await;
        (_, description) = described(&namespace, &flow, &id).await?;
    }
    if description.status().is_end() {
        return Ok(json_answer(&RequestResultWire::from(description)));
    }
    let mut answer = json_answer_at(StatusCode::ACCEPTED, &RequestResultWire::from(description));
    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    Ok(answer)
}

/// Reads the checkpoints of a request: the latest states of its blocks.
#[utoipa::path(
    get,
    path = "/flows/{flow}/requests/{id}/checkpoints",
    params(("flow" = String, Path), ("id" = String, Path)),
    responses(
        (status = 200, description = "The checkpoints.", body = CheckpointsWire),
        NoSuchRequest,
    )
)]
async fn request_checkpoints(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
) -> Result<Response, Problem> {
    described(&namespace, &flow, &id).await?;
    let checkpoints = registered(&namespace, &flow)?.request(id.as_str()).checkpoints().await?;
    Ok(json_answer(&CheckpointsWire { checkpoints: checkpoints.into_iter().collect() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    use axum::body::to_bytes;
    use latchwork::flow::{flow, handler};
    use latchwork::store::Store;
    use latchwork::workflow::Engine;
    use latchwork::{Value, json};

    use crate::access::Access;
    use crate::api::{Api, Closing};
    use crate::limits::Limits;

    pub(super) async fn namespace(store: &Store) -> Namespace {
        let asks = handler("asks").run(async |ctx, _: Value| Ok(ctx.suspend("why").await?.is_approved()));
        let flow = flow("texts").action("asks", asks).build().unwrap();
        let engine = Engine::on(store).flow(&flow).start().await.unwrap();
        let closing = Closing::new(tokio::sync::watch::Sender::new(false));
        Api::on(&engine).flow(&flow).into_namespace("default", Access::local(), Limits::default(), closing)
    }

    pub(super) async fn body(answer: Response) -> Value {
        serde_json::from_slice(&to_bytes(answer.into_body(), 1 << 20).await.unwrap()).unwrap()
    }

    pub(super) async fn run(namespace: &Namespace, call: Call, id: Option<&str>) -> Result<Value, Problem> {
        let new = NewRequest { input: json!(1), id: id.map(Into::into), session: None, user: None, org: None };
        let path = PathParams(("texts".to_string(), "asks".to_string()));
        Ok(body(run_action(State(namespace.clone()), path, call, JsonBody(new)).await?).await)
    }

    #[tokio::test]
    async fn a_request_that_was_made_before_its_process_died_is_found() {
        let namespace = namespace(&Store::memory().await.unwrap()).await;
        for (key, id) in [(1, None), (2, Some("mine"))] {
            let (call, attempt) = Call::begin(namespace.calls(), key).await;
            let first = run(&namespace, call, id).await.unwrap();
            drop(attempt);
            let (call, _attempt) = Call::begin(namespace.calls(), key).await;
            assert_eq!(run(&namespace, call, id).await.unwrap(), first);
        }
        let taken = run(&namespace, Call::default(), Some("mine")).await.unwrap_err();
        assert_eq!(taken.code(), ProblemCode::AlreadyExists);
    }
}
