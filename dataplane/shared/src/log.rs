//! Order of a shard's writes to the store: one at a time. Packs come first, then checkpoints, then the manifest that
//! names them; and what a manifest does not need any more is deleted after it.

use std::collections::VecDeque;
use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::ids::{Epoch, Slot};
use kvplane_tier::SlotSet;

use crate::config::{CHECKPOINT_PACKS, STEP_ENTRIES};
use crate::format::{CheckpointWriter, Manifest, PackRow, Stream};
use crate::index::Index;

/// Slots of a shard, by what is known of their contents.
#[derive(Debug)]
pub(crate) struct SlotStates {
    /// Slots that the map gives the shard.
    pub(crate) owned: SlotSet,
    /// Owned slots whose contents in the index are complete.
    pub(crate) valid: SlotSet,
    /// Slots that were complete when the newest checkpoint was begun, and have not been gained since.
    pub(crate) checkpointed: SlotSet,
    /// Slots lost in the present layout, and in the one before. Their contents are complete, or will be when their
    /// takeovers end.
    pub(crate) released: [SlotSet; 2],
    /// Slots whose entries are still to be removed from the index.
    pub(crate) purged: SlotSet,
}

impl SlotStates {
    pub(crate) fn new() -> Self {
        let none = SlotSet::none;
        Self { owned: none(), valid: none(), checkpointed: none(), released: [none(), none()], purged: none() }
    }

    /// Returns the slots of which the index has everything, while some are still being taken over: owned ones, and ones
    /// that were lost.
    pub(crate) fn complete(&self, incomplete: &SlotSet) -> SlotSet {
        let released = self.all_released().with(incomplete, |released, incomplete| released & !incomplete);
        self.valid.with(&released, |valid, released| valid | released)
    }

    /// Returns the slots that a former layout's new owners may take over.
    pub(crate) fn all_released(&self) -> SlotSet {
        self.released[0].with(&self.released[1], |now, before| now | before)
    }
}

/// Checkpoint that is being made, in steps.
#[derive(Debug)]
struct CheckpointDraft {
    writer: CheckpointWriter,
    packs: Vec<PackRow>,
    after: Option<Digest>,
    /// Complete slots, whose entries it has. Also those that were released: their new owners may not have read an older
    /// checkpoint.
    complete: SlotSet,
}

/// Checkpoint on its way to the store.
#[derive(Debug)]
pub(crate) struct SealedCheckpoint {
    pub(crate) number: u64,
    pub(crate) bytes: Arc<Vec<u8>>,
    /// Last pack that it takes in.
    after: u64,
    complete: SlotSet,
}

/// Writes of a shard, apart from its packs.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Last pack that the store has.
    written: u64,
    /// Pack that is written before the next manifest: it has removals in slots that were lost.
    settled_after: u64,
    /// True if the last write was a pack.
    is_after_pack: bool,
    /// Newest checkpoint that the store has, and the last pack that it takes in.
    checkpoint: (u64, u64),
    /// Number of the last checkpoint that was begun.
    last_checkpoint: u64,
    /// Checkpoint and last pack that the manifest in the store names.
    pub(crate) named: (u64, u64),
    /// True if the index has changed in a way that later packs do not tell.
    wants_checkpoint: bool,
    wants_manifest: bool,
    making: Option<CheckpointDraft>,
    pub(crate) sealed: Option<SealedCheckpoint>,
    /// Number of the last manifest, and of the one in the store.
    last_manifest: u64,
    named_by: u64,
    /// Slots whose contents were forgotten, and still count by the manifest in the store.
    forgotten: Option<SlotSet>,
    /// Checkpoint and last pack that the manifest on its way names.
    naming: Option<(u64, u64)>,
    /// Names of objects to delete.
    pub(crate) deletes: VecDeque<String>,
}

impl Log {
    /// Returns true if a checkpoint or a manifest waits to be written.
    pub(crate) const fn is_waiting(&self) -> bool {
        self.sealed.is_some() || self.wants_manifest || self.is_checkpoint_due()
    }

    /// Requests a checkpoint, and a manifest that names it.
    pub(crate) const fn want_checkpoint(&mut self) {
        self.wants_checkpoint = true;
    }

    /// Requests a manifest, also in place of one that the store did not take.
    pub(crate) const fn want_manifest(&mut self) {
        self.wants_manifest = true;
    }

    /// Requests a manifest without the contents of these slots.
    pub(crate) fn forget(&mut self, slots: &SlotSet) {
        let before = self.forgotten.take().unwrap_or_else(SlotSet::none);
        self.forgotten = Some(before.with(slots, |before, slots| before | slots));
        self.wants_manifest = true;
    }

    /// Returns true while forgotten contents of a slot still count by the manifest in the store.
    pub(crate) fn counts_forgotten(&self, slot: Slot) -> bool {
        self.forgotten.as_ref().is_some_and(|slots| slots.has(slot))
    }

    /// Returns true while a checkpoint is being made or written: the index must not get entries of new packs.
    pub(crate) const fn is_checkpointing(&self) -> bool {
        self.making.is_some() || self.sealed.is_some()
    }

