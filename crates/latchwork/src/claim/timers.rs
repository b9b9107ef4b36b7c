//! Timers of steps: a timer fires its step when an entity has been at the step's status for a given time.
//!
//! The commit that brings an entity to the status sets the timer. The timer stays when the entity leaves the status.
//! When it is due, it fires only if the entity has not left the status since it was set.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use xxhash_rust::xxh3::xxh3_64;

use crate::claim::claims::ClaimsInner;
use crate::claim::config::ClaimStep;
use crate::claim::error::Result;
use crate::claim::fire::{FireCall, Which};
use crate::claim::ledger::Ledger;
use crate::claim::machine::Machine;
use crate::claim::outcome::Fired;
use crate::claim::stored::{ClaimSpaces, Logged, LoggedKind, Timed, TimerTerms};
use crate::damage::scan_around;
use crate::entity::{EntityId, Query, Standing};
use crate::lane::{OnceCall, Part};
use crate::node::ExecutionId;
use crate::node::alarm::{Alarms, Due, Keeper, alarm_key, read_alarm_key};
use crate::node::{NodeNotice, shard_of};
use crate::record::Record;
use crate::store::{Commit, Key, Order, Timestamp};

/// The shortest and the longest pause before a step that could not be fired is fired again.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// How long a step that a timer has fired holds its permit at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// The number of entities, or of timers, that are read at once.
const PAGE: usize = 500;

/// Adds timers to the part of a commit that brings an entity to a status.
pub(crate) fn set(
    part: Part,
    ledger: &Ledger,
    workflow: &str,
    timers: &[TimerTerms],
    (entity, since): (&EntityId, u64),
    now: Timestamp,
) -> Part {
    timers.iter().fold(part, |part, timer| {
        let timed = Timed { workflow: workflow.into(), step_id: timer.step_id, entity: entity.clone(), since };
        let due = now.plus(Duration::from_micros(timer.after_us));
        let (name, alarms) = (timed.name(), ledger.timers.clone());
        let part = part.put(&ledger.spaces.timer(&timed, due), timed.encode());
        // Also if this node owns the shard: no check of this commit says that it still does.
        let part = ledger.engine.node.noticed(part, || NodeNotice::Alarm(shard_of(name.as_bytes())));
        part.then(move |_| alarms.upgrade().iter().for_each(|alarms| alarms.set(&name, due)))
    })
}

impl Timed {
    /// The name of the timer for alarms.
    fn name(&self) -> ExecutionId {
        format!("{}\0{}\0{}", self.workflow, self.step_id, self.entity).into()
    }
}

impl ClaimSpaces {
    pub(crate) fn timer(&self, timed: &Timed, due: Timestamp) -> Key {
        self.timers.key(alarm_key(due, &timed.name()))
    }
}

/// Fires steps whose timers are due.
pub(crate) struct Ring;

impl Keeper for Ring {
    type Engine = ClaimsInner;

    fn alarms(claims: &ClaimsInner) -> &Arc<Alarms> {
        &claims.alarms
    }

    async fn ring(claims: &Arc<ClaimsInner>, due: Vec<Due>, damaged: Vec<Key>) -> bool {
        damaged.iter().for_each(|key| tracing::error!(%key, "timer of a claim workflow is damaged"));
        for due in due {
            let Ok(timed) = Timed::decode(&due.item.value) else {
                tracing::error!(key = %due.key, "timer of a claim workflow is damaged");
                continue;
            };
            // The number of permits limits how many steps fire at once. Without a permit the keeper waits.
            let Ok(permit) = claims.ringing.clone().acquire_owned().await else { return false };
            let ringing = Arc::downgrade(claims);
            let env = claims.ledger.store.env().clone();
            claims.ledger.engine.node.runtime.spawn(async move {
                // An action may take days, so a slow step gives its permit back.
                let ringing = pin!(ring(ringing, due.key, timed));
                let slow = select(ringing, env.sleep(PATIENCE)).await;
                drop(permit);
                if let Either::Right((_, ringing)) = slow {
                    ringing.await;
                }
            });
        }
        true
    }
}

/// Fires the step of a timer. Deletes the timer, or sets it again if the step must be fired later.
async fn ring(claims: Weak<ClaimsInner>, key: Key, timed: Timed) {
    let Some(claims) = claims.upgrade() else { return };
    let next = match claims.fire_timed(&timed).await {
        Ok(next) => next,
        Err(error) => {
            let (entity, step) = (&timed.entity, timed.step_id);
            tracing::warn!(%entity, step, %error, "the timer could not fire its step yet");
            Some(PAUSES.1)
        }
    };
    let ledger = &claims.ledger;
    let mut commit = Commit::new().present(&key).delete(&key);
    let due = next.map(|pause| ledger.store.env().now().plus(pause));
    if let Some(due) = due {
        commit = commit.put(&ledger.spaces.timer(&timed, due), timed.encode());
    }
    while let Err(error) = ledger.store.commit(commit.clone()).await {
        if ledger.engine.is_stopped() || error.is_final() {
            // The timer rings again when the next engine starts.
            return;
        }
        tracing::warn!(%error, "timer of a claim workflow could not be removed yet");
        ledger.store.env().sleep(PAUSES.0).await;
    }
    due.into_iter().for_each(|due| claims.alarms.set(&timed.name(), due));
}

