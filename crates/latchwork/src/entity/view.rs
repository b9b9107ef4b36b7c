//! Entities at one generation: reads, finds and history. A view remembers what was read through it, so that a commit
//! can depend on exactly that.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::entity::document::Moment;
use crate::entity::op::Meta;
use crate::entity::{Entities, Entity, EntityError, EntityId, Result};
use crate::lane::as_found;
use crate::page::{Asked, Page, mark, paged};
use crate::store::{Check, Generation, Item, Range, Rev, StoreError, Timestamp, Version, View};

/// The point in the past for [`Entities::as_of`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsOf {
    /// The store as that generation left it.
    Generation(Generation),
    /// The store as it was at that time: everything that was committed up to it.
    Time(Timestamp),
}

impl From<Generation> for AsOf {
    fn from(generation: Generation) -> AsOf {
        AsOf::Generation(generation)
    }
}

impl From<Timestamp> for AsOf {
    fn from(time: Timestamp) -> AsOf {
        AsOf::Time(time)
    }
}

/// Entities at one generation, until it is released or dropped. Writers continue; nothing seen through a view changes.
pub struct EntityView {
    entities: Entities,
    generation: Generation,
    view: RwLock<Option<Arc<View>>>,
    /// `None` if the view remembers no reads.
    reads: Option<Mutex<ReadSet>>,
}

/// A version in an entity's history.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Revision {
    /// The rev.
    pub rev: Rev,
    /// When it was committed.
    pub committed: Moment,
    /// The entity from then on; `None` if it was removed.
    pub entity: Option<Entity>,
    /// The author and the reason, if they were given.
    pub meta: Meta,
}

impl EntityView {
    pub(crate) fn new(entities: Entities, view: View) -> EntityView {
        let generation = view.generation();
        let reads = Some(Mutex::new(ReadSet { generation, ..ReadSet::default() }));
        EntityView { entities, generation, view: RwLock::new(Some(Arc::new(view))), reads }
    }

    /// Makes a view for one read. It remembers nothing.
    pub(crate) fn passing(entities: Entities, view: View) -> EntityView {
        EntityView { reads: None, ..EntityView::new(entities, view) }
    }

