//! Several processes on one database: four that write, with eight tasks each, and a watch in this one. The watch sees
//! each generation once and in order. `LATCHWORK_COMMITS` sets how many commits are made.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use latchwork_store::*;

use crate::power_loss::number;
use crate::server::Server;

/// What a process that writes is told: the connection string, its number, and how many commits each task makes.
const URL: &str = "LATCHWORK_WRITER_URL";
const NUMBER: &str = "LATCHWORK_WRITER_NUMBER";
const COUNT: &str = "LATCHWORK_WRITER_COUNT";
const SCHEMA: &str = "LATCHWORK_WRITER_SCHEMA";

const PROCESSES: u64 = 4;
const TASKS: u64 = 8;
/// One commit of that many raises a counter that all tasks share.
const SHARED: u64 = 20;

async fn opened(schema: &str, url: &str) -> (Store, Space) {
    let options = PostgresOptions::new().schema(schema).connections(2).patience(Duration::from_secs(120));
    let store = options.connect(url).await.unwrap();
    let space = store.space(SpaceSpec::new("counters").history(History::Forever)).await.unwrap();
    (store, space)
}

fn value(item: &Item) -> u64 {
    String::from_utf8_lossy(&item.value).parse().unwrap()
}

/// Adds one to the shared counter, by compare and swap.
async fn raise(store: &Store, key: &Key) {
    loop {
        let item = store.view().await.unwrap().get(key).await.unwrap();
        let commit = match &item {
            Some(item) => Commit::new().at_rev(key, item.rev),
            None => Commit::new().absent(key),
        };
        let next = item.as_ref().map_or(0, value) + 1;
        if store.commit(commit.put(key, next.to_string())).await.unwrap().is_applied() {
            return;
        }
    }
}

/// Raises a counter of its own with each commit, and now and then the shared one.
async fn write(store: Store, space: Space, name: String, count: u64) {
    let (own, shared) = (space.key(name), space.key("shared"));
    let (mut rev, mut raised) = (None, 0_u64);
    for made in 1..=count {
        if made % SHARED == 0 {
            raise(&store, &shared).await;
            continue;
        }
        raised += 1;
        let commit = match rev {
            Some(rev) => Commit::new().at_rev(&own, rev),
            None => Commit::new().absent(&own),
        };
        let receipt = store.commit(commit.put(&own, raised.to_string())).await.unwrap();
        rev = receipt.applied().expect("no other task writes it").revs[0];
        assert_eq!(rev, Some(Rev(raised)), "a rev for each commit");
    }
}

/// Not a test itself: this is a process that writes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_process_that_writes() {
    let Ok(url) = std::env::var(URL) else { return };
    let (process, count) = (number(NUMBER, 0), number(COUNT, 0));
    let (store, space) = opened(&std::env::var(SCHEMA).unwrap(), &url).await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(write(store.clone(), space.clone(), format!("{process}/{task}"), count));
    }
    tasks.join_all().await;
    store.close().await.unwrap();
}

fn start(url: &str, schema: &str, process: u64, count: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::a_process_that_writes", "--nocapture"])
        .env(URL, url)
        .env(SCHEMA, schema)
        .env(NUMBER, process.to_string())
        .env(COUNT, count.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_watch_sees_the_commits_of_four_processes_once_and_in_order() {
    let (server, commits) = (Server::start(), number("LATCHWORK_COMMITS", 3200));
    let schema = format!("t_{}_processes", std::process::id());
    let (store, space) = opened(&schema, &server.url).await;
    let begun = store.generation().await.unwrap();
    let mut watch = store.watch(space.all(), begun).await.unwrap();
    let each = commits / (PROCESSES * TASKS);
    let began = store.env().monotonic();
    let children: Vec<Child> = (0..PROCESSES).map(|process| start(&server.url, &schema, process, each)).collect();
    let (mut last, expected) = (begun, each * PROCESSES * TASKS);
    let mut revs = std::collections::BTreeMap::new();
    for _ in 0..expected {
        let committed = tokio::time::timeout(Duration::from_secs(120), watch.next()).await.unwrap().unwrap();
        assert_eq!(committed.generation, last.next(), "no generation is missing, and none comes twice");
        last = committed.generation;
        let [change] = &committed.changes[..] else { panic!("one key a commit") };
        let rev: &mut Rev = revs.entry(change.key.clone()).or_default();
        assert_eq!(change.rev, rev.next(), "of each key, every rev comes once and in order");
        *rev = change.rev;
    }
    let took = store.env().monotonic() - began;
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process that writes has failed");
    }
    let view = store.view().await.unwrap();
    assert_eq!(view.generation(), Generation(begun.0 + expected), "there are no other commits");
    let found = view.scan(&space.all(), Order::Ascending, 100).await.unwrap();
    assert_eq!(found.iter().map(|(_, item)| value(item)).sum::<u64>(), expected, "no update was lost");
    println!(
        "{expected} commits of {} writers, {:.0} a second",
        PROCESSES * TASKS,
        expected as f64 / took.as_secs_f64()
    );
}
