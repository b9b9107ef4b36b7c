//! Locks under faults from a seed: executions and sessions acquire them in every way, operators release them by force,
//! and an oracle compares what all clients were told with what was stored. Seeds are chosen as for workflows.

mod cast;
mod clients;
mod oracle;

use std::time::Duration;

use latchwork::testing::{Faults, Report, TraceKind};

use crate::workflow::simulation::campaign_of;
use clients::Play;

fn simulate(seed: u64, faults: Faults) -> (Report, Vec<String>) {
    let play = Play::drawn(seed, faults == Faults::none());
    let report = play.simulation(seed).faults(faults).timeout(Duration::from_secs(3 * 86_400)).run();
    let complaints = play.judge(&report);
    (report, complaints)
}

#[test]
fn locks_keep_their_promises_under_any_faults() {
    campaign_of(simulate, 300);
}

#[test]
fn locks_keep_their_promises_without_faults() {
    for seed in 1..=200 {
        let (report, complaints) = simulate(seed, Faults::none());
        assert!(complaints.is_empty(), "{report}{}\nseed {seed}", complaints.join("\n"));
        assert_eq!(report.lives, 1);
    }
}

/// Nothing restarts the engine here: whatever the engine forgets stays forgotten.
#[test]
fn locks_keep_their_promises_when_answers_are_lost() {
    let mut faults = Faults::none();
    (faults.lives, faults.lost_answers, faults.slow) = (1, true, true);
    for seed in 1..=200 {
        let (report, complaints) = simulate(seed, faults.clone());
        assert!(complaints.is_empty(), "{report}{}\nseed {seed}", complaints.join("\n"));
    }
}

/// Checks that every kind of event happens, since a simulation without events proves nothing.
#[test]
fn every_scene_is_played() {
    let mut played = std::collections::BTreeMap::<String, u32>::new();
    for seed in 1..=200 {
        let report = simulate(seed, Faults::default()).0;
        for event in &report.events {
            let scene = match &event.what {
                TraceKind::Note(text) => text.split(':').next().unwrap_or_default(),
                TraceKind::Granted { owner: latchwork::lock::Owner::Execution(_), .. } => "granted to an execution",
                TraceKind::Granted { .. } => "granted to a session",
                TraceKind::Expired(_) => "expired",
                _ => continue,
            };
            *played.entry(scene.into()).or_default() += 1;
        }
        for result in report.results.values().filter_map(|result| result.as_ref().err()) {
            let text = result.to_string();
            let why = ["would never end", "cancelled", "terminated", "meant to fail"];
            let why = why.iter().find(|why| text.contains(**why)).unwrap_or(&"failed otherwise");
            *played.entry(why.to_string()).or_default() += 1;
        }
    }
    println!("{played:?}");
    let scenes = [
        "granted to an execution",
        "granted to a session",
        "expired",
        "write applied",
        "write refused",
        "released",
        "released too late",
        "not in time",
        "given up",
        "repeated",
        "lost",
        "forced",
        "would never end",
        "cancelled",
        "terminated",
        "meant to fail",
    ];
    let missing: Vec<_> = scenes.iter().filter(|scene| played.get(**scene).is_none_or(|times| *times < 3)).collect();
    assert!(missing.is_empty(), "{missing:?} {played:?}");
}
