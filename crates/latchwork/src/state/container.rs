//! A container as callers hold it: a name, its settings, and the operations. The callers need not know where it lives.

use std::convert::Infallible;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Number, Value};
use tokio::sync::{mpsc, oneshot};

use crate::json::{self, Path};
use crate::state::batch::KnownState;
use crate::state::definition::{ContainerDefinition, StateFits};
use crate::state::memory::{Memories, Memory};
use crate::state::op::{self, StateOp, kind_of};
use crate::state::queue::{
    Changed, Condition, GuardCheck, HeldContainers, Identity, JobWaiter, JobWork, MutationRetry, Mutator, Progress,
    Quiet, Refusal, RunningMutator, Settled, StateJob,
};
use crate::state::stored::Shelf;
use crate::state::watch::{Change, ChangeSource, StateWatch};
use crate::state::{MutationError, Result, StateError};
use crate::store::{Env, Generation, Key, Rev, Right, Store};

/// A state that is changed by one mutation at a time, in the order of the calls.
///
/// Handles are cheap to clone; handles of the same stored container share its queue. A method like
/// [`Container::attempts`] or [`Container::once`] sets something for the handle that it returns, so it can be used for
/// one call: `session.clone().once("order-7").inc_state("orders", 1)`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::json;
/// use latchwork::state::States;
/// use latchwork::store::Store;
///
/// let states = States::on(&Store::memory().await?).await?;
/// let session = states.session("s-1");
/// session.set_state(json!({"visits": 1})).await?;
/// session.patch_state(json!({"user": {"name": "Ada"}})).await?;
/// session.inc_state("visits", 2).await?;
/// session.push_state("pages", "/home").await?;
/// session.set_state_record("flags", "beta", true).await?;
/// session.delete_state_record("flags", "beta").await?;
/// let state = session.get().await?.unwrap();
/// assert_eq!(state["visits"], json!(3));
/// assert_eq!(state["pages"], json!(["/home"]));
/// assert_eq!(session.delete_state().await?.value["user"]["name"], json!("Ada"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Container {
    home: Home,
    /// Shared by all handles with the same settings.
    setup: Arc<Setup>,
}

/// Where a container lives.
#[derive(Clone)]
enum Home {
    Stored(Arc<ContainerPlace>),
    Memory(Arc<Memory>),
    /// In the store, read and changed through a steward.
    By(Arc<Entrusted>),
}

/// A program may hold very many idle containers in memory, so a handle is three words. Benchmark `state.idle` counts
/// the bytes.
const _: () = assert!(size_of::<Container>() == 3 * size_of::<usize>(), "a handle of a container has grown");

/// A stored container and its steward. They have their own allocation: inside the handle they would enlarge it.
struct Entrusted {
    place: Arc<ContainerPlace>,
    steward: Arc<dyn Steward>,
}

/// The place of a stored container.
pub(crate) struct ContainerPlace {
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) key: Key,
    pub(crate) name: Arc<str>,
}

/// Connects reads and changes with something else: a journal, or a transaction.
pub(crate) trait Steward: Send + Sync {
    /// Reads the container.
    fn read<'a>(&'a self, place: &'a ContainerPlace) -> Pin<Box<dyn Future<Output = Result<KnownState>> + Send + 'a>>;

    /// Does a job and answers it.
    fn change<'a>(
        &'a self,
        place: &'a ContainerPlace,
        job: StateJob,
    ) -> Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

    /// The store does not serve, or a newer program is needed. Returns the error for the caller, if it returns.
    fn failed(&self, error: StateError) -> Pin<Box<dyn Future<Output = StateError> + Send + '_>>;
}

/// The settings of a container.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) env: Env,
    pub(crate) definition: Arc<ContainerDefinition>,
    pub(crate) retry: MutationRetry,
    pub(crate) timeout: Option<Duration>,
    pub(crate) once: Option<Arc<str>>,
    /// The condition of a change.
    pub(crate) condition: Option<Condition>,
    /// The check that must pass when a change lands.
    pub(crate) guard: Option<GuardCheck>,
    /// The lanes of containers in memory.
    pub(crate) memories: Arc<Memories>,
    /// An error in the settings, which every operation returns.
    pub(crate) wrong: Option<StateError>,
}

