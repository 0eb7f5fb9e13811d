//! One shared-memory connection: two rings, two doorbells, a socket.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvplane_proto::Limits;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_sys::{Region, SharedDoorbell, ShmConsumer, ShmProducer, shm_ring};

use super::fence::View;
use super::one_sided::ClosingChannel;
use crate::types::CloseCause;

/// Size of each ring in bytes; the longest frame fits.
const RING_BYTES: usize = 1 << 20;
const _: () = assert!(RING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES + Limits::PAYLOAD_ALONG_BYTES as usize + 64);
/// Offsets of the doorbell flags: a cache line each.
const CLIENT_FLAG_AT: usize = 0;
const SERVER_FLAG_AT: usize = 128;
const REQUESTS_AT: usize = 4096;
const REPLIES_AT: usize = REQUESTS_AT + shm_ring::bytes_needed(RING_BYTES).next_multiple_of(4096);
/// Size of a channel's region, in bytes.
pub(super) const CHANNEL_BYTES: usize = REPLIES_AT + shm_ring::bytes_needed(RING_BYTES).next_multiple_of(4096);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    Client,
    Server,
}

pub(super) struct Channel {
    pub(super) side: Side,
    /// Mapped pool of the peer; on the client side only.
    pub(super) pool: Option<Arc<Region>>,
    /// View of the peer's segment table; on the client side only.
    pub(super) view: Option<View>,
    /// Process id of the peer as the kernel reports it; 0 if it is not visible from here.
    pub(super) pid: i32,
    pub(super) region: Arc<Region>,
    producer: ShmProducer,
    consumer: ShmConsumer,
    pub(super) own_bell: SharedDoorbell,
    pub(super) peer_bell: SharedDoorbell,
    /// Frames that did not fit into the ring, oldest first. The window of requests bounds them.
    overflow: VecDeque<Vec<u8>>,
    /// The peer has hung up, but frames that it sent before are still in the ring; on the client side only.
    pub(super) hung_up: bool,
    record: Vec<u8>,
    /// Length of the payload at the end of the record that was not taken yet.
    along_bytes: usize,
    pub(super) socket: UnixStream,
    /// Shared with the holds of segments, whose copies are in flight.
    pub(super) holds: Arc<()>,
}

impl Channel {
    pub(super) fn new(
        side: Side,
        socket: UnixStream,
        region: &Arc<Region>,
        client_event: OwnedFd,
        server_event: OwnedFd,
        pool: Option<Arc<Region>>,
    ) -> Self {
        let (out_at, in_at) = match side {
            Side::Client => (REQUESTS_AT, REPLIES_AT),
            Side::Server => (REPLIES_AT, REQUESTS_AT),
        };
        let client = SharedDoorbell::new(Arc::clone(region), CLIENT_FLAG_AT, client_event);
        let server = SharedDoorbell::new(Arc::clone(region), SERVER_FLAG_AT, server_event);
        let (own_bell, peer_bell) = match side {
            Side::Client => (client, server),
            Side::Server => (server, client),
        };
        Self {
            side,
            pool,
            view: None,
            pid: 0,
            region: Arc::clone(region),
            producer: ShmProducer::new(Arc::clone(region), out_at, RING_BYTES),
            consumer: ShmConsumer::new(Arc::clone(region), in_at, RING_BYTES),
            own_bell,
            peer_bell,
            overflow: VecDeque::new(),
            hung_up: false,
            record: Vec::new(),
            along_bytes: 0,
            socket,
            holds: Arc::new(()),
        }
    }

    pub(super) fn has_input(&self) -> bool {
        // Backpressure: while replies wait for room, no more requests are taken.
        self.overflow.len() < Limits::REPLIES_QUEUED && !self.consumer.is_empty()
    }

    pub(super) fn take_frame(&mut self, scratch: &mut Vec<u8>) -> Result<Option<Header>, CloseCause> {
        if !self.consumer.pop(&mut self.record).map_err(CloseCause::Ring)? {
            return Ok(None);
        }
        let Some((bytes, body)) = self.record.split_first_chunk::<HEADER_BYTES>() else {
            return Err(CloseCause::Setup(format!("a record of {} bytes is too short for a frame", self.record.len())));
        };
        let header = Header::decode(bytes).map_err(CloseCause::Frame)?;
        let stated_bytes = u64::from(header.body_bytes).saturating_add(header.payload_bytes);
        if header.payload_bytes > Limits::PAYLOAD_ALONG_BYTES || body.len() as u64 != stated_bytes {
            let payload_bytes = header.payload_bytes;
            let what = format!("{} bytes follow a header, not {} and {payload_bytes}", body.len(), header.body_bytes);
            return Err(CloseCause::Setup(what));
        }
        let (body, payload) = body.split_at(header.body_bytes as usize);
        header.check_body(body).map_err(CloseCause::Frame)?;
        self.along_bytes = payload.len();
        scratch.clear();
        scratch.extend_from_slice(body);
        Ok(Some(header))
    }

    /// Takes the payload of the last frame.
    pub(super) fn take_along(&mut self) -> &[u8] {
        let bytes = std::mem::take(&mut self.along_bytes);
        &self.record[self.record.len() - bytes..]
    }

    pub(super) fn push(&mut self, header: &Header, body: &[u8], payload: &[u8]) {
        let header = header.encode();
        if self.overflow.is_empty() && self.producer.push(&[&header, body, payload]).is_ok() {
            return;
        }
        self.overflow.push_back([&header, body, payload].concat());
    }

    pub(super) fn drain_overflow(&mut self) {
        while let Some(record) = self.overflow.front() {
            if self.producer.push(&[record]).is_err() {
                return;
            }
            self.overflow.pop_front();
        }
    }

    pub(super) fn is_overflowing(&self) -> bool {
        !self.overflow.is_empty()
    }

    /// Ends our part of the connection; the result tells when the client no longer accesses our memory.
    pub(super) fn leave(self) -> ClosingChannel {
        ClosingChannel::new(self.socket, self.region, self.pid)
    }

    /// Unmaps first and hangs up last: the peer takes the end of the socket as proof that nothing is mapped or copied
    /// any more. While segments are held, their holds keep the socket open.
    pub(super) fn close(self) {
        drop(self.pool);
        drop(self.view);
        drop(self.region);
        drop(self.producer);
        drop(self.consumer);
        if Arc::strong_count(&self.holds) == 1 {
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }
}
