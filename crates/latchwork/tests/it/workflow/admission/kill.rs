//! SIGKILL on the file store, again and again, with a limit of two and a long queue: every start is served once, never
//! more than two run at a time, and no permit is left over.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Failure, History, Queue, Retry, Tx, Workflow, workflow};

use crate::workflow::simulation::number;

const DIRECTORY: &str = "LATCHWORK_ADMISSION_DIRECTORY";
const STARTS: usize = 1000;
const LIMIT: usize = 2;

/// Records in one slot that it is inside, and later that it is outside again. Records in another slot that it was
/// there. The execution fails if it is the third execution inside, or if it was inside before.
fn visit() -> Workflow<usize, usize> {
    workflow("visit").concurrency(LIMIT as u32).when_full(Queue::new()).run(async |ctx: Ctx, n: usize| {
        let enter = ctx.transaction("enter", async |tx: Tx| {
            let slot = tx.global::<Vec<usize>>("inside");
            let mut inside = slot.get().await?.unwrap_or_default();
            inside.push(n);
            if inside.len() > LIMIT {
                return Err(Failure::new(format!("{inside:?} are inside")));
            }
            slot.set(inside.clone()).await?;
            Ok(inside.len())
        });
        let seen = enter.await?;
        ctx.run("look around", async || Ok(())).retry(Retry::exponential()).await?;
        let leave = ctx.transaction("leave", async |tx: Tx| {
            let slot = tx.global::<Vec<usize>>("inside");
            let mut inside = slot.get().await?.unwrap_or_default();
            let place = inside.iter().position(|other| *other == n);
            inside.remove(place.ok_or_else(|| Failure::new(format!("{n} is not among {inside:?}")))?);
            slot.set(inside).await?;
            let visits = tx.global::<u32>(&format!("visits-{n}"));
            let before = visits.get().await?.unwrap_or(0);
            if before > 0 {
                return Err(Failure::new(format!("{n} was here before")));
            }
            visits.set(1).await?;
            tx.global::<u64>("visits").increment(1).await?;
            Ok(())
        });
        leave.await?;
        Ok(seen)
    })
}

/// Not a test by itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let engine = Engine::open(directory).register(&visit()).start().await.unwrap();
    println!("open");
    let visits = engine.states().global().slot::<u64>("visits");
    let env = engine.store().env().clone();
    tokio::spawn(async move {
        let mut told = None;
        loop {
            let served = visits.get().await.unwrap().unwrap_or(0);
            if told.replace(served) != Some(served) {
                println!("served {served}");
            }
            env.sleep(Duration::from_millis(1)).await;
        }
    });
    let mut starts = tokio::task::JoinSet::new();
    for n in 0..STARTS {
        let engine = engine.clone();
        starts.spawn(async move {
            let start = engine.start(&visit(), n).id(n.to_string()).or_join();
            start.await.unwrap().result().await.unwrap();
        });
    }
    starts.join_all().await;
    std::future::pending::<()>().await;
}

/// When a process is killed.
enum KillAfter {
    /// Some time after it has opened the store: while the queue fills, or right after a recovery.
    Opening(Duration),
    /// When it has served this many: while the queue drains.
    Served(u64),
}

/// Runs the process and kills it. Returns how many were served when it was killed, as far as it has told.
fn kill(directory: &std::path::Path, after: KillAfter) -> u64 {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "workflow::admission::kill::the_process_that_is_killed", "--nocapture"])
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with("open")), "the process opens the store");
    let mut served = lines.filter_map(|line| line.strip_prefix("served ")?.parse::<u64>().ok());
    let told = match after {
        KillAfter::Opening(time) => {
            let (_sender, never) = std::sync::mpsc::channel::<()>();
            let _ = never.recv_timeout(time);
            0
        }
        KillAfter::Served(count) => {
            let before = served.next().expect("the process tells how many are served");
            served.find(|now| *now >= before + count).expect("the process serves on")
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    told
}

/// After this many kills the test uses a new store: a queue that is already empty proves nothing.
const KILLS_OF_A_QUEUE: u64 = 8;

#[tokio::test]
async fn killed_processes_exceed_no_limit_and_leak_no_permit() {
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED").unwrap_or(1));
    let mut left = number("LATCHWORK_KILLS").unwrap_or(KILLS_OF_A_QUEUE);
    while left > 0 {
        let kills = left.min(KILLS_OF_A_QUEUE);
        left -= kills;
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("data");
        let mut drained = 0;
        for kill_number in 0..kills {
            let after = match kill_number % 2 {
                0 => KillAfter::Opening(Duration::from_millis(random.u64(1..=60))),
                _ => KillAfter::Served(random.u64(1..=STARTS as u64 / KILLS_OF_A_QUEUE)),
            };
            let served = kill(&directory, after);
            drained += u64::from((1..STARTS as u64).contains(&served));
        }
        assert_eq!(drained, kills / 2, "these kills hit a queue that was being served");
        judge(&directory).await;
    }
}

/// The last process serves all executions that are left.
async fn judge(directory: &std::path::Path) {
    let engine = Engine::open(directory).register(&visit()).start().await.unwrap();
    let earlier = History::ids(engine.store()).await.unwrap().len();
    let served = async || engine.states().global().slot::<u64>("visits").get().await.unwrap().unwrap_or(0);
    let before = served().await;
    let mut handles = Vec::new();
    for n in 0..STARTS {
        handles.push(engine.start(&visit(), n).id(n.to_string()).or_join().await.unwrap());
    }
    let mut most = 0;
    for handle in &handles {
        let ended = tokio::time::timeout(Duration::from_secs(60), handle.result()).await;
        most = most.max(ended.expect("it ends").unwrap());
    }
    assert_eq!(most, LIMIT, "two were inside at once, and the transaction has seen no third");
    assert_eq!(served().await, STARTS as u64, "each was served once");
    for n in 0..STARTS {
        let visits = engine.states().global().slot::<u32>(&format!("visits-{n}")).get().await.unwrap();
        assert_eq!(visits, Some(1), "{n}");
    }
    assert_eq!(History::ids(engine.store()).await.unwrap().len(), STARTS, "each start is one execution");
    let limit = engine.limit_use("visit", None).await.unwrap();
    assert_eq!((limit.used, limit.waiting), (0, 0));
    assert!(engine.parked().await.unwrap().is_empty());
    assert_eq!(engine.store().verify().await.unwrap(), []);
    println!("{earlier} started and {before} served before the last life");
}
