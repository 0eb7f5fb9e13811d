//! Memory of an idle connection, and recovery of lent memory when a notification is lost.

use super::*;
use crate::types::Input;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{RequestId, Status};
use kvplane_sys::{HugePages, IoBuf, Region, RegionOptions};

/// Limit for an idle peer.
const IDLE_BYTES: usize = 32 << 10;

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
fn an_idle_connection_owns_little_memory() {
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
        assert!(Instant::now() < limit, "no connection arrives any more");
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
        assert!(Instant::now() < limit, "no event arrives any more");
        round(&poller, &mut asking);
        seen += round(&other, &mut asked);
    }
    for tcp in [&asking, &asked] {
        for connection in tcp.connections.iter() {
            assert!(connection.is_quiet() && connection.owned_bytes() < IDLE_BYTES, "{}", connection.owned_bytes());
        }
        assert!(tcp.output.spare_bytes() <= 64 * 4096);
    }
}

/// Returns a client and a server with one connection on which a payload is lent and its notification is never
/// recognized: the driver believes that there was an earlier call.
fn one_lost_notice() -> Option<(Poller, Tcp, Poller, Tcp)> {
    let options = ZeroCopyOptions { when: ZeroCopy::Always, least_bytes: 1 };
    let (poller, mut asking) = (Poller::new().expect("a poller"), Tcp::new(options));
    let (other, mut asked) = (Poller::new().expect("a poller"), Tcp::new(options));
    let listener = net::tcp_listener(([127, 0, 0, 1], 0).into(), 64).expect("a port");
    let address = listener.local_addr().expect("an address");
    asked.listen(&other, listener).expect("a poller with room");
    let id = asking.connect(&poller, address).expect("a socket");
    while asked.open() == 0 {
        round(&poller, &mut asking);
        round(&other, &mut asked);
    }
    let connection = asking.connections.get(id).expect("a connection");
    connection.writer.lending.decide(connection.socket.as_fd(), &options);
    let Some(lent) = connection.writer.lending.lent() else {
        println!("skipped: lost notices: this kernel gives none");
        return None;
    };
    lent.invent_call();
    let memory = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("lost-notice", 20_000) };
    let buffers = IoBuf::whole(Region::allocate(&memory).expect("memory")).into();
    let header = Header::request(Kind::Request(Operation::Put), RequestId::default()).with_payload(20_000, None);
    assert!(asking.send(id, &header, b"", Some(OutgoingPayload { buffers, hold: Some(77) })));
    while asking.zero_copy().noticed == 0 {
        round(&poller, &mut asking);
        round(&other, &mut asked);
    }
    Some((poller, asking, other, asked))
}

/// Runs rounds until the event that `wanted` selects; other events are skipped.
fn wait_for(poller: &Poller, tcp: &mut Tcp, wanted: impl Fn(&Event) -> bool) {
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(Instant::now() < limit, "it never happens");
        while let Some(event) = tcp.poll_event() {
            if wanted(&event) {
                return;
            }
        }
        let mut readiness = Vec::new();
        poller.wait(Duration::from_millis(1), &mut readiness).expect("a working poller");
        for one in readiness {
            tcp.ready(poller, Token::from_bits(one.token).expect("a token of the driver"), &one);
        }
        let mut scratch = Vec::new();
        while let Some(id) = tcp.next_ready() {
            while let Input::Frame(header) = tcp.input(id, &mut scratch) {
                assert_eq!(header.request, RequestId::default());
            }
        }
        tcp.flush(poller);
    }
}

#[test]
fn a_late_notification_is_replaced_by_a_reply_and_acknowledged_bytes() {
    let Some((poller, mut asking, other, mut asked)) = one_lost_notice() else { return };
    let reply = Header::reply(Kind::Reply(Operation::Put), RequestId::default(), Status::Ok);
    assert!(asked.send(ConnectionId { index: 0, generation: 1 }, &reply, b"", None));
    let start = Instant::now();
    round(&other, &mut asked);
    wait_for(&poller, &mut asking, |event| matches!(event, Event::Sent(77)));
    assert!(start.elapsed() >= Duration::from_millis(50), "not before patience is lost");
    assert_eq!((asking.zero_copy().late, asking.zero_copy().abandoned), (1, 0));
    let mut answers = 0;
    while answers == 0 {
        answers += round(&poller, &mut asking);
    }
    assert!(
        asking.poll_timeout().is_none() && asking.connections.get(ConnectionId { index: 0, generation: 1 }).is_some()
    );
}

#[test]
fn closing_does_not_wait_forever_for_a_notification() {
    let Some((poller, mut asking, _other, _asked)) = one_lost_notice() else { return };
    let id = ConnectionId { index: 0, generation: 1 };
    asking.close(id, CloseCause::Closed);
    for _ in 0..20 {
        round(&poller, &mut asking);
    }
    assert!(asking.open() == 1 && asking.poll_timeout().is_some(), "it waits");
    let connection = asking.connections.at_mut(0).expect("a connection that is ending");
    connection.writer.lending.lent().expect("a lender").until_ns = Some(1);
    wait_for(&poller, &mut asking, |event| matches!(event, Event::Sent(77)));
    wait_for(&poller, &mut asking, |event| matches!(event, Event::Gone(gone, CloseCause::Closed) if *gone == id));
    assert_eq!((asking.zero_copy().late, asking.zero_copy().abandoned, asking.open()), (0, 1, 0));
}
