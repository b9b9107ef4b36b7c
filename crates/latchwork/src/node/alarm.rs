//! Alarms: stored due times. Their keys are ordered by shard, then by due time. The keeper of a space remembers when
//! the first alarm of each shard is due, and sleeps until the earliest of them. So a million waiting alarms cost
//! nothing. The keeper reads only the shards that its node owns, and only when an alarm in them is due.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::shard::{COUNT, shard_key, shard_of};
use super::{ExecutionId, Node, woken_or_after};
use crate::damage::{Scanned, scan_around};
use crate::store::{Env, Item, Key, Result, Space, Timestamp, View};

/// The longest sleep of a keeper, by default. During a sleep the time of day may be set forward, or the machine may be
/// suspended.
const LONGEST: Duration = Duration::from_secs(600);

/// The pause before a retry, if the store was unavailable.
const PAUSE: Duration = Duration::from_millis(100);

/// The alarms of a space, and what their keeper must learn about them.
pub(crate) struct Alarms {
    node: Arc<Node>,
    space: Space,
    told: Mutex<KeeperState>,
    woken: Notify,
    longest: Duration,
    /// True if the keeper rings only alarms that became due after its node took the shard.
    is_recovered: bool,
}

struct KeeperState {
    /// For each shard that was taken since the keeper last looked: from when on alarms are rung.
    taken: Vec<Option<Timestamp>>,
    /// The earliest alarm of each shard that was set since the keeper last looked.
    earliest: Vec<Option<Timestamp>>,
    /// The alarm that the keeper sleeps for, and when its sleep ends by the clock that only goes forward. An alarm that
    /// is due after both does not wake it.
    sleeps: Option<(Timestamp, Duration)>,
}

/// An alarm that is due.
pub(crate) struct Due {
    pub(crate) id: ExecutionId,
    pub(crate) key: Key,
    pub(crate) item: Item,
}

/// The key of an alarm: shard, due time, execution.
pub(crate) fn alarm_key(due: Timestamp, id: &ExecutionId) -> Vec<u8> {
    let mut key = Vec::with_capacity(id.len() + 10);
    write_due(&mut key, shard_of(id.as_bytes()), due);
    key.extend_from_slice(id.as_bytes());
    key
}

/// Returns the due time and the execution of an alarm's key.
pub(crate) fn read_alarm_key(key: &[u8]) -> Option<(Timestamp, ExecutionId)> {
    let (due, id) = key.get(2..)?.split_first_chunk::<8>()?;
    Some((Timestamp(u64::from_be_bytes(*due)), std::str::from_utf8(id).ok()?.into()))
}

/// The prefix of the keys of alarms that are due in a shard at a time.
pub(crate) fn due_key(shard: u16, due: Timestamp) -> Vec<u8> {
    let mut key = Vec::with_capacity(10);
    write_due(&mut key, shard, due);
    key
}

fn write_due(key: &mut Vec<u8>, shard: u16, due: Timestamp) {
    key.extend_from_slice(&shard_key(shard));
    key.extend_from_slice(&due.0.to_be_bytes());
}

/// The due time by which a key is ordered. It also works for a damaged key.
fn place(key: &[u8]) -> Timestamp {
    let mut due = [0; 8];
    due.iter_mut().zip(key.iter().skip(2)).for_each(|(due, byte)| *due = *byte);
    Timestamp(u64::from_be_bytes(due))
}

impl Alarms {
    pub(crate) fn new(node: &Arc<Node>, space: &Space) -> Arc<Alarms> {
        Alarms::with(node, space, LONGEST, false)
    }

    /// The same for alarms of which those that are due when a shard is taken are found elsewhere.
    pub(crate) fn recovered(node: &Arc<Node>, space: &Space) -> Arc<Alarms> {
        Alarms::with(node, space, LONGEST, true)
    }

    /// Like [`Alarms::new`], but the keeper notices within `longest` that the time of day was set forward. While there
    /// is an alarm, it looks at the clock that often. It does not read the store for that.
    pub(crate) fn on_time(node: &Arc<Node>, space: &Space, longest: Duration) -> Arc<Alarms> {
        Alarms::with(node, space, longest, false)
    }

