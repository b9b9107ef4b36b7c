//! Tasks on the wire: their shapes, and what their errors become.

use std::time::Duration;

use latchwork::Value;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::spans;
use crate::tasks::{self, Lease, Take, TaskError, TaskFailure, TaskRetry, TaskState};
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::{TimeWire, duration, millis};

/// The longest names, in bytes.
const ID_BYTES: usize = 512;
const KIND_BYTES: usize = 200;
const KEY_BYTES: usize = 255;
/// The number of kinds of a worker, and of tasks that it takes at once.
const KINDS: usize = 100;
const MOST: usize = 100;
/// The lease, by default and within which bounds.
const LEASE: Duration = Duration::from_secs(30);
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest delay, and the longest pause between attempts.
const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

fn wrong(detail: impl Into<String>) -> Problem {
    Problem::new(ProblemCode::InvalidBody, detail)
}

/// A task to put.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = NewTask)]
#[serde(deny_unknown_fields)]
pub(crate) struct PutTask {
    /// What a worker has to be able to do: workers take tasks by their kinds. 1 to 200 bytes.
    kind: String,
    #[serde(default)]
    #[schema(value_type = Value)]
    input: Value,
    /// Puts it once: a task of this id, kind and input is put at most once, as long as it is kept, which is seven days
    /// after its end. Without one, an id is generated.
    id: Option<String>,
    /// What the worker passes to receivers as their idempotency key: 1 to 255 visible ASCII characters. By default the
    /// id, if it has such characters only.
    key: Option<String>,
    /// How often it may be taken, by default five times.
    attempts: Option<u32>,
    /// The pause after the first attempt that fails, such as `1s`, which is the default. It doubles with each attempt.
    pause: Option<String>,
    /// The longest pause; by default one minute.
    longest_pause: Option<String>,
    /// It can be taken after this time.
    delay: Option<String>,
}

impl PutTask {
    pub(crate) fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    pub(crate) fn read(self, id: String) -> Result<tasks::NewTask, Problem> {
        let PutTask { kind, input, key, attempts, pause, longest_pause, delay, .. } = self;
        check_name("id", &id, ID_BYTES)?;
        check_name("kind", &kind, KIND_BYTES)?;
        let is_key = |key: &str| (1..=KEY_BYTES).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
        if key.as_deref().is_some_and(|key| !is_key(key)) {
            return Err(wrong(format!("key: it has 1 to {KEY_BYTES} visible ASCII characters")));
        }
        let mut new = tasks::NewTask::new(id, kind, input);
        new.key = key.unwrap_or_else(|| crate::tasks::key_of(&new.id));
        let retry = TaskRetry::default();
        let micros = |field, text: Option<String>, default: u64| {
            Ok::<_, Problem>(read(field, text.as_deref(), YEAR)?.map_or(default, |read| read.as_micros() as u64))
        };
        new.retry = TaskRetry {
            attempts: attempts.unwrap_or(retry.attempts),
            pause_us: micros("pause", pause, retry.pause_us)?,
            longest_us: micros("longest_pause", longest_pause, retry.longest_us)?,
        };
        if new.retry.attempts == 0 {
            return Err(wrong("attempts: a task is tried at least once"));
        }
        new.delay = read("delay", delay.as_deref(), YEAR)?.unwrap_or_default();
        Ok(new)
    }
}

fn check_name(field: &str, name: &str, most: usize) -> Result<(), Problem> {
    match (1..=most).contains(&name.len()) {
        true => Ok(()),
        false => Err(wrong(format!("{field}: it has 1 to {most} bytes, not {}", name.len()))),
    }
}

fn read(field: &str, text: Option<&str>, most: Duration) -> Result<Option<Duration>, Problem> {
    let Some(text) = text else { return Ok(None) };
    let read =
        duration(text).ok_or_else(|| wrong(format!("{field}: {text:?} is not a duration: write 30s, or 500ms")))?;
    if read > most {
        return Err(wrong(format!("{field}: at most {most:?}, not {read:?}")));
    }
    Ok(Some(read))
}

fn lease(text: Option<&str>) -> Result<Option<Duration>, Problem> {
    match read("lease", text, LONGEST)? {
        Some(length) if length < SHORTEST => Err(wrong(format!("lease: at least {SHORTEST:?}, not {length:?}"))),
        length => Ok(length),
    }
}

/// What a worker takes.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TakeTasks {
    /// The kinds of tasks that the worker does.
    kinds: Vec<String>,
    /// How many tasks at most: 1 to 100, by default 1.
    #[schema(minimum = 1, maximum = 100)]
    max: Option<usize>,
    /// How long the worker may be silent before another one gets the task: `30s`, which is the default, or `500ms`. At
    /// least 100 ms, at most a day. A heartbeat renews it.
    lease: Option<String>,
    /// The name that operators see. By default the name of the token.
    worker: Option<String>,
}

