//! Traces of a server: the spans that have ended wait in a bounded queue, and are sent in batches. Nothing waits for
//! the collector: a span that finds no place is dropped and counted. It knows neither the format nor the connection.

mod otlp;
mod post;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use latchwork::store::Env;
use latchwork_server::{EndedSpan, SpanLayer};
use metrics::counter;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::config::traces::Collector;
use crate::serve::traces::otlp::Resource;
use crate::serve::traces::post::Posted;

/// The number of spans that wait. Each has at most some kilobytes.
const WAITING: usize = 2048;
/// The number of spans of one request.
const BATCH: usize = 512;
/// How long a span waits for others.
const LINGER: Duration = Duration::from_secs(1);
/// How often a batch is sent before it is dropped.
const TRIES: u32 = 4;
/// The pause before a batch is sent again. It doubles each time.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause between two log lines about spans that are dropped.
const TELL: Duration = Duration::from_secs(60);
/// How long the end of the server waits for the last spans.
const FLUSH: Duration = Duration::from_secs(5);

/// Traces that are about to begin: the layer is to be installed first.
pub(crate) struct NewTraces {
    collector: Collector,
    spans: mpsc::Receiver<EndedSpan>,
    crowded_out: Arc<AtomicU64>,
}

/// Traces that are sent, until they are ended.
pub(crate) struct Traces {
    closing: watch::Sender<bool>,
    sender: JoinHandle<()>,
}

/// Sends batches, and tells of what is lost.
struct Sender {
    collector: Collector,
    resource: Resource,
    env: Env,
    /// The number of spans that found no place in the queue.
    crowded_out: Arc<AtomicU64>,
    /// The number of spans that were dropped since the last log line.
    dropped: u64,
    /// The last reason.
    reason: String,
    /// On the monotonic clock.
    told_at: Option<Duration>,
}

/// Prepares traces, and the layer of the subscriber that makes them.
pub(crate) fn prepare(collector: Collector) -> (SpanLayer, NewTraces) {
    let (ended, spans) = mpsc::channel(WAITING);
    let crowded_out = Arc::<AtomicU64>::default();
    let counted = crowded_out.clone();
    let layer = SpanLayer::new(collector.ratio, move |span| {
        if ended.try_send(span).is_err() {
            count("dropped", 1);
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    (layer, NewTraces { collector, spans, crowded_out })
}

impl NewTraces {
    /// Begins to send, in a task of its own.
    pub(crate) fn begin(self) -> Traces {
        let NewTraces { collector, spans, crowded_out } = self;
        tracing::info!(collector = %collector.place, "traces are sent");
        let env = Env::system();
        let resource = Resource::new(&collector.service, env.uuid());
        let (dropped, reason, told_at) = (0, String::new(), None);
        let sender = Sender { collector, resource, env, crowded_out, dropped, reason, told_at };
        let (closing, closed) = watch::channel(false);
        Traces { closing, sender: tokio::spawn(sender.run(spans, closed)) }
    }
}

impl Traces {
    /// Sends what waits, for at most some seconds.
    pub(crate) async fn end(mut self) {
        self.closing.send_replace(true);
        tokio::select! {
            _ = &mut self.sender => {}
            () = Env::system().sleep(FLUSH) => {
                self.sender.abort();
                tracing::warn!("the collector did not take the last spans in time: they are lost");
            }
        }
    }
}

fn count(outcome: &'static str, spans: u64) {
    if spans > 0 {
        counter!("latchwork_trace_spans_total", "outcome" => outcome).increment(spans);
    }
}

impl Sender {
    /// Sends until the server ends, and then what is left.
    async fn run(mut self, mut spans: mpsc::Receiver<EndedSpan>, mut closed: watch::Receiver<bool>) {
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                _ = closed.wait_for(|is_closed| *is_closed) => break,
                received = spans.recv() => match received {
                    Some(span) => batch.push(span),
                    None => break,
                },
            }
            let gathers = self.env.sleep(LINGER);
            tokio::select! {
                // What was received before the time is up stays in the batch.
                () = fill(&mut spans, &mut batch) => {}
                () = gathers => {}
                _ = closed.wait_for(|is_closed| *is_closed) => {}
            }
            self.deliver(&mut batch, &mut closed).await;
            self.tell();
        }
        spans.close();
        while spans.recv_many(&mut batch, BATCH).await > 0 {
            self.deliver(&mut batch, &mut closed).await;
        }
        self.told_at = None;
        self.tell();
    }

    /// Sends a batch, and sends it again if that may help. At the end of the server, it is sent once.
    async fn deliver(&mut self, batch: &mut Vec<EndedSpan>, closed: &mut watch::Receiver<bool>) {
        let spans = batch.len() as u64;
        let body = self.resource.request(batch.drain(..));
        let mut pause = PAUSE;
        for attempt in 1..=TRIES {
            match post::post(&self.collector, &self.env, body.clone()).await {
                Posted::Taken { refused, message } => {
                    let refused = refused.min(spans);
                    count("sent", spans - refused);
                    if refused > 0 {
                        self.drop_all(refused, format!("the collector has refused them: {message}"));
                    }
                    return;
                }
                Posted::Refused(reason) => return self.drop_all(spans, reason),
                Posted::NotNow(reason) if attempt == TRIES || *closed.borrow() => {
                    return self.drop_all(spans, reason);
                }
                Posted::NotNow(reason) => {
                    tracing::debug!(reason, "spans are sent again");
                    tokio::select! {
                        () = self.env.sleep(pause) => {}
                        _ = closed.wait_for(|is_closed| *is_closed) => {}
                    }
                    pause *= 2;
                }
            }
        }
    }

    fn drop_all(&mut self, spans: u64, reason: String) {
        count("dropped", spans);
        self.dropped += spans;
        self.reason = reason;
    }

    /// Tells once in a while of what was dropped.
    fn tell(&mut self) {
        let crowded_out = self.crowded_out.swap(0, Ordering::Relaxed);
        self.dropped += crowded_out;
        if crowded_out > 0 && self.reason.is_empty() {
            self.reason = "more spans end than the collector takes".into();
        }
        let now = self.env.monotonic();
        if self.dropped == 0 || self.told_at.is_some_and(|told_at| now.saturating_sub(told_at) < TELL) {
            return;
        }
        tracing::warn!(spans = self.dropped, reason = self.reason, "spans were dropped");
        (self.dropped, self.told_at) = (0, Some(now));
        self.reason.clear();
    }
}

/// Fills a batch.
async fn fill(spans: &mut mpsc::Receiver<EndedSpan>, batch: &mut Vec<EndedSpan>) {
    while batch.len() < BATCH {
        match spans.recv().await {
            Some(span) => batch.push(span),
            None => return,
        }
    }
}
