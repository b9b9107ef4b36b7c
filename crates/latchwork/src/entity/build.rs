//! Builds indexes over entities that exist already, and clears indexes that are no longer wanted. Both happen in small
//! commits while other writers continue. If a process dies in between, the next declaration of the type finishes the
//! work.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::entity::declare::{Declaration, TypeSpec};
use crate::entity::document::EntityRecord;
use crate::entity::index::{self, Index, IndexState};
use crate::entity::{Entities, EntityError, EntityId, Result};
use crate::lane::as_found;
use crate::lane::{Part, Tag};
use crate::record::Record as _;
use crate::store::{Check, Commit, Order, Outcome, Rev, StoreError, View};

/// The number of entities that one commit puts into an index or takes out of it.
const BATCH: usize = 200;

/// The declaration of the type has not changed since it was read.
const DECLARED: Tag = Tag("declared");

impl Entities {
    /// Declares indexes and unique values of a type. What is declared already stays. A new index is built over the
    /// existing entities while other writers continue, and is used when it is complete. If two entities have the same
    /// value where it must be unique, this fails, names both, and leaves nothing behind.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result, TypeSpec};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// entities.declare(TypeSpec::new("person").unique(["data.email"]).index(["data.city"])).await?;
    /// # Ok(()) }
    /// ```
    pub fn declare(&self, spec: TypeSpec) -> impl Future<Output = Result<()>> + Send + use<> {
        self.clone().add_declared(spec)
    }

    async fn add_declared(self, spec: TypeSpec) -> Result<()> {
        let asked = spec.checked()?;
        self.change_declaration(&spec.name, |declaration| declaration.with_missing(&spec.name, &asked)).await?;
        // If another caller built the index and failed, the index is gone for this caller, too.
        let (_, declaration) = self.declaration(&spec.name).await?;
        match asked.iter().find(|(fields, unique)| declaration.find(fields, *unique).is_none()) {
            Some(_) => Err(EntityError::Declaration {
                entity_type: spec.name,
                reason: "an index was dropped while it was being built".into(),
            }),
            None => Ok(()),
        }
    }

    /// Removes indexes and unique values from the declaration of a type: those that are named and exist.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result, TypeSpec};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// entities.undeclare(TypeSpec::new("person").index(["data.city"])).await?;
    /// # Ok(()) }
    /// ```
    pub fn undeclare(&self, spec: TypeSpec) -> impl Future<Output = Result<()>> + Send + use<> {
        self.clone().remove_declared(spec)
    }

    async fn remove_declared(self, spec: TypeSpec) -> Result<()> {
        let named = spec.checked()?;
        let without_named = |declaration: &Declaration| {
            let dropped = named.iter().filter_map(|(fields, unique)| declaration.find(fields, *unique));
            let dropping = |wanted: Declaration, index: &Index| wanted.with_state(index.number, IndexState::Dropping);
            Ok(dropped.fold(declaration.clone(), dropping))
        };
        self.change_declaration(&spec.name, without_named).await
    }

    /// Changes the declaration, and builds or clears indexes accordingly.
    async fn change_declaration(
        &self,
        entity_type: &str,
        change: impl Fn(&Declaration) -> Result<Declaration>,
    ) -> Result<()> {
        loop {
            let (rev, declaration) = self.declaration(entity_type).await?;
            let wanted = change(&declaration)?;
            if wanted == *declaration || self.redeclare(entity_type, rev, &wanted).await? {
                return self.settle(entity_type).await;
            }
        }
    }

    async fn declaration(&self, entity_type: &str) -> Result<(Option<Rev>, Arc<Declaration>)> {
        Ok(match self.refresh(entity_type).await? {
            Some((rev, declaration)) => (Some(rev), declaration),
            None => (None, Arc::default()),
        })
    }

    fn declaration_check(&self, entity_type: &str, rev: Option<Rev>) -> Check {
        as_found(self.type_key(entity_type), rev)
    }

    /// Replaces the declaration, if it is at the rev it was read at.
    async fn redeclare(&self, entity_type: &str, rev: Option<Rev>, wanted: &Declaration) -> Result<bool> {
        let commit = Commit::new()
            .check(self.declaration_check(entity_type, rev))
            .put(&self.type_key(entity_type), wanted.encode());
        Ok(self.store().commit(commit).await?.is_applied())
    }

