//! What callers are told of executions of other nodes, and by which commits. Each test holds the moment open in which a
//! caller could be forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use latchwork::store::{Commit, SpaceId};
use latchwork::workflow::{Queue, Status};
use parking_lot::Mutex;

use super::between::{calm, owner_and};
use super::held::{Fate, HeldBackend, memory, space, spaces, store_of, writes_into};
use super::*;

/// Sums what it is asked to add, until it is told to go.
fn sums() -> Workflow<u64, u64> {
    workflow("sums").run(async |ctx: Ctx, mut sum: u64| {
        loop {
            let asked = ctx.receive_update::<u64, u64>("add").await?;
            sum += asked.value;
            asked.answer(&sum).await?;
            if sum >= 100 {
                // So the end has a commit of its own.
                ctx.sleep(Duration::from_millis(20)).await?;
                return Ok(sum);
            }
        }
    })
}

/// What the tests below look for in commits: the spaces of messages and answers, of notices, and of removals.
#[derive(Clone, Copy)]
struct Sought {
    kept: SpaceId,
    board: SpaceId,
    removals: SpaceId,
}

impl Sought {
    async fn of(store: &Store) -> Sought {
        let found = spaces(store, &["workflow.kept", "node.board", "workflow.removals"]).await;
        Sought { kept: found[0], board: found[1], removals: found[2] }
    }

    fn has_notice(self, commit: &Commit) -> bool {
        let mut keys = commit.writes().iter().map(|write| write.key());
        keys.any(|key| key.space() == self.board && key.bytes().first() == Some(&b'w'))
    }

    /// True if the commit answers an update of the execution `s`.
    fn has_answer(self, commit: &Commit) -> bool {
        let mut keys = commit.writes().iter().map(|write| write.key());
        keys.any(|key| key.space() == self.kept && key.bytes().get(3) == Some(&21))
    }
}

/// Who listens, and that there is news, is told by the commits that are made anyway.
#[tokio::test(flavor = "multi_thread")]
async fn an_update_between_nodes_is_two_commits_and_an_end_tells_of_itself() {
    let sums = sums();
    let [(_owner, store, of_owner), (other, _, of_other)] = owner_and("other", &sums, &sums).await;
    let handle = other.start(&sums, 0).id("s").await.unwrap();
    // The owner knows of a caller on the other node from here on.
    assert_eq!(in_time(handle.update::<u64>("add", &1_u64).into_future()).await.unwrap(), 1);
    let sought = Sought::of(&store).await;
    let counting = |held: &HeldBackend| {
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        held.rule(move |commit| {
            let counts = sought.has_notice(commit) || writes_into(commit, &[sought.kept]);
            counted.fetch_add(u64::from(counts), Ordering::SeqCst);
            Fate::Lands
        });
        count
    };
    for number in 2..20 {
        let (here, there) = (counting(&of_other), counting(&of_owner));
        assert_eq!(in_time(handle.update::<u64>("add", &1_u64).into_future()).await.unwrap(), number);
        let commits = (here.load(Ordering::SeqCst), there.load(Ordering::SeqCst));
        assert_eq!(commits, (1, 1), "of the sender, and of the owner, for update {number}");
    }
    let ends = Arc::new(Mutex::new(Vec::new()));
    let ended = ends.clone();
    of_owner.rule(move |commit| {
        if writes_into(commit, &[sought.removals]) {
            ended.lock().push(sought.has_notice(commit));
        }
        Fate::Lands
    });
    assert_eq!(in_time(handle.update::<u64>("add", &100_u64).into_future()).await.unwrap(), 119);
    assert_eq!(in_time(handle.result()).await.unwrap(), 119);
    assert_eq!(*ends.lock(), [true]);
}

/// The owner receives an update, and answers it, before it has heard that the sender listens. The sender has looked
/// before the answer, and is not told of it by the commit.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_told_to_a_caller_that_is_heard_of_later() {
    let sums = sums();
    let [(owner, store, of_owner), (other, _, of_other)] = owner_and("other", &sums, &sums).await;
    let handle = other.start(&sums, 0).id("s").await.unwrap();
    // The owner runs it.
    assert_eq!(in_time(owner.update::<u64>("s", "add", &0_u64).into_future()).await.unwrap(), 0);
    let sought = Sought::of(&store).await;
    let sent = of_other.rule_for(Fate::Lands, move |commit| writes_into(commit, &[sought.kept]));
    of_owner.hears(false);
    of_owner.rule(move |commit| if sought.has_answer(commit) { Fate::Waits } else { Fate::Lands });
    let asked = tokio::spawn(handle.update::<u64>("add", &1_u64).into_future());
    in_time(sent).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    // An update of the owner's own makes it look for all of them.
    let own = tokio::spawn(owner.update::<u64>("s", "add", &0_u64).into_future());
    tokio::time::sleep(Duration::from_millis(300)).await;
    of_owner.rule(|_| Fate::Lands);
    assert_eq!(in_time(own).await.unwrap().unwrap(), 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!asked.is_finished(), "the caller was told by mistake");
    of_owner.hears(true);
    assert_eq!(in_time(asked).await.unwrap().unwrap(), 1);
}

