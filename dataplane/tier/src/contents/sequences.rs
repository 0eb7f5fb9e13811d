//! Sequence numbers, which order everything: records and generations of segments share one counter, and the incarnation
//! of the shard is in the bits above it, so no start repeats a number of an earlier one.

/// Bits of a sequence below those of the incarnation.
const SEQUENCE_BITS: u32 = 40;
/// Number of incarnations that a sequence can distinguish.
pub(crate) const INCARNATIONS_MOST: u64 = 1 << (64 - SEQUENCE_BITS);

/// Returns the incarnation in which a sequence or a generation was assigned.
pub(crate) const fn incarnation_of(sequence: u64) -> u64 {
    sequence >> SEQUENCE_BITS
}

/// Generator of sequences.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    incarnation: u64,
    next: u64,
}

impl Sequences {
    /// Returns the number of times that the device was opened, this one included.
    pub(crate) const fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Sets the incarnation, as the superblock states it.
    pub(crate) const fn claim(&mut self, incarnation: u64) {
        self.incarnation = incarnation;
    }

    /// Starts assigning sequences, all greater than `newest`, which is on the device.
    pub(crate) fn begin_above(&mut self, newest: u64) {
        self.incarnation = self.incarnation.max(incarnation_of(newest) + 1);
        self.begin();
    }

    /// Starts assigning sequences.
    pub(crate) const fn begin(&mut self) {
        self.next = self.floor() + 1;
    }

    /// Returns a number less than every sequence of this incarnation, and greater than those of all earlier ones.
    pub(crate) const fn floor(&self) -> u64 {
        self.incarnation << SEQUENCE_BITS
    }

    pub(crate) const fn take(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Returns the next sequence that [`Self::take`] will assign.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sequence_of_an_earlier_incarnation_is_given_out_again() {
        let mut sequences = Sequences::default();
        sequences.claim(3);
        sequences.begin();
        let last = (0..10).map(|_| sequences.take()).last().expect("ten");
        assert_eq!((incarnation_of(last), sequences.next()), (3, last + 1));
        let mut later = Sequences::default();
        later.claim(2);
        later.begin_above(last);
        assert_eq!(later.incarnation(), 4, "the superblock was older than what is on the device");
        assert!(last < later.floor() && later.floor() < later.take());
    }
}
