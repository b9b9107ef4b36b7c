//! The verbs that repeat a block: `do_while`, `do_until`, `loop_back`. A round leaves nothing behind but the loop's own
//! entry, with the number of the next round and its value. So a loop takes the same room however often it goes round.

use std::sync::Arc;

use crate::flow::block::{Block, BlockBegun, Data, NoOutput};
use crate::flow::chain::{AnyValue, Flowing};
use crate::flow::ctx::Look;
use crate::flow::error::{BlockError, FlowError, failed};
use crate::flow::frame::Frame;
use crate::flow::request::{FoundTrace, gave, shown};
use crate::flow::sequencer::{LookCondition, SequencerBuilder, asked};
use crate::workflow::Failure;
use crate::workflow::journal::place::BranchPath;
use crate::workflow::stored::record::{EntryState, Kind};

/// The output of a block that can be repeated: the next value, or none, and then the value stays.
pub trait Carries<V>: Send + 'static {
    /// The value of the next round.
    fn carry(self, before: V) -> V;
}

impl<V: Data> Carries<V> for V {
    fn carry(self, _: V) -> V {
        self
    }
}

impl<V: Data> Carries<V> for NoOutput {
    fn carry(self, before: V) -> V {
        before
    }
}

struct Repeat<S, V, O> {
    block: Block<V, O>,
    /// Whether there is another round.
    goes_on: Arc<LookCondition<S, V>>,
    /// True if that is asked before the first round, too.
    asks_first: bool,
    most: u32,
}

impl<S, I: Data, V: Data> SequencerBuilder<S, I, V> {
    /// Repeats a block while a condition holds, which is asked before each round. The output of a round is the value of
    /// the next one; a block without output leaves the value as it is.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").do_while(|value, _| *value < 10, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn do_while<O, F>(self, condition: F, block: &Block<V, O>) -> Self
    where
        V: Clone,
        O: Carries<V>,
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        self.repeat(block, Arc::new(condition), true)
    }

    /// Repeats a block until a condition holds, which is asked after each round.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").do_until(|value, _| *value > 10, &a).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn do_until<O, F>(self, condition: F, block: &Block<V, O>) -> Self
    where
        V: Clone,
        O: Carries<V>,
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        self.repeat(block, Arc::new(move |value: &V, look: &Look<S>| !condition(value, look)), false)
    }

    fn repeat<O>(self, block: &Block<V, O>, goes_on: Arc<LookCondition<S, V>>, asks_first: bool) -> Self
    where
        V: Clone,
        O: Carries<V>,
        S: 'static,
    {
        let names = vec![block.node.name.clone()];
        let repeat = Arc::new(Repeat { block: block.clone(), goes_on, asks_first, most: self.most_rounds });
        self.uses([&block.node]).then(names, move |frame, value, nth| {
            let repeat = repeat.clone();
            Box::pin(async move { repeat.run(&frame, value, nth).await })
        })
    }

    /// Goes back to a block of this sequencer while a condition holds: everything from that block to here is done
    /// again, with the present value. It must have the type that the block takes.
    ///
    /// ```
    /// # use latchwork::flow::{handler, otherwise, sequencer, when};
    /// # use latchwork::workflow::Failure;
    /// # #[derive(Default, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
    /// # struct Total { total: u64 }
    /// # let a = handler("a").run(async |_, value: u64| Ok(value + 1));
    /// # let b = handler("b").run(async |_, value: u64| Ok(value * 2));
    /// let chain = sequencer::<u64>("chain").step(&a).step(&b).loop_back("a", |value, _| *value < 10).build()?;
    /// # Ok::<(), latchwork::flow::FlowError>(())
    /// ```
    pub fn loop_back<F>(mut self, to: &str, condition: F) -> Self
    where
        F: Fn(&V, &Look<S>) -> bool + Send + Sync + 'static,
        S: 'static,
    {
        let Some(target) = self.stages.iter().position(|stage| stage.names.iter().any(|name| **name == *to)) else {
            let sequencer = self.name.clone();
            return self.fails(FlowError::NoSuchBlock { sequencer, target: to.into() });
        };
        let label: Arc<str> = format!("loop_back>{to}").into();
        if self.stages.iter().any(|stage| stage.names.contains(&label)) {
            // Both would record under one name.
            let (sequencer, name) = (self.name.clone(), label.to_string());
            return self.fails(FlowError::DuplicateName { sequencer, name });
        }
        let (question, condition) = (asked(&label), Arc::new(condition));
        self = self.flows(vec![label, question.clone()], move |frame, value, nth| {
            let (question, condition) = (question.clone(), condition.clone());
            Box::pin(async move {
                let goes_back = frame.choose(&question, nth, || condition(&value, &Look::of(&frame))).await?;
                if !goes_back {
                    return Ok(Flowing::Next(Box::new(value)));
                }
                let text = frame.request.run().text("the value", &value)?;
                Ok(Flowing::Back(Box::new(value), text))
            })
        });
        let read = |text: &str| serde_json::from_str::<V>(text).map(|value| Box::new(value) as AnyValue);
        self.stages.iter_mut().last().into_iter().for_each(|stage| stage.back = Some((target, read)));
        self
    }
}

