//! The OpenAPI document and the page that shows it. Both are made from what the groups declare; nothing is written
//! twice.

use std::fmt::Write as _;

use axum::extract::{OriginalUri, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::response::{IntoResponse, Response};
use latchwork::{Value, json};
use utoipa::PartialSchema;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::server::Server as Place;
use utoipa::openapi::{OpenApi, RefOr};

use crate::group::{ROLE, operations};
use crate::router::Hub;
use crate::wire::problem::{ProblemCode, ProblemShape};
use crate::wire::request::json_answer;

const ABOUT: &str = "Work that must happen once, over HTTP. Every error is a problem document (RFC 9457) whose `code` \
                     is stable. Every call that changes something takes an `Idempotency-Key`. The extension \
                     `x-latchwork-role` of an operation is the role that its token needs.";

/// Describes routes that are beside the namespaces: they need no token.
pub(crate) fn outside(document: &mut OpenApi) {
    for path in document.paths.paths.values_mut() {
        path.servers = Some(vec![Place::new("/")]);
        for operation in operations(path) {
            operation.tags = Some(vec!["health".into()]);
            operation.security = Some(Vec::new());
            let extensions = operation.extensions.get_or_insert_default();
            extensions.merge(ExtensionsBuilder::new().add(ROLE, "public").build());
        }
    }
}

/// Completes the document, as JSON.
pub(crate) fn complete(mut document: OpenApi) -> Value {
    document.info.title = "Latchwork".into();
    document.info.description = Some(ABOUT.into());
    document.info.license = None;
    document.info.contact = None;
    let components = document.components.get_or_insert_default();
    components.schemas.insert("Problem".into(), ProblemShape::schema());
    let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    components.security_schemes.insert("token".into(), RefOr::T(bearer));
    let mut document = serde_json::to_value(&document).unwrap_or_default();
    // The socket and a server without tokens need none.
    document["security"] = json!([{}, {"token": []}]);
    let codes = ProblemCode::ALL.iter().map(|code| (code.slug().to_string(), code.title().into()));
    document["x-latchwork-problems"] = Value::Object(codes.collect());
    document
}

/// The document. Its addresses begin where the router is mounted.
pub(crate) async fn openapi_json(State(hub): State<Hub>, OriginalUri(uri): OriginalUri) -> Response {
    let mounted = uri.path().strip_suffix("/openapi.json").unwrap_or_default();
    let mut document = hub.document().clone();
    document["servers"] = json!([
        {"url": format!("{mounted}/v1"), "description": "The default namespace."},
        {
            "url": format!("{mounted}/v1/ns/{{namespace}}"),
            "description": "Another namespace.",
            "variables": {"namespace": {"default": "default"}},
        },
    ]);
    if let Some(paths) = document["paths"].as_object_mut() {
        for path in paths.values_mut().filter(|path| path.get("servers").is_some()) {
            path["servers"] = json!([{"url": if mounted.is_empty() { "/" } else { mounted }}]);
        }
    }
    json_answer(&document)
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
                     code{font-size:.9em}section{border-top:1px solid #8884;padding:.5rem 0}\
                     dt{font-weight:600}small{opacity:.7}@media(prefers-color-scheme:dark){:root{color-scheme:dark}}";

/// The document as a page for people: one file, without scripts and without anything from elsewhere.
pub(crate) async fn docs(State(hub): State<Hub>) -> Response {
    let document = hub.document();
    let mut page =
        String::from("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Latchwork API</title>");
    let _ = write!(page, "<style>{STYLE}</style><h1>Latchwork API</h1><p>{}</p>", escaped(ABOUT));
    page.push_str("<p>The whole description is in <a href=\"openapi.json\">openapi.json</a>.</p>");
    for (path, item) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in item.as_object().into_iter().flatten() {
            if operation.get("responses").is_some() {
                write_operation(&mut page, method, path, operation);
            }
        }
    }
    page.push_str("<h2>Codes of problems</h2><dl>");
    for code in ProblemCode::ALL {
        let _ = write!(page, "<dt><code>{}</code></dt><dd>{}</dd>", code.slug(), escaped(code.title()));
    }
    page.push_str("</dl></html>");
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, page).into_response()
}

fn write_operation(page: &mut String, method: &str, path: &str, operation: &Value) {
    let text = |field: &str| escaped(operation[field].as_str().unwrap_or_default());
    let place = if operation[ROLE] == "public" { path.to_string() } else { format!("/v1{path}") };
    let _ = write!(
        page,
        "<section><h3><code>{} {}</code></h3><p>{}</p><p>{}</p><p><small>Role: {}</small></p>",
        method.to_uppercase(),
        escaped(&place),
        text("summary"),
        text("description"),
        text(ROLE),
    );
    let parameters = operation["parameters"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !parameters.is_empty() {
        page.push_str("<dl>");
        for parameter in parameters {
            let field = |field: &str| escaped(parameter[field].as_str().unwrap_or_default());
            let (name, place, about) = (field("name"), field("in"), field("description"));
            let _ = write!(page, "<dt><code>{name}</code> <small>{place}</small></dt><dd>{about}</dd>");
        }
        page.push_str("</dl>");
    }
    page.push_str("</section>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
