//! dbos in a database of its own, on a server that the caller of this program has started. Its steps are durable when
//! the server's commits are, which is the server's default.

use std::sync::Arc;

use anyhow::Result;
use dbos::{Config, DBOS, WorkflowRef, step};

use crate::measure::{self, Engine, Figures, Plan, Rest, STEPS};

struct Dbos {
    instance: DBOS,
    work: WorkflowRef<u32, u32>,
}

impl Engine for Dbos {
    async fn workflow(&self, steps: u32) -> Result<u32> {
        Ok(self.work.run(steps).await?)
    }
}

pub async fn run(plan: &Plan, host: &str, max_connections: u32) -> Result<Figures> {
    // The database is created at the launch.
    let url = format!("postgres://postgres@localhost/peers?host={host}");
    let config = Config { app_version: Some("1".into()), max_connections, ..Config::new("peers", url) };
    let instance = DBOS::new(config);
    let work = instance.register_workflow("work", |steps: u32| async move {
        for _ in 0..steps {
            step("step", || async {
                measure::step();
                dbos::Result::Ok(())
            })
            .await?;
        }
        dbos::Result::Ok(steps)
    })?;
    instance.launch().await?;
    let engine = Arc::new(Dbos { instance, work });
    let (step_us, workflow_us) = measure::sequential(plan, &*engine).await?;
    let mut figures = Figures { step_us, workflow_us, ..Figures::default() };
    for callers in [16, 64, 256, 1024] {
        figures.steps.push((callers, measure::rate(plan, &engine, STEPS, callers, Rest::Await).await?.0));
        figures.starts.push((callers, measure::rate(plan, &engine, 1, callers, Rest::Await).await?.1));
    }
    engine.instance.shutdown().await;
    Ok(figures)
}
