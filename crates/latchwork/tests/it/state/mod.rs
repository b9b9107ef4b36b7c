//! State containers and slots.

mod conditions;
mod conflicts;
mod crash;
mod once_wrong;
mod queue;
mod runtimes;
mod schema;
mod simulation;
mod slots;
mod timeouts;

use latchwork::state::{Container, States};
use latchwork::store::Store;

pub(crate) async fn states() -> States {
    States::on(&Store::memory().await.unwrap()).await.unwrap()
}

/// One container of each kind, for tests of both kinds.
pub(crate) async fn both() -> [Container; 2] {
    let states = states().await;
    [states.session("s"), states.sequencer("q")]
}
