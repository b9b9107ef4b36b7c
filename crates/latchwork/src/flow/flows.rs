//! Flows: named actions, each a block that requests are made to. A request is an execution of the engine. This file
//! builds flows, registers them, and is what callers hold of requests.

use std::any::Any;
use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::block::{Block, BlockNode, Data, check_name};
use crate::flow::checkpoint::Checkpoint;
use crate::flow::error::{FlowError, Result};
use crate::flow::frame::Frame;
#[cfg(feature = "testing")]
use crate::flow::request::FlowSabotage;
use crate::flow::request::{Asker, FlowRequest, Settings, shown};
use crate::flow::schema::{StatePart, merge};
use crate::flow::stream::{self, Events, FlowEvent};
use crate::flow::suspend::{self, AnswerKind, Suspension, Suspensions};
use crate::json;
use crate::record::Record;
use crate::store::Order;
use crate::workflow::{
    Ctx, Engine, EngineBuilder, ExecutionId, Failure, Handle, Queue, Workflow, WorkflowError, workflow,
};

/// The longest path of a block, in bytes of its key.
const PATH_BYTES: usize = 1280;

/// The input of a request's execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestInput<I> {
    /// The input of the action.
    pub input: I,
    /// Who the request is for.
    #[serde(default)]
    pub asker: Asker,
    /// Tells requests without a session apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alone: Option<String>,
}

impl<I> RequestInput<I> {
    /// The input of a request without a session.
    ///
    /// ```
    /// # use latchwork::flow::RequestInput;
    /// let input = RequestInput::new("hello".to_string());
    /// ```
    pub fn new(input: I) -> RequestInput<I> {
        RequestInput { input, asker: Asker::default(), alone: None }
    }
}

/// What happens to a request while another one of the same session and action has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Busy {
    /// It runs beside the other.
    #[default]
    Allow,
    /// It waits until the other has ended.
    Queue,
    /// It is rejected.
    Reject,
}

/// Starts the definition of a flow.
///
/// ```
/// # use latchwork::flow::{flow, handler};
/// let echo = handler("echo").run(async |_, text: String| Ok(text));
/// let echoes = flow("echoes").action("echo", echo).build()?;
/// # Ok::<(), latchwork::flow::FlowError>(())
/// ```
pub fn flow(kind: &str) -> FlowBuilder {
    let settings =
        Settings { mutation_timeout: Some(Duration::from_secs(30)), cleanup_checkpoints: false, sabotage: None };
    FlowBuilder { kind: kind.into(), settings, timeout: None, keep: None, actions: Vec::new() }
}

/// A flow that is not built yet.
#[must_use = "a flow does nothing until it is built and registered"]
pub struct FlowBuilder {
    kind: String,
    settings: Settings,
    timeout: Option<Duration>,
    keep: Option<Duration>,
    actions: Vec<FlowActionBuilder>,
}

/// Makes the workflow of an action, under this name.
type MakeAction = dyn FnOnce(&str, &FlowBuilder, Busy) -> FlowAction + Send;

struct FlowActionBuilder {
    name: String,
    node: Arc<BlockNode>,
    busy: Busy,
    make: Box<MakeAction>,
}

/// An action that can be registered. Its types are left behind.
struct FlowAction {
    busy: Busy,
    workflow: String,
    register: Box<dyn Fn(EngineBuilder) -> EngineBuilder + Send + Sync>,
    typed: Box<dyn Any + Send + Sync>,
}

