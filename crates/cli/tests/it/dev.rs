//! `latch dev`: it runs to its end, is killed, and other commands look at its data.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use latchwork::entity::{Add, Entities, Update};
use latchwork::store::Store;
use serde_json::{Value, json};

use crate::{latch, succeeded, text};

/// Few transfers, between so few accounts that they wait for each other.
const FEW: [&str; 5] = ["dev", "--transfers", "12", "--accounts", "4"];

fn json(arguments: &[&str], store: &Path) -> Value {
    let output = latch(&[arguments, &["-o", "json"]].concat(), store).output().unwrap();
    serde_json::from_str(&succeeded(output)).unwrap()
}

fn check_done(summary: &Value, transfers: u32, accounts: u32) {
    let (sum, invoices) = (accounts * 1000, transfers.div_ceil(10));
    let parts = json!({"transfers": transfers, "accounts": accounts, "sum": sum, "expected": sum, "lost": 0,
        "doubled": 0, "wrong_accounts": 0, "failed": 0, "invoices": invoices, "paid": invoices, "payments": invoices,
        "paid_twice": 0, "ok": true});
    for (name, value) in parts.as_object().unwrap() {
        assert_eq!(summary[name], *value, "{name} in {summary}");
    }
}

#[test]
fn it_runs_to_its_end_and_starts_a_new_one_with_fresh() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let said = succeeded(latch(&FEW, &store).output().unwrap());
    for part in [
        "12 transfers between 4 accounts, each under the locks of both;",
        "0 running, 0 waiting for a lock, 0 asleep, 12 of 12 done; ",
        "2 invoices, and 5 clients that race to pay each of them.",
        "4 accounts hold 4000, as always; 2 of 2 invoices paid, 2 bodies run, 8 clients refused",
        "It was never killed.",
        "No transfer was lost, and none was done twice.",
        "No invoice was paid twice: 2 are paid, by 2 payments.",
    ] {
        assert!(said.contains(part), "{part} is missing in:\n{said}");
    }
    assert!(!said.contains('\u{1b}') && !said.contains('\r'), "no control characters without a terminal: {said:?}");
    let header: Vec<&str> = said.lines().take_while(|line| !line.is_empty()).collect();
    assert!(header.len() >= 8, "{said}");
    for line in &header {
        // A hint is a command, and its length depends on the paths in it.
        assert!(line.starts_with("  ") || line.chars().count() <= 80, "{line:?} wraps at 80 columns");
    }
    let again = succeeded(latch(&["dev"], &store).output().unwrap());
    assert!(again.contains("is complete.") && again.contains("latch dev --fresh"), "{again}");
    // A user can run a hint as it is, wherever this program and its directory are.
    let look = header.iter().find(|line| line.contains(" workflow list ")).unwrap();
    let looked = Command::new("sh").arg("-c").arg(look).env_remove("PATH").output().unwrap();
    assert!(succeeded(looked).contains("transfer"), "{look}");
    check_done(&json(&["dev"], &store), 12, 4);
    let fresh = json(&["dev", "--fresh", "--transfers", "3", "--accounts", "2"], &store);
    assert_eq!((&fresh["round"], &fresh["starts"], &fresh["done_before"]), (&2.into(), &1.into(), &0.into()));
    check_done(&fresh, 3, 2);
}

#[test]
fn killed_in_the_middle_it_continues_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    for kills in 1..=3 {
        let mut child = latch(&FEW, &store).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap)
            .scan(0, |frames, line| {
                *frames += usize::from(line.contains(" of 12 done"));
                (*frames < 2).then_some(line)
            })
            .collect();
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "it was killed before it was done: {lines:?}");
        let resumed = lines.iter().any(|line| line.contains("resumed ") && line.contains(" were done before"));
        assert_eq!(resumed, kills > 1, "{lines:?}");
        // Other commands can look at the data.
        succeeded(latch(&["lock", "list", "--held"], &store).output().unwrap());
        succeeded(latch(&["claim", "list"], &store).output().unwrap());
        succeeded(latch(&["workflow", "list"], &store).output().unwrap());
    }
    let summary = json(&["dev", "--transfers", "99"], &store);
    assert_eq!((&summary["starts"], &summary["killed"]), (&4.into(), &3.into()));
    let found = summary["resumed"].as_u64().unwrap() + summary["done_before"].as_u64().unwrap();
    assert_eq!(found, 12, "it continues what was started: {summary}");
    check_done(&summary, 12, 4);
}

#[test]
fn it_kills_itself_and_ends_well() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let said = succeeded(latch(&[&FEW[..], &["--crash-every", "300ms"]].concat(), &store).output().unwrap());
    assert!(said.contains("Killed process ") && said.contains("No transfer was lost"), "{said}");
    let summary = json(&["dev"], &store);
    // A process that was killed before it had opened the directory has not counted itself.
    let killed = summary["killed"].as_u64().unwrap();
    assert!(killed > 0 && killed <= said.matches("Killed process ").count() as u64, "{said}");
    check_done(&summary, 12, 4);
    // A new demonstration is started once, no matter how often it is killed.
    let again = ["dev", "--fresh", "--transfers", "4", "--accounts", "2", "--crash-every", "300ms"];
    let again = json(&again, &store);
    assert_eq!(again["round"], 2);
    check_done(&again, 4, 2);
    for wrong in ["1ms", "often"] {
        let output = latch(&["dev", "--crash-every", wrong], &store).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn invoices_are_paid_once_despite_kills_in_the_middle_of_payments() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let many = ["dev", "--transfers", "2", "--accounts", "2", "--invoices", "8", "--crash-every", "300ms"];
    let said = succeeded(latch(&many, &store).output().unwrap());
    assert!(said.contains("No invoice was paid twice: 8 are paid, by 8 payments."), "{said}");
    let summary = json(&["dev"], &store);
    assert_eq!((&summary["paid"], &summary["payments"], &summary["ok"]), (&8.into(), &8.into(), &true.into()));
    let list = json(&["claim", "list"], &store);
    assert_eq!(list["claims"], json!([]), "nothing is left claimed");
    let reverted = summary["reverted"].as_u64().unwrap();
    assert_eq!(said.contains("cut off by a kill"), reverted > 0, "{said}");
    let none = ["dev", "--fresh", "--transfers", "2", "--accounts", "2", "--invoices", "0"];
    let said = succeeded(latch(&none, &store).output().unwrap());
    assert!(!said.contains("invoice"), "{said}");
}

#[test]
fn wrong_data_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    succeeded(latch(&["dev", "--transfers", "2", "--accounts", "2"], &store).output().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let opened = Store::open(&store).await.unwrap();
        let entities = Entities::on(&opened).await.unwrap();
        entities.update(Update::new("demo-1/account-00").data(json!({"number": 0, "balance": 1}))).await.unwrap();
        entities.remove("demo-1/transfer-0002").await.unwrap();
        let payment = json!({"invoice": "demo-1/invoice-0001", "amount": 11});
        entities.add(Add::new("demo-1-payment").data(payment)).await.unwrap();
        drop(entities);
        opened.close().await.unwrap();
    });
    let output = latch(&["dev"], &store).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stdout);
    assert!(said.contains("1 were lost") && said.contains("at the beginning they held 2000"), "{said}");
    assert!(said.contains("1 of 1 invoices are paid, by 2 payments; 1 were paid twice."), "{said}");
}