    /// The generation of this view.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let view = entities.now().await?;
    /// println!("as of generation {}", view.generation());
    /// # Ok(()) }
    /// ```
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Releases the generation, so that the store may drop it. Dropping the view does the same.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let view = entities.now().await?;
    /// view.release();
    /// assert!(view.get("ada").await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn release(&self) {
        self.view.write().take();
    }

    pub(crate) fn pinned(&self) -> Result<Arc<View>> {
        self.view.read().clone().ok_or(EntityError::Released { generation: self.generation })
    }

    pub(crate) fn entities(&self) -> &Entities {
        &self.entities
    }

    /// Returns the entity with this id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Update};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let before = entities.now().await?;
    /// entities.update(Update::new("ada").data(json!({"visits": 1}))).await?;
    /// assert_eq!(before.get("ada").await?.unwrap().data["visits"], 0);
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, id: impl Into<EntityId>) -> Result<Option<Entity>> {
        let id = id.into();
        let view = self.pinned()?;
        self.read(&view, &id).await?.map(|item| Entity::decode(id, &item)).transpose()
    }

    /// Returns the record with this id. Remembers that it was read.
    pub(crate) async fn read(&self, view: &View, id: &EntityId) -> Result<Option<Item>> {
        id.validate()?;
        let item = view.get(&self.entities.key(id)).await?;
        self.remember_entity(id, item.as_ref().map(|item| item.rev));
        Ok(item)
    }

    /// Remembers a range that a find has read, and its name for errors.
    pub(crate) fn remember(&self, range: Range, what: impl FnOnce() -> String) {
        if let Some(reads) = &self.reads {
            reads.lock().range(range, what);
        }
    }

    /// Remembers that an index of a type was used.
    pub(crate) fn remember_type(&self, entity_type: &Arc<str>, declared: Rev) {
        if let Some(reads) = &self.reads {
            reads.lock().types.insert(entity_type.clone(), declared);
        }
    }

    pub(crate) fn remember_entity(&self, id: &EntityId, rev: Option<Rev>) {
        if let Some(reads) = &self.reads {
            reads.lock().entity(id, rev);
        }
    }

    pub(crate) fn read_set(&self) -> ReadSet {
        self.reads.as_ref().map(|reads| reads.lock().clone()).unwrap_or_default()
    }

    /// The versions of an entity that are still kept, up to this view, newest first. Removals are versions, too. Await
    /// it for a page.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let view = entities.now().await?;
    /// for revision in view.history("ada").limit(10).await? {
    ///     println!("rev {} by {:?}", revision.rev, revision.meta.author);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn history(&self, id: impl Into<EntityId>) -> Revisions<'_> {
        Revisions { view: self, id: id.into(), asked: Asked::of("versions") }
    }

    /// The author and reason of the commit that wrote a version. `None` if the commit is older than the history that is
    /// kept.
    async fn meta(&self, view: &View, id: &EntityId, generation: Generation) -> Result<Meta> {
        let range = self.entities.only(id);
        let before = Generation(generation.0.saturating_sub(1));
        match view.changes_since(&range, before, 1).await {
            Ok(changes) => {
                let commit = changes.commits.first().filter(|commit| commit.generation == generation);
                Ok(commit.map(|commit| Meta::decode(&commit.meta)).unwrap_or_default())
            }
            Err(StoreError::HistoryDropped { .. }) => Ok(Meta::default()),
            Err(error) => Err(error.into()),
        }
    }

    /// The ids of all entities that were added, changed or removed after `older` and up to this view, in order.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let before = entities.now().await?;
    /// entities.add(Add::new("person").id("bob")).await?;
    /// assert_eq!(entities.now().await?.since(&before).await?, ["bob"]);
    /// # Ok(()) }
    /// ```
    pub async fn since(&self, older: &EntityView) -> Result<Vec<EntityId>> {
        older.pinned()?;
        self.since_generation(older.generation).await
    }

    /// The ids of all entities that were added, changed or removed after a generation and up to this view, in order.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let before = entities.store().generation().await?;
    /// entities.add(Add::new("person").id("bob")).await?;
    /// assert_eq!(entities.now().await?.since_generation(before).await?, ["bob"]);
    /// # Ok(()) }
    /// ```
    pub async fn since_generation(&self, older: Generation) -> Result<Vec<EntityId>> {
        let view = self.pinned()?;
        if older > self.generation {
            return Err(EntityError::NotOlder { older, newer: self.generation });
        }
        let mut touched = BTreeSet::new();
        let mut through = older;
        while through < self.generation {
            let changes = view.changes_since(&self.entities.all(), through, 1000).await?;
            for change in changes.commits.iter().flat_map(|commit| &commit.changes) {
                if !touched.contains(change.key.bytes()) {
                    touched.insert(change.key.bytes().to_vec());
                }
            }
            through = changes.through;
        }
        touched.iter().map(|id| EntityId::from_stored(id)).collect()
    }

    /// Writes the whole store, as this view sees it, into an empty or missing directory, as a data directory of its
    /// own. The store stays in use meanwhile.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// entities.now().await?.persist("./backup").await?;
    /// # Ok(()) }
    /// ```
    pub async fn persist(&self, directory: impl AsRef<Path>) -> Result<()> {
        Ok(self.pinned()?.persist(directory).await?)
    }
}

shown!(EntityView, it => generation: it.generation);

/// A page of an entity's history that is about to be read.
#[must_use = "nothing is read until this is awaited"]
pub struct Revisions<'a> {
    view: &'a EntityView,
    id: EntityId,
    asked: Asked,
}

