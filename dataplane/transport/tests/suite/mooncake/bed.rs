//! A host with lanes only, and peers that follow a script.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, SegmentId};
use kvplane_proto::message::{Item, Kind, Operation, ReadItem, WriteItem};
use kvplane_sys::{IoBuf, Poller, Region, cpu};
use kvplane_transport::mooncake::Lanes;
use kvplane_transport::mooncake::wire::{Dialect, Request};
use kvplane_transport::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Target, Token};

use super::raw::{OK, PATIENCE, Raw, byte_at, bytes_at, memory};

pub(crate) const BYTES: usize = 64 << 20;
/// Addresses as a peer might announce them.
pub(crate) const REMOTE: u64 = 0x7fff_0000_0000;

/// A host with lanes only, driven by the test.
pub(crate) struct Bed {
    pub(crate) lanes: Lanes,
    pub(crate) poller: Poller,
    pub(crate) region: Arc<Region>,
    pub(crate) requests: u32,
    /// Destinations of the answers to reads.
    pub(crate) places: BTreeMap<u32, (usize, usize)>,
    /// Outcomes in order of arrival.
    pub(crate) outcomes: Vec<(u32, Status)>,
    pub(crate) receiving: Option<u32>,
    /// Writes whose memory is in use.
    pub(crate) lent: BTreeMap<u64, u32>,
    pub(crate) connected: usize,
    pub(crate) gone: Vec<CloseCause>,
    /// Offset of the lanes' clock ahead of the real one, in nanoseconds.
    pub(crate) ahead_ns: u64,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self {
            lanes: Lanes::new(),
            poller: Poller::new().expect("epoll"),
            region: memory(BYTES),
            requests: 0,
            places: BTreeMap::new(),
            outcomes: Vec::new(),
            receiving: None,
            lent: BTreeMap::new(),
            connected: 0,
            gone: Vec::new(),
            ahead_ns: 0,
        }
    }

    pub(crate) fn connect(&mut self, address: SocketAddr, dialect: Dialect) -> ConnectionId {
        let id = self.lanes.connect(&self.poller, address, dialect, cpu::monotonic_ns()).expect("a socket");
        let connected = self.connected + self.gone.len();
        self.until("connected or gone", |bed| bed.connected + bed.gone.len() > connected);
        id
    }

    pub(crate) fn id(&mut self) -> RequestId {
        self.requests += 1;
        RequestId { index: self.requests, generation: 1 }
    }

    /// Writes from this offset of the memory to the remote address of the same offset.
    pub(crate) fn write(&mut self, lane: ConnectionId, offset: usize, bytes: usize) -> u32 {
        let request = self.id();
        let mut body = Vec::new();
        WriteItem { segment: SegmentId::default(), offset: REMOTE + offset as u64 }.encode(&mut body);
        let header = Header::request(Kind::Request(Operation::Write), request)
            .with_body(&body, 1)
            .with_payload(bytes as u64, None);
        let hold = u64::from(request.index) + 1000;
        self.lent.insert(hold, request.index);
        let buffers = IoBuf::new(Arc::clone(&self.region), offset, bytes).into();
        self.lanes.send(lane, &header, &body, Some(OutgoingPayload { buffers, hold: Some(hold) }));
        request.index
    }

    pub(crate) fn read(&mut self, lane: ConnectionId, offset: usize, bytes: usize) -> u32 {
        let request = self.id();
        let mut body = Vec::new();
        let segment = SegmentId::default();
        ReadItem { request, segment, offset: REMOTE + offset as u64, bytes: bytes as u64 }.encode(&mut body);
        let header = Header::request(Kind::Request(Operation::Read), RequestId::default()).with_body(&body, 1);
        self.places.insert(request.index, (offset, bytes));
        self.lanes.send(lane, &header, &body, None);
        request.index
    }

    /// One round of a host.
    pub(crate) fn round(&mut self) {
        let timeout = if self.lanes.has_work() { Duration::ZERO } else { Duration::from_millis(5) };
        let mut ready = Vec::new();
        self.poller.wait(timeout, &mut ready).expect("epoll");
        for readiness in ready {
            let token = Token::from_bits(readiness.token).expect("a token of the lanes'");
            self.lanes.ready(token, readiness.readable, readiness.writable);
        }
        self.lanes.flush(&self.poller, cpu::monotonic_ns() + self.ahead_ns);
        self.take_events();
        let mut scratch = Vec::new();
        for id in core::iter::from_fn(|| self.lanes.next_ready()).collect::<Vec<_>>() {
            loop {
                let input = self.lanes.input(&self.poller, id, &mut scratch);
                self.take_events();
                match input {
                    Input::Wait => break,
                    Input::Frame(header) => self.take_frame(id, &header),
                    Input::Payload(sum) => {
                        assert_eq!(sum, None);
                        let request = self.receiving.take().expect("a payload was announced");
                        self.outcomes.push((request, Status::Ok));
                    }
                }
            }
        }
    }

    pub(crate) fn take_frame(&mut self, id: ConnectionId, header: &Header) {
        let index = header.request.index;
        match (header.kind, header.status) {
            (Kind::Reply(Operation::Read), Status::Ok) => {
                let (offset, bytes) = self.places.remove(&index).expect("answered once");
                assert_eq!(header.payload_bytes, bytes as u64);
                assert_eq!(self.receiving.replace(index), None);
                let buffer = IoBuf::new(Arc::clone(&self.region), offset, bytes);
                self.lanes.receive_payload(id, Target::Memory { buffer, checksum: false });
            }
            (Kind::Reply(_), status) => {
                assert!(!self.lent.values().any(|&request| request == index), "answered while its memory is in use");
                self.outcomes.push((index, status));
            }
            (kind, _) => panic!("{kind:?} is no answer"),
        }
    }

    pub(crate) fn take_events(&mut self) {
        while let Some(event) = self.lanes.poll_event() {
            match event {
                Event::Connected(_) => self.connected += 1,
                Event::Sent(hold) => assert!(self.lent.remove(&hold).is_some(), "memory was returned twice"),
                Event::Gone(_, why) => {
                    self.receiving = None;
                    self.gone.push(why);
                }
                Event::Accepted(_) => panic!("there is no listener"),
            }
        }
    }

    pub(crate) fn until(&mut self, what: &str, there: impl Fn(&Self) -> bool) {
        let end_ns = cpu::monotonic_ns() + PATIENCE.as_nanos() as u64;
        while !there(self) {
            assert!(cpu::monotonic_ns() < end_ns, "never {what}: {:?} {:?}", self.outcomes, self.gone);
            self.round();
        }
    }

    pub(crate) fn outcome(&mut self, request: u32) -> Status {
        self.until("an outcome", |bed| bed.outcomes.iter().any(|&(of, _)| of == request));
        let found: Vec<Status> =
            self.outcomes.iter().filter(|(of, _)| *of == request).map(|&(_, status)| status).collect();
        assert_eq!(found.len(), 1, "one outcome");
        found[0]
    }

    pub(crate) fn fill(&self, seed: u64, offset: usize, bytes: usize) {
        self.region.fill_with(offset, bytes, &mut |at, part| {
            let start = REMOTE + offset as u64 + at;
            part.iter_mut().enumerate().for_each(|(i, byte)| *byte = byte_at(seed, start + i as u64));
        });
    }
}

/// Starts a peer that plays this script for its connections, one after the other.
pub(crate) fn peer(script: impl FnOnce(&mut Listening) + Send + 'static) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    (address, std::thread::spawn(move || script(&mut Listening(listener))))
}

pub(crate) struct Listening(TcpListener);

impl Listening {
    pub(crate) fn accept(&mut self) -> Raw {
        Raw::of(self.0.accept().expect("a connection").0)
    }
}

/// Answers like a stock server of version 2 whose memory contains the pattern at every address.
pub(crate) fn serve(peer: &mut Raw, requests: usize, seed: u64) -> Vec<Request> {
    (0..requests)
        .map(|_| {
            let request = peer.take_request();
            let bytes = bytes_at(seed, request.address, request.bytes as usize);
            if request.write {
                assert!(peer.take(request.bytes as usize) == bytes, "another payload at {:#x}", request.address);
            }
            if request.dialect == Dialect::V2 {
                peer.send(&OK);
            }
            if !request.write {
                peer.send(&bytes);
            }
            request
        })
        .collect()
}
