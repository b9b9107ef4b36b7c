//! What this process knows of the newest state without reading: where the last transaction left the head, and the
//! newest versions of keys that were read or written lately. A group of commits can be decided on it at once. That is a
//! guess: the statement that writes the group compares it with the tables, and writes nothing if it is wrong. Other
//! processes tell where they left the head. Where they move it faster than they tell, a group is written with any head,
//! if only the keys are as guessed. It is also known which spaces the last commits touched, so that a watch on another
//! space need not ask.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::backend::{Facts, Needs};
use crate::commit::Head;
use crate::postgres::writer::{DecidedGroup, Job, Last};
use crate::space::RECEIPTS;
use crate::{Change, Check, Committed, Generation, Key, SpaceId, Timestamp};

/// How many keys are remembered, in two halves: when the newer one is full, the older one is forgotten.
const HALF: usize = 8192;

/// How many of the newest commits are remembered.
const COMMITS: usize = 4096;

/// How many transactions go without a guess after many wrong ones.
const LONGEST_PAUSE: u32 = 64;

#[derive(Default)]
pub(super) struct Known {
    last: Option<Last>,
    newer: HashMap<Key, Head>,
    older: HashMap<Key, Head>,
    /// Commits without an unknown one between them: the generation after them, and which spaces each has touched, in
    /// the order of generations.
    next: Generation,
    touched: VecDeque<Spaces>,
    /// The highest generation that was seen here.
    highest: Generation,
    /// How many transactions still go without a guess of keys, and of the head.
    keys: Pause,
    head: Pause,
}

/// A guess that is not made for a while after it was wrong.
#[derive(Default)]
struct Pause {
    /// How many transactions still go without it.
    left: u32,
    /// How many go without it after the next wrong one.
    next: u32,
}

impl Pause {
    /// Gives whether the next transaction goes without the guess.
    fn counts(&mut self) -> bool {
        let is_left = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_left
    }

    fn right(&mut self) {
        self.next = 1;
    }

    fn wrong(&mut self) {
        self.left = self.next.max(1);
        self.next = (self.next * 2).clamp(1, LONGEST_PAUSE);
    }
}

/// A set of spaces. It may hold more spaces than were added.
#[derive(Clone, Copy, Default)]
pub(super) struct Spaces(u64);

impl Spaces {
    pub(super) fn of(space: SpaceId) -> Spaces {
        Spaces(1 << (space.0 % u64::BITS))
    }

    fn touched_by(committed: &Committed) -> Spaces {
        Spaces(committed.changes.iter().fold(0, |all, change| all | Spaces::of(change.key.space()).0))
    }

    /// What the commits of a group touch.
    pub(super) fn touched_by_group(group: &DecidedGroup) -> Spaces {
        Spaces(group.applied.iter().fold(0, |all, committed| all | Spaces::touched_by(committed).0))
    }

    pub(super) fn add(&mut self, others: Spaces) {
        self.0 |= others.0;
    }

    pub(super) fn and(self, others: Spaces) -> Spaces {
        Spaces(self.0 & others.0)
    }

    /// As a column: the same bits.
    pub(super) fn bits(self) -> i64 {
        self.0 as i64
    }

    pub(super) fn may_hold(self, space: SpaceId) -> bool {
        self.0 & Spaces::of(space).0 != 0
    }
}

/// What a process is told of a group of another one: its first generation, where the group has left the head, and which
/// spaces its commits have touched, all in all.
#[derive(Clone, Copy)]
pub(super) struct News {
    first: Generation,
    pub(super) last: Last,
    touched: Spaces,
}

impl News {
    /// The end of the payload of a notification. What comes before is known when the group is written.
    pub(super) fn touched(touched: Spaces) -> String {
        touched.0.to_string()
    }

    /// Reads the payload of a notification: numbers.
    pub(super) fn parse(text: &str) -> Option<News> {
        let numbers: Vec<u64> = text.split(' ').map(|number| number.parse().ok()).collect::<Option<_>>()?;
        let [first, generation, time, touched] = numbers[..] else { return None };
        let last = Last { generation: Generation(generation), time: Timestamp(time) };
        (first <= generation).then_some(News { first: Generation(first), last, touched: Spaces(touched) })
    }
}

