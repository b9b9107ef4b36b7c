//! The commit log: frames in preallocated, recycled segment files. A commit syncs only the log.
//!
//! At most one frame is not synced yet: the last one. So a frame that cannot be read is the torn end of the log if no
//! readable frame was written after it. Otherwise it is damage, and opening fails.
//!
//! Every segment that may hold an acknowledged commit is announced, with its length, before its first frame is written:
//! by the index, or by a trailer in the segment before it. So a missing or truncated segment is damage, too.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::frame::{Frame, HEADER, Header, PAGE, Position, Trailer, decode_commits};
use super::index::Progress;
use crate::disk::{Disk, DiskFile, Open};
use crate::{Committed, Generation, Result, StoreError};

/// How many empty segments are kept ready behind the segment in use.
const SPARES: usize = 1;

/// The directory of the log and the size of its segments.
#[derive(Debug, Clone)]
pub(super) struct LogFiles {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) directory: PathBuf,
    pub(super) identity: u128,
    pub(super) segment_bytes: u64,
}

/// An open segment.
#[derive(Debug)]
struct Segment {
    number: u64,
    file: Arc<dyn DiskFile>,
    pages: u64,
}

/// The end of the log, where frames are added.
#[derive(Debug)]
pub(super) struct Log {
    files: LogFiles,
    segment: Segment,
    /// The position of the next frame, if it fits into the segment.
    next: Position,
    spares: VecDeque<Segment>,
    /// The frames that are not folded into the index yet: last generation, position.
    frames: VecDeque<(Generation, Position)>,
    /// The full segments that still exist, oldest first, with their numbers of pages.
    full: VecDeque<(u64, u64)>,
    pub(super) bytes_written: u64,
    #[cfg(feature = "testing")]
    pub(super) skip_sync: bool,
}

/// The result of opening the log.
pub(super) struct Replayed {
    pub(super) log: Log,
    /// The commits that the index does not contain, in order.
    pub(super) commits: Vec<Arc<Committed>>,
}

