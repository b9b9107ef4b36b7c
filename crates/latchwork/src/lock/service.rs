//! What an engine knows of locks in memory: lanes, sessions, and who in this process waits for what.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use crate::lock::deadlock::Suspect;
use crate::lock::lane::{Ask, Ear, Gone, Heard, Lanes, Want};
use crate::lock::name::Spaces;
use crate::lock::session::{Session, Watched};
use crate::lock::stored::Request;
use crate::lock::table::Told;
use crate::lock::{LockName, Owner};
use crate::record::Record;
use crate::store::{Check, ErrorKind, Store, StoreError, Uuid};
use crate::workflow::engine::Inner;

/// By lock and ticket, in an order that is the same each time.
type Ears = BTreeMap<(LockName, u64), (Uuid, Vec<Ear>)>;

pub(crate) struct Service {
    pub(crate) spaces: Spaces,
    pub(crate) lanes: Mutex<Lanes>,
    /// The requests of sessions in this process, held and waiting, with all who have made them.
    ears: Mutex<Ears>,
    /// The session of those who have none of their own.
    pub(crate) own: Mutex<Option<Session>>,
    /// Held by whoever begins it.
    pub(crate) beginning: tokio::sync::Mutex<()>,
    /// The sessions that were begun here and have not ended.
    pub(crate) begun: Mutex<BTreeSet<Uuid>>,
    /// Sessions that end if they are not renewed, and nobody in this process does that by itself.
    pub(crate) watched: Mutex<HashMap<Uuid, Watched>>,
    pub(crate) watches: Notify,
    /// Executions that have begun to wait for a lock.
    pub(crate) suspects: mpsc::UnboundedSender<Suspect>,
    suspected: Mutex<Option<mpsc::UnboundedReceiver<Suspect>>>,
}

impl Service {
    pub(crate) async fn on(store: &Store) -> Result<Service, StoreError> {
        let (suspects, suspected) = mpsc::unbounded_channel();
        Ok(Service {
            spaces: Spaces::declare(store).await?,
            lanes: Mutex::default(),
            ears: Mutex::default(),
            own: Mutex::default(),
            beginning: tokio::sync::Mutex::default(),
            begun: Mutex::default(),
            watched: Mutex::default(),
            watches: Notify::new(),
            suspects,
            suspected: Mutex::new(Some(suspected)),
        })
    }

    /// Those who may be in a deadlock, for the one who looks.
    pub(crate) fn suspected(&self) -> Option<mpsc::UnboundedReceiver<Suspect>> {
        self.suspected.lock().take()
    }

    /// The session of those who have none of their own, if there is one.
    pub(crate) fn own(&self) -> Option<Session> {
        self.own.lock().clone().filter(|own| !own.is_lost())
    }

    /// Has somebody not hear of a request any more, if others do who have made the same.
    pub(crate) fn is_left_to_others(&self, lock: &LockName, ticket: u64, ear: &Ear) -> bool {
        let mut ears = self.ears.lock();
        let Some((_, ears)) = ears.get_mut(&(lock.clone(), ticket)) else { return false };
        let is_left = ears.iter().any(|other| !Arc::ptr_eq(other, ear));
        if is_left {
            ears.retain(|other| !Arc::ptr_eq(other, ear));
        }
        is_left
    }

    /// A session is lost, and with it everything it had.
    pub(crate) fn lose(&self, session: Uuid) {
        let mut ears = self.ears.lock();
        let lost = ears.extract_if(.., |_, (owner, _)| *owner == session);
        lost.for_each(|(_, (_, ears))| tell(&ears, &Heard::Gone(Gone::SessionLost)));
    }

    /// Nothing is served any more.
    pub(crate) fn stop(&self) {
        let own = self.own.lock().take();
        drop(own);
        let ears = std::mem::take(&mut *self.ears.lock());
        ears.into_values().for_each(|(_, ears)| tell(&ears, &Heard::Gone(Gone::SessionLost)));
    }
}

fn tell(ears: &[Ear], heard: &Heard) {
    ears.iter().for_each(|ear| drop(ear.send_replace(heard.clone())));
}

