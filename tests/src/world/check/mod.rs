//! The rules of the world, each small and in its own file, and what a broken one looks like.
//!
//! * [`shadow`]: which put made which version of which object, and the bytes that it must have.
//! * [`removal`]: what may not be read any more.
//! * [`segments`]: what must be in the ranges of segments that were written.
//! * [`ledger`]: which ranges of a pool are being written or read, so that none is both.
//! * [`memory`]: the callers' buffers: lent or free, and untouched while free.
//! * [`epochs`]: epochs never go back, and one epoch has one map.
//!
//! That batches complete once and in time, and that everything works again when faults have stopped, is checked where
//! batches are submitted and where a run ends.

pub(crate) mod epochs;
pub(crate) mod handles;
pub(crate) mod ledger;
pub(crate) mod memory;
pub(crate) mod removal;
pub(crate) mod segments;
pub(crate) mod shadow;

/// A rule of the world.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    /// What a get returns is what the put of its version wrote.
    Bytes,
    /// What becomes visible is what one put wrote, once for each time that it was sent.
    Commit,
    /// What was removed is not read.
    Removed,
    /// What was acknowledged as durable is there after every crash.
    Durable,
    /// What two owners were said to have is there when one of them has died.
    Lost,
    /// Versions of a shard grow, also over its incarnations.
    Version,
    /// A range of a pool is read or written, never both, and by one writer.
    Ledger,
    /// A caller's buffer is touched only while it is lent.
    Memory,
    /// A batch completes once, with as many results as requests, each of a kind that fits.
    Batch,
    /// A batch is complete soon after its deadline.
    Deadline,
    /// Epochs never go back and are never reused.
    Epoch,
    /// When all is well again, everything works.
    Liveness,
    /// When all is quiet, nothing is held.
    Leak,
    /// Who has a ticket that was made just now is let in, and the ticket time never goes back.
    Tickets,
    /// Honest peers never break the protocol.
    Protocol,
    /// The code under test asserted something that did not hold.
    Panic,
}

/// A broken rule.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// How.
    pub what: String,
}

/// The outcome of a check.
pub(crate) type CheckResult = Result<(), Violation>;

pub(crate) const fn broken(rule: Rule, what: String) -> Violation {
    Violation { rule, what }
}
