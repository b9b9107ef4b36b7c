//! Slots: named values of a type of one's own.

use std::future::ready;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Number, Value};

use crate::state::container::{Container, Steward, to_json};
use crate::state::op::Op;
use crate::state::queue::Changed;
use crate::state::{MutationError, Result, StateError, StateWatch};
use crate::store::{Generation, Right};

/// A named value in the store.
///
/// It reads as its initial value only while it was never written; a deleted one reads as absent.
pub struct Slot<T> {
    container: Container,
    holds: PhantomData<fn() -> T>,
}

impl<T> Clone for Slot<T> {
    fn clone(&self) -> Slot<T> {
        Slot { container: self.container.clone(), holds: PhantomData }
    }
}

impl<T> std::fmt::Debug for Slot<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("name", &self.container.name()).finish()
    }
}

impl<T: Serialize + DeserializeOwned> Slot<T> {
    pub(crate) fn new(container: Container) -> Slot<T> {
        Slot { container: container.fits(fits::<T>), holds: PhantomData }
    }

    /// The same slot, changed by way of somebody.
    pub(crate) fn by(self, steward: Arc<dyn Steward>) -> Slot<T> {
        Slot { container: self.container.by(steward), holds: PhantomData }
    }

    /// What reads while nothing was ever written.
    pub fn initial(self, value: T) -> Slot<T> {
        Slot::new(self.container.initial(value))
    }

    /// As [`Container::attempts`].
    pub fn attempts(self, attempts: u32) -> Slot<T> {
        Slot::new(self.container.attempts(attempts))
    }

    /// As [`Container::mutation_timeout`].
    pub fn mutation_timeout(self, timeout: impl Into<Option<Duration>>) -> Slot<T> {
        Slot::new(self.container.mutation_timeout(timeout))
    }

    /// As [`Container::once`].
    pub fn once(self, key: impl Into<Arc<str>>) -> Slot<T> {
        Slot::new(self.container.once(key))
    }

    /// As [`Container::guard`].
    pub fn guard(self, right: &impl Right) -> Slot<T> {
        Slot::new(self.container.guard(right))
    }

    /// The slot as a container of JSON.
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// The value as it was last committed.
    pub async fn get(&self) -> Result<Option<T>> {
        self.container.get().await?.map(|value| typed(self.container.name(), value)).transpose()
    }

    /// Replaces the value.
    pub async fn set(&self, value: T) -> Result<Changed<T>> {
        let changed = self.container.op("set", Op::Set(self.container.value(&value)?)).await?;
        Ok(changed.with(value))
    }

    /// Removes the value.
    pub async fn delete(&self) -> Result<Changed<()>> {
        Ok(self.container.op("delete", Op::Delete).await?.with(()))
    }

    /// Makes a new value of the present one. It may be run again on a newer one if another process was faster.
    pub async fn update<F>(&self, mut change: F) -> Result<Changed<T>>
    where
        F: FnMut(Option<T>) -> T + Send + 'static,
        T: 'static,
    {
        self.try_update(move |value| Ok(change(value))).await.map_err(MutationError::unrefused)
    }

    /// Like [`Slot::update`], with a change that may refuse: then nothing is written, and its error comes back.
    pub async fn try_update<F, E>(&self, mut change: F) -> Result<Changed<T>, MutationError<E>>
    where
        F: FnMut(Option<T>) -> Result<T, E> + Send + 'static,
        E: Send + 'static,
        T: 'static,
    {
        let name = Arc::<str>::from(self.container.name());
        let mut changed = move |state: Option<Value>| -> Result<Option<Value>, MutationError<E>> {
            let current = state.map(|state| typed(&name, state)).transpose()?;
            let value = change(current).map_err(MutationError::Refused)?;
            Ok(Some(to_json(&name, &value)?))
        };
        match self.container.mutate("update", move |state| ready(changed(state))).await {
            Ok(changed) => Ok(self.typed(changed)?),
            Err(MutationError::State(error) | MutationError::Refused(MutationError::State(error))) => Err(error.into()),
            Err(MutationError::Refused(MutationError::Refused(error))) => Err(MutationError::Refused(error)),
        }
    }

    /// Adds to a number; a slot without a value counts as zero.
    pub async fn increment(&self, by: impl Into<Number>) -> Result<Changed<T>> {
        self.typed(self.container.op("increment", Op::Increment(None, by.into())).await?)
    }

    /// Merges into an object as a JSON merge patch does.
    pub async fn merge(&self, patch: impl Serialize) -> Result<Changed<T>> {
        self.typed(self.container.op("merge", self.container.patch(&patch)?).await?)
    }

    /// As [`Container::watch`].
    pub async fn watch(&self, after: Generation) -> Result<StateWatch> {
        self.container.watch(after).await
    }

    fn typed(&self, changed: Changed) -> Result<Changed<T>> {
        let value = typed(self.container.name(), &changed.value)?;
        Ok(changed.with(value))
    }
}

impl<E: Serialize + DeserializeOwned> Slot<Vec<E>> {
    /// Adds an element to the end. Answers the length.
    pub async fn append(&self, element: E) -> Result<Changed<u64>> {
        let changed = self.container.op("append", Op::Push(None, vec![self.container.value(&element)?])).await?;
        let length = changed.value.as_u64().unwrap_or_default();
        Ok(changed.with(length))
    }

    /// Takes the first element; from an empty list, nothing.
    pub async fn remove_first(&self) -> Result<Changed<Option<E>>> {
        self.removed(self.container.op("remove_first", Op::RemoveFirst(None)).await?)
    }

    /// Takes the last element; from an empty list, nothing.
    pub async fn remove_last(&self) -> Result<Changed<Option<E>>> {
        self.removed(self.container.op("remove_last", Op::RemoveLast(None)).await?)
    }

    /// What was taken; if nothing was, nothing changed.
    fn removed(&self, changed: Changed) -> Result<Changed<Option<E>>> {
        let taken = changed.changed.then(|| typed(self.container.name(), &changed.value)).transpose()?;
        Ok(changed.with(taken))
    }
}

fn fits<T: DeserializeOwned>(state: &Value) -> std::result::Result<(), String> {
    T::deserialize(state).map(drop).map_err(|error| error.to_string())
}

/// The state of a container as a value of a type.
pub(crate) fn typed<'a, T, S>(key: &str, state: S) -> Result<T>
where
    T: Deserialize<'a>,
    S: Deserializer<'a, Error = serde_json::Error>,
{
    T::deserialize(state).map_err(|error| StateError::Mismatch { key: key.into(), message: error.to_string() })
}
