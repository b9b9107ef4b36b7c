//! Bytes that change on the medium. If bytes are flipped, zeroed or missing, a read returns what was written or an
//! error that says where the damage is. Damage is never taken for the end of the log.

use std::path::{Path, PathBuf};
use std::sync::Once;

use latchwork_store::disk::sim::{Event, SimDisk};
use latchwork_store::*;

use crate::ledger::{Entry, Ledger};
use crate::power_loss::number;
use crate::recovered::{DIRECTORY, Expected, check_contents, options};
use crate::workload::{Failing, failing};

/// redb panics on some damage, and the store catches the panic. This hides its output.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.location().is_some_and(|location| location.file().contains("redb")) {
                usual(info);
            }
        }));
    });
}

/// A store with data in the index and, behind it, frames in several segments of the log.
struct Subject {
    disk: SimDisk,
    ledger: Ledger,
    now: Timestamp,
    /// The frames that are not folded into the index: file, offset, bytes.
    frames: Vec<(PathBuf, usize, Vec<u8>)>,
}

async fn subject() -> Subject {
    quiet();
    let disk = SimDisk::new();
    let Failing { store, mut ledger, now, .. } = failing(5, 150, disk.clone()).await.unwrap();
    drop(store);
    let (env, _clock) = Env::seeded(0);
    let store = options(&disk, &env).without_threads().overlay_bytes(10 << 20).open(DIRECTORY).await.unwrap();
    while store.maintain().await.unwrap() {}
    let recording = disk.record();
    let space = ledger.spaces(u64::MAX)[3].0.clone();
    for number in 0..40_usize {
        let key = space.key(format!("unfolded {number}"));
        let value = vec![number as u8; number * number * 7 % 9000];
        let receipt = store.commit(Commit::new().put(&key, value.clone())).await.unwrap().applied().unwrap();
        let entry = Entry::new(receipt.generation.0, receipt.time);
        ledger.push(Entry { changes: vec![(key, Rev(1), Some(value))], ..entry });
    }
    let recording = recording.stop();
    drop(store);
    let frames = recording.events().iter().filter_map(|event| match event {
        Event::Write(file, offset, bytes) if bytes.starts_with(b"LWF1") => {
            Some((disk.name(*file)?, *offset as usize, bytes.to_vec()))
        }
        _ => None,
    });
    let frames: Vec<_> = frames.collect();
    assert_eq!(frames.len(), 40);
    Subject { disk, ledger, now, frames }
}

impl Subject {
    fn damaged(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) -> SimDisk {
        let disk = self.disk.copy();
        disk.damage(path, change);
        disk
    }

    fn space(&self) -> Space {
        self.ledger.spaces(u64::MAX)[3].0.clone()
    }

    async fn open(&self, disk: &SimDisk) -> Result<Store> {
        let (env, _clock) = Env::seeded(0);
        options(disk, &env).without_threads().open(DIRECTORY).await
    }

    /// Reads everything, and compares it with the ledger.
    async fn read(&self, store: &Store, seed: u64) -> Result<(), String> {
        let generation = store.generation().await.map_err(|error| error.to_string())?.0;
        if generation > self.ledger.last() {
            return Err(format!("generation {generation} never was"));
        }
        let expected = Expected { ledger: &self.ledger, acknowledged: 0, now: self.now, seed };
        check_contents(store, &expected, generation, &mut fastrand::Rng::with_seed(seed)).await
    }

    /// The log is damaged within frame number `index`. Opening must fail and name the position.
    async fn check_refused(&self, disk: &SimDisk, index: usize, what: &str) {
        let (path, offset, _) = &self.frames[index];
        match self.open(disk).await {
            Err(StoreError::Corrupt { place, .. }) => {
                assert!(place.contains(&format!("{} at byte {offset}", path.display())), "{what}: {place}");
            }
            Err(error) => panic!("{what}: {error}"),
            Ok(store) => panic!("{what}: opened at {:?}", store.generation().await),
        }
    }
}

