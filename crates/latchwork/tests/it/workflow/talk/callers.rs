//! The simulation: which executions there are, and which client sends what to them and when, all drawn from the seed.

use std::sync::Arc;
use std::time::Duration;

use latchwork::testing::{Caller, Report, Simulation};
use latchwork::workflow::{Close, Engine, Result, Workflow, WorkflowError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::cast::{self, Birth, Ear, Family, How, Job, Kid, Listener, STOP};
use super::oracle::{self, Log, Said};

/// A client that sends words to a listener, in order.
#[derive(Debug, Clone)]
pub struct Sender {
    n: u64,
    pub words: Vec<u64>,
    pauses: Vec<u64>,
    /// Whether it sends everything again when it is called again.
    repeats: bool,
}

/// A workflow that does the same.
#[derive(Debug, Clone)]
pub struct Post {
    n: u64,
    pub id: String,
    pub words: Vec<u64>,
    pause: u64,
    delay: u64,
}

/// An execution, and the clients that use it.
#[derive(Debug, Clone)]
pub enum Act {
    Listens { id: String, listener: Listener, senders: Vec<Sender>, hellos: Vec<u64>, posts: Vec<Post> },
    Counts { id: String, until: usize, updates: Vec<(String, u64)> },
    Family { id: String, family: Family },
    Asks { id: String, within: Option<u64>, answers: Vec<u64> },
    Heralds { id: String, last: u64, pause: u64 },
}

impl Act {
    pub fn id(&self) -> &str {
        let (Act::Listens { id, .. }
        | Act::Counts { id, .. }
        | Act::Family { id, .. }
        | Act::Asks { id, .. }
        | Act::Heralds { id, .. }) = self;
        id
    }
}

/// An operator who ends an execution after so long.
#[derive(Debug, Clone)]
struct Operator {
    id: String,
    after: u64,
    terminates: bool,
    twice: bool,
}

pub struct Play {
    pub acts: Vec<Act>,
    operators: Vec<Operator>,
    delays: Vec<u64>,
    log: Arc<Log>,
}

/// A start with a signal that counts once, however often it is sent; and a signal that is sent without an id, and
/// without a start.
pub const NAMED: u64 = 100;
const UNNAMED: u64 = 101;

/// Times that are often equal, so that things happen at once.
fn time(random: &mut fastrand::Rng) -> u64 {
    match random.u8(..6) {
        0 => 0,
        1..3 => 500 * random.u64(1..8),
        3 => random.u64(..400),
        4 => 1000 * random.u64(1..30),
        _ => random.u64(1..50) << random.u8(..10),
    }
}

fn listens(random: &mut fastrand::Rng, id: String) -> Act {
    let ear = |random: &mut fastrand::Rng| match random.u8(..16) {
        14..16 => Ear::Pass(time(random)),
        0..2 => Ear::Receive,
        2..4 => Ear::Within(time(random)),
        4..6 => Ear::OrSleep(time(random)),
        6 => Ear::OrStep(time(random)),
        7 => Ear::AfterStep(time(random), time(random)),
        8..10 => Ear::Duet,
        10 => Ear::Busy(time(random)),
        11 => Ear::Echo,
        12 => Ear::Nap(time(random)),
        _ => Ear::Anew,
    };
    let mut plan: Vec<Ear> = (0..random.usize(1..6)).map(|_| ear(random)).collect();
    plan.push(Ear::Receive);
    let turns = (random.u8(..3) == 0).then(|| random.usize(..8));
    let sender = |n: u64, random: &mut fastrand::Rng| {
        let words: Vec<u64> = (0..random.u64(1..7)).map(|word| 1000 * n + word).collect();
        let pauses = words.iter().map(|_| if random.bool() { 0 } else { time(random) }).collect();
        Sender { n, words, pauses, repeats: random.bool() }
    };
    let senders = (1..1 + random.u64(1..4)).map(|n| sender(n, random)).collect();
    let hellos = (0..random.u64(..4)).map(|n| NAMED + n).collect();
    let post = |n: u64, random: &mut fastrand::Rng| {
        let words = (0..random.u64(1..5)).map(|word| 1000 * (n + 10) + word).collect();
        Post { n: n + 10, id: format!("{id}.post{n}"), words, pause: time(random), delay: time(random) }
    };
    let posts = (0..random.u64(..2)).map(|n| post(n, random)).collect();
    let listener = Listener { plan, turns, turn: 0, heard: Vec::new(), counted: 0 };
    Act::Listens { id, listener, senders, hellos, posts }
}

fn family(random: &mut fastrand::Rng, id: String) -> Act {
    let birth = |n: u64, random: &mut fastrand::Rng| {
        let close = [Close::Cancel, Close::Cancel, Close::Await, Close::Abandon][random.usize(..4)];
        let how = match random.u8(..5) {
            0 => How::Result,
            1 => How::Start,
            2 => How::Lost(time(random)),
            3 => How::Cancel(time(random)),
            _ => How::Signal(time(random)),
        };
        let mut job = match random.u8(..6) {
            0 => Job::Nap(time(random)),
            1 => Job::Step(time(random)),
            2 => Job::Fails(time(random)),
            3 => Job::Waits,
            4 => Job::Cleans(time(random)),
            _ => Job::Parents(time(random)),
        };
        // A child that waits must be signalled or cancelled at some time.
        let is_told =
            matches!((how, close), (How::Signal(_) | How::Cancel(_) | How::Start | How::Lost(_), Close::Cancel));
        if matches!(job, Job::Waits | Job::Cleans(_)) && !is_told {
            job = Job::Nap(time(random));
        }
        Birth { kid: Kid { n, job }, close, how, is_named: random.u8(..4) > 0 }
    };
    let births = (0..random.u64(1..5)).map(|n| birth(n, random)).collect();
    let (at_once, nap) = (random.usize(1..4), time(random));
    let (fails, anew) = (random.u8(..5) == 0, random.u8(..4) == 0);
    Act::Family { id, family: Family { births, at_once, nap, fails, anew } }
}

impl Play {
    pub fn drawn(seed: u64) -> Play {
        let mut random = fastrand::Rng::with_seed(seed ^ 0x7a1b);
        let random = &mut random;
        let (mut acts, mut operators) = (Vec::new(), Vec::new());
        for n in 0..random.u64(1..5) {
            let id = format!("e{n}");
            let act = match random.u8(..8) {
                0..3 => listens(random, id),
                3 => {
                    let updates = random.u64(1..6);
                    let update = |update: u64| (format!("u{update}"), random.u64(..6));
                    let updates: Vec<_> = (0..updates).map(update).collect();
                    Act::Counts { id, until: random.usize(1..7), updates }
                }
                4..6 => family(random, id),
                6 => {
                    let within = random.bool().then(|| time(random));
                    Act::Asks { id, within, answers: (0..random.u64(1..4)).map(|n| 40 + n).collect() }
                }
                _ => Act::Heralds { id, last: random.u64(1..8), pause: time(random) },
            };
            if random.u8(..3) == 0 {
                let (terminates, twice) = (random.u8(..3) == 0, random.u8(..3) == 0);
                operators.push(Operator { id: act.id().into(), after: time(random), terminates, twice });
            }
            acts.push(act);
        }
        let delays = (0..64).map(|_| if random.bool() { 0 } else { time(random) }).collect();
        Play { acts, operators, delays, log: Arc::default() }
    }

    pub fn judge(&self, report: &Report) -> Vec<String> {
        oracle::judge(&self.log, self, report)
    }

    pub fn simulation(&self, seed: u64) -> Simulation {
        let log = &self.log;
        let (listener, account, family) = (cast::listener(log), cast::account(log), cast::family(log));
        let (asker, herald, postman) = (cast::asker(), cast::herald(log), cast::postman());
        let simulation = Simulation::new(seed).register(&listener).register(&account).register(&family);
        let simulation = simulation.register(&cast::kid(log)).register(&asker).register(&herald).register(&postman);
        let mut cast = Cast { log: log.clone(), delays: self.delays.clone().into_iter().cycle(), simulation };
        for act in &self.acts {
            let id = act.id();
            match act.clone() {
                Act::Listens { listener: input, senders, hellos, posts, .. } => {
                    cast.starts(id, &listener, input.clone());
                    let speakers: Vec<u64> = senders.iter().map(|sender| sender.n).collect();
                    let speakers = speakers.into_iter().chain(posts.iter().map(|post| post.n)).chain(hellos.clone());
                    cast.stops(id, speakers.collect());
                    senders.into_iter().for_each(|sender| cast.says(id, sender));
                    hellos.into_iter().for_each(|n| cast.greets(id, &listener, input.clone(), n));
                    posts.into_iter().for_each(|post| cast.posts(id, &postman, post));
                }
                Act::Counts { until, updates, .. } => {
                    cast.starts(id, &account, until);
                    for (place, (update, amount)) in updates.into_iter().enumerate() {
                        // Several clients send some of the updates.
                        (0..1 + place % 2).for_each(|_| cast.asks(id, update.clone(), amount));
                    }
                }
                Act::Family { family: input, .. } => cast.starts(id, &family, input),
                Act::Asks { within, answers, .. } => {
                    cast.starts(id, &asker, within);
                    answers.into_iter().for_each(|answer| cast.completes(id, &asker, answer));
                }
                Act::Heralds { last, pause, .. } => {
                    cast.starts(id, &herald, (last, pause));
                    cast.watches(id, &herald, 1 + last / 2);
                    cast.watches(id, &herald, last);
                }
            }
        }
        self.operators.iter().for_each(|operator| cast.operates(operator.clone()));
        let log = log.clone();
        cast.simulation.afterwards(move |engine| look(log, engine))
    }
}

impl std::fmt::Display for Play {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.acts.iter().try_for_each(|act| writeln!(f, "{act:?}"))?;
        self.operators.iter().try_for_each(|operator| writeln!(f, "{operator:?}"))
    }
}

