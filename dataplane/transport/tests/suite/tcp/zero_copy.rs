//! Zero-copy sends. Over loopback the kernel copies them after all, but sends notifications as for any device, so
//! everything but the benefit can be tested.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{RequestId, Status};
use kvplane_sys::net;
use kvplane_transport::{CloseCause, Tcp, ZeroCopy, ZeroCopyOptions};

use super::bed::{End, PART_BYTES, Places, cut, lending_pair, pair, pair_at, until};
use super::lengths_at_the_receiver;

const ALWAYS: ZeroCopyOptions = ZeroCopyOptions { when: ZeroCopy::Always, least_bytes: 4096 };
/// More than a socket accepts at once while the peer does not read, and more than the peer's socket accepts.
const LONG_BYTES: usize = 300_000;

/// Returns true if this kernel supports zero-copy sends.
fn can_lend() -> bool {
    let socket = net::tcp_socket(([127, 0, 0, 1], 1).into()).expect("a socket");
    let can = kvplane_sys::zero_copy::enable(std::os::fd::AsFd::as_fd(&socket));
    if let Err(error) = &can {
        println!("skipped: sends without a copy: {error}");
    }
    can.is_ok()
}

fn lending(connections: usize, parts: usize, places: Places) -> Option<(End, End)> {
    can_lend().then(|| lending_pair(connections, parts, places, ALWAYS))
}

fn reply(number: u32) -> Header {
    let request = RequestId { index: number, generation: 1 };
    Header::reply(Kind::Reply(Operation::Put), request, Status::Ok)
}

/// Sends payloads of all lengths, in one piece and in many, short and long ones mixed.
fn send_all(sender: &mut End, receiver: &mut End) {
    let sizes = [1, 63, 5000, 8193, 16_384, 70_000, 262_144, 300_001, 1 << 20, 3_000_000];
    let id = sender.connections[0];
    let mut sent = BTreeMap::new();
    for number in 0..4 * sizes.len() as u32 {
        let bytes = sizes[number as usize % sizes.len()];
        let about = [bytes, 3000, 5000, 40_000][number as usize / sizes.len()];
        let lengths = if about == bytes { vec![bytes] } else { cut(u64::from(number) + 7, bytes, about) };
        sent.insert(number, sender.send(id, number, &number.to_le_bytes(), &lengths));
    }
    until(&mut [sender, receiver], |ends| ends[1].payloads.len() == sent.len() && ends[0].holds.is_empty());
    for &(number, checksum, _) in &receiver.payloads {
        let wanted = &sent[&number];
        let Some(lengths) = lengths_at_the_receiver(number, wanted.len()) else { continue };
        assert!(receiver.bytes(number, &lengths) == *wanted, "bytes of {number} differ");
        assert_eq!(checksum, Some(payload_checksum(wanted)));
    }
}

#[test]
fn every_call_is_notified_and_every_byte_arrives() {
    let Some((mut sender, mut receiver)) = lending(1, 40, lengths_at_the_receiver) else { return };
    send_all(&mut sender, &mut receiver);
    let counters = *sender.tcp.zero_copy();
    assert!(counters.bytes > 10_000_000, "{counters:?}");
    assert_eq!((counters.noticed, counters.abandoned, counters.late), (counters.calls, 0, 0), "{counters:?}");
    assert!(!sender.tcp.has_work() && sender.tcp.poll_timeout().is_none());
}

/// On loopback zero-copy never pays: payloads are lent only if forced, and short ones not even then.
#[test]
fn unprofitable_payloads_are_copied() {
    let (mut sender, mut receiver) = pair(1, 40, lengths_at_the_receiver);
    send_all(&mut sender, &mut receiver);
    assert_eq!(*sender.tcp.zero_copy(), Default::default());
    let Some((mut sender, mut receiver)) = lending(1, 1, |_, _| None) else { return };
    for number in 0..500 {
        sender.send(sender.connections[0], number, b"small", &[]);
    }
    until(&mut [&mut sender, &mut receiver], |ends| ends[1].frames.len() == 500);
    assert_eq!(*sender.tcp.zero_copy(), Default::default());
}