impl TakeTasks {
    pub(crate) fn read(self, subject: &str) -> Result<Take, Problem> {
        let TakeTasks { mut kinds, max, lease: length, worker } = self;
        let most = max.unwrap_or(1);
        if !(1..=MOST).contains(&most) {
            return Err(wrong(format!("max: 1 to {MOST} tasks, not {most}")));
        }
        if !(1..=KINDS).contains(&kinds.len()) {
            return Err(wrong(format!("kinds: 1 to {KINDS} kinds, not {}", kinds.len())));
        }
        kinds.iter().try_for_each(|kind| check_name("kinds", kind, KIND_BYTES))?;
        kinds.sort_unstable();
        kinds.dedup();
        let worker = worker.unwrap_or_else(|| subject.into());
        check_name("worker", &worker, KIND_BYTES)?;
        Ok(Take { kinds, most, lease: Lease { worker, length: lease(length.as_deref())?.unwrap_or(LEASE) } })
    }
}

/// A sign of life of a worker.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Heartbeat {
    /// The token under which the worker has taken the task.
    pub(crate) token: u64,
    /// The lease from now on. By default it is as long as before.
    lease: Option<String>,
}

impl Heartbeat {
    pub(crate) fn lease(&self) -> Result<Option<Duration>, Problem> {
        lease(self.lease.as_deref())
    }
}

/// The result of a task.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompleteTask {
    /// The token under which the worker has taken the task.
    pub(crate) token: u64,
    #[serde(default)]
    #[schema(value_type = Value)]
    pub(crate) output: Value,
}

/// The failure of an attempt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FailTask {
    /// The token under which the worker has taken the task.
    pub(crate) token: u64,
    message: String,
    /// A code for programs.
    code: Option<String>,
    #[serde(default)]
    #[schema(value_type = Value)]
    details: Value,
    /// False if no other attempt makes sense: the task has failed for good.
    #[serde(default = "yes")]
    retryable: bool,
    /// The pause before the next attempt, in place of that of the task.
    pause: Option<String>,
}

fn yes() -> bool {
    true
}

impl FailTask {
    /// The failure; and the pause, unless no other attempt makes sense.
    pub(crate) fn read(self) -> Result<(TaskFailure, Option<Option<Duration>>), Problem> {
        let FailTask { message, code, details, retryable, pause, .. } = self;
        let again = retryable.then_some(read("pause", pause.as_deref(), YEAR)?);
        Ok((TaskFailure { message, code, details }, again))
    }
}

/// The end of a task that shall not be done.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CancelTask {
    pub(crate) reason: String,
}

/// A task.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Task)]
pub(crate) struct TaskWire {
    id: String,
    kind: String,
    /// The idempotency key for receivers: the same for each attempt.
    key: String,
    /// `open`, `leased`, `done`, `failed` or `cancelled`.
    state: &'static str,
    #[schema(value_type = Value)]
    input: Value,
    /// How often it was taken.
    attempt: u32,
    /// How often it may be taken.
    attempts: u32,
    /// The fencing token of the last lease, which is larger than that of each lease before; 0 if it was never taken.
    token: u64,
    put_at: TimeWire,
    /// From when on it can be taken, if it is open.
    #[schema(required)]
    due_at: Option<TimeWire>,
    /// The worker that has taken it, if it is leased.
    #[schema(required)]
    worker: Option<String>,
    /// Until when the worker may be silent, if it is leased.
    #[schema(required)]
    lease_until: Option<TimeWire>,
    #[schema(required)]
    lease_ms: Option<u64>,
    #[schema(required)]
    ended_at: Option<TimeWire>,
    /// The result, if it is done.
    #[schema(required, value_type = Option<Value>)]
    output: Option<Value>,
    /// Why the attempt has failed that has failed last.
    #[schema(required)]
    failure: Option<TaskFailureWire>,
    /// Why it was cancelled.
    #[schema(required)]
    reason: Option<String>,
    /// The header `traceparent` of W3C Trace Context under which a worker does it. It is there when the worker takes
    /// the task, if the server makes traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
}

/// Why an attempt at a task has failed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TaskFailure)]
pub(crate) struct TaskFailureWire {
    message: String,
    #[schema(required)]
    code: Option<String>,
    #[schema(value_type = Value)]
    details: Value,
}

