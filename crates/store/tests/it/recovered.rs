//! Opens a data directory after a crash and compares everything that can be read there with the ledger.

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::*;

use crate::ledger::{Entry, Ledger};

pub const DIRECTORY: &str = "/data";

/// Segments are small, so that they are changed and recycled all the time.
pub fn options(disk: &SimDisk, env: &Env) -> FileOptions {
    let mut limits = Limits::default();
    limits.commit_bytes = 16 << 10;
    limits.operations = 64;
    FileOptions::new()
        .disk(disk.clone())
        .env(env.clone())
        .limits(limits)
        .segment_bytes(64 << 10)
        .overlay_bytes(96 << 10)
        .cache_bytes(1 << 20)
}

/// What is known about the run that ended in the crash.
pub struct Expected<'a> {
    pub ledger: &'a Ledger,
    /// The last generation that was acknowledged before the crash.
    pub acknowledged: u64,
    /// The latest possible time of the clock.
    pub now: Timestamp,
    /// Decides which of many reads are checked.
    pub seed: u64,
}

macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!($($what)+));
        }
    };
}
pub(crate) use ensure;

pub fn said<T>(result: Result<T>, doing: &str) -> Result<T, String> {
    result.map_err(|error| format!("{doing}: {error}"))
}

/// Checks everything, then commits once more and folds. Returns the ledger after that.
pub async fn check(disk: &SimDisk, expected: &Expected<'_>) -> Result<Ledger, String> {
    let (env, _clock) = Env::seeded(expected.seed);
    let store = said(options(disk, &env).without_threads().open(DIRECTORY).await, "opening")?;
    let generation = said(store.generation().await, "reading the generation")?.0;
    disk.note(generation);
    ensure!(
        generation >= expected.acknowledged,
        "generation {generation} was recovered, and {} was acknowledged",
        expected.acknowledged
    );
    ensure!(generation <= expected.ledger.last(), "generation {generation} was recovered but never sent");
    let mut random = fastrand::Rng::with_seed(expected.seed);
    check_contents(&store, expected, generation, &mut random).await?;
    check_answers(&store, expected.ledger, generation, &mut random).await?;
    let damage = said(store.verify().await, "verifying")?;
    ensure!(damage.is_empty(), "verify found {damage:?}");
    let mut ledger = expected.ledger.cut(generation);
    if let Some(entry) = go_on(&store, &ledger, &mut random).await? {
        disk.note(entry.generation);
        ledger.push(entry);
        said(store.maintain().await, "folding")?;
        let after = Expected { ledger: &ledger, ..*expected };
        check_contents(&store, &after, generation + 1, &mut random).await?;
    }
    Ok(ledger)
}

/// Reads all spaces, now and in the past.
pub async fn check_contents(
    store: &Store,
    expected: &Expected<'_>,
    generation: u64,
    random: &mut fastrand::Rng,
) -> Result<(), String> {
    let ledger = expected.ledger;
    let spaces = ledger.spaces(generation);
    let found = said(store.spaces().await, "listing spaces")?;
    let mut declared: Vec<_> = spaces.iter().map(|(space, _)| (space.name().to_string(), space.id())).collect();
    declared.sort();
    let found: Vec<_> = found.iter().map(|space| (space.name().to_string(), space.id())).collect();
    ensure!(found == declared, "spaces {found:?} instead of {declared:?}");
    for (space, history) in spaces {
        let oldest = store.oldest(space).0;
        let highest = ledger.highest_floor(*history, generation, expected.now);
        ensure!(oldest <= highest, "{space:?} has floor {oldest}, its rules allow {highest} at {generation}");
        let anew = ledger.anew(generation);
        ensure!(oldest >= anew, "{space:?} has floor {oldest}, before the restore at {anew}");
        for at in [generation, oldest, random.u64(oldest..=generation)] {
            let view = said(store.view_at(Generation(at)).await, "opening a view")?;
            let found = said(view.scan(&space.all(), Order::Ascending, usize::MAX).await, "scanning")?;
            let wanted = ledger.live(space, at);
            ensure!(found == wanted, "{space:?} at {at} of {generation}: {}", difference(&found, &wanted));
        }
        if *history != History::None {
            check_changes(store, ledger, space, (oldest, generation)).await?;
        }
    }
    Ok(())
}

fn difference(found: &[(Key, Item)], wanted: &[(Key, Item)]) -> String {
    let short = |(key, item): &(Key, Item)| {
        let Item { rev, generation, time, value } = item;
        format!("{key} rev {rev} of generation {generation} at {time}, {} bytes", value.len())
    };
    let extra = found.iter().find(|row| !wanted.contains(row)).map(short);
    let missing = wanted.iter().find(|row| !found.contains(row)).map(short);
    format!("found {extra:?}, wanted {missing:?}")
}

