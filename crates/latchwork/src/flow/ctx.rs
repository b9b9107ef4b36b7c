//! What the code of a flow is given: the context of a handler's body, the states it can reach, and what the functions
//! between blocks see. It does not decide when anything is recorded.

use std::future::Future;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};

use crate::flow::error::{BlockError, FlowError, failed};
use crate::flow::frame::Frame;
use crate::flow::request::{Asker, shown};
use crate::flow::state::{CellAnswer, StateCell};
use crate::flow::stream::FlowEvent;
use crate::json::{self, Path as JsonPath};
use crate::state::{Changed, Container, StateError, StateOp, States};
use crate::workflow::run::largest;
use crate::workflow::{Ctx, Failure};

/// The context of a handler's body. It derefs to the context of a workflow: `ctx.run`, `ctx.sleep`, `ctx.mutex` and all
/// other operations are recorded in the place of the block. `P` is the part of the sequencer's state that the handler
/// needs.
pub struct BlockCtx<P> {
    ctx: Ctx,
    pub(crate) frame: Arc<Frame>,
    part: PhantomData<fn() -> P>,
}

impl<P> Clone for BlockCtx<P> {
    fn clone(&self) -> BlockCtx<P> {
        BlockCtx { ctx: self.ctx.clone(), frame: self.frame.clone(), part: PhantomData }
    }
}

impl<P> Deref for BlockCtx<P> {
    type Target = Ctx;

    fn deref(&self) -> &Ctx {
        &self.ctx
    }
}

