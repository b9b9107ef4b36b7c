//! Three clients and two permits of a named lock, in every order of calls, crashes and expired leases. The engine is
//! the real one and is led to each state from the start. Beside it stands a queue of a few rules, written separately;
//! the stored records and the answers to clients must match that queue.
//!
//! Clients are interchangeable: those in the queue are identified by their positions, and a new request comes from one
//! of the others. So there are few states, and the search ends by itself, without a bound on calls or time.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use latchwork::lock::{LockError, LockGuard, Owner, Requested, Result, Session};
use latchwork::store::{Commit, Order, Uuid};
use latchwork::testing::Side;
use parking_lot::Mutex;
use stateright::{Checker, HasDiscoveries, Model, Property};
use tokio::task::JoinHandle;

use super::turnstile::{Stage, tokens};

const PERMITS: u32 = 2;
const CLIENTS: usize = 3;
const LIMIT: Duration = Duration::from_secs(1000);
const LEASE: Duration = Duration::from_secs(1_000_000);

/// A request in the queue, by the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    /// Its position before the current action.
    was: usize,
    permits: u32,
    is_granted: bool,
    /// Whether it waits for a limited time only.
    is_limited: bool,
    life: Life,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Life {
    Alive,
    /// The client has crashed, and its lease has not expired yet.
    Crashed,
    /// Its session has expired, and its request is still stored.
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum How {
    Waits,
    Within,
    Tries,
}

/// What happens next. Requests in the queue are named by their positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Comes(u32, How),
    Releases(usize),
    GivesUp(usize),
    /// The client ends its session.
    Ends(usize),
    Crashes(usize),
    /// Another process deletes the expired session's record, and does not release its locks.
    IsOver(usize),
    /// The time of requests with a time limit is up.
    TimeIsUp,
    /// The leases of crashed clients expire.
    LeasesEnd,
    /// Two calls in one commit: another process outruns the first, which is tried again together with the second.
    Together(Call, Call),
}

/// A call that can be made together with another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Call {
    Comes(u32),
    Releases(usize),
    GivesUp(usize),
    TimeIsUp,
}

/// The queue, in the order of tickets. Holders stand before waiters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct RequestQueue(Vec<Place>);

impl RequestQueue {
    fn used(&self) -> u32 {
        self.0.iter().filter(|place| place.is_granted).map(|place| place.permits).sum()
    }

    fn comes(&mut self, permits: u32, how: How) {
        let is_free = self.0.iter().all(|place| place.is_granted) && self.used() + permits <= PERMITS;
        if is_free || how != How::Tries {
            let is_limited = !is_free && how == How::Within;
            self.0.push(Place { was: CLIENTS, permits, is_granted: is_free, is_limited, life: Life::Alive });
        }
    }

    /// A request leaves, and the free permits go to the waiters in their order.
    fn leaves(&mut self, place: usize) {
        self.0.remove(place);
        while let Some(first) = self.0.iter().position(|place| !place.is_granted) {
            if self.used() + self.0[first].permits > PERMITS {
                return;
            }
            if self.0[first].life == Life::Over {
                self.0.remove(first);
                continue;
            }
            (self.0[first].is_granted, self.0[first].is_limited) = (true, false);
        }
    }

    fn all_leave(&mut self, who: impl Fn(&Place) -> bool) {
        while let Some(place) = self.0.iter().position(&who) {
            self.leaves(place);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Comes(permits, how) => self.comes(permits, how),
            Action::Releases(place) | Action::GivesUp(place) | Action::Ends(place) => self.leaves(place),
            Action::Crashes(place) => self.0[place].life = Life::Crashed,
            Action::IsOver(place) => self.0[place].life = Life::Over,
            Action::TimeIsUp => self.all_leave(|place| place.is_limited),
            Action::LeasesEnd => {
                // All expired sessions are found before any of their requests is removed, or one after the other: live
                // clients see no difference.
                let crashed = self.0.iter_mut().filter(|place| place.life == Life::Crashed);
                crashed.for_each(|place| place.life = Life::Over);
                self.all_leave(|place| place.life == Life::Over);
            }
            Action::Together(first, second) => [first, second].into_iter().for_each(|call| match call {
                Call::Comes(permits) => self.comes(permits, How::Waits),
                Call::Releases(place) | Call::GivesUp(place) => self.all_leave(|found| found.was == place),
                Call::TimeIsUp => self.all_leave(|place| place.is_limited),
            }),
        }
        self.0.iter_mut().enumerate().for_each(|(number, place)| place.was = number);
    }
}

