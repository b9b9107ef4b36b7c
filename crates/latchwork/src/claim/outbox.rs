//! After-effects: the outbox delivers what transitions have written into it, at least once, under a key that stays the
//! same. The after-effects of one entity are delivered in the order of its transitions.
//!
//! An `EffectQueue` is the queue of one entity: its after-effects that are known in memory. A transition announces its
//! after-effects before it sends its commit, so a later transition of the same entity cannot overtake it.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::Instrument;

use crate::backoff::{doubled, jittered};
use crate::claim::error::Result;
use crate::claim::stored::{ClaimSpaces, EffectKey, OutboxEffect};
use crate::damage::scan_around;
use crate::entity::EntityId;
use crate::node::Node;
use crate::panic::message_of;
use crate::record::Record;
use crate::store::{Commit, Order, Timestamp};
use crate::workflow::Boxed;

/// The pause until a node without the handler of an after-effect looks again whether it is alone.
const ELSEWHERE: Duration = Duration::from_secs(5);

/// The pauses between attempts: the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));

/// The number of deliverable after-effects in memory above which no more are read from the store.
const MOST_KNOWN: usize = 10_000;

/// The number of after-effects that are read at once.
const PAGE: usize = 1000;

/// The pause before a retry, if the store was unavailable.
const AGAIN: Duration = Duration::from_millis(100);

/// An after-effect as its handler gets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AfterEffect {
    /// An idempotency key for receivers that accept one. It is the same for each delivery, and no other after-effect
    /// has it.
    pub key: String,
    /// Its name in the configuration.
    pub name: String,
    /// The claim workflow.
    pub workflow: String,
    /// The key of the step.
    pub step: String,
    /// The entity.
    pub entity: EntityId,
    /// The entity's type.
    pub entity_type: String,
    /// The entity's rev after the transition.
    pub rev: u64,
    /// The status before.
    pub from: String,
    /// The status after.
    pub to: String,
    /// The requester that the step was fired for.
    pub requester: String,
    /// The actor that has fired the step, if one was given.
    pub actor: Option<String>,
    /// The input that the step was fired with.
    pub input: Value,
    /// The output of the action.
    pub output: Value,
    /// When the transition was made.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
    /// The number of this attempt, counted from 1.
    pub attempt: u32,
}

impl OutboxEffect {
    pub(crate) fn told(&self, key: &EffectKey) -> AfterEffect {
        let json = |text: &str| serde_json::from_str(text).unwrap_or_default();
        AfterEffect {
            key: key.text(),
            name: self.name.clone(),
            workflow: self.workflow.clone(),
            step: self.step_key.clone(),
            entity: key.entity.clone(),
            entity_type: self.entity_type.clone(),
            rev: key.rev.0,
            from: self.from.clone(),
            to: self.to.clone(),
            requester: self.requester.clone(),
            actor: self.actor.clone(),
            input: json(&self.input),
            output: json(&self.output),
            at: Timestamp(self.at_us),
            attempt: self.attempts + 1,
        }
    }
}

pub(crate) type Handler = Arc<dyn Fn(AfterEffect) -> Boxed<'static, std::result::Result<(), String>> + Send + Sync>;

pub(crate) struct EffectOutbox {
    /// The name of the engine.
    name: Option<Arc<str>>,
    node: Arc<Node>,
    spaces: ClaimSpaces,
    handlers: BTreeMap<String, Handler>,
    most_attempts: u32,
    queues: Mutex<EffectQueues>,
    /// Notified when fewer after-effects are known.
    fewer: Notify,
    /// Notified when the stored outbox must be read again.
    again: Arc<Notify>,
    acks: mpsc::UnboundedSender<Ack>,
}

#[derive(Default)]
struct EffectQueues {
    by: HashMap<EntityId, EffectQueue>,
    known: usize,
    /// The number of known after-effects whose commits have not landed yet.
    expected: usize,
    /// True when everything that was stored before the start has been read. Until then, after-effects that land are
    /// held back in `late`: an after-effect that was stored before may have to go first.
    is_read: bool,
    late: Vec<EffectKey>,
}

#[derive(Default)]
struct EffectQueue {
    effects: BTreeMap<EffectKey, KnownEffect>,
    /// Notified when the first of them has changed.
    woken: Arc<Notify>,
    has_worker: bool,
}

