//! Shards: an engine reads, wakes and removes what is in its own shards, and nothing in shards that another engine has
//! taken over.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::store::{Commit, Key, Order, Store};
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, ExecutionState, Failure, Status, Workflow, workflow};

use crate::lock::turnstile::{Stage, has_ended};

const SECOND: Duration = Duration::from_secs(1);
const SCANNED: [&str; 3] = ["workflow.running", "workflow.timers", "workflow.removals"];

/// An execution that runs until the gate opens, one that sleeps, and one that ends at once; the last kind is removed
/// after 100 s.
struct Kinds {
    gate: tokio::sync::watch::Sender<bool>,
    gated: Workflow<(), ()>,
    naps: Workflow<u64, ()>,
    short: Workflow<(), ()>,
}

impl Kinds {
    fn new() -> Kinds {
        let (gate, open) = tokio::sync::watch::channel(false);
        let gated = workflow("gated").run(move |ctx: Ctx, ()| {
            let open = open.clone();
            async move {
                let wait = async || open.clone().wait_for(|open| *open).await.map(drop).map_err(Failure::from);
                ctx.run("wait", wait).await
            }
        });
        let naps = workflow("naps").run(async |ctx: Ctx, seconds: u64| ctx.sleep(Duration::from_secs(seconds)).await);
        let short = workflow("short").keep(100 * SECOND).run(async |_: Ctx, ()| Ok(()));
        Kinds { gate, gated, naps, short }
    }

    async fn stage(&self) -> Stage {
        let stage = Stage::new(|engine| engine.register(&self.gated).register(&self.naps).register(&self.short)).await;
        stage.turns().await;
        stage
    }

    async fn start(&self, engine: &Engine, number: u32) {
        engine.start(&self.gated, ()).id(format!("gated {number}")).await.unwrap();
        engine.start(&self.naps, 100).id(format!("naps {number}")).await.unwrap();
        engine.start(&self.short, ()).id(format!("short {number}")).await.unwrap().result().await.unwrap();
    }
}

async fn keys(store: &Store, space: &str) -> Vec<Key> {
    let spaces = store.spaces().await.unwrap();
    let space = spaces.into_iter().find(|known| known.name() == space).unwrap();
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    found.into_iter().map(|(key, _)| key).collect()
}

fn shard(key: &Key) -> u16 {
    u16::from_be_bytes(*key.bytes().first_chunk().unwrap())
}

/// The shard of each execution id, from the keys of a space. The id starts after so many bytes.
async fn shards(store: &Store, space: &str, before: usize) -> BTreeMap<String, u16> {
    let id = |key: &Key| String::from_utf8(key.bytes()[before..].to_vec()).unwrap();
    keys(store, space).await.iter().map(|key| (id(key), shard(key))).collect()
}

/// Another engine takes a shard over: its record gets another rev.
async fn take_over(store: &Store, shard: u16) {
    let record = keys(store, "node.shards").await[usize::from(shard)].clone();
    let owner = store.view().await.unwrap().get(&record).await.unwrap().unwrap().value;
    store.commit(Commit::new().put(&record, owner)).await.unwrap().applied().unwrap();
}

async fn state(engine: &Engine, id: &str) -> Option<ExecutionState> {
    engine.describe(id).await.ok().map(|described| described.state)
}

#[tokio::test]
async fn keys_that_owners_scan_start_with_the_shard() {
    // XXH3-64 of these ids, modulo 64.
    let known = [("a", 31), ("abc", 16)];
    let kinds = Kinds::new();
    let stage = kinds.stage().await;
    let (engine, store) = (&stage.engine, stage.engine.store());
    for (id, _) in known {
        engine.start(&kinds.gated, ()).id(id).await.unwrap();
    }
    stage.turns().await;
    let running = shards(store, "workflow.running", 2 + 2 + "gated".len() + 8).await;
    let expected: BTreeMap<String, u16> = known.iter().map(|(id, shard)| (id.to_string(), *shard)).collect();
    assert_eq!(running, expected);
    kinds.gate.send_replace(true);
    stage.turns().await;
    assert_eq!(keys(store, "workflow.running").await, []);
    assert_eq!(shards(store, "workflow.removals", 2 + 8).await, expected);
    let stage = kinds.stage().await;
    for (id, _) in known {
        stage.engine.start(&kinds.naps, 100).id(id).await.unwrap();
    }
    stage.turns().await;
    assert_eq!(shards(stage.engine.store(), "workflow.timers", 2 + 8).await, expected);
}

