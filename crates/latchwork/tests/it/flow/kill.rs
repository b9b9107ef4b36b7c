//! SIGKILL between a question and its answer, and between the answer and the end: the request continues where it was,
//! no question is asked twice, and no block runs again whose trace is recorded.

// Processes take their own time.
#![allow(clippy::disallowed_methods)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use latchwork::flow::{AnswerKind, Flow, flow, handler, sequencer};
use latchwork::workflow::Engine;

use super::Tally;

const DIRECTORY: &str = "LATCHWORK_FLOW_DIRECTORY";

fn append(file: &Path, line: &str) {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    writeln!(file, "{line}").unwrap();
}

/// Charges, asks, and ships. Each body leaves a line in a file.
fn orders(directory: &Path) -> Flow {
    let told = |name: &'static str| {
        let file = directory.join("bodies");
        handler(name).run(move |ctx, value: i64| {
            let file = file.clone();
            async move {
                append(&file, name);
                ctx.sequencer().inc([("total", 1)]).await?;
                Ok(value)
            }
        })
    };
    let file = directory.join("bodies");
    let approval = handler("approval").run(move |ctx, value: i64| {
        let file = file.clone();
        async move {
            append(&file, "approval");
            let answer = ctx.suspend("ship").message("Ship it?").data(value).await?;
            println!("answered by {}", answer.by);
            // Time for the parent to kill this process after the answer, in the second life.
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok(value + i64::from(answer.is_approved()))
        }
    });
    let order = sequencer("order").state::<Tally>().step(&told("charge")).step(&approval).step(&told("ship"));
    flow("orders").action("place", order.build().unwrap()).build().unwrap()
}

/// Not a test by itself: this is the process that is killed. It answers an open question if there is a file `answer`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let directory = PathBuf::from(directory);
    let flow = orders(&directory);
    let engine = Engine::open(directory.join("data")).flow(&flow).start().await.unwrap();
    let flows = engine.flow(&flow);
    let request = flows.run("place", 1).idempotency_key("order-1").await.unwrap();
    let asked = async {
        loop {
            if let Some(question) = request.suspensions().await.unwrap().pop() {
                println!("asked {}", question.id);
                if directory.join("answer").exists() {
                    flows.answer(&question.id, AnswerKind::Approve, (), "ada").await.unwrap();
                    println!("answer stored");
                }
                return std::future::pending::<()>().await;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = asked => {}
        result = request.result::<i64>() => {
            let checkpoints = request.checkpoints().await.unwrap();
            println!("result {} {}", result.unwrap(), checkpoints["order"]["total"]);
        }
    }
    std::future::pending::<()>().await;
}

fn spawned(directory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "flow::kill::the_process_that_is_killed", "--nocapture"])
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Runs the process until it says a line that contains this, and kills it. Returns that line from the word on.
fn killed_after(directory: &Path, word: &str) -> String {
    let mut child = spawned(directory);
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.into_iter().find_map(|line| Some(line[line.find(word)?..].to_string()));
    child.kill().unwrap();
    child.wait().unwrap();
    said.unwrap_or_else(|| panic!("it never said {word:?}"))
}

#[test]
fn an_approval_survives_kills_between_question_and_answer_and_after_the_answer() {
    let home = tempfile::tempdir().unwrap();
    let first = killed_after(home.path(), "asked");
    let again = killed_after(home.path(), "asked");
    assert_eq!(first, again, "the same question is open");
    std::fs::write(home.path().join("answer"), "").unwrap();
    killed_after(home.path(), "answer stored");
    assert_eq!(killed_after(home.path(), "result"), "result 2 2", "the output, and each change of the state once");
    let bodies = std::fs::read_to_string(home.path().join("bodies")).unwrap();
    let count = |name: &str| bodies.lines().filter(|line| *line == name).count();
    assert_eq!(count("charge"), 1, "its trace is recorded before the question is asked: {bodies}");
    assert!(count("approval") >= 2, "the block that waits runs again up to its question: {bodies}");
    assert!(count("ship") >= 1 && bodies.trim_end().ends_with("ship"), "{bodies}");
}

#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/approval.rs"]
mod approval;

const EXAMPLE: &str = "LATCHWORK_FLOW_EXAMPLE";

/// Not a test by itself: the example in a process of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_that_is_killed() {
    let Ok(directory) = std::env::var(EXAMPLE) else { return };
    let directory = PathBuf::from(directory);
    let amount = directory.join("answer").exists().then_some(25);
    approval::run(&directory.join("data"), amount).await.unwrap();
}

/// Runs the example until it says a line that begins so, kills it, and returns what it has said.
fn example_until(directory: &Path, word: &str) -> Vec<String> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "flow::kill::the_example_that_is_killed", "--nocapture"])
        .env(EXAMPLE, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut said = Vec::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
        // The test harness may have begun the line.
        let begin = ["look up", "asked", "refused", "pay", "refunded"].iter().filter_map(|word| line.find(word)).min();
        said.extend(begin.map(|begin| line[begin..].to_string()));
        if said.last().is_some_and(|last| last.starts_with(word)) {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    said
}

#[test]
fn the_example_of_an_approval_says_what_it_should_and_survives_kills() {
    let home = tempfile::tempdir().unwrap();
    let asked = "asked: How much of 40 is refunded for order-7?";
    assert_eq!(example_until(home.path(), "asked"), ["look up order-7", asked]);
    assert_eq!(example_until(home.path(), "asked"), [asked], "the order is not looked up again");
    std::fs::write(home.path().join("answer"), "").unwrap();
    assert_eq!(example_until(home.path(), "refunded"), [asked, "refused: true", "pay 25", "refunded 25 of 40"]);
}
