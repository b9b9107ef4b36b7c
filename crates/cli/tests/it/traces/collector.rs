//! A collector of the test: takes batches over HTTP, decodes them, and shows the spans in a form that is easy to
//! compare.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::HeaderMap;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use prost::Message;

/// Batches as they arrived: headers and bodies.
type Batches = Arc<(Mutex<Vec<(HeaderMap, Bytes)>>, Condvar)>;

pub(super) struct Collector {
    pub(super) url: String,
    batches: Batches,
}

/// All spans that have arrived.
pub(super) struct Seen {
    pub(super) spans: Vec<SeenSpan>,
    services: Vec<String>,
}

/// A span; ids are in hexadecimal digits, and times in nanoseconds.
#[derive(Debug)]
pub(super) struct SeenSpan {
    pub(super) trace: String,
    pub(super) id: String,
    /// Empty if there is none.
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) kind: &'static str,
    pub(super) began: u64,
    pub(super) ended: u64,
    attributes: BTreeMap<String, Value>,
    pub(super) links: Vec<(String, String)>,
    pub(super) error: Option<String>,
}

/// Serves in a thread of its own, until the process ends.
pub(super) fn apart(listener: std::net::TcpListener, app: Router) {
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), app).await.unwrap();
        });
    });
}

impl Collector {
    pub(super) fn start() -> Collector {
        let batches = Batches::default();
        let kept = batches.clone();
        let take = async move |headers: HeaderMap, body: Bytes| {
            kept.0.lock().unwrap().push((headers, body));
            kept.1.notify_all();
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        apart(listener, Router::new().route("/v1/traces", post(take)));
        Collector { url, batches }
    }

    /// Waits until what has arrived is enough.
    pub(super) fn until(&self, is_enough: impl Fn(&Seen) -> bool) {
        let batches = self.batches.0.lock().unwrap();
        let limit = Duration::from_secs(30);
        let lacks = |batches: &mut Vec<(HeaderMap, Bytes)>| !is_enough(&Seen::of(batches));
        let (batches, ended) = self.batches.1.wait_timeout_while(batches, limit, lacks).unwrap();
        let names: Vec<String> = Seen::of(&batches).spans.into_iter().map(|span| span.name).collect();
        assert!(!ended.timed_out(), "only these have arrived: {names:?}");
    }

    pub(super) fn seen(&self) -> Seen {
        Seen::of(&self.batches.0.lock().unwrap())
    }

    pub(super) fn headers(&self) -> Vec<HeaderMap> {
        let batches = self.batches.0.lock().unwrap();
        assert!(!batches.is_empty());
        batches.iter().map(|(headers, _)| headers.clone()).collect()
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.batches.0.lock().unwrap().iter().flat_map(|(_, body)| body.to_vec()).collect()
    }
}

impl Seen {
    fn of(batches: &[(HeaderMap, Bytes)]) -> Seen {
        let (mut spans, mut services) = (Vec::new(), Vec::new());
        for (headers, body) in batches {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            for of_resource in ExportTraceServiceRequest::decode(body.clone()).unwrap().resource_spans {
                let resource = attributes(of_resource.resource.unwrap().attributes);
                let Value::StringValue(service) = &resource["service.name"] else { panic!("{resource:?}") };
                services.push(service.clone());
                assert!(resource.contains_key("service.instance.id") && resource.contains_key("service.version"));
                for of_scope in of_resource.scope_spans {
                    assert_eq!(of_scope.scope.unwrap().name, "latchwork");
                    spans.extend(of_scope.spans.into_iter().map(SeenSpan::of));
                }
            }
        }
        services.dedup();
        Seen { spans, services }
    }

    pub(super) fn services(&self) -> &[String] {
        &self.services
    }

    pub(super) fn named(&self, name: &str) -> impl Iterator<Item = &SeenSpan> {
        self.spans.iter().filter(move |span| span.name == name)
    }

    /// The only span of this name.
    pub(super) fn one(&self, name: &str) -> &SeenSpan {
        let names = || self.spans.iter().map(|span| &span.name).collect::<Vec<_>>();
        assert_eq!(self.named(name).count(), 1, "{name}: {:?}", names());
        self.named(name).next().unwrap()
    }

    /// The only span of this name with this text.
    pub(super) fn one_with(&self, name: &str, attribute: &str, text: &str) -> &SeenSpan {
        let has = |span: &&SeenSpan| span.attributes.get(attribute) == Some(&Value::StringValue(text.into()));
        let found: Vec<_> = self.named(name).filter(has).collect();
        assert_eq!(found.len(), 1, "{name}: {:?}", self.spans);
        found[0]
    }
}

impl SeenSpan {
    fn of(span: opentelemetry_proto::tonic::trace::v1::Span) -> SeenSpan {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8));
        let status = span.status.unwrap_or_default();
        SeenSpan {
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            name: span.name,
            kind: ["", "internal", "server", "client"][usize::try_from(span.kind).unwrap()],
            began: span.start_time_unix_nano,
            ended: span.end_time_unix_nano,
            attributes: attributes(span.attributes),
            links: span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect(),
            error: (status.code == 2).then_some(status.message),
        }
    }

    pub(super) fn text(&self, attribute: &str) -> &str {
        match self.attributes.get(attribute) {
            Some(Value::StringValue(text)) => text,
            other => panic!("{attribute} is {other:?} in {self:?}"),
        }
    }

    pub(super) fn number(&self, attribute: &str) -> i64 {
        match self.attributes.get(attribute) {
            Some(Value::IntValue(number)) => *number,
            other => panic!("{attribute} is {other:?} in {self:?}"),
        }
    }
}

fn attributes(all: Vec<KeyValue>) -> BTreeMap<String, Value> {
    all.into_iter().filter_map(|one| Some((one.key, one.value?.value?))).collect()
}
