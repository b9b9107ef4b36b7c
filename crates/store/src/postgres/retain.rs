//! What is forgotten: pins of this process as a row with a lease, floors by the rules of spaces, and clean-up in
//! slices. A floor never passes a pin of any live process.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::try_join4;
use parking_lot::Mutex;
use tokio_postgres::Row;

use crate::backend::{Pin, Rules, generation_at};
use crate::postgres::Shared;
use crate::postgres::known::Spaces;
use crate::postgres::link::{Link, Param, failed};
use crate::postgres::read::{keys_of, signed, version_of};
use crate::postgres::writer::{BEGIN, Last};
use crate::space::{SPACES, SpaceRecord};
use crate::{Generation, History, Key, Range, Result, SpaceId, StoreError, Timestamp};

/// How many commits a slice of clean-up looks at.
const SLICE: i64 = 2000;

/// After so many commits, one of the processes that use the store cleans up.
const OFTEN: u64 = 2000;

/// After fewer commits than this, the clean-up waits for so many renewals of the lease.
const FEW: u64 = 100;
const SELDOM: u32 = 15;

/// So many forgotten commits, and this part of what the tables hold, are vacuumed. Autovacuum looks once a minute:
/// under load, the tables would grow by all that is written in that time.
const VACUUMED: (u64, f64) = (3000, 0.2);

/// Writers are not blocked: the ends of the tables, which a lock would be needed for, are left.
const VACUUM: &str = "VACUUM (SKIP_LOCKED, TRUNCATE false, PARALLEL 0)";

/// The pause after a failure.
const AGAIN: Duration = Duration::from_secs(1);

/// What this process pins, and what it knows of floors and of other processes.
#[derive(Default)]
pub(super) struct Pins {
    local: BTreeMap<Generation, usize>,
    /// What the row of this process says.
    stored: Option<Generation>,
    floors: BTreeMap<SpaceId, Generation>,
    peers: Peers,
    /// Of the last renewal: an older one must not be written over a newer one.
    number: i64,
}

/// The other processes that use the store, and those of them whose ids are smaller. Processes clean up one after the
/// other in the order of their ids, so many of them do not clean up more often than one.
#[derive(Clone, Copy, Default)]
struct Peers {
    others: u64,
    before: u64,
}

impl Peers {
    /// The generation at which it is the turn of this process next.
    fn next_clean_up(self, seen: Generation) -> u64 {
        let (next, processes) = (seen.0 / OFTEN + 1, self.others + 1);
        let wait = (self.before + processes - next % processes) % processes;
        (next + wait) * OFTEN
    }
}

/// A pin of this process. The row of the process is brought up to date in the background.
struct ProcessPin {
    pins: Arc<Mutex<Pins>>,
    at: Generation,
}

impl ProcessPin {
    fn new(pins: &Arc<Mutex<Pins>>, at: Generation) -> ProcessPin {
        *pins.lock().local.entry(at).or_default() += 1;
        ProcessPin { pins: pins.clone(), at }
    }
}

impl Drop for ProcessPin {
    fn drop(&mut self) {
        let mut pins = self.pins.lock();
        if let Some(count) = pins.local.get_mut(&self.at) {
            *count -= 1;
            if *count == 0 {
                pins.local.remove(&self.at);
            }
        }
    }
}

/// What the row of this process says now.
struct WrittenRow {
    watched: Spaces,
    oldest: Generation,
    /// The newest generation of the store, and whether anything is pinned here.
    latest: Generation,
    is_pinned: bool,
}

impl WrittenRow {
    /// Whether it keeps more than is needed. A process is not told of every commit.
    fn is_stale(&self) -> bool {
        !self.is_pinned && self.latest.0 > self.oldest.0 + OFTEN
    }
}

impl Shared {
    /// Pins the present. No row is written: that of this process pins everything from an older generation on.
    async fn pin_present(&self) -> Result<Pin> {
        loop {
            // Until the answer is there, nothing from what is known on is given up.
            let bound = ProcessPin::new(&self.pins, self.seen());
            let (latest, declared) = self.head().await?;
            let pin = ProcessPin::new(&self.pins, latest);
            drop(bound);
            let is_whole = self.pins.lock().floors.values().all(|floor| *floor <= latest);
            if is_whole {
                return Ok(Pin::leased(latest, declared, pin));
            }
            drop(pin);
        }
    }

