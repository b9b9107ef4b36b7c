//! How an engine runs that is not at work: with mocks, with operations that yield, or on a journal alone. The canary
//! requests a replay of a journal; the rest only the feature `testing` can request, and without it the compiler removes
//! those checks.

use std::collections::HashMap;
use std::fmt::Display;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use crate::workflow::{ExecutionId, Failure};

/// What a mock returns in place of a step's body: JSON or a failure.
type MockResult = Result<Value, Failure>;

/// Replaces the body of a step. Its argument is the number of the attempt.
pub(crate) type Mock = Arc<dyn Fn(u32) -> MockResult + Send + Sync>;

/// What a test or the canary has requested.
#[derive(Default)]
pub(crate) struct Rehearsal {
    /// By step name.
    pub(crate) mocks: HashMap<String, Mock>,
    /// True if every operation yields, so that operations that overlap are found however fast the store is.
    pub(crate) is_strict: bool,
    /// True if only the journal is replayed: nothing happens that is not in it.
    pub(crate) is_replay: bool,
    /// Whether virtual time passes, if it does so only while a test drives it.
    pub(crate) time: Option<Arc<Driven>>,
    /// True once the code of a replay has come to an operation that the journal does not answer.
    pub(crate) is_at_end: AtomicBool,
    /// Where a replay and its journal differ.
    pub(crate) differs: Mutex<Option<JournalDifference>>,
}

/// Where code and journal differ, in words.
#[derive(Debug, Clone)]
pub(crate) struct JournalDifference {
    pub(crate) place: String,
    pub(crate) journal: String,
    pub(crate) code: String,
}

/// Whether a test drives virtual time.
#[derive(Default)]
pub(crate) struct Driven {
    active: AtomicUsize,
    begun: AtomicUsize,
}

/// Time passes until this is dropped.
#[cfg(feature = "testing")]
pub(crate) struct Driving<'a>(&'a Driven);

impl Driven {
    #[cfg(feature = "testing")]
    pub(crate) fn begin(&self) -> Driving<'_> {
        self.active.fetch_add(1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::SeqCst);
        Driving(self)
    }
}

#[cfg(feature = "testing")]
impl Drop for Driving<'_> {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How long a caller waits by the machine's clock while virtual time stands still. Then it will never have an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A thread that wakes a task after [`PATIENCE`], unless this is dropped before.
struct Watchdog(Arc<(Mutex<Watching>, Condvar)>);

#[derive(Clone, Copy, PartialEq)]
enum Watching {
    Waits,
    Barked,
    Dropped,
}

impl Watchdog {
    fn start(waker: Waker) -> Watchdog {
        let shared = Arc::new((Mutex::new(Watching::Waits), Condvar::new()));
        let watchdog = Watchdog(shared.clone());
        std::thread::spawn(move || {
            let (state, changed) = &*shared;
            let mut state = state.lock();
            changed.wait_while_for(&mut state, |state| *state == Watching::Waits, PATIENCE);
            if *state == Watching::Waits {
                *state = Watching::Barked;
                drop(state);
                waker.wake();
            }
        });
        watchdog
    }

    fn has_barked(&self) -> bool {
        *self.0.0.lock() == Watching::Barked
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.0.0.lock() = Watching::Dropped;
        self.0.1.notify_all();
    }
}

/// True if a test can request mocks, strict operations and virtual time.
const IS_ON: bool = cfg!(feature = "testing");

impl Rehearsal {
    pub(crate) fn mocked(&self, step: &str, attempt: u32) -> Option<MockResult> {
        if IS_ON { self.mocks.get(step).map(|mock| mock(attempt)) } else { None }
    }

    pub(crate) fn is_strict(&self) -> bool {
        IS_ON && self.is_strict
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.is_replay
    }

    /// The code of a replay has come to an operation that the journal does not answer.
    pub(crate) fn come_to_end(&self) {
        self.is_at_end.store(true, Ordering::SeqCst);
    }

    /// True if a part of the replayed code waits for what the journal does not hold. Other branches may go on.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_replay && self.is_at_end.load(Ordering::SeqCst)
    }

    /// Code and journal differ here. A replay reports the first difference.
    pub(crate) fn differ(&self, place: impl Display, journal: impl Into<String>, code: impl Into<String>) {
        if self.is_replay {
            let difference =
                || JournalDifference { place: place.to_string(), journal: journal.into(), code: code.into() };
            self.differs.lock().get_or_insert_with(difference);
        }
    }

    /// Waits for news of an execution, for a caller outside of it.
    ///
    /// # Panics
    ///
    /// If virtual time has stood still for some real seconds: no news would ever come.
    pub(crate) async fn watch<T>(&self, id: &ExecutionId, news: impl Future<Output = T>) -> T {
        let Some(time) = self.time.as_ref().filter(|_| IS_ON) else { return news.await };
        let mut news = pin!(news);
        let (begun, mut watchdog) = (time.begun.load(Ordering::SeqCst), None);
        std::future::poll_fn(|context| {
            let polled = news.as_mut().poll(context);
            let stands_still = time.active.load(Ordering::SeqCst) == 0 && time.begun.load(Ordering::SeqCst) == begun;
            if polled.is_pending() && stands_still {
                let watchdog = watchdog.get_or_insert_with(|| Watchdog::start(context.waker().clone()));
                assert!(
                    !watchdog.has_barked(),
                    "a caller has waited for execution {id:?} for {} s, and virtual time stood still. On a TestEngine \
                     time passes inside of TestEngine::run: `test.run(handle.result()).await`",
                    PATIENCE.as_secs()
                );
            }
            polled
        })
        .await
    }
}
