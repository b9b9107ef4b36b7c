//! Reading: versions of keys, ranges and commits at a generation. A read is one round trip, and a second one for a key
//! that was written after the generation. The floor is read with what it guards or after it: floors only rise, so what
//! was found is whole if the generation is not below the floor then.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures_util::future::try_join;
use tokio_postgres::Row;

use crate::backend::{Before, Changes, Order, Scan};
use crate::codec::Reader;
use crate::commit::Head;
use crate::postgres::Shared;
use crate::postgres::link::{Param, failed};
use crate::postgres::schema::Sql;
use crate::postgres::writer::key_of;
use crate::{Change, Committed, Generation, Key, Range, Result, Rev, SpaceId, StoreError, Timestamp, Version};

/// How many records are asked for at once.
const PAGE: usize = 1000;
const FIRST_PAGE: usize = 32;

/// A larger answer is read for its own sake, and not for the next commit.
const FEW: usize = 64;

pub(super) fn version_of(row: &Row) -> Result<(Key, Version)> {
    let version = Version {
        rev: Rev(row.get::<_, i64>(1) as u64),
        generation: Generation(row.get::<_, i64>(2) as u64),
        time: Timestamp(row.get::<_, i64>(3) as u64),
        value: row.get::<_, Option<&[u8]>>(4).map(Bytes::copy_from_slice),
    };
    Ok((key_of(row.get(0))?, version))
}

/// The keys of a row of `touched`.
pub(super) fn keys_of(bytes: &[u8]) -> Result<Vec<Key>> {
    let mut reader = Reader(Bytes::copy_from_slice(bytes));
    let mut keys = Vec::new();
    while !reader.0.is_empty() {
        let key = reader.string().and_then(Key::from_encoded);
        keys.push(key.ok_or_else(|| StoreError::corrupt("table touched", "its keys cannot be read"))?);
    }
    Ok(keys)
}

impl Shared {
    /// Runs a read of one space at a generation, and checks that the space can be read there.
    async fn read(&self, space: SpaceId, at: Generation, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let number = i64::from(space.0);
        let asked: [Param<'_>; 1] = [&number];
        let asked = &asked;
        let found = self
            .reading(|link| async move { try_join(link.query(sql, params), link.query(&self.sql.floor, asked)).await });
        let (rows, floor) = found.await?.map_err(|error| failed("read from", &error))?;
        if let Some(row) = floor.first() {
            self.learn_floor(space, Generation(row.get::<_, i64>(0) as u64));
        }
        self.check(space, at)?;
        Ok(rows)
    }

    /// One statement reads the newest version and the floor, as both were at one moment. That is one round trip, unless
    /// the key was written after the generation. A key without a newest version has no visible one: the newest is
    /// forgotten only below the floor, and what was overwritten before that ends there.
    pub(super) async fn get(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        let found = self.newest_up_to(key, at).await?;
        self.check(key.space(), at)?;
        match found {
            Some(version) if version.generation > at => {
                let asked = signed(at);
                let rows = self.read(key.space(), at, &self.sql.overwritten, &[&key.encoded(), &asked]).await?;
                rows.first().map(|row| version_of(row).map(|(_, version)| version)).transpose()
            }
            found => Ok(found),
        }
    }

    pub(super) async fn newest(&self, key: &Key) -> Result<Option<Version>> {
        self.newest_up_to(key, Generation(u64::MAX)).await
    }

    /// The newest version of a key; without its value, if it is above a generation.
    async fn newest_up_to(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        let (asked, space) = (signed(at), i64::from(key.space().0));
        let rows = self.ask(&self.sql.newest, &[&key.encoded(), &asked, &space]).await?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("a point read", "it has no row"))?;
        if let Some(floor) = row.get::<_, Option<i64>>(4) {
            self.learn_floor(key.space(), Generation(floor as u64));
        }
        let Some(rev) = row.get::<_, Option<i64>>(0) else { return Ok(None) };
        let (rev, generation) = (Rev(rev as u64), Generation(row.get::<_, i64>(1) as u64));
        let value = row.get::<_, Option<&[u8]>>(3).map(Bytes::copy_from_slice);
        if generation <= at {
            self.known.lock().found(key, Head { rev, generation, live: value.is_some() });
        }
        Ok(Some(Version { rev, generation, time: Timestamp(row.get::<_, i64>(2) as u64), value }))
    }

