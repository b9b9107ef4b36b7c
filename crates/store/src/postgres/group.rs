//! What a group of commits writes, as the columns of one statement.

use std::collections::BTreeMap;

use tokio_postgres::Row;

use crate::codec::put_string;
use crate::postgres::Shared;
use crate::postgres::known::{Guessed, News, Spaces};
use crate::postgres::link::{Link, Param};
use crate::postgres::read::signed;
use crate::postgres::schema::Sql;
use crate::postgres::writer::{Answered, DecidedGroup};
use crate::{Committed, SpaceId, Uuid};

/// The rows of a table, as columns.
#[derive(Default)]
struct Versions<'a> {
    keys: Vec<&'a [u8]>,
    revs: Vec<i64>,
    generations: Vec<i64>,
    times: Vec<i64>,
    values: Vec<Option<&'a [u8]>>,
    /// Of versions that are overwritten: at which generation.
    until: Vec<i64>,
}

impl<'a> Versions<'a> {
    fn push(&mut self, key: &'a [u8], (rev, generation, time, value): Columns<'a>, until: i64) {
        self.keys.push(key);
        self.revs.push(rev);
        self.generations.push(generation);
        self.times.push(time);
        self.values.push(value);
        self.until.push(until);
    }
}

/// Rev, generation, time, value.
type Columns<'a> = (i64, i64, i64, Option<&'a [u8]>);

/// The commits, once for each space that they touch, as columns.
#[derive(Default)]
struct Commits<'a> {
    spaces: Vec<i64>,
    generations: Vec<i64>,
    times: Vec<i64>,
    metas: Vec<&'a [u8]>,
    keys: Vec<Vec<u8>>,
}

/// What a group writes.
#[derive(Default)]
struct GroupRows<'a> {
    /// Keys that had a version before the group, and at which generation that ends.
    overwritten: Vec<&'a [u8]>,
    until: Vec<i64>,
    /// Versions that the group itself overwrites.
    between: Versions<'a>,
    present: Versions<'a>,
    commits: Commits<'a>,
}

impl<'a> GroupRows<'a> {
    fn of(applied: &'a [Committed]) -> GroupRows<'a> {
        let mut newest: BTreeMap<&[u8], Columns<'_>> = BTreeMap::new();
        let mut rows = GroupRows::default();
        for committed in applied {
            let (generation, time) = (committed.generation.0 as i64, committed.time.0 as i64);
            let mut touched: BTreeMap<SpaceId, Vec<u8>> = BTreeMap::new();
            for change in &committed.changes {
                let key = change.key.encoded();
                let columns = (change.rev.0 as i64, generation, time, change.value.as_deref());
                match newest.insert(key, columns) {
                    Some(before) => rows.between.push(key, before, generation),
                    None if change.rev.0 > 1 => {
                        rows.overwritten.push(key);
                        rows.until.push(generation);
                    }
                    // Nothing is stored under the key.
                    None => {}
                }
                put_string(touched.entry(change.key.space()).or_default(), key);
            }
            for (space, touched) in touched {
                rows.commits.spaces.push(i64::from(space.0));
                rows.commits.generations.push(generation);
                rows.commits.times.push(time);
                rows.commits.metas.push(&committed.meta[..]);
                rows.commits.keys.push(touched);
            }
        }
        newest.into_iter().for_each(|(key, columns)| rows.present.push(key, columns, 0));
        rows
    }
}

/// A group of so many commits is told only to the processes that watch what it touches. Others would learn from it
/// where the head is, but among processes that write so much, the head has moved on by then. To tell all of them would
/// take a sixth of the rate.
pub(super) const MANY: usize = 16;

/// In which transaction a group is written.
pub(super) struct Scope<'a> {
    /// The id of the writer, and the number of the transaction.
    pub(super) writer: (Uuid, i64),
    /// The name of the transaction, if nothing is to be written in another one.
    pub(super) name: Option<&'a str>,
    /// What was not read in this transaction.
    pub(super) versions: &'a Guessed,
    /// Until when the group may land, by the clock of the server, in seconds.
    pub(super) deadline: Option<f64>,
}

/// Writes what is decided, or nothing if the head or a guessed version has changed. Gives a row if it was written.
pub(super) async fn write(
    shared: &Shared,
    link: &Link,
    sql: &Sql,
    decided: &DecidedGroup,
    Scope { writer: (writer, number), name, versions, deadline }: Scope<'_>,
) -> Answered<Vec<Row>> {
    let GroupRows { overwritten, until: ends, between, present, commits } = GroupRows::of(&decided.applied);
    let (before, after) = (decided.before, decided.after);
    let (generation, time) = (signed(after.generation), after.time.0 as i64);
    let (expected, expected_time) = (signed(before.generation), (!decided.moves).then_some(before.time.0 as i64));
    let (touched, guessed_keys) = (Spaces::touched_by_group(decided), versions.encoded());
    let told = (decided.applied.len() >= MANY).then_some(touched.bits());
    let (channel, touched) = (&shared.sql.channel, News::touched(touched));
    let Versions { keys: past, generations: from, revs: past_revs, times: past_times, values: past_values, until } =
        &between;
    let Versions { keys: all, revs, generations: made, times: at, values, .. } = &present;
    let params: [Param<'_>; 33] = [
        &overwritten,
        &ends,
        past,
        from,
        past_revs,
        past_times,
        past_values,
        until,
        all,
        revs,
        made,
        at,
        values,
        &commits.spaces,
        &commits.generations,
        &commits.times,
        &commits.metas,
        &commits.keys,
        &generation,
        &time,
        &decided.declared,
        &writer,
        &number,
        channel,
        &touched,
        &shared.process,
        &expected,
        &expected_time,
        &guessed_keys,
        &versions.revs,
        &name,
        &deadline,
        &told,
    ];
    link.query(sql, &params).await
}
