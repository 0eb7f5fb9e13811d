//! Bounded pool of endpoints (connections with a queue pair) that evicts idle ones not used recently.
//!
//! SIEVE (Zhang and others, NSDI 2024): entries in order of arrival, a visited mark set by each use, and a hand that
//! moves from old to new, clears marks, and evicts the first entry without one. This variant skips entries that are in
//! use.
//!
//! Pure: no I/O, no time.

/// Id of an endpoint. The generation makes every id unique.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::rdma) struct EndpointId {
    pub(in crate::rdma) index: u32,
    pub(in crate::rdma) generation: u32,
}

/// End of a list.
const NOWHERE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Entry {
    generation: u32,
    taken: bool,
    visited: bool,
    older: u32,
    newer: u32,
}

/// Bounded pool of endpoints.
pub(in crate::rdma) struct Endpoints {
    entries: Vec<Entry>,
    free: Vec<u32>,
    capacity: usize,
    oldest: u32,
    newest: u32,
    /// Position of the search for a victim.
    hand: u32,
    taken: usize,
}

impl Endpoints {
    /// Creates a pool with this capacity.
    pub(in crate::rdma) const fn new(capacity: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            capacity,
            oldest: NOWHERE,
            newest: NOWHERE,
            hand: NOWHERE,
            taken: 0,
        }
    }

    /// Allocates an endpoint; returns `None` if the pool is full.
    pub(in crate::rdma) fn insert(&mut self) -> Option<EndpointId> {
        if self.taken == self.capacity {
            return None;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            let fresh = Entry { generation: 0, taken: false, visited: false, older: NOWHERE, newer: NOWHERE };
            self.entries.push(fresh);
            self.entries.len() as u32 - 1
        });
        let generation = self.entries[index as usize].generation.wrapping_add(1);
        let older = core::mem::replace(&mut self.newest, index);
        self.entries[index as usize] = Entry { generation, taken: true, visited: false, older, newer: NOWHERE };
        match older {
            NOWHERE => self.oldest = index,
            older => self.entries[older as usize].newer = index,
        }
        self.taken += 1;
        Some(EndpointId { index, generation })
    }

    /// Frees an endpoint; returns false if it was freed before.
    pub(in crate::rdma) fn remove(&mut self, id: EndpointId) -> bool {
        if !self.has(id) {
            return false;
        }
        let Entry { older, newer, .. } = self.entries[id.index as usize];
        match older {
            NOWHERE => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NOWHERE => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        if self.hand == id.index {
            self.hand = newer;
        }
        self.entries[id.index as usize].taken = false;
        self.free.push(id.index);
        self.taken -= 1;
        true
    }

    fn has(&self, id: EndpointId) -> bool {
        self.entries.get(id.index as usize).is_some_and(|entry| entry.taken && entry.generation == id.generation)
    }

    /// Marks an endpoint as used.
    pub(in crate::rdma) fn touch(&mut self, id: EndpointId) {
        if self.has(id) {
            self.entries[id.index as usize].visited = true;
        }
    }

    /// Returns the endpoint to evict, among those that are `idle`; `None` if all are in use. It stays in the pool until
    /// removed.
    pub(in crate::rdma) fn victim(&mut self, mut idle: impl FnMut(EndpointId) -> bool) -> Option<EndpointId> {
        // Two passes: one to clear marks, one to find an entry without a mark.
        for _ in 0..2 * self.taken {
            if self.hand == NOWHERE {
                self.hand = self.oldest;
            }
            let index = self.hand;
            let entry = self.entries.get_mut(index as usize)?;
            self.hand = entry.newer;
            let id = EndpointId { index, generation: entry.generation };
            let visited = core::mem::take(&mut entry.visited);
            if !visited && idle(id) {
                return Some(id);
            }
        }
        None
    }

    /// Returns the capacity of the pool.
    pub(in crate::rdma) const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of endpoints in the pool.
    pub(in crate::rdma) const fn len(&self) -> usize {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn unused_endpoints_are_evicted_first() {
        let mut pool = Endpoints::new(3);
        let ids: Vec<_> = (0..3).map(|_| pool.insert().expect("room")).collect();
        assert_eq!(pool.insert(), None);
        pool.touch(ids[0]);
        pool.touch(ids[2]);
        assert_eq!(pool.victim(|_| true), Some(ids[1]));
        assert!(pool.remove(ids[1]) && !pool.remove(ids[1]));
        let fresh = pool.insert().expect("room again");
        assert_ne!(fresh, ids[1], "the place is the same, the name is not");
        pool.touch(ids[1]);
        // The hand is behind the removed endpoint; a new one has not been used and comes first.
        assert_eq!(pool.victim(|id| id != ids[2]), Some(fresh));
        assert_eq!(pool.victim(|_| false), None, "all are in use");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert,
        Remove(usize),
        Touch(usize),
        Evict(BTreeSet<usize>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => Just(Step::Insert),
            1 => (0usize..12).prop_map(Step::Remove),
            3 => (0usize..12).prop_map(Step::Touch),
            2 => proptest::collection::btree_set(0usize..12, 0..6).prop_map(Step::Evict),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn the_pool_is_bounded_and_evicts_only_idle_endpoints(capacity in 1usize..8, steps in steps()) {
            let mut pool = Endpoints::new(capacity);
            // In order of arrival: the id of each endpoint.
            let mut model: BTreeMap<usize, EndpointId> = BTreeMap::new();
            let mut arrivals = 0;
            let nth = |model: &BTreeMap<usize, EndpointId>, n: usize| {
                model.values().nth(n % model.len().max(1)).copied()
            };
            for step in steps {
                match step {
                    Step::Insert => match pool.insert() {
                        Some(id) => {
                            prop_assert!(model.len() < capacity && !model.values().any(|held| *held == id));
                            model.insert(arrivals, id);
                            arrivals += 1;
                        }
                        None => prop_assert_eq!(model.len(), capacity),
                    },
                    Step::Remove(n) => if let Some(id) = nth(&model, n) {
                        prop_assert!(pool.remove(id) && !pool.remove(id));
                        model.retain(|_, held| *held != id);
                    },
                    Step::Touch(n) => if let Some(id) = nth(&model, n) {
                        pool.touch(id);
                    },
                    Step::Evict(busy) => {
                        let busy: Vec<_> = busy.iter().filter_map(|n| nth(&model, *n)).collect();
                        let idle = model.values().any(|id| !busy.contains(id));
                        let victim = pool.victim(|id| !busy.contains(&id));
                        prop_assert_eq!(victim.is_some(), idle, "a victim is found if there is an idle endpoint");
                        if let Some(victim) = victim {
                            prop_assert!(model.values().any(|held| *held == victim) && !busy.contains(&victim));
                        }
                    }
                }
                prop_assert_eq!(pool.len(), model.len());
            }
        }
    }
}
