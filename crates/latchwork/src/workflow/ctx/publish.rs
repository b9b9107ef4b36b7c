//! Published values: what an execution shows of itself to every caller, also when it is out of memory or has ended.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::engine::handle::{Handle, read_as};
use crate::workflow::engine::listen::News;
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::journal::replay::OpCall;
use crate::workflow::run::{Run, WaitEnd};
use crate::workflow::stored::kept::Published;
use crate::workflow::stored::record::{EntryState, Kind, WaitsFor};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

impl Ctx {
    /// Publishes a value under a name, in place of an earlier one. The value is visible after the next commit, at the
    /// latest when the workflow waits.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.publish("stage", "paid").await?;
    /// # Ok(()) }
    /// ```
    pub async fn publish(&self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<(), Failure> {
        let text = self.run.text("the value", value)?;
        let call = OpCall { kind: Kind::Publish, name, argument: hash(&text) };
        self.replay(WaitsFor::Store, call, |operation| async move {
            self.run.ensure_published().await;
            // All published values are one record.
            let length = self.run.with(|state| state.published.bytes_with(name, &text));
            self.run.fits("all values together", length).map_err(|failure| operation.gave(failure))?;
            operation.done(&());
            self.run.with(|state| {
                state.publish(name, text);
                state.ops.wake_waiting(&WaitsFor::Published(name.into()));
            });
            Ok(())
        })
        .await
    }

    /// Waits until `is_it` accepts a value that another branch of the execution has published. Returns that value, and
    /// records it.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let stock = ctx.wait_until("stock", |stock: &u64| *stock > 0).await?;
    /// # Ok(()) }
    /// ```
    pub async fn wait_until<T: DeserializeOwned>(&self, name: &str, is_it: impl Fn(&T) -> bool) -> Result<T, Failure> {
        let what = WaitsFor::Published(name.into());
        let call = OpCall { kind: Kind::Published, name, argument: 0 };
        self.replay(what.clone(), call, |operation| async move {
            self.run.effect().await;
            self.run.ensure_published().await;
            let waited = operation.doing.wait(what, operation.since(), None, |state| {
                let text = state.published.get(name)?;
                let value: T = serde_json::from_str(text).ok()?;
                is_it(&value).then(|| (text.clone(), value))
            });
            let WaitEnd::Got((text, value)) = waited.await else { return Err(operation.cancelled()) };
            operation.ends(EntryState::Done(text), None);
            Ok(value)
        })
        .await
    }
}

impl Run {
    /// Loads the published values, unless they are in memory.
    async fn ensure_published(&self) {
        let is_known = self.with(|state| {
            if !state.known.is_stored() {
                state.published.load(Published::default());
            }
            state.published.is_loaded()
        });
        if is_known {
            return;
        }
        let values = self.or_stop(self.engine.read_published(&self.id).await).await;
        self.with(|state| state.published.load(values));
    }
}

impl EngineInner {
    async fn read_published(&self, id: &ExecutionId) -> Result<Published> {
        let published = self.kept(id).fetch_published(&self.store.view().await?).await?;
        Ok(published.map(|(published, _)| published).unwrap_or_default())
    }

    async fn query<T: DeserializeOwned>(&self, id: &ExecutionId, name: &str) -> Result<Option<T>> {
        let published = self.read_published(id).await?;
        match published.0.get(name) {
            Some(text) => read_as(id, text).map(Some),
            None => self.known(id).await.map(|_| None),
        }
    }
}

impl Engine {
    /// The value that an execution has published under a name; `None` if it has not.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let stage = engine.query::<String>("order-7", "stage").await?;
    /// # Ok(()) }
    /// ```
    pub async fn query<T: DeserializeOwned>(&self, id: impl Into<ExecutionId>, name: &str) -> Result<Option<T>> {
        self.inner.query(&id.into(), name).await
    }
}

impl<O> Handle<O> {
    /// The value that the execution has published under a name; `None` if it has not.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// let stage = handle.query::<String>("stage").await?;
    /// # Ok(()) }
    /// ```
    pub async fn query<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        self.engine.query(self.id(), name).await
    }

    /// Waits until `is_it` accepts a value that the execution has published. If the execution ends before that, this is
    /// an error.
    ///
    /// ```
    /// # use latchwork::workflow::{Handle, Result};
    /// # async fn example(handle: Handle<u64>) -> Result<()> {
    /// let sum = handle.wait_until("sum", |sum: &u64| *sum >= 10).await?;
    /// # Ok(()) }
    /// ```
    pub async fn wait_until<T: DeserializeOwned>(&self, name: &str, is_it: impl Fn(&T) -> bool) -> Result<T> {
        let (engine, id) = (&self.engine, self.id());
        let look = |_| async {
            let ended = engine.has_ended(id).await?;
            // The last value was published before the end was seen.
            match engine.query::<T>(id, name).await?.filter(|value| is_it(value)) {
                Some(value) => Ok(Some(value)),
                None if ended => Err(WorkflowError::Ended { id: id.clone() }),
                None => Ok(None),
            }
        };
        engine.listen(id, News::Published, look).await
    }
}