/// A client of the real engine.
#[derive(Default)]
struct Client {
    session: Option<Session>,
    held: Option<LockGuard>,
    waits: Option<JoinHandle<Result<Option<LockGuard>>>>,
}

/// The real engine, and the clients in the queue.
struct Cast {
    stage: Stage,
    queue: RequestQueue,
    clients: Vec<Client>,
    /// The client of each session.
    sessions: BTreeMap<Uuid, usize>,
    /// The clients in the queue, by position.
    places: Vec<usize>,
    /// The sessions and guards of crashed clients: they are not dropped before the end of the test.
    left: Vec<(usize, Client)>,
    granted: BTreeSet<u64>,
}

impl Cast {
    async fn new() -> Cast {
        Cast {
            stage: Stage::new(|builder| builder).await,
            queue: RequestQueue::default(),
            clients: (0..CLIENTS).map(|_| Client::default()).collect(),
            sessions: BTreeMap::new(),
            places: Vec::new(),
            left: Vec::new(),
            granted: BTreeSet::new(),
        }
    }

    /// A client that is not in the queue makes a request.
    async fn comes(&mut self, permits: u32, how: How) {
        let client = (0..CLIENTS).find(|client| !self.places.contains(client)).expect("a client is not in the queue");
        let session = match &self.clients[client].session {
            Some(session) => session.clone(),
            None => self.stage.engine.locks().session().lease(LEASE).renewed_by_hand().await.unwrap(),
        };
        self.sessions.insert(session.id(), client);
        let semaphore = self.stage.engine.semaphore("s", PERMITS).by(&session);
        let taken = async move {
            match how {
                How::Waits => semaphore.acquire_many(permits).await.map(Some),
                How::Within => semaphore.acquire_many_within(permits, LIMIT).await,
                How::Tries => semaphore.try_acquire_many(permits).await,
            }
        };
        let waits = Some(self.stage.begins(taken).await);
        self.clients[client] = Client { session: Some(session), held: None, waits };
        self.places.push(client);
    }

    /// Begins a call. Its result is checked later.
    async fn calls(&mut self, call: Call, places: &[usize]) -> Option<JoinHandle<Result<bool>>> {
        match call {
            Call::Comes(permits) => self.comes(permits, How::Waits).await,
            Call::Releases(place) => {
                let held = self.clients[places[place]].held.take().expect("it holds the lock");
                return Some(self.stage.begins(held.release()).await);
            }
            Call::GivesUp(place) => {
                self.clients[places[place]].waits.take().expect("it waits").abort();
                self.stage.pass(Duration::from_secs(1)).await;
            }
            Call::TimeIsUp => self.stage.pass(LIMIT).await,
        }
        None
    }

    async fn releases(&mut self, call: Option<JoinHandle<Result<bool>>>) {
        if let Some(released) = call {
            assert!(self.stage.done(released).await.unwrap(), "it was held");
        }
    }

