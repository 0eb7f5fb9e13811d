//! Rounds of a host: when the clock is read, and when the poller is called.
//!
//! A host that spins makes a round in less time than either takes. So the clock is read every few rounds while there is
//! no input, and with the first input of a round; the poller is called every few rounds while connections are tried one
//! by one. Decisions depend on counts alone; the clock's times are arguments.

/// Empty rounds after which the clock is read again. Input reads it in any case.
const ROUNDS_PER_CLOCK: u32 = 16;
/// Bytes copied or moved after which the clock is read again, whatever other work there is.
pub(crate) const BYTES_PER_CLOCK: u64 = 32 << 10;
/// Rounds after which the poller is called although there are connections to try without it, and although there is
/// enough other work.
const ROUNDS_PER_LOOK: u32 = 16;
const BUSY_ROUNDS_PER_LOOK: u32 = 12;
/// Bytes moved in a round from which on a call of the poller costs little in comparison.
const LONG_ROUND_BYTES: usize = 64 << 10;

/// Time of the current round, and number of rounds since the clock and the poller were used.
#[derive(Debug)]
pub(crate) struct Rounds {
    now_ns: u64,
    since_clock: u32,
    since_look: u32,
    /// Consecutive rounds without progress, since the last park.
    idle: u32,
    /// True if the last round moved many bytes.
    is_long: bool,
    /// Bytes that connections had moved in this round when the clock was read.
    clocked_bytes: usize,
    /// Bytes that were copied since the clock was read.
    copied_bytes: u64,
}

impl Rounds {
    /// Creates the state before the first round, at this time.
    pub(crate) const fn new(now_ns: u64) -> Self {
        Self { now_ns, since_clock: 0, since_look: 0, idle: 0, is_long: false, clocked_bytes: 0, copied_bytes: 0 }
    }

    /// Returns the time of the last clock read.
    pub(crate) const fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Returns true if a call of the poller is due in this round. `tries` returns true if there are connections to try
    /// without it.
    ///
    /// The poller is not called right after a round with progress: a host that parks calls it then anyway, and one that
    /// spins is back at once.
    pub(crate) fn takes_look(&mut self, tries: impl FnOnce() -> bool) -> bool {
        self.since_look += 1;
        let due = if self.idle == 0 {
            self.is_long || self.since_look >= BUSY_ROUNDS_PER_LOOK
        } else {
            !tries() || self.since_look >= ROUNDS_PER_LOOK
        };
        if due {
            self.since_look = 0;
        }
        due
    }

    /// Begins a round. Returns true if the clock is to be read: there is input, or it was not read for long.
    pub(crate) const fn begin(&mut self, something_came: bool) -> bool {
        let due = something_came || self.since_clock >= ROUNDS_PER_CLOCK;
        self.since_clock = if due { 1 } else { self.since_clock + 1 };
        self.clocked_bytes = 0;
        due
    }

    /// Stores a time that was read; returns the previous one.
    pub(crate) const fn read(&mut self, now_ns: u64) -> u64 {
        core::mem::replace(&mut self.now_ns, now_ns)
    }

    /// Returns the arrival time of input: the clock is read for the first input of a round, and again after many bytes.
    /// With the time of the last empty round, a request could appear to be answered before it was sent, and any rail
    /// would appear fast.
    pub(crate) fn arrival_ns(&mut self, moved_bytes: usize, clock: impl FnOnce() -> u64) -> u64 {
        if self.since_clock > 1 || moved_bytes - self.clocked_bytes >= BYTES_PER_CLOCK as usize {
            self.now_ns = clock();
            (self.since_clock, self.clocked_bytes) = (1, moved_bytes);
        }
        self.now_ns
    }

    /// Returns the end time of a copy of `bytes` that was made just now. Consecutive copies (`more`) share a clock
    /// read, up to what takes a few microseconds: the time of the last of them is exact, and so is that of a single
    /// one.
    pub(crate) fn copied_ns(&mut self, bytes: u64, more: bool, clock: impl FnOnce() -> u64) -> u64 {
        self.copied_bytes += bytes;
        if !more || self.copied_bytes >= BYTES_PER_CLOCK {
            self.copied_bytes = 0;
            self.now_ns = clock();
        }
        self.now_ns
    }

    /// Ends a round in which connections moved `moved_bytes`.
    pub(crate) const fn end(&mut self, progress: bool, moved_bytes: usize) {
        self.is_long = moved_bytes >= LONG_ROUND_BYTES;
        self.idle = if progress { 0 } else { self.idle.saturating_add(1) };
    }

    /// Ends a park: the next round reads the clock.
    pub(crate) const fn wake(&mut self) {
        (self.since_clock, self.since_look, self.idle) = (ROUNDS_PER_CLOCK, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_read_on_input_and_every_few_rounds() {
        let mut rounds = Rounds::new(5);
        assert!(rounds.begin(true));
        let empty = (0..100).filter(|_| rounds.begin(false)).count();
        assert_eq!(empty, 100 / ROUNDS_PER_CLOCK as usize);
        rounds.wake();
        assert!(rounds.begin(false), "after a park");
        assert_eq!((rounds.read(9), rounds.now_ns()), (5, 9));
    }

    #[test]
    fn the_first_input_of_a_round_and_many_bytes_read_the_clock() {
        let mut rounds = Rounds::new(0);
        rounds.begin(true);
        rounds.begin(false);
        assert_eq!(rounds.arrival_ns(10, || 7), 7, "the clock is of the round before");
        assert_eq!(rounds.arrival_ns(20, || unreachable!("it was read in this round")), 7);
        assert_eq!(rounds.arrival_ns(10 + BYTES_PER_CLOCK as usize, || 8), 8);
    }

    #[test]
    fn consecutive_copies_share_a_clock_read() {
        let mut rounds = Rounds::new(1);
        assert_eq!(rounds.copied_ns(100, true, || unreachable!("more copies follow")), 1);
        assert_eq!(rounds.copied_ns(BYTES_PER_CLOCK, true, || 2), 2);
        assert_eq!(rounds.copied_ns(1, false, || 3), 3, "the last is exact");
    }

    #[test]
    fn the_poller_is_called_less_often_with_connections_to_try() {
        let looks = |progress: bool, tries: bool, moved_bytes: usize| {
            let mut rounds = Rounds::new(0);
            rounds.end(progress, moved_bytes);
            (0..48).filter(|_| rounds.takes_look(|| tries)).count()
        };
        assert_eq!(looks(false, false, 0), 48);
        assert_eq!(looks(false, true, 0), 48 / ROUNDS_PER_LOOK as usize);
        assert_eq!(looks(true, true, 0), 48 / BUSY_ROUNDS_PER_LOOK as usize);
        assert_eq!(looks(true, true, LONG_ROUND_BYTES), 48);
    }
}