/// What a group of commits is decided on, without a look at the tables.
pub(super) struct Guess {
    pub(super) facts: Facts,
    pub(super) last: Last,
    pub(super) versions: Guessed,
    /// True if the head is probably another one by then: the group moves along with it.
    pub(super) moves: bool,
}

/// The newest versions of keys, as they are guessed.
#[derive(Default)]
pub(super) struct Guessed {
    pub(super) keys: Vec<Key>,
    /// The rev of each key; below zero if the key is deleted, and 0 if it was never written. No other part of a version
    /// counts for a commit.
    pub(super) revs: Vec<i64>,
}

impl Known {
    /// A guess of what a group is decided on. None if a range is checked, or if a guess would probably be wrong.
    pub(super) fn guess(&mut self, group: &[Job]) -> Option<Guess> {
        if self.keys.counts() {
            return None;
        }
        let (last, moves) = (self.last?, self.head.counts());
        let (mut keys, mut receipts) = (Vec::new(), Vec::new());
        for needs in group.iter().map(|job| Needs::of(&job.commit)) {
            if needs.ranges().next().is_some() {
                return None;
            }
            keys.extend(needs.heads().cloned());
            receipts.extend(needs.receipt());
        }
        keys.sort_unstable();
        keys.dedup();
        let mut facts = Facts::new(last.generation);
        let mut revs = Vec::with_capacity(keys.len() + receipts.len());
        for key in &keys {
            let head = self.version(key);
            revs.push(head.map_or(0, |head| if head.live { head.rev.0 as i64 } else { -(head.rev.0 as i64) }));
            facts.add_head(key.clone(), head);
        }
        // No commit with the same id has landed before.
        for receipt in receipts {
            facts.add_receipt(receipt.clone(), None);
            revs.push(0);
            keys.push(receipt);
        }
        Some(Guess { facts, last, versions: Guessed { keys, revs }, moves })
    }

    /// The same for a transaction of the user's own, whose SQL is run again after a wrong guess.
    pub(super) fn sure_guess(&mut self, group: &[Job]) -> Option<Guess> {
        self.guess(group).filter(|guess| !guess.moves && guess.versions.are_sure(group))
    }

    fn version(&mut self, key: &Key) -> Option<Head> {
        if let Some(head) = self.newer.get(key) {
            return Some(*head);
        }
        let (key, head) = self.older.remove_entry(key)?;
        self.remember(key, head);
        Some(head)
    }

    /// A version was read, which is probably the newest one.
    pub(super) fn found(&mut self, key: &Key, head: Head) {
        if self.version(key).is_none_or(|known| known.generation < head.generation) {
            self.remember(key.clone(), head);
        }
    }

