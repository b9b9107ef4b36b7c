//! A recorded life with entities on a simulated disk: everything that is done to the disk, and the expected contents
//! after every generation, kept apart from the code under test.

use std::collections::BTreeMap;
use std::sync::Arc;

use latchwork::entity::{Add, Entities, Transaction, TypeSpec, Update};
use latchwork::store::disk::sim::{Recording, SimDisk};
use latchwork::store::{Env, FileOptions, Limits};
use serde_json::{Value, json};

/// Entities by id, with their revs.
pub(super) type State = BTreeMap<String, (u64, Value)>;

/// The cities where people live.
pub(super) const CITIES: u64 = 4;

pub(super) struct Life {
    pub(super) recording: Recording,
    /// The generation at which the record begins.
    pub(super) begin: u64,
    /// The contents from a generation on.
    pub(super) states: BTreeMap<u64, Arc<State>>,
    /// What was declared or undeclared, with its first and its last generation.
    pub(super) declared: Vec<Declared>,
}

/// A declaration, or its undeclaration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Declared {
    pub(super) what: What,
    pub(super) back: bool,
    pub(super) first: u64,
    pub(super) last: u64,
}

/// How far a declaration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Nothing,
    Building,
    Ready,
    Dropping,
}

/// The declarations on people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    City,
    CityAndEmail,
    UniqueEmail,
}

impl What {
    pub(super) const ALL: [What; 3] = [What::City, What::CityAndEmail, What::UniqueEmail];

    pub(super) fn spec(self) -> TypeSpec {
        let person = TypeSpec::new("person");
        match self {
            What::City => person.index(["data.city"]),
            What::CityAndEmail => person.index(["data.city", "data.email"]),
            What::UniqueEmail => person.unique(["data.email"]),
        }
    }
}

/// Small segments and a small overlay, so that segments are switched and commits are folded all the time.
pub(super) async fn open(disk: &SimDisk, seed: u64) -> latchwork::entity::Result<Entities> {
    let mut limits = Limits::default();
    limits.commit_bytes = 64 << 10;
    limits.operations = 1000;
    let (env, _clock) = Env::seeded(seed);
    let options = FileOptions::new().disk(disk.clone()).env(env).limits(limits).without_threads();
    let options = options.segment_bytes(128 << 10).overlay_bytes(48 << 10).cache_bytes(1 << 20);
    Entities::on(&options.open("/data").await?).await
}

pub(super) fn person(id: &str, city: u64, email: &str) -> Add {
    Add::new("person").id(id).data(json!({ "city": city, "email": email }))
}

struct Living<'a> {
    disk: &'a SimDisk,
    entities: Entities,
    random: fastrand::Rng,
    state: State,
    /// How often each removed id was written.
    gone: BTreeMap<String, u64>,
    next: u64,
    states: BTreeMap<u64, Arc<State>>,
    declared: Vec<Declared>,
}

impl Life {
    /// Begins with so many people; with none, on an empty disk.
    pub(super) async fn live(seed: u64, people: u64) -> Life {
        let disk = SimDisk::new();
        let fresh = (people == 0).then(|| disk.record());
        let mut living = Living {
            disk: &disk,
            entities: open(&disk, seed).await.expect("an empty disk opens"),
            random: fastrand::Rng::with_seed(seed),
            state: State::new(),
            gone: BTreeMap::new(),
            next: 0,
            states: BTreeMap::from([(0, Arc::default())]),
            declared: Vec::new(),
        };
        for _ in 0..people.div_ceil(50) {
            living.arrive(50).await;
        }
        let begin = if people == 0 { 0 } else { living.generation().await };
        let recording = fresh.unwrap_or_else(|| disk.record());
        let begun = if people == 0 { 12 } else { 70 };
        for step in 0..begun {
            living.step(step, people == 0).await;
        }
        Life { recording: recording.stop(), begin, states: living.states, declared: living.declared }
    }

    /// The contents at a generation.
    pub(super) fn at(&self, generation: u64) -> Arc<State> {
        self.states.range(..=generation).next_back().map(|(_, state)| state.clone()).unwrap_or_default()
    }

    /// How far a declaration was at a generation.
    pub(super) fn progress(&self, what: What, generation: u64) -> Progress {
        let last = self.declared.iter().rev().find(|declared| declared.what == what && declared.first <= generation);
        match last {
            Some(last) if last.last > generation => {
                if last.back {
                    Progress::Dropping
                } else {
                    Progress::Building
                }
            }
            Some(last) if !last.back => Progress::Ready,
            _ => Progress::Nothing,
        }
    }
}