impl Setup {
    pub(crate) fn new(store: &Store) -> Setup {
        let retry = MutationRetry { attempts: 4, pause: Duration::from_millis(10) };
        let timeout = Some(Duration::from_secs(30));
        let (env, memories) = (store.env().clone(), Arc::new(Memories::new(store)));
        let (definition, once, condition, guard, wrong) = (Arc::default(), None, None, None, None);
        Setup { env, definition, retry, timeout, once, condition, guard, memories, wrong }
    }
}

impl Container {
    pub(crate) fn stored(shelf: &Arc<Shelf>, key: Key, name: String, setup: Arc<Setup>) -> Container {
        let place = ContainerPlace { shelf: shelf.clone(), key, name: name.into() };
        Container { home: Home::Stored(Arc::new(place)), setup }
    }

    pub(crate) fn memory(name: Arc<str>, setup: Arc<Setup>) -> Container {
        Container { home: Home::Memory(Arc::new(Memory::new(name))), setup }
    }

    /// The same container, changed through a steward. If other writers are faster, a change is tried again without a
    /// limit of attempts or time.
    pub(crate) fn by(self, steward: Arc<dyn Steward>) -> Container {
        let Home::Stored(place) = self.home else { return self };
        let container = Container { home: Home::Stored(place.clone()), setup: self.setup };
        let container = container.attempts(u32::MAX).mutation_timeout(None);
        Container { home: Home::By(Arc::new(Entrusted { place, steward })), setup: container.setup }
    }

    /// The same container with other settings, unless a steward decides them.
    fn treated(self, change: impl FnOnce(&mut Setup)) -> Container {
        if let Home::By(..) = self.home { self } else { self.set_up(change) }
    }

    fn set_up(mut self, change: impl FnOnce(&mut Setup)) -> Container {
        change(Arc::make_mut(&mut self.setup));
        self
    }