impl<P> std::fmt::Debug for BlockCtx<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockCtx").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl<P> BlockCtx<P> {
    pub(crate) fn new(ctx: Ctx, frame: Arc<Frame>) -> BlockCtx<P> {
        BlockCtx { ctx, frame, part: PhantomData }
    }

    fn handle<T>(&self, cell: Option<Arc<StateCell>>) -> StateHandle<T> {
        StateHandle { cell, frame: self.frame.clone(), part: PhantomData }
    }

    /// The names of the blocks from the outermost to this one, such as `research/planner`.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     println!("{}", ctx.path());
    ///     Ok(())
    /// });
    /// ```
    pub fn path(&self) -> String {
        shown(&self.frame.path)
    }

    /// The state of the nearest sequencer around this block that declares state.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     let Total { total } = ctx.sequencer().state();
    ///     ctx.sequencer().patch(json!({"total": total + value})).await
    /// });
    /// ```
    pub fn sequencer(&self) -> StateHandle<P> {
        self.handle(self.frame.enclosing().cloned())
    }

    /// The state of this block itself, if it declares one.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.own::<Total>().exists())
    /// });
    /// ```
    pub fn own<T: DeserializeOwned>(&self) -> StateHandle<T> {
        self.handle(self.frame.own.clone())
    }

    /// The state of the block right around this one, if it declares one.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.parent::<Total>().inc([("total", value)]).await
    /// });
    /// ```
    pub fn parent<T: DeserializeOwned>(&self) -> StateHandle<T> {
        self.handle(self.frame.parent.as_ref().and_then(|parent| parent.own.clone()))
    }

    /// The state of a block of this name: of one before this block in the same sequencer or in one around it, the most
    /// recent first; then of a block around it.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.target::<Total>("count").state().total)
    /// });
    /// ```
    pub fn target<T: DeserializeOwned>(&self, name: &str) -> StateHandle<T> {
        self.handle(self.frame.target(name))
    }

    /// Who the request is for.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     println!("for {:?}", ctx.asker().session);
    ///     Ok(())
    /// });
    /// ```
    pub fn asker(&self) -> &Asker {
        &self.frame.request.asker
    }

    fn stored(&self, scope: &'static str, of: &str, container: impl FnOnce(&States, &str) -> Container) -> Container {
        let timeout = self.frame.request.settings.mutation_timeout;
        let container = container(&self.engine().states, of).mutation_timeout(timeout);
        let (of, limit) = (of.to_string(), largest(self.engine()));
        let tells = move |change, rev| FlowEvent::stored_change((scope, of.as_str()), change, rev, limit);
        self.ctx.entrust(container, Arc::new(tells))
    }

    /// The stored state of this request. A change of it and the record of that change are one commit.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.request().inc_state("calls", 1).await?)
    /// });
    /// ```
    pub fn request(&self) -> Container {
        self.stored("request", self.id(), States::request)
    }

    /// The stored state of the request's session, which later requests share.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.session()?.inc_state("visits", 1).await?)
    /// });
    /// ```
    pub fn session(&self) -> Result<Container, FlowError> {
        let session = self.asker().session.as_deref().ok_or(FlowError::NoScope { scope: "session" })?;
        Ok(self.stored("session", session, States::session))
    }

    /// The stored state of the request's user.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.user()?.inc_state("visits", 1).await?)
    /// });
    /// ```
    pub fn user(&self) -> Result<Container, FlowError> {
        let user = self.asker().user.as_deref().ok_or(FlowError::NoScope { scope: "user" })?;
        Ok(self.stored("user", user, States::user))
    }

    /// The stored state of the request's organisation.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.org()?.inc_state("visits", 1).await?)
    /// });
    /// ```
    pub fn org(&self) -> Result<Container, FlowError> {
        let org = self.asker().org.as_deref().ok_or(FlowError::NoScope { scope: "organisation" })?;
        Ok(self.stored("org", org, States::org))
    }

    /// An effect that must not be repeated when the body runs again. It is a step of this run of the block, and is
    /// found by its key, wherever in the body it is called: once its result is recorded, every call with the key
    /// returns that. It is tried again if it fails, with the same idempotency key. Another round of a loop runs it
    /// again.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # async fn charge(cents: u64) -> std::io::Result<String> { Ok(String::new()) }
    /// let charges = handler("charges").run(async |ctx, cents: u64| {
    ///     ctx.run_once("charge", async || Ok(charge(cents).await?)).await
    /// });
    /// ```
    pub async fn run_once<F, Fut, T>(&self, key: &str, body: F) -> Result<T, Failure>
    where
        F: Fn() -> Fut + Send + Sync,
        Fut: Future<Output = Result<T, Failure>> + Send,
        T: Serialize + DeserializeOwned + Send,
    {
        let known = self.frame.effect(key);
        // A second call with the key waits for the first one.
        let mut known = known.lock().await;
        if let Some(known) = &*known {
            let value = known.clone()?;
            return T::deserialize(value).map_err(|error| Failure::misfit("the result of an effect", &error));
        }
        let result = self.frame.aside(&self.ctx, key, |ctx| async move { ctx.run(key, body).await }).await;
        *known = Some(match &result {
            Ok(value) => json::to_value(value).map_err(|error| Failure::no_json("the result of an effect", &error)),
            Err(failure) => Err(failure.clone()),
        });
        result
    }
}

/// The state of a running block, as code inside it sees it. Reads are immediate; changes are made one at a time, in the
/// order of the calls.
pub struct StateHandle<T> {
    cell: Option<Arc<StateCell>>,
    frame: Arc<Frame>,
    part: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for StateHandle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateHandle").field("of", &self.cell.as_ref().map(|cell| cell.name())).finish()
    }
}

impl<T> StateHandle<T> {
    /// True if there is such a state.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.target::<Total>("count").exists())
    /// });
    /// ```
    pub fn exists(&self) -> bool {
        self.cell.is_some()
    }

    /// The whole state as JSON; null if there is none.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     println!("{}", ctx.sequencer().value());
    ///     Ok(())
    /// });
    /// ```
    pub fn value(&self) -> Value {
        self.cell.as_ref().map(|cell| cell.read()).unwrap_or_default()
    }

    /// How often the state was changed. After an interruption it continues at the last checkpoint.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     println!("changed {} times", ctx.sequencer().rev());
    ///     Ok(())
    /// });
    /// ```
    pub fn rev(&self) -> u64 {
        self.cell.as_ref().map_or(0, |cell| cell.rev())
    }

