//! Sequencers: chains of blocks, built verb by verb. The compiler checks the type of the value from verb to verb. This
//! file builds; the verbs that run several blocks or repeat one are beside it, and `chain.rs` runs what was built.

use std::any::TypeId;
use std::marker::PhantomData;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::flow::block::{Block, BlockNode, Data, Format, check_name};
use crate::flow::chain::{AnyValue, Chain, Flowing, Rescue, Stage, StageInput, take};
use crate::flow::ctx::Look;
use crate::flow::error::{BlockError, FlowError, Result, failed};
use crate::flow::frame::Frame;
use crate::flow::request::shown;
use crate::flow::schema::Shape;
use crate::flow::stream::FlowEvent;
use crate::flow::work::drive;
use crate::workflow::stored::record::Kind;
use crate::workflow::{Boxed, Failure};

/// How often a loop may go round by default.
const MOST_ROUNDS: u32 = 100_000;

/// Starts a sequencer. Its input has the type that the first verb takes.
///
/// ```
/// # use latchwork::flow::{handler, otherwise, sequencer, when};
/// # use latchwork::workflow::Failure;
/// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
/// # struct Total { total: u64 }
/// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
/// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
/// let chain = sequencer::<u64>("chain").step(&a).step(&b).build()?;
/// # Ok::<(), latchwork::flow::FlowError>(())
/// ```
pub fn sequencer<I: Data>(name: &str) -> SequencerBuilder<(), I, I> {
    SequencerBuilder {
        name: name.into(),
        shape: Ok(None),
        is_durable: true,
        most_rounds: MOST_ROUNDS,
        stages: Vec::new(),
        rescues: Vec::new(),
        children: Vec::new(),
        outputs: Vec::new(),
        wrong: None,
        labels: 0,
        types: PhantomData,
    }
}

/// A sequencer that is not built yet: its state is an `S`, it takes an `I`, and has a `V` so far.
#[must_use = "a sequencer does nothing until it is built and used"]
pub struct SequencerBuilder<S, I, V> {
    pub(super) name: String,
    shape: Result<Option<Shape>>,
    is_durable: bool,
    pub(super) most_rounds: u32,
    pub(super) stages: Vec<Stage>,
    rescues: Vec<Rescue>,
    children: Vec<Arc<BlockNode>>,
    /// The types of values that become the output before the end of the chain.
    outputs: Vec<(&'static str, TypeId, &'static str)>,
    pub(super) wrong: Option<FlowError>,
    /// How many functions have followed the last block.
    labels: u32,
    types: PhantomData<fn(S, I) -> V>,
}

impl<S, I: Data, V: Data> SequencerBuilder<S, I, V> {
    fn with<T, W>(self) -> SequencerBuilder<T, I, W> {
        let SequencerBuilder {
            name,
            shape,
            is_durable,
            most_rounds,
            stages,
            rescues,
            children,
            outputs,
            wrong,
            labels,
            ..
        } = self;
        SequencerBuilder {
            name,
            shape,
            is_durable,
            most_rounds,
            stages,
            rescues,
            children,
            outputs,
            wrong,
            labels,
            types: PhantomData,
        }
    }

    /// Declares the sequencer's state. Each run of the sequencer has its own, which starts with the defaults.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").state::<Total>().map(|value, look| value + look.state().total).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn state<T>(mut self) -> SequencerBuilder<T, I, V>
    where
        T: Default + Serialize + DeserializeOwned + JsonSchema,
    {
        self.shape = Shape::of::<T>(&self.name).map(Some);
        self.with()
    }

