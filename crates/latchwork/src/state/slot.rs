//! Slots: named values of your own type.

use std::future::ready;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Number, Value};

use crate::state::container::{Container, Steward, to_json};
use crate::state::op::StateOp;
use crate::state::queue::Changed;
use crate::state::{MutationError, Result, StateError, StateWatch};
use crate::store::{Generation, Rev, Right};

/// A named value in the store.
///
/// It reads as its initial value only while it was never written; a deleted slot reads as absent.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::state::States;
/// use latchwork::store::{Rev, Store};
///
/// let states = States::on(&Store::memory().await?).await?;
/// let orders = states.global().slot::<u64>("orders").initial(100);
/// assert_eq!(orders.increment(1).await?.value, 101);
/// assert_eq!(orders.update(|orders| orders.unwrap_or(0) * 2).await?.value, 202);
/// let (value, rev) = orders.read().await?;
/// assert_eq!((value, rev), (Some(202), Rev(2)));
/// orders.clone().if_rev(rev).set(7).await?;
/// orders.delete().await?;
/// assert_eq!(orders.get().await?, None);
///
/// let list = states.global().slot::<Vec<String>>("list");
/// assert_eq!(list.append("a".into()).await?.value, 1);
/// assert_eq!(list.remove_first().await?.value.as_deref(), Some("a"));
/// # Ok(()) }
/// ```
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

    /// The same slot, changed through a steward.
    pub(crate) fn by(self, steward: Arc<dyn Steward>) -> Slot<T> {
        Slot { container: self.container.by(steward), holds: PhantomData }
    }

    /// The value that is read while nothing was ever written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// let orders = states.global().slot::<u64>("orders").initial(100);
    /// assert_eq!(orders.get().await?, Some(100));
    /// # Ok(()) }
    /// ```
    pub fn initial(self, value: T) -> Slot<T> {
        Slot::new(self.container.initial(value))
    }

    /// As [`Container::attempts`].
    ///
    /// ```
    /// # use latchwork::state::{Result, Slot};
    /// # async fn example(orders: Slot<u64>) -> Result<()> {
    /// orders.clone().attempts(10).increment(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn attempts(self, attempts: u32) -> Slot<T> {
        Slot::new(self.container.attempts(attempts))
    }

    /// As [`Container::mutation_timeout`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::state::{Result, Slot};
    /// # async fn example(orders: Slot<u64>) -> Result<()> {
    /// orders.clone().mutation_timeout(Duration::from_secs(2)).increment(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn mutation_timeout(self, timeout: impl Into<Option<Duration>>) -> Slot<T> {
        Slot::new(self.container.mutation_timeout(timeout))
    }

    /// As [`Container::once`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// for _ in 0..2 {
    ///     orders.clone().once("request-7").increment(1).await?;
    /// }
    /// assert_eq!(orders.get().await?, Some(1));
    /// # Ok(()) }
    /// ```
    pub fn once(self, key: impl Into<Arc<str>>) -> Slot<T> {
        Slot::new(self.container.once(key))
    }

    /// As [`Container::if_rev`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// let (_, rev) = orders.read().await?;
    /// orders.clone().if_rev(rev).set(7).await?;
    /// assert!(orders.clone().if_rev(rev).set(8).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn if_rev(self, rev: impl Into<Rev>) -> Slot<T> {
        Slot::new(self.container.if_rev(rev))
    }

    /// As [`Container::if_absent`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// orders.clone().if_absent().set(7).await?;
    /// assert!(orders.clone().if_absent().set(8).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn if_absent(self) -> Slot<T> {
        Slot::new(self.container.if_absent())
    }

    /// As [`Container::guard`].
    ///
    /// ```
    /// # use latchwork::lock::LockGuard;
    /// # use latchwork::state::{Result, Slot};
    /// # async fn example(orders: Slot<u64>, guard: LockGuard) -> Result<()> {
    /// orders.clone().guard(guard.token()).set(7).await?;
    /// # Ok(()) }
    /// ```
    pub fn guard(self, right: &impl Right) -> Slot<T> {
        Slot::new(self.container.guard(right))
    }

    /// The slot as a container of JSON.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// assert_eq!(orders.container().name(), "slot \"orders\"");
    /// # Ok(()) }
    /// ```
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// The value as it was last committed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// orders.set(7).await?;
    /// assert_eq!(orders.get().await?, Some(7));
    /// # Ok(()) }
    /// ```
    pub fn get(&self) -> impl Future<Output = Result<Option<T>>> + use<T> {
        let read = self.read();
        async move { Ok(read.await?.0) }
    }

    /// The value as it was last committed, and its rev; zero while nothing was ever written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::{Rev, Store};
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// orders.set(7).await?;
    /// assert_eq!(orders.read().await?, (Some(7), Rev(1)));
    /// # Ok(()) }
    /// ```
    pub fn read(&self) -> impl Future<Output = Result<(Option<T>, Rev)>> + use<T> {
        let container = self.container.clone();
        async move {
            let (value, rev) = container.read().await?;
            Ok((value.map(|value| typed(container.name(), value)).transpose()?, rev))
        }
    }

    /// Replaces the value.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// assert_eq!(orders.set(7).await?.value, 7);
    /// # Ok(()) }
    /// ```
    pub fn set(&self, value: T) -> impl Future<Output = Result<Changed<T>>> + use<T> {
        let op = self.container.value(&value).map(StateOp::Set);
        let done = self.container.clone().done("set", op);
        async move { Ok(done.await?.with(value)) }
    }

    /// Removes the value.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// orders.set(7).await?;
    /// orders.delete().await?;
    /// assert_eq!(orders.get().await?, None);
    /// # Ok(()) }
    /// ```
    pub fn delete(&self) -> impl Future<Output = Result<Changed<()>>> + use<T> {
        let done = self.container.clone().done("delete", Ok(StateOp::Delete));
        async move { Ok(done.await?.with(())) }
    }

    /// Computes a new value from the current one. The change may run again on a newer value if another process was
    /// faster.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// let doubled = orders.update(|orders| orders.unwrap_or(1) * 2).await?;
    /// assert_eq!(doubled.value, 2);
    /// # Ok(()) }
    /// ```
    pub fn update<F>(&self, mut change: F) -> impl Future<Output = Result<Changed<T>>> + use<F, T>
    where
        F: FnMut(Option<T>) -> T + Send + 'static,
        T: 'static,
    {
        let updated = self.try_update(move |value| Ok(change(value)));
        async move { updated.await.map_err(MutationError::unrefused) }
    }

    /// Like [`Slot::update`], with a change that may refuse: then nothing is written, and its error is returned.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::{MutationError, States};
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// let sold = orders.try_update(|left| left.unwrap_or(0).checked_sub(1).ok_or("sold out")).await;
    /// assert!(matches!(sold, Err(MutationError::Refused("sold out"))));
    /// # Ok(()) }
    /// ```
    pub fn try_update<F, E>(
        &self,
        mut change: F,
    ) -> impl Future<Output = Result<Changed<T>, MutationError<E>>> + use<F, E, T>
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
        let (slot, mutated) = (self.clone(), self.container.clone());
        let mutated = mutated.mutate("update", move |state| ready(changed(state)));
        async move {
            use MutationError::{Refused, State};
            match mutated.await {
                Ok(changed) => Ok(slot.typed(changed)?),
                Err(State(error) | Refused(State(error))) => Err(error.into()),
                Err(Refused(Refused(error))) => Err(Refused(error)),
            }
        }
    }

    /// Adds to a number; a slot without a value counts as zero.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let orders = states.global().slot::<u64>("orders");
    /// assert_eq!(orders.increment(2).await?.value, 2);
    /// # Ok(()) }
    /// ```
    pub fn increment<N: Into<Number>>(&self, by: N) -> impl Future<Output = Result<Changed<T>>> + use<N, T> {
        self.clone().done("increment", Ok(StateOp::Increment(None, by.into())))
    }

    /// Merges into an object as a JSON merge patch does.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # use latchwork::{Value, json};
    /// let profile = states.global().slot::<Value>("profile").initial(json!({"name": "Ada"}));
    /// let merged = profile.merge(json!({"city": "Oslo"})).await?;
    /// assert_eq!(merged.value, json!({"name": "Ada", "city": "Oslo"}));
    /// # Ok(()) }
    /// ```
    pub fn merge<V: Serialize>(&self, patch: V) -> impl Future<Output = Result<Changed<T>>> + use<V, T> {
        let op = self.container.patch(&patch);
        self.clone().done("merge", op)
    }

    /// As [`Container::watch`].
    ///
    /// ```
    /// # use latchwork::state::{Result, Slot};
    /// # use latchwork::store::Store;
    /// # async fn example(orders: Slot<u64>, store: Store) -> Result<()> {
    /// let mut changes = orders.watch(store.generation().await?).await?;
    /// while let Some(change) = changes.next().await? {
    ///     println!("{:?} from rev {} on", change.state, change.rev);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn watch(&self, after: Generation) -> impl Future<Output = Result<StateWatch>> + Send + use<T> {
        self.container.watch(after)
    }

    async fn done(self, operation: &'static str, op: Result<StateOp>) -> Result<Changed<T>> {
        let changed = self.container.clone().done(operation, op).await?;
        self.typed(changed)
    }

    fn typed(&self, changed: Changed) -> Result<Changed<T>> {
        let value = typed(self.container.name(), &changed.value)?;
        Ok(changed.with(value))
    }
}

