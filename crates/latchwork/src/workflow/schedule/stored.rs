//! The stored records of schedules, and their keys. docs/format.md shows the bytes.

use serde::{Deserialize, Serialize};

use super::plan::written;
use super::{Counts, Overlap, RunOutcome};
use crate::node::alarm::{alarm_key, due_key};
use crate::node::{ExecutionId, read_text, shard_of, write_text};
use crate::record::stored;
use crate::store::{Key, Range, Space, SpaceSpec, Store, StoreError, Timestamp};

/// A schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ScheduleRecord {
    pub(crate) timing: Timing,
    pub(crate) overlap: Overlap,
    pub(crate) catch_up_us: u64,
    /// The name of the workflow that it starts.
    pub(crate) workflow: String,
    /// JSON text.
    pub(crate) input: String,
    pub(crate) created_us: u64,
    /// When it was last put.
    pub(crate) changed_us: u64,
    pub(crate) paused: Option<Paused>,
    /// The next occurrence; none if there are no more. Not updated while the schedule is paused.
    pub(crate) next_us: Option<u64>,
    /// The last occurrence that was handled. No occurrence up to this time comes again.
    pub(crate) last_us: Option<u64>,
    /// The alarm that is set. The next commit replaces it.
    pub(crate) due_us: Option<u64>,
    /// Occurrences that operators requested and that the keeper must handle at once.
    pub(crate) triggers: Vec<Occurrence>,
    /// Occurrences that wait for the end of an execution.
    pub(crate) waiting: Vec<Occurrence>,
    pub(crate) backfills: Vec<Backfill>,
    /// How often it was triggered.
    pub(crate) triggered: u64,
    /// How many past runs were recorded.
    pub(crate) runs: u64,
    pub(crate) counts: Counts,
    /// Why the schedule cannot start anything at present.
    pub(crate) stalled: Option<String>,
}

/// When a schedule fires.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timing {
    pub(crate) when: When,
    pub(crate) jitter_us: u64,
    /// There is no occurrence before this time.
    pub(crate) start_us: Option<u64>,
    /// There is no occurrence after this time.
    pub(crate) end_us: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum When {
    Cron { expression: String, zone: String },
    Every { every_us: u64 },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Paused {
    pub(crate) reason: String,
    pub(crate) since_us: u64,
}

/// One time at which a schedule starts an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Occurrence {
    pub(crate) time_us: u64,
    pub(crate) cause: Cause,
}

/// The cause of an occurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Cause {
    /// The time of the schedule.
    Time,
    /// A trigger by an operator, with its number.
    Trigger(u64),
    /// A backfill.
    Backfill,
}

/// A range of past occurrences that must still be started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Backfill {
    /// The first occurrence that is left.
    pub(crate) from_us: u64,
    /// All occurrences are before this time.
    pub(crate) to_us: u64,
}

/// The outcome of an occurrence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PastRun {
    pub(crate) occurrence: Occurrence,
    pub(crate) at_us: u64,
    pub(crate) outcome: RunOutcome,
}

stored!(ScheduleRecord, PastRun);

impl Timing {
    pub(crate) fn new(when: When) -> Timing {
        Timing { when, jitter_us: 0, start_us: None, end_us: None }
    }
}

impl Occurrence {
    /// The id of the execution for this occurrence. A triggered occurrence has another id than a timed one of the same
    /// time.
    pub(crate) fn execution(&self, schedule: &str) -> ExecutionId {
        let time = written(Timestamp(self.time_us));
        match self.cause {
            Cause::Time | Cause::Backfill => format!("{schedule}@{time}").into(),
            Cause::Trigger(number) => format!("{schedule}@{time}~{number}").into(),
        }
    }
}

/// How many past runs of a schedule are kept.
pub(crate) const KEPT_RUNS: u64 = 100;

const SCHEDULES: &str = "workflow.schedules";
const DUE: &str = "workflow.schedules.due";
const RUNNING: &str = "workflow.schedules.running";
const RUNS: &str = "workflow.schedules.runs";

/// The spaces of schedules.
#[derive(Clone)]
pub(crate) struct ScheduleSpaces {
    /// name → schedule
    pub(crate) schedules: Space,
    /// shard, due time, name → nothing; or the same followed by an execution of the schedule that has ended
    pub(crate) due: Space,
    /// name, execution → nothing, as long as the execution has not ended
    pub(crate) running: Space,
    /// name, number → the outcome of an occurrence
    pub(crate) runs: Space,
}

