//! Faults from a seed, and the world they happen in. Each fault stands for something that happens to real processes.
//! How often each fault happens is drawn for every seed, so some seeds have mostly crashes and others mostly delays.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::admitted::Admitted;
use super::audit::Audit;
use super::fault::{FaultGate, Side};
use super::trace::{Trace, TraceEvent, TraceKind};
use crate::node::alarm::read_alarm_key;
use crate::record::Record;
use crate::store::backend::{Answer, Backend, MemoryBackend};
use crate::store::{Commit, Env, Outcome, Result, SpaceId, StoreError, Timestamp, VirtualClock, Write};
use crate::workflow::admission::stored::{ADMISSION, GATES};
use crate::workflow::engine::{EXECUTIONS, REMOVALS};
use crate::workflow::stored::record::Removal;

/// The faults that a simulation may meet. All are on by default.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Faults {
    /// How many lives may end by a fault. The life after them meets no fault at all, so that everything can end.
    pub lives: u32,
    /// The process dies right before or right after a commit: power loss, `kill -9`, a panic that aborts. A commit that
    /// it has sent may still land later.
    pub crashes: bool,
    /// The engine is stopped at some moment, between commits or during one, as by a deploy.
    pub restarts: bool,
    /// The process gets no answer for a while, right before or right after a commit, and another process takes its
    /// place: a machine that sleeps, a network that is cut. When the process continues, it is no longer the owner. Or
    /// two engines run at once because an operator started the second one too early.
    pub pauses: bool,
    /// The answer to a commit is lost, and sometimes the commit, too: a connection that breaks.
    pub lost_answers: bool,
    /// A commit lands late, or its answer arrives late: a disk or a network under load. Other commits overtake it,
    /// deadlines pass, and the caller may no longer wait. Reads can be slow, too.
    pub slow: bool,
    /// The time of day jumps, far forward or a little back: an operator, NTP, a machine that slept.
    pub clock_jumps: bool,
}

impl Default for Faults {
    fn default() -> Faults {
        Faults::with(6, true)
    }
}

impl Faults {
    /// No faults.
    ///
    /// ```
    /// # use latchwork::testing::Faults;
    /// let mut only_crashes = Faults::none();
    /// only_crashes.crashes = true;
    /// only_crashes.lives = 6;
    /// ```
    pub fn none() -> Faults {
        Faults::with(0, false)
    }

    fn with(lives: u32, all: bool) -> Faults {
        Faults { lives, crashes: all, restarts: all, pauses: all, lost_answers: all, slow: all, clock_jumps: all }
    }
}

/// How many of a thousand commits meet each fault, on average.
struct Odds {
    lost: u64,
    slow: u64,
    jump: u64,
}

/// What all lives of a simulation share.
pub(crate) struct World {
    pub(crate) env: Env,
    pub(crate) clock: Arc<VirtualClock>,
    pub(crate) memory: Arc<MemoryBackend>,
    pub(crate) trace: Trace,
    faults: Faults,
    odds: Odds,
    /// Decides about faults. It is separate from `env`, so code that draws one more number from `env` meets the same
    /// faults.
    chance: Env,
    /// The names of spaces.
    pub(crate) spaces: Mutex<BTreeMap<SpaceId, String>>,
    /// The lives that have owned the executions, in order.
    owners: Mutex<Vec<u32>>,
    pub(crate) audit: Mutex<Audit>,
    pub(crate) admitted: Mutex<Admitted>,
}

impl World {
    pub(crate) fn new(seed: u64, faults: Faults) -> World {
        let (env, clock) = Env::seeded(seed);
        let (chance, _) = Env::seeded(!seed);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        let drawn = |wanted: bool, odds: [u64; 4]| if wanted { odds[(chance.random() % 4) as usize] } else { 0 };
        let odds = Odds {
            lost: drawn(faults.lost_answers, [0, 10, 40, 150]),
            slow: drawn(faults.slow, [0, 20, 100, 400]),
            jump: drawn(faults.clock_jumps, [0, 0, 10, 50]),
        };
        let (trace, spaces, owners) = (Trace::default(), Mutex::default(), Mutex::default());
        let (audit, admitted) = (Mutex::default(), Mutex::default());
        World { env, clock, memory, trace, faults, odds, chance, spaces, owners, audit, admitted }
    }

    /// True if this life owns the executions.
    pub(crate) fn is_owner(&self, life: u32) -> bool {
        self.owners.lock().last() == Some(&life)
    }

    /// True if this life has owned the executions and no longer does.
    pub(crate) fn is_fenced(&self, life: u32) -> bool {
        let owners = self.owners.lock();
        owners.contains(&life) && owners.last() != Some(&life)
    }

    pub(crate) fn note(&self, life: u32, what: TraceKind) {
        self.trace.push(TraceEvent { at: self.env.monotonic(), time: self.env.now(), life, what });
    }

