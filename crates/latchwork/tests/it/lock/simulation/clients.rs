//! The simulation: which executions and clients there are, drawn from the seed, and what clients do.

use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::{LockError, LockGuard, Session};
use latchwork::store::{Commit, SpaceSpec};
use latchwork::testing::{Caller, Report, Simulation};
use latchwork::workflow::{Result, WorkflowError};

use super::cast::{self, End, How, PERMITS, Plan, Take, Then, What, ms};
use super::oracle::{self, Log};

/// The session that a client uses.
#[derive(Debug, Clone, Copy, PartialEq)]
enum By {
    Process,
    /// A session of its own, which renews itself.
    Own(u64),
    Hand(u64),
}

/// How a client releases a lock.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Gone {
    Released,
    Dropped,
    Ended,
}

#[derive(Debug, Clone)]
enum Act {
    /// Acquires a lock and holds it for several periods. It writes after each of them.
    Holds {
        what: What,
        how: How,
        by: By,
        holds: Vec<(u64, bool)>,
        gone: Gone,
    },
    /// Makes the same request twice.
    Repeats {
        what: What,
        lease: u64,
        hold: u64,
    },
    /// Does not wait for an answer.
    GivesUp {
        what: What,
        by: By,
        after: u64,
    },
    Forces {
        after: u64,
        pick: usize,
    },
    Ends {
        id: String,
        after: u64,
        terminates: bool,
    },
}

pub struct Play {
    plans: Vec<(String, Plan)>,
    acts: Vec<(u64, Act)>,
    is_calm: bool,
    log: Arc<Log>,
}

/// Times that are often equal, so that things happen at once.
fn time(random: &mut fastrand::Rng) -> u64 {
    match random.u8(..6) {
        0 => 0,
        1..3 => 500 * random.u64(1..8),
        3 => random.u64(..400),
        4 => 1000 * random.u64(1..20),
        _ => random.u64(1..50) << random.u8(..9),
    }
}

fn what(random: &mut fastrand::Rng) -> What {
    match random.u8(..8) {
        0..4 => What::Mutex(random.u8(..2)),
        4..6 => What::Permits(random.u32(1..=PERMITS)),
        6 => What::Read,
        _ => What::Write,
    }
}

fn how(random: &mut fastrand::Rng) -> How {
    match random.u8(..8) {
        0..4 => How::Acquire,
        4 => How::Within(time(random)),
        5 => How::Try,
        6 => How::Race(time(random)),
        _ => How::Beside(time(random)),
    }
}

fn plan(random: &mut fastrand::Rng) -> Plan {
    let then = [Then::Release, Then::Drop, Then::Keep, Then::Keep];
    let take = |random: &mut fastrand::Rng| {
        let (what, how) = (what(random), how(random));
        Take { what, how, hold: time(random), then: then[random.usize(..4)] }
    };
    let takes = (0..random.usize(1..5)).map(|_| take(random)).collect();
    let end = [End::Completes, End::Completes, End::Completes, End::Fails, End::Anew][random.usize(..5)];
    Plan { takes, gives_up: random.bool(), end }
}

fn act(random: &mut fastrand::Rng) -> Act {
    let lease = [50, 300, 1000, 5000, 30_000][random.usize(..5)];
    let by = [By::Process, By::Own(lease), By::Hand(lease)][random.usize(..3)];
    match random.u8(..8) {
        0..4 => {
            let holds = (0..random.usize(1..4)).map(|_| (time(random), random.bool())).collect();
            let gone = [Gone::Released, Gone::Dropped, Gone::Ended][random.usize(..3)];
            Act::Holds { what: what(random), how: how(random), by, holds, gone }
        }
        4 => Act::Repeats { what: what(random), lease, hold: time(random) },
        5 => Act::GivesUp { what: what(random), by, after: time(random) },
        _ => Act::Forces { after: time(random), pick: random.usize(..100) },
    }
}

