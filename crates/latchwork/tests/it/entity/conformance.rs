//! The promises of entities, sentence by sentence, on every backend.

mod bad_input;
mod basics;
mod batches;
mod declarations;
mod guards;
mod races;
mod read_sets;
mod restores;
mod subtypes;
mod transactions;
mod unique;
mod update_with;
mod views;

use latchwork::entity::{Add, Entities, Entity, EntityError, FailedOp, Query};
use serde_json::Value;

/// Adds entities with an id each.
async fn fill<'a>(entities: &Entities, entity_type: &str, items: impl IntoIterator<Item = (&'a str, Value)>) {
    for (id, data) in items {
        entities.add(Add::new(entity_type).id(id).data(data)).await.unwrap();
    }
}

async fn get(entities: &Entities, id: &str) -> Entity {
    entities.get(id).await.unwrap().unwrap_or_else(|| panic!("there is no {id}"))
}

async fn generation(entities: &Entities) -> u64 {
    entities.store().generation().await.unwrap().0
}

/// The ids that a query finds on one page.
async fn found(entities: &Entities, query: &Query) -> Vec<String> {
    ids(&entities.find(query).await.unwrap().items)
}

fn ids(items: &[Entity]) -> Vec<String> {
    items.iter().map(|entity| entity.id.to_string()).collect()
}

/// The failed checks of a rejected transaction.
#[track_caller]
fn failed<T: std::fmt::Debug>(result: Result<T, EntityError>) -> Vec<FailedOp> {
    match result {
        Err(EntityError::Rejected { failed }) => failed,
        other => panic!("not rejected: {other:?}"),
    }
}

/// The place and the message of each failed check.
fn told(failed: &[FailedOp]) -> Vec<(Option<usize>, String)> {
    failed.iter().map(|failed| (failed.op, failed.error.to_string())).collect()
}

/// Checks that index entries and entities agree.
pub(super) async fn assert_sound(entities: &Entities) {
    assert_eq!(entities.verify().await.unwrap(), []);
    assert_eq!(entities.store().verify().await.unwrap(), []);
}
