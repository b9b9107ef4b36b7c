//! SIGKILL on the file store, again and again, while transfers move money under mutexes. No money is lost or created,
//! no two holders are inside at once, and every execution ends.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use latchwork::lock::LockRefused;
use latchwork::workflow::{Ctx, Engine, History, Retry, Workflow, workflow};

use crate::workflow::simulation::number;

const DIRECTORY: &str = "LATCHWORK_LOCK_DIRECTORY";
const ACCOUNTS: u32 = 12;
const TRANSFERS: u32 = 60;
const BALANCE: i64 = 1000;

fn account(n: u32) -> String {
    format!("account-{n}")
}

/// Moves an amount in two writes, with time in between, under the mutexes of both accounts. Some transfers take the
/// mutexes in the wrong order. Returns whether it was alone.
fn transfer() -> Workflow<u32, bool> {
    workflow("transfer").run(async |ctx: Ctx, n: u32| {
        let (from, to) = (n % ACCOUNTS, (n + 1 + n / ACCOUNTS % (ACCOUNTS - 1)) % ACCOUNTS);
        let (one, other) = if n.is_multiple_of(5) { (from, to) } else { (from.min(to), from.max(to)) };
        let guards = loop {
            let first = ctx.mutex(account(one)).acquire().await?;
            match ctx.mutex(account(other)).acquire().await {
                Ok(second) => break (first, second),
                Err(failure) if matches!(failure.get(), Some(LockRefused::Deadlock { .. })) => {
                    first.release().await?;
                    ctx.sleep(Duration::from_millis(u64::from(n % 7))).await?;
                }
                Err(failure) => return Err(failure),
            }
        };
        let mut is_alone = true;
        for n in [from, to] {
            let inside = ctx.state().global::<i64>(&format!("inside-{n}"));
            is_alone &= inside.update(|inside| inside.unwrap_or(0) + 1).await?.value == 1;
        }
        let amount = i64::from(n % 17);
        let (from_slot, to_slot) = (ctx.state().global::<i64>(&account(from)), ctx.state().global::<i64>(&account(to)));
        let (left, there) = (from_slot.get().await?.unwrap_or(BALANCE), to_slot.get().await?.unwrap_or(BALANCE));
        from_slot.set(left - amount).await?;
        ctx.run("pause", async || Ok(())).retry(Retry::exponential()).await?;
        to_slot.set(there + amount).await?;
        for n in [from, to] {
            let inside = ctx.state().global::<i64>(&format!("inside-{n}"));
            is_alone &= inside.update(|inside| inside.unwrap_or(0) - 1).await?.value == 0;
        }
        if n.is_multiple_of(3) {
            guards.0.release().await?;
        }
        Ok(is_alone)
    })
}

/// Takes the mutexes of accounts away from transfers for a moment, as code outside of workflows.
async fn visit(engine: Engine) {
    let session = engine.locks().session().lease(Duration::from_millis(300)).await.unwrap();
    for n in (0..ACCOUNTS).cycle() {
        let Ok(guard) = engine.mutex(account(n)).by(&session).acquire().await else { return };
        tokio::task::yield_now().await;
        if guard.release().await.is_err() {
            return;
        }
    }
}

/// Not a test by itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let engine = Engine::open(directory).register(&transfer()).start().await.unwrap();
    println!("open");
    tokio::spawn(visit(engine.clone()));
    for n in 0..TRANSFERS {
        engine.start(&transfer(), n).id(format!("{n}")).or_join().await.unwrap();
    }
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn killed_processes_leave_no_lock_and_no_money_behind() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED").unwrap_or(1));
    for _ in 0..number("LATCHWORK_KILLS").unwrap_or(8) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "lock::kill::the_process_that_is_killed", "--nocapture"])
            .env(DIRECTORY, &directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line.ends_with("open"))), "the process opens the store");
        let (_sender, never) = std::sync::mpsc::channel::<()>();
        let _ = never.recv_timeout(Duration::from_millis(random.u64(1..=150)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let engine = Engine::open(&directory).register(&transfer()).start().await.unwrap();
    let all = History::ids(engine.store()).await.unwrap();
    for (id, _) in &all {
        let ended = tokio::time::timeout(Duration::from_secs(60), engine.handle(&transfer(), id).result()).await;
        assert!(ended.expect("it ends").unwrap(), "{id} was not alone");
    }
    let mut sum = 0;
    for n in 0..ACCOUNTS {
        sum += engine.states().global().slot::<i64>(&account(n)).get().await.unwrap().unwrap_or(BALANCE);
        // Sessions of killed processes hold a mutex for the rest of their lease, and no longer.
        let mutex = engine.mutex(account(n)).acquire_within(Duration::from_secs(60));
        mutex.await.unwrap().expect("the lock is released").release().await.unwrap();
        let state = engine.locks().inspect(account(n)).await.unwrap();
        assert_eq!((state.waiting, state.used), (0, 0), "{state:?}");
    }
    assert_eq!(sum, BALANCE * i64::from(ACCOUNTS));
    assert!(engine.parked().await.unwrap().is_empty());
    assert_eq!(engine.store().verify().await.unwrap(), []);
    println!("{} transfers", all.len());
}
