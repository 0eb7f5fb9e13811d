//! Frames of all sizes, more of them than there are credits, in both directions at once.

use kvplane_proto::Limits;
use kvplane_proto::message::Operation;
use kvplane_proto::rng::Rng;
use kvplane_transport::{CloseCause, RdmaOptions};

use super::bed::{Bed, End, answers, asks, on_devices, pattern};

fn body(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| pattern(seed, at)).collect()
}

#[test]
fn frames_of_all_sizes_arrive_whole_and_in_order() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 4096, RdmaOptions::default());
        let mut rng = Rng::new(1, "frames");
        let edges = [0, 1, 8192 - 32 - 64, 8192 - 32 - 64 + 1, 2 * (8192 - 32) - 64, Limits::BODY_BYTES];
        let sizes: Vec<usize> = edges.into_iter().chain((0..60).map(|_| (rng.next_u64() % 20_000) as usize)).collect();
        for (index, &bytes) in sizes.iter().enumerate() {
            let (there, back) = (body(index as u64, bytes), body(!(index as u64), bytes));
            let header = asks(Operation::Exists, index as u32).with_body(&there, 1);
            assert!(bed.asking.rdma.send(bed.ask, &header, &there, None));
            let header = answers(Operation::Exists, index as u32).with_body(&back, 1);
            assert!(bed.asked.rdma.send(bed.serve, &header, &back, None));
        }
        bed.until("all frames are there", |bed| {
            bed.asking.frames.len() == sizes.len() && bed.asked.frames.len() == sizes.len()
        });
        for (index, &bytes) in sizes.iter().enumerate() {
            for (end, seed) in [(&bed.asked, index as u64), (&bed.asking, !(index as u64))] {
                let (header, found) = &end.frames[index];
                assert_eq!(header.request.index, index as u32);
                assert_eq!(*found, body(seed, bytes), "body {index} of {bytes} bytes");
            }
        }
    });
}

#[test]
fn many_small_frames_share_a_doorbell() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 4096, RdmaOptions::default());
        const FRAMES: usize = 3000;
        for index in 0..FRAMES as u32 {
            assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Size, index), &[], None));
        }
        bed.until("all frames are there", |bed| bed.asked.frames.len() == FRAMES);
        let counters = *bed.asking.rdma.counters();
        assert!(counters.messages >= FRAMES as u64);
        assert!(counters.doorbells * 2 <= counters.messages, "{counters:?}");
    });
}

#[test]
fn a_connection_that_is_closed_ends_on_both_sides() {
    on_devices(|devices, _| {
        let mut bed = Bed::new(devices, 4096, RdmaOptions::default());
        let ask = bed.ask;
        bed.asked.rdma.close(bed.serve, CloseCause::Closed);
        bed.until("our side is closed", |bed| bed.asked.gone.len() == 1 && bed.asked.rdma.open() == 0);
        // The other side detects it by a request.
        assert!(bed.asking.rdma.send(ask, &asks(Operation::Exists, 1), &[], None));
        bed.until("the other side is gone", |bed| bed.asking.gone.len() == 1);
        assert!(matches!(&bed.asking.gone[0], (id, CloseCause::Rdma(_)) if *id == ask), "{:?}", bed.asking.gone);
        assert!(!bed.asking.rdma.send(ask, &asks(Operation::Exists, 2), &[], None));
        bed.connect();
        assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Exists, 3), &[], None));
        bed.until("the next connection works", |bed| bed.asked.frames.len() == 1);
    });
}

#[test]
fn a_new_connection_evicts_the_least_recently_used_one() {
    on_devices(|devices, _| {
        let options = RdmaOptions { endpoints: 3, receives: 48, ..RdmaOptions::default() };
        let mut bed = Bed::new(devices, 4096, options);
        let mut connections = vec![(bed.ask, bed.serve)];
        for _ in 0..2 {
            bed.connect();
            connections.push((bed.ask, bed.serve));
        }
        // The first two are used.
        for (index, (ask, _)) in connections[..2].iter().enumerate() {
            assert!(bed.asking.rdma.send(*ask, &asks(Operation::Abort, index as u32), &[], None));
        }
        bed.until("both frames are there", |bed| bed.asked.frames.len() == 2);
        for _ in 0..100 {
            bed.round();
        }
        bed.connect();
        assert_eq!(bed.asking.gone, [(connections[2].0, CloseCause::Closed)]);
        assert_eq!(bed.asked.gone, [(connections[2].1, CloseCause::Closed)]);
        assert_eq!(bed.asking.rdma.counters().evictions, 1);
        assert_eq!(bed.asking.rdma.open(), 3);
    });
}

#[test]
fn unusable_offers_are_rejected_with_the_reason() {
    on_devices(|devices, fabric| {
        let mut asked = End::new(&devices[1], 4096, RdmaOptions::default());
        let (id, answer) = asked.rdma.accept(b"no offer");
        assert!(id.is_none() && !answer.is_empty());
        let mut asking = End::new(&devices[0], 4096, RdmaOptions::default());
        let (ask, _) = asking.rdma.offer(0, 0).expect("an offer");
        asking.rdma.complete(ask, &answer);
        asking.round();
        assert!(
            matches!(&asking.gone[..], [(_, CloseCause::Setup(why))] if why.contains("refuses")),
            "{:?}",
            asking.gone
        );
        assert!(asking.rdma.offer(5, 0).is_err(), "no such device");
        let Some(fabric) = fabric else { return };
        let (_, offer) = asking.rdma.offer(0, 0).expect("an offer");
        fabric.set_port(1, false);
        asked.round();
        let (id, answer) = asked.rdma.accept(&offer);
        assert!(id.is_none() && String::from_utf8_lossy(&answer).contains("loop1"), "{answer:?}");
        fabric.set_port(0, false);
        asking.round();
        let error = asking.rdma.offer(0, 0).expect_err("the port is down").to_string();
        assert!(error.contains("loop0") && error.contains("Down"), "{error}");
        fabric.set_port(0, true);
        fabric.set_port(1, true);
        asking.round();
        assert!(asking.rdma.offer(0, 0).is_ok(), "it is active again");
    });
}
