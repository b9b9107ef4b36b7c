//! The machine of the record: the record of an execution as it is stored, and what the next commit has to change in it.
//! It knows nothing of entries, messages or commits in flight.

use crate::store::{Rev, Timestamp};
use crate::workflow::stored::record::{Admission, Execution, Labels, StoredStatus};

#[derive(Default)]
pub(crate) struct KnownRecord {
    stored: Execution,
    /// `None` while the execution is not stored.
    rev: Option<Rev>,
    has_children: bool,
    has_locks: bool,
    has_reviews: bool,
    labels: Labels,
    /// The labels that the code has set in the present poll.
    draft_labels: Option<Labels>,
    cancel: Option<String>,
    /// True if the record has to be written though no entry is pending.
    is_wanted: bool,
}

impl KnownRecord {
    pub(crate) fn new(stored: Execution, rev: Option<Rev>) -> KnownRecord {
        KnownRecord {
            has_children: stored.has_children,
            has_locks: stored.has_locks,
            has_reviews: stored.has_reviews,
            labels: stored.labels.clone(),
            cancel: stored.cancel.clone(),
            stored,
            rev,
            ..KnownRecord::default()
        }
    }

    /// The stored record; of an execution that is not stored yet, the record that its first commit writes.
    pub(crate) fn stored(&self) -> &Execution {
        &self.stored
    }

    pub(crate) fn rev(&self) -> Option<Rev> {
        self.rev
    }

    pub(crate) fn is_stored(&self) -> bool {
        self.rev.is_some()
    }

    /// True if it has started children, uncommitted ones included.
    pub(crate) fn has_children(&self) -> bool {
        self.has_children
    }

    /// True if it has requested locks, uncommitted requests included.
    pub(crate) fn has_locks(&self) -> bool {
        self.has_locks
    }

    /// True if it has opened reviews, uncommitted ones included.
    pub(crate) fn has_reviews(&self) -> bool {
        self.has_reviews
    }

    pub(crate) fn start_child(&mut self) {
        self.has_children = true;
    }

    pub(crate) fn ask_for_lock(&mut self) {
        self.has_locks = true;
    }

    pub(crate) fn open_review(&mut self) {
        self.has_reviews = true;
    }

    /// The labels, including those of the present poll.
    pub(crate) fn labels(&self) -> &Labels {
        self.draft_labels.as_ref().unwrap_or(&self.labels)
    }

    pub(super) fn label(&mut self, labels: Labels) {
        self.draft_labels = Some(labels);
    }

    /// The poll is over: the next commit writes its changes together.
    pub(super) fn release(&mut self) {
        if let Some(labels) = self.draft_labels.take() {
            self.labels = labels;
        }
    }

    /// The reason of the cancellation, if the execution is to be cancelled.
    pub(crate) fn cancel(&self) -> Option<&str> {
        self.cancel.as_deref()
    }

    /// Cancels the execution with the next commit, and asks for that commit.
    pub(super) fn ask_cancel(&mut self, reason: &str) {
        self.cancel.get_or_insert_with(|| reason.into());
        self.is_wanted = true;
    }

    /// Another commit has changed the record. Returns whether that commit changed the rev that is known here. If not,
    /// the known record is out of date.
    #[must_use]
    pub(super) fn changed(&mut self, before: Rev, after: Option<Rev>, execution: Execution) -> bool {
        if self.rev != Some(before) {
            return false;
        }
        self.rev = after;
        self.cancel = self.cancel.take().or(execution.cancel.clone());
        self.stored = execution;
        true
    }

    /// Asks for the record to be written soon.
    pub(super) fn want(&mut self) {
        self.is_wanted = true;
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }

    /// A commit takes the request to write the record. A later request asks for another commit.
    pub(super) fn take_wanted(&mut self) -> bool {
        std::mem::take(&mut self.is_wanted)
    }

    /// True if the stored record differs from the record that the running execution has to have.
    pub(super) fn is_changed(&self) -> bool {
        let stored = &self.stored;
        stored.status != StoredStatus::Running
            || stored.timer_us.is_some()
            || stored.labels != self.labels
            || stored.cancel != self.cancel
            || stored.has_children != self.has_children
            || stored.has_locks != self.has_locks
            || stored.has_reviews != self.has_reviews
    }

