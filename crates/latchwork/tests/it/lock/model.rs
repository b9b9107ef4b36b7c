//! Four clients and two permits, in every order of calls, crashes and ticks of the clock. The record is the real one;
//! the properties are judged from outside, by what each client was answered and when.
//!
//! Nothing depends on the current time, only on the rest of each lease; nor on the values of tokens, only on their
//! order. So the time stays the same while leases get shorter, and tokens are renumbered after each step. That leaves
//! so few states that the search ends by itself, without a bound on calls or time.

use std::time::Duration;

use latchwork::lock::{LockRecord, initial_lock_record};
use latchwork::store::Timestamp;
use stateright::{Checker, HasDiscoveries, Model, Property};

const PERMITS: u32 = 2;
const CLIENTS: usize = 4;
const NAMES: [&str; CLIENTS] = ["a", "b", "c", "d"];
/// In ticks, which are microseconds.
const LEASE: u64 = 2;
const NOW: u64 = 100;

struct Locks {
    /// Whether the clock may be set back. If so, what clients believe is not checked; their tokens are.
    may_go_back: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    record: LockRecord,
    clients: [Client; CLIENTS],
    /// The clients that were told to wait, in the order in which they were first told. A client whose lease has expired
    /// has no position.
    queue: Vec<usize>,
    /// The largest token that a client was given.
    told: u64,
    /// The first rule that was broken.
    fault: Option<&'static str>,
    /// A scene that has happened, to check that the search reaches it.
    seen: Option<Seen>,
}

/// The last answer to the client of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Client {
    standing: StandingOutcome,
    /// The client has crashed since then, and has forgotten the answer.
    has_forgotten: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
