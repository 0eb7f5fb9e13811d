//! Counters of a mesh.

/// Frames and bytes of payloads in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames.
    pub frames: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
}

impl Traffic {
    pub(crate) const fn count(&mut self, bytes: usize) {
        self.frames += 1;
        self.bytes += bytes as u64;
    }
}

/// Traffic of one kind of lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTraffic {
    /// Frames sent; over TCP and RDMA, queued to be sent.
    pub sent: Traffic,
    /// Frames received.
    pub received: Traffic,
}

/// Counters of a mesh since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeshCounters {
    /// Traffic over shared memory.
    pub shared_memory: LaneTraffic,
    /// Traffic over TCP.
    pub tcp: LaneTraffic,
    /// Traffic over RDMA.
    pub rdma: LaneTraffic,
    /// Sends that found no room ([`SendOutcome::Full`](crate::SendOutcome::Full)).
    pub stalls: u64,
    /// Channels that came up.
    pub ups: u64,
    /// Channels that ended, other than by a change of the peers.
    pub downs: u64,
    /// Peers' connections that were refused: of another world, another incarnation, or with other settings.
    pub refused: u64,
    /// Waits that yielded the core.
    pub yields: u64,
    /// Waits that slept.
    pub parks: u64,
}
