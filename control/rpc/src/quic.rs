//! QUIC of both ends: TLS and transport parameters, sockets, resets.

pub(crate) mod reset;
pub(crate) mod socket;
pub(crate) mod tls;
