//! Every fault of every rank, at every frame of every kind of operation of every size.

use kvplane_collective::CollectiveKind;
use kvplane_group::{FailureMode, WorldRank};

use super::process::Habits;
use super::workload::Workload;
use super::{Fault, MS, Simulation, number};

const RANKS: u8 = 3;
/// Elements of four bytes, so that each schedule occurs.
const COUNTS: [u64; 3] = [4, 60, 300];
const FAULTS: [Fault; 6] =
    [Fault::Kill, Fault::Stop, Fault::CutPair, Fault::CutOff, Fault::KillControl, Fault::KillBoth];
/// The operation that fails is one of the first ones.
const BEFORE: u64 = 3;

/// Returns a group that has completed some operations, and is about to begin the next one.
fn begun(collective: CollectiveKind, count: u64) -> Simulation {
    let workload = Workload::Fixed { collective, count };
    let mut simulation = Simulation::new(0, (RANKS, RANKS), FailureMode::Automatic, workload);
    let timeout_ns = (200 * MS, 400 * MS);
    simulation.habits = Habits { late: 0, pause_ns: 8 * MS, has_messages: false, timeout_ns };
    while simulation.results < BEFORE * u64::from(RANKS) {
        simulation.step();
        assert!(simulation.now_ns < 5_000 * MS, "no operation of {collective} in the beginning");
    }
    simulation
}

/// Returns the frames of an operation.
fn frames_of(collective: CollectiveKind, count: u64) -> u64 {
    let mut simulation = begun(collective, count);
    let before = simulation.frames;
    while simulation.results < (BEFORE + 1) * u64::from(RANKS) {
        simulation.step();
    }
    simulation.frames - before
}

fn fail(collective: CollectiveKind, count: u64, at: u64, fault: Fault, rank: u8) {
    let mut simulation = begun(collective, count);
    simulation.planned = Some((simulation.frames + at, fault, WorldRank(rank)));
    simulation.run(100, 0);
    assert!(simulation.planned.is_none(), "frame {at} did not arrive");
    let results = simulation.results;
    // Longer than the deadline, the verdict and a change of the view.
    simulation.run(2_500, 0);
    let needs_control = fault == Fault::KillBoth;
    let is_root_gone = rank == 0 && !matches!(fault, Fault::CutOff | Fault::KillControl);
    if !needs_control && !is_root_gone {
        assert!(simulation.results > results + 20, "the others do not go on");
    }
    simulation.heal();
    simulation.run(3_000, 0);
    simulation.check_healed();
}

/// `KVPLANE_COLLECTIVE_CASES` of all cases, at equal distances.
#[test]
fn faults_at_frames() {
    let kinds = (0..).map_while(CollectiveKind::from_number);
    let sizes = kinds.flat_map(|kind| {
        let counts: &[u64] = if kind == CollectiveKind::Barrier { &[0] } else { &COUNTS };
        counts.iter().map(move |count| (kind, *count))
    });
    let frames = sizes.flat_map(|(kind, count)| (1..=frames_of(kind, count)).map(move |at| (kind, count, at)));
    let faults = || FAULTS.into_iter().flat_map(|fault| (0..RANKS - 1).map(move |rank| (fault, rank)));
    let cases: Vec<_> = frames.flat_map(|frame| faults().map(move |fault| (frame, fault))).collect();
    let every = (cases.len() as u64 / number("KVPLANE_COLLECTIVE_CASES", 80).max(1)).max(1);
    for ((kind, count, at), (fault, rank)) in cases.into_iter().skip(every as usize / 2).step_by(every as usize) {
        println!("{kind} of {count}: {fault:?} of rank {rank} at frame {at}");
        fail(kind, count, at, fault, rank);
    }
}
