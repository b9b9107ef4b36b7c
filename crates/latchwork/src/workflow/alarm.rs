//! Alarms: things that are due at a time, in the store in the order of time. Whoever sees to them looks at the first
//! one only, and sleeps until it is due or an earlier one is set; so a million of them cost nothing while they wait.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::damage::{Scanned, scan_around};
use crate::store::{Env, Item, Key, Space, StoreError, Timestamp};
use crate::workflow::engine::Inner;
use crate::workflow::record::read_alarm_key;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many alarms are looked at in one go.
const BATCH: usize = 256;

/// How long it sleeps at the most: the time of day may be set forward meanwhile, or the machine have slept.
const LONGEST: Duration = Duration::from_secs(600);

/// How long to wait after the store did not serve.
const PAUSE: Duration = Duration::from_millis(100);

/// What is told to the one who sees to the alarms of a space.
#[derive(Default)]
pub(crate) struct Alarms {
    state: Mutex<Heard>,
    set: Notify,
}

#[derive(Default)]
struct Heard {
    /// The earliest that was set since it looked last, as far as it has to know.
    earliest: Option<Timestamp>,
    /// It sleeps for this alarm, and until then by the clock that is never set. It need not know of what is due later
    /// than both.
    sleeps: Option<(Timestamp, Duration)>,
}

/// An alarm that is due.
pub(crate) struct Due {
    pub(crate) id: ExecutionId,
    pub(crate) key: Key,
    pub(crate) item: Item,
}

impl Alarms {
    /// An alarm was committed. Time may have jumped since somebody went to sleep. If it went ahead, that is longer than
    /// until what it sleeps for, and perhaps longer than until this; if it went back, this may be due before alarms
    /// that were rung.
    pub(crate) fn set(&self, due: Timestamp, env: &Env) {
        let mut told = self.state.lock();
        let wakes = |until| until <= env.monotonic().saturating_add(left(due, env));
        if told.sleeps.is_some_and(|(next, until)| next <= due && wakes(until)) {
            return;
        }
        told.earliest = Some(told.earliest.map_or(due, |earliest| earliest.min(due)));
        drop(told);
        self.set.notify_one();
    }

    /// Waits until the next alarm is due, or at most for a pause, or until an earlier one is set.
    async fn wait(&self, env: &Env, next: Next) {
        let (due, pause) = match next {
            Next::Due(due) => (Some(due), Some(left(due, env).min(LONGEST))),
            Next::Nothing => (None, None),
            Next::Again(pause) => (None, Some(pause)),
        };
        {
            let mut told = self.state.lock();
            if told.earliest.is_some() {
                return;
            }
            told.sleeps = due.zip(pause.map(|pause| env.monotonic().saturating_add(pause)));
        }
        let mut set = std::pin::pin!(self.set.notified());
        let mut sleep = pause.map(|pause| env.sleep(pause));
        std::future::poll_fn(|context| {
            let sleep = sleep.as_mut().is_some_and(|sleep| sleep.as_mut().poll(context).is_ready());
            if sleep || set.as_mut().poll(context).is_ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.state.lock().sleeps = None;
    }
}

/// How long it is until then, by the time of day.
fn left(due: Timestamp, env: &Env) -> Duration {
    Duration::from_micros(due.0.saturating_sub(env.now().0))
}

/// When to look again.
enum Next {
    Due(Timestamp),
    Nothing,
    Again(Duration),
}

/// Where a kind of alarm lies, and what is done with those that are due.
pub(crate) trait Keeper: Send + Sync + 'static {
    fn space(engine: &Inner) -> &Space;
    fn alarms(engine: &Inner) -> &Arc<Alarms>;
    fn ring(engine: &Arc<Inner>, due: Vec<Due>) -> impl Future<Output = Result<()>> + Send;
}

/// Sees to alarms for as long as the engine lives.
pub(crate) async fn keep<K: Keeper>(engine: Weak<Inner>, from: Timestamp) {
    // Everything due before here was rung. It stays where it is until somebody commits that it is done.
    let mut rung = from.0.to_be_bytes().to_vec();
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let next = match look::<K>(&inner, &mut rung).await {
            Ok(next) => next,
            Err(WorkflowError::Store(StoreError::Closed | StoreError::Stopped { .. })) => return,
            Err(_) => Next::Again(PAUSE),
        };
        let (env, alarms) = (inner.store.env().clone(), K::alarms(&inner).clone());
        drop(inner);
        if !matches!(next, Next::Again(Duration::ZERO)) {
            alarms.wait(&env, next).await;
        }
    }
}

/// Rings what is due. Tells when to look again.
async fn look<K: Keeper>(inner: &Arc<Inner>, rung: &mut Vec<u8>) -> Result<Next> {
    // Time may have gone back since.
    if let Some(earliest) = K::alarms(inner).state.lock().earliest.take()
        && **rung > earliest.0.to_be_bytes()[..]
    {
        *rung = earliest.0.to_be_bytes().to_vec();
    }
    let space = K::space(inner);
    let rest = space.all().after(&space.key(&*rung));
    let now = inner.store.env().now();
    // Most often only the first is looked at.
    let view = inner.store.view().await?;
    let mut scanned = scan_around(&view, space, &rest, 1).await?;
    if scanned.found.first().is_some_and(|(key, _)| read_alarm_key(key.bytes()).is_none_or(|(at, _)| at <= now)) {
        scanned = scan_around(&view, space, &rest, BATCH).await?;
    }
    drop(view);
    let Scanned { found, damaged } = scanned;
    damaged.iter().for_each(|key| inner.pass_over(key, read_alarm_key(key.bytes()).map(|(_, id)| id)));
    let (mut due, mut last, mut next) = (Vec::new(), None, None);
    for (key, item) in &found {
        let alarm = read_alarm_key(key.bytes());
        if let Some((at, _)) = alarm.as_ref().filter(|(at, _)| *at > now) {
            next = Some(Next::Due(*at));
            break;
        }
        last = Some(key.bytes().to_vec());
        match alarm {
            Some((_, id)) => due.push(Due { id, key: key.clone(), item: item.clone() }),
            None => inner.pass_over(key, None),
        }
    }
    if !due.is_empty() {
        K::ring(inner, due).await?;
    }
    last.into_iter().for_each(|last| *rung = last);
    let rest = if found.len() == BATCH { Next::Again(Duration::ZERO) } else { Next::Nothing };
    Ok(next.unwrap_or(rest))
}
