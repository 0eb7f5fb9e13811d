//! Locality: distance of devices from memory, and the pairing of the devices of two hosts by it.
//!
//! A host numbers the *places* (NUMA nodes, GPUs) where its memory can be, and states the distance of each of its
//! devices from each of them. The tables come from the host; this module knows numbers only. A rail over devices serves
//! memory at two places, ours and the peer's; its cost is the sum of both distances. Slices take the nearest rails that
//! are healthy, and farther ones only while no nearest rail is.

use kvplane_proto::limits::Limits;

use super::options::RailDevices;

/// Place of memory, by its host's number from 1 on; 0 if unknown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub struct Place(pub u8);

impl Place {
    /// The unknown place.
    pub const UNKNOWN: Self = Self(0);

    /// Returns the place at this position of a list; unknown beyond the range of the number.
    #[must_use]
    pub fn at(position: usize) -> Self {
        Self(u8::try_from(position + 1).unwrap_or(0))
    }

    /// Returns the position in a list, if the place is known.
    #[must_use]
    pub fn position(self) -> Option<usize> {
        usize::from(self.0).checked_sub(1)
    }
}

/// Distance of a device from memory at a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Nearness {
    /// Tier of the distance: 0 for the devices to use first.
    pub tier: u8,
    /// True if both are on one NUMA node; `None` if unknown.
    pub same_node: Option<bool>,
}

/// Distance of each device of a host from each place of its memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Near {
    /// Distances by device, then by the place's position.
    rows: Vec<Vec<Nearness>>,
}

impl Near {
    /// Creates a table from one row for each device, in the order of their numbers, with an entry for each place.
    #[must_use]
    pub const fn new(rows: Vec<Vec<Nearness>>) -> Self {
        Self { rows }
    }

    /// Returns the number of devices in the table.
    #[must_use]
    pub const fn devices(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of places in the table.
    #[must_use]
    pub fn places(&self) -> usize {
        self.rows.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Returns the distance of a device from a place; the least one if it is unknown.
    #[must_use]
    pub fn of(&self, device: u16, place: Place) -> Nearness {
        let row = self.rows.get(usize::from(device));
        row.and_then(|row| row.get(place.position()?)).copied().unwrap_or_default()
    }

    /// Returns the devices nearest to a place.
    fn nearest(&self, place: Place) -> Vec<u16> {
        let devices = 0..u16::try_from(self.rows.len()).unwrap_or(u16::MAX);
        let least = devices.clone().map(|device| self.of(device, place).tier).min();
        devices.filter(|device| Some(self.of(*device, place).tier) == least).collect()
    }

    /// Returns the number of lower-numbered devices with the same distances as this one.
    fn rank(&self, device: u16) -> usize {
        let row = self.rows.get(usize::from(device));
        (0..usize::from(device)).filter(|other| self.rows.get(*other) == row).count()
    }

    /// Returns the rails from `devices` of ours to the devices of `peer`, at most [`Limits::RAILS`]. Each of our
    /// devices gets a mate for each place of the peer, among the peer's devices that are nearest to it: the one with
    /// the same number if it is among them, else they are assigned in turn. The first mates of all devices come before
    /// any second mate. If the peer's locality is unknown, devices are paired by number.
    #[must_use]
    pub fn pairs(&self, devices: usize, peer: &Self) -> Vec<RailDevices> {
        let devices = devices.min(Limits::RAILS) as u16;
        let mates = |own: u16| {
            let mut mates: Vec<u16> = Vec::new();
            for place in (0..peer.places()).map(Place::at) {
                let near = peer.nearest(place);
                let turn = near.get(self.rank(own) % near.len().max(1)).copied();
                let mate = near.iter().copied().find(|mate| *mate == own).or(turn);
                mates.extend(mate.filter(|mate| !mates.contains(mate)));
            }
            if mates.is_empty() {
                let count = u16::try_from(peer.devices()).unwrap_or(u16::MAX);
                mates.push(if count == 0 { own } else { own % count });
            }
            // The same number comes first: if the place of the peer's memory is unknown, it is as good as any other.
            mates.sort_by_key(|mate| *mate != own);
            mates
        };
        let mates: Vec<Vec<u16>> = (0..devices).map(mates).collect();
        let most = mates.iter().map(Vec::len).max().unwrap_or(0);
        let round = |turn: usize| {
            let mates = mates.iter().enumerate();
            mates.filter_map(move |(own, mates)| Some(RailDevices { own: own as u16, peer: *mates.get(turn)? }))
        };
        (0..most).flat_map(round).take(Limits::RAILS).collect()
    }

    /// Returns the cost of a rail for memory at two places, ours and the peer's, to be compared with that of other
    /// rails only. `first` is true for the first rail of its device, which is preferred if the peer's place is unknown.
    #[must_use]
    pub fn cost(&self, devices: RailDevices, ours: Place, peer: &Self, theirs: Place, first: bool) -> u8 {
        let tiers = self.of(devices.own, ours).tier.saturating_add(peer.of(devices.peer, theirs).tier);
        let second = theirs == Place::UNKNOWN && !first;
        tiers.saturating_mul(2).saturating_add(u8::from(second))
    }
}

/// Counts of slices by whether their memory and the device that moved them are on one NUMA node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeCounts {
    /// Slices with both on one node.
    pub same: u64,
    /// Slices with both on different nodes.
    pub other: u64,
    /// Slices for which one of both nodes is unknown.
    pub unknown: u64,
}

impl NodeCounts {
    /// Counts one slice.
    pub const fn count(&mut self, same_node: Option<bool>) {
        self.count_many(same_node, 1);
    }

