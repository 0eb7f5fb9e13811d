//! Which slots the shard owned when it last said so, and what on the device is void: two copies, written one after the
//! other.
//!
//! A start believes what the device has of a slot if the slot was the shard's by the newest of these notes, and if the
//! control plane says that no slot has changed hands since. Else what it has is in doubt until it was compared with
//! what happened to the slot meanwhile; a note that is written before that is done says of which slots that is still
//! so.

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
const DOUBT_EPOCH_AT: usize = 40;
const DOUBT_FLOOR_AT: usize = 48;
const DOUBT_AT: usize = END;
const DOUBT_CHECKSUM_AT: usize = DOUBT_AT + SLOTS / 8;

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

    /// How many are in it.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Puts a slot in.
    pub fn insert(&mut self, slot: Slot) {
        self.0[usize::from(slot.0) / 64] |= 1 << (slot.0 % 64);
    }

    /// Takes a slot out.
    pub fn remove(&mut self, slot: Slot) {
        self.0[usize::from(slot.0) / 64] &= !(1 << (slot.0 % 64));
    }

    /// The slots that are in it, in their order.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        (0..SLOTS as u16).map(Slot).filter(|slot| self.has(*slot))
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
    /// Slots, owned or not, of which the device has objects that were not compared yet with what others did meanwhile.
    pub doubt: Doubt,
}

/// Slots that others had meanwhile, perhaps. An earlier version of this program knows nothing of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Doubt {
    /// Which.
    pub slots: SlotSet,
    /// By a map of this epoch, or a later one, the shard had each of them last.
    pub epoch: Epoch,
    /// Their objects with lesser versions are in doubt; the others are of the time since.
    pub floor: Version,
}

impl Doubt {
    /// About nothing.
    #[must_use]
    pub fn none() -> Self {
        Self { slots: SlotSet::none(), epoch: Epoch(0), floor: Version(0) }
    }
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
        put64(&mut out, DOUBT_EPOCH_AT, self.doubt.epoch.0);
        put64(&mut out, DOUBT_FLOOR_AT, self.doubt.floor.0);
        for (at, set) in [(OWNED_AT, &self.owned), (VOID_AT, &self.void), (DOUBT_AT, &self.doubt.slots)] {
            set.0.iter().enumerate().for_each(|(word, bits)| put64(&mut out, at + 8 * word, *bits));
        }
        // All slots in one: a note of which a part was written is none, whatever a former note left in the other part.
        let body = frame_checksum(&out[OWNED_AT..DOUBT_CHECKSUM_AT]);
        put32(&mut out, BODY_CHECKSUM_AT, body);
        let doubt = frame_checksum(&out[DOUBT_AT..DOUBT_CHECKSUM_AT]);
        put32(&mut out, DOUBT_CHECKSUM_AT, doubt);
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

/// True for a note of earlier versions, whose body was what came before the slots in doubt. These had a checksum of
/// their own, or were all zeros where a version knew no doubt.
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
    fn a_note_says_what_is_in_doubt() {
        let bytes = note().encode(4, 11);
        assert_eq!(Ownership::decode(&bytes, 11), Ok((4, note())));
        let slots: Vec<u16> = note().doubt.slots.iter().map(|slot| slot.0).collect();
        assert_eq!((slots, note().doubt.slots.count()), (vec![3, 16_383], 2));
    }

    #[test]
    fn damage_to_what_is_in_doubt_is_seen() {
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
    fn a_note_of_which_a_part_was_written_is_none() {
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
        // One that knew no doubt.
        let mut bytes = earlier(&Ownership { doubt: Doubt::none(), ..note() });
        bytes[DOUBT_CHECKSUM_AT..DOUBT_CHECKSUM_AT + 4].fill(0);
        let (_, found) = Ownership::decode(&bytes, 11).expect("a note");
        assert_eq!(found.doubt, Doubt::none());
    }
}
