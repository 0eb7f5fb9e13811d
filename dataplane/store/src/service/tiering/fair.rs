//! Fair queue: requests of tenants for the device, in proportion to the tenants' weights.
//!
//! Start-time fair queueing over bytes (Goyal, Vin and Cheng, 1996): a request starts, in virtual time, when the one
//! before it of the same tenant ends, or now if the tenant had none; it takes its bytes divided by the tenant's weight;
//! the request that starts first is next. A tenant that had no requests for a while has saved nothing up, and one that
//! is alone has the whole device. Requests of one tenant stay in order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Virtual time of one byte of a tenant of weight 1: a multiple of many weights.
const UNIT: u64 = 1 << 12;
/// Least cost of a request, in bytes: short ones cost the device an operation too.
const LEAST_BYTES: u64 = 4096;
/// Tenants without requests whose virtual times are remembered.
const IDLE_MOST: usize = 1024;

/// Requests of one tenant.
#[derive(Debug)]
struct Flow<T> {
    items: VecDeque<(u64, T)>,
    /// Virtual time at which its first request starts; without requests, at which the last one ended.
    start: u64,
    weight: u64,
}

/// Queue of requests by tenant.
#[derive(Debug)]
pub(super) struct FairQueue<T> {
    flows: BTreeMap<u32, Flow<T>>,
    /// Tenants with requests, by the start of their first.
    active: BTreeSet<(u64, u32)>,
    now: u64,
    len: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { flows: BTreeMap::new(), active: BTreeSet::new(), now: 0, len: 0 }
    }
}

impl<T> FairQueue<T> {
    /// Returns the number of requests.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of requests of a tenant.
    pub(super) fn len_of(&self, tenant: u32) -> usize {
        self.flows.get(&tenant).map_or(0, |flow| flow.items.len())
    }

    /// Adds a request of a tenant, which has this weight from now on.
    pub(super) fn push(&mut self, tenant: u32, weight: u32, bytes: u64, item: T) {
        if self.flows.len() - self.active.len() > IDLE_MOST {
            let now = self.now;
            self.flows.retain(|_, flow| !flow.items.is_empty() || flow.start > now);
        }
        let now = self.now;
        let flow = self.flows.entry(tenant).or_insert(Flow { items: VecDeque::new(), start: now, weight: 1 });
        flow.weight = weight.max(1).into();
        if flow.items.is_empty() {
            flow.start = flow.start.max(now);
            self.active.insert((flow.start, tenant));
        }
        flow.items.push_back((bytes, item));
        self.len += 1;
    }

    /// Returns the next request.
    pub(super) fn front(&self) -> Option<&T> {
        let (_, tenant) = self.active.first()?;
        self.flows.get(tenant)?.items.front().map(|(_, item)| item)
    }

    /// Takes the next request, and charges its tenant for it.
    pub(super) fn pop(&mut self) -> Option<T> {
        let (start, tenant) = self.active.pop_first()?;
        let flow = self.flows.get_mut(&tenant)?;
        let (bytes, item) = flow.items.pop_front()?;
        self.len -= 1;
        self.now = start;
        flow.start = start.saturating_add(bytes.max(LEAST_BYTES).saturating_mul(UNIT) / flow.weight);
        if !flow.items.is_empty() {
            self.active.insert((flow.start, tenant));
        }
        Some(item)
    }

    /// Returns all requests, by tenant.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.flows.values().flat_map(|flow| flow.items.iter().map(|(_, item)| item))
    }

    /// Returns all requests, by tenant, to be changed.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.flows.values_mut().flat_map(|flow| flow.items.iter_mut().map(|(_, item)| item))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn backlogged_tenants_get_bytes_in_proportion_to_their_weights(
            weights in prop::collection::vec(1..=1000u32, 2..6),
            lengths in prop::collection::vec(4096..1_000_000u64, 1..40),
            served in 50..400usize,
        ) {
            let mut queue = FairQueue::default();
            let mut next = lengths.iter().cycle();
            let mut add = |queue: &mut FairQueue<(usize, u64)>, of: usize| {
                let bytes = *next.next().expect("a cycle");
                queue.push(of as u32, weights[of], bytes, (of, bytes));
            };
            (0..weights.len()).for_each(|of| {
                add(&mut queue, of);
                add(&mut queue, of);
            });
            let mut got = vec![0u64; weights.len()];
            for _ in 0..served {
                let (of, bytes) = queue.pop().expect("all have requests");
                got[of] += bytes;
                add(&mut queue, of);
            }
            // What two tenants got, divided by their weights, differs by one longest request of each.
            for (a, b) in (0..weights.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
                let of = |at: usize| got[at] as f64 / f64::from(weights[at]);
                let most = 1e6 / f64::from(weights[a]) + 1e6 / f64::from(weights[b]) + 1.0;
                prop_assert!((of(a) - of(b)).abs() <= most, "{:?} of weights {:?}", got, weights);
            }
        }

        #[test]
        fn every_request_is_served_once_and_those_of_a_tenant_in_order(
            steps in prop::collection::vec((0..4u32, 1..100u32, 0..10_000u64, any::<bool>()), 1..200),
        ) {
            let (mut queue, mut last, mut left) = (FairQueue::default(), [None; 4], 0);
            for (number, (tenant, weight, bytes, takes)) in steps.iter().copied().enumerate() {
                queue.push(tenant, weight, bytes, (tenant, number));
                left += 1;
                if takes {
                    prop_assert!(queue.front().is_some());
                    let (of, at) = queue.pop().expect("one was added");
                    prop_assert!(last[of as usize] < Some(at), "{:?} after {:?}", at, last[of as usize]);
                    (last[of as usize], left) = (Some(at), left - 1);
                }
                prop_assert_eq!((queue.len(), queue.iter().count()), (left, left));
            }
            while let Some((of, at)) = queue.pop() {
                prop_assert!(last[of as usize] < Some(at));
                last[of as usize] = Some(at);
                left -= 1;
            }
            prop_assert!(left == 0 && queue.is_empty());
        }
    }

    #[test]
    fn an_idle_tenant_saves_nothing_up() {
        let mut queue = FairQueue::default();
        (0..100).for_each(|_| queue.push(1, 1, 100_000, 1));
        (0..50).for_each(|_| assert_eq!(queue.pop(), Some(1)));
        (0..50).for_each(|_| queue.push(2, 1, 100_000, 2));
        let taken: Vec<_> = (0..20).filter_map(|_| queue.pop()).collect();
        assert!((9..=11).contains(&taken.iter().filter(|of| **of == 1).count()), "{taken:?}");
        assert_eq!((queue.len_of(1), queue.len_of(2), queue.len_of(3)), (40, 40, 0));
    }
}