paged!(Revisions<'a> => Revision, EntityError);

impl Revisions<'_> {
    async fn page(self) -> Result<Page<Revision>> {
        let Revisions { view: its, id, asked } = self;
        let mark = mark(&id);
        let before = match asked.position(mark)?.map(<[u8; 8]>::try_from) {
            Some(Ok(rev)) => Some(Rev(u64::from_be_bytes(rev))),
            Some(Err(_)) => return Err(asked.unknown().into()),
            None => None,
        };
        let view = its.pinned()?;
        its.read(&view, &id).await?;
        let key = its.entities.key(&id);
        let mut wanted = asked.limit + 1;
        if let Some(before) = before {
            // The store reads versions from the newest on, so those of the earlier pages are read again.
            let newest = view.history(&key, 1).await?.first().map_or(0, |newest| newest.rev.0);
            let passed = (newest + 1).saturating_sub(before.0);
            wanted = wanted.saturating_add(usize::try_from(passed).unwrap_or(usize::MAX));
        }
        let versions = view.history(&key, wanted).await?.into_iter();
        let versions = versions.filter(|version| before.is_none_or(|before| version.rev < before));
        let page = asked.page(mark, versions.map(|version| (version.rev.0.to_be_bytes(), version)).collect());
        let mut items = Vec::new();
        for Version { rev, generation, time, value } in page.items {
            let item = value.map(|value| Item { rev, generation, time, value });
            let entity = item.map(|item| Entity::decode(id.clone(), &item)).transpose()?;
            let meta = its.meta(&view, &id, generation).await?;
            items.push(Revision { rev, committed: Moment { generation, time }, entity, meta });
        }
        Ok(Page { items, next: page.next })
    }
}

/// What was read through a view.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadSet {
    pub(crate) generation: Generation,
    /// With the rev that was found.
    entities: BTreeMap<EntityId, Option<Rev>>,
    ranges: Vec<(Range, String)>,
    /// Types of which an index was used, with the rev of the declaration: an index that is undeclared misses later
    /// writes.
    types: BTreeMap<Arc<str>, Rev>,
    /// The number of reads that were too many to remember.
    forgotten: usize,
}

/// The most reads that are remembered: one commit could not check more.
const REMEMBERED: usize = 10_000;

impl ReadSet {
    fn has_room(&mut self) -> bool {
        let room = self.entities.len() + self.ranges.len() < REMEMBERED;
        self.forgotten += usize::from(!room);
        room
    }

    fn entity(&mut self, id: &EntityId, rev: Option<Rev>) {
        if !self.entities.contains_key(id) && self.has_room() {
            self.entities.insert(id.clone(), rev);
        }
    }

    fn range(&mut self, range: Range, what: impl FnOnce() -> String) {
        if !self.ranges.iter().any(|(known, _)| *known == range) && self.has_room() {
            self.ranges.push((range, what()));
        }
    }

    /// Fails if a commit with this number of operations cannot check everything that was read.
    pub(crate) fn validate(&self, limit: usize) -> Result<()> {
        let reads = self.entities.len() + self.ranges.len() + self.types.len() + self.forgotten;
        let limit = limit.min(REMEMBERED);
        if self.forgotten > 0 || reads > limit { Err(EntityError::ReadSetTooLarge { reads, limit }) } else { Ok(()) }
    }

    /// The checks that nothing read has changed, each with a name for errors. A single entity is checked by its rev,
    /// which is cheaper than a check of all commits since.
    pub(crate) fn checks(&self, entities: &Entities) -> impl Iterator<Item = (Check, String)> {
        let types = self.types.iter().map(|(entity_type, rev)| {
            let check = Check::AtRev(entities.type_key(entity_type), *rev);
            (check, format!("the declaration of type {entity_type:?}"))
        });
        let entities = self.entities.iter().map(|(id, rev)| {
            let check = as_found(entities.key(id), *rev);
            (check, format!("entity {id:?}"))
        });
        let ranges = self.ranges.iter();
        let ranges = ranges.map(|(range, what)| (Check::Unchanged(range.clone(), self.generation), what.clone()));
        entities.chain(ranges).chain(types)
    }
}
