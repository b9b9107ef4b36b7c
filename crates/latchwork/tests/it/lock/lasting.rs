//! Lasting sessions, which belong to no process, and standing requests, which keep their place while no call waits.

use std::path::Path;
use std::task::Poll;
use std::time::Duration;

use latchwork::lock::{
    FencingToken, LockError, LockKind, LockRefused, Locks, Session, StandingOutcome, StandingRequest,
};
use latchwork::node::NodeOptions;
use latchwork::store::{ErrorKind, Store, Uuid};
use latchwork::workflow::Engine;

const SHORT: Duration = Duration::from_millis(5);
const LONG: Duration = Duration::from_secs(20);

async fn engine() -> Engine {
    Engine::on(&Store::memory().await.unwrap()).start().await.unwrap()
}

async fn open(home: &Path) -> Engine {
    Engine::open(home).start().await.unwrap()
}

async fn begin(engine: &Engine, lease: Duration) -> (Uuid, Session) {
    let id = engine.store().env().uuid();
    (id, engine.locks().session().lease(lease).label("client").lasting(id).await.unwrap())
}

async fn found(engine: &Engine, id: Uuid) -> Session {
    engine.locks().lasting_session(id).await.unwrap().unwrap()
}

/// Requests mutex `m` under id `r`.
async fn stand(engine: &Engine, session: &Session, wait: Duration) -> Result<StandingOutcome, LockError> {
    let request = StandingRequest::new("r").wait(wait);
    engine.locks().stand(session, "m", LockKind::Mutex, request).await
}

