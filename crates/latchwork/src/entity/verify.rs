//! Compares every index entry with the entities, and every entity with its entries.

use crate::entity::document::EntityRecord;
use crate::entity::index::{self, IndexState};
use crate::entity::{Entities, EntityId, Result};
use crate::record::{BadRecord, Record as _};
use crate::store::{Damage, Key, Order, Range, View};

const BATCH: usize = 1000;

impl Entities {
    /// Reads all entities and all index entries at one generation and reports where they disagree. `Store::verify`
    /// checks the bytes themselves.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// for damage in entities.verify().await? {
    ///     println!("{}: {}", damage.place, damage.detail);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn verify(&self) -> impl Future<Output = Result<Vec<Damage>>> + Send + use<> {
        self.clone().verified()
    }

    async fn verified(self) -> Result<Vec<Damage>> {
        let view = self.store().view().await?;
        let mut damage = Vec::new();
        self.verify_entities(&view, &mut damage).await?;
        self.verify_index(&view, &mut damage).await?;
        Ok(damage)
    }

    async fn verify_entities(&self, view: &View, damage: &mut Vec<Damage>) -> Result<()> {
        let mut rest = self.all();
        while let Some((items, next)) = batch(view, &rest).await? {
            rest = next;
            for (key, item) in items {
                let id = EntityId::from_stored(key.bytes())?;
                let record = match EntityRecord::of(&id, &item.value) {
                    Ok(record) => record,
                    Err(bad) if bad.why.is_version() => return Err(bad.into()),
                    Err(BadRecord { place, .. }) => {
                        damage.push(Damage { place, detail: "it cannot be read".into() });
                        continue;
                    }
                };
                for (number, key) in self.entries(view, &id, &record, |state| state == IndexState::Ready).await? {
                    let found = view.get(&self.index_key(&key)).await?;
                    if found.is_none_or(|found| found.value != id.as_bytes()) {
                        let (place, detail) = (format!("index {number} of {:?}", record.entity_type), "it lacks");
                        damage.push(Damage { place, detail: format!("{detail} entity {id:?}") });
                    }
                }
            }
        }
        Ok(())
    }

    async fn verify_index(&self, view: &View, damage: &mut Vec<Damage>) -> Result<()> {
        let mut rest = self.index_prefix(&[]);
        while let Some((items, next)) = batch(view, &rest).await? {
            rest = next;
            for (key, item) in items {
                let id = EntityId::from_stored(&item.value)?;
                if !self.belongs(view, &key, &id).await? {
                    let place = format!("the index entry {}", key.bytes().escape_ascii());
                    damage.push(Damage { place, detail: format!("entity {id:?} does not have it") });
                }
            }
        }
        Ok(())
    }

    /// True if an entity has an entry, or may have it while an index is being built or cleared.
    async fn belongs(&self, view: &View, key: &Key, id: &EntityId) -> Result<bool> {
        let Some((entity_type, number)) = index::read_prefix(key.bytes()) else { return Ok(false) };
        if let Some((_, declaration)) = self.declared_at(view, entity_type).await?
            && declaration.by_number(number).is_some_and(|index| index.state == IndexState::Dropping)
        {
            return Ok(true);
        }
        let Some(item) = view.get(&self.key(id)).await? else { return Ok(false) };
        let Ok(record) = EntityRecord::decode(&item.value) else { return Ok(false) };
        let known = self.entries(view, id, &record, |state| state != IndexState::Dropping).await?;
        Ok(known.iter().any(|(_, known)| known == key.bytes()))
    }

    /// The entries of an entity in the indexes with one of these states, and in the list of its type.
    async fn entries(
        &self,
        view: &View,
        id: &EntityId,
        record: &EntityRecord,
        wanted: fn(IndexState) -> bool,
    ) -> Result<Vec<(u16, Vec<u8>)>> {
        let declared = self.declared_at(view, &record.entity_type).await?;
        let indexes = declared.iter().flat_map(|(_, declaration)| &declaration.indexes);
        let entry = |index: &index::Index| Ok((index.number, index.entry(id, record, usize::MAX)?.key));
        let entries = indexes.filter(|index| wanted(index.state)).map(entry);
        let subtyped = index::subtyped(id, record).map(|entry| Ok((entry.index, entry.key)));
        entries.chain([Ok((0, index::listed(&record.entity_type, id)))]).chain(subtyped).collect()
    }
}

/// The next items of a range, and the rest of the range.
async fn batch(view: &View, range: &Range) -> Result<Option<(Vec<(Key, crate::store::Item)>, Range)>> {
    let items = view.scan(range, Order::Ascending, BATCH).await?;
    let next = items.last().map(|(key, _)| range.after(key));
    Ok(next.map(|next| (items, next)))
}