impl Play {
    pub fn drawn(seed: u64, is_calm: bool) -> Play {
        let mut random = fastrand::Rng::with_seed(seed ^ 0x10c4);
        let random = &mut random;
        let plans: Vec<_> = (0..random.usize(1..6)).map(|n| (format!("e{n}"), plan(random))).collect();
        let mut acts: Vec<_> = (0..random.usize(..6)).map(|_| (time(random), act(random))).collect();
        for (id, _) in &plans {
            if random.u8(..4) == 0 {
                let (after, terminates) = (time(random), random.bool());
                acts.push((time(random), Act::Ends { id: id.clone(), after, terminates }));
            }
        }
        Play { plans, acts, is_calm, log: Arc::default() }
    }

    pub fn judge(&self, report: &Report) -> Vec<String> {
        let plans = self.plans.iter().map(|plan| format!("{plan:?}"));
        let play: Vec<String> = plans.chain(self.acts.iter().map(|act| format!("{act:?}"))).collect();
        oracle::judge(&self.log, &play.join("\n"), self.is_calm, report)
    }

    pub fn simulation(&self, seed: u64) -> Simulation {
        let taker = cast::taker(&self.log);
        let mut simulation = Simulation::new(seed).register(&taker);
        for (id, plan) in self.plans.clone() {
            let (log, taker) = (self.log.clone(), taker.clone());
            simulation = simulation.client(move |caller| {
                log.meet(caller.env());
                let start = caller.engine().start(&taker, plan.clone()).id(id.as_str()).or_join();
                async move {
                    let handle = start.await?;
                    caller.started(handle.id());
                    match handle.result().await {
                        Err(error @ (WorkflowError::Stopped | WorkflowError::Store(_))) => Err(error),
                        _ => Ok(()),
                    }
                }
            });
        }
        for (place, (delay, act)) in self.acts.clone().into_iter().enumerate() {
            let (log, is_calm) = (self.log.clone(), self.is_calm);
            simulation = simulation.client(move |caller| {
                log.meet(caller.env());
                let (log, act) = (log.clone(), act.clone());
                async move {
                    caller.env().sleep(ms(delay)).await;
                    let client = Client { log, caller, is_calm, name: format!("c{place}") };
                    client.acts(act).await
                }
            });
        }
        simulation
    }
}

/// A lock that a client holds. It is released wherever the client stops.
struct Held {
    log: Arc<Log>,
    guard: Option<LockGuard>,
}

impl Held {
    fn guard(&self) -> &LockGuard {
        self.guard.as_ref().expect("it is there until it is released")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.guard.iter().for_each(|guard| self.log.lets_go(guard.name(), guard.token()));
    }
}

struct Client {
    log: Arc<Log>,
    caller: Caller,
    is_calm: bool,
    name: String,
}

type Locked<T> = std::result::Result<T, LockError>;

impl Client {
    async fn acts(&self, act: Act) -> Result<()> {
        let done = match act {
            Act::Holds { what, how, by, holds, gone } => self.holds(what, how, by, holds, gone).await,
            Act::Repeats { what, lease, hold } => self.repeats(what, lease, hold).await,
            Act::GivesUp { what, by, after } => self.gives_up(what, by, after).await,
            Act::Forces { after, pick } => self.forces(after, pick).await,
            Act::Ends { id, after, terminates } => return self.ends(&id, after, terminates).await,
        };
        match done {
            Ok(()) => Ok(()),
            Err(LockError::Store(error)) => Err(error.into()),
            Err(LockError::Stopped) => Err(WorkflowError::Stopped),
            Err(LockError::SessionLost { .. } | LockError::Refused(_) | LockError::NoSuchToken { .. }) => {
                self.caller.note(format!("lost: {}", self.name));
                Ok(())
            }
            Err(error) => {
                self.log.complain(format!("{} was told: {error}", self.name));
                Ok(())
            }
        }
    }

    async fn sleep(&self, length: u64) {
        self.caller.env().sleep(ms(length)).await;
    }

