//! One record is damaged: one execution reports it, and all others start, wake, receive and are removed as usual.

use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, ExecutionFilter, Failure, Status, Workflow, workflow};

use crate::lock::turnstile::{Harm, Stage, has_ended};

const SECOND: Duration = Duration::from_secs(1);

/// The executions that are parked or set aside. Checks that each reason says that a record is damaged.
async fn damaged(engine: &Engine) -> Vec<String> {
    let parked = engine.parked().await.unwrap();
    parked.iter().for_each(|(id, reason)| assert!(reason.contains("damaged"), "{id}: {reason}"));
    parked.into_iter().map(|(id, _)| id.to_string()).collect()
}

/// A first step, and a step whose body ends when the test opens the gate.
fn gated() -> (tokio::sync::watch::Sender<bool>, Workflow<u32, u32>) {
    let (gate, open) = tokio::sync::watch::channel(false);
    let gated = workflow("gated").run(move |ctx: Ctx, number: u32| {
        let open = open.clone();
        async move {
            let first = ctx.run("first", async || Ok(number)).await?;
            let wait = async || open.clone().wait_for(|open| *open).await.map(drop).map_err(Failure::from);
            ctx.run("wait", wait).await?;
            Ok(first)
        }
    });
    (gate, gated)
}

/// Stands for a process that ended, and a disk that lost a record meanwhile: the record of a running execution, the
/// record that lists it, or an entry of its journal.
#[tokio::test]
async fn executions_that_ran_beside_a_damaged_record_continue_at_the_next_start() {
    for space in ["workflow.executions", "workflow.running", "workflow.journal"] {
        for harm in Harm::ALL {
            let (gate, gated) = gated();
            let stage = Stage::new(|engine| engine.register(&gated)).await;
            for number in 100..400 {
                stage.engine.start(&gated, number).id(format!("e{number}")).await.unwrap();
            }
            stage.turns().await;
            stage.engine.stop();
            stage.damage(space, b"e200", harm).await;
            gate.send_replace(true);
            let engine = Engine::on(stage.engine.store()).register(&gated).start().await.unwrap();
            for _ in 0..3 {
                stage.pass(SECOND).await;
            }
            let what = format!("{harm:?} of {space}");
            for number in (100..400).filter(|number| *number != 200) {
                let state = engine.describe(format!("e{number}")).await.unwrap().state;
                assert!(has_ended(&state), "{what}: e{number} is {state:?}");
            }
            // An execution with a damaged crash count is loaded as if it was never counted.
            if (space, harm) != ("workflow.running", Harm::Nonsense) {
                assert_eq!(damaged(&engine).await, ["e200"], "{what}");
            }
        }
    }
}

fn naps() -> Workflow<u64, ()> {
    workflow("naps").run(async |ctx: Ctx, seconds: u64| ctx.sleep(Duration::from_secs(seconds)).await)
}

/// A record of an execution or of a timer is damaged while many executions sleep. Their timers are due while this
/// engine runs, or before the next engine starts.
#[tokio::test]
async fn executions_that_sleep_beside_a_damaged_record_wake() {
    for space in ["workflow.executions", "workflow.timers"] {
        for (harm, restarts) in Harm::ALL.into_iter().flat_map(|harm| [(harm, false), (harm, true)]) {
            let naps = naps();
            let stage = Stage::new(|engine| engine.register(&naps)).await;
            for number in 0..10 {
                stage.engine.start(&naps, 100 + number % 2).id(format!("e{number}")).await.unwrap();
            }
            stage.pass(5 * SECOND).await;
            assert_eq!(stage.engine.residents(), 0);
            stage.damage(space, b"e4", harm).await;
            let mut engine = stage.engine.clone();
            if restarts {
                engine.stop();
                stage.clock.advance(200 * SECOND);
                engine = Engine::on(stage.engine.store()).register(&naps).start().await.unwrap();
            }
            for _ in 0..120 {
                stage.pass(SECOND).await;
            }
            let what = format!("{harm:?} of {space}, after a restart: {restarts}");
            for number in (0..10).filter(|number| *number != 4) {
                let state = engine.describe(format!("e{number}")).await.unwrap().state;
                assert!(has_ended(&state), "{what}: e{number} is {state:?}");
            }
            if (space, harm) != ("workflow.timers", Harm::Nonsense) {
                assert_eq!(damaged(&engine).await, ["e4"], "{what}");
            }
        }
    }
}

/// Executions have ended and are to be removed after a while; one of their records is damaged.
#[tokio::test]
async fn executions_beside_a_damaged_record_are_removed_in_time() {
    let spaces = ["workflow.executions", "workflow.removals", "workflow.journal", "workflow.listed"];
    for space in spaces {
        for harm in Harm::ALL {
            let short = workflow("short").keep(100 * SECOND).run(async |ctx: Ctx, ()| {
                ctx.run("a", async || Ok("x".repeat(2000))).await?;
                Ok(())
            });
            let stage = Stage::new(|engine| engine.register(&short)).await;
            for number in 0..10 {
                let handle = stage.engine.start(&short, ()).id(format!("e{number}")).await.unwrap();
                handle.result().await.unwrap();
            }
            stage.damage(space, b"e4", harm).await;
            for _ in 0..3 {
                stage.pass(60 * SECOND).await;
            }
            for number in (0..10).filter(|number| *number != 4) {
                let is_gone = stage.engine.describe(format!("e{number}")).await.is_err();
                assert!(is_gone, "{harm:?} of {space}: e{number} is still there");
            }
            if space == "workflow.executions" {
                assert_eq!(damaged(&stage.engine).await, ["e4"], "{harm:?} of {space}");
            }
        }
    }
}

