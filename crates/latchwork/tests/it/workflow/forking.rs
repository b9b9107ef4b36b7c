//! Forks: operations recorded before the place are kept and not done again; the rest is done. And histories by pages,
//! which places are taken from.

use std::future::IntoFuture;
use std::time::Duration;

use latchwork::state::States;
use latchwork::store::History;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, ExecutionState, Failure, Kind, Operation, WaitsFor, Workflow, WorkflowError, workflow};

/// A step and its result.
async fn step(ctx: &Ctx, name: String, input: &u64) -> Result<String, Failure> {
    let gives = format!("{name}:{input}");
    ctx.run(&name, async || Ok(gives.clone())).input(input).await
}

fn ten() -> Workflow<u64, Vec<String>> {
    workflow("ten").run(async |ctx: Ctx, input: u64| {
        let mut gave = Vec::new();
        for number in 0..10 {
            gave.push(step(&ctx, format!("s{number}"), &input).await?);
            if number == 4 {
                ctx.sleep(Duration::from_secs(3600)).await?;
            }
        }
        Ok(gave)
    })
}

/// A step, two branches of three steps each, of which the second has two branches of its own, and a step.
fn wide() -> Workflow<u64, Vec<String>> {
    workflow("wide").run(async |ctx: Ctx, input: u64| {
        let mut gave = vec![step(&ctx, "before".into(), &input).await?];
        let branches = ctx.map([0, 1], 2, |ctx: Ctx, branch: u32| async move {
            let mut gave = Vec::new();
            for number in 0..3 {
                gave.push(step(&ctx, format!("b{branch}-{number}"), &input).await?);
            }
            if branch == 1 {
                let (first, second) = ctx
                    .join((
                        async |ctx: Ctx| step(&ctx, "inner0".into(), &input).await,
                        async |ctx: Ctx| step(&ctx, "inner1".into(), &input).await,
                    ))
                    .await;
                gave.extend([first?, second?]);
            }
            Ok::<_, Failure>(gave)
        });
        for branch in branches.await {
            gave.extend(branch?);
        }
        gave.push(step(&ctx, "after".into(), &input).await?);
        Ok(gave)
    })
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

fn text(operation: &Operation) -> String {
    format!("{}{}", operation.branch, operation.place)
}

#[tokio::test]
async fn a_fork_at_each_step_runs_that_and_the_rest_and_nothing_before() {
    let ten = ten();
    let test = TestEngine::new(&ten, 1).await.unwrap();
    let handle = test.engine().start(&ten, 7).id("source").await.unwrap();
    let output = test.run(handle.result()).await.unwrap();
    let source = test.history("source").await.unwrap();
    for (number, operation) in source.operations.iter().filter(|it| it.kind == Kind::Step).enumerate() {
        for by_name in [false, true] {
            let before = test.bodies().len();
            let fork = test.engine().fork("source").id(format!("fork-{number}-{by_name}"));
            let fork = if by_name { fork.at_step(&operation.name) } else { fork.at(text(operation)) };
            let id = fork.await.unwrap();
            assert_eq!(test.run(test.engine().handle(&ten, &id).result()).await.unwrap(), output);
            let expected: Vec<String> = (number..10).map(|number| format!("s{number}")).collect();
            assert_eq!(test.bodies()[before..], expected, "at step {number}");
            let history = test.history(&id).await.unwrap();
            assert_eq!(history.steps(), source.steps());
            assert_eq!(history.operations[..operation.place as usize].len(), operation.place as usize);
        }
    }
    assert_eq!(test.history("source").await.unwrap(), source, "the source stays as it was");
}

#[tokio::test]
async fn a_fork_with_another_input_keeps_the_recorded_results() {
    let ten = ten();
    let test = TestEngine::new(&ten, 1).await.unwrap();
    let handle = test.engine().start(&ten, 7).id("source").await.unwrap();
    test.run(handle.result()).await.unwrap();
    let id = test.engine().fork("source").at_step("s6").input(&9u64).await.unwrap();
    let output = test.run(test.engine().handle(&ten, &id).result()).await.unwrap();
    let expected: Vec<String> = (0..10).map(|n| format!("s{n}:{}", if n < 6 { 7 } else { 9 })).collect();
    assert_eq!(output, expected);
    // Without a place, everything is done anew.
    let id = test.engine().fork("source").input(&8u64).await.unwrap();
    let output = test.run(test.engine().handle(&ten, &id).result()).await.unwrap();
    assert!(output.iter().all(|gave| gave.ends_with(":8")), "{output:?}");
}

/// The fork has the receipt of the update from its source and gives the answer itself: an update under the same id is
/// the same one, and is not received again.
#[tokio::test]
async fn an_update_that_the_source_has_received_is_answered_by_the_fork_once() {
    let counts = workflow("counts").run(async |ctx: Ctx, until: usize| {
        let mut received = Vec::new();
        while received.len() < until {
            let request = ctx.receive_update::<u64, usize>("add").await?;
            received.push(request.value);
            ctx.run("work", async || Ok(())).await?;
            request.answer(&received.len()).await?;
        }
        Ok(received)
    });
    let test = TestEngine::new(&counts, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&counts, 2).id("source").await.unwrap();
    assert_eq!(test.run(handle.update::<usize>("add", &7).id("u1").into_future()).await.unwrap(), 1);
    let fork = engine.fork("source").at_step("work").await.unwrap();
    let fork = engine.handle(&counts, &fork);
    // It begins anew after the receipt, and answers.
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    assert_eq!(test.run(fork.update::<usize>("add", &7).id("u1").into_future()).await.unwrap(), 1);
    assert_eq!(test.run(fork.update::<usize>("add", &8).into_future()).await.unwrap(), 2);
    assert_eq!(test.run(fork.result()).await.unwrap(), [7, 8]);
}

#[tokio::test]
async fn a_fork_within_a_branch_keeps_the_branches_beside_it() {
    let wide = wide();
    let test = TestEngine::new(&wide, 1).await.unwrap();
    let handle = test.engine().start(&wide, 7).id("source").await.unwrap();
    let output = test.run(handle.result()).await.unwrap();
    let cases: [(&str, &[&str]); 6] = [
        ("after", &["after"]),
        ("b0-1", &["after", "b0-1", "b0-2"]),
        ("b1-2", &["after", "b1-2", "inner0", "inner1"]),
        ("inner1", &["after", "inner1"]),
        ("b1-0", &["after", "b1-0", "b1-1", "b1-2", "inner0", "inner1"]),
        ("before", &["after", "b0-0", "b0-1", "b0-2", "b1-0", "b1-1", "b1-2", "before", "inner0", "inner1"]),
    ];
    for (at, expected) in cases {
        let before = test.bodies().len();
        let id = test.engine().fork("source").at_step(at).await.unwrap();
        assert_eq!(test.run(test.engine().handle(&wide, &id).result()).await.unwrap(), output, "at {at}");
        assert_eq!(sorted(test.bodies()[before..].to_vec()), expected, "at {at}");
    }
    // At the operation that starts the branches, nothing of the branches is kept.
    let before = test.bodies().len();
    let id = test.engine().fork("source").at("1").await.unwrap();
    assert_eq!(test.run(test.engine().handle(&wide, &id).result()).await.unwrap(), output);
    assert_eq!(test.bodies().len() - before, 9);
}

#[tokio::test]
async fn a_fork_of_more_than_a_commit_holds_is_whole() {
    let long = workflow("long").run(async |ctx: Ctx, count: u64| {
        let mut sum = 0;
        for number in 0..count {
            sum += ctx.run("add", async || Ok(number)).await?;
        }
        ctx.run("last", async || Ok(sum)).await
    });
    let test = TestEngine::new(&long, 1).await.unwrap();
    let handle = test.engine().start(&long, 2500).id("source").await.unwrap();
    let output = test.run(handle.result()).await.unwrap();
    for (at, count) in [("2499", 2), ("2500", 1), ("999", 1502), ("1000", 1501)] {
        let before = test.bodies().len();
        let id = test.engine().fork("source").at(at).await.unwrap();
        assert_eq!(test.run(test.engine().handle(&long, &id).result()).await.unwrap(), output);
        assert_eq!(test.bodies().len() - before, count, "at {at}");
    }
}

/// Changes a slot of its own in every possible way: alone, in a transaction, without effect, and by reading. Returns
/// the values that it saw.
fn counter() -> Workflow<(), Vec<u64>> {
    workflow("counter").run(async |ctx: Ctx, ()| {
        let own = || ctx.state().execution::<u64>("n");
        let mut saw = vec![own().increment(1).await?.value];
        // This entry goes into the commit of the next change.
        ctx.now().await;
        saw.push(own().increment(10).await?.value);
        saw.push(own().get().await?.unwrap_or_default());
        saw.push(own().update(|n| n.unwrap_or_default()).await?.value);
        let gave = ctx.transaction("tx", async |tx| {
            tx.execution::<Vec<u64>>("list").set(vec![1, 2]).await?;
            Ok(tx.execution::<u64>("n").increment(100).await?.value)
        });
        saw.push(gave.await?);
        ctx.run("with its id", async || Ok(())).input(ctx.id()).await?;
        saw.push(own().increment(1000).await?.value);
        ctx.state().execution::<Vec<u64>>("list").delete().await?;
        saw.push(own().update(|n| n.unwrap_or_default() + 10_000).await?.value);
        Ok(saw)
    })
}

async fn slots_of(test: &TestEngine, id: &str) -> (Option<u64>, Option<Vec<u64>>) {
    let slots = test.engine().states().execution(id);
    (slots.slot("n").get().await.unwrap(), slots.slot("list").get().await.unwrap())
}

#[tokio::test]
async fn a_fork_has_the_slots_as_they_were_at_that_place() {
    let counter = counter();
    let test = TestEngine::new(&counter, 1).await.unwrap();
    let handle = test.engine().start(&counter, ()).id("source").await.unwrap();
    let output = test.run(handle.result()).await.unwrap();
    assert_eq!(output, [1, 11, 11, 11, 111, 1111, 11111]);
    // Other code writes to the slot, too.
    let others = test.engine().states().execution("source").slot::<u64>("n");
    others.set(0).await.unwrap();
    let source = test.history("source").await.unwrap();
    assert_eq!(source.operations.len(), 10);
    for operation in &source.operations {
        let at = text(operation);
        let id = test.engine().fork("source").at(&at).await.unwrap();
        assert_eq!(test.run(test.engine().handle(&counter, &id).result()).await.unwrap(), output, "at {at}");
        assert_eq!(slots_of(&test, &id).await, (Some(11111), None), "at {at}");
        // A fork of the fork.
        let again = test.engine().fork(&id).at(&at).await.unwrap();
        assert_eq!(test.run(test.engine().handle(&counter, &again).result()).await.unwrap(), output, "at {at}");
    }
    assert_eq!(slots_of(&test, "source").await, (Some(0), None), "the source stays as it was");
}

/// Only the newest state of a slot is kept. If a slot was changed after the place, its earlier value is unknown; if
/// not, it is known.
#[tokio::test]
async fn a_fork_whose_slot_values_are_no_longer_known_is_refused() {
    let counter = counter();
    let test = TestEngine::new(&counter, 1).await.unwrap();
    States::with_history(test.engine().store(), History::Generations(0)).await.unwrap();
    let handle = test.engine().start(&counter, ()).id("source").await.unwrap();
    let output = test.run(handle.result()).await.unwrap();
    while test.engine().store().maintain().await.unwrap() {}
    for at in ["2", "3", "5", "8"] {
        match test.engine().fork("source").at(at).await {
            Err(WorkflowError::Fork { at: told, reason, .. }) => {
                assert_eq!(told, at);
                assert!(reason.contains("no longer"), "{reason}");
            }
            other => panic!("at {at}: {other:?}"),
        }
    }
    let id = test.engine().fork("source").await.unwrap();
    assert_eq!(test.run(test.engine().handle(&counter, &id).result()).await.unwrap(), output);
}

/// Names that contain the id of the execution, or of the root of its tree, refer to the fork's own id in a fork.
#[tokio::test]
async fn a_fork_uses_its_own_id_in_names() {
    let own = workflow("own").run(async |ctx: Ctx, ()| {
        let mutex = ctx.mutex("m").of_tree();
        let guard = mutex.acquire().await?;
        ctx.signal(ctx.id().clone(), "note", &7u64).await?;
        let note = ctx.receive::<u64>("note").await?;
        guard.release().await?;
        let guard = mutex.acquire().await?;
        ctx.run("under it", async || Ok(())).await?;
        guard.release().await?;
        ctx.run("last", async || Ok(note)).await
    });
    let test = TestEngine::new(&own, 1).await.unwrap();
    let handle = test.engine().start(&own, ()).id("source").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), 7);
    for at in ["under it", "last"] {
        let id = test.engine().fork("source").at_step(at).await.unwrap();
        assert_eq!(test.run(test.engine().handle(&own, &id).result()).await.unwrap(), 7, "at {at}");
    }
}

