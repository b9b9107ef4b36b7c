//! The lock service: what one process keeps in memory about locks. It owns the lanes, and knows which callers of this
//! process wait for which requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::lane::Lanes;
use crate::lock::error::LockError;
use crate::lock::lane::{Ask, Ear, Gone, Heard, Want};
use crate::lock::name::LockSpaces;
use crate::lock::owners::OwningExecutions;
use crate::lock::session::Session;
use crate::lock::stored::LockRequest;
use crate::lock::table::CallerNotice;
use crate::lock::{LockName, Owner};
use crate::node::Node;
use crate::node::session::Sessions;
use crate::record::Record;
use crate::store::{ErrorKind, StoreError, Uuid};

/// A request by lock and ticket, ordered so that iteration is deterministic.
type Ears = BTreeMap<(LockName, u64), (Uuid, Vec<Ear>)>;

pub(crate) struct Service {
    pub(crate) node: Arc<Node>,
    pub(crate) spaces: LockSpaces,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) lanes: Lanes<Service>,
    /// The executions that own requests, if there is an engine.
    pub(super) executions: OnceLock<Weak<dyn OwningExecutions>>,
    /// The requests of sessions in this process, held and waiting, with all callers of each request.
    ears: Mutex<Ears>,
    /// Whether everything that is held here is lost: a request whose commit is answered after that is lost, too.
    is_over: AtomicBool,
    /// The requests whose guards were dropped, until they are released.
    leaving: Mutex<BTreeSet<(LockName, u64)>>,
    /// Counts the notices of other processes about sessions of this one.
    heard: AtomicU64,
    /// What sessions of this process hold beside locks: claims, by id and token, while an action runs for them.
    pub(crate) held: Mutex<BTreeSet<(Uuid, u64)>>,
}

impl Service {
    pub(crate) async fn on(node: &Arc<Node>) -> Result<Arc<Service>, StoreError> {
        let spaces = LockSpaces::declare(&node.store).await?;
        Ok(Arc::new_cyclic(|service: &Weak<Service>| Service {
            sessions: Sessions::new(node, &spaces.sessions, service.clone()),
            spaces,
            node: node.clone(),
            lanes: Lanes::default(),
            executions: OnceLock::new(),
            ears: Mutex::default(),
            is_over: AtomicBool::new(false),
            leaving: Mutex::default(),
            heard: AtomicU64::new(0),
            held: Mutex::default(),
        }))
    }

    /// Sets the executions that own requests.
    pub(crate) fn serve(&self, executions: Weak<dyn OwningExecutions>) {
        let _ = self.executions.set(executions);
    }

    /// Returns true if another caller listens to the same request. Then this caller no longer listens.
    pub(crate) fn is_left_to_others(&self, lock: &LockName, ticket: u64, ear: &Ear) -> bool {
        let mut ears = self.ears.lock();
        let Some((_, ears)) = ears.get_mut(&(lock.clone(), ticket)) else { return false };
        let is_left = ears.iter().any(|other| !Arc::ptr_eq(other, ear));
        if is_left {
            ears.retain(|other| !Arc::ptr_eq(other, ear));
        }
        is_left
    }

    /// True if the request's guard was dropped and its release is on its way.
    pub(crate) fn is_leaving(&self, lock: &LockName, ticket: u64) -> bool {
        self.leaving.lock().contains(&(lock.clone(), ticket))
    }

    /// Notifies the callers of a lost session.
    pub(crate) fn lose(&self, session: Uuid) {
        let mut ears = self.ears.lock();
        let lost = ears.extract_if(.., |_, (owner, _)| *owner == session);
        lost.for_each(|(_, (_, ears))| tell(&ears, &Heard::Gone(Gone::SessionLost)));
    }

    /// A notice of another process about a session of this one was heard. Requests whose commits are on their way are
    /// looked at again when they are answered.
    pub(crate) fn count_heard(&self) {
        self.heard.fetch_add(1, Ordering::SeqCst);
    }

    /// How many notices were heard.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.load(Ordering::SeqCst)
    }

    /// Stops the service.
    pub(crate) fn stop(&self) {
        self.sessions.stop();
        self.lose_all();
    }

    /// Notifies all callers that their locks are lost.
    pub(crate) fn lose_all(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        let ears = std::mem::take(&mut *self.ears.lock());
        ears.into_values().for_each(|(_, ears)| tell(&ears, &Heard::Gone(Gone::SessionLost)));
    }
}

fn tell(ears: &[Ear], heard: &Heard) {
    ears.iter().for_each(|ear| drop(ear.send_replace(heard.clone())));
}

