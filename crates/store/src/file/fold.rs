//! Folds: moves overlays into the index and removes dropped history from it. One fold runs at a time, in the fold
//! thread or on request.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::index::{Fold, Index, Progress};
use super::layers::Layers;
use super::writer::FileWriter;
use crate::backend::{Before, Contents};
use crate::disk::{DirectoryLock, DiskFile};
use crate::evaluate::restored;
use crate::{Change, Damage, Generation, Key, Result, SpaceId, Stats, StoreError, Timestamp, Version};

/// Owns the index. All changes of the index go through it.
pub(super) struct Folder {
    pub(super) writer: Arc<FileWriter>,
    /// Locked while the index changes or must not change. `None` once the store is closed.
    pub(super) index: Mutex<Option<Index>>,
    pub(super) index_file: Arc<dyn DiskFile>,
    pub(super) interval: Duration,
    pub(super) identity: u128,
    /// Released last: no other process may open the directory before the index has made its last write.
    pub(super) lock: Mutex<Option<Box<dyn DirectoryLock>>>,
}

/// How many rows of dropped history one fold removes, in addition to twice the number of commits that it adds.
const CLEARED_PER_FOLD: usize = 4096;
/// How often an idle store checks whether some of its history has expired.
const IDLE: Duration = Duration::from_secs(60);

impl Folder {
    /// The loop of the fold thread. It ends when the store closes or fails.
    pub(super) fn run(&self) {
        let _watched = self.writer.stop_on_panic();
        let mut more = false;
        loop {
            if !self.wait_for_work(more) {
                return;
            }
            match self.fold() {
                Ok(left) => more = left,
                Err(_) => return,
            }
        }
    }

    /// Waits until an overlay should be folded; does not wait if `more` is left to do. Returns `false` when the store
    /// ends.
    fn wait_for_work(&self, more: bool) -> bool {
        let writer = &self.writer;
        let mut stage = writer.lock_stage();
        let mut waited = false;
        loop {
            if stage.closing || writer.check().is_err() {
                return false;
            }
            let layers = writer.layers.load();
            let dirty = !layers.active.is_empty();
            if more || layers.frozen.is_some() || (dirty && waited) {
                return true;
            }
            drop(layers);
            let patience = if dirty { self.interval } else { IDLE };
            waited = writer.fold_waits.wait_for(&mut stage, patience).timed_out();
            if waited && !dirty {
                return true;
            }
        }
    }

    /// Folds what is in memory into the index and removes some dropped history. Returns whether more is left. A failure
    /// stops the store.
    pub(super) fn fold(&self) -> Result<bool> {
        self.writer.check()?;
        self.fold_once().inspect_err(|error| {
            if !matches!(error, StoreError::Closed) {
                self.writer.stop(error);
            }
        })
    }

    /// Folds on request of a caller. If an overlay is already frozen, the fold takes only that one. Then more is left
    /// as well: the commits since.
    pub(super) fn maintain(&self) -> Result<bool> {
        let is_behind = {
            let layers = self.writer.layers.load();
            layers.frozen.is_some() && !layers.active.is_empty()
        };
        Ok(self.fold()? || is_behind)
    }

    fn fold_once(&self) -> Result<bool> {
        let writer = &self.writer;
        let index = self.index.lock();
        let index = index.as_ref().ok_or(StoreError::Closed)?;
        let frozen = {
            let mut stage = writer.lock_stage();
            if !writer.layers.load().active.is_empty() {
                writer.freeze(&mut stage);
            }
            writer.layers.load().frozen.clone()
        };
        let last = frozen.as_ref().and_then(|overlay| overlay.last());
        if let Some(last) = &last {
            writer.wait_visible(last.generation)?;
        }
        let layers = writer.layers.load_full();
        let before = layers.index.progress;
        writer
            .retention
            .advance(writer.visible(), writer.env.now(), |time, spaces| self.before(&layers, time, spaces))?;
        let floors = writer.retention.floors();
        let applied = last.as_ref().map_or(before.applied, |commit| commit.generation);
        let (log, pages) = writer.log.lock().position_after(applied);
        let time = last.as_ref().map_or(before.time, |commit| commit.time);
        let progress = Progress { applied, time, log, pages };
        let rules = |space| writer.retention.rules(space).unwrap_or_default();
        let budget = CLEARED_PER_FOLD + 2 * (applied.0 - before.applied.0) as usize;
        let fold = Fold { overlay: frozen.as_deref(), floors: &floors, rules: &rules, progress, budget };
        if frozen.is_none() && !layers.index.has_rows_below(&floors)? && index.floors()? == floors {
            return self.prepare_log().map(|()| false);
        }
        let more = index.fold(&fold)?;
        let reader = Arc::new(index.reader()?);
        writer.swap_layers(|layers| Layers { frozen: None, index: reader, ..layers.copied() });
        writer.log.lock().release(applied, progress.log)?;
        self.prepare_log()?;
        Ok(more)
    }

