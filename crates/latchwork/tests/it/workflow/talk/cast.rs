//! The workflows of the simulation: listeners, accounts, families, askers, heralds and postmen.

use std::sync::Arc;
use std::time::Duration;

use latchwork::workflow::{Close, Ctx, Failure, First2, Retry, Workflow, workflow};
use serde::{Deserialize, Serialize};

use super::oracle::Log;

/// The word that ends a listener.
pub const STOP: u64 = u64::MAX;

type Done<T> = Result<T, Failure>;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn often() -> Retry {
    Retry::exponential().max_attempts(10_000).longest_pause(Duration::from_secs(4))
}

/// A step that takes so long.
async fn step(log: &Log, ctx: &Ctx, name: &str, length: u64) -> Done<u64> {
    let body = ctx.run(name, async || {
        log.env().sleep(ms(length)).await;
        Ok(length)
    });
    body.retry(often()).await
}

/// One turn of a listener.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ear {
    Receive,
    Within(u64),
    OrSleep(u64),
    OrStep(u64),
    /// A branch runs a step before it receives. It may lose against a sleep.
    AfterStep(u64, u64),
    /// A branch forwards to its own execution what it receives. It may lose against a sleep.
    Pass(u64),
    /// A step that runs until the other branch has received.
    Duet,
    /// Receives while branches count in a slot and a child runs.
    Busy(u64),
    /// A signal to itself.
    Echo,
    Nap(u64),
    Anew,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Listener {
    pub plan: Vec<Ear>,
    /// Ends after so many turns, whatever comes.
    pub turns: Option<usize>,
    pub turn: usize,
    pub heard: Vec<u64>,
    pub counted: u64,
}

/// What it received.
#[derive(Debug, Serialize, Deserialize)]
pub struct Heard {
    pub words: Vec<u64>,
    pub hellos: Vec<u64>,
    /// What branches have forwarded, also branches that have lost.
    pub passed: Vec<u64>,
    /// How often it has counted, by its own count and by the slot.
    pub counted: (u64, u64),
}

pub fn listener(log: &Arc<Log>) -> Workflow<Listener, Heard> {
    let log = log.clone();
    let kid = kid(&log);
    workflow("listener").run(move |ctx: Ctx, mut me: Listener| {
        let (log, kid) = (log.clone(), kid.clone());
        async move {
            while me.turns.is_none_or(|turns| me.turn < turns) && me.heard.last() != Some(&STOP) {
                let ear = me.plan[me.turn % me.plan.len()].clone();
                me.turn += 1;
                if matches!(ear, Ear::Anew) {
                    return ctx.continue_as_new(me).await;
                }
                let heard = listen(&log, &kid, &ctx, &mut me, ear).await?;
                me.heard.extend(heard);
            }
            let (mut hellos, mut passed) = (Vec::new(), Vec::new());
            for (name, heard) in [("hello", &mut hellos), ("passed", &mut passed)] {
                while let Some(word) = ctx.receive::<u64>(name).timeout(ms(1)).await? {
                    heard.push(word);
                }
            }
            let counted = ctx.state().execution::<u64>("counted").get().await?.unwrap_or(0);
            Ok(Heard { words: me.heard, hellos, passed, counted: (me.counted, counted) })
        }
    })
}

async fn word(ctx: Ctx) -> Done<u64> {
    ctx.receive::<u64>("word").await
}

