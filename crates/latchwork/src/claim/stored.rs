//! The stored records of claims: claims, the log of each entity, after-effects and timers. It defines keys and records,
//! and makes no decision.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::claim::config::Recovery;
use crate::entity::EntityId;
use crate::lock::Owner;
use crate::node::{ExecutionId, read_text, shard_key, shard_of, write_text};
use crate::record::stored;
use crate::store::{Key, Range, Rev, Space, SpaceSpec, Store, StoreError, Uuid};

/// The terms of a claim: what its step configured for the requester when the claim was made. They apply until the claim
/// ends, also if the configuration changes meanwhile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Terms {
    pub(crate) workflow: String,
    pub(crate) module: String,
    pub(crate) entity_type: String,
    /// The path of the status, in its written form.
    pub(crate) status_field: String,
    pub(crate) step_id: u64,
    pub(crate) step_key: String,
    /// The status that the step starts at, and that a claim reverts to.
    pub(crate) from: String,
    /// The claiming status, if the step is claimed.
    pub(crate) claim_into: Option<String>,
    /// The status that the step leads to.
    pub(crate) into: String,
    pub(crate) action: Option<String>,
    pub(crate) effects: Vec<EffectTerms>,
    pub(crate) lease_us: u64,
    pub(crate) recovery: Recovery,
    pub(crate) most_attempts: u32,
    /// The timers of the steps that start at `into`.
    pub(crate) timers: Vec<TimerTerms>,
}

/// An after-effect of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct EffectTerms {
    pub(crate) name: String,
    /// The workflow to start, if the after-effect is a workflow.
    pub(crate) workflow: Option<String>,
}

/// A timer of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TimerTerms {
    pub(crate) step_id: u64,
    pub(crate) after_us: u64,
}

/// The record of a claim. The commit that claims writes it, and the commit that ends the claim deletes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Claim {
    /// Unique for each claim.
    pub(crate) id: Uuid,
    pub(crate) terms: Arc<Terms>,
    pub(crate) requester: String,
    pub(crate) actor: Option<String>,
    /// JSON text.
    pub(crate) input: String,
    pub(crate) owner: Owner,
    /// The rev of the entity while this claim holds. Every end of the claim, and every other write, moves the rev.
    pub(crate) token: u64,
    pub(crate) since_us: u64,
    /// The number of attempts of the action.
    pub(crate) attempts: u32,
    pub(crate) phase: ClaimPhase,
    /// The idempotency key of the firing, if it has one.
    pub(crate) once: Option<FiredOnce>,
}

/// The idempotency key of a firing, and what stands for the firing and its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FiredOnce {
    pub(crate) key: String,
    pub(crate) fingerprint: u64,
}

/// The state of a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ClaimPhase {
    /// Its owner runs the action.
    Held,
    /// Its owner is gone, and it is not known whether the action took effect. The claim waits for an operator.
    Review(String),
    /// An operator has asked to run the action again.
    Retry,
}

/// A change of an entity's status, or the end of a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Logged {
    pub(crate) workflow: String,
    pub(crate) step_id: u64,
    pub(crate) step_key: String,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) requester: String,
    pub(crate) actor: Option<String>,
    pub(crate) reason: String,
    pub(crate) kind: LoggedKind,
    /// The claim that ended, or the firing that made the change.
    pub(crate) claim: Uuid,
    /// When the claim was made, or when the step was fired if it is not claimed.
    pub(crate) since_us: u64,
    pub(crate) at_us: u64,
}

/// The kind of a log entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LoggedKind {
    Done,
    Released,
    Review,
    Retried,
}

/// An after-effect in the outbox or among the dead letters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct OutboxEffect {
    pub(crate) name: String,
    pub(crate) workflow: String,
    pub(crate) step_id: u64,
    pub(crate) step_key: String,
    pub(crate) entity_type: String,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) requester: String,
    pub(crate) actor: Option<String>,
    /// JSON text.
    pub(crate) input: String,
    /// JSON text.
    pub(crate) output: String,
    pub(crate) at_us: u64,
    /// The number of attempts.
    pub(crate) attempts: u32,
    /// When the next attempt is due.
    pub(crate) due_us: u64,
    pub(crate) error: Option<String>,
}

/// A timer of a step for an entity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timed {
    pub(crate) workflow: String,
    pub(crate) step_id: u64,
    pub(crate) entity: EntityId,
    /// The rev with which the entity reached the step's status. 0 if it was added at this status.
    pub(crate) since: u64,
}

stored!(Claim => [b"\0"], Logged, OutboxEffect, Timed);

/// The spaces of all records.
#[derive(Clone)]
pub(crate) struct ClaimSpaces {
    /// entity → claim
    pub(crate) claims: Space,
    /// entity, rev → log entry
    pub(crate) log: Space,
    /// shard, entity, rev, number → after-effect
    pub(crate) outbox: Space,
    /// entity, rev, number → dead letter
    pub(crate) dead: Space,
    /// shard, due time, timer → timer
    pub(crate) timers: Space,
}

/// The names of spaces.
const CLAIMS: &str = "claim.claims";
const LOG: &str = "claim.log";
const OUTBOX: &str = "claim.outbox";
const DEAD: &str = "claim.dead";
const TIMERS: &str = "claim.timers";