    /// Prepares the next segment of the log before it is needed.
    fn prepare_log(&self) -> Result<()> {
        let files = {
            let log = self.writer.log.lock();
            if !log.wants_spare() {
                return Ok(());
            }
            log.files().clone()
        };
        files.prepare_spare()?;
        self.writer.log.lock().add_spare()
    }

    /// Finds the newest commit that is not later than `time`; see [`crate::backend::Backend::before`].
    pub(super) fn before(&self, layers: &Layers, time: Timestamp, spaces: &[(SpaceId, Generation)]) -> Result<Before> {
        let visible = self.writer.visible();
        if time >= self.writer.lock_stage().time {
            return Ok(Before::Latest(visible));
        }
        let asked_for = |change: &Change| spaces.iter().any(|(space, _)| *space == change.key.space());
        if let Some(found) = layers.last_at(time, visible, |commit| commit.changes.iter().any(asked_for)) {
            return Ok(Before::Touched(Some(found)));
        }
        let mut found = None;
        for (space, floor) in spaces {
            found = found.max(layers.index.last_at(*space, *floor, time)?);
        }
        Ok(Before::Touched(found))
    }

    /// Replaces everything: see [`crate::Backend::replace`].
    pub(super) fn replace(&self, contents: Contents) -> Result<Generation> {
        let writer = &self.writer;
        // From here on commits wait. Commits that were staged before become durable and are folded.
        let _held = writer.hold_commits();
        while self.fold()? || !writer.layers.load().is_folded() {}
        let index = self.index.lock();
        let index = index.as_ref().ok_or(StoreError::Closed)?;
        if writer.lock_stage().closing {
            return Err(StoreError::Closed);
        }
        let layers = writer.layers.load_full();
        let before = layers.index.progress;
        if contents.identity != self.identity && layers.index.has_user_records()? {
            return Err(StoreError::ForeignSnapshot);
        }
        writer.retention.check_unpinned()?;
        let generation = before.applied.max(contents.generation).next();
        let time = writer.env.now().max(before.time).max(contents.time);
        let progress = Progress { applied: generation, time, ..before };
        let decide = |key: &Key, old: Option<&Version>, new: Option<&Version>| {
            let rules = writer.retention.rules(key.space()).unwrap_or_default();
            restored(key, old, new, (generation, time), rules)
        };
        let floors = |spaces: BTreeSet<SpaceId>| writer.retention.begin_anew(generation, spaces);
        // A snapshot that cannot be read ends the restore before it has changed anything. The store keeps working.
        let mut unreadable = None;
        let mut records = contents.records.inspect(|record| unreadable = record.as_ref().err().cloned());
        let replaced = index.replace(&mut records, &decide, &floors, progress);
        drop(records);
        if let Some(error) = unreadable {
            return Err(error);
        }
        match replaced.and_then(|()| index.reader()) {
            Ok(reader) => {
                let layers = Layers { index: Arc::new(reader), ..layers.copied() };
                writer.publish(layers);
                Ok(generation)
            }
            // A view was opened meanwhile. Nothing has changed here either.
            Err(error @ StoreError::ViewsOpen { .. }) => Err(error),
            Err(error) => {
                writer.stop(&error);
                Err(error)
            }
        }
    }

    /// Folds everything into the index and releases the files. A store that has stopped only releases them.
    pub(super) fn close(&self) -> Result<()> {
        let folded = loop {
            match self.maintain() {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.let_go();
        folded
    }

    /// Closes the store and releases the directory.
    pub(super) fn let_go(&self) {
        self.writer.set_closed();
        self.index.lock().take();
        self.lock.lock().take();
    }

    /// Returns figures. It does not wait for the index, which may be busy for a long time.
    pub(super) fn stats(&self) -> Result<Stats> {
        let writer = &self.writer;
        writer.check()?;
        let (keys, past_versions) = writer.layers.load().index.counts()?;
        let index_bytes = self.index_file.length().map_err(|cause| StoreError::io("measure", "the index", cause))?;
        let pins = writer.retention.pins() as u64;
        Ok(Stats { keys, past_versions, index_bytes, pins, ..writer.stats() })
    }

    /// Reads log and index from the medium.
    pub(super) fn verify(&self) -> Result<Vec<Damage>> {
        self.writer.check()?;
        let index = self.index.lock();
        let index = index.as_ref().ok_or(StoreError::Closed)?;
        let progress = self.writer.layers.load().index.progress;
        let files = self.writer.log.lock().files().clone();
        // The log grows meanwhile. Frames that are not durable yet are not verified.
        let durable = self.writer.visible();
        let mut found = Vec::new();
        match super::log::Log::verify(&files, &progress, durable) {
            Ok(end) if end < durable => {
                let detail = format!("it ends at generation {end}, but {durable} was durable");
                found.push(Damage { place: files.directory.display().to_string(), detail });
            }
            Ok(_) => {}
            Err(StoreError::Corrupt { place, detail }) => found.push(Damage { place, detail }),
            Err(error) => return Err(error),
        }
        found.extend(index.verify().into_iter().map(|(place, detail)| Damage { place, detail }));
        Ok(found)
    }
}
