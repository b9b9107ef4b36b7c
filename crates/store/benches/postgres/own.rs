//! A transaction of the user's own: one insert into the user's table, and a commit of the store with it. What
//! `postgres.sql_step` takes beyond this is the engine's.

use std::time::{Duration, Instant};

use latchwork_store::{Commit, Space, SqlEnded, Store};

use crate::report::{Figure, median};
use crate::{Bench, VALUE_BYTES, floor};

pub(crate) fn own(bench: &Bench) {
    if !bench.report.wants("postgres.own") {
        return;
    }
    let (store, space) = bench.open("own");
    bench.runtime.block_on(async {
        let table = "CREATE TABLE own (id bigint PRIMARY KEY, value text)";
        floor::connect(bench).await.batch_execute(table).await.expect("a table");
    });
    let (rounds, seconds) = bench.rounds();
    let (mut ours, mut theirs, mut next) = (Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        theirs.push(floor::insert(bench, 1, seconds).latency_us);
        let (began, time) = (Instant::now(), Duration::from_secs(seconds));
        let made = bench.in_task(insert_for(store.clone(), space.clone(), next, time));
        ours.push(began.elapsed().as_secs_f64() * 1e6 / made as f64);
        next += made;
    }
    let (value, floor) = (median(ours), median(theirs));
    bench.report.add(Figure { name: "postgres.own", value, unit: "µs", floor, target: "report" });
    bench.runtime.block_on(store.close()).expect("it closes");
}

/// Inserts rows from this number on for so long. Gives how many.
async fn insert_for(store: Store, space: Space, first: i64, time: Duration) -> i64 {
    let (postgres, value) = (store.postgres().expect("it is in PostgreSQL"), "x".repeat(VALUE_BYTES));
    let (began, mut made) = (Instant::now(), 0);
    while began.elapsed() < time {
        let transaction = postgres.begin().await.expect("a transaction").repeatable();
        let id = first + made;
        let inserted = transaction.tx().execute("INSERT INTO own VALUES ($1, $2)", &[&id, &value]).await;
        assert_eq!(inserted.expect("an insert"), 1);
        let key = space.key(format!("{id:0>40}"));
        let ended = transaction.commit(Commit::new().absent(&key).put(&key, "inserted")).await;
        assert!(matches!(ended, Ok(SqlEnded::Applied(_))), "{ended:?}");
        made += 1;
    }
    made
}