impl<E: Serialize + DeserializeOwned> Slot<Vec<E>> {
    /// Adds an element to the end. Returns the length.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let list = states.global().slot::<Vec<String>>("list");
    /// assert_eq!(list.append("a".into()).await?.value, 1);
    /// assert_eq!(list.append("b".into()).await?.value, 2);
    /// # Ok(()) }
    /// ```
    pub fn append(&self, element: E) -> impl Future<Output = Result<Changed<u64>>> + Send + use<E> {
        let op = self.container.value(&element).map(|element| StateOp::Push(None, vec![element]));
        let done = self.container.clone().done("append", op);
        async move {
            let changed = done.await?;
            let length = changed.value.as_u64().unwrap_or_default();
            Ok(changed.with(length))
        }
    }

    /// Removes and returns the first element; `None` if the list is empty.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let list = states.global().slot::<Vec<String>>("list");
    /// list.append("a".into()).await?;
    /// assert_eq!(list.remove_first().await?.value.as_deref(), Some("a"));
    /// assert_eq!(list.remove_first().await?.value, None);
    /// # Ok(()) }
    /// ```
    pub fn remove_first(&self) -> impl Future<Output = Result<Changed<Option<E>>>> + use<E> {
        let (slot, done) = (self.clone(), self.container.clone().done("remove_first", Ok(StateOp::RemoveFirst(None))));
        async move { slot.removed(done.await?) }
    }

    /// Removes and returns the last element; `None` if the list is empty.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let list = states.global().slot::<Vec<String>>("list");
    /// list.set(vec!["a".into(), "b".into()]).await?;
    /// assert_eq!(list.remove_last().await?.value.as_deref(), Some("b"));
    /// # Ok(()) }
    /// ```
    pub fn remove_last(&self) -> impl Future<Output = Result<Changed<Option<E>>>> + use<E> {
        let (slot, done) = (self.clone(), self.container.clone().done("remove_last", Ok(StateOp::RemoveLast(None))));
        async move { slot.removed(done.await?) }
    }

    /// The removed element; `None` if nothing changed.
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
