//! The commands and how they are generated. There are few ids, types, fields and values, so that commands meet. Revs,
//! generations and times are relative to the current ones when a command runs: checks hold and fail about equally
//! often, also in a sequence from which commands were removed.

use fastrand::Rng;
use serde_json::{Map, Value, json};

use super::filter::{Asked, Condition, FIELDS, Test};
use super::reference::{Doc, Fields};

pub(super) const TYPES: [&str; 2] = ["person", "thing"];
pub(super) const NAMED: u8 = 6;
/// Some ids stand for entities whose ids the store generated.
const IDS: u8 = 8;

/// An id by number.
pub(super) type Id = u8;

#[derive(Debug, Clone)]
pub(super) enum Command {
    Add(Op),
    AddMany(Vec<Op>, bool),
    Update(Op),
    UpdateMany(Vec<Op>),
    /// Read, change, write; the change may refuse.
    UpdateWith {
        id: Id,
        doc: Doc,
        refuse: bool,
    },
    Remove(Op),
    Transact {
        ops: Vec<Op>,
        at_generation: Option<i8>,
        unchanged: Option<u8>,
        author: Option<u8>,
    },
    Declare(&'static str, Fields),
    Undeclare(&'static str, Fields),
    /// Undeclares something that is declared.
    UndeclareSome(&'static str, u8),
    AddIfMissing(Asked, Op),
    /// All pages, at the present or through a view.
    Find(Option<u8>, Asked),
    /// The first page; its cursor is kept.
    Begin(Asked),
    /// The next page of a query that was begun, at the present or through a view.
    Continue(Option<u8>, u8),
    /// A cursor with a query that it does not belong to.
    Misuse(Asked, u8),
    Get(Option<u8>, Id),
    /// Every history, and everything that changed since another view or so many generations.
    Read(u8),
    Since(u8, u8),
    SinceGeneration(u8, u8),
    Now,
    AsOf(u8),
    /// So many tenths of a second ago.
    AsOfTime(u8),
    Release(u8),
    Drop(u8),
    Persist(u8),
    Restore {
        keep_views: bool,
    },
    Reopen,
    Maintain,
    /// Lets tenths of seconds pass, or sets the clock back by some.
    Advance(i8),
}

#[derive(Debug, Clone)]
pub(super) enum Op {
    Add { id: Option<Id>, doc: Doc, if_absent: Option<bool> },
    Update { id: Id, data: Option<Value>, metadata: Option<(Map<String, Value>, bool)>, if_rev: Option<i8> },
    Remove { id: Id, if_rev: Option<i8> },
    Exists(Id),
    AtRev(Id, i8),
    Absent(Id),
}

pub(super) fn sequence(random: &mut Rng, length: usize) -> Vec<Command> {
    (0..length).map(|_| command(random)).collect()
}

fn maybe<T>(random: &mut Rng, percent: u8, make: impl FnOnce(&mut Rng) -> T) -> Option<T> {
    (random.u8(..100) < percent).then(|| make(random))
}

fn pick<T: Clone>(random: &mut Rng, from: &[T]) -> T {
    from[random.usize(..from.len())].clone()
}

fn entity_type(random: &mut Rng) -> &'static str {
    TYPES[usize::from(random.u8(..10) > 6)]
}

fn id(random: &mut Rng) -> Id {
    if random.u8(..10) < 9 { random.u8(..NAMED) } else { random.u8(NAMED..IDS) }
}

/// A value, or none: then the field is left out.
fn value(random: &mut Rng) -> Option<Value> {
    Some(match random.u8(..20) {
        0..=4 => json!(1),
        5..=7 => json!("x"),
        8..=10 => json!("xy"),
        11..=12 => json!(2),
        13 => json!(1.0),
        14 => json!(null),
        15 => json!([1, "x"]),
        16 => json!(true),
        _ => return None,
    })
}

fn some_value(random: &mut Rng) -> Value {
    value(random).unwrap_or(json!(1))
}

fn data(random: &mut Rng) -> Value {
    let mut fields = Map::new();
    fields.extend(value(random).map(|value| ("a".to_string(), value)));
    fields.extend(value(random).map(|value| ("b".to_string(), value)));
    Value::Object(fields)
}

fn metadata(random: &mut Rng) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.extend(value(random).map(|value| ("m".to_string(), value)));
    fields.extend(maybe(random, 30, |random| ("other".to_string(), some_value(random))));
    fields
}

fn doc(random: &mut Rng) -> Doc {
    Doc { entity_type: entity_type(random), data: data(random), metadata: metadata(random) }
}

fn off(random: &mut Rng) -> i8 {
    if random.u8(..10) < 7 { 0 } else { random.i8(-1..=1) }
}

fn add(random: &mut Rng) -> Op {
    let if_absent = maybe(random, 40, |random| random.u8(..4) > 0);
    Op::Add { id: maybe(random, 85, id), doc: doc(random), if_absent }
}

fn update(random: &mut Rng) -> Op {
    let data = maybe(random, 70, data);
    let metadata = maybe(random, 50, |random| (metadata(random), random.bool()));
    Op::Update { id: id(random), data, metadata, if_rev: maybe(random, 50, off) }
}

fn remove(random: &mut Rng) -> Op {
    Op::Remove { id: id(random), if_rev: maybe(random, 50, off) }
}

fn op(random: &mut Rng) -> Op {
    match random.u8(..10) {
        0..=3 => add(random),
        4..=6 => update(random),
        7 => remove(random),
        _ => match random.u8(..3) {
            0 => Op::Exists(id(random)),
            1 => Op::AtRev(id(random), off(random)),
            _ => Op::Absent(id(random)),
        },
    }
}

fn many<T>(random: &mut Rng, most: usize, make: fn(&mut Rng) -> T) -> Vec<T> {
    (0..random.usize(1..=most)).map(|_| make(random)).collect()
}

fn index(random: &mut Rng) -> Fields {
    let first = random.usize(..FIELDS.len());
    let second = (first + random.usize(1..FIELDS.len())) % FIELDS.len();
    let fields = if random.u8(..3) == 0 { vec![FIELDS[first], FIELDS[second]] } else { vec![FIELDS[first]] };
    (fields, random.u8(..3) == 0)
}

fn ordered(random: &mut Rng) -> Value {
    pick(random, &[json!(1), json!(2), json!("x"), json!("xy"), json!(true), json!(1.5)])
}

fn test(random: &mut Rng) -> Test {
    match random.u8(..16) {
        0..=4 => Test::Equals(some_value(random)),
        5 => Test::Differs(some_value(random)),
        6 => Test::Greater(ordered(random)),
        7 => Test::AtLeast(ordered(random)),
        8 => Test::Less(ordered(random)),
        9 => Test::AtMost(ordered(random)),
        10 if random.bool() => Test::Between(json!(random.u8(..3)), json!(random.u8(1..3))),
        10 => Test::Between(json!("x"), json!("xy")),
        11..=12 => Test::OneOf((0..random.usize(..4)).map(|_| some_value(random)).collect()),
        13 => Test::Contains(some_value(random)),
        14 => Test::Exists,
        _ => Test::StartsWith(pick(random, &["", "x", "xy", "y"])),
    }
}

fn condition(random: &mut Rng, depth: u8) -> Condition {
    let fields = ["data.a", "data.a", "data.b", "data.b", "metadata.m", "metadata.m", "data.a.0"];
    let list = |random: &mut Rng| (0..random.usize(..=3)).map(|_| condition(random, depth - 1)).collect();
    match random.u8(..10) {
        0..=1 if depth > 0 => Condition::All(list(random)),
        2 if depth > 0 => Condition::Any(list(random)),
        3 if depth > 0 => Condition::Not(Box::new(condition(random, depth - 1))),
        4 => Condition::All(Vec::new()),
        _ => Condition::Is(pick(random, &fields), test(random)),
    }
}

fn asked(random: &mut Rng) -> Asked {
    let mut order = Vec::new();
    for path in FIELDS {
        order.extend(maybe(random, 25, |random| (path, random.bool())));
    }
    random.shuffle(&mut order);
    Asked {
        entity_type: maybe(random, 85, entity_type),
        condition: condition(random, 2),
        order,
        limit: pick(random, &[1, 1, 2, 3, 5, 1000]),
        as_json: random.bool(),
    }
}

/// A query by one field, and an entity that often matches it.
fn add_if_missing(random: &mut Rng) -> Command {
    let (path, value) = (FIELDS[random.usize(..FIELDS.len())], some_value(random));
    let mut doc = doc(random);
    if random.u8(..8) > 0 {
        match path {
            "data.a" => doc.data["a"] = value.clone(),
            "data.b" => doc.data["b"] = value.clone(),
            _ => drop(doc.metadata.insert("m".into(), value.clone())),
        }
    }
    let entity_type = maybe(random, 90, |_| doc.entity_type);
    let condition = Condition::Is(path, Test::Equals(value));
    let asked = Asked { entity_type, condition, order: Vec::new(), limit: 7, as_json: false };
    let (id, if_absent) = (maybe(random, 50, id), maybe(random, 20, Rng::bool));
    Command::AddIfMissing(asked, Op::Add { id, doc, if_absent })
}

fn transact(random: &mut Rng) -> Command {
    Command::Transact {
        ops: many(random, 6, op),
        at_generation: maybe(random, 15, |random| if random.bool() { 0 } else { random.i8(-1..=2) }),
        unchanged: maybe(random, 40, |random| random.u8(..)),
        author: maybe(random, 30, |random| random.u8(..3)),
    }
}

fn command(random: &mut Rng) -> Command {
    let number = |random: &mut Rng| random.u8(..);
    match random.u8(..100) {
        0..=11 => Command::Add(add(random)),
        12..=21 => Command::Update(update(random)),
        22..=24 => Command::UpdateWith { id: id(random), doc: doc(random), refuse: random.u8(..5) == 0 },
        25..=29 => Command::Remove(remove(random)),
        30..=45 => transact(random),
        46..=48 => Command::AddMany(many(random, 4, add), random.bool()),
        49..=50 => Command::UpdateMany(many(random, 3, update)),
        51..=55 => Command::Declare(entity_type(random), index(random)),
        56 => Command::Undeclare(entity_type(random), index(random)),
        57..=58 => Command::UndeclareSome(entity_type(random), random.u8(..)),
        59..=62 => add_if_missing(random),
        63..=76 => Command::Find(maybe(random, 60, number), asked(random)),
        77..=78 => Command::Begin(Asked { limit: 1, ..asked(random) }),
        79..=80 => Command::Continue(maybe(random, 40, number), random.u8(..)),
        81 => Command::Misuse(asked(random), random.u8(..)),
        82..=84 => Command::Get(maybe(random, 80, number), id(random)),
        85 => Command::Read(random.u8(..)),
        86 => Command::Since(random.u8(..), random.u8(..)),
        87 => Command::SinceGeneration(random.u8(..), random.u8(..30)),
        88..=90 => Command::Now,
        91..=92 => Command::AsOf(random.u8(..40)),
        93 => Command::AsOfTime(random.u8(..60)),
        94 => {
            if random.bool() {
                Command::Release(random.u8(..))
            } else {
                Command::Drop(random.u8(..))
            }
        }
        95 if random.u8(..3) == 0 => Command::Persist(random.u8(..)),
        95 => Command::Restore { keep_views: random.u8(..4) == 0 },
        96 => Command::Reopen,
        97 => Command::Maintain,
        _ => Command::Advance(random.i8(-5..=20)),
    }
}
