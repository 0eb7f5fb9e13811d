//! Inquiry for the good bytes of a damaged object: the nodes that may have them are asked one after the other, until
//! one has sent them or none is left. After a round in which one could not be reached, it rests and begins anew.

use kvplane_proto::Status;
use kvplane_proto::map::ShardKey;

use crate::service::fetches::FetchDone;

/// Backoff after no other node could be reached; doubles up to the maximum.
const RETRY_NS: u64 = 100_000_000;
const RETRY_MOST_NS: u64 = 5_000_000_000;

/// Next step of an inquiry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NextSource {
    /// This node is asked.
    Ask(ShardKey),
    /// A request is in flight, or none may be sent now.
    Wait,
    /// A pause begins.
    Rest,
    /// No node has the bytes.
    Nobody,
}

/// Progress of an inquiry.
#[derive(Debug, Default)]
pub(super) struct Inquiry {
    /// Nodes that were asked since the last pause, the last one possibly in flight.
    asked: Vec<ShardKey>,
    is_asking: bool,
    /// True if one of those could not be reached: it may have the object.
    is_uncertain: bool,
    failures: u32,
    retry_ns: u64,
}

impl Inquiry {
    /// Returns true in a pause.
    pub(super) const fn rests(&self) -> bool {
        self.retry_ns > 0
    }

    /// Returns true if the next step can be decided on.
    pub(super) const fn is_due(&self, now_ns: u64) -> bool {
        !self.is_asking && self.retry_ns <= now_ns
    }

    /// Returns the next step, where `sources` may have the bytes; no node is asked unless it `may_ask`.
    pub(super) fn next(&mut self, sources: &[ShardKey], may_ask: bool, now_ns: u64) -> NextSource {
        if !self.is_due(now_ns) {
            return NextSource::Wait;
        }
        self.retry_ns = 0;
        match sources.iter().find(|source| !self.asked.contains(source)) {
            Some(_) if !may_ask => NextSource::Wait,
            Some(source) => {
                self.is_asking = true;
                self.asked.push(*source);
                NextSource::Ask(*source)
            }
            None if self.is_uncertain => {
                self.failures += 1;
                let pause_ns = (RETRY_NS << self.failures.min(10)).min(RETRY_MOST_NS);
                self.retry_ns = now_ns.saturating_add(pause_ns);
                (self.is_uncertain, self.asked) = (false, Vec::new());
                NextSource::Rest
            }
            None => NextSource::Nobody,
        }
    }

    /// Handles a failure of the node that was asked: it has no good bytes, or `has_none` is false and it may have.
    pub(super) const fn failed(&mut self, has_none: bool) {
        self.is_asking = false;
        self.is_uncertain |= !has_none;
    }

    /// Returns the time at which a pause ends.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        (self.rests() && !self.is_asking).then_some(self.retry_ns)
    }
}

/// Returns true if an answer proves that a node has no good bytes: it has others, or none. Otherwise it may have some;
/// also where the bytes did not arrive as they were sent, several times.
pub(super) const fn has_none(done: &FetchDone) -> bool {
    match done {
        FetchDone::Object(..) | FetchDone::Page(_) => true,
        FetchDone::Failed(status) => {
            matches!(status, Status::NotFound | Status::Stale | Status::BufferTooSmall)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    #[test]
    fn all_sources_are_asked_before_it_rests_or_ends() {
        let source = |node| ShardKey { node: NodeId(node), incarnation: Incarnation(1), shard: ShardId(0) };
        let sources = [source(1), source(2)];
        let mut inquiry = Inquiry::default();
        assert_eq!(inquiry.next(&sources, false, 5), NextSource::Wait);
        assert_eq!(inquiry.next(&sources, true, 5), NextSource::Ask(source(1)));
        assert_eq!(inquiry.next(&sources, true, 5), NextSource::Wait, "it was not answered");
        inquiry.failed(has_none(&FetchDone::Failed(Status::Unreachable)));
        assert_eq!(inquiry.next(&sources, true, 5), NextSource::Ask(source(2)));
        inquiry.failed(has_none(&FetchDone::Failed(Status::NotFound)));
        assert_eq!(inquiry.next(&sources, true, 5), NextSource::Rest, "the first may have them");
        assert!(inquiry.rests() && inquiry.poll_timeout() == Some(5 + 2 * RETRY_NS));
        let now_ns = 5 + 2 * RETRY_NS;
        for number in [1, 2] {
            assert_eq!(inquiry.next(&sources, true, now_ns), NextSource::Ask(source(number)));
            inquiry.failed(has_none(&FetchDone::Object(3, 4)));
        }
        assert_eq!(inquiry.next(&sources, true, now_ns), NextSource::Nobody);
    }
}
