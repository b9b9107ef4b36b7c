//! Each rule of the record by itself, and all of them under random calls.

use std::time::Duration;

use latchwork::json;
use latchwork::lock::{AcquireOutcome, Holder, LockRecord, TokensSpent, Waiter, initial_lock_record};
use latchwork::store::Timestamp;
use proptest::collection::vec;
use proptest::prelude::*;

const LEASE: Duration = Duration::from_micros(10);

fn at(micros: u64) -> Timestamp {
    Timestamp(micros)
}

/// What the record says of a client: whether it holds a permit and its token, or its position in the queue.
fn standing(record: &LockRecord, who: &str) -> Option<AcquireOutcome> {
    let held = record.holders.iter().find(|held| held.holder_id == who).map(|held| held.token);
    let place = record.waiters.iter().position(|waiter| waiter.holder_id == who);
    match held {
        Some(token) => Some(AcquireOutcome { acquired: true, position: None, token: Some(token) }),
        None => place.map(|place| AcquireOutcome { acquired: false, position: Some(place), token: None }),
    }
}

/// A lock and its number of permits.
struct Lock(LockRecord, u32);

impl Lock {
    fn new(permits: u32) -> Lock {
        Lock(initial_lock_record(), permits)
    }

    /// An attempt at a time. Returns its token or its position.
    fn acquire(&mut self, holder: &str, now: u64) -> Result<u64, usize> {
        let attempt = self.0.try_acquire(self.1, holder, at(now), LEASE).unwrap();
        assert_eq!(standing(&self.0, holder), Some(attempt), "the answer is what the record says");
        match attempt {
            AcquireOutcome { acquired: true, position: None, token: Some(token) } => Ok(token),
            AcquireOutcome { acquired: false, position: Some(position), token: None } => Err(position),
            other => panic!("{other:?}"),
        }
    }

    fn holders(&self) -> Vec<&str> {
        self.0.holders.iter().map(|holder| &*holder.holder_id).collect()
    }

    fn waiters(&self) -> Vec<&str> {
        self.0.waiters.iter().map(|waiter| &*waiter.holder_id).collect()
    }
}

#[test]
fn permits_are_granted_until_there_are_none_and_then_in_the_order_of_the_queue() {
    let mut lock = Lock::new(2);
    assert_eq!([lock.acquire("a", 0), lock.acquire("b", 0)], [Ok(1), Ok(2)]);
    assert_eq!([lock.acquire("c", 0), lock.acquire("d", 0), lock.acquire("e", 0)], [Err(0), Err(1), Err(2)]);
    assert!(lock.0.release("a", at(1)));
    assert_eq!(lock.acquire("d", 1), Err(1), "c is before it");
    assert_eq!(lock.acquire("f", 1), Err(3), "no client overtakes");
    assert_eq!(lock.acquire("c", 1), Ok(3));
    assert_eq!(lock.waiters(), ["d", "e", "f"]);
}

/// With two permits free, the first two of the queue may take one each, in either order; the third may not.
#[test]
fn as_many_waiters_are_served_as_permits_are_free() {
    let mut lock = Lock::new(2);
    let _ = ["a", "b", "c", "d", "e"].map(|holder| lock.acquire(holder, 0));
    lock.0.release("a", at(1));
    lock.0.release("b", at(1));
    assert_eq!(lock.acquire("e", 1), Err(2));
    assert_eq!(lock.acquire("d", 1), Ok(3), "the second of the queue");
    assert_eq!(lock.acquire("e", 1), Err(1), "the other permit is for the first");
    assert_eq!(lock.acquire("c", 1), Ok(4));
    assert_eq!((lock.holders(), lock.waiters()), (vec!["d", "c"], vec!["e"]));
}

#[test]
fn a_lease_that_ends_now_is_over() {
    let mut lock = Lock::new(1);
    assert_eq!(lock.acquire("a", 0), Ok(1));
    assert_eq!(lock.acquire("b", 9), Err(0));
    assert!(lock.0.is_held_by("a", at(9)) && !lock.0.is_held_by("a", at(10)));
    assert_eq!(lock.acquire("b", 10), Ok(2));
    assert_eq!(lock.holders(), ["b"]);
}