    fn cell(&self) -> Result<&Arc<StateCell>, Failure> {
        self.cell.as_ref().ok_or_else(|| failed(BlockError::NoState { path: shown(&self.frame.path) }))
    }

    fn place(path: &str) -> Result<Option<JsonPath>, StateError> {
        let wrong = |cause| StateError::Path { path: path.into(), cause };
        if path.is_empty() { Ok(None) } else { JsonPath::parse(path).map(Some).map_err(wrong) }
    }

    fn json(&self, value: &(impl Serialize + ?Sized)) -> Result<Value, StateError> {
        let key = self.cell.as_ref().map(|cell| cell.name().to_string()).unwrap_or_default();
        json::to_value(value).map_err(|cause| StateError::Value { key, cause })
    }

    async fn apply(&self, operation: &'static str, ops: Vec<StateOp>) -> Result<Changed, Failure> {
        let (cell, request) = (self.cell()?, &self.frame.request);
        let (env, budget) = (request.run().env(), request.settings.mutation_timeout);
        let answer = cell.apply(env, budget, &self.frame.covered_by, operation, ops).await;
        Ok(self.told(answer.map_err(|error| self.refused(error))?))
    }

    fn refused(&self, error: StateError) -> Failure {
        let path = shown(&self.frame.path);
        match error {
            StateError::TooLarge { length: bytes, limit, .. } => {
                failed(BlockError::StateTooLarge { path, bytes, limit })
            }
            error => error.into(),
        }
    }

    /// Keeps what the stream tells of a change until the block's boundary.
    fn told(&self, (changed, told): CellAnswer) -> Changed {
        if let (Some(told), Some(cell)) = (told, &self.cell) {
            self.frame.tell_change(&cell.path, told);
        }
        changed
    }

    /// Merges into the state as a JSON merge patch does (RFC 7396): objects are merged, `null` removes.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().patch(json!({"total": value})).await
    /// });
    /// ```
    pub async fn patch(&self, patch: impl Serialize) -> Result<Changed, Failure> {
        let patch = self.json(&patch)?;
        if !patch.is_object() {
            let (key, place) = (self.cell()?.name().to_string(), "the patch".into());
            return Err(StateError::NotAnObject { key, place, found: "no object".into() }.into());
        }
        self.apply("patch_state", vec![StateOp::Patch(patch)]).await
    }

    /// Replaces the state.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().set(Total { total: value }).await
    /// });
    /// ```
    pub async fn set(&self, value: impl Serialize) -> Result<Changed, Failure> {
        let value = self.json(&value)?;
        self.apply("set_state", vec![StateOp::Set(value)]).await
    }

    /// Adds an element to the list at a path.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().push("seen", value).await
    /// });
    /// ```
    pub async fn push(&self, path: &str, value: impl Serialize) -> Result<Changed, Failure> {
        let op = StateOp::Push(Self::place(path)?, vec![self.json(&value)?]);
        self.apply("push_state", vec![op]).await
    }

    /// Adds to the numbers at several paths, to all or none of them.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().inc([("total", value), ("calls", 1)]).await
    /// });
    /// ```
    pub async fn inc<'a, N: Into<Number>>(
        &self,
        fields: impl IntoIterator<Item = (&'a str, N)>,
    ) -> Result<Changed, Failure> {
        let op = |(path, by): (&str, N)| Ok(StateOp::Increment(Self::place(path)?, by.into()));
        let ops: Result<Vec<StateOp>, StateError> = fields.into_iter().map(op).collect();
        self.apply("inc_state", ops?).await
    }

    /// Sets an entry of the record at a path.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().set_record("prices", "apple", value).await
    /// });
    /// ```
    pub async fn set_record(&self, path: &str, entry: &str, value: impl Serialize) -> Result<Changed, Failure> {
        let op = StateOp::SetRecord(Self::place(path)?, entry.into(), self.json(&value)?);
        self.apply("set_state_record", vec![op]).await
    }

