//! Put sessions: requests on one go to the incarnation of the shard that assigned its number, or fail as stale.

use kvplane_proto::flags::ItemFlags;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{Incarnation, NodeId, ReservationId};
use kvplane_proto::message::{Bitmap, CommitReply, Item, Kind, Operation, ReserveReply};
use kvplane_proto::status::Status;

use crate::tests::rig::{Reply, Rig, SentFrame, digest, local, map, push_name, shared_config, stream_config};
use crate::{Config, PeerIncarnation, PutBook, Request, SubmitOptions};

const BYTES: u64 = 100;
const NUMBER: u64 = 0x8000_0000_1234_5678;

fn answer(rig: &mut Rig, sent: &SentFrame, items: usize, body: &[u8]) {
    let header = Header::reply(Kind::Reply(sent.operation()), sent.header.request, Status::Ok).with_body(body, items);
    rig.place(&Reply { lane: sent.lane, header, body: body.to_vec(), sum: 0 });
}

/// Begins a put session. Returns the incarnation of its owner.
fn begin(rig: &mut Rig, key: u64) -> PeerIncarnation {
    let mut book = PutBook::new();
    let number = push_name(&mut book, key, BYTES);
    let options = SubmitOptions::until(rig.now_ns + crate::tests::rig::SECOND_NS);
    let request = Request::Begin(digest(key), BYTES, 1000, number);
    let batch = rig.client.submit_puts(&[request], &book, &options, rig.now_ns).expect("a valid batch");
    let frames = rig.frames();
    let [sent] = &frames[..] else { panic!("{frames:?}") };
    let mut body = Vec::new();
    ReserveReply { status: Status::Ok, reservation: ReservationId::from_bits(NUMBER), offset: 0 }.encode(&mut body);
    answer(rig, sent, 1, &body);
    rig.run();
    let result = rig.client.batches().results(batch)[0];
    assert_eq!((result.status, result.version.0), (Status::Ok, NUMBER));
    rig.finish(batch);
    result.incarnation
}

fn requests(key: u64, incarnation: PeerIncarnation) -> [Request; 3] {
    let digest = digest(key);
    [
        Request::Fill(digest, incarnation, NUMBER, 0, local(0, 0, BYTES)),
        Request::Seal(digest, incarnation, NUMBER),
        Request::Discard(digest, incarnation, NUMBER),
    ]
}

/// Asserts that all requests on the session fail as stale, without a frame.
fn assert_stale(rig: &mut Rig, key: u64, incarnation: PeerIncarnation) {
    let batch = rig.submit(&requests(key, incarnation));
    assert!(rig.frames().is_empty(), "no request is sent");
    assert_eq!(rig.finish(batch), [(Status::Stale, 0, 0); 3]);
}

/// Returns a key that this member owns in a map of two.
fn key_of(node: u64) -> u64 {
    let (two, owners) = (map(1, 2, 1), kvplane_proto::map::OwnerTable::compute(&map(1, 2, 1)));
    let is_its = |key: &u64| {
        owners.owner_of(digest(*key)).is_some_and(|owner| two.members[usize::from(owner.member)].node == NodeId(node))
    };
    (0..).find(is_its).expect("each has some")
}

#[test]
fn put_session_requests_go_to_the_incarnation_that_began_it() {
    for config in [stream_config(), shared_config()] {
        let mut rig = Rig::new(Config { lanes: 1, ..config }, 2);
        let incarnation = begin(&mut rig, 1);
        // Another map with the same incarnations changes nothing.
        rig.client.set_map(map(2, 2, 1), rig.now_ns);
        for request in &requests(1, incarnation)[1..] {
            let batch = rig.submit(&[*request]);
            let frames = rig.frames();
            let [sent] = &frames[..] else { panic!("{frames:?}") };
            assert_eq!(rig.addresses[&sent.lane].incarnation, Incarnation(1));
            let mut body = Vec::new();
            match sent.operation() {
                Operation::Discard => Bitmap::encode([true], &mut body),
                _ => {
                    let version = kvplane_proto::ids::Version(9);
                    CommitReply { status: Status::Ok, version, flags: ItemFlags::NONE }
                }
                .encode(&mut body),
            }
            answer(&mut rig, sent, 1, &body);
            rig.run();
            assert_eq!(rig.finish(batch)[0].0, Status::Ok);
        }
        // The nodes restart.
        rig.client.set_map(map(3, 2, 2), rig.now_ns);
        rig.run();
        assert_stale(&mut rig, 1, incarnation);
        let next = begin(&mut rig, 1);
        assert_ne!(next, incarnation);
        assert_stale(&mut rig, 1, incarnation);
        rig.assert_empty();
    }
}

#[test]
fn put_session_requests_are_not_sent_to_the_next_owner() {
    let mut rig = Rig::new(stream_config(), 2);
    let (first, second) = (key_of(1), key_of(2));
    // Both shards assigned the same number.
    let (kept, moved) = (begin(&mut rig, first), begin(&mut rig, second));
    assert_ne!(kept, moved);
    rig.client.set_map(map(2, 1, 1), rig.now_ns);
    rig.run();
    assert_stale(&mut rig, second, moved);
    let batch = rig.submit(&requests(first, kept)[1..2]);
    assert_eq!(rig.frames().len(), 1, "the other put session goes on");
    rig.client.cancel(batch, rig.now_ns);
    rig.run();
    rig.finish(batch);
    // Its owner returns, which is another incarnation of it to this client.
    rig.client.set_map(map(3, 2, 1), rig.now_ns);
    rig.run();
    assert_stale(&mut rig, second, moved);
}

#[test]
fn pending_put_session_requests_are_not_sent_to_a_restarted_owner() {
    let mut rig = Rig::new(Config { lanes: 1, ..stream_config() }, 1);
    let incarnation = begin(&mut rig, 1);
    let batch = rig.submit(&requests(1, incarnation));
    let frames = rig.frames();
    assert!(!frames.is_empty());
    let lane = frames[0].lane;
    rig.lose(lane);
    rig.client.set_map(map(2, 1, 2), rig.now_ns);
    assert!(rig.frames().is_empty(), "no request is retried");
    rig.run();
    assert_eq!(rig.finish(batch), [(Status::Stale, 0, 0); 3]);
    rig.assert_empty();
}
