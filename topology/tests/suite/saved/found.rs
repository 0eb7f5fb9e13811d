//! Tests of the devices found: ports, queues, drives over a network, GPUs, CXL, and unknown values.

use super::{CXL, HGX, HOLES, SMALL, machine};
use kvplane_topology::model::{Gpu, LinkLayer, NodeKind, PortState};
use kvplane_topology::{PlanRequest, plan, rail_matrix};

#[test]
fn rdma_devices_and_their_ports() {
    let machine = machine(CXL);
    let names: Vec<&str> = machine.rdma_devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["mlx5_0", "mlx5_1", "rxe0", "rxe1"]);
    let [roce, infiniband, over_nic, over_veth] = &machine.rdma_devices[..] else { unreachable!() };
    let port = &roce.ports[0];
    assert_eq!((port.number, port.state, port.link_layer), (1, PortState::Active, LinkLayer::Ethernet));
    assert_eq!((port.speed_mbps, port.netdev.as_deref()), (Some(200_000), Some("ens1")));
    assert_eq!(port.active_mtu_bytes, Some(4_096), "4200 bytes have room for headers");
    assert_eq!((roce.numa_node, roce.driver.as_deref()), (Some(0), Some("mlx5_core")));
    assert_eq!(roce.pci.as_ref().unwrap().function.to_string(), "0000:11:00.0");
    let port = &infiniband.ports[0];
    assert_eq!((port.link_layer, port.active_mtu_bytes, port.netdev.as_ref()), (LinkLayer::InfiniBand, None, None));
    // A software device has its interface's place, if the interface has one.
    assert_eq!((over_nic.numa_node, over_veth.numa_node), (Some(1), None));
    assert_eq!(over_nic.pci.as_ref().unwrap().function.to_string(), "0000:83:00.0");
    assert!(over_veth.pci.is_none());
    let eth0 = machine.nics.iter().find(|nic| nic.name == "eth0").unwrap();
    assert_eq!((eth0.rdma_device.as_deref(), eth0.mtu_bytes, eth0.queues), (Some("rxe0"), Some(9_000), Some(2)));
    assert_eq!(eth0.driver.as_deref(), Some("igb"));
}

#[test]
fn drives_here_and_over_a_network() {
    let machine = machine(CXL);
    let disk = |name: &str| machine.block_devices.iter().find(|disk| disk.name == name).unwrap();
    let local = disk("nvme0n1");
    assert_eq!((local.nvme, local.numa_node, local.block_bytes), (true, Some(0), Some(512)));
    assert_eq!(local.controllers, ["nvme0"]);
    assert_eq!(local.hardware_queues.len(), 2);
    assert!(local.hardware_queues[1].cpus.contains(&15));
    let attached = disk("nvme9n1");
    assert_eq!((attached.numa_node, attached.controllers.as_slice()), (None, &["nvme9".to_owned()][..]));
    let controller = machine.nvme_controllers.iter().find(|controller| controller.name == "nvme9").unwrap();
    assert!(controller.over_fabrics() && controller.pci.is_none());
    assert_eq!(controller.transport.as_deref(), Some("tcp"));
    assert_eq!(controller.address.as_deref(), Some("traddr=10.0.0.9,trsvcid=4420"));
    let own = machine.nvme_controllers.iter().find(|controller| controller.name == "nvme0").unwrap();
    assert!(!own.over_fabrics());
    assert_eq!((own.state.as_deref(), own.queues, own.numa_node), (Some("live"), Some(3), Some(0)));
}

#[test]
fn memory_behind_cxl_is_a_node_without_cpus() {
    let machine = machine(CXL);
    let kinds: Vec<NodeKind> = machine.numa_nodes.iter().map(|node| node.kind).collect();
    assert_eq!(kinds, [NodeKind::Cpus, NodeKind::Cpus, NodeKind::Cxl]);
    let access = machine.numa_nodes[2].access.unwrap();
    assert_eq!((access.read_latency_ns, access.write_mib_per_s), (Some(250), Some(20_480)));
    assert_eq!(machine.distance(2, 1), Some(31));
    assert_eq!(machine.distance(2, 7), None);
}

#[test]
fn gpus_but_not_boot_screens() {
    let machine = machine(HGX);
    assert_eq!(machine.gpus.len(), 8);
    let gpu = &machine.gpus[4];
    assert_eq!((gpu.numa_node, gpu.vendor(), gpu.device_id), (Some(1), "NVIDIA", Some(0x2330)));
    assert_eq!((gpu.prefix(), gpu.driver.as_deref()), ("cuda", Some("nvidia")));
    assert_eq!(gpu.pci.bridges.len(), 3);
    let ascend = Gpu { vendor_id: 0x19e5, ..gpu.clone() };
    assert_eq!((ascend.prefix(), ascend.vendor()), ("npu", "Huawei"));
}

#[test]
fn missing_facts_are_unknown_and_noted() {
    let machine = machine(HOLES);
    assert_eq!(machine.numa_nodes[2].kind, NodeKind::MemoryOnly);
    assert!(machine.numa_nodes[1].distances.is_empty() && machine.nvme_controllers.is_empty());
    assert_eq!(machine.cores.iter().find(|core| core.id == 3).unwrap().package, None);
    for part in ["distances of node 1", "NUMA node of mlx5_1", "memory size of node 1", "port state of mlx5_2 port 1"] {
        assert!(machine.notes.iter().any(|note| note.contains(part)), "{part} in {:?}", machine.notes);
    }
    let rails = rail_matrix(&machine);
    assert_eq!(rails.rails.iter().map(|rail| rail.name.as_str()).collect::<Vec<_>>(), ["mlx5_0", "mlx5_1"]);
    assert!(rails.excluded[0].reason.contains("port 1 is unknown"), "{:?}", rails.excluded);
}

#[test]
fn queues_follow_the_nodes() {
    let machine = machine(HGX);
    let plan = plan(&machine, &PlanRequest::default());
    assert_eq!(plan.shards.len(), 111);
    let first = plan.shards[0].numa_node;
    assert_eq!(first, Some(0), "both have the same bandwidth, without the slow one");
    for seat in &plan.shards {
        assert!(!seat.nics.is_empty() && !seat.drives.is_empty(), "{seat:?}");
        assert!(seat.nics.iter().chain(&seat.drives).all(|share| share.local), "{seat:?}");
        // Queue n of a drive serves the CPUs with remainder n modulo 56.
        let queue = seat.core.unwrap() as u32 % 56;
        assert!(seat.drives.iter().all(|share| share.queue == queue), "{seat:?}");
    }
    let small = super::machine(SMALL);
    let plan = kvplane_topology::plan(&small, &PlanRequest::default());
    assert_eq!((plan.shards.len(), plan.shards[0].core), (1, Some(1)));
    assert_eq!(plan.shards[0].nics[0].device, "eth0");
    assert!(plan.shards[0].nics[0].local, "on a machine with one node everything is near");
}

#[test]
fn a_limit_is_found_and_kept() {
    let limited = machine(&format!("{CXL}limit 350000/100000 -=-\n"));
    assert_eq!(limited.cpu_limit_millis, Some(3_500));
    let plan = plan(&limited, &PlanRequest::default());
    assert_eq!(plan.shards.len(), 2);
}
