//! Metrics of a server: the recorder, its upkeep, and figures about the stores. It opens no port: the server shows what
//! is rendered here.

use std::time::Duration;

use anyhow::{Context, Result};
use latchwork::store::{Env, Store};
use metrics::gauge;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// How often figures are read, and old samples dropped.
const EVERY: Duration = Duration::from_secs(5);

/// The bounds of times in histograms, in seconds.
const BOUNDS: [f64; 14] = [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0];

/// Starts to record. An engine counts only if it is started later.
pub(crate) fn install() -> Result<PrometheusHandle> {
    let builder = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &BOUNDS);
    let recorder = builder.context("cannot prepare metrics")?.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).context("cannot install the recorder of metrics")?;
    gauge!("latchwork_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    Ok(handle)
}

/// Keeps the recorder small and the figures about stores recent, until it is aborted.
pub(crate) async fn keep_up(recorder: PrometheusHandle, stores: Vec<(String, Store)>) {
    let env = Env::system();
    loop {
        for (name, store) in &stores {
            // On a database, the figures are a query over all tables.
            if !store.is_shared()
                && let Ok(stats) = store.stats().await
            {
                let set = |figure: &'static str, value: u64| {
                    gauge!(figure, "namespace" => name.clone()).set(value as f64);
                };
                set("latchwork_store_generation", stats.generation.0);
                set("latchwork_store_keys", stats.keys);
                set("latchwork_store_past_versions", stats.past_versions);
                set("latchwork_store_index_bytes", stats.index_bytes);
                set("latchwork_store_overlay_bytes", stats.overlay_bytes);
                set("latchwork_store_open_views", stats.pins);
            }
        }
        recorder.run_upkeep();
        env.sleep(EVERY).await;
    }
}
