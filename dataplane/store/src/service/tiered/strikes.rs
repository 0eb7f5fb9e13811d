//! What a put has the SSD strike out: what it replaces, known or not.

use kvplane_proto::{Digest, Status};
use kvplane_tier::Tier;

use super::super::objects::CommittedObject;
use super::{REMOVALS_MOST, Service};

impl Service {
    /// Whether the SSD can strike out what a put, `replacing` or not, may have to have struck out.
    pub(in crate::service) fn may_strike(&self, digest: Digest, replacing: bool) -> Result<(), Status> {
        let Some(tiered) = &self.tiered else { return Ok(()) };
        let strikes = replacing || may_stand(&tiered.tier, digest);
        let is_full = strikes && tiered.removals.len() >= REMOVALS_MOST;
        let takes_none = tiered.tier.degraded().is_some();
        // What it takes no tombstone for has to be known first.
        let is_late = !replacing && takes_none && tiered.tier.is_recovering();
        if is_full || is_late {
            return Err(Status::Busy);
        }
        // What is there can be neither struck out nor replaced: the put is refused before memory gives up what it has.
        if replacing && takes_none && tiered.tier.may_have(digest) { Err(Status::NoSpace) } else { Ok(()) }
    }

    /// Whether the SSD may have, or bring back later, what an object replaces: perhaps without that anybody knew, as
    /// while it recovers.
    pub(super) fn must_strike(&self, made: &CommittedObject) -> bool {
        let Some(tiered) = &self.tiered else { return false };
        match tiered.tier.degraded() {
            // What is hidden, and what came to light while the put was under way, is struck out too.
            None => made.replaces || may_stand(&tiered.tier, made.digest),
            // One that takes no writes strikes nothing out: what it has, or may have, stands in the way.
            Some(_) => made.replaces && tiered.tier.may_have(made.digest),
        }
    }
}

/// True where the SSD has a record of this digest, shown or hidden, or may bring one to light.
fn may_stand(tier: &Tier, digest: Digest) -> bool {
    tier.may_find(digest) || tier.locate(digest).is_some()
}
