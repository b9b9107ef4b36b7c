//! Checks the locks as commits change them, in the store's order: every commit must keep the promises of locks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::locks::{contradictions, grantable};
use super::trace::TraceKind;
use crate::lock::name::{FORCED, HEADS, LockSpaces, REQUESTS, UNFINISHED, read_ticket};
use crate::lock::stored::{Forced, Head, LockRequest};
use crate::lock::{LockName, Owner};
use crate::node::session::{Lease, SESSIONS};
use crate::record::Record;
use crate::store::{Check, Key, Uuid, Write};

/// What the store holds about locks, and the violations found so far.
#[derive(Default)]
pub(crate) struct Audit {
    locks: BTreeMap<LockName, Audited>,
    /// When the record of a session was written last, and the length of its lease.
    sessions: BTreeMap<Uuid, (Duration, Duration)>,
    pub(crate) wrong: Vec<String>,
}

#[derive(Default)]
struct Audited {
    head: Head,
    requests: BTreeMap<u64, LockRequest>,
    /// The largest ticket so far.
    newest: u64,
    /// True if a node has noted that it left requests that could be granted.
    is_noted: bool,
}

impl Audited {
    fn wrong(&self, lock: &LockName) -> Vec<String> {
        let requests: Vec<_> = self.requests.iter().map(|(ticket, request)| (*ticket, request.clone())).collect();
        let mut wrong = contradictions(lock, &self.head, &requests);
        wrong.extend(grantable(lock, &self.head, &requests).filter(|_| !self.is_noted));
        wrong
    }
}

impl Audit {
    /// Takes in a commit that landed, with the names of the spaces it writes to. Returns the events of locks in it.
    pub(crate) fn landed(&mut self, writes: &[(String, Write)], checks: &[Check], now: Duration) -> Vec<TraceKind> {
        let (mut events, mut touched) = (Vec::new(), BTreeSet::new());
        for (_, write) in writes.iter().filter(|(space, _)| space == SESSIONS) {
            events.extend(self.session(write, checks, now));
        }
        let mut granted = Vec::new();
        for (space, write) in writes {
            match (&**space, write) {
                (HEADS, Write::Put(key, value)) => {
                    let Some((lock, head)) = LockName::read_head(key).zip(Head::decode(value).ok()) else {
                        self.wrong.push(format!("the head of a lock cannot be read: {key}"));
                        continue;
                    };
                    let known = &mut self.locks.entry(lock.clone()).or_default().head;
                    if head.granted < known.granted {
                        self.wrong.push(format!("{lock}: {} is granted after {}", head.granted, known.granted));
                    }
                    *known = head;
                    touched.insert(lock);
                }
                (REQUESTS, Write::Put(key, value)) => {
                    granted.extend(self.request(key, LockRequest::decode(value).ok()))
                }
                (REQUESTS, Write::Delete(key)) => {
                    let Some((lock, token)) = read_ticket(key) else { continue };
                    let request = self.locks.entry(lock.clone()).or_default().requests.remove(&token);
                    if let Some(LockRequest { owner, granted_us: Some(_), .. }) = request {
                        events.push(TraceKind::Released { lock, token, owner });
                    }
                }
                (FORCED, Write::Put(key, value)) => {
                    let Some(((lock, token), forced)) = read_ticket(key).zip(Forced::decode(value).ok()) else {
                        continue;
                    };
                    let LockRequest { owner, granted_us, .. } = forced.request;
                    events.push(TraceKind::Forced { lock, token, owner, was_held: granted_us.is_some() });
                }
                (UNFINISHED, write) => {
                    // The other kind of note is about an execution.
                    let Some(lock) = LockSpaces::read_unfinished(write.key()) else { continue };
                    self.locks.entry(lock.clone()).or_default().is_noted = matches!(write, Write::Put(..));
                    touched.insert(lock);
                }
                _ => {}
            }
        }
        let wrong = touched.iter().filter_map(|lock| Some(self.locks.get(lock)?.wrong(lock)));
        self.wrong.extend(wrong.flatten());
        events.extend(granted);
        events
    }

    /// Checks the end of a simulation: the newest engine runs and has nothing left to do. It must have granted the
    /// requests that other nodes left, and deleted their notes.
    pub(crate) fn settled(&mut self) {
        let noted = self.locks.iter().filter(|(_, audited)| audited.is_noted);
        self.wrong.extend(noted.map(|(lock, _)| format!("{lock}: the note of an unfinished release is left")));
    }

