//! Streams of sorted keys that are read side by side: unions (in any of several) and joins (in all of several). Each
//! stream jumps to the position of the others, so that few keys are read that do not count.

use std::collections::VecDeque;

use crate::node::COUNT;
use crate::store::{Order, Range, Space, View};
use crate::workflow::operate::status::Status;
use crate::workflow::stored::listed::{Lists, by_shard, read_by_status};
use crate::workflow::{Result, WorkflowError};

/// How many keys are read at once at most.
const BATCH: usize = 256;

/// One view of the keys that list executions, in one direction.
pub(crate) struct ListReader<'a> {
    pub(crate) view: &'a View,
    pub(crate) lists: &'a Lists,
    pub(crate) order: Order,
    /// How many keys were read so far.
    pub(crate) looks: usize,
}

/// The target of a seek. A position is the part of a key after the prefix.
#[derive(Clone, Copy)]
pub(crate) enum To<'p> {
    Start,
    /// This position or the next one.
    At(&'p [u8]),
    /// The next position after this one.
    After(&'p [u8]),
}

/// The prefix of keys in a space.
pub(crate) struct Prefix {
    pub(crate) space: Space,
    pub(crate) bytes: Vec<u8>,
}

/// The keys of one prefix. Their positions are distinct.
pub(crate) struct Stream {
    prefix: Prefix,
    range: Range,
    /// The positions that were read and not passed.
    found: VecDeque<Vec<u8>>,
    /// How many keys the next read asks for.
    batch: usize,
    /// True if there are no more keys to read.
    is_done: bool,
}

/// The positions that are in any of several streams.
pub(crate) struct Union {
    streams: Vec<Stream>,
}

/// The positions that are in all of several unions.
pub(crate) struct Join {
    unions: Vec<Union>,
}

/// The next result of a join.
pub(crate) enum JoinNext {
    Found(Vec<u8>),
    /// The read limit is reached. No result was missed up to this position.
    Tired(Vec<u8>),
    End,
}

/// The first string after all strings with this prefix.
pub(crate) fn successor(prefix: &[u8]) -> Vec<u8> {
    let kept = prefix.iter().rposition(|byte| *byte != 0xff).expect("a prefix starts with a letter or a shard");
    let mut end = prefix[..=kept].to_vec();
    end[kept] += 1;
    end
}

impl ListReader<'_> {
    /// True if one position comes before another.
    pub(crate) fn is_before(&self, a: &[u8], b: &[u8]) -> bool {
        match self.order {
            Order::Ascending => a < b,
            Order::Descending => a > b,
        }
    }

    /// The prefix of list keys.
    pub(crate) fn listed(&self, bytes: Vec<u8>) -> Prefix {
        Prefix { space: self.lists.listed.clone(), bytes }
    }

    fn is_passed(&self, position: &[u8], to: To<'_>) -> bool {
        match to {
            To::Start => false,
            To::At(at) => self.is_before(position, at),
            To::After(after) => !self.is_before(after, position),
        }
    }

    /// The prefixes of keys that list executions of a status, for each of its workflows; for running executions also
    /// for each shard.
    pub(crate) async fn workflows(&self, status: Status) -> Result<Vec<Prefix>> {
        let (space, whole) = self.lists.with_status(status);
        let (mut rest, mut prefixes) = (whole, Vec::new());
        loop {
            let found = self.view.scan(&rest, Order::Ascending, 1).await?;
            let Some((key, _)) = found.first() else { return Ok(prefixes) };
            let damaged = || WorkflowError::corrupt(format!("key {key} of a list"));
            let (_, end) = read_by_status(key.bytes()).ok_or_else(damaged)?;
            let bytes = key.bytes()[..key.bytes().len() - end.len()].to_vec();
            // Skip the other keys of this workflow.
            rest = rest.from(&space.key(successor(&bytes)));
            prefixes.push(Prefix { space: space.clone(), bytes });
        }
    }

    /// The prefixes of keys that list running executions of a workflow, for each shard that has some.
    pub(crate) async fn running(&self, workflow: &str) -> Result<Vec<Prefix>> {
        let space = &self.lists.running;
        let (mut prefixes, mut shard) = (Vec::new(), 0);
        while shard < COUNT {
            let bytes = by_shard(shard, workflow);
            let found = self.view.scan(&space.all().from(&space.key(&bytes)), Order::Ascending, 1).await?;
            let Some((key, _)) = found.first() else { break };
            let is_its = key.bytes().starts_with(&bytes);
            let found = key.bytes().first_chunk().map_or(shard, |shard| u16::from_be_bytes(*shard));
            // This shard is done; shards without running executions are skipped.
            shard = if found > shard { found } else { shard + 1 };
            if is_its {
                prefixes.push(Prefix { space: space.clone(), bytes });
            }
        }
        Ok(prefixes)
    }
}

