//! A restore: one transaction in which every key becomes what the snapshot holds.

use std::collections::BTreeSet;
use std::iter::Peekable;

use crate::backend::Contents;
use crate::codec::put_string;
use crate::evaluate::{restored, restored_receipt};
use crate::postgres::Shared;
use crate::postgres::link::{Link, failed};
use crate::postgres::read::{signed, version_of};
use crate::postgres::writer::BEGIN;
use crate::space::{RECEIPTS, SPACES};
use crate::{Generation, Key, Result, SpaceId, StoreError, Timestamp, Version};

/// How many records are read and written at once.
const PAGE: i64 = 1000;
const PAGE_BYTES: usize = 8 << 20;

/// What is notified to have the other processes write how many views they have open.
pub(super) const ASK: &str = "views";

type Records = Peekable<Box<dyn Iterator<Item = Result<(Key, Version)>> + Send>>;

/// What is to be written of a page.
#[derive(Default)]
struct Page {
    put: Vec<(Key, Version)>,
    delete: Vec<Key>,
    receipts: Vec<(Key, Version)>,
}

impl Shared {
    pub(super) async fn replace(&self, contents: Contents) -> Result<Generation> {
        let link = self.open().await?;
        self.ask_others(&link).await?;
        let replaced = self.replace_on(&link, contents).await;
        match &replaced {
            Ok(generation) => self.saw(*generation),
            Err(_) => drop(link.run("ROLLBACK").await),
        }
        replaced
    }

    async fn replace_on(&self, link: &Link, contents: Contents) -> Result<Generation> {
        let error = |error: tokio_postgres::Error| failed("write to", &error);
        link.run(BEGIN).await.map_err(error)?;
        link.query(&self.sql.lock_store, &[]).await.map_err(error)?;
        let head = link.query(&self.sql.lock_head, &[]).await.map_err(error)?;
        let head = head.first().ok_or_else(|| StoreError::corrupt("table head", "it has no row"))?;
        let (latest, time) = (Generation(head.get::<_, i64>(0) as u64), Timestamp(head.get::<_, i64>(1) as u64));
        self.check_unpinned(link).await?;
        let generation = latest.max(contents.generation).next();
        let time = self.env.now().max(time).max(contents.time);
        let is_foreign = contents.identity != self.identity && latest > Generation(0);
        let mut records: Records = contents.records.peekable();
        let (mut from, mut spaces) = (Vec::new(), BTreeSet::from([SPACES]));
        for table in ["past", "touched"] {
            link.run(&format!("DELETE FROM {}.{table}", self.sql.schema)).await.map_err(error)?;
        }
        loop {
            let rows = link.query(&self.sql.all, &[&from, &PAGE]).await.map_err(error)?;
            let mut current = Vec::with_capacity(rows.len());
            for row in &rows {
                current.push(version_of(row)?);
            }
            if is_foreign && current.iter().any(|(key, _)| key.space() != SPACES) {
                return Err(StoreError::ForeignSnapshot);
            }
            let is_last = current.len() < PAGE as usize;
            let end = current.last().map(|(key, _)| key.clone()).filter(|_| !is_last);
            let mut current = current.into_iter().peekable();
            loop {
                let merged = self.merge(&mut current, &mut records, end.as_ref(), (generation, time), &mut spaces);
                let (page, is_done) = merged?;
                self.write_page(link, &page).await?;
                if is_done {
                    break;
                }
            }
            match end {
                Some(end) => from = [end.encoded(), &[0]].concat(),
                None => break,
            }
        }
        let known: Vec<SpaceId> = self.rules.lock().keys().copied().chain(spaces).collect();
        let known: BTreeSet<SpaceId> = known.into_iter().filter(|space| *space != RECEIPTS).collect();
        let numbers: Vec<i64> = known.iter().map(|space| i64::from(space.0)).collect();
        let floors = vec![signed(generation); numbers.len()];
        let raised = link.query(&self.sql.raise, &[&numbers, &floors]).await.map_err(error)?;
        let (at, when) = (signed(generation), time.0 as i64);
        link.query(&self.sql.advance, &[&at, &when, &at]).await.map_err(error)?;
        link.query(&self.sql.notify, &[&self.sql.channel, &at.to_string()]).await.map_err(error)?;
        // A view may have been opened meanwhile.
        self.check_unpinned(link).await?;
        let cause = |error: tokio_postgres::Error| StoreError::Uncertain { cause: error.to_string().into() };
        link.run("COMMIT").await.map_err(cause)?;
        self.learn_floors(&raised);
        Ok(generation)
    }

