//! duroxide on its SQLite provider, in a file. Its provider sets `synchronous = WAL`, which SQLite does not know and
//! reads as `NORMAL`: the last commits may be lost in a power loss. This file sets its connections to `FULL`, so that
//! all engines make the same promise.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use duroxide::providers::sqlite::SqliteProvider;
use duroxide::runtime::registry::ActivityRegistry;
use duroxide::runtime::{OrchestrationStatus, Runtime, RuntimeOptions};
use duroxide::{ActivityContext, Client, ClientError, OrchestrationContext, OrchestrationRegistry};

use crate::measure::{self, Engine, Figures, Plan, Rest, STEPS};

/// The size of the provider's pool, which cannot be configured.
const CONNECTIONS: usize = 5;

/// Longer than any workflow takes here.
const WAIT: Duration = Duration::from_secs(120);

/// The default options.
pub fn defaults() -> RuntimeOptions {
    RuntimeOptions::default()
}

/// Looks for work every millisecond instead of ten times a second. It keeps its two dispatchers of each kind: in
/// trials, fewer were slower, and more made no clear difference.
pub fn tuned() -> RuntimeOptions {
    RuntimeOptions { dispatcher_min_poll_interval: Duration::from_millis(1), ..RuntimeOptions::default() }
}

struct Duroxide {
    runtime: Arc<Runtime>,
    client: Client,
    next: AtomicU64,
}

impl Engine for Duroxide {
    async fn workflow(&self, steps: u32) -> Result<u32> {
        let instance = format!("work-{}", self.next.fetch_add(1, Ordering::Relaxed));
        retried(|| self.client.start_orchestration(&instance, "work", steps.to_string())).await?;
        match retried(|| self.client.wait_for_orchestration(&instance, WAIT)).await? {
            OrchestrationStatus::Completed { output, .. } => Ok(output.parse()?),
            other => bail!("{instance} ended as {other:?}"),
        }
    }
}

/// Under load its client may find the database locked, and returns a retryable error.
async fn retried<T, F>(attempt: impl Fn() -> F) -> Result<T, ClientError>
where
    F: Future<Output = Result<T, ClientError>>,
{
    loop {
        match attempt().await {
            Err(error) if error.is_retryable() => tokio::time::sleep(Duration::from_millis(5)).await,
            ended => return ended,
        }
    }
}

pub async fn run(plan: &Plan, directory: &Path, options: RuntimeOptions) -> Result<Figures> {
    let fresh = |name: String| open(directory.join(name), options.clone());
    let engine = fresh("sequential".into()).await?;
    let (step_us, workflow_us) = measure::sequential(plan, &*engine).await?;
    engine.runtime.clone().shutdown(None).await;
    let mut figures = Figures { step_us, workflow_us, ..Figures::default() };
    // Each scenario has its own file, and workflows that still run are left behind: at these rates it would take
    // minutes to finish them.
    for callers in [16, 64, 256] {
        let engine = fresh(format!("steps-{callers}")).await?;
        figures.steps.push((callers, measure::rate(plan, &engine, STEPS, callers, Rest::Drop).await?.0));
        engine.runtime.clone().shutdown(None).await;
        let engine = fresh(format!("starts-{callers}")).await?;
        figures.starts.push((callers, measure::rate(plan, &engine, 1, callers, Rest::Drop).await?.1));
        engine.runtime.clone().shutdown(None).await;
    }
    Ok(figures)
}

async fn open(file: PathBuf, options: RuntimeOptions) -> Result<Arc<Duroxide>> {
    let address = format!("sqlite:{}?mode=rwc", file.to_str().context("the directory's name is not UTF-8")?);
    let store = Arc::new(SqliteProvider::new(&address, None).await?);
    sync_in_full(&store).await?;
    let activities = ActivityRegistry::builder()
        .register("step", |_: ActivityContext, _: String| async {
            measure::step();
            Ok(String::new())
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("work", |ctx: OrchestrationContext, steps: String| async move {
            let count: u32 = steps.parse().map_err(|_| "not a number of steps".to_string())?;
            for _ in 0..count {
                ctx.schedule_activity("step", "").await?;
            }
            Ok::<_, String>(steps)
        })
        .build();
    let runtime = Runtime::start_with_options(store.clone(), activities, orchestrations, options).await;
    Ok(Arc::new(Duroxide { runtime, client: Client::new(store), next: AtomicU64::new(0) }))
}

/// The setting belongs to a connection, so all connections of the pool are taken at once.
async fn sync_in_full(store: &SqliteProvider) -> Result<()> {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(store.get_pool().acquire().await?);
    }
    for connection in &mut connections {
        sqlx::query("PRAGMA synchronous = FULL").execute(&mut **connection).await?;
        let (level,): (i64,) = sqlx::query_as("PRAGMA synchronous").fetch_one(&mut **connection).await?;
        ensure!(level == 2, "SQLite syncs at level {level}, not in full");
    }
    Ok(())
}
