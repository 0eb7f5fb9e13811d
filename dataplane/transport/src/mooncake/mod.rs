//! Mooncake's TCP data protocol, as its engines of version 0.3 speak it: server and client.
//!
//! * [`wire`]: encoding of requests and statuses.
//! * [`Server`]: connections from stock engines. It looks up each range in [`Ranges`] and moves the bytes in place.
//! * [`Lanes`]: connections to stock engines. It accepts client frames and returns frames, so that a stock engine looks
//!   like any other peer to the client.
//!
//! All I/O is by nonblocking system calls on the host's thread; the host's [`kvplane_sys::Poller`] reports which
//! sockets are ready. The kernel therefore holds no reference to a caller's memory between two calls, and closing a
//! connection ends its use of memory at once.
//!
//! The protocol has no authentication, no checksums and no request ids: any process that reaches the port can read and
//! write the registered memory. The listener belongs on loopback or a trusted network.

mod client;
mod server;
pub mod wire;

pub use client::{LaneCounters, Lanes};
pub use server::{Ranges, Server, ServerCounters, ServerOptions};

/// Byte budget of one connection's turn.
const TURN_BYTES: usize = 1 << 20;

/// Returns true if an error means "try again later".
fn is_later(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}
