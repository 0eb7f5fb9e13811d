//! Ownership note: the slots that the shard owned when it last wrote the note, and the slots whose records are void.
//! Two copies, written one after the other.
//!
//! After a start, a slot's records are trusted if the newest note lists the slot as owned, and if the control plane
//! confirms that no slot has changed owners since. Otherwise the slot is in doubt until it was reconciled with the
//! changes of its other owners; a note that is written before that is done lists the slots that are still in doubt.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};
use kvplane_proto::narrowing::length_u16;

use super::{Flaw, check_start, put32, put64, seeded, start, word32, word64};

/// Bytes of a note as it is read and written; the rest after the fields is zero.
pub const OWNERSHIP_IO_BYTES: u32 = 8192;
/// Offsets of the two copies on the device.
pub const OWNERSHIP_OFFSETS: [u64; 2] = [8192, 40_960];
const MAGIC: [u8; 4] = *b"KVTO";
const BODY_CHECKSUM_AT: usize = 56;
const CHECKSUM_AT: usize = 60;
const OWNED_AT: usize = 64;
const VOID_AT: usize = OWNED_AT + SLOTS / 8;
const END: usize = VOID_AT + SLOTS / 8;
const DOUBT_EPOCH_AT: usize = 40;
const DOUBT_FLOOR_AT: usize = 48;
const DOUBT_AT: usize = END;
const DOUBT_CHECKSUM_AT: usize = DOUBT_AT + SLOTS / 8;

/// A set of slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotSet(pub Box<[u64; SLOTS / 64]>);

impl SlotSet {
    /// Returns an empty set.
    #[must_use]
    pub fn none() -> Self {
        Self(Box::new([0; SLOTS / 64]))
    }

    /// Returns true if the set contains `slot`.
    #[must_use]
    pub fn has(&self, slot: Slot) -> bool {
        self.0[usize::from(slot.0) / 64] & (1 << (slot.0 % 64)) != 0
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Returns the number of slots in the set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Adds a slot.
    pub fn insert(&mut self, slot: Slot) {
        self.0[usize::from(slot.0) / 64] |= 1 << (slot.0 % 64);
    }

    /// Removes a slot.
    pub fn remove(&mut self, slot: Slot) {
        self.0[usize::from(slot.0) / 64] &= !(1 << (slot.0 % 64));
    }

    /// Returns the slots of the set in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..length_u16(SLOTS)).map(Slot).filter(|slot| self.has(*slot))
    }

    /// Combines each word of this set with that of `other`.
    #[must_use]
    pub fn with(&self, other: &Self, both: impl Fn(u64, u64) -> u64) -> Self {
        Self(Box::new(core::array::from_fn(|at| both(self.0[at], other.0[at]))))
    }
}

/// Slots that a shard owned, and which of them are void.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ownership {
    /// Cluster state that the epoch belongs to.
    pub state: u64,
    /// Epoch of the cluster map that was applied last.
    pub epoch: Epoch,
    /// Slots that the map gave the shard. Records of all other slots are void.
    pub owned: SlotSet,
    /// Slots that the shard owns again while the device still has records of its earlier ownership: those below `floor`
    /// are void.
    pub void: SlotSet,
    /// Least version of an object of a slot in `void` that is not void.
    pub floor: Version,
    /// Slots, owned or not, whose objects on the device are not reconciled yet with the changes of other owners.
    pub doubt: Doubt,
}

/// Slots in doubt: other owners may have changed them meanwhile. An earlier version of this program does not know them.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Doubt {
    pub slots: SlotSet,
    /// Least epoch by which the shard last owned each of the slots; it may have owned them by a later map too.
    pub epoch: Epoch,
    /// Objects of these slots with lesser versions are in doubt; greater ones were committed since.
    pub floor: Version,
}

impl Doubt {
    /// Returns a value with no slot in doubt.
    #[must_use]
    pub fn none() -> Self {
        Self { slots: SlotSet::none(), epoch: Epoch(0), floor: Version(0) }
    }
}

impl Ownership {
    /// Encodes the `number`-th note.
    #[must_use]
    pub fn encode(&self, number: u64, uuid: u128) -> Vec<u8> {
        let mut out = vec![0; OWNERSHIP_IO_BYTES as usize];
        start(&mut out, MAGIC);
        put64(&mut out, 8, number);
        put64(&mut out, 16, self.state);
        put64(&mut out, 24, self.epoch.0);
        put64(&mut out, 32, self.floor.0);
        put64(&mut out, DOUBT_EPOCH_AT, self.doubt.epoch.0);
        put64(&mut out, DOUBT_FLOOR_AT, self.doubt.floor.0);
        for (at, set) in [(OWNED_AT, &self.owned), (VOID_AT, &self.void), (DOUBT_AT, &self.doubt.slots)] {
            set.0.iter().enumerate().for_each(|(word, bits)| put64(&mut out, at + 8 * word, *bits));
        }
        // One checksum over all slots: a partly written note is invalid, whatever an earlier note left in the other
        // part.
        let body = frame_checksum(&out[OWNED_AT..DOUBT_CHECKSUM_AT]);
        put32(&mut out, BODY_CHECKSUM_AT, body);
        let doubt = frame_checksum(&out[DOUBT_AT..DOUBT_CHECKSUM_AT]);
        put32(&mut out, DOUBT_CHECKSUM_AT, doubt);
        let checksum = seeded(uuid, &out[..CHECKSUM_AT]);
        put32(&mut out, CHECKSUM_AT, checksum);
        out
    }

