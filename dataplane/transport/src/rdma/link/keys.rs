//! Segment keys of a link: keys of the peer's segments, and which of our keys the peer has.

use std::collections::HashSet;
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId, Status};

use crate::rdma::foreign_peer::ForeignPeer;
use crate::rdma::mixing::MixedMap;
use crate::rdma::wire::SegmentKey;

/// State of the key of a peer's segment.
#[derive(Clone, Copy, Debug)]
enum KeyState {
    /// The key was requested from the peer.
    Asked,
    Known(SegmentKey),
}

/// Source of segment keys.
#[derive(Clone)]
pub(in crate::rdma) enum KeySource {
    /// The peer, by a message for each key.
    Messages,
    /// The description of a stock engine's memory, for the device at this position.
    Description(Arc<ForeignPeer>, usize),
    /// None: the peer is a stock engine that connected to us, and its memory is not accessed.
    Nowhere,
}

/// Result of a key lookup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeyLookup {
    /// Known; it is now the last key.
    Known,
    /// Requested; the reply is outstanding.
    Awaited,
    /// Unknown: the link has to request it from the peer.
    Missing,
}

/// Segment keys of a link.
pub(in crate::rdma) struct SegmentKeys {
    source: KeySource,
    /// Key that was used last: consecutive copies mostly access the same segment.
    last: Option<(SegmentId, SegmentKey)>,
    keys: MixedMap<SegmentId, KeyState>,
    /// Our segments whose keys the peer has.
    told: HashSet<SegmentId>,
}

impl SegmentKeys {
    pub(super) fn new() -> Self {
        Self { source: KeySource::Messages, last: None, keys: MixedMap::default(), told: HashSet::new() }
    }

    /// Sets the source of keys, before the first lookup.
    pub(in crate::rdma) fn set_source(&mut self, source: KeySource) {
        self.source = source;
    }

    /// Returns the segment that was used last, and its key.
    #[inline]
    pub(super) const fn last(&self) -> Option<&(SegmentId, SegmentKey)> {
        self.last.as_ref()
    }

    /// Makes the key of a segment the last one. On [`KeyLookup::Missing`] the caller requests it from the peer.
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
            // Drops the ids of segments that are long gone; valid keys are requested again.
            self.keys.clear();
        }
        self.keys.insert(segment, KeyState::Asked);
        KeyLookup::Missing
    }

    /// Stores the peer's reply about a segment's key, or the notification that the segment is gone.
    pub(in crate::rdma) fn learn(&mut self, segment: SegmentId, key: SegmentKey) {
        // A key that was not requested is ignored.
        if let Some(state) = self.keys.get_mut(&segment) {
            *state = KeyState::Known(key);
            self.last = None;
        }
    }

    /// Records that the peer gets the key of our segment.
    pub(super) fn tell(&mut self, segment: SegmentId) {
        self.told.insert(segment);
    }

    /// Removes one of our segments. Returns true if the peer has its key.
    pub(super) fn untell(&mut self, segment: SegmentId) -> bool {
        self.told.remove(&segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_requested_once_and_unrequested_keys_are_ignored() {
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
    fn memory_of_a_connecting_stock_engine_is_not_accessed() {
        let mut keys = SegmentKeys::new();
        keys.set_source(KeySource::Nowhere);
        let segment = SegmentId { index: 0, generation: 0 };
        assert_eq!(keys.look_up(segment), KeyLookup::Known);
        assert_eq!(keys.last().map(|(_, key)| key.status), Some(Status::Stale));
    }
}
