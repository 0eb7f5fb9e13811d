//! The drawing and the JSON of small machines, whole, so that a change of either is seen.

use super::*;
use crate::model::Cache;
use crate::model::{BlockDevice, Nic};
use crate::{CpuSet, PlanRequest, ShardPlan, rail_matrix, synthetic};

fn plan(machine: &Machine, shards: Option<usize>) -> ShardPlan {
    crate::plan(machine, &PlanRequest { shards, affinity: None })
}

fn machine() -> Machine {
    let mut machine = synthetic::parse("numa:2 core:2 pu:2").unwrap();
    machine.allowed_cpus.remove(&3);
    machine.allowed_cpus.remove(&7);
    let cache = |level, kind, cpus: &[usize], size_bytes| Cache {
        level,
        kind,
        shared_cpus: cpus.iter().copied().collect(),
        size_bytes,
    };
    machine.caches = vec![
        cache(1, CacheKind::Data, &[0, 4], Some(48 << 10)),
        cache(1, CacheKind::Data, &[1, 5], Some(48 << 10)),
        cache(3, CacheKind::Unified, &[0, 1, 4, 5], Some(3 << 19)),
    ];
    machine.nics = vec![
        Nic { name: "eth0\u{1b}[2J".into(), ..Nic::default() },
        Nic {
            name: "ib0".into(),
            numa_node: Some(1),
            speed_mbps: Some(400_000),
            up: true,
            rdma_device: Some("mlx5_0".into()),
            ..Nic::default()
        },
    ];
    machine.block_devices = vec![BlockDevice {
        name: "nvme0n1".into(),
        numa_node: Some(0),
        nvme: true,
        bytes: Some(3_840_755_982_336),
        rotational: Some(false),
        ..BlockDevice::default()
    }];
    machine
}

#[test]
fn text_shows_the_placement_of_shards() {
    let machine = machine();
    let expected = "\
2 NUMA nodes, 4 physical cores, 8 CPUs (6 usable)
2 shards, pinned; housekeeping on CPUs 0,4
caches: 2 x L1d 48 KiB, 1 x L3 1.5 MiB
node 0: memory 64 GiB, distances 10 21
  [0,4 hk]  [*1,5 s0]
  disk nvme0n1: 3.4 TiB, NVMe
node 1: memory 64 GiB, distances 21 10
  [*2,6 s1] [3,7 --]
  nic ib0: 400 Gb/s, up, RDMA mlx5_0
node unknown
  nic eth0\\u{1b}[2J: speed unknown, down
[CPUs of one physical core]  *CPU of shard sN  hk: housekeeping  --: not allowed
note: This process may use 6 of 8 CPUs: 0-2,4-6.
note: This machine has no RDMA device: bytes go over TCP and shared memory.
";
    assert_eq!(text(&machine, &plan(&machine, None), &rail_matrix(&machine)), expected);
}

#[test]
fn rows_keep_to_the_width_on_a_large_machine() {
    let machine = synthetic::parse("numa:2 core:96 pu:2").unwrap();
    let drawing = text(&machine, &plan(&machine, None), &rail_matrix(&machine));
    assert!(drawing.lines().all(|line| line.chars().count() <= ROW_CHARACTERS), "{drawing}");
    assert!(drawing.lines().count() < 50, "{drawing}");
    // One mark a shard, and one in the legend.
    assert_eq!(drawing.matches('*').count(), 191 + 1, "{drawing}");
}

#[test]
fn a_machine_that_says_nothing_can_be_drawn() {
    let machine = Machine::default();
    let plan = plan(&machine, None);
    let rails = rail_matrix(&machine);
    assert!(text(&machine, &plan, &rails).starts_with("0 NUMA nodes, 0 physical cores, 0 CPUs (0 usable)"));
    assert_eq!(
        json(&machine, &plan, &rails),
        "{\"machine\":{\"numa_nodes\":[],\"cores\":[],\"caches\":[],\"nics\":[],\"rdma_devices\":[],\
         \"block_devices\":[],\"nvme_controllers\":[],\"gpus\":[],\"allowed_cpus\":[],\"cpu_limit_millis\":null,\
         \"notes\":[]},\"plan\":{\"shards\":[{\"shard\":0,\"core\":null,\"numa_node\":null,\"nics\":[],\"drives\":[],\
         \"reason\":\"Not pinned: the scheduler places it.\"}],\"housekeeping_cores\":[],\"notes\":[\"No usable CPU is \
         known: shards are not pinned, and park as soon as they are idle.\"],\"must_park_at_once\":true},\
         \"rails\":{\"rails\":[],\"excluded\":[],\"rows\":[{\"location\":\"cpu:0\",\"tiers\":[]}],\"notes\":[\"This \
         machine has no RDMA device: bytes go over TCP and shared memory.\"]}}"
    );
}

#[test]
fn json_names_every_field() {
    let mut machine = machine();
    machine.cores.truncate(1);
    machine.numa_nodes.truncate(1);
    machine.caches.truncate(1);
    machine.nics.remove(0);
    machine.allowed_cpus = CpuSet::from([0]);
    let written = json(&machine, &plan(&machine, None), &rail_matrix(&machine));
    for part in [
        concat!(
            r#""numa_nodes":[{"id":0,"kind":"cpus","memory_bytes":68719476736,"#,
            r#""distances":[10,21],"access":null}]"#
        ),
        r#""cores":[{"id":0,"numa_node":0,"package":0,"core_id":0,"smt_siblings":[0,4]}]"#,
        r#""caches":[{"level":1,"kind":"data","shared_cpus":[0,4],"size_bytes":49152}]"#,
        concat!(
            r#""nics":[{"name":"ib0","numa_node":1,"pci":null,"driver":null,"speed_mbps":400000,"#,
            r#""mtu_bytes":null,"queues":null,"up":true,"loopback":false,"rdma_device":"mlx5_0"}]"#
        ),
        concat!(
            r#""block_devices":[{"name":"nvme0n1","numa_node":0,"pci":null,"nvme":true,"controllers":[],"#,
            r#""bytes":3840755982336,"block_bytes":null,"rotational":false,"hardware_queues":[]}]"#
        ),
        r#""allowed_cpus":[0]"#,
    ] {
        assert!(written.contains(part), "{part} in {written}");
    }
}

#[test]
fn sizes_round_down_to_a_tenth() {
    assert_eq!(size_text(Some(1_023)), "1023 B");
    assert_eq!(size_text(Some(1_024)), "1 KiB");
    assert_eq!(size_text(Some((1 << 30) - 1)), "1023.9 MiB");
    assert_eq!(size_text(Some(u64::MAX)), "16777215.9 TiB");
    assert_eq!(size_text(None), "size unknown");
}

#[test]
fn the_picture_holds_no_bare_markup_or_controls() {
    let mut machine = machine();
    machine.nics[0].name = "<eth0>&\u{1b}\"".into();
    let drawing = svg(&machine, &plan(&machine, None), &rail_matrix(&machine));
    assert!(drawing.contains("&lt;eth0&gt;&amp;\u{fffd}&quot;"), "{drawing}");
    assert!(!drawing.contains('\u{1b}') && !drawing.contains("<eth0>"));
    assert!(roxmltree::Document::parse(&drawing).is_ok(), "{drawing}");
}
