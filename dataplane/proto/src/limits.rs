//! Limits of the data path, all in one place, with compile-time assertions on their relations.
//!
//! A peer that exceeds a limit gets an error reply or is disconnected; no limit is discovered by running out of memory.

/// Limits of the wire protocol and of one connection. They are constants of the protocol version, so both sides know
/// them.
pub struct Limits;

impl Limits {
    /// Items in one batched request.
    pub const ITEMS_PER_FRAME: usize = 4_096;
    /// Items in one batched request of digests that is answered without payloads: `Exists`, `Size`, `Remove`,
    /// `RemoveCopy`.
    pub const QUESTIONS_PER_FRAME: usize = 32_768;
    /// Ranges of one gathered read or write, in as many runs or fewer.
    pub const RANGES_PER_FRAME: usize = 4_096;
    /// Total bytes of the ranges of one gathered read or write.
    pub const GATHER_BYTES: u64 = 4 << 20;
    /// Lists that one shard serves concurrently.
    pub const LISTS: usize = 64;
    /// Bytes of the body of one frame.
    pub const BODY_BYTES: usize = 512 * 1024;
    /// Bytes of the payload of one frame.
    pub const PAYLOAD_BYTES: u64 = 4 << 30;
    /// Largest payload that travels inside its frame over shared memory, in bytes: two more copies cost less than a
    /// second round trip.
    pub const PAYLOAD_ALONG_BYTES: u64 = 8_192;
    /// Bytes of the name of a cluster, a segment or a tenant.
    pub const NAME_BYTES: usize = 255;
    /// Bytes of a key.
    pub const KEY_BYTES: usize = 4_096;
    /// Longest soft pin: a day, in milliseconds.
    pub const SOFT_PIN_MS: u32 = 86_400_000;
    /// Regions of one segment.
    pub const REGIONS_PER_SEGMENT: usize = 1_024;
    /// Segments that one shard serves.
    pub const SEGMENTS: usize = 4_096;
    /// In-flight requests on one connection.
    pub const REQUESTS_PER_CONNECTION: usize = 8_192;
    /// Replies, or memory ranges of replies, queued on one connection before the shard stops reading its requests
    /// (backpressure).
    pub const REPLIES_QUEUED: usize = 8_192;
    /// Connections of one shard.
    pub const CONNECTIONS: usize = 8_192;
    /// Requests of one client batch.
    pub const BATCH_REQUESTS: usize = 1 << 20;
    /// In-flight slices of one client.
    pub const OPEN_SLICES: usize = 1 << 22;
    /// Least bytes of a slice of a large range, except for its last slice.
    pub const SLICE_BYTES_LEAST: u64 = 4_096;
    /// Time that a reservation may stay uncommitted, in nanoseconds.
    pub const RESERVATION_NS: u64 = 30_000_000_000;
    /// Duration of a replica lease, in nanoseconds, counted from when the client sent its request: until then the
    /// client may read the object from the replica owner.
    pub const COPY_LEASE_NS: u64 = 250_000_000;
    /// Time after the last lease that an owner granted during which it assumes that clients still read the replica, in
    /// nanoseconds: the lease, plus a fifth for clock drift and for the delay between granting and sending.
    pub const COPY_LAPSE_NS: u64 = 300_000_000;
    /// Put sessions of one shard. A client may hold at most as many as are free: half of all, if it is the only one.
    pub const PUT_SESSIONS: usize = 2_048;
    /// Disjoint written ranges of one put session.
    pub const PUT_SESSION_RANGES: usize = 4_096;
    /// Ranges that are being written or read, over all put sessions of a shard.
    pub const PUT_SESSION_TICKETS: u32 = 16_384;
    /// Default idle timeout of a put session, in milliseconds: a session without a write for so long is aborted.
    pub const PUT_SESSION_IDLE_MS: u32 = 30_000;
    /// Longest idle timeout that a client may set for a put session, in milliseconds.
    pub const PUT_SESSION_IDLE_MOST_MS: u32 = 600_000;
    /// Time for the handshake of a new connection, in nanoseconds.
    pub const HELLO_NS: u64 = 5_000_000_000;
    /// Time for the handshake of a new connection on one of several rails, in nanoseconds; doubled after attempts that
    /// timed out.
    pub const RAIL_HELLO_NS: u64 = 500_000_000;
    /// Time during which an unreachable path is not retried if there is another path, in nanoseconds.
    pub const UNAVAILABLE_NS: u64 = 10_000_000_000;
    /// Time without progress after which a connection with in-flight work is closed, if another rail can take over, in
    /// nanoseconds. Extended where the in-flight work would take longer than this.
    pub const STALL_NS: u64 = 100_000_000;
    /// Most by which earlier silences of a rail extend [`Self::STALL_NS`], in nanoseconds.
    pub const RAIL_SILENCE_NS: u64 = 2_000_000_000;
    /// Time after which a client of the store gives a TCP connection up on which sent data is not acknowledged, in
    /// nanoseconds: its peer's host is not reachable, or does not know the connection any more (half-open).
    pub const UNACKNOWLEDGED_NS: u64 = 1_000_000_000;
    /// Deadline of a request that sets none, in nanoseconds.
    pub const DEFAULT_DEADLINE_NS: u64 = 10_000_000_000;
    /// Replicas of an object, the owner's included.
    pub const REPLICAS: u8 = crate::map::MAX_REPLICAS;
    /// Attempts for one slice, the first included.
    pub const ATTEMPTS: u8 = 4;
    /// Burst of retries to one peer: twice the in-flight requests of one lost connection.
    pub const RETRY_BURST: u32 = 2 * crate::narrowing::length_u32(Self::REQUESTS_PER_CONNECTION);
    /// Fenced connections that one peer has not acknowledged, after which the client sends this peer no further
    /// requests.
    pub const FENCED: usize = 1_024;
    /// Peers, disconnected before they acknowledged a fence, that a client remembers.
    pub const FENCED_PEERS: usize = 256;
    /// Rails of one path to one peer.
    pub const RAILS: usize = 64;
}

