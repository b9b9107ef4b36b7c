//! One entity: a transition, many concurrent requests, and a refused request.

use std::time::Instant;

use tokio::runtime::Runtime;

use crate::kit::{HOLD, Kit, TURN, id};
use crate::report::{Figure, Report, median};
use crate::{as_task, in_turns};

/// The number of entities of one caller.
const ENTITIES: usize = 100;

/// A claimed transition whose action does nothing: two commits.
pub(crate) fn transition(runtime: &Runtime, report: &Report) {
    if !report.wants("claims.transition") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (path, rounds) = (directory.path().to_path_buf(), if report.quick { 10 } else { 100 });
    let (value, floor) = as_task(runtime, async move {
        let kit = Kit::open(&path.join("claims")).await;
        kit.fill(TURN, ENTITIES).await;
        let measured = in_turns(&path.join("store"), rounds, 20, |number| {
            let kit = kit.clone();
            async move {
                let begin = Instant::now();
                kit.turn(TURN, number % ENTITIES, (number / ENTITIES) as u64).await;
                begin.elapsed()
            }
        })
        .await;
        assert_eq!(kit.seen.bodies(), rounds * 20, "each action has run once");
        measured
    });
    report.add(Figure { name: "claims.transition", value, unit: "µs", floor, target: "≤ 2.5" });
}

/// Measures from the first of many requests for one entity until all of them are answered, in turn with a single
/// transition.
pub(crate) fn race(runtime: &Runtime, report: &Report) {
    const REQUESTS: usize = 50;
    if !report.wants("claims.race.50") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (path, rounds) = (directory.path().to_path_buf(), if report.quick { 100 } else { 2_000 });
    let (ours, floors) = as_task(runtime, async move {
        let kit = Kit::open(&path).await;
        kit.fill(TURN, rounds + 1).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let begin = Instant::now();
            kit.turn(TURN, rounds, round as u64).await;
            floors.push(begin.elapsed().as_secs_f64() * 1e6);
            let (begin, before) = (Instant::now(), kit.seen.bodies());
            let request = |_| {
                let kit = kit.clone();
                tokio::spawn(async move { kit.fire(TURN, "go", round).await })
            };
            let requests: Vec<_> = (0..REQUESTS).map(request).collect();
            let mut answers = Vec::new();
            for request in requests {
                answers.push(request.await.expect("a request"));
            }
            ours.push(begin.elapsed().as_secs_f64() * 1e6);
            assert_eq!(kit.seen.bodies() - before, 1, "the action has run once");
            let done = answers.iter().filter(|answer| answer.is_done()).count();
            let refused = answers.iter().filter(|answer| answer.is_refused()).count();
            assert_eq!((done, refused), (1, REQUESTS - 1), "one request was served, and the others refused");
            assert_eq!(kit.at(TURN, round).await, ("b".into(), 3));
        }
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "claims.race.50", value, unit: "µs", floor, target: "≤ 3; 1 body" });
}

/// A request for a claimed entity, against a read of the entity.
pub(crate) fn refused(runtime: &Runtime, report: &Report) {
    if !report.wants("claims.refused") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (path, rounds) = (directory.path().to_path_buf(), if report.quick { 10 } else { 100 });
    let (ours, floors) = as_task(runtime, async move {
        let kit = Kit::open(&path).await;
        kit.fill(HOLD, ENTITIES).await;
        let held = kit.hold(0..ENTITIES).await;
        kit.settle().await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let begin = Instant::now();
            for number in 0..ENTITIES {
                let found = kit.engine.entities().get(id(HOLD, number)).await.expect("a get");
                assert!(found.is_some());
            }
            floors.push(begin.elapsed().as_secs_f64() * 1e6 / ENTITIES as f64);
            let begin = Instant::now();
            for number in 0..ENTITIES {
                let refused = kit.fire(HOLD, "go", number).await;
                assert!(refused.is_refused(), "{refused:?}");
            }
            ours.push(begin.elapsed().as_secs_f64() * 1e6 / ENTITIES as f64);
        }
        assert_eq!(kit.seen.bodies(), ENTITIES, "no refused request has run an action");
        kit.seen.gate.add_permits(ENTITIES);
        for held in held {
            assert!(held.await.expect("a caller").is_done());
        }
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "claims.refused", value, unit: "µs", floor, target: "≤ 5" });
}