enum KnownEffect {
    /// This many commits are on their way that would write it. Callers that race for an unclaimed step expect the same
    /// after-effect, and only one of their commits lands.
    Expected(usize),
    Landed(Box<OutboxEffect>),
    /// It was read from the store, or may be there. It is read again before it is delivered.
    Stored,
}

/// After-effects whose commit is on its way.
pub(crate) struct Expected {
    outbox: Arc<EffectOutbox>,
    effects: Vec<(EffectKey, OutboxEffect)>,
}

/// A delivered after-effect, and the worker that waits for its removal.
pub(crate) struct Ack {
    key: EffectKey,
    done: oneshot::Sender<()>,
}

/// The delivered after-effects that must be removed from the store.
type Acked = mpsc::UnboundedReceiver<Ack>;

impl Expected {
    /// The commit has landed.
    pub(crate) fn landed(mut self) {
        let effects = std::mem::take(&mut self.effects);
        let mut queues = self.outbox.queues.lock();
        if !queues.is_read {
            queues.late.extend(effects.into_iter().map(|(key, _)| key));
            return;
        }
        for (key, effect) in effects {
            queues.put(&self.outbox, key, KnownEffect::Landed(Box::new(effect)));
        }
    }

    /// The commit was refused.
    pub(crate) fn refused(mut self) {
        let mut queues = self.outbox.queues.lock();
        for (key, _) in std::mem::take(&mut self.effects) {
            queues.unexpect(&key);
        }
    }
}

/// It is not known whether the commit has landed.
impl Drop for Expected {
    fn drop(&mut self) {
        for (key, _) in std::mem::take(&mut self.effects) {
            self.outbox.look_at(key);
        }
    }
}

impl EffectQueues {
    fn holds(&self, key: &EffectKey) -> bool {
        self.by.get(&key.entity).is_some_and(|queue| queue.effects.contains_key(key))
    }

    /// The number of after-effects that can be delivered, as far as is known.
    fn deliverable(&self) -> usize {
        self.known - self.expected
    }

    fn put(&mut self, outbox: &Arc<EffectOutbox>, key: EffectKey, known: KnownEffect) {
        let is_expected = matches!(known, KnownEffect::Expected(_));
        let queue = self.by.entry(key.entity.clone()).or_default();
        // An after-effect that is known to have landed stays as it is, also if it is then found in the store.
        match queue.effects.get_mut(&key) {
            Some(KnownEffect::Landed(_) | KnownEffect::Stored) => return,
            Some(KnownEffect::Expected(commits)) if is_expected => {
                *commits += 1;
                return;
            }
            Some(KnownEffect::Expected(_)) => self.expected -= 1,
            None => {
                self.known += 1;
                self.expected += usize::from(is_expected);
            }
        }
        let entity = key.entity.clone();
        queue.effects.insert(key, known);
        queue.woken.notify_one();
        if !is_expected && !queue.has_worker {
            queue.has_worker = true;
            outbox.node.runtime.spawn(work(outbox.clone(), entity));
        }
    }

    /// A commit was refused. What another commit has written stays.
    fn unexpect(&mut self, key: &EffectKey) {
        let queue = self.by.get_mut(&key.entity);
        match queue.and_then(|queue| queue.effects.get_mut(key)) {
            Some(KnownEffect::Expected(commits)) if *commits > 1 => *commits -= 1,
            Some(KnownEffect::Expected(_)) => self.take(key),
            Some(KnownEffect::Landed(_) | KnownEffect::Stored) | None => {}
        }
    }

    /// Removes an after-effect that was delivered, or that no commit will write any more.
    fn take(&mut self, key: &EffectKey) {
        let Some(queue) = self.by.get_mut(&key.entity) else { return };
        if let Some(taken) = queue.effects.remove(key) {
            self.known -= 1;
            self.expected -= usize::from(matches!(taken, KnownEffect::Expected(_)));
        }
        queue.woken.notify_one();
        if queue.effects.is_empty() && !queue.has_worker {
            self.by.remove(&key.entity);
        }
    }
}

/// What a worker does next.
enum WorkerNext {
    Waits(Arc<Notify>),
    Delivers(EffectKey, Option<Box<OutboxEffect>>),
    Ends,
}

