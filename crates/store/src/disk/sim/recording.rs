//! A recording of the changes of a simulated disk, and the images that a power loss could leave at any point of it.

use super::medium::Medium;
use super::{Event, FileId, Loss, SECTOR, SimDisk};

/// The contents of a disk at the start and the events since.
pub struct Recording {
    start: Medium,
    events: Vec<Event>,
    disk: SimDisk,
}

impl Recording {
    pub(super) fn new(start: Medium, disk: SimDisk) -> Recording {
        Recording { start, events: Vec::new(), disk }
    }

    /// Ends the recording and keeps what was recorded.
    pub fn stop(mut self) -> Recording {
        self.events = self.disk.state.lock().recording.take().unwrap_or_default();
        self
    }

    /// The recorded events.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns a disk as a power loss right before event number `point` could leave it.
    pub fn image(&self, point: usize, loss: Loss) -> SimDisk {
        let mut walk = self.walk();
        while walk.point() < point && walk.step().is_some() {}
        walk.image(loss)
    }

    /// Starts a walk at the first event, to build images at one point after the other.
    pub fn walk(&self) -> Walk<'_> {
        Walk { events: &self.events, next: 0, sure: self.start.clone(), unsure_names: Vec::new(), unsure: Vec::new() }
    }
}

/// A point of a recording. It keeps durable contents apart from changes that are not durable yet.
pub struct Walk<'a> {
    events: &'a [Event],
    next: usize,
    sure: Medium,
    /// The changes of names that no directory sync covers yet.
    unsure_names: Vec<&'a Event>,
    /// Writes and changes of length that no sync of their file covers yet, in order.
    unsure: Vec<(FileId, &'a Event)>,
}

impl<'a> Walk<'a> {
    /// How many events have passed.
    pub fn point(&self) -> usize {
        self.next
    }

    /// Moves past the next event and returns it.
    pub fn step(&mut self) -> Option<&'a Event> {
        let event = self.events.get(self.next)?;
        self.next += 1;
        match event {
            Event::Create(..) | Event::Rename(..) | Event::Remove(..) => self.unsure_names.push(event),
            Event::SyncDirectory(directory) => {
                let (sure, rest): (Vec<_>, Vec<_>) =
                    self.unsure_names.drain(..).partition(|event| event.directory() == Some(directory));
                self.unsure_names = rest;
                sure.into_iter().for_each(|event| self.sure.rename(event));
            }
            Event::Write(file, ..) | Event::SetLength(file, _) => self.unsure.push((*file, event)),
            Event::Sync(file) => {
                let (sure, rest): (Vec<_>, Vec<_>) = self.unsure.drain(..).partition(|(id, _)| id == file);
                self.unsure = rest;
                sure.into_iter().for_each(|(_, event)| self.sure.change(event));
            }
            Event::Note(_) => {}
        }
        Some(event)
    }

    /// Returns a disk as a power loss at this point could leave it.
    pub fn image(&self, loss: Loss) -> SimDisk {
        let seed = match loss {
            Loss::SomeWrites(seed) | Loss::SomeSectors(seed) => seed,
            Loss::Everything | Loss::Nothing => 0,
        };
        let mut random = fastrand::Rng::with_seed(seed);
        let mut medium = self.sure.clone();
        let kept = match loss {
            Loss::Everything => 0,
            Loss::Nothing => self.unsure_names.len(),
            Loss::SomeWrites(_) | Loss::SomeSectors(_) => random.usize(..=self.unsure_names.len()),
        };
        for event in &self.unsure_names[..kept] {
            medium.rename(event);
        }
        for (_, event) in &self.unsure {
            match (loss, event) {
                (Loss::Everything, _) => {}
                (Loss::Nothing, _) => medium.change(event),
                (Loss::SomeSectors(_), Event::Write(file, offset, bytes)) => {
                    tear(&mut medium, &mut random, *file, *offset, bytes);
                }
                (Loss::SomeWrites(_) | Loss::SomeSectors(_), _) => {
                    if random.bool() {
                        medium.change(event);
                    }
                }
            }
        }
        SimDisk::holding(medium)
    }
}

/// Applies a random part of a write's sectors.
fn tear(medium: &mut Medium, random: &mut fastrand::Rng, file: FileId, offset: u64, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() {
        let in_sector = SECTOR - (offset as usize + at) % SECTOR;
        let end = bytes.len().min(at + in_sector);
        if random.bool() {
            medium.write(file, offset + at as u64, &bytes[at..end]);
        }
        at = end;
    }
}
