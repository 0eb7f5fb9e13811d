//! TLS connections over real sockets: bytes in pieces, ends with different modes, and a man in the middle.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvplane_proto::RequestId;
use kvplane_proto::Status;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_proto::message::{Kind, Operation};
use kvplane_tls::{DataTls, Keychain};
use kvplane_transport::CloseCause;

use super::bed::{End, PART_BYTES, keyed_pair, until};
use super::certificates::{Authority, keychain};
use super::{frames_of_all, lengths_at_the_receiver, payloads_of_all};

/// Creates the keys of a client and of a node of one cluster.
fn keys(modes: (DataTls, DataTls)) -> (Option<Keychain>, Option<Keychain>) {
    let authority = Authority::new();
    (Some(keychain(modes.0, authority.issue("client"))), Some(keychain(modes.1, authority.issue("node"))))
}

const BOTH: (DataTls, DataTls) = (DataTls::Require, DataTls::Require);

/// Makes this many connections and waits until all have completed their handshake.
fn join(sender: &mut End, receiver: &mut End, address: SocketAddr, connections: usize) {
    for _ in 0..connections {
        sender.tcp.connect(&sender.poller, address).expect("a socket");
    }
    until(&mut [sender, receiver], |ends| ends.iter().all(|end| end.connections.len() == connections));
}

fn text(gone: &[CloseCause]) -> String {
    gone.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[test]
fn tls_payloads_are_sent_and_received_in_pieces_of_any_length() {
    let sizes = [1, 63, 5000, 8193, 16_383, 16_384, 16_385, 70_000, 300_001, 1 << 20, 3_000_000];
    let count = 4 * sizes.len() as u32;
    let (client, node) = keys(BOTH);
    let (mut sender, mut receiver, address) = keyed_pair(count as usize, lengths_at_the_receiver, client, node);
    join(&mut sender, &mut receiver, address, 1);
    payloads_of_all(&mut sender, &mut receiver, &sizes);
    // And back, on the same connection.
    let id = receiver.connections[0];
    let content = receiver.send(id, 0, b"back", &[100_000]);
    until(&mut [&mut sender, &mut receiver], |ends| ends[0].payloads.len() == 1);
    assert!(sender.bytes(0, &[100_000]) == content);
}

#[test]
fn tls_connections_share_their_staging_without_mixing_bytes() {
    let (client, node) = keys(BOTH);
    let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, client, node);
    join(&mut sender, &mut receiver, address, 7);
    frames_of_all(&mut sender, &mut receiver, 40);
}

#[test]
fn a_full_tls_socket_buffers_little_and_its_close_returns_holds() {
    let (client, node) = keys(BOTH);
    let (mut sender, mut receiver, address) = keyed_pair(9, |_, _| None, client, node);
    join(&mut sender, &mut receiver, address, 1);
    let id = sender.connections[0];
    for number in 0..9 {
        sender.send(id, number, b"", &[PART_BYTES]);
    }
    for _ in 0..200 {
        sender.round();
    }
    assert!(!sender.tcp.has_work() && !sender.holds.is_empty(), "{} holds", sender.holds.len());
    sender.tcp.close(id, CloseCause::Closed);
    sender.round();
    assert_eq!((sender.holds.len(), sender.gone.as_slice()), (0, [CloseCause::Closed].as_slice()));
    until(&mut [&mut receiver], |ends| !ends[0].gone.is_empty());
}

fn hello() -> Header {
    Header::request(Kind::Request(Operation::Hello), RequestId { index: 3, generation: 1 })
}

#[test]
fn a_plaintext_peer_is_refused_where_tls_is_required() {
    let (_, node) = keys(BOTH);
    let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, None, node);
    join(&mut sender, &mut receiver, address, 1);
    assert!(sender.tcp.send(sender.connections[0], &hello(), b"", None));
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| !end.gone.is_empty()));
    assert_eq!(sender.frames.len(), 1, "the refusal");
    assert!(receiver.frames.is_empty(), "its frame is not given to the host");
    assert!(text(&receiver.gone).contains("connected without TLS"), "{}", text(&receiver.gone));
}

#[test]
fn an_offering_client_reconnects_with_tls_where_it_is_required() {
    let (client, node) = keys((DataTls::Offer, DataTls::Require));
    let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, client, node);
    join(&mut sender, &mut receiver, address, 1);
    assert!(sender.tcp.send(sender.connections[0], &hello(), b"", None));
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| !end.gone.is_empty()));
    assert!(sender.frames.is_empty(), "the host has nothing to do with it");
    // No operator action is needed either: the peer reconnects with TLS.
    assert_eq!(receiver.gone.as_slice(), [CloseCause::Closed].as_slice());
    sender.connections.clear();
    receiver.connections.clear();
    join(&mut sender, &mut receiver, address, 1);
    assert!(sender.tcp.send(sender.connections[0], &hello(), b"", None));
    until(&mut [&mut sender, &mut receiver], |ends| ends[1].frames.len() == 1);
}

#[test]
fn an_offering_server_accepts_plaintext_and_tls() {
    for mode in [DataTls::Off, DataTls::Offer, DataTls::Require] {
        let (client, node) = keys((mode, DataTls::Offer));
        let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, client, node);
        join(&mut sender, &mut receiver, address, 1);
        sender.send(sender.connections[0], 5, b"body", &[]);
        until(&mut [&mut sender, &mut receiver], |ends| ends[1].frames.len() == 1);
        assert_eq!(receiver.frames[0].2, b"body");
    }
}