#[test]
fn a_holder_that_tries_again_has_its_lease_extended_and_keeps_its_token() {
    let mut lock = Lock::new(1);
    assert_eq!([lock.acquire("a", 0), lock.acquire("a", 7)], [Ok(1), Ok(1)]);
    let held = &lock.0.holders[0];
    assert_eq!((held.lease_expires_at, held.since), (at(17), at(0)));
    assert_eq!(lock.0.last_token, 1);
    assert_eq!(lock.acquire("a", 17), Ok(2), "it was over, so this is another grant");
}

/// This holds for the former holder as well: the waiters go first.
#[test]
fn a_holder_whose_lease_has_expired_stands_at_the_end_of_the_queue() {
    let mut lock = Lock::new(1);
    assert_eq!([lock.acquire("a", 0), lock.acquire("b", 5)], [Ok(1), Err(0)]);
    assert_eq!(lock.acquire("a", 12), Err(1));
    assert_eq!(lock.acquire("b", 12), Ok(2));
}

#[test]
fn a_waiter_keeps_its_place_and_its_life_when_it_tries_again() {
    let mut lock = Lock::new(1);
    let _ = [lock.acquire("a", 0), lock.acquire("b", 0), lock.acquire("c", 0)];
    assert_eq!([lock.acquire("a", 8), lock.acquire("b", 8), lock.acquire("c", 8)], [Ok(1), Err(0), Err(1)]);
    assert_eq!(lock.acquire("d", 17), Err(2), "b and c are still there");
    let times = lock.0.waiters.iter().map(|waiter| (waiter.since.0, waiter.lease_expires_at.0));
    assert_eq!(times.collect::<Vec<_>>(), [(0, 18), (0, 18), (17, 27)]);
}

#[test]
fn a_dead_waiter_is_dropped_by_the_next_attempt_of_any_client() {
    let mut lock = Lock::new(1);
    let _ = [lock.acquire("a", 0), lock.acquire("dead", 0), lock.acquire("c", 5)];
    assert_eq!(lock.acquire("a", 9), Ok(1));
    assert_eq!(lock.acquire("c", 10), Err(0));
    assert_eq!(lock.waiters(), ["c"]);
    lock.0.release("a", at(11));
    assert_eq!(lock.acquire("c", 11), Ok(2));
}

#[test]
fn a_release_takes_from_both_lists_and_again_changes_nothing() {
    let mut lock = Lock::new(1);
    let _ = [lock.acquire("a", 0), lock.acquire("b", 0), lock.acquire("c", 5)];
    assert!(lock.0.release("b", at(1)));
    assert_eq!((lock.holders(), lock.waiters()), (vec!["a"], vec!["c"]));
    let before = lock.0.clone();
    assert!(!lock.0.release("b", at(12)) && !lock.0.release("stranger", at(12)));
    assert_eq!(lock.0, before, "not even what has expired is touched");
    let twice = lock.0.holders[0].clone();
    lock.0.waiters.push(Waiter { holder_id: "a".into(), lease_expires_at: at(99), since: twice.since });
    lock.0.holders.push(twice);
    assert!(lock.0.release("a", at(6)));
    assert_eq!((lock.holders(), lock.waiters()), (vec![], vec!["c"]));
    let _ = lock.acquire("d", 6);
    assert!(lock.0.release("d", at(15)));
    assert_eq!(lock.waiters(), Vec::<&str>::new(), "c has expired meanwhile");
}

#[test]
fn a_renewal_extends_what_is_held_and_never_enqueues() {
    let mut lock = Lock::new(1);
    let _ = [lock.acquire("a", 0), lock.acquire("b", 0)];
    assert!(lock.0.renew("a", at(9), LEASE));
    assert_eq!(lock.0.holders[0].lease_expires_at, at(19));
    assert!(lock.0.renew("a", at(10), Duration::from_micros(1)));
    assert_eq!(lock.0.holders[0].lease_expires_at, at(19), "it is never shortened");
    let before = lock.0.clone();
    assert!(!lock.0.renew("b", at(10), LEASE), "it waits");
    assert!(!lock.0.renew("c", at(10), LEASE), "the client is unknown");
    assert!(!lock.0.renew("a", at(19), LEASE), "the lease has expired, though the permit is still free");
    assert_eq!(lock.0, before);
}

