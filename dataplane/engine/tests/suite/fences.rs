//! Tests of fences on real sockets: the bytes of a write that its sender has given up are in the shard's receive
//! buffer, or half received, when a fence and then a newer write arrive on another connection. The old bytes never
//! land.
//!
//! The test drives the host itself, so it decides what has arrived before the host polls. The other connection's bytes
//! arrive first, so the host, which serves sockets in the order in which they became ready, reaches the old ones last.

use crate::support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_engine::{HostConfig, HugePages, Region, RegionOptions, ShardHost};
use kvplane_proto::frame::{HEADER_BYTES, Header, VERSION};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::message::{Hello, IdItem, Item, Kind, Operation, RunItem, WriteItem};
use kvplane_proto::rng::mix64;
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_store::Store;
use kvplane_store::service::{SegmentInfo, Service};
use kvplane_sys::net;

/// Bytes of the segment and of each write: more than is copied out of the staging buffer, less than a socket's buffer.
const BYTES: usize = 40_000;
const OLD: u64 = 1;
const NEW: u64 = 2;
/// No step may take this long.
const HANG: Duration = Duration::from_secs(60);

/// End of the sender's side of the old connection.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    /// The network lost the packets that end it.
    Silent,
    /// A reset.
    Reset,
    /// An orderly close.
    Closed,
}

/// Progress of the old write when the fence arrives.
#[derive(Clone, Copy, PartialEq, Debug)]
enum OldWrite {
    /// All of it is in the receive buffer.
    No,
    /// Its header and a part of its payload were received, in place.
    Half,
}

struct Bed {
    host: ShardHost,
    region: Arc<Region>,
    segment: SegmentId,
    address: std::net::SocketAddr,
}

fn pattern(number: u64, at: usize) -> u8 {
    mix64(number << 32 ^ at as u64) as u8
}

fn bytes_of(number: u64) -> Vec<u8> {
    (0..BYTES).map(|at| pattern(number, at)).collect()
}

impl Bed {
    fn new() -> Self {
        let identity = support::identity();
        let service = Service::new(identity, Store::empty());
        let mut host = ShardHost::new(&HostConfig::default(), service, None, None).expect("a poller");
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        let address = listener.local_addr().expect("an address");
        host.listen(listener, None).expect("a listener");
        let options = RegionOptions { huge: HugePages::Never, prefault: false, ..RegionOptions::new("target", BYTES) };
        let region = Region::allocate(&options).expect("memory");
        let info = SegmentInfo {
            address: region.address(),
            bytes: BYTES as u64,
            writable: true,
            shareable: false,
            remote_accessible: true,
        };
        let segment = host.service().segments_mut().register(info).expect("a free range");
        host.segments().add(segment, Arc::clone(&region));
        Self { host, region, segment, address }
    }

    /// Runs rounds until none makes progress.
    fn settle(&mut self) {
        let mut idle = 0;
        while idle < 40 {
            self.host.park(Duration::from_millis(1), || false).expect("a working poller");
            idle = if self.host.poll().expect("a working poller") { 0 } else { idle + 1 };
        }
    }

    /// Reads one frame, running the host meanwhile.
    fn hear(&mut self, stream: &mut TcpStream) -> Header {
        let (mut bytes, mut at) = ([0; HEADER_BYTES], 0);
        let limit = Instant::now() + HANG;
        while at < HEADER_BYTES {
            // Parked first, so that sockets are served in the order in which they became ready.
            self.host.park(Duration::from_millis(1), || false).expect("a working poller");
            self.host.poll().expect("a working poller");
            match stream.read(&mut bytes[at..]) {
                Ok(0) => panic!("the host closed a connection in use"),
                Ok(more) => at += more,
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            assert!(Instant::now() < limit, "no answer");
        }
        let header = Header::decode(&bytes).expect("a frame");
        let mut body = vec![0; header.body_bytes as usize];
        stream.set_nonblocking(false).expect("a socket");
        stream.read_exact(&mut body).expect("a body");
        stream.set_nonblocking(true).expect("a socket");
        header
    }

    fn connect(&mut self, client: u64, connection: u64) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).expect("a listener");
        let hello = Hello {
            version_min: VERSION,
            version_max: VERSION,
            client,
            connection,
            node: NodeId(0),
            incarnation: Incarnation(0),
            shard: ShardId(0),
            lane: 0,
            fetches: false,
            cluster: "test".to_owned(),
        };
        stream.write_all(&frame(Operation::Hello, &hello.encode(), &[])).expect("a connection");
        stream.set_nonblocking(true).expect("a socket");
        assert_eq!(self.hear(&mut stream).status, Status::Ok);
        stream
    }

    /// Encodes a write of the whole segment; gathered writes cover it in four ranges.
    fn write(&self, operation: Operation, number: u64) -> Vec<u8> {
        let mut body = Vec::new();
        if operation == Operation::Write {
            WriteItem { segment: self.segment, offset: 0 }.encode(&mut body);
        } else {
            let (bytes, ranges) = (BYTES as u32 / 4, 4);
            let stride_bytes = u64::from(bytes);
            RunItem { segment: self.segment, offset: 0, stride_bytes, bytes, ranges }.encode(&mut body);
        }
        frame(operation, &body, &bytes_of(number))
    }

    /// Returns the write whose bytes are in the segment, if they are all of one.
    fn found(&self) -> Option<u64> {
        let mut bytes = vec![0; BYTES];
        self.region.read_with(0, BYTES, &mut |at, part| {
            bytes[at as usize..at as usize + part.len()].copy_from_slice(part);
        });
        [OLD, NEW].into_iter().find(|&number| bytes == bytes_of(number))
    }
}

