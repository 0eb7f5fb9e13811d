//! Policies by name, and the policy that a store was configured with.

use core::fmt;
use core::str::FromStr;

use super::{EvictionPolicy, S3Fifo, SegmentedLru};
use crate::entry::{Entries, Entry, EntryId};

/// Name of an eviction policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// Segmented LRU: the best on traces of conversations.
    #[default]
    SegmentedLru,
    /// S3-FIFO: for loads in which most objects are read once, and an access must cost nothing.
    S3Fifo,
    /// Plain LRU.
    Lru,
}

impl Eviction {
    /// Every policy.
    pub const ALL: [Self; 3] = [Self::SegmentedLru, Self::S3Fifo, Self::Lru];

    /// Returns its name on command lines and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SegmentedLru => "slru",
            Self::S3Fifo => "s3fifo",
            Self::Lru => "lru",
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error of a name that is no eviction policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownEviction {
    /// The name.
    pub name: String,
}

impl fmt::Display for UnknownEviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        write!(f, "{name:?} is no eviction policy: use slru, s3fifo or lru")
    }
}

impl core::error::Error for UnknownEviction {}

impl FromStr for Eviction {
    type Err = UnknownEviction;

    fn from_str(text: &str) -> Result<Self, UnknownEviction> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| UnknownEviction { name: text.to_owned() })
    }
}

/// Policy that was chosen when the process started.
#[derive(Debug)]
pub enum ChosenPolicy {
    /// Segmented LRU; plain LRU if no share is protected.
    SegmentedLru(SegmentedLru),
    /// S3-FIFO.
    S3Fifo(S3Fifo),
}

impl ChosenPolicy {
    /// Creates the policy of this name for a pool of `pool_granules` and up to `max_objects`. `protected_percent` is
    /// for segmented LRU: see [`SegmentedLru::new`].
    #[must_use]
    pub fn new(name: Eviction, pool_granules: u64, max_objects: u32, protected_percent: u8) -> Self {
        match name {
            Eviction::SegmentedLru => Self::SegmentedLru(SegmentedLru::new(pool_granules, protected_percent)),
            Eviction::Lru => Self::SegmentedLru(SegmentedLru::new(pool_granules, 0)),
            Eviction::S3Fifo => Self::S3Fifo(S3Fifo::new(max_objects)),
        }
    }
}

/// Forwards a call to the chosen policy.
macro_rules! each {
    ($policy:expr, $bound:ident => $call:expr) => {
        match $policy {
            ChosenPolicy::SegmentedLru($bound) => $call,
            ChosenPolicy::S3Fifo($bound) => $call,
        }
    };
}

impl EvictionPolicy for ChosenPolicy {
    fn anew(&self) -> Self {
        match self {
            Self::SegmentedLru(policy) => Self::SegmentedLru(policy.anew()),
            Self::S3Fifo(policy) => Self::S3Fifo(policy.anew()),
        }
    }

    fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        each!(self, policy => policy.insert(entries, id));
    }

    fn access(&mut self, entries: &mut Entries, id: EntryId) {
        each!(self, policy => policy.access(entries, id));
    }

    fn remove(&mut self, entries: &mut Entries, id: EntryId) {
        each!(self, policy => policy.remove(entries, id));
    }

    fn evict(&mut self, entries: &mut Entries, id: EntryId) {
        each!(self, policy => policy.evict(entries, id));
    }

    fn unpinned(&mut self, entries: &mut Entries, id: EntryId) {
        each!(self, policy => policy.unpinned(entries, id));
    }

    fn victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        each!(self, policy => policy.victim(entries))
    }

    fn was_accessed(&self, entry: &Entry) -> bool {
        each!(self, policy => policy.was_accessed(entry))
    }

    fn check(&self, entries: &Entries) -> usize {
        each!(self, policy => policy.check(entries))
    }
}
