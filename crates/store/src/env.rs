//! Time, ids and randomness as parameters. Only this module reads the machine's clock, sleeps by it or uses its
//! entropy. All other code asks an [`Env`], so that a whole system can run on virtual time from a seed.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::CommitId;

/// Microseconds since 1970, by the clock of the environment. In JSON it is that number, and it compares with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The time `duration` earlier, or 1970.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Timestamp;
    /// assert_eq!(Timestamp(3_000_000).minus(Duration::from_secs(1)), Timestamp(2_000_000));
    /// ```
    pub fn minus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_sub(micros(duration)))
    }

    /// The time `duration` later.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Timestamp;
    /// assert_eq!(Timestamp(3_000_000).plus(Duration::from_secs(1)), Timestamp(4_000_000));
    /// ```
    pub fn plus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(micros(duration)))
    }

    /// How much later this is than `earlier`; zero if it is not later.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Timestamp;
    /// assert_eq!(Timestamp(3_000_000).since(Timestamp(2_000_000)), Duration::from_secs(1));
    /// ```
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The source of time and randomness.
#[derive(Clone)]
pub struct Env {
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
}

/// A source of time.
pub trait Clock: Send + Sync {
    /// The time of day. It may jump.
    fn now(&self) -> Timestamp;
    /// Time since some fixed moment. It never goes back.
    fn monotonic(&self) -> Duration;
    /// Resolves once `duration` of monotonic time has passed since this was called.
    fn sleep(&self, duration: Duration) -> Sleep;
}

/// Resolves when its time is over. Dropping it cancels the sleep.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A source of randomness.
pub trait Random: Send + Sync {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]);
}

impl Env {
    /// The machine's clock and entropy.
    ///
    /// ```
    /// # use latchwork_store::Env;
    /// println!("it is {}", Env::system().now());
    /// ```
    pub fn system() -> Env {
        Env { clock: Arc::new(SystemClock::new()), random: Arc::new(SystemRandom(Mutex::default())) }
    }

    /// A clock that moves only when a test advances it, and randomness that follows from `seed` alone.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Env;
    /// let (env, clock) = Env::seeded(7);
    /// let before = env.now();
    /// clock.advance(Duration::from_secs(60));
    /// assert_eq!(env.now().since(before), Duration::from_secs(60));
    /// ```
    pub fn seeded(seed: u64) -> (Env, Arc<VirtualClock>) {
        let clock = Arc::new(VirtualClock::default());
        let random = Arc::new(SeededRandom(Mutex::new(fastrand::Rng::with_seed(seed))));
        (Env { clock: clock.clone(), random }, clock)
    }

    /// An environment with the given clock and randomness.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use latchwork_store::{Env, Random, VirtualClock};
    /// # struct Zeros;
    /// # impl Random for Zeros {
    /// #     fn fill(&self, bytes: &mut [u8]) {
    /// #         bytes.fill(0);
    /// #     }
    /// # }
    /// // `Zeros` is a `Random` that fills everything with zeros.
    /// let env = Env::new(Arc::new(VirtualClock::default()), Arc::new(Zeros));
    /// assert_eq!(env.random(), 0);
    /// ```
    pub fn new(clock: Arc<dyn Clock>, random: Arc<dyn Random>) -> Env {
        Env { clock, random }
    }

