//! Connections that fail at any moment: every operation completes exactly once, and no memory is accessed after that.

use std::collections::BTreeMap;

use kvplane_proto::message::Operation;
use kvplane_proto::rng::Rng;
use kvplane_proto::{SegmentId, Status};
use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_sys::verbs::Mtu;
use kvplane_transport::{CloseCause, RdmaOptions, Target};

use super::bed::{Bed, End, answers, asks, check, fill, on_devices, part, request};

const BYTES: usize = 4 << 20;
const SEGMENT: SegmentId = SegmentId { index: 1, generation: 1 };
const LENGTH: usize = 40_000;

/// Injected failure.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    WeClose,
    TheyClose,
    OurPort,
    TheirPort,
    Retract,
}

/// Starts many of each kind: copies, pushed payloads, fetched payloads.
fn start(bed: &mut Bed, count: usize) {
    for index in 0..count {
        let own = part(&bed.asking.region, index * LENGTH, LENGTH);
        bed.asking.copy(bed.ask, index as u64, (SEGMENT, (index * LENGTH) as u64), &own, false);
        let number = (count + index) as u32;
        let wanted = part(&bed.asking.region, number as usize * LENGTH, LENGTH);
        bed.asking.rdma.expect_answer(bed.ask, request(number), wanted.into());
        assert!(bed.asking.rdma.send(bed.ask, &asks(Operation::Get, number), &[], None));
        let number = (2 * count + index) as u32;
        let source = part(&bed.asking.region, number as usize * LENGTH, LENGTH);
        let header = asks(Operation::Put, number).with_payload(LENGTH as u64, None);
        let payload = bed.asking.outgoing(source, u64::from(number));
        assert!(bed.asking.rdma.send(bed.ask, &header, &[], payload));
    }
}

/// Answers the requests that arrived since the last call.
fn serve(bed: &mut Bed, served: &mut usize, lent: &mut u64) {
    while let Some((header, _)) = bed.asked.frames.get(*served) {
        let (number, kind) = (header.request.index, header.kind);
        *served += 1;
        if kind == kvplane_proto::message::Kind::Request(Operation::Get) {
            let source = part(&bed.asked.region, number as usize * LENGTH, LENGTH);
            let reply = answers(Operation::Get, number).with_payload(LENGTH as u64, None);
            let payload = bed.asked.outgoing(source, u64::from(number));
            // A rejected send is reported as sent nevertheless.
            bed.asked.rdma.send(bed.serve, &reply, &[], payload);
            *lent += 1;
        }
    }
}

fn into_place(end: &End, header: &kvplane_proto::frame::Header) -> Target {
    let at = header.request.index as usize * LENGTH;
    Target::Memory { buffer: part(&end.region, at, LENGTH), checksum: false }
}

fn cause(bed: &mut Bed, fabric: Option<&Loopback>, trouble: Trouble) {
    match (trouble, fabric) {
        (Trouble::WeClose, _) => bed.asking.rdma.close(bed.ask, CloseCause::Closed),
        (Trouble::OurPort, Some(fabric)) => fabric.set_port(0, false),
        (Trouble::TheirPort, Some(fabric)) => fabric.set_port(1, false),
        (Trouble::Retract, _) => bed.asked.rdma.retract(SEGMENT),
        _ => bed.asked.rdma.close(bed.serve, CloseCause::Closed),
    }
}

/// Runs one incarnation of a connection, with a failure after some rounds.
fn one(bed: &mut Bed, fabric: Option<&Loopback>, rng: &mut Rng) {
    const COUNT: usize = 30;
    let trouble = [Trouble::WeClose, Trouble::TheyClose, Trouble::OurPort, Trouble::TheirPort, Trouble::Retract]
        [rng.next_u64() as usize % 5];
    let rounds = rng.next_u64() % 12;
    let theirs = bed.asked.region.clone();
    bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), BYTES as u64, true);
    fill(&part(&bed.asked.region, 0, BYTES), 6);
    for end in [&mut bed.asking, &mut bed.asked] {
        end.frames.clear();
        end.payloads.clear();
        end.holds.clear();
        end.copied.clear();
        end.gone.clear();
    }
    start(bed, COUNT);
    let (mut served, mut lent) = (0, 0);
    for _ in 0..rounds {
        bed.asking.round();
        bed.asked.round();
        serve(bed, &mut served, &mut lent);
    }
    cause(bed, fabric, trouble);
    let ends = !matches!(trouble, Trouble::Retract);
    println!("{trouble:?} after {rounds} rounds");
    let limit = std::time::Instant::now() + super::bed::DEADLINE;
    loop {
        bed.round();
        serve(bed, &mut served, &mut lent);
        let asking_over = !bed.asking.gone.is_empty();
        // The other channel reports to the host that the peer is gone, even while no request is outstanding.
        if !bed.asked.gone.is_empty() && !asking_over {
            bed.asking.rdma.close(bed.ask, CloseCause::Peer);
        }
        let over = bed.asking.copied.len() == COUNT && bed.asking.holds.len() == COUNT;
        if over && (asking_over || !ends) && bed.asked.holds.len() as u64 == lent {
            break;
        }
        assert!(
            std::time::Instant::now() < limit,
            "{trouble:?} after {rounds}: never over: {:?} {:?}",
            bed.asking.gone,
            bed.asked.gone
        );
    }
    check_outcomes(bed, COUNT);
    // From here on its memory is not accessed any more.
    let quiet = part(&bed.asking.region, 0, BYTES);
    fill(&quiet, 7);
    if bed.asking.gone.is_empty() {
        bed.asking.rdma.close(bed.ask, CloseCause::Closed);
    }
    if bed.asked.gone.is_empty() {
        bed.asked.rdma.close(bed.serve, CloseCause::Closed);
    }
    bed.until("both ends are gone", |bed| bed.asking.rdma.open() == 0 && bed.asked.rdma.open() == 0);
    bed.asked.rdma.retract(SEGMENT);
    if let Some(fabric) = fabric {
        fabric.set_port(0, true);
        fabric.set_port(1, true);
    }
    for _ in 0..20 {
        bed.round();
    }
}