// The largest item of a batched body is 56 bytes, except for puts and pages of keys: these carry names of variable
// length, so the sender of puts has to check the bytes too. One put with the longest name fits.
const _: () = assert!(64 + Limits::NAME_BYTES + Limits::KEY_BYTES <= Limits::BODY_BYTES);
const _: () = assert!(Limits::ITEMS_PER_FRAME * 64 <= Limits::BODY_BYTES);
// Such an item is a digest, and no reply to one is longer.
const _: () = assert!(Limits::QUESTIONS_PER_FRAME * 16 <= Limits::BODY_BYTES);
// Any gathered ranges can be encoded as runs of 1, and their total is a payload.
const _: () = assert!(Limits::RANGES_PER_FRAME <= Limits::ITEMS_PER_FRAME);
const _: () = assert!(Limits::GATHER_BYTES <= Limits::PAYLOAD_BYTES && Limits::GATHER_BYTES <= u32::MAX as u64);
// The replies to one full batched get fit the queue, so reading is not stopped before they are all queued.
const _: () = assert!(Limits::ITEMS_PER_FRAME <= Limits::REPLIES_QUEUED);
const _: () = assert!(Limits::ITEMS_PER_FRAME <= Limits::REQUESTS_PER_CONNECTION);
// The largest batch of small requests fits a client that has nothing else in flight.
const _: () = assert!(Limits::BATCH_REQUESTS <= Limits::OPEN_SLICES);
// A descriptor of the largest segment fits a body.
const _: () = assert!(Limits::REGIONS_PER_SEGMENT * 32 + 512 <= Limits::BODY_BYTES);
// The space of a dead writer is reclaimed only after its own deadline could have passed.
const _: () = assert!(Limits::RESERVATION_NS > Limits::DEFAULT_DEADLINE_NS);
const _: () = assert!(Limits::COPY_LAPSE_NS >= Limits::COPY_LEASE_NS + Limits::COPY_LEASE_NS / 5);