    /// The time of day. It may jump.
    ///
    /// ```
    /// # use latchwork_store::Env;
    /// println!("it is {}", Env::system().now());
    /// ```
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Time since some fixed moment. It never goes back.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Env;
    /// # let (env, clock) = Env::seeded(7);
    /// let start = env.monotonic();
    /// clock.advance(Duration::from_secs(5));
    /// assert_eq!(env.monotonic() - start, Duration::from_secs(5));
    /// ```
    pub fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }

    /// Resolves once `duration` of monotonic time has passed since this was called; at once if it is zero.
    ///
    /// # Panics
    ///
    /// On the machine's clock, outside of a tokio runtime that has time enabled.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Env;
    /// # async fn example(env: Env) {
    /// env.sleep(Duration::from_secs(1)).await;
    /// # }
    /// ```
    pub fn sleep(&self, duration: Duration) -> Sleep {
        if duration.is_zero() { Box::pin(ready(())) } else { self.clock.sleep(duration) }
    }

    /// A random number.
    ///
    /// ```
    /// # use latchwork_store::Env;
    /// let (one, other) = (Env::seeded(7).0, Env::seeded(7).0);
    /// assert_eq!(one.random(), other.random());
    /// ```
    pub fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        self.random.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// A new id: a UUIDv7, so that ids sort by the time they were made.
    ///
    /// ```
    /// # use latchwork_store::Env;
    /// assert_eq!(Env::system().uuid().get_version_num(), 7);
    /// ```
    pub fn uuid(&self) -> uuid::Uuid {
        let mut random = [0; 10];
        self.random.fill(&mut random);
        uuid::Builder::from_unix_timestamp_millis(self.now().0 / 1000, &random).into_uuid()
    }

    /// A new commit id.
    ///
    /// ```
    /// # use latchwork_store::Env;
    /// let env = Env::system();
    /// assert_ne!(env.commit_id(), env.commit_id());
    /// ```
    pub fn commit_id(&self) -> CommitId {
        CommitId(*self.uuid().as_bytes())
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Env")
    }
}

struct SystemClock {
    start: std::time::Instant,
}

impl SystemClock {
    #[allow(clippy::disallowed_methods)] // Only this module reads the machine's clock.
    fn new() -> SystemClock {
        SystemClock { start: std::time::Instant::now() }
    }
}

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // Only this module reads the machine's clock.
    fn now(&self) -> Timestamp {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Timestamp(micros(since.unwrap_or_default()))
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }

    #[allow(clippy::disallowed_methods)] // Only this module sleeps by the machine's clock.
    fn sleep(&self, duration: Duration) -> Sleep {
        Box::pin(tokio::time::sleep(duration))
    }
}

struct SystemRandom(Mutex<Vec<u8>>);

/// How many random bytes are read in advance.
const POOL: usize = 1024;

impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) {
        let mut pool = self.0.lock();
        if bytes.len() > pool.len() {
            // One system call serves many calls of this function.
            pool.resize(bytes.len() + POOL, 0);
            getrandom::fill(&mut pool).expect("the operating system provides random bytes");
        }
        let rest = pool.len() - bytes.len();
        bytes.copy_from_slice(&pool[rest..]);
        pool.truncate(rest);
    }
}

struct SeededRandom(Mutex<fastrand::Rng>);

impl Random for SeededRandom {
    fn fill(&self, bytes: &mut [u8]) {
        self.0.lock().fill(bytes);
    }
}

/// A clock for tests. It moves only when a test advances it.
#[derive(Debug)]
pub struct VirtualClock(Arc<Mutex<VirtualTime>>);

#[derive(Debug)]
struct VirtualTime {
    /// Since 1970.
    now: Duration,
    monotonic: Duration,
    /// The wakers of the sleeps that were polled, by deadline and number of the sleep. All deadlines are in the future.
    sleepers: BTreeMap<(Duration, u64), Waker>,
    /// How many sleeps were created.
    sleeps: u64,
}

impl Default for VirtualClock {
    /// The first second of 2026.
    fn default() -> VirtualClock {
        let (now, monotonic) = (Duration::from_secs(1_767_225_600), Duration::ZERO);
        VirtualClock(Arc::new(Mutex::new(VirtualTime { now, monotonic, sleepers: BTreeMap::new(), sleeps: 0 })))
    }
}

impl VirtualClock {
    /// Moves both clocks forward and wakes the sleeps that are over, in the order of their deadlines.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::Env;
    /// # let (env, clock) = Env::seeded(7);
    /// let before = env.now();
    /// clock.advance(Duration::from_secs(60));
    /// assert_eq!(env.now().since(before), Duration::from_secs(60));
    /// ```
    pub fn advance(&self, by: Duration) {
        let mut time = self.0.lock();
        time.now = time.now.saturating_add(by);
        time.monotonic = time.monotonic.saturating_add(by);
        let reached = (time.monotonic, u64::MAX);
        let later = time.sleepers.split_off(&reached);
        let due = std::mem::replace(&mut time.sleepers, later);
        // A woken task may read the clock.
        drop(time);
        due.into_values().for_each(Waker::wake);
    }

