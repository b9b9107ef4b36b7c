//! Another process moves the head all the time, so a guess of the head is always wrong. The groups of this process move
//! along: they land with whatever head they find, if only their keys are as guessed.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use latchwork_store::tokio_postgres::Client;
use latchwork_store::*;

use crate::guess::{admin, apply, arrive_late};
use crate::postgres::options;
use crate::power_loss::number;
use crate::server::Server;
use crate::wire::{Cut, Wire};

/// Two handles, as two processes have them, which hear nothing of each other. The second one has a clock that is ahead.
struct Pair {
    first: Store,
    second: Store,
    space: Space,
    clock: Arc<VirtualClock>,
    client: Client,
    schema: String,
    _server: Server,
}

impl Pair {
    async fn new(name: &str) -> Pair {
        let server = Server::start();
        let ((env, clock), (ahead, its_clock)) = (Env::seeded(1), Env::seeded(2));
        its_clock.advance(Duration::from_secs(3600));
        let first = options(name).env(env).without_upkeep().connect(&server.url).await.unwrap();
        let second = options(name).env(ahead).without_upkeep().connect(&server.url).await.unwrap();
        let space = first.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
        second.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
        let (client, schema) = (admin(&server).await, first.postgres().unwrap().schema().to_string());
        note_groups(&client, &schema).await;
        Pair { first, second, space, clock, client, schema, _server: server }
    }

    /// The second handle moves the head.
    async fn push(&self) -> Receipt {
        apply(&self.second, Commit::new().put(&self.space.key("other"), "1")).await
    }

    /// The first handle has guessed the head wrong so often that it does not guess it for a while.
    async fn unsettle(&self) {
        for _ in 0..24 {
            self.push().await;
            apply(&self.first, Commit::new().put(&self.space.key("own"), "1")).await;
        }
    }

    async fn moved(&self) -> i64 {
        moved(&self.client, &self.schema).await
    }
}

/// The next group of the first handle moves along: pauses of 1, 2, 4, 8 and 16 groups without a guess of the head are
/// over, and the one after them is not.
async fn move_along(first: &Store, second: &Store, space: &Space) {
    for _ in 0..40 {
        apply(second, Commit::new().put(&space.key("other"), "1")).await;
        apply(first, Commit::new().put(&space.key("own"), "1")).await;
    }
}

/// The server notes for each group whether it has moved along: only such a group has a name of its own. It also notes
/// how long it would wait for a process that is silent.
async fn note_groups(client: &Client, schema: &str) {
    let note = format!(
        "CREATE TABLE {schema}.noted (name text, silent text);
         CREATE FUNCTION {schema}.notes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           INSERT INTO {schema}.noted VALUES (coalesce(current_setting('latchwork.own', true), ''),
             current_setting('idle_in_transaction_session_timeout'));
           RETURN NULL; END $$;
         CREATE TRIGGER notes AFTER UPDATE ON {schema}.head FOR EACH ROW EXECUTE FUNCTION {schema}.notes()"
    );
    client.batch_execute(&note).await.unwrap();
}

async fn moved(client: &Client, schema: &str) -> i64 {
    let asked = format!("SELECT count(*) FROM {schema}.noted WHERE name <> ''");
    client.query_one(&asked, &[]).await.unwrap().get(0)
}

