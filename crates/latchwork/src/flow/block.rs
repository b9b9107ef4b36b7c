//! Blocks: what a flow is made of. A handler is a block with a body; sequencers and routers are made of blocks. This
//! file defines them and how each is done once; it does not know the verbs that join them.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::flow::ctx::{BlockCtx, Look};
use crate::flow::error::{BlockError, FlowError, Result, failed};
use crate::flow::frame::Frame;
use crate::flow::request::{FlowSabotage, FoundTrace, gave, shown};
use crate::flow::schema::{Shape, StatePart};
use crate::workflow::journal::place::BranchPath;
use crate::workflow::stored::record::{EntryState, Kind};
use crate::workflow::{Boxed, Failure};

/// The longest name of a block, in bytes.
const NAME_BYTES: usize = 128;

/// A value that passes from block to block: it can be written as JSON and read again.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a value that can pass from block to block",
    note = "a block without output is used in `tap` or `work`, not in `step`",
    note = "other types need `serde::Serialize` and `serde::Deserialize`"
)]
pub trait Data: Serialize + DeserializeOwned + Send + Sync + 'static {}

impl<T: Serialize + DeserializeOwned + Send + Sync + 'static> Data for T {}

/// The output of a block that has none. Such a block is used in `tap` or `work`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoOutput(());

/// What is known of a block before it runs.
pub(crate) struct BlockNode {
    pub(crate) name: Arc<str>,
    pub(crate) kind: Kind,
    /// The state that it declares.
    pub(crate) shape: Option<Arc<Shape>>,
    pub(crate) is_durable: bool,
    /// What it needs of a sequencer around it, of the session, the user and the organisation; and of the states of
    /// other blocks, by their names.
    pub(crate) needs: Vec<StatePart>,
    pub(crate) scopes: Vec<(&'static str, StatePart)>,
    pub(crate) targets: Vec<(String, StatePart)>,
    pub(crate) children: Vec<Arc<BlockNode>>,
    /// Why it cannot be built.
    pub(crate) wrong: Option<FlowError>,
}

impl BlockNode {
    pub(crate) fn new(name: &str, kind: Kind) -> BlockNode {
        BlockNode {
            name: name.into(),
            kind,
            shape: None,
            is_durable: true,
            needs: Vec::new(),
            scopes: Vec::new(),
            targets: Vec::new(),
            children: Vec::new(),
            wrong: None,
        }
    }

    /// Takes over what the blocks inside declare, except for what its own state serves.
    pub(crate) fn adopt(&mut self, children: Vec<Arc<BlockNode>>) -> Result<()> {
        for child in &children {
            child.wrong.clone().map_or(Ok(()), Err)?;
            check_name("a block", &child.name)?;
        }
        let needs = children.iter().flat_map(|child| child.needs.iter());
        let needs: Vec<StatePart> = needs.map(|part| part.clone().within(&self.name)).collect();
        let scopes = children.iter().flat_map(|child| child.scopes.iter());
        self.scopes.extend(scopes.map(|(scope, part)| (*scope, part.clone().within(&self.name))));
        crate::flow::schema::merge("sequencer", &needs)?;
        match self.shape.take().map(Arc::try_unwrap) {
            Some(Ok(mut shape)) if self.kind == Kind::Sequencer => {
                shape.serve(needs)?;
                self.shape = Some(Arc::new(shape));
            }
            shape => {
                self.shape = shape.map(|shape| shape.map_or_else(|shared| shared, Arc::new));
                self.needs.extend(needs);
            }
        }
        self.children = children;
        Ok(())
    }
}

/// Refuses a name that is empty or too long, or that could be the label of a function between blocks, such as `a>map`
/// and `a?`.
pub(crate) fn check_name(what: &'static str, name: &str) -> Result<()> {
    let is_label = name.contains('>') || name.ends_with('?');
    match name.len() {
        1..=NAME_BYTES if !is_label => Ok(()),
        _ => Err(FlowError::Name { what, name: name.into() }),
    }
}

/// Does a block once.
pub(crate) type Perform<I, O> = dyn Fn(Arc<Frame>, I) -> Boxed<'static, Result<O, Failure>> + Send + Sync;

/// A block of a flow: it takes an `I` and gives an `O`. Cheap to clone.
pub struct Block<I, O> {
    pub(crate) node: Arc<BlockNode>,
    pub(crate) perform: Arc<Perform<I, O>>,
    pub(crate) format: Format<O>,
}

/// How an output is recorded.
pub(crate) struct Format<O> {
    pub(crate) write: fn(&O) -> std::result::Result<Value, crate::json::JsonError>,
    pub(crate) read: fn(&str) -> serde_json::Result<O>,
}

impl<O> Clone for Format<O> {
    fn clone(&self) -> Format<O> {
        *self
    }
}

impl<O> Copy for Format<O> {}

impl<O: Data> Format<O> {
    pub(crate) fn json() -> Format<O> {
        Format { write: |value| crate::json::to_value(value), read: |text| serde_json::from_str(text) }
    }
}

impl Format<NoOutput> {
    fn none() -> Format<NoOutput> {
        Format { write: |_| Ok(Value::Null), read: |_| Ok(NoOutput(())) }
    }
}

impl<I, O> Clone for Block<I, O> {
    fn clone(&self) -> Block<I, O> {
        Block { node: self.node.clone(), perform: self.perform.clone(), format: self.format }
    }
}

shown!(Block<I, O>, it => name: it.node.name);

/// A block that was looked up in the journal.
pub(crate) enum BlockBegun<O> {
    /// It has ended before.
    Over(Result<O, Failure>),
    /// It runs, for the first time or once more.
    Runs(Arc<Frame>),
}

impl<I: Send + 'static, O: Send + 'static> Block<I, O> {
    /// Its name.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// let greet = handler("greet").run(async |_, name: String| Ok(format!("hello {name}")));
    /// assert_eq!(greet.name(), "greet");
    /// ```
    pub fn name(&self) -> &str {
        &self.node.name
    }