    /// How often a mutation is tried if another process moves the container meanwhile. The default is 4, the minimum 1.
    ///
    /// ```
    /// # use latchwork::state::{Container, Result};
    /// # async fn example(session: Container) -> Result<()> {
    /// session.clone().attempts(10).inc_state("visits", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn attempts(self, attempts: u32) -> Container {
        self.treated(|setup| setup.retry.attempts = attempts.max(1))
    }

    /// The longest first pause between attempts. The default is 10 ms. It doubles each time, up to 40 ms; from then on,
    /// every other attempt follows at once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::state::{Container, Result};
    /// # async fn example(session: Container) -> Result<()> {
    /// session.clone().pause(Duration::from_millis(2)).inc_state("visits", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn pause(self, pause: Duration) -> Container {
        self.treated(|setup| setup.retry.pause = pause)
    }

    /// How long a mutation may wait and run together. The default is 30 s; `None` means no limit.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::state::{Container, Result};
    /// # async fn example(session: Container) -> Result<()> {
    /// session.clone().mutation_timeout(Duration::from_secs(2)).inc_state("visits", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn mutation_timeout(self, timeout: impl Into<Option<Duration>>) -> Container {
        self.treated(|setup| setup.timeout = timeout.into())
    }

    /// Sets the idempotency key of each mutation through the returned handle, so make one handle for each call. A
    /// mutation that is sent again under the same key is applied once and returns the same answer, for a day. The same
    /// key with another operation or other arguments is an error. (Mutators are compared by the method alone.)
    /// Containers in memory keep no keys.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// for _ in 0..2 {
    ///     session.clone().once("request-7").inc_state("visits", 1).await?;
    /// }
    /// assert_eq!(session.get().await?, Some(json!({"visits": 1})));
    /// # Ok(()) }
    /// ```
    pub fn once(self, key: impl Into<Arc<str>>) -> Container {
        self.set_up(|setup| setup.once = Some(key.into()))
    }

    /// Makes each change through the returned handle only if the container is at this rev, as returned by
    /// [`Container::read`]. Zero stands for a container that was never written. Otherwise the change fails with
    /// [`StateError::RevisionConflict`], which has both revs, and nothing is written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use latchwork::json;
    /// use latchwork::state::{StateError, States};
    /// use latchwork::store::Store;
    ///
    /// let states = States::on(&Store::memory().await?).await?;
    /// let session = states.session("s-1");
    /// let (_, rev) = session.read().await?;
    /// session.clone().if_rev(rev).set_state(json!({"step": 1})).await?;
    /// let late = session.clone().if_rev(rev).set_state(json!({"step": 2})).await;
    /// assert!(matches!(late, Err(StateError::RevisionConflict { expected, actual, .. }) if expected < actual));
    /// # Ok(()) }
    /// ```
    ///
    /// Changes of several callers can share a commit, and then have the same rev. A change with a condition is the last
    /// one of its commit, so the rev of its answer names exactly the state that it has left. The rev of another answer
    /// may name a state with changes of other callers in it; read the container before you use such a rev as a
    /// condition.
    pub fn if_rev(self, rev: impl Into<Rev>) -> Container {
        self.set_up(|setup| setup.condition = Some(Condition::AtRev(rev.into())))
    }

    /// Makes each change through the returned handle only if the container has no state: it was never written, or was
    /// deleted. Otherwise the change fails with [`StateError::AlreadyExists`], and nothing is written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::{StateError, States};
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// session.clone().if_absent().set_state(json!({"step": 1})).await?;
    /// let late = session.clone().if_absent().set_state(json!({"step": 2})).await;
    /// assert!(matches!(late, Err(StateError::AlreadyExists { .. })));
    /// # Ok(()) }
    /// ```
    pub fn if_absent(self) -> Container {
        self.set_up(|setup| setup.condition = Some(Condition::Absent))
    }

    /// Guards each change through the returned handle: it lands only while the lock of this token is held, and fails
    /// with [`StateError::Fenced`] otherwise. Containers in memory cannot be guarded.
    ///
    /// ```
    /// # use latchwork::lock::LockGuard;
    /// # use latchwork::state::{Container, Result};
    /// # async fn example(session: Container, guard: LockGuard) -> Result<()> {
    /// session.clone().guard(guard.token()).inc_state("visits", 1).await?;
    /// # Ok(()) }
    /// ```
    pub fn guard(self, right: &impl Right) -> Container {
        let (guard, name) = ((right.check(), right.lost().into()), self.name().to_string());
        let is_memory = matches!(self.home, Home::Memory(_));
        self.set_up(|setup| match is_memory {
            true => setup.wrong = Some(StateError::Unguardable { key: name }),
            false => setup.guard = Some(guard),
        })
    }

    /// The value that is read while nothing was ever written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// let user = states.user("ada").initial(json!({"visits": 0}));
    /// assert_eq!(user.get().await?, Some(json!({"visits": 0})));
    /// # Ok(()) }
    /// ```
    pub fn initial(self, value: impl Serialize) -> Container {
        let value = self.value(&value);
        self.set_up(|setup| match value {
            Ok(value) => {
                let definition = Arc::make_mut(&mut setup.definition);
                definition.initial = Some(value);
                #[cfg(feature = "schema")]
                {
                    definition.given = true;
                }
            }
            Err(error) => setup.wrong = Some(error),
        })
    }

    /// Refuses every state that does not fit a JSON schema. Its defaults are the initial state, if none is given.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// let user = states.user("ada").schema(&json!({"properties": {"age": {"type": "integer"}}}));
    /// assert!(user.set_state(json!({"age": "old"})).await.is_err());
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "schema")]
    pub fn schema(self, schema: &Value) -> Container {
        let schema = crate::state::definition::Schema::new(self.name(), schema);
        self.set_up(|setup| match schema {
            Ok(schema) => {
                let definition = Arc::make_mut(&mut setup.definition);
                if !definition.given {
                    definition.initial = schema.defaults.clone().or(definition.initial.take());
                }
                definition.schema = Some(Arc::new(schema));
            }
            Err(error) => setup.wrong = Some(error),
        })
    }

    /// Refuses every state that does not fit the schema of a Rust type.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// #[derive(schemars::JsonSchema)]
    /// struct Visits {
    ///     count: u32,
    /// }
    /// let visits = states.user("ada").schema_of::<Visits>();
    /// assert!(visits.set_state(json!({"count": "many"})).await.is_err());
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "schema")]
    pub fn schema_of<T: schemars::JsonSchema>(self) -> Container {
        let schema = schemars::schema_for!(T).to_value();
        self.schema(&schema)
    }

    pub(crate) fn fits(self, fits: StateFits) -> Container {
        if self.setup.definition.fits.is_some() {
            return self;
        }
        self.set_up(|setup| Arc::make_mut(&mut setup.definition).fits = Some(fits))
    }

    /// The name, as messages show it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// assert_eq!(session.name(), "session \"s-1\"");
    /// # Ok(()) }
    /// ```
    pub fn name(&self) -> &str {
        self.shared_name()
    }

    fn shared_name(&self) -> &Arc<str> {
        match &self.home {
            Home::Stored(place) => &place.name,
            Home::By(entrusted) => &entrusted.place.name,
            Home::Memory(memory) => memory.name(),
        }
    }

    /// The environment that its time comes from.
    ///
    /// ```
    /// # use latchwork::state::{Container, Result};
    /// # async fn example(session: Container) -> Result<()> {
    /// println!("it is {}", session.env().now());
    /// # Ok(()) }
    /// ```
    pub fn env(&self) -> &Env {
        &self.setup.env
    }

    /// The state as it was last committed. A container that was never written reads as its initial value, which is `{}`
    /// by default; only a deleted one is `None`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// assert_eq!(session.get().await?, Some(json!({})));
    /// # Ok(()) }
    /// ```
    pub fn get(&self) -> impl Future<Output = Result<Option<Value>>> + Send + use<> {
        let read = self.read();
        async move { Ok(read.await?.0) }
    }

    /// The state as it was last committed, and its rev; zero while nothing was ever written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::{Rev, Store};
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// assert_eq!(session.read().await?, (Some(json!({})), Rev(0)));
    /// session.inc_state("visits", 1).await?;
    /// assert_eq!(session.read().await?, (Some(json!({"visits": 1})), Rev(1)));
    /// # Ok(()) }
    /// ```
    pub fn read(&self) -> impl Future<Output = Result<(Option<Value>, Rev)>> + Send + use<> {
        self.clone().read_now()
    }

    async fn read_now(self) -> Result<(Option<Value>, Rev)> {
        self.well()?;
        let known = match &self.home {
            Home::Memory(memory) => memory.read(),
            Home::Stored(place) => place.shelf.read(&place.key, &place.name).await?,
            Home::By(entrusted) => entrusted.steward.read(&entrusted.place).await?,
        };
        let state = if known.rev.is_some() { known.state } else { self.setup.definition.initial.clone() };
        Ok((state, known.rev.unwrap_or_default()))
    }

    /// Replaces the state.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// session.set_state(json!({"visits": 1})).await?;
    /// assert_eq!(session.get().await?, Some(json!({"visits": 1})));
    /// # Ok(()) }
    /// ```
    pub fn set_state<V: Serialize>(&self, value: V) -> impl Future<Output = Result<Changed>> + Send + use<V> {
        let op = self.value(&value).map(StateOp::Set);
        self.clone().done("set_state", op)
    }

    /// Removes the state and returns it. From then on the container reads as absent, not as its initial value.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// session.set_state(json!({"visits": 1})).await?;
    /// assert_eq!(session.delete_state().await?.value, json!({"visits": 1}));
    /// assert_eq!(session.get().await?, None);
    /// # Ok(()) }
    /// ```
    pub fn delete_state(&self) -> impl Future<Output = Result<Changed>> + Send + use<> {
        self.clone().done("delete_state", Ok(StateOp::Delete))
    }

    /// Merges into the state as a JSON merge patch does (RFC 7396): objects are merged, `null` removes.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// session.set_state(json!({"visits": 1, "step": "cart"})).await?;
    /// let patched = session.patch_state(json!({"visits": 2, "step": null})).await?;
    /// assert_eq!(patched.value, json!({"visits": 2}));
    /// # Ok(()) }
    /// ```
    pub fn patch_state<V: Serialize>(&self, patch: V) -> impl Future<Output = Result<Changed>> + Send + use<V> {
        let op = self.patch(&patch);
        self.clone().done("patch_state", op)
    }

    pub(crate) fn patch(&self, patch: &impl Serialize) -> Result<StateOp> {
        let patch = self.value(patch)?;
        if !patch.is_object() {
            let (key, place, found) = (self.name().to_string(), "the patch".into(), kind_of(&patch).into());
            return Err(StateError::NotAnObject { key, place, found });
        }
        Ok(StateOp::Patch(patch))
    }

    /// Adds an element to the list at a path; a missing list is created. Returns the length.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// assert_eq!(session.push_state("pages", "/home").await?.value, json!(1));
    /// assert_eq!(session.push_state("pages", "/cart").await?.value, json!(2));
    /// # Ok(()) }
    /// ```
    pub fn push_state<V: Serialize>(
        &self,
        path: &str,
        value: V,
    ) -> impl Future<Output = Result<Changed>> + Send + use<V> {
        let op = self.place(path).and_then(|place| Ok(StateOp::Push(place, vec![self.value(&value)?])));
        self.clone().done("push_state", op)
    }

    /// Adds to the number at a path; a missing number counts as zero. Returns the sum.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// assert_eq!(session.inc_state("visits", 2).await?.value, json!(2));
    /// # Ok(()) }
    /// ```
    pub fn inc_state<N: Into<Number>>(
        &self,
        path: &str,
        by: N,
    ) -> impl Future<Output = Result<Changed>> + Send + use<N> {
        let op = self.place(path).map(|place| StateOp::Increment(place, by.into()));
        self.clone().done("inc_state", op)
    }

    /// Sets an entry of the record at a path; a missing record is created.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// session.set_state_record("flags", "beta", true).await?;
    /// assert_eq!(session.get().await?, Some(json!({"flags": {"beta": true}})));
    /// # Ok(()) }
    /// ```
    pub fn set_state_record<V: Serialize>(
        &self,
        path: &str,
        entry: &str,
        value: V,
    ) -> impl Future<Output = Result<Changed>> + Send + use<V> {
        let op = self.place(path).and_then(|place| Ok(StateOp::SetRecord(place, entry.into(), self.value(&value)?)));
        self.clone().done("set_state_record", op)
    }

    /// Removes an entry of the record at a path. Returns its value.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// session.set_state_record("flags", "beta", true).await?;
    /// assert_eq!(session.delete_state_record("flags", "beta").await?.value, json!(true));
    /// # Ok(()) }
    /// ```
    pub fn delete_state_record(&self, path: &str, entry: &str) -> impl Future<Output = Result<Changed>> + Send + use<> {
        let op = self.place(path).map(|place| StateOp::DeleteRecord(place, entry.into()));
        self.clone().done("delete_state_record", op)
    }

    /// Runs a mutator on the state and stores its result. The mutator may be asynchronous, and may run again on newer
    /// state if another process was faster. Its own error leaves the state as it is and is returned unchanged. The type
    /// of that error is the mutator's choice, so a mutator that never fails has to name one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::json;
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let session = states.session("s-1");
    /// # use std::convert::Infallible;
    /// let wrapped = session.atomic_state(|state| async move {
    ///     Ok::<_, Infallible>(Some(json!({"before": state})))
    /// });
    /// assert_eq!(wrapped.await?.value, json!({"before": {}}));
    /// # Ok(()) }
    /// ```
    pub fn atomic_state<F, Fut, E>(
        &self,
        mutator: F,
    ) -> impl Future<Output = Result<Changed, MutationError<E>>> + Send + use<F, Fut, E>
    where
        F: FnMut(Option<Value>) -> Fut + Send + 'static,
        Fut: Future<Output = std::result::Result<Option<Value>, E>> + Send + 'static,
        E: Send + 'static,
    {
        self.clone().mutate("atomic_state", mutator)
    }

    /// Watches every change after the generation `after` of the store. A container in memory is watched from now on.
    ///
    /// ```
    /// # use latchwork::state::{Container, Result};
    /// # use latchwork::store::Store;
    /// # async fn example(session: Container, store: Store) -> Result<()> {
    /// let mut changes = session.watch(store.generation().await?).await?;
    /// while let Some(change) = changes.next().await? {
    ///     println!("rev {}: {:?}", change.rev, change.events);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn watch(&self, after: Generation) -> impl Future<Output = Result<StateWatch>> + Send + use<> {
        self.clone().watch_now(after)
    }

    async fn watch_now(self, after: Generation) -> Result<StateWatch> {
        self.well()?;
        let source = match &self.home {
            Home::Memory(memory) => {
                let (sender, receiver) = mpsc::unbounded_channel::<Change>();
                memory.watch(sender);
                ChangeSource::Memory(receiver)
            }
            Home::By(entrusted) => return Err(StateError::Unwatchable { key: entrusted.place.name.to_string() }),
            Home::Stored(place) => {
                let range = place.shelf.space.range(place.key.bytes()..=place.key.bytes());
                ChangeSource::Stored(Box::new(place.shelf.store.watch(range, after).await?))
            }
        };
        Ok(StateWatch { source, key: self.name().to_string() })
    }

    fn well(&self) -> Result<()> {
        self.setup.wrong.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn value(&self, value: &impl Serialize) -> Result<Value> {
        to_json(self.name(), value)
    }

    fn place(&self, path: &str) -> Result<op::StatePath> {
        if path.is_empty() {
            return Ok(None);
        }
        Path::parse(path).map(Some).map_err(|cause| StateError::Path { path: path.into(), cause })
    }

    fn identity(&self) -> Identity {
        let place = match &self.home {
            Home::Stored(place) => place,
            Home::By(entrusted) => &entrusted.place,
            Home::Memory(memory) => return memory.identity(),
        };
        Identity::Stored(place.shelf.store.clone(), place.key.clone())
    }

    /// The containers that the current task is mutating. Refused if this container is one of them.
    fn held(&self) -> Result<HeldContainers> {
        self.well()?;
        let held = HeldContainers::by_this_task();
        if held.has(&self.identity()) {
            return Err(StateError::ReentrantMutation { key: self.name().to_string() });
        }
        Ok(held)
    }

    fn job(&self, operation: &'static str, body: JobWork, held: HeldContainers, progress: Arc<Progress>) -> StateJob {
        let Setup { once, retry, definition, condition, guard, .. } = &*self.setup;
        let (once, retry, definition, guard) = (once.clone(), *retry, definition.clone(), guard.clone());
        let condition = *condition;
        let name = self.shared_name().clone();
        StateJob {
            body,
            operation,
            name,
            once,
            definition,
            condition,
            guard,
            retry,
            tried: 0,
            held,
            progress,
            rider: None,
            told: None,
        }
    }

    async fn submit(&self, job: StateJob) -> Result<()> {
        match &self.home {
            Home::Stored(place) => place.shelf.submit(&place.key, job),
            Home::Memory(memory) => self.setup.memories.submit(memory, job),
            Home::By(entrusted) => entrusted.steward.change(&entrusted.place, job).await,
        }
    }

    /// The error for the caller, if there is one.
    async fn told(&self, error: StateError) -> StateError {
        match (&self.home, error) {
            (Home::By(entrusted), error @ (StateError::Store(_) | StateError::UnknownVersion { .. })) => {
                entrusted.steward.failed(error).await
            }
            (_, error) => error,
        }
    }

    fn waiting<R>(&self, answer: oneshot::Receiver<R>, progress: Arc<Progress>) -> JobWaiter<'_, R> {
        JobWaiter { answer, progress, env: &self.setup.env, key: self.name(), timeout: self.setup.timeout }
    }

    pub(crate) async fn done(self, operation: &'static str, op: Result<StateOp>) -> Result<Changed> {
        let (op, held) = (op?, self.held()?);
        op.check().map_err(|cause| StateError::Value { key: self.name().to_string(), cause })?;
        let (reply, answer) = oneshot::channel();
        let progress = Arc::new(Progress::default());
        let job = self.job(operation, JobWork::Op(op, reply), held, progress.clone());
        if let (Home::Memory(memory), JobWork::Op(op, _)) = (&self.home, &job.body)
            && let Some(done) = memory.apply_now(&job, op, &self.setup.env)
        {
            return done;
        }
        let waiting = self.waiting(answer, progress);
        self.submit(job).await?;
        match waiting.answered::<Infallible>().await.unwrap_or_else(|error| Err(error.unrefused())) {
            Ok(changed) => Ok(changed),
            Err(error) => Err(self.told(error).await),
        }
    }

    pub(crate) async fn mutate<F, Fut, E>(
        self,
        operation: &'static str,
        mutator: F,
    ) -> Result<Changed, MutationError<E>>
    where
        F: FnMut(Option<Value>) -> Fut + Send + 'static,
        Fut: Future<Output = std::result::Result<Option<Value>, E>> + Send + 'static,
        E: Send + 'static,
    {
        let held = self.held()?;
        let (reply, answer) = oneshot::channel();
        let progress = Arc::new(Progress::default());
        let body =
            JobWork::Mutator(Box::new(Own { mutator: Quiet::new(mutator), reply, made: PhantomData::<fn() -> Fut> }));
        let job = self.job(operation, body, held, progress.clone());
        let waiting = self.waiting(answer, progress);
        self.submit(job).await?;
        match waiting.answered().await? {
            Err(MutationError::State(error)) => Err(self.told(error).await.into()),
            answer => answer,
        }
    }
}

