//! Options of a get.

use std::time::Duration;

use kvplane_cluster::p2p::{Interval, ShardSet};

use crate::p2p::config::USUAL;
use crate::p2p::error::P2pError;
use crate::p2p::replica::Ranks;

/// Progress of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Shard that has just arrived.
    pub shard: u32,
    /// Number of shards present.
    pub have: u32,
    /// Number of requested shards that are missing.
    pub missing: u32,
}

/// Options of a get.
#[derive(Default)]
pub struct GetOptions<'a> {
    /// Shards to fetch, as runs of first shard and count; `None` fetches all.
    pub shards: Option<Vec<Interval>>,
    /// Verify the content of the memory first: shards that match already are not fetched again.
    pub resume: bool,
    /// Rank of this process among several that all fetch the whole object at about the same time; ranks fetch from each
    /// other by a schedule, and whatever the schedule does not deliver the usual way.
    pub ranks: Option<Ranks>,
    /// Deadline of the call. Until then the call waits for shards that no peer holds: their peer may be restarting.
    /// Without one, the call takes at most an hour, and waits 12 s for such a shard. A shard whose origin has wrong
    /// bytes is not waited for.
    pub deadline: Option<Duration>,
    /// Callback for each shard that has arrived and was verified, called by threads of the call.
    pub each: Option<&'a (dyn Fn(Progress) + Sync)>,
}

impl std::fmt::Debug for GetOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GetOptions({:?}, resume {}, {:?})", self.shards, self.resume, self.deadline)
    }
}

impl GetOptions<'_> {
    /// Returns the time that the call may take.
    pub(super) fn limit(&self) -> Duration {
        self.deadline.unwrap_or(USUAL)
    }

    /// Returns the requested shards of an object of so many shards.
    ///
    /// # Errors
    /// When the object has not all of them.
    pub(super) fn wanted(&self, shards: u32) -> Result<ShardSet, P2pError> {
        let all = vec![(0, shards)];
        let found = ShardSet::of(shards, self.shards.as_ref().unwrap_or(&all));
        found.map_err(|(first, count)| P2pError::Shards { first, count, shards })
    }
}