    /// The same block under another name: for a second use in one sequencer.
    ///
    /// ```
    /// # use latchwork::flow::{handler, sequencer};
    /// let double = handler("double").run(async |_, value: u64| Ok(value * 2));
    /// let four_times = sequencer::<u64>("four-times").step(&double).step(&double.named("again")).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn named(&self, name: &str) -> Block<I, O> {
        let BlockNode { kind, shape, is_durable, needs, scopes, targets, children, wrong, .. } = &*self.node;
        let node = BlockNode {
            name: name.into(),
            kind: *kind,
            shape: shape.clone(),
            is_durable: *is_durable,
            needs: needs.clone(),
            scopes: scopes.clone(),
            targets: targets.clone(),
            children: children.clone(),
            wrong: wrong.clone(),
        };
        Block { node: Arc::new(node), ..self.clone() }
    }

    /// Does the block at its path in a sequencer, or takes its output from its trace.
    pub(crate) async fn perform(&self, around: &Arc<Frame>, nth: u32, input: I) -> Result<O, Failure> {
        let path = match around.request.breaks(FlowSabotage::TraceByPosition) {
            true => around.path.named(&around.position(), 0),
            false => around.path.named(&self.node.name, nth),
        };
        self.perform_at(around, path, input).await
    }

    pub(crate) async fn perform_at(&self, around: &Arc<Frame>, path: BranchPath, input: I) -> Result<O, Failure> {
        let frame = match self.begin(around, path).await {
            BlockBegun::Over(result) => return result,
            BlockBegun::Runs(frame) => frame,
        };
        let result = self.run(&frame, input).await;
        if !frame.has_trace {
            return result;
        }
        frame.request.room().await;
        let (result, state) = self.recorded(&frame, result);
        frame.ends(&frame.path, self.node.kind, state, None);
        result
    }

    /// Looks the block up, and records that it has begun.
    pub(crate) async fn begin(&self, around: &Arc<Frame>, path: BranchPath) -> BlockBegun<O> {
        let (BlockNode { kind, name, .. }, request) = (&*self.node, &around.request);
        let frame = around.child(&self.node, path);
        request.expect_fit().await;
        if !frame.has_trace {
            return BlockBegun::Runs(frame);
        }
        match request.found(&frame.path, *kind, name).await {
            FoundTrace::Done(text) => match (self.format.read)(&text) {
                Ok(output) => BlockBegun::Over(Ok(output)),
                Err(error) => request.misfit(&frame.path, &error).await,
            },
            FoundTrace::Gave(failure) => BlockBegun::Over(Err(failure)),
            FoundTrace::Begun(_) => {
                frame.runs();
                BlockBegun::Runs(frame)
            }
            FoundTrace::Nothing => {
                request.run().effect().await;
                request.room().await;
                frame.begins();
                frame.runs();
                BlockBegun::Runs(frame)
            }
        }
    }

    /// Runs the block. A failure has its path, unless it has the name of a step.
    pub(crate) async fn run(&self, frame: &Arc<Frame>, input: I) -> Result<O, Failure> {
        let result = (self.perform)(frame.clone(), input).await;
        result.map_err(|failure| match failure.is_cancelled() {
            true => failure,
            false => failure.in_step(&shown(&frame.path)),
        })
    }

