//! Admission: limits, lines, rates, and starts that are gathered.

mod crash;
mod example;
mod gathered;
mod kill;
mod limits;
mod lines;
mod many;
mod rates;
mod simulation;
mod wrong;

use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Workflow, workflow};
use latchwork::workflow::{Engine, WorkflowBuilder};

/// A workflow that waits until it is told to end, and gives its input.
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