impl<S, V: Data + Clone, O: Carries<V>> Repeat<S, V, O> {
    async fn run(&self, frame: &Arc<Frame>, mut value: V, nth: u32) -> Result<V, Failure> {
        let (request, name) = (&frame.request, &self.block.node.name);
        let at = frame.path.named(name, nth);
        let mut round = 0;
        if frame.records {
            match request.found(&at, Kind::Loop, name).await {
                FoundTrace::Done(text) => match serde_json::from_str(&text) {
                    Ok(value) => return Ok(value),
                    Err(error) => return request.misfit(&at, &error).await,
                },
                FoundTrace::Gave(failure) => return Err(failure),
                FoundTrace::Begun(Some(progress)) => match serde_json::from_str(&progress) {
                    Ok(progress) => (round, value) = progress,
                    Err(error) => return request.misfit(&at, &error).await,
                },
                FoundTrace::Begun(None) | FoundTrace::Nothing => {}
            }
        }
        loop {
            let path = at.named(name, round);
            // A round that has begun was decided on before.
            let is_decided = frame.records && request.has_begun(&path);
            let asks = (self.asks_first || round > 0) && !is_decided;
            if asks && !(self.goes_on)(&value, &Look::of(frame)) {
                break;
            }
            if round >= self.most {
                let endless = failed(BlockError::Endless { path: shown(&at), rounds: self.most });
                if frame.records {
                    // A second life must not ask the condition again: the state may have changed.
                    request.note(&at, request.entry(Kind::Loop, name, gave(&endless)));
                }
                return Err(endless);
            }
            value = self.round(frame, &at, path, round, value).await?;
            round += 1;
        }
        if frame.records {
            let text = request.run().text("the value", &value)?;
            request.note(&at, request.entry(Kind::Loop, name, EntryState::Done(text)));
        }
        Ok(value)
    }

    /// One round. Its boundary is the loop's own entry.
    async fn round(
        &self,
        frame: &Arc<Frame>,
        at: &BranchPath,
        path: BranchPath,
        round: u32,
        value: V,
    ) -> Result<V, Failure> {
        let inner = match self.block.begin(frame, path).await {
            BlockBegun::Over(result) => return result.map(|output| output.carry(value)),
            BlockBegun::Runs(inner) => inner,
        };
        let output = self.block.run(&inner, value.clone()).await;
        let next = output.map(|output| output.carry(value));
        if !inner.has_trace {
            return next;
        }
        inner.request.room().await;
        let progress = next.and_then(|next| Ok((inner.request.run().text("the value", &(round + 1, &next))?, next)));
        match progress {
            Ok((text, next)) => {
                inner.ends(at, Kind::Loop, EntryState::Begun, Some(text));
                Ok(next)
            }
            Err(failure) => {
                inner.ends(at, Kind::Loop, gave(&failure), None);
                Err(failure)
            }
        }
    }
}
