//! Tests of connections: handshakes, tickets and fences.

mod fences;
mod gate;
mod handshake;
