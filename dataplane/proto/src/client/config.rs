//! Settings of a client.

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
    /// Whether shared memory is used where the peer is on the same host.
    pub shared: bool,
    /// Whether the kernel is asked to copy between the processes where the peer is on the same host.
    pub cma: bool,
    /// Whether streams are used.
    pub stream: bool,
    /// Bytes per second of each RDMA device of this host, by the host's numbers; 0 where that is not known. None: RDMA
    /// is not used.
    pub rdma: Vec<u64>,
    /// Ranges of segments are cut into slices of this many bytes, at least [`crate::Limits::SLICE_BYTES_LEAST`].
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
    /// Whether requests of a batch that touch each other on both sides share slices.
    pub merge: bool,
    /// Slices that take longer are remembered with where they spent their time.
    pub slow_ns: u64,
    /// Reads and writes of segments of at most so many bytes share frames of up to `slice_bytes`; 0: each has its own.
    pub gather_range_bytes: u64,
    /// Whether payloads of segment reads and writes carry a checksum; objects always do.
    pub checksum_segments: bool,
    /// Whether the end of each task is told by [`super::Client::poll_finished`], and not only that of its batch.
    pub report_tasks: bool,
    /// Whether it only asks former owners for what was in slots that moved: see [`super::Client::set_sources`].
    pub fetches: bool,
    /// Requests that one lane to a peer of a foreign protocol may have under way, at least 1.
    pub foreign_depth: u32,
    /// After so long without a sign of its owner, a get leaves its request for the other owner: as long as the slowest
    /// hundredth of the owner's gets takes, at least half of this and at most this. 0: only when it must.
    pub hedge_ns: u64,
    /// Whether gets of whole objects that two owners have are spread over both.
    pub spread: bool,
    /// How long requests for objects wait for another map while the one in use is of epoch 0: a control plane that lost
    /// its state has none until it has adopted the one of its members. 0: they fail at once, as they do after that.
    pub first_map_ns: u64,
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
            first_map_ns: 0,
        }
    }
}