    pub(super) async fn pin(&self, at: Option<Generation>) -> Result<Pin> {
        let Some(at) = at else { return self.pin_present().await };
        let pin = ProcessPin::new(&self.pins, at);
        let (latest, declared) = self.head().await?;
        let is_pinned = self.pins.lock().stored.is_some_and(|stored| stored <= at);
        // The row of this process is written while no other process raises floors. A frozen store sees no floor rise.
        if !is_pinned && at <= latest && !self.is_frozen {
            self.renew().await?;
        }
        Ok(Pin::leased(at, declared, pin))
    }

    /// Writes the row of this process: what it pins, and that it lives.
    pub(super) async fn renew(&self) -> Result<()> {
        let mut upkeep = self.upkeep.lock().await;
        self.in_time(self.renew_on(&mut upkeep)).await?.map(drop)
    }

    /// Tells other processes what is watched here from now on. A group that began before may not be told, so the head
    /// is read after all such groups: those that do not hold its lock find that it has changed.
    async fn make_watched_known(&self) -> Result<()> {
        let mut upkeep = self.upkeep.lock().await;
        let said = self.in_time(self.renew_on(&mut upkeep)).await??;
        let Some(link) = upkeep.take() else { return Ok(()) };
        let (lock, outdate) = (link.query(&self.sql.lock_head, &[]), link.query(&self.sql.outdate, &[]));
        let asked = self.in_time(try_join4(link.run(BEGIN), lock, outdate, link.run("COMMIT"))).await?;
        let ((), _, head, ()) = asked.map_err(|error| failed("write to", &error))?;
        *upkeep = Some(link);
        self.watched.lock().make_known(said);
        if let Some(last) = head.first().and_then(|row| Last::of(row, 0)) {
            self.known.lock().outdated(last);
            self.saw(last.generation);
        }
        Ok(())
    }

    /// Uses the connection that is kept for it. After a failure, the next renewal opens another one. Gives the spaces
    /// that the row names.
    async fn renew_on(&self, upkeep: &mut Option<Link>) -> Result<Spaces> {
        if self.is_closed() {
            return Err(StoreError::Closed);
        }
        let kept = upkeep.take().filter(|link| !link.is_closed());
        let is_kept = kept.is_some();
        let mut link = match kept {
            Some(link) => link,
            None => self.open_planned(&[]).await?,
        };
        let mut written = self.write_row(&link).await;
        // The connection may have been lost without a sign since the last renewal.
        if written.is_err() && is_kept && link.is_closed() {
            link = self.open_planned(&[]).await?;
            written = self.write_row(&link).await;
        }
        let mut row = written?;
        if row.is_stale() {
            row = self.write_row(&link).await?;
        }
        *upkeep = Some(link);
        Ok(row.watched)
    }

