//! Tests of the daemon over real sockets on loopback, without a stock engine at the other end.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::Instant;

use super::*;
use crate::frame::{self, Kind};
use crate::{Buffer, Caller, Descriptor, Notice, NoticeLimits, PublishedEngine, Stage};

const LIMIT: usize = 1 << 20;
const LONG: Duration = Duration::from_secs(20);

fn start(config: DaemonConfig) -> (Daemon, Arc<PublishedEngine>, String) {
    let listening = Daemon::listen(config).expect("a free port");
    let name = listening.address().to_string();
    let mut descriptor = Descriptor::tcp(&name, "127.0.0.1", 7);
    descriptor.buffers.push(Buffer::new(&name, 0x7f00_0000_0000, 4096));
    let limits = NoticeLimits { notices: 2, bytes: LIMIT };
    let published = Arc::new(PublishedEngine::new(&descriptor, LIMIT, limits).expect("a good descriptor"));
    let daemon = listening.serve(published.clone()).expect("a thread");
    (daemon, published, name)
}

fn any_port() -> DaemonConfig {
    DaemonConfig { ports: 0..=0, ..DaemonConfig::default() }
}

fn patient() -> Caller {
    Caller { timeout: LONG, ..Caller::default() }
}

/// Waits for a count of another thread.
fn until(daemon: &Daemon, what: &str, reached: impl Fn(Counts) -> bool) {
    let deadline = Instant::now() + LONG;
    while !reached(daemon.counts()) {
        assert!(Instant::now() < deadline, "{what}: {:?}", daemon.counts());
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn connect(name: &str) -> TcpStream {
    let stream = TcpStream::connect(name).expect("it listens");
    stream.set_read_timeout(Some(LONG)).expect("a time-out");
    stream
}

/// Reads until the daemon closes; a reset counts as the end.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn callers_get_descriptor_life_and_notices() {
    let (daemon, published, name) = start(any_port());
    let caller = patient();
    caller.probe(&name).expect("it lives");
    let descriptor = caller.descriptor(&name, "{}").expect("its descriptor");
    assert_eq!((descriptor.name.as_str(), descriptor.buffers.len()), (name.as_str(), 1));
    let mut changed = descriptor.clone();
    changed.buffers.push(Buffer::new("cpu:0", 1 << 20, 64));
    published.replace(&changed).expect("a good one");
    assert_eq!(caller.descriptor(&name, "{}").expect("the new one"), changed);
    let notice = |text: &str| Notice { name: "peer".to_owned(), message: text.to_owned() };
    caller.notify(&name, &notice("1")).expect("room");
    caller.notify(&name, &notice("2")).expect("room");
    let error = caller.notify(&name, &notice("3")).expect_err("full");
    assert!(error.to_string().contains(&name) && error.to_string().contains("is full"), "{error}");
    assert_eq!(published.take_notices(), [notice("1"), notice("2")]);
    caller.notify(&name, &notice("4")).expect("room again");
    until(&daemon, "all counted", |counts| {
        let Counts { descriptors, notices, refused_notices, probes, .. } = counts;
        (descriptors, notices, refused_notices, probes) == (2, 3, 1, 1)
    });
    daemon.stop(LONG).expect("it stops");
    let error = caller.probe(&name).expect_err("nobody listens");
    assert_eq!(error.stage, Stage::Connect);
}

#[test]
fn bytes_on_the_wire_are_as_stock_engines_expect_them() {
    let (_daemon, published, name) = start(any_port());
    let cases = [
        (frame::typed(Kind::Probe, "{}\n"), frame::typed(Kind::Probe, r#"{"status":"success"}"#)),
        (frame::typed(Kind::Metadata, "{}"), frame::typed(Kind::Metadata, &published.descriptor())),
        (
            frame::typed(Kind::Notify, r#"{"name":"a","notify_msg":"b"}"#),
            frame::typed(Kind::Notify, r#"{"name":"","notify_msg":"success"}"#),
        ),
    ];
    for (request, reply) in cases {
        let mut stream = connect(&name);
        stream.write_all(&request).expect("sent");
        // The daemon closes its half on its own, without waiting for ours.
        assert_eq!(rest(&mut stream), reply);
    }
    for request in [frame::typed(Kind::Connection, "{}"), frame::untyped("{}")] {
        let mut stream = connect(&name);
        stream.write_all(&request).expect("sent");
        let reply = rest(&mut stream);
        assert_eq!(reply[8] == 0, request[8] == 0, "a reply has a type if the request has");
        let text = String::from_utf8_lossy(&reply[8..]).into_owned();
        assert!(text.contains("\"reply_msg\":\"this engine has no RDMA"), "{text}");
    }
}

#[test]
fn other_protocols_are_rejected() {
    let (daemon, _, name) = start(any_port());
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03", &[0; 9]] {
        let mut stream = connect(&name);
        stream.write_all(bytes).expect("sent");
        assert_eq!(rest(&mut stream), b"");
    }
    until(&daemon, "three malformed", |counts| counts.malformed == 3);
    patient().probe(&name).expect("others are served");
}

/// Neighbours that are idle, half-open or send garbage: all other peers are served meanwhile. The time that this takes
/// is printed, not checked: machines differ.
#[test]
fn blocked_neighbours_do_not_delay_other_peers() {
    let (daemon, _, name) = start(any_port());
    let alone = probe_all(&name);
    let idle: Vec<TcpStream> = (0..100).map(|_| connect(&name)).collect();
    let half: Vec<TcpStream> = (0..100)
        .map(|index| {
            let mut stream = connect(&name);
            stream.write_all(&frame::typed(Kind::Notify, "{\"name\":1}")[..index % 15 + 1]).expect("sent");
            stream
        })
        .collect();
    let mut garbage = connect(&name);
    garbage.write_all(&[0xff; 4096]).expect("sent");
    until(&daemon, "neighbours are there", |counts| counts.accepted >= 216);
    let beside = probe_all(&name);
    println!("slowest of 16 probes: alone {alone:?}, beside 201 blocked neighbours {beside:?}");
    until(&daemon, "probes are counted", |counts| counts.probes == 32);
    assert_eq!(daemon.counts().expired + daemon.counts().evicted, 0, "the neighbours were there all the time");
    drop((idle, half));
}

/// Probes one after the other; returns the longest time.
fn probe_all(name: &str) -> Duration {
    let one = |_| {
        let start = Instant::now();
        patient().probe(name).expect("served");
        start.elapsed()
    };
    (0..16).map(one).max().unwrap_or_default()
}

#[test]
fn many_callers_at_once_are_served() {
    let (daemon, _, name) = start(any_port());
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..20 {
                    patient().probe(&name).expect("served");
                    patient().descriptor(&name, "{}").expect("served");
                }
            });
        }
    });
    until(&daemon, "all are counted", |counts| counts.probes == 320 && counts.descriptors == 320);
}

