//! Heartbeats: signs of life of an attempt at a step, and its progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use crate::workflow::Failure;
use crate::workflow::journal::place::Place;
use crate::workflow::run::{OpInProgress, Run};
use crate::workflow::stored::record::{Entry, WaitsFor};

/// The attempts in progress: the number of each attempt, and the last progress that it has reported.
#[derive(Default)]
pub(crate) struct Attempts(BTreeMap<Place, (u32, Option<String>)>);

impl Attempts {
    pub(crate) fn begin(&mut self, place: &Place, attempt: u32) {
        self.0.insert(place.clone(), (attempt, None));
    }

    /// Records the progress of an attempt. Returns whether the attempt is in progress.
    pub(crate) fn beat(&mut self, place: &Place, attempt: u32, progress: &str) -> bool {
        match self.0.get_mut(place) {
            Some((under_way, told)) if *under_way == attempt => {
                *told = Some(progress.into());
                true
            }
            _ => false,
        }
    }

    /// The attempt is over. Returns the last progress that it has reported.
    pub(crate) fn end(&mut self, place: &Place) -> Option<String> {
        self.0.remove(place).and_then(|(_, progress)| progress)
    }

    pub(crate) fn begin_anew(&mut self) {
        self.0.clear();
    }
}

/// When this is dropped, the attempt at the step is over.
pub(crate) struct BeatsEnd<'a> {
    pub(crate) run: &'a Run,
    pub(crate) place: &'a Place,
}

impl Drop for BeatsEnd<'_> {
    fn drop(&mut self) {
        self.run.with(|state| state.attempts.end(self.place));
    }
}

fn over() -> Failure {
    Failure::new("the attempt is over").with_code("latchwork.attempt.over")
}

/// Where an attempt reports its progress, from any task.
#[derive(Clone)]
pub(crate) struct Beats {
    inner: Arc<BeatsInner>,
}

struct BeatsInner {
    run: Arc<Run>,
    place: Place,
    /// The number of the execution's run.
    number: u32,
    /// The entry of the step when the attempt began.
    entry: Entry,
    /// The time of the last heartbeat, in microseconds of the monotonic clock.
    last_us: AtomicU64,
}

impl Beats {
    pub(crate) fn new(run: &Arc<Run>, place: &Place, entry: &Entry) -> Beats {
        let (run, number, place, entry) = (run.clone(), run.number().1, place.clone(), entry.clone());
        let last_us = AtomicU64::new(run.env().monotonic().as_micros() as u64);
        Beats { inner: Arc::new(BeatsInner { run, place, number, entry, last_us }) }
    }

    /// How long ago the last heartbeat or the beginning of the attempt was.
    pub(crate) fn silence(&self) -> Duration {
        let last = Duration::from_micros(self.inner.last_us.load(Ordering::SeqCst));
        self.inner.run.env().monotonic().saturating_sub(last)
    }

    /// Reports a heartbeat with the progress of the attempt.
    pub(crate) async fn beat(&self, progress: &(impl Serialize + ?Sized)) -> Result<(), Failure> {
        let BeatsInner { run, place, number, entry, last_us } = &*self.inner;
        let progress = run.text("the progress", progress)?;
        last_us.store(run.env().monotonic().as_micros() as u64, Ordering::SeqCst);
        let doing = OpInProgress::begin(run, WaitsFor::Store);
        if !run.with(|state| state.beat(place, *number, entry, progress)) {
            return Err(over());
        }
        run.nudge();
        doing.flushed().await.ok_or_else(over)
    }
}

shown!(Beats, it => silence: it.silence());
