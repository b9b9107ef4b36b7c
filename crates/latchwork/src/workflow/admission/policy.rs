//! The rules of a definition for its starts: how many may run, how often, and which are gathered; and what they mean
//! for one start. This file reads and stores nothing.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::panic::message_of;
use crate::workflow::admission::stored::Partition;
use crate::workflow::{Result, WorkflowError};

/// The longest key of a limit, in bytes.
const KEY_BYTES: usize = 512;

/// The largest batch.
const LARGEST_BATCH: u32 = 10_000;

/// Computes a property of a start from its input, which is JSON text.
type OfInput<T> = Arc<dyn Fn(&str) -> Result<T, String> + Send + Sync>;

/// Wraps a function of the input so that it takes JSON text. A panic becomes an error.
fn of_input<I: DeserializeOwned, T>(function: impl Fn(&I) -> T + Send + Sync + 'static) -> OfInput<T> {
    Arc::new(move |input| {
        let input = serde_json::from_str(input).map_err(|error| format!("the input does not fit: {error}"))?;
        let computed = std::panic::catch_unwind(AssertUnwindSafe(|| function(&input)));
        computed.map_err(|panic| format!("the function panicked: {}", message_of(&*panic)))
    })
}

/// What happens to a start when a limit is reached.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// It is rejected with [`WorkflowError::LimitReached`].
    #[default]
    Reject,
    /// It waits in a queue.
    Queue(Queue),
}

impl From<Queue> for WhenFull {
    fn from(queue: Queue) -> WhenFull {
        WhenFull::Queue(queue)
    }
}

/// The queue of starts that wait for a permit. First come, first served, unless a priority or a fair key is set.
///
/// ```
/// use std::time::Duration;
/// use latchwork::workflow::{Ctx, Queue, workflow};
///
/// let import = workflow("import")
///     .concurrency_by(2, |customer: &String| customer.clone())
///     .when_full(Queue::new().depth(1000).timeout(Duration::from_secs(600)))
///     .run(async |_: Ctx, customer: String| Ok(customer));
/// ```
#[derive(Clone, Default)]
#[must_use = "pass the queue to `when_full`"]
pub struct Queue {
    depth: Option<u32>,
    timeout: Option<Duration>,
    priority: Option<(Duration, OfInput<i32>)>,
    fair: Option<OfInput<String>>,
}

impl Queue {
    /// First come, first served, without a limit of length or time.
    ///
    /// ```
    /// # use latchwork::workflow::{Queue, workflow};
    /// let import = workflow("import").concurrency(2).when_full(Queue::new());
    /// ```
    pub fn new() -> Queue {
        Queue::default()
    }

    /// How many starts may wait in one queue. A start beyond that is rejected with [`WorkflowError::QueueFull`].
    ///
    /// ```
    /// # use latchwork::workflow::{Queue, workflow};
    /// let import = workflow("import").concurrency(2).when_full(Queue::new().depth(1000));
    /// ```
    pub fn depth(mut self, depth: u32) -> Queue {
        self.depth = Some(depth);
        self
    }

    /// How long a start waits at most. Then its execution ends as timed out, and none of its code has run.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Queue, workflow};
    /// let queue = Queue::new().timeout(Duration::from_secs(600));
    /// let import = workflow("import").concurrency(2).when_full(queue);
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Queue {
        self.timeout = Some(timeout);
        self
    }

    /// Starts of a higher priority go first. One step of priority counts as much as `ageing` of additional waiting
    /// time. So other starts can overtake a start of low priority only for a limited time.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Queue, workflow};
    /// // The input is a file and its urgency.
    /// let queue = Queue::new().priority(Duration::from_secs(60), |(_, urgency): &(String, i32)| *urgency);
    /// let import = workflow("import").concurrency(2).when_full(queue);
    /// ```
    pub fn priority<I: DeserializeOwned + 'static>(
        mut self,
        ageing: Duration,
        priority: impl Fn(&I) -> i32 + Send + Sync + 'static,
    ) -> Queue {
        self.priority = Some((ageing, of_input(priority)));
        self
    }

    /// Starts of different keys are served in turn, one of each key per round. So a key with many starts does not delay
    /// a key with few. If a priority is also set, one step of it counts as one round.
    ///
    /// ```
    /// # use latchwork::workflow::{Queue, workflow};
    /// // The input is a tenant and a file.
    /// let queue = Queue::new().fair(|(tenant, _): &(String, String)| tenant.clone());
    /// let import = workflow("import").concurrency(2).when_full(queue);
    /// ```
    pub fn fair<I: DeserializeOwned + 'static, K: Into<String>>(
        mut self,
        key: impl Fn(&I) -> K + Send + Sync + 'static,
    ) -> Queue {
        self.fair = Some(of_input(move |input: &I| key(input).into()));
        self
    }
}

