//! Holders: instances, ranks of instances, store nodes. Each has a slot, which is reused once no run has records of it.

use super::codec::{Reader, SnapshotError, put};
use super::run::bit;
use super::{HolderId, IndexError};

/// Retired holder, of which runs may still have records.
struct RetiredHolder {
    slot: u16,
    /// True once the sweep has begun at the first run since the holder was retired.
    is_swept_from_first: bool,
}

/// Holders of an index.
pub(super) struct Holders {
    /// Number of earlier holders of each slot.
    generations: Vec<u32>,
    /// Bitset of the slots of registered holders that lookups answer.
    live: Vec<u64>,
    /// Bitset of the slots of registered holders that are hidden from lookups.
    hidden: Vec<u64>,
    /// Free slots, the next one to be used last.
    spare: Vec<u16>,
    retired: Vec<RetiredHolder>,
}

impl Holders {
    /// Creates an empty set of at most `most` holders.
    pub(super) fn new(most: usize) -> Self {
        Self {
            generations: vec![0; most],
            live: vec![0; most.div_ceil(64)],
            hidden: vec![0; most.div_ceil(64)],
            spare: (0..most as u16).rev().collect(),
            retired: Vec::new(),
        }
    }

    /// Registers a holder, if a slot is free.
    pub(super) fn register(&mut self) -> Option<HolderId> {
        let slot = self.spare.pop()?;
        self.live[usize::from(slot) / 64] |= 1 << (slot % 64);
        Some(self.holder(slot))
    }

    /// Returns true if no slot is free, apart from those that a sweep may free.
    pub(super) const fn is_full(&self) -> bool {
        self.spare.is_empty()
    }

    pub(super) fn retire(&mut self, holder: HolderId) -> Result<(), IndexError> {
        let slot = self.slot(holder)?;
        self.live[usize::from(slot) / 64] &= !(1 << (slot % 64));
        self.hidden[usize::from(slot) / 64] &= !(1 << (slot % 64));
        self.generations[usize::from(slot)] = self.generations[usize::from(slot)].wrapping_add(1);
        self.retired.push(RetiredHolder { slot, is_swept_from_first: false });
        Ok(())
    }

    /// Returns the slot of a registered holder.
    pub(super) fn slot(&self, holder: HolderId) -> Result<u16, IndexError> {
        let known = self.generations.get(usize::from(holder.slot)) == Some(&holder.generation);
        if known && self.is_registered(holder.slot) { Ok(holder.slot) } else { Err(IndexError::UnknownHolder) }
    }

    /// Hides a registered holder from lookups: its blocks are kept and changed, and not answered.
    pub(super) fn hide(&mut self, holder: HolderId) -> Result<(), IndexError> {
        let slot = self.slot(holder)?;
        self.live[usize::from(slot) / 64] &= !(1 << (slot % 64));
        self.hidden[usize::from(slot) / 64] |= 1 << (slot % 64);
        Ok(())
    }

    /// Lets lookups answer a holder that was hidden. Idempotent.
    pub(super) fn show(&mut self, holder: HolderId) -> Result<(), IndexError> {
        let slot = self.slot(holder)?;
        self.hidden[usize::from(slot) / 64] &= !(1 << (slot % 64));
        self.live[usize::from(slot) / 64] |= 1 << (slot % 64);
        Ok(())
    }

    /// Lets lookups answer all hidden holders, which remain hidden, until [`Self::conceal`].
    pub(super) fn reveal(&mut self) {
        self.live.iter_mut().zip(&self.hidden).for_each(|(live, hidden)| *live |= hidden);
    }

    /// Ends [`Self::reveal`].
    pub(super) fn conceal(&mut self) {
        self.live.iter_mut().zip(&self.hidden).for_each(|(live, hidden)| *live &= !hidden);
    }

    /// Returns true if the slot has a registered holder, hidden or not.
    pub(super) fn is_registered(&self, slot: u16) -> bool {
        bit(&self.live, slot) || bit(&self.hidden, slot)
    }

    /// Returns true if lookups answer the holder of the slot.
    pub(super) fn is_live(&self, slot: u16) -> bool {
        bit(&self.live, slot)
    }

    /// Returns the bitset of the slots of the holders that lookups answer.
    pub(super) fn live(&self) -> &[u64] {
        &self.live
    }

    /// Returns the present holder of a slot.
    pub(super) fn holder(&self, slot: u16) -> HolderId {
        HolderId { slot, generation: self.generations[usize::from(slot)] }
    }

    pub(super) const fn has_retired(&self) -> bool {
        !self.retired.is_empty()
    }

    /// Returns the slots of retired holders that are not free yet.
    pub(super) fn retired(&self) -> impl Iterator<Item = u16> {
        self.retired.iter().map(|retired| retired.slot)
    }

    /// Notes that the sweep begins at the first run again: holders that were retired before its previous begin are in
    /// no run any more, and their slots become free.
    pub(super) fn end_sweep(&mut self) {
        let spare = &mut self.spare;
        self.retired.retain_mut(|retired| {
            if retired.is_swept_from_first {
                spare.push(retired.slot);
            }
            !std::mem::replace(&mut retired.is_swept_from_first, true)
        });
    }

    /// Writes all slots to a snapshot.
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put(out, self.generations.len() as u64);
        for (slot, generation) in self.generations.iter().enumerate() {
            put(out, u64::from(*generation) << 1 | u64::from(self.is_registered(slot as u16)));
        }
    }

    /// Restores the slots that [`Self::put`] wrote.
    pub(super) fn restore(&mut self, reader: &mut Reader<'_>) -> Result<(), SnapshotError> {
        let most = self.generations.len();
        for slot in 0..reader.count("holders", most)? {
            let word = reader.word()?;
            // Retired holders are out: no record of them was written.
            self.generations[slot] = (word >> 1) as u32;
            self.live[slot / 64] |= (word & 1) << (slot % 64);
        }
        self.spare = (0..most as u16).rev().filter(|slot| !self.is_live(*slot)).collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_holder_is_registered_and_not_answered() {
        let mut holders = Holders::new(2);
        let holder = holders.register().expect("a slot");
        holders.hide(holder).expect("it is registered");
        assert!(holders.is_registered(holder.slot()) && !holders.is_live(holder.slot()));
        assert_eq!(holders.slot(holder), Ok(holder.slot()));
        holders.show(holder).expect("it is registered");
        assert!(holders.is_live(holder.slot()));
        holders.hide(holder).expect("it is registered");
        holders.retire(holder).expect("it is registered");
        assert!(!holders.is_registered(holder.slot()));
        assert_eq!(
            (holders.hide(holder), holders.show(holder)),
            (Err(IndexError::UnknownHolder), Err(IndexError::UnknownHolder))
        );
    }

    #[test]
    fn slot_is_free_after_a_whole_sweep_and_its_former_holder_is_rejected() {
        let mut holders = Holders::new(1);
        let first = holders.register().expect("a slot");
        assert!(holders.is_full() && holders.register().is_none());
        holders.retire(first).expect("it is registered");
        assert_eq!(holders.retire(first), Err(IndexError::UnknownHolder));
        assert_eq!(holders.retired().collect::<Vec<_>>(), [first.slot()]);
        // The sweep was at some run in the middle: only the next round visits all runs.
        holders.end_sweep();
        assert!(holders.is_full() && holders.has_retired());
        holders.end_sweep();
        assert!(!holders.is_full() && !holders.has_retired());
        let second = holders.register().expect("a slot");
        assert_eq!(second.slot(), first.slot());
        assert!(holders.slot(first).is_err() && holders.slot(second).is_ok());
    }
}
