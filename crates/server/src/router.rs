//! The whole router: what is checked of every request, and which namespace a request is for. It knows namespaces, and
//! no route of theirs.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH, LINK, LOCATION, RETRY_AFTER,
};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use latchwork::Value;
use std::net::SocketAddr;
use tower::ServiceExt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::CorsLayer;

use crate::access::{Access, Peer, Role, check_host};
use crate::api::{Api, Closing, DEFAULT, Namespace};
use crate::calls::{KEY, REPLAYED};
use crate::document;
use crate::limits::Limits;
use crate::routes;
use crate::spans;
use crate::wire::problem::{self, Problem, ProblemCode};

/// The route of everything in namespaces.
pub(crate) const API_ROUTES: &str = "/v1/{*rest}";

/// All namespaces, and what is said of all of them.
#[derive(Clone)]
pub(crate) struct Hub(Arc<Inner>);

struct Inner {
    namespaces: BTreeMap<String, (Namespace, Router)>,
    access: Access,
    document: Value,
    closing: Closing,
}

impl Hub {
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.0.namespaces.values().map(|(namespace, _)| namespace)
    }

    pub(crate) fn document(&self) -> &Value {
        &self.0.document
    }

    pub(crate) fn is_closing(&self) -> bool {
        *self.0.closing.borrow()
    }
}

/// The namespace whose routes are at `/v1` itself on one connection.
#[derive(Debug, Clone)]
pub(crate) struct Home(pub(crate) Arc<str>);

impl Default for Home {
    fn default() -> Home {
        Home(DEFAULT.into())
    }
}

/// Whether there are routes beside those of the namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beside {
    /// None: every other path is a problem.
    Nothing,
    /// Those of another application, which answers for all other paths.
    Others,
}

/// The router of these namespaces.
pub(crate) fn assemble(
    apis: BTreeMap<String, Api>,
    access: Access,
    limits: Limits,
    closing: Closing,
    beside: Beside,
) -> Router {
    let (outside, mut document) = routes::health().split_for_parts();
    document::outside(&mut document);
    let mut namespaces = BTreeMap::new();
    for (name, api) in apis {
        let namespace = api.into_namespace(&name, access.clone(), limits, closing.clone());
        let (router, described) = routes::all(&namespace).split_for_parts();
        // Every namespace has the same routes.
        document.merge(described);
        namespaces.insert(name, (namespace.clone(), router.with_state(namespace)));
    }
    let document = document::complete(document);
    let cors = cors(&access);
    let hub = Hub(Arc::new(Inner { namespaces, access, document, closing }));
    let router = outside
        .route("/openapi.json", get(document::openapi_json))
        .route("/docs", get(document::docs))
        .route(API_ROUTES, any(dispatch));
    let router = match beside {
        Beside::Nothing => router.fallback(async || StatusCode::NOT_FOUND),
        Beside::Others => router,
    };
    let router = router.layer(CatchPanicLayer::custom(problem::panicked));
    let router = match cors {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router
        .layer(middleware::from_fn_with_state(hub.clone(), guard_host))
        .layer(middleware::map_response(problem::ensure))
        .layer(middleware::from_fn(spans::request))
        .with_state(hub)
}

async fn guard_host(State(hub): State<Hub>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match check_host(&hub.0.access, &parts) {
        Ok(()) => next.run(Request::from_parts(parts, body)).await,
        Err(problem) => problem.into_response(),
    }
}

/// What pages of the allowed origins may send and see.
fn cors(access: &Access) -> Option<CorsLayer> {
    let origins: Vec<HeaderValue> = access.origins().filter_map(|origin| origin.parse().ok()).collect();
    let layer = || {
        CorsLayer::new()
            .allow_origin(origins.clone())
            .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
            .allow_headers([
                ACCEPT,
                AUTHORIZATION,
                CONTENT_TYPE,
                IF_MATCH,
                IF_NONE_MATCH,
                KEY,
                HeaderName::from_static("last-event-id"),
            ])
            .expose_headers([ETAG, LINK, LOCATION, RETRY_AFTER, REPLAYED])
    };
    (!origins.is_empty()).then(layer)
}

/// Passes a request to its namespace: `/v1/ns/NAME/…`, or `/v1/…` for the default namespace of the connection. A token
/// that is not valid in a namespace learns nothing about it, not even whether it exists.
async fn dispatch(State(hub): State<Hub>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let home = parts.extensions.get::<Home>().cloned().unwrap_or_default();
    let (name, path) = named_namespace(parts.uri.path(), &home);
    let Some((_, router)) = hub.0.namespaces.get(&name) else {
        let known = hub.0.access.admit(&parts, Role::Read, &name);
        let missing = |_| Problem::new(ProblemCode::NamespaceNotFound, format!("there is no namespace {name:?}"));
        return known.map(missing).unwrap_or_else(|refused| refused).into_response();
    };
    let Some(uri) = with_path(&parts.uri, path) else {
        return Problem::new(ProblemCode::InvalidPath, "the path cannot be read").into_response();
    };
    parts.uri = uri;
    // The parameters of the outer path are no parameters of the inner one.
    let (peer, told) = (parts.extensions.remove::<Peer>(), parts.extensions.remove::<ConnectInfo<SocketAddr>>());
    parts.extensions.clear();
    peer.map(|peer| parts.extensions.insert(peer));
    told.map(|told| parts.extensions.insert(told));
    match router.clone().oneshot(Request::from_parts(parts, body)).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

/// The namespace that a path names, and the path within it.
fn named_namespace<'a>(path: &'a str, home: &Home) -> (String, &'a str) {
    let within = path.strip_prefix("/v1").unwrap_or(path);
    match within.strip_prefix("/ns/") {
        Some(rest) => {
            let end = rest.find('/').unwrap_or(rest.len());
            (rest[..end].to_string(), &rest[end..])
        }
        None => (home.0.to_string(), within),
    }
}

fn with_path(uri: &Uri, path: &str) -> Option<Uri> {
    let path = if path.is_empty() { "/" } else { path };
    let target = match uri.query() {
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
        None => PathAndQuery::try_from(path),
    };
    Some(Uri::from(target.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_namespace() {
        for (path, name, within) in [
            ("/v1/entities/a", "default", "/entities/a"),
            ("/v1/ns/billing/entities/a", "billing", "/entities/a"),
            ("/v1/ns/billing", "billing", ""),
            ("/v1/ns/", "", ""),
            ("/v1/nsx/a", "default", "/nsx/a"),
        ] {
            assert_eq!(named_namespace(path, &Home::default()), (name.to_string(), within), "{path}");
        }
        assert_eq!(named_namespace("/v1/a", &Home("billing".into())), ("billing".into(), "/a"));
        let uri = with_path(&"/v1/entities/a%2Fb?x=1".parse().unwrap(), "/entities/a%2Fb").unwrap();
        assert_eq!(uri, "/entities/a%2Fb?x=1");
    }
}