impl EffectOutbox {
    pub(crate) fn new(
        name: Option<Arc<str>>,
        node: &Arc<Node>,
        spaces: &ClaimSpaces,
        handlers: BTreeMap<String, Handler>,
        most_attempts: u32,
    ) -> (Arc<EffectOutbox>, Acked) {
        let (acks, acked) = mpsc::unbounded_channel();
        let outbox = EffectOutbox {
            name,
            node: node.clone(),
            spaces: spaces.clone(),
            handlers,
            most_attempts,
            queues: Mutex::default(),
            fewer: Notify::new(),
            again: Arc::default(),
            acks,
        };
        (Arc::new(outbox), acked)
    }

    /// Starts to deliver.
    pub(crate) fn serve(self: &Arc<EffectOutbox>, acked: Acked) {
        self.node.chore(acknowledge(Arc::downgrade(self), acked));
        self.node.chore(read(Arc::downgrade(self)));
        // After-effects of other nodes, and of shards that this node takes.
        let (again, mut gained) = (self.again.clone(), self.node.gained.subscribe());
        self.node.chore(async move {
            while gained.changed().await.is_ok() {
                again.notify_one();
            }
        });
    }

    /// Announces after-effects whose commit is about to be sent.
    pub(crate) fn expect(self: &Arc<EffectOutbox>, effects: Vec<(EffectKey, OutboxEffect)>) -> Expected {
        let mut queues = self.queues.lock();
        for (key, _) in &effects {
            queues.put(self, key.clone(), KnownEffect::Expected(1));
        }
        drop(queues);
        Expected { outbox: self.clone(), effects }
    }

    /// The store may hold an after-effect that is not known here.
    pub(crate) fn look_at(self: &Arc<EffectOutbox>, key: EffectKey) {
        let mut queues = self.queues.lock();
        match queues.is_read {
            true => queues.put(self, key, KnownEffect::Stored),
            false => queues.late.push(key),
        }
    }

    /// Reads the stored outbox again: another process may have written to it.
    pub(crate) fn look_again(&self) {
        self.again.notify_one();
    }

    /// The number of after-effects that are known here and not delivered.
    pub(crate) fn known(&self) -> usize {
        let queues = self.queues.lock();
        queues.known + queues.late.iter().filter(|key| !queues.holds(key)).count()
    }

    fn next(&self, entity: &EntityId) -> WorkerNext {
        let mut queues = self.queues.lock();
        let Some(queue) = queues.by.get_mut(entity) else { return WorkerNext::Ends };
        match queue.effects.first_key_value() {
            Some((_, KnownEffect::Expected(_))) => WorkerNext::Waits(queue.woken.clone()),
            Some((key, KnownEffect::Landed(effect))) => WorkerNext::Delivers(key.clone(), Some(effect.clone())),
            Some((key, KnownEffect::Stored)) => WorkerNext::Delivers(key.clone(), None),
            None => {
                queues.by.remove(entity);
                WorkerNext::Ends
            }
        }
    }

    /// True if this node delivers the after-effects of an entity, as far as it knows.
    fn is_ours(&self, entity: &EntityId) -> bool {
        !self.node.is_stopped() && self.node.owns_name(entity.as_bytes())
    }

    /// Removes the after-effects of an entity from memory. They are in the store, and another node delivers them.
    fn forget(&self, entity: &EntityId) {
        let mut queues = self.queues.lock();
        let left: Vec<EffectKey> =
            queues.by.get(entity).map_or(Vec::new(), |queue| queue.effects.keys().cloned().collect());
        left.iter().for_each(|key| queues.take(key));
        queues.by.remove(entity);
        drop(queues);
        self.fewer.notify_one();
    }

    /// Returns the first after-effect of the same entity that comes before this one. If several processes share the
    /// store, another process may have written it. If only one process can have the store open, everything is known
    /// here.
    async fn earlier(&self, key: &EffectKey) -> Result<Option<EffectKey>> {
        let store = &self.node.store;
        if store.opening().is_some() {
            return Ok(None);
        }
        let before = self.spaces.effects_before(key);
        let found = store.view().await?.scan(&before, Order::Ascending, 1).await?;
        Ok(found.first().and_then(|(key, _)| EffectKey::read_outbox(key)))
    }

