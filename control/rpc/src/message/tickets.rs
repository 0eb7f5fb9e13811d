//! Messages about data tickets: what their holders get, and what nodes need to check them.
//!
//! Secrets travel here, inside TLS with certificates on both sides, and are never shown by `Debug`.

use std::fmt;

use bincode::{Decode, Encode};

use crate::identity::{IdentityError, provider};

/// Asks for a ticket, with which shards let its holder in.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GetTicket {
    /// A number that the caller has drawn at its start, and nobody else has.
    pub holder: u64,
    /// The only tenant whose objects it is to be for; without, all tenants'.
    pub tenant: Option<String>,
}

/// A ticket.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
pub struct TicketReply {
    /// Whether shards of this cluster want tickets; if not, nothing else here counts.
    pub wanted: bool,
    /// The ticket.
    pub ticket: Vec<u8>,
    /// Its secret: the holder's alone.
    pub secret: Vec<u8>,
    /// How long it is good, in nanoseconds from now.
    pub valid_ns: u64,
}

impl fmt::Debug for TicketReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketReply(wanted {}, good for {} ns)", self.wanted, self.valid_ns)
    }
}

/// Asks for what a node needs to let holders of tickets in, and for a ticket of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GetTicketKeys {
    /// Which node.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
}

/// What a node needs.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct TicketKeys {
    /// The control plane's ticket time, in seconds.
    pub seconds: u64,
    /// The keys: at most [`KEYS_PER_REPLY`].
    pub keys: Vec<KeyOfTickets>,
    /// The node's own ticket.
    pub ticket: TicketReply,
}

/// Keys in one reply at most.
pub const KEYS_PER_REPLY: usize = 16;

/// A key that tickets are checked with.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
pub struct KeyOfTickets {
    /// Its number.
    pub id: u64,
    /// The key.
    pub secret: [u8; 32],
    /// When the last ticket under it ends, in seconds of the control plane's ticket time.
    pub until: u64,
}

impl fmt::Debug for KeyOfTickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyOfTickets({:#x}, until {})", self.id, self.until)
    }
}

/// Makes a new key for tickets at once. Tickets under the former one are good until they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RotateTickets;

/// Random bytes from the system, for keys.
///
/// # Errors
/// [`IdentityError::Issue`] when the system has none.
pub fn random_bytes(out: &mut [u8]) -> Result<(), IdentityError> {
    let none = |_| IdentityError::Issue("the system has no randomness".to_owned());
    provider().secure_random.fill(out).map_err(none)
}