    /// Returns true if a checkpoint is due.
    pub(crate) const fn is_checkpoint_due(&self) -> bool {
        self.wants_checkpoint || self.written >= self.checkpoint.1 + CHECKPOINT_PACKS
    }

    /// Returns true if the manifest in the store is outdated.
    pub(crate) const fn is_manifest_due(&self) -> bool {
        self.wants_manifest
    }

    /// Returns true if the manifest in the store says what is valid now, or if there is none.
    pub(crate) const fn is_settled(&self) -> bool {
        self.last_manifest == 0 || !self.wants_manifest && self.naming.is_none()
    }

    /// Notes that the store has a pack.
    pub(crate) const fn pack_written(&mut self, number: u64) {
        (self.written, self.is_after_pack) = (number, true);
    }

    /// Demands that the store has this pack before the next manifest, which releases slots: it tells of no later
    /// removals.
    pub(crate) fn settle_after(&mut self, pack: u64) {
        self.settled_after = self.settled_after.max(pack);
    }

    /// Returns true if a checkpoint or a manifest goes before the next pack, if one is due.
    pub(crate) const fn is_its_turn(&self) -> bool {
        self.is_after_pack && self.written >= self.settled_after
    }

    /// Notes that slots have other contents than a checkpoint that is being made or written.
    pub(crate) fn renew(&mut self, slots: &SlotSet) {
        let making = self.making.as_mut().map(|making| &mut making.complete);
        let sealed = self.sealed.as_mut().map(|sealed| &mut sealed.complete);
        for complete in making.into_iter().chain(sealed) {
            *complete = complete.with(slots, |complete, renewed| complete & !renewed);
        }
    }

    /// Begins to make a checkpoint of these slots of the index. No pack is being written.
    pub(crate) fn begin_checkpoint(&mut self, index: &Index, complete: SlotSet) {
        self.wants_checkpoint = false;
        let packs: Vec<PackRow> = index.packs().filter(|state| !state.is_gone).map(|state| state.pack).collect();
        let writer = CheckpointWriter::new(&packs);
        self.making = Some(CheckpointDraft { writer, packs, after: None, complete });
    }

    /// Continues to make the checkpoint. Returns true if there was anything to do.
    pub(crate) fn step(&mut self, index: &Index, stream: Stream) -> bool {
        let Some(making) = &mut self.making else { return false };
        let CheckpointDraft { writer, packs, after, complete } = making;
        *after = index.walk(*after, STEP_ENTRIES, &mut |entry, state| {
            // Both are in the order of shards and numbers.
            let row = packs.binary_search_by_key(&(state.pack.shard, state.pack.number), |row| (row.shard, row.number));
            if let (Ok(row), true) = (row, complete.has(entry.digest.slot())) {
                writer.push(entry, kvplane_proto::narrowing::length_u32(row));
            }
        });
        if after.is_some() {
            return true;
        }
        if let Some(CheckpointDraft { writer, complete, .. }) = self.making.take() {
            self.last_checkpoint += 1;
            let number = self.last_checkpoint;
            let bytes = Arc::new(writer.seal(stream, number));
            self.sealed = Some(SealedCheckpoint { number, bytes, after: self.written, complete });
        }
        true
    }

    /// Notes that the store has the checkpoint.
    pub(crate) fn checkpoint_written(&mut self, slots: &mut SlotStates) {
        let Some(sealed) = self.sealed.take() else { return };
        self.checkpoint = (sealed.number, sealed.after);
        slots.checkpointed = sealed.complete;
        self.wants_manifest = true;
    }

    /// Returns the manifest to be written now, with its number. Each attempt has a number of its own: one that was
    /// given up may still reach the store after a later one.
    pub(crate) fn begin_manifest(&mut self, slots: &SlotStates, epoch: Epoch) -> (u64, Manifest) {
        let all_released = slots.all_released();
        (self.wants_manifest, self.is_after_pack) = (false, false);
        self.last_manifest += 1;
        self.naming = Some(self.checkpoint);
        let manifest = Manifest {
            epoch,
            checkpoint: self.checkpoint.0,
            after: self.checkpoint.1,
            upto: self.written,
            owned: slots.valid.with(&slots.checkpointed, |valid, there| valid & there),
            released: all_released.with(&slots.checkpointed, |released, there| released & there),
            releasing: all_released.with(&slots.checkpointed, |released, there| released & !there),
        };
        (self.last_manifest, manifest)
    }

    /// Notes that the store has the manifest: the ones before are deleted, with the checkpoint that they name.
    pub(crate) fn manifest_written(&mut self, stream: Stream) {
        let Some(naming) = self.naming.take() else { return };
        // One that was begun before they were forgotten is followed by another.
        if !self.wants_manifest {
            self.forgotten = None;
        }
        let before = core::mem::replace(&mut self.named, naming);
        // Also those that were given up, which may be there.
        let given_up = self.named_by.max(1)..self.last_manifest;
        self.deletes.extend(given_up.map(|number| stream.manifest(number)));
        self.named_by = self.last_manifest;
        if before.0 != 0 && before.0 != self.named.0 {
            self.deletes.push_back(stream.checkpoint(before.0));
        }
    }
}