/// Running executions are stored by shard, and still listed in the order of their starts, page by page.
#[tokio::test]
async fn executions_in_many_shards_are_listed_in_the_order_of_starts() {
    let kinds = Kinds::new();
    let stage = kinds.stage().await;
    let mut started = Vec::new();
    for number in 0..100 {
        kinds.start(&stage.engine, number).await;
        started.push(format!("gated {number}"));
        stage.clock.advance(Duration::from_millis(1));
    }
    stage.turns().await;
    for filter in [
        ExecutionFilter::new().is(Status::Running),
        ExecutionFilter::new().workflow("gated"),
        ExecutionFilter::new().workflow("gated").is(Status::Running),
    ] {
        for descends in [false, true] {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let list = stage.engine.list(filter.clone()).limit(7).after(after);
                let page = if descends { list.descending() } else { list.ascending() }.await.unwrap();
                found.extend(page.items.into_iter().map(|listed| listed.id.to_string()));
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            if descends {
                found.reverse();
            }
            assert_eq!(found, started, "{filter:?}");
        }
    }
    let none = stage.engine.list(ExecutionFilter::new().is(Status::Running).workflow("naps")).await.unwrap();
    assert_eq!(none.items, []);
}

/// Stands for a second engine that takes one shard over while the first engine runs, and for a commit without an
/// answer, after which the first engine scans the running executions.
#[tokio::test]
async fn executions_in_a_lost_shard_are_left_alone_and_all_others_continue() {
    let kinds = Kinds::new();
    let stage = kinds.stage().await;
    let (engine, store) = (&stage.engine, stage.engine.store());
    for number in 0..200 {
        kinds.start(engine, number).await;
    }
    stage.turns().await;
    let mut of = shards(store, "workflow.running", 2 + 2 + "gated".len() + 8).await;
    of.extend(shards(store, "workflow.timers", 2 + 8).await);
    of.extend(shards(store, "workflow.removals", 2 + 8).await);
    assert_eq!(of.len(), 600);
    let lost = of["gated 0"];
    let count = |kind: &str| of.iter().filter(|(id, shard)| id.starts_with(kind) && **shard == lost).count();
    assert!(count("naps") > 0 && count("short") > 0, "there are all kinds in this shard");
    take_over(store, lost).await;
    // The first commit in that shard is refused.
    kinds.gate.send_replace(true);
    stage.pass(SECOND).await;
    assert_eq!(engine.residents(), 0);
    stage.scanned();
    stage.lose_answer();
    let mutex = engine.mutex("m");
    let acquired = tokio::spawn(async move { mutex.acquire().await.map(drop) });
    for _ in 0..30 {
        stage.pass(10 * SECOND).await;
    }
    let scanned = stage.scanned();
    acquired.abort();
    for space in SCANNED {
        let id = stage.space(space).await.id();
        let foreign = scanned.iter().find(|key| key.space() == id && shard(key) == lost);
        assert_eq!(foreign, None, "{space} was read");
        assert!(scanned.iter().any(|key| key.space() == id) || space == "workflow.running", "{space} was not read");
    }
    for (id, shard) in &of {
        let state = state(engine, id).await;
        let is_as_it_was = match (&state, id.split(' ').next().unwrap()) {
            (Some(ExecutionState::Running), "gated") | (Some(ExecutionState::Waiting), "naps") => true,
            (Some(state), "short") => has_ended(state),
            _ => false,
        };
        let has_gone_on = match (&state, id.split(' ').next().unwrap()) {
            (Some(state), "gated" | "naps") => has_ended(state),
            (state, _) => state.is_none(),
        };
        assert_eq!((is_as_it_was, has_gone_on), (*shard == lost, *shard != lost), "{id}: {state:?}");
    }
}

/// Stands for a second engine that takes one shard over while the first engine begins to load the running executions.
#[tokio::test]
async fn executions_in_a_shard_that_is_lost_at_the_start_are_not_loaded() {
    let kinds = Kinds::new();
    let stage = kinds.stage().await;
    let store = stage.engine.store();
    for number in 0..400 {
        stage.engine.start(&kinds.gated, ()).id(format!("gated {number}")).await.unwrap();
    }
    stage.turns().await;
    stage.engine.stop();
    let of = shards(store, "workflow.running", 2 + 2 + "gated".len() + 8).await;
    let lost = of["gated 0"];
    let bodies = std::sync::Arc::new(parking_lot::Mutex::new(Vec::new()));
    let told = bodies.clone();
    let engine = Engine::on(store).register(&kinds.gated).on_step(move |id, _| told.lock().push(id.to_string()));
    let engine = engine.start().await.unwrap();
    take_over(store, lost).await;
    kinds.gate.send_replace(true);
    for _ in 0..3 {
        stage.pass(SECOND).await;
    }
    for (id, shard) in &of {
        let state = state(&engine, id).await.unwrap();
        assert_eq!(has_ended(&state), *shard != lost, "{id}: {state:?}");
    }
    assert!(bodies.lock().iter().all(|id| of[id] != lost), "no body has run");
    assert_eq!(engine.residents(), 0);
    // The engine wrote nothing there: it did not count a load either.
    let running = keys(store, "workflow.running").await;
    let view = store.view().await.unwrap();
    for key in &running {
        assert_eq!(shard(key), lost);
        assert_eq!(view.get(key).await.unwrap().unwrap().rev.0, 1, "{key}");
    }
}