impl LogFiles {
    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(format!("log-{number:016x}"))
    }

    fn number(name: &str) -> Option<u64> {
        u64::from_str_radix(name.strip_prefix("log-")?, 16).ok()
    }

    fn failed(&self, action: &'static str, number: u64) -> impl FnOnce(std::io::Error) -> StoreError {
        let path = self.path(number);
        move |cause| StoreError::io(action, path, cause)
    }

    fn sync_directory(&self) -> Result<()> {
        let synced = self.disk.sync_directory(&self.directory);
        synced.map_err(|cause| StoreError::io("sync", self.directory.clone(), cause))
    }

    /// Writes and syncs a file of zeros. Later writes into it need no new blocks, which makes their syncs cheap. If it
    /// fails, the file is removed: on a full disk it would take space that other files need.
    fn write_zeros(&self, path: &Path) -> Result<Arc<dyn DiskFile>> {
        const CHUNK: usize = 1 << 20;
        let write = || {
            let file = self.disk.open(path, Open::Fresh)?;
            let zeros = vec![0; CHUNK.min(self.segment_bytes as usize)];
            let mut at = 0;
            while at < self.segment_bytes {
                let length = (zeros.len() as u64).min(self.segment_bytes - at);
                file.write_at(at, &zeros[..length as usize])?;
                at += length;
            }
            file.sync()?;
            Ok(file)
        };
        write().map_err(|cause| {
            let _ = self.disk.remove(path);
            StoreError::io("write", path, cause)
        })
    }

    /// Creates a segment that is durable under its name.
    fn create(&self, number: u64) -> Result<Segment> {
        let file = self.write_zeros(&self.path(number))?;
        self.sync_directory()?;
        Ok(Segment { number, file, pages: self.segment_bytes / PAGE as u64 })
    }

    /// Renames a file to a new segment. Frames that are left in it contain the old segment number, so they are not
    /// valid any more.
    fn recycle(&self, from: &Path, number: u64) -> Result<Segment> {
        self.disk.rename(from, &self.path(number)).map_err(self.failed("rename", number))?;
        self.sync_directory()?;
        self.open(number)
    }

    fn open(&self, number: u64) -> Result<Segment> {
        let file = self.disk.open(&self.path(number), Open::Existing).map_err(self.failed("open", number))?;
        let length = file.length().map_err(self.failed("measure", number))?;
        Ok(Segment { number, file, pages: length / PAGE as u64 })
    }

    /// The numbers of the existing segments, in order.
    fn list(&self) -> Result<Vec<u64>> {
        let names = self.disk.list(&self.directory);
        let names = names.map_err(|cause| StoreError::io("list", self.directory.clone(), cause))?;
        let mut numbers: Vec<u64> = names.iter().filter_map(|name| LogFiles::number(name)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Opens the segments from number `first` on. Their numbers have no gap: each segment is created after the one
    /// before it, and only segments before `first` are removed.
    fn open_from(&self, first: u64) -> Result<BTreeMap<u64, Segment>> {
        let numbers = self.list()?.into_iter().filter(|number| *number >= first);
        let segments: BTreeMap<u64, Segment> =
            numbers.map(|number| Ok((number, self.open(number)?))).collect::<Result<_>>()?;
        let last = segments.keys().next_back().copied().unwrap_or(first);
        match (first..=last).find(|number| !segments.contains_key(number)) {
            Some(missing) => Err(StoreError::corrupt(self.path(missing).display().to_string(), "the file is missing")),
            None => Ok(segments),
        }
    }

    /// Reads the frame that starts at a page, if there is one.
    fn frame_at(&self, segment: &Segment, page: u64) -> Result<Option<(Header, Bytes)>> {
        if page >= segment.pages {
            return Ok(None);
        }
        let failed = || self.failed("read", segment.number);
        let mut bytes = vec![0; PAGE];
        segment.file.read_at(page * PAGE as u64, &mut bytes).map_err(failed())?;
        let Some(header) = Header::decode(&bytes) else { return Ok(None) };
        let in_place = (header.at.segment, header.at.page) == (segment.number, page);
        if !in_place || header.pages() > segment.pages - page {
            return Ok(None);
        }
        bytes.resize(header.pages() as usize * PAGE, 0);
        segment.file.read_at((page + 1) * PAGE as u64, &mut bytes[PAGE..]).map_err(failed())?;
        if !header.fits(&bytes, self.identity) {
            return Ok(None);
        }
        bytes.truncate(HEADER + header.length as usize);
        Ok(Some((header, Bytes::from(bytes).split_off(HEADER))))
    }

    /// Finds a frame at or behind `from` that was written when `missing` was already durable. It proves that the frame
    /// of `missing` is damaged.
    fn witness(
        &self,
        segments: &BTreeMap<u64, Segment>,
        from: Position,
        missing: Generation,
    ) -> Result<Option<Position>> {
        const CHUNK_PAGES: u64 = 256;
        for (number, segment) in segments.range(from.segment..) {
            let mut page = if *number == from.segment { from.page } else { 0 };
            while page < segment.pages {
                let pages = CHUNK_PAGES.min(segment.pages - page);
                let mut chunk = vec![0; pages as usize * PAGE];
                segment.file.read_at(page * PAGE as u64, &mut chunk).map_err(self.failed("read", *number))?;
                for (index, bytes) in chunk.chunks(PAGE).enumerate() {
                    let at = page + index as u64;
                    let likely = Header::decode(bytes).is_some_and(|header| {
                        header.at.segment == *number && header.at.page == at && header.durable >= missing
                    });
                    if likely && let Some((header, _)) = self.frame_at(segment, at)? {
                        return Ok(Some(header.at));
                    }
                }
                page += pages;
            }
        }
        Ok(None)
    }

    fn place(&self, position: Position) -> String {
        format!("{} at byte {}", self.path(position.segment).display(), position.page * PAGE as u64)
    }

    /// Describes where a frame that cannot be read should be: behind the frame before it, or first in the next segment
    /// if it did not fit there.
    fn place_of_missing(&self, segments: &BTreeMap<u64, Segment>, next: Position) -> String {
        let follower = Position { segment: next.segment + 1, page: 0, ..next };
        let has_room = segments.get(&next.segment).is_some_and(|segment| next.page < segment.pages);
        match (has_room, segments.contains_key(&follower.segment)) {
            (true, true) => format!("{} or {}", self.place(next), self.place(follower)),
            (true, false) => self.place(next),
            (false, _) => self.place(follower),
        }
    }

    /// Fails if a segment is missing or has fewer pages than were announced.
    fn check_announced(&self, segments: &BTreeMap<u64, Segment>, number: u64, pages: u64) -> Result<()> {
        let detail = match segments.get(&number) {
            Some(segment) if segment.pages >= pages => return Ok(()),
            Some(segment) => format!("it was truncated to {} of its {pages} pages of {PAGE} bytes", segment.pages),
            None => "the file is missing".into(),
        };
        Err(StoreError::corrupt(self.path(number).display().to_string(), detail))
    }

    /// The trailer at a position, if there is one.
    fn trailer_at(&self, segments: &BTreeMap<u64, Segment>, at: Position) -> Result<Option<Trailer>> {
        let Some(segment) = segments.get(&at.segment).filter(|segment| at.page < segment.pages) else {
            return Ok(None);
        };
        let mut page = vec![0; PAGE];
        segment.file.read_at(at.page * PAGE as u64, &mut page).map_err(self.failed("read", at.segment))?;
        Ok(Trailer::decode(&page, self.identity).filter(|trailer| trailer.at == at))
    }

    /// Reads the frames that are not folded into the index, up to the frame that holds generation `last`, and passes
    /// each to `visit`. Returns the end of the log, and the position of the trailer before it if no frame lies between
    /// them. Fails if a frame or segment is damaged.
    fn walk(
        &self,
        segments: &BTreeMap<u64, Segment>,
        progress: &Progress,
        last: Generation,
        mut visit: impl FnMut(Header, Bytes) -> Result<()>,
    ) -> Result<(Position, Option<Position>)> {
        let Progress { applied, log: mut next, pages, .. } = *progress;
        self.check_announced(segments, next.segment, pages.max(next.page))?;
        let mut trailer = None;
        let mut expected: Option<Generation> = None;
        while expected.unwrap_or(applied.next()) <= last {
            let wanted = |(header, _): &(Header, Bytes)| {
                let follows = expected.map_or(header.first <= applied.next(), |expected| header.first == expected);
                header.at.chain == next.chain && follows
            };
            let frame_at = |number, page| match segments.get(&number) {
                Some(segment) => Ok(self.frame_at(segment, page)?.filter(wanted)),
                None => Ok(None),
            };
            let mut frame = frame_at(next.segment, next.page)?;
            if frame.is_none()
                && let Some(found) = self.trailer_at(segments, next)?
            {
                trailer = Some(found.at);
                next = Position { segment: next.segment + 1, page: 0, ..next };
                self.check_announced(segments, next.segment, found.next_pages.into())?;
                continue;
            }
            // A frame that did not fit into its segment is the first one of the next. It is found without the trailer.
            if frame.is_none() {
                frame = frame_at(next.segment + 1, 0)?;
            }
            let Some((header, payload)) = frame else {
                let missing = expected.unwrap_or(applied.next());
                if let Some(witness) = self.witness(segments, next, missing)? {
                    let witness = self.place(witness);
                    let detail = format!("generation {missing} cannot be read here, but {witness} follows it");
                    return Err(StoreError::corrupt(self.place_of_missing(segments, next), detail));
                }
                return Ok((next, trailer));
            };
            trailer = None;
            expected = Some(Generation(header.first.0 + u64::from(header.count)));
            next = header.after();
            visit(header, payload)?;
        }
        Ok((next, trailer))
    }
}

impl Log {
    /// Starts the log of a new store. Returns its position and the number of pages of its segment.
    pub(super) fn create(files: &LogFiles) -> Result<(Position, u64)> {
        let segment = files.create(1)?;
        Ok((Position { segment: segment.number, page: 0, chain: 0 }, segment.pages))
    }

    /// Reads the commits that are not folded into the index, and prepares to append behind the last frame.
    pub(super) fn open(files: LogFiles, progress: &Progress) -> Result<Replayed> {
        let applied = progress.applied;
        let mut segments = files.open_from(progress.log.segment)?;
        let mut commits = Vec::new();
        let mut frames = VecDeque::new();
        let mut last = None;
        let (next, trailer) = files.walk(&segments, progress, Generation(u64::MAX), |header, payload| {
            let Some(decoded) = decode_commits(&header, payload) else {
                return Err(StoreError::corrupt(files.place(header.at), "the commits in it cannot be read"));
            };
            frames.extend(decoded.last().map(|commit| (commit.generation, header.at)));
            commits.extend(decoded.into_iter().filter(|commit| commit.generation > applied));
            last = Some(header);
            Ok(())
        })?;
        if let Some(header) = last {
            files.write_again(&segments[&header.at.segment], header.at.page, header.pages())?;
        }
        if let Some(at) = trailer {
            files.write_again(&segments[&at.segment], at.page, 1)?;
        }
        let segment = segments.remove(&next.segment).expect("the log ends in a segment that was read");
        let full = files.list()?.into_iter().take_while(|number| *number < segment.number);
        let full = full.map(|number| (number, segments.get(&number).map_or(0, |segment| segment.pages))).collect();
        let mut log = Log {
            files,
            next,
            spares: VecDeque::new(),
            frames,
            full,
            segment,
            bytes_written: 0,
            #[cfg(feature = "testing")]
            skip_sync: false,
        };
        log.adopt_spares(segments)?;
        Ok(Replayed { log, commits })
    }

    /// Keeps the unused segments behind the end as spares, and removes those that a crash left incomplete.
    fn adopt_spares(&mut self, segments: BTreeMap<u64, Segment>) -> Result<()> {
        let mut unfinished = Vec::new();
        for (number, segment) in segments.into_iter().filter(|(number, _)| *number > self.segment.number) {
            let follows = number == self.last_number() + 1;
            if follows && segment.pages * PAGE as u64 >= self.files.segment_bytes {
                // A killed process may have left it unsynced. A trailer will announce its length, so sync it now.
                segment.file.sync().map_err(self.files.failed("sync", number))?;
                self.spares.push_back(segment);
            } else {
                unfinished.push(number);
            }
        }
        // An incomplete spare is of no use, but large. Usually there is none.
        let _ = self.files.disk.remove(&self.files.spare_path());
        // The last one first, so that a crash in between leaves no gap.
        for number in unfinished.into_iter().rev() {
            self.files.disk.remove(&self.files.path(number)).map_err(self.files.failed("remove", number))?;
        }
        Ok(())
    }

    fn last_number(&self) -> u64 {
        self.spares.back().map_or(self.segment.number, |segment| segment.number)
    }

    /// Writes a frame and syncs it. Returns the number of bytes written. After an error nothing may be written any
    /// more.
    pub(super) fn append(&mut self, frame: &mut Frame, durable: Generation) -> Result<usize> {
        let pages = frame.length().div_ceil(PAGE) as u64;
        // One page is reserved for the trailer.
        if self.next.page + pages >= self.segment.pages {
            self.next_segment()?;
        }
        let at = self.next;
        let last = frame.last();
        let (bytes, next) = frame.seal(at, durable, self.files.identity);
        let number = self.segment.number;
        self.segment.file.write_at(at.page * PAGE as u64, bytes).map_err(self.files.failed("write", number))?;
        let written = bytes.len();
        self.bytes_written += written as u64;
        self.sync()?;
        self.next = next;
        self.frames.push_back((last, at));
        Ok(written)
    }

    fn sync(&self) -> Result<()> {
        #[cfg(feature = "testing")]
        if self.skip_sync {
            return Ok(());
        }
        self.segment.file.sync().map_err(self.files.failed("sync", self.segment.number))
    }

    /// Writes a trailer that announces the next segment, and continues there.
    fn next_segment(&mut self) -> Result<()> {
        let number = self.segment.number + 1;
        let next = match self.spares.pop_front() {
            Some(spare) => spare,
            None => self.files.create(number)?,
        };
        if self.next.page < self.segment.pages {
            let next_pages = u32::try_from(next.pages).unwrap_or(u32::MAX);
            let page = Trailer { at: self.next, next_pages }.encode(self.files.identity);
            let written = self.segment.file.write_at(self.next.page * PAGE as u64, &page);
            written.map_err(self.files.failed("write", self.segment.number))?;
            self.sync()?;
        }
        self.full.push_back((self.segment.number, self.segment.pages));
        self.segment = next;
        self.next = Position { segment: number, page: 0, chain: self.next.chain };
        Ok(())
    }

    /// The position from which the log must be read when everything up to `applied` is in the index, and the number of
    /// pages of its segment.
    pub(super) fn position_after(&self, applied: Generation) -> (Position, u64) {
        let at = self.frames.iter().find(|(last, _)| *last > applied).map_or(self.next, |(_, at)| *at);
        let full = self.full.iter().find(|(number, _)| *number == at.segment);
        (at, full.map_or(self.segment.pages, |(_, pages)| *pages))
    }

    /// Forgets the frames that are durably folded into the index. Segments that are not needed any more become spares
    /// or are removed.
    pub(super) fn release(&mut self, applied: Generation, start: Position) -> Result<()> {
        while self.frames.front().is_some_and(|(last, _)| *last <= applied) {
            self.frames.pop_front();
        }
        while let Some((oldest, pages)) = self.full.front().copied().filter(|(oldest, _)| *oldest < start.segment) {
            // A segment of another size, such as a snapshot's, or of an unknown size cannot be a spare.
            if self.spares.len() < SPARES && pages * PAGE as u64 == self.files.segment_bytes {
                let spare = self.files.recycle(&self.files.path(oldest), self.last_number() + 1)?;
                self.spares.push_back(spare);
            } else {
                let files = &self.files;
                files.disk.remove(&files.path(oldest)).map_err(files.failed("remove", oldest))?;
            }
            self.full.pop_front();
        }
        Ok(())
    }

    /// True if [`LogFiles::prepare_spare`] should prepare a segment.
    pub(super) fn wants_spare(&self) -> bool {
        self.spares.len() < SPARES
    }

    /// Adds the prepared segment under the next number.
    pub(super) fn add_spare(&mut self) -> Result<()> {
        let spare = self.files.recycle(&self.files.spare_path(), self.last_number() + 1)?;
        self.spares.push_back(spare);
        Ok(())
    }

    /// Reads again every frame that is not folded into the index, up to generation `durable`. Returns the last
    /// generation found.
    pub(super) fn verify(files: &LogFiles, progress: &Progress, durable: Generation) -> Result<Generation> {
        let segments = files.open_from(progress.log.segment)?;
        let mut last = progress.applied;
        files.walk(&segments, progress, durable, |header, _| {
            last = Generation(header.first.0 + u64::from(header.count) - 1);
            Ok(())
        })?;
        Ok(last)
    }

    pub(super) fn files(&self) -> &LogFiles {
        &self.files
    }
}

impl LogFiles {
    fn spare_path(&self) -> PathBuf {
        self.directory.join("spare.new")
    }

    /// Prepares a segment under a temporary name. This takes time, and the log may reach the next segment meanwhile.
    pub(super) fn prepare_spare(&self) -> Result<()> {
        self.write_zeros(&self.spare_path()).map(|_| ())
    }

    /// Writes pages again and syncs them: those of the last frame, or of the trailer behind it. After a crash of the
    /// process alone they may not be synced. After a failed sync the operating system may treat them as synced. The
    /// commits of the frame become visible only after this.
    fn write_again(&self, segment: &Segment, page: u64, pages: u64) -> Result<()> {
        let offset = page * PAGE as u64;
        let mut bytes = vec![0; pages as usize * PAGE];
        segment.file.read_at(offset, &mut bytes).map_err(self.failed("read", segment.number))?;
        segment.file.write_at(offset, &bytes).map_err(self.failed("write", segment.number))?;
        segment.file.sync().map_err(self.failed("sync", segment.number))
    }
}
