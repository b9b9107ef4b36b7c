//! Wakes executions that wait. Timers lie in the store in the order of time; this looks at the first of them only, and
//! sleeps until it is due or an earlier one is set.

use std::sync::Weak;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::store::{Order, Timestamp};
use crate::workflow::engine::Inner;
use crate::workflow::record::read_timer_key;

/// How many timers are looked at in one go.
const BATCH: usize = 256;

/// What is told to the one who wakes.
#[derive(Default)]
pub(crate) struct Timers {
    /// The earliest that was set since it looked last.
    earliest: Mutex<Option<Timestamp>>,
    set: Notify,
}

impl Timers {
    /// A timer was committed.
    pub(crate) fn set(&self, due: Timestamp) {
        let mut earliest = self.earliest.lock();
        *earliest = Some(earliest.map_or(due, |earliest| earliest.min(due)));
        drop(earliest);
        self.set.notify_one();
    }
}

/// Wakes executions for as long as the engine lives.
pub(crate) async fn wake(engine: Weak<Inner>) {
    // Everything due up to here was woken. Timers stay where they are until the execution's next commit.
    let mut woken: Option<Vec<u8>> = None;
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let next = match step(&inner, &mut woken).await {
            Ok(next) => next,
            Err(_) => return,
        };
        let (store, timers) = (inner.store.clone(), inner.timers_handle());
        drop(inner);
        match next {
            Some(pause) if pause.is_zero() => continue,
            Some(pause) => {
                let mut sleep = store.env().sleep(pause);
                let mut set = std::pin::pin!(timers.set.notified());
                std::future::poll_fn(|context| {
                    let woken = sleep.as_mut().poll(context).is_ready() || set.as_mut().poll(context).is_ready();
                    if woken { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
                })
                .await;
            }
            None => timers.set.notified().await,
        }
    }
}

/// Wakes what is due. Tells how long it is until the next, if there is one.
async fn step(inner: &std::sync::Arc<Inner>, woken: &mut Option<Vec<u8>>) -> crate::workflow::Result<Option<Duration>> {
    // Time may have gone back since.
    if let Some(earliest) = inner.timers.earliest.lock().take()
        && woken.as_ref().is_some_and(|woken| **woken >= earliest.0.to_be_bytes()[..])
    {
        *woken = Some(earliest.0.saturating_sub(1).to_be_bytes().to_vec());
    }
    let space = &inner.spaces.timers;
    let rest = match woken {
        Some(woken) => space.all().after(&space.key(&*woken)),
        None => space.all(),
    };
    let now = inner.store.env().now();
    let found = inner.store.view().await?.scan(&rest, Order::Ascending, BATCH).await?;
    for (key, _) in &found {
        let Some((due, id)) = read_timer_key(key.bytes()) else { continue };
        if due > now {
            return Ok(Some(Duration::from_micros(due.0 - now.0)));
        }
        *woken = Some(key.bytes().to_vec());
        inner.pick_up(&id).await?;
    }
    Ok((found.len() == BATCH).then_some(Duration::ZERO))
}