shown!(Container, it => name: it.name());

/// A caller's mutator, and where its answer goes.
struct Own<F, Fut, E> {
    mutator: Quiet<F>,
    reply: oneshot::Sender<Result<Changed, MutationError<E>>>,
    made: PhantomData<fn() -> Fut>,
}

impl<F, Fut, E> Mutator for Own<F, Fut, E>
where
    F: FnMut(Option<Value>) -> Fut + Send,
    Fut: Future<Output = std::result::Result<Option<Value>, E>> + Send + 'static,
    E: Send + 'static,
{
    fn run(&mut self, state: Option<Value>) -> RunningMutator {
        let running = (self.mutator.get())(state);
        Quiet::new(Box::pin(async move { running.await.map_err(|error| Box::new(error) as Refusal) }))
    }

    fn settle(self: Box<Self>, settled: Settled) {
        let answer = match settled {
            Settled::Done(changed) => Ok(changed),
            Settled::Failed(error) => Err(error.into()),
            Settled::Refused(refusal) => match refusal.downcast::<E>() {
                Ok(error) => Err(MutationError::Refused(*error)),
                Err(_) => return,
            },
        };
        // An answer without a receiver is a value of the caller, too: its drop may panic.
        drop(Quiet::new(self.reply.send(answer)));
    }
}

/// The JSON of a value for a container.
pub(crate) fn to_json(key: &str, value: &impl Serialize) -> Result<Value> {
    json::to_value(value).map_err(|cause| StateError::Value { key: key.into(), cause })
}

/// An object, for containers that start with one.
pub(crate) fn empty() -> Value {
    Value::Object(Map::new())
}