    /// The result as it is recorded. An output that cannot be stored is a failure.
    pub(crate) fn recorded(&self, frame: &Frame, result: Result<O, Failure>) -> (Result<O, Failure>, EntryState) {
        let run = frame.request.run();
        let written = result.and_then(|output| {
            let value = (self.format.write)(&output).map_err(|error| Failure::no_json("the output", &error))?;
            let text = value.to_string();
            run.fits("the output", text.len())?;
            Ok((output, text))
        });
        match written {
            Ok((output, text)) => (Ok(output), EntryState::Done(text)),
            Err(failure) => {
                let state = gave(&failure);
                (Err(failure), state)
            }
        }
    }
}

/// Starts the definition of a handler: a block with a body.
///
/// ```
/// # use latchwork::flow::handler;
/// let double = handler("double").run(async |_, value: u64| Ok(value * 2));
/// ```
pub fn handler(name: &str) -> HandlerBuilder<Value> {
    HandlerBuilder { node: Ok(BlockNode::new(name, Kind::Handler)), needs: PhantomData }
}

/// A handler that has no body yet. `P` is the part of the sequencer's state that it needs.
#[must_use = "a handler needs a body to run"]
pub struct HandlerBuilder<P> {
    node: Result<BlockNode>,
    needs: PhantomData<fn() -> P>,
}

impl<P> HandlerBuilder<P> {
    fn add(mut self, add: impl FnOnce(&mut BlockNode) -> Result<()>) -> HandlerBuilder<P> {
        self.node = self.node.and_then(|mut node| add(&mut node).map(|()| node));
        self
    }

    /// The part of the state of the sequencer around it that the handler needs. It is compared with the sequencer's
    /// state when that is built.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Total {
    ///     total: u64,
    /// }
    /// let count = handler("count").needs::<Total>();
    /// let count = count.tap(async |ctx, by: u64| ctx.sequencer().inc([("total", by)]).await);
    /// ```
    pub fn needs<N: JsonSchema + DeserializeOwned>(self) -> HandlerBuilder<N> {
        let node = self.node.and_then(|mut node| {
            node.needs.push(StatePart::of::<N>(&node.name)?);
            Ok(node)
        });
        HandlerBuilder { node, needs: PhantomData }
    }

    /// The part of another block's state that it needs: of a block before it, or else around it.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Total {
    ///     total: u64,
    /// }
    /// let report = handler("report").needs_target::<Total>("count").run(async |ctx, _: u64| {
    ///     Ok(ctx.target::<Total>("count").state().total)
    /// });
    /// ```
    pub fn needs_target<N: JsonSchema + DeserializeOwned>(self, target: &str) -> HandlerBuilder<P> {
        self.add(|node| {
            let part = StatePart::of::<N>(&node.name)?;
            node.targets.push((target.into(), part));
            Ok(())
        })
    }

    /// The part of the session's state that it needs.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Total {
    ///     total: u64,
    /// }
    /// let visit = handler("visit").needs_session::<Total>().tap(async |ctx, _: u64| {
    ///     Ok(ctx.session()?.inc_state("total", 1).await?)
    /// });
    /// ```
    pub fn needs_session<N: JsonSchema + DeserializeOwned>(self) -> HandlerBuilder<P> {
        self.scope::<N>("session")
    }

    /// The part of the user's state that it needs.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Total {
    ///     total: u64,
    /// }
    /// let visit = handler("visit").needs_user::<Total>().tap(async |ctx, _: u64| {
    ///     Ok(ctx.user()?.inc_state("total", 1).await?)
    /// });
    /// ```
    pub fn needs_user<N: JsonSchema + DeserializeOwned>(self) -> HandlerBuilder<P> {
        self.scope::<N>("user")
    }

    /// The part of the organisation's state that it needs.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, JsonSchema)]
    /// struct Total {
    ///     total: u64,
    /// }
    /// let visit = handler("visit").needs_org::<Total>().tap(async |ctx, _: u64| {
    ///     Ok(ctx.org()?.inc_state("total", 1).await?)
    /// });
    /// ```
    pub fn needs_org<N: JsonSchema + DeserializeOwned>(self) -> HandlerBuilder<P> {
        self.scope::<N>("org")
    }

    fn scope<N: JsonSchema + DeserializeOwned>(self, scope: &'static str) -> HandlerBuilder<P> {
        self.add(|node| {
            let part = StatePart::of::<N>(&node.name)?;
            node.scopes.push((scope, part));
            Ok(())
        })
    }