impl FlowBuilder {
    /// Adds an action: a block that takes the input of a request.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn action<I: Data, O: Data>(mut self, name: &str, block: Block<I, O>) -> FlowBuilder {
        let node = block.node.clone();
        let make = Box::new(move |name: &str, flow: &FlowBuilder, busy| made(name, flow, block, busy));
        self.actions.push(FlowActionBuilder { name: name.into(), node, busy: Busy::default(), make });
        self
    }

    /// What happens to a request of the last action while its session has another one of that action.
    ///
    /// ```
    /// # use latchwork::flow::{Busy, flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).when_busy(Busy::Queue).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn when_busy(mut self, busy: Busy) -> FlowBuilder {
        self.actions.iter_mut().last().into_iter().for_each(|action| action.busy = busy);
        self
    }

    /// How long a change of a state may wait and run together: 30 s by default, `None` for no limit.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).mutation_timeout(std::time::Duration::from_secs(5)).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn mutation_timeout(mut self, timeout: impl Into<Option<Duration>>) -> FlowBuilder {
        self.settings.mutation_timeout = timeout.into();
        self
    }

    /// Removes the checkpoints of a request in the commit that ends it. Without this, the last ones are kept as long as
    /// the request is.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).cleanup_checkpoints_on_terminal().build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn cleanup_checkpoints_on_terminal(mut self) -> FlowBuilder {
        self.settings.cleanup_checkpoints = true;
        self
    }

    /// Breaks the flow on purpose, so that tests can show that they notice.
    ///
    /// ```
    /// # use latchwork::flow::{FlowSabotage, flow};
    /// let broken = flow("orders").sabotage(FlowSabotage::CheckpointLater);
    /// ```
    #[cfg(feature = "testing")]
    pub fn sabotage(mut self, sabotage: FlowSabotage) -> FlowBuilder {
        self.settings.sabotage = Some(sabotage);
        self
    }

    /// How long a request may take, from its start to its end.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).timeout(std::time::Duration::from_secs(3600)).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> FlowBuilder {
        self.timeout = Some(timeout);
        self
    }

    /// How long a request is kept after its end, with its stream, traces and checkpoints: seven days by default.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).keep(std::time::Duration::from_secs(3600)).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn keep(mut self, keep: Duration) -> FlowBuilder {
        self.keep = Some(keep);
        self
    }

    /// Builds the flow, and checks what the blocks of all actions have declared.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn build(mut self) -> Result<Flow> {
        check_name("a flow", &self.kind)?;
        let mut actions = BTreeMap::new();
        let nodes: Vec<Arc<BlockNode>> = self.actions.iter().map(|action| action.node.clone()).collect();
        for node in &nodes {
            node.wrong.clone().map_or(Ok(()), Err)?;
            check_name("a block", &node.name)?;
            if let Some((part, field)) = node.needs.first().and_then(|part| Some((part, part.fields.keys().next()?))) {
                return Err(FlowError::NoState { field: field.clone(), block: part.block.clone() });
            }
            check_depth(node, &node.name, 0)?;
            check_targets(node, &mut Vec::new())?;
        }
        for scope in ["session", "user", "org"] {
            let parts = nodes.iter().flat_map(|node| node.scopes.iter().filter(|(its, _)| *its == scope));
            let parts: Vec<StatePart> = parts.map(|(_, part)| part.clone()).collect();
            merge(scope, &parts)?;
        }
        for FlowActionBuilder { name, busy, make, .. } in std::mem::take(&mut self.actions) {
            check_name("an action", &name)?;
            let made = make(&format!("flow:{}/{name}", self.kind), &self, busy);
            if actions.insert(name.clone(), made).is_some() {
                return Err(FlowError::DuplicateAction { flow: self.kind, action: name });
            }
        }
        Ok(Flow { kind: self.kind.into(), actions: Arc::new(actions) })
    }
}

/// Makes the workflow of an action.
fn made<I: Data, O: Data>(name: &str, flow: &FlowBuilder, block: Block<I, O>, busy: Busy) -> FlowAction {
    let mut builder = workflow(name);
    if let Some(timeout) = flow.timeout {
        builder = builder.timeout(timeout);
    }
    if let Some(keep) = flow.keep {
        builder = builder.keep(keep);
    }
    let key = |input: &RequestInput<serde::de::IgnoredAny>| {
        input.asker.session.clone().or_else(|| input.alone.clone()).unwrap_or_default()
    };
    builder = match busy {
        Busy::Allow => builder,
        Busy::Queue => builder.concurrency_by(1, key).when_full(Queue::new()),
        Busy::Reject => builder.concurrency_by(1, key),
    };
    let (settings, action) = (flow.settings.clone(), name.trim_start_matches("flow:").to_string());
    let workflow: Workflow<RequestInput<I>, O> = builder.run(move |ctx, given: RequestInput<I>| {
        let (block, settings, action) = (block.clone(), settings.clone(), action.clone());
        async move { requested(ctx, given, block, settings, action).await }
    });
    let registered = workflow.clone();
    let register = Box::new(move |builder: EngineBuilder| builder.register(&registered));
    FlowAction { busy, workflow: name.into(), register, typed: Box::new(workflow) }
}

