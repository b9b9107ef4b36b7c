//! The verbs that run several blocks: side by side, for each item, as work in the background. Which block was first, or
//! has failed, is recorded together with its trace, so that after an interruption the same one counts.

use std::sync::Arc;
use std::task::Poll;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;

use crate::flow::block::{Block, BlockNode, Data};
use crate::flow::chain::{AnyValue, take};
use crate::flow::ctx::Look;
use crate::flow::error::{BlockError, FlowError, failed};
use crate::flow::frame::Frame;
use crate::flow::request::shown;
use crate::flow::sequencer::{SequencerBuilder, asked};
use crate::workflow::journal::place::BranchPath;
use crate::workflow::{Boxed, Failure};

/// A block that runs beside others.
struct SideBlock {
    /// Its name, or the number of its item.
    key: String,
    path: BranchPath,
    run: Boxed<'static, Result<AnyValue, Failure>>,
}

impl SideBlock {
    fn new<I, O>(frame: &Arc<Frame>, block: &Block<I, O>, nth: u32, input: I) -> SideBlock
    where
        I: Send + 'static,
        O: Send + Sync + 'static,
    {
        let path = frame.path.named(&block.node.name, nth);
        SideBlock::at(frame, block, block.node.name.to_string(), path, input)
    }

    fn at<I, O>(frame: &Arc<Frame>, block: &Block<I, O>, key: String, path: BranchPath, input: I) -> SideBlock
    where
        I: Send + 'static,
        O: Send + Sync + 'static,
    {
        let (frame, block, its) = (frame.clone(), block.clone(), path.clone());
        let run = Box::pin(async move {
            let output: AnyValue = Box::new(block.perform_at(&frame, its, input).await?);
            Ok(output)
        });
        SideBlock { key, path, run }
    }
}

/// The blocks that have not ended. Those that are left when this is dropped are given up.
struct Left<'a> {
    frame: &'a Frame,
    paths: Vec<(usize, BranchPath)>,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        let request = &self.frame.request;
        // A function that panics parks the request: the others are not given up, they run again later.
        if !request.run().is_stopping() && !std::thread::panicking() {
            request.give_up(&self.paths.iter().map(|(_, path)| path.clone()).collect());
        }
    }
}

/// Runs blocks side by side, at most `at_once` at a time, until all have ended, or until one ends the run. Returns the
/// results so far, in order, and the index of that one.
async fn side_by_side(
    frame: &Arc<Frame>,
    (label, nth): (&str, u32),
    mut blocks: Vec<SideBlock>,
    at_once: usize,
    ends: fn(&Result<AnyValue, Failure>) -> bool,
) -> Result<(Vec<Option<Result<AnyValue, Failure>>>, Option<usize>), Failure> {
    let paths: Vec<(usize, BranchPath)> = blocks.iter().map(|block| block.path.clone()).enumerate().collect();
    let mut results: Vec<_> = blocks.iter().map(|_| None).collect();
    let recorded: Option<String> = frame.chosen(label, nth).await;
    let recorded = recorded.and_then(|key| blocks.iter().position(|block| block.key == key));
    if let Some(index) = recorded {
        let lost: Vec<BranchPath> = paths.iter().filter(|(it, _)| *it != index).map(|(_, path)| path.clone()).collect();
        let result = blocks.swap_remove(index).run.await;
        if ends(&result) {
            frame.request.run().release_where(|branch| lost.iter().any(|path| branch.is_within(path))).await;
            results[index] = Some(result);
            return Ok((results, Some(index)));
        }
        // The flow was changed, and this block does not end the run any more: neither does it run again.
        results[index] = Some(result);
        return Ok((results, None));
    }
    let keys: Vec<String> = blocks.iter().map(|block| block.key.clone()).collect();
    let mut waiting = blocks.into_iter().enumerate();
    let (mut running, mut left) = (FuturesUnordered::new(), Left { frame, paths: Vec::new() });
    loop {
        while left.paths.len() < at_once.max(1)
            && let Some((index, block)) = waiting.next()
        {
            left.paths.push((index, block.path));
            running.push(async move { (index, block.run.await) });
        }
        let Some((index, result)) = running.next().await else { return Ok((results, None)) };
        left.paths.retain(|(its, _)| *its != index);
        let is_end = ends(&result);
        results[index] = Some(result);
        if is_end {
            // The record is in the commit of the block's trace, because nothing waits in between.
            frame.choose(label, nth, || keys[index].clone()).await?;
            drop(running);
            // Also those that an earlier life has begun, and this one has not.
            let is_lost = |(its, _): &&(usize, BranchPath)| results[*its].is_none();
            let lost: Vec<BranchPath> = paths.iter().filter(is_lost).map(|(_, path)| path.clone()).collect();
            drop(left);
            if !lost.is_empty() {
                frame.request.run().release_where(|branch| lost.iter().any(|path| branch.is_within(path))).await;
            }
            return Ok((results, Some(index)));
        }
    }
}