/// How often a workflow may be started: a bucket of `max` tokens that fills evenly, completely in `per`. Each start
/// takes a token. A full bucket allows `max` starts at once, and then one more each `per / max`.
#[derive(Clone)]
#[must_use = "a rate limit is given to a definition"]
pub struct RateLimit {
    max: u32,
    per: Duration,
    key: Option<OfInput<String>>,
    delays: bool,
}

impl RateLimit {
    /// Allows `max` starts in `per`. A start beyond that is rejected with [`WorkflowError::RateLimited`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{RateLimit, workflow};
    /// let import = workflow("import").rate_limit(RateLimit::new(100, Duration::from_secs(60)));
    /// ```
    pub fn new(max: u32, per: Duration) -> RateLimit {
        RateLimit { max, per, key: None, delays: false }
    }

    /// Uses one bucket for each key.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{RateLimit, workflow};
    /// let limit = RateLimit::new(100, Duration::from_secs(60)).by(|customer: &String| customer.clone());
    /// let import = workflow("import").rate_limit(limit);
    /// ```
    pub fn by<I: DeserializeOwned + 'static, K: Into<String>>(
        mut self,
        key: impl Fn(&I) -> K + Send + Sync + 'static,
    ) -> RateLimit {
        self.key = Some(of_input(move |input: &I| key(input).into()));
        self
    }

    /// A start that finds no token is not rejected. Its execution begins when there is a token, in the order of starts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{RateLimit, workflow};
    /// let import = workflow("import").rate_limit(RateLimit::new(10, Duration::from_secs(1)).delay());
    /// ```
    pub fn delay(mut self) -> RateLimit {
        self.delays = true;
        self
    }
}

/// Starts that follow each other closely become one execution, which gets the last input.
#[derive(Clone)]
#[must_use = "a debounce is given to a definition"]
pub struct Debounce {
    window: Duration,
    max_wait: Option<Duration>,
    key: Option<OfInput<String>>,
}

impl Debounce {
    /// The execution begins when no further start has come for `window`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Debounce, workflow};
    /// let index = workflow("index").debounce(Debounce::new(Duration::from_secs(5)));
    /// ```
    pub fn new(window: Duration) -> Debounce {
        Debounce { window, max_wait: None, key: None }
    }

    /// The execution begins at most `max_wait` after the first of the starts.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Debounce, workflow};
    /// let debounce = Debounce::new(Duration::from_secs(5)).max_wait(Duration::from_secs(60));
    /// let index = workflow("index").debounce(debounce);
    /// ```
    pub fn max_wait(mut self, max_wait: Duration) -> Debounce {
        self.max_wait = Some(max_wait);
        self
    }

    /// Only starts of the same key become one execution.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Debounce, workflow};
    /// let debounce = Debounce::new(Duration::from_secs(5)).by(|page: &String| page.clone());
    /// let index = workflow("index").debounce(debounce);
    /// ```
    pub fn by<I: DeserializeOwned + 'static, K: Into<String>>(
        mut self,
        key: impl Fn(&I) -> K + Send + Sync + 'static,
    ) -> Debounce {
        self.key = Some(of_input(move |input: &I| key(input).into()));
        self
    }
}

/// Starts that are gathered into one execution, which gets all of their inputs.
#[derive(Clone)]
#[must_use = "a batch is given to a definition"]
pub struct Batch {
    max_size: u32,
    max_wait: Duration,
    key: Option<OfInput<String>>,
}

impl Batch {
    /// The execution begins with `max_size` inputs, or `max_wait` after the first of them.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Batch, workflow};
    /// let send = workflow("send").batch(Batch::new(100, Duration::from_millis(200)));
    /// ```
    pub fn new(max_size: u32, max_wait: Duration) -> Batch {
        Batch { max_size, max_wait, key: None }
    }

    /// Only starts of the same key are gathered together.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Batch, workflow};
    /// // The input is a domain and a text.
    /// let batch = Batch::new(100, Duration::from_millis(200)).by(|(domain, _): &(String, String)| domain.clone());
    /// let send = workflow("send").batch(batch);
    /// ```
    pub fn by<I: DeserializeOwned + 'static, K: Into<String>>(
        mut self,
        key: impl Fn(&I) -> K + Send + Sync + 'static,
    ) -> Batch {
        self.key = Some(of_input(move |input: &I| key(input).into()));
        self
    }
}

