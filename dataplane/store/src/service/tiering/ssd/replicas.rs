//! Replica records: records of replicas that this shard has as a replica owner.
//!
//! All records of an *open* slot are replica records. A slot of which this shard is the replica owner is opened when
//! the SSD has no other record of it, and the durable ownership note does not name it: so a restart makes all replica
//! records void, as another incarnation of a replica owner has no replicas. An exported slot can be opened when the new
//! owner has reported that it has imported everything, or at once if its export began with nothing in it. A slot is
//! closed as soon as this shard is the replica owner of another incarnation of the owner, or none.

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_tier::SlotSet;

use crate::service::shard::exports::Exports;
use crate::service::shard::slot_table::SlotTable;

/// Most replicas that wait until their slot is open. Further ones are in memory only.
const WAITING_MOST: usize = 1 << 16;
/// Pause between two attempts to open slots.
const RETRY_NS: u64 = 100_000_000;

/// Slots with replica records, and those that are to be opened.
#[derive(Debug)]
pub(in crate::service) struct ReplicaRecords {
    open: SlotSet,
    /// Open slots of which there may be records.
    written: SlotSet,
    /// Slots that are to be opened, with the replicas in memory that wait for it.
    waiting: SlotTable<Vec<Digest>>,
    waiting_replicas: usize,
    retry_ns: u64,
    /// Exported slots of which this shard had nothing when their export began, with the epoch of that map.
    empty_exports: SlotTable<Epoch>,
}

impl ReplicaRecords {
    pub(super) fn new() -> Self {
        let (open, written) = (SlotSet::none(), SlotSet::none());
        let (waiting, empty_exports) = (SlotTable::default(), SlotTable::default());
        Self { open, written, waiting, waiting_replicas: 0, retry_ns: 0, empty_exports }
    }

    /// Notes the exports after a map was followed, by a shard that may have nothing at all.
    pub(super) fn note_exports(&mut self, exports: &Exports, has_nothing: bool) {
        self.empty_exports.retain(|slot, since| exports.since(slot) == Some(*since));
        if has_nothing {
            self.empty_exports.extend(exports.slots());
        }
    }

    /// Returns true if all records of a slot are replica records.
    pub(in crate::service) fn is_open(&self, slot: Slot) -> bool {
        self.open.has(slot)
    }

    /// Marks an open slot as one that may have records.
    pub(in crate::service::tiering) fn note_written(&mut self, slot: Slot) {
        self.written.insert(slot);
    }

    /// Has a slot opened as soon as that is possible.
    pub(in crate::service) fn begin(&mut self, slot: Slot) {
        if !self.open.has(slot) {
            if !self.waiting.has(slot) {
                self.waiting.insert(slot, Vec::new());
            }
            self.retry_ns = 0;
        }
    }

    /// Closes a slot; returns true if there may be records of it.
    pub(super) fn close(&mut self, slot: Slot) -> bool {
        self.waiting_replicas -= self.waiting.remove(slot).map_or(0, |replicas| replicas.len());
        self.open.remove(slot);
        let was_written = self.written.has(slot);
        self.written.remove(slot);
        was_written
    }

    /// Makes a replica wait until its slot is open. False if too many wait, or the slot is not to be opened.
    pub(in crate::service::tiering) fn wait(&mut self, digest: Digest) -> bool {
        let has_room = self.waiting_replicas < WAITING_MOST;
        let Some(waiting) = self.waiting.get_mut(digest.slot()).filter(|_| has_room) else { return false };
        waiting.push(digest);
        self.waiting_replicas += 1;
        true
    }

    /// Returns the number of slots that are to be opened.
    pub(in crate::service) fn closed(&self) -> usize {
        self.waiting.len()
    }

    /// Returns true if slots are to be opened and an attempt is due.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        !self.waiting.is_empty() && self.retry_ns <= now_ns
    }

    /// Opens the slots for which `may_open` returns true; returns the replicas that waited for them.
    pub(super) fn open(&mut self, now_ns: u64, exports: &Exports, may_open: impl Fn(Slot) -> bool) -> Vec<Digest> {
        self.retry_ns = now_ns.saturating_add(RETRY_NS);
        let mut ready = Vec::new();
        let (open, empty) = (&mut self.open, &self.empty_exports);
        let has_export = |slot: Slot| exports.has_slot(slot) && exports.since(slot) != empty.get(slot).copied();
        self.waiting.retain(|slot, replicas| {
            let opens = !has_export(slot) && may_open(slot);
            if opens {
                open.insert(slot);
                ready.append(replicas);
            }
            !opens
        });
        self.waiting_replicas -= ready.len();
        ready
    }

    /// Returns the time of the next attempt to open slots.
    pub(in crate::service::tiering) fn poll_timeout(&self) -> Option<u64> {
        (!self.waiting.is_empty()).then_some(self.retry_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_wait_until_their_slot_is_open() {
        let mut records = ReplicaRecords::new();
        let digest = |slot: u128| Digest(slot << 114 | 9);
        assert!(!records.wait(digest(3)), "this shard is no replica owner of it");
        [3, 4].into_iter().for_each(|slot| records.begin(Slot(slot)));
        assert!(records.wait(digest(3)) && records.wait(digest(4)) && records.is_due(0));
        assert_eq!(records.open(5, &Exports::default(), |slot| slot == Slot(3)), [digest(3)]);
        assert!(records.is_open(Slot(3)) && !records.is_open(Slot(4)) && !records.is_due(5));
        assert_eq!(records.poll_timeout(), Some(5 + RETRY_NS));
        records.note_written(Slot(3));
        assert!(records.close(Slot(3)) && !records.close(Slot(4)));
        assert_eq!((records.is_open(Slot(3)), records.poll_timeout(), records.waiting_replicas), (false, None, 0));
    }
}
