//! Entities and the reference side by side. Each command runs on both; the first difference is the answer.

mod reading;
mod writing;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use latchwork::Cursor;
use latchwork::entity::{Entities, EntityError, EntityView, TypeSpec};
use latchwork::store::backend::MemoryBackend;
use latchwork::store::disk::sim::SimDisk;
use latchwork::store::{
    Confirm, Env, FileOptions, Generation, Limits, Rev, Store, StoreError, Timestamp, VirtualClock,
};

use super::Kept;
use super::command::{Command, Id, NAMED};
use super::filter::{Asked, Place};
use super::reference::{Fields, Reference, Snapshot};

pub(super) struct World {
    kept: Kept,
    env: Env,
    clock: Arc<VirtualClock>,
    disk: SimDisk,
    /// `None` only while the entities are opened again.
    entities: Option<Entities>,
    views: Vec<Looked>,
    /// Queries that were begun, with the position where they continue.
    begun: Vec<(Asked, Cursor, Place)>,
    snapshots: Vec<(String, Snapshot)>,
    /// Ids that the store generated, in the order in which they appeared.
    made: Vec<String>,
    reference: Reference,
}

/// A view and what was read through it.
struct Looked {
    view: EntityView,
    released: bool,
    /// Entities that were read, with their revs.
    entities: Vec<(String, Option<u64>)>,
    finds: Vec<Found>,
}

/// A find: the query and its start position, the ids and revs of the result, and whether there was more.
type Found = (Asked, Option<Place>, Vec<(String, u64)>, bool);

type Compared = Result<(), String>;

fn same<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Compared {
    if found == expected { Ok(()) } else { Err(format!("{what}:\n  found    {found:?}\n  expected {expected:?}")) }
}

/// The text without the numbers of spaces, which the reference does not know.
fn told<T>(result: Result<T, EntityError>) -> Result<T, String> {
    result.map_err(|error| match error {
        EntityError::Store(StoreError::HistoryDropped { oldest, .. }) => dropped(oldest.0),
        error => format!("{error:?}"),
    })
}

fn dropped(oldest: u64) -> String {
    format!("history dropped before {oldest}")
}

impl World {
    pub(super) async fn new(kept: Kept) -> World {
        let (env, clock) = Env::seeded(1);
        let reference = Reference::new(env.now().0);
        let mut world = World {
            kept,
            env,
            clock,
            disk: SimDisk::new(),
            entities: None,
            views: Vec::new(),
            begun: Vec::new(),
            snapshots: Vec::new(),
            made: Vec::new(),
            reference,
        };
        world.open().await;
        world
    }

    async fn open(&mut self) {
        let mut limits = Limits::default();
        limits.commit_bytes = 64 << 10;
        limits.value_bytes = 16 << 10;
        limits.operations = 1000;
        let store = match self.kept {
            Kept::Memory => {
                let backend = Arc::new(MemoryBackend::new(self.env.clone()));
                Store::with_backend(backend, self.env.clone(), limits, Arc::new(self.disk.clone())).await
            }
            Kept::Files => {
                let options = FileOptions::new().env(self.env.clone()).disk(self.disk.clone()).without_threads();
                let options = options.limits(limits).segment_bytes(256 << 10).overlay_bytes(24 << 10);
                options.cache_bytes(1 << 20).open("/store").await
            }
        };
        self.entities = Some(Entities::on(&store.expect("the store opens")).await.expect("the entities open"));
    }

    fn entities(&self) -> &Entities {
        self.entities.as_ref().expect("the entities are open")
    }

    fn now(&self) -> u64 {
        self.env.now().0
    }

    fn id(&self, id: Id) -> String {
        match self.made.len() {
            made if id >= NAMED && made > 0 => self.made[usize::from(id) % made].clone(),
            _ => ((b'a' + id % NAMED) as char).to_string(),
        }
    }

    /// A rev near the present one of an entity, also of a removed one.
    fn rev(&self, id: &str, off: i8) -> u64 {
        let last = self.reference.entities.get(id).and_then(|versions| versions.last());
        last.map_or(0, |last| last.rev).saturating_add_signed(i64::from(off))
    }

    fn ago(&self, back: i64) -> u64 {
        self.reference.generation.saturating_add_signed(-back)
    }

    fn number(&self, view: u8) -> Option<usize> {
        (!self.views.is_empty()).then(|| usize::from(view) % self.views.len())
    }

