//! Tests that hwloc's XML and the kernel's sysfs are read into the same model.
//!
//! `machines/cxl.hwloc.xml` was written by libhwloc 2.9 for the tree that `cxl.txt` describes.

use super::{CXL, machine};
use kvplane_topology::hwloc::{self, HwlocError};
use kvplane_topology::model::{Machine, NodeKind};
use kvplane_topology::{PlanRequest, merge, plan, rail_matrix};

const CXL_XML: &str = include_str!("machines/cxl.hwloc.xml");

fn from_hwloc() -> Machine {
    hwloc::parse(CXL_XML).unwrap()
}

#[test]
fn both_sources_give_one_machine() {
    let (sysfs, hwloc) = (machine(CXL), from_hwloc());
    assert_eq!(hwloc.cores, sysfs.cores);
    assert_eq!(hwloc.caches, sysfs.caches);
    assert_eq!(hwloc.allowed_cpus, sysfs.allowed_cpus);
    for (theirs, ours) in hwloc.numa_nodes.iter().zip(&sysfs.numa_nodes) {
        assert_eq!((theirs.id, theirs.memory_bytes, theirs.access), (ours.id, ours.memory_bytes, ours.access));
        assert_eq!(theirs.distances, ours.distances);
    }
    assert_eq!(hwloc.numa_nodes[2].kind, NodeKind::MemoryOnly, "this version does not tell that it is CXL");
    for theirs in &hwloc.nics {
        let ours = sysfs.nics.iter().find(|nic| nic.name == theirs.name).unwrap();
        assert_eq!((theirs.numa_node, &theirs.pci), (ours.numa_node, &ours.pci), "{}", theirs.name);
    }
    for theirs in &hwloc.rdma_devices {
        let ours = sysfs.rdma_devices.iter().find(|device| device.name == theirs.name).unwrap();
        assert_eq!((theirs.numa_node, &theirs.pci), (ours.numa_node, &ours.pci), "{}", theirs.name);
        assert_eq!(theirs.ports[0].state, ours.ports[0].state);
        assert_eq!(theirs.ports[0].netdev, ours.ports[0].netdev);
    }
    for theirs in &hwloc.block_devices {
        let ours = sysfs.block_devices.iter().find(|disk| disk.name == theirs.name).unwrap();
        assert_eq!((theirs.numa_node, &theirs.pci, theirs.bytes), (ours.numa_node, &ours.pci, ours.bytes));
    }
    let counts = (hwloc.nics.len(), hwloc.rdma_devices.len(), hwloc.block_devices.len());
    assert_eq!(counts, (2, 2, 2), "devices of hardware");
    assert_eq!(merge::merge(hwloc, sysfs.clone()), sysfs, "the kernel knows all that hwloc does");
}

#[test]
fn one_source_completes_the_other() {
    let complete = machine(CXL);
    let mut sparse = complete.clone();
    for core in &mut sparse.cores {
        (core.numa_node, core.package) = (None, None);
    }
    for node in &mut sparse.numa_nodes {
        (node.memory_bytes, node.access) = (None, None);
        node.distances.clear();
    }
    for nic in sparse.nics.iter_mut().filter(|nic| nic.name != "veth0") {
        (nic.numa_node, nic.pci) = (None, None);
    }
    sparse.caches.clear();
    for disk in sparse.block_devices.iter_mut().filter(|disk| disk.name != "nvme9n1") {
        (disk.numa_node, disk.pci, disk.bytes) = (None, None, None);
    }
    assert_eq!(merge::merge(from_hwloc(), sparse), complete);
}

#[test]
fn differences_are_noted() {
    let mut sysfs = machine(CXL);
    sysfs.nics.iter_mut().find(|nic| nic.name == "ens1").unwrap().numa_node = Some(1);
    let merged = merge::merge(from_hwloc(), sysfs);
    let note = "The node of ens1 is 0 by hwloc and 1 by the kernel; hwloc's is taken.";
    assert!(merged.notes.iter().any(|one| one == note), "{:?}", merged.notes);
    assert_eq!(merged.nics.iter().find(|nic| nic.name == "ens1").unwrap().numa_node, Some(0));
}

#[test]
fn hwloc_alone_is_enough_to_plan() {
    let machine = from_hwloc();
    let (from_xml, from_sysfs) =
        (plan(&machine, &PlanRequest::default()), plan(&super::machine(CXL), &PlanRequest::default()));
    let cores = |plan: &kvplane_topology::ShardPlan| plan.shards.iter().map(|seat| seat.core).collect::<Vec<_>>();
    assert_eq!(cores(&from_xml), cores(&from_sysfs));
    let first = |location: &str| rail_matrix(&machine).row(location).unwrap().tiers[0].rails.clone();
    assert_eq!(
        (first("cpu:0"), first("cpu:1"), first("cpu:2")),
        (vec!["mlx5_0".into()], vec!["mlx5_1".into()], vec!["mlx5_0".into()])
    );
}

#[test]
fn other_texts_are_refused_with_the_reason() {
    let refused = |text: &str| hwloc::parse(text).unwrap_err();
    assert!(matches!(refused(""), HwlocError::NotXml { .. }));
    assert!(matches!(refused("<a></b>"), HwlocError::NotXml { .. }));
    let other = refused("<system version=\"1\"><gpu/></system>").to_string();
    assert!(other.contains("\"system\"") && other.contains("lstopo --of xml"), "{other}");
    assert!(matches!(refused("<topology version=\"3.0\"/>"), HwlocError::NotHwloc { .. }));
    assert_eq!(refused("<topology version=\"2.0\"/>"), HwlocError::NoCpus);
    let large = " ".repeat(hwloc::MAX_XML_BYTES + 1);
    assert!(matches!(refused(&large), HwlocError::TooLarge { .. }));
    let bomb = "<!DOCTYPE topology [<!ENTITY a \"xx\"><!ENTITY b \"&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;\">\
                <!ENTITY c \"&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;\">]><topology version=\"2.0\">&c;&c;&c;</topology>";
    let _ = hwloc::parse(bomb);
}

#[test]
fn damaged_attributes_leave_values_unknown() {
    for (from, to) in [
        ("cpuset=\"0x0000", "cpuset=\"0xf...f,"),
        ("os_index=\"", "os_index=\"-"),
        ("bridge_pci=\"0000", "bridge_pci=\"zz"),
        ("pci_busid=\"0000", "pci_busid=\"x"),
        ("value=\"", "value=\"-"),
        ("<u64values length=\"27\">10", "<u64values length=\"27\">1 2 10"),
        ("type=\"Core\"", "type=\"Kern\""),
        ("local_memory=\"", "local_memory=\"18446744073709551616"),
    ] {
        let damaged = CXL_XML.replace(from, to);
        assert_ne!(damaged, CXL_XML, "{from}");
        if let Ok(machine) = hwloc::parse(&damaged) {
            assert!(!plan(&machine, &PlanRequest::default()).shards.is_empty());
            let _ = rail_matrix(&machine);
        }
    }
}
