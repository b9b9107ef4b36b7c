//! A disk that fails, at every sync, write and change of a name in turn. After the first failure nothing is
//! acknowledged any more. What was acknowledged before is there when the directory is opened again, also after a power
//! loss.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use latchwork_store::disk::sim::{Attempt, Fault, Loss, SimDisk};
use latchwork_store::*;
use parking_lot::Mutex;

use crate::power_loss::number;
use crate::recovered::{DIRECTORY, Expected, check};
use crate::workload::{Failing, failing};

const STEPS: usize = 150;

/// The attempts that were made on the data directory, and the attempt that failed.
#[derive(Debug, Default)]
struct Seen {
    attempts: usize,
    failed: Option<PathBuf>,
    /// Syncs of the same file after its failed sync.
    retried: usize,
}

/// Makes attempt number `turn` of a kind fail once.
fn fail_once(disk: &SimDisk, kind: Attempt, turn: usize, fault: Fault) -> Arc<Mutex<Seen>> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let shared = seen.clone();
    disk.set_faults(move |attempt, path| {
        let inside = path.starts_with(DIRECTORY);
        if attempt != kind || !inside {
            return None;
        }
        let mut seen = shared.lock();
        seen.attempts += 1;
        if seen.failed.as_deref() == Some(path) && kind == Attempt::Sync {
            seen.retried += 1;
        }
        if seen.attempts != turn {
            return None;
        }
        seen.failed = Some(path.to_path_buf());
        Some(fault)
    });
    seen
}

/// Asserts that every call on a store that has failed returns the same error.
async fn check_stopped(store: &Store) -> Result<(), String> {
    let key = store.spaces().await.err().map(|error| error.to_string());
    let view = store.view().await.err();
    let answers = [
        store.commit(Commit::new()).await.err(),
        store.generation().await.err(),
        store.maintain().await.err(),
        store.verify().await.err(),
        store.stats().await.err(),
        store.space(SpaceSpec::new("more")).await.err(),
        store.close().await.err(),
        view,
    ];
    for answer in answers {
        let Some(error) = answer else { return Err("a call was answered after a failure".into()) };
        let stopped =
            matches!(error, StoreError::Stopped { .. }) && error.kind() == latchwork_store::ErrorKind::Unavailable;
        if !stopped || Some(error.to_string()) != key {
            return Err(format!("a call after a failure was answered with {error}"));
        }
    }
    Ok(())
}

/// Makes one run in which attempt number `turn` fails. Returns whether there were that many attempts.
async fn fail_at(kind: Attempt, turn: usize, fault: Fault) -> Result<bool, String> {
    let disk = SimDisk::new();
    let recording = disk.record();
    let seen = fail_once(&disk, kind, turn, fault);
    let Failing { error, store, ledger, acknowledged, now } =
        failing(number("LATCHWORK_SEED", 5), STEPS, disk.clone()).await?;
    if let Some(store) = &store
        && error.is_some()
    {
        check_stopped(store).await?;
    }
    if let Some(error) = &error
        && !matches!(error, StoreError::Io { .. } | StoreError::Stopped { .. })
    {
        return Err(format!("the failure was reported as {error}"));
    }
    drop(store);
    let came = {
        let seen = seen.lock();
        if seen.retried > 0 && error.is_some() {
            return Err(format!("{:?} was synced again after its sync had failed", seen.failed));
        }
        seen.failed.is_some()
    };
    disk.clear_faults();
    let recording = recording.stop();
    let end = recording.events().len();
    let after_power_loss = [Loss::Everything, Loss::SomeSectors(turn as u64)].map(|loss| recording.image(end, loss));
    for disk in after_power_loss.iter().chain([&disk]) {
        check(disk, &Expected { ledger: &ledger, acknowledged, now, seed: turn as u64 }).await?;
    }
    Ok(came)
}

async fn fail_each(kind: Attempt, fault: Fault, stride: usize) {
    let mut runs = 0;
    for turn in (1..).step_by(stride) {
        match fail_at(kind, turn, fault).await {
            Ok(true) => runs += 1,
            Ok(false) => break,
            Err(what) => panic!("{kind:?} number {turn}, {fault:?}: {what}"),
        }
    }
    println!("{kind:?} {fault:?}: {runs} runs");
    assert!(runs > 1, "{runs} runs");
}

