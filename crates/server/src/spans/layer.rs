//! Watches the spans of this process that traces are made of, gives each its identity, and hands it over when it has
//! ended. It knows neither a collector nor a protocol.

use std::borrow::Cow;
use std::time::Duration;

use latchwork::store::{Env, Timestamp};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, SpanRef};

use crate::spans::context::{Sampler, SpanContext};
use crate::spans::ended::EndedSpan;
use crate::spans::fields::Fields;
use crate::spans::shape::Shape;

/// The namespace of an engine without a name.
const DEFAULT: &str = crate::api::DEFAULT;
/// Links of a span, at most.
const LINKS: usize = 32;

/// Makes traces of what the server and the library tell `tracing`: requests, executions, steps, claim actions,
/// after-effects, tasks, and calls of endpoints.
///
/// It is a layer of the program's subscriber. While there is one, requests continue the trace of their `traceparent`,
/// calls of endpoints send one, and tasks tell one.
///
/// ```
/// use latchwork_server::{EndedSpan, SpanLayer};
/// use tracing_subscriber::Layer;
/// use tracing_subscriber::filter::filter_fn;
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let (ended, to_send) = std::sync::mpsc::sync_channel::<EndedSpan>(2048);
/// // A span that finds no place is lost: nothing waits for a collector.
/// let spans = SpanLayer::new(0.1, move |span| drop(ended.try_send(span)));
/// let subscriber = tracing_subscriber::registry().with(spans.with_filter(filter_fn(SpanLayer::wants)));
/// # let _ = (subscriber, to_send);
/// ```
pub struct SpanLayer {
    sampler: Sampler,
    env: Env,
    ended: Box<dyn Fn(EndedSpan) + Send + Sync>,
}

/// A span that has not ended.
pub(super) struct OpenSpan {
    shape: Shape,
    pub(super) context: SpanContext,
    parent: Option<u64>,
    started: Timestamp,
    /// On the monotonic clock.
    began: Duration,
    fields: Fields,
    links: Vec<SpanContext>,
}

/// What a span takes from the one around it.
struct Around {
    shape: Shape,
    context: SpanContext,
    inherited: Vec<(&'static str, String)>,
}

impl SpanLayer {
    /// Records this share of the traces, from 0 to 1, and calls `ended` with each of their spans. A trace that begins
    /// elsewhere is recorded if its `traceparent` says so. `ended` is called wherever a span ends, so it must not wait.
    pub fn new(ratio: f64, ended: impl Fn(EndedSpan) + Send + Sync + 'static) -> SpanLayer {
        SpanLayer { sampler: Sampler::new(ratio), env: Env::system(), ended: Box::new(ended) }
    }

    /// True for the spans and events that it uses, for a filter.
    pub fn wants(metadata: &Metadata<'_>) -> bool {
        Shape::of(metadata).is_some()
    }

    pub(super) fn sampler(&self) -> Sampler {
        self.sampler
    }

    /// The identity of a new span, and its parent.
    fn identity(&self, shape: Shape, fields: &mut Fields, around: Option<&Around>) -> (SpanContext, Option<u64>) {
        let namespace = fields.text("namespace").unwrap_or(DEFAULT);
        let (name, attempt) = (|field: &str| fields.text(field).unwrap_or_default(), fields.number("attempt"));
        let beneath = |parent: SpanContext| (parent.child(&self.env), Some(parent.span));
        match shape {
            Shape::Residency | Shape::Execution => (self.sampler.execution(namespace, name("id")), None),
            Shape::Action => (self.sampler.action(namespace, name("claim"), attempt.unwrap_or(1)), None),
            Shape::AfterEffect => (self.sampler.after_effect(namespace, name("key"), attempt.unwrap_or(1)), None),
            Shape::Request => {
                let told = fields.take_text("traceparent").and_then(|text| SpanContext::read(&text));
                told.map_or_else(|| (self.sampler.fresh(&self.env), None), beneath)
            }
            Shape::Step | Shape::Call => match around {
                Some(around) => beneath(around.context),
                None => (self.sampler.fresh(&self.env), None),
            },
            Shape::Task => {
                let owner = fields.text("owner").and_then(SpanContext::read);
                let context = fields.text("context").and_then(SpanContext::read);
                (context.unwrap_or_else(|| self.sampler.fresh(&self.env)), owner.map(|owner| owner.span))
            }
        }
    }