impl Service {
    /// Makes a caller listen to its request.
    pub(crate) fn hears(&self, lock: &LockName, ticket: u64, want: &Want, is_granted: bool) {
        // A caller that has given up does not listen.
        let ear = want.ear.as_ref().filter(|ear| !matches!(*ear.borrow(), Heard::Gone(_)));
        if let (Owner::Session(session), Some(ear)) = (&want.owner, ear) {
            let mut ears = self.ears.lock();
            // Read under the lock of `ears`: if it is not set yet, the code that sets it will find this request.
            if self.is_over.load(Ordering::SeqCst) {
                ear.send_replace(Heard::Gone(Gone::SessionLost));
                return;
            }
            ears.entry((lock.clone(), ticket)).or_insert_with(|| (*session, Vec::new())).1.push(ear.clone());
            if is_granted {
                ear.send_replace(Heard::Granted);
            }
        }
    }

    /// A caller no longer listens to its request, of which it may not know the ticket.
    pub(crate) fn unhear(&self, lock: &LockName, ticket: Option<u64>, ear: &Ear) {
        // If its request is not registered yet, it will not be.
        ear.send_replace(Heard::Gone(Gone::LetGo));
        let (first, last) = ticket.map_or((0, u64::MAX), |ticket| (ticket, ticket));
        let mut ears = self.ears.lock();
        let unheard = ears.extract_if((lock.clone(), first)..=(lock.clone(), last), |_, (_, ears)| {
            ears.retain(|other| !Arc::ptr_eq(other, ear));
            ears.is_empty()
        });
        unheard.for_each(drop);
    }

    /// Notifies callers in this process about their requests.
    pub(crate) fn tell_requests(&self, lock: &LockName, told: Vec<CallerNotice>) {
        if told.is_empty() {
            return;
        }
        let mut ears = self.ears.lock();
        for told in told {
            match told {
                CallerNotice::Granted(ticket) => {
                    if let Some((_, ears)) = ears.get(&(lock.clone(), ticket)) {
                        tell(ears, &Heard::Granted);
                    }
                }
                CallerNotice::Gone(ticket, gone) => {
                    if let Some((_, ears)) = ears.remove(&(lock.clone(), ticket)) {
                        tell(&ears, &Heard::Gone(gone));
                    }
                }
            }
        }
    }

    /// After a commit without an answer: finds out which requests it has granted, and notifies their callers.
    pub(crate) async fn listen_again(self: &Arc<Service>) -> Result<(), StoreError> {
        let ears: Vec<_> = self.ears.lock().keys().cloned().collect();
        if ears.is_empty() {
            return Ok(());
        }
        let view = self.node.store.view().await?;
        for (lock, ticket) in ears {
            let item = match view.get(&self.spaces.request(&lock, ticket)).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::error!(%lock, ticket, %error, "a request is damaged");
                    continue;
                }
                item => item?,
            };
            let told = match item.map(|item| LockRequest::decode(&item.value)) {
                Some(Ok(request)) if request.granted_us.is_some() => CallerNotice::Granted(ticket),
                Some(_) => continue,
                None => CallerNotice::Gone(ticket, Gone::SessionLost),
            };
            self.tell_requests(&lock, vec![told]);
        }
        Ok(())
    }

    /// Abandons a request whose caller has given up. Retries until the store takes it.
    pub(crate) fn abandon(self: &Arc<Service>, lock: LockName, owner: Owner, id: Vec<u8>, ear: Ear) {
        self.ask_at_last(lock, Ask::Abandon { owner, id, ear: Some(ear) });
    }

    /// Continues granting a lock where one commit could not hold all grants.
    pub(crate) fn grant_on(self: &Arc<Service>, lock: &LockName) {
        self.ask_at_last(lock.clone(), Ask::Grant);
    }

    /// Releases the lock of a dropped guard. Retries until the store takes it, and keeps the session until then. From
    /// now on, the same request made again is a new request.
    pub(crate) fn release_at_last(self: &Arc<Service>, lock: LockName, ticket: u64, session: Session) {
        let service = self.clone();
        self.leaving.lock().insert((lock.clone(), ticket));
        self.node.runtime.spawn(async move {
            let ask = || service.ask(&lock, Ask::Release { ticket, id: None }, None);
            service.node.at_last("a lock could not be released", LockError::kind, ask).await;
            service.leaving.lock().remove(&(lock, ticket));
            drop(session);
        });
    }

    /// Does an operation on a lock, in a task of its own. Retries until the store takes it.
    fn ask_at_last(self: &Arc<Service>, lock: LockName, ask: Ask) {
        let service = self.clone();
        self.node.runtime.spawn(async move {
            let attempt = || service.ask(&lock, ask.clone(), None);
            service.node.at_last("an operation on a lock failed", LockError::kind, attempt).await;
        });
    }
}