const BROKEN: Fault = Fault::Error(ErrorKind::Other);
const FULL: Fault = Fault::Error(ErrorKind::StorageFull);

#[tokio::test]
async fn every_failed_sync_stops_the_store_and_is_not_retried() {
    fail_each(Attempt::Sync, BROKEN, 1).await;
}

#[tokio::test]
async fn every_failed_sync_of_names_stops_the_store() {
    fail_each(Attempt::SyncDirectory, BROKEN, 1).await;
}

#[tokio::test]
async fn every_failed_write_stops_the_store() {
    fail_each(Attempt::Write, BROKEN, 3).await;
}

#[tokio::test]
async fn a_full_disk_stops_the_store() {
    fail_each(Attempt::Write, FULL, 3).await;
    fail_each(Attempt::SetLength, FULL, 1).await;
}

#[tokio::test]
async fn a_store_that_has_stopped_tells_a_full_disk_from_a_failing_one() {
    let quota = Fault::Error(ErrorKind::QuotaExceeded);
    for (fault, kind, is_full) in [
        (BROKEN, ErrorKind::Other, false),
        (FULL, ErrorKind::StorageFull, true),
        (quota, ErrorKind::QuotaExceeded, true),
    ] {
        let disk = SimDisk::new();
        let store = FileOptions::new().disk(disk.clone()).without_threads().open("/d").await.unwrap();
        let key = store.space(SpaceSpec::new("a")).await.unwrap().key("k");
        disk.set_faults(move |attempt, _| matches!(attempt, Attempt::Write | Attempt::Sync).then_some(fault));
        let first = store.commit(Commit::new().put(&key, "1")).await.unwrap_err();
        disk.clear_faults();
        // All later callers are told the same, though the disk has recovered.
        for error in [first, store.commit(Commit::new().put(&key, "2")).await.unwrap_err()] {
            assert!(matches!(error, StoreError::Stopped { .. }), "{error}");
            assert_eq!((error.io_kind(), error.is_disk_full()), (Some(kind), is_full), "{error}");
        }
    }
    assert_eq!(StoreError::Closed.io_kind(), None);
}

#[tokio::test]
async fn a_short_write_stops_the_store() {
    fail_each(Attempt::Write, Fault::ShortWrite, 3).await;
}

#[tokio::test]
async fn every_failed_create_rename_or_remove_stops_the_store() {
    fail_each(Attempt::Rename, BROKEN, 1).await;
    fail_each(Attempt::Create, BROKEN, 1).await;
}

/// Lets a segment be created but not completed, as on a full disk.
fn fill_up(disk: &SimDisk, name: &'static str) {
    let mut writes = 0;
    disk.set_faults(move |attempt, path| {
        let segment = path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name));
        writes += usize::from(attempt == Attempt::Write && segment);
        (attempt == Attempt::Write && segment && writes > 2).then_some(FULL)
    });
}

fn names(disk: &SimDisk) -> Vec<(String, u64)> {
    let files = disk.files().into_iter().filter(|(path, _)| path.starts_with("/d"));
    files.map(|(path, length)| (path.file_name().unwrap().to_string_lossy().into_owned(), length)).collect()
}

/// Otherwise the incomplete file keeps the disk full.
#[tokio::test]
async fn an_incomplete_segment_is_removed() {
    const SEGMENT: u64 = 16 << 20;
    let disk = SimDisk::new();
    let open = || FileOptions::new().disk(disk.clone()).without_threads().open("/d");
    fill_up(&disk, "log-");
    assert!(matches!(open().await, Err(StoreError::Io { .. })));
    assert!(names(&disk).iter().all(|(name, _)| name == "FORMAT"), "{:?}", names(&disk));
    disk.clear_faults();
    // The next segment is prepared in the background, or, under load, created when it is needed.
    for (made, commits) in [("spare.new", 1), ("log-", 12)] {
        let store = open().await.unwrap();
        let space = store.space(SpaceSpec::new("a")).await.unwrap();
        fill_up(&disk, made);
        let mut stopped = None;
        for number in 0..commits {
            let put = Commit::new().put(&space.key(format!("{number}")), vec![1; 4 << 20]);
            stopped = store.commit(put).await.err().or(stopped);
        }
        stopped = store.maintain().await.err().or(stopped);
        assert!(matches!(stopped, Some(StoreError::Stopped { .. } | StoreError::Io { .. })), "{made}: {stopped:?}");
        drop(store);
        disk.clear_faults();
        let whole = |(name, length): &(String, u64)| !name.starts_with("log-") || *length == SEGMENT;
        let left = names(&disk);
        assert!(left.iter().all(|file| whole(file) && file.0 != "spare.new"), "{made}: {left:?}");
    }
    assert_eq!(open().await.unwrap().verify().await.unwrap(), []);
}