/// Runs blocks side by side and waits for all of them. With the first failure, the others are given up.
async fn all(
    frame: &Arc<Frame>,
    label: (&str, u32),
    blocks: Vec<SideBlock>,
    at_once: usize,
) -> Result<Vec<AnyValue>, Failure> {
    let (results, failed) = side_by_side(frame, label, blocks, at_once, Result::is_err).await?;
    match failed {
        Some(index) => results.into_iter().nth(index).flatten().into_iter().collect(),
        None => results.into_iter().flatten().collect(),
    }
}

/// The label of what is recorded of a verb, after its first block.
fn group(verb: &str, first: &BlockNode) -> Arc<str> {
    format!("{verb}>{}", first.name).into()
}

fn names(label: &Arc<str>, nodes: &[Arc<BlockNode>]) -> Vec<Arc<str>> {
    nodes.iter().map(|node| node.name.clone()).chain([label.clone()]).collect()
}

/// A list that `for_each` goes through.
pub trait ItemList {
    /// What it holds.
    type Item: Data;

    /// The items; without them, what the value is instead.
    fn items(self) -> Result<Vec<Self::Item>, String>;
}

impl<T: Data> ItemList for Vec<T> {
    type Item = T;

    fn items(self) -> Result<Vec<T>, String> {
        Ok(self)
    }
}

impl ItemList for Value {
    type Item = Value;

    fn items(self) -> Result<Vec<Value>, String> {
        match self {
            Value::Array(items) => Ok(items),
            Value::Object(_) => Err("an object".into()),
            other => Err(other.to_string()),
        }
    }
}

fn items<V: ItemList>(value: V, path: &BranchPath) -> Result<Vec<V::Item>, Failure> {
    value.items().map_err(|found| failed(BlockError::NotAList { path: shown(path), found }))
}

/// A builder that uses several blocks; the label of what is recorded of them, and their names.
type Several<B, V, O> = (B, Arc<str>, Vec<Arc<str>>, Arc<[Block<V, O>]>);

impl<S, I: Data, V: Data> SequencerBuilder<S, I, V> {
    /// Does blocks side by side with the same value: the next value is the tuple of their outputs. With the first
    /// failure, the others are given up.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").parallel((&a, &b)).map(|(a, b), _| a + b).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn parallel<B: Parallel<V>>(self, blocks: B) -> SequencerBuilder<S, I, B::Output>
    where
        V: Clone,
    {
        let ParallelBlocks { nodes, run } = blocks.blocks();
        let label: Arc<str> = nodes.first().map_or_else(|| "parallel".into(), |first| group("parallel", first));
        let names = names(&label, &nodes);
        self.uses(&nodes).then(names, move |frame, value, nth| run(frame, label.clone(), nth, value))
    }

    fn several<O: Data>(self, verb: &'static str, blocks: &[&Block<V, O>]) -> Result<Several<Self, V, O>, Box<Self>> {
        let nodes: Vec<Arc<BlockNode>> = blocks.iter().map(|block| block.node.clone()).collect();
        let Some(first) = nodes.first() else {
            let sequencer = self.name.clone();
            return Err(Box::new(self.fails(FlowError::NoBlocks { sequencer, verb })));
        };
        let label = group(verb, first);
        let names = names(&label, &nodes);
        Ok((self.uses(&nodes), label, names, blocks.iter().map(|block| (*block).clone()).collect()))
    }

    /// Does blocks of the same types side by side: the next value is the list of their outputs, in order. With the
    /// first failure, the others are given up.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").step_all(&[&a, &b]).map(|list, _| list.iter().sum::<u64>()).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn step_all<O: Data>(self, blocks: &[&Block<V, O>]) -> SequencerBuilder<S, I, Vec<O>>
    where
        V: Clone,
    {
        let (builder, label, names, blocks) = match self.several("step_all", blocks) {
            Ok(several) => several,
            Err(builder) => return builder.then(Vec::new(), |_, _, _| Box::pin(async { Ok(Vec::new()) })),
        };
        builder.then(names, move |frame, value, nth| {
            let (label, blocks) = (label.clone(), blocks.clone());
            Box::pin(async move {
                let beside = blocks.iter().map(|block| SideBlock::new(&frame, block, nth, value.clone())).collect();
                let done = all(&frame, (&label, nth), beside, usize::MAX).await?;
                done.into_iter().map(|output| take(&frame, output)).collect()
            })
        })
    }

