//! Generations of segments: the least one that is live, and what the next segment header states about the segments
//! before it.
//!
//! A segment's header states the least generation whose segments hold live records. That is true on the device only
//! once the header is durable, so there are three values: the current one, the one in the header in preparation, and
//! the one in the latest durable header.

use crate::format::FilledNote;

/// Statements of a header in preparation about the segments before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Heritage {
    pub(crate) oldest_live: u64,
    /// Generation of the segment that was opened last in this incarnation.
    pub(crate) previous: u64,
    pub(crate) filled: Option<FilledNote>,
}

/// Generations of a tier's segments.
#[derive(Debug, Default)]
pub(crate) struct Generations {
    /// Least generation with live records: segments of lesser generations hold none.
    oldest_live: u64,
    /// Value of `oldest_live` in the latest durable header.
    durable_oldest_live: u64,
    /// Value of `oldest_live` in the header in preparation.
    prepared_oldest_live: u64,
    preparing: Option<u32>,
    last_opened: u64,
    /// Note on the segment that was filled last in this incarnation.
    filled: Option<FilledNote>,
    /// Sequence of the last tombstone that was appended.
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

    /// Raises the least generation with live records.
    pub(crate) fn raise(&mut self, oldest_live: u64) {
        self.oldest_live = self.oldest_live.max(oldest_live);
    }

    /// Marks the current value as durable, as all headers were read.
    pub(crate) const fn headers_read(&mut self) {
        self.durable_oldest_live = self.oldest_live;
    }

    /// Begins writing the header of a segment, and returns its statements.
    pub(crate) const fn prepare(&mut self, segment: u32) -> Heritage {
        self.preparing = Some(segment);
        self.prepared_oldest_live = self.oldest_live;
        Heritage { oldest_live: self.oldest_live, previous: self.last_opened, filled: self.filled }
    }

    /// Ends writing the header: it is durable, or was not written.
    pub(crate) const fn prepared(&mut self, is_durable: bool) {
        self.preparing = None;
        if is_durable {
            self.durable_oldest_live = self.prepared_oldest_live;
        }
    }

    /// Records the generation of the segment that takes records from now on.
    pub(crate) const fn opened(&mut self, generation: u64) {
        self.last_opened = generation;
    }

    /// Records the note on the open segment, which takes no more records.
    pub(crate) const fn filled(&mut self, note: FilledNote) {
        self.filled = Some(note);
    }

    /// Records the sequence of an appended tombstone.
    pub(crate) const fn tombstone(&mut self, sequence: u64) {
        self.last_tombstone = sequence;
    }

    /// Returns true if a restart could find removed or reclaimed records: there is a tombstone beyond the durable
    /// sequence given, or a generation whose reclaim no durable header states.
    pub(crate) const fn is_ahead(&self, durable_sequence: u64) -> bool {
        self.last_tombstone > durable_sequence || self.durable_oldest_live < self.oldest_live
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_durable_header_gives_up_reclaimed_generations() {
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