/// A message is damaged before it is received. Its receiver is reported as damaged; other executions receive their
/// messages.
#[tokio::test]
async fn a_damaged_message_is_reported_and_others_are_received() {
    for harm in Harm::ALL {
        let hears = workflow("hears").run(async |ctx: Ctx, ()| {
            ctx.sleep(100 * SECOND).await?;
            ctx.receive::<u32>("s").timeout(100 * SECOND).await
        });
        let stage = Stage::new(|engine| engine.register(&hears)).await;
        for number in 0..3 {
            let id = format!("e{number}");
            stage.engine.start(&hears, ()).id(&*id).await.unwrap();
            stage.pass(2 * SECOND).await;
            stage.engine.signal(&*id, "s", &number).await.unwrap();
        }
        // The key of a message: the execution's id, and a byte for the kind of record.
        stage.damage("workflow.kept", b"e1\x01", harm).await;
        for _ in 0..11 {
            stage.pass(10 * SECOND).await;
        }
        assert_eq!(damaged(&stage.engine).await, ["e1"], "{harm:?}");
        for number in [0, 2] {
            let result = stage.engine.handle(&hears, format!("e{number}")).result().await.unwrap();
            assert_eq!(result, Some(number), "{harm:?}");
        }
    }
}

/// A child ends though its parent's record is damaged, and a parent ends though its child's record is damaged.
#[tokio::test]
async fn the_end_of_an_execution_does_not_wait_for_a_damaged_relative() {
    for harm in Harm::ALL {
        for of in ["dad", "kid"] {
            let kid = workflow("kid").run(async |ctx: Ctx, ()| ctx.sleep(100 * SECOND).await);
            let dad = workflow("dad").run({
                let kid = kid.clone();
                move |ctx: Ctx, ()| {
                    let kid = kid.clone();
                    async move {
                        ctx.child(&kid, ()).id("kid").start().await?;
                        ctx.sleep(100 * SECOND).await
                    }
                }
            });
            let stage = Stage::new(|engine| engine.register(&kid).register(&dad)).await;
            stage.engine.start(&dad, ()).id("dad").await.unwrap();
            stage.pass(5 * SECOND).await;
            stage.damage("workflow.executions", of.as_bytes(), harm).await;
            for _ in 0..11 {
                stage.pass(10 * SECOND).await;
            }
            let other = if of == "dad" { "kid" } else { "dad" };
            let state = stage.engine.describe(other).await.unwrap().state;
            assert!(has_ended(&state), "{harm:?} of {of}: {other} is {state:?}");
            assert_eq!(damaged(&stage.engine).await, [of], "{harm:?}");
        }
    }
}

/// Bits of one record flip in the file of a closed store. The file store finds that by the record's checksum.
#[tokio::test]
async fn a_record_with_flipped_bits_in_a_file_costs_one_execution() {
    let directory = tempfile::tempdir().unwrap();
    let naps = workflow("naps").run(async |ctx: Ctx, _: String| ctx.sleep(Duration::from_millis(1500)).await);
    let engine = Engine::open(directory.path()).register(&naps).start().await.unwrap();
    for number in 0..10 {
        engine.start(&naps, format!("input of number {number}")).id(format!("e{number}")).await.unwrap();
    }
    while engine.residents() > 0 {
        engine.store().env().sleep(Duration::from_millis(10)).await;
    }
    while engine.store().maintain().await.unwrap() {}
    engine.shutdown().await.unwrap();
    let file = directory.path().join("index.redb");
    let mut bytes = std::fs::read(&file).unwrap();
    let needle = b"input of number 4";
    let places: Vec<usize> = (0..bytes.len() - needle.len()).filter(|at| bytes[*at..].starts_with(needle)).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| bytes[*at] ^= 1);
    std::fs::write(&file, bytes).unwrap();
    let engine = Engine::open(directory.path()).register(&naps).start().await.unwrap();
    for number in (0..10).filter(|number| *number != 4) {
        engine.handle(&naps, format!("e{number}")).result().await.unwrap();
    }
    while damaged(&engine).await != ["e4"] {
        engine.store().env().sleep(Duration::from_millis(10)).await;
    }
}

/// Several records are damaged, some of them neighbours, at both ends of the scanned range and in the middle: each
/// costs its own execution. All others are listed, and so are the parked ones.
#[tokio::test]
async fn several_damaged_records_cost_several_executions() {
    let (gate, gated) = gated();
    let stage = Stage::new(|engine| engine.register(&gated)).await;
    for number in 100..400 {
        stage.engine.start(&gated, number).id(format!("e{number}")).await.unwrap();
    }
    stage.turns().await;
    stage.engine.stop();
    let bad = ["e100", "e250", "e251", "e252", "e399"];
    let mut keys = Vec::new();
    for id in bad {
        keys.push(stage.find("workflow.running", id.as_bytes()).await);
    }
    keys.into_iter().for_each(|key| stage.break_checksum(key));
    gate.send_replace(true);
    let engine = Engine::on(stage.engine.store()).register(&gated).start().await.unwrap();
    for _ in 0..3 {
        stage.pass(SECOND).await;
    }
    assert_eq!(damaged(&engine).await, bad);
    let completed = engine.list(ExecutionFilter::new().is(Status::Completed)).limit(1000).await.unwrap();
    assert_eq!(completed.items.len(), 300 - bad.len());
    stage.damage("workflow.executions", b"e300", Harm::Checksum).await;
    let completed = engine.list(ExecutionFilter::new().is(Status::Completed)).limit(1000).await.unwrap();
    assert_eq!(completed.items.len(), 299 - bad.len());
}