async fn check_changes(store: &Store, ledger: &Ledger, space: &Space, part: (u64, u64)) -> Result<(), String> {
    let (oldest, generation) = part;
    let view = said(store.view().await, "opening a view")?;
    let mut through = Generation(oldest);
    let mut found = Vec::new();
    while through < view.generation() {
        let changes = said(view.changes_since(&space.all(), through, 100).await, "reading changes")?;
        ensure!(changes.through > through, "changes of {space:?} do not continue after {through}");
        through = changes.through;
        found.extend(changes.commits);
    }
    let timed = found.iter().find(|commit| commit.time != ledger.time(commit.generation.0));
    ensure!(timed.is_none(), "{space:?} shows a commit at another time: {timed:?}");
    let found: Vec<_> =
        found.iter().flat_map(|commit| commit.changes.iter().map(|c| (commit.generation.0, c))).collect();
    let entries = ledger.until(generation).iter().filter(|entry| entry.generation > oldest);
    let wanted = entries.flat_map(|entry| entry.changes.iter().map(|change| (entry.generation, change)));
    let wanted: Vec<_> = wanted.filter(|(_, (key, ..))| key.space() == space.id()).collect();
    let same = found.len() == wanted.len()
        && found.iter().zip(&wanted).all(|((at, found), (wanted_at, (key, rev, value)))| {
            at == wanted_at && found.key == *key && found.rev == *rev && found.value.as_deref() == value.as_deref()
        });
    ensure!(same, "{space:?} shows {} changes after {oldest}, {} were made", found.len(), wanted.len());
    Ok(())
}

/// Sends some of the commits with an id again. Applied ones must return their first answer and write nothing.
async fn check_answers(
    store: &Store,
    ledger: &Ledger,
    generation: u64,
    random: &mut fastrand::Rng,
) -> Result<(), String> {
    let named = ledger.named(generation);
    let last = named.last().copied();
    let some = (0..named.len().min(3)).map(|_| named[random.usize(..named.len())]);
    for entry in some.chain(last).collect::<Vec<_>>() {
        let Some((id, commit, revs)) = &entry.named else { continue };
        let outcome = said(store.commit(commit.clone().id(*id)).await, "sending a commit again")?;
        let Outcome::Applied(receipt) = outcome else {
            return Err(format!("commit {id} of {} was refused when sent again", entry.generation));
        };
        ensure!(receipt.repeated && receipt.revs == *revs, "commit {id} was answered with {receipt:?}");
        let restored = entry.generation <= ledger.anew(generation);
        let same = receipt.generation.0 == entry.generation && receipt.time == entry.time;
        ensure!(same || restored, "commit {id} of {} was answered with {receipt:?}", entry.generation);
    }
    ensure!(said(store.generation().await, "reading the generation")?.0 == generation, "a repeated commit was applied");
    Ok(())
}

/// Commits once more: deleted keys, an existing key and a new one.
async fn go_on(store: &Store, ledger: &Ledger, random: &mut fastrand::Rng) -> Result<Option<Entry>, String> {
    let at = ledger.last();
    let spaces: Vec<Space> = ledger.spaces(at).iter().map(|(space, _)| space.clone()).collect();
    let Some(space) = spaces.first() else { return Ok(None) };
    let again: Vec<_> = ledger.state(at).filter(|(key, _)| !key.bytes().starts_with(b"once")).collect();
    let deleted = again.iter().filter(|(_, (.., value))| value.is_none()).take(5);
    let mut chosen: Vec<Key> = deleted.map(|(key, _)| (*key).clone()).collect();
    if !again.is_empty() {
        let any = again[random.usize(..again.len())].0;
        if !chosen.contains(any) {
            chosen.push(any.clone());
        }
    }
    chosen.push(space.key(format!("after the crash at {at}")));
    let mut commit = Commit::new();
    let mut entry = Entry::new(at + 1, Timestamp(0));
    let mut revs = Vec::new();
    for key in &chosen {
        let held = ledger.held(key, at);
        let rev = held.map_or(Rev(1), |(rev, ..)| rev.next());
        commit = match held {
            Some((rev, _, Some(_))) => commit.at_rev(key, *rev),
            _ => commit.absent(key),
        };
        commit = commit.put(key, "again");
        revs.push(Some(rev));
        entry.changes.push((key.clone(), rev, Some(b"again".to_vec())));
    }
    let id = CommitId(random.u128(..).to_le_bytes());
    let outcome = said(store.commit(commit.clone().id(id)).await, "committing after the crash")?;
    let Outcome::Applied(receipt) = outcome else {
        return Err(format!("a commit after the crash was refused: {outcome:?}"));
    };
    ensure!(receipt.generation.0 == at + 1, "the first commit after {at} got generation {}", receipt.generation);
    ensure!(receipt.revs == revs, "revs after the crash are {:?} instead of {revs:?}", receipt.revs);
    entry.time = receipt.time;
    entry.named = Some((id, commit, revs));
    Ok(Some(entry))
}
