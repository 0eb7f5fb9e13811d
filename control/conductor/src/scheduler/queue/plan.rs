//! Plan of queued prefills: list scheduling on the instances, in one order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Prefill instance that takes requests, as a plan sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::scheduler) struct PlannedInstance {
    pub(in crate::scheduler) number: u32,
    /// Time at which its bookings are done.
    pub(in crate::scheduler) free_ns: u64,
    /// Ratio of its prefill durations to the model's.
    pub(in crate::scheduler) factor: f64,
}

/// Prefill in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) struct PlannedPrefill {
    pub(in crate::scheduler) begins_ns: u64,
    pub(in crate::scheduler) done_ns: u64,
}

/// State of a plan: instances by the time at which they are free, and by position.
#[derive(Clone, Debug, Default)]
pub(in crate::scheduler) struct PlanState(BinaryHeap<Reverse<(u64, usize)>>);

/// Plan of prefills: each begins, in the order in which they are added, on the instance that is free first; of several
/// that are free when it could begin, on the fastest.
///
/// A prefill costs `O(log instances)`, and as much again for each instance that it excludes and each slower one that is
/// free.
pub(in crate::scheduler) struct Plan<'a> {
    instances: &'a [PlannedInstance],
    free: PlanState,
    /// Least factor of an instance: one with it need not be compared with others.
    least_factor: f64,
}

impl<'a> Plan<'a> {
    /// Creates a plan in which the instances have their bookings only.
    pub(in crate::scheduler) fn new(instances: &'a [PlannedInstance]) -> Self {
        let free = instances.iter().enumerate().map(|(at, instance)| Reverse((instance.free_ns, at))).collect();
        Self::resume(instances, PlanState(free))
    }

    /// Continues a plan of these instances.
    pub(in crate::scheduler) fn resume(instances: &'a [PlannedInstance], state: PlanState) -> Self {
        let least_factor = instances.iter().map(|instance| instance.factor).fold(f64::INFINITY, f64::min);
        Self { instances, free: state, least_factor }
    }

    /// Returns the state, from which the plan can be continued.
    pub(in crate::scheduler) const fn state(&self) -> &PlanState {
        &self.free
    }

    /// Returns the state, from which the plan can be continued.
    pub(in crate::scheduler) fn into_state(self) -> PlanState {
        self.free
    }

    /// Adds a prefill that begins at `from_ns` at the earliest and takes `work_ns` by the model alone; `None` if it
    /// excludes every instance.
    pub(in crate::scheduler) fn add(&mut self, work_ns: u64, from_ns: u64, excluded: &[u32]) -> Option<PlannedPrefill> {
        let mut passed = Vec::new();
        let mut found: Option<(u64, usize)> = None;
        while let Some(Reverse(entry)) = self.free.0.peek().copied() {
            let is_chosen = |(free_ns, at): (u64, usize)| {
                entry.0 > free_ns.max(from_ns) || self.instances[at].factor <= self.least_factor
            };
            if found.is_some_and(is_chosen) {
                break;
            }
            self.free.0.pop();
            if excluded.contains(&self.instances[entry.1].number) {
                passed.push(Reverse(entry));
                continue;
            }
            let is_faster = |(_, other): (u64, usize)| self.instances[entry.1].factor < self.instances[other].factor;
            match found {
                Some(slower) if is_faster(slower) => passed.extend(found.replace(entry).map(Reverse)),
                Some(_) => passed.push(Reverse(entry)),
                None => found = Some(entry),
            }
        }
        self.free.0.extend(passed);
        let (free_ns, at) = found?;
        let begins_ns = free_ns.max(from_ns);
        let done_ns = begins_ns.saturating_add((work_ns as f64 * self.instances[at].factor) as u64);
        self.free.0.push(Reverse((done_ns, at)));
        Some(PlannedPrefill { begins_ns, done_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prefill_begins_where_it_can_begin_first() {
        let instance = |number, free_ns, factor| PlannedInstance { number, free_ns, factor };
        let instances = [instance(3, 10, 1.0), instance(7, 0, 2.0)];
        let mut plan = Plan::new(&instances);
        let planned = |begins_ns, done_ns| Some(PlannedPrefill { begins_ns, done_ns });
        assert_eq!(plan.add(20, 0, &[]), planned(0, 40), "the second instance takes twice as long");
        assert_eq!(plan.add(5, 0, &[3]), planned(40, 50));
        assert_eq!(plan.add(5, 12, &[]), planned(12, 17));
        assert_eq!(plan.add(5, 0, &[3, 7]), None);
        assert_eq!(plan.add(1, 0, &[]), planned(17, 18), "excluded instances stay in the plan");
        assert_eq!(Plan::new(&[]).add(1, 0, &[]), None);
    }

    #[test]
    fn of_several_that_are_free_the_fastest_prefills() {
        let instance = |number, free_ns, factor| PlannedInstance { number, free_ns, factor };
        let instances = [instance(0, 0, 3.0), instance(1, 5, 1.0), instance(2, 7, 2.0)];
        let planned = |begins_ns, done_ns| Some(PlannedPrefill { begins_ns, done_ns });
        assert_eq!(Plan::new(&instances).add(10, 0, &[]), planned(0, 30), "only the slowest one is free");
        let mut plan = Plan::new(&instances);
        assert_eq!(plan.add(10, 6, &[]), planned(6, 16));
        assert_eq!(plan.add(10, 6, &[]), planned(6, 36), "the other one is not free by then");
        assert_eq!(plan.add(10, 6, &[]), planned(7, 27));
        assert_eq!(Plan::new(&instances).add(10, 9, &[1]), planned(9, 29), "the fastest one is excluded");
    }
}
