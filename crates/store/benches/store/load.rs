//! The load of the suite: each caller waits for its own commit of 2 checks and 3 puts of 150 bytes. Each caller has its
//! own keys, so that no commits conflict.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use latchwork_store::{Commit, Key, Rev, Space, Store, Write};
use tokio::runtime::Runtime;

use crate::floor::Floor;

/// The number of keys of all callers together.
pub(crate) const KEYS: usize = 100_000;
pub(crate) const VALUE_BYTES: usize = 150;
pub(crate) const KEY_BYTES: usize = 40;
pub(crate) const PAYLOAD_BYTES: usize = 3 * (KEY_BYTES + VALUE_BYTES);

/// One caller's keys, and the revs that it last saw.
pub(crate) struct Caller {
    keys: Vec<(Key, Option<Rev>)>,
    random: fastrand::Rng,
    value: Vec<u8>,
}

impl Caller {
    pub(crate) fn new(space: &Space, number: usize, of: usize) -> Caller {
        let count = (KEYS / of).max(3);
        let key = |index| space.key(format!("{:0>width$}", number * count + index, width = KEY_BYTES));
        let keys = (0..count).map(|index| (key(index), None)).collect();
        Caller { keys, random: fastrand::Rng::with_seed(number as u64), value: vec![7; VALUE_BYTES] }
    }

    /// Three different keys of this caller.
    fn pick(&mut self) -> [usize; 3] {
        let start = self.random.usize(..self.keys.len());
        let step = 1 + self.random.usize(..(self.keys.len() / 3).max(1));
        [start, (start + step) % self.keys.len(), (start + 2 * step) % self.keys.len()]
    }

    /// The next commit, and the keys that it writes.
    fn next(&mut self) -> (Commit, [usize; 3]) {
        let mut picked = self.pick();
        if picked[0] == picked[2] || picked[0] == picked[1] || picked[1] == picked[2] {
            picked = [0, 1, 2];
        }
        self.random.fill(&mut self.value[..8]);
        let mut commit = Commit::new();
        for index in &picked[..2] {
            let (key, rev) = &self.keys[*index];
            commit = match rev {
                Some(rev) => commit.at_rev(key, *rev),
                None => commit.absent(key),
            };
        }
        for index in picked {
            commit = commit.put(&self.keys[index].0, Bytes::copy_from_slice(&self.value));
        }
        (commit, picked)
    }

    pub(crate) async fn commit(&mut self, store: &Store) {
        let (commit, picked) = self.next();
        let receipt = store.commit(commit).await.expect("the store works").applied().expect("no commits conflict");
        for (index, rev) in picked.into_iter().zip(receipt.revs) {
            self.keys[index].1 = rev;
        }
    }

    /// Sends the bytes of the same commit to the floor, which ignores its checks.
    pub(crate) async fn append(&mut self, floor: &Floor, bytes: &mut Vec<u8>) {
        let (commit, picked) = self.next();
        bytes.clear();
        for write in commit.writes() {
            bytes.extend_from_slice(write.key().bytes());
            if let Write::Put(_, value) = write {
                bytes.extend_from_slice(value);
            }
        }
        floor.append(bytes).await;
        for index in picked {
            self.keys[index].1 = Some(Rev(1));
        }
    }
}

/// Creates the callers once. Later rounds continue with the revs that they know.
pub(crate) fn callers(space: &Space, count: usize) -> Vec<Caller> {
    (0..count).map(|number| Caller::new(space, number, count)).collect()
}

/// Runs callers for `duration` and returns their commits per second. `seen` counts commits as they happen.
pub(crate) fn run(
    runtime: &Runtime,
    store: &Store,
    callers: &mut Vec<Caller>,
    duration: Duration,
    seen: &Arc<AtomicU64>,
) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let before = seen.load(Ordering::Relaxed);
    let begin = Instant::now();
    let tasks: Vec<_> = std::mem::take(callers)
        .into_iter()
        .map(|mut caller| {
            let (store, stop, seen) = (store.clone(), stop.clone(), seen.clone());
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    caller.commit(&store).await;
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                caller
            })
        })
        .collect();
    std::thread::sleep(duration);
    let done = seen.load(Ordering::Relaxed) - before;
    let rate = done as f64 / begin.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            callers.push(task.await.expect("a caller"));
        }
    });
    rate
}

/// Returns the floor's commits per second with the same number of callers that make the same commits.
pub(crate) fn run_floor(runtime: &Runtime, floor: &Arc<Floor>, callers: &mut Vec<Caller>, duration: Duration) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::new(AtomicU64::new(0));
    let begin = Instant::now();
    let tasks: Vec<_> = std::mem::take(callers)
        .into_iter()
        .map(|mut caller| {
            let (floor, stop, seen) = (floor.clone(), stop.clone(), seen.clone());
            runtime.spawn(async move {
                let mut bytes = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    caller.append(&floor, &mut bytes).await;
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                caller
            })
        })
        .collect();
    std::thread::sleep(duration);
    let rate = seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            callers.push(task.await.expect("a caller"));
        }
    });
    rate
}