/// How many bytes of a frame are used.
fn used(frame: &[u8]) -> usize {
    64 + u32::from_le_bytes(frame[4..8].try_into().unwrap()) as usize
}

#[tokio::test]
async fn a_flipped_bit_in_the_log_is_reported_and_never_taken_for_its_end() {
    let subject = subject().await;
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED", 1));
    let last = subject.frames.len() - 1;
    for (index, (path, offset, bytes)) in subject.frames[..last].iter().enumerate() {
        let header = (0..64).step_by(3);
        let rest = (0..8).map(|_| random.usize(64..used(bytes).max(65)));
        for byte in
            header.chain(rest.collect::<Vec<_>>()).filter(|byte| !(60..64).contains(byte) && *byte < used(bytes))
        {
            let bit = random.u8(..8);
            let disk = subject.damaged(path, |file| file[offset + byte] ^= 1 << bit);
            subject.check_refused(&disk, index, &format!("frame {index}, byte {byte}, bit {bit}")).await;
        }
    }
}

#[tokio::test]
async fn a_damaged_last_frame_is_the_end_of_the_log() {
    let subject = subject().await;
    let (path, offset, bytes) = subject.frames.last().unwrap();
    for byte in [0, 9, 20, 41, used(bytes) - 1] {
        let disk = subject.damaged(path, |file| file[offset + byte] ^= 4);
        let store = subject.open(&disk).await.unwrap();
        assert_eq!(store.generation().await.unwrap().0, subject.ledger.last() - 1);
        subject.read(&store, 1).await.unwrap();
    }
}

#[tokio::test]
async fn zeroed_blocks_in_the_middle_of_the_log_are_reported() {
    let subject = subject().await;
    let last = subject.frames.len() - 1;
    for (index, (path, offset, bytes)) in subject.frames[..last].iter().enumerate() {
        for page in 0..used(bytes).div_ceil(4096) {
            let start = offset + page * 4096;
            let disk = subject.damaged(path, |file| file[start..start + 4096].fill(0));
            subject.check_refused(&disk, index, &format!("page {page} of frame {index}")).await;
        }
    }
    let last_path = &subject.frames[last].0;
    let mut segments: Vec<&PathBuf> = subject.frames.iter().map(|(path, ..)| path).collect();
    segments.dedup();
    assert!(segments.len() > 3);
    for path in segments.into_iter().filter(|path| *path != last_path) {
        let index = subject.frames.iter().position(|(of, ..)| of == path).unwrap();
        let disk = subject.damaged(path, |file| file.fill(0));
        // A whole segment of 64 KiB is zeroed, so that no frame follows the one before it.
        let error = subject.open(&disk).await.map(|_| ()).unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. }), "segment of frame {index}: {error}");
    }
}

/// Asserts that opening reports a segment that is missing or truncated.
async fn check_named(subject: &Subject, disk: &SimDisk, path: &Path, what: &str) {
    let (env, _clock) = Env::seeded(0);
    let opened = [
        subject.open(disk).await,
        options(disk, &env).without_threads().open_read_only(DIRECTORY).await,
        subject.open(disk).await,
    ];
    for opened in opened {
        match opened {
            Err(StoreError::Corrupt { place, .. }) => assert_eq!(place, path.display().to_string(), "{what}"),
            other => panic!("{} {what}: {:?}", path.display(), other.map(|_| ())),
        }
    }
}

/// Removes a file, or truncates it to `left` bytes.
fn cut(disk: &SimDisk, path: &Path, left: Option<usize>) {
    match left {
        Some(left) => disk.damage(path, |bytes| bytes.truncate(left)),
        None => latchwork_store::disk::Disk::remove(disk, path).unwrap(),
    }
}

