//! Tests of peers that break the protocol or belong to another cluster: their connection is closed, and the others are
//! served.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

use kvplane::rpc::{ClientConfig as Rpc, ClusterName, Role, RuntimeDirectory};
use kvplane::{Client, ClientConfig, Control, NodeId};
use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::frame::{HEADER_BYTES, Header, VERSION};
use kvplane_proto::ids::{Incarnation, RequestId, ShardId};
use kvplane_proto::message::{GetItem, Hello, Kind, Operation, encode_items};
use kvplane_proto::{Digest, Limits, Status};

use crate::support::{PATIENCE, Way, Workplace, finish, text, wait_until};

fn request_id() -> RequestId {
    RequestId::from_bits(1)
}

pub(crate) fn hello_of(cluster: &str, versions: (u8, u8), node: u64) -> Vec<u8> {
    let body = Hello {
        version_min: versions.0,
        version_max: versions.1,
        client: 1,
        connection: 1,
        node: NodeId(node),
        incarnation: Incarnation(0),
        shard: ShardId(0),
        lane: 0,
        fetches: false,
        cluster: cluster.to_owned(),
    };
    let body = body.encode();
    let header = Header::request(Kind::Request(Operation::Hello), request_id()).with_body(&body, 1);
    [&header.encode()[..], &body].concat()
}

