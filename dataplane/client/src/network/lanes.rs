//! Lanes of all peers: those with frames to send, and those being connected.

use core::ops::{Index, IndexMut};
use std::collections::VecDeque;

use super::lane::{EndpointEvent, Lane};
use crate::tables::FreeList;
use crate::timers::Timers;
use crate::types::{LaneId, Path, PeerId};

/// Lanes of all peers, by their positions.
pub(crate) struct Lanes {
    list: FreeList<Lane>,
    /// Lanes with frames to send.
    dirty: VecDeque<u32>,
    /// Number of lanes being connected.
    coming: u32,
}

impl Lanes {
    pub(crate) const fn new() -> Self {
        Self { list: FreeList::new(), dirty: VecDeque::new(), coming: 0 }
    }

    /// Adds a lane of a rail.
    pub(crate) fn add(&mut self, peer: PeerId, rail: u32, path: Path, number: u16) -> u32 {
        self.list.take(|| Lane::new(peer, rail, path, number), |lane| lane.renew(peer, rail, path, number))
    }

    /// Frees lanes that are idle and empty, for other peers.
    pub(crate) fn give_back(&mut self, lanes: Vec<u32>) {
        self.list.give_back(lanes);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lane> {
        self.list.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns a lane if its generation is current.
    #[inline]
    pub(crate) fn current(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.list.get_mut(lane.index as usize).filter(|entry| entry.generation == lane.generation)
    }

    /// Returns a lane if its generation is current, for reading.
    pub(crate) fn look(&self, lane: LaneId) -> Option<&Lane> {
        self.list.get(lane.index as usize).filter(|entry| entry.generation == lane.generation)
    }

    /// Applies an event to a lane; returns false if it was stale.
    pub(crate) fn step(&mut self, lane: u32, event: EndpointEvent) -> bool {
        let entry = &mut self.list[lane as usize];
        let came = entry.is_coming();
        let moved = entry.step(event);
        match (came, entry.is_coming()) {
            (false, true) => self.coming += 1,
            (true, false) => self.coming -= 1,
            _ => {}
        }
        moved
    }

    /// Returns true if lanes are being connected.
    pub(crate) const fn are_coming(&self) -> bool {
        self.coming > 0
    }

    /// Marks a lane that has frames to send.
    #[inline]
    pub(crate) fn mark_dirty(&mut self, lane: u32) {
        let entry = &mut self.list[lane as usize];
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push_back(lane);
        }
    }

    /// Returns the number of lanes with frames to send.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty.len()
    }

    /// Removes and returns the lane that has waited longest to send.
    pub(crate) fn take_dirty(&mut self) -> Option<u32> {
        let lane = self.dirty.pop_front()?;
        self.list[lane as usize].dirty = false;
        Some(lane)
    }

    /// Sets or clears the alarm of a lane.
    pub(crate) fn set_alarm(&mut self, timers: &mut Timers, lane: u32, at_ns: Option<u64>) {
        let old_ns = core::mem::replace(&mut self.list[lane as usize].alarm_ns, at_ns);
        timers.move_alarm(lane, old_ns, at_ns);
    }
}

impl Index<u32> for Lanes {
    type Output = Lane;

    #[inline]
    fn index(&self, lane: u32) -> &Lane {
        &self.list[lane as usize]
    }
}

impl IndexMut<u32> for Lanes {
    #[inline]
    fn index_mut(&mut self, lane: u32) -> &mut Lane {
        &mut self.list[lane as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connecting_lanes_are_counted_until_ready_or_gone() {
        let mut lanes = Lanes::new();
        let [first, second] = [0, 1].map(|number| lanes.add(PeerId(0), 0, Path::Stream, number));
        assert!(!lanes.are_coming());
        for lane in [first, second] {
            assert!(lanes.step(lane, EndpointEvent::Connect) && lanes.step(lane, EndpointEvent::Connected));
        }
        assert!(lanes.step(first, EndpointEvent::Welcome) && lanes.are_coming());
        assert!(lanes.step(second, EndpointEvent::Gone) && !lanes.are_coming());
        assert!(!lanes.step(second, EndpointEvent::Gone), "it is gone already");
    }

    #[test]
    fn a_dirty_lane_is_queued_once_and_in_order() {
        let mut lanes = Lanes::new();
        let added = [0, 1].map(|number| lanes.add(PeerId(0), 0, Path::Stream, number));
        for lane in [added[1], added[0], added[1]] {
            lanes.mark_dirty(lane);
        }
        assert_eq!((lanes.dirty(), lanes.take_dirty(), lanes.take_dirty()), (2, Some(added[1]), Some(added[0])));
        assert_eq!(lanes.take_dirty(), None);
    }

    #[test]
    fn an_alarm_moves_with_its_lane() {
        let (mut lanes, mut timers) = (Lanes::new(), Timers::default());
        let lane = lanes.add(PeerId(0), 0, Path::Stream, 0);
        lanes.set_alarm(&mut timers, lane, Some(7));
        lanes.set_alarm(&mut timers, lane, Some(5));
        assert_eq!((timers.due_alarm(4), timers.due_alarm(5)), (None, Some(lane)));
        lanes.set_alarm(&mut timers, lane, None);
        assert_eq!((timers.due_alarm(u64::MAX), lanes[lane].alarm_ns), (None, None));
    }
}
