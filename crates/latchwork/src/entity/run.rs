//! Answers a query on a view: reads the ranges that the plan names, checks each entity, and keeps the matches. Works
//! the same for every view, also of the past.

use crate::entity::document::{EntityRecord, Moment};
use crate::entity::plan::{self, AccessPath, IndexStart};
use crate::entity::query::{Access, CheckedQuery, OrderPosition};
use crate::entity::{Entity, EntityError, EntityId, EntityView, Explained, Plan, Query, Result};
use crate::page::Page;
use crate::store::{Item, Key, Order, Range, View};

/// The most and the fewest entries that are read at once.
const BATCH: usize = 256;
const FIRST_BATCH: usize = 16;

impl EntityView {
    /// Returns the entities that a query asks for.
    ///
    /// ```
    /// # use latchwork::entity::{EntityView, Query, Result};
    /// # async fn example(view: EntityView) -> Result<()> {
    /// for person in view.find(&Query::of("person")).await? {
    ///     println!("{}", person.id);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn find(&self, query: &Query) -> Result<Page<Entity>> {
        Ok(self.find_explained(query).await?.page)
    }

    /// Returns the entities that a query asks for, and how they were found.
    ///
    /// ```
    /// # use latchwork::entity::{EntityView, Query, Result};
    /// # async fn example(view: EntityView) -> Result<()> {
    /// let found = view.find_explained(&Query::of("person")).await?;
    /// println!("{}, {} entities read", found.plan, found.examined);
    /// # Ok(()) }
    /// ```
    pub async fn find_explained(&self, query: &Query) -> Result<Explained> {
        let query = query.checked()?;
        let view = self.pinned()?;
        let path = self.plan(&view, &query).await?;
        let run = QueryRun { view: self, pinned: &view, query: &query, path: &path, examined: 0 };
        run.page().await
    }

    /// Returns how a query would be answered.
    ///
    /// ```
    /// # use latchwork::entity::{EntityView, Query, Result, field};
    /// # async fn example(view: EntityView) -> Result<()> {
    /// let plan = view.explain(&Query::of("person").filter(field("data.city").equals("Paris"))).await?;
    /// println!("{plan}");
    /// # Ok(()) }
    /// ```
    pub async fn explain(&self, query: &Query) -> Result<Plan> {
        let query = query.checked()?;
        Ok(self.plan(&*self.pinned()?, &query).await?.plan)
    }

    /// Uses the declaration of this generation: an index that was declared later has no entries here.
    async fn plan(&self, view: &View, query: &CheckedQuery) -> Result<AccessPath> {
        let entities = self.entities();
        let key_bytes = entities.store().limits().key_bytes;
        let declared = match &query.entity_type {
            Some(entity_type) => entities.declared_at(view, entity_type).await?,
            None => None,
        };
        let path = plan::choose(query, declared.as_ref().map(|(_, declaration)| &**declaration), key_bytes);
        if let (Some(entity_type), Some((rev, _)), false) = (&query.entity_type, &declared, path.plan.scans()) {
            self.remember_type(entity_type, *rev);
        }
        Ok(path)
    }
}

/// A match, before it is put into a page.
struct Match {
    sort_key: Vec<u8>,
    position: OrderPosition,
    entity: Entity,
}

struct QueryRun<'a> {
    view: &'a EntityView,
    pinned: &'a View,
    query: &'a CheckedQuery,
    path: &'a AccessPath,
    examined: usize,
}

