//! Rules of the World, each in a small file of its own, and violations of them.
//!
//! * [`shadow`]: the put that made each version of each object, and the bytes that it must have.
//! * [`removal`]: versions that may not be read any more.
//! * [`segments`]: expected bytes of written ranges of segments.
//! * [`ledger`]: ranges of a pool that are being written or read, so that none is both.
//! * [`memory`]: the callers' buffers: lent or free, and untouched while free.
//! * [`epochs`]: epochs never go back, and one epoch has one map.
//!
//! [`observe`] feeds them from the frames of each shard, [`puts`] from its commits, [`results`] from completed batches.
//! Single and timely completion of batches, and recovery after the faults have stopped, are checked where batches are
//! submitted and where a run ends.

mod device;
pub(crate) mod epochs;
mod far;
pub(crate) mod handles;
pub(crate) mod ledger;
pub(crate) mod memory;
pub(crate) mod observe;
pub(crate) mod puts;
pub(crate) mod removal;
pub(crate) mod results;
pub(crate) mod segments;
pub(crate) mod shadow;

/// Rule of the World.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    /// A get returns the bytes that the put of its version wrote.
    Bytes,
    /// A visible object consists of the bytes of one put, once for each time that it was sent.
    Commit,
    /// A removed object is not read.
    Removed,
    /// An object acknowledged as durable survives every crash.
    Durable,
    /// An object acknowledged with two replicas survives the death of one of their nodes.
    Lost,
    /// Versions of a shard grow, also over its incarnations.
    Version,
    /// A range of a pool is read or written, never both, and by one writer.
    Ledger,
    /// Kept memory has one process at a time, which serves what a complete image of its own says, and that once.
    Kept,
    /// No tenant has more on SSDs than its quota, one that was removed has nothing, and settings never contradict.
    Quota,
    /// A caller's buffer is touched only while it is lent.
    Memory,
    /// A batch completes once, with as many results as requests, each of a kind that fits.
    Batch,
    /// A batch is complete soon after its deadline.
    Deadline,
    /// Epochs never go back and are never reused.
    Epoch,
    /// After recovery from all faults, everything works.
    Liveness,
    /// At rest, no memory is pinned or reserved.
    Leak,
    /// A client with a ticket that was just issued is admitted, and ticket time never goes back.
    Tickets,
    /// Honest peers never break the protocol.
    Protocol,
    /// The code under test panicked.
    Panic,
}

/// Broken rule.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Rule that was broken.
    pub rule: Rule,
    /// Description of the violation.
    pub what: String,
}

/// Outcome of a check.
pub(crate) type CheckResult = Result<(), Violation>;

pub(crate) const fn broken(rule: Rule, what: String) -> Violation {
    Violation { rule, what }
}