    /// Removes an entry of the record at a path.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().delete_record("prices", "apple").await
    /// });
    /// ```
    pub async fn delete_record(&self, path: &str, entry: &str) -> Result<Changed, Failure> {
        self.apply("delete_state_record", vec![StateOp::DeleteRecord(Self::place(path)?, entry.into())]).await
    }
}

impl<T: DeserializeOwned> StateHandle<T> {
    /// The state, or the part of it that the type describes.
    ///
    /// # Panics
    ///
    /// If the block has declared another type, and the state does not fit this one. A panic in a body is a
    /// failure of the block.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     Ok(ctx.sequencer().state().total)
    /// });
    /// ```
    pub fn state(&self) -> T {
        read(&self.value())
    }

    /// Runs a mutator on the state, or on the part of it that the type describes, and stores its result. No other
    /// change comes between. Its own error leaves the state as it is.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use latchwork::json;
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let block = handler("block").needs::<Total>().tap(async |ctx, value: u64| {
    ///     ctx.sequencer().atomic(async |Total { total }| Ok(Total { total: total.max(value) })).await
    /// });
    /// ```
    pub async fn atomic<F, Fut>(&self, mutator: F) -> Result<Changed, Failure>
    where
        T: Serialize,
        F: FnOnce(T) -> Fut,
        Fut: Future<Output = Result<T, Failure>>,
    {
        let (cell, request) = (self.cell()?, &self.frame.request);
        let (env, budget) = (request.run().env(), request.settings.mutation_timeout);
        let whole = |before: Value| async move {
            let part = T::deserialize(&before).map_err(|error| Failure::misfit("the state", &error))?;
            let after = json::to_value(&mutator(part).await?).map_err(|error| Failure::no_json("the state", &error))?;
            Ok(match (before, after) {
                (Value::Object(mut fields), Value::Object(part)) => {
                    fields.extend(part);
                    Value::Object(fields)
                }
                (_, after) => after,
            })
        };
        Ok(self.told(cell.mutate(env, budget, &self.frame.covered_by, whole).await?))
    }
}

fn read<T: DeserializeOwned>(state: &Value) -> T {
    T::deserialize(state).expect("a state is checked against the types of its readers whenever it is written")
}

/// What a function between blocks sees: the state of its sequencer. It must only look: it may be called again.
pub struct Look<S> {
    cell: Option<Arc<StateCell>>,
    asker: Asker,
    state: PhantomData<fn() -> S>,
}

impl<S> Look<S> {
    pub(crate) fn of(frame: &Arc<Frame>) -> Look<S> {
        let cell = frame.own.clone().or_else(|| frame.enclosing().cloned());
        Look { cell, asker: frame.request.asker.clone(), state: PhantomData }
    }

    /// The whole state as JSON; an empty object if there is none.
    ///
    /// ```
    /// # use latchwork::flow::sequencer;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let sum = sequencer::<u64>("sum").state::<Total>();
    /// let sum = sum.map(|value, look| value + look.value()["total"].as_u64().unwrap_or(0)).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn value(&self) -> Value {
        self.cell.as_ref().map_or_else(|| Value::Object(Map::new()), |cell| cell.read())
    }

    /// Who the request is for.
    ///
    /// ```
    /// # use latchwork::flow::sequencer;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let sum = sequencer::<u64>("sum").state::<Total>();
    /// let sum = sum.map(|value, look| value + u64::from(look.asker().session.is_some())).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn asker(&self) -> &Asker {
        &self.asker
    }
}

impl<S: DeserializeOwned> Look<S> {
    /// The state of the sequencer.
    ///
    /// ```
    /// # use latchwork::flow::sequencer;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// let sum = sequencer::<u64>("sum").state::<Total>();
    /// let sum = sum.map(|value, look| value + look.state().total).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn state(&self) -> S {
        read(&self.value())
    }
}

shown!(Look<S>, it => of: it.cell.as_ref().map(|cell| cell.name()));