/// Runs a request.
async fn requested<I: Data, O: Data>(
    ctx: Ctx,
    given: RequestInput<I>,
    block: Block<I, O>,
    settings: Settings,
    action: String,
) -> Result<O, Failure> {
    let request = FlowRequest::load(ctx, given.asker, settings).await;
    if request.is_new() {
        request.tell(&FlowEvent::RequestStarted { action });
    }
    let frame = Frame::outermost(request, &block.node);
    frame.request.expect_fit().await;
    let result = block.run(&frame, given.input).await;
    frame.take_events().iter().for_each(|event| frame.request.tell(event));
    if let Some(failure) = result.as_ref().err().filter(|failure| !failure.is_cancelled()) {
        frame.request.tell(&FlowEvent::error(&frame.path, failure));
    }
    frame.request.end().await;
    result
}

/// Refuses blocks that are nested too deeply for the path of one to be stored.
fn check_depth(node: &BlockNode, path: &str, before: usize) -> Result<()> {
    // A block in a loop or of a list of items has its name twice in its path.
    let length = before + 2 * (8 + node.name.len().div_ceil(8) * 8);
    if length > PATH_BYTES {
        return Err(FlowError::TooDeep { block: path.into(), length, limit: PATH_BYTES });
    }
    node.children.iter().try_for_each(|child| check_depth(child, &format!("{path}/{}", child.name), length))
}

/// Checks that the states that blocks need of other blocks exist, are found by one name, and have the fields.
fn check_targets<'a>(node: &'a Arc<BlockNode>, around: &mut Vec<&'a Arc<BlockNode>>) -> Result<()> {
    for (target, part) in &node.targets {
        let (block, target) = (part.block.clone(), target.clone());
        // The blocks around this one, from the inside out, each with the block in it that leads here.
        let inner = around.iter().copied().skip(1).chain([node]);
        let mut levels: Vec<_> = around.iter().copied().zip(inner).collect();
        levels.reverse();
        let before = levels.into_iter().find_map(|(outer, inner)| {
            let earlier = outer.children.iter().take_while(|child| !Arc::ptr_eq(child, inner));
            earlier.filter(|child| *child.name == *target && child.shape.is_some()).last()
        });
        let ancestors: Vec<_> = around.iter().filter(|it| *it.name == *target && it.shape.is_some()).collect();
        let found = match (before, &ancestors[..]) {
            (Some(found), _) => found,
            (None, [one]) => one,
            (None, []) => return Err(FlowError::UnknownTarget { block, target }),
            (None, _) => return Err(FlowError::AmbiguousTarget { block, target }),
        };
        if let Some(shape) = &found.shape {
            let mut own = shape.own.clone();
            own.block = target.clone();
            if let Some(field) = part.fields.keys().find(|field| !own.fields.contains_key(*field)) {
                return Err(FlowError::MissingField { field: field.clone(), block, sequencer: target });
            }
            merge("target", &[own, part.clone()])?;
        }
    }
    around.push(node);
    let checked = node.children.iter().try_for_each(|child| check_targets(child, around));
    around.pop();
    checked
}

/// A flow: it is registered with an engine, and requests are made to its actions there. Cheap to clone.
#[derive(Clone)]
pub struct Flow {
    kind: Arc<str>,
    actions: Arc<BTreeMap<String, FlowAction>>,
}

shown!(Flow, it => kind: it.kind);
shown!(FlowBuilder, it => kind: it.kind);

impl Flow {
    /// Its name.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).build()?;
    /// assert_eq!(echoes.kind(), "echoes");
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn kind(&self) -> &str {
        &self.kind
    }

    fn action(&self, name: &str) -> Result<&FlowAction> {
        self.actions.get(name).ok_or_else(|| FlowError::UnknownAction {
            flow: self.kind.to_string(),
            action: name.into(),
            known: self.actions.keys().cloned().collect(),
        })
    }

    /// The workflow of an action, for tests that need one. `None` if there is no such action of these types.
    ///
    /// ```
    /// # use latchwork::flow::{flow, handler};
    /// let echo = handler("echo").run(async |_, text: String| Ok(text));
    /// let echoes = flow("echoes").action("echo", echo).build()?;
    /// assert!(echoes.workflow::<String, String>("echo").is_some());
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn workflow<I: Data, O: Data>(&self, action: &str) -> Option<Workflow<RequestInput<I>, O>> {
        self.actions.get(action)?.typed.downcast_ref::<Workflow<RequestInput<I>, O>>().cloned()
    }
}

impl EngineBuilder {
    /// Registers a flow, so that requests to its actions can run here.
    ///
    /// ```
    /// # use latchwork::flow::Flow;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(echoes: Flow) -> Result<()> {
    /// let engine = Engine::open("./data").flow(&echoes).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn flow(self, flow: &Flow) -> EngineBuilder {
        flow.actions.values().fold(self, |builder, action| (action.register)(builder))
    }
}

