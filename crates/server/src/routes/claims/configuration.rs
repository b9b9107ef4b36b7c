//! Configurations of claim workflows over HTTP: they are checked and drawn. Nothing here needs a store.

use axum::extract::State;
use axum::response::Response;
use latchwork::claim::{self, Checked};

use crate::api::Namespace;
use crate::wire::claim::finding::{DiagramRequest, DiagramWire, FindingsWire, wrong_configuration};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, JsonText, json_answer};

/// The JSON schema of configurations, for editors.
#[utoipa::path(
    get,
    path = "/claim-configurations/schema",
    responses((status = 200, description = "The schema.", body = Object))
)]
pub(super) async fn claim_schema(State(_): State<Namespace>) -> Response {
    json_answer(&claim::json_schema())
}

/// Reports everything that is wrong with a configuration: one claim workflow, or a list of them. Positions are those
/// in the body.
#[utoipa::path(
    post,
    path = "/claim-configurations:validate",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "All findings. A wrong configuration is an answer, too.",
        body = FindingsWire))
)]
pub(super) async fn validate_claims(JsonText(text): JsonText) -> Response {
    let checked = claim::check_json(&text);
    let is_valid = checked.is_valid();
    json_answer(&FindingsWire { is_valid, findings: checked.findings.into_iter().map(Into::into).collect() })
}

/// Draws a claim workflow as a Mermaid diagram, with its claiming statuses dashed.
#[utoipa::path(
    post,
    path = "/claim-configurations:diagram",
    request_body = DiagramRequest,
    responses(
        (status = 200, description = "The diagram.", body = DiagramWire),
        (status = 400, description = "The configuration is wrong, or has several workflows and none is chosen.",
            body = ProblemShape, content_type = "application/problem+json"),
        (status = 404, description = "The configuration has no such workflow.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn draw_claims(JsonBody(asked): JsonBody<DiagramRequest>) -> Result<Response, Problem> {
    let DiagramRequest { configuration, workflow: asked } = asked;
    let checked = claim::check_json(&configuration.to_string());
    if !checked.is_valid() {
        return Err(wrong_configuration(checked.findings));
    }
    let Checked { workflows, .. } = checked;
    let names: Vec<String> = workflows.iter().map(|workflow| workflow.name.clone()).collect();
    let is_asked = |name: &str| asked.as_deref().is_none_or(|asked| asked == name);
    let mut chosen = workflows.into_iter().filter(|workflow| is_asked(&workflow.name));
    match (chosen.next(), chosen.next(), &asked) {
        (Some(workflow), None, _) => {
            let mermaid = workflow.diagram();
            Ok(json_answer(&DiagramWire { workflow: workflow.name, mermaid }))
        }
        (None, _, Some(asked)) => {
            let detail = format!("the configuration has no claim workflow {asked:?}");
            Err(Problem::new(ProblemCode::NotFound, detail).with("known", names))
        }
        _ => {
            let detail = "choose one of the configuration's workflows with `workflow`";
            Err(Problem::new(ProblemCode::Invalid, detail).with("known", names))
        }
    }
}
