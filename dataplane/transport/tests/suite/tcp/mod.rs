//! The TCP driver over real sockets: payloads in pieces, connections that share a staging, full sockets, and fairness.

mod bed;
#[path = "../../../../tls/tests/support/mod.rs"]
mod certificates;
mod tls;
mod zero_copy;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::Duration;

use kvplane_proto::RequestId;
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::rng::mix64;
use kvplane_transport::{CloseCause, ZeroCopyOptions, limit_unacknowledged};

use bed::{End, PART_BYTES, cut, pair, pattern, until};

pub(crate) fn lengths_at_the_receiver(number: u32, bytes: usize) -> Option<Vec<usize>> {
    match number % 4 {
        0 => Some(vec![bytes]),
        1 => Some(cut(u64::from(number), bytes, 4096)),
        2 => Some(cut(u64::from(number), bytes, 50_000)),
        _ => None,
    }
}

#[test]
fn payloads_are_sent_and_received_in_pieces_of_any_length() {
    let sizes = [1, 63, 5000, 8192, 8193, 16_384, 70_000, 262_144, 300_001, 1 << 20, 3_000_000];
    let count = 4 * sizes.len() as u32;
    let (mut sender, mut receiver) = pair(1, count as usize, lengths_at_the_receiver);
    payloads_of_all(&mut sender, &mut receiver, &sizes);
}

/// Sends payloads of these sizes over the first connection, each four times: in one piece, and in pieces of about three
/// lengths. All arrive, in order, with the checksums of their sender.
pub(crate) fn payloads_of_all(sender: &mut End, receiver: &mut End, sizes: &[usize]) {
    let count = 4 * sizes.len() as u32;
    let id = sender.connections[0];
    let mut sent = BTreeMap::new();
    for number in 0..count {
        let bytes = sizes[number as usize % sizes.len()];
        let about = [bytes, 100, 4096, 40_000][number as usize / sizes.len()];
        let lengths = if about == bytes { vec![bytes] } else { cut(u64::from(number) + 99, bytes, about) };
        sent.insert(number, sender.send(id, number, &number.to_le_bytes(), &lengths));
    }
    until(&mut [&mut *sender, &mut *receiver], |ends| ends[1].payloads.len() == count as usize);
    until(&mut [&mut *sender, &mut *receiver], |ends| ends[0].holds.is_empty());
    for (at, (_, number, body)) in receiver.frames.iter().enumerate() {
        assert_eq!((at as u32, body.as_slice()), (*number, number.to_le_bytes().as_slice()));
    }
    for &(number, checksum, _) in &receiver.payloads {
        let wanted = &sent[&number];
        let Some(lengths) = lengths_at_the_receiver(number, wanted.len()) else {
            assert_eq!(checksum, None);
            continue;
        };
        assert!(receiver.bytes(number, &lengths) == *wanted, "bytes of {number} differ");
        assert_eq!(checksum, Some(payload_checksum(wanted)));
    }
}

/// Long bodies are split by the socket anywhere, and the connections take turns with the one staging.
#[test]
fn connections_share_a_staging_without_mixing_bytes() {
    let (mut sender, mut receiver) = pair(7, 1, |_, _| None);
    frames_of_all(&mut sender, &mut receiver, 60);
}

/// Sends this many frames over each connection in turn, with bodies of many lengths; all arrive in order.
pub(crate) fn frames_of_all(sender: &mut End, receiver: &mut End, frames: u32) {
    let body = |connection: usize, number: u32| {
        let bytes = mix64(u64::from(number) * 31 + connection as u64) % 190_000;
        pattern(number * 16 + connection as u32, bytes as usize)
    };
    let connections = sender.connections.clone();
    for number in 0..frames {
        for (at, id) in connections.iter().enumerate() {
            sender.send(*id, number * 16 + at as u32, &body(at, number), &[]);
        }
    }
    let all = frames as usize * connections.len();
    until(&mut [&mut *sender, &mut *receiver], |ends| ends[1].frames.len() == all);
    let mut next = BTreeMap::new();
    for (id, label, found) in &receiver.frames {
        let (at, number) = (*label as usize % 16, label / 16);
        let expected: &mut (usize, u32) = next.entry(*id).or_insert((at, 0));
        assert_eq!(*expected, (at, number), "frames of a connection stay in order and on it");
        expected.1 += 1;
        assert!(*found == body(at, number), "body {number} of connection {at} differs");
    }
}