#[tokio::test]
async fn impossible_forks_are_refused() {
    let (ten, child) = (ten(), ten_child());
    let parent = {
        let child = child.clone();
        workflow("parent").run(move |ctx: Ctx, ()| {
            let child = child.clone();
            async move {
                let started = ctx.child(&child, 1).id("the-child").start().await?;
                ctx.run("between", async || Ok(())).await?;
                let output = started.result().await?;
                ctx.run("last", async || Ok(())).await?;
                Ok(output)
            }
        })
    };
    let test = TestEngine::build(1).register(&ten).register(&child).register(&parent).start().await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&ten, 7).id("source").await.unwrap();
    test.run(handle.result()).await.unwrap();
    let refused = engine.fork("missing").at("0").await;
    assert!(matches!(refused, Err(WorkflowError::NotFound { .. })), "{refused:?}");
    for at in ["99", "no place", "", "0.0/0"] {
        let refused = engine.fork("source").at(at).await;
        assert!(matches!(refused, Err(WorkflowError::Fork { .. })), "{at:?}: {refused:?}");
    }
    let refused = engine.fork("source").at_step("s99").await;
    assert!(matches!(refused, Err(WorkflowError::Fork { .. })), "{refused:?}");
    let refused = engine.fork("source").at("0").id("source").await;
    assert!(matches!(refused, Err(WorkflowError::AlreadyStarted { .. })), "{refused:?}");
    let handle = engine.start(&parent, ()).id("parent").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), 2);
    for at in ["between", "last"] {
        let id = engine.fork("parent").at_step(at).await.unwrap();
        assert_eq!(test.run(engine.handle(&parent, &id).result()).await.unwrap(), 2, "at {at}");
    }
}

