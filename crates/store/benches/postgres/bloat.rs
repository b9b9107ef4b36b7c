//! The size of the tables after many updates of few keys. Autovacuum runs with its defaults, as it does for users.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use latchwork_store::Commit;

use crate::report::Figure;
use crate::{Bench, VALUE_BYTES};

const KEYS: u64 = 10_000;

pub(crate) fn bloat(bench: &Bench) {
    if !bench.report.wants("postgres.bloat") {
        return;
    }
    let (store, space) = bench.open("bloat");
    let updates = if bench.report.quick { 50_000 } else { 1_000_000 };
    let update = |from: u64, to: u64| {
        bench.runtime.block_on(async {
            let next = Arc::new(AtomicU64::new(from));
            let mut callers = tokio::task::JoinSet::new();
            for _ in 0..256 {
                let (store, space, next) = (store.clone(), space.clone(), next.clone());
                callers.spawn(async move {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= to {
                            return;
                        }
                        let key = space.key(format!("{:0>40}", number % KEYS));
                        let commit = Commit::new().put(&key, vec![number as u8; VALUE_BYTES]);
                        assert!(store.commit(commit).await.expect("a commit").is_applied());
                    }
                });
            }
            callers.join_all().await;
            while store.maintain().await.expect("it is cleaned up") {}
            store.stats().await.expect("figures").index_bytes as f64 / f64::from(1 << 20)
        })
    };
    let floor = update(0, KEYS);
    let value = update(KEYS, KEYS + updates);
    bench.report.add(Figure { name: "postgres.bloat", value, unit: "MB", floor, target: "≤ 3" });
    bench.runtime.block_on(store.close()).expect("it closes");
}