impl From<tasks::Task> for TaskWire {
    fn from(task: tasks::Task) -> TaskWire {
        let (state, ended_at) = (task.word(), task.ended().map(TimeWire));
        let (mut due_at, mut worker, mut lease_until, mut lease_ms) = (None, None, None, None);
        let (mut output, mut reason) = (None, None);
        match task.state {
            TaskState::Open { due } => due_at = Some(due.into()),
            TaskState::Leased { worker: by, until, lease_us } => {
                (worker, lease_until) = (Some(by), Some(until.into()));
                lease_ms = Some(millis(Duration::from_micros(lease_us)));
            }
            TaskState::Done { output: done, .. } => output = Some(done),
            TaskState::Failed { .. } => {}
            TaskState::Cancelled { reason: why, .. } => reason = Some(why),
        }
        let failure =
            task.failure.map(|TaskFailure { message, code, details }| TaskFailureWire { message, code, details });
        TaskWire {
            id: task.id,
            kind: task.kind,
            key: task.key,
            state,
            input: task.input,
            attempt: task.attempt,
            attempts: task.retry.attempts,
            token: task.token,
            put_at: task.put_at.into(),
            due_at,
            worker,
            lease_until,
            lease_ms,
            ended_at,
            output,
            failure,
            reason,
            traceparent: None,
        }
    }
}

impl TaskWire {
    /// As the worker gets it that takes it.
    pub(crate) fn taken(tasks: &tasks::Tasks, task: tasks::Task) -> TaskWire {
        let traceparent = spans::traceparent_of_task(tasks.engine_name(), &task);
        TaskWire { traceparent, ..TaskWire::from(task) }
    }
}

/// The tasks that a worker has taken.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TakenTasks {
    /// None if there were none until the time was up.
    pub(crate) tasks: Vec<TaskWire>,
}

/// Which tasks are listed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TaskQuery {
    /// Only tasks of this kind.
    pub(crate) kind: Option<String>,
    /// Only tasks in this state: `open`, `leased`, `done`, `failed` or `cancelled`.
    #[param(inline)]
    pub(crate) state: Option<TaskStateWord>,
    /// Continues after an earlier page: its `next`.
    pub(crate) after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<usize>,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TaskStateWord {
    Open,
    Leased,
    Done,
    Failed,
    Cancelled,
}

impl TaskStateWord {
    pub(crate) fn word(self) -> &'static str {
        match self {
            TaskStateWord::Open => "open",
            TaskStateWord::Leased => "leased",
            TaskStateWord::Done => "done",
            TaskStateWord::Failed => "failed",
            TaskStateWord::Cancelled => "cancelled",
        }
    }
}

impl TaskQuery {
    /// Stands for the filter, in cursors.
    fn mark(&self) -> String {
        let state = self.state.map_or("", TaskStateWord::word);
        format!("tasks/{}/{state}/", hex(self.kind.as_deref().unwrap_or_default()))
    }

    /// The cursor after this task.
    pub(crate) fn next(&self, id: &str) -> String {
        hex(&format!("{}{id}", self.mark()))
    }

    /// The task after which the page begins.
    pub(crate) fn position(&self) -> Result<Option<String>, Problem> {
        let Some(after) = &self.after else { return Ok(None) };
        let unknown = || Problem::new(ProblemCode::InvalidCursor, format!("{after:?} does not continue this list"));
        let text = unhex(after).ok_or_else(unknown)?;
        text.strip_prefix(&self.mark()).map(|id| Some(id.into())).ok_or_else(unknown)
    }
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<String> {
    let digits = text.as_bytes();
    let byte = |two: &[u8]| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.chunks_exact(2).map(byte).collect();
    String::from_utf8(bytes.filter(|_| digits.len().is_multiple_of(2))?).ok()
}

impl From<TaskError> for Problem {
    fn from(error: TaskError) -> Problem {
        let detail = error.to_string();
        match error {
            TaskError::NotFound { id } => Problem::new(ProblemCode::NotFound, detail).with("id", id),
            TaskError::Exists { id } => Problem::new(ProblemCode::AlreadyExists, detail).with("id", id),
            TaskError::LeaseLost { id, state } => {
                Problem::new(ProblemCode::LeaseLost, detail).with("id", id).with("state", state)
            }
            TaskError::Ended { id, state } => {
                Problem::new(ProblemCode::TaskEnded, detail).with("id", id).with("state", state)
            }
            TaskError::Contended => Problem::new(ProblemCode::Contended, detail),
            TaskError::Damaged { .. } => {
                tracing::error!(error = detail, "stored data is damaged");
                Problem::new(ProblemCode::Damaged, "stored data cannot be read; the log of the server names the place")
            }
            TaskError::Unwritable { .. } | TaskError::Answer => Problem::internal(&detail),
            TaskError::Store(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_continues_its_own_list_only() {
        let query =
            |kind: &str, after: Option<String>| TaskQuery { kind: Some(kind.into()), after, ..Default::default() };
        let next = query("a", None).next("täsk/1");
        assert_eq!(query("a", Some(next.clone())).position().unwrap().as_deref(), Some("täsk/1"));
        for wrong in
            [query("b", Some(next.clone())), query("a", Some(format!("{next}0"))), query("a", Some("zz".into()))]
        {
            assert_eq!(wrong.position().unwrap_err().code(), ProblemCode::InvalidCursor);
        }
    }
}
