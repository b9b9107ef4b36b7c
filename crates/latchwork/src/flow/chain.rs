//! The chain of a sequencer at run time: its stages one after the other, with values whose types are left behind. The
//! builder has checked the types. It knows when a chain goes back, ends early or is rescued; the verbs are elsewhere.

use std::any::Any;
use std::sync::Arc;

use crate::flow::error::{BlockError, failed};
use crate::flow::frame::Frame;
use crate::flow::request::shown;
use crate::workflow::stored::record::{EntryState, Kind};
use crate::workflow::{Boxed, Failure};

/// A value between two stages.
pub(crate) type AnyValue = Box<dyn Any + Send + Sync>;

/// What a stage is given.
pub(crate) struct StageInput {
    pub(crate) frame: Arc<Frame>,
    pub(crate) value: AnyValue,
    /// How often the chain has gone back over this stage.
    pub(crate) nth: u32,
}

/// What follows a stage.
pub(crate) enum Flowing {
    Next(AnyValue),
    /// The sequencer ends with this value.
    Exit(AnyValue),
    /// The chain goes back with this value, which is recorded as this text.
    Back(AnyValue, String),
}

/// Reads a value that goes back from its recorded text.
type ReadBack = fn(&str) -> serde_json::Result<AnyValue>;

type Matches = dyn Fn(&Failure, &Arc<Frame>) -> bool + Send + Sync;
type RunRescue = dyn Fn(Arc<Frame>, Failure) -> Boxed<'static, Result<AnyValue, Failure>> + Send + Sync;
type RunStage = dyn Fn(StageInput) -> Boxed<'static, Result<Flowing, Failure>> + Send + Sync;

#[derive(Clone)]
pub(crate) struct Stage {
    pub(crate) run: Arc<RunStage>,
    /// The names in the sequencer that the stage records something under.
    pub(crate) names: Vec<Arc<str>>,
    /// The stage that the chain goes back to from here, and how a value that goes back is read.
    pub(crate) back: Option<(usize, ReadBack)>,
}

/// A block that takes over when the chain fails.
#[derive(Clone)]
pub(crate) struct Rescue {
    pub(crate) name: Arc<str>,
    pub(crate) matches: Arc<Matches>,
    pub(crate) run: Arc<RunRescue>,
}

pub(crate) struct Chain {
    pub(crate) stages: Vec<Stage>,
    pub(crate) rescues: Vec<Rescue>,
    pub(crate) most_rounds: u32,
}

/// The value of a stage. The builder has checked its type.
pub(crate) fn take<V: 'static>(frame: &Frame, value: AnyValue) -> Result<V, Failure> {
    let other = || failed(BlockError::OtherType { path: shown(&frame.path) });
    value.downcast::<V>().map(|value| *value).map_err(|_| other())
}

/// A stage that the chain goes back from.
struct GoingBack<'a> {
    index: usize,
    from: &'a Stage,
    target: usize,
    read: ReadBack,
}

/// How often the chain has gone back over a stage.
fn nth(backs: &[GoingBack<'_>], rounds: &[u32], at: usize) -> u32 {
    let covers = |back: &&GoingBack<'_>| (back.target..=back.index).contains(&at);
    backs.iter().filter(covers).map(|back| rounds[back.index]).sum()
}

/// The label of what a stage that goes back has recorded.
fn label(stage: &Stage) -> &Arc<str> {
    stage.names.first().expect("a stage that goes back has a label")
}

impl Chain {
    pub(crate) async fn run(&self, frame: &Arc<Frame>, input: AnyValue) -> Result<AnyValue, Failure> {
        let failure = match self.run_stages(frame, input).await {
            Err(failure) if !failure.is_cancelled() => failure,
            ended => return ended,
        };
        for rescue in &self.rescues {
            let label = format!("{}?", rescue.name);
            if frame.choose(&label, 0, || (rescue.matches)(&failure, frame)).await? {
                return (rescue.run)(frame.clone(), failure).await;
            }
        }
        Err(failure)
    }

    async fn run_stages(&self, frame: &Arc<Frame>, mut value: AnyValue) -> Result<AnyValue, Failure> {
        let mut rounds = vec![0; self.stages.len()];
        let mut restored = vec![false; self.stages.len()];
        // When the chain went back from each stage the last time: a number that rises.
        let mut turns = vec![0_u64; self.stages.len()];
        let backs: Vec<GoingBack<'_>> = self.backs().collect();
        let mut at = 0;
        while let Some(stage) = self.stages.get(at) {
            for GoingBack { index, from, target, read } in &backs {
                let index = *index;
                if *target != at || restored[index] {
                    continue;
                }
                restored[index] = true;
                // An earlier life has gone back to here: the chain continues with the value that it went back with.
                let Some((count, turn, text)) = frame.chosen::<(u32, u64, String)>(label(from), 0).await else {
                    continue;
                };
                (rounds[index], turns[index]) = (count, turn);
                // A loop around this one, or another one to this place, may have gone back later.
                if turns.iter().all(|other| *other <= turn) {
                    value = match read(&text) {
                        Ok(before) => before,
                        Err(error) => frame.request.misfit(&frame.path.named(label(from), 0), &error).await,
                    };
                }
            }
            let turn = StageInput { frame: frame.clone(), value, nth: nth(&backs, &rounds, at) };
            match (stage.run)(turn).await? {
                Flowing::Next(next) => (value, at) = (next, at + 1),
                Flowing::Exit(output) => return Ok(output),
                Flowing::Back(next, text) => {
                    // What this round has recorded is removed, so its work has to be over.
                    frame.works.ended().await;
                    value = next;
                    turns[at] = 1 + turns.iter().max().copied().unwrap_or_default();
                    at = self.go_back(frame, &backs, &mut rounds, (at, turns[at], &text))?;
                }
            }
        }
        Ok(value)
    }

    /// The stages that go back. Most chains have none, and a chain may have thousands of stages.
    fn backs(&self) -> impl Iterator<Item = GoingBack<'_>> {
        self.stages.iter().enumerate().filter_map(|(index, from)| {
            let (target, read) = from.back?;
            Some(GoingBack { index, from, target, read })
        })
    }

    /// Records that the chain goes back, and removes what this round has recorded. Returns the next stage.
    fn go_back(
        &self,
        frame: &Frame,
        backs: &[GoingBack<'_>],
        rounds: &mut [u32],
        (at, turn, text): (usize, u64, &str),
    ) -> Result<usize, Failure> {
        let Some((target, _)) = self.stages[at].back else { return Ok(at + 1) };
        let names = |index: usize| {
            let nth = nth(backs, rounds, index);
            self.stages[index].names.iter().map(move |name| frame.path.named(name, nth))
        };
        let own = frame.path.named(label(&self.stages[at]), 0);
        let round: Vec<_> = (target..=at).flat_map(names).filter(|path| *path != own).collect();
        rounds[at] += 1;
        if rounds[at] > self.most_rounds {
            let path = shown(&own);
            return Err(failed(BlockError::Endless { path, rounds: self.most_rounds }));
        }
        if frame.records {
            let request = &frame.request;
            let chosen = serde_json::to_string(&(rounds[at], turn, text)).expect("a text can be written as JSON");
            let entry = request.entry(Kind::Choice, label(&self.stages[at]), EntryState::Done(chosen));
            request.go_back(&own, entry, &round);
        }
        Ok(target)
    }
}
