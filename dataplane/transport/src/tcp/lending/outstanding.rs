//! Outstanding zero-copy calls of a connection, and whether zero-copy sends pay off. Pure.
//!
//! The kernel numbers such calls per socket from 0, wrapping, and sends notifications for ranges of them: several calls
//! at once, in any order (Linux: networking/msg_zerocopy). A payload is released when its last call and all earlier
//! ones are notified: TCP acknowledges in order, so little is lost by that, and a single number suffices.

use super::options::ZeroCopy;

/// Limit of outstanding calls on a connection; close to the kernel's own memory limit for notifications.
pub(super) const CALLS: u32 = u128::BITS;

/// Outstanding calls of one connection.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    /// Number of the oldest outstanding call, or of the next call if none is outstanding.
    oldest: u32,
    /// Number of calls issued from the oldest on.
    issued: u32,
    /// Bit set of notified calls from the oldest on; the oldest itself is never set.
    done: u128,
}

impl Outstanding {
    /// Returns true if no further call may be made.
    pub(super) const fn is_full(&self) -> bool {
        self.issued == CALLS
    }

    /// Records a call that the kernel accepted; returns its number.
    pub(super) fn issue(&mut self) -> u32 {
        assert!(!self.is_full(), "{CALLS} calls are outstanding");
        let call = self.oldest.wrapping_add(self.issued);
        self.issued += 1;
        call
    }

    /// Handles the notification of a range of calls. Numbers that are not outstanding are ignored.
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

    /// Returns true if a call and all earlier ones are notified. Only valid for calls that were outstanding recently.
    pub(super) const fn is_done(&self, call: u32) -> bool {
        call.wrapping_sub(self.oldest) >= self.issued
    }

    /// Returns true if no call is outstanding.
    #[cfg(test)]
    pub(super) const fn is_empty(&self) -> bool {
        self.issued == 0
    }
}

/// Consecutive calls without benefit after which a connection pauses zero-copy sends.
const UNPAID: u32 = 4;
/// Bytes sent with a copy during the first pause; each pause is twice as long as the last. A packet capture on the
/// interface makes the kernel copy as long as it lasts, so a connection tries again, but not often.
const PAUSE_BYTES: u64 = 1 << 30;
/// Limit of pauses, after which a connection never tries again.
const PAUSES: u32 = 4;

/// Decides whether a connection should continue to send without a copy.
#[derive(Debug, Default)]
pub(super) struct Worth {
    unpaid: u32,
    pauses: u32,
    left_bytes: u64,
}

impl Worth {
    /// Returns true if the next payload should be lent to the kernel.
    pub(super) fn pays(&self, when: ZeroCopy) -> bool {
        match when {
            ZeroCopy::Never => false,
            ZeroCopy::Always => true,
            ZeroCopy::Auto => self.left_bytes == 0,
        }
    }

    /// Records bytes sent with a copy.
    pub(super) const fn copied(&mut self, bytes: u64) {
        if self.left_bytes != u64::MAX {
            self.left_bytes = self.left_bytes.saturating_sub(bytes);
        }
    }

    /// Records a call that saved a copy.
    pub(super) const fn paid(&mut self) {
        self.unpaid = 0;
    }

    /// Records a call without benefit: the kernel copied after all, or refused.
    pub(super) fn unpaid(&mut self) {
        self.unpaid = self.unpaid.saturating_add(1);
        if self.unpaid >= UNPAID && self.left_bytes == 0 {
            self.pause();
        }
    }

    /// Pauses zero-copy sends.
    pub(super) fn pause(&mut self) {
        self.pauses = self.pauses.saturating_add(1);
        self.left_bytes = if self.pauses > PAUSES { u64::MAX } else { PAUSE_BYTES << (self.pauses - 1) };
        // After the pause, one call is enough to detect that nothing has changed.
        self.unpaid = UNPAID - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Issues calls and delivers notifications for runs of outstanding ones, in any order, some out of range, some
    /// twice.
    fn run(start: u32, steps: &[(bool, u8, u8)]) {
        let mut found = Outstanding { oldest: start, ..Outstanding::default() };
        // The model counts calls without wrapping.
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
        fn a_call_is_done_when_it_and_all_earlier_ones_are_notified(
            start in prop_oneof![Just(0), Just(u32::MAX - 5), any::<u32>()],
            steps in proptest::collection::vec((any::<bool>(), 0_u8..140, 0_u8..140), 0..200),
        ) {
            run(start, &steps);
        }

        #[test]
        fn invalid_notifications_are_ignored(first: u32, span in u32::MAX / 2 + 1..) {
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
    fn unprofitable_zero_copy_is_retried_a_few_times_only() {
        let mut worth = Worth::default();
        (0..UNPAID - 1).for_each(|_| worth.unpaid());
        worth.paid();
        (0..UNPAID - 1).for_each(|_| worth.unpaid());
        assert!(worth.pays(ZeroCopy::Auto) && !worth.pays(ZeroCopy::Never), "one that paid was between them");
        worth.unpaid();
        for pause in 0..PAUSES {
            // Notifications of sends before the pause arrive late.
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