/// What the store holds in the end that no result shows.
async fn look(log: Arc<Log>, engine: Engine) -> Result<()> {
    let ids = latchwork::workflow::History::ids(engine.store()).await?;
    for (id, _) in ids {
        let why = engine.why(&id).await?.cancel;
        log.with(|told| told.whys.insert(id.to_string(), why));
        for name in ["count", "cleaned"] {
            let slot = engine.states().execution(&id).slot::<u64>(name);
            let value = slot.get().await.ok().flatten().unwrap_or(0);
            log.with(|told| told.slots.insert((id.to_string(), name.into()), value));
        }
    }
    Ok(())
}

/// How long a client waits after it found no execution.
const AGAIN: Duration = Duration::from_millis(250);

struct Cast {
    log: Arc<Log>,
    delays: std::iter::Cycle<std::vec::IntoIter<u64>>,
    simulation: Simulation,
}

impl Cast {
    /// Adds a client that begins after a while.
    fn client<F, Fut>(&mut self, client: F)
    where
        F: Fn(Arc<Log>, Caller) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<()>> + Send + 'static,
    {
        let (log, delay) = (self.log.clone(), Duration::from_millis(self.delays.next().unwrap_or(0)));
        let simulation = std::mem::replace(&mut self.simulation, Simulation::new(0));
        self.simulation = simulation.client(move |caller| {
            log.meet(caller.env());
            let called = client(log.clone(), caller.clone());
            async move {
                caller.env().sleep(delay).await;
                called.await
            }
        });
    }