#[test]
fn a_long_payload_does_not_starve_other_connections() {
    let (mut sender, mut receiver) = pair(2, 2, |_, bytes| Some(vec![bytes]));
    let (long, short) = (sender.connections[0], sender.connections[1]);
    sender.send(long, 0, b"", &[PART_BYTES]);
    sender.send(short, 1, b"", &[100]);
    until(&mut [&mut sender, &mut receiver], |ends| ends[1].payloads.len() == 2);
    assert_eq!(receiver.payloads[0].0, 1, "the short one is not behind the long one");
    assert!(receiver.longest_turn_bytes <= 1 << 20, "{} bytes in one turn", receiver.longest_turn_bytes);
}

#[test]
fn a_full_socket_keeps_holds_until_the_close_returns_them() {
    let (mut sender, mut receiver) = pair(1, 9, |_, _| None);
    let id = sender.connections[0];
    for number in 0..9 {
        sender.send(id, number, b"", &[PART_BYTES]);
    }
    // The peer does not read: the sockets fill up, and no work is left.
    for _ in 0..200 {
        sender.round();
    }
    assert!(!sender.tcp.has_work() && !sender.holds.is_empty(), "{} holds", sender.holds.len());
    sender.tcp.close(id, CloseCause::Closed);
    assert!(sender.tcp.has_work());
    sender.round();
    assert_eq!((sender.holds.len(), sender.gone.as_slice()), (0, [CloseCause::Closed].as_slice()));
    until(&mut [&mut receiver], |ends| !ends[0].gone.is_empty());
    assert_eq!((sender.tcp.open(), receiver.tcp.open()), (0, 0));
}

#[test]
fn queued_frames_are_sent_before_a_graceful_close() {
    let (mut sender, mut receiver) = pair(1, 3, |_, bytes| Some(vec![bytes]));
    let id = sender.connections[0];
    for number in 0..3 {
        sender.send(id, number, b"last words", &[PART_BYTES]);
    }
    sender.tcp.close_after_sending(id, CloseCause::Closed);
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| !end.gone.is_empty()));
    assert_eq!((receiver.payloads.len(), sender.holds.len()), (3, 0));
    assert_eq!((&sender.gone[0], &receiver.gone[0]), (&CloseCause::Closed, &CloseCause::Peer));
}

#[test]
fn a_graceful_close_times_out_if_the_peer_does_not_read() {
    let (mut sender, receiver) = pair(1, 9, |_, bytes| Some(vec![bytes]));
    let id = sender.connections[0];
    for number in 0..9 {
        sender.send(id, number, b"last words", &[PART_BYTES]);
    }
    sender.tcp.close_after_sending(id, CloseCause::Closed);
    until(&mut [&mut sender], |ends| !ends[0].gone.is_empty());
    assert_eq!((sender.gone.as_slice(), sender.holds.len()), ([CloseCause::Closed].as_slice(), 0));
    assert_eq!((sender.tcp.open(), receiver.payloads.len()), (0, 0));
}

/// A client tries only connections with outstanding replies, a server those that were active recently.
#[test]
fn only_connections_that_expect_input_are_tried() {
    let (mut client, mut server) = pair(1, 1, |_, _| None);
    let (asked, asking) = (client.connections[0], server.connections[0]);
    assert!(!client.tcp.try_active() && !server.tcp.try_active(), "no request was sent yet");
    client.send(asked, 0, b"question", &[]);
    assert!(client.tcp.try_active());
    until(&mut [&mut client, &mut server], |ends| ends[1].frames.len() == 1);
    assert!(server.tcp.try_active());
    let request = RequestId { index: 0, generation: 1 };
    let reply = Header::reply(Kind::Reply(Operation::Put), request, kvplane_proto::Status::Ok);
    assert!(server.tcp.send(asking, &reply, b"", None));
    until(&mut [&mut client, &mut server], |ends| ends[0].frames.len() == 1);
    assert!(!client.tcp.try_active(), "nothing more is owed");
}

/// The kernel of a process that is frozen acknowledges what fits its buffers, and nothing more is sent then; beyond a
/// cut link nothing is acknowledged at all. Either way the connection ends.
#[test]
fn a_connection_whose_data_is_not_taken_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut sender = End::new(9 * PART_BYTES, |_, bytes| Some(vec![bytes]), ZeroCopyOptions::default());
    limit_unacknowledged(&mut sender.tcp, Duration::from_millis(100));
    let id = sender.tcp.connect(&sender.poller, listener.local_addr().expect("an address")).expect("a socket");
    until(&mut [&mut sender], |ends| ends[0].connections == [id]);
    for number in 0..9 {
        sender.send(id, number, b"", &[PART_BYTES]);
    }
    until(&mut [&mut sender], |ends| !ends[0].gone.is_empty());
    assert!(matches!(sender.gone[..], [CloseCause::Kernel(_)]), "{:?}", sender.gone);
    assert!(sender.holds.is_empty() && sender.tcp.open() == 0);
}
