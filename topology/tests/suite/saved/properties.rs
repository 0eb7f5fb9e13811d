//! Properties of plan and matrix on machines of any shape.

use kvplane_topology::model::{BlockDevice, Core, Gpu, Machine, NumaNode, PciPath, PortState, RdmaDevice, RdmaPort};
use kvplane_topology::plan::QueueShare;
use kvplane_topology::rails::GivenMatrix;
use kvplane_topology::{CpuSet, PlanRequest, draw, plan, rail_matrix};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Places on the PCI bus: behind switches, on root ports, and none.
fn any_pci(slot: u8) -> impl Strategy<Value = Option<PciPath>> {
    (0_u8..3, 0_u8..3, any::<bool>()).prop_map(move |(root, port, switched)| {
        let bus = root * 0x40;
        let function = format!("0000:{:02x}:00.0", bus + 0x10 + slot);
        let text = match (port, switched) {
            (0, _) => return None,
            (_, true) => format!("pci0000:{bus:02x}/0000:{bus:02x}:0{port}.0/0000:{:02x}:00.0/{function}", bus + port),
            (_, false) => format!("pci0000:{bus:02x}/0000:{bus:02x}:0{port}.0/{function}"),
        };
        PciPath::from_components(text.split('/'))
    })
}

fn any_rdma(index: u8) -> impl Strategy<Value = RdmaDevice> {
    let speed = prop::option::of(prop::sample::select(vec![10_000_u64, 100_000, 200_000, 400_000]));
    (prop::option::of(0_u32..4), any_pci(index), speed, 0_u32..5).prop_map(
        move |(numa_node, pci, speed_mbps, state)| {
            let port =
                RdmaPort { number: 1, state: PortState::from_number(state + 1), speed_mbps, ..RdmaPort::default() };
            RdmaDevice { name: format!("mlx5_{index}"), numa_node, pci, driver: None, ports: vec![port] }
        },
    )
}

fn any_machine() -> impl Strategy<Value = Machine> {
    let cores = prop::collection::vec((prop::option::of(0_u32..4), any::<bool>()), 0..20);
    let rdma = prop::collection::vec(any::<bool>(), 12)
        .prop_flat_map(|there| (0..12).filter(|&i| there[i as usize]).map(any_rdma).collect::<Vec<_>>());
    let gpus = (0..6_u8).map(|index| (any_pci(0x20 + index), prop::option::of(0_u32..4))).collect::<Vec<_>>();
    let drives = prop::collection::vec(prop::option::of(0_u32..4), 0..6);
    let distances = prop::collection::vec(10_u32..40, 16);
    let limit = prop::option::of(0_u64..20_000);
    (cores, rdma, gpus, drives, distances, limit).prop_map(|(cores, rdma_devices, gpus, drives, distances, limit)| {
        let core = |(id, (numa_node, _)): (usize, &(Option<u32>, bool))| Core {
            id,
            numa_node: *numa_node,
            package: None,
            core_id: None,
            smt_siblings: CpuSet::from([id / 2 * 2, id]),
        };
        let row = |id: u32| distances[id as usize * 4..][..4].to_vec();
        let gpu = |(pci, numa_node): (Option<PciPath>, Option<u32>)| {
            Some(Gpu { pci: pci?, vendor_id: 0x10de, device_id: None, numa_node, driver: None })
        };
        let drive = |(index, numa_node): (usize, Option<u32>)| BlockDevice {
            name: format!("nvme{index}n1"),
            numa_node,
            nvme: true,
            ..BlockDevice::default()
        };
        Machine {
            numa_nodes: (0..4).map(|id| NumaNode { id, distances: row(id), ..NumaNode::default() }).collect(),
            cores: cores.iter().enumerate().map(core).collect(),
            allowed_cpus: (0..cores.len()).filter(|&id| cores[id].1).collect(),
            rdma_devices,
            gpus: gpus.into_iter().filter_map(gpu).collect(),
            block_devices: drives.into_iter().enumerate().map(drive).collect(),
            cpu_limit_millis: limit,
            ..Machine::default()
        }
    })
}

