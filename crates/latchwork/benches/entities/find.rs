//! Finding entities by an index, at the newest generation and in the past.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use latchwork::entity::{Add, Entities, EntityView, Query, TypeSpec, Update, field};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};

/// The number of entities with the same value.
const GROUP: usize = 10;
/// How many generations ago the past view is.
const GENERATIONS: usize = 100_000;

fn id(index: usize) -> String {
    format!("entity-{index:0>12}")
}

/// The ids of a group's members are scattered.
fn document(index: usize, groups: usize, round: usize) -> Value {
    json!({"group": index % groups, "round": round, "text": "x".repeat(80)})
}

async fn fill(entities: &Entities, count: usize, groups: usize) {
    entities.declare(TypeSpec::new("thing").index(["data.group"])).await.expect("a declaration");
    let numbers: Vec<usize> = (0..count).collect();
    for some in numbers.chunks(1000) {
        let adds = some.iter().map(|index| Add::new("thing").id(id(*index)).data(document(*index, groups, 0)));
        entities.add_many(adds).await.expect("a batch");
    }
}

/// Updates random entities, `generations` times.
async fn age(entities: &Entities, count: usize, groups: usize, generations: usize) {
    let next = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..256u64)
        .map(|task| {
            let (entities, next) = (entities.clone(), next.clone());
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(task);
                while next.fetch_add(1, Ordering::Relaxed) < generations {
                    let index = random.usize(..count);
                    let update = Update::new(id(index)).data(document(index, groups, 1));
                    entities.update(update).await.expect("an update");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a writer");
    }
}

/// The time to find ten entities by their group, in microseconds.
async fn find_cost(view: &EntityView, groups: usize, finds: usize) -> f64 {
    let mut random = fastrand::Rng::with_seed(1);
    let begin = Instant::now();
    for _ in 0..finds {
        let query = Query::of("thing").filter(field("data.group").equals(random.usize(..groups)));
        let found = view.find_explained(&query).await.expect("a find");
        assert!(found.page.items.len() == GROUP && !found.plan.scans(), "{found:?}");
    }
    begin.elapsed().as_secs_f64() * 1e6 / finds as f64
}

/// The time of a get, in microseconds.
async fn get_cost(view: &EntityView, count: usize, gets: usize) -> f64 {
    let mut random = fastrand::Rng::with_seed(1);
    let begin = Instant::now();
    for _ in 0..gets {
        let found = view.get(id(random.usize(..count))).await.expect("a get");
        assert!(found.is_some());
    }
    begin.elapsed().as_secs_f64() * 1e6 / gets as f64
}

pub(crate) fn finds(runtime: &Runtime, report: &Report) {
    if !report.wants("entities.find") && !report.wants("entities.find_past") {
        return;
    }
    let (count, generations) = if report.quick { (100_000, 10_000) } else { (1_000_000, GENERATIONS) };
    let groups = count / GROUP;
    let directory = tempfile::tempdir().expect("a directory");
    runtime.block_on(async {
        let entities = Entities::open(directory.path().join("entities")).await.expect("entities");
        fill(&entities, count, groups).await;
        settle(&entities).await;
        let (reads, rounds) = if report.quick { (1000, 1) } else { (10_000, 5) };
        let (mut finds, mut gets) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            // A new view each time, so that the reads that it records do not accumulate.
            gets.push(get_cost(&entities.now().await.expect("a view"), count, reads).await);
            finds.push(find_cost(&entities.now().await.expect("a view"), groups, reads).await);
        }
        let (value, floor) = (median(finds), median(gets));
        report.add(Figure { name: "entities.find", value, unit: "µs", floor, target: "≤ 20" });
        let old = entities.store().generation().await.expect("a generation");
        age(&entities, count, groups, generations).await;
        settle(&entities).await;
        let new = entities.store().generation().await.expect("a generation");
        assert!(new.0 - old.0 >= generations as u64, "the past is far enough back");
        let (mut presents, mut pasts) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            presents.push(find_cost(&entities.now().await.expect("a view"), groups, reads).await);
            pasts.push(find_cost(&entities.as_of(old).await.expect("a view"), groups, reads).await);
        }
        let (value, floor) = (median(pasts), median(presents));
        report.add(Figure { name: "entities.find_past", value, unit: "µs", floor, target: "≤ 3" });
    });
}

/// Folds everything into the index, because the figures are about reads from it.
async fn settle(entities: &Entities) {
    while entities.store().maintain().await.expect("maintenance") {}
    entities.store().maintain().await.expect("maintenance");
}
