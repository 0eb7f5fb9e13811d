//! What a connection owns when nothing happens on it.

use super::connection::Piece;
use super::*;
use crate::types::Input;
use kvplane_proto::RequestId;
use kvplane_proto::message::{Kind, Operation};

/// The goal for an idle peer.
const IDLE_BYTES: usize = 32 << 10;

fn owned_bytes(connection: &Connection) -> usize {
    size_of::<Connection>()
        + connection.frames.capacity() * size_of::<Frame>()
        + connection.pieces.capacity() * size_of::<Piece>()
        + connection.kept.capacity()
        + connection.left.capacity()
}

fn round(poller: &Poller, tcp: &mut Tcp) -> usize {
    let (mut readiness, mut scratch, mut frames) = (Vec::new(), Vec::new(), 0);
    let longest = Duration::from_millis(u64::from(!tcp.has_work()));
    poller.wait(longest, &mut readiness).expect("a working poller");
    for one in readiness {
        tcp.ready(poller, Token::from_bits(one.token).expect("a token of the driver"), &one);
    }
    while tcp.poll_event().is_some() {}
    while let Some(id) = tcp.next_ready() {
        while let Input::Frame(_) = tcp.input(id, &mut scratch) {
            frames += 1;
        }
    }
    tcp.flush(poller);
    frames
}

#[test]
fn an_idle_connection_owns_next_to_nothing() {
    const CONNECTIONS: usize = 20;
    const FRAMES: usize = 700;
    let (poller, mut asking, mut asked) = (Poller::new().expect("a poller"), Tcp::default(), Tcp::default());
    let other = Poller::new().expect("a poller");
    let listener = net::tcp_listener(([127, 0, 0, 1], 0).into(), 64).expect("a port");
    let address = listener.local_addr().expect("an address");
    asked.listen(&other, listener).expect("a poller with room");
    for _ in 0..CONNECTIONS {
        asking.connect(&poller, address).expect("a socket");
    }
    let limit = Instant::now() + Duration::from_secs(30);
    while asked.open() < CONNECTIONS {
        assert!(Instant::now() < limit, "nobody comes any more");
        round(&poller, &mut asking);
        round(&other, &mut asked);
    }
    let body = vec![7; 5000];
    let header = Header::request(Kind::Request(Operation::Put), RequestId::default()).with_body(&body, 1);
    for index in 0..CONNECTIONS as u32 {
        for _ in 0..FRAMES {
            assert!(asking.send(ConnectionId { index, generation: 1 }, &header, &body, None));
        }
    }
    let mut seen = 0;
    while seen < CONNECTIONS * FRAMES {
        assert!(Instant::now() < limit, "nothing comes any more");
        round(&poller, &mut asking);
        seen += round(&other, &mut asked);
    }
    for tcp in [&asking, &asked] {
        for connection in tcp.connections.iter().flatten() {
            assert!(connection.is_quiet() && owned_bytes(connection) < IDLE_BYTES, "{}", owned_bytes(connection));
        }
        assert!(tcp.spare_bodies.iter().map(Vec::capacity).sum::<usize>() <= 64 * 4096);
    }
}
