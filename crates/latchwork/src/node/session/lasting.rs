//! Lasting sessions: they belong to no process. A client that knows the id of one renews it, and uses it in any process
//! on the store, in several at once, too. It ends when it is ended, or is not renewed.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{LASTING, Lease, LocalSession, PRESENT, Result, SessionOptions, Sessions};
use crate::node::NodeError;
use crate::record::Record;
use crate::store::{Check, Commit, Item, Uuid};

impl LocalSession {
    /// The record of the session, if the session has not ended.
    pub(crate) async fn record(&self) -> Result<Option<Lease>> {
        let item = self.sessions.node.store.get(&self.sessions.key(self.id)).await?;
        item.map(|item| read(self.id, &item)).transpose()
    }
}

fn read(id: Uuid, item: &Item) -> Result<Lease> {
    Lease::decode(&item.value).map_err(|why| NodeError::Record(why.at(format!("session {id}"))))
}

impl Sessions {
    /// Begins a lasting session under this id, or finds it if it was begun before. `None` if the id belongs to another
    /// session, or the session has just ended. It is begun even if the caller drops this future.
    pub(crate) async fn begin_lasting(
        self: &Arc<Sessions>,
        id: Uuid,
        terms: SessionOptions,
    ) -> Result<Option<Arc<LocalSession>>> {
        let sessions = self.clone();
        let begun = self.node.runtime.run(async move { sessions.begun_lasting(id, terms).await });
        begun.await.unwrap_or(Err(NodeError::Stopped))
    }

    async fn begun_lasting(self: &Arc<Sessions>, id: Uuid, terms: SessionOptions) -> Result<Option<Arc<LocalSession>>> {
        if self.node.is_stopped() {
            return Err(NodeError::Stopped);
        }
        let SessionOptions { lease, label, .. } = terms;
        let (key, now) = (self.key(id), self.node.store.env().now().0);
        let lease_us = u64::try_from(lease.as_micros()).unwrap_or(u64::MAX);
        let record = Lease { label, lease_us, since_us: now, renewed_us: now, opening: Some(LASTING) };
        let part = self.node.for_any(id.as_bytes()).check(PRESENT, Check::Absent(key.clone()));
        match self.commit(Commit::new(), part.put(&key, record.encode())).await? {
            Ok(_) | Err(PRESENT) => self.lasting(id).await,
            Err(_) => Err(NodeError::Stopped),
        }
    }

    /// A lasting session that was begun here or elsewhere, if it has not ended.
    pub(crate) async fn lasting(self: &Arc<Sessions>, id: Uuid) -> Result<Option<Arc<LocalSession>>> {
        let Some(item) = self.node.store.get(&self.key(id)).await? else { return Ok(None) };
        let record = read(id, &item)?;
        if record.opening != Some(LASTING) {
            return Ok(None);
        }
        let lease = Duration::from_micros(record.lease_us);
        // In this order: what is forgotten with the watch includes the entry.
        self.lasting.lock().insert(id);
        self.watch_other(id, item.rev, lease);
        let (is_lost, renewed) = (watch::Sender::new(false), Mutex::new(self.node.store.env().monotonic()));
        let sessions = self.clone();
        Ok(Some(Arc::new(LocalSession { sessions, id, lease, is_lasting: true, is_lost, renewed })))
    }

    /// True if callers in this process may use the session: what other processes do with its requests concerns them.
    pub(crate) fn is_used(&self, id: Uuid) -> bool {
        self.has_begun(id) || self.lasting.lock().contains(&id)
    }
}