/// The answer to the commit of an end is lost, and the owner hears of the caller after that: it does not know of news
/// that are later than what the caller has seen.
#[tokio::test(flavor = "multi_thread")]
async fn an_end_whose_commit_had_no_answer_is_told_to_a_caller_that_is_heard_of_later() {
    let slow = workflow("slow").run(async |ctx: Ctx, n: u64| {
        let more = ctx.receive::<u64>("go").await?;
        ctx.sleep(Duration::from_millis(400)).await?;
        Ok(n + more)
    });
    let [(owner, store, of_owner), (other, ..)] = owner_and("other", &slow, &slow).await;
    let handle = other.start(&slow, 1).id("s").await.unwrap();
    let removals = space(&store, "workflow.removals").await.key("").space();
    let ended = of_owner.rule_for(Fate::AnswerIsLost, move |commit| writes_into(commit, &[removals]));
    owner.signal("s", "go", &1_u64).await.unwrap();
    // The receipt is stored before the caller listens, and the end after that.
    tokio::time::sleep(Duration::from_millis(150)).await;
    of_owner.hears(false);
    let result = tokio::spawn(handle.result());
    in_time(ended).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!result.is_finished(), "the caller was told by mistake");
    of_owner.hears(true);
    assert_eq!(in_time(result).await.unwrap().unwrap(), 2);
}

/// What the sender of an update has read of the execution is out of date when it sends: it reads again.
#[tokio::test(flavor = "multi_thread")]
async fn an_update_reaches_an_execution_that_goes_to_wait_meanwhile() {
    let sums = sums();
    let [(owner, store, _), (other, _, of_other)] = owner_and("other", &sums, &sums).await;
    let kept = spaces(&store, &["workflow.kept"]).await;
    let handle = other.start(&sums, 0).id("s").await.unwrap();
    for number in 1..10 {
        assert_eq!(owner.update::<u64>("s", "add", &0_u64).await.unwrap(), number - 1);
        let (wants, mut wanted) = tokio::sync::watch::channel(false);
        let of_kept = kept.clone();
        of_other.rule(move |commit| {
            let is_it = writes_into(commit, &of_kept);
            wants.send_if_modified(|wants| is_it && !std::mem::replace(wants, true));
            if is_it { Fate::Waits } else { Fate::Lands }
        });
        let asked = tokio::spawn(handle.update::<u64>("add", &1_u64).into_future());
        in_time(wanted.wait_for(|wanted| *wanted)).await.unwrap();
        in_time(async {
            while owner.describe("s").await.unwrap().status() != Status::Waiting {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        of_other.rule(|_| Fate::Lands);
        assert_eq!(in_time(asked).await.unwrap().unwrap(), number);
    }
}

/// An end admits the next execution of a queue, which belongs to another node, and tells a caller on that node: both
/// notices are in the commit of the end.
#[tokio::test(flavor = "multi_thread")]
async fn an_end_that_admits_an_execution_of_another_node_and_tells_a_caller_is_one_commit() {
    let memory = memory();
    let ((one, of_a), (two, of_b)) = (store_of(&memory).await, store_of(&memory).await);
    let queued = workflow("queued").concurrency(1).when_full(Queue::new()).run(async |ctx: Ctx, n: u64| {
        let more = ctx.receive::<u64>("go").await?;
        // An end that also receives a message would be committed alone.
        ctx.sleep(Duration::from_millis(20)).await?;
        Ok(n + more)
    });
    let a = calm(&one, "a").register(&queued).start().await.unwrap();
    let b = calm(&two, "b").register(&queued).start().await.unwrap();
    until(&one, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let mut handles = Vec::new();
    for n in 0..24 {
        handles.push(a.start(&queued, n).id(format!("e{n}")).await.unwrap());
    }
    let (removals, records) = (space(&one, "workflow.removals").await, space(&one, "workflow.executions").await);
    let (removals, records) = (removals.key("").space(), records.key("").space());
    // How many executions each end changes: itself and the next.
    let changed = Arc::new(Mutex::new(Vec::new()));
    for held in [&of_a, &of_b] {
        let changed = changed.clone();
        held.rule(move |commit| {
            if writes_into(commit, &[removals]) {
                let of_records = |write: &&latchwork::store::Write| write.key().space() == records;
                changed.lock().push(commit.writes().iter().filter(of_records).count());
            }
            Fate::Lands
        });
    }
    for (n, handle) in handles.into_iter().enumerate() {
        let (here, there) = (handle.result(), b.handle(&queued, handle.id().clone()).result());
        let (here, there) = (tokio::spawn(here), tokio::spawn(there));
        // Both callers have asked for news.
        tokio::time::sleep(Duration::from_millis(30)).await;
        b.signal(handle.id().clone(), "go", &100_u64).await.unwrap();
        assert_eq!(in_time(here).await.unwrap().unwrap(), 100 + n as u64);
        assert_eq!(in_time(there).await.unwrap().unwrap(), 100 + n as u64);
    }
    let expected: Vec<usize> = (0..24).map(|n| if n < 23 { 2 } else { 1 }).collect();
    assert_eq!(*changed.lock(), expected);
}