    /// Sets the time of day, forwards or backwards, as an operator or NTP would. No sleep ends by it: sleeps follow
    /// monotonic time.
    ///
    /// ```
    /// # use latchwork_store::{Env, Timestamp};
    /// # let (env, clock) = Env::seeded(7);
    /// clock.jump_to(Timestamp(7_000_000));
    /// assert_eq!(env.now(), Timestamp(7_000_000));
    /// ```
    pub fn jump_to(&self, now: Timestamp) {
        self.0.lock().now = Duration::from_micros(now.0);
    }

    /// The earliest deadline of a sleep, in monotonic time. It is in the future: to move the clock there, advance it by
    /// the difference. A sleep that was never polled is not counted.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use std::time::Duration;
    /// # use latchwork_store::Env;
    /// # let (env, clock) = Env::seeded(7);
    /// let sleeper = tokio::spawn(env.sleep(Duration::from_secs(5)));
    /// tokio::task::yield_now().await; // the sleep is polled
    /// assert_eq!(clock.next_deadline(), Some(Duration::from_secs(5)));
    /// # }
    /// ```
    pub fn next_deadline(&self) -> Option<Duration> {
        self.0.lock().sleepers.first_key_value().map(|((deadline, _), _)| *deadline)
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        Timestamp(micros(self.0.lock().now))
    }

    fn monotonic(&self) -> Duration {
        self.0.lock().monotonic
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        let mut time = self.0.lock();
        time.sleeps += 1;
        let place = (time.monotonic.saturating_add(duration), time.sleeps);
        Box::pin(VirtualSleep { time: self.0.clone(), place })
    }
}

/// A sleep on a virtual clock: its deadline and its unique number. Dropping a waker may drop a task, and with it
/// another sleep, which takes the lock. So no waker is dropped under the lock.
struct VirtualSleep {
    time: Arc<Mutex<VirtualTime>>,
    place: (Duration, u64),
}

impl Future for VirtualSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let waker = context.waker().clone();
        let mut time = self.time.lock();
        if time.monotonic >= self.place.0 {
            return Poll::Ready(());
        }
        let before = time.sleepers.insert(self.place, waker);
        drop(time);
        drop(before);
        Poll::Pending
    }
}

