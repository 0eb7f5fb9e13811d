//! Rails of all peers: their measured rates, lanes and counts.

use core::ops::{Index, IndexMut};

use super::group::Group;
use crate::counts::RailBooks;
use crate::sched::{Health, Rail};
use crate::tables::FreeList;
use crate::types::{Config, Path, RailAddress};

/// A rail, its lanes and its counts.
pub(crate) struct RailEntry {
    pub(crate) rail: Rail,
    pub(crate) peer: u32,
    pub(crate) group: u8,
    pub(crate) lanes: Vec<u32>,
    /// Address of the rail, if it is not the peer's own.
    pub(crate) address: Option<RailAddress>,
    pub(crate) path: Path,
    pub(crate) books: RailBooks,
}

/// Rails of all peers, by their positions.
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

    /// Frees the rails of a closed peer.
    pub(crate) fn give_back(&mut self, rails: Vec<u32>) {
        self.list.give_back(rails);
    }

    /// Returns true if a group has large slices in flight.
    #[inline]
    pub(crate) fn has_bulk(&self, group: &Group) -> bool {
        group.rails.iter().any(|&rail| self[rail].rail.inflight_bytes().0 > 0)
    }

    /// Restarts the comparison of a group's rails: they were idle, or their number has changed.
    pub(crate) fn start_shares(&mut self, group: &Group) {
        for &rail in &group.rails {
            self[rail].rail.start_share();
        }
    }

    /// Returns true if a rail is reliable: it never failed, or has regained trust since. A rail that is not connected
    /// yet counts as reliable, as it is about to be.
    pub(crate) fn is_settled(&self, rail: u32, config: &Config) -> bool {
        let entry = &self[rail].rail;
        entry.health() == Health::Healthy && entry.is_trusted(self.window_of(rail, config))
    }

    /// Returns the window of large slices on a rail, in bytes.
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