async fn listen(log: &Arc<Log>, kid: &Workflow<Kid, u64>, ctx: &Ctx, me: &mut Listener, ear: Ear) -> Done<Option<u64>> {
    let heard = match ear {
        Ear::Receive => Some(word(ctx.clone()).await?),
        Ear::Within(length) => ctx.receive::<u64>("word").timeout(ms(length)).await?,
        Ear::OrSleep(length) => match ctx.select((async |ctx: Ctx| ctx.sleep(ms(length)).await, word)).await {
            First2::First(slept) => slept.map(|()| None)?,
            First2::Second(heard) => Some(heard?),
        },
        Ear::OrStep(length) => {
            let race = ctx.select((word, async |ctx: Ctx| step(log, &ctx, "or", length).await));
            match race.await {
                First2::First(heard) => Some(heard?),
                First2::Second(stepped) => stepped.map(|_| None)?,
            }
        }
        Ear::AfterStep(length, sleep) => {
            let after = async |ctx: Ctx| {
                step(log, &ctx, "before", length).await?;
                ctx.state().global::<u64>("lost").increment(1).await?;
                word(ctx).await
            };
            match ctx.select((after, async |ctx: Ctx| ctx.sleep(ms(sleep)).await)).await {
                First2::First(heard) => Some(heard?),
                First2::Second(slept) => slept.map(|()| None)?,
            }
        }
        Ear::Pass(length) => {
            let pass = async |ctx: Ctx| {
                let heard = word(ctx.clone()).await?;
                // The word that ends the listener must not be lost.
                if heard != STOP {
                    ctx.signal(ctx.id(), "passed", &heard).await?;
                }
                Ok::<_, Failure>(heard)
            };
            match ctx.select((pass, async |ctx: Ctx| ctx.sleep(ms(length)).await)).await {
                First2::First(heard) => Some(heard?),
                First2::Second(slept) => slept.map(|()| None)?,
            }
        }
        Ear::Duet => Some(duet(log, ctx, me.turn).await?),
        Ear::Busy(length) => {
            me.counted += 3;
            busy(log, kid, ctx, length).await?
        }
        Ear::Echo => {
            ctx.signal(ctx.id(), "echo", &me.turn).await?;
            let echo = ctx.receive::<usize>("echo").await?;
            if echo != me.turn {
                return Err(Failure::new(format!("echo {echo} for {}", me.turn)));
            }
            None
        }
        Ear::Nap(length) => ctx.sleep(ms(length)).await.map(|()| None)?,
        Ear::Anew => None,
    };
    Ok(heard)
}

/// A branch receives, and another waits for that in a body.
async fn duet(log: &Arc<Log>, ctx: &Ctx, turn: usize) -> Done<u64> {
    let key = (ctx.id().clone(), turn);
    let waits = async |ctx: Ctx| {
        let body = ctx.run("until heard", async || {
            while !log.has_heard(&key) {
                log.env().sleep(ms(50)).await;
            }
            Ok(())
        });
        body.retry(often()).await
    };
    let hears = async |ctx: Ctx| {
        let heard = word(ctx).await?;
        log.hears(&key);
        Ok(heard)
    };
    let (heard, waited) = ctx.join((hears, waits)).await;
    waited?;
    heard
}

/// Receives while branches count and a child sleeps.
async fn busy(log: &Arc<Log>, kid: &Workflow<Kid, u64>, ctx: &Ctx, length: u64) -> Done<Option<u64>> {
    let counts = async |ctx: Ctx| {
        let counted = ctx.map([1u64, 2, 3], 2, async |ctx: Ctx, n| {
            ctx.state().execution::<u64>("counted").increment(1).await?;
            step(log, &ctx, "count", n * 10).await
        });
        counted.await.into_iter().collect::<Done<Vec<u64>>>()
    };
    let child = async |ctx: Ctx| ctx.child(kid, Kid { n: 5, job: Job::Nap(length) }).await;
    let (heard, counted, five) =
        ctx.join((async |ctx: Ctx| ctx.receive::<u64>("word").timeout(ms(length)).await, counts, child)).await;
    if counted? != [10, 20, 30] || five? != 5 {
        return Err(Failure::new("branches gave something else"));
    }
    heard
}

/// Updates that were received, each with the count at that time.
pub type Counted = Vec<(String, u64)>;

