//! Routing by maps: wrong owners, new maps, members that join and leave.

use kvplane_proto::ids::NodeId;
use kvplane_proto::status::Status;

use crate::tests::answers::bare;
use crate::tests::rig::{ClientOutput, Rig, SECOND_NS, digest, local, map, shared_config, stream_config};
use crate::{Config, Request};

fn one_lane() -> Config {
    Config { lanes: 1, ..stream_config() }
}

#[test]
fn keys_go_to_their_owners() {
    let mut rig = Rig::new(stream_config(), 4);
    let requests: Vec<Request> = (0..400).map(|number| Request::Exists(digest(number))).collect();
    let batch = rig.submit(&requests);
    let owners = kvplane_proto::map::OwnerTable::compute(&map(1, 4, 1));
    let mut nodes = std::collections::BTreeSet::new();
    for sent in rig.frames() {
        let node = rig.addresses[&sent.lane].node;
        nodes.insert(node);
        for item in sent.items::<kvplane_proto::message::DigestItem>() {
            let owner = owners.owner_of(item.digest).expect("an owner");
            assert_eq!(NodeId(u64::from(owner.member) + 1), node);
        }
        rig.act(ClientOutput::Frame(sent));
    }
    assert_eq!(nodes.len(), 4);
    rig.run();
    assert_eq!(rig.finish(batch).len(), 400);
    rig.assert_empty();
}

#[test]
fn a_wrong_owner_parks_the_request_and_asks_for_a_map() {
    let mut rig = Rig::new(one_lane(), 1).with_objects(&[(1, 5)]);
    let batch = rig.submit(&[Request::Get(digest(1), local(0, 0, 10)), Request::Exists(digest(1))]);
    let frames = rig.frames();
    for sent in &frames {
        for mut reply in rig.answers(sent) {
            reply = bare(reply.lane, sent.operation(), reply.header.request, Status::WrongOwner);
            rig.place(&reply);
        }
    }
    assert!(rig.frames().is_empty(), "parked, not retried at once");
    assert_eq!(rig.maps_wanted, 1, "one question for both");
    // The new map has other incarnations, so the requests need new connections.
    rig.client.set_map(map(2, 1, 2), rig.now_ns);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Ok, 5, 2), (Status::Ok, 0, 0)]);
    assert!(rig.addresses.values().any(|address| address.incarnation.0 == 2));
    rig.assert_empty();
}

#[test]
fn a_wrong_owner_is_retried_until_the_deadline() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.submit(&[Request::Exists(digest(1))]);
    let mut asked = 0;
    while !rig.client.batches().is_complete(batch) {
        for sent in rig.frames() {
            asked += 1;
            rig.place(&bare(sent.lane, sent.operation(), sent.header.request, Status::WrongOwner));
        }
        if let Some(at_ns) = rig.client.poll_timeout() {
            rig.now_ns = rig.now_ns.max(at_ns);
            rig.client.handle_timeout(rig.now_ns);
        }
        assert!(asked < 50, "retries do not back off");
    }
    rig.run();
    assert!((15..50).contains(&asked), "{asked} in ten seconds");
    assert!((10..=20).contains(&rig.maps_wanted), "{} maps were requested in ten seconds", rig.maps_wanted);
    assert_eq!(rig.finish(batch), [(Status::DeadlineExceeded, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn slices_queued_for_a_dead_member_go_to_the_new_owner_at_once() {
    let mut rig = Rig::new(one_lane(), 1);
    let batch = rig.submit(&[Request::Exists(digest(1))]);
    let seen = rig.drain();
    let [ClientOutput::Connect { lane, .. }] = seen[..] else { panic!("{seen:?}") };
    rig.lose(lane);
    assert!(rig.frames().is_empty(), "it waits before the next connection");
    rig.client.set_map(map(2, 1, 2), rig.now_ns);
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::NotFound, 0, 0)]);
    rig.assert_empty();
}

#[test]
fn an_older_map_changes_nothing() {
    let mut rig = Rig::new(one_lane(), 2);
    rig.client.set_map(map(5, 1, 1), 1);
    rig.client.set_map(map(4, 3, 1), 1);
    assert_eq!(rig.client.epoch().0, 5);
    rig.client.set_map(map(5, 3, 1), 1);
    assert_eq!(rig.client.router.placement.map().map(|map| map.members.len()), Some(1));
    // In another cluster state, epochs begin anew.
    rig.client.adopt_map(map(2, 3, 1), 1);
    assert_eq!(rig.client.epoch().0, 2);
    rig.client.set_map(map(1, 1, 1), 1);
    assert_eq!(rig.client.router.placement.map().map(|map| map.members.len()), Some(3));
}

#[test]
fn departed_members_leave_nothing_behind() {
    let mut rig = Rig::new(shared_config(), 2);
    let segment = rig.segment_peer(false);
    let opened = rig.submit(&[Request::OpenSegment(segment)]);
    rig.run();
    rig.finish(opened);
    for incarnation in 2..50 {
        let requests: Vec<Request> = (0..20).map(|number| Request::Put(digest(number), local(0, 0, 5))).collect();
        let batch = rig.submit(&requests);
        // Half of the requests are in flight when the members restart.
        let frames = rig.frames();
        frames.into_iter().step_by(2).for_each(|sent| rig.act(ClientOutput::Frame(sent)));
        rig.client.set_map(map(incarnation, 2, incarnation), rig.now_ns);
        rig.run_until(rig.now_ns + SECOND_NS);
        assert_eq!(rig.finish(batch).len(), 20);
        rig.done.clear();
        rig.objects.clear();
    }
    assert!(rig.client.network().peers.len() <= 5, "{} peers", rig.client.network().peers.len());
    assert!(rig.client.network().lanes.len() <= 14, "{} lanes", rig.client.network().lanes.len());
    assert!(rig.client.network().peers.addresses() <= 3);
    let again = rig.submit(&[Request::OpenSegment(segment)]);
    let connected = rig.addresses.len();
    rig.run();
    assert_eq!(rig.finish(again), [(Status::Ok, 0, 0)]);
    assert_eq!(rig.addresses.len(), connected, "a segment's peer that no map names keeps its lane");
    rig.assert_empty();
}
