//! Who may ask for what: owners answer for their slots, and for what left to those who have it now.

use kvplane_proto::{Digest, Status};

use super::{Service, owns};

impl Service {
    /// Whether an object may be asked for here. An asker with a newer map knows more than we do. The new owner of what
    /// we had may ask for that, and nobody else any more.
    pub(super) fn may_ask(&mut self, digest: Digest) -> Result<(), Status> {
        let knows = self.store.is_some() && self.asker_epoch <= self.epoch;
        let status = match self.asker_fetches {
            _ if !knows => Status::WrongOwner,
            false if owns(&self.owned, digest) || self.may_read_copy(digest).is_some() => return self.may_use(digest),
            false => Status::WrongOwner,
            true if self.moves.exports.has(digest) => return Ok(()),
            true => Status::Stale,
        };
        self.counters.wrong_owner += u64::from(status == Status::WrongOwner);
        Err(status)
    }

    /// Whether an object is still to be kept: as the owner of its slot, or for the next owner.
    pub(super) fn keeps(&self, digest: Digest) -> bool {
        owns(&self.owned, digest) || self.moves.exports.has(digest)
    }
}
