//! The events of a block that its next boundary tells of. A commit holds only so many: past some hundred, the changes
//! of one state are told as one difference. It does not know when a boundary is.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::flow::state::ToldChange;
use crate::flow::stream::FlowEvent;
use crate::json::merge;
use crate::state::difference;
use crate::workflow::journal::place::BranchPath;

/// How many changes of one state are told one by one, and how many bytes of them.
const MOST_CHANGES: usize = 500;
const MOST_BYTES: usize = 1 << 20;

/// The operation of an event that tells of several changes.
const SEVERAL: &str = "several";

#[derive(Default)]
pub(crate) struct Untold {
    changes: Vec<FlowEvent>,
    states: BTreeMap<BranchPath, Told>,
    /// What is told after the changes.
    rest: Vec<FlowEvent>,
}

/// The changes of one state.
#[derive(Default)]
struct Told {
    count: usize,
    bytes: usize,
    folded: Option<Folded>,
}

/// Changes that are told as one. Both states have the changes of this block only.
struct Folded {
    before: Value,
    after: Value,
    rev: u64,
}

impl Untold {
    pub(crate) fn tell(&mut self, event: FlowEvent) {
        self.rest.push(event);
    }

    /// Tells of a change of the state of a block.
    pub(crate) fn change(&mut self, owner: &BranchPath, change: ToldChange) {
        let its = self.states.entry(owner.clone()).or_default();
        its.count += 1;
        its.bytes += change.delta.to_string().len();
        if its.folded.is_none() && its.count <= MOST_CHANGES && its.bytes <= MOST_BYTES {
            return self.changes.push(FlowEvent::changed(owner, change));
        }
        let ToldChange { before, after, rev, .. } = change;
        let patch = difference(Some(&before), Some(&after));
        let folded = its.folded.get_or_insert_with(|| Folded { before: before.clone(), after: before, rev });
        merge(&mut folded.after, &patch);
        folded.rev = rev;
    }

    pub(crate) fn take(&mut self) -> Vec<FlowEvent> {
        let Untold { changes: mut events, states, rest } = std::mem::take(self);
        for (owner, told) in states {
            let Some(Folded { before, after, rev }) = told.folded else { continue };
            let delta = difference(Some(&before), Some(&after));
            let (operation, path) = (SEVERAL, String::new());
            events.push(FlowEvent::changed(&owner, ToldChange { operation, path, delta, rev, before, after }));
        }
        events.extend(rest);
        events
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn many_changes_of_one_state_are_told_as_one_difference() {
        let (owner, other) = (BranchPath::default().named("a", 0), BranchPath::default().named("b", 0));
        let mut untold = Untold::default();
        let change = |rev: u64| ToldChange {
            operation: "inc_state",
            path: "n".into(),
            delta: json!(1),
            rev,
            before: json!({"n": rev - 1, "beside": rev}),
            after: json!({"n": rev, "beside": rev}),
        };
        (1..=2000).for_each(|rev| untold.change(&owner, change(rev)));
        untold.change(&other, change(1));
        let events = untold.take();
        assert_eq!(events.len(), MOST_CHANGES + 2);
        let rest = |scope: &str, operation: &str, path: &str, delta: Value, rev: u64| FlowEvent::StateChange {
            scope: scope.into(),
            of: None,
            operation: operation.into(),
            path: path.into(),
            delta,
            rev,
        };
        assert_eq!(events[MOST_CHANGES], rest("b", "inc_state", "n", json!(1), 1));
        assert_eq!(events[MOST_CHANGES + 1], rest("a", "several", "", json!({"n": 2000}), 2000));
        assert!(untold.take().is_empty());
    }

    #[test]
    fn long_changes_are_told_as_one_sooner() {
        let owner = BranchPath::default().named("a", 0);
        let (mut untold, long) = (Untold::default(), "x".repeat(MOST_BYTES / 4));
        for rev in 1..=40 {
            let (before, after) = (json!({"n": rev - 1}), json!({"n": rev}));
            let (operation, path, delta) = ("set_state", String::new(), json!(long));
            untold.change(&owner, ToldChange { operation, path, delta, rev, before, after });
        }
        assert!(untold.take().len() < 6);
    }
}