/// The receipt tells what is stored. Whatever a group of several commits overwrites, each of its versions is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_moves_along_is_stored_as_its_receipts_say() {
    let pair = Pair::new("along").await;
    let (first, space) = (&pair.first, &pair.space);
    let [a, b, new] = ["a", "b", "new"].map(|name| space.key(name));
    apply(first, Commit::new().put(&a, "0").put(&b, "0")).await;
    pair.unsettle().await;
    let before = pair.moved().await;
    let last = pair.push().await;
    // They are made together, and share a transaction.
    let (one, two, three) = tokio::join!(
        apply(first, Commit::new().put(&a, "1").delete(&b)),
        apply(first, Commit::new().put(&a, "2").absent(&new).put(&new, "2")),
        apply(first, Commit::new().put(&a, "3").put(&b, "3")),
    );
    assert!(pair.moved().await > before, "they have moved along");
    let asked = format!("SELECT count(*) FROM {}.noted WHERE name <> '' AND silent <> '10s'", pair.schema);
    assert_eq!(pair.client.query_one(&asked, &[]).await.unwrap().get::<_, i64>(0), 0, "a silent process is waited for");
    let receipts = [&one, &two, &three];
    let generations = receipts.map(|receipt| receipt.generation.0 - last.generation.0);
    assert_eq!(generations, [1, 2, 3], "the head that was found counts, not the known head");
    assert!(receipts.iter().all(|receipt| receipt.time >= last.time), "time does not go back");
    let fresh = first.view().await.unwrap();
    let found = fresh.history(&a, 3).await.unwrap();
    let stored: Vec<_> = found.iter().rev().map(|it| (it.generation, it.time, Some(it.rev))).collect();
    let told: Vec<_> = receipts.iter().map(|it| (it.generation, it.time, it.revs[0])).collect();
    assert_eq!(stored, told);
    for (receipt, value, other) in [(&one, "1", None), (&two, "2", None), (&three, "3", Some("3"))] {
        let view = first.view_at(receipt.generation).await.unwrap();
        assert_eq!(view.get(&a).await.unwrap().unwrap().value, value);
        assert_eq!(view.get(&b).await.unwrap().map(|item| item.value), other.map(Into::into));
    }
    let view = first.view_at(last.generation).await.unwrap();
    assert_eq!(view.get(&a).await.unwrap().unwrap().value, "0", "what the group has overwritten");
    let mut watch = first.watch(space.all(), last.generation).await.unwrap();
    for receipt in receipts {
        let committed = watch.next().await.unwrap();
        assert_eq!((committed.generation, committed.time), (receipt.generation, receipt.time));
    }
    assert_eq!(first.verify().await.unwrap(), []);
}

/// What depends on the head itself is decided on the head that is there, in each kind of commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_depends_on_the_head_is_decided_on_the_head_that_is_there() {
    let pair = Pair::new("depends").await;
    let (first, space) = (&pair.first, &pair.space);
    let [key, stamped, other] = ["k", "stamped", "other"].map(|name| space.key(name));
    apply(first, Commit::new().put(&key, "0")).await;
    pair.unsettle().await;
    for _ in 0..3 {
        pair.clock.advance(Duration::from_millis(1));
        let last = pair.push().await;
        let receipt = apply(first, Commit::new().put_stamped(&stamped, vec![7; 16], 0)).await;
        assert_eq!(receipt.generation, last.generation.next());
        let stamp = [receipt.generation.0.to_be_bytes(), receipt.time.0.to_be_bytes()].concat();
        assert_eq!(first.get(&stamped).await.unwrap().unwrap().value, stamp);

        let last = pair.push().await;
        let commit = Commit::new().id(first.commit_id()).put(&key, "1");
        let receipt = apply(first, commit.clone()).await;
        pair.push().await;
        let again = apply(first, commit).await;
        assert_eq!(receipt.generation, last.generation.next());
        assert_eq!((again.generation, again.time, again.repeated), (receipt.generation, receipt.time, true));

        let last = pair.push().await;
        let refused = first.commit(Commit::new().at_rev(&other, Rev(1)).put(&key, "1")).await.unwrap();
        let Outcome::Refused(refusal) = refused else { panic!("{refused:?}") };
        assert_eq!((refusal.generation, refusal.failed.len()), (last.generation, 1));
        assert_eq!(refusal.failed[0].actual, Actual::AtRev(last.revs[0].unwrap()));

        let last = pair.push().await;
        let receipt = apply(first, Commit::new().at_generation(last.generation).put(&key, "1")).await;
        assert_eq!(receipt.generation, last.generation.next());
        pair.push().await;
        let refused = first.commit(Commit::new().at_generation(receipt.generation).put(&key, "1")).await.unwrap();
        assert!(matches!(refused, Outcome::Refused(_)), "{refused:?}");

        // A commit that changes nothing, beside one that lands.
        let last = pair.push().await;
        let none = space.key("none");
        let (applied, nothing) =
            tokio::join!(apply(first, Commit::new().put(&key, "1")), apply(first, Commit::new().delete(&none)));
        assert_eq!(applied.generation, last.generation.next());
        assert!(nothing.generation == last.generation || nothing.generation == applied.generation, "{nothing:?}");
        assert!(nothing.time >= last.time);
    }
    pair.push().await;
    let declared = first.space(SpaceSpec::new("later")).await.unwrap();
    assert_eq!(pair.second.space(SpaceSpec::new("later")).await.unwrap().id(), declared.id());
    assert!(pair.moved().await > 0);
    assert_eq!(first.verify().await.unwrap(), []);
}

