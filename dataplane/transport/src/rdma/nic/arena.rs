//! Message memory of a device: receives, then slots from which messages are sent, then bounce buffers for memory that
//! cannot be registered.

use std::sync::Arc;

use kvplane_sys::verbs::{Access, MemoryRegion, Piece, ProtectionDomain, VerbsError};
use kvplane_sys::{IoBuf, Region, RegionOptions};

use crate::rdma::options::RdmaOptions;

/// Size of a bounce buffer, in bytes.
pub(in crate::rdma) const BOUNCE_BYTES: usize = 128 << 10;
/// Number of bounce buffers of a device.
const BOUNCES: u32 = 8;

/// Registered region with its free slots and bounce buffers.
pub(in crate::rdma) struct Arena {
    region: Arc<Region>,
    memory: MemoryRegion,
    message_bytes: u32,
    receives: u32,
    slots: u32,
    free_slots: Vec<u32>,
    free_bounces: Vec<u32>,
}

impl Arena {
    /// Allocates and registers the arena for this many receives.
    pub(super) fn open(
        domain: &ProtectionDomain,
        device: &str,
        receives: u32,
        options: &RdmaOptions,
    ) -> Result<Self, VerbsError> {
        let (message_bytes, slots) = (options.message_bytes, options.send_slots);
        let bytes = (receives + slots) as usize * message_bytes as usize + BOUNCES as usize * BOUNCE_BYTES;
        let region =
            Region::allocate(&RegionOptions::new("rdma-messages", bytes)).map_err(|error| VerbsError::Register {
                device: device.to_owned(),
                bytes: bytes as u64,
                source: std::io::Error::other(error.to_string()),
            })?;
        // Peers read bounce buffers; they may not write to the arena.
        let access = Access { remote_write: false, ..Access::REMOTE };
        let memory = domain.register(&IoBuf::whole(Arc::clone(&region)), access)?;
        let (free_slots, free_bounces) = ((0..slots).rev().collect(), (0..BOUNCES).rev().collect());
        Ok(Self { region, memory, message_bytes, receives, slots, free_slots, free_bounces })
    }

    /// Reads the contents of a receive.
    pub(in crate::rdma) fn read_receive(&self, receive: u32, bytes: usize, out: &mut Vec<u8>) {
        out.resize(bytes, 0);
        self.region.copy_out(receive as usize * self.message_bytes as usize, out);
    }

    /// Returns the memory of a receive.
    pub(super) fn receive_piece(&self, receive: u32) -> Option<Piece<'_>> {
        self.memory.piece(receive as usize * self.message_bytes as usize, self.message_bytes)
    }

    /// Allocates a slot for an outgoing message.
    pub(in crate::rdma) fn take_slot(&mut self) -> Option<u32> {
        self.free_slots.pop()
    }

    pub(in crate::rdma) fn has_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    pub(in crate::rdma) fn free_slot(&mut self, slot: u32) {
        self.free_slots.push(slot);
    }

    fn slot_offset(&self, slot: u32) -> usize {
        (self.receives + slot) as usize * self.message_bytes as usize
    }

    /// Copies a message into a slot.
    pub(in crate::rdma) fn fill_slot(&self, slot: u32, message: &[u8]) {
        self.region.copy_in(self.slot_offset(slot), message);
    }

    pub(in crate::rdma) fn slot_piece(&self, slot: u32, bytes: usize) -> Option<Piece<'_>> {
        self.memory.piece(self.slot_offset(slot), bytes as u32)
    }

    pub(in crate::rdma) fn has_bounce(&self) -> bool {
        !self.free_bounces.is_empty()
    }

    /// Allocates a bounce buffer.
    pub(in crate::rdma) fn take_bounce(&mut self) -> Option<u32> {
        self.free_bounces.pop()
    }

    pub(in crate::rdma) fn free_bounce(&mut self, bounce: u32) {
        self.free_bounces.push(bounce);
    }

    /// Returns the memory of a bounce buffer.
    pub(in crate::rdma) fn bounce(&self, bounce: u32) -> IoBuf {
        let start = self.slot_offset(self.slots) + bounce as usize * BOUNCE_BYTES;
        IoBuf::new(Arc::clone(&self.region), start, BOUNCE_BYTES)
    }

    pub(in crate::rdma) fn bounce_piece(&self, bounce: u32, bytes: usize) -> Option<Piece<'_>> {
        self.memory.piece(self.bounce(bounce).offset(), bytes as u32)
    }

    /// Returns the address and the remote key with which a peer reads a bounce buffer.
    pub(in crate::rdma) fn bounce_address(&self, bounce: u32) -> (u64, u32) {
        (self.memory.address() + self.bounce(bounce).offset() as u64, self.memory.remote_key())
    }
}
