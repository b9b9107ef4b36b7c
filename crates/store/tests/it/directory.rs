//! The data directory on a real disk: when it can be opened, and which errors are returned otherwise.

use std::process::Command;

use latchwork_store::*;

/// The variable with the directory that another process has open.
const HELD: &str = "LATCHWORK_HELD_DIRECTORY";

fn check_locked(result: Result<Store>, directory: &std::path::Path, owner: u32) {
    match result {
        Err(error @ StoreError::Locked { .. }) => {
            assert_eq!(error.kind(), ErrorKind::Conflict);
            let said = error.to_string();
            assert!(said.contains(&directory.display().to_string()) && said.contains(&owner.to_string()), "{said}");
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[tokio::test]
async fn a_directory_is_opened_by_one_process_at_a_time() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    let store = Store::open(&directory).await.unwrap();
    check_locked(Store::open(&directory).await, &directory, std::process::id());
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "directory::another_process_finds_it_locked", "--nocapture"])
        .env(HELD, &directory)
        .env("LATCHWORK_HOLDER", std::process::id().to_string())
        .output()
        .unwrap();
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stdout));
    store.close().await.unwrap();
    let next = Store::open(&directory).await.unwrap();
    drop((store, next));
    Store::open(&directory).await.unwrap();
}

/// Not a test itself: this is the other process.
#[tokio::test]
async fn another_process_finds_it_locked() {
    let Ok(directory) = std::env::var(HELD) else { return };
    let holder = std::env::var("LATCHWORK_HOLDER").unwrap().parse().unwrap();
    let directory = std::path::PathBuf::from(directory);
    check_locked(Store::open(&directory).await, &directory, holder);
}

#[tokio::test]
async fn an_impossible_path_is_an_error_that_names_it() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("file");
    std::fs::write(&file, "not a directory").unwrap();
    for place in [file.clone(), file.join("data"), file.join("a/b/c")] {
        match Store::open(&place).await {
            Err(error @ StoreError::Io { .. }) => {
                assert!(error.to_string().contains(&place.display().to_string()), "{error}");
            }
            other => panic!("{}: {:?}", place.display(), other.map(|_| ())),
        }
    }
}

#[tokio::test]
async fn parents_of_a_data_directory_are_created() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("a/b/data");
    Store::open(&directory).await.unwrap().close().await.unwrap();
    assert!(directory.join("FORMAT").is_file());
}

#[tokio::test]
async fn limits_that_the_log_cannot_hold_are_refused() {
    let home = tempfile::tempdir().unwrap();
    for (operations, commit_bytes) in
        [(usize::MAX, 1), (1, usize::MAX), (usize::MAX, usize::MAX), (1, u32::MAX as usize)]
    {
        let mut limits = Limits::default();
        (limits.operations, limits.commit_bytes) = (operations, commit_bytes);
        let options = FileOptions::new().limits(limits).segment_bytes(1 << 40);
        match options.open(home.path().join("data")).await {
            Err(error @ StoreError::Option { .. }) => assert_eq!(error.kind(), ErrorKind::Invalid),
            other => panic!("{:?}", other.map(|_| ())),
        }
    }
    assert!(!home.path().join("data").exists());
}

#[tokio::test]
async fn a_directory_with_other_files_does_not_become_a_store() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("thesis.tex"), "all of it").unwrap();
    let error = Store::open(home.path()).await.unwrap_err();
    assert!(matches!(error, StoreError::NotAStore { .. }) && error.to_string().contains("other files"), "{error}");
    std::fs::remove_file(home.path().join("thesis.tex")).unwrap();
    std::fs::write(home.path().join(".gitignore"), "*").unwrap();
    Store::open(home.path()).await.unwrap();
}

/// Every file with its contents, except the lock file.
fn contents(directory: &std::path::Path) -> Vec<(std::ffi::OsString, Vec<u8>)> {
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files.filter(|file| !file.ends_with("LOCK")).collect();
    files.sort();
    files.iter().map(|file| (file.file_name().unwrap().to_owned(), std::fs::read(file).unwrap())).collect()
}

#[tokio::test]
async fn a_restore_changes_nothing_in_the_snapshot() {
    let home = tempfile::tempdir().unwrap();
    let (data, snapshot) = (home.path().join("data"), home.path().join("snapshot"));
    let store = Store::open(&data).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let put = |value: &str| Commit::new().put(&space.key("k"), value.to_owned());
    assert!(store.commit(put("1")).await.unwrap().is_applied());
    store.view().await.unwrap().persist(&snapshot).await.unwrap();
    // A process opens the snapshot as a store, commits and is killed: its log is not folded into the index.
    let copy = Store::open(&snapshot).await.unwrap();
    assert!(copy.commit(put("2")).await.unwrap().is_applied());
    drop(copy);
    let before = contents(&snapshot);
    for _ in 0..2 {
        store.restore(&snapshot, Confirm::ReplaceEverything).await.unwrap();
        assert_eq!(store.view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap().value, "2");
        assert!(contents(&snapshot) == before, "the snapshot was changed");
    }
    let error = store.restore(&data, Confirm::ReplaceEverything).await.unwrap_err();
    assert!(matches!(error, StoreError::Locked { .. }), "the store's own directory is in use: {error}");
}

#[tokio::test]
async fn opening_read_only_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let data = home.path().join("data");
    let store = Store::open(&data).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let put = |value: &str| Commit::new().put(&space.key("k"), value.to_owned());
    assert!(store.commit(put("1")).await.unwrap().is_applied());
    check_locked(Store::open_read_only(&data).await, &data, std::process::id());
    drop(store);
    let before = (contents(&data), std::fs::read(data.join("LOCK")).unwrap());
    let (one, other) = (Store::open_read_only(&data).await.unwrap(), Store::open_read_only(&data).await.unwrap());
    for store in [&one, &other] {
        assert_eq!(store.view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap().value, "1");
        assert!(matches!(store.commit(put("2")).await, Err(StoreError::ReadOnly)));
        assert!(matches!(store.space(SpaceSpec::new("b")).await, Err(StoreError::ReadOnly)));
        assert!(!store.maintain().await.unwrap());
        assert_eq!(store.verify().await.unwrap(), []);
    }
    assert!(matches!(Store::open(&data).await, Err(StoreError::Locked { .. })), "it would change what `one` reads");
    one.close().await.unwrap();
    assert!(matches!(one.view().await, Err(StoreError::Closed)));
    drop(other);
    assert!((contents(&data), std::fs::read(data.join("LOCK")).unwrap()) == before, "the directory was changed");
    Store::open(&data).await.unwrap();
}

#[tokio::test]
async fn opening_read_only_without_a_store_creates_nothing() {
    let home = tempfile::tempdir().unwrap();
    let (empty, foreign, file) = (home.path().join("empty"), home.path().join("foreign"), home.path().join("file"));
    std::fs::create_dir(&empty).unwrap();
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("thesis.tex"), "years of work").unwrap();
    std::fs::write(&file, "not a directory").unwrap();
    for path in [&home.path().join("missing"), &empty, &foreign, &file] {
        let error = Store::open_read_only(path).await.err().unwrap();
        assert!(matches!(&error, StoreError::NotAStore { path: named, .. } if named == path), "{error}");
    }
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 3);
    assert_eq!((contents(&empty).len(), contents(&foreign).len()), (0, 1));
    assert!(!empty.join("LOCK").exists() && !foreign.join("LOCK").exists());
}
