//! Who polls a connection. A task does; but a caller that is alone on a connection polls it itself while it waits: what
//! it asks is sent by its own task, and the answer wakes that task, without a detour over another one. Knows no
//! statement.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::{Mutex, MutexGuard};

use crate::postgres::link::Wire;

/// A connection that several tasks poll. Its socket, and its queue of statements to send, wake the task that polled
/// last. That is a caller only while no other caller waits, so no caller depends on the progress of another. In all
/// other cases it is the task that stays: a caller that is done, or no longer alone, polls once more with the waker of
/// that task.
///
/// The lock is only tried. A waker that is dropped under it may drop a future, which then takes the lock as well. Where
/// the lock is held, its holder polls at this moment, and looks afterwards whether the connection must be given back.
pub(super) struct Driver {
    state: Mutex<State>,
    /// How many callers wait for answers.
    waiting: AtomicUsize,
    /// A caller has left before its answer came, so the server may still work for it.
    is_behind: AtomicBool,
}

struct State {
    /// None after the connection has ended.
    wire: Option<Wire>,
    /// Wakes the task that stays.
    staying: Option<Waker>,
}

impl Driver {
    /// Polls a connection in a task of the present runtime, until it ends.
    pub(super) fn start(wire: Wire) -> Arc<Driver> {
        let state = Mutex::new(State { wire: Some(wire), staying: None });
        let driver = Arc::new(Driver { state, waiting: AtomicUsize::new(0), is_behind: AtomicBool::new(false) });
        let staying = driver.clone();
        tokio::spawn(poll_fn(move |context| staying.stay(context)));
        driver
    }

    fn stay(&self, context: &mut Context<'_>) -> Poll<()> {
        // No lock is held here, so this waits for a holder and not for itself.
        let mut state = self.state.lock();
        // A caller has seen its end. Further callers may still take the lock, so it is not only tried.
        if state.wire.is_none() {
            return Poll::Ready(());
        }
        let before = state.staying.replace(context.waker().clone());
        drop(state);
        drop(before);
        if self.poll(context) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Does work that waits for answers of the connection, and polls the connection meanwhile.
    pub(super) async fn drive<T>(&self, work: impl Future<Output = T>) -> T {
        let mut waits = Waits::on(self);
        let (mut work, inner) = (pin!(work), Arc::new(InnerWaker::default()));
        let waker = Waker::from(inner.clone());
        let done = poll_fn(|context| {
            inner.begin(context.waker());
            let mut inside = Context::from_waker(&waker);
            for _ in 0..AT_ONCE {
                if self.is_alone() {
                    self.poll(&mut inside);
                }
                // Another caller may have come meanwhile, and found the lock held.
                if !self.is_alone() {
                    self.give_back();
                }
                if let Poll::Ready(done) = work.as_mut().poll(&mut inside) {
                    return Poll::Ready(done);
                }
                if inner.rests() {
                    return Poll::Pending;
                }
            }
            inner.goes_on_later();
            Poll::Pending
        });
        let done = done.await;
        waits.has_answer = true;
        done
    }

    /// Whether no caller waits, and what is sent next is done next, as far as is known.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0 && !self.is_behind.load(Ordering::Relaxed)
    }

    /// Pairs with the fence of a caller that begins to wait: either it finds the lock free, or it is seen here.
    fn is_alone(&self) -> bool {
        fence(Ordering::SeqCst);
        self.waiting.load(Ordering::SeqCst) <= 1
    }

    /// Sends and receives what is there. Gives whether the connection has ended.
    fn poll(&self, context: &mut Context<'_>) -> bool {
        self.state.try_lock().is_some_and(|state| poll_locked(state, context))
    }

    fn give_back(&self) {
        let Some(state) = self.state.try_lock() else { return };
        if let Some(staying) = state.staying.clone() {
            poll_locked(state, &mut Context::from_waker(&staying));
        }
    }
}

fn poll_locked(mut state: MutexGuard<'_, State>, context: &mut Context<'_>) -> bool {
    let Some(wire) = &mut state.wire else { return true };
    // The client gets the errors of its connection.
    if Pin::new(wire).poll(context).is_pending() {
        return false;
    }
    let (ended, staying) = (state.wire.take(), state.staying.take());
    drop(state);
    drop(ended);
    staying.iter().for_each(Waker::wake_by_ref);
    true
}

/// The work sends and the connection delivers within one poll, and each wakes the other. Such a wake-up is a reason to
/// go on in that poll, and none to schedule the task once more: a runtime may move it to another thread for that.
#[derive(Default)]
struct InnerWaker {
    state: AtomicU8,
    task: Mutex<Option<Waker>>,
}

/// Wake-ups are for the task.
const RESTS: u8 = 0;
/// The task is being polled, or has what it waited for.
const POLLED: u8 = 1;
/// The task is being polled, and there was a wake-up.
const WOKEN: u8 = 2;

/// How often work and connection are polled in one poll of the task: once to send, once to receive, and a reserve. Both
/// may also be woken because the runtime wants them to stop for others.
const AT_ONCE: usize = 3;

impl InnerWaker {
    fn begin(&self, waker: &Waker) {
        self.state.store(POLLED, Ordering::SeqCst);
        let mut task = self.task.lock();
        if task.as_ref().is_none_or(|task| !task.will_wake(waker)) {
            let old = task.replace(waker.clone());
            drop(task);
            drop(old);
        }
    }

    /// Ends the poll of the task, unless there was a wake-up since work and connection were polled.
    fn rests(&self) -> bool {
        let rests = self.state.compare_exchange(POLLED, RESTS, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !rests {
            self.state.store(POLLED, Ordering::SeqCst);
        }
        rests
    }

    fn goes_on_later(&self) {
        self.state.store(RESTS, Ordering::SeqCst);
        self.wake_task();
    }

    fn wake_task(&self) {
        let task = self.task.lock().clone();
        task.iter().for_each(Waker::wake_by_ref);
    }
}

impl Wake for InnerWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.compare_exchange(POLLED, WOKEN, Ordering::SeqCst, Ordering::SeqCst) == Err(RESTS) {
            self.wake_task();
        }
    }
}

/// A caller that waits for answers. It may also be dropped before it has them.
struct Waits<'a> {
    driver: &'a Driver,
    has_answer: bool,
}

impl Waits<'_> {
    fn on(driver: &Driver) -> Waits<'_> {
        driver.waiting.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Waits { driver, has_answer: false }
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        // Answers come in the order of what was sent: with this one, those of earlier callers have come.
        self.driver.is_behind.store(!self.has_answer, Ordering::Relaxed);
        self.driver.waiting.fetch_sub(1, Ordering::SeqCst);
        self.driver.give_back();
    }
}