#[test]
fn silence_and_slowness_have_deadlines() {
    let config = DaemonConfig { idle: Duration::from_millis(60), total: Duration::from_millis(300), ..any_port() };
    let (daemon, _, name) = start(config);
    let mut silent = connect(&name);
    let mut replied = connect(&name);
    replied.write_all(&frame::typed(Kind::Probe, "{}")).expect("sent");
    assert_eq!(rest(&mut silent), b"", "closed by the daemon");
    until(&daemon, "both have expired", |counts| counts.expired == 2);
    // Single bytes in time are not idleness, but the total deadline ends the connection.
    let mut slow = connect(&name);
    let request = frame::typed(Kind::Notify, &"x".repeat(1 << 16));
    for byte in request {
        if slow.write_all(&[byte]).is_err() || daemon.counts().expired == 3 {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    until(&daemon, "the slow one has expired", |counts| counts.expired == 3);
}

#[test]
fn the_connection_idle_longest_is_evicted() {
    let (daemon, _, name) = start(DaemonConfig { max_connections: 3, ..any_port() });
    let mut silent: Vec<TcpStream> = Vec::new();
    for index in 0..3 {
        silent.push(connect(&name));
        until(&daemon, "accepted", |counts| counts.accepted == index + 1);
    }
    patient().probe(&name).expect("served");
    until(&daemon, "one made room", |counts| counts.evicted == 1);
    assert_eq!(rest(&mut silent[0]), b"", "the first went");
    silent[2].write_all(&frame::typed(Kind::Probe, "{}")).expect("still there");
    assert!(!rest(&mut silent[2]).is_empty());
}

#[test]
fn memory_for_requests_is_limited() {
    let (daemon, _, name) = start(DaemonConfig { max_held_bytes: 100_000, ..any_port() });
    let request = frame::typed(Kind::Notify, &"x".repeat(200_000));
    let mut stream = connect(&name);
    // The whole request could be read in one turn.
    let _ = stream.write_all(&request[..150_000]);
    assert_eq!(rest(&mut stream), b"");
    until(&daemon, "refused", |counts| counts.evicted == 1);
    patient().probe(&name).expect("others are served");
}

#[test]
fn a_large_descriptor_arrives_whole() {
    let (_daemon, published, name) = start(any_port());
    let mut descriptor = Descriptor::tcp(&name, "127.0.0.1", 7);
    descriptor.buffers = (1..15_000).map(|index| Buffer::new("cpu:0", index << 16, index)).collect();
    published.replace(&descriptor).expect("below the limit");
    assert_eq!(patient().descriptor(&name, "{}").expect("whole"), descriptor);
    let small = Caller { max_message_bytes: 1000, ..patient() };
    let error = small.descriptor(&name, "{}").expect_err("too long");
    assert!(error.to_string().contains("MC_HANDSHAKE_MAX_LENGTH"), "{error}");
    assert_eq!(error.stage, Stage::Decode);
}

#[test]
fn ports_are_taken_from_the_range_and_addresses_refused() {
    let (first, _, _) = start(DaemonConfig::default());
    assert!((15_000..=17_000).contains(&first.address().port()));
    let taken = first.address().port();
    let config = DaemonConfig { ports: taken..=taken, ..DaemonConfig::default() };
    assert!(matches!(Daemon::listen(config), Err(StartError::System(_))));
    let address: IpAddr = "0.0.0.0".parse().expect("an address");
    let open = DaemonConfig { address, ..any_port() };
    assert!(matches!(Daemon::listen(open.clone()), Err(StartError::NotLoopback(_))));
    Daemon::listen(DaemonConfig { without_authentication_anywhere: true, ..open }).expect("allowed explicitly");
}

#[test]
fn a_peer_that_is_no_daemon_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let name = listener.local_addr().expect("bound").to_string();
    let replies: [(&[u8], &str); 4] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "may not be a Mooncake engine"),
        (b"\x03\0\0", "closed the connection without a reply"),
        (b"\x09\0\0\0\0\0\0\0\x03{}", "after 2 of 8 bytes"),
        (b"\x03\0\0\0\0\0\0\0\x02{}", "answers a probe request with"),
    ];
    for (reply, expected) in replies {
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().expect("a caller");
                // Reads the whole request, so that closing does not reset the connection.
                stream.read_exact(&mut [0; 11]).expect("a probe");
                stream.write_all(reply).expect("sent");
            });
            patient().probe(&name).expect_err("no daemon").to_string()
        });
        assert!(error.contains(expected) && error.contains(&name), "{error}");
    }
    let quick = Caller { timeout: Duration::from_millis(50), ..Caller::default() };
    let error = quick.probe(&name).expect_err("nobody answers");
    assert_eq!(error.stage, Stage::Receive);
    assert_eq!(error.source.map(|error| error.kind()), Some(io::ErrorKind::TimedOut));
}