proptest! {
    #[test]
    fn every_row_has_every_rail_once(machine in any_machine()) {
        let matrix = rail_matrix(&machine);
        prop_assert_eq!(matrix.rails.len() + matrix.excluded.len(), machine.rdma_devices.len());
        let names: BTreeSet<&str> = matrix.rails.iter().map(|rail| rail.name.as_str()).collect();
        prop_assert_eq!(matrix.rows.len(), machine.numa_nodes.len() + machine.gpus.len());
        for row in &matrix.rows {
            let listed: Vec<&str> = row.tiers.iter().flat_map(|tier| &tier.rails).map(String::as_str).collect();
            prop_assert_eq!(listed.len(), names.len());
            prop_assert_eq!(&listed.into_iter().collect::<BTreeSet<_>>(), &names);
            prop_assert!(row.tiers.iter().all(|tier| !tier.rails.is_empty() && !tier.reason.is_empty()));
            prop_assert!(row.tiers.is_sorted_by_key(|tier| tier.slow), "slow rails come last");
            for pair in row.tiers.windows(2).filter(|pair| pair[0].slow == pair[1].slow) {
                prop_assert!(pair[0].nearness <= pair[1].nearness);
                if pair[0].nearness == pair[1].nearness {
                    prop_assert!(pair[0].distance < pair[1].distance || pair[1].distance.is_none());
                }
            }
        }
    }

    #[test]
    fn the_order_of_discovery_does_not_matter(machine in any_machine()) {
        let mut other = machine.clone();
        other.rdma_devices.reverse();
        other.block_devices.reverse();
        prop_assert_eq!(rail_matrix(&machine), rail_matrix(&other));
        let request = PlanRequest::default();
        prop_assert_eq!(plan(&machine, &request), plan(&other, &request));
    }

    #[test]
    fn matrix_written_for_mooncake_is_accepted_again(machine in any_machine()) {
        let matrix = rail_matrix(&machine);
        let again = matrix.with_given(&GivenMatrix::parse(&matrix.to_mooncake()).unwrap()).unwrap();
        prop_assert_eq!(matrix.differences(&again), Vec::<String>::new());
        prop_assert_eq!(again.to_mooncake(), matrix.to_mooncake());
    }

    #[test]
    fn no_device_is_lost_and_no_shard_goes_without(machine in any_machine(), shards in prop::option::of(1_usize..12)) {
        let plan = plan(&machine, &PlanRequest { shards, affinity: None });
        let matrix = rail_matrix(&machine);
        let devices = |shares: Vec<&QueueShare>| -> BTreeSet<String> {
            shares.into_iter().map(|share| share.device.clone()).collect()
        };
        let dealt = devices(plan.shards.iter().flat_map(|seat| &seat.nics).collect());
        for rail in &matrix.rails {
            prop_assert!(dealt.contains(&rail.name), "{} is lost", rail.name);
        }
        let drives = devices(plan.shards.iter().flat_map(|seat| &seat.drives).collect());
        prop_assert_eq!(drives.len(), machine.block_devices.len());
        for seat in &plan.shards {
            prop_assert!(matrix.rails.is_empty() || !seat.nics.is_empty(), "shard {} has no NIC", seat.shard);
            prop_assert!(!seat.reason.is_empty());
        }
        let queues: Vec<(&str, u32)> =
            plan.shards.iter().flat_map(|s| &s.nics).map(|share| (share.device.as_str(), share.queue)).collect();
        prop_assert_eq!(queues.iter().collect::<BTreeSet<_>>().len(), queues.len(), "no queue has two shards");
    }

    #[test]
    fn cores_go_to_one_shard_within_all_limits(
        machine in any_machine(),
        shards in prop::option::of(1_usize..12),
        affinity in prop::option::of(prop::collection::btree_set(0_usize..20, 0..20)),
    ) {
        let plan = plan(&machine, &PlanRequest { shards, affinity: affinity.clone() });
        let pinned: Vec<usize> = plan.shards.iter().filter_map(|seat| seat.core).collect();
        prop_assert_eq!(pinned.iter().collect::<BTreeSet<_>>().len(), pinned.len());
        let mut usable = machine.usable_cpus();
        usable.retain(|cpu| affinity.as_ref().is_none_or(|affinity| affinity.contains(cpu)));
        prop_assert!(pinned.iter().all(|cpu| usable.contains(cpu)));
        prop_assert!(pinned.iter().all(|cpu| !plan.housekeeping_cores.contains(cpu)));
        prop_assert!(usable.is_empty() || !plan.housekeeping_cores.is_empty(), "something is left for the rest");
        if let Some(limit) = machine.cpu_limit_millis.filter(|limit| *limit < usable.len() as u64 * 1_000) {
            prop_assert!((pinned.len() as u64) < (limit / 1_000).max(1), "{} pollers of {limit}", pinned.len());
        }
    }

    #[test]
    fn any_machine_can_be_drawn(machine in any_machine()) {
        let (plan, rails) = (plan(&machine, &PlanRequest::default()), rail_matrix(&machine));
        let text = draw::text(&machine, &plan, &rails);
        prop_assert!(text.lines().filter(|line| !line.starts_with("note: ")).all(|line| line.chars().count() <= 120));
        prop_assert!(roxmltree::Document::parse(&draw::svg(&machine, &plan, &rails)).is_ok());
        prop_assert!(serde_json::from_str::<serde_json::Value>(&draw::json(&machine, &plan, &rails)).is_ok());
        prop_assert!(!draw::why(&plan, &rails).is_empty());
    }

    #[test]
    fn any_text_is_answered_as_a_matrix(text in "[\\[\\]{}:,\"a-z0-9 ]{0,60}|\\PC{0,60}") {
        let _ = GivenMatrix::parse(&text);
    }
}
