//! Shared state: a queue inside the process, compare-and-swap outside it.
//!
//! Mutations of one container run one at a time, in the order of the calls, so tasks of this process never conflict
//! with each other. Each commit checks that no other process has moved the container, so processes that share a store
//! do not lose each other's changes. Neighbours in a queue share a commit.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::json;
//! use latchwork::state::States;
//! use latchwork::store::Store;
//!
//! let states = States::on(&Store::memory().await?).await?;
//! let session = states.session("s-1");
//! session.patch_state(json!({"findings": {"a": 1}})).await?;
//! session.patch_state(json!({"findings": {"b": 2}})).await?;
//! session.inc_state("visits", 1).await?;
//! assert_eq!(session.get().await?.unwrap(), json!({"findings": {"a": 1, "b": 2}, "visits": 1}));
//!
//! let orders = states.global().slot::<u64>("orders").initial(100);
//! assert_eq!(orders.increment(1).await?.value, 101);
//! assert_eq!(orders.update(|orders| orders.unwrap_or(0) * 2).await?.value, 202);
//! # Ok(()) }
//! ```

mod batch;
mod container;
mod definition;
mod error;
mod memory;
mod once;
mod op;
mod queue;
mod record;
mod slot;
mod staged;
mod stored;
mod watch;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::json;
use crate::lane::KeptAnswers;
use crate::store::{History, Key, Range, SpaceSpec, Store};

pub use container::Container;
pub use error::{MutationError, Result, StateError, TimeoutOutcome};
pub use op::Event;
pub use queue::Changed;
pub use slot::Slot;
pub use watch::{Change, StateWatch};

pub(crate) use batch::{KnownState, StateBatch};
pub(crate) use container::{ContainerPlace, Steward, to_json};
pub(crate) use op::{StateOp, difference};
pub(crate) use queue::{HeldContainers, Identity, Quiet, Settled, StateJob, ToldEvent};
pub(crate) use slot::typed;
pub(crate) use staged::StagedSlots;
pub(crate) use watch::ContainerEvents;

use container::{Setup, empty};
use definition::ContainerDefinition;
use once::Answers;
use stored::Shelf;

/// How many generations of the store a watch may fall behind by default.
const GENERATIONS: u64 = 100_000;

/// The longest part of a name, in bytes.
const NAME_BYTES: usize = 512;

/// The containers and slots of a store. Handles are cheap to clone and share the queues.
#[derive(Clone)]
pub struct States {
    shelf: Arc<Shelf>,
    /// The settings of slots, of stored containers and of containers in memory.
    setups: [Arc<Setup>; 2],
}

/// Indexes of `setups`.
const BARE: usize = 0;
const OBJECT: usize = 1;

impl States {
    /// Opens the state in a data directory, which is created if it is missing.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> Result<()> {
    /// let states = States::open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(directory: impl AsRef<Path>) -> Result<States> {
        States::on(&Store::open(directory).await?).await
    }

    /// Opens the state of a store.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> Result<()> {
    /// let states = States::on(&store).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<States> {
        let known = store.spaces().await?;
        let is_new = known.iter().all(|space| space.name() != STATE);
        States::with(store, is_new.then_some(History::Generations(GENERATIONS))).await
    }

    /// Opens the state of a store, with this history from now on. A watch cannot fall behind further than that.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # use latchwork::store::{History, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// let states = States::with_history(&store, History::Generations(1_000)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn with_history(store: &Store, history: History) -> Result<States> {
        States::with(store, Some(history)).await
    }

    async fn with(store: &Store, history: Option<History>) -> Result<States> {
        let answers = Answers(KeptAnswers(store.space(SpaceSpec::new(ONCE)).await?));
        let spec = SpaceSpec::new(STATE);
        let spec = history.into_iter().fold(spec, SpaceSpec::history);
        let space = store.space(spec).await?;
        let shelf = Arc::new(Shelf::new(store.clone(), space, answers));
        let bare = Setup::new(store);
        let definition = Arc::new(ContainerDefinition { initial: Some(empty()), ..ContainerDefinition::default() });
        let object = Setup { definition, ..bare.clone() };
        Ok(States { shelf, setups: [Arc::new(bare), Arc::new(object)] })
    }

    /// The store below.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let generation = states.store().generation().await?;
    /// # Ok(()) }
    /// ```
    pub fn store(&self) -> &Store {
        &self.shelf.store
    }

    /// These states with another budget for mutations. The default is 30 s; `None` means no limit.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let states = states.mutation_timeout(Duration::from_secs(5));
    /// # Ok(()) }
    /// ```
    pub fn mutation_timeout(self, timeout: impl Into<Option<Duration>>) -> States {
        let timeout = timeout.into();
        self.set_up(|setup| setup.timeout = timeout)
    }

    /// These states with another number of attempts when another process is faster. The default is 4.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let states = states.attempts(10);
    /// # Ok(()) }
    /// ```
    pub fn attempts(self, attempts: u32) -> States {
        self.set_up(|setup| setup.retry.attempts = attempts.max(1))
    }

    fn set_up(mut self, change: impl Fn(&mut Setup)) -> States {
        self.setups.iter_mut().for_each(|setup| change(Arc::make_mut(setup)));
        self
    }

    /// The state of a request.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// states.request("r-1").inc_state("steps", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn request(&self, id: &str) -> Container {
        self.scope("request", id)
    }

    /// The state of a session.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// states.session("s-1").inc_state("visits", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn session(&self, id: &str) -> Container {
        self.scope("session", id)
    }

    /// The state of a user.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// states.user("ada").inc_state("logins", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn user(&self, id: &str) -> Container {
        self.scope("user", id)
    }

    /// The state of an organisation.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// states.org("acme").inc_state("members", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn org(&self, id: &str) -> Container {
        self.scope("org", id)
    }

    /// A new container in memory, for the state of one run of a sequencer. It ends with its last handle. The name is
    /// for messages and need not be unique.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let run = states.sequencer("import");
    /// run.push_state("steps", "read").await?;
    /// # Ok(()) }
    /// ```
    pub fn sequencer(&self, name: impl Into<Arc<str>>) -> Container {
        Container::memory(name.into(), self.setups[OBJECT].clone())
    }

    /// A new container in memory, for the state of a target. It ends with its last handle. The name is for messages and
    /// need not be unique.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let target = states.target("printer-2");
    /// target.inc_state("pages", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn target(&self, name: impl Into<Arc<str>>) -> Container {
        Container::memory(name.into(), self.setups[OBJECT].clone())
    }

    /// Slots that all code shares.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// states.global().slot::<u64>("orders").increment(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn global(&self) -> Slots {
        Slots { states: self.clone(), scope: "global", owner: None }
    }

    /// Slots that all executions of a workflow type share.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// states.workflow("order").slot::<u64>("sold").increment(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn workflow(&self, workflow_type: &str) -> Slots {
        Slots { states: self.clone(), scope: "workflow", owner: Some(workflow_type.into()) }
    }

    /// Slots of an execution.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let progress = states.execution("order-7").slot::<u64>("progress").get().await?;
    /// # Ok(()) }
    /// ```
    pub fn execution(&self, id: &str) -> Slots {
        Slots { states: self.clone(), scope: "execution", owner: Some(id.into()) }
    }

    /// Slots that an execution without a parent shares with all its descendants.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let budget = states.tree("order-7").slot::<u64>("budget").get().await?;
    /// # Ok(()) }
    /// ```
    pub fn tree(&self, root: &str) -> Slots {
        Slots { states: self.clone(), scope: "tree", owner: Some(root.into()) }
    }

    fn scope(&self, scope: &'static str, id: &str) -> Container {
        self.stored(format!("{scope} {id:?}"), &[scope, id], &self.setups[OBJECT])
    }

    fn stored(&self, name: String, parts: &[&str], setup: &Arc<Setup>) -> Container {
        let setup = match parts.iter().find_map(|part| check_name(part).err()) {
            Some(wrong) => Arc::new(Setup { wrong: Some(wrong), ..(**setup).clone() }),
            None => setup.clone(),
        };
        Container::stored(&self.shelf, self.key(parts), name, setup)
    }

    fn key(&self, parts: &[&str]) -> Key {
        let mut key = Vec::new();
        for part in parts {
            json::encode(&mut key, Some(&Value::String((*part).into())));
        }
        self.shelf.space.key(key)
    }
}

