//! Two ends of the TCP driver, with memory in which each payload has a range of its own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::RequestId;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::rng::{Rng, mix64};
use kvplane_sys::{HugePages, IoBuf, Poller, Readiness, Region, RegionOptions, net};
use kvplane_tls::Keychain;
use kvplane_transport::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Target, Tcp, Token, ZeroCopyOptions};

/// Destination of the payload of the frame with this number: lengths of its pieces, or `None` to discard it.
pub(crate) type Places = fn(u32, usize) -> Option<Vec<usize>>;

pub(crate) struct End {
    pub(crate) poller: Poller,
    pub(crate) tcp: Tcp,
    pub(crate) memory: Arc<Region>,
    pub(crate) places: Places,
    pub(crate) connections: Vec<ConnectionId>,
    pub(crate) gone: Vec<CloseCause>,
    pub(crate) holds: Vec<u64>,
    /// Frames in order of arrival: connection, number, body.
    pub(crate) frames: Vec<(ConnectionId, u32, Vec<u8>)>,
    /// Frames that arrived before the payload of the same number was reported as sent.
    pub(crate) early: Vec<u32>,
    /// Checksums of payloads, and the rounds in which they were complete.
    pub(crate) payloads: Vec<(u32, Option<u64>, u64)>,
    pub(crate) arriving: BTreeMap<ConnectionId, u32>,
    pub(crate) round: u64,
    /// Largest number of bytes taken from one connection before the next one's turn.
    pub(crate) longest_turn_bytes: usize,
}

impl End {
    pub(crate) fn new(memory_bytes: usize, places: Places, zero_copy: ZeroCopyOptions) -> Self {
        let options =
            RegionOptions { huge: HugePages::Never, prefault: false, ..RegionOptions::new("tcp-test", memory_bytes) };
        Self {
            poller: Poller::new().expect("a poller"),
            tcp: Tcp::new(zero_copy),
            memory: Region::allocate(&options).expect("memory"),
            places,
            connections: Vec::new(),
            gone: Vec::new(),
            holds: Vec::new(),
            frames: Vec::new(),
            early: Vec::new(),
            payloads: Vec::new(),
            arriving: BTreeMap::new(),
            round: 0,
            longest_turn_bytes: 0,
        }
    }

    pub(crate) fn round(&mut self) {
        self.round += 1;
        let longest = Duration::from_millis(u64::from(!self.tcp.has_work()));
        let mut readiness: Vec<Readiness> = Vec::new();
        self.poller.wait(longest, &mut readiness).expect("a working poller");
        for one in readiness {
            self.tcp.ready(&self.poller, Token::from_bits(one.token).expect("a token of the driver"), &one);
        }
        while let Some(event) = self.tcp.poll_event() {
            match event {
                Event::Accepted(id) | Event::Connected(id) => self.connections.push(id),
                Event::Sent(hold) => self.holds.retain(|&other| other != hold),
                Event::Gone(_, why) => self.gone.push(why),
            }
        }
        self.tcp.take_moved_bytes();
        while let Some(id) = self.tcp.next_ready() {
            self.take(id);
            self.longest_turn_bytes = self.longest_turn_bytes.max(self.tcp.take_moved_bytes());
        }
        self.tcp.flush(&self.poller);
    }

    pub(crate) fn take(&mut self, id: ConnectionId) {
        let mut scratch = Vec::new();
        loop {
            match self.tcp.input(id, &mut scratch) {
                Input::Wait => return,
                Input::Frame(header) => {
                    let number = header.request.index;
                    self.frames.push((id, number, scratch.clone()));
                    self.early.extend(self.holds.contains(&u64::from(number)).then_some(number));
                    if header.payload_bytes > 0 {
                        self.arriving.insert(id, number);
                        let target = self.target(number, header.payload_bytes as usize);
                        self.tcp.receive_payload(id, target);
                    }
                }
                Input::Payload(checksum) => {
                    let number = self.arriving.remove(&id).expect("a frame before its payload");
                    self.payloads.push((number, checksum, self.round));
                }
            }
        }
    }

    pub(crate) fn target(&self, number: u32, bytes: usize) -> Target {
        let Some(lengths) = (self.places)(number, bytes) else { return Target::Discard };
        let buffers = self.pieces(number, &lengths);
        match <[IoBuf; 1]>::try_from(buffers) {
            Ok([buffer]) => Target::Memory { buffer, checksum: true },
            Err(buffers) => Target::Scatter { buffers, checksum: true },
        }
    }

    /// Returns pieces of these lengths in the range of this number, last piece first in memory.
    pub(crate) fn pieces(&self, number: u32, lengths: &[usize]) -> Vec<IoBuf> {
        let mut end = (number as usize + 1) * PART_BYTES;
        let mut pieces = Vec::new();
        for &bytes in lengths {
            end -= bytes;
            pieces.push(IoBuf::new(Arc::clone(&self.memory), end, bytes));
        }
        pieces
    }

