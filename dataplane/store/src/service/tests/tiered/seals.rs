//! Tests of repeated seals and puts: answered as busy while the first one waits, with its version, or as stale.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{
    CommitReply, FillItem, IdItem, Kind, Operation, PutAck, PutItem, PutOptions, ReserveReply, decode_items,
};
use kvplane_proto::{FrameFlags, Status, Version};

use super::super::rig::{body_of, digest};
use super::world::{KEYS, PEER, World};
use crate::service::{Output, PayloadTo, TierPolicy};

const KEY: u8 = 3;
const BYTES: u64 = 40_000;

/// Fills a put session completely, with the bytes of fresh memory.
fn filled(world: &mut World) -> u64 {
    let options = PutOptions { ack: Some(PutAck::Durable), ..PutOptions::default() };
    let item = PutItem::plain(digest(KEY), BYTES).with_options(&options);
    let begun: ReserveReply = world.answer((PEER, Operation::Begin, FrameFlags::NONE), |_| item).item();
    assert_eq!(begun.status, Status::Ok);
    let put_session = begun.reservation.to_bits();
    let (request, sum) = (world.next_request(), payload_checksum(&[0; BYTES as usize]));
    let body = body_of([FillItem { session: put_session, offset: 0, bytes: BYTES }]);
    let header =
        Header::request(Kind::Request(Operation::Fill), request).with_body(&body, 1).with_payload(BYTES, Some(sum));
    assert!(matches!(world.service.request(PEER, &header, &body, world.now_ns), PayloadTo::Extent(_)));
    world.service.payload_done(PEER, Some(sum), world.now_ns);
    world.hear();
    put_session
}

fn seal(world: &mut World, put_session: u64) -> CommitReply {
    world.answer((PEER, Operation::Seal, FrameFlags::NONE), |_| IdItem { id: put_session }).item()
}

/// Returns the reply to a seal without completing any operation of the device before.
fn seal_now(world: &mut World, put_session: u64) -> CommitReply {
    let request = world.next_request();
    let body = body_of([IdItem { id: put_session }]);
    let header = Header::request(Kind::Request(Operation::Seal), request).with_body(&body, 1);
    world.service.request(PEER, &header, &body, world.now_ns);
    let mut said = None;
    while let Some(output) = world.service.poll_output() {
        let Output::Frame { header, body, .. } = output else { continue };
        if header.request == request {
            said = decode_items(world.service.body(body), 1).and_then(|mut items| items.next());
        }
    }
    said.expect("it is answered at once")
}

fn world() -> World {
    World::new(1000, TierPolicy { ack: PutAck::Memory, ..TierPolicy::default() })
}

#[test]
fn a_repeated_seal_waits_for_the_ssd_too() {
    let mut world = world();
    let put_session = filled(&mut world);
    world.ask(Operation::Seal, FrameFlags::NONE, &body_of([IdItem { id: put_session }]));
    assert_eq!(seal_now(&mut world, put_session).status, Status::Busy, "nothing of it is written");
    world.settle();
    let again = seal(&mut world, put_session);
    assert_eq!(again.status, Status::Ok);
    let tier = world.service.inspect().tier().expect("a tier").snapshot();
    assert_eq!(tier.backlog, 0);
    assert!(again.version > Version(0));
    // An object that was put since is another one, and does not change the reply.
    world.put_with(KEY, &PutOptions { replace: true, ack: Some(PutAck::Durable), ..PutOptions::default() });
    world.settle();
    assert_eq!(seal(&mut world, put_session), again);
    world.end();
}

/// Another put may be committed, written and evicted from memory while the put session is being filled.
#[test]
fn a_seal_does_not_replace_an_object_on_the_ssd_alone() {
    let mut world = world();
    let put_session = filled(&mut world);
    world.put_with(KEY, &PutOptions { ack: Some(PutAck::Durable), ..PutOptions::default() });
    world.settle();
    assert_eq!(world.last_put, Status::Ok);
    let in_memory = |world: &World| world.service.store().exists(digest(KEY));
    for key in (4..KEYS as u8).cycle().take(100) {
        if !in_memory(&world) {
            break;
        }
        world.put_with(key, &PutOptions { replace: true, ..PutOptions::default() });
        world.settle();
    }
    assert!(!in_memory(&world), "it was not evicted");
    let kept = world.service.objects.local.on_ssd(digest(KEY)).expect("it is on the SSD").version;
    assert_eq!(seal(&mut world, put_session).status, Status::Exists);
    assert_eq!(world.service.objects.local.on_ssd(digest(KEY)).map(|view| view.version), Some(kept));
    world.get(KEY);
    world.settle();
    world.end();
}

#[test]
fn a_repeated_seal_after_a_refusal_does_not_succeed() {
    let mut world = world();
    let put_session = filled(&mut world);
    world.ask(Operation::Seal, FrameFlags::NONE, &body_of([IdItem { id: put_session }]));
    // The slot is lost during the write, and regained before the device is done: the record is void.
    world.lost_slots.insert(KEY);
    world.own();
    world.lost_slots.clear();
    world.own();
    world.settle();
    let again = seal(&mut world, put_session);
    assert_ne!(again.status, Status::Ok, "the first answer was a refusal");
    world.end();
}

/// A client whose connection broke puts again, and finds the object of its own first put.
#[test]
fn a_repeated_put_waits_for_the_ssd_too() {
    let put = |world: &mut World, ack| {
        world.put_with(KEY, &PutOptions { ack: Some(ack), ..PutOptions::default() });
        world.hear();
        world.last_put
    };
    let mut world = world();
    put(&mut world, PutAck::Durable);
    assert_eq!(put(&mut world, PutAck::Durable), Status::Busy, "nothing of it is written");
    assert_eq!(put(&mut world, PutAck::Memory), Status::Exists);
    world.settle();
    assert_eq!(put(&mut world, PutAck::Durable), Status::Exists);
    world.end();
}
