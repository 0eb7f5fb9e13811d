//! Tests of connections: greetings, tickets and fences.

mod fences;
mod gate;
mod handshake;