#[test]
fn a_requiring_client_sends_no_frame_to_a_plaintext_server() {
    let (client, _) = keys(BOTH);
    let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, client, None);
    sender.tcp.connect(&sender.poller, address).expect("a socket");
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| !end.gone.is_empty()));
    assert!(sender.connections.is_empty(), "it was never reported to the host");
    assert!(text(&receiver.gone).contains("--data-tls is off here"), "{}", text(&receiver.gone));
}

/// A server that answers a hello like one without TLS, as a man in the middle would.
#[test]
fn a_requiring_client_cannot_be_downgraded() {
    let (client, _) = keys(BOTH);
    let (mut sender, mut receiver, _) = keyed_pair(1, |_, _| None, client, None);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let server = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("a peer");
        let reply = Header::reply(Kind::Reply(Operation::Hello), RequestId::default(), Status::Ok);
        socket.write_all(&reply.encode()).expect("room");
        let mut heard = Vec::new();
        let _ = socket.read_to_end(&mut heard);
        heard
    });
    sender.tcp.connect(&sender.poller, address).expect("a socket");
    until(&mut [&mut sender, &mut receiver], |ends| !ends[0].gone.is_empty());
    assert!(sender.connections.is_empty() && sender.frames.is_empty());
    assert!(matches!(sender.gone[0], CloseCause::Tls(_)), "{:?}", sender.gone);
    let heard = server.join().expect("a server");
    assert!(heard.first() == Some(&22) && !heard.windows(4).any(|part| part == b"KVPF"), "only TLS was sent");
}

#[test]
fn slow_or_invalid_handshakes_time_out() {
    let (_, node) = keys(BOTH);
    let (_, mut receiver, address) = keyed_pair(1, |_, _| None, None, node);
    let connect = || TcpStream::connect(address).expect("a connection");
    let (mut nonsense, mut slow, silent) = (connect(), connect(), connect());
    nonsense.write_all(&[22, 3, 1, 0, 100]).expect("room");
    nonsense.write_all(&[7; 100]).expect("room");
    slow.write_all(&[22]).expect("room");
    until(&mut [&mut receiver], |ends| !ends[0].gone.is_empty());
    assert_eq!((receiver.gone.len(), receiver.tcp.open()), (1, 2), "the one that talks nonsense, at once");
    let start = Instant::now();
    until(&mut [&mut receiver], |ends| ends[0].tcp.open() == 0);
    assert!(start.elapsed() < Duration::from_secs(20));
    assert!(text(&receiver.gone).contains("did not complete within 5 s"), "{}", text(&receiver.gone));
    drop((slow, silent));
}

#[test]
fn handshake_steps_per_round_are_bounded() {
    let (client, node) = keys(BOTH);
    let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, client, node);
    join(&mut sender, &mut receiver, address, 60);
    assert!(receiver.round > 15, "{} rounds", receiver.round);
}

#[test]
fn renewed_certificates_apply_to_new_connections() {
    let authority = Authority::new();
    let client = keychain(DataTls::Require, authority.issue_for("prod", "client", (2020, 2021)));
    let node = keychain(DataTls::Require, authority.issue("node"));
    let (mut sender, mut receiver, address) = keyed_pair(1, |_, _| None, None, Some(node));
    let client = std::sync::Arc::new(client);
    sender.tcp.set_tls(std::sync::Arc::clone(&client));
    sender.tcp.connect(&sender.poller, address).expect("a socket");
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| !end.gone.is_empty()));
    assert!(text(&receiver.gone).contains("has expired"), "{}", text(&receiver.gone));
    assert!(text(&sender.gone).contains("our certificate has expired"), "{}", text(&sender.gone));
    assert!(client.set(authority.issue("client")).expect("a good one"));
    sender.connections.clear();
    receiver.connections.clear();
    join(&mut sender, &mut receiver, address, 1);
}

/// Relays between two peers, and after this many bytes flips a bit of the first one's data, or ends the connection.
fn between(server: SocketAddr, after: usize, ends: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a peer");
        let mut server = TcpStream::connect(server).expect("a server");
        let (mut back_from, mut back_to) =
            (server.try_clone().expect("a socket"), client.try_clone().expect("a socket"));
        std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
        let (mut seen, mut bytes) = (0, [0; 4096]);
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            if (seen..seen + count).contains(&after) {
                bytes[after - seen] ^= 4;
                if ends {
                    let _ = server.write_all(&bytes[..after - seen]);
                    let _ = server.shutdown(std::net::Shutdown::Both);
                    let _ = client.shutdown(std::net::Shutdown::Both);
                    return;
                }
            }
            seen += count;
            if server.write_all(&bytes[..count]).is_err() {
                return;
            }
        }
    });
    address
}

#[test]
fn tampered_or_truncated_tls_data_is_not_delivered() {
    // Handshakes of these ends have about 700 bytes; the payload has 200 KiB.
    for (after, ends) in [(40_000, false), (130_000, false), (HEADER_BYTES + 3000, false), (100_000, true)] {
        let (client, node) = keys(BOTH);
        let (mut sender, mut receiver, address) = keyed_pair(1, |_, bytes| Some(vec![bytes]), client, node);
        let middle = between(address, after, ends);
        join(&mut sender, &mut receiver, middle, 1);
        sender.send(sender.connections[0], 0, b"put", &[200_000]);
        until(&mut [&mut sender, &mut receiver], |ends| !ends[1].gone.is_empty());
        assert!(receiver.payloads.is_empty(), "after {after}");
        let wanted = if ends { "closed by the peer" } else { "changed in transit" };
        assert!(text(&receiver.gone).contains(wanted), "{after}: {}", text(&receiver.gone));
    }
}
