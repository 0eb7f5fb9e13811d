//! All rails: what each was measured to carry, its lanes, and what it did.

use core::ops::{Index, IndexMut};

use super::group::Group;
use crate::counts::RailBooks;
use crate::sched::{Health, Rail};
use crate::tables::FreeList;
use crate::types::{Config, Path, RailAddress};

/// A rail, its lanes and its books.
pub(crate) struct RailEntry {
    pub(crate) rail: Rail,
    pub(crate) peer: u32,
    pub(crate) group: u8,
    pub(crate) lanes: Vec<u32>,
    /// Where it leads, where that is not the peer's own address.
    pub(crate) address: Option<RailAddress>,
    pub(crate) path: Path,
    pub(crate) books: RailBooks,
}

/// The rails of all peers, by their positions.
pub(crate) struct Rails {
    list: FreeList<RailEntry>,
}

impl Rails {
    pub(crate) const fn new() -> Self {
        Self { list: FreeList::new() }
    }

    pub(crate) fn add(&mut self, entry: RailEntry) -> u32 {
        self.list.add(entry)
    }

    /// Rails of a peer that was left are free for another.
    pub(crate) fn give_back(&mut self, rails: Vec<u32>) {
        self.list.give_back(rails);
    }

    /// Whether a group has large slices posted.
    pub(crate) fn has_bulk(&self, group: &Group) -> bool {
        group.rails.iter().any(|&rail| self[rail].rail.inflight_bytes().0 > 0)
    }

    /// The rails of a group are compared from here on: they were idle, or have become more or fewer.
    pub(crate) fn start_shares(&mut self, group: &Group) {
        for &rail in &group.rails {
            self[rail].rail.start_share();
        }
    }

    /// Whether a rail can be relied on: it never failed, or has earned its trust back since. One that is not connected
    /// yet is about to be.
    pub(crate) fn is_settled(&self, rail: u32, config: &Config) -> bool {
        let entry = &self[rail].rail;
        entry.health() == Health::Healthy && entry.is_trusted(self.window_of(rail, config))
    }

    /// Bytes of large slices that a rail may have posted.
    #[inline]
    pub(crate) fn window_of(&self, rail: u32, config: &Config) -> u64 {
        let least = config.slice_bytes.saturating_mul(2);
        self[rail].rail.window_bytes(config.post_ahead_ns, least)
    }

    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &RailEntry> {
        self.list.iter()
    }
}

impl Index<u32> for Rails {
    type Output = RailEntry;

    #[inline]
    fn index(&self, rail: u32) -> &RailEntry {
        &self.list[rail as usize]
    }
}

impl IndexMut<u32> for Rails {
    #[inline]
    fn index_mut(&mut self, rail: u32) -> &mut RailEntry {
        &mut self.list[rail as usize]
    }
}