    /// Does blocks side by side: the next value is the output of the first that succeeds, and the others are given up.
    /// If all fail, the sequencer fails with the last block's failure.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").step_any(&[&a, &b]).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn step_any<O: Data>(self, blocks: &[&Block<V, O>]) -> SequencerBuilder<S, I, O>
    where
        V: Clone,
    {
        self.first_of("step_any", blocks, Result::is_ok)
    }

    /// Does blocks side by side: the next value is the output of the first that ends, and the others are given up. If
    /// that one fails, the sequencer fails.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").race(&[&a, &b]).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn race<O: Data>(self, blocks: &[&Block<V, O>]) -> SequencerBuilder<S, I, O>
    where
        V: Clone,
    {
        self.first_of("race", blocks, |_| true)
    }

    fn first_of<O: Data>(
        self,
        verb: &'static str,
        blocks: &[&Block<V, O>],
        ends: fn(&Result<AnyValue, Failure>) -> bool,
    ) -> SequencerBuilder<S, I, O>
    where
        V: Clone,
    {
        let other = |frame: &Frame| failed(BlockError::NoMatch { path: shown(&frame.path) });
        let (builder, label, names, blocks) = match self.several(verb, blocks) {
            Ok(several) => several,
            Err(builder) => {
                return builder.then(Vec::new(), move |frame, _, _| Box::pin(std::future::ready(Err(other(&frame)))));
            }
        };
        builder.then(names, move |frame, value, nth| {
            let (label, blocks) = (label.clone(), blocks.clone());
            Box::pin(async move {
                let beside = blocks.iter().map(|block| SideBlock::new(&frame, block, nth, value.clone())).collect();
                let (mut results, first) = side_by_side(&frame, (&label, nth), beside, usize::MAX, ends).await?;
                let last = || results.iter().rposition(Option::is_some);
                let index = first.or_else(last).unwrap_or_default();
                match results.get_mut(index).and_then(Option::take) {
                    Some(result) => take(&frame, result?),
                    None => Err(other(&frame)),
                }
            })
        })
    }

    /// Does a block for each item of a list, at most `at_once` at a time: the next value is the list of outputs, in the
    /// order of the items. With the first failure, the others are given up.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").map(|value, _| vec![value, 7]).for_each(2, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn for_each<O: Data>(self, at_once: usize, block: &Block<V::Item, O>) -> SequencerBuilder<S, I, Vec<O>>
    where
        V: ItemList,
    {
        let label = group("for_each", &block.node);
        let (block, names) = (block.clone(), names(&label, std::slice::from_ref(&block.node)));
        self.uses([&block.node]).then(names, move |frame, value, nth| {
            let (block, label) = (block.clone(), label.clone());
            Box::pin(async move {
                let name = &block.node.name;
                let at = frame.path.named(name, nth);
                let item = |(index, item): (usize, V::Item)| {
                    SideBlock::at(&frame, &block, index.to_string(), at.named(name, index as u32), item)
                };
                let beside = items(value, &at)?.into_iter().enumerate().map(item).collect();
                let done = all(&frame, (&label, nth), beside, at_once).await?;
                done.into_iter().map(|output| take(&frame, output)).collect()
            })
        })
    }

    /// Does a block for each item of a list in the background: see [`SequencerBuilder::work`].
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").map(|value, _| vec![value, 7]).for_each_background(&a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn for_each_background<O: Send + 'static>(self, block: &Block<V::Item, O>) -> Self
    where
        V: ItemList + Clone,
    {
        let (block, names) = (block.clone(), vec![block.node.name.clone()]);
        self.uses([&block.node]).then(names, move |frame, value: V, nth| {
            let block = block.clone();
            Box::pin(async move {
                let at = frame.path.named(&block.node.name, nth);
                for (index, item) in items(value.clone(), &at)?.into_iter().enumerate() {
                    background(&frame, &block, at.named(&block.node.name, index as u32), item);
                }
                Ok(value)
            })
        })
    }

    /// Does a block in the background, with the present value. The chain goes on at once. If the block fails, that is
    /// recorded, and the chain does not fail. The sequencer waits for all its work before it ends, however it ends.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").work(&a).step(&b).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn work<O: Send + 'static>(self, block: &Block<V, O>) -> Self
    where
        V: Clone,
    {
        let (block, names) = (block.clone(), vec![block.node.name.clone()]);
        self.uses([&block.node]).then(names, move |frame, value: V, nth| {
            let path = frame.path.named(&block.node.name, nth);
            background(&frame, &block, path, value.clone());
            Box::pin(std::future::ready(Ok(value)))
        })
    }

