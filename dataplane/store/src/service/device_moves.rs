//! Device pool of a [`LocalStore`]: which objects are to move, which are to come back, and the moves for the host.

use kvplane_proto::{Digest, Status};

use super::device_pool::{MoveId, MoveOutcome};
use super::local::LocalStore;
use super::shard::stream_read::Reader;
use super::types::Hold;
use crate::store::PoolMove;

/// Returns true if an access of an object would find it hot, and not in the device pool yet.
pub(super) fn is_to_be_promoted(local: &LocalStore, digest: Digest) -> bool {
    local.device.is_some() && local.shard.store.is_hot(digest)
}

/// Returns true if an object is in the device pool.
pub(super) fn is_on_device(local: &LocalStore, digest: Digest) -> bool {
    local.device.is_some() && local.shard.peek(digest).is_some_and(|object| object.is_on_device)
}

/// Requests that an object of the device pool be moved back to memory, for the get that waits for it if there is one.
///
/// # Errors
/// `Busy` if too many gets wait.
pub(super) fn recall(local: &mut LocalStore, digest: Digest, reader: Option<Reader>) -> Result<(), Status> {
    match &mut local.device {
        Some(device) => device.recall(&mut local.shard, digest, reader),
        None => Err(Status::NotFound),
    }
}

/// Moves between the pool and the device pool, for the host that copies the bytes. There are none without a device
/// pool.
pub struct DeviceMoves<'a> {
    pub(super) local: &'a mut LocalStore,
}

impl DeviceMoves<'_> {
    /// Returns the next move, whose bytes and tail the host copies; polled until `None` in every round. The end of the
    /// copies goes to [`Self::finish`].
    pub fn poll(&mut self, now_ns: u64) -> Option<(MoveId, PoolMove)> {
        let LocalStore { shard, device, .. } = &mut *self.local;
        let device = device.as_mut()?;
        shard.now_ns = shard.now_ns.max(now_ns);
        device.poll(shard)
    }

    /// Takes the outcome of the copies of a move: none of them is in flight any more, unless the device is lost.
    ///
    /// # Panics
    /// If there is no such move.
    pub fn finish(&mut self, id: MoveId, outcome: MoveOutcome, now_ns: u64) {
        let LocalStore { shard, device, .. } = &mut *self.local;
        shard.now_ns = shard.now_ns.max(now_ns);
        device.as_mut().expect("a service with a device pool").moved(shard, id, outcome);
    }

    /// Gives the device pool up, whose device is lost: its objects are gone.
    pub fn lose(&mut self) {
        let LocalStore { shard, device, .. } = &mut *self.local;
        if let Some(device) = device {
            device.lose(shard);
        }
    }

    /// Gives the device pool up, because the bytes of a get could not be read from it. Returns the status that answers
    /// the get: its object is gone with the device, or it has moved back to memory meanwhile, or was put anew, and is
    /// found when the get is repeated.
    pub fn lose_read(&mut self, hold: Hold) -> Status {
        self.lose();
        let store = &self.local.shard.store;
        let read = if let Hold::Pin(pin) = hold { store.pinned(pin) } else { None };
        if read.is_some_and(|entry| store.exists(entry.digest())) { Status::Busy } else { Status::NotFound }
    }
}
