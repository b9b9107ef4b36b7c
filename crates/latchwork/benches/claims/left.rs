//! Claims whose holders are gone: a sweep over them, and recovery after SIGKILL.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use latchwork::store::Commit;
use tokio::runtime::Runtime;

use crate::kit::{DEFAULT_LEASE, HOLD, Kit};
use crate::report::{Figure, Report, median};
use crate::{as_task, child, given, kill_when_ready, ready};

/// Measures a sweep that reverts some claims among many entities, in turn with one among few.
pub(crate) fn sweep(runtime: &Runtime, report: &Report) {
    if !report.wants("claims.sweep") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (many, rounds) = if report.quick { (100_000, 10) } else { (1_000_000, 100) };
    let path = directory.path().to_path_buf();
    let (ours, floors) = as_task(runtime, async move {
        let mut large = Sweeping::new(&path.join("large"), many).await;
        let mut small = Sweeping::new(&path.join("small"), 1_000).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            floors.push(small.round().await);
            ours.push(large.round().await);
        }
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "claims.sweep", value, unit: "ms", floor, target: "≤ 2" });
}

/// A store with entities, some of which are claimed and abandoned.
struct Sweeping {
    kit: Kit,
    entities: usize,
    random: fastrand::Rng,
}

impl Sweeping {
    const STUCK: usize = 100;

    async fn new(directory: &Path, entities: usize) -> Sweeping {
        // No other sweep runs than the measured one.
        let seldom = Duration::from_secs(24 * 3600);
        let kit = Kit::with(directory, DEFAULT_LEASE, |builder| builder.sweep_every(seldom)).await;
        kit.fill(HOLD, entities).await;
        kit.settle().await;
        Sweeping { kit, entities, random: fastrand::Rng::with_seed(1) }
    }

    /// The time to revert claims whose session is gone, in milliseconds.
    async fn round(&mut self) -> f64 {
        let (kit, mut stuck) = (&self.kit, BTreeSet::new());
        while stuck.len() < Self::STUCK {
            stuck.insert(self.random.usize(..self.entities));
        }
        let mut revs = Vec::new();
        for number in &stuck {
            revs.push(kit.at(HOLD, *number).await.1);
        }
        let held = kit.hold(stuck.iter().copied()).await;
        // Deletes the session, as another process does when it expires. This process notices it at its next renewal.
        let sessions = kit.keys("lock.sessions").await;
        let gone = sessions.iter().fold(Commit::new(), |commit, session| commit.delete(session));
        kit.engine.store().commit(gone).await.expect("a commit").applied().expect("it has no checks");
        let begin = Instant::now();
        let swept = kit.claims.sweep().await.expect("a sweep");
        let took = begin.elapsed().as_secs_f64() * 1e3;
        assert_eq!((swept.open, swept.recovered), (Self::STUCK, Self::STUCK), "the sweep finds all of them");
        for (number, rev) in stuck.iter().zip(revs) {
            assert_eq!(kit.at(HOLD, *number).await, ("a".into(), rev + 2), "the claim is reverted");
        }
        kit.seen.gate.add_permits(Self::STUCK);
        for held in held {
            let fired = held.await.expect("a caller");
            assert!(matches!(fired, latchwork::claim::Fired::Lost(_)), "{fired:?}");
        }
        took
    }
}

/// Measures from the opening of the store and the start of the engine until the claims of a killed process are
/// reverted, in leases.
pub(crate) fn recovery(runtime: &Runtime, report: &Report) {
    if !report.wants("claims.recovery") {
        return;
    }
    let (count, lease) = if report.quick { (1_000, 5) } else { (10_000, 30) };
    let directory = tempfile::tempdir().expect("a directory");
    let mut left = child("child-claims", directory.path(), count);
    left.arg(format!("{lease}s"));
    kill_when_ready(left);
    let path = directory.path().to_path_buf();
    let took = as_task(runtime, async move {
        let begin = Instant::now();
        let kit = Kit::with(&path, &format!("{lease}s"), |builder| builder).await;
        assert_eq!(kit.keys("claim.claims").await.len(), count, "the child has left them");
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            eprintln!("claims.recovery: claims have started after {:.2} s", begin.elapsed().as_secs_f64());
        }
        while !kit.keys("claim.claims").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let took = begin.elapsed().as_secs_f64();
        for number in 0..count {
            assert_eq!(kit.at(HOLD, number).await, ("a".into(), 3), "the claim is reverted");
        }
        assert_eq!(kit.seen.bodies(), 0, "no action was run again");
        took
    });
    let floor = f64::from(lease);
    report.add(Figure { name: "claims.recovery", value: took, unit: "s", floor, target: "≤ 1.2" });
}

/// Claims entities, prints a line when all actions wait, and waits to be killed.
pub(crate) fn child_claims<'a>(mut words: impl Iterator<Item = &'a str>) {
    let (directory, count) = given(&mut words);
    let lease = words.next().expect("a lease");
    crate::runtime().block_on(async {
        let kit = Kit::with(directory, lease, |builder| builder).await;
        kit.fill(HOLD, count).await;
        let _held = kit.hold(0..count).await;
        ready().await;
    });
}