/// This cannot be the torn end of a crash: the files are shorter than any crash leaves them.
#[tokio::test]
async fn every_missing_or_truncated_segment_is_reported() {
    let subject = subject().await;
    let mut segments: Vec<&PathBuf> = subject.frames.iter().map(|(path, ..)| path).collect();
    segments.dedup();
    for path in &segments {
        for left in [None, Some(0), Some(1), Some((64 << 10) / 3), Some((64 << 10) - 1)] {
            let disk = subject.disk.copy();
            cut(&disk, path, left);
            check_named(&subject, &disk, path, &format!("{left:?}")).await;
        }
    }
    // All segments from the second one on.
    let disk = subject.disk.copy();
    segments[1..].iter().for_each(|path| cut(&disk, path, None));
    check_named(&subject, &disk, segments[1], "with all behind it").await;
    let disk = subject.disk.copy();
    latchwork_store::disk::Disk::remove(&disk, &Path::new(DIRECTORY).join("index.redb")).unwrap();
    assert!(matches!(subject.open(&disk).await, Err(StoreError::Corrupt { .. })));
}

#[tokio::test]
async fn verify_reports_a_segment_that_was_lost_while_the_store_is_open() {
    let subject = subject().await;
    let newest = &subject.frames.last().unwrap().0;
    for left in [None, Some((64 << 10) / 3)] {
        let disk = subject.disk.copy();
        let store = subject.open(&disk).await.unwrap();
        assert_eq!(store.verify().await.unwrap(), []);
        cut(&disk, newest, left);
        let found = store.verify().await.unwrap();
        assert!(found.iter().any(|damage| damage.place == newest.display().to_string()), "{left:?}: {found:?}");
    }
}

#[tokio::test]
async fn the_current_segment_of_a_closed_store_is_needed_and_a_spare_is_not() {
    let subject = subject().await;
    let store = subject.open(&subject.disk).await.unwrap();
    while store.maintain().await.unwrap() {}
    store.close().await.unwrap();
    let logs = subject.disk.files().into_iter().map(|(path, _)| path);
    let logs: Vec<PathBuf> = logs.filter(|path| path.starts_with(Path::new(DIRECTORY))).collect();
    let logs: Vec<&PathBuf> = logs.iter().filter(|path| path.to_string_lossy().contains("log-")).collect();
    let [current, spare] = logs[..] else { panic!("{logs:?}") };
    for left in [None, Some(0), Some((64 << 10) / 3)] {
        let disk = subject.disk.copy();
        cut(&disk, current, left);
        check_named(&subject, &disk, current, &format!("{left:?}")).await;
        // A spare holds no commit, and a crash may leave it incomplete.
        let disk = subject.disk.copy();
        cut(&disk, spare, left);
        let store = subject.open(&disk).await.unwrap();
        assert_eq!(store.generation().await.unwrap().0, subject.ledger.last());
    }
}

/// A trailer only announces a segment: frames are found without it.
#[tokio::test]
async fn a_damaged_trailer_loses_nothing() {
    let subject = subject().await;
    let mut trailers = 0;
    let mut segments: Vec<&PathBuf> = subject.frames.iter().map(|(path, ..)| path).collect();
    segments.dedup();
    for path in segments {
        let disk = subject.damaged(path, |bytes| {
            for page in bytes.chunks_mut(4096).filter(|page| page.starts_with(b"LWT1")) {
                page[20] ^= 1;
                trailers += 1;
            }
        });
        let store = subject.open(&disk).await.unwrap();
        assert_eq!(store.generation().await.unwrap().0, subject.ledger.last());
        subject.read(&store, 1).await.unwrap();
    }
    assert!(trailers > 2);
}