    /// Decodes a note and its number.
    ///
    /// # Errors
    /// If the bytes are not a valid note.
    pub fn decode(bytes: &[u8], uuid: u128) -> Result<(u64, Self), Flaw> {
        check_start(bytes, MAGIC)?;
        let body = word32(bytes, BODY_CHECKSUM_AT);
        let is_whole = body == frame_checksum(&bytes[OWNED_AT..DOUBT_CHECKSUM_AT]) || is_earlier(bytes, body);
        if word32(bytes, CHECKSUM_AT) != seeded(uuid, &bytes[..CHECKSUM_AT]) || !is_whole {
            return Err(Flaw::Checksum);
        }
        let set = |at: usize| SlotSet(Box::new(core::array::from_fn(|word| word64(bytes, at + 8 * word))));
        let found = Self {
            state: word64(bytes, 16),
            epoch: Epoch(word64(bytes, 24)),
            floor: Version(word64(bytes, 32)),
            owned: set(OWNED_AT),
            void: set(VOID_AT),
            doubt: Doubt {
                slots: set(DOUBT_AT),
                epoch: Epoch(word64(bytes, DOUBT_EPOCH_AT)),
                floor: Version(word64(bytes, DOUBT_FLOOR_AT)),
            },
        };
        Ok((word64(bytes, 8), found))
    }
}

/// Returns true for a note of earlier versions, whose body checksum covers only what precedes the slots in doubt. Those
/// slots had a checksum of their own, or were all zeros in versions without doubt.
fn is_earlier(bytes: &[u8], body: u32) -> bool {
    let slots = &bytes[DOUBT_AT..DOUBT_CHECKSUM_AT];
    let (stated, none) = (word32(bytes, DOUBT_CHECKSUM_AT), slots.iter().all(|byte| *byte == 0));
    body == frame_checksum(&bytes[OWNED_AT..END]) && (stated == frame_checksum(slots) || stated == 0 && none)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> Ownership {
        let mut doubt = Doubt { slots: SlotSet::none(), epoch: Epoch(7), floor: Version(9 << 32) };
        doubt.slots.insert(Slot(3));
        doubt.slots.insert(Slot(16_383));
        let mut owned = SlotSet::none();
        owned.insert(Slot(3));
        Ownership { state: 5, epoch: Epoch(8), owned, void: SlotSet::none(), floor: Version(2), doubt }
    }

    #[test]
    fn a_note_lists_the_slots_in_doubt() {
        let bytes = note().encode(4, 11);
        assert_eq!(Ownership::decode(&bytes, 11), Ok((4, note())));
        let slots: Vec<u16> = note().doubt.slots.iter().map(|slot| slot.0).collect();
        assert_eq!((slots, note().doubt.slots.count()), (vec![3, 16_383], 2));
    }

    #[test]
    fn damage_to_the_slots_in_doubt_is_detected() {
        let mut bytes = note().encode(4, 11);
        bytes[DOUBT_AT + 100] ^= 1;
        assert_eq!(Ownership::decode(&bytes, 11), Err(Flaw::Checksum));
    }

    /// A note as earlier versions wrote it.
    fn earlier(note: &Ownership) -> Vec<u8> {
        let mut bytes = note.encode(4, 11);
        let body = frame_checksum(&bytes[OWNED_AT..END]);
        put32(&mut bytes, BODY_CHECKSUM_AT, body);
        let checksum = seeded(11, &bytes[..CHECKSUM_AT]);
        put32(&mut bytes, CHECKSUM_AT, checksum);
        bytes
    }

    #[test]
    fn a_torn_note_is_invalid() {
        let (after, before) = (note().encode(4, 11), Ownership { doubt: Doubt::none(), epoch: Epoch(7), ..note() });
        let torn = |first: &[u8], then: &[u8], cut: usize| {
            let torn = [&first[..cut], &then[cut..]].concat();
            let found = Ownership::decode(&torn, 11);
            assert!(torn == first || torn == then || found == Err(Flaw::Checksum), "{cut}: {found:?}");
        };
        for cut in (512..after.len()).step_by(512) {
            torn(&after, &before.encode(2, 11), cut);
            torn(&before.encode(2, 11), &after, cut);
            torn(&after, &earlier(&before), cut);
        }
    }

    #[test]
    fn notes_of_earlier_versions_are_read() {
        assert_eq!(Ownership::decode(&earlier(&note()), 11), Ok((4, note())));
        let mut damaged = earlier(&note());
        damaged[DOUBT_AT + 100] ^= 1;
        assert_eq!(Ownership::decode(&damaged, 11), Err(Flaw::Checksum));
        // A note of a version without slots in doubt.
        let mut bytes = earlier(&Ownership { doubt: Doubt::none(), ..note() });
        bytes[DOUBT_CHECKSUM_AT..DOUBT_CHECKSUM_AT + 4].fill(0);
        let (_, found) = Ownership::decode(&bytes, 11).expect("a note");
        assert_eq!(found.doubt, Doubt::none());
    }
}
