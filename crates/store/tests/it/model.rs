//! Runs random command sequences on a store and the reference, and compares every answer. There are no threads and time
//! is virtual, so that a failing sequence shrinks and replays exactly.

mod command;
mod world;

use latchwork_store::Sabotage;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use self::command::Command;
use self::world::World;

/// The number of sequences on all backends together.
fn cases() -> u32 {
    std::env::var("LATCHWORK_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000)
}

/// The backend of the store that is compared.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kept {
    Memory,
    Files(Option<Sabotage>),
    /// With the connection string of the server.
    Postgres(&'static str),
}

/// Compares `cases` random sequences. Fails with the smallest sequence found whose answers differ.
pub(crate) fn compare(kept: Kept, cases: u32) -> Result<(), String> {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let compared = TestRunner::new(config)
        .run(&command::sequences(), |commands| play(kept, &commands).map_err(TestCaseError::fail));
    compared.map_err(|error| match error {
        TestError::Fail(reason, commands) => format!("{reason}\nafter {commands:#?}"),
        TestError::Abort(reason) => format!("gave up: {reason}"),
    })
}

/// Runs one sequence.
fn play(kept: Kept, commands: &[Command]) -> Result<(), String> {
    let mut world = World::new(kept);
    for command in commands {
        world.play(command).map_err(|difference| format!("{command:?}: {difference}"))?;
        world.check_floors().map_err(|difference| format!("after {command:?}: {difference}"))?;
    }
    world.finish()
}

fn check(kept: Kept, cases: u32) {
    if let Err(difference) = compare(kept, cases) {
        panic!("{difference}");
    }
}

#[test]
fn memory_answers_as_the_reference_does() {
    check(Kept::Memory, cases());
}

/// `LATCHWORK_POSTGRES_CASES` sets the number of sequences: a server takes its time for each answer.
#[test]
fn postgres_answers_as_the_reference_does() {
    let server = crate::server::Server::start();
    let url: &'static str = Box::leak(server.url.clone().into_boxed_str());
    check(Kept::Postgres(url), crate::power_loss::number("LATCHWORK_POSTGRES_CASES", 20) as u32);
}

#[test]
fn files_answer_as_the_reference_does() {
    check(Kept::Files(None), cases());
}
