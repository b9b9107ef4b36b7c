//! The programs in a process of their own that is killed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use latchwork::entity::{Entities, Query, field};
use latchwork::store::FileOptions;

use super::{add_if_missing, assert_well, counter, lock_document};

/// Names the data directory for the process that is to be killed.
const DIRECTORY: &str = "LATCHWORK_KILL_DIRECTORY";
const TASKS: u64 = 4;
const TTL: Duration = Duration::from_millis(50);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number in the environment"))
}

/// Small segments that are folded often, so that the process also dies while it does that.
async fn open(directory: &Path) -> Entities {
    let mut limits = latchwork::store::Limits::default();
    limits.commit_bytes = 64 << 10;
    limits.operations = 1000;
    let options = FileOptions::new().limits(limits).segment_bytes(256 << 10).overlay_bytes(128 << 10);
    let store = options.fold_interval(Duration::from_millis(5)).open(directory).await.expect("the directory opens");
    Entities::on(&store).await.expect("the entities open")
}

/// One write, so that a line is there as a whole or not at all.
fn say(what: std::fmt::Arguments<'_>) {
    let line = format!("{what}\n");
    std::io::stdout().lock().write_all(line.as_bytes()).expect("the parent listens");
}

/// Increments a counter of its own by hand and one that all tasks share, takes addresses that other tasks want as well,
/// and sometimes the lock. Reports each action when it is done.
async fn work(entities: Entities, task: u64) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let own = format!("own {task}");
    let mut count = counter::bootstrap(&entities, &own).await?;
    loop {
        count += 1;
        counter::increment_by_hand(&entities, &own, 1, 1).await?;
        say(format_args!("own {task} {count}"));
        counter::increment(&entities, "shared", 1, 5).await?;
        say(format_args!("shared {task} {count}"));
        let email = format!("{}@example.org", count / 2);
        let (id, _) = add_if_missing::by_unique_email(&entities, "Ada", &email).await?;
        say(format_args!("email {email} {id}"));
        if let Some(rev) = lock_document::try_acquire(&entities, &own, TTL).await? {
            say(format_args!("lock {task} {rev}"));
            lock_document::release(&entities, rev).await?;
        }
    }
}

/// Not a test by itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let entities = open(Path::new(&directory)).await;
    // The process before this one may have left the index half built.
    add_if_missing::declare(&entities).await.unwrap();
    lock_document::bootstrap(&entities).await.unwrap();
    counter::bootstrap(&entities, "shared").await.unwrap();
    say(format_args!("open"));
    let tasks: Vec<_> = (0..TASKS).map(|task| tokio::spawn(work(entities.clone(), task))).collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

/// Runs the process for a while after it has opened the store, and returns what it reported.
fn run_and_kill(directory: &Path, life: Duration) -> Vec<Vec<String>> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "entity::examples::kill::the_process_that_is_killed", "--nocapture"])
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
            said.push(line.split(' ').map(String::from).collect());
        }
        said
    });
    open.recv_timeout(Duration::from_secs(30)).expect("the process opens the store");
    let _ = open.recv_timeout(life);
    // SIGKILL: nothing is flushed, closed or reported.
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap()
}

/// What the processes have reported so far, and what was found in the store.
#[derive(Default)]
struct Said {
    own: BTreeMap<u64, i64>,
    shared: i64,
    emails: BTreeMap<String, String>,
    lock: u64,
}

impl Said {
    async fn check(&mut self, entities: &Entities, lines: &[Vec<String>]) {
        let mut shared = 0;
        for line in lines {
            match &line.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["own", task, count] => drop(self.own.insert(task.parse().unwrap(), count.parse().unwrap())),
                ["shared", ..] => shared += 1,
                ["email", email, id] => {
                    let before = self.emails.insert(email.to_string(), id.to_string());
                    assert!(before.is_none_or(|before| before == *id), "{email} belonged to another before {id}");
                }
                ["lock", _, rev] => self.lock = self.lock.max(rev.parse().unwrap()),
                _ => {}
            }
        }
        for task in 0..TASKS {
            let (id, last) = (format!("own {task}"), self.own.get(&task).copied().unwrap_or(0));
            let found = counter::bootstrap(entities, &id).await.unwrap();
            assert!(found == last || found == last + 1, "task {task} said {last} and is at {found}");
            self.own.insert(task, found);
        }
        // Every task may have done one more action than it reported.
        let (found, least) = (counter::value(entities, "shared").await.unwrap(), self.shared + shared);
        assert!((least..=least + TASKS as i64).contains(&found), "{least} were said and {found} are there");
        self.shared = found;
        let rev = entities.get("shared").await.unwrap().unwrap().rev.0;
        assert_eq!(rev, 1 + found as u64, "a rev for every increment");
        self.check_people(entities).await;
        let lock = lock_document_rev(entities).await;
        assert!(lock >= self.lock, "the lock was taken at rev {} and is at {lock}", self.lock);
    }

    /// Each reported address belongs to the reported person, and no address is there twice.
    async fn check_people(&mut self, entities: &Entities) {
        let people = entities.find(&Query::of("person").limit(1_000_000)).await.unwrap();
        let mut owners = BTreeMap::new();
        for person in people.items {
            let email = person.metadata["email"].as_str().unwrap().to_string();
            let before = owners.insert(email.clone(), person.id.to_string());
            assert_eq!(before, None, "{email} is there twice");
            let query = Query::of("person").filter(field("metadata.email").equals(&email));
            let found = entities.find_explained(&query).await.unwrap();
            assert!(found.page.items.len() == 1 && !found.plan.scans(), "{email} is found by its index: {found:?}");
        }
        for (email, id) in &self.emails {
            assert_eq!(owners.get(email), Some(id), "{email} was said to be there");
        }
        self.emails = owners;
    }
}

async fn lock_document_rev(entities: &Entities) -> u64 {
    let lock = entities.find(&Query::of("lock")).await.unwrap().items.pop().expect("the lock document is there");
    lock.rev.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_nothing_and_doubles_nothing() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    let mut random = fastrand::Rng::with_seed(number("LATCHWORK_SEED", 1));
    let mut said = Said::default();
    for _ in 0..number("LATCHWORK_KILLS", 5) {
        let lines = run_and_kill(&directory, Duration::from_millis(random.u64(1..=200)));
        let entities = open(&directory).await;
        said.check(&entities, &lines).await;
        assert_well(&entities).await;
        assert_eq!(entities.store().verify().await.unwrap(), []);
    }
    // A lock that was held when its holder died is free when its time is up.
    let entities = open(&directory).await;
    latchwork::store::Env::system().sleep(TTL * 2).await;
    let rev = lock_document::try_acquire(&entities, "the next one", TTL).await.unwrap();
    assert!(rev.is_some_and(|rev| rev.0 > said.lock));
    println!("{} shared, {} addresses", said.shared, said.emails.len());
}
