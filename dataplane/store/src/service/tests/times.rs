//! Tests of the breakdown of slow requests, and of hot objects.

use kvplane_proto::Status;
use kvplane_proto::message::Operation;

use super::rig::{Rig, digest};
use crate::service::{Path, SlowOperation};

#[test]
fn slow_puts_and_gets_are_reported_with_bytes_and_object() {
    let mut rig = Rig::new();
    let peer = rig.join(Path::Stream);
    rig.service.control().set_slow_after(1_000);
    rig.begin_put(peer, 1, 3_000);
    rig.now_ns += 5_000;
    rig.done(peer);
    assert_eq!(rig.answer().status(), Status::Ok);
    let got = rig.get(peer, 1);
    let (_, hold) = got.payload.expect("the object's bytes");
    let leaving = rig.service.leaving(&got.header, rig.now_ns);
    rig.now_ns += 7_000;
    rig.service.left(&leaving, hold, rig.now_ns);
    rig.service.sent(hold);
    let told = |one: &SlowOperation| (one.operation, one.digest, one.bytes, one.receive_ns, one.send_ns);
    let slow: Vec<_> = rig.service.inspect().times(rig.now_ns).slow.iter().map(told).collect();
    let object = Some(digest(1));
    assert_eq!(slow, [(Operation::Put, object, 3_000, 5_000, 0), (Operation::Get, object, 3_000, 0, 7_000)]);
    rig.assert_idle();
}

#[test]
fn the_most_read_object_is_hot_over_streams_and_shared_memory() {
    let mut rig = Rig::new();
    let (stream, shared) = (rig.join(Path::Stream), rig.join(Path::Shared));
    for key in 1..4 {
        assert_eq!(rig.put(stream, key, 256).status(), Status::Ok);
    }
    for turn in 0..600u64 {
        // The first object is read twice as often as the two others together.
        let key = if turn % 3 < 2 { 1 } else { 2 + (turn % 2) as u8 };
        if turn % 2 == 0 {
            let (_, hold) = rig.get(stream, key).payload.expect("the object's bytes");
            rig.service.sent(hold);
        } else {
            let pin = rig.lookup(shared, key).pin;
            rig.release(shared, pin);
            rig.assert_quiet();
        }
    }
    let hot = rig.service.inspect().times(rig.now_ns).hot.objects;
    assert_eq!(hot[0].digest, digest(1), "{hot:?}");
    let all: u64 = hot.iter().map(|one| one.gets).sum();
    assert!((300..900).contains(&all) && hot[0].gets * 2 > all, "{hot:?}");
    assert_eq!(hot[0].bytes, hot[0].gets * 256);
}
