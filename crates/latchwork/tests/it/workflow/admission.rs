//! Admission: limits, queues, rates, and starts that are gathered.

mod changed;
mod crash;
mod example;
mod first_steps;
mod gathered;
mod given_up;
mod kill;
mod left;
mod limits;
mod many;
mod queues;
mod races;
mod rates;
mod restored;
mod simulation;
mod supersede;
mod wrong;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use latchwork::store::{Env, Limits, Order, Store, VirtualClock};
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Ctx, Engine, ExecutionFilter, ExecutionState, WaitsFor, Workflow, WorkflowBuilder, workflow,
};

/// A workflow that waits for the signal "end", and returns its input.
fn held(builder: WorkflowBuilder) -> Workflow<String, String> {
    builder.run(async |ctx: Ctx, input: String| {
        ctx.receive::<()>("end").await?;
        Ok(input)
    })
}

fn import() -> WorkflowBuilder {
    workflow("import")
}

async fn engine_of(workflow: &Workflow<String, String>) -> TestEngine {
    TestEngine::new(workflow, 1).await.unwrap()
}

/// Lets everything happen that needs no time.
async fn settle() {
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
}

async fn used(engine: &Engine, key: Option<&str>) -> (u64, u64) {
    let limit = engine.limit_use("import", key).await.unwrap();
    (limit.used, limit.waiting)
}

/// A store in memory on virtual time, on which engines follow each other like processes.
struct Lives {
    store: Store,
    env: Env,
    clock: Arc<VirtualClock>,
}

impl Lives {
    async fn new() -> Lives {
        let (env, clock) = Env::seeded(1);
        let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
        Lives { store, env, clock }
    }

    /// Starts an engine with one workflow.
    async fn begin<I, O>(&self, workflow: &Workflow<I, O>) -> Engine {
        let engine = Engine::on(&self.store).register(workflow).start().await.unwrap();
        settle().await;
        engine
    }

    /// Waits for a future while time passes by itself.
    async fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let passing = async {
            loop {
                for _ in 0..64 {
                    tokio::task::yield_now().await;
                }
                let next = self.clock.next_deadline();
                next.into_iter().for_each(|next| self.clock.advance(next.saturating_sub(self.env.monotonic())));
            }
        };
        tokio::select! {
            biased;
            done = future => done,
            () = passing => unreachable!("time has no end"),
        }
    }

    async fn pass(&self, seconds: u64) {
        self.run(self.env.sleep(Duration::from_secs(seconds))).await;
        settle().await;
    }

    /// The number of records of limits, queues and gathered starts.
    async fn records(&self) -> usize {
        self.count(&["workflow.gates", "workflow.admission"]).await
    }

    /// The number of records in these spaces.
    async fn count(&self, spaces: &[&str]) -> usize {
        let view = self.store.view().await.unwrap();
        let mut found = 0;
        for space in self.store.spaces().await.unwrap() {
            if spaces.contains(&space.name()) {
                found += view.scan(&space.all(), Order::Ascending, 10_000).await.unwrap().len();
            }
        }
        found
    }
}

/// The executions of the workflow `import` that hold a permit of a limit, and those that wait for one, in the order of
/// the queue. Both are read from the executions' own records. The key of an execution is the first letter of its id.
async fn counted(engine: &Engine, key: Option<&str>) -> (Vec<String>, Vec<String>) {
    let (mut held, mut waiting) = (Vec::new(), Vec::new());
    let page = engine.list(ExecutionFilter::new().workflow("import")).ascending().limit(1000).await.unwrap();
    for found in page.items.into_iter().filter(|found| has_not_ended(&found.state)) {
        let why = engine.why(&found.id).await.unwrap();
        let waits = why.waits.iter().find_map(|wait| match &wait.what {
            WaitsFor::Admission(key) => Some(key.clone()),
            _ => None,
        });
        let place = (why.queue.map_or(0, |queue| queue.ahead), found.id.to_string());
        let is_of_key = key.is_none_or(|key| found.id.starts_with(key));
        // An execution acquires the permit of its key first.
        match (key, waits.as_deref()) {
            _ if !is_of_key => {}
            (None, Some("import")) => waiting.push(place),
            (Some(key), Some(waits)) if waits == key => waiting.push(place),
            (None, Some(_)) => {}
            _ => held.push(found.id.to_string()),
        }
    }
    waiting.sort();
    (held, waiting.into_iter().map(|(_, id)| id).collect())
}

fn has_not_ended(state: &ExecutionState) -> bool {
    matches!(state, ExecutionState::Running | ExecutionState::Waiting | ExecutionState::Parked(_))
}

/// Checks that a limit counts the executions there are, and is not exceeded.
async fn judge(engine: &Engine, key: Option<&str>, most: u64) {
    let (held, waiting) = counted(engine, key).await;
    assert_eq!(used(engine, key).await, (held.len() as u64, waiting.len() as u64), "{key:?}: {held:?} {waiting:?}");
    assert!(held.len() as u64 <= most, "{key:?}: {held:?} hold permits, and the limit is {most}");
}