    /// Like [`SequencerBuilder::work`], if a condition holds.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").work_if(|value, _| *value > 5, &a).step(&b).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn work_if<O, F>(self, condition: F, block: &Block<V, O>) -> Self
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
                    let path = frame.path.named(&block.node.name, nth);
                    background(&frame, &block, path, value.clone());
                }
                Ok(value)
            })
        })
    }

    /// Waits until all work of this sequencer so far has ended.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").work(&a).wait_for_work().build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn wait_for_work(self) -> Self {
        self.then(Vec::new(), |frame, value, _| {
            Box::pin(async move {
                frame.works.ended().await;
                Ok(value)
            })
        })
    }

    /// Waits until a condition holds, which work in the background brings about. If no work is left and it does not
    /// hold, the sequencer fails with [`BlockError::NeverHolds`].
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// # let counts = handler("counts").tap(async |ctx, by: u64| ctx.sequencer().inc([("total", by)]).await);
    /// let chain = sequencer::<u64>("chain").state::<Total>().work(&counts);
    /// let chain = chain.wait_for_condition(|_, look| look.state().total > 5).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn wait_for_condition<F>(mut self, condition: F) -> Self
    where
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        let (label, condition) = (self.label("wait_for_condition"), Arc::new(condition));
        self.then(vec![label.clone()], move |frame, value, nth| {
            let (label, condition) = (label.clone(), condition.clone());
            Box::pin(async move {
                let known: Option<bool> = frame.chosen(&label, nth).await;
                let looked = std::future::poll_fn(|_| match known {
                    Some(known) => Poll::Ready(known),
                    None if condition(&value, &Look::of(&frame)) => Poll::Ready(true),
                    None if frame.works.left() == 0 => Poll::Ready(false),
                    None => Poll::Pending,
                });
                let holds = looked.await;
                match frame.choose(&label, nth, || holds).await? {
                    true => Ok(value),
                    false => Err(failed(BlockError::NeverHolds { path: shown(&frame.path.named(&label, nth)) })),
                }
            })
        })
    }
}

/// Adds work to a sequencer.
fn background<I, O>(frame: &Arc<Frame>, block: &Block<I, O>, path: BranchPath, input: I)
where
    I: Send + 'static,
    O: Send + 'static,
{
    let (around, block) = (frame.clone(), block.clone());
    frame.works.add(Box::pin(async move {
        // A failure is in the block's trace.
        let _ = block.perform_at(&around, path, input).await;
    }));
}

/// Blocks for [`SequencerBuilder::parallel`]: tuples of two to six.
pub trait Parallel<V> {
    /// The tuple of outputs.
    type Output: Data;

    /// The blocks, ready to be run.
    #[doc(hidden)]
    fn blocks(self) -> ParallelBlocks<V, Self::Output>;
}

/// Blocks that run side by side. Only their tuple of outputs is known.
#[doc(hidden)]
pub struct ParallelBlocks<V, O> {
    nodes: Vec<Arc<BlockNode>>,
    run: Arc<RunParallel<V, O>>,
}

type RunParallel<V, O> = dyn Fn(Arc<Frame>, Arc<str>, u32, V) -> Boxed<'static, Result<O, Failure>> + Send + Sync;

macro_rules! parallel {
    ($($output:ident $place:tt),+) => {
        impl<V: Data + Clone, $($output: Data),+> Parallel<V> for ($(&Block<V, $output>,)+) {
            type Output = ($($output,)+);

            fn blocks(self) -> ParallelBlocks<V, Self::Output> {
                let nodes = vec![$(self.$place.node.clone()),+];
                let blocks = ($(self.$place.clone(),)+);
                type Run<O> = Boxed<'static, Result<O, Failure>>;
                let run = move |frame: Arc<Frame>, label: Arc<str>, nth: u32, value: V| -> Run<Self::Output> {
                    let beside = vec![$(SideBlock::new(&frame, &blocks.$place, nth, value.clone())),+];
                    Box::pin(async move {
                        let mut done = all(&frame, (&label, nth), beside, usize::MAX).await?.into_iter();
                        let other = || failed(BlockError::OtherType { path: shown(&frame.path) });
                        Ok(($(take::<$output>(&frame, done.next().ok_or_else(other)?)?,)+))
                    })
                };
                ParallelBlocks { nodes, run: Arc::new(run) }
            }
        }
    };
}

parallel!(A 0, B 1);
parallel!(A 0, B 1, C 2);
parallel!(A 0, B 1, C 2, D 3);
parallel!(A 0, B 1, C 2, D 3, E 4);
parallel!(A 0, B 1, C 2, D 3, E 4, F 5);
