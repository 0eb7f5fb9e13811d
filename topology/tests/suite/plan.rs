//! Tests of the shard plan on machines of every shape: named cases, then the rules as properties.

use kvplane_topology::model::{Core, Machine};
use kvplane_topology::plan::MAX_SHARDS;
use kvplane_topology::{CpuSet, PlanRequest, ShardPlan, synthetic};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn plan(machine: &Machine, shards: Option<usize>) -> ShardPlan {
    kvplane_topology::plan(machine, &PlanRequest { shards, affinity: None })
}

fn machine(text: &str) -> Machine {
    synthetic::parse(text).unwrap()
}

fn cores_of(plan: &ShardPlan) -> Vec<Option<usize>> {
    plan.shards.iter().map(|seat| seat.core).collect()
}

fn nodes_of(plan: &ShardPlan) -> Vec<Option<u32>> {
    plan.shards.iter().map(|seat| seat.numa_node).collect()
}

#[test]
fn two_cores_carry_one_shard_and_the_rest() {
    let plan = plan(&machine("core:2"), None);
    assert_eq!(cores_of(&plan), [Some(1)]);
    assert_eq!(plan.housekeeping_cores, CpuSet::from([0]));
    assert!(!plan.must_park_at_once());
    assert!(plan.notes.is_empty(), "{:?}", plan.notes);
}

#[test]
fn one_core_carries_one_shard_that_is_not_pinned() {
    for requested in [None, Some(1)] {
        let plan = plan(&machine("core:1"), requested);
        assert_eq!((cores_of(&plan), nodes_of(&plan)), (vec![None], vec![None]));
        assert_eq!(plan.housekeeping_cores, CpuSet::from([0]));
        assert!(plan.must_park_at_once());
        assert!(plan.notes[0].starts_with("The only usable CPU"), "{:?}", plan.notes);
    }
}

#[test]
fn a_cpuset_of_one_cpu_carries_one_shard_that_is_not_pinned() {
    // By the machine's allowed CPUs, and by the scheduler's affinity alone.
    let mut narrow = machine("numa:2 core:4 pu:2");
    narrow.allowed_cpus = CpuSet::from([5]);
    let wide = (machine("numa:2 core:4 pu:2"), Some(CpuSet::from([5])));
    for (machine, affinity) in [(narrow, None), wide] {
        for shards in [None, Some(1)] {
            let plan = kvplane_topology::plan(&machine, &PlanRequest { shards, affinity: affinity.clone() });
            assert_eq!(cores_of(&plan), [None], "{:?}", plan.notes);
            assert_eq!(plan.housekeeping_cores, CpuSet::from([5]));
            assert!(plan.must_park_at_once());
            assert_eq!(plan.notes[0], "This process may use 1 of 16 CPUs: 5.");
            assert!(plan.notes[1].starts_with("The only usable CPU"), "{:?}", plan.notes);
        }
    }
}

#[test]
fn the_threads_of_one_core_are_divided() {
    let plan = plan(&machine("pu:2"), None);
    assert_eq!(cores_of(&plan), [Some(1)]);
    assert_eq!(plan.housekeeping_cores, CpuSet::from([0]));
    assert!(plan.notes[0].contains("divided"), "{:?}", plan.notes);
}

#[test]
fn two_shards_do_not_fit_the_threads_of_one_core() {
    let plan = plan(&machine("pu:2"), Some(2));
    assert_eq!(cores_of(&plan), [None, None]);
    assert!(plan.notes[0].contains("on one usable physical core"), "{:?}", plan.notes);
    assert_eq!(plan.notes.len(), 1);
}

#[test]
fn more_shards_than_cores_are_not_pinned() {
    let plan = plan(&machine("core:4 pu:2"), Some(4));
    assert_eq!(cores_of(&plan), [None; 4]);
    assert_eq!(plan.housekeeping_cores.len(), 8);
    assert!(plan.must_park_at_once());
    assert!(plan.notes[0].contains("4 shards were requested, but only 3"), "{:?}", plan.notes);
}

