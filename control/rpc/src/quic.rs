//! QUIC endpoints of both sides: TLS and transport parameters, sockets, stateless resets.

pub(crate) mod reset;
pub(crate) mod socket;
pub(crate) mod tls;