    async fn act(&mut self, action: Action) {
        let places = self.places.clone();
        match action {
            Action::Comes(permits, how) => self.comes(permits, how).await,
            Action::Releases(place) => {
                let released = self.calls(Call::Releases(place), &places).await;
                self.releases(released).await;
            }
            Action::GivesUp(place) => drop(self.calls(Call::GivesUp(place), &places).await),
            Action::Ends(place) => {
                let client = std::mem::take(&mut self.clients[places[place]]);
                let session = client.session.expect("a client in the queue has a session");
                let ended = self.stage.begins(session.end()).await;
                self.stage.done(ended).await.unwrap();
                assert!(client.held.is_none_or(|held| held.is_lost()));
                if let Some(waits) = client.waits {
                    assert!(matches!(self.stage.done(waits).await, Err(LockError::SessionLost { .. })));
                }
            }
            Action::Crashes(place) => {
                let client = places[place];
                self.left.push((client, std::mem::take(&mut self.clients[client])));
            }
            Action::IsOver(place) => {
                let left = self.left.iter().rev().find(|(client, _)| *client == places[place]);
                let session = left.and_then(|(_, left)| left.session.clone()).expect("the client had a session");
                let record = self.stage.space("lock.sessions").await.key(session.id().as_bytes());
                let ended = self.stage.engine.store().commit(Commit::new().delete(&record)).await.unwrap();
                assert!(ended.is_applied());
            }
            Action::TimeIsUp => self.stage.pass(LIMIT).await,
            Action::LeasesEnd => {
                self.renew().await;
                self.stage.pass(LEASE / 2).await;
                self.renew().await;
                self.stage.pass(LEASE / 2).await;
                self.renew().await;
            }
            Action::Together(first, second) => self.together(first, second, &places).await,
        }
    }

    /// The second call comes while the commit of the first is on its way. That commit is then refused.
    async fn together(&mut self, first: Call, second: Call, places: &[usize]) {
        let store = self.stage.engine.store().clone();
        let (before, sessions) = (store.generation().await.unwrap(), self.sessions.len());
        self.stage.hold(Side::Before);
        let first = self.calls(first, places).await;
        self.touch().await;
        let second = self.calls(second, places).await;
        self.stage.open();
        self.stage.turns().await;
        self.releases(first).await;
        self.releases(second).await;
        // One commit of the other process and one for both calls; one more for each new session.
        let commits = 2 + (self.sessions.len() - sessions) as u64;
        assert_eq!(store.generation().await.unwrap().0 - before.0, commits, "the calls do not share a commit");
    }

    /// Renews the sessions of live clients.
    async fn renew(&mut self) {
        for session in self.clients.iter().filter_map(|client| client.session.as_ref()) {
            assert!(session.renew().await.unwrap(), "the session of a live client has expired");
        }
    }

    /// Another process writes the head of the lock without changing it.
    async fn touch(&self) {
        let (heads, store) = (self.stage.space("lock.heads").await, self.stage.engine.store());
        let found = store.view().await.unwrap().scan(&heads.all(), Order::Ascending, 1).await.unwrap();
        let (key, item) = found.into_iter().next().expect("the lock is there");
        assert!(store.commit(Commit::new().put(&key, item.value)).await.unwrap().is_applied());
    }

    /// Clients receive the results of their calls.
    async fn hear(&mut self) {
        for client in &mut self.clients {
            let Some(waits) = client.waits.take_if(|waits| waits.is_finished()) else { continue };
            client.held = waits.await.unwrap().unwrap();
        }
    }

