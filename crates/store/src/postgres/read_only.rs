//! A store in PostgreSQL that is only read: all reads are in one transaction, so the store stays as it was when it was
//! opened, and no other process can drop what it reads. Nothing is written: no table, no lease.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::backend::{Answer, Backend, Before, Changes, Contents, Damage, Pin, Rules, Scan, Stats};
use crate::postgres::link::{Link, failed};
use crate::postgres::schema::Statements;
use crate::postgres::{Address, PostgresOptions, Shared, opened};
use crate::{Commit, Generation, Key, Outcome, Range, Result, SpaceId, StoreError, Timestamp, Version};

/// The transaction lasts as long as the store is open, whatever the defaults of the role are.
const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
     SET LOCAL idle_in_transaction_session_timeout = 0";

pub(super) struct Frozen(Shared);

fn refuse<T: Send + 'static>() -> Answer<'static, T> {
    Box::pin(ready(Err(StoreError::ReadOnly)))
}

impl Frozen {
    pub(super) async fn connect(options: PostgresOptions, address: Address) -> Result<Frozen> {
        let sql = Statements::of(&options.schema);
        let link = Link::open(&address, &[]).await?;
        let opened = opened(&link, &sql).await?;
        let (_, identity) = opened.ok_or_else(|| StoreError::NoSchema { schema: options.schema.clone() })?;
        link.run(BEGIN).await.map_err(|error| failed("read from", &error))?;
        let shared = Shared::new(options.connections(1), address, sql, identity, true);
        *shared.readers[0].lock().await = Some(Arc::new(link));
        shared.head().await?;
        shared.learn_all_floors().await?;
        Ok(Frozen(shared))
    }
}

impl Backend for Frozen {
    fn commit(&self, _commit: Commit) -> Answer<'_, Outcome> {
        refuse()
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(self.0.latest())
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        Box::pin(self.0.get(key, at))
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(self.0.scan(scan, at))
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        Box::pin(self.0.versions(key, at, limit))
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        Box::pin(self.0.changes(range, after, limit))
    }

    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        Box::pin(self.0.newer(than, space))
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        Box::pin(self.0.before(time, spaces))
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        Box::pin(self.0.pin(at))
    }

    fn floor(&self, space: SpaceId) -> Generation {
        self.0.floor(space)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.0.declare(space, rules, at);
    }

    fn maintain(&self) -> Answer<'_, bool> {
        Box::pin(ready(Ok(false)))
    }

    fn replace(&self, _contents: Contents) -> Answer<'_, Generation> {
        refuse()
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        Box::pin(self.0.verify())
    }

    fn stats(&self) -> Answer<'_, Stats> {
        Box::pin(self.0.stats())
    }

    fn identity(&self) -> u128 {
        self.0.identity
    }

    fn close(&self) -> Answer<'_, ()> {
        Box::pin(async {
            if self.0.closed.swap(true, Ordering::SeqCst) {
                return Err(StoreError::Closed);
            }
            // The transaction ends with its connection.
            *self.0.readers[0].lock().await = None;
            self.0.latest.send_modify(|_| {});
            Ok(())
        })
    }
}