    fn starts<I, O>(&mut self, id: &str, workflow: &Workflow<I, O>, input: I)
    where
        I: Serialize + Clone + Send + Sync + 'static,
        O: Serialize + DeserializeOwned + Send + 'static,
    {
        let (id, workflow) = (id.to_string(), workflow.clone());
        self.client(move |log, caller| {
            let start = caller.engine().start(&workflow, input.clone()).id(id.as_str()).or_join();
            async move {
                let handle = start.await?;
                caller.started(handle.id());
                let end = match handle.result().await {
                    Err(error @ (WorkflowError::Stopped | WorkflowError::Store(_))) => return Err(error),
                    end => end.map(|output| latchwork::json!(output)),
                };
                log.sees(handle.id(), &end);
                Ok(())
            }
        });
    }

    fn says(&mut self, id: &str, sender: Sender) {
        let id = id.to_string();
        self.client(move |log, caller| say(log, caller, id.clone(), sender.clone()));
    }

    /// Sends the last word, when no other client has anything to send.
    fn stops(&mut self, id: &str, speakers: Vec<u64>) {
        let id = id.to_string();
        self.client(move |log, caller| {
            let (id, speakers) = (id.clone(), speakers.clone());
            async move {
                while !log.with(|told| speakers.iter().all(|n| told.done.contains(&(id.clone(), *n)))) {
                    caller.env().sleep(AGAIN).await;
                }
                signal(&log, &caller, &id, STOP).await
            }
        });
    }

