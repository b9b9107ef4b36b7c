//! Mixed operations by many tasks through two handles, from a seed, against a model: the watch shows the order in which
//! they were applied, and the model applies them in that order. `LATCHWORK_CASES` and `LATCHWORK_SEED` as elsewhere.

use std::time::Duration;

use latchwork::state::{Container, StateError, States};
use latchwork::store::{Env, Limits, Store};
use latchwork::{Value, json};

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Makes one operation. Returns whether it was applied, and its answer.
async fn operate(container: &Container, random: &mut fastrand::Rng) -> Result<(Value, bool), StateError> {
    let field = ["a", "b", "r.c"][random.usize(..3)];
    let amount = random.i64(-2..3);
    let changed = match random.u8(..8) {
        0 => container.patch_state(json!({"a": amount, "r": {"c": amount}})).await?,
        1 => container.push_state("l", amount).await?,
        2..5 => container.inc_state(field, amount).await?,
        5 => container.set_state_record("r", "x", amount).await?,
        6 => container.delete_state_record("r", "x").await?,
        _ => {
            let mutated = container.atomic_state(move |state| async move {
                tokio::task::yield_now().await;
                let mut state = state.unwrap_or_else(|| json!({}));
                state["b"] = json!(state["b"].as_i64().unwrap_or(0) * 2 + 1);
                Ok::<_, std::convert::Infallible>(Some(state))
            });
            match mutated.await {
                Ok(changed) => changed,
                Err(latchwork::state::MutationError::State(error)) => return Err(error),
                Err(latchwork::state::MutationError::Refused(never)) => match never {},
            }
        }
    };
    Ok((changed.value, changed.changed))
}

/// Applies an operation to the model, from the watch's event.
fn apply(state: &mut Value, operation: &str, path: &str, delta: &Value) {
    let mut here = &mut *state;
    for part in path.split('.').filter(|part| !part.is_empty()) {
        if here.get(part).is_none() {
            here[part] = Value::Null;
        }
        here = &mut here[part];
    }
    match operation {
        "inc_state" => *here = json!(here.as_i64().unwrap_or(0) + delta.as_i64().unwrap()),
        "push_state" => {
            let mut list = here.as_array().cloned().unwrap_or_default();
            list.extend(delta.as_array().unwrap().iter().cloned());
            *here = Value::Array(list);
        }
        _ => merge(here, delta),
    }
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, patch) in patch {
        match patch {
            Value::Null => drop(target.as_object_mut().unwrap().remove(key)),
            patch => merge(&mut target[key], patch),
        }
    }
}

async fn simulate(seed: u64) {
    let (env, clock) = Env::seeded(seed);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    let handles = [States::on(&store).await.unwrap(), States::on(&store).await.unwrap()];
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let container = handles[task % 2].session("s").attempts(10_000).mutation_timeout(None);
        let mut random = fastrand::Rng::with_seed(seed ^ (task as u64) << 32);
        tasks.spawn(async move {
            let mut changes = 0u64;
            for _ in 0..15 {
                match operate(&container, &mut random).await {
                    Ok((_, changed)) => changes += u64::from(changed),
                    Err(error) => panic!("{error}"),
                }
            }
            changes
        });
    }
    let mut changes = 0;
    while !tasks.is_empty() {
        while let Some(done) = tasks.try_join_next() {
            changes += done.unwrap();
        }
        tokio::task::yield_now().await;
        clock.advance(Duration::from_millis(1));
    }
    let session = handles[0].session("s");
    let (state, rev) = session.read().await.unwrap();
    let mut watch = session.watch(latchwork::store::Generation(0)).await.unwrap();
    let (mut model, mut told) = (json!({}), 0);
    for _ in 0..rev.0 {
        let change = watch.next().await.unwrap().unwrap();
        for event in &change.events {
            for _ in 0..event.times {
                apply(&mut model, &event.operation, &event.path, &event.delta);
                told += 1;
            }
        }
        assert_eq!(change.state.as_ref(), Some(&model), "seed {seed} at rev {}", change.rev);
    }
    assert_eq!((state, told), (Some(model), changes), "seed {seed}");
}

#[tokio::test]
async fn mixed_operations_of_two_handles_match_the_model() {
    let first = number("LATCHWORK_SEED", 1);
    for seed in first..first + number("LATCHWORK_CASES", 200) {
        simulate(seed).await;
    }
}
