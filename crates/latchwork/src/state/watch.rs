//! Watches a container: every committed change, with the operations.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::record::Record as _;
use crate::state::Result;
use crate::state::op::Event;
use crate::state::record::StateRecord;
use crate::store::{Generation, Rev, Timestamp, Watch};

/// A committed change of a container.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Change {
    /// The container's rev from this change on.
    pub rev: Rev,
    /// The generation of the store. For a container in memory, its rev again.
    pub generation: Generation,
    /// When it was committed.
    pub time: Timestamp,
    /// The operations, in order. There are several if changes of callers shared a commit.
    pub events: Vec<Event>,
    /// The state from then on; `None` if it was removed.
    pub state: Option<Value>,
}

/// The changes of a container, each once, in order.
#[derive(Debug)]
pub struct StateWatch {
    pub(crate) source: ChangeSource,
    pub(crate) key: String,
}

#[derive(Debug)]
pub(crate) enum ChangeSource {
    Stored(Box<Watch>),
    Memory(UnboundedReceiver<Change>),
}

impl StateWatch {
    /// Returns the next change. Fails if the watch fell behind the history that the store keeps. Returns `None` if the
    /// container was in memory and is gone.
    ///
    /// ```
    /// # use latchwork::state::{Result, StateWatch};
    /// # async fn example(mut changes: StateWatch) -> Result<()> {
    /// while let Some(change) = changes.next().await? {
    ///     println!("{:?} from rev {} on", change.state, change.rev);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn next(&mut self) -> Result<Option<Change>> {
        let watch = match &mut self.source {
            ChangeSource::Memory(changes) => return Ok(changes.recv().await),
            ChangeSource::Stored(watch) => watch,
        };
        loop {
            let commit = watch.next().await?;
            let Some(change) = commit.changes.into_iter().next() else { continue };
            let state = match change.value {
                Some(value) => StateRecord::decode(&value).map_err(|why| why.at(&*self.key))?.into_state(),
                None => None,
            };
            let events = ContainerEvents::decode(&commit.meta, &self.key);
            let (rev, generation, time) = (change.rev, commit.generation, commit.time);
            return Ok(Some(Change { rev, generation, time, events, state }));
        }
    }
}

/// What a commit records in its meta about the containers it changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ContainerEvents {
    pub(crate) container: String,
    pub(crate) events: Vec<Event>,
}

#[derive(Serialize, Deserialize)]
struct CommitMeta {
    #[serde(default)]
    state: Vec<ContainerEvents>,
}

impl ContainerEvents {
    pub(crate) fn encode(told: Vec<ContainerEvents>) -> Vec<u8> {
        serde_json::to_vec(&CommitMeta { state: told }).expect("events can be written as JSON")
    }

    /// The events of one container. A commit without events, for example a restore, has changed it, too.
    fn decode(meta: &[u8], container: &str) -> Vec<Event> {
        let told = crate::json::parse_stored::<CommitMeta>(meta).map(|meta| meta.state).unwrap_or_default();
        told.into_iter().find(|told| told.container == container).map(|told| told.events).unwrap_or_default()
    }
}
