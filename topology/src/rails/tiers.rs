//! Computation of the tiers of each location.
//!
//! A rail is ranked by, in this order: whether it is slow, its proximity, and the distance: bridges between for the
//! same switch, NUMA distance for nodes. Rails with the same rank share a tier.

use super::{Location, Nearness, Rail, RailMatrix, Row, Tier, gigabits};
use crate::model::{Machine, NodeKind, PciPath, PciRelation};
use std::collections::BTreeMap;

/// A location, with the inputs of its distances.
struct LocationFacts<'a> {
    location: Location,
    numa_node: Option<u32>,
    /// True if the node has no CPUs, and so no device of its own.
    bare: bool,
    pci: Option<&'a PciPath>,
}

/// Sort key of tiers; unknown distances come last of their proximity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    slow: bool,
    /// For a node without CPUs: a rail of an unknown node is surely on another one, so known nodes come first.
    doubtful: bool,
    nearness: Nearness,
    distance: u32,
}

const UNKNOWN: u32 = u32::MAX;

pub(super) fn rows(machine: &Machine, matrix: &RailMatrix) -> Vec<Row> {
    let row = |place: &LocationFacts<'_>| Row { location: place.location, tiers: tiers(machine, matrix, place) };
    let mut rows: Vec<Row> = places(machine).iter().map(row).collect();
    begin_apart(&mut rows);
    rows
}

fn places(machine: &Machine) -> Vec<LocationFacts<'_>> {
    let mut places = Vec::new();
    for node in &machine.numa_nodes {
        let location = match node.kind {
            NodeKind::Cxl => Location::Cxl(node.id),
            NodeKind::Cpus | NodeKind::MemoryOnly => Location::Cpu(node.id),
        };
        let bare = node.kind != NodeKind::Cpus;
        places.push(LocationFacts { location, numa_node: Some(node.id), bare, pci: None });
    }
    if places.is_empty() {
        places.push(LocationFacts { location: Location::Cpu(0), numa_node: None, bare: false, pci: None });
    }
    let mut numbers: BTreeMap<&'static str, u32> = BTreeMap::new();
    for gpu in machine.gpus.iter().filter(|gpu| gpu.usable()) {
        let number = numbers.entry(gpu.prefix()).or_default();
        let location = Location::Gpu(gpu.prefix(), *number);
        *number += 1;
        places.push(LocationFacts {
            location,
            numa_node: machine.effective_node(gpu.numa_node),
            bare: false,
            pci: Some(&gpu.pci),
        });
    }
    places
}

fn tiers(machine: &Machine, matrix: &RailMatrix, place: &LocationFacts<'_>) -> Vec<Tier> {
    let mut groups: BTreeMap<Rank, Vec<&Rail>> = BTreeMap::new();
    for rail in &matrix.rails {
        let (nearness, distance) = nearness(machine, place, rail);
        let doubtful = place.bare && nearness == Nearness::NodeUnknown;
        let rank = Rank { slow: matrix.is_slow(rail), doubtful, nearness, distance: distance.unwrap_or(UNKNOWN) };
        groups.entry(rank).or_default().push(rail);
    }
    let tier = |(rank, rails): (Rank, Vec<&Rail>)| {
        let distance = (rank.distance != UNKNOWN).then_some(rank.distance);
        Tier {
            nearness: rank.nearness,
            distance,
            slow: rank.slow,
            reason: reason(matrix, place, rank, distance, &rails),
            rails: rails.iter().map(|rail| rail.name.clone()).collect(),
        }
    };
    groups.into_iter().map(tier).collect()
}

fn nearness(machine: &Machine, place: &LocationFacts<'_>, rail: &Rail) -> (Nearness, Option<u32>) {
    if let (Some(here), Some(there)) = (place.pci, &rail.pci) {
        match here.relation(there) {
            PciRelation::SameSwitch { bridges_between } => {
                return (Nearness::SameSwitch, Some(bridges_between as u32));
            }
            PciRelation::SameRootComplex => return (Nearness::SameRootComplex, None),
            PciRelation::Apart => {}
        }
    }
    // Without NUMA all memory is equally near.
    if machine.numa_nodes.is_empty() && place.pci.is_none() {
        return (Nearness::SameNode, None);
    }
    match (place.numa_node, machine.effective_node(rail.numa_node)) {
        (Some(here), Some(there)) if here == there => (Nearness::SameNode, machine.distance(here, there)),
        (Some(here), Some(there)) => (Nearness::OtherNode, machine.distance(here, there)),
        _ => (Nearness::NodeUnknown, None),
    }
}

fn reason(
    matrix: &RailMatrix,
    place: &LocationFacts<'_>,
    rank: Rank,
    distance: Option<u32>,
    rails: &[&Rail],
) -> String {
    let at = distance.map_or(String::new(), |distance| format!(" at NUMA distance {distance}"));
    let node = place.numa_node.map_or("an unknown node".to_owned(), |node| format!("node {node}"));
    let location = place.location;
    let near = match rank.nearness {
        Nearness::SameSwitch => match distance {
            Some(0) | None => format!("on the card of {location}"),
            Some(bridges) => {
                format!("below the PCI switch of {location}, {bridges} bridges away: no processor in between")
            }
        },
        Nearness::SameRootComplex => format!("below the root complex of {location}, by another root port"),
        Nearness::SameNode => format!("on {node}, where {location} is"),
        Nearness::NodeUnknown => format!("the kernel does not report the distance to {location}"),
        Nearness::OtherNode => {
            let mut nodes: Vec<String> =
                rails.iter().filter_map(|rail| rail.numa_node).map(|n| n.to_string()).collect();
            nodes.sort();
            nodes.dedup();
            format!("on node {}{at} from {location} on {node}", nodes.join(" and "))
        }
        Nearness::Given => "as given".to_owned(),
    };
    if !rank.slow {
        return near;
    }
    let full = gigabits(matrix.full_speed_from_mbps());
    format!("{near}; held back, because slower than {full}, half of the fastest rail")
}

/// Makes GPUs with the same nearest tier begin with different rails of it, so that they do not all use the first.
fn begin_apart(rows: &mut [Row]) {
    let first = |row: &Row| match (row.location, row.tiers.first()) {
        (Location::Gpu(..), Some(tier)) => Some(tier.rails.clone()),
        _ => None,
    };
    let firsts: Vec<Option<Vec<String>>> = rows.iter().map(first).collect();
    for (index, row) in rows.iter_mut().enumerate() {
        let Some(mine) = &firsts[index] else { continue };
        let same = |other: &&Option<Vec<String>>| other.as_ref() == Some(mine);
        let (sharing, before) = (firsts.iter().filter(same).count(), firsts[..index].iter().filter(same).count());
        if let Some(tier) = row.tiers.first_mut() {
            let start = before * tier.rails.len() / sharing;
            tier.rails.rotate_left(start);
        }
    }
}
