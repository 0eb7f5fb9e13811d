//! Tests of the sysfs reader on small trees in a temporary directory: a server, a bare virtual machine, damage.

use kvplane_topology::model::{CacheKind, Machine};
use kvplane_topology::sysfs::{MAX_FILE_BYTES, SysfsError};
use kvplane_topology::{CpuSet, PlanRequest, ShardPlan, Sysfs};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

fn plan(machine: &Machine, shards: Option<usize>) -> ShardPlan {
    kvplane_topology::plan(machine, &PlanRequest { shards, affinity: None })
}

/// A directory that looks like `/sys`, removed when dropped.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvplane-topology-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        fs::create_dir(&root).unwrap();
        Self { root }
    }

    fn file(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> &Self {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    fn link(&self, path: &str, target: &str) -> &Self {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.root.join(target), path).unwrap();
        self
    }

    /// Adds a CPU with its siblings and a level-2 cache that they share.
    fn cpu(&self, id: usize, package: u32, siblings: &str) -> &Self {
        let cpu = format!("devices/system/cpu/cpu{id}");
        self.file(format!("{cpu}/topology/core_cpus_list"), siblings)
            .file(format!("{cpu}/topology/physical_package_id"), format!("{package}\n"))
            .file(format!("{cpu}/topology/core_id"), "-1\n")
            .file(format!("{cpu}/cache/index2/level"), "2\n")
            .file(format!("{cpu}/cache/index2/type"), "Unified\n")
            .file(format!("{cpu}/cache/index2/size"), "2048K\n")
            .file(format!("{cpu}/cache/index2/shared_cpu_list"), siblings)
    }

    fn node(&self, id: u32, cpus: &str, distances: &str) -> &Self {
        let node = format!("devices/system/node/node{id}");
        self.file(format!("{node}/cpulist"), cpus)
            .file(format!("{node}/distance"), distances)
            .file(format!("{node}/meminfo"), format!("Node {id} MemTotal:    1048576 kB\nNode {id} x\n"))
    }

    fn nic(&self, name: &str, flags: &str, state: &str) -> &Self {
        self.file(format!("class/net/{name}/flags"), flags).file(format!("class/net/{name}/operstate"), state)
    }

    fn reader(&self) -> Sysfs {
        Sysfs::at(&self.root, &self.root)
    }

    fn read(&self) -> Machine {
        self.reader().read().unwrap()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // A leftover in the temporary directory does not fail the test.
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Builds two nodes of two cores of two threads; a NIC that names node -1, one with RDMA on node 1, an NVMe disk on
/// node 1.
fn server() -> Tree {
    let tree = Tree::new();
    tree.file("devices/system/cpu/online", "0-7\n")
        .file("status", "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,5-7\nMems_allowed_list:\t0\n");
    for cpu in 0..8 {
        let core = cpu % 4;
        tree.cpu(cpu, core as u32 / 2, &format!("{core},{}\n", core + 4));
    }
    tree.node(0, "0-1,4-5\n", "10 21\n").node(1, "2-3,6-7\n", "21 10\n");

    tree.nic("lo", "0x9\n", "unknown\n").file("class/net/bonding_masters", "\n");
    tree.nic("eth0", "0x1003\n", "up\n")
        .file("class/net/eth0/speed", "-1\n")
        .file("devices/pci0000:00/0000:00:03.0/numa_node", "-1\n")
        .file("devices/pci0000:00/0000:00:03.0/virtio2/id", "2")
        .link("class/net/eth0/device", "devices/pci0000:00/0000:00:03.0/virtio2");
    tree.nic("ib0", "0x1003\n", "down\n")
        .file("class/net/ib0/speed", "400000\n")
        .file("devices/pci0000:80/0000:81:00.0/numa_node", "1\n")
        .file("devices/pci0000:80/0000:81:00.0/infiniband/mlx5_0/node_type", "1: CA\n")
        .link("class/net/ib0/device", "devices/pci0000:80/0000:81:00.0");

    tree.file("block/nvme0n1/size", "7501476528\n")
        .file("block/nvme0n1/queue/rotational", "0\n")
        .file("devices/pci0000:80/0000:82:00.0/numa_node", "1\n")
        .file("devices/pci0000:80/0000:82:00.0/nvme/nvme0/model", "M")
        .link("block/nvme0n1/device", "devices/pci0000:80/0000:82:00.0/nvme/nvme0")
        .file("block/nvme0c0n1/size", "7501476528\n")
        .file("block/nvme0c0n1/hidden", "1\n")
        .file("block/loop0/size", "0\n")
        .file("block/sda/size", "odd\n")
        .file("block/sda/queue/rotational", "1\n");
    tree
}

#[test]
fn cpus_nodes_and_caches_of_a_server() {
    let machine = server().read();
    assert_eq!(machine.cores.len(), 8);
    let core = &machine.cores[6];
    assert_eq!((core.id, core.numa_node, core.package, core.core_id), (6, Some(1), Some(1), None));
    assert_eq!(core.smt_siblings, CpuSet::from([2, 6]));
    assert_eq!(machine.allowed_cpus, CpuSet::from([0, 1, 2, 3, 5, 6, 7]));
    assert_eq!(machine.numa_nodes.len(), 2);
    assert_eq!(machine.numa_nodes[1].memory_bytes, Some(1 << 30));
    assert_eq!(machine.numa_nodes[1].distances, [21, 10]);
    assert_eq!(machine.caches.len(), 4, "siblings list the same cache: {:?}", machine.caches);
    let cache = &machine.caches[3];
    assert_eq!((cache.level, cache.kind, cache.size_bytes), (2, CacheKind::Unified, Some(2 << 20)));
    assert_eq!(cache.shared_cpus, CpuSet::from([3, 7]));

    let plan = plan(&machine, None);
    let seats: Vec<_> = plan.shards.iter().map(|seat| (seat.core, seat.numa_node)).collect();
    assert_eq!(seats, [(Some(1), Some(0)), (Some(2), Some(1)), (Some(3), Some(1))]);
    assert_eq!(plan.housekeeping_cores, CpuSet::from([0]));
}

#[test]
fn devices_of_a_server() {
    let machine = server().read();
    let names: Vec<_> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["eth0", "ib0", "lo"]);
    let [eth0, ib0, lo] = &machine.nics[..] else { unreachable!() };
    assert_eq!((eth0.numa_node, eth0.speed_mbps, eth0.up), (None, None, true));
    assert_eq!((eth0.loopback, eth0.rdma_device.as_deref()), (false, None));
    assert_eq!((ib0.numa_node, ib0.speed_mbps, ib0.up), (Some(1), Some(400_000), false));
    assert_eq!(ib0.rdma_device.as_deref(), Some("mlx5_0"));
    assert_eq!((lo.loopback, lo.up, lo.numa_node), (true, true, None));

    let names: Vec<_> = machine.block_devices.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["nvme0n1", "sda"]);
    let [nvme, sda] = &machine.block_devices[..] else { unreachable!() };
    assert_eq!((nvme.nvme, nvme.numa_node, nvme.rotational), (true, Some(1), Some(false)));
    assert_eq!(nvme.bytes, Some(3_840_755_982_336));
    assert_eq!((sda.nvme, sda.numa_node, sda.bytes, sda.rotational), (false, None, None, Some(true)));
}