/// The rules of a definition for its starts.
#[derive(Clone, Default)]
pub(crate) struct Policy {
    /// How many executions may run: of the whole workflow, and of each key.
    pub(crate) total: Option<u32>,
    pub(crate) each: Option<(u32, OfInput<String>)>,
    pub(crate) when_full: WhenFull,
    pub(crate) rate: Option<RateLimit>,
    pub(crate) debounce: Option<Debounce>,
    pub(crate) batch: Option<Batch>,
    /// Permits are taken in a commit of their own, so that tests can show that they notice.
    pub(crate) permits_apart: bool,
}

/// What one start needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StartNeeds {
    /// The keys of the limits that it must pass, in this order.
    pub(crate) gates: Vec<Option<String>>,
    pub(crate) priority: i32,
    /// The key that a fair queue uses.
    pub(crate) flow: Option<String>,
    /// The key of its bucket, if the workflow has a rate limit.
    pub(crate) bucket: Option<Option<String>>,
    /// The key under which it is gathered, if the workflow gathers starts.
    pub(crate) gathers: Option<Option<String>>,
}

/// How starts are gathered.
pub(crate) enum Gather {
    /// The next input replaces the one before.
    Last { window: Duration, max_wait: Option<Duration> },
    /// All inputs are kept.
    All { max_size: u32, max_wait: Duration },
}

