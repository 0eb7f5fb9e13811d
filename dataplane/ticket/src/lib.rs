//! Data tickets: who may ask a shard what, and until when, without a call to the control plane.
//!
//! The control plane has [`TicketKey`]s and gives them to nodes. A holder gets a [`Credential`] of it: the ticket,
//! which is no secret, and a secret that is the ticket's HMAC under the key. Whoever knows the key can compute the
//! secret from the ticket, and nobody else can. So a change of any bit of a ticket changes the secret that goes with
//! it, and the ticket needs no signature of its own.
//!
//! On a connection the secret is never shown. The shard says a [`Challenge`], and the holder answers with a [`Proof`]:
//! the HMAC, under the secret, of the challenge, of a number of its own, and of what the two have said so far. A proof
//! that was recorded is of no use on another connection. The shard proves in the same way that it knows the secret too,
//! so that a stranger who listens at the address of a shard is found out.
//!
//! Pure: time and randomness are arguments. Secrets are never shown by `Debug`.

#![forbid(unsafe_code)]

mod credential;
mod keys;
mod mac;
mod mint;
mod proof;
mod ticket;
mod time;

pub use credential::Credential;
pub use keys::{Disbelief, Keys, MOST_KEYS, TicketKey};
pub use mac::{CHALLENGE_BYTES, Challenges, PROOF_BYTES, SECRET_BYTES};
pub use mint::{Mint, Terms};
pub use proof::{Challenge, CheckedTicket, HandshakeTranscript, Proof};
pub use ticket::{Rights, Role, TICKET_BYTES, Ticket, TicketError};
pub use time::{GRACE_S, HeardTime, TicketTime, TimeLine, UNHEARD_NS};