/// A parked daemon stops at once, also with connections open.
#[test]
fn it_stops_with_connections_open() {
    let (daemon, _, name) = start(any_port());
    let mut open: Vec<TcpStream> = (0..10).map(|_| connect(&name)).collect();
    until(&daemon, "accepted", |counts| counts.accepted == 10);
    daemon.stop(LONG).expect("it stops");
    for stream in &mut open {
        assert_eq!(rest(stream), b"");
    }
    assert!(TcpStream::connect(&name).is_err(), "the port is closed");
}

/// A stop waits for a call of the user's code that does not return no longer than its deadline.
#[test]
fn stopping_has_a_deadline() {
    struct Stuck(std::sync::Mutex<mpsc::Receiver<()>>);
    impl Local for Stuck {
        fn descriptor(&self) -> Arc<str> {
            let _ = self.0.lock().expect("one thread").recv();
            "{}".into()
        }
        fn notified(&self, _: Notice) -> Result<(), crate::NoticesFull> {
            Ok(())
        }
        fn connect(&self, _: &crate::RdmaHandshake) -> crate::RdmaHandshake {
            crate::RdmaHandshake::refused("not here")
        }
    }
    let (release, released) = mpsc::channel();
    let listening = Daemon::listen(any_port()).expect("a port");
    let mut stream = connect(&listening.address().to_string());
    let daemon = listening.serve(Arc::new(Stuck(released.into()))).expect("a thread");
    stream.write_all(&frame::typed(Kind::Metadata, "{}")).expect("sent");
    until(&daemon, "accepted", |counts| counts.accepted == 1);
    std::thread::sleep(Duration::from_millis(20));
    assert!(matches!(daemon.stop(Duration::from_millis(20)), Err(StopError::Deadline(_))));
    release.send(()).expect("the thread still waits");
    assert!(!rest(&mut stream).is_empty() || stream.take_error().is_ok());
}