impl Drop for VirtualSleep {
    fn drop(&mut self) {
        let mut time = self.time.lock();
        let waker = time.sleepers.remove(&self.place);
        drop(time);
        drop(waker);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_ids() {
        let ids = |seed| {
            let (env, clock) = Env::seeded(seed);
            (0..3).map(|_| (clock.advance(Duration::from_millis(1)), env.uuid()).1).collect::<Vec<_>>()
        };
        assert_eq!(ids(7), ids(7));
        assert_ne!(ids(7), ids(8));
        assert!(ids(7).is_sorted());
    }

    #[test]
    fn the_time_between_two_times_is_never_negative() {
        let (earlier, later) = (Timestamp(1_000_000), Timestamp(3_500_000));
        assert_eq!((later.since(earlier), earlier.since(later)), (Duration::from_millis(2500), Duration::ZERO));
        assert_eq!(earlier.plus(later.since(earlier)), later);
    }

    #[test]
    fn a_jump_of_the_day_leaves_monotonic_time_alone() {
        let (env, clock) = Env::seeded(0);
        clock.advance(Duration::from_secs(5));
        clock.jump_to(Timestamp(0));
        assert_eq!((env.now(), env.monotonic()), (Timestamp(0), Duration::from_secs(5)));
    }

    /// Counts how often it is woken, and reads the clock each time.
    struct Sleeper {
        clock: Arc<VirtualClock>,
        woken: AtomicUsize,
    }

    impl Wake for Sleeper {
        fn wake(self: Arc<Self>) {
            self.clock.monotonic();
            self.woken.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn sleeper(clock: &Arc<VirtualClock>) -> Arc<Sleeper> {
        Arc::new(Sleeper { clock: clock.clone(), woken: AtomicUsize::new(0) })
    }

    impl Sleeper {
        fn woken(&self) -> usize {
            self.woken.load(Ordering::SeqCst)
        }

        fn is_over(self: &Arc<Self>, sleep: &mut Sleep) -> bool {
            sleep.as_mut().poll(&mut Context::from_waker(&self.clone().into())).is_ready()
        }
    }

    const SECOND: Duration = Duration::from_secs(1);
    const INSTANT: Duration = Duration::from_nanos(1);

    #[test]
    fn a_sleep_is_over_when_the_clock_reaches_its_deadline_and_not_before() {
        for beyond in [Duration::ZERO, INSTANT, SECOND] {
            let (env, clock) = Env::seeded(0);
            let sleeper = sleeper(&clock);
            clock.advance(SECOND);
            let mut sleep = env.sleep(SECOND);
            assert!(!sleeper.is_over(&mut sleep));
            clock.advance(SECOND - INSTANT);
            assert!(!sleeper.is_over(&mut sleep) && sleeper.woken() == 0);
            clock.advance(INSTANT + beyond);
            assert_eq!(sleeper.woken(), 1);
            assert!(sleeper.is_over(&mut sleep));
            clock.advance(SECOND);
            assert_eq!(sleeper.woken(), 1, "no sleeper is woken twice");
        }
    }

    #[test]
    fn a_sleep_counts_from_its_creation() {
        let (env, clock) = Env::seeded(0);
        let (mut short, mut long) = (env.sleep(SECOND), env.sleep(2 * SECOND));
        clock.advance(SECOND);
        let sleeper = sleeper(&clock);
        assert!(sleeper.is_over(&mut short) && !sleeper.is_over(&mut long));
        clock.advance(SECOND);
        assert!(sleeper.is_over(&mut long));
    }

    #[test]
    fn a_sleep_of_zero_is_over_at_once() {
        let (env, clock) = Env::seeded(0);
        let sleeper = sleeper(&clock);
        let asked_of_clock = clock.sleep(Duration::ZERO);
        for mut sleep in [env.sleep(Duration::ZERO), asked_of_clock, Env::system().sleep(Duration::ZERO)] {
            assert!(sleeper.is_over(&mut sleep));
        }
        assert_eq!((sleeper.woken(), clock.next_deadline()), (0, None));
        assert!(!sleeper.is_over(&mut env.sleep(INSTANT)), "a longer sleep is not");
    }

    #[test]
    fn a_jump_of_the_day_wakes_no_sleeper() {
        let (env, clock) = Env::seeded(0);
        let (sleeper, mut sleep) = (sleeper(&clock), env.sleep(SECOND));
        assert!(!sleeper.is_over(&mut sleep));
        for now in [env.now().plus(3600 * SECOND), Timestamp(0), Timestamp(u64::MAX)] {
            clock.jump_to(now);
            assert!(!sleeper.is_over(&mut sleep) && sleeper.woken() == 0);
            assert_eq!(clock.next_deadline(), Some(SECOND));
        }
    }

    #[test]
    fn a_dropped_sleep_leaves_nothing_behind() {
        let (env, clock) = Env::seeded(0);
        let sleeper = sleeper(&clock);
        let mut sleeps = [2, 1, 1, 3].map(|seconds| env.sleep(seconds * SECOND));
        assert!(sleeps.iter_mut().all(|sleep| !sleeper.is_over(sleep)));
        let [two, one, other, three] = sleeps;
        drop((one, two));
        assert_eq!(clock.next_deadline(), Some(SECOND), "another sleep has the same deadline");
        drop(other);
        assert_eq!(clock.next_deadline(), Some(3 * SECOND));
        drop(three);
        assert_eq!(clock.next_deadline(), None);
        assert_eq!(Arc::strong_count(&sleeper), 1, "no waker is kept");
        clock.advance(5 * SECOND);
        assert_eq!(sleeper.woken(), 0);
        drop(env.sleep(SECOND));
        assert_eq!(Arc::strong_count(&clock.0), 1);
    }

    #[test]
    fn a_driver_moves_the_clock_from_deadline_to_deadline() {
        let (env, clock) = Env::seeded(0);
        let sleeper = sleeper(&clock);
        let asked = [300, 100, 200, 100].map(|number| number * SECOND + number * INSTANT);
        let mut sleeps = asked.map(|duration| env.sleep(duration));
        assert_eq!(clock.next_deadline(), None, "no sleep was polled yet");
        assert!(sleeps.iter_mut().all(|sleep| !sleeper.is_over(sleep)));
        let mut stops = Vec::new();
        while let Some(deadline) = clock.next_deadline() {
            clock.advance(deadline - env.monotonic());
            assert_eq!(env.monotonic(), deadline);
            stops.push((deadline.as_secs(), sleeper.woken()));
        }
        assert_eq!(stops, [(100, 2), (200, 3), (300, 4)]);
        assert!(sleeps.iter_mut().all(|sleep| sleeper.is_over(sleep)));
    }

    #[test]
    fn a_sleep_may_be_longer_than_any_time_that_passes() {
        let (env, clock) = Env::seeded(0);
        clock.advance(SECOND);
        let (sleeper, mut sleep) = (sleeper(&clock), env.sleep(Duration::MAX));
        clock.advance(u32::MAX * SECOND);
        assert!(!sleeper.is_over(&mut sleep));
        assert_eq!(clock.next_deadline(), Some(Duration::MAX));
    }

    #[test]
    fn sleepers_are_woken_in_the_order_of_their_deadlines() {
        struct Listed(u64, Arc<Mutex<Vec<u64>>>);
        impl Wake for Listed {
            fn wake(self: Arc<Self>) {
                self.1.lock().push(self.0);
            }
        }
        let (env, clock) = Env::seeded(0);
        let woken = Arc::new(Mutex::new(Vec::new()));
        let sleeps: Vec<Sleep> = [5, 1, 4, 2, 3]
            .map(|number| {
                let (mut sleep, waker) = (env.sleep(number as u32 * SECOND), Arc::new(Listed(number, woken.clone())));
                assert!(sleep.as_mut().poll(&mut Context::from_waker(&waker.into())).is_pending());
                sleep
            })
            .into();
        clock.advance(4 * SECOND);
        assert_eq!(*woken.lock(), [1, 2, 3, 4]);
        drop(sleeps);
    }

    #[test]
    fn a_sleep_wakes_the_task_that_polled_it_last() {
        let (env, clock) = Env::seeded(0);
        let (first, second, mut sleep) = (sleeper(&clock), sleeper(&clock), env.sleep(SECOND));
        assert!(!first.is_over(&mut sleep) && !second.is_over(&mut sleep));
        assert_eq!(Arc::strong_count(&first), 1);
        clock.advance(SECOND);
        assert_eq!((first.woken(), second.woken()), (0, 1));
    }

    /// A dropped waker may be the last owner of a task, and the task owns a sleep.
    #[test]
    fn dropping_a_waker_may_drop_another_sleep() {
        struct Task {
            _own: Mutex<Sleep>,
        }
        impl Wake for Task {
            fn wake(self: Arc<Self>) {}
        }
        let (env, clock) = Env::seeded(0);
        let sleeping = || {
            let mut own = env.sleep(3 * SECOND);
            assert!(!sleeper(&clock).is_over(&mut own));
            let mut sleep = env.sleep(SECOND);
            let task = Waker::from(Arc::new(Task { _own: Mutex::new(own) }));
            assert!(sleep.as_mut().poll(&mut Context::from_waker(&task)).is_pending());
            sleep
        };
        drop(sleeping());
        let mut replaced = sleeping();
        assert!(!sleeper(&clock).is_over(&mut replaced));
        let _woken = sleeping();
        clock.advance(SECOND);
        assert_eq!(clock.next_deadline(), None, "each task dropped its own sleep");
    }

    #[tokio::test]
    async fn the_machines_clock_sleeps_for_the_given_time() {
        let env = Env::system();
        let before = env.monotonic();
        tokio::spawn(env.sleep(Duration::from_millis(20))).await.unwrap();
        assert!(env.monotonic() - before >= Duration::from_millis(20));
    }
}
