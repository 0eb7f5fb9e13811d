//! What a server needs of its host, and its limits.

use kvplane_sys::IoBuf;

use crate::mooncake::wire::Request;

/// Who knows the registered memory.
pub trait Ranges {
    /// The memory of a request, of exactly its length and writable if it is a write, and a name under which it is
    /// released. `None` when the range is not registered, or not for this use.
    fn acquire(&mut self, request: &Request) -> Option<(IoBuf, u64)>;
    /// The range is not used any more.
    fn release(&mut self, hold: u64);
}

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Connections at a time. At the limit a new one takes the place of the one that has been idle the longest, or is
    /// closed where none has been for `reclaim_ns`.
    pub connections: usize,
    /// A connection without a request for so long is closed.
    pub idle_ns: u64,
    /// At the limit of connections, one without a request for so long gives way.
    pub reclaim_ns: u64,
    /// A request or payload that does not move for so long ends its connection.
    pub stall_ns: u64,
    /// So long may a payload take for each byte, on top of `stall_ns`.
    pub slowest_ns_per_byte: u64,
    /// After a refusal the peer has so long to read it and close.
    pub drain_ns: u64,
    /// And so many bytes of what it was sending are read meanwhile.
    pub drain_bytes: u64,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            connections: 4_096,
            idle_ns: 600_000_000_000,
            reclaim_ns: 10_000_000_000,
            stall_ns: 30_000_000_000,
            // 64 KiB/s.
            slowest_ns_per_byte: 1_000_000_000 >> 16,
            drain_ns: 5_000_000_000,
            drain_bytes: 1 << 30,
        }
    }
}
