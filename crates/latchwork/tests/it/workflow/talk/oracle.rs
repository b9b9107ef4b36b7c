//! What clients were told, and what must follow from it. Knows nothing of how engines work.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use latchwork::Value;
use latchwork::store::Env;
use latchwork::testing::{Report, TraceKind};
use latchwork::workflow::{Close, ExecutionId, WorkflowError};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;

use super::callers::{Act, NAMED, Play};
use super::cast::{Counted, Ear, Heard, How, Job, STOP, Seen};

/// The answer to something that was sent.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    Stored,
    Count(u64),
    Refused(String),
    TooLate,
}

#[derive(Default)]
pub struct Log {
    env: OnceLock<Env>,
    told: Mutex<Told>,
}

#[derive(Default)]
pub struct Told {
    pub complaints: Vec<String>,
    heard: BTreeSet<(ExecutionId, usize)>,
    /// By the execution and what was sent.
    pub said: BTreeMap<(String, String), Said>,
    /// How often a start with a signal was tried, and whether it was acknowledged.
    pub hellos: BTreeMap<(String, u64), (usize, bool)>,
    /// The clients that have nothing more to send to a listener.
    pub done: BTreeSet<(String, u64)>,
    /// The clients that were told that they have completed a token.
    pub completed: BTreeMap<String, BTreeSet<u64>>,
    pub cancelled: BTreeSet<String>,
    pub terminated: BTreeSet<String>,
    ends: BTreeMap<String, String>,
    /// Slots as they are in the end, and the reasons of cancellations.
    pub slots: BTreeMap<(String, String), u64>,
    pub whys: BTreeMap<String, Option<String>>,
}

impl Log {
    pub fn meet(&self, env: &Env) {
        let _ = self.env.set(env.clone());
    }

    pub fn env(&self) -> &Env {
        self.env.get().expect("nothing runs before the simulation has started")
    }

    pub fn with<T>(&self, look: impl FnOnce(&mut Told) -> T) -> T {
        look(&mut self.told.lock())
    }

    pub fn hears(&self, key: &(ExecutionId, usize)) {
        self.with(|told| told.heard.insert(key.clone()));
    }

    pub fn has_heard(&self, key: &(ExecutionId, usize)) -> bool {
        self.with(|told| told.heard.contains(key))
    }

    /// An answer, once given, never changes.
    pub fn says(&self, id: &str, what: impl ToString, said: Said) {
        let key = (id.to_string(), what.to_string());
        self.with(|told| {
            let first = told.said.entry(key.clone()).or_insert_with(|| said.clone()).clone();
            if first != said {
                told.complaints.push(format!("{key:?} was answered {first:?} and {said:?}"));
            }
        });
    }

    pub fn sees(&self, id: &str, end: &Result<Value, WorkflowError>) {
        let end = text(end);
        self.with(|told| {
            let first = told.ends.entry(id.into()).or_insert_with(|| end.clone()).clone();
            if first != end {
                told.complaints.push(format!("{id} ended as {first} and as {end}"));
            }
        });
    }
}

fn text(end: &Result<Value, WorkflowError>) -> String {
    end.as_ref().map_or_else(|error| error.to_string(), Value::to_string)
}

/// Returns everything that is wrong.
pub fn judge(log: &Log, play: &Play, report: &Report) -> Vec<String> {
    let told = std::mem::take(&mut *log.told.lock());
    let mut judge = Judge { told: &told, report, complaints: told.complaints.clone(), ended: BTreeMap::new() };
    judge.settled();
    for act in &play.acts {
        judge.act(act);
    }
    judge.operators();
    if !judge.complaints.is_empty() {
        judge.complaints.insert(0, play.to_string());
    }
    judge.complaints
}

struct Judge<'a> {
    told: &'a Told,
    report: &'a Report,
    complaints: Vec<String>,
    /// The order in which executions ended.
    ended: BTreeMap<ExecutionId, usize>,
}