/// Answers updates until it has answered so many, or until no update comes for a minute.
pub fn account(log: &Arc<Log>) -> Workflow<usize, Counted> {
    let log = log.clone();
    let account = workflow("account").validate("add", |_, amount: &u64| match amount {
        0 => Err(Failure::new("nothing")),
        _ => Ok(()),
    });
    account.run(move |ctx: Ctx, until: usize| {
        let log = log.clone();
        async move {
            let mut counted = Vec::new();
            while counted.len() < until {
                let received = ctx.receive_update::<u64, u64>("add").timeout(Duration::from_secs(60)).await;
                let request = match received {
                    Ok(None) => break,
                    Ok(Some(request)) => request,
                    Err(failure) => {
                        let ctx = ctx.shielded();
                        step(&log, &ctx, "clean up", 700).await?;
                        ctx.state().execution::<u64>("cleaned").increment(1).await?;
                        return Err(failure);
                    }
                };
                let count = ctx.state().execution::<u64>("count").increment(1).await?.value;
                counted.push((request.id().to_string(), count));
                match request.value {
                    1 => step(&log, &ctx.shielded(), "think", 300).await.map(drop)?,
                    2 => ctx.publish("count", &count).await?,
                    _ => {}
                }
                if request.value == 3 {
                    request.refuse(Failure::new(format!("refused {count}"))).await;
                } else {
                    request.answer(&count).await?;
                }
            }
            Ok(counted)
        }
    })
}

/// What a child does.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Job {
    Nap(u64),
    Step(u64),
    Fails(u64),
    /// Waits until it is signalled or cancelled.
    Waits,
    /// The same, and cleans up for so long.
    Cleans(u64),
    /// Has a child of its own that waits.
    Parents(u64),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Kid {
    pub n: u64,
    pub job: Job,
}

pub fn kid(log: &Arc<Log>) -> Workflow<Kid, u64> {
    let log = log.clone();
    workflow("kid").run(move |ctx: Ctx, kid: Kid| {
        let log = log.clone();
        async move {
            match kid.job {
                Job::Nap(length) => ctx.sleep(ms(length)).await?,
                Job::Step(length) => step(&log, &ctx, "work", length).await.map(drop)?,
                Job::Fails(length) => {
                    ctx.sleep(ms(length)).await?;
                    return Err(Failure::new(format!("kid {} fails", kid.n)));
                }
                Job::Waits => return ctx.receive::<u64>("go").await,
                Job::Cleans(length) => {
                    let waited = ctx.receive::<u64>("go").await;
                    step(&log, &ctx.shielded(), "clean up", length).await?;
                    return waited;
                }
                Job::Parents(length) => {
                    // It starts itself by another definition of the same name.
                    let itself = workflow("kid").run(async |_: Ctx, kid: Kid| Ok(kid.n));
                    let below = Kid { n: kid.n + 100, job: Job::Waits };
                    ctx.child(&itself, below).id(format!("{}.below", ctx.id())).start().await?;
                    ctx.sleep(ms(length)).await?;
                }
            }
            Ok(kid.n)
        }
    })
}