/// Memory is not returned before the kernel has released it, and after that none of it can be sent.
#[test]
fn a_reset_returns_memory_after_notification() {
    let Some((mut sender, mut receiver)) = lending(1, 9, |_, bytes| Some(vec![bytes])) else { return };
    let id = sender.connections[0];
    for number in 0..9 {
        sender.send(id, number, b"", &[PART_BYTES]);
    }
    // The peer does not read: the sockets fill up, and no work is left.
    for _ in 0..200 {
        sender.round();
    }
    assert!(!sender.tcp.has_work() && sender.holds.len() > 5, "{} holds", sender.holds.len());
    assert!(sender.tcp.zero_copy().calls > sender.tcp.zero_copy().noticed, "{:?}", sender.tcp.zero_copy());
    sender.tcp.close(id, CloseCause::Closed);
    let header = reply(0);
    assert!(!sender.tcp.send(id, &header, b"", None), "to all others it is gone");
    until(&mut [&mut sender], |ends| !ends[0].gone.is_empty());
    let counters = *sender.tcp.zero_copy();
    assert_eq!((sender.holds.len(), counters.noticed, counters.abandoned), (0, counters.calls, 0), "{counters:?}");
    assert_eq!(sender.gone, [CloseCause::Closed]);
    // Bytes written there now do not reach the peer.
    for number in 0..9 {
        sender.pieces(number, &[PART_BYTES])[0].copy_in(&vec![0xee; PART_BYTES]);
    }
    until(&mut [&mut receiver], |ends| !ends[0].gone.is_empty());
    assert!(matches!(receiver.gone[0], CloseCause::Kernel(_)), "{:?}", receiver.gone);
    assert!(!receiver.bytes(0, &[PART_BYTES]).windows(8).any(|bytes| bytes == [0xee; 8]));
    assert_eq!((sender.tcp.open(), receiver.tcp.open()), (0, 0));
    assert!(
        sender.tcp.poll_timeout().is_none() || {
            sender.round();
            sender.tcp.poll_timeout().is_none()
        }
    );
}

/// A reply from a peer that has not taken the payload is deferred until the kernel has released the memory.
#[test]
fn a_reply_is_deferred_until_its_requests_notification() {
    let Some((mut client, mut server)) = lending(1, 3, |_, bytes| Some(vec![bytes])) else { return };
    let (asked, asking) = (client.connections[0], server.connections[0]);
    for number in 0..3 {
        client.send(asked, number, b"", &[LONG_BYTES]);
    }
    for _ in 0..20 {
        client.round();
    }
    assert!(client.holds.contains(&2), "the peer's socket took everything");
    for number in 0..3 {
        assert!(server.tcp.send(asking, &reply(number).with_body(b"taken", 1), b"taken", None));
    }
    // Longer than the timeout: unacknowledged memory is not returned because of a reply either.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(150) {
        server.tcp.flush(&server.poller);
        client.round();
    }
    assert!(client.gone.is_empty() && client.early.is_empty(), "{:?} {:?}", client.gone, client.early);
    assert!(client.frames.len() < 3, "all answers were believed");
    until(&mut [&mut client, &mut server], |ends| ends[0].frames.len() == 3);
    assert!(client.early.is_empty() && client.holds.is_empty());
    assert!(client.frames.iter().all(|(_, _, body)| body == b"taken"));
    until(&mut [&mut client, &mut server], |ends| ends[1].payloads.len() == 3);
    assert_eq!(client.tcp.zero_copy().noticed, client.tcp.zero_copy().calls);
}

#[test]
fn replies_arrive_after_the_memory_of_their_requests_is_returned() {
    let Some((mut client, mut server)) = lending(3, 60, |_, bytes| Some(vec![bytes])) else { return };
    let mut answered = 0;
    for number in 0..60 {
        let id = client.connections[number as usize % 3];
        client.send(id, number, b"", &[[5000, 70_000, LONG_BYTES, 1_500_000][number as usize % 4]]);
    }
    until(&mut [&mut client, &mut server], |_| true);
    let limit = Instant::now() + Duration::from_secs(30);
    while client.frames.len() < 60 {
        assert!(Instant::now() < limit, "no event arrives any more");
        client.round();
        server.round();
        while let Some(&(number, _, _)) = server.payloads.get(answered) {
            let asking = server.frames.iter().find(|frame| frame.1 == number).expect("a frame before its payload").0;
            assert!(server.tcp.send(asking, &reply(number), b"", None));
            answered += 1;
        }
    }
    assert!(client.early.is_empty() && client.holds.is_empty(), "{:?}", client.early);
}

