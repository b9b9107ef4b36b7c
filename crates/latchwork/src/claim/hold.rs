//! What this process knows in memory about claims: for which claims an action runs here, and which entities a caller
//! here is about to claim. Both only save work; the store decides.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::claim::claims::ClaimsInner;
use crate::claim::stored::Claim;
use crate::entity::EntityId;
use crate::store::Uuid;

/// A claim whose action runs in this process. Without this value the janitor treats the claim as abandoned.
pub(crate) struct HeldClaim {
    claims: Arc<ClaimsInner>,
    claim: (Uuid, u64),
    is_settled: bool,
}

impl HeldClaim {
    pub(crate) fn new(claims: &Arc<ClaimsInner>, claim: &Claim) -> HeldClaim {
        let claim = (claim.id, claim.token);
        claims.service().held.lock().insert(claim);
        HeldClaim { claims: claims.clone(), claim, is_settled: false }
    }

    /// The claim has ended, and the janitor has nothing to do.
    pub(crate) fn settled(mut self) {
        self.is_settled = true;
    }
}

impl Drop for HeldClaim {
    fn drop(&mut self) {
        self.claims.service().held.lock().remove(&self.claim);
        if !self.is_settled {
            self.claims.nudge.notify_one();
        }
    }
}

/// The turn of one caller in this process to claim an entity. Without turns, all callers of a race would send commits,
/// and only one of them could land. A turn decides nothing: callers in other processes do not see it.
pub(crate) struct ClaimTurn {
    claims: Arc<ClaimsInner>,
    entity: EntityId,
}

impl ClaimTurn {
    /// Takes the turn. If another caller has it, returns the semaphore that is closed at the end of that turn.
    pub(crate) fn take(claims: &Arc<ClaimsInner>, entity: &EntityId) -> Result<ClaimTurn, Arc<Semaphore>> {
        match claims.claiming.lock().entry(entity.clone()) {
            Entry::Occupied(other) => Err(other.get().clone()),
            Entry::Vacant(free) => {
                free.insert(Arc::new(Semaphore::new(0)));
                Ok(ClaimTurn { claims: claims.clone(), entity: entity.clone() })
            }
        }
    }
}

impl Drop for ClaimTurn {
    fn drop(&mut self) {
        let turn = self.claims.claiming.lock().remove(&self.entity);
        turn.iter().for_each(|turn| turn.close());
    }
}
