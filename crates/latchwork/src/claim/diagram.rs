//! A claim workflow as a Mermaid diagram. It reads only the configuration, and knows no store.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::claim::config::{ClaimStep, ClaimWorkflow, Each};

impl ClaimWorkflow {
    /// The statuses and steps as a Mermaid state diagram, with claiming statuses marked.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimStep, ClaimWorkflow};
    /// # let invoice = ClaimWorkflow::new("invoice", "billing", "invoice")
    /// #     .statuses(["sent", "paying", "paid"])
    /// #     .step(ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay"));
    /// assert!(invoice.diagram().starts_with("stateDiagram-v2"));
    /// ```
    pub fn diagram(&self) -> String {
        let ids: BTreeMap<&str, String> = self
            .status_types
            .iter()
            .enumerate()
            .map(|(number, status)| (status.as_str(), format!("s{number}")))
            .collect();
        let id = |status: &str| ids.get(status).cloned().unwrap_or_else(|| "unknown".into());
        let claiming = self.claiming();
        let mut out = String::from("stateDiagram-v2\n");
        for status in &self.status_types {
            let class = if claiming.contains(status.as_str()) { ":::claiming" } else { "" };
            let _ = writeln!(out, "    state {} as {}{class}", quoted(status), id(status));
        }
        for status in self.starts() {
            let _ = writeln!(out, "    [*] --> {}", id(status));
        }
        let mut edges = BTreeSet::new();
        for step in &self.steps {
            for (from, to, label) in step_edges(step) {
                if edges.insert((from.clone(), to.clone(), label.clone())) {
                    let _ = writeln!(out, "    {} --> {}: {label}", id(&from), id(&to));
                }
            }
        }
        for status in &self.status_types {
            if !claiming.contains(status.as_str()) && self.steps.iter().all(|step| step.status != *status) {
                let _ = writeln!(out, "    {} --> [*]", id(status));
            }
        }
        out.push_str("    classDef claiming stroke-dasharray: 5 5\n");
        out
    }
}

/// The edges of a step: to its claiming status, from there to the next status, and back.
fn step_edges(step: &ClaimStep) -> Vec<(String, String, String)> {
    let mut edges = Vec::new();
    let claims = step.claim_state.as_ref();
    for (requester, end) in step.successful_state.values() {
        let label =
            plain(&requester.map_or(step.step_key.clone(), |requester| format!("{} ({requester})", step.step_key)));
        let of = |requester: &str| claims.and_then(|claims| claims.of(requester));
        let taken: Vec<_> = match requester {
            Some(requester) => of(requester).into_iter().collect(),
            None => claims.iter().flat_map(|claims| claims.values()).map(|(_, claim)| claim).collect(),
        };
        let is_always_claimed = requester.is_some() || matches!(claims, Some(Each::All(_)));
        if taken.is_empty() || !is_always_claimed {
            edges.push((step.status.clone(), end.clone(), label.clone()));
        }
        for claim in taken {
            edges.push((step.status.clone(), claim.claim_into.clone(), label.clone()));
            edges.push((claim.claim_into.clone(), end.clone(), "success".into()));
            edges.push((claim.claim_into.clone(), claim.revert_to.clone(), "reverts".into()));
        }
    }
    edges
}

/// A text in quotation marks. Mermaid has no escapes, so characters with a meaning are replaced.
fn quoted(text: &str) -> String {
    format!("\"{}\"", plain(text))
}

/// Replaces the characters that have a meaning in Mermaid.
fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() || "\"#;:".contains(letter) { ' ' } else { letter }).collect()
}