fn ten_child() -> Workflow<u64, u64> {
    workflow("child").run(async |ctx: Ctx, number: u64| {
        ctx.run("child step", async || Ok(())).await?;
        Ok(number * 2)
    })
}

#[tokio::test]
async fn operations_come_page_by_page_as_in_the_history() {
    let (ten, wide) = (ten(), wide());
    let test = TestEngine::build(1).register(&ten).register(&wide).start().await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&wide, 7).id("wide").await.unwrap();
    test.run(handle.result()).await.unwrap();
    // A running execution: the entry before the next step announces it.
    engine.start(&ten, 7).id("ten").await.unwrap();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    for id in ["wide", "ten"] {
        let history = test.history(id).await.unwrap();
        assert_eq!(matches!(history.state, ExecutionState::Completed(_)), id == "wide");
        let mut expected = history.operations.clone();
        let depth = |operation: &Operation| operation.branch.matches('/').count();
        expected.sort_by_key(|operation| (depth(operation), operation.branch.clone(), operation.place));
        for limit in [1, 2, 3, 5, 1000] {
            let (mut all, mut after) = (Vec::new(), None);
            loop {
                let page = engine.operations(id).limit(limit).after(after).await.unwrap();
                assert!(page.items.len() == limit || page.next.is_none());
                all.extend(page.items);
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(all, expected, "{limit} on a page");
        }
    }
    assert!(matches!(engine.operations("missing").await, Err(WorkflowError::NotFound { .. })));
    let next = engine.operations("wide").limit(1).await.unwrap().next;
    assert!(matches!(engine.operations("ten").after(next).await, Err(WorkflowError::Cursor(_))));
}