    fn greets<O: DeserializeOwned + Send + 'static>(
        &mut self,
        id: &str,
        workflow: &Workflow<Listener, O>,
        input: Listener,
        n: u64,
    ) {
        let (id, workflow) = (id.to_string(), workflow.clone());
        self.client(move |log, caller| {
            let start = caller.engine().start(&workflow, input.clone()).id(id.as_str()).signal("hello", &n);
            let (start, key) = (if n == NAMED { start.signal_id("hello") } else { start }, (id.clone(), n));
            let signal = caller.engine().signal(id.as_str(), "hello", &n);
            async move {
                log.with(|told| told.hellos.entry(key.clone()).or_default().0 += 1);
                let sent = if n == UNNAMED { signal.await } else { start.await.map(drop) };
                match sent {
                    Ok(()) => {
                        caller.note("started with a signal");
                        log.with(|told| told.hellos.entry(key.clone()).or_default().1 = true);
                    }
                    Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
                log.with(|told| told.done.insert(key));
                Ok(())
            }
        });
    }

    fn posts(&mut self, id: &str, workflow: &Workflow<(String, Vec<u64>, u64), Vec<u64>>, post: Post) {
        let (id, workflow) = (id.to_string(), workflow.clone());
        self.client(move |log, caller| {
            let (id, workflow, post) = (id.clone(), workflow.clone(), post.clone());
            async move {
                let engine = caller.engine();
                while let Err(WorkflowError::NotFound { .. }) = engine.why(&*id).await {
                    caller.env().sleep(AGAIN).await;
                }
                let input = (id.clone(), post.words, post.pause);
                let start = engine.start(&workflow, input).id(post.id).or_join();
                let handle = start.delay(Duration::from_millis(post.delay)).await?;
                let end = match handle.result().await {
                    Err(error @ (WorkflowError::Stopped | WorkflowError::Store(_))) => return Err(error),
                    end => end.map(|output| latchwork::json!(output)),
                };
                log.sees(handle.id(), &end);
                log.with(|told| told.done.insert((id, post.n)));
                Ok(())
            }
        });
    }

    fn asks(&mut self, id: &str, update: String, amount: u64) {
        let id = id.to_string();
        self.client(move |log, caller| ask(log, caller, id.clone(), update.clone(), amount));
    }

    fn completes<I: 'static, O: 'static>(&mut self, id: &str, workflow: &Workflow<I, O>, answer: u64) {
        let (id, workflow) = (id.to_string(), workflow.clone());
        self.client(move |log, caller| {
            let handle = caller.engine().handle(&workflow, id.as_str());
            let id = id.clone();
            async move {
                let token = loop {
                    match handle.wait_until("token", |_: &String| true).await {
                        Err(WorkflowError::NotFound { .. }) => caller.env().sleep(AGAIN).await,
                        Err(WorkflowError::Ended { .. }) => return Ok(()),
                        token => break token?,
                    }
                };
                match caller.engine().complete(&token, &answer).await {
                    Ok(()) => {
                        caller.note(format!("token used: {id} {answer}"));
                        log.with(|told| told.completed.entry(id).or_default().insert(answer));
                        Ok(())
                    }
                    Err(WorkflowError::TokenUsed { .. } | WorkflowError::Ended { .. }) => {
                        caller.note(format!("token too late: {id} {answer}"));
                        Ok(())
                    }
                    Err(error) => Err(error),
                }
            }
        });
    }

    fn watches<I: 'static, O: 'static>(&mut self, id: &str, workflow: &Workflow<I, O>, wanted: u64) {
        let (id, workflow) = (id.to_string(), workflow.clone());
        self.client(move |log, caller| {
            let handle = caller.engine().handle(&workflow, id.as_str());
            async move {
                loop {
                    match handle.wait_until("number", |number: &u64| *number >= wanted).await {
                        Err(WorkflowError::NotFound { .. }) => caller.env().sleep(AGAIN).await,
                        Err(WorkflowError::Ended { id }) => {
                            caller.note("published too late");
                            let why = caller.engine().history(&id).await?.state;
                            if matches!(why, latchwork::workflow::ExecutionState::Completed(_)) {
                                let told = format!("{id} completed, and {wanted} was not seen");
                                log.with(|all| all.complaints.push(told));
                            }
                            return Ok(());
                        }
                        Err(error) => return Err(error),
                        Ok(_) => {
                            caller.note("published");
                            return Ok(());
                        }
                    }
                }
            }
        });
    }

    fn operates(&mut self, operator: Operator) {
        self.client(move |log, caller| operate(log, caller, operator.clone()));
    }
}

