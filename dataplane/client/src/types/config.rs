//! Settings of a client.

use kvplane_proto::limits::Limits;

use super::path::{Path, Transport, Via};

/// Settings of a client.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the cluster; peers of another cluster refuse the connection.
    pub cluster: String,
    /// Random id of this process.
    pub client: u64,
    /// Boot id of this host; a peer with an equal one can be reached over shared memory.
    pub host: String,
    /// Stream lanes to each shard.
    pub lanes: u16,
    /// Enables shared memory to peers on the same host.
    pub shared: bool,
    /// Enables copies by the kernel between the processes (CMA) for peers on the same host.
    pub cma: bool,
    /// Enables TCP streams.
    pub stream: bool,
    /// Bandwidth of each RDMA device of this host in bytes per second, by the host's numbers; 0 if unknown. If empty,
    /// RDMA is disabled.
    pub rdma: Vec<u64>,
    /// Size of slices that ranges of segments are cut into, at least [`kvplane_proto::Limits::SLICE_BYTES_LEAST`].
    pub slice_bytes: u64,
    /// Window of a lane: most payload bytes that are requested, sent, pinned or reserved on it and not completed. A
    /// slice that is larger goes alone.
    pub lane_window_bytes: u64,
    /// Most time, beyond its latency, that a rail may take for its posted work: more keeps the rail busy, less lets
    /// urgent slices overtake sooner.
    pub post_ahead_ns: u64,
    /// Slices up to this size do not wait behind larger ones.
    pub small_bytes: u64,
    /// Alignment: slices of a range end where the target's offset is a multiple of this, if possible.
    pub align_bytes: u64,
    /// Merges requests of a batch that are adjacent on both sides into shared slices.
    pub merge: bool,
    /// Threshold above which a slice is recorded as slow, with a breakdown of its time.
    pub slow_ns: u64,
    /// Reads and writes of segments up to this size share frames of up to `slice_bytes` (gathering); 0 disables
    /// gathering.
    pub gather_range_bytes: u64,
    /// Adds checksums to payloads of segment reads and writes; payloads of objects always have one.
    pub checksum_segments: bool,
    /// Makes [`crate::Client::poll_finished`] report the end of each task, besides that of its batch.
    pub report_tasks: bool,
    /// Makes the client an importer, which only pulls objects of migrating slots from former owners: see
    /// [`crate::Client::set_sources`].
    pub fetches: bool,
    /// In-flight requests on one lane to a peer of a foreign protocol, at least 1.
    pub foreign_depth: u32,
    /// Upper bound of the hedging delay: a get without a reply from its owner for so long is sent to the replica owner
    /// too. The delay is the 99th percentile of the owner's gets, clamped to between half of this and this. 0 disables
    /// hedging.
    pub hedge_ns: u64,
    /// Spreads gets of whole objects over the owner and the replica owner.
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
    /// Returns true if a slice of so many bytes counts as small.
    pub(crate) const fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.small_bytes
    }

    /// Returns the most bytes of a slice of a range.
    pub(crate) fn most_slice_bytes(&self) -> u64 {
        self.slice_bytes.max(Limits::SLICE_BYTES_LEAST)
    }

    /// Returns the way of copying that is expected for peers on this host.
    pub(crate) const fn usual_via(&self) -> Via {
        if self.shared { Via::Map } else { Via::Cma }
    }

    /// Returns the transport that is expected for a rail of this path.
    pub(crate) const fn usual_transport(&self, path: Path) -> Transport {
        Transport::of(path, self.usual_via())
    }
}
