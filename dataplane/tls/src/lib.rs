//! TLS 1.3 for data connections: certificates, the handshake and records. Pure: bytes in, bytes out, no sockets.
//!
//! [`Handshake`] is rustls', fed with what a driver received. When it is done it becomes a [`Session`], which seals and
//! opens records with rustls' ciphers in the driver's own memory, so that a payload is copied once on its way, and not
//! once more into rustls and out of it. Both ends show certificates, of the same authority as on control connections.
//!
//! Nothing here waits. Memory is bounded: a handshake keeps no more than [`HANDSHAKE_BYTES`] of its peer's bytes, a
//! session none.

#![forbid(unsafe_code)]

mod error;
mod handshake;
mod keys;
mod session;
mod verify;

pub use error::TlsError;
pub use handshake::{HANDSHAKE_BYTES, Handshake, Step};
pub use keys::{DataTls, Keychain, Keys, Material};
pub use session::{OpenedRecord, PLAIN_BYTES, RECORD_BYTES, Session};

/// The first byte of every connection that begins with TLS: a handshake record. No frame begins so.
pub const FIRST_BYTE: u8 = 22;