fn check_name(name: &str) -> Result<()> {
    let refuse = |reason: &'static str| {
        Err(StateError::Name { what: "a container or slot".into(), name: name.into(), reason: reason.into() })
    };
    match name.len() {
        0 => refuse("it is empty"),
        length if length > NAME_BYTES => refuse("it is longer than 512 bytes"),
        _ => Ok(()),
    }
}

/// The owner of a slot, as messages and journals show it.
fn of(scope: &str, owner: &str) -> String {
    format!(" of {scope} {owner:?}")
}

/// The name of a slot as an execution records it. It has no ids if the slot belongs to the execution or its tree,
/// because a fork has other ids and the same journal.
pub(crate) fn name_within(slot: &str, execution: &str, root: &str) -> String {
    if let Some(name) = slot.strip_suffix(&of("execution", execution)) {
        return format!("{name} of this execution");
    }
    match slot.strip_suffix(&of("tree", root)) {
        Some(name) => format!("{name} of this tree"),
        None => slot.into(),
    }
}

/// The slots of one scope.
#[derive(Clone, Debug)]
pub struct Slots {
    states: States,
    scope: &'static str,
    owner: Option<String>,
}

impl Slots {
    /// The slot with this name.
    ///
    /// ```
    /// # use latchwork::state::{Result, States};
    /// # async fn example(states: States) -> Result<()> {
    /// let motto = states.global().slot::<String>("motto");
    /// motto.set("work once".into()).await?;
    /// # Ok(()) }
    /// ```
    pub fn slot<T: Serialize + DeserializeOwned>(&self, name: &str) -> Slot<T> {
        let (shown, parts) = match &self.owner {
            None => (format!("slot {name:?}"), vec!["slot", self.scope, name]),
            Some(owner) => (format!("slot {name:?}{}", of(self.scope, owner)), vec!["slot", self.scope, owner, name]),
        };
        Slot::new(self.states.stored(shown, &parts, &self.states.setups[BARE]))
    }

    /// The common start of the keys of all these slots.
    fn prefix(&self) -> Key {
        let parts: Vec<&str> = ["slot", self.scope].into_iter().chain(self.owner.as_deref()).collect();
        self.states.key(&parts)
    }

    /// The range of all these slots.
    pub(crate) fn all(&self) -> Range {
        self.states.shelf.space.prefix(self.prefix().bytes())
    }

    /// The slot of another scope with the same name as one of these.
    pub(crate) fn namesake(&self, slot: &Key, other: &Slots) -> Key {
        let name = &slot.bytes()[self.prefix().bytes().len()..];
        self.states.shelf.space.key([other.prefix().bytes(), name].concat())
    }
}

/// The names of the spaces.
const STATE: &str = "state";
const ONCE: &str = "state.once";

shown!(States, _it => );
