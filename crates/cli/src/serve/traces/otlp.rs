//! The messages of the OpenTelemetry protocol: a batch of spans as a request, and what an answer says. It knows the
//! messages only.

use hyper::body::Bytes;
use latchwork::store::Uuid;
use latchwork_server::{EndedSpan, SpanContext, SpanKind, SpanValue};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource as ResourceMessage;
use opentelemetry_proto::tonic::trace::v1::span::{Link, SpanKind as KindNumber};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use prost::Message;

/// The flag of a span that is recorded.
const SAMPLED: u32 = 1;

/// What all spans of the process have in common.
pub(crate) struct Resource {
    attributes: Vec<KeyValue>,
}

impl Resource {
    pub(crate) fn new(service: &str, instance: Uuid) -> Resource {
        let text = |name: &str, text: &str| attribute(name, SpanValue::Text(text.into()));
        let attributes = vec![
            text("service.name", service),
            text("service.version", env!("CARGO_PKG_VERSION")),
            text("service.instance.id", &instance.to_string()),
        ];
        Resource { attributes }
    }

    /// A request with these spans.
    pub(crate) fn request(&self, spans: impl Iterator<Item = EndedSpan>) -> Bytes {
        let scope = InstrumentationScope {
            name: "latchwork".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            ..InstrumentationScope::default()
        };
        let spans = spans.map(message).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, schema_url: String::new() }];
        let resource = ResourceMessage { attributes: self.attributes.clone(), ..ResourceMessage::default() };
        let all = ResourceSpans { resource: Some(resource), scope_spans, schema_url: String::new() };
        ExportTraceServiceRequest { resource_spans: vec![all] }.encode_to_vec().into()
    }
}

/// How many spans a collector has refused, and why. Most answers are empty.
pub(crate) fn refused(answer: &[u8]) -> (u64, String) {
    let read = ExportTraceServiceResponse::decode(answer).ok();
    let partial = read.and_then(|answer| answer.partial_success).unwrap_or_default();
    (u64::try_from(partial.rejected_spans).unwrap_or(0), partial.error_message)
}

fn message(span: EndedSpan) -> Span {
    let EndedSpan { name, kind, context, parent, started, ended, attributes, links, error, .. } = span;
    let kind = match kind {
        SpanKind::Server => KindNumber::Server,
        SpanKind::Client => KindNumber::Client,
        _ => KindNumber::Internal,
    };
    let status = error.map(|error| Status { message: error.into_owned(), code: StatusCode::Error.into() });
    let (trace_id, span_id) = ids(context);
    Span {
        trace_id,
        span_id,
        parent_span_id: parent.map(|parent| parent.to_be_bytes().to_vec()).unwrap_or_default(),
        flags: SAMPLED,
        name,
        kind: kind.into(),
        start_time_unix_nano: started.0.saturating_mul(1000),
        end_time_unix_nano: ended.0.saturating_mul(1000),
        attributes: attributes.into_iter().map(|(name, value)| attribute(name, value)).collect(),
        links: links.into_iter().map(link).collect(),
        status,
        ..Span::default()
    }
}

fn ids(context: SpanContext) -> (Vec<u8>, Vec<u8>) {
    (context.trace.to_be_bytes().to_vec(), context.span.to_be_bytes().to_vec())
}

fn link(context: SpanContext) -> Link {
    let (trace_id, span_id) = ids(context);
    Link { trace_id, span_id, flags: u32::from(context.is_sampled), ..Link::default() }
}

fn attribute(name: &str, value: SpanValue) -> KeyValue {
    let value = match value {
        SpanValue::Text(text) => Value::StringValue(text),
        SpanValue::Number(number) => Value::IntValue(number),
        SpanValue::Flag(flag) => Value::BoolValue(flag),
        other => Value::StringValue(format!("{other:?}")),
    };
    KeyValue { key: name.into(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}