impl Inner {
    /// That this engine is the one that serves a lock.
    pub(crate) fn lock_check(&self, lock: &LockName) -> Check {
        self.shard_of(&lock.bytes())
    }

    /// Has somebody hear what becomes of a request.
    pub(crate) fn hears(&self, lock: &LockName, ticket: u64, want: &Want, is_granted: bool) {
        // Who has given up by now does not listen.
        let ear = want.ear.as_ref().filter(|ear| !matches!(*ear.borrow(), Heard::Gone(_)));
        if let (Owner::Session(session), Some(ear)) = (&want.owner, ear) {
            let mut ears = self.locks.ears.lock();
            ears.entry((lock.clone(), ticket)).or_insert_with(|| (*session, Vec::new())).1.push(ear.clone());
            if is_granted {
                ear.send_replace(Heard::Granted);
            }
        }
    }

    /// Tells those in this process what became of their requests.
    pub(crate) fn tell_requests(&self, lock: &LockName, told: Vec<Told>) {
        if told.is_empty() {
            return;
        }
        let mut ears = self.locks.ears.lock();
        for told in told {
            match told {
                Told::Granted(ticket) => {
                    if let Some((_, ears)) = ears.get(&(lock.clone(), ticket)) {
                        tell(ears, &Heard::Granted);
                    }
                }
                Told::Gone(ticket, gone) => {
                    if let Some((_, ears)) = ears.remove(&(lock.clone(), ticket)) {
                        tell(&ears, &Heard::Gone(gone));
                    }
                }
            }
        }
    }

    /// A commit had no answer: those whom it may have granted something look.
    pub(crate) async fn listen_again(self: &Arc<Inner>) -> Result<(), StoreError> {
        let ears: Vec<_> = self.locks.ears.lock().keys().cloned().collect();
        if ears.is_empty() {
            return Ok(());
        }
        let view = self.store.view().await?;
        for (lock, ticket) in ears {
            let item = view.get(&self.locks.spaces.request(&lock, ticket)).await?;
            let told = match item.map(|item| Request::decode(&item.value)) {
                Some(Ok(request)) if request.granted_us.is_some() => Told::Granted(ticket),
                Some(_) => continue,
                None => Told::Gone(ticket, Gone::SessionLost),
            };
            self.tell_requests(&lock, vec![told]);
        }
        Ok(())
    }

    /// Lets go of something that nobody wants any more, however long the store does not serve.
    pub(crate) fn abandon(self: &Arc<Inner>, lock: LockName, owner: Owner, id: Vec<u8>, ear: Ear) {
        self.ask_at_last(lock, Ask::Abandon { owner, id, ear: Some(ear) }, None);
    }

    /// Goes on with granting a lock to those who wait, where one commit could not hold all of it.
    pub(crate) fn grant_on(self: &Arc<Inner>, lock: &LockName) {
        self.ask_at_last(lock.clone(), Ask::Grant, None);
    }

    /// Has something done to a lock, in a task of its own, however long the store does not serve. A session is kept
    /// until then.
    pub(crate) fn ask_at_last(self: &Arc<Inner>, lock: LockName, ask: Ask, session: Option<Session>) {
        let engine = self.clone();
        self.runtime.spawn(async move {
            let what = "nothing could be done to a lock";
            engine.at_last(what, || engine.ask(&lock, ask.clone(), None)).await;
            drop(session);
        });
    }

    /// Does something, however long the store does not serve. What else fails is told of, and left.
    pub(crate) async fn at_last<T, F>(&self, what: &str, mut attempt: impl FnMut() -> F)
    where
        F: Future<Output = crate::lock::error::Result<T>>,
    {
        while let Err(error) = attempt().await {
            if self.is_stopped() {
                return;
            }
            if error.kind() != ErrorKind::Unavailable {
                return tracing::warn!(%error, "{what}");
            }
            self.store.env().sleep(AGAIN).await;
        }
    }
}

/// How long to wait after the store did not serve.
pub(crate) const AGAIN: Duration = Duration::from_millis(200);
