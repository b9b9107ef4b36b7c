//! The identity of a span: W3C trace contexts, and identities that follow from names. What outlives a process has a
//! trace whose id is a hash of its name, so that every process and every restart finds the same trace, and nothing is
//! stored. It knows no subscriber.

use std::fmt;

use latchwork::store::Env;
use sha2::{Digest as _, Sha256};

/// The identity of a span, as the header `traceparent` of W3C Trace Context tells it.
///
/// ```
/// use latchwork_server::SpanContext;
///
/// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// let context = SpanContext::read(text).unwrap();
/// assert!(context.is_sampled);
/// assert_eq!(context.to_string(), text);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// The trace. Never 0.
    pub trace: u128,
    /// The span in it. Never 0.
    pub span: u64,
    /// Whether the spans of the trace are recorded.
    pub is_sampled: bool,
}

impl SpanContext {
    /// Reads a `traceparent`. A later version than 00 may have more fields, which are ignored.
    pub fn read(text: &str) -> Option<SpanContext> {
        let mut fields = text.trim().split('-');
        let (version, trace) = (fields.next()?, fields.next()?);
        let (span, flags) = (fields.next()?, fields.next()?);
        let is_over = fields.next().is_none();
        let is_hex = |text: &str, length: usize| {
            text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let fits = is_hex(version, 2) && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
        if !fits || version == "ff" || (version == "00" && !is_over) {
            return None;
        }
        let (trace, span) = (u128::from_str_radix(trace, 16).ok()?, u64::from_str_radix(span, 16).ok()?);
        let is_sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        (trace != 0 && span != 0).then_some(SpanContext { trace, span, is_sampled })
    }

    /// A new span of the same trace.
    pub(super) fn child(self, env: &Env) -> SpanContext {
        SpanContext { span: not_zero(env), ..self }
    }

    /// The span of the same trace that has this name.
    pub(super) fn named(self, what: &str, name: &str) -> SpanContext {
        let trace = format!("{:032x}", self.trace);
        let (_, span) = hashed(&[&trace, what, name]);
        SpanContext { span, ..self }
    }
}

/// As a `traceparent`.
impl fmt::Display for SpanContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.is_sampled))
    }
}

/// Decides which traces are recorded. The decision follows from the id of the trace, so that all nodes agree.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sampler {
    /// The share of the ids that is recorded, in 2^63 parts.
    bound: u64,
}

impl Sampler {
    /// Records this share of the traces: 0 to 1.
    pub(super) fn new(ratio: f64) -> Sampler {
        // A number out of range is cast to the nearest bound.
        Sampler { bound: (ratio * (1_u64 << 63) as f64) as u64 }
    }

    fn records(self, trace: u128) -> bool {
        (trace as u64) >> 1 < self.bound
    }

    /// The first span of a trace of its own.
    pub(super) fn fresh(self, env: &Env) -> SpanContext {
        let trace = u128::from(not_zero(env)) << 64 | u128::from(env.random());
        SpanContext { trace, span: not_zero(env), is_sampled: self.records(trace) }
    }

    /// The root of what has this name in a namespace.
    pub(super) fn root(self, namespace: &str, what: &str, name: &str) -> SpanContext {
        let (trace, span) = hashed(&[namespace, what, name]);
        SpanContext { trace, span, is_sampled: self.records(trace) }
    }

    /// The root of an execution's trace.
    pub(super) fn execution(self, namespace: &str, id: &str) -> SpanContext {
        self.root(namespace, "execution", id)
    }

    /// An attempt at the action of a claim. The first one is the root of the trace.
    pub(super) fn action(self, namespace: &str, claim: &str, attempt: u64) -> SpanContext {
        let root = self.root(namespace, "claim", claim);
        if attempt <= 1 { root } else { root.named("attempt", &attempt.to_string()) }
    }

    /// An attempt at an after-effect. The first one is the root of the trace.
    pub(super) fn after_effect(self, namespace: &str, key: &str, attempt: u64) -> SpanContext {
        let root = self.root(namespace, "after-effect", key);
        if attempt <= 1 { root } else { root.named("attempt", &attempt.to_string()) }
    }
}

fn not_zero(env: &Env) -> u64 {
    env.random().max(1)
}

/// Ids that follow from these texts.
fn hashed(texts: &[&str]) -> (u128, u64) {
    let mut hash = Sha256::new();
    for text in texts {
        // With its length, no text runs into the next one.
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text.as_bytes());
    }
    let bytes = hash.finalize();
    let number = |range: std::ops::Range<usize>| bytes[range].iter().fold(0, |sum, byte| sum << 8 | u128::from(*byte));
    (number(0..16).max(1), (number(16..24) as u64).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_as_the_standard_says() {
        let read = SpanContext::read("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").unwrap();
        assert_eq!((read.trace, read.span), (0x0af7651916cd43dd8448eb211c80319c, 0xb7ad6b7169203331));
        assert!(!read.is_sampled);
        let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03-what-comes-later";
        assert!(SpanContext::read(later).unwrap().is_sampled);
        for wrong in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c8031-b7ad6b7169203331-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(SpanContext::read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_name_has_one_trace_and_other_names_have_others() {
        let sampler = Sampler::new(1.0);
        let root = sampler.execution("default", "order-7");
        assert_eq!(root, sampler.execution("default", "order-7"));
        let others = [
            sampler.execution("default", "order-8"),
            sampler.execution("billing", "order-7"),
            sampler.execution("defaulto", "rder-7"),
            sampler.action("default", "order-7", 1),
            sampler.after_effect("default", "order-7", 1),
        ];
        assert!(others.iter().all(|other| other.trace != root.trace));
        let (first, second) = (sampler.action("default", "c", 1), sampler.action("default", "c", 2));
        assert_eq!(first.trace, second.trace);
        assert_ne!(first.span, second.span);
    }

    #[test]
    fn the_sample_has_about_the_size_that_is_asked_for() {
        for (ratio, least, most) in [(0.0, 0, 0), (0.25, 2300, 2700), (1.0, 10_000, 10_000)] {
            let sampler = Sampler::new(ratio);
            let recorded = (0..10_000).filter(|n| sampler.execution("default", &n.to_string()).is_sampled).count();
            assert!((least..=most).contains(&recorded), "{ratio}: {recorded}");
        }
        let (most, env) = (Sampler::new(1.0), Env::system());
        assert!((0..1000).all(|_| most.fresh(&env).is_sampled));
    }
}
