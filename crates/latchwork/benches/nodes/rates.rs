//! Commits and steps of several processes, against one.

use tokio::runtime::Runtime;

use crate::process::Process;
use crate::report::{Figure, Report};
use crate::server::Server;

/// What processes of a role have done together, a second.
fn together(server: &Server, role: &str, schema: &str, processes: usize, seconds: u64) -> f64 {
    let started: Vec<Process> = (0..processes).map(|_| Process::start(role, &server.url, schema, seconds)).collect();
    let ready: Vec<Process> = started.into_iter().map(Process::ready).collect();
    let done = ready.into_iter().map(|process| process.end().trim().parse::<f64>().expect("a count"));
    done.sum::<f64>() / seconds as f64
}

pub(crate) fn rates(_: &Runtime, report: &Report) {
    let seconds = if report.quick { 3 } else { 15 };
    let figures =
        [("nodes.rate.4", "commits", 4, "commits/s", "≥ 1"), ("nodes.steps.2", "steps", 2, "steps/s", "≥ 0.9")];
    for (name, role, processes, unit, target) in figures {
        if !report.wants(name) {
            continue;
        }
        let server = Server::start_own();
        // The first use creates the schema.
        together(&server, role, "bench", 1, 1);
        let floor = together(&server, role, "bench", 1, seconds);
        let value = together(&server, role, "bench", processes, seconds);
        report.add(Figure { name, value, unit, floor, target });
    }
}