    /// Finishes the indexes that are half built or half cleared.
    async fn settle(&self, entity_type: &str) -> Result<()> {
        loop {
            let (rev, declaration) = self.declaration(entity_type).await?;
            let index = declaration.indexes.iter().find(|index| index.state != IndexState::Ready);
            let Some(index) = index else { return Ok(()) };
            let built = match index.state {
                IndexState::Dropping => {
                    self.clear(entity_type, rev, index).await?;
                    self.redeclare(entity_type, rev, &declaration.without(index.number)).await?;
                    continue;
                }
                _ => self.build(entity_type, rev, index).await,
            };
            let state = if built.is_ok() { IndexState::Ready } else { IndexState::Dropping };
            match built {
                // Another caller has continued it.
                Ok(false) => continue,
                // The store failed, not the index.
                Err(EntityError::Store(error)) => return Err(error.into()),
                _ => {}
            }
            let declared = self.redeclare(entity_type, rev, &declaration.with_state(index.number, state)).await?;
            if let (Err(error), true) = (built, declared) {
                Box::pin(self.settle(entity_type)).await?;
                return Err(error);
            }
        }
    }

    /// Puts every entity of the type into an index. Returns true if the declaration stayed the same meanwhile.
    async fn build(&self, entity_type: &str, rev: Option<Rev>, index: &Index) -> Result<bool> {
        let list = index::prefix(entity_type, 0);
        let mut rest = self.index_prefix(&list);
        let mut batch = BATCH;
        loop {
            let view = self.store().view().await?;
            let found = view.scan(&rest, Order::Ascending, batch).await?;
            let Some((last, _)) = found.last() else { return Ok(true) };
            let declared = Part::default().check(DECLARED, self.declaration_check(entity_type, rev));
            let (commit, declared) = declared.place(Commit::new());
            let mut entering = Entering { commit, owners: BTreeMap::new() };
            for (_, item) in &found {
                let id = EntityId::from_stored(&item.value)?;
                self.enter(&view, &mut entering, index, &id).await?;
            }
            match self.store().commit(entering.commit).await {
                Ok(Outcome::Applied(_)) => (rest, batch) = (rest.after(last), BATCH),
                Ok(Outcome::Refused(refusal)) if declared.has_failed(&refusal, DECLARED) => return Ok(false),
                // An entity was written meanwhile. A writer that writes it again and again also puts it into the index.
                Ok(Outcome::Refused(_)) => batch = (batch / 2).max(1),
                Err(error) => batch = smaller(batch, error)?,
            }
        }
    }

    /// Adds an entity's entry to a commit, unless the entry exists.
    async fn enter(&self, view: &View, entering: &mut Entering, index: &Index, id: &EntityId) -> Result<()> {
        let key = self.key(id);
        let damaged = || EntityError::corrupt(format!("entity {id:?}"));
        let item = view.get(&key).await?.ok_or_else(damaged)?;
        let record = EntityRecord::of(id, &item.value)?;
        let entry = index.entry(id, &record, self.store().limits().key_bytes)?;
        let entry_key = self.index_key(&entry.key);
        let owner = match view.get(&entry_key).await? {
            Some(owner) => Some(EntityId::from_stored(&owner.value)?),
            None => entering.owners.get(&entry.key).cloned(),
        };
        match owner {
            Some(owner) if owner == *id => {}
            Some(owner) => {
                let (entity_type, fields) = (record.entity_type.to_string(), index.names());
                return Err(EntityError::UniqueViolation { id: id.clone(), entity_type, fields, owner });
            }
            None => {
                let commit = std::mem::take(&mut entering.commit).at_rev(&key, item.rev).absent(&entry_key);
                entering.commit = commit.put(&entry_key, id.as_bytes().to_vec());
                entering.owners.insert(entry.key, id.clone());
            }
        }
        Ok(())
    }

    /// Removes every entry of an index that writers no longer maintain.
    async fn clear(&self, entity_type: &str, rev: Option<Rev>, index: &Index) -> Result<()> {
        let range = self.index_prefix(&index::prefix(entity_type, index.number));
        let mut batch = BATCH;
        loop {
            let found = self.store().view().await?.scan(&range, Order::Ascending, batch).await?;
            if found.is_empty() {
                return Ok(());
            }
            let check = Commit::new().check(self.declaration_check(entity_type, rev));
            let commit = found.iter().fold(check, |commit, (key, _)| commit.delete(key));
            match self.store().commit(commit).await {
                Ok(outcome) if outcome.is_applied() => {}
                Ok(_) => return Ok(()),
                Err(error) => batch = smaller(batch, error)?,
            }
        }
    }
}

/// Entries that are about to be put into an index.
struct Entering {
    commit: Commit,
    /// The owners of the entries.
    owners: BTreeMap<Vec<u8>, EntityId>,
}

/// Half of a batch that was too large for a commit.
fn smaller(batch: usize, error: StoreError) -> Result<usize> {
    match error {
        StoreError::TooManyOperations { .. } | StoreError::CommitTooLarge { .. } if batch > 1 => Ok(batch / 2),
        error => Err(error.into()),
    }
}
