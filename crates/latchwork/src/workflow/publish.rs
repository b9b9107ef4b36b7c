//! Published values: what an execution shows of itself to everybody, also when it is out of memory or has ended.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::record::Record;
use crate::workflow::ctx::{Call, Ctx, hash};
use crate::workflow::engine::{Engine, Inner};
use crate::workflow::handle::{Handle, read_as};
use crate::workflow::kept::Published;
use crate::workflow::record::{Entry, EntryState, Kind, WaitsFor};
use crate::workflow::run::{Publishes, Run, Waited};
use crate::workflow::step::read_failure;
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

impl Ctx {
    /// Publishes a value under a name, in place of the one that was there. It is seen with the next commit, at the
    /// latest when the workflow waits.
    pub async fn publish(&self, name: &str, value: &impl Serialize) -> std::result::Result<(), Failure> {
        let json = json::to_value(value).map_err(|error| Failure::no_json("the value", &error))?;
        let text = json.to_string();
        self.run.fits("the value", text.len())?;
        self.operation(WaitsFor::Store, |_| async move {
            let call = Call { kind: Kind::Publish, name, argument: hash(&text) };
            let (place, found) = self.take(&call).await;
            if let Some(found) = found {
                return if let EntryState::Gave(text) = found.state { Err(read_failure(&text)) } else { Ok(()) };
            }
            self.run.ensure_published().await;
            // They are one record.
            let length = self.run.with(|state| state.published_bytes(name, &text));
            if let Err(failure) = self.run.fits("all values together", length) {
                let state = EntryState::Gave(crate::workflow::record::failure_text(&failure));
                self.run.put(&place, call.entry(self.run.env().now(), state));
                return Err(failure);
            }
            self.run.put(&place, call.entry(self.run.env().now(), EntryState::Done("null".into())));
            self.run.with(|state| {
                state.publish(name, text);
                state.wake_waiting(&WaitsFor::Published(name.into()));
            });
            Ok(())
        })
        .await
    }

    /// Waits until a value that the execution has published, from another branch, is as it should be; gives that value.
    /// What it was is recorded.
    pub async fn wait_until<T: DeserializeOwned>(
        &self,
        name: &str,
        is_it: impl Fn(&T) -> bool,
    ) -> std::result::Result<T, Failure> {
        let what = WaitsFor::Published(name.into());
        self.operation(what.clone(), |doing| async move {
            let run = &self.run;
            let call = Call { kind: Kind::Published, name, argument: 0 };
            let (place, found) = self.take(&call).await;
            let entry = match found {
                Some(Entry { state: EntryState::Done(text), .. }) => {
                    return Ok(self.recorded(&call, &place, &text).await);
                }
                Some(Entry { state: EntryState::Gave(text), .. }) => return Err(read_failure(&text)),
                Some(entry) => entry,
                None => call.entry(run.env().now(), EntryState::Begun),
            };
            run.effect().await;
            run.ensure_published().await;
            let since = crate::store::Timestamp(entry.since_us);
            let waited = doing.wait(what, since, None, |state| {
                let text = state.published(name)?;
                let value: T = serde_json::from_str(text).ok()?;
                is_it(&value).then(|| (text.clone(), value))
            });
            match waited.await {
                Waited::Got((text, value)) => {
                    run.put(&place, Entry { state: EntryState::Done(text), ..entry });
                    Ok(value)
                }
                _ => Err(self.cancelled(&place, entry)),
            }
        })
        .await
    }
}

impl Run {
    /// Sees to it that what was published is in memory.
    async fn ensure_published(&self) {
        let is_known = self.with(|state| {
            if state.rev.is_none() {
                state.published.get_or_insert_default();
            }
            state.published.is_some()
        });
        if is_known {
            return;
        }
        match self.engine.read_published(&self.id).await {
            Ok(values) => self.with(|state| {
                state.published.get_or_insert(Publishes { values, is_new: false });
            }),
            Err(WorkflowError::Store(error)) => self.stop_for(self.failed(error)).await,
            Err(error) => self.park(error.to_string()).await,
        }
    }
}

impl Inner {
    async fn read_published(&self, id: &ExecutionId) -> Result<Published> {
        let item = self.store.view().await?.get(&self.kept(id).published()).await?;
        let place = || format!("what execution {id:?} has published");
        let Some(item) = item else { return Ok(Published::default()) };
        Ok(Published::decode(&item.value).map_err(|why| why.at(place()))?)
    }

    async fn query<T: DeserializeOwned>(&self, id: &ExecutionId, name: &str) -> Result<Option<T>> {
        let published = self.read_published(id).await?;
        let Some(text) = published.0.get(name) else {
            return match self.read(id).await? {
                Some(_) => Ok(None),
                None => Err(WorkflowError::NotFound { id: id.clone() }),
            };
        };
        read_as(id, text).map(Some)
    }
}

impl Engine {
    /// The value that an execution has published under a name; `None` if it has not.
    pub async fn query<T: DeserializeOwned>(&self, id: impl Into<ExecutionId>, name: &str) -> Result<Option<T>> {
        self.inner.query(&id.into(), name).await
    }
}

impl<O> Handle<O> {
    /// The value that the execution has published under a name; `None` if it has not.
    pub async fn query<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        self.engine.query(self.id(), name).await
    }

    /// Waits until a value that the execution has published is as it should be. If the execution ends before, that is
    /// an error.
    pub async fn wait_until<T: DeserializeOwned>(&self, name: &str, is_it: impl Fn(&T) -> bool) -> Result<T> {
        let (engine, id) = (&self.engine, self.id());
        let look = || async {
            let is_resident = engine.is_resident(id);
            let ended = match is_resident {
                true => false,
                false => {
                    let found = engine.read(id).await?;
                    let (execution, _) = found.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })?;
                    execution.status.is_terminal()
                }
            };
            // What was published last was so before the end was seen.
            match engine.query::<T>(id, name).await?.filter(|value| is_it(value)) {
                Some(value) => Ok(Some(value)),
                None if ended => Err(WorkflowError::Ended { id: id.clone() }),
                None => Ok(None),
            }
        };
        engine.listen(id, None, look).await
    }
}