impl Policy {
    /// Sets a limit for each key.
    pub(crate) fn each<I: DeserializeOwned + 'static, K: Into<String>>(
        &mut self,
        max: u32,
        key: impl Fn(&I) -> K + Send + Sync + 'static,
    ) {
        self.each = Some((max, of_input(move |input: &I| key(input).into())));
    }

    /// True if the definition sets no rule for starts.
    pub(crate) fn is_empty(&self) -> bool {
        let Policy { total, each, rate, debounce, batch, .. } = self;
        total.is_none() && each.is_none() && rate.is_none() && debounce.is_none() && batch.is_none()
    }

    /// Rejects rules that make no sense.
    pub(crate) fn check(&self, workflow: &str) -> Result<()> {
        match self.wrong() {
            None => Ok(()),
            Some(reason) => Err(WorkflowError::Policy { workflow: workflow.into(), reason: reason.into() }),
        }
    }

    fn wrong(&self) -> Option<&'static str> {
        let most = self.total.into_iter().chain(self.each.as_ref().map(|(max, _)| *max));
        if most.min() == Some(0) {
            return Some("a concurrency of 0 would admit no execution; the minimum is 1");
        }
        if let WhenFull::Queue(queue) = &self.when_full {
            if self.total.is_none() && self.each.is_none() {
                return Some("a queue needs a limit: set `concurrency` or `concurrency_by` as well");
            }
            if queue.depth == Some(0) {
                return Some("a queue of depth 0 can hold no start; leave `when_full` out to reject starts");
            }
            if queue.timeout.is_some_and(|timeout| timeout.is_zero()) {
                return Some("a queue with a time limit of zero can hold no start");
            }
            if queue.priority.as_ref().is_some_and(|(ageing, _)| ageing.is_zero()) && queue.fair.is_none() {
                return Some("with an ageing of zero a priority would have no effect");
            }
        }
        if let Some(RateLimit { max, per, .. }) = &self.rate {
            if *max == 0 {
                return Some("a rate limit of 0 would admit no execution; the minimum is 1");
            }
            if per.as_micros() < u128::from(*max) {
                return Some("the period of a rate limit must be at least a microsecond for each start");
            }
        }
        if let Some(Debounce { window, max_wait, .. }) = &self.debounce {
            if window.is_zero() {
                return Some("a debounce with a window of zero would gather nothing");
            }
            if max_wait.is_some_and(|most| most < *window) {
                return Some("the window of a debounce is longer than its `max_wait`");
            }
            if self.batch.is_some() {
                return Some("a workflow has a debounce or batches, not both");
            }
        }
        match &self.batch {
            Some(Batch { max_size: 0, .. }) => Some("a batch of 0 inputs can never be full; the minimum is 1"),
            Some(Batch { max_size, .. }) if *max_size > LARGEST_BATCH => Some("a batch has at most 10,000 inputs"),
            Some(Batch { max_wait, .. }) if max_wait.is_zero() => {
                Some("a batch with a `max_wait` of zero would gather nothing")
            }
            _ => None,
        }
    }

    /// The lane that decides everything of a partition. If several rules are set, their keys may differ, and one lane
    /// decides all starts of the workflow.
    pub(crate) fn lane(&self, partition: &Partition) -> Partition {
        let looks = [self.total.is_some(), self.each.is_some(), self.rate.is_some(), self.gather().is_some()];
        match looks.into_iter().filter(|looks| *looks).count() {
            ..=1 => partition.clone(),
            _ => Partition::new(partition.workflow(), None),
        }
    }

    /// The lane that decides a start.
    pub(crate) fn lane_of(&self, workflow: &str, asked: &StartNeeds) -> Partition {
        let key = asked.gates.iter().chain(&asked.bucket).chain(&asked.gathers).next();
        self.lane(&Partition::new(workflow, key.and_then(|key| key.as_deref())))
    }

    /// How many executions a limit admits. None if the workflow no longer has this limit.
    pub(crate) fn most(&self, partition: &Partition) -> Option<u32> {
        match partition.key() {
            Some(_) => self.each.as_ref().map(|(max, _)| *max),
            None => self.total,
        }
    }

    /// True if starts that find a limit reached wait.
    pub(crate) fn queues(&self) -> bool {
        matches!(self.when_full, WhenFull::Queue(_))
    }

    pub(crate) fn is_fair(&self) -> bool {
        matches!(&self.when_full, WhenFull::Queue(queue) if queue.fair.is_some())
    }

    pub(crate) fn depth(&self) -> Option<u32> {
        if let WhenFull::Queue(queue) = &self.when_full { queue.depth } else { None }
    }

    /// How long a start waits in a queue at most.
    pub(crate) fn queue_timeout(&self) -> Option<Duration> {
        if let WhenFull::Queue(queue) = &self.when_full { queue.timeout } else { None }
    }

    /// The waiting time that one step of priority counts for.
    pub(crate) fn ageing(&self) -> Option<Duration> {
        if let WhenFull::Queue(queue) = &self.when_full {
            queue.priority.as_ref().map(|(ageing, _)| *ageing)
        } else {
            None
        }
    }

    /// The size of a bucket, the time in which it fills, and whether starts wait for a token.
    pub(crate) fn bucket(&self) -> Option<(u32, Duration, bool)> {
        self.rate.as_ref().map(|rate| (rate.max, rate.per, rate.delays))
    }

    pub(crate) fn gather(&self) -> Option<Gather> {
        let last = self.debounce.as_ref().map(|it| Gather::Last { window: it.window, max_wait: it.max_wait });
        last.or_else(|| self.batch.as_ref().map(|it| Gather::All { max_size: it.max_size, max_wait: it.max_wait }))
    }

    /// Computes what a start with this input needs. Only here are the functions of the definition called.
    pub(crate) fn asked(&self, workflow: &str, input: &str) -> Result<StartNeeds> {
        let bad = |what: &'static str, reason: String| WorkflowError::Key { workflow: workflow.into(), what, reason };
        let key = |what, function: &OfInput<String>| {
            let key = function(input).map_err(|reason| bad(what, reason))?;
            match key.len() {
                0 => Err(bad(what, "it is empty".into())),
                length if length > KEY_BYTES => {
                    Err(bad(what, format!("it has {length} bytes; the limit is {KEY_BYTES}")))
                }
                _ => Ok(key),
            }
        };
        let optional = |what, function: &Option<OfInput<String>>| function.as_ref().map(|it| key(what, it)).transpose();
        let mut asked = StartNeeds::default();
        if let Some((_, function)) = &self.each {
            asked.gates.push(Some(key("the key of its concurrency", function)?));
        }
        if self.total.is_some() {
            asked.gates.push(None);
        }
        if let WhenFull::Queue(queue) = &self.when_full {
            asked.flow = optional("the key of its fair queue", &queue.fair)?;
            if let Some((_, priority)) = &queue.priority {
                asked.priority = priority(input).map_err(|reason| bad("its priority", reason))?;
            }
        }
        if let Some(rate) = &self.rate {
            asked.bucket = Some(optional("the key of its rate limit", &rate.key)?);
        }
        let gathered = self.debounce.as_ref().map(|it| &it.key).or(self.batch.as_ref().map(|it| &it.key));
        if let Some(function) = gathered {
            asked.gathers = Some(optional("the key under which it is gathered", function)?);
        }
        Ok(asked)
    }
}

impl StartNeeds {
    /// The same for an execution that is never gathered with others.
    pub(crate) fn alone(self) -> StartNeeds {
        StartNeeds { gathers: None, ..self }
    }
}
