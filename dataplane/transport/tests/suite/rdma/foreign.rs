//! Connections like those of stock Mooncake engines: both roles, without messages, keys from a descriptor.

use std::sync::Arc;

use kvplane_proto::rng::Rng;
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::verbs::{Device, Gid};
use kvplane_transport::{ConnectionId, ForeignBuffer, ForeignHalf, ForeignPeer, RdmaOptions};

use super::bed::{Bed, check, fill, on_devices, part};

const BYTES: usize = 4 << 20;
const PUBLISHED: SegmentId = SegmentId { index: 3, generation: 9 };

/// Two ends, one of which connects to the other like a stock engine.
struct Foreign {
    bed: Bed,
    peer: Arc<ForeignPeer>,
    id: ConnectionId,
    segment: SegmentId,
    /// Our half of the connection.
    half: ForeignHalf,
}

/// Learns the description that a descriptor would carry of the passive end's memory.
fn learn(bed: &mut Bed, peer: &ForeignPeer) -> SegmentId {
    let keys = bed.asked.rdma.foreign_keys(PUBLISHED);
    let keys = keys.into_iter().map(|key| key.map_or(0, |(_, remote)| remote)).collect();
    let (address, bytes) = (bed.asked.region.address(), BYTES as u64);
    let devices = bed.asked.rdma.device_names().map(str::to_owned).collect();
    SegmentId { index: 0, generation: peer.learn(devices, vec![ForeignBuffer { address, bytes, keys }]) }
}

impl Foreign {
    fn new(devices: &[Device], writable: bool) -> Self {
        let mut bed = Bed::new(devices, BYTES, RdmaOptions::default());
        let theirs = bed.asked.region.clone();
        bed.asked.rdma.publish(PUBLISHED, &theirs.clone().into(), BYTES as u64, writable);
        let peer = Arc::new(ForeignPeer::new("127.0.0.1:15000"));
        let segment = learn(&mut bed, &peer);
        let nowhere = ConnectionId { index: u32::MAX, generation: 0 };
        let half = ForeignHalf { queue_pairs: Vec::new(), gid: Gid::default(), lid: 0 };
        let mut foreign = Self { bed, peer, id: nowhere, segment, half };
        foreign.connect(2);
        foreign
    }

    fn offer(&mut self, queue_pairs: usize) -> ForeignHalf {
        let offered = self.bed.asking.rdma.offer_foreign(0, Arc::clone(&self.peer), 0, queue_pairs);
        let (id, half) = offered.expect("an offer");
        (self.id, self.half) = (id, half.clone());
        half
    }

    fn accept(&mut self, half: &ForeignHalf) -> ForeignHalf {
        let device = self.bed.asked.rdma.device_names().next().expect("a device").to_owned();
        self.bed.asked.rdma.accept_foreign(&device, "a:1@m0", half).expect("an accepted connection")
    }

    fn connect(&mut self, queue_pairs: usize) {
        let half = self.offer(queue_pairs);
        assert_eq!(half.queue_pairs.len(), queue_pairs);
        let answer = self.accept(&half);
        assert_eq!(answer.queue_pairs.len(), queue_pairs);
        assert_eq!(self.accept(&half), answer, "who asks twice gets the same answer");
        self.bed.asking.rdma.complete_foreign(self.id, &answer);
        let id = self.id;
        self.bed.until("it is connected", |bed| bed.asking.up.contains(&id));
    }

    fn copy(&mut self, token: u64, offset: usize, (at, bytes): (usize, usize), write: bool) {
        let local = part(&self.bed.asking.region, at, bytes);
        self.bed.asking.copy(self.id, token, (self.segment, offset as u64), &local, write);
    }

    fn outcome(&mut self, token: u64) -> Result<(), Status> {
        self.bed.until("the copy is over", |bed| bed.asking.copied.iter().any(|copied| copied.0 == token));
        let found: Vec<_> = self.bed.asking.copied.iter().filter(|copied| copied.0 == token).collect();
        assert_eq!(found.len(), 1, "each copy completes once");
        found[0].1
    }
}

#[test]
fn random_ranges_are_read_and_written_without_a_message() {
    on_devices(|devices, _| {
        let mut foreign = Foreign::new(devices, true);
        let theirs = foreign.bed.asked.region.clone();
        let before = foreign.bed.asking.rdma.counters().messages;
        fill(&part(&theirs, 0, BYTES), 1);
        let mut rng = Rng::new(11, "foreign");
        let count = 300;
        let mut ranges = Vec::new();
        for token in 0..count {
            let (at, bytes) = (token * 4096, 1 + rng.next_u64() as usize % 4096);
            let offset = rng.next_u64() as usize % (BYTES - bytes);
            foreign.copy(token as u64, offset, (at, bytes), false);
            ranges.push((offset, at, bytes));
        }
        foreign.bed.until("all are over", |bed| bed.asking.copied.len() == count);
        assert!(foreign.bed.asking.copied.iter().all(|copied| copied.1 == Ok(())));
        for (offset, at, bytes) in ranges {
            check(&part(&foreign.bed.asking.region, at, bytes), 1, offset as u64);
        }
        fill(&part(&foreign.bed.asking.region, 0, BYTES), 2);
        foreign.copy(1000, 5, (5, BYTES - 5), true);
        assert_eq!(foreign.outcome(1000), Ok(()));
        check(&part(&theirs, 5, BYTES - 5), 2, 5);
        assert_eq!(foreign.bed.asking.rdma.counters().messages, before, "such a peer takes no messages");
        foreign.copy(1001, BYTES - 1, (0, 2), false);
        assert_eq!(foreign.outcome(1001), Err(Status::OutOfRange));
    });
}

