//! Data tickets: authorise clients at shards, with rights and an expiry, without a call to the control plane.
//!
//! The control plane has [`TicketKey`]s and publishes them to nodes. A holder gets a [`Credential`] from it: the
//! ticket, which is public, and a secret, which is the ticket's HMAC under the key. With the key the secret can be
//! computed from the ticket, and without it, it cannot. So a change of any bit of a ticket changes the secret that
//! belongs to it, and the ticket needs no signature of its own.
//!
//! The secret is never sent over a data connection. The shard sends a [`Challenge`], and the holder answers with a
//! [`Proof`]: the HMAC, under the secret, of the challenge, of a nonce of its own, and of the handshake so far. A
//! replayed proof is of no use on another connection. The shard proves in the same way that it knows the secret too,
//! which detects an impostor that listens at the address of a shard.
//!
//! Pure (sans-IO): time and randomness are arguments. `Debug` never prints secrets.

#![forbid(unsafe_code)]

mod credential;
mod keys;
mod mac;
mod mint;
mod proof;
mod ticket;
mod time;

pub use credential::Credential;
pub use keys::{Keys, MOST_KEYS, ProofError, TicketKey};
pub use mac::{CHALLENGE_BYTES, Challenges, PROOF_BYTES, SECRET_BYTES};
pub use mint::{Mint, Terms};
pub use proof::{Challenge, CheckedTicket, HandshakeTranscript, Proof};
pub use ticket::{Rights, Role, TICKET_BYTES, Ticket, TicketError};
pub use time::{GRACE_S, HeardTime, TicketTime, TimeLine, UNHEARD_NS};
