//! Point reads of one caller: through a view that is open, and through a new view for each read.

use std::time::{Duration, Instant};

use latchwork_store::{Commit, Key, Store};

use crate::report::{Figure, median};
use crate::{Bench, VALUE_BYTES, floor};

pub(crate) fn reads(bench: &Bench) {
    if !bench.report.wants("postgres.read") {
        return;
    }
    let (store, space) = bench.open("read");
    let keys: Vec<Key> = (0..floor::ROWS).map(|number| space.key(format!("{number:0>40}"))).collect();
    bench.runtime.block_on(async {
        for keys in keys.chunks(1000) {
            let put = keys.iter().fold(Commit::new(), |commit, key| commit.put(key, vec![7; VALUE_BYTES]));
            assert!(store.commit(put).await.expect("a commit").is_applied());
        }
        floor::connect(bench).await.batch_execute("VACUUM ANALYZE").await.expect("it is clean");
    });
    let (rounds, seconds) = bench.rounds();
    let (mut open, mut fresh, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        theirs.push(floor::select(bench, seconds).latency_us);
        open.push(bench.runtime.block_on(read_for(&store, &keys, usize::MAX, Duration::from_secs(seconds))));
        fresh.push(bench.runtime.block_on(read_for(&store, &keys, 1, Duration::from_secs(seconds))));
    }
    let floor = median(theirs);
    let value = median(open);
    bench.report.add(Figure { name: "postgres.read", value, unit: "µs", floor, target: "≤ 1.5" });
    let value = median(fresh);
    bench.report.add(Figure { name: "postgres.read.fresh", value, unit: "µs", floor, target: "report" });
    bench.runtime.block_on(store.close()).expect("it closes");
}

/// Reads random keys for so long, `each` of them through one view. Gives the average time of a read.
async fn read_for(store: &Store, keys: &[Key], each: usize, time: Duration) -> f64 {
    let mut random = fastrand::Rng::with_seed(1);
    let (began, mut made) = (Instant::now(), 0_u64);
    let mut view = store.view().await.expect("a view");
    let mut left = each;
    while began.elapsed() < time {
        if left == 0 {
            (view, left) = (store.view().await.expect("a view"), each);
        }
        assert!(view.get(&keys[random.usize(..keys.len())]).await.expect("a read").is_some());
        left -= 1;
        made += 1;
    }
    began.elapsed().as_secs_f64() * 1e6 / made as f64
}
