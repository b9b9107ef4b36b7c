//! Alarms: things that are due at a time, in the store in the order of time. Whoever sees to them looks at the first
//! one only, and sleeps until it is due or an earlier one is set; so a million of them cost nothing while they wait.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::store::{Item, Key, Order, Space, StoreError, Timestamp};
use crate::workflow::engine::Inner;
use crate::workflow::record::read_alarm_key;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many alarms are looked at in one go.
const BATCH: usize = 256;

/// How long to wait after the store did not serve.
const PAUSE: Duration = Duration::from_millis(100);

/// What is told to the one who sees to the alarms of a space.
#[derive(Default)]
pub(crate) struct Alarms {
    /// The earliest that was set since it looked last.
    earliest: Mutex<Option<Timestamp>>,
    set: Notify,
}

/// An alarm that is due.
pub(crate) struct Due {
    pub(crate) id: ExecutionId,
    pub(crate) key: Key,
    pub(crate) item: Item,
}

impl Alarms {
    /// An alarm was committed.
    pub(crate) fn set(&self, due: Timestamp) {
        let mut earliest = self.earliest.lock();
        *earliest = Some(earliest.map_or(due, |earliest| earliest.min(due)));
        drop(earliest);
        self.set.notify_one();
    }

    /// Waits until an alarm is set, at most for the pause.
    async fn pause(&self, env: &crate::store::Env, pause: Option<Duration>) {
        let mut set = std::pin::pin!(self.set.notified());
        let mut sleep = pause.map(|pause| env.sleep(pause));
        std::future::poll_fn(|context| {
            let sleep = sleep.as_mut().is_some_and(|sleep| sleep.as_mut().poll(context).is_ready());
            if sleep || set.as_mut().poll(context).is_ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
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
        let pause = match look::<K>(&inner, &mut rung).await {
            Ok(pause) => pause,
            Err(WorkflowError::Store(StoreError::Closed | StoreError::Stopped { .. })) => return,
            Err(_) => Some(PAUSE),
        };
        let (env, alarms) = (inner.store.env().clone(), K::alarms(&inner).clone());
        drop(inner);
        if pause.is_none_or(|pause| !pause.is_zero()) {
            alarms.pause(&env, pause).await;
        }
    }
}

/// Rings what is due. Tells how long it is until the next, if there is one.
async fn look<K: Keeper>(inner: &Arc<Inner>, rung: &mut Vec<u8>) -> Result<Option<Duration>> {
    // Time may have gone back since.
    if let Some(earliest) = K::alarms(inner).earliest.lock().take()
        && **rung > earliest.0.to_be_bytes()[..]
    {
        *rung = earliest.0.to_be_bytes().to_vec();
    }
    let space = K::space(inner);
    let rest = space.all().after(&space.key(&*rung));
    let now = inner.store.env().now();
    let found = inner.store.view().await?.scan(&rest, Order::Ascending, BATCH).await?;
    let (mut due, mut last, mut next) = (Vec::new(), Vec::new(), None);
    for (key, item) in &found {
        let Some((at, id)) = read_alarm_key(key.bytes()) else { continue };
        if at > now {
            next = Some(Duration::from_micros(at.0 - now.0));
            break;
        }
        last = key.bytes().to_vec();
        due.push(Due { id, key: key.clone(), item: item.clone() });
    }
    if !due.is_empty() {
        K::ring(inner, due).await?;
        *rung = last;
    }
    Ok(next.or((found.len() == BATCH).then_some(Duration::ZERO)))
}