#[test]
fn tokens_rise_over_releases_and_end_with_an_error() {
    let mut lock = Lock::new(3);
    assert_eq!([lock.acquire("a", 0), lock.acquire("b", 0)], [Ok(1), Ok(2)]);
    let _ = (lock.0.release("a", at(1)), lock.0.release("b", at(1)));
    assert_eq!(lock.acquire("a", 1), Ok(3));
    lock.0.last_token = u64::MAX;
    assert_eq!(lock.0.try_acquire(3, "c", at(1), LEASE), Err(TokensSpent));
    assert_eq!(lock.acquire("a", 2), Ok(3), "that is no new grant");
}

#[test]
fn times_saturate_and_may_go_back() {
    let mut lock = Lock::new(1);
    assert_eq!(lock.acquire("a", u64::MAX - 1), Ok(1));
    assert_eq!(lock.0.holders[0].lease_expires_at, at(u64::MAX));
    assert_eq!(lock.acquire("b", 0), Err(0), "a clock that was set back grants nothing");
    assert!(lock.0.renew("a", at(3), Duration::MAX));
    assert!(lock.0.renew("a", at(3), LEASE));
    assert_eq!(lock.0.holders[0].lease_expires_at, at(u64::MAX));
    assert_eq!(lock.acquire("a", 3), Ok(1));
    assert_eq!(lock.0.holders[0].lease_expires_at, at(u64::MAX), "and takes nothing away");
}

#[test]
fn fewer_permits_than_before_take_nothing_away() {
    let mut lock = Lock::new(3);
    let _ = ["a", "b", "c"].map(|holder| lock.acquire(holder, 0));
    lock.1 = 1;
    assert_eq!([lock.acquire("a", 1), lock.acquire("d", 1)], [Ok(1), Err(0)]);
    let _ = (lock.0.release("a", at(2)), lock.0.release("b", at(2)));
    assert_eq!(lock.acquire("d", 2), Err(0));
    lock.0.release("c", at(2));
    assert_eq!(lock.acquire("d", 2), Ok(4));
}

#[test]
fn a_record_is_written_as_json_of_this_shape() {
    let mut lock = Lock::new(1);
    let _ = [lock.acquire("a", 5), lock.acquire("b", 6)];
    let written = serde_json::to_value(&lock.0).unwrap();
    let expected = json!({
        "holders": [{"holder_id": "a", "lease_expires_at": 15, "token": 1, "since": 5}],
        "waiters": [{"holder_id": "b", "lease_expires_at": 16, "since": 6}],
        "last_token": 1,
    });
    assert_eq!(written, expected);
    assert_eq!(serde_json::from_value::<LockRecord>(written).unwrap(), lock.0);
}

/// Calls of clients at random.
#[derive(Debug, Clone)]
enum Call {
    Acquire(usize, u64),
    Release(usize),
    Renew(usize, u64),
    /// The time moves forward or back.
    Pass(i64),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let (who, lease) = (0..5usize, prop_oneof![9 => 1..12u64, 1 => Just(u64::MAX)]);
    let call = prop_oneof![
        5 => (who.clone(), lease.clone()).prop_map(|(who, lease)| Call::Acquire(who, lease)),
        2 => who.clone().prop_map(Call::Release),
        2 => (who, lease).prop_map(|(who, lease)| Call::Renew(who, lease)),
        3 => (0..8i64).prop_map(Call::Pass),
        1 => prop_oneof![-20..0i64, Just(i64::MIN), Just(i64::MAX)].prop_map(Call::Pass),
    ];
    vec(call, 1..120)
}

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Whether it holds a permit, and when its lease or its position expires.
fn lease_of(record: &LockRecord, who: &str) -> Option<(bool, Timestamp)> {
    let holders = record.holders.iter().map(|held| (&*held.holder_id, (true, held.lease_expires_at)));
    let waiters = record.waiters.iter().map(|waiter| (&*waiter.holder_id, (false, waiter.lease_expires_at)));
    holders.chain(waiters).find(|(name, _)| *name == who).map(|(_, lease)| lease)
}