/// The source's wait for the token timed out several times before the place of the fork.
#[tokio::test]
async fn a_token_whose_waits_timed_out_can_be_used_in_a_fork() {
    let reminds = workflow("reminds").run(async |ctx: Ctx, ()| {
        let completion = ctx.completion::<u64>("paid").await;
        ctx.publish("token", &completion.token()).await?;
        for _ in 0..3 {
            if let Some(paid) = completion.wait_within(Duration::from_secs(10)).await? {
                return Ok(paid);
            }
            ctx.run("remind", async || Ok(())).await?;
        }
        completion.wait().await
    });
    let test = TestEngine::new(&reminds, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&reminds, ()).id("source").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    let id = engine.fork("source").at_step("remind").await.unwrap();
    let token: String = engine.query("source", "token").await.unwrap().unwrap();
    engine.complete(&token, &1).await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), 1);
    let token = token.replace("source", &id);
    engine.complete(&token, &2).await.unwrap();
    assert_eq!(test.run(engine.handle(&reminds, &id).result()).await.unwrap(), 2);
}

/// Two tokens of one name; the first was used before the place.
#[tokio::test]
async fn a_token_of_the_same_name_as_a_used_one_can_be_used_in_a_fork() {
    let asks = workflow("asks").run(async |ctx: Ctx, ()| {
        let mut sum = 0;
        for _ in 0..2 {
            let answer = ctx.completion::<u32>("answer").await;
            ctx.run("ask", async || Ok(())).await?;
            ctx.publish("token", &answer.token()).await?;
            sum += answer.wait().await?;
        }
        Ok(sum)
    });
    let test = TestEngine::new(&asks, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&asks, ()).id("a").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    let token: String = handle.query("token").await.unwrap().unwrap();
    engine.complete(&token, &1).await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    engine.fork("a").at("5").id("f").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    let fork = engine.handle(&asks, "f");
    let token: String = fork.query("token").await.unwrap().unwrap();
    engine.complete(&token, &2).await.unwrap();
    assert_eq!(test.run(fork.result()).await.unwrap(), 3);
}

