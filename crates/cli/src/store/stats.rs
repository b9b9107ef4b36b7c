//! `latch store stats`: figures about a store.

use anyhow::Result;
use latchwork::store::Stats;
use serde::{Deserialize, Serialize};

use crate::output::{Cell, Output, Table, Tone};
use crate::progress::bytes;
use crate::target::{Looked, Target};

/// The figures, as they are printed and as a server sends them.
#[derive(Debug, Serialize, Deserialize)]
struct StatsFields {
    generation: u64,
    keys: u64,
    past_versions: u64,
    applied: u64,
    refused: u64,
    groups: u64,
    overlay_bytes: u64,
    log_bytes: u64,
    index_bytes: u64,
    pins: u64,
}

impl StatsFields {
    fn of(stats: Stats) -> StatsFields {
        StatsFields {
            generation: stats.generation.0,
            keys: stats.keys,
            past_versions: stats.past_versions,
            applied: stats.applied,
            refused: stats.refused,
            groups: stats.groups,
            overlay_bytes: stats.overlay_bytes,
            log_bytes: stats.log_bytes,
            index_bytes: stats.index_bytes,
            pins: stats.pins,
        }
    }
}

pub(crate) async fn run(target: &Target, output: &mut Output<'_>) -> Result<()> {
    let (stats, is_running) = match target.look().await? {
        Looked::Server(client) => (client.get("/store", &[]).await?, true),
        Looked::Store(store) => {
            let stats = store.stats().await;
            store.close().await?;
            (StatsFields::of(stats?), false)
        }
    };
    output.one(&stats, |text| text.table(table(&stats, is_running)))
}

/// What a process has done since it opened the store is left out if no process has it open.
fn table(stats: &StatsFields, is_running: bool) -> Table {
    let mut table = Table::new(&[]);
    let mut row = |name: &str, value: String| table.row([Cell::new(name, Tone::Dim), value.into()]);
    row("generation", stats.generation.to_string());
    row("keys", stats.keys.to_string());
    row("past versions", stats.past_versions.to_string());
    row("index", bytes(stats.index_bytes));
    row("not in the index yet", bytes(stats.overlay_bytes));
    if is_running {
        row("commits applied", stats.applied.to_string());
        row("commits refused", stats.refused.to_string());
        row("syncs", stats.groups.to_string());
        row("written to the log", bytes(stats.log_bytes));
        row("open views", stats.pins.to_string());
    }
    table
}
