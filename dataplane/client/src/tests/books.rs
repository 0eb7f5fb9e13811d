//! Counters: transports and failovers are counted where they occur, slow slices have a time breakdown, and counts
//! survive the close of their peer.

use kvplane_proto::ids::SegmentId;
use kvplane_proto::status::Status;

use super::rig::{ClientOutput, Rig, local, shared_config};
use crate::{Config, PeerId, Request, SegmentTarget, Transport, Via};

fn write(peer: PeerId, segment: u32, shareable: bool, bytes: u64) -> Request {
    let segment = SegmentId { index: segment, generation: 1 };
    Request::Write(
        SegmentTarget { peer, segment, offset: 0, shareable, place: crate::Place::UNKNOWN },
        local(0, 0, bytes),
    )
}

/// Executes the client's outputs, one copy at a time; the first `closed` copies fail.
fn run(rig: &mut Rig, mut closed: usize) {
    loop {
        let seen = rig.drain();
        if seen.is_empty() {
            return;
        }
        for seen in seen {
            match seen {
                ClientOutput::Copy { lane, slice, .. } => {
                    rig.now_ns += 10_000;
                    let result = if closed > 0 { Err(Status::Unsupported) } else { Ok(0) };
                    closed = closed.saturating_sub(1);
                    rig.client.copied(lane, slice, result, rig.now_ns);
                }
                other => rig.act(other),
            }
        }
    }
}

fn counted(rig: &Rig) -> Vec<(Transport, u64, u64, u64, u64)> {
    let rails = rig.client.metrics().rail_metrics().filter(|rail| !rail.counts.is_empty());
    rails.map(|r| (r.transport, r.counts.operations, r.counts.bytes, r.counts.retries, r.counts.failovers)).collect()
}

fn rig(change: impl FnOnce(&mut Config)) -> (Rig, PeerId) {
    let mut config = Config { lanes: 1, slow_ns: 20_000, ..shared_config() };
    change(&mut config);
    let mut rig = Rig::new(config, 1);
    rig.cma = true;
    let peer = rig.segment_peer(true);
    (rig, peer)
}

#[test]
fn mapped_and_kernel_copies_are_counted_separately() {
    let (mut rig, peer) = rig(|_| ());
    let batch = rig.submit(&[write(peer, 1, true, 100), write(peer, 2, false, 30), write(peer, 3, false, 7)]);
    run(&mut rig, 0);
    assert!(rig.finish(batch).iter().all(|result| result.0 == Status::Ok));
    assert_eq!(counted(&rig), [(Transport::Shm, 1, 100, 0, 0), (Transport::Cma, 2, 37, 0, 0)]);
    for rail in rig.client.metrics().rail_metrics().filter(|rail| rail.counts.operations > 0) {
        assert_eq!(rail.counts.service.count(), rail.counts.operations);
        assert!(rail.counts.service.sum_ns() >= 10_000, "{:?}: copies take time", rail.transport);
    }
    rig.assert_empty();
}

#[test]
fn an_unused_rail_is_reported_under_its_expected_transport() {
    for (shared, usual) in [(true, Transport::Shm), (false, Transport::Cma)] {
        let (rig, _) = rig(|config| config.shared = shared);
        let rails: Vec<Transport> = rig.client.metrics().rail_metrics().map(|rail| rail.transport).collect();
        assert_eq!(rails, [usual, Transport::Tcp]);
    }
}

#[test]
fn failovers_are_counted_at_the_transport_that_failed() {
    let (mut rig, peer) = rig(|_| ());
    let batch = rig.submit(&[write(peer, 1, true, 100)]);
    run(&mut rig, 2);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    assert_eq!(rig.ways, [Some(Via::Map), Some(Via::Cma)]);
    let expected = [(Transport::Shm, 0, 0, 1, 1), (Transport::Cma, 0, 0, 1, 1), (Transport::Tcp, 1, 100, 0, 0)];
    assert_eq!(counted(&rig), expected);
    let changes: Vec<_> = rig.client.metrics().failovers().iter().map(|one| (one.from, one.to, one.slices)).collect();
    assert_eq!(changes, [(Transport::Shm, Transport::Cma, 1), (Transport::Cma, Transport::Tcp, 1)]);
    rig.assert_empty();
}

#[test]
fn the_time_breakdown_of_a_slow_slice_adds_up() {
    let (mut rig, peer) = rig(|_| ());
    // Connected first, so that the slice does not wait for the connection.
    let batch = rig.submit(&[write(peer, 2, true, 1)]);
    run(&mut rig, 0);
    rig.finish(batch);
    let began_ns = rig.now_ns;
    let batch = rig.submit(&[write(peer, 1, true, 100)]);
    run(&mut rig, 1);
    assert_eq!(rig.finish(batch)[0].0, Status::Ok);
    let slow: Vec<_> = rig.client.metrics().slow_operations().copied().collect();
    let [slow] = slow[..] else { panic!("{slow:?}") };
    // A way that was found closed is no failed attempt.
    assert_eq!((slow.transport, slow.attempts, slow.status, slow.bytes), (Transport::Cma, 0, Status::Ok, 100));
    // Both ways took 10 µs.
    let stages = [slow.begun_ns, slow.queued_ns, slow.posted_ns, slow.sent_ns, slow.done_ns];
    assert_eq!(stages.map(|at_ns| at_ns - began_ns), [0, 10_000, 10_000, 10_000, 20_000]);
    let cma = rig.client.metrics().rail_metrics().find(|rail| rail.transport == Transport::Cma);
    assert_eq!(cma.map(|rail| rail.counts.slow), Some(1));
}

#[test]
fn counts_of_closed_peers_stay_in_the_totals() {
    let (mut rig, first) = rig(|_| ());
    let mut peer = first;
    for incarnation in 1..=3u64 {
        let batch = rig.submit(&[write(peer, 1, true, 100), write(peer, 2, false, 30)]);
        run(&mut rig, 0);
        rig.finish(batch);
        assert_eq!(rig.client.metrics().departed_metrics().len(), if incarnation == 1 { 0 } else { 2 });
        assert!(rig.client.close_peer(peer, rig.now_ns));
        rig.run();
        assert_eq!(counted(&rig), []);
        let mut departed: Vec<_> = rig.client.metrics().departed_metrics().to_vec();
        departed.sort_by_key(|(transport, _)| *transport);
        let sums: Vec<_> = departed.iter().map(|(one, counts)| (*one, counts.operations, counts.bytes)).collect();
        assert_eq!(
            sums,
            [(Transport::Shm, incarnation, 100 * incarnation), (Transport::Cma, incarnation, 30 * incarnation)]
        );
        assert!(departed.iter().all(|(_, counts)| counts.service.count() == incarnation));
        peer = rig.segment_peer(true);
    }
}