    fn with(node: &Arc<Node>, space: &Space, longest: Duration, is_recovered: bool) -> Arc<Alarms> {
        let none = vec![None; usize::from(COUNT)];
        let told = Mutex::new(KeeperState { taken: none.clone(), earliest: none, sleeps: None });
        let (node, space, woken) = (node.clone(), space.clone(), Notify::new());
        let alarms = Arc::new(Alarms { node: node.clone(), space, told, woken, longest, is_recovered });
        node.keeps(&alarms);
        alarms
    }

    /// The node has taken shards.
    pub(super) fn taken(&self, shards: &[u16]) {
        let mut told = self.told.lock();
        for shard in shards {
            told.taken[usize::from(*shard)] = Some(self.from(*shard));
        }
        drop(told);
        self.woken.notify_one();
    }

    /// From when on alarms of a shard are rung. What finds the earlier ones reads up to exactly this time.
    fn from(&self, shard: u16) -> Timestamp {
        self.node.since(shard).filter(|_| self.is_recovered).unwrap_or_default()
    }

    /// An alarm was committed. The time of day may have jumped since the keeper went to sleep. After a jump forward the
    /// keeper sleeps too long for its own alarm, and perhaps for this one. After a jump back this alarm may be due
    /// before alarms that were already rung.
    pub(crate) fn set(&self, id: &ExecutionId, due: Timestamp) {
        let env = self.node.store.env();
        let mut told = self.told.lock();
        let earliest = &mut told.earliest[usize::from(shard_of(id.as_bytes()))];
        *earliest = Some(earliest.map_or(due, |earliest| earliest.min(due)));
        let is_in_time = |until| until <= env.monotonic().saturating_add(left(due, env));
        // A keeper that is awake reads `earliest` before it sleeps.
        let wakes = told.sleeps.is_some_and(|(next, until)| due < next || !is_in_time(until));
        drop(told);
        if wakes {
            self.woken.notify_one();
        }
    }

    /// Makes the keeper look at all due alarms again, also at those that were already rung.
    pub(crate) fn look_again(&self) {
        self.told.lock().earliest.fill(Some(Timestamp(0)));
        self.woken.notify_one();
    }

    /// Passes on to the keeper what was set since it last looked. The time of day may have gone back since.
    fn hear(&self, shards: &mut [KeeperProgress]) {
        let mut told = self.told.lock();
        for (shard, (position, taken)) in (0..).zip(shards.iter_mut().zip(&mut told.taken)) {
            if let Some(from) = taken.take() {
                *position = KeeperProgress::since(shard, from);
            }
        }
        for (shard, (position, earliest)) in (0..).zip(shards.iter_mut().zip(&mut told.earliest)) {
            let Some(earliest) = earliest.take() else { continue };
            position.next = Some(position.next.map_or(earliest, |next| next.min(earliest)));
            let before = due_key(shard, earliest);
            if position.rung > before {
                position.rung = before;
            }
        }
    }

    /// Waits until the next alarm is due or an earlier one is set.
    async fn wait(&self, env: &Env, next: Option<Timestamp>) {
        let pause = next.map(|next| left(next, env).min(self.longest));
        {
            let mut told = self.told.lock();
            if told.earliest.iter().chain(&told.taken).any(Option::is_some) {
                return;
            }
            let until = pause.map_or(Duration::MAX, |pause| env.monotonic().saturating_add(pause));
            told.sleeps = Some((next.unwrap_or(Timestamp(u64::MAX)), until));
        }
        woken_or_after(&self.woken, env, pause).await;
        self.told.lock().sleeps = None;
    }
}

/// The time that is left until an alarm is due, by the time of day.
fn left(due: Timestamp, env: &Env) -> Duration {
    Duration::from_micros(due.0.saturating_sub(env.now().0))
}

/// How far the keeper has come in a shard.
struct KeeperProgress {
    /// All alarms up to this key were rung. An alarm stays in the store until a commit deletes it.
    rung: Vec<u8>,
    /// No alarm that was not rung is due before this time. `None` if there is none.
    next: Option<Timestamp>,
}

impl KeeperProgress {
    fn since(shard: u16, from: Timestamp) -> KeeperProgress {
        KeeperProgress { rung: due_key(shard, from), next: Some(from) }
    }
}

