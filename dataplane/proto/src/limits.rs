//! Every limit of the data path in one place, with proofs of how they relate.
//!
//! A peer that breaks one is answered with an error or cut off; none is discovered by running out of memory.

/// Limits of the wire and of one connection. They are constants of the protocol version, so both sides know them.
pub struct Limits;

impl Limits {
    /// Items in one batched request.
    pub const ITEMS_PER_FRAME: usize = 4_096;
    /// Items in one batched request of which each item takes a digest and is answered without a payload: whether
    /// objects are there, how long they are, that they are to be removed.
    pub const QUESTIONS_PER_FRAME: usize = 32_768;
    /// Ranges that one gathered read or write names, in as many runs or fewer.
    pub const RANGES_PER_FRAME: usize = 4_096;
    /// Bytes of all ranges of one gathered read or write.
    pub const GATHER_BYTES: u64 = 4 << 20;
    /// Lists that one shard answers at the same time.
    pub const LISTS: usize = 64;
    /// Bytes of the body of one frame.
    pub const BODY_BYTES: usize = 512 * 1024;
    /// Bytes of the payload of one frame.
    pub const PAYLOAD_BYTES: u64 = 4 << 30;
    /// Bytes of a payload that goes along with its frame over shared memory: copied twice more, which costs less than a
    /// second trip.
    pub const PAYLOAD_ALONG_BYTES: u64 = 8_192;
    /// Bytes of a name: a cluster, a segment, a tenant.
    pub const NAME_BYTES: usize = 255;
    /// Bytes of a key.
    pub const KEY_BYTES: usize = 4_096;
    /// The longest that an object can be asked to be kept before others: a day, in milliseconds.
    pub const SOFT_PIN_MS: u32 = 86_400_000;
    /// Regions of one segment.
    pub const REGIONS_PER_SEGMENT: usize = 1_024;
    /// Segments that one shard serves.
    pub const SEGMENTS: usize = 4_096;
    /// Requests that one connection may have open.
    pub const REQUESTS_PER_CONNECTION: usize = 8_192;
    /// Replies, or pieces of memory of replies, that one connection may have waiting to be sent before its requests are
    /// no longer read.
    pub const REPLIES_QUEUED: usize = 8_192;
    /// Connections of one shard.
    pub const CONNECTIONS: usize = 8_192;
    /// Requests of one client batch.
    pub const BATCH_REQUESTS: usize = 1 << 20;
    /// Slices that one client may have open.
    pub const OPEN_SLICES: usize = 1 << 22;
    /// Least bytes of a slice of a large range, but its last.
    pub const SLICE_BYTES_LEAST: u64 = 4_096;
    /// Time that a put may stay reserved on the server without being committed.
    pub const RESERVATION_NS: u64 = 30_000_000_000;
    /// For so long from its question a client may read what its first owner said to have a copy from the second owner.
    pub const COPY_LEASE_NS: u64 = 250_000_000;
    /// For so long after it said so for the last time, a first owner takes clients to do that: a lease, with a fifth on
    /// top for clocks that run apart and for what is said a little after it was decided.
    pub const COPY_LAPSE_NS: u64 = 300_000_000;
    /// Objects that are being written in ranges, of one shard: a client may have as many of them as are left, which is
    /// half of all for one that is alone.
    pub const DRAFTS: usize = 2_048;
    /// Ranges of one such object that do not touch.
    pub const DRAFT_RANGES: usize = 4_096;
    /// Ranges that are being written or read, over all of those of a shard.
    pub const DRAFT_TICKETS: u32 = 16_384;
    /// How long nothing may be written to such an object before it is given up, where its writer does not say, in
    /// milliseconds.
    pub const DRAFT_IDLE_MS: u32 = 30_000;
    /// The longest that its writer may say.
    pub const DRAFT_IDLE_MOST_MS: u32 = 600_000;
    /// Time for a new connection to say hello.
    pub const HELLO_NS: u64 = 5_000_000_000;
    /// Time for a new connection to say hello on a rail that has others beside it; more where that was not enough.
    pub const RAIL_HELLO_NS: u64 = 500_000_000;
    /// How long a path that does not lead to its peer is not tried again, where there is another.
    pub const UNAVAILABLE_NS: u64 = 10_000_000_000;
    /// Time without progress after which a connection with work is given up, where another rail can take over. Longer
    /// where the work that it has would take longer.
    pub const STALL_NS: u64 = 100_000_000;
    /// The most by which earlier silences of a rail put that off.
    pub const RAIL_SILENCE_NS: u64 = 2_000_000_000;
    /// Deadline of a request that names none.
    pub const DEFAULT_DEADLINE_NS: u64 = 10_000_000_000;
    /// Owners of a slot that may have an object at the same time.
    pub const REPLICAS: u8 = 2;
    /// Attempts of one slice, the first included.
    pub const ATTEMPTS: u8 = 4;
    /// Retries to one peer that may follow each other at once: what one lost connection may have had open, twice.
    pub const RETRY_BURST: u32 = 2 * Self::REQUESTS_PER_CONNECTION as u32;
    /// Connections of which a peer was told that they are over, and that it has not answered for, before nothing more
    /// is asked of it.
    pub const FENCED: usize = 1_024;
    /// Peers that were left before they answered a fence, and of which that is remembered.
    pub const FENCED_PEERS: usize = 256;
    /// Rails of one path to one peer.
    pub const RAILS: usize = 64;
}

// The largest item of any batched body is 48 bytes (a lookup's answer), but for puts and pages of keys: their names
// are as long as they
// are, so whoever sends puts looks at the bytes too. One put with the longest name fits.
const _: () = assert!(64 + Limits::NAME_BYTES + Limits::KEY_BYTES <= Limits::BODY_BYTES);
const _: () = assert!(Limits::ITEMS_PER_FRAME * 64 <= Limits::BODY_BYTES);
// A question is a digest, and so long is the longest answer to one.
const _: () = assert!(Limits::QUESTIONS_PER_FRAME * 16 <= Limits::BODY_BYTES);
// Any gathered ranges can be named as runs of 1, and their sum is a payload.
const _: () = assert!(Limits::RANGES_PER_FRAME <= Limits::ITEMS_PER_FRAME);
const _: () = assert!(Limits::GATHER_BYTES <= Limits::PAYLOAD_BYTES && Limits::GATHER_BYTES <= u32::MAX as u64);
// One whole batched get can be answered before reading stops.
const _: () = assert!(Limits::ITEMS_PER_FRAME <= Limits::REPLIES_QUEUED);
const _: () = assert!(Limits::ITEMS_PER_FRAME <= Limits::REQUESTS_PER_CONNECTION);
// The largest batch of small requests fits a client that has nothing else open.
const _: () = assert!(Limits::BATCH_REQUESTS <= Limits::OPEN_SLICES);
// A descriptor of the largest segment fits a body.
const _: () = assert!(Limits::REGIONS_PER_SEGMENT * 32 + 512 <= Limits::BODY_BYTES);
// A dead writer's space comes back only after its own deadline could have passed.
const _: () = assert!(Limits::RESERVATION_NS > Limits::DEFAULT_DEADLINE_NS);
const _: () = assert!(Limits::COPY_LAPSE_NS >= Limits::COPY_LEASE_NS + Limits::COPY_LEASE_NS / 5);
