//! Time, ids and randomness as parameters. This is the only module that reads the machine's clock or its entropy;
//! everything else asks an [`Env`], so that a whole system can run on virtual time from a seed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::CommitId;

/// Microseconds since 1970, by the clock of the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The time `duration` earlier, or 1970.
    pub fn minus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_sub(micros(duration)))
    }

    /// The time `duration` later.
    pub fn plus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(micros(duration)))
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

/// Where time and chance come from.
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
}

/// A source of randomness.
pub trait Random: Send + Sync {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]);
}

impl Env {
    /// The machine's clock and entropy.
    pub fn system() -> Env {
        Env { clock: Arc::new(SystemClock::new()), random: Arc::new(SystemRandom) }
    }

    /// A clock that moves only when told to, and randomness that follows from `seed` alone.
    pub fn seeded(seed: u64) -> (Env, Arc<VirtualClock>) {
        let clock = Arc::new(VirtualClock::default());
        let random = Arc::new(SeededRandom(Mutex::new(fastrand::Rng::with_seed(seed))));
        (Env { clock: clock.clone(), random }, clock)
    }

    /// An environment of one's own parts.
    pub fn new(clock: Arc<dyn Clock>, random: Arc<dyn Random>) -> Env {
        Env { clock, random }
    }

    /// The time of day. It may jump.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Time since some fixed moment. It never goes back.
    pub fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }

    /// A random number.
    pub fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        self.random.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// A new id: a UUIDv7, so that ids sort by the time they were made.
    pub fn uuid(&self) -> uuid::Uuid {
        let mut random = [0; 10];
        self.random.fill(&mut random);
        uuid::Builder::from_unix_timestamp_millis(self.now().0 / 1000, &random).into_uuid()
    }

    /// A new commit id.
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
    #[allow(clippy::disallowed_methods)] // The one place that reads the machine's clock.
    fn new() -> SystemClock {
        SystemClock { start: std::time::Instant::now() }
    }
}

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // The one place that reads the machine's clock.
    fn now(&self) -> Timestamp {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Timestamp(micros(since.unwrap_or_default()))
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) {
        getrandom::fill(bytes).expect("the operating system gives random bytes");
    }
}

struct SeededRandom(Mutex<fastrand::Rng>);

impl Random for SeededRandom {
    fn fill(&self, bytes: &mut [u8]) {
        self.0.lock().fill(bytes);
    }
}

/// A clock for tests: it stands still until it is moved.
#[derive(Debug)]
pub struct VirtualClock {
    now: AtomicU64,
    monotonic: AtomicU64,
}

impl Default for VirtualClock {
    /// The first second of 2026.
    fn default() -> VirtualClock {
        VirtualClock { now: AtomicU64::new(1_767_225_600_000_000), monotonic: AtomicU64::new(0) }
    }
}

impl VirtualClock {
    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        self.now.fetch_add(micros(by), Ordering::SeqCst);
        self.monotonic.fetch_add(micros(by), Ordering::SeqCst);
    }

    /// Sets the time of day, forwards or backwards, as an operator or NTP would.
    pub fn jump_to(&self, now: Timestamp) {
        self.now.store(now.0, Ordering::SeqCst);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.now.load(Ordering::SeqCst))
    }

    fn monotonic(&self) -> Duration {
        Duration::from_micros(self.monotonic.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
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
    fn a_jump_of_the_day_leaves_monotonic_time_alone() {
        let (env, clock) = Env::seeded(0);
        clock.advance(Duration::from_secs(5));
        clock.jump_to(Timestamp(0));
        assert_eq!((env.now(), env.monotonic()), (Timestamp(0), Duration::from_secs(5)));
    }
}