    /// The record that the running execution has to have from now on.
    pub(super) fn running(&self) -> Execution {
        let mut after = Execution {
            status: StoredStatus::Running,
            timer_us: None,
            waits: Vec::new(),
            labels: self.labels.clone(),
            cancel: self.cancel.clone(),
            has_children: self.has_children,
            has_locks: self.has_locks,
            has_reviews: self.has_reviews,
            ..self.stored.clone()
        };
        after.admission.iter_mut().for_each(|admission| admission.gathers = None);
        after
    }

    /// A commit that wrote the record has landed.
    pub(super) fn landed(&mut self, execution: Execution, rev: Option<Rev>) {
        (self.stored, self.rev) = (execution, rev);
    }

    /// Sets the permits that the first commit takes; none if the start was not admitted.
    pub(crate) fn set_admission(&mut self, admission: Option<Box<Admission>>) {
        self.stored.admission = admission;
    }

    /// The fields that the commit that ends the execution needs. The input is copied only if it is asked for.
    pub(super) fn ending(&self, with_input: bool) -> Execution {
        let stored = &self.stored;
        Execution {
            workflow: stored.workflow.clone(),
            input: if with_input { stored.input.clone() } else { String::new() },
            started_us: stored.started_us,
            has_children: self.has_children,
            has_locks: self.has_locks,
            has_reviews: self.has_reviews,
            parent: stored.parent.clone(),
            schedule: stored.schedule.clone(),
            admission: stored.admission.clone(),
            superseded: stored.superseded,
            run: stored.run,
            key: stored.key.clone(),
            ..Execution::default()
        }
    }

    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.stored.deadline_us.map(Timestamp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Event = fn(&mut KnownRecord);

    fn running() -> KnownRecord {
        let stored = Execution { workflow: "w".into(), status: StoredStatus::Running, ..Execution::default() };
        KnownRecord::new(stored, Some(Rev(3)))
    }

    /// Each row: events, whether the record then has to be written, and whether a commit for the record alone is
    /// wanted.
    #[test]
    fn the_record_is_written_if_and_only_if_an_event_has_changed_it() {
        let cancelled =
            || Execution { cancel: Some("stop".into()), status: StoredStatus::Running, ..Execution::default() };
        let table: &[(&str, &[Event], bool, bool)] = &[
            ("nothing", &[], false, false),
            ("a child", &[KnownRecord::start_child], true, false),
            ("a lock", &[KnownRecord::ask_for_lock], true, false),
            ("a review", &[KnownRecord::open_review], true, false),
            ("a cancellation", &[|known| known.ask_cancel("stop")], true, true),
            ("labels in a poll", &[|known| known.label(labels("a"))], false, false),
            ("labels, and the poll is over", &[|known| known.label(labels("a")), KnownRecord::release], true, false),
            (
                "the same labels as before",
                &[|known| known.label(Labels::default()), KnownRecord::release],
                false,
                false,
            ),
            ("a doubt", &[KnownRecord::want], false, true),
            ("a doubt that a commit has taken", &[KnownRecord::want, |known| _ = known.take_wanted()], false, false),
        ];
        for (what, events, is_changed, is_wanted) in table {
            let mut known = running();
            events.iter().for_each(|event| event(&mut known));
            assert_eq!((known.is_changed(), known.is_wanted()), (*is_changed, *is_wanted), "{what}");
            let after = known.running();
            known.landed(after, Some(Rev(4)));
            assert!(!known.is_changed(), "{what}: the next commit has written it");
        }
        let mut known = running();
        assert!(known.changed(Rev(3), Some(Rev(4)), cancelled()) && known.cancel() == Some("stop"));
        assert!(!known.changed(Rev(3), Some(Rev(5)), cancelled()), "a change of an older record is a doubt");
        assert_eq!(known.rev(), Some(Rev(4)));
        let mut waiting =
            KnownRecord::new(Execution { status: StoredStatus::Waiting, ..Execution::default() }, Some(Rev(1)));
        assert!(waiting.is_changed(), "the record of a waiting execution says that it waits");
        waiting.landed(waiting.running(), Some(Rev(2)));
        assert!(!waiting.is_changed());
    }

    fn labels(tag: &str) -> Labels {
        Labels { tags: [tag.to_string()].into(), ..Labels::default() }
    }
}
