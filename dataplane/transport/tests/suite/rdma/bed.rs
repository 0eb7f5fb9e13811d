//! Two ends with a driver each, and the events that they saw.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::rng::mix64;
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_sys::verbs::{Device, Verbs};
use kvplane_sys::{HugePages, IoBuf, Poller, Readiness, Region, RegionOptions, cpu};
use kvplane_transport::{
    CloseCause, ConnectionId, CopyCompletions, Event, Input, OutgoingPayload, Rdma, RdmaCopy, RdmaOptions, Target,
    Token,
};

/// Time limit of any wait, on the slowest machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Destination of a frame's payload.
pub(crate) type Places = fn(&End, &Header) -> Target;

/// One end of a connection.
pub(crate) struct End {
    pub(crate) poller: Poller,
    pub(crate) rdma: Rdma,
    pub(crate) region: Arc<Region>,
    pub(crate) places: Places,
    pub(crate) up: Vec<ConnectionId>,
    pub(crate) gone: Vec<(ConnectionId, CloseCause)>,
    pub(crate) holds: Vec<u64>,
    /// Frames in order of arrival, with their bodies.
    pub(crate) frames: Vec<(Header, Vec<u8>)>,
    /// Received payloads: request and checksum.
    pub(crate) payloads: Vec<(RequestId, Option<u64>)>,
    pub(crate) copied: Vec<(u64, Result<(), Status>)>,
    arriving: HashMap<ConnectionId, RequestId>,
}

/// Two connected ends.
pub(crate) struct Bed {
    pub(crate) asking: End,
    pub(crate) asked: End,
    pub(crate) ask: ConnectionId,
    pub(crate) serve: ConnectionId,
}

/// Runs a test on software devices, and on the machine's own if it has two.
pub(crate) fn on_devices(test: impl Fn(&[Device], Option<&Loopback>)) {
    let fabric = Loopback::new(&[SoftPort::default(), SoftPort::default()]);
    test(&fabric.verbs().devices().expect("devices"), Some(&fabric));
    assert_eq!(fabric.violations(), 0, "memory was deregistered under a request");
    let devices = Verbs::open().and_then(|verbs| verbs.devices());
    match devices {
        Ok(devices) if devices.len() >= 2 => test(&devices, None),
        Ok(devices) => println!("skipped: {} RDMA devices on this machine, two are needed", devices.len()),
        Err(error) => println!("skipped: {error}"),
    }
}

pub(crate) fn region(bytes: usize) -> Arc<Region> {
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("rdma-test", bytes) };
    Region::allocate(&options).expect("memory")
}

/// Returns the byte at an offset, different for every seed.
pub(crate) fn pattern(seed: u64, at: u64) -> u8 {
    mix64(seed ^ mix64(at / 8)).to_le_bytes()[at as usize % 8]
}

/// Fills memory with the pattern of its offset in the region.
pub(crate) fn fill(memory: &IoBuf, seed: u64) {
    let start = memory.offset() as u64;
    memory.region().fill_with(memory.offset(), memory.bytes(), &mut |at, part| {
        for (index, byte) in part.iter_mut().enumerate() {
            *byte = pattern(seed, start + at + index as u64);
        }
    });
}

/// Checks memory against a pattern that begins at `from`.
pub(crate) fn check(memory: &IoBuf, seed: u64, from: u64) {
    memory.region().read_with(memory.offset(), memory.bytes(), &mut |at, part| {
        for (index, byte) in part.iter().enumerate() {
            let place = from + at + index as u64;
            assert_eq!(*byte, pattern(seed, place), "byte {} of {memory:?}", at + index as u64);
        }
    });
}

pub(crate) fn part(region: &Arc<Region>, offset: usize, bytes: usize) -> IoBuf {
    IoBuf::new(Arc::clone(region), offset, bytes)
}

/// Returns the request id with this number.
pub(crate) fn request(index: u32) -> RequestId {
    RequestId { index, generation: 7 }
}

pub(crate) fn asks(operation: Operation, index: u32) -> Header {
    Header::request(Kind::Request(operation), request(index))
}

pub(crate) fn answers(operation: Operation, index: u32) -> Header {
    Header::reply(Kind::Reply(operation), request(index), Status::Ok)
}

