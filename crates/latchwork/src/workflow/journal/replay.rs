//! How every operation runs: it takes its place in the journal. If the journal holds its result, the operation returns
//! that; otherwise it runs, from its beginning or from its recorded state.

use std::future::Future;
use std::task::{Context, Poll};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::Timestamp;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::journal::place::Place;
use crate::workflow::run::{Doing, OpEffect, OpInProgress, Run, Stop};
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor, failure_text};
use crate::workflow::{Failure, Result};

/// An operation that the code calls.
pub(crate) struct OpCall<'a> {
    pub(crate) kind: Kind,
    pub(crate) name: &'a str,
    /// A hash of its arguments.
    pub(crate) argument: u64,
}

impl<'a> OpCall<'a> {
    /// A wait with a time limit.
    pub(crate) fn timed(kind: Kind, name: &'a str, timeout: Option<Duration>) -> OpCall<'a> {
        OpCall { kind, name, argument: timeout.map_or(0, |timeout| hash(&(timeout.as_micros() as u64))) }
    }

    pub(crate) fn entry(&self, since: Timestamp, state: EntryState) -> Entry {
        Entry::new(self.kind, self.name, self.argument, since, state)
    }
}

/// An operation in words: its kind, and its name if it has one.
pub(crate) fn shown_call(kind: Kind, name: &str) -> String {
    if name.is_empty() { kind.to_string() } else { format!("{kind} {name:?}") }
}

/// An operation at its place in the journal.
pub(crate) struct Journaled<'a> {
    pub(crate) ctx: &'a Ctx,
    pub(crate) doing: Doing,
    pub(crate) place: Place,
    /// The recorded entry, or the entry to record if the code calls the operation for the first time.
    pub(crate) entry: Entry,
    pub(crate) is_new: bool,
}

impl Ctx {
    /// Runs an operation whose result is JSON. The result has to fit its type on every replay.
    pub(crate) async fn replay<'a, T, F>(
        &'a self,
        what: WaitsFor,
        call: OpCall<'_>,
        anew: impl FnOnce(Journaled<'a>) -> F,
    ) -> Result<T, Failure>
    where
        T: DeserializeOwned,
        F: Future<Output = Result<T, Failure>>,
    {
        self.replay_as(what, call, |_, text| serde_json::from_str(text), anew).await
    }