impl QueryRun<'_> {
    async fn page(mut self) -> Result<Explained> {
        let mut matches = self.matches().await?;
        let more = matches.len() > self.query.limit;
        matches.truncate(self.query.limit);
        let next = matches.last().filter(|_| more).map(|last| self.query.cursor(&last.position));
        let items = matches.into_iter().map(|found| found.entity).collect();
        let page = Page { items, next };
        Ok(Explained { page, plan: self.path.plan.clone(), examined: self.examined })
    }

    /// The ranges to read. If the index has the requested order, the part before the cursor is left out.
    fn ranges(&self) -> Vec<Range> {
        let entities = self.view.entities();
        let scans_all = self.path.plan.access == Access::ScanAll;
        let ranges = match scans_all {
            true => vec![entities.all()],
            false => self.path.ranges.iter().map(|(start, end)| entities.index_range(start, end)).collect(),
        };
        let after = self.query.after.as_ref().filter(|_| !self.path.plan.sorts);
        let Some(position) = after else { return ranges };
        let rest = |range: &Range| {
            if scans_all {
                return self.behind(range, &entities.key(&position.id));
            }
            match self.path.start_behind(position, entities.store().limits().key_bytes) {
                IndexStart::Behind(key) => self.behind(range, &entities.index_key(&key)),
                IndexStart::At(key) => self.starting_at(range, &entities.index_key(&key)),
            }
        };
        ranges.iter().map(rest).collect()
    }

    /// The matches of a page in the requested order, and one more, which tells whether there is another page. If the
    /// index has that order, reading ends with the last of them; otherwise everything is read, and the first matches
    /// are kept.
    async fn matches(&mut self) -> Result<Vec<Match>> {
        let (sorts, order) = (self.path.plan.sorts, self.path.order);
        let wanted = self.query.limit.saturating_add(1);
        let mut matches = Vec::new();
        for range in self.ranges() {
            let mut rest = range.clone();
            let mut batch = if sorts { BATCH } else { wanted.clamp(FIRST_BATCH, BATCH) };
            loop {
                let found = self.pinned.scan(&rest, order, batch).await?;
                let ends = found.len() < batch;
                for (key, item) in found {
                    matches.extend(self.look(&key, &item).await?);
                    rest = self.behind(&rest, &key);
                    if !sorts && matches.len() == wanted {
                        let seen = match order {
                            Order::Ascending => range.through(&key),
                            Order::Descending => range.from(&key),
                        };
                        self.view.remember(seen, || self.what());
                        return Ok(matches);
                    }
                }
                if sorts && matches.len() / 2 >= wanted {
                    keep_first(&mut matches, wanted);
                }
                if ends {
                    break;
                }
                batch = BATCH;
            }
            self.view.remember(range, || self.what());
        }
        if sorts {
            keep_first(&mut matches, wanted);
        }
        Ok(matches)
    }

    /// The rest of a range after this key was read.
    fn behind(&self, rest: &Range, key: &Key) -> Range {
        match self.path.order {
            Order::Ascending => rest.after(key),
            Order::Descending => rest.before(key),
        }
    }

    /// The part of a range that begins with this key.
    fn starting_at(&self, range: &Range, key: &Key) -> Range {
        match self.path.order {
            Order::Ascending => range.from(key),
            Order::Descending => range.through(key),
        }
    }

    /// Checks the entity of an index entry.
    async fn look(&mut self, key: &Key, entry: &Item) -> Result<Option<Match>> {
        self.examined += 1;
        if self.path.plan.access == Access::ScanAll {
            let id = EntityId::from_stored(key.bytes())?;
            self.view.remember_entity(&id, Some(entry.rev));
            return self.matched(id, entry);
        }
        let id = EntityId::from_stored(&entry.value)?;
        let item = self.view.read(self.pinned, &id).await?;
        let item = item.ok_or_else(|| EntityError::corrupt(format!("the index entry {key} without an entity")))?;
        self.matched(id, &item)
    }

    fn matched(&self, id: EntityId, item: &Item) -> Result<Option<Match>> {
        let record = EntityRecord::of(&id, &item.value)?;
        if !self.query.matches(&record) {
            return Ok(None);
        }
        let position = self.query.position(&id, &record);
        let mut sort_key = Vec::new();
        if self.path.plan.sorts || self.query.after.is_some() {
            sort_key = self.query.sort_key(&position);
            if self.query.after.as_ref().is_some_and(|after| sort_key <= self.query.sort_key(after)) {
                return Ok(None);
            }
        }
        let entity = record.into_entity(id, item.rev, Moment { generation: item.generation, time: item.time });
        Ok(Some(Match { sort_key, position, entity }))
    }

    /// The name of a range in an error that says it has changed.
    fn what(&self) -> String {
        let entity_type = self.query.entity_type.as_deref();
        match (&self.path.plan.access, entity_type) {
            (Access::Index { fields, .. }, Some(entity_type)) => {
                format!("the result of the index of {entity_type:?} on {}", fields.join(", "))
            }
            (_, Some(entity_type)) => format!("the list of all {entity_type:?}"),
            (_, None) => "the list of all entities".into(),
        }
    }
}

/// Sorts matches in the requested order and drops those beyond the limit.
fn keep_first(matches: &mut Vec<Match>, wanted: usize) {
    matches.sort_unstable_by(|a, b| a.sort_key.cmp(&b.sort_key));
    matches.truncate(wanted);
}