enum StandingOutcome {
    #[default]
    Away,
    Waits {
        until: u64,
    },
    Holds {
        token: u64,
        until: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Seen {
    /// The permit of a crashed client went to another client.
    Takeover,
    /// A waiter was granted a permit though a client before it had crashed.
    PastTheDead,
    /// The second in the queue was granted the second permit before the first came.
    SecondFirst,
    /// A crashed client came back under its name, and still holds its permit.
    Return,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Try(usize),
    Renew(usize),
    Release(usize),
    Crash(usize),
    Tick,
    SetBack,
}

impl State {
    fn holds(&self, client: usize) -> bool {
        matches!(self.clients[client].standing, StandingOutcome::Holds { until, .. } if until > NOW)
    }

    fn waits(&self, client: usize) -> bool {
        matches!(self.clients[client].standing, StandingOutcome::Waits { until } if until > NOW)
    }

    fn others(&self, client: usize) -> impl Iterator<Item = usize> + '_ {
        (0..CLIENTS).filter(move |other| *other != client)
    }

    /// The live clients that were told to wait before this one.
    fn ahead(&self, client: usize) -> Vec<usize> {
        let in_queue = self.queue.iter().copied().filter(|other| self.waits(*other));
        in_queue.take_while(|other| *other != client).collect()
    }

    fn try_acquire(&mut self, client: usize) {
        let before = self.clone();
        let attempt =
            match self.record.try_acquire(PERMITS, NAMES[client], Timestamp(NOW), Duration::from_micros(LEASE)) {
                Ok(attempt) => attempt,
                Err(_) => return self.fault = Some("tokens are spent"),
            };
        let until = NOW + LEASE;
        let ahead = before.ahead(client);
        let holders = before.others(client).filter(|other| before.holds(*other)).count();
        let is_free = holders + ahead.len() < PERMITS as usize;
        match attempt.token {
            Some(token) => {
                self.fault = match before.clients[client].standing {
                    StandingOutcome::Holds { token: held, .. } if before.holds(client) => {
                        (token != held).then_some("another token for the same grant")
                    }
                    _ if token <= before.told => Some("a token that does not rise"),
                    _ => (!is_free).then_some("a permit that is not free, or the turn of another client"),
                };
                self.see(&before, client, &ahead);
                self.told = self.told.max(token);
                self.queue.retain(|other| *other != client);
                self.clients[client] =
                    Client { standing: StandingOutcome::Holds { token, until }, has_forgotten: false };
            }
            None => {
                self.fault = if before.holds(client) {
                    Some("a permit was lost")
                } else if is_free {
                    Some("a permit is free, and the client waits")
                } else {
                    (attempt.position != Some(ahead.len())).then_some("a wrong position in the queue")
                };
                if !before.waits(client) {
                    self.queue.retain(|other| *other != client);
                    self.queue.push(client);
                }
                self.clients[client] = Client { standing: StandingOutcome::Waits { until }, has_forgotten: false };
            }
        }
    }

    fn see(&mut self, before: &State, client: usize, ahead: &[usize]) {
        let gone = |other: &usize| before.clients[*other].has_forgotten;
        let was_held = |other: &usize| {
            matches!(before.clients[*other].standing, StandingOutcome::Holds { token, until }
                if until <= NOW && before.record.holders.iter().any(|held| held.token == token))
        };
        let dead_ahead = before.queue.iter().take_while(|other| **other != client).any(gone);
        self.seen = if before.clients[client].has_forgotten && before.holds(client) {
            Some(Seen::Return)
        } else if before.record.holders.len() == 2
            && before.others(client).any(|other| gone(&other) && was_held(&other))
        {
            Some(Seen::Takeover)
        } else if before.waits(client) && !ahead.is_empty() {
            Some(Seen::SecondFirst)
        } else {
            (before.waits(client) && dead_ahead).then_some(Seen::PastTheDead)
        };
    }

    fn renew(&mut self, client: usize) {
        let was_held = self.holds(client);
        let renewed = self.record.renew(NAMES[client], Timestamp(NOW), Duration::from_micros(LEASE));
        if renewed != was_held {
            self.fault = Some("a wrong answer to a renewal");
        }
        if let (true, StandingOutcome::Holds { token, .. }) = (renewed, self.clients[client].standing) {
            self.clients[client].standing = StandingOutcome::Holds { token, until: NOW + LEASE };
        }
    }

    fn release(&mut self, client: usize) {
        self.record.release(NAMES[client], Timestamp(NOW));
        self.queue.retain(|other| *other != client);
        self.clients[client] = Client::default();
    }

    /// Moves the time forward or back by a tick. All expired leases are treated alike, however long ago they expired.
    fn shift(&mut self, by: i64) {
        let shifted = |until: u64| until.saturating_add_signed(by).max(NOW);
        for held in &mut self.record.holders {
            held.lease_expires_at = Timestamp(shifted(held.lease_expires_at.0));
        }
        for waiter in &mut self.record.waiters {
            waiter.lease_expires_at = Timestamp(shifted(waiter.lease_expires_at.0));
        }
        for client in &mut self.clients {
            match &mut client.standing {
                StandingOutcome::Waits { until } | StandingOutcome::Holds { until, .. } => *until = shifted(*until),
                StandingOutcome::Away => {}
            }
        }
    }

    /// Renumbers tokens in their order, and clears what no rule looks at.
    fn forget_numbers(&mut self) {
        let held = self.record.holders.iter().map(|held| held.token);
        let believed = self.clients.iter().filter_map(|client| match client.standing {
            StandingOutcome::Holds { token, .. } => Some(token),
            _ => None,
        });
        let last = [0, self.told, self.record.last_token];
        let mut tokens: Vec<u64> = held.chain(believed).chain(last).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let renumbered = |token: u64| tokens.partition_point(|other| *other < token) as u64;
        self.told = renumbered(self.told);
        self.record.last_token = renumbered(self.record.last_token);
        for held in &mut self.record.holders {
            (held.token, held.since) = (renumbered(held.token), Timestamp(NOW));
        }
        for waiter in &mut self.record.waiters {
            waiter.since = Timestamp(NOW);
        }
        for client in &mut self.clients {
            if let StandingOutcome::Holds { token, .. } = &mut client.standing {
                *token = renumbered(*token);
            }
        }
    }

    /// True if a client that tries once a tick is served within a lease while all others are dead.
    fn is_served(&self, client: usize) -> bool {
        let mut record = self.record.clone();
        let attempts = (NOW..=NOW + LEASE)
            .map(|now| record.try_acquire(PERMITS, NAMES[client], Timestamp(now), Duration::from_micros(LEASE)));
        attempts.last().is_some_and(|attempt| attempt.is_ok_and(|attempt| attempt.acquired))
    }
}

impl Model for Locks {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let (record, clients) = (initial_lock_record(), Default::default());
        vec![State { record, clients, queue: vec![], told: 0, fault: None, seen: None }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, client) in state.clients.iter().enumerate() {
            actions.push(Action::Try(number));
            if self.may_go_back || client.standing != StandingOutcome::Away && !client.has_forgotten {
                actions.extend([Action::Renew(number), Action::Release(number), Action::Crash(number)]);
            }
        }
        actions.push(Action::Tick);
        if self.may_go_back {
            actions.push(Action::SetBack);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = State { seen: None, ..state.clone() };
        match action {
            Action::Try(client) => next.try_acquire(client),
            Action::Renew(client) => next.renew(client),
            Action::Release(client) => next.release(client),
            Action::Crash(client) => next.clients[client].has_forgotten = true,
            Action::Tick => next.shift(-1),
            Action::SetBack => next.shift(1),
        }
        if self.may_go_back {
            next = State { record: next.record, ..self.init_states().swap_remove(0) };
        }
        next.forget_numbers();
        Some(next)
    }

