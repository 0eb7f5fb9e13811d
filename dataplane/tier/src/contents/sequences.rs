//! The numbers that order everything: records and generations of segments share one counter, and the incarnation of the
//! shard stands above it, so no start repeats a number of an earlier one.

/// Sequences of one incarnation of the shard, in bits: the incarnation stands above them.
const SEQUENCE_BITS: u32 = 40;
/// Incarnations that can be told apart.
pub(crate) const INCARNATIONS_MOST: u64 = 1 << (64 - SEQUENCE_BITS);

/// The incarnation in which a sequence or a generation was given out.
pub(crate) const fn incarnation_of(sequence: u64) -> u64 {
    sequence >> SEQUENCE_BITS
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    incarnation: u64,
    next: u64,
}

impl Sequences {
    /// How often the device was opened, this time too.
    pub(crate) const fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The superblock says which incarnation this is.
    pub(crate) const fn claim(&mut self, incarnation: u64) {
        self.incarnation = incarnation;
    }

    /// Sequences are given out from now on, all greater than `newest`, which is on the device.
    pub(crate) fn begin_above(&mut self, newest: u64) {
        self.incarnation = self.incarnation.max(incarnation_of(newest) + 1);
        self.begin();
    }

    /// Sequences are given out from now on.
    pub(crate) const fn begin(&mut self) {
        self.next = self.floor() + 1;
    }

    /// Less than every sequence of this incarnation, and more than those of all before.
    pub(crate) const fn floor(&self) -> u64 {
        self.incarnation << SEQUENCE_BITS
    }

    pub(crate) const fn take(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// What [`Self::take`] gives next.
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
