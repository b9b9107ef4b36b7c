//! What clients and executions were told about locks, and whether it is true. The trace shows what was stored, in the
//! store's order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Duration;

use latchwork::lock::{FencingToken, LockName, Owner};
use latchwork::store::{Env, Uuid};
use latchwork::testing::{Report, TraceKind};
use latchwork::workflow::WorkflowError;
use parking_lot::Mutex;

type Grant = (String, u64);

#[derive(Default)]
pub struct Log {
    env: OnceLock<Env>,
    said: Mutex<Said>,
}

#[derive(Default)]
struct Said {
    complaints: Vec<String>,
    /// Which owner was told that it holds a lock, and when.
    told: BTreeMap<Grant, (String, Duration)>,
    /// When an owner began to release a grant, or was made to.
    lets_go: BTreeMap<Grant, Duration>,
    /// When an operator began to release a grant by force.
    taken: BTreeMap<Grant, Duration>,
    /// When an owner was told that its lock is released.
    freed: BTreeMap<Grant, Duration>,
    writes: u64,
}

impl Log {
    pub fn meet(&self, env: &Env) {
        let _ = self.env.set(env.clone());
    }

    fn now(&self) -> Duration {
        self.env.get().expect("nothing runs before the simulation has started").monotonic()
    }

    pub fn complain(&self, what: String) {
        self.said.lock().complaints.push(what);
    }

    pub fn told(&self, owner: &str, lock: &LockName, token: &FencingToken) {
        let (grant, now) = ((lock.to_string(), token.number()), self.now());
        let mut said = self.said.lock();
        let first = said.told.entry(grant.clone()).or_insert_with(|| (owner.into(), now)).0.clone();
        if first != owner {
            said.complaints.push(format!("{grant:?} was given to {first} and to {owner}"));
        }
    }

    pub fn lets_go(&self, lock: &LockName, token: &FencingToken) {
        let now = self.now();
        self.said.lock().lets_go.entry((lock.to_string(), token.number())).or_insert(now);
    }

    pub fn takes_away(&self, lock: &LockName, token: u64) {
        let (grant, now) = ((lock.to_string(), token), self.now());
        let mut said = self.said.lock();
        said.lets_go.entry(grant.clone()).or_insert(now);
        said.taken.entry(grant).or_insert(now);
    }

    pub fn freed(&self, lock: &LockName, token: &FencingToken) {
        let now = self.now();
        self.said.lock().freed.entry((lock.to_string(), token.number())).or_insert(now);
    }

    /// True if the owner or an operator has begun to release this grant.
    pub fn is_let_go(&self, lock: &LockName, token: u64) -> bool {
        self.said.lock().lets_go.contains_key(&(lock.to_string(), token))
    }

    /// A new number for a write.
    pub fn writes(&self) -> u64 {
        let mut said = self.said.lock();
        said.writes += 1;
        said.writes
    }
}

/// Returns everything that is wrong.
pub fn judge(log: &Log, play: &str, is_calm: bool, report: &Report) -> Vec<String> {
    let said = std::mem::take(&mut *log.said.lock());
    let mut judge = Judge::new(&said);
    judge.settled(report);
    for event in &report.events {
        judge.happened(event.at, &event.what);
    }
    judge.afterwards();
    if is_calm {
        judge.unknown();
    }
    if !judge.complaints.is_empty() {
        judge.complaints.insert(0, play.to_string());
    }
    judge.complaints
}

struct Judge<'a> {
    said: &'a Said,
    complaints: Vec<String>,
    held: BTreeSet<Grant>,
    granted: BTreeMap<Grant, (String, Duration)>,
    released: BTreeMap<Grant, Duration>,
    /// Grants that an operator has released by force while they were held.
    forced: BTreeMap<Grant, (String, Duration)>,
    /// The last token that was granted of a lock.
    last: BTreeMap<String, u64>,
    ended: BTreeSet<String>,
    expired: BTreeSet<Uuid>,
    /// Whether the lock was held when a write was sent.
    sent: BTreeMap<u64, (Grant, bool)>,
}

