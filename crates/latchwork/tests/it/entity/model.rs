//! Random sequences of commands against entities and the reference, with every answer compared. Runs without threads on
//! virtual time, so a failing sequence replays exactly, and is cut down to the commands that are needed.
//!
//! `LATCHWORK_CASES` sets how many sequences are tried, `LATCHWORK_SEED` the seed of the first.

mod command;
mod filter;
mod reference;
mod world;

use self::command::Command;
use self::world::World;

/// How long a sequence is.
const COMMANDS: usize = 60;

/// The backend of the compared entities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    Memory,
    Files,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number in the environment"))
}

/// Plays one sequence to its end, or to the first difference.
fn play(kept: Kept, commands: &[Command]) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut world = World::new(kept).await;
        for command in commands {
            world.play(command).await.map_err(|difference| format!("{command:?}\n{difference}"))?;
            world.check_generation().await.map_err(|difference| format!("after {command:?}\n{difference}"))?;
        }
        world.finish().await
    })
}

/// Removes commands for as long as the sequence still fails.
fn cut_down(kept: Kept, mut commands: Vec<Command>) -> Vec<Command> {
    let mut size = commands.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < commands.len() {
            let mut fewer = commands.clone();
            fewer.drain(at..commands.len().min(at + size));
            if play(kept, &fewer).is_err() {
                commands = fewer;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    commands
}

fn compare(kept: Kept) {
    let first = number("LATCHWORK_SEED", 1);
    for seed in first..first + number("LATCHWORK_CASES", 300) {
        let commands = command::sequence(&mut fastrand::Rng::with_seed(seed), COMMANDS);
        if play(kept, &commands).is_err() {
            let commands = cut_down(kept, commands);
            let difference = play(kept, &commands).expect_err("a sequence fails each time or never");
            let commands: Vec<_> = commands.iter().map(|command| format!("  {command:?}")).collect();
            panic!("LATCHWORK_SEED={seed} LATCHWORK_CASES=1 on {kept:?}: {difference}\nafter\n{}", commands.join("\n"));
        }
    }
}

#[test]
fn memory_answers_as_the_reference_does() {
    compare(Kept::Memory);
}

#[test]
fn files_answer_as_the_reference_does() {
    compare(Kept::Files);
}
