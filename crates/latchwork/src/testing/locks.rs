//! Checks that the records of locks agree: heads, requests and their owners. Heads and owners follow from the requests,
//! so they can be computed again and compared.

use std::collections::{BTreeMap, BTreeSet};

use crate::lock::LockName;
use crate::lock::Owner;
use crate::lock::name::{HEADS, LockSpaces, OWNED, REQUESTS, UNFINISHED, read_ticket};
use crate::lock::stored::{Head, LockRequest, Ticket};
use crate::record::Record;
use crate::store::{Order, Space, Store, StoreError, View};
use crate::workflow::engine::EXECUTIONS;
use crate::workflow::stored::record::Execution;

/// All places where records of locks contradict each other or break a promise.
pub(crate) async fn differences(store: &Store) -> Result<Vec<String>, StoreError> {
    let spaces = store.spaces().await?;
    let space = |name: &str| spaces.iter().find(|space| space.name() == name).cloned();
    let (Some(heads), Some(requests), Some(owned), Some(unfinished), Some(executions)) =
        (space(HEADS), space(REQUESTS), space(OWNED), space(UNFINISHED), space(EXECUTIONS))
    else {
        return Ok(Vec::new());
    };
    let view = store.view().await?;
    let mut wrong = Vec::new();
    let mut by_lock: BTreeMap<LockName, Vec<(u64, LockRequest)>> = BTreeMap::new();
    for (key, item) in view.scan(&requests.all(), Order::Ascending, usize::MAX).await? {
        match (read_ticket(&key), LockRequest::decode(&item.value)) {
            (Some((lock, ticket)), Ok(request)) => by_lock.entry(lock).or_default().push((ticket, request)),
            _ => wrong.push(format!("request {key} cannot be read")),
        }
    }
    let mut count = 0;
    for (lock, requests) in &by_lock {
        for (ticket, request) in requests {
            for name in request.names() {
                count += 1;
                let key = LockSpaces::owned_key(&owned, &request.owner, lock, name);
                let found = view.get(&key).await?.map(|item| Ticket::decode(&item.value));
                if found != Some(Ok(Ticket(*ticket))) {
                    wrong.push(format!("{} has no record of its request {ticket} for {lock}", request.owner));
                }
            }
            wrong.extend(dead(&view, &executions, lock, *ticket, request).await?);
        }
    }
    let owns = view.scan(&owned.all(), Order::Ascending, usize::MAX).await?.len();
    if owns != count {
        wrong.push(format!("owners have records of {owns} requests, but {count} requests exist"));
    }
    let notes = view.scan(&unfinished.all(), Order::Ascending, usize::MAX).await?;
    let noted: BTreeSet<LockName> = notes.iter().filter_map(|(key, _)| LockSpaces::read_unfinished(key)).collect();
    for (key, item) in view.scan(&heads.all(), Order::Ascending, usize::MAX).await? {
        match (LockName::read_head(&key), Head::decode(&item.value)) {
            (Some(lock), Ok(head)) => {
                let requests = by_lock.remove(&lock).unwrap_or_default();
                wrong.extend(contradictions(&lock, &head, &requests));
                wrong.extend(grantable(&lock, &head, &requests).filter(|_| !noted.contains(&lock)));
            }
            _ => wrong.push(format!("lock {key} cannot be read")),
        }
    }
    wrong.extend(by_lock.into_keys().map(|lock| format!("{lock} has requests, but no head")));
    Ok(wrong)
}

/// A request whose owner has ended. An execution that has ended must hold nothing. A session that has ended may still
/// hold locks: it is ended first, and its locks are released after that.
async fn dead(
    view: &View,
    executions: &Space,
    lock: &LockName,
    ticket: u64,
    request: &LockRequest,
) -> Result<Option<String>, StoreError> {
    let Owner::Execution(id) = &request.owner else { return Ok(None) };
    let item = view.get(&executions.key(id.as_bytes())).await?;
    let execution = item.and_then(|item| Execution::decode(&item.value).ok());
    let is_alive = execution.is_some_and(|execution| !execution.status.is_terminal() && execution.has_locks);
    Ok((!is_alive).then(|| format!("{} has ended, but still has request {ticket} for {lock}", request.owner)))
}

/// Returns where the head of a lock and its requests contradict each other.
pub(super) fn contradictions(lock: &LockName, head: &Head, requests: &[(u64, LockRequest)]) -> Vec<String> {
    let mut wrong = Vec::new();
    let (used, capacity) = permits(head, requests);
    if used != u64::from(head.used) || used > capacity {
        wrong.push(format!("{lock}: {used} permits are held, the head counts {} of {capacity}", head.used));
    }
    let waiting = requests.iter().filter(|(_, request)| request.granted_us.is_none()).count();
    if waiting as u64 != head.waiting {
        wrong.push(format!("{lock}: {waiting} wait, the head counts {}", head.waiting));
    }
    let is_inverted =
        requests.iter().any(|(ticket, request)| request.granted_us.is_some() != (*ticket <= head.granted));
    if is_inverted {
        wrong.push(format!("{lock}: a request was overtaken, {requests:?} at {}", head.granted));
    }
    wrong
}

/// Returns a complaint if the first waiting request fits and is not granted. A lock with the note of an unfinished
/// release may be left in that state: the node that reads the note grants the request.
pub(super) fn grantable(lock: &LockName, head: &Head, requests: &[(u64, LockRequest)]) -> Option<String> {
    let (used, capacity) = permits(head, requests);
    let (ticket, request) = requests.iter().find(|(_, request)| request.granted_us.is_none())?;
    let fits = used + u64::from(request.permits) <= capacity;
    fits.then(|| format!("{lock}: {} could be granted {ticket}, but is not", request.owner))
}

/// The number of permits that are granted, and the number that the lock has.
fn permits(head: &Head, requests: &[(u64, LockRequest)]) -> (u64, u64) {
    let granted = requests.iter().filter(|(_, request)| request.granted_us.is_some());
    let used = granted.map(|(_, request)| u64::from(request.permits)).sum();
    (used, head.kind.map_or(0, |kind| kind.capacity()).into())
}
