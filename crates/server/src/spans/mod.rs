//! Traces: which spans there are, how they belong together, and how that is told to others. What outlives a request
//! (an execution, a claim, an after-effect, a task) has a trace of its own, whose id follows from its name; a request
//! that begins it has a link to it. Spans are told to `tracing`; [`SpanLayer`] makes traces of them. Nothing here
//! knows a collector.

mod context;
mod ended;
mod fields;
mod layer;
mod request;
mod shape;
mod tasks;

use latchwork::workflow::Engine;
use tracing::{Span, dispatcher};
use tracing_subscriber::Registry;
use tracing_subscriber::registry::LookupSpan;

pub use context::SpanContext;
pub use ended::{EndedSpan, SpanKind, SpanValue};
pub use layer::SpanLayer;
pub(crate) use request::{known_method, matched, request};
pub(crate) use tasks::{task_ended, traceparent_of_task};

use context::Sampler;
use layer::OpenSpan;

/// The name under which an engine without a name has its traces.
fn name_of(engine: &Engine) -> &str {
    engine.name().unwrap_or(crate::api::DEFAULT)
}

/// How the traces of this program are sampled, if it makes traces.
fn sampler() -> Option<Sampler> {
    dispatcher::get_default(|dispatch| dispatch.downcast_ref::<SpanLayer>().map(SpanLayer::sampler))
}

/// The identity of a span, or of the nearest one around it that is a part of a trace.
pub(crate) fn context_of(span: &Span) -> Option<SpanContext> {
    let found = span.with_subscriber(|(id, dispatch)| {
        let span = dispatch.downcast_ref::<Registry>()?.span(id)?;
        span.scope().find_map(|span| span.extensions().get::<OpenSpan>().map(|open| open.context))
    });
    found.flatten()
}

/// The request that is being answered has to do with this execution: its span has a link to the trace of it.
pub(crate) fn link_to_execution(engine: &Engine, id: &str) {
    let Some(sampler) = sampler() else { return };
    let root = sampler.execution(name_of(engine), id);
    Span::current().record("execution", id).record("link", root.to_string());
}