    /// Records nothing of the blocks in this sequencer, and makes no checkpoints: it is recorded as one block. After an
    /// interruption it starts again from its beginning.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").ephemeral().step(&a).step(&b).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn ephemeral(mut self) -> Self {
        self.is_durable = false;
        self
    }

    /// How often the loops of this sequencer may go round: 100,000 by default.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").most_rounds(10).do_while(|value, _| *value < 10, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn most_rounds(mut self, rounds: u32) -> Self {
        self.most_rounds = rounds;
        self
    }

    /// The next verb uses these blocks.
    pub(super) fn uses<'a>(mut self, nodes: impl IntoIterator<Item = &'a Arc<BlockNode>>) -> Self {
        self.children.extend(nodes.into_iter().cloned());
        self.labels = 0;
        self
    }

    /// The label of a function that has no name: its verb, after the name of the block before it.
    pub(super) fn label(&mut self, verb: &str) -> Arc<str> {
        self.labels += 1;
        let before = self.children.last().map(|node| node.name.to_string()).unwrap_or_default();
        let count = if self.labels == 1 { String::new() } else { self.labels.to_string() };
        format!("{before}>{verb}{count}").into()
    }

    pub(super) fn fails(mut self, error: FlowError) -> Self {
        self.wrong.get_or_insert(error);
        self
    }

    /// Adds a stage that gives the next value.
    pub(super) fn then<W: Data>(
        self,
        names: Vec<Arc<str>>,
        run: impl Fn(Arc<Frame>, V, u32) -> Boxed<'static, Result<W, Failure>> + Send + Sync + 'static,
    ) -> SequencerBuilder<S, I, W> {
        let run = Arc::new(run);
        self.flows(names, move |frame, value, nth| {
            let run = run.clone();
            Box::pin(async move { Ok(Flowing::Next(Box::new(run(frame, value, nth).await?))) })
        })
        .with()
    }

    /// Adds a stage that decides how the chain goes on.
    pub(super) fn flows(
        mut self,
        names: Vec<Arc<str>>,
        run: impl Fn(Arc<Frame>, V, u32) -> Boxed<'static, Result<Flowing, Failure>> + Send + Sync + 'static,
    ) -> Self {
        let run = move |StageInput { frame, value, nth }: StageInput| match take::<V>(&frame, value) {
            Ok(value) => run(frame, value, nth),
            Err(failure) => Box::pin(std::future::ready(Err(failure))),
        };
        self.stages.push(Stage { run: Arc::new(run), names, back: None });
        self
    }

    /// Does a block: its output is the next value.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").step(&a).step(&b).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn step<O: Data>(self, block: &Block<V, O>) -> SequencerBuilder<S, I, O> {
        let (block, names) = (block.clone(), vec![block.node.name.clone()]);
        self.uses([&block.node]).then(names, move |frame, value, nth| {
            let block = block.clone();
            Box::pin(async move { block.perform(&frame, nth, value).await })
        })
    }

    /// Does a block with what a function makes of the value.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").map(|value, _| value.to_string());
    /// let chain = chain.step_with(|text, _| text.len() as u64, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn step_with<J, O, F>(self, connect: F, block: &Block<J, O>) -> SequencerBuilder<S, I, O>
    where
        J: Data,
        O: Data,
        F: Fn(V, &Look<S>) -> J + Send + Sync + 'static,
        S: 'static,
    {
        self.map(connect).step(block)
    }

    /// Does a block if a condition holds. Otherwise the value stays.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").step_if(|value, _| *value > 5, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn step_if<F>(self, condition: F, block: &Block<V, V>) -> Self
    where
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        let (block, label) = (block.clone(), asked(&block.node.name));
        let (names, condition) = (vec![block.node.name.clone(), label.clone()], Arc::new(condition));
        self.uses([&block.node]).then(names, move |frame, value, nth| {
            let (block, label, condition) = (block.clone(), label.clone(), condition.clone());
            Box::pin(async move {
                let holds = frame.choose(&label, nth, || condition(&value, &Look::of(&frame))).await?;
                if holds { block.perform(&frame, nth, value).await } else { Ok(value) }
            })
        })
    }

    /// Makes another value of the value. The function is called once for a request, and its result is recorded with the
    /// next commit.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").map(|value, _| value.to_string()).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn map<W, F>(mut self, map: F) -> SequencerBuilder<S, I, W>
    where
        W: Data,
        F: Fn(V, &Look<S>) -> W + Send + Sync + 'static,
        S: 'static,
    {
        let (label, map) = (self.label("map"), Arc::new(map));
        self.then(vec![label.clone()], move |frame, value, nth| {
            let (label, map) = (label.clone(), map.clone());
            Box::pin(async move { frame.choose(&label, nth, || map(value, &Look::of(&frame))).await })
        })
    }

    /// Does a block beside the chain of values: its output is dropped, the value stays. If the block fails, the
    /// sequencer does.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").tap(&a).step(&b).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn tap<O: Send + 'static>(self, block: &Block<V, O>) -> Self
    where
        V: Clone,
    {
        let (block, names) = (block.clone(), vec![block.node.name.clone()]);
        self.uses([&block.node]).then(names, move |frame, value: V, nth| {
            let block = block.clone();
            Box::pin(async move { block.perform(&frame, nth, value.clone()).await.map(|_| value) })
        })
    }

    /// Like [`SequencerBuilder::tap`], if a condition holds.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").tap_if(|value, _| *value > 5, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn tap_if<O, F>(self, condition: F, block: &Block<V, O>) -> Self
    where
        O: Send + 'static,
        V: Clone,
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        let (block, label) = (block.clone(), asked(&block.node.name));
        let (names, condition) = (vec![block.node.name.clone(), label.clone()], Arc::new(condition));
        self.uses([&block.node]).then(names, move |frame, value: V, nth| {
            let (block, label, condition) = (block.clone(), label.clone(), condition.clone());
            Box::pin(async move {
                if frame.choose(&label, nth, || condition(&value, &Look::of(&frame))).await? {
                    block.perform(&frame, nth, value.clone()).await?;
                }
                Ok(value)
            })
        })
    }

    /// Ends the sequencer here if a condition holds: the value is its output. The type of the value must be that of the
    /// sequencer's output, which is checked when it is built.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").exit_if(|value, _| *value > 5).step(&a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn exit_if<F>(mut self, condition: F) -> Self
    where
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        self.outputs.push(("exit_if", TypeId::of::<V>(), std::any::type_name::<V>()));
        let (label, condition) = (self.label("exit_if"), Arc::new(condition));
        self.flows(vec![label.clone()], move |frame, value, nth| {
            let (label, condition) = (label.clone(), condition.clone());
            Box::pin(async move {
                let holds = frame.choose(&label, nth, || condition(&value, &Look::of(&frame))).await?;
                let value: AnyValue = Box::new(value);
                Ok(if holds { Flowing::Exit(value) } else { Flowing::Next(value) })
            })
        })
    }

    /// Fails if the function returns a failure.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain");
    /// let chain = chain.throw_if(|value, _| (*value > 5).then(|| Failure::new("too many"))).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn throw_if<F>(mut self, fails: F) -> Self
    where
        F: Fn(&V, &Look<S>) -> Option<Failure> + Send + Sync + 'static,
        S: 'static,
    {
        let (label, fails) = (self.label("throw_if"), Arc::new(fails));
        self.then(vec![label.clone()], move |frame, value, nth| {
            let (label, fails) = (label.clone(), fails.clone());
            Box::pin(async move {
                match frame.choose(&label, nth, || fails(&value, &Look::of(&frame))).await? {
                    Some(failure) => Err(failure),
                    None => Ok(value),
                }
            })
        })
    }

    /// Does the block of the first case that matches. Without a match, the sequencer fails with
    /// [`BlockError::NoMatch`].
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").branch(vec![when(|value, _| *value > 5, &a), otherwise(&b)]).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn branch<O: Data>(mut self, cases: Vec<Case<S, V, O>>) -> SequencerBuilder<S, I, O>
    where
        S: 'static,
    {
        let Some(first) = cases.first() else {
            let sequencer = self.name.clone();
            return self.fails(FlowError::NoBlocks { sequencer, verb: "branch" }).with();
        };
        let label: Arc<str> = format!("branch>{}", first.block.node.name).into();
        let mut names: Vec<Arc<str>> = cases.iter().map(|case| case.block.node.name.clone()).collect();
        names.push(label.clone());
        self = self.uses(cases.iter().map(|case| &case.block.node));
        let cases: Arc<[Case<S, V, O>]> = cases.into();
        self.then(names, move |frame, value, nth| {
            let (label, cases) = (label.clone(), cases.clone());
            Box::pin(async move {
                let look = Look::of(&frame);
                let first = || cases.iter().find(|case| (case.matches)(&value, &look));
                let choose = || first().map(|case| case.block.node.name.to_string());
                let chosen: Option<String> = frame.choose(&label, nth, choose).await?;
                // The block that was chosen may not exist any more. That no case matched stays as it is.
                let case =
                    chosen.and_then(|name| cases.iter().find(|case| *case.block.node.name == *name).or_else(first));
                match case {
                    Some(case) => case.block.perform(&frame, nth, value).await,
                    None => Err(failed(BlockError::NoMatch { path: shown(&frame.path.named(&label, nth)) })),
                }
            })
        })
    }

    /// Takes over if the chain fails with a failure that matches: the output of the block is that of the sequencer. A
    /// cancellation is not rescued, and a suspension is not a failure.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// # let mends = handler("mends").run(async |_, _: Failure| Ok(0_u64));
    /// let chain = sequencer::<u64>("chain").step(&a).rescue(|failure, _| failure.code() == "funds", &mends).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn rescue<O, F>(mut self, matches: F, block: &Block<Failure, O>) -> Self
    where
        O: Data,
        F: Fn(&Failure, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        self.outputs.push(("rescue", TypeId::of::<O>(), std::any::type_name::<O>()));
        let block = block.clone();
        self.children.push(block.node.clone());
        let name = block.node.name.clone();
        let matches = move |failure: &Failure, frame: &Arc<Frame>| matches(failure, &Look::of(frame));
        let run = move |frame: Arc<Frame>, failure: Failure| -> Boxed<'static, Result<AnyValue, Failure>> {
            let block = block.clone();
            Box::pin(async move {
                let output: AnyValue = Box::new(block.perform(&frame, 0, failure).await?);
                Ok(output)
            })
        };
        self.rescues.push(Rescue { name, matches: Arc::new(matches), run: Arc::new(run) });
        self
    }

    /// Builds the sequencer. What the blocks in it need of its state is compared with what it declares.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").step(&a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn build(self) -> Result<Block<I, V>> {
        let name = self.name.clone();
        check_name("a sequencer", &name)?;
        self.wrong.map_or(Ok(()), Err)?;
        let mut seen = std::collections::BTreeSet::new();
        if let Some(twice) = self.children.iter().find(|node| !seen.insert(node.name.clone())) {
            return Err(FlowError::DuplicateName { sequencer: name, name: twice.name.to_string() });
        }
        let is_other = |(_, output, _): &&(&'static str, TypeId, &'static str)| *output != TypeId::of::<V>();
        if let Some((verb, _, found)) = self.outputs.iter().find(is_other) {
            let expected = std::any::type_name::<V>();
            return Err(FlowError::OtherType { sequencer: name, verb, found, expected });
        }
        let mut node = BlockNode::new(&name, Kind::Sequencer);
        node.shape = self.shape?.map(Arc::new);
        node.is_durable = self.is_durable;
        node.adopt(self.children)?;
        let chain = Chain { stages: self.stages, rescues: self.rescues, most_rounds: self.most_rounds };
        let chain = Arc::new(chain);
        let perform = move |frame: Arc<Frame>, input: I| -> Boxed<'static, Result<V, Failure>> {
            let chain = chain.clone();
            Box::pin(async move {
                let result = drive(&frame, chain.run(&frame, Box::new(input))).await;
                if let Some(state) = frame.own.as_ref().and_then(|own| own.shown()) {
                    frame.tell(FlowEvent::StateSnapshot { scope: shown(&frame.path), state });
                }
                take(&frame, result?)
            })
        };
        Ok(Block { node: Arc::new(node), perform: Arc::new(perform), format: Format::json() })
    }
}

