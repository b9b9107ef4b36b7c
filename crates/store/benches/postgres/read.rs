//! Point reads of one caller, a task: through a view that is open, through a new view for each read, and without the
//! store by the client that it uses.

use std::sync::Arc;
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
    let (mut open, mut fresh, mut client, mut theirs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (keys, time) = (Arc::new(keys), Duration::from_secs(seconds));
    let reads = |each| bench.in_task(read_for(store.clone(), keys.clone(), each, time));
    for _ in 0..rounds {
        theirs.push(floor::select(bench, seconds).latency_us);
        open.push(reads(usize::MAX));
        fresh.push(reads(1));
        let connected = bench.runtime.block_on(floor::connect(bench));
        client.push(bench.in_task(select_for(connected, time)));
    }
    let floor = median(theirs);
    let value = median(open);
    bench.report.add(Figure { name: "postgres.read", value, unit: "µs", floor, target: "≤ 1.5" });
    let value = median(fresh);
    bench.report.add(Figure { name: "postgres.read.fresh", value, unit: "µs", floor, target: "report" });
    let value = median(client);
    bench.report.add(Figure { name: "postgres.read.client", value, unit: "µs", floor, target: "report" });
    bench.runtime.block_on(store.close()).expect("it closes");
}

/// Reads random keys for so long, `each` of them through one view. Gives the average time of a read.
async fn read_for(store: Store, keys: Arc<Vec<Key>>, each: usize, time: Duration) -> f64 {
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

/// Reads random rows of the floor's table for so long, with a statement that is prepared. Gives the average time.
async fn select_for(client: tokio_postgres::Client, time: Duration) -> f64 {
    let mut random = fastrand::Rng::with_seed(1);
    let select = client.prepare("SELECT value FROM kept WHERE id = $1").await.expect("a statement");
    let (began, mut made) = (Instant::now(), 0_u64);
    while began.elapsed() < time {
        let id = random.i64(1..=floor::ROWS as i64);
        let row = client.query_one(&select, &[&id]).await.expect("a row");
        assert_eq!(row.get::<_, &str>(0).len(), VALUE_BYTES);
        made += 1;
    }
    began.elapsed().as_secs_f64() * 1e6 / made as f64
}
