//! Connections between processes: ordered frames with delays, and losses of all that has not arrived.

use std::collections::{BTreeMap, VecDeque};

use kvplane_group::{RankSet, WorldRank};

use crate::host::Frame;

/// A connection of two processes, by their ranks in order.
type Pair = (WorldRank, WorldRank);

/// The connections of a world.
#[derive(Debug, Default)]
pub(crate) struct Network {
    /// Pairs that are connected, and since which of their connections.
    connected: BTreeMap<Pair, u64>,
    next: u64,
    /// Frames from one rank to another, and when they arrive.
    frames: BTreeMap<(WorldRank, WorldRank), VecDeque<(u64, Frame)>>,
}

pub(crate) fn pair(one: WorldRank, other: WorldRank) -> Pair {
    (one.min(other), one.max(other))
}

impl Network {
    pub(crate) fn connect(&mut self, one: WorldRank, other: WorldRank) {
        self.next += 1;
        self.connected.insert(pair(one, other), self.next);
    }

    /// Ends a connection; what has not arrived is lost. Returns false if there is none.
    pub(crate) fn disconnect(&mut self, one: WorldRank, other: WorldRank) -> bool {
        self.frames.remove(&(one, other));
        self.frames.remove(&(other, one));
        self.connected.remove(&pair(one, other)).is_some()
    }

    pub(crate) fn is_connected(&self, one: WorldRank, other: WorldRank) -> bool {
        self.connected.contains_key(&pair(one, other))
    }

    pub(crate) fn peers(&self, rank: WorldRank) -> RankSet<WorldRank> {
        let other = |(one, other): &Pair| match () {
            () if *one == rank => Some(*other),
            () if *other == rank => Some(*one),
            () => None,
        };
        self.connected.keys().filter_map(other).collect()
    }

    /// Frames that are on their way.
    pub(crate) fn waiting(&self, from: WorldRank, to: WorldRank) -> usize {
        self.frames.get(&(from, to)).map_or(0, VecDeque::len)
    }

    /// Sends a frame that arrives at a time, or after those before it. Returns when.
    pub(crate) fn send(&mut self, from: WorldRank, to: WorldRank, at_ns: u64, frame: Frame) -> u64 {
        let frames = self.frames.entry((from, to)).or_default();
        let at_ns = frames.back().map_or(at_ns, |(last_ns, _)| at_ns.max(*last_ns));
        frames.push_back((at_ns, frame));
        at_ns
    }

    /// Returns the next frame, if it has arrived.
    pub(crate) fn receive(&mut self, from: WorldRank, to: WorldRank, now_ns: u64) -> Option<Frame> {
        let frames = self.frames.get_mut(&(from, to))?;
        let (at_ns, _) = frames.front()?;
        if *at_ns > now_ns {
            return None;
        }
        frames.pop_front().map(|(_, frame)| frame)
    }
}
