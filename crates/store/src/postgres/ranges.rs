//! The checks that ranges are unchanged. A scan of a range may take long, so ranges are scanned before the head is
//! locked. What was written between the scan and the lock is found under the lock, by the keys of the commits since.

use futures_util::future::{try_join, try_join_all};
use tokio_postgres::Row;

use crate::backend::{Facts, Needs};
use crate::postgres::Shared;
use crate::postgres::link::Link;
use crate::postgres::read::{keys_of, signed};
use crate::postgres::writer::key_of;
use crate::{Generation, Key, Range, Result};

/// More commits than this are not looked through: the ranges are scanned again instead.
const MOST: i64 = 2000;

/// The ranges that the commits of a group are decided on.
pub(super) struct Ranges<'a> {
    asked: Vec<(&'a Range, Generation)>,
    spaces: Vec<i64>,
    /// Every commit up to this generation is visible to the scans.
    known: Generation,
}

/// What was found under the lock.
#[derive(Default)]
pub(super) struct Since {
    /// The commits after the known generation.
    touched: Vec<Row>,
    pub(super) floors: Vec<Row>,
}

impl<'a> Ranges<'a> {
    pub(super) fn of(needs: &'a [Needs<'a>], known: Generation) -> Ranges<'a> {
        let asked: Vec<(&Range, Generation)> = needs.iter().flat_map(Needs::ranges).collect();
        let mut spaces: Vec<i64> = asked.iter().map(|(range, _)| i64::from(range.space().0)).collect();
        spaces.sort_unstable();
        spaces.dedup();
        Ranges { asked, spaces, known }
    }

    /// Looks for the first change of each range.
    pub(super) async fn scan(&self, shared: &Shared, link: &Link) -> Result<Vec<Vec<Row>>, tokio_postgres::Error> {
        let looks = self.asked.iter().map(|(range, since)| async move {
            link.query(&shared.sql.range, &[&range.start(), &range.end(), &signed(*since)]).await
        });
        try_join_all(looks).await
    }

    /// Reads what was written since the known generation, and the floors.
    pub(super) async fn since(&self, shared: &Shared, link: &Link) -> Result<Since, tokio_postgres::Error> {
        if self.asked.is_empty() {
            return Ok(Since::default());
        }
        let (known, most) = (signed(self.known), MOST);
        let touched = async { link.query(&shared.sql.since, &[&self.spaces, &known, &most]).await };
        let (touched, floors) = try_join(touched, link.query(&shared.sql.floors, &[])).await?;
        Ok(Since { touched, floors })
    }

    /// Whether the scans and what was written since tell everything. If not, for example because this process slept for
    /// longer than its lease and the commits since are no longer kept, the ranges have to be scanned under the lock.
    pub(super) fn is_covered(&self, shared: &Shared, latest: Generation, since: &Since) -> bool {
        let is_kept = |(range, _): &(&Range, Generation)| shared.floor(range.space()) <= self.known;
        self.asked.is_empty()
            || (self.known <= latest && (since.touched.len() as i64) < MOST && self.asked.iter().all(is_kept))
    }

    pub(super) fn add_to(
        &self,
        facts: &mut Facts,
        shared: &Shared,
        scanned: Vec<Vec<Row>>,
        since: &Since,
    ) -> Result<()> {
        let mut touched: Vec<(Generation, Key)> = Vec::new();
        for row in &since.touched {
            let generation = Generation(row.get::<_, i64>(0) as u64);
            touched.extend(keys_of(row.get(1))?.into_iter().map(|key| (generation, key)));
        }
        for ((range, asked), found) in self.asked.iter().zip(scanned) {
            let changed = match shared.check(range.space(), *asked) {
                Err(dropped) => Err(dropped),
                Ok(()) => {
                    let mut first = match found.first() {
                        Some(row) => Some((key_of(row.get(0))?, Generation(row.get::<_, i64>(1) as u64))),
                        None => None,
                    };
                    let later = touched.iter().filter(|(at, key)| at > asked && range.contains(key));
                    later.for_each(|(at, key)| first = Some(first_of(first.take(), (key, *at))));
                    Ok(first)
                }
            };
            facts.add_range((*range).clone(), *asked, changed);
        }
        Ok(())
    }
}

/// The change of the smaller key; of one key, the later change.
fn first_of(first: Option<(Key, Generation)>, (key, at): (&Key, Generation)) -> (Key, Generation) {
    match first {
        Some((known, before)) if known < *key => (known, before),
        Some((known, before)) if known == *key => (known, before.max(at)),
        _ => (key.clone(), at),
    }
}