#[test]
fn a_multipath_disk_has_the_node_that_its_controllers_agree_on() {
    let tree = server();
    let subsystem = "devices/virtual/nvme-subsystem/nvme-subsys0";
    tree.file("block/nvme1n1/size", "8\n")
        .file(format!("{subsystem}/nqn"), "n")
        .link("block/nvme1n1/device", subsystem)
        .link(&format!("{subsystem}/nvme0"), "devices/pci0000:80/0000:82:00.0/nvme/nvme0")
        .link(&format!("{subsystem}/nvme1n1"), "block/nvme1n1");
    let node = |tree: &Tree| tree.read().block_devices.iter().find(|d| d.name == "nvme1n1").unwrap().numa_node;
    assert_eq!(node(&tree), Some(1));
    tree.file("devices/pci0000:00/0000:00:04.0/numa_node", "0\n")
        .link(&format!("{subsystem}/nvme2"), "devices/pci0000:00/0000:00:04.0");
    assert_eq!(node(&tree), None);
}

#[test]
fn a_bare_tree_is_unknown_not_an_error() {
    let tree = Tree::new();
    for name in ["cpu1/uevent", "cpu0/uevent", "cpufreq/policy", "cpu99999/uevent"] {
        tree.file(format!("devices/system/cpu/{name}"), "");
    }
    let machine = tree.read();
    assert_eq!(machine.cores.iter().map(|core| core.id).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(machine.cores[0].smt_siblings, CpuSet::from([0]));
    assert_eq!((machine.cores[0].numa_node, machine.cores[0].package), (None, None));
    assert_eq!(machine.allowed_cpus, CpuSet::from([0, 1]));
    assert!(machine.numa_nodes.is_empty() && machine.caches.is_empty());
    assert!(machine.nics.is_empty() && machine.block_devices.is_empty());
    assert_eq!(plan(&machine, None).shards[0].core, Some(1));
}

#[test]
fn garbage_in_every_file_is_unknown_not_an_error() {
    fn files(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match fs::symlink_metadata(&path).unwrap().file_type() {
                kind if kind.is_dir() => files(&path, found),
                kind if kind.is_file() => found.push(path),
                _ => {}
            }
        }
    }
    let endless = "9".repeat(MAX_FILE_BYTES as usize * 2);
    let garbage: [&[u8]; 7] =
        [b"", b"\xff\xfe\0", b"-1\n", b"0-999999999\n", b"18446744073709551615K\n", b"a: b\n", endless.as_bytes()];
    for content in garbage {
        let tree = server();
        let mut found = Vec::new();
        files(&tree.root, &mut found);
        assert!(found.len() > 60, "the tree has files to damage");
        for path in found {
            fs::write(path, content).unwrap();
        }
        let machine = tree.read();
        assert_eq!(machine.cores.len(), 8, "CPUs are found by their directories");
        assert_eq!(machine.allowed_cpus.len(), 8);
        assert!(machine.cores.iter().all(|core| core.numa_node.is_none()));
        assert!(machine.numa_nodes.iter().all(|node| node.memory_bytes.is_none()));
        assert!(machine.nics.iter().all(|nic| nic.numa_node.is_none() && nic.speed_mbps.is_none()));
        assert_eq!(plan(&machine, None).shards.len(), 7);
    }
}

