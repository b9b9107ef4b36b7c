//! JSON as it is stored: the values it accepts, and paths into them.

mod errors;
mod keys;
mod path;
mod values;

use latchwork::state::StateError;
use latchwork::{JsonError, Value};
use serde::Serialize;

use crate::state::states;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime").block_on(future)
}

/// The state of a container that is set to `value`.
fn to_value<T: Serialize + ?Sized>(value: &T) -> Result<Value, JsonError> {
    match block_on(async { states().await.sequencer("q").set_state(value).await }) {
        Ok(changed) => Ok(changed.value),
        Err(StateError::Value { cause, .. }) => Err(cause),
        Err(other) => panic!("{other}"),
    }
}

fn custom(path: &str, message: &str) -> JsonError {
    JsonError::Custom { path: path.into(), message: message.into() }
}
