//! Locks as commits make them, one after the other in the store's order: every commit is held against the promises.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::locks::contradictions;
use super::trace::What;
use crate::lock::name::{FORCED, HEADS, REQUESTS, SESSIONS, read_ticket};
use crate::lock::stored::{Forced, Head, Lease, Request};
use crate::lock::{LockName, Owner};
use crate::record::Record;
use crate::store::{Check, Key, Uuid, Write};

/// What is stored of locks, and what was wrong on the way there.
#[derive(Default)]
pub(crate) struct Audit {
    locks: BTreeMap<LockName, Audited>,
    /// When the record of a session was written last, and how long that holds.
    sessions: BTreeMap<Uuid, (Duration, Duration)>,
    pub(crate) wrong: Vec<String>,
}

#[derive(Default)]
struct Audited {
    head: Head,
    requests: BTreeMap<u64, Request>,
    /// The largest ticket there ever was.
    newest: u64,
}

impl Audit {
    /// A commit has landed that writes to locks: writes with the names of their spaces. Gives what it has done.
    pub(crate) fn landed(&mut self, writes: &[(String, Write)], checks: &[Check], now: Duration) -> Vec<What> {
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
                        self.wrong.push(format!("{lock}: {} was granted after {}", head.granted, known.granted));
                    }
                    *known = head;
                    touched.insert(lock);
                }
                (REQUESTS, Write::Put(key, value)) => granted.extend(self.request(key, Request::decode(value).ok())),
                (REQUESTS, Write::Delete(key)) => {
                    let Some((lock, token)) = read_ticket(key) else { continue };
                    let request = self.locks.entry(lock.clone()).or_default().requests.remove(&token);
                    if let Some(Request { owner, granted_us: Some(_), .. }) = request {
                        events.push(What::Released { lock, token, owner });
                    }
                }
                (FORCED, Write::Put(key, value)) => {
                    let Some(((lock, token), forced)) = read_ticket(key).zip(Forced::decode(value).ok()) else {
                        continue;
                    };
                    let Request { owner, granted_us, .. } = forced.request;
                    events.push(What::Forced { lock, token, owner, was_held: granted_us.is_some() });
                }
                _ => {}
            }
        }
        for lock in touched {
            let Some(audited) = self.locks.get(&lock) else { continue };
            let requests = audited.requests.iter().map(|(ticket, request)| (*ticket, request.clone())).collect();
            self.wrong.extend(contradictions(&lock, &audited.head, Some(requests)));
        }
        events.extend(granted);
        events
    }

    /// A request is made or granted.
    fn request(&mut self, key: &Key, request: Option<Request>) -> Option<What> {
        let ((lock, token), request) = read_ticket(key).zip(request)?;
        let audited = self.locks.entry(lock.clone()).or_default();
        let known = audited.requests.insert(token, request.clone());
        let mut complain = |what: &str| self.wrong.push(format!("{lock}: request {token} of {} {what}", request.owner));
        match &known {
            None if token <= audited.newest => complain("was made after one with a larger ticket"),
            Some(known) if known.granted_us.is_some() => complain("is granted for the second time"),
            Some(known) if (&known.owner, known.permits) != (&request.owner, request.permits) => {
                complain("is not what it was");
            }
            _ => {}
        }
        audited.newest = audited.newest.max(token);
        request.granted_us?;
        if let Owner::Session(id) = &request.owner
            && !self.sessions.contains_key(id)
        {
            complain("is granted, and the session is over");
        }
        Some(What::Granted { lock, token, permits: request.permits, owner: request.owner })
    }

    /// A session begins, is renewed or ends. Who ends that of somebody else has it checked that it was not renewed.
    fn session(&mut self, write: &Write, checks: &[Check], now: Duration) -> Option<What> {
        let id = Uuid::from_slice(write.key().bytes()).ok()?;
        if let Write::Put(_, value) = write {
            let lease = Duration::from_micros(Lease::decode(value).ok()?.lease_us);
            self.sessions.insert(id, (now, lease));
            return None;
        }
        let (renewed, lease) = self.sessions.remove(&id)?;
        checks.iter().find(|check| matches!(check, Check::AtRev(key, _) if key == write.key()))?;
        if now < renewed + lease {
            self.wrong
                .push(format!("session {id} was ended {:?} after its renewal, its lease is {lease:?}", now - renewed));
        }
        Some(What::Expired(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::LockKind;
    use crate::lock::name::Spaces;
    use crate::store::Store;

    #[tokio::test]
    async fn a_head_that_says_otherwise_than_the_requests_is_noticed() {
        let store = Store::memory().await.expect("a store in memory");
        let spaces = Spaces::declare(&store).await.expect("the spaces of locks");
        let head = Head { kind: Some(LockKind::Mutex), used: 1, ..Head::default() };
        let write = Write::Put(spaces.head(&LockName::global("m")), head.encode());
        let mut audit = Audit::default();
        audit.landed(&[(HEADS.to_string(), write)], &[], Duration::ZERO);
        assert_eq!(audit.wrong, ["m: 0 permits are held, 1 are noted, there are 1"]);
    }
}
