//! One connection: two rings, two doorbells, a socket.

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

/// Bytes of each ring; takes the longest frame.
const RING_BYTES: usize = 1 << 20;
const _: () = assert!(RING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES + Limits::PAYLOAD_ALONG_BYTES as usize + 64);
/// Where the flags are: a cache line each.
const CLIENT_FLAG_AT: usize = 0;
const SERVER_FLAG_AT: usize = 128;
const REQUESTS_AT: usize = 4096;
const REPLIES_AT: usize = REQUESTS_AT + shm_ring::bytes_needed(RING_BYTES).next_multiple_of(4096);
/// Bytes of a channel's region.
pub(super) const CHANNEL_BYTES: usize = REPLIES_AT + shm_ring::bytes_needed(RING_BYTES).next_multiple_of(4096);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    Client,
    Server,
}

pub(super) struct Channel {
    pub(super) side: Side,
    /// The peer's pool, mapped; a client's only.
    pub(super) pool: Option<Arc<Region>>,
    /// What the peer says of its segments; a client's only.
    pub(super) view: Option<View>,
    /// The process at the other end, as the kernel says; 0 when it is not visible from here.
    pub(super) pid: i32,
    pub(super) region: Arc<Region>,
    producer: ShmProducer,
    consumer: ShmConsumer,
    pub(super) own_bell: SharedDoorbell,
    pub(super) peer_bell: SharedDoorbell,
    /// Frames that the ring had no room for, oldest first. The window of requests bounds them.
    overflow: VecDeque<Vec<u8>>,
    /// The peer has hung up, and what it said before is not taken yet; a client's only.
    pub(super) hung_up: bool,
    record: Vec<u8>,
    /// How much at the end of the record is a payload that nobody has taken yet.
    along_bytes: usize,
    pub(super) socket: UnixStream,
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
        }
    }

    pub(super) fn has_input(&self) -> bool {
        // While answers wait for room, no more questions are taken.
        self.overflow.len() < Limits::REPLIES_QUEUED && !self.consumer.is_empty()
    }

    pub(super) fn take_frame(&mut self, scratch: &mut Vec<u8>) -> Result<Option<Header>, CloseCause> {
        if !self.consumer.pop(&mut self.record).map_err(CloseCause::Ring)? {
            return Ok(None);
        }
        let Some((bytes, body)) = self.record.split_first_chunk::<HEADER_BYTES>() else {
            return Err(CloseCause::Setup(format!("a record of {} bytes is no frame", self.record.len())));
        };
        let header = Header::decode(bytes).map_err(CloseCause::Frame)?;
        let stated_bytes = u64::from(header.body_bytes).saturating_add(header.payload_bytes);
        if header.payload_bytes > Limits::PAYLOAD_ALONG_BYTES || body.len() as u64 != stated_bytes {
            let payload_bytes = header.payload_bytes;
            let what = format!("{} bytes, {} and {payload_bytes} stated", body.len(), header.body_bytes);
            return Err(CloseCause::Setup(what));
        }
        let (body, payload) = body.split_at(header.body_bytes as usize);
        header.check_body(body).map_err(CloseCause::Frame)?;
        self.along_bytes = payload.len();
        scratch.clear();
        scratch.extend_from_slice(body);
        Ok(Some(header))
    }

    /// The payload that came along with the last frame.
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

    /// Ends our part of it, and leaves open what tells whether the client is done with our memory.
    pub(super) fn leave(self) -> ClosingChannel {
        ClosingChannel::new(self.socket, self.region, self.pid)
    }

    /// Unmaps first and hangs up last: the peer takes the socket's end as the word that nothing is mapped any more.
    pub(super) fn close(self) {
        drop(self.pool);
        drop(self.view);
        drop(self.region);
        drop(self.producer);
        drop(self.consumer);
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}
