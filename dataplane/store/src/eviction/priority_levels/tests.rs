//! Levels against a model, and the two bounds of the rule.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use proptest::prelude::*;

use super::*;
use crate::allocator::Allocator;
use crate::entry::{Keep, Reserve};
use crate::eviction::SegmentedLru;

/// Space of the tenant.
const CAPACITY: u64 = 320;

/// A tenant that evicts what its puts need, beside a model of the rule with plain LRU lists.
struct Tenant {
    entries: Entries,
    levels: PriorityLevels<SegmentedLru>,
    /// Objects from the least recent on.
    lru: Vec<EntryId>,
    /// By number of the priority: granules charged, times the divisor.
    charged: [u64; ObjectPriority::COUNT],
    puts: u128,
}

fn priority(number: i64) -> ObjectPriority {
    ObjectPriority::new(number).expect("it is in range")
}

const fn index(priority: ObjectPriority) -> usize {
    (priority.number() + 4) as usize
}

impl Tenant {
    fn new() -> Self {
        let levels = PriorityLevels::new(SegmentedLru::new(CAPACITY, 0));
        let charged = [0; ObjectPriority::COUNT];
        Self { entries: Entries::new(4096), levels, lru: Vec::new(), charged, puts: 0 }
    }

    fn granules_of(&self, priority: ObjectPriority) -> u64 {
        let of_it = self.lru.iter().filter(|id| self.entries[**id].priority() == priority);
        of_it.map(|id| self.entries[*id].granules()).sum()
    }

    fn granules(&self) -> u64 {
        self.lru.iter().map(|id| self.entries[*id].granules()).sum()
    }

    fn is_above_floor(&self, priority: ObjectPriority) -> bool {
        self.granules_of(priority) * 16 > self.granules()
    }

    /// Returns the least recent object of a priority without pins.
    fn oldest(&self, priority: ObjectPriority) -> Option<EntryId> {
        let is_free = |id: &&EntryId| self.entries[**id].priority() == priority && self.entries[**id].pins() == 0;
        self.lru.iter().find(is_free).copied()
    }

    /// Returns the victim of the model.
    fn expected(&mut self) -> Option<EntryId> {
        let all: Vec<_> = (-4..=4).map(priority).collect();
        for priority in all.iter().filter(|priority| self.is_above_floor(**priority)).copied().collect::<Vec<_>>() {
            match self.oldest(priority) {
                Some(id) if self.charged[index(priority)] >= 16 * self.entries[id].granules() => return Some(id),
                Some(_) => {}
                None if self.charged[index(priority)] >= 16 => self.charged[index(priority)] = 0,
                None => {}
            }
        }
        let above = all.iter().filter(|priority| self.is_above_floor(**priority));
        let lowest = above.filter_map(|priority| self.oldest(*priority)).next();
        lowest.or_else(|| all.iter().find_map(|priority| self.oldest(*priority)))
    }

    /// Evicts one object, the same as the model would; returns its priority.
    fn evict(&mut self) -> Option<ObjectPriority> {
        let victim = self.levels.victim(&mut self.entries);
        assert_eq!(victim, self.levels.victim(&mut self.entries), "a victim stays the victim");
        assert_eq!(victim, self.expected());
        let id = victim?;
        let (of, granules) = (self.entries[id].priority(), self.entries[id].granules());
        for higher in (i64::from(of.number()) + 1..=4).map(priority) {
            if self.is_above_floor(higher) {
                self.charged[index(higher)] += granules;
            }
        }
        self.charged[index(of)] = self.charged[index(of)].saturating_sub(16 * granules);
        self.levels.evict(&mut self.entries, id);
        self.forget(id);
        Some(of)
    }

    fn forget(&mut self, id: EntryId) {
        let of = self.entries[id].priority();
        self.lru.retain(|other| *other != id);
        self.entries.release(id);
        if self.granules_of(of) == 0 {
            self.charged[index(of)] = 0;
        }
    }

    /// Puts an object; returns the priorities of those that were evicted for it. `None` if there is no room.
    fn put(&mut self, priority: ObjectPriority, granules: u64) -> Option<Vec<ObjectPriority>> {
        let mut evicted = Vec::new();
        while self.granules() + granules > CAPACITY {
            evicted.push(self.evict()?);
        }
        self.puts += 1;
        let block = Allocator::new(256, 1).allocate(1).expect("the pool is empty");
        let keep = Keep { priority, ..Keep::default() };
        let wanted = Reserve { keep, ..Reserve::plain(Digest(self.puts), granules * 256) };
        let id = self.entries.reserve(&wanted, block);
        self.entries.commit(id, Version(1), 0);
        self.levels.insert(&mut self.entries, id);
        self.lru.push(id);
        Some(evicted)
    }