    /// A commit may soon be decided on what was found.
    fn learn(&self, found: &[(Key, Version)]) {
        if found.len() <= FEW {
            let mut known = self.known.lock();
            for (key, version) in found {
                let live = version.value.is_some();
                known.found(key, Head { rev: version.rev, generation: version.generation, live });
            }
        }
    }

    pub(super) async fn scan(&self, scan: Scan, at: Generation) -> Result<Vec<(Key, Version)>> {
        let (asked, mut range, mut room) = (signed(at), scan.range.clone(), scan.room());
        let sql = match scan.order {
            Order::Ascending => &self.sql.scan_up,
            Order::Descending => &self.sql.scan_down,
        };
        // An empty range is not read, but it is no answer about a generation that is gone.
        self.check(range.space(), at)?;
        let mut found: Vec<(Key, Version)> = Vec::new();
        // Values may be large: a caller that asks for few bytes is not read a thousand of them.
        let (mut size, mut bytes) = (if scan.bytes == usize::MAX { PAGE } else { FIRST_PAGE }, 0_usize);
        while room.is_left() && !range.is_empty() {
            let page = size.min(scan.limit.saturating_sub(found.len()));
            let limit = page as i64;
            let rows = self
                .read(range.space(), at, sql, &[&range.start(), &range.end(), &asked, &limit, &scan.with_deleted])
                .await?;
            let is_last = rows.len() < page;
            for row in &rows {
                if !room.is_left() {
                    self.learn(&found);
                    return Ok(found);
                }
                let (key, version) = version_of(row)?;
                room.take(&key, &version);
                bytes += version.value.as_ref().map_or(0, Bytes::len) + 64;
                found.push((key, version));
            }
            size = (scan.bytes.saturating_sub(bytes) / (bytes / found.len().max(1)).max(1)).clamp(1, PAGE);
            let Some((last, _)) = found.last().filter(|_| !is_last) else { break };
            range = match scan.order {
                Order::Ascending => range.after(last),
                Order::Descending => range.before(last),
            };
        }
        self.learn(&found);
        Ok(found)
    }

    pub(super) async fn versions(&self, key: &Key, at: Generation, limit: usize) -> Result<Vec<Version>> {
        let (asked, most) = (signed(at), i64::try_from(limit).unwrap_or(i64::MAX));
        let rows = self.read(key.space(), at, &self.sql.versions, &[&key.encoded(), &asked, &most]).await?;
        let (floor, mut versions) = (self.floor(key.space()), Vec::new());
        for row in &rows {
            let (_, version) = version_of(row)?;
            let is_oldest = version.generation <= floor;
            versions.push(version);
            if is_oldest {
                break;
            }
        }
        Ok(versions)
    }