#[test]
fn retracted_memory_is_inaccessible_and_a_new_connection_reaches_the_rest() {
    on_devices(|devices, _| {
        let mut foreign = Foreign::new(devices, true);
        foreign.copy(0, 0, (0, 64), true);
        assert_eq!(foreign.outcome(0), Ok(()));
        foreign.bed.asked.rdma.retract(PUBLISHED);
        let theirs = foreign.bed.asked.region.clone();
        fill(&part(&theirs, 0, BYTES), 3);
        foreign.copy(1, 0, (0, 4096), true);
        assert_eq!(foreign.outcome(1), Err(Status::Stale));
        check(&part(&theirs, 0, BYTES), 3, 0);
        let id = foreign.id;
        foreign.bed.until("the connection ends", |bed| bed.asking.gone.iter().any(|gone| gone.0 == id));
        // It is registered again: its description is fetched again, and the old id is not used any more.
        foreign.bed.asked.rdma.publish(PUBLISHED, &theirs.clone().into(), BYTES as u64, true);
        let old = foreign.segment;
        foreign.segment = learn(&mut foreign.bed, &Arc::clone(&foreign.peer));
        assert_ne!(old, foreign.segment);
        foreign.connect(3);
        foreign.copy(2, 100, (0, 64), false);
        assert_eq!(foreign.outcome(2), Ok(()));
        check(&part(&foreign.bed.asking.region, 0, 64), 3, 100);
        foreign.bed.asking.copy(foreign.id, 3, (old, 0), &part(&theirs, 0, 1), false);
        assert_eq!(foreign.outcome(3), Err(Status::Stale));
    });
}

#[test]
fn read_only_segments_are_not_written() {
    on_devices(|devices, _| {
        let mut foreign = Foreign::new(devices, false);
        let theirs = foreign.bed.asked.region.clone();
        fill(&part(&theirs, 0, BYTES), 4);
        foreign.copy(0, 8, (0, 64), false);
        assert_eq!(foreign.outcome(0), Ok(()));
        foreign.copy(1, 8, (64, 64), true);
        assert_eq!(foreign.outcome(1), Err(Status::Stale), "the device refuses, and does not say why");
        check(&part(&theirs, 0, BYTES), 4, 0);
    });
}

#[test]
fn connections_of_stock_engines_are_bounded_and_the_oldest_is_evicted() {
    on_devices(|devices, _| {
        let mut foreign = Foreign::new(devices, true);
        let device = foreign.bed.asked.rdma.device_names().next().expect("a device").to_owned();
        assert!(foreign.bed.asked.rdma.has_foreign(&device, "a:1@m0", &foreign.half.queue_pairs));
        let mut half = ForeignHalf { queue_pairs: vec![1 << 20; 17], ..foreign.half.clone() };
        let refused = foreign.bed.asked.rdma.accept_foreign(&device, "b:1@m0", &half).unwrap_err();
        assert!(refused.to_string().contains("17 queue pairs"), "{refused}");
        let refused = foreign.bed.asked.rdma.accept_foreign("mlx5_9", "b:1@m0", &half).unwrap_err();
        assert!(refused.to_string().contains("mlx5_9"), "{refused}");
        half.queue_pairs.truncate(2);
        let most = RdmaOptions::default().endpoints as usize / 2;
        for number in 0..2 * most {
            let from = format!("c:{number}@m0");
            foreign.bed.asked.rdma.accept_foreign(&device, &from, &half).expect("room");
            foreign.bed.asked.round();
        }
        let there = |from: &str| foreign.bed.asked.rdma.has_foreign(&device, from, &half.queue_pairs);
        assert!(!there("c:0@m0") && there(&format!("c:{}@m0", 2 * most - 1)));
        // An evicted peer detects it at its next request, and reconnects.
        foreign.copy(0, 0, (0, 64), true);
        assert_eq!(foreign.outcome(0), Err(Status::Unreachable));
        foreign.connect(2);
        foreign.copy(1, 0, (0, 64), true);
        assert_eq!(foreign.outcome(1), Ok(()));
    });
}
