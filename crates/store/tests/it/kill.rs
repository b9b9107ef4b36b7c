//! A process under load is killed again and again, at random moments. Every commit that it reported as applied is
//! there, once. `LATCHWORK_KILLS` sets how often.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use latchwork_store::*;

use crate::power_loss::number;

/// The variable with the data directory of the process that is killed.
const DIRECTORY: &str = "LATCHWORK_KILL_DIRECTORY";
const TASKS: u64 = 4;

fn options() -> FileOptions {
    let mut limits = Limits::default();
    limits.commit_bytes = 16 << 10;
    limits.operations = 64;
    let options = FileOptions::new().limits(limits).segment_bytes(256 << 10).overlay_bytes(128 << 10);
    options.fold_interval(Duration::from_millis(5))
}

async fn space(store: &Store) -> Space {
    store.space(SpaceSpec::new("work").history(History::Generations(50))).await.unwrap()
}

async fn value(store: &Store, key: &Key) -> (Option<Rev>, u64) {
    let item = store.view().await.unwrap().get(key).await.unwrap();
    let number = |item: &Item| String::from_utf8_lossy(&item.value).parse().unwrap();
    item.map_or((None, 0), |item| (Some(item.rev), number(&item)))
}

fn at(commit: Commit, key: &Key, rev: Option<Rev>) -> Commit {
    match rev {
        Some(rev) => commit.at_rev(key, rev),
        None => commit.absent(key),
    }
}

fn say(what: std::fmt::Arguments<'_>) {
    let line = format!("{what}\n");
    std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
}

/// Increments a number of this task and, with an id and retries, a number that all tasks share.
async fn work(store: Store, task: u64) {
    let space = space(&store).await;
    let (own, shared) = (space.key(format!("task {task}")), space.key("shared"));
    loop {
        let (rev, before) = value(&store, &own).await;
        let next = (before + 1).to_string();
        store.commit(at(Commit::new(), &own, rev).put(&own, next)).await.unwrap().applied().unwrap();
        say(format_args!("own {task} {}", before + 1));
        loop {
            let (rev, before) = value(&store, &shared).await;
            let (_, added) = value(&store, &space.key(format!("added by {task}"))).await;
            let commit = at(Commit::new(), &shared, rev)
                .put(&shared, (before + 1).to_string())
                .put(&space.key(format!("added by {task}")), (added + 1).to_string())
                .id(store.commit_id());
            if let Outcome::Applied(first) = store.commit(commit.clone()).await.unwrap() {
                // Sends the same commit again, as after a lost connection.
                let again = store.commit(commit).await.unwrap().applied().unwrap();
                assert!(again.repeated && again.generation == first.generation);
                say(format_args!("added {task} {}", added + 1));
                break;
            }
        }
    }
}

/// Not a test itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let store = options().open(directory).await.unwrap();
    say(format_args!("open"));
    let tasks: Vec<_> = (0..TASKS).map(|task| tokio::spawn(work(store.clone(), task))).collect();
    for task in tasks {
        task.await.unwrap();
    }
}

/// Runs the process for `life` after it has opened the store. Adds the lines that it printed to `said`.
fn run_and_kill(directory: &Path, life: Duration, said: &mut BTreeMap<String, u64>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::the_process_that_is_killed", "--nocapture"])
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let (opened, open) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        for line in stdout.lines().map_while(|line| line.ok()) {
            if line.ends_with("open") {
                let _ = opened.send(());
            }
            said.push(line);
        }
        said
    });
    open.recv_timeout(Duration::from_secs(30)).expect("the process opens the store");
    let _ = open.recv_timeout(life);
    child.kill().unwrap();
    child.wait().unwrap();
    for line in reader.join().unwrap() {
        let words: Vec<&str> = line.split(' ').collect();
        if let [what @ ("own" | "added"), task, number] = words[..] {
            let last = said.entry(format!("{what} {task}")).or_default();
            let number = number.parse().unwrap();
            assert!(number > *last, "{line} was printed after {last}");
            *last = number;
        }
    }
}

#[tokio::test]
async fn a_killed_process_loses_nothing_and_repeats_nothing() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED", 1));
    let mut said = BTreeMap::new();
    for _ in 0..number("LATCHWORK_KILLS", 10) {
        run_and_kill(&directory, Duration::from_millis(random.u64(1..=200)), &mut said);
        let store = options().open(&directory).await.unwrap();
        let space = space(&store).await;
        let mut sum = 0;
        for task in 0..TASKS {
            let own = space.key(format!("task {task}"));
            let (rev, counted) = value(&store, &own).await;
            let last = said.get(&format!("own {task}")).copied().unwrap_or(0);
            assert!(counted == last || counted == last + 1, "task {task} reported {last} and is at {counted}");
            assert_eq!(rev.map_or(0, |rev| rev.0), counted, "a rev for every number");
            let (_, added) = value(&store, &space.key(format!("added by {task}"))).await;
            let last = said.get(&format!("added {task}")).copied().unwrap_or(0);
            assert!(added == last || added == last + 1, "task {task} reported {last} additions, not {added}");
            // A commit that was applied but not reported counts from now on.
            said.insert(format!("own {task}"), counted);
            said.insert(format!("added {task}"), added);
            sum += added;
        }
        let (rev, shared) = value(&store, &space.key("shared")).await;
        assert_eq!((rev.map_or(0, |rev| rev.0), shared), (sum, sum), "every addition once");
        assert_eq!(store.verify().await.unwrap(), []);
        if random.bool() {
            store.close().await.unwrap();
        }
    }
    println!("{said:?}");
}