#[track_caller]
fn granted(standing: StandingOutcome) -> FencingToken {
    match standing {
        StandingOutcome::Granted(token) => token,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn waits(standing: StandingOutcome) -> FencingToken {
    match standing {
        StandingOutcome::Waits(token) => token,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_lasting_session_holds_its_locks_over_restarts() {
    let home = tempfile::tempdir().unwrap();
    let engine = open(home.path()).await;
    let (id, session) = begin(&engine, Duration::from_secs(60)).await;
    let token = granted(stand(&engine, &session, SHORT).await.unwrap());
    let (other, waiting) = begin(&engine, Duration::from_secs(60)).await;
    let behind = waits(stand(&engine, &waiting, SHORT).await.unwrap());
    drop((session, waiting));
    engine.shutdown().await.unwrap();

    let engine = open(home.path()).await;
    let session = found(&engine, id).await;
    assert!(session.renew().await.unwrap());
    assert_eq!(session.state().await.unwrap().unwrap().label, "client");
    assert_eq!(granted(stand(&engine, &session, SHORT).await.unwrap()), token);
    assert!(engine.mutex("m").try_acquire().await.unwrap().is_none());
    let waiting = found(&engine, other).await;
    assert_eq!(waits(stand(&engine, &waiting, SHORT).await.unwrap()), behind);
    assert!(engine.locks().release(&session, "m", token.number()).await.unwrap());
    assert_eq!(granted(stand(&engine, &waiting, SHORT).await.unwrap()), behind);
    waiting.end().await.unwrap();
    assert!(engine.locks().lasting_session(other).await.unwrap().is_none());
    engine.mutex("m").acquire_within(LONG).await.unwrap().unwrap().release().await.unwrap();
    engine.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_lasting_session_that_is_not_renewed_ends_also_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let engine = open(home.path()).await;
    let (id, session) = begin(&engine, Duration::from_millis(300)).await;
    granted(stand(&engine, &session, SHORT).await.unwrap());
    engine.shutdown().await.unwrap();

    let engine = open(home.path()).await;
    let guard = engine.mutex("m").acquire_within(LONG).await.unwrap().unwrap();
    assert!(engine.locks().lasting_session(id).await.unwrap().is_none());
    guard.release().await.unwrap();
    engine.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_lasting_session_that_is_renewed_does_not_end() {
    let engine = engine().await;
    let (id, session) = begin(&engine, Duration::from_millis(200)).await;
    let token = granted(stand(&engine, &session, SHORT).await.unwrap());
    for _ in 0..10 {
        engine.store().env().sleep(Duration::from_millis(50)).await;
        assert!(found(&engine, id).await.renew().await.unwrap());
    }
    assert_eq!(granted(stand(&engine, &session, SHORT).await.unwrap()), token);
    // From now on it is not renewed.
    let late = engine.mutex("m").acquire_within(LONG).await.unwrap().unwrap();
    assert!(!session.renew().await.unwrap() && session.is_lost());
    assert!(session.state().await.unwrap().is_none());
    let lost = stand(&engine, &session, SHORT).await;
    assert!(matches!(lost, Err(LockError::SessionLost { .. })), "{lost:?}");
    assert!(!engine.locks().release(&session, "m", token.number()).await.unwrap());
    late.release().await.unwrap();
}

#[tokio::test]
async fn a_session_begun_again_under_its_id_is_the_same() {
    let engine = engine().await;
    let (id, session) = begin(&engine, Duration::from_secs(60)).await;
    let token = granted(stand(&engine, &session, SHORT).await.unwrap());
    let again = engine.locks().session().lease(SHORT * 2).label("other").lasting(id).await.unwrap();
    let state = again.state().await.unwrap().unwrap();
    assert_eq!((state.id, &*state.label, state.lease.length), (id, "client", Duration::from_secs(60)));
    assert_eq!(granted(stand(&engine, &again, SHORT).await.unwrap()), token);
    // A session of a process is not for others.
    let own = engine.locks().session().await.unwrap();
    assert!(engine.locks().lasting_session(own.id()).await.unwrap().is_none());
    let taken = engine.locks().session().lasting(own.id()).await;
    assert!(matches!(taken, Err(LockError::SessionLost { .. })));
    assert!(engine.locks().lasting_session(engine.store().env().uuid()).await.unwrap().is_none());
}

#[tokio::test]
async fn a_standing_request_keeps_its_place_while_no_call_waits() {
    let engine = engine().await;
    let mut sessions = Vec::new();
    for _ in 0..3 {
        sessions.push(begin(&engine, Duration::from_secs(60)).await.1);
    }
    let first = granted(stand(&engine, &sessions[0], SHORT).await.unwrap());
    let second = waits(stand(&engine, &sessions[1], SHORT).await.unwrap());
    let third = waits(stand(&engine, &sessions[2], SHORT).await.unwrap());
    assert!(first.number() < second.number() && second.number() < third.number());
    let patient = tokio::spawn({
        let (engine, session) = (engine.clone(), sessions[1].clone());
        async move { stand(&engine, &session, LONG).await }
    });
    tokio::task::yield_now().await;
    assert!(engine.locks().release(&sessions[0], "m", first.number()).await.unwrap());
    assert_eq!(granted(patient.await.unwrap().unwrap()), second);
    assert!(engine.locks().release(&sessions[1], "m", second.number()).await.unwrap());
    // No call waits for the third: it was granted all the same.
    assert_eq!(engine.locks().inspect("m").await.unwrap().holders[0].token, third.number());
    assert_eq!(granted(stand(&engine, &sessions[2], SHORT).await.unwrap()), third);
}

#[tokio::test]
async fn a_caller_that_gives_up_leaves_the_request_as_it_is() {
    let engine = engine().await;
    let (holder, session) = (begin(&engine, LONG).await.1, begin(&engine, LONG).await.1);
    let first = granted(stand(&engine, &holder, SHORT).await.unwrap());
    let mut call = Box::pin(stand(&engine, &session, LONG));
    while engine.locks().inspect("m").await.unwrap().waiting == 0 {
        assert!(std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_pending())).await);
        tokio::task::yield_now().await;
    }
    drop(call);
    engine.store().env().sleep(Duration::from_millis(30)).await;
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiting, 1);
    engine.locks().release(&holder, "m", first.number()).await.unwrap();
    let token = granted(stand(&engine, &session, SHORT).await.unwrap());
    // A call that is repeated and given up does not release what an earlier call was granted.
    let mut again = Box::pin(stand(&engine, &session, LONG));
    let _ = std::future::poll_fn(|context| Poll::Ready(again.as_mut().poll(context).is_pending())).await;
    drop(again);
    engine.store().env().sleep(Duration::from_millis(30)).await;
    assert_eq!(engine.locks().inspect("m").await.unwrap().holders[0].token, token.number());
}

#[tokio::test]
async fn a_request_without_a_wait_does_not_enter_the_queue() {
    let engine = engine().await;
    let guard = engine.semaphore("s", 3).acquire_many(2).await.unwrap();
    let session = begin(&engine, LONG).await.1;
    let kind = LockKind::Semaphore { permits: 3 };
    let tried = async |request| engine.locks().stand(&session, "s", kind, request).await;
    assert_eq!(tried(StandingRequest::new("a").permits(2)).await.unwrap(), StandingOutcome::Busy);
    assert_eq!(tried(StandingRequest::new("a").exclusive()).await.unwrap(), StandingOutcome::Busy);
    assert_eq!(engine.locks().inspect("s").await.unwrap().waiting, 0);
    let one = granted(tried(StandingRequest::new("a")).await.unwrap());
    let reused = tried(StandingRequest::new("a").permits(2)).await;
    assert!(matches!(reused, Err(LockError::Refused(LockRefused::Reused { .. }))), "{reused:?}");
    let behind = waits(tried(StandingRequest::new("b").wait(SHORT)).await.unwrap());
    // A request that is in the queue is found there.
    assert_eq!(waits(tried(StandingRequest::new("b")).await.unwrap()), behind);
    let long = tried(StandingRequest::new("x".repeat(257))).await.unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Invalid);
    let none = tried(StandingRequest::new("none").permits(0)).await.unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Invalid);
    assert!(engine.locks().release(&session, "s", one.number()).await.unwrap());
    guard.release().await.unwrap();
    let lock = engine.locks().stand(&session, "config", LockKind::ReadWrite, StandingRequest::new("w").exclusive());
    granted(lock.await.unwrap());
    assert!(engine.rw_lock("config").try_read().await.unwrap().is_none());
}