impl Judge<'_> {
    fn new(said: &Said) -> Judge<'_> {
        Judge {
            said,
            complaints: said.complaints.clone(),
            held: BTreeSet::new(),
            granted: BTreeMap::new(),
            released: BTreeMap::new(),
            forced: BTreeMap::new(),
            last: BTreeMap::new(),
            ended: BTreeSet::new(),
            expired: BTreeSet::new(),
            sent: BTreeMap::new(),
        }
    }

    fn complain(&mut self, wrong: bool, what: impl FnOnce() -> String) {
        if wrong {
            self.complaints.push(what());
        }
    }

    fn settled(&mut self, report: &Report) {
        self.complain(report.stuck.is_some(), || format!("stuck: {:?}", report.stuck));
        self.complain(!report.unfinished.is_empty(), || format!("unfinished: {:?}", report.unfinished));
        self.complain(!report.parked.is_empty(), || format!("parked: {:?}", report.parked));
        self.complain(!report.errors.is_empty(), || format!("callers were told: {:?}", report.errors));
        self.complain(!report.misfiled.is_empty(), || format!("misfiled: {:?}", report.misfiled));
        for (id, result) in &report.results {
            let Err(WorkflowError::Failed { failure, .. }) = result else { continue };
            let known = ["would never end", "terminated", "meant to fail"];
            let is_known = known.iter().any(|known| failure.message().contains(known));
            self.complain(!is_known, || format!("{id} failed: {failure}"));
        }
    }

    fn happened(&mut self, at: Duration, what: &TraceKind) {
        match what {
            TraceKind::Ended(id) => drop(self.ended.insert(format!("execution {id}"))),
            TraceKind::Expired(session) => drop(self.expired.insert(*session)),
            TraceKind::Granted { lock, token, owner, .. } => {
                let lock = lock.to_string();
                let last = self.last.insert(lock.clone(), *token).unwrap_or(0);
                self.complain(*token <= last, || format!("{lock}: token {token} after {last}"));
                self.held.insert((lock.clone(), *token));
                self.granted.insert((lock, *token), (owner.to_string(), at));
            }
            TraceKind::Released { lock, token, owner } => self.released(at, (lock.to_string(), *token), owner),
            TraceKind::Forced { lock, token, owner, was_held } => {
                let grant = (lock.to_string(), *token);
                let is_wanted = self.said.taken.get(&grant).is_some_and(|taken| *taken <= at);
                self.complain(!is_wanted, || format!("{owner} was made to let go of {grant:?}, unasked"));
                if *was_held {
                    self.forced.insert(grant, (owner.to_string(), at));
                }
            }
            TraceKind::Note(text) => self.wrote(text),
            _ => {}
        }
    }

    /// An owner loses a lock only by its own release, by an operator, by its end, or by a lease that was not renewed.
    fn released(&mut self, at: Duration, grant: Grant, owner: &Owner) {
        self.held.remove(&grant);
        let is_told = self.said.told.get(&grant).is_some_and(|(_, told)| *told <= at);
        let lets_go = self.said.lets_go.get(&grant).is_some_and(|begun| *begun <= at);
        let is_over = match owner {
            Owner::Session(session) => self.expired.contains(session),
            owner => self.ended.contains(&owner.to_string()),
        };
        self.complain(is_told && !lets_go && !is_over, || format!("{owner} has lost {grant:?} at {at:?}"));
        self.released.insert(grant, at);
    }

    /// `write sent: number lock token`, and then `write applied` or `write refused`.
    fn wrote(&mut self, text: &str) {
        let Some((what, rest)) = text.split_once(": ") else { return };
        let mut words = rest.split(' ');
        let Some(number) = words.next().and_then(|number| number.parse::<u64>().ok()) else { return };
        if let ("write sent", Some(lock), Some(Ok(token))) = (what, words.next(), words.next().map(str::parse)) {
            let grant = (lock.to_string(), token);
            let is_held = self.held.contains(&grant);
            self.sent.insert(number, (grant, is_held));
            return;
        }
        let Some((grant, was_held)) = self.sent.remove(&number) else { return };
        let is_held = self.held.contains(&grant);
        self.complain(what == "write applied" && !was_held, || format!("{grant:?} is stale, and has written"));
        self.complain(what == "write refused" && was_held && is_held, || format!("{grant:?} was held, and refused"));
    }

    /// Without faults, no owner holds a lock for long before it is told so.
    fn unknown(&mut self) {
        let is_known = |grant: &Grant| self.said.told.contains_key(grant);
        let unknown = self.granted.iter().filter(|(grant, _)| !is_known(grant));
        let is_long = |(grant, (_, at)): &(&Grant, &(String, Duration))| {
            self.released.get(*grant).is_none_or(|released| *released > *at + Duration::from_secs(1))
        };
        let unknown: Vec<_> = unknown.filter(is_long).map(|(grant, (owner, _))| format!("{owner} {grant:?}")).collect();
        self.complain(!unknown.is_empty(), || format!("no owner was told of {unknown:?}"));
    }

    fn afterwards(&mut self) {
        let said = self.said;
        for (grant, (owner, told)) in &said.told {
            // A request that was granted and forced in one commit is recorded only as forced.
            let granted = self.granted.get(grant).or_else(|| self.forced.get(grant)).cloned();
            let fits = granted.as_ref().is_some_and(|(granted, at)| granted == owner && at <= told);
            self.complain(!fits, || format!("{owner} was told of {grant:?}, which was granted {granted:?}"));
        }
        for (grant, freed) in &said.freed {
            let fits = self.released.get(grant).is_some_and(|released| released <= freed);
            self.complain(!fits, || format!("{grant:?} was said to be released at {freed:?}"));
        }
        let left: Vec<_> = self.held.iter().filter_map(|grant| self.granted.get(grant)).cloned().collect();
        let left: Vec<_> = left.into_iter().filter(|(owner, _)| owner.starts_with("execution")).collect();
        self.complain(!left.is_empty(), || format!("{left:?} still hold locks"));
    }
}
