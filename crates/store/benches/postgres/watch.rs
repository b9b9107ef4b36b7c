//! From the sending of a commit to its arrival at a watch of another handle, which has connections of its own, as
//! another process has.

use std::time::{Duration, Instant};

use latchwork_store::{Commit, History, SpaceSpec};

use crate::Bench;
use crate::report::{Figure, median};

pub(crate) fn watch(bench: &Bench) {
    if !bench.report.wants("postgres.watch") {
        return;
    }
    let ((store, _), (other, _)) = (bench.open("watch"), bench.open("watch"));
    let commits = if bench.report.quick { 200 } else { 3000 };
    let (seen, made) = bench.runtime.block_on(async {
        let spec = SpaceSpec::new("watched").history(History::Generations(1000));
        let space = store.space(spec).await.expect("a space");
        let begin = store.generation().await.expect("a generation");
        let mut watch = other.watch(space.all(), begin).await.expect("a watch");
        let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(committed) = watch.next().await {
                let _ = arrived.send((committed.generation, Instant::now()));
            }
        });
        let (mut seen, mut made) = (Vec::new(), Vec::new());
        for number in 0..commits {
            let key = space.key(format!("{}", number % 100));
            let began = Instant::now();
            let receipt =
                store.commit(Commit::new().put(&key, "1")).await.expect("a commit").applied().expect("it lands");
            made.push(began.elapsed().as_secs_f64() * 1e6);
            let (generation, at) = arrivals.recv().await.expect("it arrives");
            assert_eq!(generation, receipt.generation);
            seen.push((at - began).as_secs_f64() * 1e6);
            // The next one must not find the watch still at work.
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        (seen, made)
    });
    let (value, floor) = (median(seen), median(made));
    bench.report.add(Figure { name: "postgres.watch", value, unit: "µs", floor, target: "≤ 2" });
    bench.runtime.block_on(async {
        store.close().await.expect("it closes");
        other.close().await.expect("it closes");
    });
}
