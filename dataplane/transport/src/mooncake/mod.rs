//! Mooncake's TCP data protocol, as its engines of version 0.3 speak it: their requests answered, their memory reached.
//!
//! * [`wire`]: the bytes.
//! * [`Server`]: connections of stock engines. It asks [`Ranges`] for each range and moves the bytes in place.
//! * [`Lanes`]: connections to stock engines. It takes the client's frames and gives back frames, so that the client
//!   does not know the difference.
//!
//! All I/O is by nonblocking system calls on the host's thread; the host's [`kvplane_sys::Poller`] says which sockets
//! are ready. So the kernel holds nothing of anybody's memory between two calls, and ending a connection ends its use
//! of memory at once.
//!
//! The protocol has no authentication, no checksums and no request ids: whoever reaches the port reads and writes what
//! is registered. Its listener belongs on loopback or a network of friends.

mod client;
mod server;
pub mod wire;

pub use client::{LaneCounters, Lanes};
pub use server::{Ranges, Server, ServerCounters, ServerOptions};

/// Bytes moved for one connection before the next has its turn.
const TURN_BYTES: usize = 1 << 20;

/// Whether an error only says "not now".
fn is_later(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}