    /// A number below `end`.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.chance.random() % end.max(1)
    }

    fn happens(&self, per_mille: u64) -> bool {
        per_mille > 0 && self.below(1000) < per_mille
    }

    /// A time between `unit` and `unit << doublings`. Short times are as likely as long ones.
    pub(crate) fn duration(&self, unit: Duration, doublings: u64) -> Duration {
        let length = unit.saturating_mul(1 << self.below(doublings));
        length + Duration::from_micros(self.below(length.as_micros() as u64))
    }

    /// How many lives end by a fault.
    pub(crate) fn lives(&self) -> u32 {
        self.below(u64::from(self.faults.lives) + 1) as u32
    }

    fn jump(&self, life: u32) {
        let by = match self.below(3) {
            0 => -(self.below(5_000_000) as i64),
            _ => self.duration(Duration::from_millis(100), 16).as_micros() as i64,
        };
        self.clock.jump_to(Timestamp(self.env.now().0.saturating_add_signed(by)));
        self.note(life, TraceKind::Jump(by));
    }

    /// Commits, and records the outcome in the trace.
    async fn land(&self, life: u32, commit: Commit) -> Result<Outcome> {
        let (mut writes, mut ended, mut owns) = (BTreeMap::<String, u32>::new(), None, false);
        let (mut locks, mut limits, checks) = (Vec::new(), Vec::new(), commit.checks().to_vec());
        {
            let spaces = self.spaces.lock();
            for write in commit.writes() {
                let space = write.key().space();
                let name = spaces.get(&space).cloned().unwrap_or_else(|| space.to_string());
                if let (REMOVALS, Write::Put(key, value)) = (&*name, write)
                    && let Ok(Removal::Execution) = Removal::decode(value)
                {
                    ended = read_alarm_key(key.bytes()).map(|(_, id)| id);
                }
                owns |= name == "node.shards";
                if name.starts_with("lock.") {
                    locks.push((name.clone(), write.clone()));
                }
                if [ADMISSION, GATES, EXECUTIONS].contains(&&*name) {
                    limits.push((name.clone(), write.clone()));
                }
                *writes.entry(name).or_default() += 1;
            }
        }
        let outcome = self.memory.commit(commit).await;
        match &outcome {
            Ok(Outcome::Applied(receipt)) => {
                let writes: Vec<_> = writes.into_iter().map(|(space, count)| format!("{space} {count}")).collect();
                self.note(life, TraceKind::Commit(receipt.generation, writes.join(", ")));
                if owns {
                    self.owners.lock().push(life);
                    self.note(life, TraceKind::Owner);
                }
                if let Some(id) = ended {
                    self.note(life, TraceKind::Ended(id));
                }
                let told = self.audit.lock().landed(&locks, &checks, self.env.monotonic());
                told.into_iter().for_each(|what| self.note(life, what));
                self.admitted.lock().landed(&limits);
            }
            Ok(Outcome::Refused(refusal)) => self.note(life, TraceKind::Refused(refusal.to_string())),
            Err(error) => self.note(life, TraceKind::Refused(error.to_string())),
        }
        outcome
    }
}

/// How a life ends, unless everything has ended before.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LifeEnd {
    None,
    Crash(u64, Side),
    Pause(u64, Side),
    /// After a commit, and this much later.
    Stop(u64, Duration),
    Supersede(u64, Duration),
}

/// What the code that runs the lives must do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LifeCommand {
    /// The process is gone.
    Gone,
    /// Stop the engine.
    Stop,
    /// Start another engine beside it.
    Supersede,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum LifePhase {
    Alive,
    Frozen,
    Dead,
}

/// Stands between the memory and the engine of one life.
pub(crate) struct Seeded {
    world: Arc<World>,
    life: u32,
    fate: LifeEnd,
    is_calm: bool,
    commits: Mutex<u64>,
    phase: Arc<Mutex<LifePhase>>,
    /// Wakes waiters in the order in which they began to wait, so that each run of a seed is the same.
    woke: Arc<Notify>,
    signal: Arc<Mutex<Option<LifeCommand>>>,
}

impl Seeded {
    pub(crate) fn new(world: &Arc<World>, life: u32, is_calm: bool) -> Seeded {
        let faults = &world.faults;
        let side = if world.below(2) == 0 { Side::Before } else { Side::After };
        // The first commits of a life belong to the start of the engine, so it may die while it starts.
        let (commit, later) =
            (1 + world.below(1 << (2 + world.below(5))), world.duration(Duration::from_millis(1), 16));
        let mut fates = Vec::new();
        if faults.crashes {
            fates.extend([LifeEnd::Crash(commit, side); 3]);
        }
        if faults.restarts {
            fates.push(LifeEnd::Stop(commit, later));
        }
        if faults.pauses {
            fates.extend([
                LifeEnd::Pause(commit, side),
                LifeEnd::Pause(commit, side),
                LifeEnd::Supersede(commit, later),
            ]);
        }
        let fate = match world.below(fates.len() as u64) as usize {
            chosen if !is_calm && chosen < fates.len() => fates[chosen],
            _ => LifeEnd::None,
        };
        let (commits, phase) = (Mutex::new(0), Arc::new(Mutex::new(LifePhase::Alive)));
        let (woke, signal) = (Arc::default(), Arc::default());
        Seeded { world: world.clone(), life, fate, is_calm, commits, phase, woke, signal }
    }

