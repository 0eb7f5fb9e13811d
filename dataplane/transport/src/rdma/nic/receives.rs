//! Shared receive queue of a device: receives are granted to peers, consumed by messages, and reposted.

use kvplane_sys::verbs::{Completion, PostError, ProtectionDomain, RetiredRequest, SharedReceiveQueue, VerbsError};

use super::arena::Arena;

/// Receives of one device.
pub(in crate::rdma) struct Receives {
    queue: SharedReceiveQueue,
    total: u32,
    /// Receives to repost with the next flush.
    reposts: Vec<u32>,
    /// Receives granted to peers.
    granted: u32,
}

impl Receives {
    /// Creates the queue with `total` receives, all of which are to be posted.
    pub(super) fn new(domain: &ProtectionDomain, total: u32) -> Result<Self, VerbsError> {
        let queue = SharedReceiveQueue::new(domain, total, 1, total)?;
        Ok(Self { queue, total, reposts: (0..total).collect(), granted: 0 })
    }

    /// Returns the queue that the device's queue pairs share.
    pub(in crate::rdma) const fn queue(&self) -> &SharedReceiveQueue {
        &self.queue
    }

    /// Returns true if this many receives can be granted to another peer.
    pub(in crate::rdma) fn can_grant(&self, grant: u16) -> bool {
        self.granted + u32::from(grant) <= self.total
    }

    /// Grants receives to a peer.
    pub(in crate::rdma) fn grant(&mut self, grant: u16) {
        self.granted += u32::from(grant);
    }

    /// Revokes the grant of a peer that is gone.
    pub(in crate::rdma) fn revoke(&mut self, grant: u16) {
        self.granted -= u32::from(grant);
    }

    /// Retires the receive that a message consumed.
    pub(in crate::rdma) fn retire(&mut self, completion: &Completion<'_>) -> Option<RetiredRequest> {
        self.queue.retire(completion)
    }

    /// Queues a receive for reposting; its contents are not needed any more.
    pub(in crate::rdma) fn repost(&mut self, receive: u32) {
        self.reposts.push(receive);
    }

    /// Posts all free receives with one call. Receives that the queue refuses are retried; an error means that the
    /// device has failed.
    pub(super) fn post(&mut self, arena: &Arena) -> Result<(), PostError> {
        if self.reposts.is_empty() && self.queue.unsent() == 0 {
            return Ok(());
        }
        while let Some(receive) = self.reposts.pop() {
            let Some(piece) = arena.receive_piece(receive) else { continue };
            if self.queue.push(receive.into(), &[piece]).is_err() {
                self.reposts.push(receive);
                break;
            }
        }
        self.queue.flush().map(drop)
    }
}
