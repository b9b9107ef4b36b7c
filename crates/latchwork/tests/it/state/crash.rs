//! Power loss while a counter is incremented, and stores that fail: acknowledged increments are there exactly once, an
//! increment that is sent again under its key is not applied twice, and every caller gets an answer. `LATCHWORK_IMAGES`
//! and `LATCHWORK_SEED` as elsewhere.

use std::time::Duration;

use latchwork::json;
use latchwork::state::{StateError, States};
use latchwork::store::disk::sim::{Attempt, Event, Fault, Loss, SimDisk};
use latchwork::store::{Env, FileOptions, Limits};
use tokio::task::JoinSet;

const ROUNDS: u64 = 30;
/// Increments that are sent together, and may share a commit.
const TOGETHER: u64 = 5;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number in the environment"))
}

async fn open(disk: &SimDisk) -> States {
    let (env, _clock) = Env::seeded(1);
    let mut limits = Limits::default();
    (limits.commit_bytes, limits.operations) = (64 << 10, 1000);
    let options = FileOptions::new().disk(disk.clone()).env(env).limits(limits).without_threads();
    let options = options.segment_bytes(128 << 10).overlay_bytes(48 << 10);
    States::on(&options.open("/data").await.unwrap()).await.unwrap()
}

/// Sends increments together, each under a key of its own, and returns their answers in the order of the keys.
async fn count(states: &States, numbers: impl Iterator<Item = u64>) -> Vec<Result<u64, StateError>> {
    let calls = numbers.map(|number| {
        let session = states.session("s").mutation_timeout(None).once(format!("{number}"));
        async move { (number, session.inc_state("n", 1).await.map(|changed| changed.value.as_u64().unwrap())) }
    });
    let mut answers = calls.collect::<JoinSet<_>>().join_all().await;
    answers.sort_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Checks a disk after a power loss: at least all acknowledged increments are there, and at most all sent ones. After
/// all are sent again, each is there once.
async fn check(disk: &SimDisk, acknowledged: u64, place: &str) {
    let states = open(disk).await;
    let session = states.session("s");
    let (state, rev) = session.read().await.unwrap();
    let found = state.unwrap()["n"].as_u64().unwrap_or(0);
    let sent = (acknowledged + TOGETHER).min(ROUNDS * TOGETHER);
    assert!(
        (acknowledged..=sent).contains(&found),
        "{acknowledged} acknowledged, {sent} sent, {found} found\n  {place}"
    );
    let answers = count(&states, 0..sent).await;
    let mut answers: Vec<u64> = answers.into_iter().map(Result::unwrap).collect();
    answers.sort();
    assert_eq!(answers, (1..=sent).collect::<Vec<_>>(), "each its own answer\n  {place}");
    assert_eq!(session.get().await.unwrap().unwrap(), json!({"n": sent}), "{place}");
    assert_eq!(found == sent, session.read().await.unwrap().1 == rev, "nothing is written again\n  {place}");
}

#[tokio::test]
async fn increments_are_there_exactly_once_whatever_a_power_loss_leaves() {
    let (images, seed) = (number("LATCHWORK_IMAGES", 200), number("LATCHWORK_SEED", 1));
    let disk = SimDisk::new();
    drop(open(&disk).await);
    let recording = disk.record();
    let states = open(&disk).await;
    for round in 0..ROUNDS {
        let answers = count(&states, round * TOGETHER..(round + 1) * TOGETHER).await;
        assert!(answers.iter().all(Result::is_ok));
        disk.note((round + 1) * TOGETHER);
    }
    drop(states);
    let recording = recording.stop();
    let mut random = fastrand::Rng::with_seed(seed);
    let share = images as f64 / (recording.events().len() * 4) as f64;
    let (mut walk, mut acknowledged) = (recording.walk(), 0);
    loop {
        let own = random.u64(..);
        for loss in [Loss::Everything, Loss::Nothing, Loss::SomeWrites(own), Loss::SomeSectors(own)] {
            if random.f64() < share {
                let place = format!("LATCHWORK_SEED={seed}, the power lost before event {} ({loss:?})", walk.point());
                check(&walk.image(loss), acknowledged, &place).await;
            }
        }
        match walk.step() {
            Some(Event::Note(note)) => acknowledged = *note,
            Some(_) => {}
            None => return,
        }
    }
}

/// A disk fails to sync: every caller gets an error, no caller hangs, and unacknowledged increments can be sent again.
#[tokio::test]
async fn every_caller_gets_an_answer_from_a_store_that_fails() {
    for failing in [Attempt::Sync, Attempt::Write] {
        let disk = SimDisk::new();
        let states = open(&disk).await;
        let answers = count(&states, 0..10).await;
        assert!(answers.iter().all(Result::is_ok));
        disk.set_faults(move |attempt, _| (attempt == failing).then_some(Fault::Error(std::io::ErrorKind::Other)));
        let failed = tokio::time::timeout(Duration::from_secs(10), count(&states, 0..3000)).await.expect("it hangs");
        let (known, new) = failed.split_at(10);
        assert!(new.iter().all(|answer| matches!(answer, Err(StateError::Store(_)))));
        assert!(known.iter().all(|answer| matches!(answer, Ok(_) | Err(StateError::Store(_)))));
        drop(states);
        disk.clear_faults();
        let states = open(&disk).await;
        let answers = count(&states, 0..3000).await;
        assert!(answers.iter().all(Result::is_ok));
        assert_eq!(states.session("s").get().await.unwrap().unwrap(), json!({"n": 3000}));
    }
}

/// A hundred thousand callers of one container.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_huge_queue_is_worked_off_in_order() {
    for container in super::both().await {
        let calls = (0..100_000).map(|_| {
            let container = container.clone().mutation_timeout(None);
            async move { container.inc_state("n", 1).await.unwrap().value.as_u64().unwrap() }
        });
        let mut answers = calls.collect::<JoinSet<_>>().join_all().await;
        answers.sort();
        assert!(answers.into_iter().eq(1..=100_000));
    }
}

/// Callers that run out of time just when their turn comes: those told `Withdrawn` are not applied, the others are.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_withdrawn_mutation_is_never_applied() {
    use latchwork::state::{MutationError, TimeoutOutcome};
    for container in super::both().await {
        let mut tasks = JoinSet::new();
        for task in 0..16u64 {
            let container = container.clone();
            tasks.spawn(async move {
                let (mut applied, mut may) = (0u64, 0u64);
                for call in 0..300 {
                    let timeout = Duration::from_micros((task * 37 + call * 11) % 900);
                    let container = container.clone().mutation_timeout(timeout);
                    let counted = container.atomic_state(move |state| async move {
                        if call % 7 == 0 {
                            tokio::task::yield_now().await;
                        }
                        let mut state = state.unwrap();
                        state["n"] = json!(state["n"].as_u64().unwrap_or(0) + 1);
                        Ok::<_, ()>(Some(state))
                    });
                    match counted.await {
                        Ok(_) => applied += 1,
                        Err(MutationError::State(StateError::ScopeMutationTimeout { outcome, .. })) => {
                            may += u64::from(outcome == TimeoutOutcome::MayCommit);
                        }
                        Err(error) => panic!("{error:?}"),
                    }
                }
                (applied, may)
            });
        }
        let counts = tasks.join_all().await;
        // When this call has ended, all earlier calls have ended as well.
        container.inc_state("n", 0).await.unwrap();
        let (applied, may) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        assert_eq!(container.get().await.unwrap().unwrap()["n"], applied + may, "{applied} applied, {may} may");
    }
}