#[test]
fn lent_payloads_are_sent_before_a_graceful_close() {
    let Some((mut sender, mut receiver)) = lending(1, 3, |_, bytes| Some(vec![bytes])) else { return };
    let id = sender.connections[0];
    for number in 0..3 {
        sender.send(id, number, b"last words", &[LONG_BYTES]);
    }
    sender.tcp.close_after_sending(id, CloseCause::Closed);
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| !end.gone.is_empty()));
    assert_eq!((receiver.payloads.len(), sender.holds.len()), (3, 0));
    assert_eq!((&sender.gone[0], &receiver.gone[0]), (&CloseCause::Closed, &CloseCause::Peer));
}

#[test]
fn a_dropped_driver_resets_connections_with_lent_payloads() {
    let Some((mut sender, mut receiver)) = lending(2, 2, |_, bytes| Some(vec![bytes])) else { return };
    for number in 0..2 {
        sender.send(sender.connections[number as usize], number, b"", &[PART_BYTES]);
    }
    for _ in 0..50 {
        sender.round();
    }
    drop(std::mem::take::<Tcp>(&mut sender.tcp));
    until(&mut [&mut receiver], |ends| ends[0].gone.len() == 2);
    assert!(receiver.gone.iter().all(|why| matches!(why, CloseCause::Kernel(_))), "{:?}", receiver.gone);
}

/// Runs a test of this file again in a network namespace of its own that this script prepares; skipped if that is not
/// possible. Returns true in that namespace.
fn in_own_network(test: &str, script: &str) -> bool {
    const CHILD: &str = "KVPLANE_TEST_NETWORK";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let script = format!("set -e; (ip link set lo up; {script}) || exit 77; exec \"$0\" --exact \"$1\"");
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new("unshare");
    command.args(["-n", "sh", "-c", &script]).arg(program).arg(format!("tcp::zero_copy::{test}")).env(CHILD, "1");
    match command.output() {
        Ok(output) if output.status.success() => {
            assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "the test did not run: {output:?}");
        }
        Ok(output) if output.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&output.stdout)),
        Ok(output) => {
            println!("skipped: {test}: no such network: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Err(error) => println!("skipped: {test}: no unshare: {error}"),
    }
    false
}

/// Without room for notifications the kernel refuses, and everything is sent with a copy.
#[test]
fn payload_is_copied_when_the_kernel_refuses_zero_copy() {
    let network = "echo 1 > /proc/sys/net/core/optmem_max";
    if can_lend() && in_own_network("payload_is_copied_when_the_kernel_refuses_zero_copy", network) {
        let (mut sender, mut receiver) = lending_pair(1, 40, lengths_at_the_receiver, ALWAYS);
        send_all(&mut sender, &mut receiver);
        let counters = *sender.tcp.zero_copy();
        assert!(counters.fallbacks > 0 && counters.noticed == counters.calls, "{counters:?}");
    }
}

/// Two addresses that are both of this host, which the addresses do not show: the notifications do.
#[test]
fn a_connection_on_which_the_kernel_copies_stops_lending() {
    let network = "ip address add 10.9.8.1/32 dev lo && ip address add 10.9.8.2/32 dev lo && \
                   ip route replace local 10.9.8.2 dev lo table local src 10.9.8.1";
    if can_lend() && in_own_network("a_connection_on_which_the_kernel_copies_stops_lending", network) {
        let options = ZeroCopyOptions { when: ZeroCopy::Auto, ..ALWAYS };
        let (mut sender, mut receiver) = pair_at([10, 9, 8, 2], 1, 40, lengths_at_the_receiver, options);
        send_all(&mut sender, &mut receiver);
        let counters = *sender.tcp.zero_copy();
        assert!(counters.copied >= 4 && counters.noticed == counters.calls, "{counters:?}");
        receiver.payloads.clear();
        send_all(&mut sender, &mut receiver);
        assert_eq!(*sender.tcp.zero_copy(), counters, "it has stopped");
    }
}
