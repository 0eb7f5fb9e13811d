//! Frames between meshes of one process: order, bytes, room, counters.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use kvplane_mesh::{HEAD_BYTES, Mesh, MeshEvent, SendOutcome};
use kvplane_proto::rng::Rng;

use crate::rig::{End, Fabric, Way, introduce, until};

/// Every rank sends frames of random lengths to every other one, each on a thread of its own.
fn storm(way: Way, ranks: u8, frames: u64) {
    let fabric = Fabric::new(ranks);
    let mut ends: Vec<End> =
        (0..ranks).map(|rank| End::new(fabric.config(way, "storm", rank, 100 + u64::from(rank)))).collect();
    introduce(&mut ends.iter_mut().collect::<Vec<_>>());
    let done = AtomicU8::new(0);
    std::thread::scope(|scope| {
        for end in &mut ends {
            let done = &done;
            scope.spawn(move || {
                let mut rng = Rng::new(u64::from(end.rank), "storm");
                let limit = end.mesh.payload_limit() as u64;
                let mut left: Vec<(u8, u64)> =
                    (0..ranks).filter(|rank| *rank != end.rank).map(|to| (to, frames)).collect();
                let expected = frames * u64::from(ranks - 1);
                end.until("all frames", |end| {
                    for (to, left) in &mut left {
                        let longest = if rng.below(8) == 0 { limit + 1 } else { 300 };
                        while *left > 0 && end.send(*to, rng.below(longest) as usize) == SendOutcome::Sent {
                            *left -= 1;
                        }
                    }
                    end.frames == expected && left.iter().all(|(_, left)| *left == 0)
                });
                // What was sent over a connection leaves while the mesh is driven.
                done.fetch_add(1, Ordering::SeqCst);
                end.until("all others have all", |_| done.load(Ordering::SeqCst) == ranks);
                assert!(end.downs.is_empty(), "{:?}", end.downs);
            });
        }
    });
    let lane = |end: &End| match way {
        Way::Shm => end.mesh.counters().shared_memory,
        Way::Tcp => end.mesh.counters().tcp,
        Way::Rdma => end.mesh.counters().rdma,
    };
    for end in &ends {
        let counters = end.mesh.counters();
        let all = counters.shared_memory.sent.frames + counters.tcp.sent.frames + counters.rdma.sent.frames;
        let expected = frames * u64::from(ranks - 1);
        assert_eq!((lane(end).sent.frames, all, lane(end).received.frames), (expected, expected, expected), "{way:?}");
    }
    drop(ends);
    fabric.check();
}

#[test]
fn frames_of_two_arrive_in_order() {
    Way::ALL.into_iter().for_each(|way| storm(way, 2, 400));
}

#[test]
fn frames_of_three_arrive_in_order() {
    Way::ALL.into_iter().for_each(|way| storm(way, 3, 150));
}

#[test]
fn frames_of_eight_arrive_in_order() {
    Way::ALL.into_iter().for_each(|way| storm(way, 8, 40));
}

#[test]
fn a_full_channel_loses_nothing_and_has_room_again() {
    for way in Way::ALL {
        let fabric = Fabric::new(2);
        let end = |rank| End::new(fabric.config(way, "full", rank, 1));
        let (mut a, mut b) = (end(0), end(1));
        introduce(&mut [&mut a, &mut b]);
        for bytes in [0, 1000, a.mesh.payload_limit()] {
            let before = b.frames;
            let mut sent = 0;
            // The kernel's buffers take some, and the mesh is driven, until nobody has room.
            let mut refused = 0;
            while refused < 1000 {
                match a.send(1, bytes) {
                    SendOutcome::Sent => (sent, refused) = (sent + 1, 0),
                    SendOutcome::Full => refused += 1,
                    SendOutcome::Down => panic!("{way:?}: down"),
                }
                a.take();
                assert!(sent < 1_000_000, "{way:?}: memory in flight is bounded");
            }
            assert!(a.mesh.counters().stalls > 0);
            until(&mut [&mut a, &mut b], "all arrive", |ends| ends[1].frames == before + sent);
            assert_eq!(a.send(1, bytes), SendOutcome::Sent, "{way:?}: there is room again");
            until(&mut [&mut a, &mut b], "one more", |ends| ends[1].frames == before + sent + 1);
        }
    }
}

/// A sender that sleeps for want of room is woken when there is some, and a receiver when there is a frame: neither
/// sleeps to the end of its wait.
#[test]
fn sleepers_are_woken() {
    for way in Way::ALL {
        let fabric = Fabric::new(2);
        let end = |rank| End::new(fabric.config(way, "sleep", rank, 1));
        let (mut a, mut b) = (end(0), end(1));
        introduce(&mut [&mut a, &mut b]);
        const FRAMES: u64 = 300;
        let long = Duration::from_secs(600);
        let done = AtomicU8::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..FRAMES {
                    while a.send(1, 100_000) == SendOutcome::Full {
                        a.mesh.wait(Instant::now() + long);
                        a.take();
                    }
                }
                a.until("the other end has all", |end| end.frames == 1);
                done.store(1, Ordering::SeqCst);
            });
            scope.spawn(|| {
                while b.frames < FRAMES {
                    if !b.take() {
                        b.mesh.wait(Instant::now() + long);
                    }
                }
                assert_eq!(b.send(0, 1), SendOutcome::Sent);
                b.until("the other end has it", |_| done.load(Ordering::SeqCst) == 1);
            });
        });
    }
}

#[test]
fn a_payload_stays_until_it_is_released() {
    for way in Way::ALL {
        let fabric = Fabric::new(2);
        let end = |rank| End::new(fabric.config(way, "held", rank, 1));
        let (mut a, mut b) = (end(0), end(1));
        introduce(&mut [&mut a, &mut b]);
        assert_eq!(a.send(1, 500), SendOutcome::Sent);
        let frame = loop {
            a.take();
            if let Some(MeshEvent::Frame(frame)) = b.mesh.poll() {
                break frame;
            }
        };
        let mut before = vec![0; 500];
        frame.payload.copy_out(&mut before);
        while a.send(1, 20_000) == SendOutcome::Sent {}
        (0..100).for_each(|_| _ = a.take());
        let mut after = vec![0; 500];
        frame.payload.copy_out(&mut after);
        assert!(before == after && before.iter().any(|byte| *byte != 0), "{way:?}");
        b.mesh.release();
        b.received[0] = 1;
        until(&mut [&mut a, &mut b], "the next one", |ends| ends[1].frames > 0);
    }
}

#[test]
fn there_is_no_channel_to_oneself_or_to_strangers() {
    let mut mesh = Mesh::start(Way::Shm.config("alone", 3, 1)).expect("a mesh");
    for to in [3, 4, 63, 255] {
        assert_eq!(mesh.send(to, &[0; HEAD_BYTES], &[]), SendOutcome::Down);
    }
    assert!(mesh.poll().is_none());
    mesh.wait(Instant::now() + Duration::from_millis(1));
}
