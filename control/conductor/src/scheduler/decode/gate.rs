//! Gate of admission by decode load: two thresholds, so that admission does not flap around one.

use crate::policy::Refusal;

/// Part of the objective up to which requests are admitted, and while the gate is closed. With a full load every
/// request decodes beside others that were admitted up to the limit, so what a prediction is too short by would be
/// missed.
const ADMITS: f64 = 0.9;
const REOPENS: f64 = 0.8;

/// Gate of a pool: closed from the first request that is rejected for the time between tokens, until one is predicted
/// to keep eight tenths of the objective.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::scheduler) struct DecodeGate {
    closed: bool,
}

impl DecodeGate {
    /// Returns the limit up to which a new request is admitted.
    pub(in crate::scheduler) fn limit_ns(self, objective_ns: u64) -> u64 {
        // The largest value is no objective.
        if objective_ns == u64::MAX {
            return objective_ns;
        }
        (objective_ns as f64 * if self.closed { REOPENS } else { ADMITS }) as u64
    }

    /// Returns the limit up to which a new request is admitted after one was rejected.
    pub(in crate::scheduler) const fn limit_after_rejection_ns(objective_ns: u64) -> u64 {
        (objective_ns as f64 * REOPENS) as u64
    }

    /// Opens the gate, for other objectives.
    pub(in crate::scheduler) const fn open(&mut self) {
        self.closed = false;
    }

    /// Notes that a new request was admitted, or why it was rejected. A request that is rejected for another reason
    /// tells nothing.
    pub(in crate::scheduler) fn note(&mut self, refusal: Option<Refusal>) {
        match refusal {
            None => self.closed = false,
            Some(Refusal::Tbt) => self.closed = true,
            Some(Refusal::Ttft | Refusal::NoInstance | Refusal::QueueFull) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of times that admission changes, for a load that swings around the objective.
    fn changes(gate: impl Fn(DecodeGate) -> u64) -> usize {
        let (mut state, mut before, mut count) = (DecodeGate::default(), true, 0);
        for at in 0..1_000u64 {
            // From 96 to 104, in steps of 1.
            let load = 96 + (at * 5) % 9;
            let admits = load <= gate(state);
            state.note((!admits).then_some(Refusal::Tbt));
            count += usize::from(admits != before);
            before = admits;
        }
        count
    }

    #[test]
    fn admission_around_the_objective_changes_once() {
        assert_eq!(changes(|gate| gate.limit_ns(111)), 1);
        assert!(changes(|_| 100) > 500, "with one threshold");
    }

    #[test]
    fn gate_opens_at_eight_tenths_and_ignores_other_rejections() {
        let mut gate = DecodeGate::default();
        gate.note(Some(Refusal::Ttft));
        assert_eq!(gate.limit_ns(100), 90);
        gate.note(Some(Refusal::Tbt));
        gate.note(Some(Refusal::QueueFull));
        assert_eq!((gate.limit_ns(100), gate.limit_ns(u64::MAX)), (80, u64::MAX));
        gate.note(None);
        assert_eq!(gate.limit_ns(100), 90);
    }
}
