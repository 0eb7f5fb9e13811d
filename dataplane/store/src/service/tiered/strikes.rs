//! What a put has the SSD strike out: what it replaces, known or not.

use kvplane_proto::{Digest, Status};

use super::super::objects::Made;
use super::{REMOVALS_MOST, Service};

impl Service {
    /// Whether there is room for what a put, `replacing` or not, may have the SSD strike out.
    pub(in crate::service) fn may_strike(&self, digest: Digest, replacing: bool) -> Result<(), Status> {
        let Some(tiered) = &self.tiered else { return Ok(()) };
        let strikes = replacing || tiered.tier.may_find(digest);
        let is_full = strikes && tiered.removals.len() >= REMOVALS_MOST;
        // What it takes no tombstone for has to be known first.
        let is_late = !replacing && tiered.tier.degraded().is_some() && tiered.tier.is_recovering();
        if is_full || is_late { Err(Status::Busy) } else { Ok(()) }
    }

    /// Whether the SSD may have, or bring back later, what an object replaces: perhaps without that anybody knew, as
    /// while it recovers.
    pub(super) fn must_strike(&self, made: &Made) -> bool {
        let Some(tiered) = &self.tiered else { return false };
        match tiered.tier.degraded() {
            None => made.replaces || tiered.tier.may_find(made.digest),
            // One that takes no writes strikes nothing out: what it has, or may have, stands in the way.
            Some(_) => made.replaces && tiered.tier.may_have(made.digest),
        }
    }
}
