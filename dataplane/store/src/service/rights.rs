//! Who this shard is, and who may ask it for what: owners answer for their slots, and for what left to those who have
//! it now.

use kvplane_proto::ids::Version;
use kvplane_proto::{Digest, Status};

use super::Service;
use super::context::RequestContext;

impl Service {
    /// A check that this shard answers for an object, and that it is not another tenant's than the peer's.
    pub(super) fn may_ask(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        self.answers_for(context, digest)?;
        if self.is_foreign(context, digest) { Err(Status::Unauthorized) } else { Ok(()) }
    }

    /// A check that this shard answers for an object. A peer with a newer map knows more than we do. The new owner of
    /// what we had may ask for that, and nobody else any more.
    pub(super) fn answers_for(&mut self, context: &RequestContext, digest: Digest) -> Result<(), Status> {
        let knows = self.store.is_some() && context.epoch <= self.ownership.epoch();
        let status = match context.fetches {
            _ if !knows => Status::WrongOwner,
            false if self.ownership.owns(digest) || self.may_read_copy(context, digest).is_some() => return Ok(()),
            false => Status::WrongOwner,
            true if self.moves.exports.has(digest) => return Ok(()),
            true => Status::Stale,
        };
        self.counters.wrong_owner += u64::from(status == Status::WrongOwner);
        Err(status)
    }

    /// Why none of these may be removed now, if so: a new owner asks by too old a map, or there may be another's object
    /// among them that is not known yet; that is neither removed nor said to be.
    pub(super) fn refuses_removal(&self, context: &RequestContext, digests: &[Digest]) -> Option<Status> {
        let exports = &self.moves.exports;
        let is_late = |digest: &Digest| exports.has(*digest) && !exports.may_remove(*digest, context.epoch);
        if context.fetches && digests.iter().any(is_late) {
            return Some(Status::WrongOwner);
        }
        let unknown = |digest: &Digest| {
            let there = self.store.as_ref().is_some_and(|store| store.exists(*digest));
            let may_be = there || self.on_ssd(*digest).is_some() || self.is_coming(*digest);
            self.is_for_peer(context, *digest) && self.is_hidden(context, *digest) && may_be
        };
        digests.iter().any(unknown).then_some(Status::Busy)
    }

    /// True where the peer may learn of an object and remove it: of a new owner, only what is kept for it. The slot may
    /// be ours again.
    pub(super) fn is_for_peer(&self, context: &RequestContext, digest: Digest) -> bool {
        !context.fetches || self.moves.exports.has(digest)
    }

    /// True where a removal names no version, or the version of the object in memory.
    pub(super) fn has_version(&self, digest: Digest, version: Option<Version>) -> bool {
        let here = || Some(self.store.as_ref()?.peek(digest)?.version);
        version.is_none() || here() == version
    }

    /// Whether an object is still to be kept: as the owner of its slot, or for the next owner.
    pub(super) fn keeps(&self, digest: Digest) -> bool {
        self.ownership.owns(digest) || self.moves.exports.has(digest)
    }
}