    async fn session(&self, by: By) -> Locked<Option<Session>> {
        let session = self.caller.engine().locks().session().label(&self.name);
        Ok(match by {
            By::Process => None,
            By::Own(lease) => Some(session.lease(ms(lease)).await?),
            By::Hand(lease) => Some(session.lease(ms(lease)).renewed_by_hand().await?),
        })
    }

    async fn take(&self, what: What, how: How, by: Option<&Session>, request: Option<&str>) -> Locked<Option<Held>> {
        let engine = self.caller.engine();
        let (lock, permits) = match what {
            What::Mutex(n) => (engine.mutex(format!("m{n}")), 1),
            What::Permits(permits) => (engine.semaphore("s", PERMITS), permits),
            What::Read | What::Write => return self.take_rw(what, how, by, request).await,
        };
        let lock = by.into_iter().fold(lock, |lock, session| lock.by(session));
        let lock = request.into_iter().fold(lock, |lock, request| lock.request(request));
        let guard = match how {
            How::Within(limit) => lock.acquire_many_within(permits, ms(limit)).await?,
            How::Try => lock.try_acquire_many(permits).await?,
            _ => Some(lock.acquire_many(permits).await?),
        };
        Ok(self.held(guard))
    }

    async fn take_rw(&self, what: What, how: How, by: Option<&Session>, request: Option<&str>) -> Locked<Option<Held>> {
        let (lock, reads) = (self.caller.engine().rw_lock("rw"), matches!(what, What::Read));
        let lock = by.into_iter().fold(lock, |lock, session| lock.by(session));
        let lock = request.into_iter().fold(lock, |lock, request| lock.request(request));
        let guard = match how {
            How::Within(limit) if reads => lock.read_within(ms(limit)).await?,
            How::Within(limit) => lock.write_within(ms(limit)).await?,
            How::Try if reads => lock.try_read().await?,
            How::Try => lock.try_write().await?,
            _ if reads => Some(lock.read().await?),
            _ => Some(lock.write().await?),
        };
        Ok(self.held(guard))
    }

    fn held(&self, guard: Option<LockGuard>) -> Option<Held> {
        let Some(guard) = guard else {
            self.caller.note(format!("not in time: {}", self.name));
            return None;
        };
        self.log.told(&format!("session {}", guard.session().id()), guard.name(), guard.token());
        Some(Held { log: self.log.clone(), guard: Some(guard) })
    }

    /// Makes a write that only the holder may make.
    async fn writes(&self, held: &Held) -> Locked<()> {
        let (store, guard) = (self.caller.engine().store(), held.guard());
        let key = store.space(SpaceSpec::new("written")).await?.key(guard.name().to_string());
        let (number, token) = (self.log.writes(), guard.token().number());
        self.caller.note(format!("write sent: {number} {} {token}", guard.name()));
        let commit = Commit::new().guard(guard.token()).put(&key, token.to_be_bytes().to_vec());
        let outcome = store.commit(commit).await?;
        let what = if outcome.is_applied() { "applied" } else { "refused" };
        self.caller.note(format!("write {what}: {number}"));
        Ok(())
    }

    async fn releases(&self, mut held: Held) -> Locked<bool> {
        let (lock, token) = (held.guard().name().clone(), held.guard().token().clone());
        self.log.lets_go(&lock, &token);
        let Some(guard) = held.guard.take() else { return Ok(false) };
        let was_held = guard.release().await?;
        if was_held {
            self.log.freed(&lock, &token);
        }
        let late = if was_held { "" } else { " too late" };
        self.caller.note(format!("released{late}: {lock} {token}"));
        Ok(was_held)
    }

