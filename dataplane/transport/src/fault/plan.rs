//! Fault plan: probabilities of faults, and the seeded decisions that follow from them.
//!
//! Each kind of decision has a random stream of its own and draws the same number of words whatever the decision is.
//! The n-th decision of a kind therefore depends on the seed, the kind's own probabilities and n only. This module only
//! decides; [`Fault`](super::Fault) injects the faults.

use kvplane_proto::rng::Rng;

/// Kinds and frequencies of the faults that a connection driver injects. The default injects none.
///
/// A probability of 0 or below means never, of 1 or above always.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FaultPlan {
    /// Seed of all decisions: equal seeds make equal decisions.
    pub seed: u64,
    /// Probability that an outgoing connection is refused.
    pub refuse_connect: f64,
    /// Probability that a connection is cut at a frame, received or sent.
    pub cut_per_frame: f64,
    /// Probability that a received frame, and with it all later frames of its connection, is delayed.
    pub delay_per_frame: f64,
    /// Longest delay of a frame, in nanoseconds; each delay is drawn evenly from 0 to this.
    pub delay_max_ns: u64,
    /// Probability that one bit of a received payload is flipped in memory. Applies to checksummed payloads only: a
    /// consumer cannot detect corruption of other payloads and gets no guarantee about them.
    pub corrupt_per_payload: f64,
}

/// Decision about a received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    Pass,
    Cut,
    Hold { delay_ns: u64 },
}

/// Decision about a frame to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Departure {
    Pass,
    /// The connection is cut before the frame is sent.
    CutBefore,
    /// The connection is cut after the frame is sent, perhaps in part; no reply arrives.
    CutAfter,
}

/// Offset of the corrupted byte in a payload, and the mask of its flipped bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Corruption {
    pub(super) offset: usize,
    pub(super) mask: u8,
}

/// Draws the decisions of a plan.
#[derive(Debug)]
pub(super) struct Injector {
    plan: FaultPlan,
    connects: Rng,
    arrivals: Rng,
    departures: Rng,
    payloads: Rng,
}

impl Injector {
    pub(super) fn new(plan: &FaultPlan) -> Self {
        let stream = |salt| Rng::new(plan.seed, salt);
        Self {
            plan: *plan,
            connects: stream("fault-connects"),
            arrivals: stream("fault-arrivals"),
            departures: stream("fault-departures"),
            payloads: stream("fault-payloads"),
        }
    }

    pub(super) fn refuses(&mut self) -> bool {
        self.connects.chance(self.plan.refuse_connect)
    }

    pub(super) fn arrival(&mut self) -> Arrival {
        let cut = self.arrivals.chance(self.plan.cut_per_frame);
        let hold = self.arrivals.chance(self.plan.delay_per_frame);
        let delay_ns = self.arrivals.below(self.plan.delay_max_ns.saturating_add(1));
        match (cut, hold) {
            (true, _) => Arrival::Cut,
            (false, true) => Arrival::Hold { delay_ns },
            (false, false) => Arrival::Pass,
        }
    }

    pub(super) fn departure(&mut self) -> Departure {
        let cut = self.departures.chance(self.plan.cut_per_frame);
        let before = self.departures.chance(0.5);
        match (cut, before) {
            (false, _) => Departure::Pass,
            (true, true) => Departure::CutBefore,
            (true, false) => Departure::CutAfter,
        }
    }

    /// Decides about a received payload of `bytes` bytes, which is not 0.
    pub(super) fn corruption(&mut self, bytes: usize) -> Option<Corruption> {
        let corrupt = self.payloads.chance(self.plan.corrupt_per_payload);
        let offset = self.payloads.below(bytes as u64) as usize;
        let mask = 1 << self.payloads.below(8);
        corrupt.then_some(Corruption { offset, mask })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: FaultPlan = FaultPlan {
        seed: 11,
        refuse_connect: 0.2,
        cut_per_frame: 0.1,
        delay_per_frame: 0.3,
        delay_max_ns: 1000,
        corrupt_per_payload: 0.4,
    };

    type Decisions = (Vec<bool>, Vec<Arrival>, Vec<Departure>, Vec<Option<Corruption>>);

    fn decide(plan: &FaultPlan, count: usize) -> Decisions {
        let mut injector = Injector::new(plan);
        let times = || 0..count;
        (
            times().map(|_| injector.refuses()).collect(),
            times().map(|_| injector.arrival()).collect(),
            times().map(|_| injector.departure()).collect(),
            times().map(|_| injector.corruption(64)).collect(),
        )
    }

    #[test]
    fn equal_seeds_decide_equally() {
        assert_eq!(decide(&PLAN, 500), decide(&PLAN, 500));
        let other = decide(&FaultPlan { seed: 12, ..PLAN }, 500);
        let ours = decide(&PLAN, 500);
        assert!(ours.0 != other.0 && ours.1 != other.1 && ours.2 != other.2 && ours.3 != other.3);
    }

    #[test]
    fn kinds_do_not_disturb_each_other() {
        let mut mixed = Injector::new(&PLAN);
        let arrivals: Vec<Arrival> = (0..500)
            .map(|n| {
                mixed.refuses();
                mixed.corruption(n + 1);
                mixed.departure();
                mixed.arrival()
            })
            .collect();
        assert_eq!(arrivals, decide(&PLAN, 500).1);
        // Changing one probability of a kind does not change the decisions of the others either.
        let undelayed = decide(&FaultPlan { delay_per_frame: 0.0, ..PLAN }, 500).1;
        assert!(arrivals.iter().zip(&undelayed).all(|(a, b)| (*a == Arrival::Cut) == (*b == Arrival::Cut)));
    }

    #[test]
    fn faults_are_as_frequent_as_planned() {
        let (refusals, arrivals, departures, corruptions) = decide(&PLAN, 10_000);
        let near = |found: usize, wanted: usize| assert!(found.abs_diff(wanted) < wanted / 5, "{found}, not {wanted}");
        near(refusals.iter().filter(|&&refused| refused).count(), 2000);
        near(arrivals.iter().filter(|&&arrival| arrival == Arrival::Cut).count(), 1000);
        near(arrivals.iter().filter(|arrival| matches!(arrival, Arrival::Hold { .. })).count(), 2700);
        near(departures.iter().filter(|&&departure| departure == Departure::CutBefore).count(), 500);
        near(departures.iter().filter(|&&departure| departure == Departure::CutAfter).count(), 500);
        near(corruptions.iter().flatten().count(), 4000);
        assert!(arrivals.iter().all(|arrival| !matches!(arrival, Arrival::Hold { delay_ns } if *delay_ns > 1000)));
        assert!(corruptions.iter().flatten().all(|at| at.offset < 64 && at.mask.is_power_of_two()));
    }

    #[test]
    fn the_default_plan_makes_no_faults_and_certainty_is_certain() {
        let (refusals, arrivals, departures, corruptions) = decide(&FaultPlan::default(), 1000);
        assert!(refusals.iter().all(|&refused| !refused));
        assert!(arrivals.iter().all(|&arrival| arrival == Arrival::Pass));
        assert!(departures.iter().all(|&departure| departure == Departure::Pass));
        assert!(corruptions.iter().all(Option::is_none));
        let always = FaultPlan { refuse_connect: 1.0, cut_per_frame: 1.0, delay_max_ns: u64::MAX, ..PLAN };
        let (refusals, arrivals, ..) = decide(&always, 1000);
        assert!(refusals.iter().all(|&refused| refused) && arrivals.iter().all(|&arrival| arrival == Arrival::Cut));
    }
}
