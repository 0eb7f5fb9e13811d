//! Settings of a client.

use kvplane_proto::limits::Limits;

use super::path::{Path, Transport, Via};

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct Config {
    /// Cluster to belong to; peers of another refuse.
    pub cluster: String,
    /// Random id of this process.
    pub client: u64,
    /// Boot id of this host; a peer with an equal one may be reached by shared memory.
    pub host: String,
    /// Stream lanes to each shard.
    pub lanes: u16,
    /// Shared memory is used where the peer is on the same host.
    pub shared: bool,
    /// The kernel copies between the processes (CMA) where the peer is on the same host.
    pub cma: bool,
    /// TCP streams are used.
    pub stream: bool,
    /// Bytes per second of each RDMA device of this host, by the host's numbers; 0 where that is not known. None: RDMA
    /// is not used.
    pub rdma: Vec<u64>,
    /// Ranges of segments are cut into slices of this many bytes, at least
    /// [`kvplane_proto::Limits::SLICE_BYTES_LEAST`].
    pub slice_bytes: u64,
    /// Payload bytes that one lane may have asked for, sent, pinned or reserved without being done with them. A slice
    /// that is larger goes alone.
    pub lane_window_bytes: u64,
    /// Work that a rail may have posted beyond its latency: more keeps it busy, less lets the urgent overtake sooner.
    pub post_ahead_ns: u64,
    /// Slices up to this size do not wait for larger ones.
    pub small_bytes: u64,
    /// Slices of a range end where the target's offset is a multiple of this, if they can.
    pub align_bytes: u64,
    /// Requests of a batch that touch each other on both sides share slices.
    pub merge: bool,
    /// Slices that take longer are remembered with where they spent their time.
    pub slow_ns: u64,
    /// Reads and writes of segments of at most so many bytes share frames of up to `slice_bytes`; 0: each has its own.
    pub gather_range_bytes: u64,
    /// Payloads of segment reads and writes carry a checksum; objects always do.
    pub checksum_segments: bool,
    /// [`crate::Client::poll_finished`] reports the end of each task, and not only that of its batch.
    pub report_tasks: bool,
    /// The client only fetches, from former owners, what was in slots that moved: see [`crate::Client::set_sources`].
    pub fetches: bool,
    /// Requests that one lane to a peer of a foreign protocol may have under way, at least 1.
    pub foreign_depth: u32,
    /// After so long without a sign of its owner, a get leaves its request for the other owner: as long as the slowest
    /// hundredth of the owner's gets takes, at least half of this and at most this. 0: only when it must.
    pub hedge_ns: u64,
    /// Gets of whole objects that two owners have are spread over both.
    pub spread: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cluster: String::new(),
            client: 0,
            host: String::new(),
            lanes: 2,
            shared: true,
            cma: true,
            stream: true,
            rdma: Vec::new(),
            slice_bytes: 256 << 10,
            lane_window_bytes: 64 << 20,
            post_ahead_ns: 2_000_000,
            small_bytes: 64 << 10,
            align_bytes: 4_096,
            merge: true,
            slow_ns: 100_000_000,
            gather_range_bytes: 32 << 10,
            checksum_segments: true,
            report_tasks: false,
            fetches: false,
            foreign_depth: 1,
            hedge_ns: 0,
            spread: true,
        }
    }
}

impl Config {
    /// Whether a slice of so many bytes counts as small.
    pub(crate) const fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.small_bytes
    }

    /// Ranges are cut into slices of at most so many bytes.
    pub(crate) fn most_slice_bytes(&self) -> u64 {
        self.slice_bytes.max(Limits::SLICE_BYTES_LEAST)
    }

    /// How peers on this host are expected to be copied from.
    pub(crate) const fn usual_via(&self) -> Via {
        if self.shared { Via::Map } else { Via::Cma }
    }

    /// What a rail of this path is expected to use.
    pub(crate) const fn usual_transport(&self, path: Path) -> Transport {
        Transport::of(path, self.usual_via())
    }
}
