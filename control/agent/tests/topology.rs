//! Agreement of libhwloc and sysfs: both describe the same machine, this one and synthetic ones whose files libhwloc
//! reads.
//!
//! The library takes another root from a variable that it reads once, so a child process does the reading: this program
//! again.

use std::path::Path;
use std::process::Command;

use kvplane_topology::{Machine, PlanRequest, Sysfs, hwloc, merge, plan, rail_matrix};
use tree::Tree;

#[path = "../../../topology/tests/suite/saved/tree/mod.rs"]
mod tree;

const HGX: &str = include_str!("../../../topology/tests/suite/saved/machines/hgx.txt");
const CXL: &str = include_str!("../../../topology/tests/suite/saved/machines/cxl.txt");
const SMALL: &str = include_str!("../../../topology/tests/suite/saved/machines/small.txt");

/// File in which the reading process stores its result.
const OUTPUT: &str = "KVPLANE_TEST_HWLOC_XML";

#[test]
fn export_for_another_test() {
    let Some(path) = std::env::var_os(OUTPUT) else { return };
    let xml = kvplane_sys::hwloc::export_xml().unwrap();
    std::fs::write(path, xml).unwrap();
}

/// Returns libhwloc's description of a tree; `None` if the library is missing.
fn exported(tree: &Tree) -> Option<Machine> {
    if let Err(error) = kvplane_sys::hwloc::export_xml() {
        println!("skipped: {error}");
        return None;
    }
    let output = tree.base().join("hwloc.xml");
    let result = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "export_for_another_test"])
        .env(OUTPUT, &output)
        .env("HWLOC_FSROOT", tree.base())
        .env("HWLOC_THISSYSTEM", "0")
        .env("HWLOC_COMPONENTS", "linux,stop")
        .output()
        .unwrap();
    assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    Some(hwloc::parse(&std::fs::read_to_string(output).unwrap()).unwrap())
}

fn read(tree: &Tree) -> Machine {
    Sysfs::at(tree.sys(), tree.process()).read().unwrap()
}

#[test]
fn libhwloc_and_sysfs_describe_synthetic_machines_alike() {
    for description in [HGX, CXL, SMALL] {
        let tree = Tree::build(description);
        let (Some(hwloc), sysfs) = (exported(&tree), read(&tree)) else { return };
        assert_eq!(hwloc.cores, sysfs.cores);
        assert_eq!(hwloc.caches, sysfs.caches);
        assert_eq!(hwloc.gpus.len(), sysfs.gpus.len());
        let hardware = sysfs.rdma_devices.iter().filter(|device| device.driver.is_some()).count();
        assert_eq!(hwloc.rdma_devices.len(), hardware);
        assert_eq!(merge::merge(hwloc, sysfs.clone()), sysfs, "no difference, and nothing that only hwloc knows");
    }
}

#[test]
fn hwloc_alone_gives_the_same_first_tiers() {
    let tree = Tree::build(HGX);
    let Some(hwloc) = exported(&tree) else { return };
    let (ours, theirs) = (rail_matrix(&read(&tree)), rail_matrix(&hwloc));
    for row in theirs.rows.iter().filter(|row| row.location.to_string().starts_with("cuda")) {
        // Without speeds no device counts as slow, so later tiers differ.
        assert_eq!(row.tiers[0].rails, ours.row(&row.location.to_string()).unwrap().tiers[0].rails);
    }
    assert_eq!(plan(&hwloc, &PlanRequest::default()).shards.len(), 111);
}

#[test]
fn libhwloc_and_sysfs_describe_this_machine_alike() {
    if !Path::new("/sys/devices/system/cpu").is_dir() {
        println!("skipped: no sysfs here");
        return;
    }
    let sysfs = Sysfs::system().read().unwrap();
    let machine = kvplane::discover_machine().unwrap();
    assert_eq!(machine.cores.len(), sysfs.cores.len());
    let differing: Vec<&String> = machine.notes.iter().filter(|note| note.contains("by hwloc")).collect();
    assert!(differing.is_empty(), "{differing:?}");
    let request = PlanRequest { shards: None, affinity: kvplane::scheduler_affinity(&machine) };
    let (one, other) = (plan(&machine, &request), plan(&sysfs, &request));
    assert_eq!(one.shards.len(), other.shards.len());
    if let Err(error) = kvplane_sys::hwloc::export_xml() {
        println!("skipped: {error}");
    }
}
