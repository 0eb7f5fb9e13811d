//! Rounds of a host: when it reads the clock, and when it asks the poller.
//!
//! A host that spins makes a round in less time than either takes. So the clock is read now and then while nothing
//! comes, and with the first thing that comes in a round; the poller is asked every few rounds while connections are
//! tried one by one. What is decided here depends on counts alone; the clock's times are arguments.

/// Empty rounds after which the clock is read again. Where something has come it is read in any case.
const ROUNDS_PER_CLOCK: u32 = 16;
/// Bytes copied or moved after which the clock is read again, whatever else there is to do.
pub(crate) const BYTES_PER_CLOCK: u64 = 32 << 10;
/// Rounds after which the poller is asked although there is something better to look at, and although there is
/// enough to do without asking.
const ROUNDS_PER_LOOK: u32 = 16;
const BUSY_ROUNDS_PER_LOOK: u32 = 12;
/// Bytes moved in a round from which on asking the poller costs nothing in comparison.
const LONG_ROUND_BYTES: usize = 64 << 10;

/// The time of the current round, and how many rounds ago things were done that are not done in each.
#[derive(Debug)]
pub(crate) struct Rounds {
    now_ns: u64,
    since_clock: u32,
    since_look: u32,
    /// Rounds in a row in which nothing happened, since the last park.
    idle: u32,
    /// The last round moved many bytes.
    is_long: bool,
    /// Bytes that connections had moved in this round when the clock was read.
    clocked_bytes: usize,
    /// Bytes that were copied here since the clock was read.
    copied_bytes: u64,
}

impl Rounds {
    /// No round yet, at this time.
    pub(crate) const fn new(now_ns: u64) -> Self {
        Self { now_ns, since_clock: 0, since_look: 0, idle: 0, is_long: false, clocked_bytes: 0, copied_bytes: 0 }
    }

    /// When the clock was read last.
    pub(crate) const fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// True if the poller is due in this round. `tries` says that there are connections to try without it.
    ///
    /// It is not asked right after something was done: a host that parks asks then anyway, and one that spins is back
    /// at once.
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

    /// A round begins. True if the clock is to be read: something has come, or it was not read for long.
    pub(crate) const fn begin(&mut self, something_came: bool) -> bool {
        let due = something_came || self.since_clock >= ROUNDS_PER_CLOCK;
        self.since_clock = if due { 1 } else { self.since_clock + 1 };
        self.clocked_bytes = 0;
        due
    }

    /// The clock was read. When it was read before.
    pub(crate) const fn read(&mut self, now_ns: u64) -> u64 {
        core::mem::replace(&mut self.now_ns, now_ns)
    }

    /// When what is being taken has come: the clock is read for the first thing of a round, and again after many bytes.
    /// By the time of the last empty round a request could be answered before it was sent, and any rail would be fast.
    pub(crate) fn arrival_ns(&mut self, moved_bytes: usize, clock: impl FnOnce() -> u64) -> u64 {
        if self.since_clock > 1 || moved_bytes - self.clocked_bytes >= BYTES_PER_CLOCK as usize {
            self.now_ns = clock();
            (self.since_clock, self.clocked_bytes) = (1, moved_bytes);
        }
        self.now_ns
    }

    /// When a copy of so many bytes, done just now, ended. Several in a row (`more`) share a look at the clock, up to
    /// what takes a few microseconds: the last of them is exact, and so is one alone.
    pub(crate) fn copied_ns(&mut self, bytes: u64, more: bool, clock: impl FnOnce() -> u64) -> u64 {
        self.copied_bytes += bytes;
        if !more || self.copied_bytes >= BYTES_PER_CLOCK {
            self.copied_bytes = 0;
            self.now_ns = clock();
        }
        self.now_ns
    }

    /// A round ends, in which connections moved so many bytes.
    pub(crate) const fn end(&mut self, progress: bool, moved_bytes: usize) {
        self.is_long = moved_bytes >= LONG_ROUND_BYTES;
        self.idle = if progress { 0 } else { self.idle.saturating_add(1) };
    }

    /// A park ends: the next round reads the clock.
    pub(crate) const fn wake(&mut self) {
        (self.since_clock, self.since_look, self.idle) = (ROUNDS_PER_CLOCK, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_read_when_something_comes_and_now_and_then_else() {
        let mut rounds = Rounds::new(5);
        assert!(rounds.begin(true));
        let empty = (0..100).filter(|_| rounds.begin(false)).count();
        assert_eq!(empty, 100 / ROUNDS_PER_CLOCK as usize);
        rounds.wake();
        assert!(rounds.begin(false), "after a park");
        assert_eq!((rounds.read(9), rounds.now_ns()), (5, 9));
    }

    #[test]
    fn what_comes_first_in_a_round_and_after_many_bytes_reads_the_clock() {
        let mut rounds = Rounds::new(0);
        rounds.begin(true);
        rounds.begin(false);
        assert_eq!(rounds.arrival_ns(10, || 7), 7, "the clock is of the round before");
        assert_eq!(rounds.arrival_ns(20, || unreachable!("it was read in this round")), 7);
        assert_eq!(rounds.arrival_ns(10 + BYTES_PER_CLOCK as usize, || 8), 8);
    }

    #[test]
    fn copies_in_a_row_share_a_look_at_the_clock() {
        let mut rounds = Rounds::new(1);
        assert_eq!(rounds.copied_ns(100, true, || unreachable!("more copies follow")), 1);
        assert_eq!(rounds.copied_ns(BYTES_PER_CLOCK, true, || 2), 2);
        assert_eq!(rounds.copied_ns(1, false, || 3), 3, "the last is exact");
    }

    #[test]
    fn the_poller_is_asked_more_rarely_where_there_are_connections_to_try() {
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