    fn within_boundary(&self, state: &State) -> bool {
        let holders = state.record.holders.iter().map(|held| held.lease_expires_at.0);
        let mut leases = holders.chain(state.record.waiters.iter().map(|waiter| waiter.lease_expires_at.0));
        leases.all(|until| until <= NOW + 2 * LEASE)
    }

    fn properties(&self) -> Vec<Property<Locks>> {
        let always = vec![
            Property::always("no more holders than permits", |_, state: &State| {
                state.record.holders.len() <= PERMITS as usize
            }),
            Property::always("tokens rise in the order of grants", |_, state: &State| {
                state.record.holders.is_sorted_by(|a, b| a.token < b.token)
                    && state.record.holders.last().is_none_or(|held| held.token <= state.record.last_token)
            }),
            Property::always("no client is there twice", |_, State { record, .. }| {
                let holders = record.holders.iter().map(|held| &held.holder_id);
                let mut names: Vec<_> = holders.chain(record.waiters.iter().map(|waiter| &waiter.holder_id)).collect();
                names.sort_unstable();
                names.is_sorted_by(|a, b| a < b)
            }),
            Property::always("dead clients never block for longer than a lease", |model: &Locks, state: &State| {
                model.may_go_back || (0..CLIENTS).all(|client| state.is_served(client))
            }),
        ];
        if self.may_go_back {
            return always;
        }
        let told = [
            Property::always("every answer is right", |_, state: &State| state.fault.is_none()),
            Property::always("at most two believe that they hold, and do", |_, state: &State| {
                let believed = (0..CLIENTS).filter(|client| state.holds(*client));
                let tokens = believed.filter_map(|client| match state.clients[client].standing {
                    StandingOutcome::Holds { token, .. } => Some((NAMES[client], token)),
                    _ => None,
                });
                let has = |(name, token): &(&str, u64)| {
                    state.record.holders.iter().any(|held| held.holder_id == *name && held.token == *token)
                };
                let tokens: Vec<_> = tokens.collect();
                tokens.len() <= PERMITS as usize && tokens.iter().all(has)
            }),
            Property::sometimes("takeover", |_, state: &State| state.seen == Some(Seen::Takeover)),
            Property::sometimes("past the dead", |_, state: &State| state.seen == Some(Seen::PastTheDead)),
            Property::sometimes("second before first", |_, state: &State| state.seen == Some(Seen::SecondFirst)),
            Property::sometimes("return", |_, state: &State| state.seen == Some(Seen::Return)),
        ];
        always.into_iter().chain(told).collect()
    }
}

fn check(model: Locks) {
    let checker = model.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.unique_state_count() >= 1000, "{} states", checker.unique_state_count());
}

#[test]
fn in_every_order_no_permit_is_granted_twice_and_no_client_overtakes_or_blocks() {
    check(Locks { may_go_back: false });
}

#[test]
fn a_clock_that_is_set_back_grants_no_more_permits_than_there_are() {
    check(Locks { may_go_back: true });
}
