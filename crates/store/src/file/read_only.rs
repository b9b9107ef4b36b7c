//! A store in a directory that is opened read-only. Repairs that opening makes are made in memory. Every commit fails,
//! because an acknowledged commit must be durable.

use std::future::ready;

use super::FileBackend;
use crate::backend::{Answer, Backend, Before, Changes, Contents, Damage, Pin, Rules, Scan, Stats};
use crate::{Commit, Generation, Key, Outcome, Range, Result, SpaceId, StoreError, Timestamp, Version};

pub(super) struct ReadOnly(pub(super) FileBackend);

fn refuse<T: Send + 'static>() -> Answer<'static, T> {
    Box::pin(ready(Err(StoreError::ReadOnly)))
}

impl Backend for ReadOnly {
    fn commit(&self, _commit: Commit) -> Answer<'_, Outcome> {
        refuse()
    }

    fn latest(&self) -> Answer<'_, Generation> {
        self.0.latest()
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        self.0.get(key, at)
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        self.0.scan(scan, at)
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        self.0.versions(key, at, limit)
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        self.0.changes(range, after, limit)
    }

    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        self.0.newer(than, space)
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        self.0.before(time, spaces)
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        self.0.pin(at)
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
        self.0.verify()
    }

    fn stats(&self) -> Answer<'_, Stats> {
        self.0.stats()
    }

    fn identity(&self) -> u128 {
        self.0.identity()
    }

    fn close(&self) -> Answer<'_, ()> {
        let closed: Result<()> = self.0.writer().begin_closing().map(|()| self.0.folder.let_go());
        Box::pin(ready(closed))
    }
}