#[test]
fn shards_alternate_over_nodes_and_leave_their_siblings_idle() {
    let machine = machine("numa:2 core:4 pu:2");
    let full = plan(&machine, None);
    let expected = [1, 4, 2, 5, 3, 6, 7].map(Some);
    assert_eq!(cores_of(&full), expected);
    assert_eq!(nodes_of(&full), [0, 1, 0, 1, 0, 1, 1].map(Some));
    assert_eq!(full.housekeeping_cores, CpuSet::from([0, 8]));
    let small = plan(&machine, Some(2));
    assert_eq!(cores_of(&small), [Some(1), Some(4)]);
    assert_eq!(small.housekeeping_cores, CpuSet::from([0, 2, 3, 5, 6, 7, 8, 10, 11, 13, 14, 15]));
}

#[test]
fn housekeeping_spares_the_only_core_of_a_node() {
    let mut machine = machine("numa:2 core:4");
    machine.allowed_cpus = CpuSet::from([3, 4, 5, 6]);
    let plan = plan(&machine, None);
    assert_eq!(nodes_of(&plan), [Some(0), Some(1), Some(1)]);
    assert_eq!(plan.housekeeping_cores, CpuSet::from([4]));
    assert_eq!(plan.notes, ["This process may use 4 of 8 CPUs: 3-6."]);
}

#[test]
fn a_request_out_of_range_is_bounded_with_a_note() {
    let machine = machine("core:4");
    for (wish, got) in [(0, 1), (usize::MAX, MAX_SHARDS)] {
        let plan = plan(&machine, Some(wish));
        assert_eq!(plan.shards.len(), got);
        assert!(plan.notes[0].contains("out of range"), "{:?}", plan.notes);
    }
    let large = plan(&synthetic::parse("core:4096").unwrap(), None);
    assert_eq!(large.shards.len(), MAX_SHARDS);
}

#[test]
fn the_schedulers_word_narrows_the_machines() {
    let machine = machine("core:4");
    let request = PlanRequest { shards: None, affinity: Some(CpuSet::from([1, 2, 9])) };
    let plan = kvplane_topology::plan(&machine, &request);
    assert_eq!(cores_of(&plan), [Some(2)]);
    assert_eq!(plan.housekeeping_cores, CpuSet::from([1]));
    assert_eq!(plan.notes, ["This process may use 2 of 4 CPUs: 1-2."]);
}

#[test]
fn a_limit_of_processor_time_feeds_fewer_pollers() {
    let mut machine = machine("core:8");
    machine.cpu_limit_millis = Some(3_500);
    let limited = plan(&machine, None);
    assert_eq!(cores_of(&limited), [Some(1), Some(2)]);
    assert!(limited.notes[0].contains("allows 3.50 CPUs of time: 2 may poll"), "{:?}", limited.notes);
    let crowded = plan(&machine, Some(4));
    assert!(crowded.must_park_at_once());
    assert!(crowded.notes[1].contains("more than may poll"), "{:?}", crowded.notes);
    machine.cpu_limit_millis = Some(1_900);
    let starved = plan(&machine, None);
    assert_eq!(cores_of(&starved), [None]);
    assert!(starved.notes[1].contains("leaves none to poll with"), "{:?}", starved.notes);
    // A limit above the number of cores has no effect.
    machine.cpu_limit_millis = Some(8_000);
    assert_eq!(plan(&machine, None).shards.len(), 7);
}

#[test]
fn a_machine_that_says_nothing_still_gets_a_shard() {
    let plan = plan(&Machine::default(), None);
    assert_eq!(cores_of(&plan), [None]);
    assert!(plan.notes[0].contains("No usable CPU is known"), "{:?}", plan.notes);
}

/// Any machine: sparse CPU numbers, unknown nodes, sibling lists that need not agree, any CPUs allowed.
fn any_machine() -> impl Strategy<Value = Machine> {
    let core =
        (prop::option::of(0_u32..3), prop::collection::btree_set(0_usize..40, 0..3), any::<bool>(), any::<bool>());
    prop::collection::btree_map(0_usize..40, core, 0..24).prop_map(|cpus| {
        let mut machine = Machine::default();
        for (id, (numa_node, mut smt_siblings, grouped, allowed)) in cpus {
            if !grouped {
                smt_siblings.clear();
            }
            smt_siblings.insert(id);
            if allowed {
                machine.allowed_cpus.insert(id);
            }
            let (package, core_id) = (None, None);
            machine.cores.push(Core { id, numa_node, package, core_id, smt_siblings });
        }
        machine
    })
}

