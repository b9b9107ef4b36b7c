//! Opening after SIGKILL. A child process writes and is killed. Another child opens the store, so that its memory can
//! be measured alone.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use latchwork_store::Store;

use crate::load::callers;
use crate::report::{Figure, Report, median, resident_mb};

pub(crate) fn open(report: &mut Report) {
    if !report.wants("store.open") {
        return;
    }
    let (few, many) = if report.quick { (1_000, 100_000) } else { (10_000, 1_000_000) };
    let rounds = if report.quick { 1 } else { 3 };
    let (small, _) = measure(few, rounds);
    let (large, memory) = measure(many, rounds);
    let target = "≤ 3";
    report.add(Figure { name: "store.open", value: large, unit: "ms", floor: small, target });
    report.add(Figure { name: "store.open.memory", value: memory, unit: "MB resident", floor: 200.0, target: "≤ 1" });
}

/// Returns the median time to open after `commits` commits, and the largest memory seen.
fn measure(commits: u64, rounds: usize) -> (f64, f64) {
    let (mut times, mut memory) = (Vec::new(), 0.0f64);
    for _ in 0..rounds {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("store");
        load_and_kill(&path, commits);
        // Only the first open after the kill is measured: it changes the directory for later ones.
        let output = Command::new(std::env::current_exe().expect("this program"))
            .arg("child-open")
            .arg(&path)
            .output()
            .expect("a child");
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut numbers = output.split_whitespace().filter_map(|number| number.parse::<f64>().ok());
        times.push(numbers.next().expect("the time to open"));
        memory = memory.max(numbers.next().expect("the memory after it"));
    }
    (median(times), memory)
}

fn load_and_kill(path: &Path, commits: u64) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .arg("child-load")
        .arg(path)
        .arg(commits.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let mut line = String::new();
    let output = child.stdout.take().expect("the child's output");
    BufReader::new(output).read_line(&mut line).expect("a line of the child");
    assert_eq!(line.trim(), "loaded");
    child.kill().expect("a kill");
    child.wait().expect("its end");
}

/// Commits until there are enough, prints a line, and continues until it is killed.
pub(crate) fn child_load<'a>(mut words: impl Iterator<Item = &'a str>) {
    let path = words.next().expect("a directory");
    let commits: i64 = words.next().and_then(|count| count.parse().ok()).expect("a count");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    let (store, space) = crate::write::opened(&runtime, Path::new(path));
    let left = Arc::new(AtomicI64::new(commits));
    let tasks: Vec<_> = callers(&space, 256)
        .into_iter()
        .map(|mut caller| {
            let (store, left) = (store.clone(), left.clone());
            runtime.spawn(async move {
                while left.fetch_sub(1, Ordering::Relaxed) > 0 {
                    caller.commit(&store).await;
                }
            })
        })
        .collect();
    runtime.block_on(async {
        for task in tasks {
            task.await.expect("a caller");
        }
    });
    println!("loaded");
    let _ = std::io::stdout().flush();
    loop {
        std::thread::park();
    }
}

pub(crate) fn child_open<'a>(mut words: impl Iterator<Item = &'a str>) {
    let path = words.next().expect("a directory");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let begin = Instant::now();
    let store = runtime.block_on(Store::open(path)).expect("the store opens");
    let time = begin.elapsed().as_secs_f64() * 1e3;
    println!("{time} {}", resident_mb());
    drop(store);
}
