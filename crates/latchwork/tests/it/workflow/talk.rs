//! Executions that communicate, under faults from a seed: signals, updates, tokens, children, published values,
//! branches and operators who end things. Clients keep a log, and an oracle compares it with what the store holds in
//! the end. Seeds are chosen as for `simulation`.

mod callers;
mod cast;
mod oracle;

use std::time::Duration;

use latchwork::testing::{Faults, Report, TraceKind};

use super::simulation::campaign_of;
use callers::Play;

fn simulate(seed: u64, faults: Faults) -> (Report, Vec<String>) {
    let play = Play::drawn(seed);
    let report = play.simulation(seed).faults(faults).timeout(Duration::from_secs(3 * 86_400)).run();
    let complaints = play.judge(&report);
    (report, complaints)
}

#[test]
fn conversations_hold_under_any_faults() {
    campaign_of(simulate, 300);
}

#[test]
fn conversations_hold_without_faults() {
    for seed in 1..=100 {
        let (report, complaints) = simulate(seed, Faults::none());
        assert!(complaints.is_empty(), "{report}{}", complaints.join("\n"));
        assert_eq!(report.lives, 1);
    }
}

/// Nothing restarts the engine here: whatever the engine forgets stays forgotten.
#[test]
fn conversations_hold_when_answers_are_lost() {
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
            if let TraceKind::Note(text) = &event.what {
                *played.entry(text.split(':').next().unwrap_or_default().into()).or_default() += 1;
            }
        }
        for result in report.results.values() {
            let end = match result {
                Ok(_) => "completed",
                Err(latchwork::workflow::WorkflowError::Cancelled { .. }) => "cancelled",
                Err(_) => "failed",
            };
            *played.entry(end.into()).or_default() += 1;
        }
    }
    println!("{played:?}");
    let scenes = [
        "signal acknowledged",
        "signal too late",
        "update answered",
        "update too late",
        "update refused",
        "token used",
        "token too late",
        "published",
        "cancel acknowledged",
        "cancel too late",
        "terminate acknowledged",
        "terminate too late",
        "started with a signal",
        "completed",
        "cancelled",
        "failed",
    ];
    let missing: Vec<_> = scenes.iter().filter(|scene| played.get(**scene).is_none_or(|times| *times < 3)).collect();
    assert!(missing.is_empty(), "{missing:?} {played:?}");
}
