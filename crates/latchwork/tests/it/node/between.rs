//! What one node begins and another one ends or must learn of: each test holds the moment between the two open, or
//! repeats it until both orders have come up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use latchwork::claim::{ClaimStep, ClaimWorkflow, Claims, StoredClaims, Timer};
use latchwork::entity::Add;
use latchwork::json;
use latchwork::store::{Commit, Order};
use latchwork::workflow::{
    ExecutionFilter, ExecutionId, ExecutionState, Executions, Failure, Queue, Retry, Status, WorkflowError,
};
use parking_lot::Mutex;

use super::held::{Fate, HeldBackend, memory, space, spaces, store_of, writes_into};
use super::*;
use crate::claim::kit::{INVOICES, Seen, invoices_with};

/// Long enough that no node is taken for dead.
const LONG: Duration = Duration::from_secs(30);

pub(super) fn calm(store: &Store, name: &str) -> EngineBuilder {
    Engine::on(store).node(NodeOptions::new().name(name).lease(LONG))
}

/// Nodes on one store: the owner of all shards, and one that owns none. With the stores of both.
pub(super) async fn owner_and(
    name: &str,
    of_owner: &Workflow<u64, u64>,
    of_other: &Workflow<u64, u64>,
) -> [(Engine, Store, Arc<HeldBackend>); 2] {
    let memory = memory();
    let ((one, first), (two, second)) = (store_of(&memory).await, store_of(&memory).await);
    let owner = calm(&one, "owner").register(of_owner).start().await.unwrap();
    let other = calm(&two, name).register(of_other).start().await.unwrap();
    Nodes::on(&one).drain(name, true).await.unwrap();
    until(&one, "the owner owns all", |nodes| shares(nodes) == [0, 64]).await;
    [(owner, one, first), (other, two, second)]
}

/// Gives every shard's record another rev, as if the shard had moved away and back, except for the shard of one
/// execution. The node learns of it by a refusal.
async fn touch_shards(store: &Store, but: &ExecutionId) {
    let but = (xxhash_rust::xxh3::xxh3_64(but.as_bytes()) % 64).to_be_bytes();
    let space = space(store, "node.shards").await;
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, 100).await.unwrap();
    let found = found.into_iter().filter(|(key, _)| key.bytes() != but);
    let commit = found.fold(Commit::new(), |commit, (key, item)| commit.put(&key, item.value));
    assert_eq!(commit.writes().len(), 63);
    assert!(store.commit(commit).await.unwrap().is_applied());
}

/// The executions whose bodies have run, and how often.
type Ran = Arc<Mutex<BTreeMap<String, u32>>>;