    /// Compares the stored requests, and the answers to clients, with the queue.
    async fn check(&mut self, before: &RequestQueue) {
        self.hear().await;
        let state = match self.stage.engine.locks().inspect("s").await {
            Err(LockError::NotFound { .. }) => return assert!(self.queue.0.is_empty(), "the lock has no record"),
            state => state.unwrap(),
        };
        assert!(state.used <= PERMITS, "more permits are held than there are");
        let (held, waiting) = tokens(&state);
        let all: Vec<&Requested> = state.holders.iter().chain(&state.waiters).collect();
        let found: Vec<(u32, bool)> = all.iter().map(|found| (found.permits, found.granted.is_some())).collect();
        let wanted: Vec<(u32, bool)> = self.queue.0.iter().map(|place| (place.permits, place.is_granted)).collect();
        assert_eq!(found, wanted, "the queue is wrong; before it was {before:?}");
        let numbers: Vec<u64> = held.iter().chain(&waiting).copied().collect();
        assert!(numbers.is_sorted_by(|a, b| a < b), "tokens do not rise: {numbers:?}");
        let last = self.granted.last().copied().unwrap_or(0);
        let is_new = |token: &&u64| !self.granted.contains(*token);
        assert!(held.iter().filter(is_new).all(|token| *token > last), "{held:?} were granted after {last}");
        self.granted.extend(held);
        self.places = all.iter().map(|found| self.client_of(&found.owner)).collect();
        for (place, found) in self.queue.0.iter().zip(&all) {
            let client = &self.clients[self.client_of(&found.owner)];
            let told = client.held.as_ref().map(|held| (held.token().number(), held.is_lost()));
            let wanted = (place.life == Life::Alive && place.is_granted).then_some((found.token, false));
            assert_eq!(told, wanted, "a client was given a wrong answer");
            assert_eq!(client.waits.is_some(), place.life == Life::Alive && !place.is_granted, "whether it waits");
        }
        for away in (0..CLIENTS).filter(|client| !self.places.contains(client)) {
            let client = &mut self.clients[away];
            assert!(client.held.is_none() && client.waits.is_none(), "a client outside of the queue holds or waits");
        }
    }

    fn client_of(&self, owner: &Owner) -> usize {
        match owner {
            Owner::Session(session) => self.sessions[session],
            owner => panic!("{owner} is no client"),
        }
    }
}

/// A state of the queue, and the actions that lead there.
#[derive(Debug, Clone)]
struct State {
    queue: RequestQueue,
    /// Whether the lock was ever used.
    is_there: bool,
    way: Vec<Action>,
    fault: Option<String>,
}

impl PartialEq for State {
    fn eq(&self, other: &State) -> bool {
        (&self.queue, self.is_there, &self.fault) == (&other.queue, other.is_there, &other.fault)
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (&self.queue, self.is_there, &self.fault).hash(hasher);
    }
}

#[derive(Default)]
struct QueueModel {
    /// How often each scene has happened.
    played: Mutex<BTreeMap<&'static str, u32>>,
}

impl QueueModel {
    /// The calls that can be made at the same time as another call.
    fn calls(queue: &RequestQueue) -> Vec<Call> {
        let call = |(number, place): (usize, &Place)| match place {
            Place { life: Life::Alive, is_granted: true, .. } => Some(Call::Releases(number)),
            Place { life: Life::Alive, is_limited: false, .. } => Some(Call::GivesUp(number)),
            _ => None,
        };
        let mut calls: Vec<Call> = queue.0.iter().enumerate().filter_map(call).collect();
        if queue.0.len() < CLIENTS {
            calls.extend((1..=PERMITS).map(Call::Comes));
        }
        calls
    }

    fn together(queue: &RequestQueue) -> Vec<Action> {
        let calls = QueueModel::calls(queue);
        let is_limited = queue.0.iter().any(|place| place.is_limited);
        let seconds: Vec<Call> = calls.iter().copied().chain(is_limited.then_some(Call::TimeIsUp)).collect();
        let pairs = calls.iter().flat_map(|first| seconds.iter().map(move |second| (*first, *second)));
        let pairs = pairs.filter(|pair| match pair {
            (Call::Comes(_), Call::Comes(_)) => queue.0.len() + 2 <= CLIENTS,
            (first, second) => first != second,
        });
        pairs.map(|(first, second)| Action::Together(first, second)).collect()
    }

    fn play(&self, scene: &'static str, is_played: bool) {
        *self.played.lock().entry(scene).or_default() += u32::from(is_played);
    }

