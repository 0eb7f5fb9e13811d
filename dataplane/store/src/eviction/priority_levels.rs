//! Priorities of objects: one policy for each priority that the objects of a tenant have, and the rule that decides
//! which of them gives an object up.
//!
//! * The lowest priority gives up its objects first, down to its *floor*: a sixteenth of what all priorities hold. So a
//!   flood of puts of a higher priority leaves new objects of a lower one some room; once they are at their floors, the
//!   flood evicts its own objects.
//! * Whatever is evicted charges each higher priority that is above its floor a sixteenth of it. A priority gives up an
//!   object of its own when its charges have reached the size of that object. So objects of a high priority that nobody
//!   accesses any more leave sooner or later, from the least recent on. A priority that is not above its floor is not
//!   charged.
//!
//! Objects that are pinned by readers give nothing up. If every priority above its floor has pinned objects only, the
//! lowest that has another one gives that up.
//!
//! Guarantees, of all that was evicted at any time: a priority has given up at most a sixteenth of what lower ones gave
//! up, and one object more, while a lower one could give up one of its own above its floor. A priority is never pushed
//! more than one object below its floor by puts of another.
//!
//! Charges follow the deficit counters of Shreedhar and Varghese, "Efficient fair queuing using deficit round-robin"
//! (SIGCOMM 1995). With objects of one priority, this is the policy of that priority, decision by decision.

use kvplane_proto::message::ObjectPriority;

use super::EvictionPolicy;
use crate::entry::{Entries, Entry, EntryId};

/// Part of what a tenant holds that a priority keeps, and part of what is evicted that a higher one bears, as a
/// divisor. All priorities but the highest together keep a half.
const DIVISOR: u64 = 16;

/// Objects of one priority.
#[derive(Debug)]
struct Level<P> {
    priority: ObjectPriority,
    /// Space that they take, pinned or not.
    granules: u64,
    /// Granules that lower priorities gave up and that this one has not borne its part of.
    charged_granules: u64,
    policy: P,
}

/// Eviction policies of a tenant's objects, by priority.
#[derive(Debug)]
pub(crate) struct PriorityLevels<P> {
    /// Those that there were objects of, the normal one in any case, lowest first.
    levels: Vec<Level<P>>,
    /// Space that all objects take.
    granules: u64,
}

impl<P: EvictionPolicy> Level<P> {
    const fn new(priority: ObjectPriority, policy: P) -> Self {
        Self { priority, granules: 0, charged_granules: 0, policy }
    }

    /// Returns true if it holds more than its floor, of what all priorities hold.
    const fn is_above_floor(&self, all_granules: u64) -> bool {
        self.granules * DIVISOR > all_granules
    }

    /// Returns the object that it is to give up because of its charges.
    fn charged_victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        if self.charged_granules < DIVISOR {
            return None;
        }
        let Some(victim) = self.policy.victim(entries) else {
            // All are in use: they owe nothing when they are released.
            self.charged_granules = 0;
            return None;
        };
        (self.charged_granules >= DIVISOR * entries[victim].granules()).then_some(victim)
    }
}

impl<P: EvictionPolicy> PriorityLevels<P> {
    /// Creates the levels of a tenant without objects; `policy` is for those of the normal priority.
    pub(crate) fn new(policy: P) -> Self {
        Self { levels: vec![Level::new(ObjectPriority::NORMAL, policy)], granules: 0 }
    }

    /// Returns the index of the level of an entry in the order; it exists.
    #[inline]
    fn index_of(&self, entries: &Entries, id: EntryId) -> usize {
        if self.levels.len() == 1 {
            return 0;
        }
        let priority = entries[id].priority();
        let found = self.levels.iter().position(|level| level.priority == priority);
        found.expect("an object in the eviction order is of a known priority")
    }

    #[inline]
    fn policy_of(&mut self, entries: &Entries, id: EntryId) -> &mut P {
        let at = self.index_of(entries, id);
        &mut self.levels[at].policy
    }

    /// Creates a policy with the settings of these, without entries.
    pub(crate) fn anew_policy(&self) -> P {
        let normal = self.levels.iter().find(|level| level.priority == ObjectPriority::NORMAL);
        normal.expect("the normal priority has a level").policy.anew()
    }

    /// Returns the level of a priority, existing or new.
    fn level_for(&mut self, priority: ObjectPriority) -> &mut Level<P> {
        let at = self.levels.partition_point(|level| level.priority < priority);
        if self.levels.get(at).is_none_or(|level| level.priority != priority) {
            let policy = self.anew_policy();
            self.levels.insert(at, Level::new(priority, policy));
        }
        &mut self.levels[at]
    }

    fn subtract(&mut self, at: usize, granules: u64) {
        self.granules -= granules;
        let level = &mut self.levels[at];
        level.granules -= granules;
        if level.granules == 0 {
            level.charged_granules = 0;
        }
    }
}

impl<P: EvictionPolicy> EvictionPolicy for PriorityLevels<P> {
    fn anew(&self) -> Self {
        Self::new(self.anew_policy())
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        let (priority, granules) = (entries[id].priority(), entries[id].granules());
        self.granules += granules;
        let level = self.level_for(priority);
        level.granules += granules;
        level.policy.insert(entries, id);
    }

    #[inline]
    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        self.policy_of(entries, id).access(entries, id);
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        let at = self.index_of(entries, id);
        self.levels[at].policy.remove(entries, id);
        self.subtract(at, entries[id].granules());
    }

    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        let (at, granules) = (self.index_of(entries, id), entries[id].granules());
        let all_granules = self.granules;
        let (lower, higher) = self.levels.split_at_mut(at + 1);
        for level in higher.iter_mut().filter(|level| level.is_above_floor(all_granules)) {
            level.charged_granules += granules;
        }
        let level = &mut lower[at];
        level.charged_granules = level.charged_granules.saturating_sub(DIVISOR * granules);
        level.policy.evict(entries, id);
        self.subtract(at, granules);
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        self.policy_of(entries, id).unpinned(entries, id);
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        let Self { levels, granules } = self;
        if let [level] = &mut levels[..] {
            return level.policy.victim(entries);
        }
        let mut above_floor = levels.iter_mut().filter(|level| level.is_above_floor(*granules));
        let charged = above_floor.find_map(|level| level.charged_victim(entries));
        if charged.is_some() {
            return charged;
        }
        let mut above_floor = levels.iter_mut().filter(|level| level.is_above_floor(*granules));
        let lowest = above_floor.find_map(|level| level.policy.victim(entries));
        lowest.or_else(|| levels.iter_mut().find_map(|level| level.policy.victim(entries)))
    }

    fn was_accessed(&self, entry: &Entry) -> bool {
        let level = self.levels.iter().find(|level| level.priority == entry.priority());
        level.is_some_and(|level| level.policy.was_accessed(entry))
    }

    fn check(&self, entries: &Entries) -> usize {
        let mut members = 0;
        for level in &self.levels {
            let of_level = level.policy.check(entries);
            assert_eq!(level.granules == 0, of_level == 0, "space of priority {}", level.priority);
            members += of_level;
        }
        assert!(self.levels.is_sorted_by(|one, next| one.priority < next.priority), "levels in order");
        assert_eq!(self.granules, self.levels.iter().map(|level| level.granules).sum::<u64>(), "space of all levels");
        members
    }
}

#[cfg(test)]
mod tests;