    /// Counts several slices.
    pub const fn count_many(&mut self, same_node: Option<bool>, slices: u64) {
        match same_node {
            Some(true) => self.same += slices,
            Some(false) => self.other += slices,
            None => self.unknown += slices,
        }
    }

    /// Adds the counts of another.
    pub const fn add(&mut self, other: &Self) {
        self.same += other.same;
        self.other += other.other;
        self.unknown += other.unknown;
    }

    /// Returns the difference to `base`.
    #[must_use]
    pub const fn beyond(&self, base: &Self) -> Self {
        Self {
            same: self.same.saturating_sub(base.same),
            other: self.other.saturating_sub(base.other),
            unknown: self.unknown.saturating_sub(base.unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Devices that are each on one node, given by the nodes' numbers.
    fn on(nodes: &[u8], places: u8) -> Near {
        let near = |node: u8, place: u8| Nearness { tier: u8::from(node != place), same_node: Some(node == place) };
        Near::new(nodes.iter().map(|&node| (0..places).map(|place| near(node, place)).collect()).collect())
    }

    fn numbers(pairs: &[RailDevices]) -> Vec<(u16, u16)> {
        pairs.iter().map(|pair| (pair.own, pair.peer)).collect()
    }

    #[test]
    fn devices_are_paired_by_number_and_across_nodes_by_turns() {
        let two = on(&[0, 1], 2);
        assert_eq!(numbers(&two.pairs(2, &two)), [(0, 0), (1, 1), (0, 1), (1, 0)]);
        assert_eq!(numbers(&two.pairs(2, &Near::default())), [(0, 0), (1, 1)]);
        // Four devices on two nodes: across the nodes the first is paired with the first.
        let four = on(&[0, 0, 1, 1], 2);
        let across = [(0, 2), (1, 3), (2, 0), (3, 1)];
        assert_eq!(numbers(&four.pairs(4, &four))[4..], across);
        // Without locality of our own, with that of a peer with two devices.
        assert_eq!(numbers(&Near::default().pairs(3, &on(&[0, 0], 1))), [(0, 0), (1, 1), (2, 0)]);
        assert_eq!(numbers(&on(&[1], 2).pairs(1, &on(&[0, 1], 2))), [(0, 0), (0, 1)]);
    }

    #[test]
    fn the_nearest_rail_is_near_at_both_ends() {
        let two = on(&[0, 1], 2);
        let pairs = two.pairs(2, &two);
        for (ours, theirs) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let cost = |pair: &RailDevices| two.cost(*pair, Place::at(ours), &two, Place::at(theirs), false);
            let best = pairs.iter().min_by_key(|pair| cost(pair)).unwrap();
            assert_eq!((usize::from(best.own), usize::from(best.peer), cost(best)), (ours, theirs, 0));
        }
        // If the peer's place is unknown, the same number is as good as any other.
        let cost = |index: usize| two.cost(pairs[index], Place::at(0), &two, Place::UNKNOWN, index < 2);
        assert_eq!([cost(0), cost(1), cost(2), cost(3)], [0, 2, 1, 3]);
    }

    proptest! {
        /// Every device of ours has a rail that is nearest to every place of the peer's memory, there are no duplicate
        /// rails, and the peer's devices at equal distance get nearly equal numbers of ours.
        #[test]
        fn every_device_reaches_every_place_by_the_nearest(
            own in prop::collection::vec(0u8..3, 1..9),
            peer in prop::collection::vec(0u8..3, 1..9),
        ) {
            let (ours, theirs) = (on(&own, 3), on(&peer, 3));
            let pairs = ours.pairs(own.len(), &theirs);
            let mut seen = std::collections::BTreeSet::new();
            prop_assert!(pairs.iter().all(|pair| seen.insert(*pair)));
            prop_assert!(pairs.iter().all(|pair| usize::from(pair.own) < own.len()));
            prop_assert!(pairs.iter().all(|pair| usize::from(pair.peer) < peer.len()));
            for place in (0..3).map(Place::at) {
                let least = (0..peer.len() as u16).map(|device| theirs.of(device, place).tier).min();
                for device in 0..own.len() as u16 {
                    let mates = pairs.iter().filter(|pair| pair.own == device);
                    let near = mates.map(|pair| theirs.of(pair.peer, place).tier).min();
                    prop_assert_eq!(near, least);
                }
            }
            let firsts: Vec<u16> = pairs[..own.len()].iter().map(|pair| pair.own).collect();
            prop_assert_eq!(firsts, (0..own.len() as u16).collect::<Vec<_>>());
        }
    }
}
