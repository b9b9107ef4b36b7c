//! The change of one entity in a commit that contains more. For the layers above, which add their own parts.

use std::sync::Arc;

use serde_json::Value;

use crate::entity::document::EntityRecord;
use crate::entity::prepare::Changing;
use crate::entity::transact::Understood;
use crate::entity::{Entities, Entity, EntityId, Meta, Moment, Result};
use crate::lane::as_found;
use crate::store::{Check, Commit, Rev, View};

/// An entity at a rev.
#[derive(Debug, Clone)]
pub(crate) struct Standing {
    pub(crate) id: EntityId,
    pub(crate) rev: Rev,
    pub(crate) changed: Moment,
    record: Arc<EntityRecord>,
}

/// A change of an entity that is about to be sent.
pub(crate) struct Revised {
    pub(crate) commit: Commit,
    pub(crate) understood: Understood,
    /// The entity as the commit leaves it. The time of the change is known only to the commit.
    pub(crate) after: Standing,
}

impl Standing {
    pub(crate) fn data(&self) -> &Value {
        &self.record.data
    }

    pub(crate) fn entity_type(&self) -> &str {
        &self.record.entity_type
    }

    /// A row of the user's own table in the place of an entity.
    #[cfg(feature = "postgres")]
    pub(crate) fn of_row(id: EntityId, rev: Rev, entity_type: &str, data: Value) -> Standing {
        let (created, metadata) = (Moment::default(), serde_json::Map::new());
        let record = EntityRecord { entity_type: entity_type.into(), subtype: None, created, data, metadata };
        Standing { id, rev, changed: Moment::default(), record: Arc::new(record) }
    }

    /// When the entity was added.
    pub(crate) fn created(&self) -> Moment {
        self.record.created
    }

    pub(crate) fn entity(&self) -> Entity {
        EntityRecord::clone(&self.record).into_entity(self.id.clone(), self.rev, self.changed)
    }
}

impl Entities {
    /// The entity with this id, as the view shows it.
    pub(crate) async fn standing(&self, view: &View, id: &EntityId) -> Result<Option<Standing>> {
        id.validate()?;
        let Some(item) = view.get(&self.key(id)).await? else { return Ok(None) };
        let record = EntityRecord::of(id, &item.value)?;
        let changed = Moment { generation: item.generation, time: item.time };
        Ok(Some(Standing { id: id.clone(), rev: item.rev, changed, record: Arc::new(record) }))
    }

    /// The check that an entity is still as it was found: at a rev, or absent.
    pub(crate) fn as_found(&self, id: &EntityId, rev: Option<Rev>) -> Check {
        as_found(self.key(id), rev)
    }

    /// Prepares a change of the data, which lands only if the entity is still at its rev. More can be added to the
    /// commit.
    pub(crate) async fn revise(&self, standing: &Standing, data: Value, meta: &Meta) -> Result<Revised> {
        let after = EntityRecord { data, ..EntityRecord::clone(&standing.record) };
        let change = Changing { op: 0, id: &standing.id, before: Some(&standing.record), after: Some(&after) };
        let (commit, understood) = self.prepare_changing(change, standing.rev).await?.split();
        let after = Standing { rev: standing.rev.next(), record: Arc::new(after), ..standing.clone() };
        Ok(Revised { commit: commit.meta(meta.encode()), understood, after })
    }
}