#[tokio::test]
async fn only_the_own_requests_of_a_session_are_released() {
    let engine = engine().await;
    let (holder, session) = (begin(&engine, LONG).await.1, begin(&engine, LONG).await.1);
    let first = granted(stand(&engine, &holder, SHORT).await.unwrap());
    assert!(!engine.locks().release(&session, "m", first.number()).await.unwrap());
    assert!(!engine.locks().release(&session, "m", 12345).await.unwrap());
    assert!(engine.locks().release(&session, "", 1).await.is_err());
    let behind = waits(stand(&engine, &session, SHORT).await.unwrap());
    let patient = tokio::spawn({
        let (engine, session) = (engine.clone(), session.clone());
        async move { stand(&engine, &session, LONG).await }
    });
    tokio::task::yield_now().await;
    assert!(engine.locks().release(&session, "m", behind.number()).await.unwrap());
    // The call that waits for the request ends: it does not enter the queue again.
    let ended = patient.await.unwrap();
    let is_told = matches!(&ended, Err(LockError::NoSuchToken { token, .. }) if *token == behind.number());
    assert!(is_told, "{ended:?}");
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiting, 0);
    assert_eq!(engine.locks().inspect("m").await.unwrap().holders[0].token, first.number());
}

#[tokio::test]
async fn a_waiting_call_is_told_why_its_request_has_ended() {
    let engine = engine().await;
    let (holder, session) = (begin(&engine, LONG).await.1, begin(&engine, LONG).await.1);
    granted(stand(&engine, &holder, SHORT).await.unwrap());
    #[allow(clippy::async_yields_async)] // The call goes on while the test does something else.
    let waiting = async |n: u64| {
        let (engine, session) = (engine.clone(), session.clone());
        let call = tokio::spawn(async move { stand(&engine, &session, LONG).await });
        for _ in 0..n {
            tokio::task::yield_now().await;
        }
        call
    };
    let call = waiting(50).await;
    let token = engine.locks().inspect("m").await.unwrap().waiters[0].token;
    engine.locks().force_release("m", token, "its client is gone").await.unwrap();
    let forced = call.await.unwrap();
    assert!(matches!(forced, Err(LockError::Refused(LockRefused::Forced { .. }))), "{forced:?}");
    let call = waiting(50).await;
    session.clone().end().await.unwrap();
    let lost = call.await.unwrap();
    assert!(matches!(lost, Err(LockError::SessionLost { .. })), "{lost:?}");
    let other = begin(&engine, LONG).await.1;
    let call = tokio::spawn({
        let engine = engine.clone();
        async move { stand(&engine, &other, LONG).await }
    });
    tokio::task::yield_now().await;
    engine.shutdown().await.unwrap();
    let stopped = call.await.unwrap();
    assert!(matches!(stopped, Err(LockError::Stopped)), "{stopped:?}");
}

#[tokio::test]
async fn a_lasting_session_is_used_without_an_engine() {
    let store = Store::memory().await.unwrap();
    let id = store.env().uuid();
    let locks = Locks::on(&store).await.unwrap();
    let session = locks.session().lasting(id).await.unwrap();
    let request = || StandingRequest::new("r");
    let token = granted(locks.stand(&session, "m", LockKind::Mutex, request()).await.unwrap());
    locks.shutdown().await.unwrap();
    drop((locks, session));
    let locks = Locks::on(&store).await.unwrap();
    let session = locks.lasting_session(id).await.unwrap().unwrap();
    assert_eq!(granted(locks.stand(&session, "m", LockKind::Mutex, request()).await.unwrap()), token);
    assert!(locks.release(&session, "m", token.number()).await.unwrap());
}

/// The client waits at one node, and the lock becomes free at another.
#[tokio::test]
async fn a_lasting_session_is_used_at_any_node() {
    let store = Store::memory().await.unwrap();
    let node = async |name| Engine::on(&store).node(NodeOptions::new().name(name)).start().await.unwrap();
    let (a, b) = (node("a").await, node("b").await);
    let (id, session) = begin(&b, LONG).await;
    let begun = store.env().monotonic();
    for _ in 0..5 {
        let holder = begin(&a, LONG).await.1;
        let first = granted(stand(&a, &holder, SHORT).await.unwrap());
        let patient = tokio::spawn({
            let (a, session) = (a.clone(), found(&a, id).await);
            async move { stand(&a, &session, LONG).await }
        });
        while b.locks().inspect("m").await.unwrap().waiting == 0 {
            tokio::task::yield_now().await;
        }
        assert!(b.locks().release(&holder, "m", first.number()).await.unwrap());
        let token = granted(patient.await.unwrap().unwrap());
        assert!(b.locks().release(&session, "m", token.number()).await.unwrap());
    }
    // Without a notice, the waiting call would only look when its time is over.
    assert!(store.env().monotonic() - begun < LONG);
    a.shutdown().await.unwrap();
    assert!(found(&b, id).await.renew().await.unwrap());
    b.shutdown().await.unwrap();
}
