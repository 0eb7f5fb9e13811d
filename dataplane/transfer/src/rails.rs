//! Ranking of RDMA rails for memory locations, with the reasons in words.

pub mod near;
pub(crate) mod rdma;

use std::fmt;

use kvplane_client::{Near, Place, RailDevices};
use kvplane_engine::NearDevices;

use crate::rails::near::Theirs;

/// Rail and its rank for a pair of memory locations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankedRail {
    /// Local device.
    pub own: String,
    /// Peer's device, by its name where the peer announced it, else by its index.
    pub peer: String,
    /// Rank: 1 for the rails that are used while one of them is healthy, 2 for those that replace them, and so on.
    pub rank: usize,
    /// Reason for the rank.
    pub reason: String,
}

/// Rails for a pair of memory locations, local and remote, in the order of their ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryRails {
    /// Location of the local memory; `*` if unknown.
    pub own: String,
    /// Location of the peer's memory; `*` if unknown.
    pub peer: String,
    /// Rails, best first.
    pub rails: Vec<RankedRail>,
}

impl fmt::Display for MemoryRails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "from local memory at {} to the peer's at {}:", self.own, self.peer)?;
        for RankedRail { own, peer, rank, reason } in &self.rails {
            writeln!(f, "  {rank}. {own} -> {peer}: {reason}")?;
        }
        Ok(())
    }
}

/// Returns the named locations; `*` if there are none.
fn places<'a>(names: impl Iterator<Item = &'a String>) -> Vec<(Place, String)> {
    let places: Vec<_> = names.enumerate().map(|(position, name)| (Place::at(position), name.clone())).collect();
    if places.is_empty() { vec![(Place::UNKNOWN, "*".to_owned())] } else { places }
}

/// Returns the rails from our devices of these names to a peer, for every pair of locations.
pub(crate) fn rank(near: &NearDevices, names: &[String], theirs: &Theirs) -> Vec<MemoryRails> {
    let table = near.table(names.iter().map(String::as_str));
    let pairs = table.pairs(names.len(), &theirs.near);
    let (ours, others) = (places(near.places.iter().map(|place| &place.name)), places(theirs.place_names.iter()));
    let mut ranked = Vec::new();
    for (own, own_name) in &ours {
        for (peer, peer_name) in &others {
            let cost = |(position, pair): (usize, &RailDevices)| {
                let first = !pairs[..position].iter().any(|other| other.own == pair.own);
                (table.cost(*pair, *own, &theirs.near, *peer, first), *pair)
            };
            let mut costs: Vec<(u8, RailDevices)> = pairs.iter().enumerate().map(cost).collect();
            costs.sort_by_key(|(cost, _)| *cost);
            let mut levels: Vec<u8> = costs.iter().map(|(cost, _)| *cost).collect();
            levels.dedup();
            let rail = |(cost, pair): (u8, RailDevices)| {
                let own_device = names[usize::from(pair.own)].clone();
                let why = near.why.get(&own_device).and_then(|why| why.get(own.position()?)).cloned();
                let here = why.unwrap_or_else(|| words(&table, pair.own, *own).to_owned());
                RankedRail {
                    peer: theirs.devices.get(usize::from(pair.peer)).cloned().unwrap_or(format!("#{}", pair.peer)),
                    rank: levels.iter().position(|level| *level == cost).map_or(0, |level| level + 1),
                    reason: format!("here {here}; there {}", words(&theirs.near, pair.peer, *peer)),
                    own: own_device,
                }
            };
            let rails: Vec<RankedRail> = costs.into_iter().map(rail).collect();
            if !rails.is_empty() {
                ranked.push(MemoryRails { own: own_name.clone(), peer: peer_name.clone(), rails });
            }
        }
    }
    ranked
}

/// Describes how near a device is to memory, as far as a table tells.
fn words(near: &Near, device: u16, place: Place) -> &'static str {
    let nearness = near.of(device, place);
    match (nearness.same_node, nearness.tier) {
        (Some(true), _) => "on the memory's node",
        (Some(false), _) => "on another node than the memory",
        (None, 0) => "distance unknown",
        (None, _) => "of a lower preference",
    }
}

#[cfg(test)]
mod tests {
    use kvplane_client::Nearness;
    use kvplane_engine::PlaceName;

    use super::*;

    #[test]
    fn rails_are_ranked_by_both_ends_with_reasons() {
        let near = |same: bool| Nearness { tier: u8::from(!same), same_node: Some(same) };
        let place = |node: u32| PlaceName { name: format!("cpu:{node}"), node: Some(node), pci: None };
        let names = ["a".to_owned(), "b".to_owned()];
        let rows = [vec![near(true), near(false)], vec![near(false), near(true)]];
        let devices = NearDevices {
            places: vec![place(0), place(1)],
            devices: names.iter().cloned().zip(rows.clone()).collect(),
            why: [("a".to_owned(), vec!["on node 0, where cpu:0 is".to_owned()])].into(),
        };
        let mut theirs = Theirs::default();
        theirs.near = Near::new(rows.to_vec());
        theirs.devices = vec!["x".to_owned(), "y".to_owned()];
        theirs.place_names = vec!["cpu:0".to_owned(), "cpu:1".to_owned()];
        let ranked = rank(&devices, &names, &theirs);
        let first = |one: &MemoryRails| {
            let best: Vec<_> = one.rails.iter().filter(|rail| rail.rank == 1).collect();
            assert_eq!(best.len(), 1);
            (one.own.clone(), one.peer.clone(), best[0].own.clone(), best[0].peer.clone())
        };
        let found: Vec<_> = ranked.iter().map(first).collect();
        let wanted = [("cpu:0", "cpu:0", "a", "x"), ("cpu:0", "cpu:1", "a", "y")];
        let wanted = wanted.into_iter().chain([("cpu:1", "cpu:0", "b", "x"), ("cpu:1", "cpu:1", "b", "y")]);
        let own = |(a, b, c, d): (&str, &str, &str, &str)| (a.to_owned(), b.to_owned(), c.to_owned(), d.to_owned());
        assert_eq!(found, wanted.map(own).collect::<Vec<_>>());
        let text = ranked[1].to_string();
        assert!(text.contains("1. a -> y: here on node 0, where cpu:0 is; there on the memory's node"), "{text}");
        assert!(text.contains("3. b -> x: here on another node than the memory; there on another node"), "{text}");
        // The devices of a peer without an announcement are paired by index.
        let plain = rank(&devices, &names, &Theirs::default());
        assert_eq!((plain.len(), plain[0].peer.as_str(), plain[0].rails[0].peer.as_str()), (2, "*", "#0"));
        assert!(rank(&NearDevices::default(), &[], &Theirs::default()).is_empty());
    }
}
