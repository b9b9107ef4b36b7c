//! The store over HTTP: figures, checks and backups.

use latchwork::entity::{Add, Entities};
use latchwork::json;
use latchwork::store::{Confirm, Store};

use crate::client::{Answer, Running, add, ask, start};

/// Unpacks a backup into a new directory.
fn unpacked(answer: &Answer) -> tempfile::TempDir {
    assert_eq!(answer.status, 200, "{answer:?}");
    let directory = tempfile::tempdir().unwrap();
    let archive = directory.path().join("backup.tar");
    std::fs::write(&archive, &answer.bytes).unwrap();
    let snapshot = directory.path().join("snapshot");
    std::fs::create_dir(&snapshot).unwrap();
    let tar = std::process::Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&snapshot).output().unwrap();
    assert!(tar.status.success(), "{tar:?}");
    directory
}

async fn back_up(running: &Running) -> Answer {
    ask("GET", "/v1/store/backup").of(running).await
}

#[tokio::test]
async fn a_backup_is_downloaded_and_holds_everything() {
    let running = start().await;
    for number in 0..50 {
        add(&running, &format!("e-{number}"), json!({"text": "x".repeat(20_000)})).await;
    }
    let answer = back_up(&running).await;
    assert_eq!(answer.header("content-type"), Some("application/x-tar"));
    assert_eq!(answer.header("content-length"), Some(answer.bytes.len().to_string().as_str()));
    let generation = answer.header("latchwork-generation").unwrap();
    let file = format!("attachment; filename=\"latchwork-default-{generation}.tar\"");
    assert_eq!(answer.header("content-disposition"), Some(file.as_str()));
    add(&running, "later", json!(1)).await;

    let directory = unpacked(&answer);
    let snapshot = directory.path().join("snapshot");
    let other = Store::memory().await.unwrap();
    other.restore(&snapshot, Confirm::ReplaceEverything).await.unwrap();
    let entities = Entities::on(&other).await.unwrap();
    for number in 0..50 {
        assert!(entities.get(format!("e-{number}")).await.unwrap().is_some());
    }
    assert!(entities.get("later").await.unwrap().is_none());
    // It is also a data directory.
    let opened = Store::open(&snapshot).await.unwrap();
    let entities = Entities::on(&opened).await.unwrap();
    assert!(entities.get("e-7").await.unwrap().is_some());
    entities.add(Add::new("t").id("new")).await.unwrap();
    opened.close().await.unwrap();
}

#[tokio::test]
async fn backups_are_made_while_the_store_is_written() {
    let running = start().await;
    add(&running, "a", json!(1)).await;
    let writer = {
        let entities = running.engine.entities().clone();
        tokio::spawn(async move {
            for number in 0..200 {
                entities.add(Add::new("t").id(format!("w-{number}"))).await.unwrap();
            }
        })
    };
    let (one, two) = tokio::join!(back_up(&running), back_up(&running));
    writer.await.unwrap();
    for answer in [one, two] {
        let directory = unpacked(&answer);
        let store = Store::memory().await.unwrap();
        store.restore(directory.path().join("snapshot"), Confirm::ReplaceEverything).await.unwrap();
        assert!(Entities::on(&store).await.unwrap().get("a").await.unwrap().is_some());
    }
}

#[tokio::test]
async fn figures_and_damage_are_shown() {
    let running = start().await;
    add(&running, "a", json!(1)).await;
    let stats = ask("GET", "/v1/store").of(&running).await;
    assert_eq!(stats.status, 200, "{stats:?}");
    let stats = stats.json();
    assert!(stats["generation"].as_u64().unwrap() > 0 && stats["applied"].as_u64().unwrap() > 0, "{stats}");
    for field in ["keys", "past_versions", "refused", "groups", "overlay_bytes", "log_bytes", "index_bytes", "pins"] {
        assert!(stats[field].is_u64(), "{field}");
    }
    let verified = ask("POST", "/v1/store:verify").of(&running).await;
    assert_eq!(verified.json(), json!({"is_sound": true, "damage": []}));
    running.engine.store().close().await.unwrap();
    for (method, path) in [("GET", "/v1/store"), ("GET", "/v1/store/backup")] {
        ask(method, path).of(&running).await.is_problem(503, "unavailable");
    }
}