/// Sends a word until it is stored for its execution, or it is too late.
async fn signal(log: &Log, caller: &Caller, id: &str, word: u64) -> Result<()> {
    loop {
        let said = match caller.engine().signal(id, "word", &word).id(format!("w{word}")).await {
            Ok(()) => Said::Stored,
            Err(WorkflowError::Ended { .. }) => Said::TooLate,
            Err(WorkflowError::NotFound { .. }) => {
                caller.env().sleep(AGAIN).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        let scene = if said == Said::Stored { "signal acknowledged" } else { "signal too late" };
        caller.note(format!("{scene}: {id} {word}"));
        log.says(id, word, said);
        return Ok(());
    }
}

async fn say(log: Arc<Log>, caller: Caller, id: String, sender: Sender) -> Result<()> {
    for (word, pause) in sender.words.iter().zip(&sender.pauses) {
        if !sender.repeats && log.with(|told| told.said.contains_key(&(id.clone(), word.to_string()))) {
            continue;
        }
        caller.env().sleep(Duration::from_millis(*pause)).await;
        signal(&log, &caller, &id, *word).await?;
    }
    log.with(|told| told.done.insert((id, sender.n)));
    Ok(())
}

async fn ask(log: Arc<Log>, caller: Caller, id: String, update: String, amount: u64) -> Result<()> {
    let said = loop {
        match caller.engine().update::<u64>(id.as_str(), "add", &amount).id(&*update).await {
            Ok(count) => break Said::Count(count),
            Err(WorkflowError::UpdateRefused { failure, .. }) => break Said::Refused(failure.message().into()),
            Err(WorkflowError::Ended { .. }) => break Said::TooLate,
            Err(WorkflowError::NotFound { .. }) => caller.env().sleep(AGAIN).await,
            Err(error) => return Err(error),
        }
    };
    let scene = match &said {
        Said::Refused(_) => "update refused",
        Said::TooLate => "update too late",
        _ => "update answered",
    };
    caller.note(format!("{scene}: {id} {update} {said:?}"));
    // An update that the validator refuses is nowhere stored, before the end and after.
    if amount > 0 {
        log.says(&id, &update, said);
    }
    Ok(())
}

async fn operate(log: Arc<Log>, caller: Caller, operator: Operator) -> Result<()> {
    let Operator { id, after, terminates, twice } = operator;
    caller.env().sleep(Duration::from_millis(after)).await;
    let what = if terminates { "terminate" } else { "cancel" };
    for _ in 0..1 + usize::from(twice) {
        loop {
            let engine = caller.engine();
            let done = match terminates {
                true => engine.terminate(id.as_str(), "enough").await,
                false => engine.cancel(id.as_str(), "enough").await,
            };
            match done {
                Ok(()) => {
                    caller.note(format!("{what} acknowledged: {id}"));
                    log.with(|told| match terminates {
                        true => told.terminated.insert(id.clone()),
                        false => told.cancelled.insert(id.clone()),
                    });
                }
                Err(WorkflowError::NotFound { .. }) => {
                    caller.env().sleep(AGAIN).await;
                    continue;
                }
                Err(WorkflowError::Ended { .. }) => caller.note(format!("{what} too late: {id}")),
                Err(error) => return Err(error),
            }
            break;
        }
    }
    Ok(())
}
