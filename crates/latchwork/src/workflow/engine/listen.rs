//! Callers that wait for news of an execution: its end, an answer, a published value, an event.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::workflow::engine::EngineInner;
use crate::workflow::stored::record::StoredStatus;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// What callers of an execution wait for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum News {
    /// Its end.
    End,
    /// A published value.
    Published,
    /// The answer to the update of this id.
    Answer(String),
    /// An event of its stream.
    Stream,
}

/// Notifies the callers that wait for the same news.
#[derive(Default)]
pub(super) struct Listener {
    pub(super) told: Notify,
    /// The status that the execution has ended with, once it has.
    ended: OnceLock<StoredStatus>,
}

/// All who wait.
pub(super) type Listeners = Mutex<BTreeMap<(ExecutionId, News), Arc<Listener>>>;

impl EngineInner {
    /// Notifies all callers that wait for an execution that it has left memory, with its final status if that is known.
    /// `is_told` says whether the commit with the end has told the other nodes.
    pub(crate) fn ended(&self, id: &ExecutionId, status: Option<StoredStatus>, is_told: bool) {
        if status.is_some() {
            self.set_aside.lock().remove(id);
        }
        if !is_told {
            self.tell_elsewhere(id);
        }
        let mut listening = self.listening.lock();
        let its = listening.range((id.clone(), News::End)..).take_while(|((listened, _), _)| listened == id);
        for (_, listener) in its {
            status.iter().for_each(|status| drop(listener.ended.set(status.clone())));
            listener.told.notify_waiters();
        }
        if status.is_some() {
            // Another execution may have the id from now on.
            listening.remove(&(id.clone(), News::End));
        }
    }

    /// Notifies all callers that wait for anything.
    pub(crate) fn tell_all(&self) {
        self.listening.lock().values().for_each(|listener| listener.told.notify_waiters());
    }

    /// Notifies the callers that wait for this news of an execution. `is_told` says whether the commit with the news
    /// has told the other nodes.
    pub(crate) fn tell(&self, id: &ExecutionId, news: News, is_told: bool) {
        if !is_told {
            self.tell_elsewhere(id);
        }
        self.listening.lock().get(&(id.clone(), news)).iter().for_each(|listener| listener.told.notify_waiters());
    }

    /// Waits until `look` finds something. `look` is called at once, and then whenever there is such news, the
    /// execution leaves memory, or the engine stops. Its argument is the final status of the execution, if that is
    /// known.
    pub(crate) async fn listen<T, F>(
        &self,
        id: &ExecutionId,
        news: News,
        look: impl FnMut(Option<StoredStatus>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<Option<T>>>,
    {
        self.listen_after(id, news, async { Ok(false) }, look).await
    }

    /// The same for news of what `send` sends. It returns whether nothing was sent before, and the owner was asked for
    /// news in the same commit: then the first look comes when there are news.
    pub(crate) async fn listen_after<T, F>(
        &self,
        id: &ExecutionId,
        news: News,
        send: impl Future<Output = Result<bool>>,
        mut look: impl FnMut(Option<StoredStatus>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<Option<T>>>,
    {
        let key = (id.clone(), news);
        let listener = self.listening.lock().entry(key.clone()).or_default().clone();
        let listening = Listening { engine: self, key, listener };
        let mut told = Box::pin(listening.listener.told.notified());
        told.as_mut().enable();
        let epoch = self.node.epoch(id.as_bytes());
        let is_remote = self.node.is_shared() && !self.node.owns(id);
        let mut asked = (send.await? && is_remote).then_some(epoch);
        let mut looks = asked.is_none();
        loop {
            if looks && let Some(found) = look(listening.listener.ended.get().cloned()).await? {
                return Ok(found);
            }
            looks = true;
            if self.is_stopped() {
                return Err(WorkflowError::Stopped);
            }
            // The owner may have told of the news before it knew of this caller, so the caller looks once more.
            if self.listen_elsewhere(id, &mut asked).await? {
                continue;
            }
            self.rehearsal.watch(id, told.as_mut()).await;
            told.set(listening.listener.told.notified());
            told.as_mut().enable();
        }
    }
}

/// A caller that waits for news.
struct Listening<'a> {
    engine: &'a EngineInner,
    key: (ExecutionId, News),
    listener: Arc<Listener>,
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let mut all = self.engine.listening.lock();
        // One reference of the map and one of this value: no other can be made while the map is locked.
        let is_last = Arc::strong_count(&self.listener) == 2;
        if is_last && all.get(&self.key).is_some_and(|found| Arc::ptr_eq(found, &self.listener)) {
            all.remove(&self.key);
        }
    }
}