#[tokio::test]
async fn a_flipped_bit_in_the_index_is_an_error_or_found_by_verify() {
    let subject = subject().await;
    let path = Path::new(DIRECTORY).join("index.redb");
    let length = subject.disk.files().into_iter().find(|(name, _)| *name == path).unwrap().1;
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED", 1));
    let (mut refused, mut seen, mut harmless) = (0, 0, 0);
    for turn in 0..number("LATCHWORK_FLIPS", 1500) {
        let (byte, bit) = (random.usize(..length as usize), random.u8(..8));
        let disk = subject.damaged(&path, |file| file[byte] ^= 1 << bit);
        let store = match subject.open(&disk).await {
            Ok(store) => store,
            Err(StoreError::Corrupt { .. }) => {
                refused += 1;
                continue;
            }
            Err(error) => panic!("byte {byte}, bit {bit}: {error}"),
        };
        let found = store.verify().await;
        let whole = store.generation().await.unwrap().0 == subject.ledger.last();
        match subject.read(&store, turn).await {
            Ok(()) if whole => harmless += 1,
            wrong => {
                seen += 1;
                let reported = !matches!(&found, Ok(damage) if damage.is_empty());
                assert!(reported, "byte {byte}, bit {bit}: {wrong:?}, and verify found nothing");
            }
        }
        // Another commit may succeed or fail, but the process must not abort.
        let key = subject.space().key("k1");
        let _ = store.commit(Commit::new().put(&key, "after the damage")).await;
        let _ = store.maintain().await;
        let _ = store.close().await;
    }
    println!("{refused} failed to open, {seen} were seen by reads, {harmless} had no effect");
}

#[tokio::test]
async fn any_damage_to_format_is_reported() {
    let subject = subject().await;
    let path = Path::new(DIRECTORY).join("FORMAT");
    for bit in 0..37 * 8 {
        let disk = subject.damaged(&path, |file| file[bit / 8] ^= 1 << (bit % 8));
        assert!(matches!(subject.open(&disk).await, Err(StoreError::Corrupt { .. })), "bit {bit}");
    }
    for length in [0, 1, 12, 36, 38] {
        let disk = subject.damaged(&path, |file| file.resize(length, 0));
        assert!(matches!(subject.open(&disk).await, Err(StoreError::Corrupt { .. })), "length {length}");
    }
}

#[tokio::test]
async fn a_newer_format_is_refused_with_its_version() {
    let subject = subject().await;
    let disk = subject.damaged(&Path::new(DIRECTORY).join("FORMAT"), |file| {
        *file = b"LATCHWRK\x09\0\0\0and whatever it needs".to_vec();
        let checksum = xxhash_rust::xxh3::xxh3_64_with_seed(file, 0);
        file.extend_from_slice(&checksum.to_le_bytes());
    });
    match subject.open(&disk).await {
        Err(StoreError::NewerFormat { path, found: 9, supported: 1 }) => assert_eq!(path, Path::new(DIRECTORY)),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[tokio::test]
async fn an_index_without_format_is_not_a_store() {
    let subject = subject().await;
    latchwork_store::disk::Disk::remove(&subject.disk, &Path::new(DIRECTORY).join("FORMAT")).unwrap();
    assert!(matches!(subject.open(&subject.disk).await, Err(StoreError::NotAStore { .. })));
}

#[tokio::test]
async fn a_damaged_snapshot_is_refused_and_the_store_keeps_working() {
    quiet();
    let disk = SimDisk::new();
    let store = FileOptions::new().disk(disk.clone()).without_threads().open("/store").await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    for number in 0..2000 {
        let put = Commit::new().put(&space.key(format!("{number:04}")), format!("value of {number:04}"));
        assert!(store.commit(put).await.unwrap().is_applied());
    }
    store.view().await.unwrap().persist("/snapshot").await.unwrap();
    disk.damage(Path::new("/snapshot/index.redb"), |bytes| {
        let value = b"value of 1500";
        let at = bytes.windows(value.len()).position(|window| window == value).expect("the value is in the index");
        bytes[at] ^= 1;
    });
    assert!(store.commit(Commit::new().put(&space.key("0000"), "newer")).await.unwrap().is_applied());
    let generation = store.generation().await.unwrap();
    let error = store.restore("/snapshot", Confirm::ReplaceEverything).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(store.generation().await.unwrap(), generation);
    let view = store.view().await.unwrap();
    assert_eq!(view.get(&space.key("0000")).await.unwrap().unwrap().value, "newer");
    assert_eq!(view.get(&space.key("1500")).await.unwrap().unwrap().value, "value of 1500");
    assert!(store.commit(Commit::new().put(&space.key("0000"), "newest")).await.unwrap().is_applied());
    assert_eq!(store.verify().await.unwrap(), []);
}
