//! An open device with what all its connections share: completions, receives, and registered buffers.
//!
//! The arena is one registered region: first the receives, then slots from which messages are sent, then bounce
//! buffers for memory that cannot be registered.

use std::os::fd::AsFd;
use std::sync::Arc;

use kvplane_sys::verbs::{
    Access, AsyncEvent, CompletionChannel, CompletionQueue, Context, Device, Entry, GidEntry, MemoryRegion, Piece,
    PortAttributes, ProtectionDomain, SharedReceiveQueue, VerbsError,
};
use kvplane_sys::{IoBuf, Poller, Region, RegionOptions};

use super::RdmaOptions;
use super::endpoints::Endpoints;
use super::memory::MemoryTable;
use super::mixing::MixedMap;
use crate::token::{Source, Token};
use crate::types::CloseCause;

/// Completions taken at once.
pub(super) const POLLED: usize = 64;
/// Length of a bounce buffer.
pub(super) const BOUNCE_BYTES: usize = 128 << 10;
/// Bounce buffers of a device.
const BOUNCES: u32 = 8;

/// An open device.
pub(super) struct Nic {
    pub(super) context: Arc<Context>,
    pub(super) domain: ProtectionDomain,
    pub(super) channel: CompletionChannel,
    pub(super) queue: CompletionQueue,
    pub(super) shared: SharedReceiveQueue,
    pub(super) entries: Box<[Entry]>,
    pub(super) memory: MemoryTable,
    arena: Arc<Region>,
    buffers: MemoryRegion,
    message_bytes: u32,
    receives: u32,
    slots: u32,
    free_slots: Vec<u32>,
    free_bounces: Vec<u32>,
    /// Receives that are to be posted again with the next flush.
    reposts: Vec<u32>,
    /// Receives that are promised to peers.
    pub(super) granted: u32,
    pub(super) endpoints: Endpoints,
    /// Links by the numbers of their queue pairs.
    pub(super) links: MixedMap<u32, u32>,
    /// The active port, and its addresses, the best first; none while it is down.
    pub(super) port: Option<(PortAttributes, Vec<GidEntry>)>,
    /// Whether all completions that were there were taken, when it was last asked.
    pub(super) emptied: bool,
    /// Why nothing works on it any more.
    pub(super) failed: Option<String>,
}

impl Nic {
    pub(super) fn open(device: &Device, options: &RdmaOptions) -> Result<Self, VerbsError> {
        let context = device.open()?;
        let domain = ProtectionDomain::new(&context)?;
        let channel = CompletionChannel::new(&context)?;
        let limits = context.limits();
        let receives = options.receives.min(limits.shared_depth);
        let completions = receives.saturating_add(options.endpoints.saturating_mul(options.send_depth));
        let completions = completions.min(limits.completion_entries);
        let queue = CompletionQueue::new(&context, completions, Some((&channel, 0)))?;
        let shared = SharedReceiveQueue::new(&domain, receives, 1, receives)?;
        let message_bytes = options.message_bytes;
        let slots = options.send_slots;
        let bytes = (receives + slots) as usize * message_bytes as usize + BOUNCES as usize * BOUNCE_BYTES;
        let arena =
            Region::allocate(&RegionOptions::new("rdma-messages", bytes)).map_err(|error| VerbsError::Register {
                device: context.name().to_owned(),
                bytes: bytes as u64,
                source: std::io::Error::other(error.to_string()),
            })?;
        // Peers read bounce buffers; nothing of the arena is theirs to write.
        let access = Access { remote_write: false, ..Access::REMOTE };
        let buffers = domain.register(&IoBuf::whole(Arc::clone(&arena)), access)?;
        let endpoints = completions.saturating_sub(receives) / options.send_depth.max(1);
        let mut nic = Self {
            endpoints: Endpoints::new(endpoints.min(limits.queue_pairs) as usize),
            memory: MemoryTable::new(&domain, options.regions),
            channel,
            queue,
            shared,
            entries: Entry::many(POLLED),
            arena,
            buffers,
            message_bytes,
            receives,
            slots,
            free_slots: (0..slots).rev().collect(),
            free_bounces: (0..BOUNCES).rev().collect(),
            reposts: (0..receives).collect(),
            granted: 0,
            links: MixedMap::default(),
            port: None,
            emptied: false,
            failed: None,
            context,
            domain,
        };
        nic.look_at_port();
        nic.post_receives();
        Ok(nic)
    }

    /// Lets the poller tell of completions and events.
    pub(super) fn watch(&self, poller: &Poller, index: u32) -> std::io::Result<()> {
        let token = |source| Token { source, index, generation: 0 }.to_bits();
        poller.add(self.channel.as_fd(), token(Source::RdmaCompletions), kvplane_sys::Interest::Readable)?;
        poller.add(self.context.as_fd(), token(Source::RdmaEvents), kvplane_sys::Interest::Readable)
    }

