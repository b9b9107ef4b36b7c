//! Code that the suites share: runtimes, stores, workflows, child processes and measurements in turn.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use latchwork::store::{Space, SpaceSpec, Store};
use latchwork::workflow::{Ctx, Workflow, WorkflowBuilder, workflow};
use tokio::runtime::Runtime;

use crate::load::callers;
use crate::report::median;

pub(crate) fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be started")
}

/// A store for the callers of the suite `store`.
pub(crate) async fn store(directory: &Path) -> (Store, Space) {
    let store = Store::open(directory).await.expect("a store");
    let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
    (store, space)
}

/// A workflow of `count` steps that only add numbers.
pub(crate) fn steps_of(name: &str, count: u64) -> Workflow<u64, u64> {
    steps_in(workflow(name), count)
}

/// The same with limits.
pub(crate) fn steps_in(builder: WorkflowBuilder, count: u64) -> Workflow<u64, u64> {
    builder.run(move |ctx: Ctx, input: u64| async move {
        let mut sum = input;
        for _ in 0..count {
            sum = ctx.run("add", async || Ok(sum + 1)).await?;
        }
        Ok(sum)
    })
}

/// Runs a future as a task of the runtime, like a caller in a server.
pub(crate) fn as_task<T: Send + 'static>(runtime: &Runtime, task: impl Future<Output = T> + Send + 'static) -> T {
    runtime.block_on(async { tokio::spawn(task).await.expect("a task") })
}

/// Measures an operation and one caller's commits in turn, so that a slow moment of the machine affects both. Returns
/// the median of each, in microseconds.
pub(crate) async fn in_turns<F: Future<Output = Duration> + Send>(
    directory: &Path,
    rounds: usize,
    times: usize,
    mut ours: impl FnMut(usize) -> F + Send,
) -> (f64, f64) {
    let (store, space) = store(directory).await;
    let mut caller = callers(&space, 1).remove(0);
    let (mut taken, mut floors) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        for number in 0..times {
            taken.push(ours(round * times + number).await.as_secs_f64() * 1e6);
        }
        for _ in 0..100 {
            let begin = Instant::now();
            caller.commit(&store).await;
            floors.push(begin.elapsed().as_secs_f64() * 1e6);
        }
    }
    (median(taken), median(floors))
}

/// Returns the command that runs one part of this program in a child process.
pub(crate) fn child(part: &str, directory: &Path, count: usize) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.arg(part).arg(directory).arg(count.to_string());
    command
}

/// Runs a child to its end and returns the numbers that it has printed.
pub(crate) fn measured<const N: usize>(mut child: Command) -> [f64; N] {
    let output = child.output().expect("a child");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<f64> = output.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{N} numbers, not {output:?}"))
}

/// The directory and the count from a child's arguments.
pub(crate) fn given<'a>(mut words: impl Iterator<Item = &'a str>) -> (&'a Path, usize) {
    let directory = Path::new(words.next().expect("a directory"));
    (directory, words.next().and_then(|count| count.parse().ok()).expect("a count"))
}

/// Runs a child until it is [`ready`], and kills it.
pub(crate) fn kill_when_ready(mut child: Command) {
    let mut child = child.stdout(Stdio::piped()).spawn().expect("a child");
    let mut line = String::new();
    let output = child.stdout.take().expect("the child's output");
    BufReader::new(output).read_line(&mut line).expect("a line of the child");
    assert_eq!(line.trim(), "ready");
    child.kill().expect("a kill");
    child.wait().expect("its end");
}

/// Prints a line for the parent, and waits to be killed.
pub(crate) async fn ready() {
    println!("ready");
    let _ = std::io::stdout().flush();
    std::future::pending::<()>().await;
}

/// The processor time of this process, in steps of 0.01 s.
pub(crate) fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program is in parentheses and may contain spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = fields.skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
    ticks.iter().sum::<f64>() / 100.0
}