    /// Delivers an after-effect, and retries until it succeeds or becomes a dead letter. Returns false if it must stay
    /// in the store.
    async fn deliver(&self, key: &EffectKey, known: Option<Box<OutboxEffect>>) -> Result<bool> {
        let (store, stored) = (&self.node.store, self.spaces.effect(key));
        let mut effect = match known {
            Some(effect) => *effect,
            None => {
                let Some(item) = store.get(&stored).await? else { return Ok(true) };
                let found =
                    OutboxEffect::decode(&item.value).map_err(|why| why.at(format!("after-effect {}", key.text())))?;
                // The attempt is counted before it is made, because the handler may crash the process.
                let counted = OutboxEffect { attempts: found.attempts + 1, ..found };
                if counted.attempts > self.most_attempts {
                    self.bury(key, counted).await?;
                    return Ok(true);
                }
                let put = Commit::new().at_rev(&stored, item.rev).put(&stored, counted.encode());
                if !store.commit(put).await?.is_applied() {
                    return Ok(false);
                }
                OutboxEffect { attempts: counted.attempts - 1, ..counted }
            }
        };
        loop {
            let env = store.env();
            let now = env.now();
            if effect.due_us > now.0 {
                env.sleep(Duration::from_micros(effect.due_us - now.0).min(PAUSES.1)).await;
            }
            if !self.is_ours(&key.entity) {
                return Ok(false);
            }
            if !self.handlers.contains_key(&effect.name) && self.node.has_others() {
                // Another node, of another version of the program, may have the handler. It delivers when it owns the
                // shard: the attempts of this node would end the after-effect.
                tracing::warn!(key = key.text(), effect = effect.name, "no handler here; left to other nodes");
                env.sleep(ELSEWHERE).await;
                continue;
            }
            let Err(error) = self.handle(key, &effect).await else {
                let (done, is_done) = oneshot::channel();
                let _ = self.acks.send(Ack { key: key.clone(), done });
                return Ok(is_done.await.is_ok());
            };
            effect.attempts += 1;
            let pause = jittered(doubled(PAUSES.0, effect.attempts).min(PAUSES.1), 0.5, env);
            (effect.due_us, effect.error) = (env.now().plus(pause).0, Some(error));
            if effect.attempts >= self.most_attempts {
                self.bury(key, effect).await?;
                return Ok(true);
            }
            tracing::warn!(key = key.text(), effect = effect.name, error = effect.error, "after-effect failed");
            if !store.commit(Commit::new().present(&stored).put(&stored, effect.encode())).await?.is_applied() {
                return Ok(true);
            }
        }
    }

    async fn handle(&self, key: &EffectKey, effect: &OutboxEffect) -> std::result::Result<(), String> {
        let Some(handler) = self.handlers.get(&effect.name) else {
            return Err(format!("this program has no after-effect {:?}", effect.name));
        };
        let (handler, told) = (handler.clone(), effect.told(key));
        let span = tracing::info_span!(
            parent: None,
            "after_effect",
            namespace = self.name.as_deref(),
            workflow = told.workflow,
            step = told.step,
            name = told.name,
            entity = %told.entity,
            key = told.key,
            attempt = told.attempt,
            error = tracing::field::Empty,
        );
        let handling = AssertUnwindSafe(async move { handler(told).await }).catch_unwind();
        let handled = match handling.instrument(span.clone()).await {
            Ok(handled) => handled,
            Err(panic) => Err(format!("it panicked: {}", message_of(&*panic))),
        };
        handled.inspect_err(|error| {
            span.record("error", error);
        })
    }

    /// Moves an after-effect to the dead letters.
    async fn bury(&self, key: &EffectKey, effect: OutboxEffect) -> Result<()> {
        tracing::error!(key = key.text(), effect = effect.name, error = effect.error, "after-effect is a dead letter");
        let (stored, dead) = (self.spaces.effect(key), self.spaces.dead(key));
        let commit = Commit::new().present(&stored).delete(&stored).put(&dead, effect.encode());
        self.node.store.commit(commit).await?.applied().ok();
        Ok(())
    }
}

