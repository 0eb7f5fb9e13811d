//! Numbers of a node's incarnations. They increase from incarnation to incarnation whatever the host's clock does: an
//! object put in a later incarnation has a greater version than all objects before, and of two incarnations the ended
//! one is known.
//!
//! The host's wall clock gives the number of a first incarnation. Later ones are above the last one that the control
//! plane knows, even if the clock was set back meanwhile.
//!
//! Each process begins a new line of incarnations ([`Incarnation::line_from`]), except one that takes the memory of a
//! running process over: it continues the line of that process, so that other nodes know that it has its replicas.

use std::time::{SystemTime, UNIX_EPOCH};

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::message::{GetIncarnation, GetLastMember};

use crate::error::Error;
use crate::link::ControlLink;

/// Minimum distance between the numbers of two processes of a node. The versions of a process's objects count up from
/// its number, by one each: no process counts that far.
const STEP: u64 = 1 << 40;

/// Incarnation that begins with a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct BegunIncarnation {
    /// Its number, and that from which its versions count.
    pub(super) number: u64,
    /// Incarnation that it is instead, if it continues the one that handed its memory over.
    pub(super) continues: Option<Incarnation>,
    /// Incarnation of the node that was a member last, if that is wanted, and the control plane knows one.
    pub(super) last_member: Option<Incarnation>,
}

/// Returns the incarnation that begins with this process; the last member only if it is wanted.
///
/// # Errors
/// When the control plane does not answer, or refuses.
pub(super) fn begin(link: &ControlLink, node: NodeId, wants_last_member: bool) -> Result<BegunIncarnation, Error> {
    let last = link.call(GetIncarnation { node: node.0 })?.incarnation;
    let last_member = if wants_last_member { last_member(link, node)? } else { None };
    Ok(BegunIncarnation { number: after(last, clock_ns()), continues: None, last_member })
}

/// Returns the incarnation of a node that was a member last, if the control plane knows one.
///
/// # Errors
/// When the control plane does not answer, or refuses.
pub(super) fn last_member(link: &ControlLink, node: NodeId) -> Result<Option<Incarnation>, Error> {
    let last = match link.call(GetLastMember { node: node.0 }) {
        Ok(last) => last.incarnation,
        // A control plane of an earlier version does not know this call: then a start that was refused counts, too.
        Err(_) => link.call(GetIncarnation { node: node.0 })?.incarnation,
    };
    Ok((last > 0).then_some(Incarnation(last)))
}

/// Returns the number of an incarnation that begins in a running process without its objects: its versions continue,
/// too.
pub(super) fn next(present: u64) -> u64 {
    Incarnation::line_from(clock_ns().max(versions_of(present).saturating_add(1))).0
}

/// Returns the number that is above the versions of an incarnation's process, and of those before it.
const fn after(last: u64, clock_ns: u64) -> u64 {
    let least = versions_of(last).saturating_add(STEP);
    Incarnation::line_from(if last > 0 && clock_ns < least { least } else { clock_ns }).0
}

/// Returns the number from which the versions of an incarnation's process count, if the clock did not show more: each
/// process of a line counts from one step further.
const fn versions_of(incarnation: u64) -> u64 {
    let number = Incarnation(incarnation);
    let handovers = number.handovers();
    (incarnation - handovers).saturating_add(handovers.saturating_mul(STEP))
}

fn clock_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // 0 is no incarnation.
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_exceeds_the_last_one_whatever_the_clock_shows() {
        let clock_ns = 1_764_000_000_000_000_000;
        let clock_ns = Incarnation::line_from(clock_ns).0;
        assert_eq!(after(0, clock_ns), clock_ns, "nothing is known of it");
        assert_eq!(after(clock_ns - 2 * STEP, clock_ns), clock_ns);
        // A quick restart, a clock that was set back by two hours, and a clock of 1970.
        for shown_ns in [clock_ns + 5_000_000_000, clock_ns - 7_200_000_000_000, 1] {
            assert_eq!(after(clock_ns, shown_ns), clock_ns + STEP);
            assert_eq!(after(clock_ns + 3, shown_ns), clock_ns + 4 * STEP, "three processes had it before");
        }
        assert!(next(u64::MAX / 2) > u64::MAX / 2);
        let line = Incarnation::line_from(u64::MAX / 2).0;
        assert!(next(line + 2) > line + 2 * STEP);
    }
}