fn child(ran: &Ran, limited: bool) -> Workflow<u64, u64> {
    let builder = workflow(if limited { "queued" } else { "child" });
    let builder = if limited { builder.concurrency(1).when_full(Queue::new()) } else { builder };
    builder.with(ran.clone()).run(async |ctx: Ctx, ran: Ran, n: u64| {
        let id = ctx.id().to_string();
        let body = async || {
            *ran.lock().entry(id.clone()).or_default() += 1;
            tokio::time::sleep(Duration::from_millis(3)).await;
            Ok(n)
        };
        // Twice at one place would be a fault, so an attempt that was cut off is not repeated.
        ctx.run("body", body).await
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_and_an_admitted_execution_run_only_on_the_node_that_owns_them() {
    let (store, ran) = (Store::memory().await.unwrap(), Ran::default());
    let (child, queued) = (child(&ran, false), child(&ran, true));
    let children = child.clone();
    let parent: Workflow<u64, u64> = workflow("parent").with(children).run(async |ctx: Ctx, child, n: u64| {
        let mut started = Vec::new();
        for number in 0..n {
            started.push(ctx.child(&child, number).id(format!("{}-{number}", ctx.id())).start().await?);
        }
        let mut sum = 0;
        for child in started {
            sum += child.result().await?;
        }
        Ok(sum)
    });
    let builder = |name| calm(&store, name).register(&parent).register(&child).register(&queued);
    let (a, b) = (builder("a").start().await.unwrap(), builder("b").start().await.unwrap());
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let mut parents = Vec::new();
    for (number, engine) in [&a, &b, &a, &b].into_iter().enumerate() {
        parents.push(engine.start(&parent, 20).id(format!("p{number}")).await.unwrap());
    }
    let mut waiting = Vec::new();
    for number in 0..40 {
        let engine = if number % 2 == 0 { &a } else { &b };
        waiting.push(engine.start(&queued, number).id(format!("q{number}")).await.unwrap());
    }
    for parent in parents {
        assert_eq!(in_time(parent.result()).await.unwrap(), 190);
    }
    for (number, queued) in waiting.into_iter().enumerate() {
        assert_eq!(in_time(queued.result()).await.unwrap(), number as u64);
    }
    let twice: Vec<(String, u32)> = ran.lock().clone().into_iter().filter(|(_, times)| *times != 1).collect();
    assert_eq!((ran.lock().len(), twice), (120, Vec::new()), "each body runs once");
}

/// The end of one execution admits the next, whose shard has moved away and back meanwhile: the end is not lost.
#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_admits_an_execution_survives_that_its_shard_has_moved() {
    let store = Store::memory().await.unwrap();
    let one = workflow("one").concurrency(1).when_full(Queue::new()).run(async |ctx: Ctx, n: u64| {
        let more = ctx.receive::<u64>("go").await?;
        Ok(n + more)
    });
    let a = calm(&store, "a").register(&one).start().await.unwrap();
    let mut handles = Vec::new();
    for n in 0..12 {
        handles.push(a.start(&one, n).id(format!("e{n}")).await.unwrap());
    }
    for (n, handle) in handles.into_iter().enumerate() {
        touch_shards(&store, handle.id()).await;
        a.signal(handle.id().clone(), "go", &100_u64).await.unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(10), handle.result()).await;
        assert_eq!(ended.expect("an end or an admission is lost").unwrap(), 100 + n as u64);
    }
}

/// Whichever of its reads fails after it has joined: the others do not wait for the lease of a node that never worked.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_start_fails_is_not_counted_on() {
    let memory = memory();
    let (store, _) = store_of(&memory).await;
    let waits = waits();
    let _a = calm(&store, "a").register(&waits).start().await.unwrap();
    let mut failed = 0;
    for nth in 0..12 {
        let (ghost, held) = store_of(&memory).await;
        let (board, shards) = (spaces(&store, &["node.board"]).await, spaces(&store, &["node.shards"]).await);
        let (broken, has_joined) = (held.clone(), AtomicU64::new(0));
        held.rule(move |commit| {
            let joins = writes_into(commit, &board) && !writes_into(commit, &shards);
            if joins && has_joined.fetch_add(1, Ordering::SeqCst) == 0 {
                broken.fail_read(nth);
            }
            Fate::Lands
        });
        match in_time(calm(&ghost, &format!("ghost-{nth}")).register(&waits).start()).await {
            Ok(engine) => engine.shutdown().await.unwrap(),
            Err(_) => failed += 1,
        }
        let gone = until(&store, "the ghost is gone", |nodes| shares(nodes) == [64]);
        tokio::time::timeout(Duration::from_secs(10), gone)
            .await
            .expect("the others count on a node that is not there");
    }
    assert!(failed > 1, "reads fail while a node starts");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_is_heard_before_the_answer_to_its_request_is_not_lost() {
    let memory = memory();
    let ((one, _), (two, held)) = (store_of(&memory).await, store_of(&memory).await);
    let (a, b) = (calm(&one, "a").start().await.unwrap(), calm(&two, "b").start().await.unwrap());
    // The session of b exists before, so that its notices are heard.
    b.mutex("other").acquire().await.unwrap().release().await.unwrap();
    let guard = a.mutex("printer").acquire().await.unwrap();
    let requests = spaces(&one, &["lock.requests"]).await;
    held.rule(move |commit| if writes_into(commit, &requests) { Fate::AnswerWaits } else { Fate::Lands });
    let asked = tokio::spawn(b.mutex("printer").acquire());
    let queued = async || a.locks().inspect("printer").await.unwrap().waiters.len();
    in_time(async {
        while queued().await == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    guard.release().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    held.rule(|_| Fate::Lands);
    let granted = tokio::time::timeout(Duration::from_secs(10), asked).await.expect("the grant is lost");
    assert!(granted.unwrap().unwrap().release().await.unwrap());
}

/// The shards cannot move, so the caller is told by the owner that it has asked, or never.
#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_fails_does_not_forget_the_callers_on_other_nodes() {
    let memory = memory();
    let ((one, held), (two, _)) = (store_of(&memory).await, store_of(&memory).await);
    let waits = waits();
    let a = calm(&one, "a").register(&waits).start().await.unwrap();
    let caller = calm(&two, "caller").start().await.unwrap();
    until(&one, "a owns all", |nodes| shares(nodes) == [64, 0]).await;
    let mut results = Vec::new();
    for n in 0..100_u64 {
        let id = a.start(&waits, n).id(format!("e{n}")).await.unwrap().id().clone();
        let handle = caller.handle(&waits, id);
        results.push(tokio::spawn(async move { handle.result().await }));
    }
    // All callers have asked the owner, and all executions wait out of memory.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let (shards, lost) = (spaces(&one, &["node.shards"]).await, Arc::new(AtomicU64::new(0)));
    let counted = lost.clone();
    held.rule(move |commit| {
        if !writes_into(commit, &shards) {
            return Fate::Lands;
        }
        counted.fetch_add(1, Ordering::SeqCst);
        Fate::IsLost
    });
    let _c = calm(&two, "c").register(&waits).start().await.unwrap();
    in_time(async {
        while lost.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    for n in 0..100_u64 {
        caller.signal(format!("e{n}"), "go", &7_u64).await.unwrap();
    }
    for (n, result) in results.into_iter().enumerate() {
        let told = tokio::time::timeout(Duration::from_secs(20), result).await.expect("a caller is forgotten");
        assert_eq!(told.unwrap().unwrap(), 7 + n as u64);
    }
    assert_eq!(shares(&Nodes::on(&one).list().await.unwrap()), [64, 0, 0], "no move has landed");
}

fn tickets() -> ClaimWorkflow {
    let timer = Some(Timer { after: Duration::from_millis(200), requester: "system".into() });
    ClaimWorkflow::new("ticket", "desk", "ticket")
        .statuses(["open", "late"])
        .step(ClaimStep { timer, ..ClaimStep::new(1, "escalate", "open", "late") })
}

/// A node still believes that it owns a shard when it sets a timer there, and then it dies.
#[tokio::test(flavor = "multi_thread")]
async fn a_timer_of_a_claim_that_a_node_sets_in_a_shard_it_has_lost_rings_on_the_new_owner() {
    let memory = memory();
    let ((one, held), (two, _)) = (store_of(&memory).await, store_of(&memory).await);
    let waits = waits();
    let a = doomed(named(&one, "a").register(&waits)).await;
    let claims = a.run(Claims::on(&a.engine).workflow(tickets()).start()).await.unwrap();
    // A node takes b for dead only after a long time, so a does not notice that it hears nothing.
    let b = calm(&two, "b").register(&waits).start().await.unwrap();
    let _claims_b = Claims::on(&b).workflow(tickets()).start().await.unwrap();
    until(&two, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    // From now on a hears nothing, and does not renew its lease: b takes over.
    let board = spaces(&two, &["node.board"]).await;
    held.hears(false);
    held.rule(move |commit| match commit.writes() {
        [write] if board.contains(&write.key().space()) && write.key().bytes().first() == Some(&b'n') => Fate::Waits,
        _ => Fate::Lands,
    });
    until(&two, "b owns all", |nodes| shares(nodes) == [64]).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    for n in 0..8 {
        claims.add("ticket", Add::new("ticket").id(format!("t{n}")).data(json!({"status": "open"}))).await.unwrap();
    }
    drop(claims);
    a.kill();
    for n in 0..8 {
        let is_late = async {
            while b.entities().get(format!("t{n}")).await.unwrap().unwrap().data["status"] != "late" {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), is_late).await.expect("the timer does not ring");
    }
}

/// The node that would have looked for the cycle dies between the wait and the look.
#[tokio::test(flavor = "multi_thread")]
async fn a_cycle_whose_last_wait_was_stored_by_a_node_that_has_died_is_found() {
    let memory = memory();
    let ((one, _), (two, held)) = (store_of(&memory).await, store_of(&memory).await);
    let cross = workflow("cross").run(async |ctx: Ctx, (first, second): (String, String)| {
        let _first = ctx.mutex(first).acquire().await?;
        ctx.receive::<()>("go").await?;
        let _second = ctx.mutex(second).acquire().await?;
        Ok(())
    });
    let a = named(&one, "a").register(&cross).start().await.unwrap();
    let b = doomed(named(&two, "b").register(&cross)).await;
    until(&one, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let here = a.start(&cross, ("x".into(), "y".into())).await.unwrap();
    let there = b.engine.start(&cross, ("y".into(), "x".into())).await.unwrap().id().clone();
    let waits_for = async |id: &ExecutionId, what: &str| {
        in_time(async {
            loop {
                let waits = a.describe(id.clone()).await.unwrap().waits;
                if waits.iter().any(|wait| format!("{:?}", wait.what).starts_with(what)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    };
    waits_for(here.id(), "Signal").await;
    waits_for(&there, "Signal").await;
    a.signal(here.id().clone(), "go", &()).await.unwrap();
    waits_for(here.id(), "Lock").await;
    // As soon as the request of b's execution is on its way, b can read nothing: it cannot look for a cycle.
    let (requests, blind) = (spaces(&one, &["lock.requests"]).await, held.clone());
    held.rule(move |commit| {
        if writes_into(commit, &requests) {
            blind.reads(false);
        }
        Fate::Lands
    });
    a.signal(there.clone(), "go", &()).await.unwrap();
    waits_for(&there, "Lock").await;
    held.rule(|_| Fate::Waits);
    b.kill();
    let ends = async {
        loop {
            let states = [here.id().clone(), there.clone()].map(|id| a.describe(id));
            let states = futures_util::future::join_all(states).await;
            let is_cycle = |state: &ExecutionState| match state {
                ExecutionState::Failed(why) => why.to_string().contains("would never end"),
                _ => false,
            };
            if states.iter().any(|it| is_cycle(&it.as_ref().unwrap().state)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ends).await.expect("the cycle is not found");
}

fn sum() -> Workflow<u64, u64> {
    workflow("sum").run(async |ctx: Ctx, most: u64| {
        let mut sum = 0;
        for _ in 0..most {
            sum += ctx.receive::<u64>("more").await?;
        }
        Ok(sum)
    })
}

/// An execution is lent again while its stay before has not ended: the commit with which it leaves memory has landed,
/// and the host does not know that yet.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_that_is_lent_again_before_its_last_stay_has_ended_does_not_get_stuck() {
    let sum = sum();
    let [(owner, one, _), (host, _, held)] = owner_and("host", &waits(), &sum).await;
    let records = spaces(&one, &["workflow.executions"]).await;
    host.start(&sum, 5).id("s").await.unwrap();
    for round in 0..5 {
        tokio::time::sleep(Duration::from_millis(400)).await;
        let records = records.clone();
        held.rule(move |commit| if writes_into(commit, &records) { Fate::AnswerWaits } else { Fate::Lands });
        in_time(async {
            while owner.describe("s").await.unwrap().waits.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        owner.signal("s", "more", &1_u64).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        held.rule(|_| Fate::Lands);
        let received = async {
            while owner.describe("s").await.unwrap().status() == Status::Waiting {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), received).await.unwrap_or_else(|_| panic!("round {round}: stuck"));
    }
    let result = tokio::time::timeout(Duration::from_secs(10), host.handle(&sum, "s").result()).await;
    assert_eq!(result.expect("the execution is stuck").unwrap(), 5);
}

/// The owner hears that the host has left before it has read what the host had given back: an execution that waits. Its
/// callers are not told that no node can run it before it has to run.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_that_waits_does_not_have_to_run_because_its_host_has_left() {
    let sum = sum();
    let [(owner, one, of_owner), (host, _, of_host)] = owner_and("host", &waits(), &sum).await;
    let records = spaces(&one, &["workflow.executions"]).await;
    host.start(&sum, 1).id("s").await.unwrap();
    // The owner has lent it when the host wants to store that it waits.
    let wanted = of_host.rule_for(Fate::Waits, move |commit| writes_into(commit, &records));
    let caller = owner.handle(&sum, "s");
    let waiting = tokio::spawn(async move { caller.result().await });
    in_time(wanted).await;
    of_owner.hears(false);
    of_host.rule(|_| Fate::Lands);
    in_time(async {
        while host.describe("s").await.unwrap().status() != Status::Waiting {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    host.shutdown().await.unwrap();
    of_owner.reads(false);
    of_owner.hears(true);
    tokio::time::sleep(Duration::from_millis(300)).await;
    of_owner.reads(true);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    owner.signal("s", "more", &1_u64).await.unwrap();
    assert!(matches!(in_time(waiting).await.unwrap(), Err(WorkflowError::Parked { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_execution_that_kills_each_host_it_is_lent_to_is_parked() {
    let store = Store::memory().await.unwrap();
    let (begun, mut hangs) = tokio::sync::mpsc::unbounded_channel();
    let deadly: Workflow<u64, u64> = workflow("deadly").with(begun).run(async |ctx: Ctx, begun, _: u64| {
        let hang = async || {
            let _: Result<(), _> = tokio::sync::mpsc::UnboundedSender::<()>::send(&begun, ());
            std::future::pending::<Result<u64, Failure>>().await
        };
        ctx.run("kill", hang).retry(Retry::exponential().max_attempts(100)).await
    });
    let owner = named(&store, "owner").register(&waits()).most_crashes(3).start().await.unwrap();
    let caller = owner.clone();
    let mut killed = 0;
    let parked = async {
        let mut host = doomed(named(&store, "host-0").register(&deadly).most_crashes(3)).await;
        Nodes::on(&store).drain("host-0", true).await.unwrap();
        until(&store, "the owner owns all", |nodes| shares(nodes) == [0, 64]).await;
        host.engine.start(&deadly, 1).id("d").await.unwrap();
        while hangs.recv().await.is_some() {
            host.kill();
            killed += 1;
            assert!(killed < 10, "it kills every host in turn");
            host = doomed(named(&store, &format!("host-{killed}")).register(&deadly).most_crashes(3)).await;
            Nodes::on(&store).drain(&format!("host-{killed}"), true).await.unwrap();
            let next = async {
                loop {
                    if let ExecutionState::Parked(reason) = caller.describe("d").await.unwrap().state {
                        return Some(reason);
                    }
                    if !hangs.is_empty() {
                        return None;
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            if let Some(reason) = in_time(next).await {
                host.kill();
                return reason;
            }
        }
        unreachable!("the channel is open")
    };
    let reason = in_time(parked).await;
    assert!(reason.contains("each time the process ended"), "{reason}");
}

/// Collects what is logged as an error.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Logged {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!(" {field}={value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().push(text.0);
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A newer program may write the record of its node in a format that this one cannot read.
#[tokio::test]
async fn a_node_whose_record_has_another_format_counts_as_dead_and_is_logged() {
    let logged = Logged::default();
    let _second = tracing::Dispatch::new(Logged::default());
    let _guard = tracing::subscriber::set_default(logged.clone());
    tracing::callsite::rebuild_interest_cache();
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let a = named(&store, "a").register(&waits).start().await.unwrap();
    let b = named(&store, "b").register(&waits).start().await.unwrap();
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let board = space(&store, "node.board").await;
    b.stop();
    until(&store, "b has left", |nodes| nodes.len() == 1).await;
    let newer = Commit::new().put(&board.key("nfuture"), vec![9_u8, 1, 2, 3]);
    assert!(store.commit(newer).await.unwrap().is_applied());
    let nodes = until(&store, "a owns all", |nodes| shares(nodes) == [64]).await;
    assert_eq!(nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["a"], "it is not listed");
    let handle = a.start(&waits, 1).id("e").await.unwrap();
    a.signal("e", "go", &2_u64).await.unwrap();
    assert_eq!(in_time(handle.result()).await.unwrap(), 3);
    in_time(async {
        let is_it = |line: &String| line.contains("cannot be read") && line.contains("future");
        while !logged.0.lock().iter().any(is_it) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    // A node that joins meanwhile gets its share: the record that cannot be read counts for nothing.
    let _c = in_time(named(&store, "c").register(&waits).start()).await.unwrap();
    until(&store, "two halves again", |nodes| shares(nodes) == [32, 32]).await;
}

/// What the owner finds, a caller on any node is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_on_any_node_is_told_that_no_live_node_can_run_the_execution() {
    let (store, waits, sum) = (Store::memory().await.unwrap(), waits(), sum());
    let owner = named(&store, "owner").register(&waits).start().await.unwrap();
    let caller = named(&store, "caller").start().await.unwrap();
    let host = named(&store, "host").register(&sum).start().await.unwrap();
    until(&store, "two halves", |nodes| shares(nodes).iter().sum::<usize>() == 64 && nodes.len() == 3).await;
    let ids: Vec<String> = (0..8).map(|n| format!("s{n}")).collect();
    for id in &ids {
        host.start(&sum, 2).id(id.clone()).await.unwrap();
    }
    let early: Vec<_> = ids
        .iter()
        .map(|id| {
            let handle = caller.handle(&sum, id.clone());
            tokio::spawn(async move { handle.result().await })
        })
        .collect();
    // Those that wait for a signal have nothing to do: no caller is told anything.
    let waiting = async || owner.list(ExecutionFilter::new().is(Status::Waiting)).await.unwrap().items.len();
    while waiting().await < ids.len() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    host.shutdown().await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(early.iter().all(|waiting| !waiting.is_finished()));
    for id in &ids {
        owner.signal(id.clone(), "more", &1_u64).await.unwrap();
    }
    let mut reasons = Vec::new();
    for waiting in early {
        match in_time(waiting).await.unwrap() {
            Err(WorkflowError::Parked { reason, .. }) => reasons.push(reason),
            other => panic!("{other:?}"),
        }
    }
    for id in &ids {
        for engine in [&caller, &owner] {
            match in_time(engine.handle(&sum, id.clone()).result()).await {
                Err(WorkflowError::Parked { reason, .. }) => reasons.push(reason),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(reasons.iter().all(|reason| reason == "workflow \"sum\" is registered on no live node"), "{reasons:?}");
    assert_eq!(Executions::on(&store).await.unwrap().unrunnable(10).await.unwrap().len(), 8);
    let again = named(&store, "again").register(&sum).start().await.unwrap();
    for id in &ids {
        again.signal(id.clone(), "more", &1_u64).await.unwrap();
        assert_eq!(in_time(caller.handle(&sum, id.clone()).result_through_parks()).await.unwrap(), 2);
    }
}

/// Two versions of a program: only one has the action that an abandoned claim needs.
#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_claim_is_left_to_a_node_that_has_its_action() {
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let retry = INVOICES.replace(r#""lease": "2s""#, r#""lease": "400ms", "recovery": "retry""#);
    let seen = [Arc::new(Seen::default()), Arc::new(Seen::default())];
    let first = doomed(named(&store, "first").register(&waits)).await;
    let claims = first.run(invoices_with(&first.engine, &seen[0], &retry).start()).await.unwrap();
    let add = Add::new("invoice").id("i").data(json!({"status": "sent"}));
    claims.add("invoice", add).await.unwrap();
    let input = json!({"pause_ms": 700, "amount": 7});
    let fired = claims.fire("invoice", "pay", "i").by("admin").input(input);
    let _fired = first.runtime.spawn(fired.into_future());
    in_time(async {
        while seen[0].bodies() == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    // The other version sweeps often, and has no action for invoices.
    let other = named(&store, "other").register(&waits).start().await.unwrap();
    let sweeps = Claims::on(&other).workflow(tickets()).sweep_every(Duration::from_millis(20));
    let _other = sweeps.start().await.unwrap();
    let second = named(&store, "second").register(&waits).start().await.unwrap();
    drop(claims);
    first.kill();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let open = StoredClaims::on(&store).await.unwrap().get("i").await.unwrap().unwrap();
    assert_eq!((open.holder.needs_review, open.attempts), (None, 1), "it waits for a node with the action");
    let able = invoices_with(&second, &seen[1], &retry).sweep_every(Duration::from_millis(20));
    let _able = able.start().await.unwrap();
    in_time(async {
        while second.entities().get("i").await.unwrap().unwrap().data["status"] != "paid" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!((seen[0].bodies(), seen[1].bodies()), (1, 1));
}