/// The label of the condition of a block.
pub(super) fn asked(name: &Arc<str>) -> Arc<str> {
    format!("{name}?").into()
}

/// Looks at the value and the state.
pub(super) type LookCondition<S, V> = dyn Fn(&V, &Look<S>) -> bool + Send + Sync;

/// A case of [`SequencerBuilder::branch`].
pub struct Case<S, V, O> {
    matches: Arc<LookCondition<S, V>>,
    block: Block<V, O>,
}

/// A case: the block is done if the condition holds.
///
/// ```
/// # use latchwork::flow::{handler, otherwise, sequencer, when};
/// # use latchwork::workflow::Failure;
/// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
/// # struct Total { total: u64 }
/// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
/// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
/// let chain = sequencer::<u64>("chain").branch(vec![when(|value, _| *value > 5, &a)]).build()?;
/// # Ok::<(), latchwork::flow::FlowError>(())
/// ```
pub fn when<S, V, O, F>(condition: F, block: &Block<V, O>) -> Case<S, V, O>
where
    F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
{
    Case { matches: Arc::new(condition), block: block.clone() }
}

/// A case that always matches.
///
/// ```
/// # use latchwork::flow::{handler, otherwise, sequencer, when};
/// # use latchwork::workflow::Failure;
/// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
/// # struct Total { total: u64 }
/// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
/// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
/// let chain = sequencer::<u64>("chain").branch(vec![when(|value, _| *value > 5, &a), otherwise(&b)]).build()?;
/// # Ok::<(), latchwork::flow::FlowError>(())
/// ```
pub fn otherwise<S, V, O>(block: &Block<V, O>) -> Case<S, V, O> {
    Case { matches: Arc::new(|_, _| true), block: block.clone() }
}

shown!(SequencerBuilder<S, I, V>, it => name: it.name);
shown!(Case<S, V, O>, it => block: it.block.node.name);