    async fn write_row(&self, link: &Link) -> Result<WrittenRow> {
        let watched = self.watched.lock().renew(self.env.monotonic());
        let (oldest, views, is_pinned, number) = {
            let (seen, mut pins) = (self.seen(), self.pins.lock());
            let oldest = pins.local.keys().next().copied().unwrap_or(seen).min(seen);
            // A view of an older generation that is opened from now on waits for a row of its own.
            pins.stored = pins.stored.map(|stored| stored.max(oldest));
            pins.number += 1;
            (oldest, pins.local.values().sum::<usize>() as i64, !pins.local.is_empty(), pins.number)
        };
        let (process, lease, signed) = (self.process, self.lease.as_secs_f64(), signed(oldest));
        let bits = watched.bits();
        let row: [Param<'_>; 6] = [&process, &signed, &views, &lease, &bits, &number];
        let head = link.query(&self.sql.renew, &row).await.map_err(|error| failed("write to", &error))?;
        let newer = || StoreError::corrupt("table pins", "the row of this process has the number of a later renewal");
        let row = head.first().ok_or_else(newer)?;
        let [latest, others, before] = [0, 1, 2].map(|column| row.get::<_, i64>(column) as u64);
        {
            let mut pins = self.pins.lock();
            (pins.stored, pins.peers) = (Some(oldest), Peers { others, before });
        }
        if row.get(3) {
            let mut watched = self.watched.lock();
            watched.was_removed();
            if watched.has_unknown() {
                self.asked.notify_one();
            }
        }
        let latest = Generation(latest);
        self.saw(latest);
        Ok(WrittenRow { watched, oldest, latest, is_pinned })
    }

    /// Removes the row of this process. If that fails, its lease ends by itself.
    pub(super) async fn unpin(&self) {
        let mut upkeep = self.upkeep.lock().await;
        let link = match upkeep.take().filter(|link| !link.is_closed()) {
            Some(link) => Ok(link),
            None => Link::open(&self.address, &[]).await,
        };
        if let Ok(link) = link {
            let _ = self.in_time(link.query(&self.sql.unpin, &[&self.process])).await;
        }
        self.is_unpinned.store(true, Ordering::SeqCst);
    }

    pub(super) fn views(&self) -> usize {
        self.pins.lock().local.values().sum()
    }

    pub(super) fn floor(&self, space: SpaceId) -> Generation {
        self.pins.lock().floors.get(&space).copied().unwrap_or_default()
    }

    pub(super) fn learn_floor(&self, space: SpaceId, floor: Generation) {
        let mut pins = self.pins.lock();
        let known = pins.floors.entry(space).or_default();
        *known = (*known).max(floor);
    }

    pub(super) fn learn_floors(&self, rows: &[Row]) {
        for row in rows {
            let (space, floor): (i64, i64) = (row.get(0), row.get(1));
            self.learn_floor(SpaceId(space as u32), Generation(floor as u64));
        }
    }

    pub(super) async fn learn_all_floors(&self) -> Result<()> {
        self.learn_floors(&self.ask(&self.sql.floors, &[]).await?);
        Ok(())
    }

    pub(super) async fn refresh_floor(&self, space: SpaceId) -> Result<()> {
        let number = i64::from(space.0);
        let rows = self.ask(&self.sql.floor, &[&number]).await?;
        rows.first().into_iter().for_each(|row| self.learn_floor(space, Generation(row.get::<_, i64>(0) as u64)));
        Ok(())
    }

    /// Refuses a read of a space below its floor.
    pub(super) fn check(&self, space: SpaceId, asked: Generation) -> Result<()> {
        let oldest = self.floor(space);
        if asked >= oldest { Ok(()) } else { Err(StoreError::HistoryDropped { space, asked, oldest }) }
    }

    /// Raises the floors to what the rules and pins allow, and drops a slice of what lies below them. Gives whether
    /// more is left.
    pub(super) async fn maintain(&self) -> Result<bool> {
        let mut upkeep = self.upkeep.lock().await;
        self.in_time(self.renew_on(&mut upkeep)).await??;
        let Some(mut link) = upkeep.take() else { return Ok(true) };
        // After a failure the connection is dropped, and its transaction with it.
        self.in_time(self.prepare_upkeep(&mut link)).await??;
        let is_more = self.raise_and_drop(&link).await?;
        *upkeep = Some(link);
        Ok(is_more)
    }

    /// A process that cleans up once probably does so again. A process that only reads does not.
    async fn prepare_upkeep(&self, link: &mut Link) -> Result<()> {
        let sql = &self.sql;
        let often = [
            &sql.renew,
            &sql.lock_store,
            &sql.expire,
            &sql.oldest,
            &sql.scan_up,
            &sql.raise,
            &sql.forget_writers,
            &sql.floors_due,
            &sql.below,
            &sql.drop_past,
            &sql.forget,
            &sql.forgettable,
            &sql.drop_touched,
        ];
        if self.is_pooled || link.has_prepared(often[0]) { Ok(()) } else { link.prepare(&often).await }
    }

    async fn raise_and_drop(&self, link: &Link) -> Result<bool> {
        let error = |error: tokio_postgres::Error| failed("write to", &error);
        link.run(BEGIN).await.map_err(error)?;
        link.query(&self.sql.lock_store, &[]).await.map_err(error)?;
        link.query(&self.sql.expire, &[]).await.map_err(error)?;
        let rows = link.query(&self.sql.oldest, &[]).await.map_err(error)?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
        let (latest, time) = (Generation(row.get::<_, i64>(0) as u64), Timestamp(row.get::<_, i64>(1) as u64));
        let pinned = row.get::<_, Option<i64>>(2).map(|pinned| Generation(pinned as u64));
        let rules = self.declared(link).await?;
        let wanted = self.wanted(&rules, latest, self.env.now().max(time)).await?;
        let bound = |floor: Generation| pinned.map_or(floor, |pinned| floor.min(pinned));
        let spaces: Vec<i64> = wanted.iter().map(|(space, _)| i64::from(space.0)).collect();
        let floors: Vec<i64> = wanted.iter().map(|(_, floor)| signed(bound(*floor))).collect();
        link.query(&self.sql.raise, &[&spaces, &floors]).await.map_err(error)?;
        link.query(&self.sql.forget_writers, &[]).await.map_err(error)?;
        // Also those of spaces that keep everything by now.
        let raised = link.query(&self.sql.floors_due, &[]).await.map_err(error)?;
        link.run("COMMIT").await.map_err(error)?;
        self.saw(latest);
        self.learn_floors(&raised);
        let mut left = SLICE;
        for row in raised.iter().filter(|row| row.get(2)) {
            let (space, floor) = (SpaceId(row.get::<_, i64>(0) as u32), row.get::<_, i64>(1));
            left -= self.drop_below(link, space, floor, rules.get(&space).copied().unwrap_or_default(), left).await?;
            if left <= 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Drops a slice of what lies below the floor of a space. Gives how many commits were looked at.
    async fn drop_below(&self, link: &Link, space: SpaceId, floor: i64, rules: Rules, most: i64) -> Result<i64> {
        let error = |error: tokio_postgres::Error| failed("write to", &error);
        let number = i64::from(space.0);
        let rows = link.query(&self.sql.below, &[&number, &floor, &most]).await.map_err(error)?;
        if rows.is_empty() {
            return Ok(0);
        }
        let mut keys: Vec<Key> = Vec::new();
        for row in &rows {
            keys.extend(keys_of(row.get(1))?);
        }
        keys.sort_unstable();
        keys.dedup();
        let keys: Vec<&[u8]> = keys.iter().map(Key::encoded).collect();
        let dropped: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        link.run(BEGIN).await.map_err(error)?;
        link.query(&self.sql.drop_past, &[&keys, &floor]).await.map_err(error)?;
        let mut is_left = false;
        if rules.forgets(false) {
            let also_live = rules.forgets(true);
            let asked: [Param<'_>; 3] = [&keys, &floor, &also_live];
            link.query(&self.sql.forget, &asked).await.map_err(error)?;
            let left = link.query(&self.sql.forgettable, &asked).await.map_err(error)?;
            is_left = left.first().is_some_and(|row| row.get::<_, i64>(0) > 0);
        }
        // A key that a writer has locked is looked for again by these rows.
        if !is_left {
            link.query(&self.sql.drop_touched, &[&number, &dropped]).await.map_err(error)?;
        }
        link.run("COMMIT").await.map_err(error)?;
        self.forgotten.fetch_add(rows.len() as u64, Ordering::Relaxed);
        Ok(rows.len() as i64)
    }

    /// Makes the space of what was forgotten free for new rows, if there is much of it, on a connection of its own:
    /// leases are renewed meanwhile.
    pub(super) fn vacuum_if_due(self: &Arc<Self>) {
        let is_due = self.forgotten_by_all() >= VACUUMED.0;
        if is_due && !self.is_vacuuming.swap(true, Ordering::SeqCst) {
            let shared = self.clone();
            tokio::spawn(async move {
                // Autovacuum does it later if it fails here: another role may own the tables.
                let _ = shared.vacuum().await;
                shared.is_vacuuming.store(false, Ordering::SeqCst);
            });
        }
    }

    /// Processes take turns to forget.
    fn forgotten_by_all(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed) * (self.pins.lock().peers.others + 1)
    }

    async fn vacuum(&self) -> Result<()> {
        let rows = self.ask(&self.sql.estimate, &[]).await?;
        let held: f64 = rows.first().map_or(0.0, |row| row.get(0));
        let forgotten = self.forgotten.load(Ordering::Relaxed);
        if (self.forgotten_by_all() as f64) < VACUUMED.0 as f64 + held * VACUUMED.1 {
            return Ok(());
        }
        self.forgotten.fetch_sub(forgotten, Ordering::Relaxed);
        let link = Link::open(&self.address, &[]).await?;
        let schema = &self.sql.schema;
        for table in ["past", "touched", "current"] {
            // A statement of its own: it cannot be in a transaction.
            let text = format!("{VACUUM} {schema}.{table}");
            link.run(&text).await.map_err(|error| failed("write to", &error))?;
        }
        Ok(())
    }

    /// The rules of all spaces as they are declared at this moment.
    async fn declared(&self, link: &Link) -> Result<BTreeMap<SpaceId, Rules>> {
        let range = Range::of_space(SPACES);
        let (at, most, deleted) = (i64::MAX, i64::MAX, false);
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&range.start(), &range.end(), &at, &most, &deleted];
        let rows = link.query(&self.sql.scan_up, &params).await.map_err(|error| failed("read from", &error))?;
        let mut rules: BTreeMap<SpaceId, Rules> = self.rules.lock().iter().map(|(space, it)| (*space, it.0)).collect();
        rules.extend(Rules::own());
        for row in &rows {
            let (key, version) = version_of(row)?;
            let record = version.value.as_ref().and_then(SpaceRecord::decode);
            let place = || format!("the declaration of space {:?}", String::from_utf8_lossy(key.bytes()));
            let record = record.ok_or_else(|| StoreError::corrupt(place(), "it cannot be read"))?;
            rules.insert(record.id, record.rules);
        }
        Ok(rules)
    }

    /// The floors that the rules ask for.
    async fn wanted(
        &self,
        rules: &BTreeMap<SpaceId, Rules>,
        latest: Generation,
        now: Timestamp,
    ) -> Result<Vec<(SpaceId, Generation)>> {
        let kept = rules.iter().filter(|(_, rules)| rules.history != History::None);
        let kept: Vec<(SpaceId, Generation)> = kept.map(|(space, _)| (*space, self.floor(*space))).collect();
        let mut wanted = Vec::with_capacity(rules.len());
        for (space, rules) in rules {
            let floor = match rules.history {
                History::None => latest,
                History::Generations(count) => Generation(latest.0.saturating_sub(count)),
                History::For(duration) => {
                    let time = now.minus(duration);
                    let before = self.before(time, kept.clone()).await?;
                    generation_at(time, &kept, before).unwrap_or_default()
                }
                History::Forever => continue,
            };
            wanted.push((*space, floor));
        }
        Ok(wanted)
    }
}

/// Renews the row of the process and cleans up, until the store is closed or dropped.
pub(super) async fn keep(shared: Weak<Shared>) {
    let (mut cleaned, mut renewals, mut has_failed) = (Generation(0), 0, false);
    loop {
        let Some(store) = shared.upgrade().filter(|shared| !shared.is_closed()) else { return };
        let seen = store.seen();
        // A store that is idle, or nearly so, mostly renews its lease.
        let is_due = seen.0 >= cleaned.0 + FEW || (seen > cleaned && renewals >= SELDOM);
        // Watches poll as long as that fails.
        let is_unknown = store.listens && !std::mem::take(&mut has_failed) && store.watched.lock().has_unknown();
        let worked = match (is_unknown, is_due) {
            // What is due is done next.
            (true, _) => store.make_watched_known().await.map(|()| is_due),
            (false, true) => store.maintain().await,
            (false, false) => store.renew().await.map(|()| false),
        };
        store.vacuum_if_due();
        let (pause, often) = match worked {
            Ok(true) => (Duration::from_millis(10), u64::MAX),
            Ok(false) => {
                (cleaned, renewals) = if is_due { (seen, 0) } else { (cleaned, renewals + 1) };
                // This process hears little, and others write much: what they overwrite is kept until it looks again.
                let is_behind = store.seen().0 > seen.0 + 20 * OFTEN;
                let is_late = is_behind || store.listens && store.watched.lock().has_unknown();
                let pause = if is_late { store.pace.min(AGAIN) } else { store.pace };
                (pause, store.pins.lock().peers.next_clean_up(seen))
            }
            Err(_) => {
                has_failed = is_unknown;
                (store.pace.min(AGAIN), u64::MAX)
            }
        };
        let (sleep, asked, mut latest) = (store.env.sleep(pause), store.asked.clone(), store.latest.subscribe());
        drop(store);
        tokio::select! {
            () = sleep => {}
            () = asked.notified() => {}
            _ = latest.wait_for(|latest| latest.0 >= often) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_take_turns_to_clean_up() {
        for processes in 1..=5 {
            let peers = (0..processes).map(|before| Peers { others: processes - 1, before });
            for seen in [0, 1, OFTEN - 1, OFTEN, 7 * OFTEN + 3] {
                let mut turns: Vec<u64> = peers.clone().map(|peers| peers.next_clean_up(Generation(seen))).collect();
                turns.sort_unstable();
                let first = (seen / OFTEN + 1) * OFTEN;
                let expected: Vec<u64> = (0..processes).map(|turn| first + turn * OFTEN).collect();
                assert_eq!(turns, expected, "{processes} processes have seen {seen}");
            }
        }
    }
}