    fn access(&mut self, id: EntryId) {
        self.levels.access(&mut self.entries, id);
        self.lru.retain(|other| *other != id);
        self.lru.push(id);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put {
        priority: i64,
        granules: u64,
    },
    Access(usize),
    Remove(usize),
    /// Access and pin.
    Pin(usize),
    Unpin(usize),
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (-4..=4i64, 1..24u64).prop_map(|(priority, granules)| Op::Put { priority, granules }),
        3 => any::<usize>().prop_map(Op::Access),
        1 => any::<usize>().prop_map(Op::Remove),
        1 => any::<usize>().prop_map(Op::Pin),
        1 => any::<usize>().prop_map(Op::Unpin),
    ]
}

proptest! {
    #[test]
    fn victims_are_those_of_the_rule(ops in prop::collection::vec(ops(), 1..400)) {
        let mut tenant = Tenant::new();
        let mut pinned: Vec<EntryId> = Vec::new();
        for op in ops {
            match op {
                Op::Put { priority: number, granules } => drop(tenant.put(priority(number), granules)),
                Op::Access(n) if !tenant.lru.is_empty() => tenant.access(tenant.lru[n % tenant.lru.len()]),
                Op::Remove(n) if !tenant.lru.is_empty() => {
                    let id = tenant.lru[n % tenant.lru.len()];
                    if tenant.entries[id].pins() == 0 {
                        tenant.levels.remove(&mut tenant.entries, id);
                        tenant.forget(id);
                    }
                }
                Op::Pin(n) if !tenant.lru.is_empty() && pinned.len() < 8 => {
                    let id = tenant.lru[n % tenant.lru.len()];
                    tenant.access(id);
                    tenant.entries.pin(id);
                    pinned.push(id);
                }
                Op::Unpin(n) if !pinned.is_empty() => {
                    let id = pinned.swap_remove(n % pinned.len());
                    if tenant.entries.unpin(id) == 0 {
                        tenant.levels.unpinned(&mut tenant.entries, id);
                    }
                }
                _ => {}
            }
            prop_assert_eq!(tenant.levels.check(&tenant.entries), tenant.lru.len());
        }
    }
}

proptest! {
    // Each case is of ten thousands of puts, of which the model takes its time.
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The bound of the flood: a lower priority keeps its floor, less one object, and its new objects find room there.
    /// The bound of what is not accessed any more: it leaves, down to the floor, while lower ones are put.
    #[test]
    fn neither_a_flood_nor_objects_that_nobody_reads_starve_others(
        low in -4..4i64,
        above in 1..8i64,
        granules in 1..8u64,
    ) {
        let (low, high) = (priority(low), priority((low + above).min(4)));
        let mut tenant = Tenant::new();
        for _ in 0..CAPACITY / granules {
            tenant.put(low, granules).expect("there is room");
        }
        for _ in 0..4 * CAPACITY / granules {
            tenant.put(high, granules).expect("there is room to be made");
            prop_assert!(tenant.granules_of(low) + granules > CAPACITY / 16 - granules, "the floor");
        }
        prop_assert!(tenant.granules_of(low) <= CAPACITY / 16 + granules, "the rest is the higher one's");
        let (mut of_low, mut of_high) = (0, 0);
        for _ in 0..40 * CAPACITY / granules {
            let was_above_floor = tenant.is_above_floor(low);
            for one in tenant.put(low, granules).expect("there is room to be made") {
                (of_low, of_high) = if one == low { (of_low + 1, of_high) } else { (of_low, of_high + 1) };
                // A lower one that has its floor only is not what gives way.
                prop_assert!(one == low || !was_above_floor || of_high <= of_low / 16 + CAPACITY / 16 / granules + 1);
            }
        }
        prop_assert!(tenant.granules_of(high) <= CAPACITY / 16 + granules, "what nobody reads is down to its floor");
    }
}

/// System prompts, say: whatever lower priorities do, they stay.
#[test]
fn a_priority_within_its_floor_loses_nothing() {
    let mut tenant = Tenant::new();
    (0..CAPACITY / 16).for_each(|_| drop(tenant.put(ObjectPriority::HIGHEST, 1)));
    let high = tenant.lru.clone();
    for _ in 0..20 * CAPACITY {
        tenant.put(ObjectPriority::LOWEST, 1).expect("there is room to be made");
    }
    assert!(high.iter().all(|id| tenant.lru.contains(id)));
}
