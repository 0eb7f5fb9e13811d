//! Messages about data tickets: issuing them to clients, and the keys that nodes verify them with.
//!
//! Secrets travel here, inside TLS with certificates on both sides, and are never shown by `Debug`.

use std::fmt;

use bincode::{Decode, Encode};
pub use kvplane_ticket::TicketKey;

use crate::identity::{IdentityError, provider};

/// Requests a ticket, which admits its holder to shards.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GetTicket {
    /// Random number that the caller drew at its start, unique to it.
    pub holder: u64,
    /// Only tenant whose objects the ticket is for; none for all tenants.
    pub tenant: Option<String>,
}

/// A ticket with its secret.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
pub struct TicketReply {
    /// True if shards of this cluster require tickets; if not, the other fields mean nothing.
    pub wanted: bool,
    /// The ticket, which is shown to shards.
    pub ticket: Vec<u8>,
    /// The ticket's secret, known to its holder alone.
    pub secret: Vec<u8>,
    /// Remaining validity, in nanoseconds.
    pub valid_ns: u64,
}

impl fmt::Debug for TicketReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketReply(wanted {}, good for {} ns)", self.wanted, self.valid_ns)
    }
}

/// Requests the keys that a node verifies tickets with, and a ticket for the node itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct GetTicketKeys {
    pub node: u64,
    pub incarnation: u64,
}

/// The reply to [`GetTicketKeys`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TicketKeys {
    /// The control plane's ticket time, in seconds.
    pub seconds: u64,
    /// Keys; at most [`KEYS_PER_REPLY`].
    pub keys: Vec<TicketKey>,
    /// The caller's own ticket.
    pub ticket: TicketReply,
}

/// Most keys in one reply.
pub const KEYS_PER_REPLY: usize = 16;

/// Rotates the ticket key at once. Tickets under the former key stay valid until they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RotateTickets;

/// Fills `out` with random bytes from the system, for keys.
///
/// # Errors
/// [`IdentityError::Issue`] when the system has no randomness.
pub fn random_bytes(out: &mut [u8]) -> Result<(), IdentityError> {
    let none = |_| IdentityError::Issue("the system has no randomness".to_owned());
    provider().secure_random.fill(out).map_err(none)
}