    /// A state of its own, new each time the block runs: `ctx.own()`.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// # use schemars::JsonSchema;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Default, Serialize, Deserialize, JsonSchema)]
    /// struct Total {
    ///     total: u64,
    /// }
    /// let count = handler("count").state::<Total>().run(async |ctx, by: u64| {
    ///     ctx.own::<Total>().inc([("total", by)]).await?;
    ///     Ok(ctx.own::<Total>().state().total)
    /// });
    /// ```
    pub fn state<S>(self) -> HandlerBuilder<P>
    where
        S: Default + Serialize + DeserializeOwned + JsonSchema,
    {
        self.add(|node| {
            node.shape = Some(Arc::new(Shape::of::<S>(&node.name)?));
            Ok(())
        })
    }

    fn block<I, O>(self, perform: Arc<Perform<I, O>>, format: Format<O>) -> Block<I, O> {
        let node = self.node.unwrap_or_else(BlockNode::wrong);
        Block { node: Arc::new(node), perform, format }
    }

    /// A handler with an output. Its body may run again after a crash until its trace is recorded: what it must not do
    /// twice belongs in an operation of its context, such as `ctx.run` or `ctx.run_once`.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// let double = handler("double").run(async |ctx, value: u64| ctx.run("double", async || Ok(value * 2)).await);
    /// ```
    pub fn run<F, Fut, I, O>(self, body: F) -> Block<I, O>
    where
        F: Fn(BlockCtx<P>, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, Failure>> + Send + 'static,
        I: Data,
        O: Data,
        P: 'static,
    {
        let body = Arc::new(body);
        let perform = move |frame: Arc<Frame>, input: I| -> Boxed<'static, Result<O, Failure>> {
            let body = body.clone();
            Box::pin(async move { frame.handle(|ctx| body(ctx, input)).await })
        };
        self.block(Arc::new(perform), Format::json())
    }

    /// A handler without an output, for `tap` and `work`. What its body returns is dropped.
    ///
    /// ```
    /// # use latchwork::flow::handler;
    /// let pause = handler("pause").tap(async |ctx, _: u64| ctx.sleep(std::time::Duration::from_secs(60)).await);
    /// ```
    pub fn tap<F, Fut, I, T>(self, body: F) -> Block<I, NoOutput>
    where
        F: Fn(BlockCtx<P>, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, Failure>> + Send + 'static,
        I: Data,
        T: Send + 'static,
        P: 'static,
    {
        let body = Arc::new(body);
        let perform = move |frame: Arc<Frame>, input: I| -> Boxed<'static, Result<NoOutput, Failure>> {
            let body = body.clone();
            Box::pin(async move { frame.handle(|ctx| body(ctx, input)).await.map(|_| NoOutput(())) })
        };
        self.block(Arc::new(perform), Format::none())
    }
}

impl BlockNode {
    /// A block that cannot be built. The flow that uses it cannot be built either.
    pub(crate) fn wrong(error: FlowError) -> BlockNode {
        let mut node = BlockNode::new("", Kind::Handler);
        node.wrong = Some(error);
        node
    }
}

/// A router: a block that chooses one of several blocks by its input, by name.
///
/// ```
/// # use latchwork::flow::{handler, router};
/// let small = handler("small").run(async |_, price: u64| Ok(price));
/// let large = handler("large").run(async |_, price: u64| Ok(price - price / 10));
/// let choose = |price: &u64, _: &_| if *price < 100 { "small".to_string() } else { "large".to_string() };
/// let discount = router("discount", choose, &[&small, &large])?;
/// # Ok::<(), latchwork::flow::FlowError>(())
/// ```
pub fn router<I, O, F>(name: &str, choose: F, blocks: &[&Block<I, O>]) -> Result<Block<I, O>>
where
    F: Fn(&I, &Look<()>) -> String + Send + Sync + 'static,
    I: Data,
    O: Data,
{
    check_name("a router", name)?;
    if blocks.is_empty() {
        return Err(FlowError::NoBlocks { sequencer: name.into(), verb: "router" });
    }
    let mut node = BlockNode::new(name, Kind::Router);
    node.adopt(blocks.iter().map(|block| block.node.clone()).collect())?;
    let blocks: Arc<[Block<I, O>]> = blocks.iter().map(|block| (*block).clone()).collect();
    let choose = Arc::new(choose);
    let perform = move |frame: Arc<Frame>, input: I| -> Boxed<'static, Result<O, Failure>> {
        let (blocks, choose) = (blocks.clone(), choose.clone());
        Box::pin(async move {
            let chosen: String = frame.choose("choice", 0, || choose(&input, &Look::of(&frame))).await?;
            let block = blocks.iter().find(|block| *block.node.name == *chosen);
            match block {
                Some(block) => block.perform(&frame, 0, input).await,
                None => Err(failed(BlockError::NoSuchBlock { path: shown(&frame.path), chosen })),
            }
        })
    };
    Ok(Block { node: Arc::new(node), perform: Arc::new(perform), format: Format::json() })
}
