//! Which sends without a copy the kernel still refers to, and whether sending so is worth it. Pure.
//!
//! The kernel numbers such calls per socket from 0, wrapping, and gives notice of ranges of them: several calls at
//! once, in any order (Linux: networking/msg_zerocopy). A payload is free when its last call and all before are done:
//! TCP acknowledges in order, so little is lost by that, and one number says it.

use super::options::ZeroCopy;

/// Calls that may be outstanding on a connection; the kernel's own limit on memory for notices is near.
pub(super) const CALLS: u32 = u128::BITS;

/// The calls of one connection.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    /// The oldest call that is not done, or the next one.
    oldest: u32,
    /// Calls from that one on.
    issued: u32,
    /// Which of those are done; the oldest is never.
    done: u128,
}

impl Outstanding {
    /// Whether no other call may be made.
    pub(super) const fn is_full(&self) -> bool {
        self.issued == CALLS
    }

    /// The kernel has taken a call; its number.
    pub(super) fn issue(&mut self) -> u32 {
        assert!(!self.is_full(), "{CALLS} calls are outstanding");
        let call = self.oldest.wrapping_add(self.issued);
        self.issued += 1;
        call
    }

    /// The kernel has given notice of these calls. Of others than the outstanding ones it means nothing.
    pub(super) fn notice(&mut self, first: u32, last: u32) {
        let span = last.wrapping_sub(first);
        if span > u32::MAX / 2 {
            return;
        }
        for at in 0..self.issued {
            if self.oldest.wrapping_add(at).wrapping_sub(first) <= span {
                self.done |= 1 << at;
            }
        }
        let prefix = self.done.trailing_ones();
        self.done = self.done.checked_shr(prefix).unwrap_or(0);
        self.oldest = self.oldest.wrapping_add(prefix);
        self.issued -= prefix;
    }

    /// Whether a call that was issued, and all before it, are done. Callers ask of calls that were outstanding lately.
    pub(super) const fn is_done(&self, call: u32) -> bool {
        call.wrapping_sub(self.oldest) >= self.issued
    }

    /// Whether nothing is outstanding.
    #[cfg(test)]
    pub(super) const fn is_empty(&self) -> bool {
        self.issued == 0
    }
}

/// Calls in a row that did not pay before a connection pauses.
const UNPAID: u32 = 4;
/// How much is sent plainly in the first pause; each next one is twice as long. A capture on the interface makes the
/// kernel copy as long as it lasts, so a connection looks again, but not often.
const PAUSE_BYTES: u64 = 1 << 30;
/// Pauses after which a connection never looks again.
const PAUSES: u32 = 4;

/// Whether a connection should go on sending without a copy.
#[derive(Debug, Default)]
pub(super) struct Worth {
    unpaid: u32,
    pauses: u32,
    left_bytes: u64,
}

impl Worth {
    /// Whether the next payload should be lent to the kernel.
    pub(super) fn pays(&self, when: ZeroCopy) -> bool {
        match when {
            ZeroCopy::Never => false,
            ZeroCopy::Always => true,
            ZeroCopy::Auto => self.left_bytes == 0,
        }
    }

    /// So many bytes were sent plainly.
    pub(super) const fn copied(&mut self, bytes: u64) {
        if self.left_bytes != u64::MAX {
            self.left_bytes = self.left_bytes.saturating_sub(bytes);
        }
    }

    /// A call saved a copy.
    pub(super) const fn paid(&mut self) {
        self.unpaid = 0;
    }

    /// A call did not: the kernel copied after all, or refused.
    pub(super) fn unpaid(&mut self) {
        self.unpaid = self.unpaid.saturating_add(1);
        if self.unpaid >= UNPAID && self.left_bytes == 0 {
            self.pause();
        }
    }

    /// Nothing is lent for a while.
    pub(super) fn pause(&mut self) {
        self.pauses = self.pauses.saturating_add(1);
        self.left_bytes = if self.pauses > PAUSES { u64::MAX } else { PAUSE_BYTES << (self.pauses - 1) };
        // One call is enough to see that nothing has changed.
        self.unpaid = UNPAID - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Issues calls and gives notice of runs of outstanding ones, in any order, some too far, some twice.
    fn run(start: u32, steps: &[(bool, u8, u8)]) {
        let mut found = Outstanding { oldest: start, ..Outstanding::default() };
        // The twin counts calls without wrapping.
        let (mut issued, mut open) = (0_u64, BTreeSet::new());
        let number = |call: u64| start.wrapping_add(call as u32);
        for &(issue, at, length) in steps {
            if issue {
                for _ in 0..=length % 7 {
                    assert_eq!(found.is_full(), open.first().is_some_and(|oldest| issued - oldest == u64::from(CALLS)));
                    if !found.is_full() {
                        assert_eq!(found.issue(), number(issued));
                        open.insert(issued);
                        issued += 1;
                    }
                }
            } else {
                let oldest = open.first().copied().unwrap_or(issued);
                let (first, last) = (oldest + u64::from(at), oldest + u64::from(at) + u64::from(length));
                let (first, last) = (first.saturating_sub(3), last);
                found.notice(number(first), number(last));
                open.retain(|call| !(first..=last).contains(call));
            }
            let oldest = open.first().copied().unwrap_or(issued);
            assert_eq!(found.is_empty(), open.is_empty());
            for call in issued.saturating_sub(u64::from(CALLS))..issued {
                assert_eq!(found.is_done(number(call)), call < oldest, "call {call}, oldest {oldest}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_call_is_done_when_it_and_all_before_were_noticed(
            start in prop_oneof![Just(0), Just(u32::MAX - 5), any::<u32>()],
            steps in proptest::collection::vec((any::<bool>(), 0_u8..140, 0_u8..140), 0..200),
        ) {
            run(start, &steps);
        }

        #[test]
        fn nonsense_changes_nothing(first: u32, span in u32::MAX / 2 + 1..) {
            let mut found = Outstanding::default();
            found.issue();
            found.notice(first, first.wrapping_add(span));
            prop_assert!(!found.is_done(0));
        }
    }

    #[test]
    fn all_calls_at_once_are_done_at_once() {
        let mut found = Outstanding { oldest: u32::MAX - 3, ..Outstanding::default() };
        let calls: Vec<u32> = (0..CALLS).map(|_| found.issue()).collect();
        assert!(found.is_full());
        found.notice(calls[0], calls[calls.len() - 1]);
        assert!(found.is_empty() && calls.iter().all(|&call| found.is_done(call)));
    }

    #[test]
    fn what_does_not_pay_is_tried_again_a_few_times_and_then_never() {
        let mut worth = Worth::default();
        (0..UNPAID - 1).for_each(|_| worth.unpaid());
        worth.paid();
        (0..UNPAID - 1).for_each(|_| worth.unpaid());
        assert!(worth.pays(ZeroCopy::Auto) && !worth.pays(ZeroCopy::Never), "one that paid was between them");
        worth.unpaid();
        for pause in 0..PAUSES {
            // Notices of what was sent before the pause come late.
            (0..UNPAID).for_each(|_| worth.unpaid());
            assert!(!worth.pays(ZeroCopy::Auto) && worth.pays(ZeroCopy::Always));
            worth.copied((PAUSE_BYTES << pause) - 1);
            assert!(!worth.pays(ZeroCopy::Auto));
            worth.copied(1);
            assert!(worth.pays(ZeroCopy::Auto));
            worth.unpaid = UNPAID - 1;
            worth.unpaid();
        }
        (0..1000).for_each(|_| worth.copied(u64::MAX / 2));
        assert!(!worth.pays(ZeroCopy::Auto), "not for ever");
    }
}