    /// Waits until every other process has written how many views it has open. Those that do not listen write it with
    /// their next renewal; those that are gone are waited for until their lease is over.
    async fn ask_others(&self, link: &Link) -> Result<()> {
        let error = |error: tokio_postgres::Error| failed("write to", &error);
        let rows = link.query(&self.sql.time, &[]).await.map_err(error)?;
        let asked: f64 = rows.first().map_or(0.0, |row| row.get(0));
        link.query(&self.sql.notify, &[&self.sql.channel, &ASK]).await.map_err(error)?;
        loop {
            let silent = link.query(&self.sql.silent, &[&self.process, &asked]).await.map_err(error)?;
            if silent.is_empty() {
                return Ok(());
            }
            // The clock of this process may be a virtual one.
            link.query(&self.sql.pause, &[]).await.map_err(error)?;
        }
    }

    /// Refuses while views are open, here or in other processes. A view that another process opens after it was asked
    /// does not count: its reads fail, because the history that it needs is dropped.
    async fn check_unpinned(&self, link: &Link) -> Result<()> {
        let elsewhere = link.query(&self.sql.views_elsewhere, &[&self.process]).await;
        let elsewhere = elsewhere.map_err(|error| failed("read from", &error))?;
        let elsewhere = elsewhere.first().map_or(0, |row| row.get::<_, i64>(0)) as usize;
        match self.views() + elsewhere {
            0 => Ok(()),
            views => Err(StoreError::ViewsOpen { views }),
        }
    }

    /// Compares what is stored with what the snapshot holds, up to a key or until a page is full. Gives whether it came
    /// to that key.
    fn merge(
        &self,
        current: &mut Peekable<std::vec::IntoIter<(Key, Version)>>,
        records: &mut Records,
        end: Option<&Key>,
        at: (Generation, Timestamp),
        spaces: &mut BTreeSet<SpaceId>,
    ) -> Result<(Page, bool)> {
        let (mut page, mut bytes) = (Page::default(), 0);
        loop {
            if page.put.len() >= PAGE as usize || bytes >= PAGE_BYTES {
                return Ok((page, false));
            }
            let is_due = |next: &Result<(Key, Version)>| match (next, end) {
                (Ok((key, _)), Some(end)) => key <= end,
                _ => true,
            };
            let stored = current.peek().map(|(key, _)| key.clone());
            let wanted = match records.peek().filter(|next| is_due(next)) {
                Some(Ok((key, _))) => Some(key.clone()),
                Some(Err(error)) => return Err(error.clone()),
                None => None,
            };
            let Some(key) = stored.iter().chain(&wanted).min().cloned() else { return Ok((page, true)) };
            let old = current.next_if(|(stored, _)| *stored == key).map(|(_, version)| version);
            let new = match records.next_if(|next| next.as_ref().is_ok_and(|(wanted, _)| *wanted == key)) {
                Some(record) => Some(record?.1),
                None => None,
            };
            spaces.insert(key.space());
            let rules = self.rules.lock().get(&key.space()).map(|it| it.0).unwrap_or_default();
            match restored(&key, old.as_ref(), new.as_ref(), at, rules) {
                Some(version) => {
                    if restored_receipt(&key, &version).is_some() {
                        page.receipts.push((key.clone(), version.clone()));
                    }
                    if old.as_ref() != Some(&version) {
                        bytes += version.value.as_ref().map_or(0, bytes::Bytes::len);
                        page.put.push((key, version));
                    }
                }
                None => page.delete.extend(old.map(|_| key)),
            }
        }
    }

    async fn write_page(&self, link: &Link, page: &Page) -> Result<()> {
        let error = |error: tokio_postgres::Error| failed("write to", &error);
        if !page.delete.is_empty() {
            let keys: Vec<&[u8]> = page.delete.iter().map(Key::encoded).collect();
            link.query(&self.sql.delete, &[&keys]).await.map_err(error)?;
        }
        let keys: Vec<&[u8]> = page.put.iter().map(|(key, _)| key.encoded()).collect();
        let revs: Vec<i64> = page.put.iter().map(|(_, version)| version.rev.0 as i64).collect();
        let generations: Vec<i64> = page.put.iter().map(|(_, version)| signed(version.generation)).collect();
        let times: Vec<i64> = page.put.iter().map(|(_, version)| version.time.0 as i64).collect();
        let values: Vec<Option<&[u8]>> = page.put.iter().map(|(_, version)| version.value.as_deref()).collect();
        link.query(&self.sql.put, &[&keys, &revs, &generations, &times, &values]).await.map_err(error)?;
        // A receipt leaves when its time has come: by the commit that it is of.
        let spaces = vec![i64::from(RECEIPTS.0); page.receipts.len()];
        let at: Vec<i64> = page.receipts.iter().map(|(_, version)| signed(version.generation)).collect();
        let times: Vec<i64> = page.receipts.iter().map(|(_, version)| version.time.0 as i64).collect();
        let metas: Vec<&[u8]> = vec![&[]; page.receipts.len()];
        let mut touched = Vec::with_capacity(page.receipts.len());
        for (key, _) in &page.receipts {
            let mut keys = Vec::new();
            put_string(&mut keys, key.encoded());
            touched.push(keys);
        }
        link.query(&self.sql.touch, &[&spaces, &at, &times, &metas, &touched]).await.map_err(error)?;
        Ok(())
    }
}
