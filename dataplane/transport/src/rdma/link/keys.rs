//! Segment keys of a link: keys of the peer's segments, and which of our keys the peer has.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use kvplane_proto::{Limits, SegmentId, Status};

use crate::rdma::foreign_peer::ForeignPeer;
use crate::rdma::mixing::MixedMap;
use crate::rdma::wire::SegmentKey;

/// State of the key of a peer's segment.
#[derive(Clone, Debug)]
enum KeyState {
    /// The key was requested from the peer.
    Requested,
    /// Key of the whole segment, or the reason why there is none.
    Known(SegmentKey),
    /// Keys of parts, by their starts; true if another one was requested.
    Parts(BTreeMap<u64, SegmentKey>, bool),
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

    /// Makes the key for this offset of a segment the last one; for an offset beyond the segment, any of its keys. On
    /// [`KeyLookup::Missing`] the caller requests it from the peer.
    #[inline]
    pub(super) fn look_up(&mut self, segment: SegmentId, offset: u64) -> KeyLookup {
        let is_last = |(last, key): &(SegmentId, SegmentKey)| *last == segment && key.is_of(offset);
        if self.last.as_ref().is_some_and(is_last) { KeyLookup::Known } else { self.find(segment, offset) }
    }

    #[cold]
    fn find(&mut self, segment: SegmentId, offset: u64) -> KeyLookup {
        let key = match &self.source {
            KeySource::Description(peer, device) => Some(peer.key(segment, *device)),
            KeySource::Nowhere => Some(SegmentKey::refused(Status::Stale)),
            KeySource::Messages => match self.keys.get_mut(&segment) {
                Some(KeyState::Known(key)) => Some(*key),
                Some(KeyState::Requested) => return KeyLookup::Awaited,
                Some(KeyState::Parts(parts, is_requested)) => {
                    let before = parts.range(..=offset).next_back().map(|(_, key)| *key);
                    let key = before.or_else(|| parts.values().next().copied()).filter(|key| key.is_of(offset));
                    if key.is_none() {
                        return if std::mem::replace(is_requested, true) {
                            KeyLookup::Awaited
                        } else {
                            KeyLookup::Missing
                        };
                    }
                    key
                }
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
        self.keys.insert(segment, KeyState::Requested);
        KeyLookup::Missing
    }

    /// Stores the peer's reply about a segment's key, or the notification that the segment is gone.
    pub(in crate::rdma) fn learn(&mut self, segment: SegmentId, key: SegmentKey) {
        // A key that was not requested is ignored.
        let Some(state) = self.keys.get_mut(&segment) else { return };
        self.last = None;
        match state {
            KeyState::Parts(parts, is_requested) if key.is_part() => {
                parts.insert(key.start, key);
                *is_requested = false;
            }
            _ if key.is_part() => *state = KeyState::Parts(BTreeMap::from([(key.start, key)]), false),
            _ => *state = KeyState::Known(key),
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
        let key = SegmentKey::whole(Status::Ok, 7, 4096, 4096);
        let mut keys = SegmentKeys::new();
        assert_eq!([keys.look_up(one, 0), keys.look_up(one, 9)], [KeyLookup::Missing, KeyLookup::Awaited]);
        keys.learn(other, key);
        keys.learn(one, key);
        assert_eq!(keys.look_up(one, 5000), KeyLookup::Known);
        assert_eq!(keys.last(), Some(&(one, key)));
        assert_eq!(keys.look_up(other, 0), KeyLookup::Missing);
        assert_eq!(keys.look_up(one, 0), KeyLookup::Known, "it is known still");
        keys.learn(one, SegmentKey::refused(Status::Stale));
        assert_eq!(keys.last(), None);
        keys.tell(one);
        assert_eq!([keys.untell(one), keys.untell(one), keys.untell(other)], [true, false, false]);
    }

    #[test]
    fn keys_of_parts_are_requested_one_by_one() {
        let segment = SegmentId { index: 1, generation: 1 };
        let part = |start, end| SegmentKey { start, end, ..SegmentKey::whole(Status::Ok, start as u32, 1 << 20, 300) };
        let mut keys = SegmentKeys::new();
        assert_eq!(keys.look_up(segment, 150), KeyLookup::Missing);
        keys.learn(segment, part(100, 200));
        assert_eq!([keys.look_up(segment, 100), keys.look_up(segment, 199)], [KeyLookup::Known; 2]);
        assert_eq!([keys.look_up(segment, 99), keys.look_up(segment, 200)], [KeyLookup::Missing, KeyLookup::Awaited]);
        keys.learn(segment, part(0, 100));
        assert_eq!((keys.look_up(segment, 99), keys.last()), (KeyLookup::Known, Some(&(segment, part(0, 100)))));
        assert_eq!(keys.look_up(segment, 200), KeyLookup::Missing);
        keys.learn(segment, part(200, 300));
        assert_eq!((keys.look_up(segment, 100), keys.last()), (KeyLookup::Known, Some(&(segment, part(100, 200)))));
        // The caller finds out by any key that an offset is beyond the segment.
        assert_eq!(keys.look_up(segment, 300), KeyLookup::Known);
        keys.learn(segment, SegmentKey::refused(Status::Stale));
        assert_eq!((keys.look_up(segment, 0), keys.last().unwrap().1.status), (KeyLookup::Known, Status::Stale));
    }

    #[test]
    fn memory_of_a_connecting_stock_engine_is_not_accessed() {
        let mut keys = SegmentKeys::new();
        keys.set_source(KeySource::Nowhere);
        let segment = SegmentId { index: 0, generation: 0 };
        assert_eq!(keys.look_up(segment, 0), KeyLookup::Known);
        assert_eq!(keys.last().map(|(_, key)| key.status), Some(Status::Stale));
    }
}