/// Returns a header with some of its bytes replaced, and a valid checksum.
fn forged(header: &Header, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut out = header.encode();
    out[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = frame_checksum(&out[..60]);
    out[60..].copy_from_slice(&checksum.to_le_bytes());
    out.to_vec()
}

/// Sends bytes, and reads until the other side closes. A reset is an end too: not all sent bytes were read.
fn say(data: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let stream = TcpStream::connect(data).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    go_on(stream, bytes)
}

/// Opens a connection and completes the hello.
fn greeted(data: SocketAddr, hello: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(data).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(hello).unwrap();
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let header = Header::decode(&header).unwrap();
    assert_eq!((header.kind, header.status), (Kind::Reply(Operation::Hello), Status::Ok));
    stream.read_exact(&mut vec![0; header.body_bytes as usize]).unwrap();
    stream
}

/// Sends more bytes, and reads until the end.
fn go_on(mut stream: TcpStream, bytes: &[u8]) -> Vec<u8> {
    // The connection may be closed before all was sent.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    loop {
        match stream.read(&mut part) {
            Ok(0) => return answer,
            Ok(read) => answer.extend_from_slice(&part[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return answer,
            Err(error) => panic!("the connection was not closed after {bytes:02x?}: {error}"),
        }
    }
}

fn status_of(answer: &[u8]) -> Option<Status> {
    let header: &[u8; HEADER_BYTES] = answer.get(..HEADER_BYTES)?.try_into().unwrap();
    Some(Header::decode(header).unwrap().status)
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns first frames that are no valid hello: each with its name.
fn broken_before_hello(exists: &Header, good: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut torn = exists.encode();
    torn[20] ^= 1;
    let mut spoiled = good.to_vec();
    *spoiled.last_mut().unwrap() ^= 1;
    let over_body = (Limits::BODY_BYTES as u32 + 1).to_le_bytes();
    let over_payload = (Limits::PAYLOAD_BYTES + 1).to_le_bytes();
    let over_items = (Limits::ITEMS_PER_FRAME as u32 + 1).to_le_bytes();
    vec![
        ("garbage", (0..4096u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()),
        (
            "HTTP",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody who is lost and talks a lot\r\n\r\n".to_vec(),
        ),
        ("a wrong frame version", forged(exists, 4, &[99])),
        ("a wrong header checksum", torn.to_vec()),
        ("a wrong body checksum", spoiled),
        ("an unknown kind", forged(exists, 5, &[0x7f])),
        ("an unknown flag", forged(exists, 52, &[0x80])),
        ("a body over the limit", forged(exists, 16, &over_body)),
        ("items over the limit", forged(exists, 20, &over_items)),
        ("a payload over the limit", forged(exists, 24, &over_payload)),
        ("a request before hello", exists.encode().to_vec()),
    ]
}

#[test]
fn a_peer_that_breaks_the_protocol_is_disconnected() {
    let place = Workplace::new("peers");
    let mut dev = place.dev("16M", &["--shards", "1"]);
    let data = dev.data();
    let good = hello_of("peers", (VERSION, VERSION), 0);
    let exists = Header::request(Kind::Request(Operation::Exists), request_id());
    let over_body = (Limits::BODY_BYTES as u32 + 1).to_le_bytes();
    let silent = broken_before_hello(&exists, &good);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let parallel = Way::BOTH.map(|way| {
            let (place, stop) = (&place, &stop);
            scope.spawn(move || {
                let mut client = place.client(way);
                let mut rounds = 0u64;
                loop {
                    let (key, value) = (format!("{way:?}-{}", rounds % 8), rounds.to_le_bytes().repeat(500));
                    client.remove(key.as_bytes()).unwrap();
                    client.put(key.as_bytes(), &value).unwrap();
                    assert_eq!(client.get(key.as_bytes()).unwrap(), Some(value));
                    rounds += 1;
                    // At least one round has run.
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            })
        });
        // The guard acts also when the test fails: the scope waits for the threads.
        let end = StopOnDrop(&stop);
        for (name, bytes) in &silent {
            assert!(say(data, bytes).is_empty(), "{name} was answered");
        }
        for (name, bytes) in [
            ("a reply", Header::reply(Kind::Reply(Operation::Get), request_id(), Status::Ok).encode().to_vec()),
            ("a second hello", good.clone()),
            ("a body over the limit", forged(&exists, 16, &over_body)),
            ("a torn hello", forged(&Header::request(Kind::Request(Operation::Hello), request_id()), 20, &[1])),
        ] {
            assert!(go_on(greeted(data, &good), &bytes).is_empty(), "{name} was answered");
        }
        for (name, bytes, status) in [
            ("another cluster", hello_of("elsewhere", (VERSION, VERSION), 0), Status::Incompatible),
            ("a later version", hello_of("peers", (VERSION + 1, 9), 0), Status::Incompatible),
            ("another node", hello_of("peers", (VERSION, VERSION), 12_345), Status::WrongOwner),
        ] {
            assert_eq!(status_of(&say(data, &bytes)), Some(status), "{name}");
        }
        // Half a frame, followed by the end.
        let mut half = TcpStream::connect(data).unwrap();
        half.write_all(&good[..30]).unwrap();
        drop(half);
        drop(end);
        for client in parallel {
            client.join().unwrap();
        }
    });
    dev.assert_alive();
}

#[test]
fn a_silent_connection_times_out() {
    let place = Workplace::new("silent");
    let dev = place.dev("8M", &["--shards", "1"]);
    assert!(say(dev.data(), &[]).is_empty());
}

/// Opens a connection that requests an object and does not read it: it is far longer than socket buffers, so it stays
/// pinned.
fn not_taken(data: SocketAddr, cluster: &str, key: &str, bytes: u64) -> TcpStream {
    let mut stream = greeted(data, &hello_of(cluster, (VERSION, VERSION), 0));
    let mut body = Vec::new();
    let digest = Digest::of(b"", key.as_bytes());
    encode_items([GetItem { digest, request: request_id(), capacity_bytes: u64::MAX }], &mut body);
    let get = Header::request(Kind::Request(Operation::Get), request_id()).with_body(&body, 1);
    stream.write_all(&[&get.encode()[..], &body].concat()).unwrap();
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let header = Header::decode(&header).unwrap();
    assert_eq!((header.status, header.payload_bytes), (Status::Ok, bytes));
    stream
}

#[test]
fn a_pool_full_of_pinned_bytes_refuses_puts_until_they_are_unpinned() {
    let place = Workplace::new("pinned");
    let mut dev = place.dev("64M", &["--shards", "1"]);
    // An object may take a quarter of the pool; together they leave a MiB.
    let readers = [(0, 16usize), (1, 16), (2, 16), (3, 15)].map(|(at, mib)| {
        let key = format!("large-{at}");
        let large = place.file("large", &vec![1; mib << 20]);
        place.run(&["ctl", "put", &key, text(&large)]).well();
        not_taken(dev.data(), "pinned", &key, (mib as u64) << 20)
    });
    let other = place.file("other", &vec![2; 4 << 20]);
    let put = || place.run(&["ctl", "put", "other", text(&other)]);
    put().failed(1, &["put of 4194304 bytes", "full", "pinned"]);
    finish(place.command(&["ctl", "put", "small", "-"]), b"what fits is served").well();
    drop(readers);
    assert!(wait_until(|| put().status.success().then_some(())).is_some());
    assert_eq!(place.run(&["ctl", "get", "other"]).well(), vec![2; 4 << 20]);
    dev.assert_alive();
}

#[test]
fn certificates_of_another_cluster_are_refused_both_ways() {
    let (here, there) = (Workplace::new("here"), Workplace::new("there"));
    let (mut dev, _other) = (here.dev("8M", &[]), there.dev("8M", &[]));
    let published = |place: &Workplace| {
        let name = ClusterName::new(&place.cluster).unwrap();
        RuntimeDirectory::at(place.runtime()).discover(&name).unwrap()
    };
    let (ours, theirs) = (published(&here), published(&there));
    let config = |change: &dyn Fn(&mut Rpc)| {
        let mut rpc = Rpc::local(&ours, Role::Client, "a test").unwrap();
        change(&mut rpc);
        ClientConfig { control: Control::Explicit(Box::new(rpc)), ..ClientConfig::local("here") }
    };
    let mut client = Client::connect(&config(&|_| {})).unwrap();
    let address = ours.control.to_string();
    let refused = |what: &str, config: ClientConfig, words: &[&str]| {
        let Err(error) = Client::connect(&config) else { panic!("{what} was accepted") };
        let text = error.to_string();
        println!("{what}: {text}");
        assert!(text.contains(&address), "{what}: no {address} in {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{what}: {text}");
    };
    refused("another authority", config(&|rpc| rpc.trust = theirs.trust.clone()), &["certificate"]);
    let stranger = theirs.identity(Role::Client).unwrap();
    refused("another's identity", config(&|rpc| rpc.identity = stranger.clone()), &["certificate"]);
    let name = ClusterName::new("there").unwrap();
    refused("another cluster's name", config(&|rpc| rpc.cluster = name.clone()), &["certificate"]);
    client.put(b"key", b"value").unwrap();
    assert_eq!(client.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
    dev.assert_alive();
}
