//! Which slots the shard owned when it last said so, and what on the device is void: two copies, written one after the
//! other.
//!
//! A start believes what the device has of a slot only if the slot was the shard's by the newest of these notes, and if
//! the control plane says that no slot has changed hands since.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};

use super::{Flaw, check_start, put32, put64, seeded, start, word32, word64};

/// Bytes of a note as it is read and written; what follows the fields is zero.
pub const OWNERSHIP_IO_BYTES: u32 = 8192;
/// Where the two copies are on the device.
pub const OWNERSHIP_OFFSETS: [u64; 2] = [8192, 40_960];
const MAGIC: [u8; 4] = *b"KVTO";
const BODY_CHECKSUM_AT: usize = 56;
const CHECKSUM_AT: usize = 60;
const OWNED_AT: usize = 64;
const VOID_AT: usize = OWNED_AT + SLOTS / 8;
const END: usize = VOID_AT + SLOTS / 8;

/// A set of slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotSet(pub Box<[u64; SLOTS / 64]>);

impl SlotSet {
    /// No slot.
    #[must_use]
    pub fn none() -> Self {
        Self(Box::new([0; SLOTS / 64]))
    }

    /// Whether a slot is in it.
    #[must_use]
    pub fn has(&self, slot: Slot) -> bool {
        self.0[usize::from(slot.0) / 64] & (1 << (slot.0 % 64)) != 0
    }

    /// Whether there is none in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Makes each word of it from its own and the other's.
    #[must_use]
    pub fn with(&self, other: &Self, both: impl Fn(u64, u64) -> u64) -> Self {
        Self(Box::new(core::array::from_fn(|at| both(self.0[at], other.0[at]))))
    }
}

/// What a shard owned, and what of that is void.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ownership {
    /// Which state of the control plane the epoch is of.
    pub state: u64,
    /// The map that was applied last.
    pub epoch: Epoch,
    /// What the map gave the shard. Whatever the device has of other slots is void.
    pub owned: SlotSet,
    /// Slots that came back while the device still had objects of the time before: those below `floor` are void.
    pub void: SlotSet,
    /// See `void`.
    pub floor: Version,
}

impl Ownership {
    /// Disk form of the `number`-th note.
    #[must_use]
    pub fn encode(&self, number: u64, uuid: u128) -> Vec<u8> {
        let mut out = vec![0; OWNERSHIP_IO_BYTES as usize];
        start(&mut out, MAGIC);
        put64(&mut out, 8, number);
        put64(&mut out, 16, self.state);
        put64(&mut out, 24, self.epoch.0);
        put64(&mut out, 32, self.floor.0);
        for (at, set) in [(OWNED_AT, &self.owned), (VOID_AT, &self.void)] {
            set.0.iter().enumerate().for_each(|(word, bits)| put64(&mut out, at + 8 * word, *bits));
        }
        let body = frame_checksum(&out[OWNED_AT..END]);
        put32(&mut out, BODY_CHECKSUM_AT, body);
        let checksum = seeded(uuid, &out[..CHECKSUM_AT]);
        put32(&mut out, CHECKSUM_AT, checksum);
        out
    }

    /// Reads a note and its number.
    ///
    /// # Errors
    /// When there is none.
    pub fn decode(bytes: &[u8], uuid: u128) -> Result<(u64, Self), Flaw> {
        check_start(bytes, MAGIC)?;
        let body = frame_checksum(&bytes[OWNED_AT..END]);
        if word32(bytes, CHECKSUM_AT) != seeded(uuid, &bytes[..CHECKSUM_AT]) || word32(bytes, BODY_CHECKSUM_AT) != body
        {
            return Err(Flaw::Checksum);
        }
        let set = |at: usize| SlotSet(Box::new(core::array::from_fn(|word| word64(bytes, at + 8 * word))));
        let found = Self {
            state: word64(bytes, 16),
            epoch: Epoch(word64(bytes, 24)),
            floor: Version(word64(bytes, 32)),
            owned: set(OWNED_AT),
            void: set(VOID_AT),
        };
        Ok((word64(bytes, 8), found))
    }
}
