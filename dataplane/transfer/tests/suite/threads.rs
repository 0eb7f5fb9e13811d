//! One engine, many threads: each byte goes to its position, and every wait ends.

use std::sync::Barrier;

use kvplane_transfer::{Opcode, SubmitOptions, TaskState, TransferEngineConfig};

use crate::rig::{Side, Way, block_on, check, fill, pair};

const BLOCK: usize = 3000;

fn hammer(a: &Side, b: &Side, threads: usize, rounds: usize) {
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (a, b, barrier) = (&a, &b, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let slot = thread * 8 * BLOCK;
                for round in 0..rounds {
                    let seed = (thread * 1000 + round) as u64;
                    fill(&a.region, slot, 4 * BLOCK, seed);
                    for (opcode, local) in [(Opcode::Write, slot), (Opcode::Read, slot + 4 * BLOCK)] {
                        let there = b.region.address() + slot as u64;
                        let requests: Vec<_> = (0..4)
                            .map(|n| a.request(opcode, local + n * BLOCK, (peer, there + (n * BLOCK) as u64), BLOCK))
                            .collect();
                        let batch = a.engine.submit(&requests, &SubmitOptions::default()).unwrap();
                        let status = match (thread + round) % 4 {
                            0 => block_on(batch.completed()),
                            1 => loop {
                                let status = batch.poll();
                                if status.state.is_final() {
                                    break status;
                                }
                                std::thread::yield_now();
                            },
                            _ => batch.wait(),
                        };
                        assert_eq!(status.state, TaskState::Completed, "{:?}", batch.problem());
                    }
                    check(&a.region, slot + 4 * BLOCK, 4 * BLOCK, seed);
                }
            });
        }
    });
}

#[test]
fn many_threads_share_an_initiator() {
    for way in Way::all() {
        let (a, b, _) = pair(way, 1 << 20);
        hammer(&a, &b, 16, 30);
    }
}

#[test]
fn threads_may_have_initiators_of_their_own() {
    for way in Way::all() {
        let bytes = 1 << 20;
        let a = Side::new(TransferEngineConfig { initiators: 3, ..way.config() }, bytes);
        let b = Side::new(way.config(), bytes);
        hammer(&a, &b, 9, 30);
    }
}

/// All threads wait for batches of each other, some for the same one.
#[test]
fn sixty_four_threads_wait_for_each_others_batches() {
    let (a, b, peer) = pair(Way::network(), 2 << 20);
    let there = b.region.address();
    let batches: Vec<_> = (0..32)
        .map(|n| {
            let read = a.request(Opcode::Read, n * 65_536, (peer, there + n as u64 * 65_536), 65_536);
            a.engine.submit(&[read], &SubmitOptions::default()).unwrap()
        })
        .collect();
    std::thread::scope(|scope| {
        for thread in 0..64 {
            let batches = &batches;
            scope.spawn(move || {
                for n in 0..batches.len() {
                    let batch = &batches[(n + thread / 2) % batches.len()];
                    assert_eq!(batch.wait().state, TaskState::Completed);
                }
            });
        }
    });
}