/// The parent no longer waits for that child, and neither does a fork.
#[tokio::test]
async fn a_fork_does_not_wait_for_a_child_of_a_lost_branch() {
    let kid = workflow("kid").run(async |ctx: Ctx, ()| ctx.sleep(Duration::from_secs(10)).await);
    let dad = workflow("dad").run({
        let kid = kid.clone();
        move |ctx: Ctx, ()| {
            let kid = kid.clone();
            async move {
                let kid = &kid;
                let waits = async |ctx: Ctx| ctx.child(kid, ()).await;
                drop(ctx.select((waits, async |ctx: Ctx| ctx.sleep(Duration::from_secs(1)).await)).await);
                ctx.run("after", async || Ok(7)).await
            }
        }
    });
    let test = TestEngine::build(1).register(&kid).register(&dad).start().await.unwrap();
    let handle = test.engine().start(&dad, ()).id("d").await.unwrap();
    test.run(handle.result()).await.unwrap();
    let id = test.engine().fork("d").at_step("after").await.unwrap();
    assert_eq!(test.run(test.engine().handle(&dad, id).result()).await.unwrap(), 7);
}

/// Starts a child that takes a minute, runs two steps, and waits for the child if the input says so.
fn parent(child: &Workflow<u64, u64>) -> Workflow<bool, u64> {
    let child = child.clone();
    workflow("parent").run(move |ctx: Ctx, waits: bool| {
        let child = child.clone();
        async move {
            let started = ctx.child(&child, 1).id("slow").start().await?;
            ctx.run("between", async || Ok(())).await?;
            ctx.run("later", async || Ok(())).await?;
            if waits { started.result().await } else { Ok(0) }
        }
    })
}

fn slow() -> Workflow<u64, u64> {
    workflow("slow").keep(Duration::from_secs(3600)).run(async |ctx: Ctx, number: u64| {
        ctx.sleep(Duration::from_secs(60)).await?;
        Ok(number * 2)
    })
}

