//! What is stored of the state of a block: the changes of blocks that have ended. A change may rest on one of a block
//! that has not; it is held beside the state until it fits. Knows nothing of running blocks.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::schema::Shape;
use crate::json::json_record;
use crate::state::StateOp;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    /// Without transient fields.
    pub(crate) state: Value,
    /// How often the state was changed.
    pub(crate) rev: u64,
    /// Changes of blocks that have ended, in order, which do not fit the state without those of others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) held: Vec<Vec<StateOp>>,
}

json_record!(Checkpoint);

/// Applies operations, all or none of them. False if they do not fit the state, or the result does not fit its type.
pub(crate) fn applied(name: &str, shape: &Shape, state: &mut Value, ops: &[StateOp]) -> bool {
    let mut after = Some(state.clone());
    if ops.iter().any(|op| op.apply(name, &mut after).is_err()) {
        return false;
    }
    let after = after.unwrap_or_default();
    let fits = shape.check(&after).is_ok();
    if fits {
        *state = after;
    }
    fits
}

/// Applies the changes that fit, in order, and keeps the others. A change may fit once another one was applied.
pub(crate) fn apply_held(name: &str, shape: &Shape, state: &mut Value, held: &mut Vec<Vec<StateOp>>) {
    loop {
        let before = held.len();
        held.retain(|ops| !applied(name, shape, state, ops));
        if held.is_empty() || held.len() == before {
            return;
        }
    }
}