#[test]
fn a_distance_row_of_another_length_is_dropped() {
    let tree = server();
    tree.file("devices/system/node/node0/distance", "10 21 31\n");
    let machine = tree.read();
    assert!(machine.numa_nodes[0].distances.is_empty());
    assert_eq!(machine.numa_nodes[1].distances, [21, 10]);
}

#[test]
fn a_root_that_is_not_sysfs_is_an_error_that_names_it() {
    let tree = Tree::new();
    let error = tree.reader().read().unwrap_err();
    assert_eq!(error, SysfsError::NotSysfs { root: tree.root.clone() });
    assert!(error.to_string().contains(tree.root.to_str().unwrap()), "{error}");
    tree.file("devices/system/cpu/online", "\n");
    let error = tree.reader().read().unwrap_err();
    assert_eq!(error, SysfsError::NoCpus { root: tree.root.clone() });
    assert!(error.to_string().contains("names no CPU"), "{error}");
}

#[test]
fn the_least_limit_of_the_groups_above_counts() {
    let tree = server();
    let limit = |tree: &Tree| tree.read().cpu_limit_millis;
    assert_eq!(limit(&tree), None);
    tree.file("cgroup", "2:cpu,cpuacct:/old\n0::/a/b\n").file("fs/cgroup/a/cpu.max", "250000 100000\n");
    assert_eq!(limit(&tree), Some(2_500));
    tree.file("fs/cgroup/a/b/cpu.max", "max 100000\n").file("fs/cgroup/cpu.max", "300000 100000\n");
    assert_eq!(limit(&tree), Some(2_500));
    tree.file("fs/cgroup/cpu,cpuacct/old/cpu.cfs_quota_us", "150000\n")
        .file("fs/cgroup/cpu,cpuacct/old/cpu.cfs_period_us", "100000\n");
    assert_eq!(limit(&tree), Some(1_500));
    // The group's own directory may be invisible in a container.
    tree.file("cgroup", "0::/../elsewhere\n").file("fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    assert_eq!(limit(&tree), Some(3_000));
    tree.file("fs/cgroup/cpu.max", "9 0\n");
    assert_eq!(limit(&tree), None);
}

#[test]
fn the_machine_under_this_test_can_be_read() {
    match Sysfs::system().read() {
        Ok(machine) => assert!(!plan(&machine, None).shards.is_empty()),
        Err(error) => eprintln!("skipped: {error}"),
    }
}
