//! One connection: two rings, two doorbells, a socket.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvplane_proto::Limits;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_sys::{Region, SharedDoorbell, ShmConsumer, ShmProducer, shm_ring};

use super::fence::View;
use super::one_sided::Lingering;
use crate::types::Gone;

/// Bytes of each ring; takes the longest frame.
const RING_BYTES: usize = 256 * 1024;
const _: () = assert!(RING_BYTES >= HEADER_BYTES + Limits::BODY_BYTES + 64);
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
    /// A question for a segment's memory had no proper answer, which may still come: nothing more is asked.
    pub(super) asked_in_vain: bool,
    pub(super) region: Arc<Region>,
    producer: ShmProducer,
    consumer: ShmConsumer,
    pub(super) own_bell: SharedDoorbell,
    pub(super) peer_bell: SharedDoorbell,
    /// Frames that the ring had no room for, oldest first. The window of requests bounds them.
    overflow: VecDeque<Vec<u8>>,
    pub(super) dirty: bool,
    record: Vec<u8>,
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
            asked_in_vain: false,
            region: Arc::clone(region),
            producer: ShmProducer::new(Arc::clone(region), out_at, RING_BYTES),
            consumer: ShmConsumer::new(Arc::clone(region), in_at, RING_BYTES),
            own_bell,
            peer_bell,
            overflow: VecDeque::new(),
            dirty: false,
            record: Vec::new(),
            socket,
        }
    }

    pub(super) fn has_input(&self) -> bool {
        // While answers wait for room, no more questions are taken.
        self.overflow.len() < Limits::REPLIES_QUEUED && !self.consumer.is_empty()
    }

    pub(super) fn take_frame(&mut self, scratch: &mut Vec<u8>) -> Result<Option<Header>, Gone> {
        if !self.consumer.pop(&mut self.record).map_err(Gone::Ring)? {
            return Ok(None);
        }
        let Some((bytes, body)) = self.record.split_first_chunk::<HEADER_BYTES>() else {
            return Err(Gone::Setup(format!("a record of {} bytes is no frame", self.record.len())));
        };
        let header = Header::decode(bytes).map_err(Gone::Frame)?;
        if body.len() != header.body_bytes as usize {
            return Err(Gone::Setup(format!("a body of {} bytes, {} stated", body.len(), header.body_bytes)));
        }
        header.check_body(body).map_err(Gone::Frame)?;
        scratch.clear();
        scratch.extend_from_slice(body);
        Ok(Some(header))
    }

    pub(super) fn push(&mut self, header: &Header, body: &[u8]) {
        let header = header.encode();
        if self.overflow.is_empty() && self.producer.push(&[&header, body]).is_ok() {
            return;
        }
        self.overflow.push_back([&header, body].concat());
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

    /// Whether the socket's end is what made it readable. For the client's side, which reads the socket only when it
    /// asked.
    pub(super) fn peer_hung_up(&self) -> bool {
        let mut byte = [0];
        // A peek would do, and std has none for Unix sockets that is stable: nothing but the end is ever sent unasked.
        self.socket.set_nonblocking(true).is_ok()
            && matches!(io::Read::read(&mut &self.socket, &mut byte), Ok(0) | Err(_))
            && !would_block(&self.socket)
    }

    /// Ends our part of it, and leaves open what tells whether the client is done with our memory.
    pub(super) fn leave(self) -> Lingering {
        Lingering::new(self.socket, self.region)
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

fn would_block(socket: &UnixStream) -> bool {
    let mut byte = [0];
    matches!(io::Read::read(&mut &*socket, &mut byte), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}
