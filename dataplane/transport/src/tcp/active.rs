//! Recently active connections, which are polled by receiving without asking the kernel's poller first.
//!
//! A host that spins for the answer of one or two peers gets it soonest by receiving repeatedly. With more peers one
//! call of the poller is cheaper than as many futile receives. Bounded: only the most recently active connections
//! count.

/// Number of connections remembered.
const REMEMBERED: usize = 4;
/// Limit of connections tried.
const TRIED: usize = 2;
/// Empty rounds after which a connection is not tried any more: about a millisecond.
const PATIENCE_ROUNDS: u64 = 4096;

/// Connections that moved bytes most recently, each with the round of its last activity.
#[derive(Default)]
pub(super) struct Active {
    entries: Vec<(u32, u64)>,
    round: u64,
}

impl Active {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), round: 0 }
    }

    /// Records that a connection moved bytes.
    pub(super) fn touch(&mut self, index: u32) {
        let round = self.round;
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.0 == index) {
            entry.1 = round;
        } else if self.entries.len() < REMEMBERED {
            self.entries.push((index, round));
        } else if let Some(oldest) = self.entries.iter_mut().min_by_key(|entry| entry.1) {
            *oldest = (index, round);
        }
    }

    pub(super) fn forget(&mut self, index: u32) {
        self.entries.retain(|entry| entry.0 != index);
    }

    /// Returns the connections to try now; none if too many of them expect input.
    pub(super) fn next(&mut self, expects: impl Fn(u32) -> bool) -> ([u32; TRIED], usize) {
        self.round += 1;
        let round = self.round;
        self.entries.retain(|entry| round - entry.1 < PATIENCE_ROUNDS);
        let (mut found, mut count) = ([0; TRIED], 0);
        for &(index, _) in self.entries.iter().filter(|entry| expects(entry.0)) {
            if count == TRIED {
                return (found, 0);
            }
            found[count] = index;
            count += 1;
        }
        (found, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(active: &mut Active, expects: impl Fn(u32) -> bool) -> Vec<u32> {
        let (found, count) = active.next(expects);
        found[..count].to_vec()
    }

    #[test]
    fn only_a_few_active_connections_are_tried() {
        let mut active = Active::new();
        assert!(tried(&mut active, |_| true).is_empty());
        active.touch(5);
        active.touch(7);
        active.touch(5);
        assert_eq!(tried(&mut active, |_| true), [5, 7]);
        assert_eq!(tried(&mut active, |index| index != 5), [7]);
        active.touch(9);
        assert!(tried(&mut active, |_| true).is_empty(), "one question is cheaper than three");
        active.forget(5);
        assert_eq!(tried(&mut active, |_| true), [7, 9]);
    }

    #[test]
    fn quiet_connections_expire_and_the_oldest_is_replaced() {
        let mut active = Active::new();
        for index in 0..10 {
            active.next(|_| false);
            active.touch(index);
        }
        assert_eq!(active.entries.len(), REMEMBERED);
        assert!(active.entries.iter().all(|entry| entry.0 > 5));
        for _ in 0..PATIENCE_ROUNDS {
            active.next(|_| true);
        }
        assert!(active.entries.is_empty());
    }
}