    /// Takes in a request that is made or granted.
    fn request(&mut self, key: &Key, request: Option<LockRequest>) -> Option<TraceKind> {
        let ((lock, token), request) = read_ticket(key).zip(request)?;
        let audited = self.locks.entry(lock.clone()).or_default();
        let known = audited.requests.insert(token, request.clone());
        let mut complain = |what: &str| self.wrong.push(format!("{lock}: request {token} of {} {what}", request.owner));
        match &known {
            None if token <= audited.newest => complain("was made after a request with a larger ticket"),
            Some(known) if known.granted_us.is_some() => complain("is granted a second time"),
            Some(known) if (&known.owner, known.permits) != (&request.owner, request.permits) => {
                complain("has changed its owner or permits");
            }
            _ => {}
        }
        audited.newest = audited.newest.max(token);
        request.granted_us?;
        if let Owner::Session(id) = &request.owner
            && !self.sessions.contains_key(id)
        {
            complain("is granted, but its session has ended");
        }
        Some(TraceKind::Granted { lock, token, permits: request.permits, owner: request.owner })
    }

    /// Takes in the begin, renewal or end of a session. A commit that ends the session of another node checks that the
    /// session was not renewed.
    fn session(&mut self, write: &Write, checks: &[Check], now: Duration) -> Option<TraceKind> {
        let id = Uuid::from_slice(write.key().bytes()).ok()?;
        if let Write::Put(_, value) = write {
            let lease = Duration::from_micros(Lease::decode(value).ok()?.lease_us);
            self.sessions.insert(id, (now, lease));
            return None;
        }
        let (renewed, lease) = self.sessions.remove(&id)?;
        checks.iter().find(|check| matches!(check, Check::AtRev(key, _) if key == write.key()))?;
        if now < renewed + lease {
            self.wrong.push(format!(
                "session {id} was ended {:?} after its renewal, but its lease is {lease:?}",
                now - renewed
            ));
        }
        Some(TraceKind::Expired(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::LockKind;
    use crate::store::Store;

    async fn spaces() -> LockSpaces {
        let store = Store::memory().await.expect("a store in memory");
        LockSpaces::declare(&store).await.expect("the spaces of locks")
    }

    #[tokio::test]
    async fn a_head_that_says_otherwise_than_the_requests_is_noticed() {
        let head = Head { kind: Some(LockKind::Mutex), used: 1, ..Head::default() };
        let write = Write::Put(spaces().await.head(&LockName::global("m")), head.encode());
        let mut audit = Audit::default();
        audit.landed(&[(HEADS.to_string(), write)], &[], Duration::ZERO);
        assert_eq!(audit.wrong, ["m: 0 permits are held, the head counts 1 of 1"]);
    }

    /// Audits commits to a mutex that is free and that execution `e` waits for. The first commit creates that state.
    /// The steps after it put the note of an unfinished release (`true`) or delete it.
    async fn after_release(is_noted: bool, steps: &[bool]) -> Audit {
        let (spaces, lock, ticket) = (spaces().await, LockName::global("m"), 256);
        let head = Head { kind: Some(LockKind::Mutex), waiting: 1, ..Head::default() };
        let owner = Owner::Execution("e".into());
        let request = LockRequest { owner, permits: 1, id: vec![1], again: Vec::new(), since_us: 0, granted_us: None };
        let note = |is_put: bool| {
            let key = spaces.unfinished(&lock);
            (UNFINISHED.to_string(), if is_put { Write::Put(key, Vec::new().into()) } else { Write::Delete(key) })
        };
        let mut first = vec![
            (HEADS.to_string(), Write::Put(spaces.head(&lock), head.encode())),
            (REQUESTS.to_string(), Write::Put(spaces.request(&lock, ticket), request.encode())),
        ];
        first.extend(is_noted.then(|| note(true)));
        let mut audit = Audit::default();
        audit.landed(&first, &[], Duration::ZERO);
        for step in steps {
            audit.landed(&[note(*step)], &[], Duration::ZERO);
        }
        audit
    }

    const NOT_GRANTED: &str = "m: execution e could be granted 256, but is not";

    #[tokio::test]
    async fn a_request_that_could_be_granted_and_is_not_is_noticed() {
        assert_eq!(after_release(false, &[]).await.wrong, [NOT_GRANTED]);
    }

    #[tokio::test]
    async fn a_request_that_could_be_granted_waits_only_as_long_as_the_lock_is_noted() {
        assert!(after_release(true, &[]).await.wrong.is_empty());
        assert!(after_release(true, &[true]).await.wrong.is_empty());
        assert_eq!(after_release(true, &[false]).await.wrong, [NOT_GRANTED]);
    }

    #[tokio::test]
    async fn a_note_that_is_left_at_the_end_is_noticed() {
        let mut audit = after_release(true, &[]).await;
        audit.settled();
        assert_eq!(audit.wrong, ["m: the note of an unfinished release is left"]);
    }
}
