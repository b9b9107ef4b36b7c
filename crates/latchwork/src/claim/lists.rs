//! The lists that operators read, page by page: open claims, the transitions of an entity, after-effects, dead letters
//! and strays. Only reads.

use crate::claim::claims::Claims;
use crate::claim::error::{ClaimError, Result};
use crate::claim::machine::status_at;
use crate::claim::operate::{OpenClaim, StoredClaims, Transition, transition};
use crate::claim::outbox::{AfterEffect, DeadLetter};
use crate::claim::stored::{Claim, ClaimPhase, ClaimSpaces, EffectKey, Logged, OutboxEffect};
use crate::entity::{EntityError, EntityId, Query, field};
use crate::page::{Asked, Cursor, Page, Records, mark, paged};
use crate::record::Record;
use crate::store::{Item, Key, Order, Space, View};

/// A page of open claims, in the order of their entities, that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct ClaimList {
    stored: StoredClaims,
    needs_review: bool,
    asked: Asked,
}

/// A page of the changes of an entity by claim workflows, newest first, that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Transitions {
    stored: StoredClaims,
    entity: EntityId,
    asked: Asked,
}

/// A page of the after-effects that are not delivered yet, that is about to be read. Their order has no meaning.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Undelivered {
    stored: StoredClaims,
    asked: Asked,
}

/// A page of dead letters, in the order of their entities, that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct DeadLetters {
    stored: StoredClaims,
    asked: Asked,
}

/// A page of the entities of a workflow whose status is not in the configuration, that is about to be read. Each comes
/// with that status.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Strays {
    claims: Claims,
    workflow: String,
    asked: Asked,
}

paged!(ClaimList => OpenClaim, ClaimError);
paged!(Transitions => Transition, ClaimError);
paged!(Undelivered => AfterEffect, ClaimError);
paged!(DeadLetters => DeadLetter, ClaimError);
paged!(Strays => (EntityId, Option<String>), ClaimError);

impl StoredClaims {
    /// The open claims, in the order of their entities. Await it for a page.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # async fn example(stored: StoredClaims) -> Result<()> {
    /// for claim in stored.list().await? {
    ///     println!("{} is at {}", claim.entity, claim.claim_into);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn list(&self) -> ClaimList {
        ClaimList { stored: self.clone(), needs_review: false, asked: Asked::of("claims") }
    }

    /// The changes of an entity by claim workflows, newest first. Await it for a page.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # async fn example(stored: StoredClaims) -> Result<()> {
    /// for change in stored.history("i-1").limit(10).await? {
    ///     println!("{:?}: {} to {}, {}", change.kind, change.from, change.to, change.reason);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn history(&self, entity: impl Into<EntityId>) -> Transitions {
        Transitions { stored: self.clone(), entity: entity.into(), asked: Asked::of("transitions") }
    }

    /// The after-effects that are not delivered yet. Their order has no meaning. Await it for a page.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # async fn example(stored: StoredClaims) -> Result<()> {
    /// for effect in stored.undelivered().await? {
    ///     println!("{} of {}", effect.name, effect.entity);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn undelivered(&self) -> Undelivered {
        Undelivered { stored: self.clone(), asked: Asked::of("after-effects") }
    }

    /// The dead letters, in the order of their entities. Await it for a page.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # async fn example(stored: StoredClaims) -> Result<()> {
    /// for letter in stored.dead_letters().await? {
    ///     println!("{}: {}", letter.effect.name, letter.error);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn dead_letters(&self) -> DeadLetters {
        DeadLetters { stored: self.clone(), asked: Asked::of("dead letters") }
    }
}

impl Claims {
    /// The entities of a workflow whose status is not in the configuration, with that status. Await it for a page.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// for (entity, status) in claims.strays("invoice").await? {
    ///     println!("{entity} is at {status:?}");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn strays(&self, workflow: impl Into<String>) -> Strays {
        Strays { claims: self.clone(), workflow: workflow.into(), asked: Asked::of("strays") }
    }
}

/// All records of a space. Damaged ones are skipped, so that the others can still be listed.
fn all_of<'a>(view: &'a View, space: &'a Space) -> Records<'a> {
    Records { view, space, range: space.all(), order: Order::Ascending, skips_damage: true }
}

