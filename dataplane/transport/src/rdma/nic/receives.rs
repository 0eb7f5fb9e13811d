//! The receives of a device, which its connections share: promised to peers, taken by messages, posted again.

use kvplane_sys::verbs::{Completion, ProtectionDomain, RetiredRequest, SharedReceiveQueue, VerbsError};

use super::arena::Arena;

/// The receives of one device.
pub(in crate::rdma) struct Receives {
    queue: SharedReceiveQueue,
    total: u32,
    /// Those that are to be posted again with the next flush.
    reposts: Vec<u32>,
    /// Those that are promised to peers.
    granted: u32,
}

impl Receives {
    /// So many receives; all are to be posted.
    pub(super) fn new(domain: &ProtectionDomain, total: u32) -> Result<Self, VerbsError> {
        let queue = SharedReceiveQueue::new(domain, total, 1, total)?;
        Ok(Self { queue, total, reposts: (0..total).collect(), granted: 0 })
    }

    /// The queue that queue pairs share.
    pub(in crate::rdma) const fn queue(&self) -> &SharedReceiveQueue {
        &self.queue
    }

    /// Whether so many receives can be promised to another peer.
    pub(in crate::rdma) fn can_grant(&self, grant: u16) -> bool {
        self.granted + u32::from(grant) <= self.total
    }

    /// Promises so many to a peer.
    pub(in crate::rdma) fn grant(&mut self, grant: u16) {
        self.granted += u32::from(grant);
    }

    /// The peer that so many were promised to is gone.
    pub(in crate::rdma) fn revoke(&mut self, grant: u16) {
        self.granted -= u32::from(grant);
    }

    /// A message has come into one.
    pub(in crate::rdma) fn retire(&mut self, completion: &Completion<'_>) -> Option<RetiredRequest> {
        self.queue.retire(completion)
    }

    /// A receive's content is not needed any more.
    pub(in crate::rdma) fn repost(&mut self, receive: u32) {
        self.reposts.push(receive);
    }

    /// Posts all that are free, with one call. What the device refuses is tried again; an error says that it is broken.
    pub(super) fn post(&mut self, arena: &Arena) -> Result<(), String> {
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
        self.queue.flush().map(drop).map_err(|error| error.to_string())
    }
}
