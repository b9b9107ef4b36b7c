//! Latchwork on its file store, all settings at their defaults.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
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

pub async fn run(plan: &Plan, directory: &Path) -> Result<Figures> {
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
    let engine = Latchwork::open(directory).register(&work).start().await?;
    let ours = Arc::new(Ours { engine, work });
    let (step_us, workflow_us) = measure::sequential(plan, &*ours).await?;
    let mut figures = Figures { step_us, workflow_us, ..Figures::default() };
    for callers in [16, 64, 256, 1024] {
        figures.steps.push((callers, measure::rate(plan, &ours, STEPS, callers, Rest::Await).await?.0));
        figures.starts.push((callers, measure::rate(plan, &ours, 1, callers, Rest::Await).await?.1));
    }
    Ok(figures)
}
