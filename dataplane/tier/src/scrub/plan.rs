//! Plan of the scrubber: the next record to read, and its time. No device, no memory: positions, bytes and times.
//!
//! A *pass* walks the index from its first bucket to its last. In the background there is a pass every hour, at a slow
//! rate; an operator may order one at a rate of choice. An ordered pass can be paused and resumed. However records move
//! in the index meanwhile, every record that exists from the beginning of a pass to its end is read in it: see
//! `contents/index.rs` for entries that move behind the walk.

use super::{ScrubPass, ScrubReport, ScrubState};

/// Time between two passes in the background.
const REST_NS: u64 = 3_600_000_000_000;
/// Pause after a part of the index with no record to read.
const LOOK_NS: u64 = 100_000;
const SECOND_NS: u64 = 1_000_000_000;

/// Schedule of reads, and counters of what was read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScrubPlan {
    background_bytes_per_s: u64,
    ordered: Option<u64>,
    report: ScrubReport,
    /// Bucket of the index at which the pass is.
    pub(super) at: usize,
    in_pass: bool,
    next_ns: u64,
}

impl ScrubPlan {
    /// Sets the rate of background passes; 0 for none.
    pub(super) fn set_background(&mut self, bytes_per_s: u64) {
        self.background_bytes_per_s = bytes_per_s;
    }

    /// Orders a pass at this rate: a new one, or the rest of the paused one. 0 pauses.
    pub(super) fn order(&mut self, now_ns: u64, bytes_per_s: u64) {
        if self.ordered.is_none() {
            if bytes_per_s == 0 {
                return;
            }
            // Records that a background pass has read are read again.
            self.in_pass = false;
        }
        self.ordered = Some(bytes_per_s);
        self.next_ns = now_ns;
    }

    /// Cancels the ordered pass.
    pub(super) const fn give_up(&mut self) {
        self.ordered = None;
        self.in_pass = false;
    }

    /// Returns the current rate in bytes per second.
    fn rate(&self) -> u64 {
        self.ordered.unwrap_or(self.background_bytes_per_s)
    }

    /// Returns the time to look for the next record; `None` while no pass is due.
    pub(super) fn due_ns(&self) -> Option<u64> {
        (self.rate() > 0).then_some(self.next_ns)
    }

    /// Begins a pass unless one is in progress; returns true if the caller has to start the index walk.
    pub(super) fn begin(&mut self, objects: u64) -> bool {
        if self.in_pass {
            return false;
        }
        self.in_pass = true;
        self.at = 0;
        self.report.pass = ScrubPass { objects, ..ScrubPass::default() };
        true
    }

    /// Notes a record that is being read.
    pub(super) fn reading(&mut self, now_ns: u64, bytes: u64) {
        let pass = &mut self.report.pass;
        pass.records += 1;
        pass.bytes += bytes;
        self.report.checked_bytes += bytes;
        let took_ns = u128::from(bytes) * u128::from(SECOND_NS) / u128::from(self.rate().max(1));
        let took_ns = u64::try_from(took_ns).unwrap_or(u64::MAX);
        // Unused time is not made up for: the rate holds over every interval.
        self.next_ns = self.next_ns.max(now_ns).saturating_add(took_ns);
    }

    /// Notes that none of the visited buckets had a record to read.
    pub(super) fn nothing(&mut self, now_ns: u64) {
        self.next_ns = self.next_ns.max(now_ns).saturating_add(LOOK_NS);
    }

    /// Counts a record that was not whole.
    pub(super) fn bad(&mut self) {
        self.report.pass.bad_records += 1;
    }

    /// Ends the pass.
    pub(super) fn end(&mut self, now_ns: u64, overlooked: u64) {
        self.report.pass.overlooked = overlooked;
        self.report.passes += 1;
        self.report.ordered_passes += u64::from(self.ordered.take().is_some());
        self.in_pass = false;
        self.next_ns = now_ns.saturating_add(REST_NS);
    }

    pub(super) fn report(&self) -> ScrubReport {
        let state = match (self.ordered, self.in_pass, self.background_bytes_per_s) {
            (Some(0), ..) => ScrubState::Paused,
            (Some(_), ..) => ScrubState::Ordered,
            (None, true, 1..) => ScrubState::Background,
            (None, ..) => ScrubState::Idle,
        };
        let bytes_per_s = if state == ScrubState::Idle { 0 } else { self.rate() };
        ScrubReport { state, bytes_per_s, ..self.report }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn over_any_stretch_of_time_the_rate_is_kept(
            rate in 1..1_000_000_000u64,
            records in prop::collection::vec((1..2_000_000u64, 0..3_000_000_000u64), 1..200),
        ) {
            let mut plan = ScrubPlan::default();
            plan.order(7, rate);
            prop_assert!(plan.begin(records.len() as u64));
            let mut now_ns = 7;
            let mut reads: Vec<(u64, u64)> = Vec::new();
            for (bytes, late_ns) in records {
                now_ns = now_ns.max(plan.due_ns().expect("a pass goes on")) + late_ns;
                plan.reading(now_ns, bytes);
                reads.push((now_ns, bytes));
            }
            let most = reads.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
            for from in 0..reads.len() {
                let mut sum = 0;
                for (at_ns, bytes) in &reads[from..] {
                    sum += bytes;
                    let time = u128::from(at_ns - reads[from].0);
                    let allowed = time * u128::from(rate) / u128::from(SECOND_NS) + u128::from(most) + 200;
                    prop_assert!(u128::from(sum) <= allowed, "{sum} bytes, {allowed} allowed");
                }
            }
        }
    }

    #[test]
    fn a_paused_pass_is_resumed_and_background_passes_follow() {
        let mut plan = ScrubPlan::default();
        assert_eq!((plan.due_ns(), plan.report().state), (None, ScrubState::Idle));
        plan.set_background(1000);
        assert!(plan.begin(5));
        assert_eq!(plan.report().state, ScrubState::Background);
        plan.at = 17;
        plan.order(3, 0);
        assert_eq!((plan.report().state, plan.at), (ScrubState::Background, 17), "nothing to pause");
        plan.order(4, 500);
        assert!(plan.begin(6), "from the start");
        plan.reading(4, 100);
        assert_eq!(plan.due_ns(), Some(4 + SECOND_NS / 5));
        plan.at = 9;
        plan.order(5, 0);
        assert_eq!((plan.due_ns(), plan.report().state), (None, ScrubState::Paused));
        plan.order(6, 700);
        assert!(!plan.begin(7), "it goes on");
        let report = plan.report();
        assert_eq!((plan.at, report.state, report.pass.records), (9, ScrubState::Ordered, 1));
        plan.bad();
        plan.end(8, 2);
        let report = plan.report();
        let pass = ScrubPass { records: 1, bytes: 100, bad_records: 1, overlooked: 2, objects: 6 };
        assert_eq!((report.pass, report.ordered_passes, report.state), (pass, 1, ScrubState::Idle));
        assert_eq!(plan.due_ns(), Some(8 + REST_NS), "it rests");
    }
}
