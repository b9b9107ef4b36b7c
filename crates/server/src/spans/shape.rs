//! The spans and events of the library and of this crate that traces are made of: how each is called there, and which
//! names its fields get. Other spans are not a part of traces.

use tracing::Metadata;

use crate::spans::ended::SpanKind;
use crate::spans::fields::Fields;

/// The targets of the library and of this crate start with this.
const OWN: &str = "latchwork";

/// What a span is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// A request to the server.
    Request,
    /// The stay of an execution in memory. It is not sent: the execution has a span from its start to its end.
    Residency,
    /// An execution, from its start to its end.
    Execution,
    /// A run of a step's body.
    Step,
    /// An attempt at a claim action.
    Action,
    /// An attempt at an after-effect.
    AfterEffect,
    /// A call of a worker's endpoint.
    Call,
    /// A task, from the time at which it was put to its end.
    Task,
}

impl Shape {
    pub(super) fn of(metadata: &Metadata<'_>) -> Option<Shape> {
        if !metadata.target().starts_with(OWN) {
            return None;
        }
        Some(match (metadata.is_span(), metadata.name()) {
            (true, "request") => Shape::Request,
            (true, "execution") => Shape::Residency,
            (true, "step") => Shape::Step,
            (true, "action") => Shape::Action,
            (true, "after_effect") => Shape::AfterEffect,
            (true, "call") => Shape::Call,
            (false, "execution.ended") => Shape::Execution,
            (false, "task.ended") => Shape::Task,
            _ => return None,
        })
    }

    pub(super) fn kind(self) -> SpanKind {
        match self {
            Shape::Request => SpanKind::Server,
            Shape::Call => SpanKind::Client,
            _ => SpanKind::Internal,
        }
    }

    /// The name of the span. It has no part that each call chooses anew, such as an id.
    pub(super) fn name(self, fields: &Fields) -> String {
        let with = |word: &str, field: &str| format!("{word} {}", fields.text(field).unwrap_or_default());
        let name = match self {
            Shape::Request => with(fields.text("method").unwrap_or("HTTP"), "route"),
            Shape::Residency | Shape::Execution => with("workflow", "workflow"),
            Shape::Step => with("step", "name"),
            Shape::Action => with("action", "name"),
            Shape::AfterEffect => with("after-effect", "name"),
            Shape::Call => fields.text("method").unwrap_or("HTTP").to_string(),
            Shape::Task => with("task", "kind"),
        };
        name.trim_end().to_string()
    }

    /// The name of the attribute that a field becomes, if it becomes one.
    pub(super) fn attribute(self, field: &str) -> Option<&'static str> {
        let is_claim = matches!(self, Shape::Action | Shape::AfterEffect);
        let is_http = matches!(self, Shape::Request | Shape::Call);
        Some(match field {
            "namespace" => "latchwork.namespace",
            "workflow" if is_claim => "latchwork.claim.workflow",
            "workflow" => "latchwork.workflow",
            "execution" => "latchwork.execution.id",
            "id" if self == Shape::Task => "latchwork.task.id",
            "id" => "latchwork.execution.id",
            "kind" => "latchwork.task.kind",
            "name" if self == Shape::Action => "latchwork.action",
            "name" if self == Shape::AfterEffect => "latchwork.after_effect",
            "name" => "latchwork.step",
            "step" => "latchwork.claim.step",
            "attempt" => "latchwork.attempt",
            "entity" => "latchwork.entity.id",
            "claim" => "latchwork.claim.id",
            "method" => "http.request.method",
            "route" => "http.route",
            "path" => "url.path",
            "status" if is_http => "http.response.status_code",
            "status" => "latchwork.status",
            "host" => "server.address",
            "port" => "server.port",
            _ => return None,
        })
    }
}
