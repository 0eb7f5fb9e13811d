//! What a link knows of the peer's segments, and the peer of ours.

use std::collections::HashSet;
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId, Status};

use crate::rdma::foreign_peer::ForeignPeer;
use crate::rdma::mixing::MixedMap;
use crate::rdma::wire::SegmentKey;

/// What we know of a peer's segment.
#[derive(Clone, Copy, Debug)]
enum KeyState {
    /// The question is under way.
    Asked,
    Known(SegmentKey),
}

/// Where keys come from.
#[derive(Clone)]
pub(in crate::rdma) enum KeySource {
    /// From the peer, by a message for each.
    Messages,
    /// A stock engine has described its memory; it is reached on this device of its, by position.
    Description(Arc<ForeignPeer>, usize),
    /// Nothing of the peer is reached: a stock engine that asks us.
    Nowhere,
}

/// What came of a look for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyLookup {
    /// It is the last one.
    Known,
    /// The question is on its way.
    Awaited,
    /// The link must ask the peer.
    Missing,
}

/// The keys of segments.
pub(in crate::rdma) struct SegmentKeys {
    source: KeySource,
    /// The one that was used last: most copies in a row are of one segment.
    last: Option<(SegmentId, SegmentKey)>,
    keys: MixedMap<SegmentId, KeyState>,
    /// Segments of ours whose keys the peer has.
    told: HashSet<SegmentId>,
}

impl SegmentKeys {
    pub(super) fn new() -> Self {
        Self { source: KeySource::Messages, last: None, keys: MixedMap::default(), told: HashSet::new() }
    }

    /// Says where keys come from. None was looked for yet.
    pub(in crate::rdma) fn set_source(&mut self, source: KeySource) {
        self.source = source;
    }

    /// The segment that was used last, and its key.
    #[inline]
    pub(super) const fn last(&self) -> Option<&(SegmentId, SegmentKey)> {
        self.last.as_ref()
    }

    /// Makes the key of a segment the last one. Where the answer is that it is missing, the peer is asked now.
    #[inline]
    pub(super) fn look_up(&mut self, segment: SegmentId) -> KeyLookup {
        if self.last.as_ref().is_some_and(|(last, _)| *last == segment) { KeyLookup::Known } else { self.find(segment) }
    }

    #[cold]
    fn find(&mut self, segment: SegmentId) -> KeyLookup {
        let key = match &self.source {
            KeySource::Description(peer, device) => Some(peer.key(segment, *device)),
            KeySource::Nowhere => Some(SegmentKey::refused(Status::Stale)),
            KeySource::Messages => match self.keys.get(&segment) {
                Some(KeyState::Known(key)) => Some(*key),
                Some(KeyState::Asked) => return KeyLookup::Awaited,
                None => None,
            },
        };
        if let Some(key) = key {
            self.last = Some((segment, key));
            return KeyLookup::Known;
        }
        if self.keys.len() >= Limits::SEGMENTS {
            // Ids of segments that are long gone: what is still true is found out again.
            self.keys.clear();
        }
        self.keys.insert(segment, KeyState::Asked);
        KeyLookup::Missing
    }

    /// The peer has said what reaches a segment, or that nothing does any more.
    pub(in crate::rdma) fn learn(&mut self, segment: SegmentId, key: SegmentKey) {
        // A key without a question is of no use.
        if let Some(state) = self.keys.get_mut(&segment) {
            *state = KeyState::Known(key);
            self.last = None;
        }
    }

    /// The peer gets the key of a segment of ours.
    pub(super) fn tell(&mut self, segment: SegmentId) {
        self.told.insert(segment);
    }

    /// A segment of ours is gone. Whether the peer has its key.
    pub(super) fn untell(&mut self, segment: SegmentId) -> bool {
        self.told.remove(&segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_asked_for_once_and_what_nobody_asked_for_is_not_learned() {
        let [one, other] = [1, 2].map(|index| SegmentId { index, generation: 1 });
        let key = SegmentKey { status: Status::Ok, writable: true, key: 7, address: 4096, bytes: 4096 };
        let mut keys = SegmentKeys::new();
        assert_eq!([keys.look_up(one), keys.look_up(one)], [KeyLookup::Missing, KeyLookup::Awaited]);
        keys.learn(other, key);
        keys.learn(one, key);
        assert_eq!(keys.look_up(one), KeyLookup::Known);
        assert_eq!(keys.last(), Some(&(one, key)));
        assert_eq!(keys.look_up(other), KeyLookup::Missing);
        assert_eq!(keys.look_up(one), KeyLookup::Known, "it is known still");
        keys.learn(one, SegmentKey::refused(Status::Stale));
        assert_eq!(keys.last(), None);
        keys.tell(one);
        assert_eq!([keys.untell(one), keys.untell(one), keys.untell(other)], [true, false, false]);
    }

    #[test]
    fn nothing_is_reached_of_a_stock_engine_that_asks_us() {
        let mut keys = SegmentKeys::new();
        keys.set_source(KeySource::Nowhere);
        let segment = SegmentId { index: 0, generation: 0 };
        assert_eq!(keys.look_up(segment), KeyLookup::Known);
        assert_eq!(keys.last().map(|(_, key)| key.status), Some(Status::Stale));
    }
}