impl ClaimsInner {
    /// Fires the step of a timer. Returns the pause before it must be tried again, or `None` if nothing is left to do.
    async fn fire_timed(self: &Arc<ClaimsInner>, timed: &Timed) -> Result<Option<Duration>> {
        // Another node may have a newer configuration.
        let unknown = Ok(self.ledger.engine.node.is_shared().then_some(PAUSES.1));
        let Some(machine) = self.machines.get(&timed.workflow) else { return unknown };
        let step = machine.config.steps.iter().find(|step| step.step_id == timed.step_id);
        let Some((step, timer)) = step.and_then(|step| Some((step, step.timer.as_ref()?))) else { return unknown };
        let view = self.ledger.view().await?;
        let Some(standing) = self.ledger.standing(&view, &timed.entity).await? else { return Ok(None) };
        drop(view);
        let status = machine.status(&standing)?;
        let pause = timer.after.clamp(PAUSES.0, PAUSES.1);
        if machine.claiming.contains(status) {
            return Ok(Some(pause));
        }
        let (since, at) = self.since(machine, &standing, step).await?;
        if status != step.status || since != timed.since {
            return Ok(None);
        }
        // An entity with the same id may have been added again, or the configuration may have another duration by now.
        let (now, due) = (self.ledger.store.env().now(), at.plus(timer.after));
        if due > now {
            return Ok(Some(Duration::from_micros(due.0 - now.0)));
        }
        let call = FireCall {
            workflow: timed.workflow.clone(),
            which: Which::Id(timed.step_id),
            entity: timed.entity.clone(),
            requester: timer.requester.clone(),
            actor: Some("timer".into()),
            input: serde_json::Value::Null,
            once: None,
            begun: OnceCall::default(),
        };
        Ok(match self.fire(call).await? {
            Fired::Done(_) => None,
            _ => Some(pause),
        })
    }

    /// Returns the rev with which an entity reached the status of a step, and when. The rev is 0 if it was added there.
    async fn since(&self, machine: &Machine, standing: &Standing, step: &ClaimStep) -> Result<(u64, Timestamp)> {
        let (view, created) = (self.ledger.view().await?, standing.created());
        let mut rest = self.ledger.spaces.log_of(&standing.id);
        loop {
            let page = view.scan(&rest, Order::Descending, 16).await?;
            for (key, item) in &page {
                // The log may contain entries of a removed entity with the same id.
                if item.generation <= created.generation {
                    return Ok((0, created.time));
                }
                let logged = Logged::decode(&item.value).map_err(|why| why.at("the log of claims"))?;
                let is_arrival = logged.kind == LoggedKind::Done && logged.workflow == machine.name();
                if is_arrival && logged.to == step.status {
                    return Ok((ClaimSpaces::read_rev(key).unwrap_or_default().0, Timestamp(logged.at_us)));
                }
            }
            match page.last() {
                Some((last, _)) if page.len() == 16 => rest = rest.before(last),
                _ => return Ok((0, created.time)),
            }
        }
    }

    /// Sets the timers of entities that reached a status without a step, for example entities that were added before
    /// the workflow had the timer.
    pub(crate) async fn adopt(self: &Arc<ClaimsInner>) -> Result<()> {
        let has_timers = |machine: &&Machine| machine.config.steps.iter().any(|step| step.timer.is_some());
        if !self.machines.values().any(|machine| has_timers(&machine)) {
            return Ok(());
        }
        let set = self.set_timers().await?;
        // A row of a user's own table gets its timers with the step that brings it to the status.
        let is_of_store = |machine: &&Machine| machine.config.meta.table.is_none();
        for machine in self.machines.values().filter(has_timers).filter(is_of_store) {
            let mut query = Query::of(machine.config.meta.entity_type.clone()).limit(PAGE);
            loop {
                let page = self.ledger.entities.find(&query).await?;
                for entity in &page.items {
                    self.adopt_one(machine, &entity.id, &set).await?;
                }
                match page.next {
                    Some(next) => query = query.after(next),
                    None => break,
                }
            }
        }
        Ok(())
    }

    /// The names of all timers in the store, as hashes.
    async fn set_timers(&self) -> Result<HashSet<u64>> {
        let (view, space) = (self.ledger.view().await?, &self.ledger.spaces.timers);
        let (mut names, mut rest) = (HashSet::new(), space.all());
        loop {
            let scanned = scan_around(&view, space, &rest, PAGE).await?;
            let name = |(key, _): &(Key, _)| Some(xxh3_64(read_alarm_key(key.bytes())?.1.as_bytes()));
            names.extend(scanned.found.iter().filter_map(name));
            match scanned.keys().max().filter(|_| scanned.found.len() == PAGE) {
                Some(last) => rest = rest.after(last),
                None => return Ok(names),
            }
        }
    }

    async fn adopt_one(self: &Arc<ClaimsInner>, machine: &Machine, id: &EntityId, set: &HashSet<u64>) -> Result<()> {
        let standing = self.ledger.entities.standing(&self.ledger.view().await?, id).await?;
        let Some(standing) = standing else { return Ok(()) };
        let Ok(status) = machine.status(&standing) else { return Ok(()) };
        for timer in machine.timers(status) {
            let Some(step) = machine.config.steps.iter().find(|step| step.step_id == timer.step_id) else { continue };
            let (since, at) = self.since(machine, &standing, step).await?;
            let timed = Timed { workflow: machine.name().into(), step_id: timer.step_id, entity: id.clone(), since };
            // A timer that exists already stays as it is, also if it was postponed.
            if set.contains(&xxh3_64(timed.name().as_bytes())) {
                continue;
            }
            let due = at.plus(Duration::from_micros(timer.after_us));
            let key = self.ledger.spaces.timer(&timed, due);
            let node = &self.ledger.engine.node;
            let told = node.noticed(Part::default(), || NodeNotice::Alarm(shard_of(timed.name().as_bytes())));
            let commit = told.place(Commit::new().absent(&key).put(&key, timed.encode())).0;
            if self.ledger.store.commit(commit).await?.is_applied() {
                self.alarms.set(&timed.name(), due);
            }
        }
        Ok(())
    }
}