    pub(super) async fn play(&mut self, command: &Command) -> Compared {
        match command {
            Command::Add(op) => self.add(op).await,
            Command::AddMany(items, if_absent) => self.add_many(items, *if_absent).await,
            Command::Update(op) => self.update(op).await,
            Command::UpdateMany(items) => self.update_many(items).await,
            Command::UpdateWith { id, doc, refuse } => self.update_with(&self.id(*id), doc, *refuse).await,
            Command::Remove(op) => self.remove(op).await,
            Command::Transact { ops, at_generation, unchanged, author } => {
                self.transact(ops, *at_generation, *unchanged, *author).await
            }
            Command::Declare(entity_type, index) => self.declare(entity_type, index).await,
            Command::Undeclare(entity_type, index) => self.undeclare(entity_type, index).await,
            Command::UndeclareSome(entity_type, some) => {
                let declared = self.reference.declared.get(entity_type).cloned().unwrap_or_default();
                match declared.len() {
                    0 => Ok(()),
                    all => self.undeclare(entity_type, &declared[usize::from(*some) % all]).await,
                }
            }
            Command::AddIfMissing(asked, op) => self.add_if_missing(asked, op).await,
            Command::Find(view, asked) => self.find(*view, asked).await,
            Command::Begin(asked) => self.begin(asked).await,
            Command::Continue(view, begun) => self.next_page(*view, *begun).await,
            Command::Misuse(asked, begun) => self.misuse(asked, *begun).await,
            Command::Get(view, id) => self.get(*view, &self.id(*id)).await,
            Command::Read(view) => self.read(*view).await,
            Command::Since(view, older) => self.since(*view, *older).await,
            Command::SinceGeneration(view, back) => self.since_generation(*view, *back).await,
            Command::Now | Command::AsOf(_) | Command::AsOfTime(_) => self.look(command).await,
            Command::Release(view) => {
                if let Some(view) = self.number(*view) {
                    self.views[view].view.release();
                    self.views[view].released = true;
                }
                Ok(())
            }
            Command::Drop(view) => {
                if let Some(view) = self.number(*view) {
                    self.views.swap_remove(view);
                }
                Ok(())
            }
            Command::Persist(view) => self.persist(*view).await,
            Command::Restore { keep_views } => self.restore(*keep_views).await,
            Command::Reopen => self.reopen().await,
            Command::Maintain => {
                while self.entities().store().maintain().await.map_err(|error| error.to_string())? {}
                Ok(())
            }
            Command::Advance(tenths) => {
                let by = Duration::from_millis(100 * u64::from(tenths.unsigned_abs()));
                let now = self.env.now();
                self.clock.jump_to(if *tenths < 0 { now.minus(by) } else { now.plus(by) });
                Ok(())
            }
        }
    }

    /// Runs after every command.
    pub(super) async fn check_generation(&self) -> Compared {
        let generation = self.entities().store().generation().await.map_err(|error| error.to_string())?;
        same("the generation", generation, Generation(self.reference.generation))
    }

    async fn declare(&mut self, entity_type: &'static str, index: &Fields) -> Compared {
        let found = told(self.entities().declare(spec(entity_type, index)).await);
        let expected = self.reference.declare(entity_type, index.clone(), self.now());
        same("declare", found, told(expected))
    }

    async fn undeclare(&mut self, entity_type: &'static str, index: &Fields) -> Compared {
        let found = told(self.entities().undeclare(spec(entity_type, index)).await);
        self.reference.undeclare(entity_type, index, self.now());
        same("undeclare", found, Ok(()))
    }

    async fn persist(&mut self, view: u8) -> Compared {
        let Some(view) = self.number(view) else { return Ok(()) };
        let path = format!("/snapshot {}", self.snapshots.len());
        let Looked { view, released, .. } = &self.views[view];
        let at = view.generation().0;
        // Half-done work is finished by the next declaration; the crash tests cover that.
        if !self.reference.is_settled(at) {
            return Ok(());
        }
        match self.unreadable(at, *released) {
            Some(error) => same("persist", told(view.persist(&path).await), Err(error)),
            None => {
                told(view.persist(&path).await)?;
                self.snapshots.push((path, self.reference.snapshot(at)));
                Ok(())
            }
        }
    }

    async fn restore(&mut self, keep_views: bool) -> Compared {
        let Some((path, snapshot)) = self.snapshots.last().cloned() else { return Ok(()) };
        if !keep_views {
            self.views.clear();
        }
        let restored = told(self.entities().restore(&path, Confirm::ReplaceEverything).await);
        let views = self.views.iter().filter(|looked| !looked.released).count();
        if views > 0 {
            let error = EntityError::Store(StoreError::ViewsOpen { views });
            return same("restore", restored, Err(format!("{error:?}")));
        }
        self.views.clear();
        same("restore", restored, Ok(self.reference.restore(&snapshot, self.now())))
    }

    async fn reopen(&mut self) -> Compared {
        if self.kept == Kept::Files {
            self.views.clear();
            self.entities = None;
            self.open().await;
        }
        Ok(())
    }

    /// The error of a view that cannot be read.
    fn unreadable(&self, at: u64, released: bool) -> Option<String> {
        let generation = Generation(at);
        let error = released.then(|| format!("{:?}", EntityError::Released { generation }));
        error.or((at < self.reference.floor).then(|| dropped(self.reference.floor)))
    }

    /// The final state must be sound, and every index must find what a full scan finds.
    pub(super) async fn finish(&mut self) -> Compared {
        let damage = told(self.entities().verify().await)?;
        same("verify", damage.len(), 0).map_err(|what| format!("{what}\n{damage:?}"))?;
        self.find_by_every_index().await?;
        self.look(&Command::Now).await?;
        self.read((self.views.len() - 1) as u8).await
    }
}

fn spec(entity_type: &str, (fields, unique): &Fields) -> TypeSpec {
    let spec = TypeSpec::new(entity_type);
    if *unique { spec.unique(fields.iter().copied()) } else { spec.index(fields.iter().copied()) }
}

fn revs(rev: u64) -> Rev {
    Rev(rev)
}

fn time(micros: u64) -> Timestamp {
    Timestamp(micros)
}
