//! Containers with a schema: nothing is written that does not fit it.

use latchwork::json;
use latchwork::state::StateError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::both;

#[derive(Serialize, Deserialize, JsonSchema)]
#[allow(dead_code)]
struct Visits {
    #[serde(default)]
    count: u32,
    #[serde(default)]
    names: Vec<String>,
}

#[tokio::test]
async fn a_value_that_does_not_fit_is_refused_with_its_path_and_nothing_is_written() {
    for container in both().await {
        let container = container.schema_of::<Visits>();
        assert_eq!(container.get().await.unwrap().unwrap(), json!({"count": 0, "names": []}), "defaults fill it");
        container.inc_state("count", 2).await.unwrap();
        let (state, rev) = container.read().await.unwrap();
        let refused = [
            (container.inc_state("count", -3).await, "/count"),
            (container.push_state("names", 7).await, "/names/0"),
            (container.set_state(json!([])).await, "its top"),
            (container.patch_state(json!({"names": "x"})).await, "/names"),
        ];
        for (answer, place) in refused {
            match answer.unwrap_err() {
                StateError::SchemaViolation { path, .. } => assert_eq!(path, place),
                other => panic!("{other}"),
            }
        }
        let mutated = container.atomic_state(|_| async { Ok::<_, ()>(Some(json!({"count": "x"}))) }).await;
        assert!(format!("{:?}", mutated.unwrap_err()).contains("/count"));
        assert_eq!(container.read().await.unwrap(), (state, rev));
        container.push_state("names", "ada").await.unwrap();
        assert!(container.delete_state().await.unwrap().changed, "removal fits every schema");
    }
}

#[tokio::test]
async fn an_invalid_schema_is_an_error_of_every_operation() {
    for container in both().await {
        let container = container.schema(&json!({"type": 7}));
        let error = container.inc_state("n", 1).await.unwrap_err();
        assert!(matches!(&error, StateError::Schema { .. }), "{error}");
        assert!(container.get().await.is_err());
    }
}

#[tokio::test]
async fn neighbours_of_a_change_that_does_not_fit_are_applied() {
    for container in both().await {
        let container = container.schema(&json!({"properties": {"n": {"maximum": 10}}}));
        let calls = (0..20).map(|_| {
            let container = container.clone();
            async move { container.inc_state("n", 1).await.is_ok() }
        });
        let landed = calls.collect::<tokio::task::JoinSet<_>>().join_all().await;
        assert_eq!(landed.into_iter().filter(|landed| *landed).count(), 10);
        assert_eq!(container.get().await.unwrap().unwrap(), json!({"n": 10}));
    }
}
