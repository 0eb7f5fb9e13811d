//! Frames that arrived before a member can use them.

use kvplane_group::GroupRank;

use crate::frame::{FrameKind, Head};
use crate::work::StashId;

/// Most bytes of payloads that a member's host keeps.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
/// Most frames that are kept. A peer sends only few before this member follows.
const MAX_FRAMES: usize = 4096;
/// Most of them of one peer.
const MAX_OF_PEER: usize = 512;

/// A frame whose payload the host keeps, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StashedFrame {
    pub(crate) from: GroupRank,
    pub(crate) head: Head,
    pub(crate) bytes: u64,
    /// `None` if the frame has no payload.
    pub(crate) payload: Option<StashId>,
}

impl StashedFrame {
    /// True if a frame that arrived later belongs to the same operation of the same peer, and does not end it.
    pub(crate) fn is_before(&self, from: GroupRank, head: &Head) -> bool {
        let is_end = matches!(head.kind, FrameKind::Abort { .. });
        self.from == from && self.head.epoch == head.epoch && self.head.operation == head.operation && !is_end
    }
}

/// Frames in the order of their arrival.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stash {
    frames: Vec<StashedFrame>,
    bytes: u64,
    next: u64,
}

impl Stash {
    /// Keeps a frame. Fails when there are too many.
    pub(crate) fn keep(&mut self, from: GroupRank, head: Head, bytes: u64) -> Option<Option<StashId>> {
        let of_peer = self.frames.iter().filter(|frame| frame.from == from).count();
        if of_peer >= MAX_OF_PEER || self.frames.len() >= MAX_FRAMES || self.bytes + bytes > MAX_BYTES {
            return None;
        }
        let payload = (bytes > 0).then(|| self.name());
        self.bytes += bytes;
        self.frames.push(StashedFrame { from, head, bytes, payload });
        Some(payload)
    }

    /// Takes all frames, in order.
    pub(crate) fn take(&mut self) -> Vec<StashedFrame> {
        self.bytes = 0;
        std::mem::take(&mut self.frames)
    }

    /// Puts frames back, before those that arrived meanwhile.
    pub(crate) fn put_back(&mut self, mut frames: Vec<StashedFrame>) {
        self.bytes += frames.iter().map(|frame| frame.bytes).sum::<u64>();
        frames.append(&mut self.frames);
        self.frames = frames;
    }

    /// True if no frame is kept.
    pub(crate) const fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// True if a frame of the peer's same operation is kept, which has to be used before.
    pub(crate) fn has_before(&self, from: GroupRank, head: &Head) -> bool {
        self.frames.iter().any(|frame| frame.is_before(from, head))
    }

    /// Names a payload that is kept without its frame.
    pub(crate) fn name(&mut self) -> StashId {
        self.next += 1;
        StashId(self.next - 1)
    }
}
