//! Changes the index: adds the versions of an overlay and removes what lies below the floors.

use std::collections::BTreeMap;

use redb::ReadableTable;

use super::super::overlay::{Chain, Overlay};
use super::record::{
    Progress, decode_row, decode_version, encode_floor, encode_progress, encode_row, encode_segment, encode_version,
};
use super::{FLOORS, Failure, STATE};
use crate::backend::{Rules, is_readable};
use crate::evaluate::restored_receipt;
use crate::{Change, Committed, Generation, Key, Result, SpaceId, Version};

/// The input of one fold.
pub(in crate::file) struct Fold<'a> {
    pub(in crate::file) overlay: Option<&'a Overlay>,
    pub(in crate::file) floors: &'a BTreeMap<SpaceId, Generation>,
    pub(in crate::file) rules: &'a dyn Fn(SpaceId) -> Rules,
    pub(in crate::file) progress: Progress,
    /// How many rows of dropped history may be removed.
    pub(in crate::file) budget: usize,
}

pub(super) type Current<'a> = redb::Table<'a, &'static [u8], &'static [u8]>;
pub(super) type Past<'a> = redb::Table<'a, (&'static [u8], u64), &'static [u8]>;
pub(super) type Touched<'a> = redb::Table<'a, (u32, u64), &'static [u8]>;

/// Adds the versions of one key. The last version becomes the current one. Earlier versions become past versions if a
/// view may still read them.
pub(super) fn take_chain(
    current: &mut Current<'_>,
    past: &mut Past<'_>,
    fold: &Fold<'_>,
    key: &Key,
    chain: &Chain,
) -> Result<(), Failure> {
    let changes = chain.changes();
    let (Some((first, ..)), Some((last, commit, change))) = (changes.first(), changes.last()) else { return Ok(()) };
    let floor = fold.floors.get(&key.space()).copied().unwrap_or_default();
    if is_readable(*first, floor) {
        let base = current.get(key.encoded())?.map(|value| value.value().to_vec());
        if let Some(base) = base {
            past.insert((key.encoded(), first.0), base.as_slice())?;
        }
    }
    for pair in changes.windows(2).filter(|pair| is_readable(pair[1].0, floor)) {
        let ((generation, commit, change), (until, ..)) = (&pair[0], &pair[1]);
        let Change { rev, value, .. } = &commit.changes[*change];
        let record = encode_version(key, *rev, (*generation, commit.time), value.as_ref());
        past.insert((key.encoded(), until.0), record.as_slice())?;
    }
    let newest = &commit.changes[*change];
    let rules = (fold.rules)(key.space());
    // No row is kept for a commit at or below the floor, so no later fold would remove this key.
    if *last <= floor && rules.forgets(newest.value.is_some()) {
        current.remove(key.encoded())?;
    } else {
        let record = encode_version(key, newest.rev, (*last, commit.time), newest.value.as_ref());
        current.insert(key.encoded(), record.as_slice())?;
    }
    Ok(())
}

pub(super) fn put_progress(transaction: &redb::WriteTransaction, progress: &Progress) -> Result<(), Failure> {
    let mut table = transaction.open_table(STATE)?;
    table.insert("progress", encode_progress(progress).as_slice())?;
    table.insert("segment", encode_segment(progress).as_slice())?;
    Ok(())
}

pub(super) fn put_floors(
    transaction: &redb::WriteTransaction,
    floors: &BTreeMap<SpaceId, Generation>,
) -> Result<(), Failure> {
    let mut table = transaction.open_table(FLOORS)?;
    for (space, floor) in floors {
        table.insert(space.0, encode_floor(*space, *floor).as_slice())?;
    }
    Ok(())
}

/// Adds the row of a record that is stored without its commit. Only a receipt needs one: it is removed by its row when
/// it expires.
pub(super) fn put_receipt_row(touched: &mut Touched<'_>, key: &Key, version: &Version) -> Result<(), Failure> {
    if let Some(commit) = restored_receipt(key, version) {
        let row = encode_row(key.space(), &commit, &commit.changes.iter().collect::<Vec<_>>());
        touched.insert((key.space().0, commit.generation.0), row.as_slice())?;
    }
    Ok(())
}

pub(super) fn put_current(current: &mut Current<'_>, key: &Key, version: Option<&Version>) -> Result<(), Failure> {
    match version {
        Some(Version { rev, generation, time, value }) => {
            let record = encode_version(key, *rev, (*generation, *time), value.as_ref());
            current.insert(key.encoded(), record.as_slice())?
        }
        None => current.remove(key.encoded())?,
    };
    Ok(())
}

/// Adds a row for each space that a commit touched, unless the commit is at or below the space's floor.
pub(super) fn take_commit(touched: &mut Touched<'_>, fold: &Fold<'_>, commit: &Committed) -> Result<(), Failure> {
    let mut rows: BTreeMap<SpaceId, Vec<&Change>> = BTreeMap::new();
    for change in &commit.changes {
        let space = change.key.space();
        if commit.generation > fold.floors.get(&space).copied().unwrap_or_default() {
            rows.entry(space).or_default().push(change);
        }
    }
    for (space, changes) in rows {
        let row = encode_row(space, commit, &changes);
        touched.insert((space.0, commit.generation.0), row.as_slice())?;
    }
    Ok(())
}

pub(super) fn clear_below(
    current: &mut Current<'_>,
    past: &mut Past<'_>,
    touched: &mut Touched<'_>,
    fold: &Fold<'_>,
) -> Result<bool, Failure> {
    let mut budget = fold.budget;
    for (space, floor) in fold.floors {
        let rules = (fold.rules)(*space);
        loop {
            let mut rows = Vec::new();
            for row in touched.range((space.0, 0)..=(space.0, floor.0))?.take(budget.min(256)) {
                let (key, value) = row?;
                let (space, generation) = key.value();
                rows.push((generation, decode_row(space, generation, value.value())?));
            }
            if rows.is_empty() {
                break;
            }
            for (generation, row) in rows {
                budget = budget.saturating_sub(1);
                for (key, _, live) in row.touched {
                    past.remove((key.encoded(), generation))?;
                    let last = current.get(key.encoded())?.map(|value| decode_version(key.encoded(), value.value()));
                    let is_last = last.transpose()?.is_some_and(|version| version.generation.0 == generation);
                    if is_last && rules.forgets(live) {
                        current.remove(key.encoded())?;
                    }
                }
                touched.remove((space.0, generation))?;
            }
            if budget == 0 {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
