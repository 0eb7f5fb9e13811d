//! Memory of a node: allocated on the requested node, on NUMA nodes with cores and on CXL memory without.

use std::fs;
use std::path::Path;

use kvplane::{FarPart, HugePages, Opcode, PageKind, Region, RegionOptions, SegmentHandle, TransferEngineConfig, cpu};

use crate::bed::{Side, config, has, region};
use crate::sysfs::{cores_of, cores_of_threads, read};

const PAGE: u64 = 4096;

/// Returns the machine's nodes: those with cores, and the one that is CXL memory behind them.
fn nodes() -> Vec<u32> {
    let Some(count) = has("RIG_NUMA", "NUMA nodes").filter(|&count| count > 1) else { return Vec::new() };
    let cxl = std::env::var("RIG_CXL").is_ok_and(|bytes| bytes != "0");
    let nodes: Vec<u32> = (0..count as u32 + u32::from(cxl)).collect();
    for &node in &nodes {
        assert_eq!(cores_of(node).is_empty(), node as usize == count, "cores of node {node}");
    }
    nodes
}

/// Returns a smaller size for the node of CXL memory: the emulator interprets every access to it.
fn bytes_on(node: u32, bytes: usize) -> usize {
    if cores_of(node).is_empty() { bytes / 32 } else { bytes }
}

/// Returns the nodes of all pages, without duplicates.
fn nodes_of(region: &Region) -> Vec<Option<u32>> {
    let pages = (region.bytes() as u64).div_ceil(PAGE);
    let mut found: Vec<_> = (0..pages).map(|page| cpu::node_of(region.address() + page * PAGE)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the page counts by node from the line of `/proc/self/numa_maps` for this address.
fn counted_by_kernel(region: &Region) -> Vec<String> {
    let maps = read(Path::new("/proc/self/numa_maps"));
    let start = format!("{:x} ", region.address());
    let line = maps.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {start} in {maps}"));
    let of_node = |word: &&str| word.starts_with('N') && word.contains('=');
    line.split(' ').filter(of_node).map(|word| word.split('=').next().unwrap().to_owned()).collect()
}

#[test]
fn pages_are_allocated_on_the_requested_node() {
    for node in nodes() {
        for (shared, huge) in
            [(false, HugePages::Never), (true, HugePages::Never), (false, HugePages::Try), (true, HugePages::Try)]
        {
            let bytes = bytes_on(node, 6 << 20) + 4096;
            let options = RegionOptions {
                shared,
                huge,
                prefault: true,
                numa_node: Some(node),
                ..RegionOptions::new("placed", bytes)
            };
            let region = Region::allocate(&options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
            assert_eq!(nodes_of(&region), [Some(node)], "{options:?} with {:?} pages", region.page_kind());
            assert_eq!(counted_by_kernel(&region), [format!("N{node}")], "{options:?}");
            println!("node {node}, shared {shared}, {huge:?}: {:?} pages", region.page_kind());
        }
    }
}

#[test]
fn a_far_part_is_on_its_node_and_the_rest_is_not() {
    let nodes = nodes();
    let Some((&far, near)) = nodes.split_last() else { return };
    for shared in [false, true] {
        let (offset, bytes) = (FarPart::UNIT_BYTES, FarPart::UNIT_BYTES + bytes_on(far, 6 << 20));
        let options = RegionOptions {
            shared,
            prefault: true,
            numa_node: near.first().copied(),
            far: Some(FarPart { offset, node: far }),
            ..RegionOptions::new("far", bytes)
        };
        let region = Region::allocate(&options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
        for at in (0..bytes as u64).step_by(PAGE as usize) {
            let node = if at < offset as u64 { near[0] } else { far };
            assert_eq!(cpu::node_of(region.address() + at), Some(node), "byte {at} of {options:?}");
        }
    }
}

#[test]
fn a_node_without_huge_pages_gives_plain_ones() {
    for node in nodes() {
        let there = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        let there: usize = read(Path::new(&there)).parse().unwrap();
        // More than the node has, less than all nodes have together.
        for prefault in [true, false] {
            if prefault && there == 0 {
                continue;
            }
            let options = RegionOptions {
                numa_node: Some(node),
                prefault,
                ..RegionOptions::new("too many", (there + 1) * (2 << 20))
            };
            let region = Region::allocate(&options).unwrap();
            assert_ne!(region.page_kind(), PageKind::HugeTlb, "{options:?}");
            // Touched completely: a missing huge page would kill the process.
            region.fill_with(0, region.bytes(), &mut |_, part| part.fill(1));
            assert_eq!(nodes_of(&region), [Some(node)]);
            let error = Region::allocate(&RegionOptions { numa_node: Some(63), ..options }).unwrap_err();
            assert!(error.to_string().contains("63"), "{error}");
        }
    }
}

#[test]
fn engines_serve_from_cores_and_memory_of_their_node() {
    let nodes = nodes();
    for &here in nodes.iter().filter(|&&node| !cores_of(node).is_empty()) {
        for &there in &nodes {
            let bytes = bytes_on(there, 2 << 20);
            for tcp in [true, false] {
                let core = *cores_of(here).last().unwrap();
                let ways = TransferEngineConfig { tcp, shared_memory: !tcp, ..config() };
                let pinned = TransferEngineConfig { core: Some(core), ..ways.clone() };
                let (a, b) =
                    (Side::new(ways, region(bytes, Some(there))), Side::new(pinned, region(bytes, Some(here))));
                assert!(cores_of_threads().contains(&core.to_string()), "a thread is pinned to core {core}");
                let location = |side: &Side| {
                    side.engine.segment_info(SegmentHandle::LOCAL).unwrap().buffers[0].location.clone().unwrap()
                };
                assert_eq!((location(&a), location(&b)), (format!("cpu:{there}"), format!("cpu:{here}")));
                let peer = a.engine.open_segment(b.engine.name()).unwrap();
                let seed = u64::from(there) * 10 + u64::from(here);
                a.fill(0, 0, bytes, seed);
                a.done(&[a.request(Opcode::Write, 0, (peer, b.region.address()), bytes)]);
                b.check(0, 0, bytes, seed);
                a.fill(0, 0, bytes, !seed);
                a.done(&[a.request(Opcode::Read, 0, (peer, b.region.address()), bytes)]);
                a.check(0, 0, bytes, seed);
                assert_eq!((nodes_of(&a.region), nodes_of(&b.region)), (vec![Some(there)], vec![Some(here)]));
            }
        }
    }
}

#[test]
fn drives_fill_memory_of_every_node_with_cores() {
    let _turn = crate::bed::alone();
    const BYTES: usize = 2 << 20;
    // No emulated device can access CXL memory.
    for node in nodes().into_iter().filter(|&node| !cores_of(node).is_empty()) {
        for drive in crate::sysfs::drives() {
            let side = Side::new(config(), region(BYTES, Some(node)));
            let of = fs::read_to_string(drive.controller.join("numa_node")).unwrap_or_default();
            let segment = side.engine.open_segment(&drive.name()).unwrap();
            side.fill(0, 0, BYTES, u64::from(node));
            side.done(&[side.request(Opcode::Write, 0, (segment, 0), BYTES)]);
            side.fill(0, 0, BYTES, !0);
            side.done(&[side.request(Opcode::Read, 0, (segment, 0), BYTES)]);
            side.check(0, 0, BYTES, u64::from(node));
            assert_eq!(nodes_of(&side.region), [Some(node)], "a drive of node {}", of.trim());
        }
    }
}