impl Living<'_> {
    async fn generation(&self) -> u64 {
        self.entities.store().generation().await.expect("the store lives").0
    }

    /// Notes the acknowledged generation in the record of the disk.
    async fn acknowledged(&mut self) {
        let generation = self.generation().await;
        self.states.insert(generation, Arc::new(self.state.clone()));
        self.disk.note(generation);
    }

    fn any_person(&mut self) -> Option<String> {
        let at = self.random.usize(..self.state.len().max(1));
        self.state.keys().nth(at).cloned()
    }

    fn put(&mut self, id: &str, data: Value) {
        let before = self.state.get(id).map(|(rev, _)| *rev).or(self.gone.remove(id)).unwrap_or(0);
        self.state.insert(id.into(), (before + 1, data));
    }

    fn take(&mut self, id: &str) {
        if let Some((rev, _)) = self.state.remove(id) {
            self.gone.insert(id.into(), rev + 1);
        }
    }

    fn newcomer(&mut self) -> Add {
        let back = self.gone.keys().next().cloned().filter(|_| self.random.bool());
        self.next += 1;
        let (id, city) = (back.unwrap_or(format!("p{:04}", self.next)), self.random.u64(..CITIES));
        let email = format!("{}@example.org", self.next);
        self.put(&id, json!({ "city": city, "email": email }));
        person(&id, city, &email)
    }

    async fn arrive(&mut self, count: u64) {
        let newcomers: Vec<Add> = (0..count).map(|_| self.newcomer()).collect();
        self.entities.add_many(newcomers).await.expect("all of them are new");
        self.acknowledged().await;
    }

    fn moved(&mut self, id: &str) -> Value {
        let mut data = self.state[id].1.clone();
        data["city"] = json!(self.random.u64(..CITIES));
        if self.random.u8(..3) == 0 {
            self.next += 1;
            data["email"] = json!(format!("{}@example.org", self.next));
        }
        self.put(id, data.clone());
        data
    }

    async fn step(&mut self, step: usize, small: bool) {
        // One declaration comes early in the small life; in the large life, declarations are made and undeclared.
        let planned = match (small, step) {
            (true, 2) => Some((What::UniqueEmail, false)),
            (false, 5) => Some((What::City, false)),
            (false, 17) => Some((What::UniqueEmail, false)),
            (false, 29) => Some((What::City, true)),
            (false, 41) => Some((What::CityAndEmail, false)),
            (false, 53) => Some((What::UniqueEmail, true)),
            (false, 62) => Some((What::City, false)),
            _ => None,
        };
        if let Some((what, back)) = planned {
            let first = self.generation().await + 1;
            let done = match back {
                true => self.entities.undeclare(what.spec()).await,
                false => self.entities.declare(what.spec()).await,
            };
            done.expect("no value is there twice");
            let last = self.generation().await;
            self.declared.push(Declared { what, back, first, last });
            return self.acknowledged().await;
        }
        if step.is_multiple_of(8) {
            self.entities.store().maintain().await.expect("the store lives");
        }
        let Some(id) = self.any_person() else { return self.arrive(3).await };
        match self.random.u8(..8) {
            0..=1 => self.arrive(1).await,
            2..=3 => {
                let data = self.moved(&id);
                self.entities.update(Update::new(&id).data(data)).await.expect("it is there");
            }
            4 => {
                let data = self.moved(&id);
                self.entities.update_with(&id, 0, |draft| draft.data = data.clone()).await.expect("no other writer");
            }
            5 => {
                self.take(&id);
                self.entities.remove(&id).await.expect("it is there");
            }
            _ => self.together().await,
        }
        self.acknowledged().await;
    }

    /// In one commit, a person is added, one moves, one is removed, and two swap their addresses.
    async fn together(&mut self) {
        let mut ids: Vec<String> = self.state.keys().cloned().collect();
        self.random.shuffle(&mut ids);
        let mut transaction = Transaction::new().add(self.newcomer()).author("life");
        if let [one, two, moving, leaving, ..] = &ids[..] {
            let (mut first, mut second) = (self.state[one].1.clone(), self.state[two].1.clone());
            let email = first["email"].take();
            first["email"] = std::mem::replace(&mut second["email"], email);
            self.put(one, first.clone());
            self.put(two, second.clone());
            transaction = transaction.update(Update::new(one).data(first)).update(Update::new(two).data(second));
            let moved = self.moved(moving);
            transaction = transaction.update(Update::new(moving).data(moved)).remove(leaving);
            self.take(leaving);
        }
        self.entities.transact(transaction).await.expect("no other writer");
    }
}