    pub(crate) fn bytes(&self, number: u32, lengths: &[usize]) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in self.pieces(number, lengths) {
            let mut bytes = vec![0; piece.bytes()];
            piece.copy_out(&mut bytes);
            out.extend(bytes);
        }
        out
    }

    /// Sends a payload in pieces of these lengths.
    pub(crate) fn send(&mut self, id: ConnectionId, number: u32, body: &[u8], lengths: &[usize]) -> Vec<u8> {
        let request = RequestId { index: number, generation: 1 };
        let mut header = Header::request(Kind::Request(Operation::Put), request).with_body(body, 1);
        let bytes: usize = lengths.iter().sum();
        let content = pattern(number, bytes);
        let outgoing = (bytes > 0).then(|| {
            let pieces = self.pieces(number, lengths);
            let mut at = 0;
            for piece in &pieces {
                piece.copy_in(&content[at..at + piece.bytes()]);
                at += piece.bytes();
            }
            // Announced with value 0: the driver computes the checksum.
            header = header.with_payload(bytes as u64, Some(0));
            self.holds.push(u64::from(number));
            OutgoingPayload { buffers: pieces.into(), hold: Some(u64::from(number)) }
        });
        assert!(self.tcp.send(id, &header, body, outgoing));
        content
    }
}

pub(crate) const PART_BYTES: usize = 4 << 20;

pub(crate) fn pattern(number: u32, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| mix64(u64::from(number) << 40 ^ (at / 8)).to_le_bytes()[(at % 8) as usize]).collect()
}

/// Returns lengths that add up to `bytes`, about `about` each; some are empty.
pub(crate) fn cut(seed: u64, bytes: usize, about: usize) -> Vec<usize> {
    let mut rng = Rng::new(seed, "tcp-cut");
    let (mut left, mut lengths) = (bytes, Vec::new());
    while left > 0 {
        let bytes = (rng.below(2 * about as u64 + 1) as usize).min(left);
        lengths.push(bytes);
        left -= bytes;
    }
    lengths
}

pub(crate) fn until(ends: &mut [&mut End], mut done: impl FnMut(&[&mut End]) -> bool) {
    let limit = Instant::now() + Duration::from_secs(30);
    while !done(ends) {
        assert!(Instant::now() < limit, "no event arrives any more");
        ends.iter_mut().for_each(|end| end.round());
    }
}

/// Creates a sender and a receiver with their keychains, and returns the receiver's address.
pub(crate) fn keyed_pair(
    parts: usize,
    places: Places,
    sender_keys: Option<Keychain>,
    receiver_keys: Option<Keychain>,
) -> (End, End, SocketAddr) {
    let end = |keys: Option<Keychain>| {
        let mut end = End::new(parts * PART_BYTES, places, ZeroCopyOptions::default());
        if let Some(keys) = keys {
            end.tcp.set_tls(Arc::new(keys));
        }
        end
    };
    let (sender, mut receiver) = (end(sender_keys), end(receiver_keys));
    let listener = net::tcp_listener(([127, 0, 0, 1], 0).into(), 1024).expect("a port");
    let address = listener.local_addr().expect("an address");
    receiver.tcp.listen(&receiver.poller, listener).expect("a poller with room");
    (sender, receiver, address)
}

/// Creates a sender with this many connections to a receiver.
pub(crate) fn pair(connections: usize, parts: usize, places: Places) -> (End, End) {
    lending_pair(connections, parts, places, ZeroCopyOptions::default())
}

/// Creates a pair like `pair`, with these zero-copy options.
pub(crate) fn lending_pair(connections: usize, parts: usize, places: Places, zero_copy: ZeroCopyOptions) -> (End, End) {
    pair_at([127, 0, 0, 1], connections, parts, places, zero_copy)
}

/// Creates a pair over this address.
pub(crate) fn pair_at(
    address: [u8; 4],
    connections: usize,
    parts: usize,
    places: Places,
    zero_copy: ZeroCopyOptions,
) -> (End, End) {
    let end = || End::new(parts * PART_BYTES, places, zero_copy);
    let (mut sender, mut receiver) = (end(), end());
    let listener = net::tcp_listener((address, 0).into(), 1024).expect("a port");
    let address = listener.local_addr().expect("an address");
    receiver.tcp.listen(&receiver.poller, listener).expect("a poller with room");
    for _ in 0..connections {
        sender.tcp.connect(&sender.poller, address).expect("a socket");
    }
    until(&mut [&mut sender, &mut receiver], |ends| ends.iter().all(|end| end.connections.len() == connections));
    (sender, receiver)
}