impl End {
    pub(crate) fn new(device: &Device, bytes: usize, options: RdmaOptions) -> Self {
        let (poller, mut rdma) = (Poller::new().expect("a poller"), Rdma::new(options));
        rdma.add_device(&poller, device).expect("an open device");
        Self {
            poller,
            rdma,
            region: region(bytes),
            places: |_, _| Target::Discard,
            up: Vec::new(),
            gone: Vec::new(),
            holds: Vec::new(),
            frames: Vec::new(),
            payloads: Vec::new(),
            copied: Vec::new(),
            arriving: HashMap::new(),
        }
    }

    /// Runs one round of a host.
    pub(crate) fn round(&mut self) {
        let mut readiness: Vec<Readiness> = Vec::new();
        self.poller.wait(Duration::ZERO, &mut readiness).expect("a working poller");
        for one in readiness {
            self.rdma.ready(Token::from_bits(one.token).expect("a token of the driver"));
        }
        self.rdma.poll(cpu::monotonic_ns());
        self.take_copied();
        while let Some(event) = self.rdma.poll_event() {
            match event {
                Event::Accepted(id) | Event::Connected(id) => self.up.push(id),
                Event::Sent(hold) => self.holds.push(hold),
                Event::Gone(id, why) => self.gone.push((id, why)),
            }
        }
        self.take_copied();
        while let Some(id) = self.rdma.next_ready() {
            self.take(id);
        }
        self.rdma.flush();
    }

    fn take_copied(&mut self) {
        let mut copied = CopyCompletions::default();
        self.rdma.take_copied(&mut copied);
        self.copied.extend(copied.iter().map(|copied| (copied.token, copied.outcome)));
    }

    /// Starts a copy.
    pub(crate) fn copy(&mut self, id: ConnectionId, token: u64, to: (SegmentId, u64), local: &IoBuf, write: bool) {
        let ((segment, offset), memory) = (to, local.region().clone().into());
        let (at, bytes) = (local.offset(), local.bytes());
        self.rdma.copy_many(id, [RdmaCopy { token, segment, offset, memory: &memory, at, bytes, write }]);
    }

    fn take(&mut self, id: ConnectionId) {
        let mut scratch = Vec::new();
        loop {
            match self.rdma.input(id, &mut scratch) {
                Input::Wait => return,
                Input::Frame(header) => {
                    self.frames.push((header, scratch.clone()));
                    if header.payload_bytes > 0 {
                        self.arriving.insert(id, header.request);
                        let target = (self.places)(self, &header);
                        self.rdma.receive_payload(id, target);
                    }
                }
                Input::Payload(checksum) => {
                    let request = self.arriving.remove(&id).expect("a payload of a frame");
                    self.payloads.push((request, checksum));
                }
            }
        }
    }

    pub(crate) fn outgoing(&self, buffers: impl Into<kvplane_transport::Pieces>, hold: u64) -> Option<OutgoingPayload> {
        Some(OutgoingPayload { buffers: buffers.into(), hold: Some(hold) })
    }
}

impl Bed {
    /// Creates two connected ends with this much memory each.
    pub(crate) fn new(devices: &[Device], bytes: usize, options: RdmaOptions) -> Self {
        let asking = End::new(&devices[0], bytes, options);
        let asked = End::new(&devices[1], bytes, options);
        let nowhere = ConnectionId { index: u32::MAX, generation: 0 };
        let mut bed = Self { asking, asked, ask: nowhere, serve: nowhere };
        bed.connect();
        bed
    }

    /// Connects the two ends once more.
    pub(crate) fn connect(&mut self) {
        let (ask, offer) = self.asking.rdma.offer(0, 0).expect("an offer");
        let (serve, answer) = self.asked.rdma.accept(&offer);
        self.asking.rdma.complete(ask, &answer);
        (self.ask, self.serve) = (ask, serve.expect("an accepted connection"));
        self.until("both are connected", |bed| bed.asking.up.contains(&ask) && bed.asked.up.contains(&bed.serve));
    }

    pub(crate) fn round(&mut self) {
        self.asking.round();
        self.asked.round();
    }

    /// Runs rounds until a condition holds.
    pub(crate) fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let limit = Instant::now() + DEADLINE;
        while !done(self) {
            assert!(
                Instant::now() < limit,
                "{what}: never happened; gone: {:?} {:?}",
                self.asking.gone,
                self.asked.gone
            );
            self.round();
        }
    }
}