impl Judge<'_> {
    fn complain(&mut self, wrong: bool, what: impl FnOnce() -> String) {
        if wrong {
            self.complaints.push(what());
        }
    }

    fn settled(&mut self) {
        let report = self.report;
        self.complain(report.stuck.is_some(), || format!("stuck: {:?}", report.stuck));
        self.complain(!report.unfinished.is_empty(), || format!("unfinished: {:?}", report.unfinished));
        self.complain(!report.parked.is_empty(), || format!("parked: {:?}", report.parked));
        self.complain(!report.errors.is_empty(), || format!("callers were told: {:?}", report.errors));
        self.complain(!report.misfiled.is_empty(), || format!("misfiled: {:?}", report.misfiled));
        for (place, event) in report.events.iter().enumerate() {
            if let TraceKind::Ended(id) = &event.what
                && self.ended.insert(id.clone(), place).is_some()
            {
                self.complaints.push(format!("{event}: for the second time"));
            }
        }
        for (id, end) in &self.told.ends {
            let stored = report.results.get(&id.as_str().into()).map(text);
            self.complain(stored.as_ref() != Some(end), || {
                format!("{id} ended as {stored:?}, callers were told {end}")
            });
        }
    }

    fn said(&self, id: &str, what: impl ToString) -> Option<&Said> {
        self.told.said.get(&(id.to_string(), what.to_string()))
    }

    fn output<T: DeserializeOwned>(&mut self, id: &str) -> Option<T> {
        let value = self.report.results.get(&id.into())?.as_ref().ok()?;
        match T::deserialize(value) {
            Ok(output) => Some(output),
            Err(error) => {
                self.complaints.push(format!("{id} gave {value}: {error}"));
                None
            }
        }
    }

    fn slot(&self, id: &str, name: &str) -> u64 {
        self.told.slots.get(&(id.into(), name.into())).copied().unwrap_or(0)
    }

    fn act(&mut self, act: &Act) {
        let id = act.id();
        let result = self.report.results.get(&id.into());
        if let Some(Err(WorkflowError::Failed { failure, .. })) = result {
            let is_known = failure.message().contains("terminated") || failure.message() == "the family fails";
            self.complain(!is_known, || format!("{id} failed: {failure}"));
        }
        match act {
            Act::Listens { listener, senders, hellos, posts, .. } => {
                let Some(Heard { words: heard, hellos: hello, passed, counted }) = self.output(id) else { return };
                let (counted, slot) = counted;
                self.complain(counted != slot, || format!("{id} counted {slot} times instead of {counted}"));
                let is_exact = listener.turns.is_none();
                let stops = heard.iter().filter(|word| **word == STOP).count();
                self.complain(is_exact && stops != 1 || stops > 1, || format!("{id} heard {stops} stops"));
                let loses = listener.plan.iter().any(|ear| matches!(ear, Ear::Pass(_)));
                let mut known = BTreeSet::from([STOP]);
                for sender in senders {
                    let stored = |word: &&u64| self.said(id, word) == Some(&Said::Stored);
                    let stored: Vec<u64> = sender.words.iter().filter(stored).copied().collect();
                    known.extend(stored.iter().copied());
                    self.heard(id, (&heard, &passed), &stored, (is_exact, loses));
                }
                for post in posts {
                    let Some(delivered) = self.output::<Vec<u64>>(&post.id) else { continue };
                    known.extend(delivered.iter().copied());
                    self.heard(id, (&heard, &passed), &delivered, (is_exact, loses));
                }
                // The listener received words that no client was told are stored.
                let all = heard.iter().chain(&passed);
                let strange: Vec<_> = all.filter(|word| !known.contains(word)).collect();
                self.complain(!strange.is_empty(), || format!("{id} heard {strange:?}"));
                for n in hellos {
                    let (tries, is_stored) = self.told.hellos.get(&(id.into(), *n)).copied().unwrap_or_default();
                    let times = hello.iter().filter(|heard| *heard == n).count();
                    let is_lost = is_exact && is_stored && times == 0;
                    let tries = if *n == NAMED { tries.min(1) } else { tries };
                    self.complain(times > tries || is_lost, || {
                        format!("{id} heard hello {n} {times} times of {tries}")
                    });
                }
            }
            Act::Counts { updates, .. } => self.counts(id, updates),
            Act::Family { .. } => self.family(act),
            Act::Asks { answers, .. } => {
                let completed = self.told.completed.get(id).cloned().unwrap_or_default();
                self.complain(completed.len() > 1, || format!("{id} was completed by {completed:?}"));
                let Some(Some(answer)) = self.output::<Option<u64>>(id) else { return };
                let fits = if completed.is_empty() { answers.contains(&answer) } else { completed.contains(&answer) };
                self.complain(!fits, || format!("{id} was completed by {completed:?} and got {answer}"));
            }
            Act::Heralds { last, .. } => {
                let Some(seen) = self.output::<u64>(id) else { return };
                self.complain(seen != *last, || format!("{id} saw {seen}"));
            }
        }
    }

    /// What a listener has received from one client that sends in order: no more than was sent, nothing twice, in
    /// order, and without gaps. A branch that receives a word and is given up before it forwards the word has lost it.
    fn heard(&mut self, id: &str, all: (&[u64], &[u64]), stored: &[u64], (is_exact, loses): (bool, bool)) {
        let of = |all: &[u64]| all.iter().filter(|word| stored.contains(word)).copied().collect::<Vec<u64>>();
        let (heard, passed) = (of(all.0), of(all.1));
        let is_ordered = |words: &[u64]| words.is_sorted_by(|a, b| a < b);
        let fits = match (loses, is_exact) {
            (true, _) => true,
            (false, true) => heard == stored,
            (false, false) => stored.starts_with(&heard),
        };
        self.complain(!fits || !is_ordered(&heard) || !is_ordered(&passed), || {
            format!("{id} heard {heard:?} and handed on {passed:?}, stored were {stored:?}")
        });
    }

    fn counts(&mut self, id: &str, updates: &[(String, u64)]) {
        let (count, cleaned) = (self.slot(id, "count"), self.slot(id, "cleaned"));
        let is_cancelled = matches!(self.report.results.get(&id.into()), Some(Err(WorkflowError::Cancelled { .. })));
        let is_wrong = cleaned != u64::from(is_cancelled) && !self.is_terminated(id);
        self.complain(is_wrong, || format!("{id} has cleaned up {cleaned} times"));
        let counted: Option<Counted> = self.output(id);
        if let Some(counted) = &counted {
            let ids: BTreeSet<_> = counted.iter().map(|(update, _)| update).collect();
            self.complain(ids.len() != counted.len(), || format!("{id} received updates twice: {counted:?}"));
            self.complain(count != counted.len() as u64, || format!("{id} counted {count} for {counted:?}"));
        }
        let mut counts = BTreeSet::new();
        for (update, _) in updates {
            let expected = match self.said(id, update) {
                Some(Said::Count(answer)) => Some(*answer),
                Some(Said::Refused(text)) => text.strip_prefix("refused ").and_then(|text| text.parse().ok()),
                Some(Said::TooLate) => {
                    let received = counted.iter().flatten().any(|(received, _)| received == update);
                    self.complain(received, || format!("{id} received {update}, which came too late"));
                    None
                }
                _ => None,
            };
            let Some(expected) = expected else { continue };
            let is_wrong = expected > count || !counts.insert(expected);
            self.complain(is_wrong, || format!("{id} answered {update} with {expected} of {count}"));
            let recorded = counted.as_ref().map(|counted| counted.contains(&(update.clone(), expected)));
            self.complain(recorded == Some(false), || format!("{id} answered {update} {expected}: {counted:?}"));
        }
    }

    fn family(&mut self, act: &Act) {
        let Act::Family { id, family, .. } = act else { return };
        for (child, seen) in self.output::<Seen>(id).into_iter().flatten().flatten() {
            let stored = self.report.results.get(&child.as_str().into());
            let fits = match (stored, &seen) {
                (Some(Ok(value)), Ok(seen)) => value.as_u64() == Some(*seen),
                (Some(Err(WorkflowError::Failed { failure, .. })), Err(seen)) => failure.message() == seen,
                (Some(Err(WorkflowError::Cancelled { .. })), Err(_)) => true,
                _ => false,
            };
            self.complain(!fits, || format!("{id} has seen {seen:?} of {child}, which came to {stored:?}"));
        }
        for birth in family.births.iter() {
            let child = format!("{id}.{}", birth.kid.n);
            let is_asked = matches!(birth.how, How::Cancel(_));
            self.closed(id, &child, birth.close, is_asked);
            if matches!(birth.kid.job, Job::Parents(_)) {
                self.closed(&child, &format!("{child}.below"), Close::Cancel, false);
            }
        }
    }

    /// What the end of a parent means for a child.
    fn closed(&mut self, parent: &str, child: &str, close: Close, is_asked: bool) {
        let ended = |id: &str| self.ended.get(&id.into()).copied();
        let (Some(child_ended), Some(parent_ended)) = (ended(child), ended(parent)) else { return };
        let is_cancelled = self.told.whys.get(child).is_some_and(Option::is_some);
        let is_before = child_ended <= parent_ended;
        let fits = match close {
            Close::Cancel => is_before || is_cancelled,
            Close::Await => is_before || self.is_terminated(parent),
            _ => !is_cancelled || is_asked,
        };
        self.complain(!fits, || format!("{parent} ended, its child {child} of {close:?} later, {is_cancelled}"));
    }

    fn is_terminated(&self, id: &str) -> bool {
        let is_it = |error: &WorkflowError| error.to_string().contains("terminated");
        self.report.results.get(&id.into()).is_some_and(|result| result.as_ref().is_err_and(is_it))
    }

    fn operators(&mut self) {
        for id in &self.told.cancelled {
            let why = self.told.whys.get(id).cloned().flatten();
            self.complain(why.is_none(), || format!("{id} was cancelled, and is not to be"));
        }
        for id in &self.told.terminated {
            let result = self.report.results.get(&id.as_str().into());
            self.complain(!self.is_terminated(id), || format!("{id} was terminated, and came to {result:?}"));
        }
    }
}