impl ClaimSpaces {
    pub(crate) async fn declare(store: &Store) -> Result<ClaimSpaces, StoreError> {
        // A rev of an entity never comes back, so a key with a rev is used once. A claim differs from earlier ones by
        // its id.
        let used_once = |name: &'static str| store.space(SpaceSpec::new(name).keys_used_once());
        Ok(ClaimSpaces {
            claims: used_once(CLAIMS).await?,
            log: used_once(LOG).await?,
            outbox: used_once(OUTBOX).await?,
            dead: used_once(DEAD).await?,
            timers: used_once(TIMERS).await?,
        })
    }

    /// Returns the spaces if all of them were declared before.
    pub(crate) async fn find(store: &Store) -> Result<Option<ClaimSpaces>, StoreError> {
        let known = store.spaces().await?;
        let space = |name: &str| known.iter().find(|space| space.name() == name).cloned();
        let find = || {
            let (claims, log, outbox) = (space(CLAIMS)?, space(LOG)?, space(OUTBOX)?);
            Some(ClaimSpaces { claims, log, outbox, dead: space(DEAD)?, timers: space(TIMERS)? })
        };
        Ok(find())
    }

    pub(crate) fn claim(&self, entity: &EntityId) -> Key {
        self.claims.key(entity.as_bytes())
    }

    pub(crate) fn logged(&self, entity: &EntityId, rev: Rev) -> Key {
        let mut key = Vec::with_capacity(entity.len() + 10);
        write_text(&mut key, entity);
        key.extend_from_slice(&rev.0.to_be_bytes());
        self.log.key(key)
    }

    /// All log entries of an entity.
    pub(crate) fn log_of(&self, entity: &EntityId) -> Range {
        let mut key = Vec::with_capacity(entity.len() + 2);
        write_text(&mut key, entity);
        self.log.prefix(key)
    }

    /// The rev that follows the entity in a key of the log.
    pub(crate) fn read_rev(key: &Key) -> Option<Rev> {
        let (_, rev) = read_text(key.bytes())?;
        Some(Rev(u64::from_be_bytes(rev.try_into().ok()?)))
    }

    pub(crate) fn effect(&self, key: &EffectKey) -> Key {
        self.outbox.key([&shard_key(shard_of(key.entity.as_bytes())), &key.bytes()[..]].concat())
    }

    /// The after-effects of the same entity that come before this one.
    pub(crate) fn effects_before(&self, key: &EffectKey) -> Range {
        let first = EffectKey { rev: Rev(0), number: 0, ..key.clone() };
        self.outbox.range(self.effect(&first).bytes()..self.effect(key).bytes())
    }

    pub(crate) fn effects_in(&self, shard: u16) -> Range {
        self.outbox.prefix(shard_key(shard))
    }

    pub(crate) fn dead(&self, key: &EffectKey) -> Key {
        self.dead.key(key.bytes())
    }
}

/// The longest id of an execution, in bytes.
const LONGEST_ID: usize = 512;

/// Names an after-effect: the entity, its rev after the transition, and the number among the transition's
/// after-effects.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EffectKey {
    pub(crate) entity: EntityId,
    pub(crate) rev: Rev,
    pub(crate) number: u16,
}

impl EffectKey {
    fn bytes(&self) -> Vec<u8> {
        let mut key = Vec::with_capacity(self.entity.len() + 14);
        write_text(&mut key, &self.entity);
        key.extend_from_slice(&self.rev.0.to_be_bytes());
        key.extend_from_slice(&self.number.to_be_bytes());
        key
    }

    fn read(bytes: &[u8]) -> Option<EffectKey> {
        let (entity, rest) = read_text(bytes)?;
        let (rev, number) = rest.split_first_chunk::<8>()?;
        let number = u16::from_be_bytes(number.try_into().ok()?);
        Some(EffectKey { entity: entity.into(), rev: Rev(u64::from_be_bytes(*rev)), number })
    }

    /// Reads a key of the outbox.
    pub(crate) fn read_outbox(key: &Key) -> Option<EffectKey> {
        EffectKey::read(key.bytes().get(2..)?)
    }

    /// Reads a key of the dead letters.
    pub(crate) fn read_dead(key: &Key) -> Option<EffectKey> {
        EffectKey::read(key.bytes())
    }

    /// The key as receivers see it. It is the same for each delivery, and no other after-effect has it.
    pub(crate) fn text(&self) -> String {
        format!("{}:{}:{}", self.entity, self.rev.0, self.number)
    }

    /// The id of the execution to start. The entity's id is hashed if the result would be too long for an execution.
    pub(crate) fn execution(&self, effect: &str) -> ExecutionId {
        let id = format!("{effect}:{}", self.text());
        if id.len() <= LONGEST_ID {
            return id.into();
        }
        let entity = xxhash_rust::xxh3::xxh3_128(self.entity.as_bytes());
        format!("{effect}:#{entity:032x}:{}:{}", self.rev.0, self.number).into()
    }

    /// Reads what [`EffectKey::text`] has written.
    pub(crate) fn parse(text: &str) -> Option<EffectKey> {
        let (rest, number) = text.rsplit_once(':')?;
        let (entity, rev) = rest.rsplit_once(':')?;
        Some(EffectKey { entity: entity.into(), rev: Rev(rev.parse().ok()?), number: number.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_after_effects_are_read_as_they_were_written() {
        for entity in ["a", "in:voice:7", "\0", "ü"] {
            let key = EffectKey { entity: entity.into(), rev: Rev(u64::MAX), number: 3 };
            assert_eq!(EffectKey::read(&key.bytes()), Some(key.clone()));
            assert_eq!(EffectKey::parse(&key.text()), Some(key));
        }
        assert_eq!(EffectKey::parse("a:b:c"), None);
    }
}