/// The other handle also writes the keys that are guessed: each write counts with the version that is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_with_a_wrong_guess_of_a_key_is_decided_again() {
    let pair = Pair::new("keys").await;
    let (first, second, key) = (&pair.first, &pair.second, pair.space.key("k"));
    let mut rev = apply(first, Commit::new().put(&key, "0")).await.revs[0].unwrap();
    pair.unsettle().await;
    for round in 0..12 {
        let changed = match round % 3 {
            0 => apply(second, Commit::new().put(&key, "2")).await,
            1 => apply(second, Commit::new().delete(&key)).await,
            _ => pair.push().await,
        };
        let is_changed = round % 3 < 2;
        let before = rev;
        rev = if is_changed { changed.revs[0].unwrap() } else { rev };
        let refused = first.commit(Commit::new().at_rev(&key, before).put(&key, "1")).await.unwrap();
        assert_eq!(refused.is_applied(), !is_changed, "{refused:?}");
        rev = if is_changed { rev } else { rev.next() };
        let receipt = apply(first, Commit::new().put(&key, "1")).await;
        assert_eq!(receipt.revs, [Some(rev.next())]);
        // It is live and at this rev for all that is known here; the rev alone is not enough.
        let deleted = apply(second, Commit::new().delete(&key)).await.revs[0].unwrap();
        let refused = first.commit(Commit::new().present(&key).put(&key, "1")).await.unwrap();
        assert!(!refused.is_applied(), "{refused:?}");
        rev = apply(first, Commit::new().absent(&key).put(&key, "1")).await.revs[0].unwrap();
        assert_eq!(rev, deleted.next());
        pair.unsettle().await;
    }
    assert!(pair.moved().await > 0);
    assert_eq!(first.verify().await.unwrap(), []);
}

/// The transaction reaches the server after its connection was given up, after its outcome was looked up, and after its
/// caller was told that it has not landed. It would find its keys as it expects them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_moves_along_and_arrives_late_writes_nothing() {
    let server = Server::start();
    let wire = Wire::to(&server, 1).await;
    let first = options("late_along").without_upkeep().connect(&wire.url).await.unwrap();
    let second = options("late_along").without_upkeep().connect(&server.url).await.unwrap();
    let space = first.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    move_along(&first, &second, &space).await;
    let last = apply(&second, Commit::new().put(&space.key("other"), "1")).await;
    arrive_late(&server, &wire, &first, &key).await;
    let fresh = options("late_along").without_upkeep().connect(&server.url).await.unwrap();
    assert_eq!(fresh.generation().await.unwrap(), last.generation);
    assert!(fresh.get(&key).await.unwrap().is_none());
    // The writer goes on with numbers above the one that was given up.
    apply(&first, Commit::new().absent(&key).put(&key, "1")).await;
}

