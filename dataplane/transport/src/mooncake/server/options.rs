//! Options of a Mooncake server, and the interface to its host's registered memory.

use kvplane_sys::IoBuf;

use crate::mooncake::wire::Request;

/// Registry of the host's registered memory.
pub trait Ranges {
    /// Acquires the memory of a request: exactly of its length, and writable if it is a write. Returns it with the hold
    /// under which it is released, or `None` if the range is not registered, or not for this use.
    fn acquire(&mut self, request: &Request) -> Option<(IoBuf, u64)>;
    /// Releases a range that is not used any more.
    fn release(&mut self, hold: u64);
}

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Limit of open connections. At the limit a new connection replaces the longest idle one, or is closed if none has
    /// been idle for `reclaim_ns`.
    pub connections: usize,
    /// Idle timeout of a connection, in nanoseconds.
    pub idle_ns: u64,
    /// Idle time after which a connection may be closed for a new one at the connection limit, in nanoseconds.
    pub reclaim_ns: u64,
    /// Timeout of a request or payload that makes no progress, in nanoseconds; its connection is closed.
    pub stall_ns: u64,
    /// Additional time allowed for a payload, in nanoseconds per byte, on top of `stall_ns`.
    pub slowest_ns_per_byte: u64,
    /// Time that the peer has after a rejection to read it and close, in nanoseconds.
    pub drain_ns: u64,
    /// Limit of bytes that are read and discarded meanwhile.
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
