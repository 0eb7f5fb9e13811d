//! Shared tier of a [`LocalStore`]: its objects as requests see them, and its operations for the host.

use kvplane_proto::ids::Incarnation;
use kvplane_proto::{Digest, Status};
use kvplane_shared::{
    OpId, Operation, Outcome, SharedConfig, SharedEvent, SharedStats, SharedTier, SharedView, StoreError,
};

use super::local::LocalStore;
use super::shard::stream_read::Reader;
use super::shard::timing::About;
use super::sharing::Sharing;
use super::types::{CommittedObject, PoolMemory};

/// Returns an object of the shared tier, if it may be read.
pub(super) fn in_shared_tier(local: &LocalStore, digest: Digest) -> Option<SharedView> {
    local.sharing.as_ref()?.locate(digest)
}

/// Returns true if the SSD or the shared tier has an object.
pub(super) fn is_below(local: &LocalStore, digest: Digest) -> bool {
    local.on_ssd(digest).is_some() || in_shared_tier(local, digest).is_some()
}

/// Begins to read an object from the shared tier, or joins a read in flight.
pub(super) fn read_shared(local: &mut LocalStore, view: &SharedView, reader: Reader) -> Result<(), Status> {
    let Some(sharing) = &mut local.sharing else { return Err(Status::NotFound) };
    sharing.read(&mut local.shard, view, reader)
}

/// Notes that an object was put: a former owner's does not count.
pub(super) fn note_change(local: &mut LocalStore, digest: Digest) {
    if let Some(sharing) = &mut local.sharing {
        sharing.note_change(digest);
    }
}

/// Notes that an object was imported with this checksum. Returns true if the shared tier has the same bytes of it: they
/// are not replaced.
pub(super) fn note_import(local: &mut LocalStore, made: &CommittedObject, checksum: u64) -> bool {
    local.sharing.as_mut().is_some_and(|sharing| sharing.note_import(made, checksum))
}

/// Forgets what the shared tier has, before objects are removed that a list names. Returns false until that is durable.
pub(super) fn forget_shared(local: &mut LocalStore) -> bool {
    let now_ns = local.shard.now_ns;
    local.sharing.as_mut().is_none_or(|sharing| sharing.forget(now_ns))
}

/// Shared tier of a service, for the host that carries its operations out. Without one, there is nothing to do.
pub struct SharedObjects<'a> {
    pub(super) local: &'a mut LocalStore,
}

impl SharedObjects<'_> {
    /// Attaches a shared tier to the shard, in a cluster whose name has this digest; `last` is the incarnation of the
    /// shard before the present one.
    ///
    /// # Panics
    /// If the store has no pool: a mistake of the host.
    pub fn attach(&mut self, config: SharedConfig, cluster: u128, last: Option<Incarnation>) {
        assert!(self.local.shard.store.config().has_pool(), "a shared tier belongs to a store");
        let tier = SharedTier::new(config, cluster, self.local.shard.ownership.key());
        self.local.sharing = Some(Box::new(Sharing::new(tier, last)));
    }

    /// Lets the tier work, answers the gets whose reads are done, and passes operations on the store to `start`.
    /// Returns true if there was any progress.
    pub fn drive(&mut self, now_ns: u64, memory: &mut dyn PoolMemory, start: &mut dyn FnMut(OpId, Operation)) -> bool {
        let LocalStore { shard, tiering, sharing, .. } = &mut *self.local;
        let Some(sharing) = sharing else { return false };
        shard.now_ns = shard.now_ns.max(now_ns);
        let ssd = tiering.as_ref().map(|tiering| &tiering.ssd);
        let (done, progress) = sharing.drive(shard, ssd, memory, start);
        for (digest, reader, timing) in done {
            let about = About { digest: Some(digest), bytes: 0 };
            let shard = &mut self.local.shard;
            shard.answers.outputs.waited(timing, about, timing.arrived_ns, shard.now_ns);
            self.local.serve(digest, reader);
        }
        progress
    }

    /// Takes the result of an operation on the store.
    pub fn complete(&mut self, now_ns: u64, id: OpId, result: Result<Outcome, StoreError>) {
        if let Some(sharing) = &mut self.local.sharing {
            sharing.complete(now_ns, id, result);
        }
    }

    /// Writes what the next owner needs to find what the store has, while the shard goes on. Returns true once it is
    /// written, or the store fails.
    pub fn settle(&mut self, now_ns: u64) -> bool {
        self.local.sharing.as_mut().is_none_or(|sharing| sharing.settle(now_ns))
    }

    /// Writes what waits to be uploaded, as the shard is about to stop. Returns true once nothing is left, or the store
    /// fails.
    pub fn close(&mut self, now_ns: u64) -> bool {
        self.local.sharing.as_mut().is_none_or(|sharing| sharing.close(now_ns))
    }

    /// Returns the next event for the operator.
    pub fn poll_notice(&mut self) -> Option<SharedEvent> {
        self.local.sharing.as_mut()?.poll_notice()
    }

    /// Returns the counters, if there is a shared tier.
    #[must_use]
    pub fn stats(&self) -> Option<SharedStats> {
        Some(self.local.sharing.as_ref()?.stats())
    }
}