fn check_outcomes(bed: &Bed, count: usize) {
    let mut copies = BTreeMap::new();
    for (token, result) in &bed.asking.copied {
        assert!(copies.insert(*token, *result).is_none(), "copy {token} completed twice");
        match result {
            Ok(()) => check(&part(&bed.asking.region, *token as usize * LENGTH, LENGTH), 6, *token * LENGTH as u64),
            Err(status) => assert!(matches!(status, Status::Stale | Status::Unreachable), "{status}"),
        }
    }
    for end in [&bed.asking, &bed.asked] {
        let mut holds = end.holds.clone();
        holds.sort_unstable();
        holds.dedup();
        assert_eq!(holds.len(), end.holds.len(), "a hold was given back twice");
    }
    for (request, _) in &bed.asking.payloads {
        let number = request.index as usize;
        assert!((count..2 * count).contains(&number));
        check(&part(&bed.asking.region, number * LENGTH, LENGTH), 6, (number * LENGTH) as u64);
    }
}

#[test]
fn every_operation_completes_once_whatever_fails() {
    on_devices(|devices, fabric| {
        let mut bed = Bed::new(devices, BYTES, RdmaOptions::default());
        bed.asking.places = into_place;
        bed.asked.places = |end, header| {
            let mut target = into_place(end, header);
            if header.request.index.is_multiple_of(3) {
                target = Target::Discard;
            }
            target
        };
        let incarnations = if fabric.is_some() { 60 } else { 6 };
        for incarnation in 0..incarnations {
            let mut rng = Rng::new(incarnation, "failures");
            one(&mut bed, fabric, &mut rng);
            bed.connect();
        }
    });
}

#[test]
fn a_removed_device_ends_all_of_its_connections() {
    on_devices(|devices, fabric| {
        let Some(fabric) = fabric else { return };
        let mut bed = Bed::new(devices, BYTES, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), BYTES as u64, true);
        start(&mut bed, 10);
        fabric.pause(0, true);
        bed.round();
        fabric.remove(0);
        bed.until("the end is reported", |bed| bed.asking.gone.len() == 1 && bed.asking.copied.len() == 10);
        assert_eq!(bed.asking.holds.len(), 10);
        let error = bed.asking.rdma.offer(0, 0).expect_err("the device is gone").to_string();
        assert!(error.contains("loop0"), "{error}");
    });
}

#[test]
fn ports_of_different_packets_agree_on_the_shorter_ones() {
    for mtus in [[Mtu::Bytes4096, Mtu::Bytes1024], [Mtu::Bytes256, Mtu::Bytes2048]] {
        let fabric = Loopback::new(&mtus.map(|mtu| SoftPort { mtu, ..SoftPort::default() }));
        let mut bed = Bed::new(&fabric.verbs().devices().unwrap(), BYTES, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), BYTES as u64, true);
        start(&mut bed, 10);
        bed.until("all is over", |bed| bed.asking.copied.len() == 10);
        assert!(bed.asking.copied.iter().all(|copied| copied.1 == Ok(())), "{:?}", bed.asking.copied);
    }
}

#[test]
fn an_unresponsive_peer_is_explained_by_the_path_mtu() {
    let fabric = Loopback::new(&[SoftPort::default(); 2]);
    let mut bed = Bed::new(&fabric.verbs().devices().unwrap(), BYTES, RdmaOptions::default());
    let theirs = bed.asked.region.clone();
    bed.asked.rdma.publish(SEGMENT, &theirs.clone().into(), BYTES as u64, true);
    fabric.set_port(1, false);
    start(&mut bed, 1);
    bed.until("the end is reported", |bed| !bed.asking.gone.is_empty());
    let why = bed.asking.gone[0].1.to_string();
    assert!(why.contains("does not answer") && why.contains("MTU of 4096 bytes"), "{why}");
}