/// What a parent does with a child.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum How {
    Result,
    Start,
    /// Signals it after so long.
    Signal(u64),
    /// Cancels it after so long.
    Cancel(u64),
    /// Runs the child in a branch that races against a sleep of so long.
    Lost(u64),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Birth {
    pub kid: Kid,
    pub close: Close,
    pub how: How,
    pub is_named: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Family {
    pub births: Vec<Birth>,
    pub at_once: usize,
    pub nap: u64,
    pub fails: bool,
    pub anew: bool,
}

/// The children whose end the parent has seen, and their results.
pub type Seen = Vec<Option<(String, Result<u64, String>)>>;

pub fn family(log: &Arc<Log>) -> Workflow<Family, Seen> {
    let kid = kid(log);
    workflow("family").run(move |ctx: Ctx, family: Family| {
        let kid = kid.clone();
        async move {
            let kid = &kid;
            let births = family.births.clone();
            let seen = ctx.map(births, family.at_once, async |ctx: Ctx, birth| raise(ctx, kid, birth).await).await;
            let seen = seen.into_iter().collect::<Done<Seen>>()?;
            ctx.sleep(ms(family.nap)).await?;
            if family.anew {
                let next = Family { births: Vec::new(), anew: false, nap: family.nap / 2, ..family };
                return ctx.continue_as_new(next).await;
            }
            if family.fails { Err(Failure::new("the family fails")) } else { Ok(seen) }
        }
    })
}

async fn raise(ctx: Ctx, kid: &Workflow<Kid, u64>, birth: Birth) -> Done<Option<(String, Result<u64, String>)>> {
    let (id, close) = (format!("{}.{}", ctx.id(), birth.kid.n), birth.close);
    if let How::Lost(length) = birth.how {
        let raised = ctx.select((
            async |ctx: Ctx| {
                let child = ctx.child(kid, birth.kid).id(id.as_str()).close(close).start().await?;
                if close == Close::Abandon { Ok(birth.kid.n) } else { child.result().await }
            },
            async |ctx: Ctx| ctx.sleep(ms(length)).await,
        ));
        return match raised.await {
            First2::First(Err(failure)) if failure.is_cancelled() && ctx.is_cancelled().await => Err(failure),
            First2::First(_) if close == Close::Abandon => Ok(None),
            First2::First(result) => Ok(Some((id, result.map_err(|failure| failure.message().into())))),
            First2::Second(slept) => slept.map(|()| None),
        };
    }
    let start = ctx.child(kid, birth.kid).close(close);
    let start = if birth.is_named { start.id(id.as_str()) } else { start };
    let child = start.start().await?;
    match birth.how {
        How::Start => return Ok(None),
        How::Signal(length) => {
            ctx.sleep(ms(length)).await?;
            // The child may have been cancelled.
            let _ = child.signal("go", &birth.kid.n).await;
        }
        How::Cancel(length) => {
            ctx.sleep(ms(length)).await?;
            let _ = child.cancel("by its parent").await;
        }
        How::Result | How::Lost(_) => {}
    }
    // A parent is not notified of the end of an abandoned child.
    if close == Close::Abandon {
        return Ok(None);
    }
    let id = child.id().to_string();
    match child.result().await {
        Err(failure) if failure.is_cancelled() && ctx.is_cancelled().await => Err(failure),
        result => Ok(Some((id, result.map_err(|failure| failure.message().into())))),
    }
}

/// Waits for a client to complete a token, within so long.
pub fn asker() -> Workflow<Option<u64>, Option<u64>> {
    workflow("asker").run(async |ctx: Ctx, within: Option<u64>| {
        let answer = ctx.completion::<u64>("answer").await;
        ctx.publish("token", &answer.token()).await?;
        match within {
            Some(within) => answer.wait_within(ms(within)).await,
            None => answer.wait().await.map(Some),
        }
    })
}

/// Publishes numbers up to this one, and waits for them itself.
pub fn herald(log: &Arc<Log>) -> Workflow<(u64, u64), u64> {
    let log = log.clone();
    workflow("herald").run(move |ctx: Ctx, (last, pause): (u64, u64)| {
        let log = log.clone();
        async move {
            let publishes = async |ctx: Ctx| {
                for number in 1..=last {
                    match number % 3 {
                        0 => ctx.sleep(ms(pause)).await?,
                        1 => step(&log, &ctx, "proclaim", pause).await.map(drop)?,
                        _ => {}
                    }
                    ctx.publish("number", &number).await?;
                }
                Ok::<_, Failure>(())
            };
            let (seen, published) = ctx
                .join((async |ctx: Ctx| ctx.wait_until("number", |number: &u64| *number >= last).await, publishes))
                .await;
            published?;
            seen
        }
    })
}

/// Sends words to a listener, one after the other. Returns those that arrived.
pub fn postman() -> Workflow<(String, Vec<u64>, u64), Vec<u64>> {
    workflow("postman").run(async |ctx: Ctx, (to, words, pause): (String, Vec<u64>, u64)| {
        let mut delivered = Vec::new();
        for word in words {
            ctx.sleep(ms(pause)).await?;
            if ctx.signal(to.as_str(), "word", &word).await.is_ok() {
                delivered.push(word);
            }
        }
        Ok(delivered)
    })
}