/// An attempt, checked against the record before it.
fn check_acquire(
    before: &LockRecord,
    after: &LockRecord,
    permits: u32,
    who: &str,
    now: Timestamp,
    attempt: AcquireOutcome,
) {
    let is_live = |until: &Timestamp| *until > now;
    let queue: Vec<&str> =
        before.waiters.iter().filter(|w| is_live(&w.lease_expires_at)).map(|w| &*w.holder_id).collect();
    let held: Vec<&Holder> = before.holders.iter().filter(|h| is_live(&h.lease_expires_at)).collect();
    let ahead = queue.iter().position(|name| *name == who).unwrap_or(queue.len());
    match held.iter().find(|held| held.holder_id == who) {
        Some(held) => assert_eq!(attempt.token, Some(held.token), "the same token"),
        None if ahead + held.len() < permits as usize => {
            assert!(attempt.token.unwrap() > before.last_token, "a larger token");
        }
        None => assert_eq!((attempt.acquired, attempt.position), (false, Some(ahead)), "its place"),
    }
    // All other clients stay where they were.
    let others = |record: &LockRecord| {
        let waiters = record.waiters.iter().filter(|w| w.holder_id != who && is_live(&w.lease_expires_at)).cloned();
        let holders = record.holders.iter().filter(|h| h.holder_id != who && is_live(&h.lease_expires_at)).cloned();
        (waiters.collect::<Vec<_>>(), holders.collect::<Vec<_>>())
    };
    assert_eq!(others(before), others(after));
    assert!(after.waiters.iter().all(|waiter| is_live(&waiter.lease_expires_at) || now == at(u64::MAX)));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_rules_hold_whatever_is_called_and_whatever_the_time(permits in 1..4u32, calls in calls()) {
        let (mut record, mut now) = (initial_lock_record(), 100u64);
        for call in calls {
            let before = record.clone();
            let time = at(now);
            match call {
                Call::Acquire(who, lease) => {
                    let lease = Duration::from_micros(lease);
                    let attempt = record.try_acquire(permits, NAMES[who], time, lease).unwrap();
                    check_acquire(&before, &record, permits, NAMES[who], time, attempt);
                    // A lease is extended, never shortened; a new lease has the requested length.
                    let until = match lease_of(&before, NAMES[who]) {
                        Some((held, until)) if held == attempt.acquired && until > time => until.max(time.plus(lease)),
                        _ => time.plus(lease),
                    };
                    prop_assert_eq!(lease_of(&record, NAMES[who]), Some((attempt.acquired, until)));
                }
                Call::Release(who) => {
                    let was_there = record.release(NAMES[who], time);
                    prop_assert_eq!(was_there, record != before);
                    prop_assert_eq!(standing(&record, NAMES[who]), None);
                }
                Call::Renew(who, lease) => {
                    let renewed = record.renew(NAMES[who], time, Duration::from_micros(lease));
                    prop_assert_eq!(renewed, before.is_held_by(NAMES[who], time));
                    prop_assert_eq!(&record.waiters, &before.waiters);
                    prop_assert_eq!(record.last_token, before.last_token);
                    for (held, before) in record.holders.iter().zip(&before.holders) {
                        prop_assert!(held.lease_expires_at >= before.lease_expires_at);
                    }
                }
                Call::Pass(time) => now = now.saturating_add_signed(time),
            }
            prop_assert!(record.holders.len() <= permits as usize);
            prop_assert!(record.last_token >= before.last_token);
            let tokens: Vec<u64> = record.holders.iter().map(|held| held.token).collect();
            prop_assert!(tokens.is_sorted_by(|a, b| a < b), "{:?}", tokens);
            prop_assert!(tokens.last().is_none_or(|token| *token <= record.last_token));
            let mut names: Vec<&str> = record.waiters.iter().map(|waiter| &*waiter.holder_id).collect();
            names.extend(record.holders.iter().map(|held| &*held.holder_id));
            names.sort_unstable();
            prop_assert!(names.is_sorted_by(|a, b| a < b), "no client is there twice: {:?}", names);
        }
    }
}