/// An operator forks the parent after the start of its child, which has not ended, to change what comes later. A fork
/// that does not wait for the child ends at once, and the child stays with its parent.
#[tokio::test]
async fn a_fork_behind_the_start_of_a_child_leaves_the_child_to_its_parent() {
    let slow = slow();
    let parent = parent(&slow);
    let test = TestEngine::build(1).register(&slow).register(&parent).start().await.unwrap();
    let engine = test.engine();
    let source = engine.start(&parent, true).id("source").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    let id = engine.fork("source").at_step("later").input(&false).await.unwrap();
    assert_eq!(test.run(engine.handle(&parent, &id).result()).await.unwrap(), 0);
    assert!(engine.why("slow").await.unwrap().cancel.is_none(), "the end of a fork cancels its own children only");
    assert_eq!(test.run(source.result()).await.unwrap(), 2);
}

/// Forks of the parent, and forks of these forks, wait for the end of the child like the parent: before that end,
/// together with the parent, and long after it.
#[tokio::test]
async fn a_fork_waits_for_the_end_of_a_child_of_its_source() {
    let slow = slow();
    let parent = parent(&slow);
    let test = TestEngine::build(1).register(&slow).register(&parent).start().await.unwrap();
    let engine = test.engine();
    let source = engine.start(&parent, true).id("source").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    let early = engine.fork("source").at_step("later").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    let again = engine.fork(&early).at_step("between").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    let why = engine.why(&again).await.unwrap();
    assert_eq!(why.waits[0].what, WaitsFor::Child("slow".into()));
    assert_eq!(test.run(source.result()).await.unwrap(), 2);
    let late = engine.fork("source").at_step("later").await.unwrap();
    for id in [early, again, late] {
        assert_eq!(test.run(engine.handle(&parent, &id).result()).await.unwrap(), 2);
    }
}

/// The child's workflow keeps executions for an hour. After that another child may have the id: its result is not used
/// for the fork.
#[tokio::test]
async fn a_fork_that_waits_for_a_child_that_was_removed_is_parked() {
    let slow = slow();
    let parent = parent(&slow);
    let test = TestEngine::build(1).register(&slow).register(&parent).start().await.unwrap();
    let engine = test.engine();
    let source = engine.start(&parent, true).id("source").await.unwrap();
    assert_eq!(test.run(source.result()).await.unwrap(), 2);
    for is_taken in [false, true] {
        test.run(test.env().sleep(Duration::from_secs(7200))).await;
        if is_taken {
            let other = engine.start(&slow, 7).id("slow").await.unwrap();
            assert_eq!(test.run(other.result()).await.unwrap(), 14);
        }
        let id = engine.fork("source").at_step("later").await.unwrap();
        test.run(test.env().sleep(Duration::from_secs(5))).await;
        let parked = engine.parked().await.unwrap();
        let reason = parked.into_iter().find(|(parked, _)| *parked == id).map(|(_, reason)| reason);
        let expected = "child \"slow\", whose end it waits for, was started by the source of this fork, \
                        and is no longer kept";
        assert_eq!(reason.as_deref(), Some(expected), "another has the id: {is_taken}");
    }
}

/// The store holds what the fork waits for: a restart changes nothing.
#[tokio::test]
async fn a_fork_that_waits_for_a_child_survives_a_restart() {
    let slow = slow();
    let parent = parent(&slow);
    let (env, clock) = latchwork::store::Env::seeded(1);
    let store = latchwork::store::Store::memory_with(env, latchwork::store::Limits::default()).await.unwrap();
    let start = || latchwork::workflow::Engine::on(&store).register(&slow).register(&parent).start();
    let pass = async |seconds| {
        for _ in 0..seconds {
            for _ in 0..200 {
                tokio::task::yield_now().await;
            }
            clock.advance(Duration::from_secs(1));
        }
    };
    let engine = start().await.unwrap();
    engine.start(&parent, true).id("source").await.unwrap();
    pass(5).await;
    engine.fork("source").at_step("later").id("fork").await.unwrap();
    pass(5).await;
    engine.stop();
    let engine = start().await.unwrap();
    pass(100).await;
    assert_eq!(engine.handle(&parent, "fork").result().await.unwrap(), 2);
}