    /// Notes the scenes that this step shows.
    fn see(&self, before: &RequestQueue, action: Action, after: &RequestQueue) {
        let granted = |queue: &RequestQueue| queue.0.iter().filter(|place| place.is_granted).count();
        let over =
            |queue: &RequestQueue| queue.0.iter().filter(|place| place.life == Life::Over && !place.is_granted).count();
        let is_leaving = matches!(action, Action::Releases(_) | Action::Ends(_));
        self.play("two are granted it at once", is_leaving && granted(after) == 2 && granted(before) == 1);
        self.play("the dead are passed over", is_leaving && over(after) < over(before));
        self.play("who is out of time makes room", action == Action::TimeIsUp && granted(after) > granted(before));
        self.play("a lease that ends makes room", action == Action::LeasesEnd && !after.0.is_empty());
        self.play("two calls share a commit", matches!(action, Action::Together(..)));
        let is_race = matches!(action, Action::Together(Call::Releases(_) | Call::GivesUp(_), Call::TimeIsUp));
        let limited = |queue: &RequestQueue| queue.0.iter().filter(|place| place.is_limited).count();
        let stays = after.0.len() + 1 + limited(before) > before.0.len();
        self.play("who is out of time is granted it just then", is_race && stays && limited(before) > 0);
    }
}

async fn led(way: &[Action]) {
    let mut cast = Cast::new().await;
    for action in way {
        let before = cast.queue.clone();
        cast.act(*action).await;
        cast.queue.act(*action);
        cast.check(&before).await;
    }
}

impl Model for QueueModel {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State { queue: RequestQueue::default(), is_there: false, way: Vec::new(), fault: None }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let queue = &state.queue;
        let is_busy = queue.0.iter().any(|place| !place.is_granted) || queue.used() == PERMITS;
        if queue.0.len() < CLIENTS {
            for permits in 1..=PERMITS {
                let how = [How::Waits, How::Tries, How::Within];
                let how = how.into_iter().take(if is_busy { 3 } else { 2 });
                actions.extend(how.map(|how| Action::Comes(permits, how)));
            }
        }
        for (number, place) in queue.0.iter().enumerate() {
            match place {
                Place { life: Life::Crashed, .. } => actions.push(Action::IsOver(number)),
                Place { life: Life::Over, .. } => {}
                Place { is_granted: true, .. } => actions.extend([Action::Releases(number), Action::Ends(number)]),
                _ => actions.extend([Action::GivesUp(number), Action::Ends(number)]),
            }
            if place.life == Life::Alive && !place.is_limited {
                actions.push(Action::Crashes(number));
            }
        }
        let is_limited = queue.0.iter().any(|place| place.is_limited);
        let is_alive = queue.0.iter().all(|place| place.life == Life::Alive);
        match (is_limited, is_alive) {
            (true, _) => actions.push(Action::TimeIsUp),
            (false, false) => actions.push(Action::LeasesEnd),
            (false, true) => {}
        }
        if state.is_there {
            actions.extend(QueueModel::together(queue));
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        if state.fault.is_some() {
            return None;
        }
        let mut next = state.clone();
        next.queue.act(action);
        next.is_there |= !next.queue.0.is_empty();
        next.way.push(action);
        self.see(&state.queue, action, &next.queue);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let led = std::panic::catch_unwind(AssertUnwindSafe(|| runtime.block_on(led(&next.way))));
        next.fault = led.err().map(|_| "the engine is not where the queue is".into());
        Some(next)
    }

    fn properties(&self) -> Vec<Property<QueueModel>> {
        vec![
            Property::always("the engine is where the queue is", |_, state: &State| state.fault.is_none()),
            Property::always("the first waiter that fits is granted the lock", |_, state: &State| {
                let first = state.queue.0.iter().find(|place| !place.is_granted);
                first.is_none_or(|first| state.queue.used() + first.permits > PERMITS)
            }),
            Property::always("no request is overtaken", |_, state: &State| {
                state.queue.0.is_sorted_by_key(|place| !place.is_granted) && state.queue.used() <= PERMITS
            }),
        ]
    }
}

#[test]
fn in_every_order_the_queue_follows_the_rules() {
    let checker =
        QueueModel::default().checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    checker.assert_properties();
    println!("{} states, {:?}", checker.unique_state_count(), checker.model().played.lock());
    assert!(checker.unique_state_count() >= 100, "{} states", checker.unique_state_count());
    assert!(checker.model().played.lock().values().all(|times| *times > 0), "{:?}", checker.model().played.lock());
}
