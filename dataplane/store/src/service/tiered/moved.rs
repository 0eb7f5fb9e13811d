//! Objects of others that are our own now: the SSD has them before their former owner gives them up.
//!
//! The former owner's record may be the only one that outlives a restart, or an eviction: whatever the policy, what
//! moves here is written at once, and is in use until it is. So are copies that an owner without a successor leaves
//! here.

use kvplane_proto::Digest;
use kvplane_proto::message::PutAck;

use super::super::Service;
use super::Tiering;

/// Progress of an object that is to be on the SSD before its former owner drops it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum MoveProgress {
    /// It is there, or the SSD, if there is one, does not take it.
    Kept,
    /// It is being written.
    Waits,
    /// There was no room for it among what waits.
    Refused,
}

impl Tiering {
    /// These copies are objects of our own from now on.
    pub(in crate::service) fn inherit(&mut self, copies: Vec<Digest>) {
        self.inherited.extend(copies);
    }
}

impl Service {
    /// True where there is an SSD that takes an object of so many bytes.
    pub(in crate::service) fn tier_fits(&self, bytes: u64) -> bool {
        self.tiered.as_ref().is_some_and(|tiered| tiered.fits(bytes))
    }

    /// Copies that became objects of our own go to the SSD, as far as there is room among what waits. Those that memory
    /// gives up first are lost with their former owner.
    pub(super) fn write_inherited(&mut self) {
        while let Some(digest) = self.tiered.as_ref().and_then(|tiered| tiered.inherited.front().copied()) {
            let object = self.store.as_ref().and_then(|store| store.peek(digest));
            let bytes = object.map(|object| object.extent.bytes);
            let (owned, is_heir) = (self.ownership.owns(digest), self.copies.inherited(digest.slot()));
            let bytes = bytes.filter(|_| owned || is_heir);
            let Some(tiered) = &mut self.tiered else { return };
            if bytes.is_some_and(|bytes| tiered.fits(bytes) && !tiered.has_room(bytes)) {
                tiered.pressed = true;
                return;
            }
            if bytes.is_some() && !owned {
                // That the slot is ours is not written down yet.
                return;
            }
            tiered.inherited.pop_front();
            if bytes.is_some() {
                self.write_moved(digest);
            }
        }
    }

    /// An object that is in memory has moved here, or is the copy of an owner that is gone: the SSD is to have it as
    /// soon as it may be, whatever the policy.
    pub(in crate::service) fn write_moved(&mut self, digest: Digest) -> MoveProgress {
        let Some(object) = self.store.as_ref().and_then(|store| store.peek(digest)) else { return MoveProgress::Kept };
        let (bytes, version) = (object.extent.bytes, object.version);
        let Some(tiered) = self.tiered.as_mut().filter(|tiered| tiered.fits(bytes)) else { return MoveProgress::Kept };
        if tiered.is_writing(digest) {
            // One that was to wait for a while does not.
            tiered.pressed = true;
            return MoveProgress::Waits;
        }
        if tiered.locate(digest).is_some_and(|view| view.version >= version) {
            return MoveProgress::Kept;
        }
        self.hold_for_write(digest, None, Some(PutAck::Buffered));
        let writes = self.tiered.as_ref().is_some_and(|tiered| tiered.is_writing(digest));
        if writes { MoveProgress::Waits } else { MoveProgress::Refused }
    }
}
