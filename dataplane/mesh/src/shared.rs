//! Channel in memory that two processes of one host share: a ring of records for each direction.
//!
//! A send is one copy into the ring and a store of the producer's position; a receive is a load of that position, and
//! the payload is used where it lies. No system call is involved unless the peer sleeps. The memory is made for one
//! connection and belongs to it: what a stopped process writes after its connection has ended lands where nobody reads.
//!
//! ```text
//! block of a direction:   0 producer's position u64   128 consumer's position u64
//!                       256 producer waits for room u64     4096 records
//! record:                 0 length of the payload u64 (all ones: the rest of the ring is skipped)
//!                        64 head of the frame   128 payload, padded to 64
//! ```
//!
//! The block of the connecting process comes first. The peer may write anything at any time: every position and length
//! is read once and checked, and payloads are only ever read through copies and kernels that tolerate that.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvplane_sys::{HugePages, IoBuf, Region, RegionOptions, SharedDoorbell};
use kvplane_transport::ConnectionId;

use crate::error::ChannelError;
use crate::ring::{LINE_BYTES, Place, Progress, RECORD_HEAD_BYTES, Record, Room, SKIP, record_bytes};
use crate::{HEAD_BYTES, MeshError, PayloadPart};

const TAIL_AT: usize = 0;
const HEAD_AT: usize = 128;
const WAITS_AT: usize = 256;
const RECORDS_AT: usize = 4096;

/// Returns the bytes of a channel with rings of this capacity.
pub(crate) const fn channel_bytes(capacity: usize) -> usize {
    2 * (RECORDS_AT + capacity)
}

/// Allocates the memory of a channel.
///
/// # Errors
/// When the kernel refuses it.
pub(crate) fn allocate(capacity: usize) -> Result<Arc<Region>, MeshError> {
    let options = RegionOptions {
        shared: true,
        huge: HugePages::Never,
        ..RegionOptions::new("kvplane-mesh", channel_bytes(capacity))
    };
    Ok(Region::allocate(&options)?)
}

/// One end of a channel in shared memory.
pub(crate) struct SharedChannel {
    /// Connection that the channel lives with.
    pub(crate) connection: ConnectionId,
    region: Arc<Region>,
    /// Block that we produce into, and the one that we consume from.
    out_at: usize,
    in_at: usize,
    room: Room,
    progress: Progress,
    /// True since a send found no room.
    waits: bool,
    /// Doorbell of the peer.
    bell: SharedDoorbell,
}

/// A frame that was taken from a channel and not released yet.
pub(crate) struct TakenFrame {
    pub(crate) head: [u8; HEAD_BYTES],
    pub(crate) payload: IoBuf,
    /// Position to release.
    pub(crate) end: u64,
}

impl SharedChannel {
    /// Creates an end of a new channel; `connects` says that this process has connected.
    pub(crate) fn new(
        connection: ConnectionId,
        region: Arc<Region>,
        capacity: usize,
        payload_limit: usize,
        connects: bool,
        bell: SharedDoorbell,
    ) -> Self {
        let second = RECORDS_AT + capacity;
        let (out_at, in_at) = if connects { (0, second) } else { (second, 0) };
        let (room, progress) = (Room::new(capacity), Progress::new(capacity, payload_limit));
        Self { connection, region, out_at, in_at, room, progress, waits: false, bell }
    }

    /// Sends a frame, whose payload has `payload_bytes` bytes in all; returns false while there is no room for it.
    ///
    /// # Errors
    /// When the peer has corrupted the channel.
    pub(crate) fn send(
        &mut self,
        head: &[u8; HEAD_BYTES],
        parts: &[PayloadPart<'_>],
        payload_bytes: usize,
    ) -> Result<bool, ChannelError> {
        let Some(place) = self.place(record_bytes(payload_bytes))? else { return Ok(false) };
        let records = self.out_at + RECORDS_AT;
        if let Some(skipped) = place.skipped {
            self.region.copy_in(records + skipped, &SKIP.to_ne_bytes());
        }
        let mut front = [0; RECORD_HEAD_BYTES];
        front[..8].copy_from_slice(&(payload_bytes as u64).to_ne_bytes());
        front[LINE_BYTES..].copy_from_slice(head);
        let at = records + place.at;
        self.region.copy_in(at, &front);
        let mut to = at + RECORD_HEAD_BYTES;
        for part in parts {
            Region::copy_between(&self.region, to, part.region, part.offset, part.bytes);
            to += part.bytes;
        }
        self.room.fill(&place);
        self.region.atomic_u64(self.out_at + TAIL_AT).store(place.end, Ordering::Release);
        self.bell.ring();
        Ok(true)
    }

    fn place(&mut self, bytes: usize) -> Result<Option<Place>, ChannelError> {
        if let Some(place) = self.room.place(bytes) {
            return Ok(Some(place));
        }
        self.look()?;
        let mut place = self.room.place(bytes);
        if place.is_none() {
            // Announced before the last look, so that the peer, which frees and then looks here, rings.
            self.region.atomic_u64(self.out_at + WAITS_AT).store(1, Ordering::SeqCst);
            self.look()?;
            place = self.room.place(bytes);
        }
        self.waits = place.is_none();
        Ok(place)
    }

    /// Takes the consumer's position.
    fn look(&mut self) -> Result<(), ChannelError> {
        let head = self.region.atomic_u64(self.out_at + HEAD_AT).load(Ordering::SeqCst);
        match self.room.free_to(head) {
            true => Ok(()),
            false => Err(ChannelError::Corrupt { position: 0, found: head }),
        }
    }

    /// Returns true if there may be a frame, or room that a send has waited for.
    pub(crate) fn is_ready(&self) -> bool {
        self.tail() != self.progress.head() || self.waits && self.has_more_room()
    }

    fn has_more_room(&self) -> bool {
        self.region.atomic_u64(self.out_at + HEAD_AT).load(Ordering::Acquire) != self.room.head()
    }

    fn tail(&self) -> u64 {
        self.region.atomic_u64(self.in_at + TAIL_AT).load(Ordering::Acquire)
    }

    /// Takes the next frame, which lies in the ring until it is released.
    ///
    /// # Errors
    /// When the peer has corrupted the channel.
    pub(crate) fn take(&mut self) -> Result<Option<TakenFrame>, ChannelError> {
        let tail = self.tail();
        while tail != self.progress.head() {
            let records = self.in_at + RECORDS_AT;
            let length = self.region.load_u64(records + self.progress.at());
            match self.progress.record(tail, length)? {
                Record::Skipped { end } => self.progress.take_to(end),
                Record::Frame { at, payload_bytes, end } => {
                    let mut head = [0; HEAD_BYTES];
                    self.region.copy_out(records + at + LINE_BYTES, &mut head);
                    let from = records + at + RECORD_HEAD_BYTES;
                    let payload = IoBuf::new(Arc::clone(&self.region), from, payload_bytes);
                    return Ok(Some(TakenFrame { head, payload, end }));
                }
            }
        }
        Ok(None)
    }

    /// Releases a frame that was taken: its memory is the peer's again.
    pub(crate) fn release(&mut self, end: u64) {
        self.progress.take_to(end);
        self.region.atomic_u64(self.in_at + HEAD_AT).store(end, Ordering::SeqCst);
        let waits = self.region.atomic_u64(self.in_at + WAITS_AT);
        if waits.load(Ordering::SeqCst) != 0 {
            waits.store(0, Ordering::SeqCst);
            self.bell.ring();
        }
    }
}