impl ClaimList {
    /// Only claims that need review: they wait for an operator.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # async fn example(stored: StoredClaims) -> Result<()> {
    /// for claim in stored.list().needs_review().await? {
    ///     println!("{}: {:?}", claim.entity, claim.holder.needs_review);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn needs_review(mut self) -> ClaimList {
        self.needs_review = true;
        self
    }

    async fn page(self) -> Result<Page<OpenClaim>> {
        let ClaimList { stored, needs_review, asked } = self;
        let mark = mark(&needs_review);
        asked.position(mark)?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let view = stored.store.view().await?;
        let read = |key: &Key, item: &Item| -> Result<Option<(EntityId, Claim)>> {
            let Ok(entity) = std::str::from_utf8(key.bytes()).map(EntityId::from) else { return Ok(None) };
            let claim = Claim::decode(&item.value).map_err(|why| why.at(format!("the claim on entity {entity:?}")))?;
            let is_listed = !needs_review || matches!(claim.phase, ClaimPhase::Review(_));
            Ok(is_listed.then_some((entity, claim)))
        };
        let page = asked.scan(mark, all_of(&view, &spaces.claims), read).await?;
        let mut items = Vec::with_capacity(page.items.len());
        for (entity, claim) in page.items {
            items.push(stored.open(&view, entity, claim).await?);
        }
        Ok(Page { items, next: page.next })
    }
}

impl Transitions {
    async fn page(self) -> Result<Page<Transition>> {
        let Transitions { stored, entity, asked } = self;
        let mark = mark(&entity);
        asked.position(mark)?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let view = stored.store.view().await?;
        let (range, order) = (spaces.log_of(&entity), Order::Descending);
        let records = Records { view: &view, space: &spaces.log, range, order, skips_damage: false };
        let read = |key: &Key, item: &Item| -> Result<Option<Transition>> {
            let place = || format!("the log of claims on entity {entity:?}");
            let logged = Logged::decode(&item.value).map_err(|why| why.at(place()))?;
            let rev = ClaimSpaces::read_rev(key).ok_or_else(|| ClaimError::Corrupt { place: place() })?;
            Ok(Some(transition(logged, rev)))
        };
        asked.scan(mark, records, read).await
    }
}

impl Undelivered {
    async fn page(self) -> Result<Page<AfterEffect>> {
        let Undelivered { stored, asked } = self;
        let mark = mark(&());
        asked.position(mark)?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let view = stored.store.view().await?;
        let read = |key: &Key, item: &Item| -> Result<Option<AfterEffect>> {
            let Some(named) = EffectKey::read_outbox(key) else { return Ok(None) };
            let effect =
                OutboxEffect::decode(&item.value).map_err(|why| why.at(format!("after-effect {}", named.text())))?;
            Ok(Some(effect.told(&named)))
        };
        asked.scan(mark, all_of(&view, &spaces.outbox), read).await
    }
}

impl DeadLetters {
    async fn page(self) -> Result<Page<DeadLetter>> {
        let DeadLetters { stored, asked } = self;
        let mark = mark(&());
        asked.position(mark)?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let view = stored.store.view().await?;
        let read = |key: &Key, item: &Item| -> Result<Option<DeadLetter>> {
            let Some(named) = EffectKey::read_dead(key) else { return Ok(None) };
            let effect =
                OutboxEffect::decode(&item.value).map_err(|why| why.at(format!("dead letter {}", named.text())))?;
            Ok(Some(DeadLetter::of(&named, effect)))
        };
        asked.scan(mark, all_of(&view, &spaces.dead), read).await
    }
}

impl Strays {
    async fn page(self) -> Result<Page<(EntityId, Option<String>)>> {
        let Strays { claims, workflow, asked } = self;
        let machine = claims.inner.machine(&workflow)?;
        let (meta, statuses) = (&machine.config.meta, &machine.config.status_types);
        if let Some(table) = &meta.table {
            let reason = "its rows are in the user's table: ask the database for other statuses".into();
            return Err(ClaimError::Table { workflow, table: table.name.clone(), reason });
        }
        let mark = mark(&(&workflow, &meta.entity_type, &meta.status_field, statuses));
        // A position is the cursor of the find.
        let after = asked.position(mark)?.map(|after| Cursor::read(after).ok_or_else(|| asked.unknown()));
        let known = field(&format!("data.{}", meta.status_field)).one_of(statuses.clone());
        let query = Query::of(meta.entity_type.clone()).filter(known.negate());
        let query = query.limit(asked.limit).after(after.transpose()?);
        let page = claims.inner.ledger.entities.find(query).await.map_err(|error| match error {
            EntityError::Cursor(_) => asked.unknown().into(),
            error => ClaimError::from(error),
        })?;
        let next = page.next.as_ref().map(|next| asked.cursor(mark, next.bytes()));
        let items = page.items.into_iter().map(|entity| {
            let status = status_at(&machine.path, &entity.data).map(str::to_string);
            (entity.id, status)
        });
        Ok(Page { items: items.collect(), next })
    }
}