/// Delivers the after-effects of an entity, one after the other.
async fn work(outbox: Arc<EffectOutbox>, entity: EntityId) {
    loop {
        if !outbox.is_ours(&entity) {
            return outbox.forget(&entity);
        }
        match outbox.next(&entity) {
            WorkerNext::Ends => return,
            WorkerNext::Waits(woken) => woken.notified().await,
            WorkerNext::Delivers(key, known) => {
                let delivered = match outbox.earlier(&key).await {
                    Ok(Some(earlier)) => {
                        outbox.queues.lock().put(&outbox, earlier, KnownEffect::Stored);
                        continue;
                    }
                    Ok(None) => outbox.deliver(&key, known).await,
                    Err(error) => Err(error),
                };
                match delivered {
                    Ok(_) => {}
                    Err(error) if outbox.node.is_stopped() => {
                        tracing::debug!(%error, "after-effect is left to the next engine");
                    }
                    Err(error) => {
                        tracing::warn!(key = key.text(), %error, "after-effect could not be delivered yet");
                        outbox.node.store.env().sleep(AGAIN).await;
                        let mut queues = outbox.queues.lock();
                        if let Some(known) = queues.by.get_mut(&entity).and_then(|queue| queue.effects.get_mut(&key)) {
                            *known = KnownEffect::Stored;
                        }
                        continue;
                    }
                }
                outbox.queues.lock().take(&key);
                outbox.fewer.notify_one();
            }
        }
    }
}

/// Removes delivered after-effects from the store. One commit removes all that were delivered meanwhile.
async fn acknowledge(outbox: Weak<EffectOutbox>, mut acked: Acked) {
    let mut acks = Vec::new();
    let Some(most) = outbox.upgrade().map(|outbox| outbox.node.store.limits().operations.min(512)) else { return };
    while acked.recv_many(&mut acks, most).await > 0 {
        let Some(outbox) = outbox.upgrade() else { return };
        let store = &outbox.node.store;
        loop {
            let delete = |commit: Commit, ack: &Ack| commit.delete(&outbox.spaces.effect(&ack.key));
            match store.commit(acks.iter().fold(Commit::new(), delete)).await {
                Ok(_) => break,
                Err(error) if error.is_final() => return,
                Err(error) => {
                    tracing::warn!(%error, "delivered after-effects could not be removed yet");
                    store.env().sleep(AGAIN).await;
                }
            }
        }
        for Ack { done, .. } in acks.drain(..) {
            let _ = done.send(());
        }
    }
}

/// Reads the outbox at the start, and again on each notification.
async fn read(outbox: Weak<EffectOutbox>) {
    loop {
        let Some(inner) = outbox.upgrade() else { return };
        while let Err(error) = inner.read_all().await {
            if inner.node.is_stopped() {
                return;
            }
            tracing::warn!(%error, "the outbox could not be read yet");
            inner.node.store.env().sleep(AGAIN).await;
        }
        let again = inner.again.clone();
        drop(inner);
        again.notified().await;
    }
}

impl EffectOutbox {
    async fn read_all(self: &Arc<EffectOutbox>) -> Result<()> {
        for shard in self.node.owned() {
            let mut rest = self.spaces.effects_in(shard);
            loop {
                let view = self.node.store.view().await?;
                let scanned = scan_around(&view, &self.spaces.outbox, &rest, PAGE).await?;
                drop(view);
                scanned.damaged.iter().for_each(|key| tracing::error!(%key, "after-effect is damaged"));
                let last = scanned.keys().max().cloned();
                for (key, _) in &scanned.found {
                    match EffectKey::read_outbox(key) {
                        Some(effect) => self.queues.lock().put(self, effect, KnownEffect::Stored),
                        None => tracing::error!(%key, "the key of the after-effect is damaged"),
                    }
                }
                match last.filter(|_| scanned.found.len() == PAGE) {
                    Some(last) => rest = rest.after(&last),
                    None => break,
                }
                while self.queues.lock().deliverable() > MOST_KNOWN {
                    self.fewer.notified().await;
                }
            }
        }
        let mut queues = self.queues.lock();
        queues.is_read = true;
        // Some of these were also read above, and may already have been delivered.
        for key in std::mem::take(&mut queues.late) {
            queues.put(self, key, KnownEffect::Stored);
        }
        Ok(())
    }
}

/// An after-effect that could not be delivered.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The after-effect as its handler would get it.
    pub effect: AfterEffect,
    /// The number of attempts.
    pub attempts: u32,
    /// The error of the last attempt.
    pub error: String,
    /// The approximate time of the last attempt.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
}

impl DeadLetter {
    pub(crate) fn of(key: &EffectKey, effect: OutboxEffect) -> DeadLetter {
        let (attempts, at) = (effect.attempts, Timestamp(effect.due_us));
        let error = effect.error.clone().unwrap_or_else(|| "its process ended during each attempt".into());
        DeadLetter { effect: effect.told(key), attempts, error, at }
    }
}