    /// Runs an operation. If the journal holds its result, `read` decodes that; otherwise `anew` runs the operation.
    pub(crate) async fn replay_as<'a, T, F>(
        &'a self,
        what: WaitsFor,
        call: OpCall<'_>,
        read: impl FnOnce(&Journaled<'a>, &str) -> serde_json::Result<T>,
        anew: impl FnOnce(Journaled<'a>) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        self.operation(what, |doing| async move {
            let operation = self.journaled(&call, doing).await;
            match &operation.entry.state {
                EntryState::Done(text) => Ok(operation.fits(read(&operation, text)).await),
                EntryState::Gave(text) => Err(operation.named(read_failure(text))),
                _ => anew(operation).await,
            }
        })
        .await
    }

    /// A value that is chosen once. It has no effects, so the next commit records it.
    pub(crate) async fn value<T: Serialize + DeserializeOwned>(
        &self,
        kind: Kind,
        name: &str,
        choose: impl FnOnce(&Run) -> T,
    ) -> T {
        self.value_with(kind, name, |run| (choose(run), None)).await
    }

    /// A value that is chosen once, with an effect of the commit that records it.
    pub(crate) async fn value_with<T: Serialize + DeserializeOwned>(
        &self,
        kind: Kind,
        name: &str,
        choose: impl FnOnce(&Run) -> (T, Option<OpEffect>),
    ) -> T {
        let call = OpCall { kind, name, argument: 0 };
        let chosen = self.replay(WaitsFor::Store, call, |operation| async move {
            let (value, effect) = choose(&self.run);
            operation.done_with(&value, effect);
            Ok(value)
        });
        match chosen.await {
            Ok(value) => value,
            Err(failure) => self.run.park(format!("{kind} {name:?} failed in the journal: {failure}")).await,
        }
    }

    /// Runs an operation in the branch that is polled.
    pub(crate) async fn operation<T, F>(&self, what: WaitsFor, operation: impl FnOnce(Doing) -> F) -> T
    where
        F: Future<Output = T>,
    {
        let here = self.begins().await;
        let doing = OpInProgress(Doing::begin(&self.run, what, Some(here.path.clone())).shielded(self.is_shielded));
        if self.run.engine.rehearsal.is_strict() {
            tokio::task::yield_now().await;
        }
        if self.run.is_full() {
            // This operation has nothing pending that could be refused.
            let _ = doing.flush().await;
        }
        let mut operation = std::pin::pin!(operation(doing.clone()));
        let poll = |context: &mut Context<'_>| match here.is_polled(&self.run) {
            true => operation.as_mut().poll(context),
            false => {
                let reason = "an operation was begun in one branch and awaited on in another; await it in one of them";
                self.run.set_stop(Stop::Parked(reason.into()));
                Poll::Pending
            }
        };
        let done = std::future::poll_fn(poll).await;
        drop(doing);
        here.ends();
        done
    }

    /// The decoded result of an operation. A result that does not fit its type parks the execution.
    pub(crate) async fn recorded<T>(&self, place: &Place, entry: &Entry, read: serde_json::Result<T>) -> T {
        match read {
            Ok(value) => value,
            Err(error) => {
                let Entry { kind, name, .. } = entry;
                let result = format!("the result of {kind} {name:?} (operation {place})");
                let reason = format!("{result} does not fit its type: {error}");
                let code = format!("{} with another type", shown_call(*kind, name));
                self.run.park_at(place, shown_call(*kind, name), code, reason).await
            }
        }
    }

    /// An operation with its place and its entry in the journal.
    pub(crate) async fn journaled(&self, call: &OpCall<'_>, doing: Doing) -> Journaled<'_> {
        let (place, found) = self.take(call).await;
        let is_new = found.is_none();
        let entry = found.unwrap_or_else(|| call.entry(self.run.env().now(), EntryState::Begun));
        Journaled { ctx: self, doing, place, entry, is_new }
    }

    /// The place of the next operation, and its entry in the journal. An entry of another operation parks the
    /// execution.
    pub(crate) async fn take(&self, call: &OpCall<'_>) -> (Place, Option<Entry>) {
        let here = self.here();
        if let Err(stop) = here.read_ahead(&self.run).await {
            return self.run.stop_for(stop).await;
        }
        // The future that was to stop may have been dropped, and the code may have continued.
        if self.run.with(|state| state.residency.is_stopping()) {
            return std::future::pending().await;
        }
        let (place, found) = here.next();
        let OpCall { kind, name, argument } = call;
        if let Some(step) = here.announced().filter(|step| (*kind, *name) != (Kind::Step, &**step)) {
            let reason = format!("the key of step {step:?} was asked for, and the next operation is {kind} {name:?}");
            let recorded = found.as_ref().map_or_else(|| "nothing".into(), |it| shown_call(it.kind, &it.name));
            return self.run.park_at(&place, recorded, shown_call(*kind, name), reason).await;
        }
        match &found {
            None => self.run.effect().await,
            Some(found) if found.kind != *kind || *found.name != **name || !found.is_given(*argument) => {
                let other = if found.kind == *kind && *found.name == **name { ", with other arguments" } else { "" };
                let reason = format!(
                    "operation {place} is {kind} {name:?} in the code, and {} {:?} in the journal{other}",
                    found.kind, found.name
                );
                let recorded = format!("{}{other}", shown_call(found.kind, &found.name));
                return self.run.park_at(&place, recorded, shown_call(*kind, name), reason).await;
            }
            Some(_) => {}
        }
        (place, found)
    }
}

impl Journaled<'_> {
    fn run(&self) -> &Run {
        &self.ctx.run
    }

    /// When the code called it first.
    pub(crate) fn since(&self) -> Timestamp {
        Timestamp(self.entry.since_us)
    }

    /// Keeps its state for the next commit.
    pub(crate) fn put(&mut self, state: EntryState) {
        self.entry.state = state;
        self.run().put(&self.place, self.entry.clone());
    }

    /// Keeps its result for the next commit, with an effect of that commit.
    pub(crate) fn ends(&self, state: EntryState, effect: Option<OpEffect>) {
        self.run().put_with(&self.place, Entry { state, ..self.entry.clone() }, effect);
    }

    /// Records its result.
    pub(crate) fn done(&self, value: &(impl Serialize + ?Sized)) {
        self.done_with(value, None);
    }

    pub(crate) fn done_with(&self, value: &(impl Serialize + ?Sized), effect: Option<OpEffect>) {
        let text = serde_json::to_string(value).expect("the result of an operation can be written as JSON");
        self.ends(EntryState::Done(text), effect);
    }

    /// Records its final failure.
    pub(crate) fn gave(&self, failure: Failure) -> Failure {
        self.ends(EntryState::Gave(failure_text(&failure)), None);
        self.named(failure)
    }

    /// The failure of a step or a transaction, with the name of that. A cancellation is the same wherever it is met.
    fn named(&self, failure: Failure) -> Failure {
        let is_step = matches!(self.entry.kind, Kind::Step | Kind::Transaction);
        if is_step && !failure.is_cancelled() { failure.in_step(&self.entry.name) } else { failure }
    }

    /// Records that it did not run because it is cancelled.
    pub(crate) fn cancelled(&self) -> Failure {
        self.gave(self.run().why_cancelled(&self.place))
    }

    /// Fails if the operation is cancelled.
    pub(crate) fn unless_cancelled(&self) -> Result<(), Failure> {
        if self.doing.is_cancelled() { Err(self.cancelled()) } else { Ok(()) }
    }

    /// The decoded result of the operation.
    pub(crate) async fn fits<T>(&self, read: serde_json::Result<T>) -> T {
        self.ctx.recorded(&self.place, &self.entry, read).await
    }
}
