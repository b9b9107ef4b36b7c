//! Answers a query on a view: goes through the ranges that the plan names, looks at each entity there, and keeps what
//! matches. The same for every view, those of the past included.

use std::collections::BinaryHeap;

use crate::entity::document::{Moment, Record};
use crate::entity::plan::{self, Path};
use crate::entity::query::{Access, CheckedQuery, Position};
use crate::entity::{Entity, EntityError, EntityId, EntityView, Page, Plan, Query, Result};
use crate::record::Record as _;
use crate::store::{Item, Key, Order, Range, View};

/// How many entries are read at once, at the most and at the least.
const BATCH: usize = 256;
const FIRST_BATCH: usize = 16;

impl EntityView {
    /// The entities that a query asks for.
    pub async fn find(&self, query: &Query) -> Result<Page> {
        let query = query.checked()?;
        let view = self.pinned()?;
        let path = self.plan(&view, &query).await?;
        let run = Run { view: self, pinned: &view, query: &query, path: &path, examined: 0 };
        run.page().await
    }

    /// How a query would be answered.
    pub async fn explain(&self, query: &Query) -> Result<Plan> {
        let query = query.checked()?;
        Ok(self.plan(&*self.pinned()?, &query).await?.plan)
    }

    /// By the declaration that held at this generation: an index that came later has nothing for it.
    async fn plan(&self, view: &View, query: &CheckedQuery) -> Result<Path> {
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

/// A match, on its way into a page.
struct Match {
    sort_key: Vec<u8>,
    position: Position,
    entity: Entity,
}

impl PartialEq for Match {
    fn eq(&self, other: &Match) -> bool {
        self.sort_key == other.sort_key
    }
}

impl Eq for Match {}

impl PartialOrd for Match {
    fn partial_cmp(&self, other: &Match) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Match {
    fn cmp(&self, other: &Match) -> std::cmp::Ordering {
        self.sort_key.cmp(&other.sort_key)
    }
}

struct Run<'a> {
    view: &'a EntityView,
    pinned: &'a View,
    query: &'a CheckedQuery,
    path: &'a Path,
    examined: usize,
}

impl Run<'_> {
    async fn page(mut self) -> Result<Page> {
        let mut matches = if self.path.plan.sorts { self.gather().await? } else { self.stream().await? };
        let more = matches.len() > self.query.limit;
        matches.truncate(self.query.limit);
        let next = matches.last().filter(|_| more).map(|last| self.query.cursor(&last.position));
        let items = matches.into_iter().map(|found| found.entity).collect();
        Ok(Page { items, next, plan: self.path.plan.clone(), examined: self.examined })
    }

    /// The ranges to go through, with the part behind the cursor left out where the order is the index's own.
    fn ranges(&self) -> Vec<Range> {
        let entities = self.view.entities();
        if self.path.plan.access == Access::ScanAll {
            let all = entities.all();
            let after = self.query.after.as_ref().filter(|_| !self.path.plan.sorts);
            return vec![after.map_or(all.clone(), |position| all.after(&entities.key(&position.id)))];
        }
        let ranges = self.path.ranges.iter().map(|(start, end)| entities.index_range(start, end));
        let after = self.query.after.as_ref().filter(|_| !self.path.plan.sorts);
        let Some(position) = after else { return ranges.collect() };
        let key_bytes = entities.store().limits().key_bytes;
        let key = entities.index_key(&self.path.key_at(position, key_bytes));
        let rest = |range: Range| match self.path.order {
            Order::Ascending => range.after(&key),
            Order::Descending => range.before(&key),
        };
        ranges.map(rest).collect()
    }

    /// Reads in the order asked for until a page is full, and one more to know whether there is another.
    async fn stream(&mut self) -> Result<Vec<Match>> {
        let mut matches = Vec::new();
        let wanted = self.query.limit.saturating_add(1);
        for range in self.ranges() {
            let mut rest = range.clone();
            let mut batch = wanted.clamp(FIRST_BATCH, BATCH);
            loop {
                let found = self.pinned.scan(&rest, self.path.order, batch).await?;
                let ends = found.len() < batch;
                for (key, item) in found {
                    matches.extend(self.look(&key, &item).await?);
                    rest = self.behind(&rest, &key);
                    if matches.len() == wanted {
                        let seen = match self.path.order {
                            Order::Ascending => range.through(&key),
                            Order::Descending => range.from(&key),
                        };
                        self.view.remember(seen, || self.what());
                        return Ok(matches);
                    }
                }
                if ends {
                    break;
                }
                batch = BATCH;
            }
            self.view.remember(range, || self.what());
        }
        Ok(matches)
    }

    /// Reads everything and keeps the first matches in the order asked for.
    async fn gather(&mut self) -> Result<Vec<Match>> {
        let wanted = self.query.limit.saturating_add(1);
        let mut heap = BinaryHeap::new();
        for range in self.ranges() {
            let mut rest = range.clone();
            loop {
                let found = self.pinned.scan(&rest, Order::Ascending, BATCH).await?;
                let ends = found.len() < BATCH;
                for (key, item) in found {
                    rest = rest.after(&key);
                    if let Some(found) = self.look(&key, &item).await? {
                        heap.push(found);
                        if heap.len() > wanted {
                            heap.pop();
                        }
                    }
                }
                if ends {
                    break;
                }
            }
            self.view.remember(range, || self.what());
        }
        Ok(heap.into_sorted_vec())
    }

    fn behind(&self, rest: &Range, key: &Key) -> Range {
        match self.path.order {
            Order::Ascending => rest.after(key),
            Order::Descending => rest.before(key),
        }
    }

    /// Looks at the entity that an entry stands for.
    async fn look(&mut self, key: &Key, entry: &Item) -> Result<Option<Match>> {
        self.examined += 1;
        if self.path.plan.access == Access::ScanAll {
            let id = EntityId::from_stored(key.bytes())?;
            self.view.remember_entity(&id, Some(entry.rev));
            return self.matched(id, entry);
        }
        let id = EntityId::from_stored(&entry.value)?;
        let item = self.view.read(self.pinned, &id).await?;
        let item = item.ok_or_else(|| EntityError::corrupt(format!("the index entry {key} of no entity")))?;
        self.matched(id, &item)
    }

    fn matched(&self, id: EntityId, item: &Item) -> Result<Option<Match>> {
        let record = Record::decode(&item.value).map_err(|why| why.at(format!("entity {id:?}")))?;
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

    /// What a range is called where it has changed.
    fn what(&self) -> String {
        let entity_type = self.query.entity_type.as_deref();
        match (&self.path.plan.access, entity_type) {
            (Access::Index { fields, .. }, Some(entity_type)) => {
                format!("what the index of {entity_type:?} on {} finds", fields.join(", "))
            }
            (_, Some(entity_type)) => format!("the list of all {entity_type:?}"),
            (_, None) => "the list of all entities".into(),
        }
    }
}