    fn remember(&mut self, key: Key, head: Head) {
        if self.newer.len() >= HALF {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(key, head);
    }

    /// A transaction has read the head, which it has locked, and versions of keys. If others move the head before this
    /// process hears of it, a guess is worth nothing.
    pub(super) fn read(&mut self, last: Last, heads: impl Iterator<Item = (Key, Option<Head>)>) {
        if last.generation < self.highest {
            // The server has lost commits, as a failover to an asynchronous replica may do. What was known is void.
            *self = Known::default();
        }
        if self.last.is_none_or(|known| known.generation != last.generation) {
            self.head.left = self.head.left.max(1);
        }
        self.last = Some(last);
        self.highest = last.generation;
        for (key, head) in heads {
            match head {
                Some(head) => self.remember(key, head),
                None => self.forget(&key),
            }
        }
    }

    /// Versions of keys were read, which may have been overwritten since.
    pub(super) fn looked(&mut self, heads: impl Iterator<Item = (Key, Option<Head>)>) {
        for (key, head) in heads {
            match head {
                Some(head) => self.found(&key, head),
                None => self.forget(&key),
            }
        }
    }

    fn forget(&mut self, key: &Key) {
        self.newer.remove(key);
        self.older.remove(key);
    }

    /// A group has landed, with which the head is as given.
    pub(super) fn landed(&mut self, applied: &[Committed], last: Last) {
        if self.last.is_none_or(|known| known.generation < last.generation) {
            self.last = Some(last);
        }
        self.highest = self.highest.max(last.generation);
        for committed in applied {
            self.remember_commit(committed.generation, Spaces::touched_by(committed));
            let Committed { generation, changes, .. } = committed;
            for Change { key, rev, value } in changes.iter().filter(|change| change.key.space() != RECEIPTS) {
                self.remember(key.clone(), Head { rev: *rev, generation: *generation, live: value.is_some() });
            }
        }
    }

    /// The head was changed, without a commit.
    pub(super) fn outdated(&mut self, last: Last) {
        if self.last.is_some_and(|known| known.generation == last.generation) {
            self.last = Some(last);
        }
    }

    /// A group of another process has landed, or one of this process. Notifications come in the order of generations.
    pub(super) fn heard(&mut self, News { first, last, touched }: News) {
        if self.last.is_some_and(|known| known.generation < last.generation) {
            self.last = Some(last);
        }
        self.highest = self.highest.max(last.generation);
        // It may be a large group; its last commits are enough.
        let most = last.generation.0.saturating_sub(COMMITS as u64);
        (first.0.max(most)..=last.generation.0).for_each(|at| self.remember_commit(Generation(at), touched));
    }

    fn remember_commit(&mut self, generation: Generation, touched: Spaces) {
        // Answers to two transactions may be told in either order.
        if generation < self.next {
            return;
        }
        if generation > self.next || self.touched.len() >= COMMITS {
            self.touched.clear();
        }
        self.touched.push_back(touched);
        self.next = generation.next();
    }

    /// True if no commit after one generation and up to another one has touched a space. False if that is not known.
    pub(super) fn is_untouched(&self, space: SpaceId, after: Generation, through: Generation) -> bool {
        let first = self.next.0.saturating_sub(self.touched.len() as u64);
        let is_known = first <= after.0 + 1 && through < self.next;
        let commits = || self.touched.range((after.0 + 1 - first) as usize..=(through.0 - first) as usize);
        is_known && after < through && !commits().any(|touched| touched.may_hold(space))
    }

    /// A guess was right, of the keys and, unless the group could move, of the head.
    pub(super) fn guessed_right(&mut self, moves: bool) {
        self.keys.right();
        if !moves {
            self.head.right();
        }
    }

    /// The head was guessed wrong, or the keys: the next transaction is right whatever the head is.
    pub(super) fn guessed_head_wrong(&mut self) {
        self.head.wrong();
    }

    /// The keys were guessed wrong: the next transaction looks.
    pub(super) fn guessed_keys_wrong(&mut self, guessed: &Guessed) {
        guessed.keys.iter().for_each(|key| self.forget(key));
        self.keys.wrong();
    }
}

impl Guessed {
    /// Whether each key that is not known, and so counts as new, is checked to be new by the group itself.
    pub(super) fn are_sure(&self, group: &[Job]) -> bool {
        let checks = group.iter().flat_map(|job| &job.commit.checks);
        let checked: HashSet<&Key> = checks
            .filter_map(|check| match check {
                Check::Absent(key) => Some(key),
                _ => None,
            })
            .collect();
        let mut unknown = self.keys.iter().zip(&self.revs).filter(|(_, rev)| **rev == 0).map(|(key, _)| key);
        unknown.all(|key| key.space() == RECEIPTS || checked.contains(key))
    }

