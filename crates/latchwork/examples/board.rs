//! A task board: tasks with dependencies, and workers that claim them under a lease. A worker that stops loses its
//! claim, and another one does the task.
//!
//!     cargo run -p latchwork --example board --features flow

// The examples run in real time.
#![allow(clippy::disallowed_methods)]

use std::error::Error;
use std::time::Duration;

use latchwork::flow::{Board, BoardState, Dispatch, NewTask};
use latchwork::store::Store;

const LEASE: Duration = Duration::from_millis(300);

async fn work(board: Board, worker: &'static str, stops: bool) -> Result<(), Box<dyn Error + Send + Sync>> {
    while board.state().await? == BoardState::Open {
        let Some(claimed) = board.claim(worker, LEASE).await? else {
            // Other workers are at the tasks that these depend on, or a lease has to run out.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        println!("{worker}: {} (attempt {})", claimed.task.id, claimed.task.attempts);
        if stops {
            println!("{worker} stops in the middle of {}", claimed.task.id);
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        board.complete(claimed, format!("done by {worker}")).await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let store = Store::memory().await?; // or Store::open("./data")
    let board = Board::open(&store, "release").await?.dispatch(Dispatch::Topology).attempts(3);
    board
        .add([
            NewTask::new("build", "cargo build"),
            NewTask::new("test", "cargo test").after("build"),
            NewTask::new("docs", "cargo doc").after("build"),
            NewTask::new("publish", "cargo publish").after("test").after("docs"),
        ])
        .await?;
    let lazy = tokio::spawn(work(board.clone(), "lazy", true));
    lazy.await??;
    let workers = ["ada", "grace"].map(|worker| tokio::spawn(work(board.clone(), worker, false)));
    for worker in workers {
        worker.await??;
    }
    for task in board.tasks().await? {
        println!("{}: {:?} after {} attempts", task.id, task.state, task.attempts);
    }
    assert_eq!(board.state().await?, BoardState::AllCompleted);
    Ok(())
}