    async fn holds(&self, what: What, how: How, by: By, holds: Vec<(u64, bool)>, gone: Gone) -> Locked<()> {
        let session = self.session(by).await?;
        let Some(held) = self.take(what, how, session.as_ref(), None).await? else { return Ok(()) };
        let mut renewed = self.caller.env().monotonic();
        for (length, renews) in holds {
            self.writes(&held).await?;
            self.sleep(length).await;
            if let (By::Hand(lease), true) = (by, self.is_calm) {
                self.is_passed_over(&held, renewed, ms(lease)).await?;
            }
            if let (true, Some(session)) = (renews, &session) {
                let begun = self.caller.env().monotonic();
                if session.renew().await? {
                    renewed = begun;
                } else {
                    self.caller.note(format!("lost: {}", self.name));
                }
            }
        }
        self.writes(&held).await?;
        match (gone, session) {
            (Gone::Released, _) => drop(self.releases(held).await?),
            (Gone::Ended, Some(session)) => {
                self.log.lets_go(held.guard().name(), held.guard().token());
                session.end().await?;
                self.writes(&held).await?;
                drop(held);
            }
            _ => drop(held),
        }
        Ok(())
    }

    /// Some time after a lease has expired, its session no longer holds the lock.
    async fn is_passed_over(&self, held: &Held, renewed: Duration, lease: Duration) -> Locked<()> {
        let since = self.caller.env().monotonic() - renewed;
        let state = self.caller.engine().locks().inspect(held.guard().name()).await?;
        let token = held.guard().token().number();
        let has_it = state.holders.iter().any(|holder| holder.token == token);
        if has_it && since > lease + ms(50) {
            self.log.complain(format!("{} still has {} after {since:?}", self.name, held.guard().name()));
        }
        Ok(())
    }

    async fn repeats(&self, what: What, lease: u64, hold: u64) -> Locked<()> {
        let session = self.session(By::Own(lease)).await?;
        let take = || self.take(what, How::Acquire, session.as_ref(), Some("r"));
        let (first, again) = tokio::join!(take(), take());
        let (Some(first), Some(again)) = (first?, again?) else { return Ok(()) };
        let (token, other) = (first.guard().token().number(), again.guard().token().number());
        // The first grant may have been forced before the second request was made.
        if token != other && !self.log.is_let_go(first.guard().name(), token.min(other)) {
            self.log.complain(format!("{} has {token} and {other} for one request", self.name));
        }
        self.caller.note(format!("repeated: {token}"));
        self.sleep(hold).await;
        let (first, again) = (self.releases(first).await?, self.releases(again).await?);
        if token == other && first && again {
            self.log.complain(format!("{} has released {token} twice", self.name));
        }
        Ok(())
    }

    async fn gives_up(&self, what: What, by: By, after: u64) -> Locked<()> {
        let session = self.session(by).await?;
        let taken = tokio::select! {
            biased;
            taken = self.take(what, How::Acquire, session.as_ref(), None) => Some(taken?),
            () = self.sleep(after) => None,
        };
        match taken {
            Some(held) => drop(held),
            None => self.caller.note(format!("given up: {}", self.name)),
        }
        self.sleep(after).await;
        Ok(())
    }

    async fn forces(&self, after: u64, pick: usize) -> Locked<()> {
        self.sleep(after).await;
        let locks = self.caller.engine().locks();
        let page = locks.list().limit(10).await?;
        let Some(lock) = page.items.get(pick % page.items.len().max(1)) else { return Ok(()) };
        let state = locks.inspect(&lock.name).await?;
        let all: Vec<u64> = state.holders.iter().chain(&state.waiters).map(|request| request.token).collect();
        let Some(token) = all.get(pick % all.len().max(1)) else { return Ok(()) };
        self.log.takes_away(&lock.name, *token);
        locks.force_release(&lock.name, *token, "enough").await?;
        self.caller.note(format!("forced: {} {token}", lock.name));
        Ok(())
    }

    async fn ends(&self, id: &str, after: u64, terminates: bool) -> Result<()> {
        self.sleep(after).await;
        let engine = self.caller.engine();
        loop {
            let done = match terminates {
                true => engine.terminate(id, "enough").await,
                false => engine.cancel(id, "enough").await,
            };
            match done {
                Err(WorkflowError::NotFound { .. }) => self.sleep(250).await,
                Err(WorkflowError::Ended { .. }) | Ok(()) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