impl Engine {
    /// The requests of a flow. The flow must be registered with [`EngineBuilder::flow`].
    ///
    /// ```
    /// # use latchwork::flow::Flow;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(echoes: Flow) -> Result<()> {
    /// let engine = Engine::open("./data").flow(&echoes).start().await?;
    /// let flows = engine.flow(&echoes);
    /// # Ok(()) }
    /// ```
    pub fn flow(&self, flow: &Flow) -> Flows {
        Flows { engine: self.clone(), flow: flow.clone() }
    }
}

/// The requests of a flow on an engine.
#[derive(Clone, Debug)]
pub struct Flows {
    engine: Engine,
    flow: Flow,
}

impl Flows {
    /// Makes a request to an action. When the awaited call returns, the request is stored and survives any crash.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.run("echo", "hello").session("s-1").await?;
    /// let echo: String = request.result().await?;
    /// # Ok(()) }
    /// ```
    pub fn run(&self, action: &str, input: impl Serialize) -> RunRequest {
        let input = json::to_value(&input);
        let (flows, action) = (self.clone(), action.into());
        RunRequest { flows, action, input, asker: Asker::default(), id: None, key: None }
    }

    /// A request that was made before.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.request("request-7");
    /// # Ok(()) }
    /// ```
    pub fn request(&self, id: impl Into<ExecutionId>) -> RequestHandle {
        RequestHandle { engine: self.engine.clone(), handle: self.engine.handle_by_id(id) }
    }

    /// The open questions of the requests to an action: by reason, then the oldest first. Await it for a page of them.
    ///
    /// ```
    /// # use latchwork::flow::{Flows, Result};
    /// # async fn example(flows: Flows) -> Result<()> {
    /// for question in flows.suspensions("refund").await? {
    ///     println!("{}: {} {:?}", question.id, question.message, question.allow);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn suspensions(&self, action: &str) -> Suspensions {
        let action = self.flow.action(action);
        Suspensions::new(action.map(|action| self.engine.reviews().workflow(&action.workflow)))
    }

    /// A question, open or not.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let question = flows.suspension("0192f0c1-…/request-7").await?;
    /// println!("{}", question.message);
    /// # Ok(()) }
    /// ```
    pub async fn suspension(&self, id: &str) -> Result<Suspension> {
        suspend::find(&self.engine, id).await
    }

    /// Answers a question: with a value if it asks for one. One caller wins; the others get [`FlowError::Answered`]. An
    /// answer that does not fit leaves the question open.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// for question in flows.suspensions("refund").await? {
    ///     flows.answer(&question.id, AnswerKind::Submit, 25, "ada@example.org").await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn answer(&self, id: &str, kind: AnswerKind, value: impl Serialize, by: &str) -> Result<()> {
        let value = json::to_value(&value)
            .map_err(|cause| FlowError::BadAnswer { reason: cause.to_string(), value: Value::Null })?;
        suspend::answer(&self.engine, id, kind, value, by).await
    }
}

/// A request that is about to be made.
#[must_use = "nothing is requested until this is awaited"]
pub struct RunRequest {
    flows: Flows,
    action: String,
    input: std::result::Result<Value, json::JsonError>,
    asker: Asker,
    id: Option<ExecutionId>,
    key: Option<String>,
}

impl RunRequest {
    /// The session that the request belongs to.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.run("echo", "hello").session("session-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn session(mut self, id: impl Into<String>) -> RunRequest {
        self.asker.session = Some(id.into());
        self
    }

    /// The user.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.run("echo", "hello").user("user-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn user(mut self, id: impl Into<String>) -> RunRequest {
        self.asker.user = Some(id.into());
        self
    }

    /// The organisation.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.run("echo", "hello").org("org-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn org(mut self, id: impl Into<String>) -> RunRequest {
        self.asker.org = Some(id.into());
        self
    }

    /// The id of the request; without one, it is a new UUIDv7.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.run("echo", "hello").id("request-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: impl Into<ExecutionId>) -> RunRequest {
        self.id = Some(id.into());
        self
    }

    /// An idempotency key: all requests to the action under one key are one request.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let request = flows.run("echo", "hello").idempotency_key("order-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn idempotency_key(mut self, key: impl Into<String>) -> RunRequest {
        self.key = Some(key.into());
        self
    }

    async fn start(self) -> Result<RequestHandle> {
        let RunRequest { flows, action, input, asker, id, key } = self;
        let Flows { engine, flow } = flows;
        let FlowAction { busy, workflow, .. } = flow.action(&action)?;
        let input = input.map_err(|cause| WorkflowError::Input { workflow: workflow.clone(), cause })?;
        let is_limited = *busy != Busy::Allow && asker.session.is_none();
        // All requests under one key are one request, with one input.
        let alone = || key.as_ref().map_or_else(|| engine.store().env().uuid().to_string(), |key| format!("key:{key}"));
        let alone = is_limited.then(alone);
        let session = asker.session.clone();
        let mut start = engine.start_by_name(workflow, RequestInput { input, asker, alone });
        if let Some(session) = session {
            start = start.attribute("session", session);
        }
        if let Some(id) = id {
            start = start.id(id);
        }
        if let Some(key) = key {
            start = start.idempotency_key(key);
        }
        Ok(RequestHandle { handle: start.await?, engine })
    }
}