    pub(super) async fn changes(&self, range: Range, after: Generation, limit: usize) -> Result<Changes> {
        self.check(range.space(), after)?;
        // What was seen has landed.
        let seen = self.seen();
        let latest = if seen > after { seen } else { self.latest().await? };
        if after >= latest || limit == 0 {
            return Ok(Changes { commits: Vec::new(), through: after });
        }
        if self.known.lock().is_untouched(range.space(), after, latest) {
            return Ok(Changes { commits: Vec::new(), through: latest });
        }
        let (space, to, page) = (i64::from(range.space().0), signed(latest), limit.min(PAGE) as i64);
        let mut changes = Changes { commits: Vec::new(), through: latest };
        let mut from = signed(after);
        loop {
            let mut rows = self.ask(&self.sql.touched, &[&space, &from, &to, &page]).await?;
            let floor = rows.first().and_then(|row| row.get::<_, Option<i64>>(4));
            floor.into_iter().for_each(|floor| self.learn_floor(range.space(), Generation(floor as u64)));
            self.check(range.space(), after)?;
            rows.retain(|row| row.get::<_, Option<i64>>(0).is_some());
            let commits = self.commits(&range, &rows).await?;
            // The floor was read again with what the commits wrote.
            self.check(range.space(), after)?;
            for committed in commits {
                changes.through = committed.generation;
                changes.commits.push(committed);
                if changes.commits.len() >= limit {
                    return Ok(changes);
                }
            }
            match rows.last().filter(|_| rows.len() as i64 == page) {
                Some(row) => from = row.get(0),
                None => {
                    changes.through = latest;
                    return Ok(changes);
                }
            }
        }
    }

    /// The commits of rows of `touched`, with their changes in a range. Commits without any are left out.
    async fn commits(&self, range: &Range, rows: &[Row]) -> Result<Vec<Committed>> {
        let mut wanted: Vec<(i64, Vec<Key>)> = Vec::with_capacity(rows.len());
        for row in rows {
            let keys = keys_of(row.get(3))?.into_iter().filter(|key| range.contains(key)).collect();
            wanted.push((row.get(0), keys));
        }
        let keys: Vec<&[u8]> = wanted.iter().flat_map(|(_, keys)| keys.iter().map(Key::encoded)).collect();
        let at: Vec<i64> = wanted.iter().flat_map(|(at, keys)| keys.iter().map(|_| *at)).collect();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let number = i64::from(range.space().0);
        let found = self.ask(&self.sql.changed, &[&keys, &at, &number]).await?;
        match found.first() {
            Some(row) => {
                let floor = row.get::<_, Option<i64>>(5);
                floor.into_iter().for_each(|floor| self.learn_floor(range.space(), Generation(floor as u64)));
            }
            // All of it was dropped meanwhile.
            None => self.refresh_floor(range.space()).await?,
        }
        let found: Vec<(Key, Version)> = found.iter().map(version_of).collect::<Result<_>>()?;
        self.learn(&found);
        let found = found.into_iter().map(|(key, version)| ((version.generation.0, key), version));
        let mut versions: BTreeMap<(u64, Key), Version> = found.collect();
        let mut commits = Vec::with_capacity(rows.len());
        for (row, (generation, keys)) in rows.iter().zip(wanted) {
            let change = |key: Key| {
                let version = versions.remove(&(generation as u64, key.clone()))?;
                Some(Change { key, rev: version.rev, value: version.value })
            };
            let changes: Vec<Change> = keys.into_iter().filter_map(change).collect();
            if !changes.is_empty() {
                commits.push(Committed {
                    generation: Generation(generation as u64),
                    time: Timestamp(row.get::<_, i64>(1) as u64),
                    meta: Bytes::copy_from_slice(row.get(2)),
                    changes,
                });
            }
        }
        Ok(commits)
    }

    pub(super) async fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Result<Before> {
        let time = i64::try_from(time.0).unwrap_or(i64::MAX);
        let numbers: Vec<i64> = spaces.iter().map(|(space, _)| i64::from(space.0)).collect();
        let floors: Vec<i64> = spaces.iter().map(|(_, floor)| signed(*floor)).collect();
        let rows = self.ask(&self.sql.before, &[&time, &numbers, &floors]).await?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
        Ok(match row.get(1) {
            true => Before::Latest(Generation(row.get::<_, i64>(0) as u64)),
            false => Before::Touched(row.get::<_, Option<i64>>(2).map(|found| Generation(found as u64))),
        })
    }
}

pub(super) fn signed(generation: Generation) -> i64 {
    i64::try_from(generation.0).unwrap_or(i64::MAX)
}