impl ScheduleSpaces {
    pub(crate) async fn declare(store: &Store) -> Result<ScheduleSpaces, StoreError> {
        // A schedule may be deleted and created again. Its revs continue, so that a check on the old record fails.
        let schedules = store.space(SpaceSpec::new(SCHEDULES)).await?;
        let due = store.space(SpaceSpec::new(DUE).keys_used_once()).await?;
        let running = store.space(SpaceSpec::new(RUNNING).keys_used_once()).await?;
        let runs = store.space(SpaceSpec::new(RUNS).keys_used_once()).await?;
        Ok(ScheduleSpaces { schedules, due, running, runs })
    }

    /// Finds the spaces of a store. None if no engine that knows schedules has used it.
    pub(crate) async fn find(store: &Store) -> Result<Option<ScheduleSpaces>, StoreError> {
        let known = store.spaces().await?;
        let space = |name: &str| known.iter().find(|space| space.name() == name).cloned();
        let find = || {
            let (schedules, due) = (space(SCHEDULES)?, space(DUE)?);
            Some(ScheduleSpaces { schedules, due, running: space(RUNNING)?, runs: space(RUNS)? })
        };
        Ok(find())
    }

    pub(crate) fn schedule(&self, name: &str) -> Key {
        self.schedules.key(name.as_bytes())
    }

    /// The alarm of a schedule. Only commits that change the schedule's record set and delete it.
    pub(crate) fn alarm(&self, name: &str, due: Timestamp) -> Key {
        self.due.key(alarm_key(due, &name.into()))
    }

    /// The notice that an execution has ended. It is stored among the alarms, so that the keeper finds it. Its key is
    /// unique, so that only a commit that has read it deletes it.
    pub(crate) fn notice(&self, name: &str, at: Timestamp, execution: &ExecutionId) -> Key {
        let mut key = due_key(shard_of(name.as_bytes()), at);
        key.extend_from_slice(name.as_bytes());
        key.push(0);
        key.extend_from_slice(execution.as_bytes());
        self.due.key(key)
    }

    pub(crate) fn running(&self, name: &str, execution: &ExecutionId) -> Key {
        let mut key = named(name);
        key.extend_from_slice(execution.as_bytes());
        self.running.key(key)
    }

    /// All executions of a schedule that have not ended.
    pub(crate) fn all_running(&self, name: &str) -> Range {
        self.running.prefix(named(name))
    }

    pub(crate) fn run(&self, name: &str, number: u64) -> Key {
        let mut key = named(name);
        key.extend_from_slice(&number.to_be_bytes());
        self.runs.key(key)
    }

    pub(crate) fn all_runs(&self, name: &str) -> Range {
        self.runs.prefix(named(name))
    }
}

/// Reads the execution from the key of a running execution.
pub(crate) fn read_running(key: &Key) -> Option<ExecutionId> {
    let (_, id) = read_text(key.bytes())?;
    Some(std::str::from_utf8(id).ok()?.into())
}

/// Reads the schedule from an alarm or a notice. True if it is a notice.
pub(crate) fn read_due(id: &ExecutionId) -> (&str, bool) {
    id.split_once('\0').map_or((id, false), |(name, _)| (name, true))
}

fn named(name: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(name.len() + 64);
    write_text(&mut key, name);
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;

    #[test]
    fn records_are_read_as_they_were_written() {
        let when = When::Cron { expression: "0 2 * * *".into(), zone: "Europe/Berlin".into() };
        let occurrence = |cause| Occurrence { time_us: 1_767_232_800_000_000, cause };
        let schedule = ScheduleRecord {
            timing: Timing { jitter_us: 1, start_us: Some(2), end_us: None, ..Timing::new(when) },
            overlap: Overlap::QueueAll,
            catch_up_us: 3,
            workflow: "report".into(),
            input: "{}".into(),
            created_us: 4,
            changed_us: 5,
            paused: Some(Paused { reason: "audit".into(), since_us: 6 }),
            next_us: Some(7),
            last_us: None,
            due_us: Some(8),
            triggers: vec![occurrence(Cause::Trigger(9))],
            waiting: vec![occurrence(Cause::Time)],
            backfills: vec![Backfill { from_us: 10, to_us: 11 }],
            triggered: 12,
            runs: 13,
            counts: Counts { started: 14, ..Counts::default() },
            stalled: None,
        };
        assert_eq!(ScheduleRecord::decode(&schedule.encode()), Ok(schedule));
        let outcome = RunOutcome::CancelledPrevious(vec!["a".into()]);
        let run = PastRun { occurrence: occurrence(Cause::Backfill), at_us: 1, outcome };
        assert_eq!(PastRun::decode(&run.encode()), Ok(run));
        assert_eq!(&*occurrence(Cause::Time).execution("a"), "a@2026-01-01T02:00:00Z");
        assert_eq!(&*occurrence(Cause::Trigger(2)).execution("a"), "a@2026-01-01T02:00:00Z~2");
    }
}
