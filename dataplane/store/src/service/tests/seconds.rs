//! What a first owner does when a second owner does not answer, with a host that is played by hand.

use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress, SlotOwners};
use kvplane_proto::message::{Operation, PutItem, PutOptions};

use super::rig::{CHECKSUM, Rig, body_of, digest, identity};
use crate::service::{Fetch, FetchDone, Path, PeerKey, Want};

const PUTS: u8 = 60;
/// The pause after one failure, with what a clock of rounds adds.
const PAUSE_NS: u64 = 50_000_000;

/// The node of this shard and another one: each has the second owners of what the other owns.
fn owners(epoch: u64) -> SlotOwners {
    let us = identity();
    let member = |node: NodeId, incarnation| Member {
        node,
        incarnation,
        weight: 1,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: ([127, 0, 0, 1], 7000 + node.0 as u16).into(), shm: None }; 3],
    };
    let members = vec![member(us.node, us.incarnation), member(NodeId(us.node.0 + 1), Incarnation(1))];
    SlotOwners::of(&ClusterMap { epoch: Epoch(epoch), replicas: 2, members, former: None })
}

/// Puts of which copies are wanted; those that are of this shard's slots.
fn put_all(rig: &mut Rig, peer: PeerKey, from: u8) -> usize {
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let mut taken = 0;
    for key in from..from + PUTS {
        rig.offer(peer, Operation::Put, &body_of([PutItem::plain(digest(key), 64).with_options(&options)]), 64);
        rig.service.payload_done(peer, Some(CHECKSUM), rig.now_ns);
        let refused = rig.drain().iter().any(|said| format!("{said:?}").contains("WrongOwner"));
        taken += usize::from(!refused);
    }
    taken
}

fn copies(rig: &mut Rig) -> Vec<Fetch> {
    std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).filter(|fetch| is_copy(&fetch.want)).collect()
}

const fn is_copy(want: &Want) -> bool {
    matches!(want, Want::Copy { .. })
}

#[test]
fn what_ends_together_is_one_failure_of_the_second_owner() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let peer = rig.join(Path::Stream);
    let taken = put_all(&mut rig, peer, 0);
    let on_their_way = copies(&mut rig);
    assert!(taken >= 4 && on_their_way.len() == taken, "{taken} objects, {} copies", on_their_way.len());
    // Their connection ends, as it does when owners change: all of them fail at the same time.
    for Fetch { token, .. } in on_their_way {
        rig.service.fetched(token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
    }
    assert!(put_all(&mut rig, peer, PUTS) > 0);
    assert!(copies(&mut rig).is_empty(), "it is left alone for a while");
    rig.pass(PAUSE_NS);
    let taken = put_all(&mut rig, peer, 2 * PUTS);
    let copied = copies(&mut rig).len();
    assert!(copied >= taken, "{copied} copies of {taken}: some wait longer, as many ended at once");
}

#[test]
fn another_map_ends_the_wait_for_a_second_owner() {
    let mut rig = Rig::new();
    rig.service.follow(1, &owners(6));
    let peer = rig.join(Path::Stream);
    put_all(&mut rig, peer, 0);
    // Five failures in a row, each after the pause of the one before.
    for _ in 0..5 {
        let asked: Vec<Fetch> = std::iter::from_fn(|| rig.service.poll_fetch(rig.now_ns)).collect();
        for Fetch { token, .. } in asked {
            rig.service.fetched(token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
        }
        rig.pass(1_000_000_000);
    }
    while let Some(Fetch { token, .. }) = rig.service.poll_fetch(rig.now_ns) {
        rig.service.fetched(token, FetchDone::Failed(Status::Unreachable), rig.now_ns);
    }
    put_all(&mut rig, peer, PUTS);
    assert!(copies(&mut rig).is_empty(), "its pause is long by now");
    let mut other = owners(7);
    other.epoch = Epoch(7);
    rig.service.follow(1, &other);
    put_all(&mut rig, peer, 2 * PUTS);
    assert!(!copies(&mut rig).is_empty(), "what it did by the map before says nothing");
}