fn frame(operation: Operation, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let request = RequestId { index: 3, generation: 4 };
    let mut header = Header::request(Kind::Request(operation), request).with_body(body, 1);
    if !payload.is_empty() {
        header = header.with_payload(payload.len() as u64, None);
    }
    [&header.encode()[..], body, payload].concat()
}

/// Returns the write whose bytes are in the segment after an old write, given up, and a newer one; `named` is the
/// connection that the fence names, if there is a fence.
fn run(operation: Operation, begun: OldWrite, end: End, named: Option<u64>) -> Option<u64> {
    let mut bed = Bed::new();
    let mut old = bed.connect(77, 1);
    let mut new = bed.connect(77, 2);
    let write = bed.write(operation, OLD);
    let before = if begun == OldWrite::Half { write.len() / 2 } else { 0 };
    old.write_all(&write[..before]).expect("room in a socket");
    bed.settle();
    let mut asked = Vec::new();
    if let Some(id) = named {
        let mut body = Vec::new();
        IdItem { id }.encode(&mut body);
        asked.extend(frame(Operation::Fence, &body, &[]));
    }
    asked.extend(bed.write(operation, NEW));
    new.write_all(&asked).expect("room in a socket");
    old.write_all(&write[before..]).expect("room in a socket");
    let _kept = match end {
        End::Silent => Some(old),
        End::Reset => {
            net::abort(old.as_fd()).expect("a socket");
            None
        }
        End::Closed => None,
    };
    if named.is_some() {
        let header = bed.hear(&mut new);
        assert_eq!((header.kind, header.status), (Kind::Reply(Operation::Fence), Status::Ok));
    }
    let header = bed.hear(&mut new);
    assert_eq!((header.kind, header.status), (Kind::Reply(operation), Status::Ok));
    bed.settle();
    bed.found()
}

const OPERATIONS: [Operation; 2] = [Operation::Write, Operation::WriteMany];
const ENDS: [End; 3] = [End::Silent, End::Reset, End::Closed];

#[test]
fn abandoned_write_never_overwrites_newer_bytes() {
    for operation in OPERATIONS {
        for begun in [OldWrite::No, OldWrite::Half] {
            for end in ENDS {
                let found = run(operation, begun, end, Some(1));
                assert_eq!(found, Some(NEW), "{operation:?}, begun: {begun:?}, {end:?}");
            }
        }
    }
}

#[test]
fn without_a_fence_or_with_one_of_another_connection_it_would() {
    // The order in which a kernel announces sockets is undefined: one occurrence is enough to show the purpose of the
    // fence.
    for named in [None, Some(3)] {
        for end in ENDS {
            let landed = (0..20).any(|_| run(Operation::Write, OldWrite::No, end, named) != Some(NEW));
            assert!(landed, "named {named:?}, {end:?}: the old write never came late, so the test above shows nothing");
        }
    }
}

#[test]
fn a_connection_that_was_fenced_ends_and_gives_its_segment_back() {
    let mut bed = Bed::new();
    let mut old = bed.connect(77, 1);
    let mut new = bed.connect(77, 2);
    let write = bed.write(Operation::Write, OLD);
    old.write_all(&write[..write.len() / 2]).expect("room in a socket");
    bed.settle();
    let segment = bed.segment;
    bed.host.service().unregister(segment);
    bed.settle();
    assert_eq!(bed.host.segments().poll_unregistered(), None, "half a write is in flight");
    let mut body = Vec::new();
    IdItem { id: 1 }.encode(&mut body);
    new.write_all(&frame(Operation::Fence, &body, &[])).expect("room in a socket");
    assert_eq!(bed.hear(&mut new).status, Status::Ok);
    bed.settle();
    assert_eq!(bed.host.segments().poll_unregistered(), Some(segment));
    assert_eq!((bed.host.connections(), bed.host.counters().broken), (1, 0), "an end that is nobody's fault");
    let ended = matches!(old.read(&mut [0; 1]), Ok(0)) || old.take_error().is_ok();
    assert!(ended);
}
