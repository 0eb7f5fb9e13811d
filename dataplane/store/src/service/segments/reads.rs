//! Replies that are being sent from segments: the peer of each, and the segments that it uses.

use kvplane_proto::ids::SegmentId;

use crate::service::types::{Hold, PeerKey};

/// Lists of segments that are kept for the next frames.
const SPARE_LISTS: usize = 64;

/// Replies that are being sent, to single reads and to gathered ones.
pub(super) struct Reads {
    single: ReplyTable<SegmentId>,
    gathered: ReplyTable<Vec<SegmentId>>,
    spare: Vec<Vec<SegmentId>>,
}

/// Replies of one kind by number, with what each uses.
struct ReplyTable<T> {
    entries: Vec<Option<(PeerKey, T)>>,
    free: Vec<u32>,
}

impl<T> ReplyTable<T> {
    const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    fn start(&mut self, peer: PeerKey, used: T) -> u32 {
        let read = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[read as usize] = Some((peer, used));
        read
    }

    /// Ends a reply, if it uses what `is_it` expects; `None` if there is no such reply.
    fn finish(&mut self, read: u32, is_it: impl FnOnce(&T) -> bool) -> Option<T> {
        let (_, used) = self.entries.get_mut(read as usize)?.take_if(|(_, used)| is_it(used))?;
        self.free.push(read);
        Some(used)
    }

    fn all(&self) -> impl Iterator<Item = &(PeerKey, T)> {
        self.entries.iter().flatten()
    }
}

impl Reads {
    pub(super) const fn new() -> Self {
        Self { single: ReplyTable::new(), gathered: ReplyTable::new(), spare: Vec::new() }
    }

    /// Records the reply to a read of one segment.
    pub(super) fn start(&mut self, peer: PeerKey, segment: SegmentId) -> Hold {
        Hold::Segment { segment, read: self.single.start(peer, segment) }
    }

    /// Ends the reply to a read of one segment.
    ///
    /// # Panics
    /// If there is no such reply.
    pub(super) fn finish(&mut self, segment: SegmentId, read: u32) {
        let used = self.single.finish(read, |used| *used == segment);
        assert!(used.is_some(), "a reply's segment was released twice");
    }

    /// Records the reply to a gathered read.
    pub(super) fn start_gathered(&mut self, peer: PeerKey, segments: Vec<SegmentId>) -> Hold {
        Hold::Segments { read: self.gathered.start(peer, segments) }
    }

    /// Ends the reply to a gathered read and returns the segments that it used.
    ///
    /// # Panics
    /// If there is no such reply.
    pub(super) fn finish_gathered(&mut self, read: u32) -> Vec<SegmentId> {
        self.gathered.finish(read, |_| true).expect("a reply's segments were released twice")
    }

    /// Returns the peers that are being sent bytes of this segment.
    pub(super) fn readers(&self, segment: SegmentId) -> impl Iterator<Item = PeerKey> {
        let single = self.single.all().filter(move |(_, used)| *used == segment).map(|&(peer, _)| peer);
        let gathered = self.gathered.all().filter(move |(_, used)| used.contains(&segment)).map(|&(peer, _)| peer);
        single.chain(gathered)
    }

    /// Returns an empty list for the segments of a gathered request.
    pub(super) fn list(&mut self) -> Vec<SegmentId> {
        self.spare.pop().unwrap_or_default()
    }

    /// Keeps the list of a request that is over for another one.
    pub(super) fn recycle(&mut self, mut list: Vec<SegmentId>) {
        if self.spare.len() < SPARE_LISTS {
            list.clear();
            self.spare.push(list);
        }
    }
}

#[cfg(test)]
impl Reads {
    /// Returns the number of replies to gathered reads.
    pub(super) fn gathered(&self) -> usize {
        self.single.count();
        self.gathered.count()
    }
}

#[cfg(test)]
impl<T> ReplyTable<T> {
    fn count(&self) -> usize {
        assert_eq!(self.entries.len() - self.free.len(), self.all().count());
        self.all().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: [PeerKey; 2] = [PeerKey { index: 1, generation: 1 }, PeerKey { index: 2, generation: 1 }];

    #[test]
    fn a_segment_has_the_readers_whose_replies_are_being_sent() {
        let [one, other] = [1, 2].map(|index| SegmentId { index, generation: 1 });
        let mut reads = Reads::new();
        let Hold::Segment { read: single, .. } = reads.start(PEERS[0], one) else { panic!("a hold of one segment") };
        let Hold::Segments { read } = reads.start_gathered(PEERS[1], vec![other, one]) else { panic!("of several") };
        assert_eq!(reads.readers(one).collect::<Vec<_>>(), PEERS);
        assert_eq!(reads.readers(other).collect::<Vec<_>>(), [PEERS[1]]);
        reads.finish(one, single);
        assert_eq!(reads.finish_gathered(read), [other, one]);
        assert_eq!((reads.readers(one).count(), reads.gathered()), (0, 0));
    }
}