fn any_regular_machine() -> impl Strategy<Value = Machine> {
    (1_usize..4, 1_usize..6, 1_usize..4, any::<u64>()).prop_map(|(nodes, cores, threads, mask)| {
        let mut machine = machine(&format!("numa:{nodes} core:{cores} pu:{threads}"));
        machine.allowed_cpus.retain(|cpu| mask >> (cpu % 64) & 1 == 1);
        machine
    })
}

fn names(machine: &Machine, cpu: usize, other: usize) -> bool {
    let core = machine.cores.iter().find(|core| core.id == cpu).unwrap();
    core.smt_siblings.contains(&other)
}

fn check(machine: &Machine, requested: Option<usize>) -> Result<(), TestCaseError> {
    let plan = plan(machine, requested);
    let pinned: Vec<usize> = plan.shards.iter().filter_map(|seat| seat.core).collect();
    let usable = machine.usable_cpus();
    let indices: Vec<usize> = plan.shards.iter().map(|seat| seat.shard).collect();
    prop_assert_eq!(indices, (0..plan.shards.len()).collect::<Vec<_>>());
    prop_assert!(!plan.shards.is_empty());
    if let Some(requested) = requested {
        prop_assert_eq!(plan.shards.len(), requested.max(1));
    }
    prop_assert!(pinned.is_empty() || pinned.len() == plan.shards.len());
    prop_assert_eq!(plan.must_park_at_once(), pinned.is_empty());
    prop_assert_eq!(pinned.iter().copied().collect::<CpuSet>().len(), pinned.len());
    for (index, &cpu) in pinned.iter().enumerate() {
        prop_assert!(usable.contains(&cpu));
        prop_assert!(!plan.housekeeping_cores.contains(&cpu));
        for &other in &pinned[index + 1..] {
            prop_assert!(!names(machine, cpu, other) && !names(machine, other, cpu));
        }
    }
    prop_assert!(plan.housekeeping_cores.is_subset(&usable));
    prop_assert!(usable.is_empty() || !plan.housekeeping_cores.is_empty());
    if pinned.len() > 1 {
        for &cpu in &plan.housekeeping_cores {
            for &shard in &pinned {
                prop_assert!(!names(machine, cpu, shard) && !names(machine, shard, cpu));
            }
        }
    }
    prop_assert!(!plan.must_park_at_once() || !plan.notes.is_empty());
    Ok(())
}

proptest! {
    #[test]
    fn rules_hold_on_any_machine(machine in any_machine(), requested in prop::option::of(0_usize..30)) {
        check(&machine, requested)?;
    }

    #[test]
    fn rules_hold_on_regular_machines(
        machine in any_regular_machine(),
        requested in prop::option::of(0_usize..30),
    ) {
        check(&machine, requested)?;
    }

    #[test]
    fn without_a_wish_all_cores_but_one_are_used(machine in any_regular_machine()) {
        let usable = machine.usable_cpus();
        let cores = machine.physical_cores().iter().filter(|c| !c.cpus.is_disjoint(&usable)).count();
        prop_assert_eq!(plan(&machine, None).shards.len(), cores.saturating_sub(1).max(1));
    }

    #[test]
    fn no_node_has_two_shards_more_than_one_with_room(
        machine in any_regular_machine(),
        draw in any::<usize>(),
    ) {
        // Any number up to the pinnable seats; without any, there is nothing to alternate.
        let wish = 1 + draw % plan(&machine, None).shards.len();
        let mut plan = plan(&machine, Some(wish));
        plan.shards.retain(|seat| seat.core.is_some());
        let usable = machine.usable_cpus();
        let mut shards: BTreeMap<u32, usize> = BTreeMap::new();
        let mut cores: BTreeMap<u32, usize> = BTreeMap::new();
        for core in machine.physical_cores().iter().filter(|c| !c.cpus.is_disjoint(&usable)) {
            *cores.entry(core.numa_node.unwrap()).or_default() += 1;
        }
        for seat in &plan.shards {
            *shards.entry(seat.numa_node.unwrap()).or_default() += 1;
        }
        let most = shards.values().copied().max().unwrap_or(0);
        let largest = cores.values().copied().max().unwrap_or(0);
        for (node, room) in cores {
            let here = shards.get(&node).copied().unwrap_or(0);
            // The node that gives the housekeeping core has one seat less; it is one of the largest.
            let seats = if room == largest { room - 1 } else { room };
            prop_assert!(here + 1 >= most || here >= seats, "node {} has {}, most {}", node, here, most);
        }
    }
}
