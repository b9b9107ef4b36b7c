//! SIGKILL on the file store, again and again, with many executions running: nothing is lost, nothing is recorded
//! twice.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, History, Retry, Workflow, workflow};

const DIRECTORY: &str = "LATCHWORK_WORKFLOW_DIRECTORY";
const EXECUTIONS: u32 = 1000;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Five steps with a short sleep in the middle. Each result is unique to its execution and place. A slot counts the
/// executions that reach the end.
fn chain() -> Workflow<u32, Vec<String>> {
    workflow("chain").run(async |ctx: Ctx, n: u32| {
        let mut results = Vec::new();
        for step in 0..5 {
            let body = ctx.run("step", async || Ok(format!("{n}.{step}"))).input(&step);
            // The body is never the reason why the process ends.
            results.push(body.retry(Retry::exponential()).await?);
            if step == 2 {
                ctx.sleep(Duration::from_millis(u64::from(n % 20))).await?;
            }
        }
        ctx.state().global::<u64>("there").increment(1).await?;
        ctx.run("end", async || Ok(())).retry(Retry::exponential()).await?;
        Ok(results)
    })
}

/// Not a test by itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let engine = Engine::open(directory).register(&chain()).start().await.unwrap();
    println!("open");
    let mut starts = tokio::task::JoinSet::new();
    for n in 0..EXECUTIONS {
        let engine = engine.clone();
        starts.spawn(async move {
            let handle = engine.start(&chain(), n).id(format!("{n}")).or_join().await.unwrap();
            println!("started {n}");
            handle.result().await.unwrap();
            println!("done {n}");
        });
    }
    starts.join_all().await;
    println!("all done");
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn killed_processes_lose_nothing() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED", 1));
    let (mut started, mut done) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    let mut left = number("LATCHWORK_KILLS", 8);
    // On a slow machine a process may be killed before its first start: then the run would prove nothing.
    while left > 0 || started.is_empty() {
        left = left.saturating_sub(1);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "workflow::kill::the_process_that_is_killed", "--nocapture"])
            .env(DIRECTORY, &directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (opened, open) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            let mut said = Vec::new();
            for line in lines.lines().map_while(Result::ok) {
                if line.ends_with("open") {
                    let _ = opened.send(());
                }
                said.push(line);
            }
            said
        });
        open.recv_timeout(Duration::from_secs(30)).expect("the process opens the store");
        let _ = open.recv_timeout(Duration::from_millis(random.u64(1..=60)));
        child.kill().unwrap();
        child.wait().unwrap();
        for line in reader.join().unwrap() {
            match line.split_once(' ') {
                Some(("started", n)) => drop(started.insert(n.to_string())),
                Some(("done", n)) => drop(done.insert(n.to_string())),
                _ => {}
            }
        }
    }
    let engine = Engine::open(&directory).register(&chain()).start().await.unwrap();
    for n in &started {
        let result = engine.handle(&chain(), n.as_str()).result().await.unwrap();
        let expected: Vec<String> = (0..5).map(|step| format!("{n}.{step}")).collect();
        assert_eq!(result, expected);
    }
    assert!(done.is_subset(&started), "what was done had been started");
    let all = History::ids(engine.store()).await.unwrap();
    for (id, _) in &all {
        engine.handle(&chain(), id).result().await.unwrap();
    }
    let there = engine.states().global().slot::<u64>("there").get().await.unwrap();
    assert_eq!(there, Some(all.len() as u64), "each was counted once");
    assert!(engine.parked().await.unwrap().is_empty());
    assert_eq!(engine.store().verify().await.unwrap(), []);
    println!("{} started, {} done before the last life", started.len(), done.len());
}
