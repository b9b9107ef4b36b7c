//! The machine of the residency: an execution's stay in memory, from its load to its eviction. It knows why the stay
//! began and why it ends. It knows nothing of what the code does meanwhile.

use tokio::sync::oneshot;

use crate::workflow::admission::StartNeeds;
use crate::workflow::run::Stop;
use crate::workflow::stored::record::StoredStatus;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// Held by an execution that may have crashed the process, until it has made progress.
pub(crate) type Probation = tokio::sync::mpsc::Sender<()>;

#[derive(Default)]
pub(crate) struct Residency {
    /// True if the journal is known to be empty.
    is_fresh: bool,
    /// The channel to the caller of the start, until that caller is notified.
    started: Option<oneshot::Sender<Result<()>>>,
    /// What the start requests from admission, if the first commit needs it.
    asked: Option<StartNeeds>,
    /// How often the execution was loaded without making progress.
    loads: u32,
    probation: Option<Probation>,
    /// The input of the next run, if the code continues as new.
    continues: Option<String>,
    /// How the execution ended, if another has taken its place.
    succeeded: Option<StoredStatus>,
    /// True if its last commit has told callers on other nodes that there is news.
    is_told: bool,
    stop: Option<Stop>,
    has_left: bool,
}

impl Residency {
    /// An execution starts. Its caller is notified when it is stored.
    pub(super) fn start(&mut self, started: oneshot::Sender<Result<()>>) {
        (self.is_fresh, self.started) = (true, Some(started));
    }

    /// The first commit needs admission.
    pub(super) fn ask(&mut self, asked: Option<StartNeeds>) {
        self.asked = asked;
    }

    pub(crate) fn take_asked(&mut self) -> Option<StartNeeds> {
        self.asked.take()
    }

    /// Sets how often the execution was loaded without making progress.
    pub(super) fn load(&mut self, loads: u32, probation: Option<Probation>) {
        (self.loads, self.probation) = (loads, probation);
    }

    /// Marks the journal as empty.
    pub(super) fn set_fresh(&mut self) {
        self.is_fresh = true;
    }

    pub(crate) fn is_fresh(&self) -> bool {
        self.is_fresh
    }

    /// How often it was loaded without making progress, this time included; 0 once it has made some.
    pub(crate) fn loads(&self) -> u32 {
        self.loads
    }

    /// A commit of the execution has landed. Returns the channel to the caller of the start, if it is not notified yet.
    pub(super) fn landed(
        &mut self,
        is_progress: bool,
        succeeded: Option<StoredStatus>,
        is_told: bool,
    ) -> Option<oneshot::Sender<Result<()>>> {
        if is_progress {
            (self.loads, self.probation) = (0, None);
        }
        self.succeeded = succeeded.or(self.succeeded.take());
        self.is_told = is_told;
        self.started.take()
    }

    /// How it ended, if another has taken its place.
    pub(super) fn succeeded(&self) -> Option<&StoredStatus> {
        self.succeeded.as_ref()
    }

    /// True if its last commit has told callers on other nodes that there is news.
    pub(super) fn is_told(&self) -> bool {
        self.is_told
    }

    /// The code continues as new.
    pub(crate) fn continue_with(&mut self, input: String) {
        self.continues = Some(input);
    }

    pub(crate) fn continues(&self) -> bool {
        self.continues.is_some()
    }

    pub(super) fn take_continuation(&mut self) -> Option<String> {
        self.continues.take()
    }

    /// Ends the stay. The first reason counts. Returns the channel to the caller of the start, and the answer. If the
    /// execution is parked or was ended by an operator, the commit that stores this notifies the caller.
    pub(super) fn stop(&mut self, id: &ExecutionId, stop: Stop) -> Option<(oneshot::Sender<Result<()>>, Result<()>)> {
        self.stop.get_or_insert_with(|| stop.clone());
        let answer = match stop {
            Stop::Parked(_) | Stop::Terminated(_) => return None,
            Stop::Taken => Err(WorkflowError::AlreadyStarted { id: id.clone() }),
            Stop::Failed(error) => Err(error.into()),
            Stop::Fenced => Err(WorkflowError::Stopped),
            Stop::Rejected(error) => Err(error),
            // The execution is stored.
            _ => Ok(()),
        };
        self.started.take().map(|started| (started, answer))
    }

    /// Forgets the earlier reason.
    pub(super) fn forget_stop(&mut self) {
        self.stop = None;
    }

    /// Why the stay has to end, if it has to.
    pub(super) fn stopping(&self) -> Option<&Stop> {
        self.stop.as_ref()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// The execution is no longer driven.
    pub(super) fn leave(&mut self) {
        self.has_left = true;
    }

    pub(crate) fn has_left(&self) -> bool {
        self.has_left
    }

    /// The next run begins, with an empty journal.
    pub(super) fn begin_anew(&mut self) {
        (self.stop, self.is_fresh) = (None, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Why the stay ends, and the answer to the caller of the start: none yet, stored, or an error.
    #[test]
    fn the_caller_of_a_start_is_notified_once_by_the_first_commit_or_by_the_stop() {
        let table = [
            (Stop::Suspended(None), Some(true)),
            (Stop::Continued, Some(true)),
            (Stop::Changed, Some(true)),
            (Stop::Taken, Some(false)),
            (Stop::Fenced, Some(false)),
            (Stop::Parked("why".into()), None),
            (Stop::Terminated(StoredStatus::TimedOut), None),
        ];
        for (stop, told) in table {
            let (sender, mut receiver) = oneshot::channel();
            let mut residency = Residency::default();
            residency.start(sender);
            assert!(residency.is_fresh() && !residency.is_stopping());
            let answer = residency.stop(&"it".into(), stop.clone());
            assert_eq!(answer.as_ref().map(|(_, answer)| answer.is_ok()), told, "{stop:?}");
            assert!(residency.is_stopping());
            let landed = residency.landed(false, None, false);
            assert_eq!(landed.is_some(), told.is_none(), "{stop:?}: by the commit that stores it");
            drop((answer, landed));
            assert!(receiver.try_recv().is_err());
        }
    }

    #[test]
    fn the_first_reason_to_stop_counts_until_it_is_forgotten() {
        let mut residency = Residency::default();
        residency.stop(&"it".into(), Stop::Changed);
        residency.stop(&"it".into(), Stop::Fenced);
        assert!(matches!(residency.stopping(), Some(Stop::Changed)));
        residency.forget_stop();
        residency.stop(&"it".into(), Stop::Fenced);
        assert!(matches!(residency.stopping(), Some(Stop::Fenced)));
        residency.begin_anew();
        assert!(residency.stopping().is_none() && residency.is_fresh());
    }

    #[test]
    fn loads_are_counted_until_there_is_progress() {
        let mut residency = Residency::default();
        residency.load(3, None);
        residency.landed(false, None, false);
        assert_eq!(residency.loads(), 3);
        residency.landed(true, None, false);
        assert_eq!(residency.loads(), 0);
    }
}
