//! The commands and their generators. Revs and generations are relative to the current ones when a command runs, so
//! that checks hold and fail about equally often, also in a shrunk sequence.

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;

/// There are few spaces and keys, so that commands often use the same ones.
pub(super) const SPACES: usize = 4;
pub(super) const KEYS: u8 = 4;
const IDS: u8 = 4;

#[derive(Debug, Clone)]
pub(super) enum Command {
    Commit {
        id: Option<u8>,
        meta: u8,
        checks: Vec<Condition>,
        writes: Vec<(Place, Option<u8>)>,
    },
    /// Sends the commit again that was applied under an id.
    Resend(u8),
    /// Opens a view of the newest generation, or of one this many generations ago.
    Open(Option<u8>),
    /// Calls every read method of a view.
    Read(u8),
    Drop(u8),
    Changes {
        view: u8,
        part: Part,
        back: u8,
        limit: usize,
    },
    Drain,
    Maintain,
    Reopen,
    /// Moves the clock forward by this many seconds, or sets it back.
    Advance(i8),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) space: usize,
    pub(super) key: u8,
}

/// The keys of a space from one key to another, which is excluded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) space: usize,
    pub(super) from: u8,
    pub(super) to: u8,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Condition {
    /// The key's rev plus an offset.
    AtRev(Place, i8),
    Absent(Place),
    Present(Place),
    /// This many generations ago; -1 is in the future.
    AtGeneration(i8),
    Unchanged(Part, i8),
}

pub(super) fn sequences() -> impl Strategy<Value = Vec<Command>> {
    vec(command(), 1..60)
}

fn place() -> impl Strategy<Value = Place> {
    (0..SPACES, 0..KEYS).prop_map(|(space, key)| Place { space, key })
}

fn part() -> impl Strategy<Value = Part> {
    let bounds = prop_oneof![3 => Just((0, KEYS)), 2 => (0..=KEYS, 0..=KEYS)];
    (0..SPACES, bounds).prop_map(|(space, (from, to))| Part { space, from, to })
}

fn condition() -> impl Strategy<Value = Condition> {
    let off = prop_oneof![4 => Just(0_i8), 1 => -1..=1_i8];
    let back = prop_oneof![3 => 0..3_i8, 3 => 0..12_i8, 1 => Just(-1)];
    prop_oneof![
        4 => (place(), off).prop_map(|(place, off)| Condition::AtRev(place, off)),
        2 => place().prop_map(Condition::Absent),
        1 => place().prop_map(Condition::Present),
        1 => (-1..2_i8).prop_map(Condition::AtGeneration),
        2 => (part(), back).prop_map(|(part, back)| Condition::Unchanged(part, back)),
    ]
}

fn command() -> impl Strategy<Value = Command> {
    let writes = vec((place(), weighted(0.7, any::<u8>())), 0..4);
    let commit = (weighted(0.2, 0..IDS), 0..3_u8, vec(condition(), 0..3), writes);
    let changes = (any::<u8>(), part(), 0..12_u8, prop_oneof![0..4_usize, Just(99)]);
    prop_oneof![
        20 => commit.prop_map(|(id, meta, checks, writes)| Command::Commit { id, meta, checks, writes }),
        1 => (0..IDS).prop_map(Command::Resend),
        3 => weighted(0.5, 0..12_u8).prop_map(Command::Open),
        3 => any::<u8>().prop_map(Command::Read),
        2 => any::<u8>().prop_map(Command::Drop),
        2 => changes.prop_map(|(view, part, back, limit)| Command::Changes { view, part, back, limit }),
        2 => Just(Command::Drain),
        3 => Just(Command::Maintain),
        1 => Just(Command::Reopen),
        2 => (-3..10_i8).prop_map(Command::Advance),
    ]
}
