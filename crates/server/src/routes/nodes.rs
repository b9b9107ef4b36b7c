//! Nodes over HTTP: the engines that share the store, and which of them does what. The engine of a store that is not
//! shared is no node.

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use latchwork::Page;
use latchwork::node::Nodes;
use latchwork::workflow::Executions;
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::wire::answers::NoSuchNode;
use crate::wire::node::{MostQuery, MoveWire, NodeWire, UnrunnableWire};
use crate::wire::page::{PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{PathParams, QueryParams, json_answer};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "nodes")
        .reads(routes!(list_nodes))
        .reads(routes!(show_node))
        .changes(Role::Admin, routes!(drain_node, undrain_node))
        .reads(routes!(node_moves))
        .reads(routes!(unrunnable_executions))
}

/// The nodes, whose change is made once for the call.
fn nodes_of(namespace: &Namespace, call: &Call) -> Nodes {
    call.once().into_iter().fold(nodes(namespace), Nodes::once)
}

fn nodes(namespace: &Namespace) -> Nodes {
    Nodes::on(namespace.engine().store())
}

/// Lists all nodes in the order of their names. A node that has died is listed until its lease is over.
#[utoipa::path(
    get,
    path = "/nodes",
    responses((status = 200, description = "All nodes, on one page.", body = PageWire<NodeWire>))
)]
async fn list_nodes(State(namespace): State<Namespace>, uri: Uri) -> Result<Response, Problem> {
    let items = nodes(&namespace).list().await?;
    Ok(page_answer(&uri, Page { items, next: None }, NodeWire::from))
}

/// Shows a node: its lease, its shards, and the workflows that it can run.
#[utoipa::path(
    get,
    path = "/nodes/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "The node.", body = NodeWire),
        NoSuchNode,
    )
)]
async fn show_node(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
) -> Result<Response, Problem> {
    Ok(json_answer(&NodeWire::from(nodes(&namespace).get(&name).await?)))
}

/// Drains a node: it gives its shards to the others and gets no more, but continues to serve its callers. The node
/// itself does it, after this is answered.
#[utoipa::path(
    put,
    path = "/nodes/{name}/drain",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "The node is being drained.", body = NodeWire),
        NoSuchNode,
        (status = 409, description = "No other node could take over.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn drain_node(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    set_draining(&namespace, &name, &call, true).await
}

/// Makes a drained node take its share of the shards again.
#[utoipa::path(
    delete,
    path = "/nodes/{name}/drain",
    params(("name" = String, Path)),
    responses(
        (status = 200, description = "The node gets its share again.", body = NodeWire),
        NoSuchNode,
    )
)]
async fn undrain_node(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    set_draining(&namespace, &name, &call, false).await
}

async fn set_draining(namespace: &Namespace, name: &str, call: &Call, is_draining: bool) -> Result<Response, Problem> {
    let nodes = nodes_of(namespace, call);
    nodes.drain(name, is_draining).await?;
    Ok(json_answer(&NodeWire::from(nodes.get(name).await?)))
}

/// Lists the last moves of shards, newest first. They are kept for 30 days.
#[utoipa::path(
    get,
    path = "/nodes:moves",
    params(MostQuery),
    responses((status = 200, description = "The moves, on one page.", body = PageWire<MoveWire>))
)]
async fn node_moves(
    State(namespace): State<Namespace>,
    QueryParams(most): QueryParams<MostQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let items = nodes(&namespace).moves(most.limit()?).await?;
    Ok(page_answer(&uri, Page { items, next: None }, MoveWire::from))
}

/// Lists executions that have to run now and that no live node can run: their workflow, or its version, is registered
/// nowhere.
#[utoipa::path(
    get,
    path = "/nodes:unrunnable",
    params(MostQuery),
    responses((status = 200, description = "The executions, on one page.", body = PageWire<UnrunnableWire>))
)]
async fn unrunnable_executions(
    State(namespace): State<Namespace>,
    QueryParams(most): QueryParams<MostQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let executions = Executions::on(namespace.engine().store()).await?;
    let items = executions.unrunnable(most.limit()?).await?;
    Ok(page_answer(&uri, Page { items, next: None }, UnrunnableWire::from))
}