    /// The keys, as a parameter of a statement.
    pub(super) fn encoded(&self) -> Vec<&[u8]> {
        self.keys.iter().map(Key::encoded).collect()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::{Commit, Range, Rev};

    fn key(space: u32, name: &str) -> Key {
        let encoded = [&space.to_be_bytes(), name.as_bytes()].concat();
        Key::from_encoded(Bytes::from(encoded)).unwrap()
    }

    fn last(generation: u64) -> Last {
        Last { generation: Generation(generation), time: Timestamp(generation * 10) }
    }

    fn committed(generation: u64, key: &Key) -> Committed {
        let change = Change { key: key.clone(), rev: Rev(1), value: Some(Bytes::new()) };
        let (generation, time) = (Generation(generation), Timestamp(generation * 10));
        Committed { generation, time, meta: Bytes::new(), changes: vec![change] }
    }

    fn land(known: &mut Known, generation: u64, space: u32) {
        known.landed(&[committed(generation, &key(space, "k"))], last(generation));
    }

    fn put(name: &str) -> [Job; 1] {
        [Job::alone(Commit::new().put(&key(9, name), "1"))]
    }

    #[test]
    fn only_an_unbroken_row_of_own_commits_tells_what_was_not_touched() {
        let mut known = Known::default();
        let untouched = |known: &Known, space: u32, after: u64, through: u64| {
            known.is_untouched(SpaceId(space), Generation(after), Generation(through))
        };
        assert!(!untouched(&known, 20, 0, 1), "nothing is known");
        for (generation, space) in [(5, 17), (6, 18), (7, 17)] {
            land(&mut known, generation, space);
        }
        assert!(untouched(&known, 20, 4, 7) && untouched(&known, 18, 6, 7) && untouched(&known, 17, 5, 6));
        assert!(!untouched(&known, 18, 4, 7) && !untouched(&known, 17, 6, 7));
        assert!(!untouched(&known, 20, 3, 7), "commit 4 is of another process");
        assert!(!untouched(&known, 20, 4, 8), "commit 8 is not known yet");
        assert!(!untouched(&known, 20, 7, 7) && !untouched(&known, 20, 8, 7));
        assert!(!untouched(&known, 17 + 64, 4, 7), "spaces may be taken for others");
        // Commit 8 is of another process, or its answer comes later.
        land(&mut known, 9, 17);
        assert!(!untouched(&known, 20, 7, 9) && untouched(&known, 20, 8, 9));
        land(&mut known, 8, 20);
        assert!(!untouched(&known, 20, 7, 9));
        for generation in 10..10 + 2 * COMMITS as u64 {
            land(&mut known, generation, 17);
            assert!(known.touched.len() <= COMMITS && untouched(&known, 20, generation - 1, generation));
        }
    }

    #[test]
    fn what_is_heard_counts_as_what_was_done() {
        let mut known = Known::default();
        let news = |first, generation, space| {
            let touched = Spaces::of(SpaceId(space)).0;
            let text = format!("{first} {generation} {} {touched}", generation * 10);
            News::parse(&text).expect("what is told is understood")
        };
        known.heard(news(2, 3, 9));
        assert!(known.guess(&put("k")).is_none(), "a head that this process has not seen itself is no start");
        land(&mut known, 4, 9);
        known.heard(news(5, 7, 17));
        let guess = known.guess(&put("k")).unwrap();
        assert_eq!((guess.last.generation, guess.last.time), (Generation(7), Timestamp(70)));
        let untouched = |known: &Known, space: u32, after: u64, through: u64| {
            known.is_untouched(SpaceId(space), Generation(after), Generation(through))
        };
        assert!(untouched(&known, 20, 1, 7) && !untouched(&known, 17, 4, 7) && untouched(&known, 17, 1, 4));
        // Own commits are notified, too.
        known.heard(news(4, 4, 9));
        assert_eq!(known.guess(&put("k")).unwrap().last.generation, Generation(7));
        // One that was lost.
        known.heard(news(9, 9, 17));
        assert!(!untouched(&known, 20, 1, 9) && !untouched(&known, 20, 7, 9) && untouched(&known, 20, 8, 9));
        known.heard(news(10, 10 + 2 * COMMITS as u64, 17));
        assert!(known.touched.len() <= COMMITS);
        for text in ["", "7", "latchwork", "1 2 3", "1 2 3 4 5", "1 2 x 5", "3 2 1 1", "-1 2 3 4"] {
            assert!(News::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn a_guess_needs_a_head_and_no_range() {
        let mut known = Known::default();
        assert!(known.guess(&put("a")).is_none(), "nothing is known");
        known.read(last(4), std::iter::empty());
        assert!(known.guess(&put("a")).expect("the head is known").moves, "others may commit, too");
        known.read(last(4), std::iter::empty());
        let guess = known.guess(&put("a")).unwrap();
        assert!(!guess.moves, "no other process has committed");
        assert_eq!((guess.last.generation, guess.versions.revs), (Generation(4), vec![0]));
        land(&mut known, 5, 9);
        let guess = known.guess(&put("k")).expect("this process has made the last commit");
        assert_eq!((guess.last.generation, guess.versions.revs), (Generation(5), vec![1]));
        let deleted = Change { key: key(9, "k"), rev: Rev(2), value: None };
        known.landed(&[Committed { changes: vec![deleted], ..committed(5, &key(9, "k")) }], last(5));
        assert_eq!(known.guess(&put("k")).unwrap().versions.revs, [-2]);
        // What is answered late does not take the head back.
        land(&mut known, 3, 9);
        assert_eq!(known.guess(&put("k")).unwrap().last.generation, Generation(5));
        let all = Range::of_space(SpaceId(9));
        let ranged = [Job::alone(Commit::new().unchanged(&all, Generation(4)).put(&key(9, "k"), "1"))];
        assert!(known.guess(&ranged).is_none());
    }

    /// Both the receipt and its key must count as absent, whatever is known of earlier commits.
    #[test]
    fn a_commit_id_is_always_guessed_to_be_new() {
        let mut known = Known::default();
        let id = crate::CommitId([7; 16]);
        let job = || [Job::alone(Commit::new().id(id).put(&key(9, "k"), "1"))];
        let receipt = Needs::of(&job()[0].commit).receipt().unwrap();
        known.landed(&[committed(5, &key(9, "k")), committed(6, &receipt)], last(6));
        let guess = known.guess(&job()).unwrap();
        assert_eq!(guess.versions.keys, [key(9, "k"), receipt]);
        assert_eq!(guess.versions.revs, [1, 0]);
    }

    /// Otherwise the user's SQL would be run again for ever.
    #[test]
    fn a_guess_that_was_wrong_is_not_made_again_for_the_users_sql() {
        let mut known = Known::default();
        land(&mut known, 5, 9);
        let absent = [Job::alone(Commit::new().absent(&key(9, "new")).put(&key(9, "new"), "1"))];
        assert!(known.sure_guess(&put("unknown")).is_none() && known.sure_guess(&absent).is_some());
        let guess = known.sure_guess(&put("k")).unwrap();
        known.guessed_keys_wrong(&guess.versions);
        for generation in 6..20 {
            known.landed(&[committed(generation, &key(9, "other"))], last(generation));
            known.guessed_right(false);
            assert!(known.sure_guess(&put("k")).is_none());
        }
    }

    #[test]
    fn what_is_known_of_commits_that_the_server_has_lost_is_void() {
        let mut known = Known::default();
        (5..9).for_each(|generation| land(&mut known, generation, 9));
        known.guessed_keys_wrong(&Guessed::default());
        known.read(last(7), std::iter::empty());
        assert!(known.version(&key(9, "k")).is_none());
        assert!(!known.is_untouched(SpaceId(20), Generation(6), Generation(7)));
        let guess = known.guess(&put("k")).unwrap();
        assert_eq!((guess.last.generation, guess.versions.revs, guess.moves), (Generation(7), vec![0], true));
    }

    #[test]
    fn wrong_guesses_become_rare_and_right_ones_make_up_for_them() {
        let mut known = Known::default();
        land(&mut known, 5, 9);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            let mut pause = 0;
            while known.guess(&put("k")).is_none() {
                pause += 1;
            }
            pauses.push(pause);
            known.guessed_keys_wrong(&Guessed::default());
        }
        assert_eq!(pauses, [0, 1, 1, 2, 4, 8, 16, 32, 64]);
        known.keys.left = 0;
        known.guessed_right(true);
        known.guessed_keys_wrong(&Guessed::default());
        assert!(known.guess(&put("k")).is_none() && known.guess(&put("k")).is_some(), "one pause");
    }

    /// The head alone is wrong for as long as other processes commit. The keys can still be guessed.
    #[test]
    fn a_group_moves_along_for_a_while_after_its_head_was_wrong() {
        let mut known = Known::default();
        land(&mut known, 5, 9);
        let mut moved = Vec::new();
        for _ in 0..5 {
            let mut count = 0;
            while known.guess(&put("k")).unwrap().moves {
                // That it has landed says nothing of the head of the next one.
                known.guessed_right(true);
                count += 1;
            }
            moved.push(count);
            known.guessed_head_wrong();
        }
        assert_eq!(moved, [0, 1, 1, 2, 4]);
        known.head.left = 1;
        assert!(known.sure_guess(&put("k")).is_none(), "the user's SQL does not lock the head first");
        assert!(known.sure_guess(&put("k")).is_some());
    }

    #[test]
    fn keys_that_were_not_used_lately_are_forgotten() {
        let mut known = Known::default();
        let names: Vec<Key> = (0..3 * HALF).map(|number| key(9, &number.to_string())).collect();
        for (generation, name) in (1..).zip(&names) {
            known.landed(&[committed(generation, name)], last(generation));
            assert!(known.version(&names[0]).is_some(), "it is used all the time");
        }
        assert!(known.version(&names[1]).is_none() && known.newer.len() + known.older.len() <= 2 * HALF);
    }
}