#[tokio::test]
async fn an_id_counts_as_used_only_once_its_commit_is_durable() {
    let disk = SimDisk::new();
    let store = FileOptions::new().disk(disk.clone()).without_threads().open("/d").await.unwrap();
    let key = store.space(SpaceSpec::new("a")).await.unwrap().key("k");
    let commit = Commit::new().id(store.commit_id());
    let mut first = pin!(store.commit(commit.clone().put(&key, "1")));
    let mut second = pin!(store.commit(commit.put(&key, "2")));
    let mut context = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut context).is_pending());
    let early = second.as_mut().poll(&mut context);
    assert!(early.is_pending(), "{early:?}");
    disk.set_faults(|attempt, _| (attempt == Attempt::Sync).then_some(BROKEN));
    for outcome in [first.await, second.await] {
        assert!(matches!(outcome, Err(StoreError::Stopped { .. })), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_closed_store_does_not_touch_the_directory_of_its_next_owner() {
    let disk = SimDisk::new();
    let open = || FileOptions::new().disk(disk.clone()).without_threads().open("/d");
    let first = open().await.unwrap();
    let space = first.space(SpaceSpec::new("a")).await.unwrap();
    first.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    first.close().await.unwrap();
    let second = open().await.unwrap();
    for round in 0..20 {
        second.commit(Commit::new().put(&space.key(format!("k{round}")), "2")).await.unwrap().applied().unwrap();
        second.maintain().await.unwrap();
    }
    let before = disk.record();
    drop(first);
    assert!(before.stop().events().is_empty(), "a closed store writes nothing when it is dropped");
    assert_eq!(second.verify().await.unwrap(), []);
}

#[tokio::test]
async fn an_incomplete_snapshot_is_neither_restored_nor_changed() {
    let disk = SimDisk::new();
    let store = FileOptions::new().disk(disk.clone()).without_threads().open("/d").await.unwrap();
    let recording = disk.record();
    store.view().await.unwrap().persist("/s").await.unwrap();
    let recording = recording.stop();
    let mut complete = 0;
    for point in 0..=recording.events().len() {
        let disk = recording.image(point, Loss::Nothing);
        let names = disk.files();
        let store = FileOptions::new().disk(disk.clone()).without_threads().open("/d").await.unwrap();
        match store.restore("/s", Confirm::ReplaceEverything).await {
            Ok(_) => complete += 1,
            Err(StoreError::NotAStore { .. }) => {
                let ours = |(path, _): &(PathBuf, u64)| path.starts_with(Path::new("/s"));
                let (before, after) = (names.into_iter().filter(ours), disk.files().into_iter().filter(ours));
                assert!(before.eq(after), "the directory was changed");
            }
            Err(error) => panic!("at {point}: {error}"),
        }
    }
    assert!(complete > 0 && complete < 5, "{complete}");
}

#[tokio::test]
async fn the_history_of_restored_spaces_starts_with_the_restore() {
    let disk = SimDisk::new();
    let open = |path: &'static str| FileOptions::new().disk(disk.clone()).without_threads().open(path);
    let source = open("/source").await.unwrap();
    let space = source.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    source.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    source.view().await.unwrap().persist("/s").await.unwrap();
    let target = open("/target").await.unwrap();
    let restored = target.restore("/s", Confirm::ReplaceEverything).await.unwrap();
    assert_eq!(target.oldest(&space), restored);
    drop(target);
    let target = open("/target").await.unwrap();
    assert_eq!(target.oldest(&space), restored);
    let error = target.view_at(Generation(1)).await.unwrap().get(&space.key("k")).await.unwrap_err();
    assert!(matches!(error, StoreError::HistoryDropped { .. }), "{error}");
}
