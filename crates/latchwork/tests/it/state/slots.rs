//! Slots: typed values, their initial value, and their scopes.

use latchwork::json;
use latchwork::state::{MutationError, StateError};
use serde::{Deserialize, Serialize};

use super::states;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Cart {
    items: Vec<String>,
    total: f64,
}

#[tokio::test]
async fn an_initial_value_reads_only_while_nothing_was_ever_written() {
    let states = states().await;
    let slot = states.global().slot::<u64>("n").initial(7);
    assert_eq!(slot.get().await.unwrap(), Some(7));
    assert_eq!(states.store().stats().await.unwrap().applied, states.store().generation().await.unwrap().0);
    assert!(slot.set(7).await.unwrap().changed, "it reads the same, and is written from now on");
    assert_eq!(states.global().slot::<u64>("n").initial(8).get().await.unwrap(), Some(7));
    assert!(!slot.set(7).await.unwrap().changed);
    assert_eq!(slot.increment(1).await.unwrap().value, 8);
    assert!(slot.delete().await.unwrap().changed);
    assert_eq!(slot.get().await.unwrap(), None, "deleted is absent, not initial");
    assert!(!slot.delete().await.unwrap().changed);
    assert_eq!(slot.increment(1).await.unwrap().value, 1, "absent counts as zero");
    let never = states.global().slot::<u64>("m").initial(7);
    assert!(never.delete().await.unwrap().changed);
    assert_eq!(never.get().await.unwrap(), None);
}

#[tokio::test]
async fn a_slot_holds_a_value_of_a_type() {
    let states = states().await;
    let slot = states.workflow("shop").slot::<Cart>("cart");
    let cart = Cart { items: vec!["tea".into()], total: 3.5 };
    assert_eq!(slot.get().await.unwrap(), None);
    slot.set(cart.clone()).await.unwrap();
    let merged = slot.merge(json!({"total": 4.0})).await.unwrap().value;
    assert_eq!(merged, Cart { total: 4.0, ..cart.clone() });
    let updated = slot.update(|cart| {
        let mut cart = cart.unwrap();
        cart.items.push("milk".into());
        cart
    });
    assert_eq!(updated.await.unwrap().value.items, ["tea", "milk"]);
    let refused = slot.try_update(|_| Err("closed")).await.unwrap_err();
    assert!(matches!(refused, MutationError::Refused("closed")));
    let refused = slot.merge(json!({"total": "x"})).await.unwrap_err();
    assert!(matches!(&refused, StateError::Mismatch { .. }), "{refused}");
    assert_eq!(slot.get().await.unwrap().unwrap().total, 4.0, "what does not fit was not written");
    let other = states.workflow("shop").slot::<String>("cart");
    other.set("not a cart".into()).await.unwrap();
    let mismatch = slot.get().await.unwrap_err();
    assert!(matches!(&mismatch, StateError::Mismatch { .. }), "{mismatch}");
    let mismatch = slot.update(|cart| cart.unwrap()).await.unwrap_err();
    assert!(matches!(&mismatch, StateError::Mismatch { .. }), "{mismatch}");
}

#[tokio::test]
async fn lists_are_appended_to_and_taken_from_at_both_ends() {
    let slot = states().await.execution("e-1").slot::<Vec<u32>>("jobs");
    assert_eq!(slot.remove_first().await.unwrap().value, None);
    for job in 1..=4u32 {
        assert_eq!(slot.append(job).await.unwrap().value, u64::from(job));
    }
    assert_eq!(slot.remove_first().await.unwrap().value, Some(1));
    assert_eq!(slot.remove_last().await.unwrap().value, Some(4));
    assert_eq!(slot.get().await.unwrap(), Some(vec![2, 3]));
    let positive = states().await.global().slot::<u64>("n");
    positive.increment(1).await.unwrap();
    assert!(matches!(positive.increment(-2).await, Err(StateError::Mismatch { .. })));
    assert_eq!(positive.get().await.unwrap(), Some(1));
    let wrong = slot.increment(1).await.unwrap_err();
    assert!(matches!(wrong, StateError::NotANumber { .. }), "{wrong}");
}

#[tokio::test]
async fn slots_of_different_scopes_and_owners_are_different_slots() {
    let states = states().await;
    let scopes = [
        states.global(),
        states.workflow("a"),
        states.workflow("b"),
        states.execution("a"),
        states.execution("a\0x"),
        states.execution("global"),
    ];
    for (number, scope) in scopes.iter().enumerate() {
        scope.slot::<usize>("x").set(number).await.unwrap();
    }
    for (number, scope) in scopes.iter().enumerate() {
        assert_eq!(scope.slot::<usize>("x").get().await.unwrap(), Some(number));
    }
    states.session("x").set_state(json!({"s": 1})).await.unwrap();
    assert_eq!(states.user("x").get().await.unwrap(), Some(json!({})));
}