    /// Returns what must be done now, and clears it.
    pub(crate) fn take_signal(&self) -> Option<LifeCommand> {
        self.signal.lock().take()
    }

    /// True if the process is paused.
    pub(crate) fn is_frozen(&self) -> bool {
        *self.phase.lock() == LifePhase::Frozen
    }

    /// Ends this life: no call gets an answer any more.
    pub(crate) fn die(&self) {
        *self.phase.lock() = LifePhase::Dead;
        *self.signal.lock() = Some(LifeCommand::Gone);
    }

    /// Returns when the process runs. It never returns in a dead process.
    async fn alive(&self) {
        while *self.phase.lock() != LifePhase::Alive {
            self.woke.notified().await;
        }
    }

    /// Does what the fate of this life says for this side of this commit.
    async fn meet(&self, number: u64, here: Side) {
        match self.fate {
            LifeEnd::Crash(commit, side) if (commit, side) == (number, here) => {
                self.world.note(self.life, TraceKind::Crash(side));
                self.die();
            }
            LifeEnd::Pause(commit, side) if (commit, side) == (number, here) => self.freeze(side),
            LifeEnd::Stop(commit, later) if (commit, Side::After) == (number, here) => {
                self.signal_later(LifeCommand::Stop, later)
            }
            LifeEnd::Supersede(commit, later) if (commit, Side::After) == (number, here) => {
                self.signal_later(LifeCommand::Supersede, later);
            }
            _ => {}
        }
        self.alive().await;
    }

    /// Pauses the process for a while. The next owner may or may not start before the pause ends.
    fn freeze(&self, side: Side) {
        let length = self.world.duration(Duration::from_millis(10), 20);
        self.world.note(self.life, TraceKind::Pause(side, length));
        *self.phase.lock() = LifePhase::Frozen;
        *self.signal.lock() = Some(LifeCommand::Supersede);
        let (world, life, phase, woke) = (self.world.clone(), self.life, self.phase.clone(), self.woke.clone());
        tokio::spawn(async move {
            world.env.sleep(length).await;
            *phase.lock() = LifePhase::Alive;
            world.note(life, TraceKind::Woke);
            woke.notify_waiters();
        });
    }

    fn signal_later(&self, signal: LifeCommand, later: Duration) {
        let (world, slot) = (self.world.clone(), self.signal.clone());
        tokio::spawn(async move {
            world.env.sleep(later).await;
            slot.lock().get_or_insert(signal);
        });
    }

    /// Lets a commit through, with the faults that are drawn for it.
    async fn travel(&self, commit: Commit) -> Result<Outcome> {
        let (world, life) = (&self.world, self.life);
        if self.is_calm {
            return world.land(life, commit).await;
        }
        if world.happens(world.odds.jump) {
            world.jump(life);
        }
        let delay = world.duration(Duration::from_millis(1), 13);
        if world.happens(world.odds.lost) {
            let decided = world.below(2) == 0;
            if decided {
                let _ = world.land(life, commit).await;
            }
            world.note(life, TraceKind::Lost { decided });
            world.env.sleep(delay).await;
            return Err(StoreError::Uncertain { cause: "the connection broke".into() });
        }
        if !world.happens(world.odds.slow) {
            return world.land(life, commit).await;
        }
        world.note(life, TraceKind::Slow(delay));
        let arrives_late = world.below(2) == 0;
        // A commit that takes the shards has no check. If it landed after the next engine had taken them, a process
        // that no longer exists would become the owner.
        if !arrives_late || commit.checks().is_empty() {
            let outcome = world.land(life, commit).await;
            world.env.sleep(delay).await;
            return outcome;
        }
        // The commit is a task of its own, so it lands even if no caller waits for the answer.
        let arriving = world.clone();
        let arrived = tokio::spawn(async move {
            arriving.env.sleep(delay).await;
            arriving.land(life, commit).await
        });
        arrived.await.unwrap_or(Err(StoreError::Closed))
    }
}

impl FaultGate for Seeded {
    fn pass(&self) -> Answer<'_, ()> {
        Box::pin(async move {
            self.alive().await;
            let world = &self.world;
            if !self.is_calm && world.happens(world.odds.slow / 4) {
                world.env.sleep(world.duration(Duration::from_millis(1), 11)).await;
                self.alive().await;
            }
            Ok(())
        })
    }

    fn commit<'a>(&'a self, _: &'a Arc<MemoryBackend>, commit: Commit) -> Answer<'a, Outcome> {
        Box::pin(async move {
            self.alive().await;
            let number = {
                let mut commits = self.commits.lock();
                *commits += 1;
                *commits
            };
            self.meet(number, Side::Before).await;
            let outcome = self.travel(commit).await;
            self.meet(number, Side::After).await;
            outcome
        })
    }
}
