//! The workload of the crash tests with many callers and the store's own threads: groups form, overlays are frozen and
//! folded in the background. No two runs are the same. The receipts say what a run must leave on the disk.

use std::time::Duration;

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::*;

use crate::ledger::{Entry, Ledger, specs};
use crate::recovered::{DIRECTORY, ensure, options, said};
use crate::workload::Run;

const TASKS: u64 = 6;

/// Runs several tasks that each make `commits` commits.
pub async fn crowd(seed: u64, commits: u64, sabotage: Option<Sabotage>) -> Result<Run, String> {
    let disk = SimDisk::new();
    let recording = disk.record();
    let (env, clock) = Env::seeded(seed);
    let mut options = options(&disk, &env).fold_interval(Duration::from_millis(3)).overlay_bytes(24 << 10);
    if let Some(sabotage) = sabotage {
        options = options.sabotage(sabotage);
    }
    let store = said(options.open(DIRECTORY).await, "opening")?;
    let mut entries = Vec::new();
    let mut spaces = Vec::new();
    for (generation, (spec, history)) in (1..).zip(specs()) {
        let space = said(store.space(spec).await, "declaring")?;
        disk.note(generation);
        spaces.push(space.clone());
        entries.push(Entry { declares: Some((space, history)), ..Entry::new(generation, env.now()) });
    }
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (store, disk, spaces, clock) = (store.clone(), disk.clone(), spaces.clone(), clock.clone());
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(seed ^ task << 32);
                let mut own = Own { task, spaces, written: Vec::new() };
                let mut entries = Vec::new();
                for number in 0..commits {
                    clock.advance(Duration::from_millis(random.u64(..4)));
                    let entry = own.commit(&store, &mut random, number).await?;
                    disk.note(entry.generation);
                    entries.push(entry);
                }
                Ok::<_, String>(entries)
            })
        })
        .collect();
    for task in tasks {
        // Verifying while tasks write must find no damage.
        while sabotage.is_none() && !task.is_finished() {
            verify(&store).await?;
            // The clock of this store is virtual, but its threads run in real time.
            #[allow(clippy::disallowed_methods)]
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        entries.extend(task.await.map_err(|error| error.to_string())??);
    }
    if sabotage.is_none() {
        verify(&store).await?;
    }
    drop(store);
    entries.sort_by_key(|entry| entry.generation);
    let mut ledger = Ledger::default();
    for entry in entries {
        ensure!(entry.generation == ledger.last() + 1, "generation {} was used twice or never", ledger.last() + 1);
        ledger.push(entry);
    }
    Ok(Run { recording: recording.stop(), ledger, now: env.now() })
}

async fn verify(store: &Store) -> Result<(), String> {
    let damage = said(store.verify().await, "verifying")?;
    ensure!(damage.is_empty(), "verify found {damage:?}");
    Ok(())
}

/// The keys of one task. No other task writes them, so the task knows their revs.
struct Own {
    task: u64,
    spaces: Vec<Space>,
    written: Vec<(Key, Rev)>,
}

impl Own {
    async fn commit(&mut self, store: &Store, random: &mut fastrand::Rng, number: u64) -> Result<Entry, String> {
        let mut commit = Commit::new();
        let mut changes = Vec::new();
        let space = &self.spaces[random.usize(..4)];
        let key = space.key(format!("task {} key {}", self.task, random.u8(..5)));
        let once = self.spaces[4 + random.usize(..2)].key(format!("once {} of {}", number, self.task));
        for (key, length) in [(key, random.usize(..3000)), (once, random.usize(..100))] {
            let rev = match self.written.iter_mut().find(|(written, _)| *written == key) {
                Some((_, rev)) => {
                    commit = commit.at_rev(&key, *rev);
                    *rev = rev.next();
                    *rev
                }
                None => {
                    commit = commit.absent(&key);
                    self.written.push((key.clone(), Rev(1)));
                    Rev(1)
                }
            };
            let value = vec![number as u8; length];
            commit = commit.put(&key, value.clone());
            changes.push((key, rev, Some(value)));
        }
        let id = CommitId(random.u128(..).to_le_bytes());
        let outcome = said(store.commit(commit.clone().id(id)).await, "committing")?;
        let receipt = outcome.applied().map_err(|refusal| format!("a task was refused: {refusal}"))?;
        let revs: Vec<_> = changes.iter().map(|(_, rev, _)| Some(*rev)).collect();
        ensure!(receipt.revs == revs, "revs {:?} instead of {revs:?}", receipt.revs);
        let entry = Entry::new(receipt.generation.0, receipt.time);
        Ok(Entry { changes, named: Some((id, commit, revs)), ..entry })
    }
}