impl IntoFuture for RunRequest {
    type Output = Result<RequestHandle>;
    type IntoFuture = crate::workflow::Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.start())
    }
}

/// A request, as a caller sees it.
#[derive(Clone)]
pub struct RequestHandle {
    engine: Engine,
    handle: Handle<Value>,
}

shown!(RequestHandle, it => id: it.handle.id());

impl RequestHandle {
    /// Its id, which is that of its execution: everything that an operator does to executions can be done to it.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// println!("{}", request.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> &ExecutionId {
        self.handle.id()
    }

    /// Waits for the output.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let echo: String = request.result().await?;
    /// # Ok(()) }
    /// ```
    pub async fn result<O: DeserializeOwned>(&self) -> Result<O> {
        let output = self.handle.result().await?;
        serde_json::from_value(output).map_err(|error| {
            let failure = Failure::misfit("the output", &error);
            WorkflowError::Failed { id: self.id().clone(), failure }.into()
        })
    }

    /// The events of the request, from the first one on.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let mut events = request.events();
    /// while let Some(event) = events.next().await? {
    ///     println!("{} {:?}", event.number, event.event);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn events(&self) -> Events {
        self.events_from(0)
    }

    /// The events of the request after a number that was seen before.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let mut events = request.events_after(41);
    /// while let Some(event) = events.next().await? {
    ///     println!("{} {:?}", event.number, event.event);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn events_after(&self, number: u64) -> Events {
        self.events_from(number.saturating_add(1))
    }

    /// The number of the last event so far: of a request that has ended, that of its end. `None` if there is no event
    /// yet.
    ///
    /// ```
    /// # use latchwork::flow::{RequestHandle, Result};
    /// # async fn example(request: RequestHandle, seen: u64) -> Result<()> {
    /// let is_of_the_future = request.last_event().await?.is_none_or(|last| seen > last);
    /// # Ok(()) }
    /// ```
    pub async fn last_event(&self) -> Result<Option<u64>> {
        Ok(stream::last(&self.engine.inner, self.id()).await?)
    }

    fn events_from(&self, next: u64) -> Events {
        Events::new(self.engine.inner.clone(), self.id().clone(), next)
    }

    /// The open questions of this request.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// for question in request.suspensions().await? {
    ///     println!("{}", question.message);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn suspensions(&self) -> Result<Vec<Suspension>> {
        let open = self.engine.inner.stored().open_reviews(self.id()).await?;
        Ok(open.into_iter().filter_map(Suspension::of).collect())
    }

    /// The checkpoints of the request, by the paths of its blocks: the latest states without transient fields.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// for (block, state) in request.checkpoints().await? {
    ///     println!("{block}: {state}");
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn checkpoints(&self) -> Result<BTreeMap<String, Value>> {
        let (engine, id) = (&self.engine.inner, self.id());
        let (view, kept) = (engine.store.view().await.map_err(WorkflowError::from)?, engine.kept(id));
        let found = view.scan(&kept.checkpoints(), Order::Ascending, usize::MAX).await.map_err(WorkflowError::from)?;
        let damaged = || WorkflowError::corrupt(format!("a checkpoint of execution {id:?}"));
        let mut checkpoints = BTreeMap::new();
        for (key, item) in found {
            let path = kept.read_checkpoint(&key).ok_or_else(damaged)?;
            let place = || format!("checkpoint {path} of execution {id:?}");
            let checkpoint = Checkpoint::decode(&item.value).map_err(|why| WorkflowError::from(why.at(place())))?;
            checkpoints.insert(shown(&path), checkpoint.state);
        }
        Ok(checkpoints)
    }
}
