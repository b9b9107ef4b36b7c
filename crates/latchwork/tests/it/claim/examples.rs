//! The programs of docs/claims.md. One of them runs in a separate process that is killed in the middle of an action:
//! the last row of the table of failures.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use latchwork::claim::{StoredClaims, TransitionKind, check_json};
use latchwork::entity::{Entities, Query};
use latchwork::store::Store;

// The `main` functions of the programs are not used here, and their public items are not reachable from other modules.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/claims.rs"]
mod claims;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/invoices.rs"]
mod invoices;

/// The data directory and the option, for the process that runs the program.
const DIRECTORY: &str = "LATCHWORK_INVOICES_DIRECTORY";
const OPTION: &str = "LATCHWORK_INVOICES_OPTION";

const SIGKILL: i32 = 9;

/// Not a test: the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let middle = match std::env::var(OPTION).as_deref() {
        Ok("--kill") => invoices::Middle::Kills,
        Ok("--wait") => invoices::Middle::Waits,
        _ => invoices::Middle::GoesOn,
    };
    invoices::run(&directory, middle).await.unwrap();
}

fn spawn(directory: &Path, option: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "claim::examples::the_process_that_is_killed", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(OPTION, option)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs the program to its end, and returns its output.
fn said(directory: &Path) -> String {
    let mut child = spawn(directory, "");
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    said
}

/// The status of `invoice-001`, the number of payments, and the invoice's history, newest first.
async fn look(directory: &Path) -> (String, usize, Vec<(TransitionKind, String)>) {
    let store = Store::open(directory).await.unwrap();
    let entities = Entities::on(&store).await.unwrap();
    let invoice = entities.get("invoice-001").await.unwrap().unwrap();
    let payments = entities.find(&Query::of("payment")).await.unwrap().items.len();
    let history = StoredClaims::on(&store).await.unwrap().history("invoice-001").limit(10).await.unwrap().items;
    drop(entities);
    store.close().await.unwrap();
    let history = history.into_iter().map(|transition| (transition.kind, transition.reason)).collect();
    (invoice.data["status"].as_str().unwrap().to_string(), payments, history)
}

#[tokio::test]
async fn the_guide_runs() {
    claims::run().await.unwrap();
}

/// The test target `guides` compiles the snippets in Rust.
#[test]
fn the_configuration_in_the_guide_has_no_findings() {
    let guide = include_str!("../../../../../docs/claims.md");
    let blocks: Vec<&str> = guide.split("\n```").filter_map(|block| block.strip_prefix("json\n")).collect();
    assert!(!blocks.is_empty());
    for block in blocks {
        assert_eq!(check_json(block).findings, [], "{block}");
    }
}

#[test]
fn the_configuration_of_the_program_has_no_findings() {
    assert_eq!(check_json(include_str!("../../../examples/invoices.json")).findings, []);
}

#[tokio::test]
async fn the_program_shows_one_body_and_every_refusal() {
    let home = tempfile::tempdir().unwrap();
    let first = said(&home.path().join("data"));
    for part in [
        "50 clients pay invoice-001 at once",
        "1 body has run: {\"outcome\":\"done\"",
        "49 were refused, 49 of them with client ",
        "invoice-002 was regenerated 1 time by 2 clients: 1 clone",
        "its clone was overdue: {\"outcome\":\"done\",\"from\":\"overdue\"",
        "3 invoices, 2 paid, 2 payments, 4 mails",
    ] {
        assert!(first.contains(part), "{part} is missing in:\n{first}");
    }
    assert!(first.contains("2026-01 was closed by 2 clients: "), "{first}");
    let second = said(&home.path().join("data"));
    assert!(second.contains("6 invoices, 4 paid, 4 payments, 8 mails"), "{second}");
}

async fn check_killed(option: &str) {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    for kills in 1..=3 {
        let mut child = spawn(&directory, option);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_in_the_middle = |line: &str| line.contains("in the middle of the payment of invoice-001");
        assert!(lines.any(|line| line.is_ok_and(|line| is_in_the_middle(&line))), "the action must begin");
        if option == "--wait" {
            child.kill().unwrap();
        }
        assert_eq!(child.wait().unwrap().signal(), Some(SIGKILL));
        let (status, payments, history) = look(&directory).await;
        assert_eq!((status.as_str(), payments), ("applying_payment_from_sent", 0), "no process has released the claim");
        // Each process has released the claim of the process before.
        let gone = (TransitionKind::Released, "its process is gone".to_string());
        assert_eq!(history, vec![gone; kills - 1]);
    }
    let said = said(&directory);
    let reverted = "invoice-001 was reverted from applying_payment_from_sent to sent: its process is gone";
    assert!(said.contains(reverted) && said.contains("50 clients pay invoice-001 at once"), "{said}");
    assert!(said.contains("3 invoices, 2 paid, 2 payments, 4 mails"), "{said}");
    let (status, _, history) = look(&directory).await;
    let kinds: Vec<TransitionKind> = history.into_iter().map(|(kind, _)| kind).collect();
    let released = [TransitionKind::Released; 3];
    assert_eq!((status.as_str(), kinds), ("paid", [&[TransitionKind::Done], &released[..]].concat()));
}

#[tokio::test]
async fn a_process_that_is_killed_in_the_middle_of_an_action_leaves_only_its_claim() {
    check_killed("--wait").await;
}

#[tokio::test]
async fn a_process_that_kills_itself_in_the_middle_of_an_action_leaves_only_its_claim() {
    check_killed("--kill").await;
}