    /// Hands over a span.
    fn hand_over(&self, open: OpenSpan, ended: Timestamp) {
        let OpenSpan { shape, context, parent, started, fields, links, .. } = open;
        if !context.is_sampled || shape == Shape::Residency {
            return;
        }
        let failed = |status| status >= 500 && shape == Shape::Request;
        let error = match fields.text("error") {
            Some(error) => Some(Cow::Owned(error.to_string())),
            None => fields.number("status").filter(|status| failed(*status)).map(|_| Cow::Borrowed("")),
        };
        let name = shape.name(&fields);
        // A path that no route has may be anything, for example an address that was mistyped.
        let has_route = fields.text("route").is_some();
        let attributes = fields.into_all().filter(|(field, _)| *field != "path" || has_route);
        let attributes = attributes.filter_map(|(field, value)| Some((shape.attribute(field)?, value))).collect();
        let kind = shape.kind();
        (self.ended)(EndedSpan { name, kind, context, parent, started, ended, attributes, links, error });
    }
}

impl OpenSpan {
    fn link(&mut self, other: SpanContext) {
        if self.links.len() < LINKS && !self.links.contains(&other) {
            self.links.push(other);
        }
    }
}

/// The nearest span around this one that is a part of a trace.
fn around<S: for<'a> LookupSpan<'a>>(span: &SpanRef<'_, S>) -> Option<Around> {
    span.scope().skip(1).find_map(|outer| {
        let extensions = outer.extensions();
        let open = extensions.get::<OpenSpan>()?;
        let id = if open.shape == Shape::Residency { "id" } else { "execution" };
        let taken = |name: &'static str, field: &str| open.fields.text(field).map(|text| (name, text.to_string()));
        let workflow = matches!(open.shape, Shape::Residency | Shape::Step).then(|| taken("workflow", "workflow"));
        let inherited = [taken("namespace", "namespace"), taken("execution", id), workflow.flatten()];
        let inherited = inherited.into_iter().flatten().collect();
        Some(Around { shape: open.shape, context: open.context, inherited })
    })
}

/// A span that links to another one, which began in it.
fn link_back<S: for<'a> LookupSpan<'a>>(span: &SpanRef<'_, S>, other: SpanContext) {
    for outer in span.scope().skip(1) {
        if let Some(open) = outer.extensions_mut().get_mut::<OpenSpan>() {
            return open.link(other);
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let (Some(shape), Some(span)) = (Shape::of(attributes.metadata()), context.span(id)) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let around = around(&span);
        let (context, parent) = self.identity(shape, &mut fields, around.as_ref());
        let (started, began) = (self.env.now(), self.env.monotonic());
        let mut open = OpenSpan { shape, context, parent, started, began, fields, links: Vec::new() };
        match &around {
            // It has a trace of its own, because it may begin again without the span around it.
            Some(around) if context.trace != around.context.trace && around.shape != Shape::Residency => {
                open.link(around.context);
                link_back(&span, context);
            }
            Some(around) if parent.is_some() => {
                around.inherited.iter().for_each(|(name, text)| open.fields.inherit(name, text));
            }
            _ => {}
        }
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(open) = extensions.get_mut::<OpenSpan>() else { return };
        values.record(&mut open.fields);
        if let Some(link) = open.fields.take_text("link").and_then(|text| SpanContext::read(&text)) {
            open.link(link);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(shape) = Shape::of(event.metadata()) else { return };
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (context, parent) = self.identity(shape, &mut fields, None);
        let (now, began) = (self.env.now(), self.env.monotonic());
        let started = fields.number("started_us").map_or(now, Timestamp);
        let namespace = fields.text("namespace").unwrap_or(DEFAULT);
        let links = fields.text("parent_id").map(|parent| self.sampler.execution(namespace, parent));
        let links = links.into_iter().collect();
        let open = OpenSpan { shape, context, parent, started, began, fields, links };
        self.hand_over(open, now.max(started));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(open) = span.extensions_mut().remove::<OpenSpan>() else { return };
        // The length is that of the monotonic clock.
        let ended = open.started.plus(self.env.monotonic().saturating_sub(open.began));
        self.hand_over(open, ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing::field::Empty;
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::layer::{Identity, SubscriberExt};

    use crate::spans::{SpanValue, context_of};

    /// The spans that end in a piece of code.
    fn ended(ratio: f64, code: impl FnOnce()) -> Vec<EndedSpan> {
        let ended = Arc::<Mutex<Vec<EndedSpan>>>::default();
        let kept = ended.clone();
        let layer = SpanLayer::new(ratio, move |span| kept.lock().push(span));
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter_fn(SpanLayer::wants)));
        // Another layer, which wants every span.
        let subscriber = subscriber.with(Identity::new());
        tracing::subscriber::with_default(subscriber, code);
        std::mem::take(&mut *ended.lock())
    }

    fn text(span: &EndedSpan, name: &str) -> Option<String> {
        span.attributes.iter().find_map(|(known, value)| match value {
            SpanValue::Text(text) if *known == name => Some(text.clone()),
            _ => None,
        })
    }

    #[test]
    fn a_step_belongs_to_its_execution_whatever_is_between() {
        let spans = ended(1.0, || {
            let execution = tracing::info_span!("execution", namespace = "b", workflow = "order", id = "o-1");
            let other = execution.in_scope(|| tracing::info_span!(target: "shop", "step", name = "of the program"));
            let step = other.in_scope(|| tracing::info_span!("step", name = "charge", attempt = 2, error = Empty));
            assert_eq!(context_of(&other), Some(Sampler::new(1.0).execution("b", "o-1")));
            step.record("error", "ä".repeat(1000));
        });
        assert_eq!(spans.len(), 1, "neither a stay in memory nor a span of the program is sent");
        let (step, root) = (&spans[0], Sampler::new(1.0).execution("b", "o-1"));
        assert_eq!((step.name.as_str(), step.parent, step.context.trace), ("step charge", Some(root.span), root.trace));
        assert_eq!(text(step, "latchwork.execution.id").as_deref(), Some("o-1"));
        assert_eq!(text(step, "latchwork.namespace").as_deref(), Some("b"));
        assert_eq!(step.error.as_deref().map(str::len), Some(1024), "a text has a bound");
        assert!(!step.attributes.iter().any(|(name, _)| *name == "error"));
    }

    #[test]
    fn a_path_without_a_route_and_a_trace_that_is_not_sampled_are_not_told() {
        let request = |route: Option<&str>, traceparent: Option<&str>| {
            drop(tracing::debug_span!("request", method = "GET", route, path = "/secret", traceparent, status = 200));
        };
        let spans = ended(0.0, || {
            request(Some("/v1/locks"), None);
            request(None, Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
            request(Some("/v1/locks"), Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"));
        });
        assert_eq!(spans.len(), 1);
        assert_eq!((spans[0].name.as_str(), text(&spans[0], "url.path")), ("GET", None));
        assert_eq!(spans[0].parent, Some(0xb7ad6b7169203331));
    }

    #[test]
    fn an_action_and_the_request_around_it_have_links() {
        let spans = ended(1.0, || {
            let request = tracing::debug_span!("request", method = "POST", status = Empty);
            let action = request.in_scope(|| tracing::info_span!("action", name = "Pay", claim = "c", attempt = 1));
            drop(action);
            request.record("status", 503);
        });
        let [action, request] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((&action.links, action.parent), (&vec![request.context], None));
        assert_eq!(request.links, [action.context]);
        assert_eq!((request.error.as_deref(), &action.error), (Some(""), &None));
    }

    #[test]
    fn the_end_of_an_execution_is_a_span_from_its_start() {
        let spans = ended(1.0, || {
            let parent_id = Some("o-1");
            tracing::debug!(name: "execution.ended", parent: None, workflow = "pay", id = "o-2", parent_id,
                started_us = 7_u64, status = "failed", error = "no card", "an execution has ended");
        });
        let sampler = Sampler::new(1.0);
        let [span] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((span.context, span.started), (sampler.execution(DEFAULT, "o-2"), Timestamp(7)));
        assert_eq!(span.links, [sampler.execution(DEFAULT, "o-1")]);
        assert_eq!((span.name.as_str(), span.error.as_deref()), ("workflow pay", Some("no card")));
        assert!(span.ended > span.started);
    }
}