impl Stream {
    /// The keys of a prefix, from `start` to before `end`.
    pub(crate) fn new(prefix: Prefix, start: Vec<u8>, end: Vec<u8>) -> Stream {
        let range = prefix.space.range(start..end);
        Stream { prefix, range, found: VecDeque::new(), batch: 1, is_done: false }
    }

    async fn seek(&mut self, reader: &mut ListReader<'_>, to: To<'_>) -> Result<Option<&[u8]>> {
        while let Some(first) = self.found.front().filter(|first| reader.is_passed(first, to)) {
            // After a long jump, few keys are read ahead.
            if !matches!(to, To::After(after) if after == first) {
                self.batch = 1;
            }
            self.found.pop_front();
        }
        if self.found.is_empty() && !self.is_done {
            self.read(reader, to).await?;
        }
        Ok(self.found.front().map(Vec::as_slice))
    }

    async fn read(&mut self, reader: &mut ListReader<'_>, to: To<'_>) -> Result<()> {
        let key = |position: &[u8]| self.prefix.space.key([&self.prefix.bytes, position].concat());
        let range = match (to, reader.order) {
            (To::Start, _) => self.range.clone(),
            (To::At(at), Order::Ascending) => self.range.from(&key(at)),
            (To::At(at), Order::Descending) => self.range.through(&key(at)),
            (To::After(after), Order::Ascending) => self.range.after(&key(after)),
            (To::After(after), Order::Descending) => self.range.before(&key(after)),
        };
        if range.is_empty() {
            self.is_done = true;
            return Ok(());
        }
        let found = reader.view.scan(&range, reader.order, self.batch).await?;
        reader.looks += found.len().max(1);
        self.is_done = found.len() < self.batch;
        self.batch = (self.batch * 2).min(BATCH);
        let start = self.prefix.bytes.len();
        self.found.extend(found.iter().map(|(key, _)| key.bytes()[start..].to_vec()));
        Ok(())
    }
}

impl Union {
    pub(crate) fn new(streams: Vec<Stream>) -> Union {
        Union { streams }
    }

    async fn seek(&mut self, reader: &mut ListReader<'_>, to: To<'_>) -> Result<Option<Vec<u8>>> {
        let mut first: Option<&[u8]> = None;
        for stream in &mut self.streams {
            if let Some(found) = stream.seek(reader, to).await?
                && first.is_none_or(|first| reader.is_before(found, first))
            {
                first = Some(found);
            }
        }
        Ok(first.map(<[u8]>::to_vec))
    }
}

impl Join {
    pub(crate) fn new(unions: Vec<Union>) -> Join {
        Join { unions }
    }

    /// True if there are no unions.
    pub(crate) fn is_empty(&self) -> bool {
        self.unions.is_empty()
    }

    /// The first position at or after `to` that is in all unions. Stops early after about `most` keys were read.
    pub(crate) async fn next(&mut self, reader: &mut ListReader<'_>, to: To<'_>, most: usize) -> Result<JoinNext> {
        let Some(first) = self.unions.first_mut() else { return Ok(JoinNext::End) };
        let Some(mut position) = first.seek(reader, to).await? else { return Ok(JoinNext::End) };
        let (count, mut agreed, mut union) = (self.unions.len(), 1, 0);
        while agreed < count {
            union = (union + 1) % count;
            match self.unions[union].seek(reader, To::At(&position)).await? {
                None => return Ok(JoinNext::End),
                Some(found) if found == position => agreed += 1,
                Some(found) => {
                    let passed = std::mem::replace(&mut position, found);
                    agreed = 1;
                    if reader.looks >= most {
                        return Ok(JoinNext::Tired(passed));
                    }
                }
            }
        }
        Ok(JoinNext::Found(position))
    }
}
