//! Latchwork on its file store or in PostgreSQL, all settings at their defaults.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use latchwork::store::{PostgresOptions, Store};
use latchwork::workflow::{Ctx, Engine as Latchwork, Workflow, workflow};

use crate::measure::{self, Engine, Figures, Plan, Rest, STEPS};

struct Ours {
    engine: Latchwork,
    work: Workflow<u32, u32>,
}

impl Engine for Ours {
    async fn workflow(&self, steps: u32) -> Result<u32> {
        Ok(self.engine.start(&self.work, steps).await?.result().await?)
    }
}

/// On the file store.
pub async fn run(plan: &Plan, directory: &Path) -> Result<Figures> {
    run_on(plan, Store::open(directory).await?).await
}

/// In PostgreSQL, on a server that the caller of this program has started.
pub async fn run_in_postgres(plan: &Plan, host: &str) -> Result<Figures> {
    let address = format!("host={host} user=postgres dbname=postgres");
    run_on(plan, PostgresOptions::new().connect(&address).await?).await
}

async fn run_on(plan: &Plan, store: Store) -> Result<Figures> {
    let work = workflow("work").run(async |ctx: Ctx, steps: u32| {
        for _ in 0..steps {
            ctx.run("step", async || {
                measure::step();
                Ok(())
            })
            .await?;
        }
        Ok(steps)
    });
    let engine = Latchwork::on(&store).register(&work).start().await?;
    let ours = Arc::new(Ours { engine, work });
    let (step_us, workflow_us) = measure::sequential(plan, &*ours).await?;
    let mut figures = Figures { step_us, workflow_us, ..Figures::default() };
    for callers in [16, 64, 256, 1024] {
        figures.steps.push((callers, measure::rate(plan, &ours, STEPS, callers, Rest::Await).await?.0));
        figures.starts.push((callers, measure::rate(plan, &ours, 1, callers, Rest::Await).await?.1));
    }
    Ok(figures)
}