/// A kind of alarm, and how alarms of this kind are rung.
pub(crate) trait Keeper: Send + Sync + 'static {
    /// The keeper runs for as long as this value lives.
    type Engine: Send + Sync + 'static;

    /// The maximum number of alarms that are rung together. The keeper reads more only when all of them are done.
    const BATCH: usize = 256;

    fn alarms(engine: &Self::Engine) -> &Arc<Alarms>;

    /// Rings due alarms. Returns false if they must be rung again after a pause. `damaged` holds the keys that cannot
    /// be read; their alarms are not rung.
    fn ring(engine: &Arc<Self::Engine>, due: Vec<Due>, damaged: Vec<Key>) -> impl Future<Output = bool> + Send;
}

/// Rings due alarms for as long as the engine lives.
pub(crate) async fn keep<K: Keeper>(engine: Weak<K::Engine>) {
    let Some(alarms) = engine.upgrade().map(|engine| K::alarms(&engine).clone()) else { return };
    let begin = |shard| KeeperProgress::since(shard, alarms.from(shard));
    let mut shards: Vec<KeeperProgress> = (0..COUNT).map(begin).collect();
    drop(alarms);
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let alarms = K::alarms(&inner).clone();
        alarms.hear(&mut shards);
        let env = alarms.node.store.env().clone();
        let now = env.now();
        let owned = alarms.node.owned();
        let mut next: Vec<(Timestamp, u16)> =
            owned.into_iter().filter_map(|shard| Some((shards[usize::from(shard)].next?, shard))).collect();
        next.sort_unstable();
        let first = next.first().map(|(due, _)| *due);
        if first.is_none_or(|due| due > now) {
            drop(inner);
            alarms.wait(&env, first).await;
            continue;
        }
        let due = next.into_iter().take_while(|(due, _)| *due <= now).map(|(_, shard)| shard);
        match look::<K>(&inner, &alarms, &mut shards, due, now).await {
            Ok(true) => continue,
            Err(error) if error.is_final() => return,
            Ok(false) | Err(_) => {}
        }
        drop((inner, alarms));
        env.sleep(PAUSE).await;
    }
}

/// Rings the due alarms of these shards together. Returns false if they must be rung again.
async fn look<K: Keeper>(
    engine: &Arc<K::Engine>,
    alarms: &Alarms,
    shards: &mut [KeeperProgress],
    among: impl Iterator<Item = u16>,
    now: Timestamp,
) -> Result<bool> {
    let view = alarms.node.store.view().await?;
    let (mut found, mut damaged, mut looked) = (Vec::new(), Vec::new(), Vec::new());
    for shard in among {
        if found.len() == K::BATCH {
            break;
        }
        let (mut scanned, position) =
            look_in(&view, &alarms.space, shard, &shards[usize::from(shard)].rung, now, K::BATCH - found.len()).await?;
        found.append(&mut scanned.found);
        damaged.append(&mut scanned.damaged);
        looked.push((shard, position));
    }
    drop(view);
    let mut due = Vec::with_capacity(found.len());
    for (key, item) in found {
        match read_alarm_key(key.bytes()) {
            Some((at, id)) => due.push((at, Due { id, key, item })),
            None => damaged.push(key),
        }
    }
    due.sort_by(|(a, one), (b, other)| a.cmp(b).then_with(|| one.id.cmp(&other.id)));
    let due: Vec<Due> = due.into_iter().map(|(_, due)| due).collect();
    let is_quiet = due.is_empty() && damaged.is_empty();
    if !is_quiet && !K::ring(engine, due, damaged).await {
        return Ok(false);
    }
    looked.into_iter().for_each(|(shard, position)| shards[usize::from(shard)] = position);
    Ok(true)
}

/// Returns at most `limit` due alarms of a shard that were not rung, and the keeper's position after them.
async fn look_in(
    view: &View,
    space: &Space,
    shard: u16,
    rung: &[u8],
    now: Timestamp,
    limit: usize,
) -> Result<(Scanned, KeeperProgress)> {
    let rest = space.prefix(shard_key(shard)).after(&space.key(rung));
    let end = space.key(due_key(shard, Timestamp(now.0.saturating_add(1))));
    let due = rest.before(&end);
    let scanned = if due.is_empty() { Scanned::default() } else { scan_around(view, space, &due, limit).await? };
    let rung = scanned.keys().max().map_or(rung, Key::bytes).to_vec();
    let next = if scanned.found.len() == limit {
        Some(place(&rung))
    } else {
        scan_around(view, space, &rest.from(&end), 1).await?.keys().map(|key| place(key.bytes())).min()
    };
    Ok((scanned, KeeperProgress { rung, next }))
}