    /// Finds out whether the port is up, and how it is reached.
    pub(super) fn look_at_port(&mut self) {
        let port = self.context.active_port();
        self.port = port.and_then(|port| self.context.gids(port.port).map(|gids| (port, gids))).ok();
    }

    /// Why no connection can be made here, if none can.
    pub(super) fn obstacle(&self) -> Option<String> {
        match (&self.failed, &self.port) {
            (Some(why), _) => Some(why.clone()),
            (None, None) => Some(match self.context.active_port().and_then(|port| self.context.gids(port.port)) {
                Err(error) => error.to_string(),
                Ok(_) => format!("{} has just come back", self.context.name()),
            }),
            (None, Some(_)) => None,
        }
    }

    /// The next event; none when there is none, and an end of the device when it cannot be asked.
    pub(super) fn next_event(&mut self) -> Option<AsyncEvent> {
        if self.failed.is_some() {
            return None;
        }
        match self.context.next_event() {
            Ok(event) => event,
            Err(error) => {
                self.failed = Some(error.to_string());
                Some(AsyncEvent::DeviceFatal)
            }
        }
    }

    /// Whether so many receives can be promised to another peer.
    pub(super) fn can_grant(&self, grant: u16) -> bool {
        self.granted + u32::from(grant) <= self.receives
    }

    /// The content of a receive.
    pub(super) fn read_receive(&self, receive: u32, bytes: usize, out: &mut Vec<u8>) {
        out.resize(bytes, 0);
        self.arena.copy_out(receive as usize * self.message_bytes as usize, out);
    }

    /// A receive's content is not needed any more.
    pub(super) fn repost(&mut self, receive: u32) {
        self.reposts.push(receive);
    }

    /// Posts all receives that are free, with one call. What the device refuses is tried again.
    pub(super) fn post_receives(&mut self) {
        if self.reposts.is_empty() && self.shared.unsent() == 0 {
            return;
        }
        while let Some(receive) = self.reposts.pop() {
            let piece = self.buffers.piece(receive as usize * self.message_bytes as usize, self.message_bytes);
            let Some(piece) = piece else { continue };
            if self.shared.push(receive.into(), &[piece]).is_err() {
                self.reposts.push(receive);
                break;
            }
        }
        if let Err(error) = self.shared.flush() {
            self.failed.get_or_insert_with(|| format!("{}: {error}", self.context.name()));
        }
    }

    /// A slot for a message that leaves.
    pub(super) fn take_slot(&mut self) -> Option<u32> {
        self.free_slots.pop()
    }

    pub(super) fn has_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    pub(super) fn free_slot(&mut self, slot: u32) {
        self.free_slots.push(slot);
    }

    fn slot_offset(&self, slot: u32) -> usize {
        (self.receives + slot) as usize * self.message_bytes as usize
    }

    /// Puts a message into a slot.
    pub(super) fn fill_slot(&self, slot: u32, message: &[u8]) {
        self.arena.copy_in(self.slot_offset(slot), message);
    }

    pub(super) fn slot_piece(&self, slot: u32, bytes: usize) -> Option<Piece<'_>> {
        self.buffers.piece(self.slot_offset(slot), bytes as u32)
    }

    pub(super) fn has_bounce(&self) -> bool {
        !self.free_bounces.is_empty()
    }

    /// Why a connection ends when the device refused something.
    pub(super) fn gone(&self, error: &impl std::fmt::Display) -> CloseCause {
        CloseCause::Rdma(format!("{}: {error}", self.context.name()))
    }

    /// A bounce buffer.
    pub(super) fn take_bounce(&mut self) -> Option<u32> {
        self.free_bounces.pop()
    }

    pub(super) fn free_bounce(&mut self, bounce: u32) {
        self.free_bounces.push(bounce);
    }

    /// The memory of a bounce buffer.
    pub(super) fn bounce(&self, bounce: u32) -> IoBuf {
        let start = self.slot_offset(self.slots) + bounce as usize * BOUNCE_BYTES;
        IoBuf::new(Arc::clone(&self.arena), start, BOUNCE_BYTES)
    }

    pub(super) fn bounce_piece(&self, bounce: u32, bytes: usize) -> Option<Piece<'_>> {
        self.buffers.piece(self.bounce(bounce).offset(), bytes as u32)
    }

    /// What a peer must know to read a bounce buffer: address and key.
    pub(super) fn bounce_address(&self, bounce: u32) -> (u64, u32) {
        (self.buffers.address() + self.bounce(bounce).offset() as u64, self.buffers.remote_key())
    }
}
