//! TLS 1.3 for data connections: certificates, the handshake and records. Pure (sans-IO): bytes in, bytes out, no
//! sockets.
//!
//! [`Handshake`] wraps rustls and is fed with the bytes that a driver received. When complete, it becomes a
//! [`Session`], which encrypts and decrypts records with rustls' ciphers in the driver's own memory, so that a payload
//! is copied once, and not once more into rustls and out of it. Both ends present certificates, of the same authority
//! as on control connections.
//!
//! No call blocks. Memory is bounded: a handshake keeps at most [`HANDSHAKE_BYTES`] of its peer's bytes, a session
//! none.

#![forbid(unsafe_code)]

mod error;
mod handshake;
mod keys;
mod session;
mod verify;

pub use error::{TlsError, TlsPart};
pub use handshake::{HANDSHAKE_BYTES, Handshake, Step};
pub use keys::{DataTls, Keychain, Keys, Material, UnknownTlsMode};
pub use session::{OpenedRecord, PLAIN_BYTES, RECORD_BYTES, Session};

/// First byte of every connection that begins with TLS: the type of a handshake record. No frame begins with it.
pub const FIRST_BYTE: u8 = 22;
