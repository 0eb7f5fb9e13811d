//! Generations of segments: which of them still count, and what the next header says of those before it.
//!
//! A segment's header says from which generation on segments hold anything that counts. That is true on the device only
//! when the header is durable, so there are three values: what holds now, what the header in preparation says, and what
//! a durable one has said.

use crate::format::FilledNote;

/// The statements of a header in preparation about the segments before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Heritage {
    pub(crate) oldest_live: u64,
    /// The generation of the segment that was opened last in this incarnation.
    pub(crate) previous: u64,
    pub(crate) filled: Option<FilledNote>,
}

/// The generations of a tier's segments.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    /// Segments of lesser generations hold nothing that counts.
    oldest_live: u64,
    /// The value of `oldest_live` that a durable header states.
    durable_oldest_live: u64,
    /// The value of `oldest_live` that the header in preparation states.
    prepared_oldest_live: u64,
    preparing: Option<u32>,
    last_opened: u64,
    /// Contents of the segment that was filled last in this incarnation.
    filled: Option<FilledNote>,
    /// The last tombstone that was appended.
    last_tombstone: u64,
}

impl Generations {
    pub(crate) const fn oldest_live(&self) -> u64 {
        self.oldest_live
    }

    pub(crate) const fn durable_oldest_live(&self) -> u64 {
        self.durable_oldest_live
    }

    pub(crate) const fn is_preparing(&self) -> bool {
        self.preparing.is_some()
    }

    /// Segments of lesser generations than this hold nothing that counts.
    pub(crate) fn raise(&mut self, oldest_live: u64) {
        self.oldest_live = self.oldest_live.max(oldest_live);
    }

    /// All headers were read: what they say is durable.
    pub(crate) const fn headers_read(&mut self) {
        self.durable_oldest_live = self.oldest_live;
    }

    /// The header of a segment is being written: what it says.
    pub(crate) const fn prepare(&mut self, segment: u32) -> Heritage {
        self.preparing = Some(segment);
        self.prepared_oldest_live = self.oldest_live;
        Heritage { oldest_live: self.oldest_live, previous: self.last_opened, filled: self.filled }
    }

    /// The header is durable, or was not written.
    pub(crate) const fn prepared(&mut self, is_durable: bool) {
        self.preparing = None;
        if is_durable {
            self.durable_oldest_live = self.prepared_oldest_live;
        }
    }

    /// A segment of this generation takes records from now on.
    pub(crate) const fn opened(&mut self, generation: u64) {
        self.last_opened = generation;
    }

    /// The open segment takes no more records.
    pub(crate) const fn filled(&mut self, note: FilledNote) {
        self.filled = Some(note);
    }

    /// A tombstone was appended.
    pub(crate) const fn tombstone(&mut self, sequence: u64) {
        self.last_tombstone = sequence;
    }

    /// True where a restart could find what was removed, or what gave way: a tombstone beyond this sequence, which is
    /// durable, or a generation that no durable header gives up.
    pub(crate) const fn is_ahead(&self, durable_sequence: u64) -> bool {
        self.last_tombstone > durable_sequence || self.durable_oldest_live < self.oldest_live
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gave_way_is_given_up_with_a_durable_header() {
        let mut generations = Generations::default();
        generations.raise(5);
        generations.headers_read();
        assert!(!generations.is_ahead(0));
        generations.raise(7);
        generations.raise(6);
        assert_eq!((generations.oldest_live(), generations.durable_oldest_live()), (7, 5));
        generations.opened(9);
        let note = FilledNote { generation: 8, last_tombstone: 3, tombstones: 1 };
        generations.filled(note);
        let heritage = generations.prepare(2);
        assert_eq!(heritage, Heritage { oldest_live: 7, previous: 9, filled: Some(note) });
        assert!(generations.is_preparing() && generations.is_ahead(0));
        generations.raise(8);
        generations.prepared(false);
        assert_eq!(generations.durable_oldest_live(), 5, "its header was not written");
        generations.prepare(2);
        generations.raise(9);
        generations.prepared(true);
        assert_eq!((generations.oldest_live(), generations.durable_oldest_live()), (9, 8), "what the header says");
        assert!(!generations.is_preparing());
    }

    #[test]
    fn a_tombstone_is_ahead_until_it_is_durable() {
        let mut generations = Generations::default();
        generations.tombstone(4);
        assert!(generations.is_ahead(3) && !generations.is_ahead(4));
    }
}