/// Connections are cut while another handle moves the head. What has landed although its answer was lost is told with
/// the generation at which it is stored. `LATCHWORK_FAULTS` sets how many connections are cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_moves_along_is_told_as_it_landed_when_connections_are_cut() {
    let (server, faults) = (Server::start(), number("LATCHWORK_FAULTS", 40));
    let wire = Wire::to(&server, number("LATCHWORK_SEED", 1)).await;
    // It does not hear where the other handle leaves the head.
    let deaf = options("cut_along").patience(Duration::from_secs(60)).without_upkeep();
    let store = deaf.connect(&wire.url).await.unwrap();
    let other = options("cut_along").connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("work").history(History::Forever)).await.unwrap();
    let (client, schema) = (admin(&server).await, store.postgres().unwrap().schema().to_string());
    note_groups(&client, &schema).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let pushing = tokio::spawn({
        let (other, key, is_over) = (other.clone(), space.key("other"), is_over.clone());
        async move {
            while !is_over.load(Ordering::SeqCst) {
                apply(&other, Commit::new().put(&key, "1")).await;
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        }
    });
    wire.break_from_now_on();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let (store, space, wire) = (store.clone(), space.clone(), wire.clone());
        tasks.spawn(async move {
            let (key, mut receipts) = (space.key(format!("{task}")), Vec::new());
            while wire.cuts() < faults {
                let commit = match receipts.last() {
                    Some(Receipt { revs, .. }) => Commit::new().at_rev(&key, revs[0].unwrap()),
                    None => Commit::new().absent(&key),
                };
                receipts.push(apply(&store, commit.put(&key, receipts.len().to_string())).await);
            }
            (key, receipts)
        });
    }
    let told = tasks.join_all().await;
    wire.mend();
    is_over.store(true, Ordering::SeqCst);
    pushing.await.unwrap();
    let view = other.view().await.unwrap();
    let mut count = 0;
    for (key, receipts) in told {
        let stored = view.history(&key, usize::MAX).await.unwrap();
        assert_eq!(stored.len(), receipts.len(), "each commit has landed once");
        for (version, receipt) in stored.iter().rev().zip(&receipts) {
            let found = (version.generation, version.time, Some(version.rev));
            assert_eq!(found, (receipt.generation, receipt.time, receipt.revs[0]));
        }
        count += receipts.len();
    }
    let moved = moved(&client, &schema).await;
    assert!(count > 50 && moved > 10, "{count} commits, {moved} groups that moved along");
    assert!(Cut::ALL.into_iter().all(|cut| wire.cuts_of(cut) > 0), "each cut has happened");
    println!("{count} commits, {moved} groups that moved along, {} connections cut", wire.cuts());
    assert_eq!(other.verify().await.unwrap(), []);
}

/// The server waits for a lock for longer than its answer is waited for. What was sent must not land then: the caller
/// has looked, and has found that it has not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_whose_process_has_given_up_does_not_land() {
    let server = Server::start();
    let opened = |patience| options("outwaited").patience(Duration::from_secs(patience)).without_upkeep();
    let first = opened(1).connect(&server.url).await.unwrap();
    let second = opened(60).connect(&server.url).await.unwrap();
    let space = first.space(SpaceSpec::new("a")).await.unwrap();
    let (key, schema) = (space.key("k"), first.postgres().unwrap().schema().to_string());
    let client = admin(&server).await;
    for moves in [true, false] {
        apply(&first, Commit::new().put(&space.key("own"), "1")).await;
        if moves {
            move_along(&first, &second, &space).await;
        }
        client.batch_execute(&format!("BEGIN; SELECT 1 FROM {schema}.head FOR UPDATE")).await.unwrap();
        let error = first.commit(Commit::new().absent(&key).put(&key, "1")).await.unwrap_err();
        assert!(matches!(error, StoreError::Uncertain { .. } | StoreError::Server { .. }), "{error}");
        client.batch_execute("ROLLBACK").await.unwrap();
        // This waits until the server has done what it was sent.
        apply(&second, Commit::new().put(&space.key("other"), "1")).await;
        assert!(second.get(&key).await.unwrap().is_none(), "moves: {moves}, {error}");
    }
}

/// The answer to a look-up is lost, and then the patience is over: the number that was given up is of no later group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_number_that_was_given_up_is_not_used_again() {
    let server = Server::start();
    let first = options("numbers").without_upkeep().connect(&server.url).await.unwrap();
    let second = options("numbers").without_upkeep().connect(&server.url).await.unwrap();
    let space = first.space(SpaceSpec::new("a")).await.unwrap();
    let (key, schema) = (space.key("k"), first.postgres().unwrap().schema().to_string());
    let client = admin(&server).await;
    let mut rev = apply(&first, Commit::new().put(&key, "1")).await.revs[0].unwrap();
    for round in 0..6 {
        move_along(&first, &second, &space).await;
        if round % 2 > 0 {
            apply(&second, Commit::new().put(&space.key("own"), "2")).await;
        }
        // What a look-up writes.
        let give_up = format!("UPDATE {schema}.writers SET number = number + 1, seen = now() WHERE number % 2 = 0");
        client.batch_execute(&give_up).await.unwrap();
        let receipt = apply(&first, Commit::new().at_rev(&key, rev).put(&key, "1")).await;
        rev = receipt.revs[0].unwrap();
        assert_eq!(second.get(&key).await.unwrap().unwrap().rev, rev);
    }
}
