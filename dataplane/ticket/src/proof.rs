//! A challenge and its answers.

use crate::mac::{CHALLENGE_BYTES, PROOF_BYTES, Purpose, SECRET_BYTES, is_sum, sum};
use crate::ticket::{TICKET_BYTES, Ticket};

/// What a shard challenges with.
pub type Challenge = [u8; CHALLENGE_BYTES];

/// What was said on a connection before the proof.
#[derive(Clone, Copy, Debug)]
pub struct HandshakeTranscript<'a> {
    /// What the shard challenged with.
    pub challenge: &'a Challenge,
    /// The greeting, as it was sent: which cluster, node, incarnation and shard was meant, and which connection of
    /// which asker this is.
    pub hello: &'a [u8],
}

/// That a holder speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof {
    /// A number of the holder's own, against shards that would have said the same challenge before.
    pub own: [u8; CHALLENGE_BYTES],
    /// The proof.
    pub mac: [u8; PROOF_BYTES],
    /// The ticket.
    pub ticket: [u8; TICKET_BYTES],
}

impl Proof {
    /// Bytes of a proof with its ticket.
    pub const BYTES: usize = CHALLENGE_BYTES + PROOF_BYTES + TICKET_BYTES;

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        [&self.own[..], &self.mac, &self.ticket].concat()
    }

    /// Reads it back; `None` for another length.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (own, rest) = bytes.split_first_chunk()?;
        let (mac, rest) = rest.split_first_chunk()?;
        Some(Self { own: *own, mac: *mac, ticket: rest.try_into().ok()? })
    }

    /// Whether who knows this secret has made it.
    pub(crate) fn is_of(&self, secret: &[u8; SECRET_BYTES], said: &HandshakeTranscript<'_>) -> bool {
        is_sum(secret, Purpose::Holder, &[said.challenge, &self.own, said.hello, &self.ticket], &self.mac)
    }
}

/// A ticket whose holder has proven to be it.
pub struct CheckedTicket {
    /// What it says.
    pub ticket: Ticket,
    /// When it ends, in seconds by the time of who checks: not that of the ticket where it is of another time line.
    pub end: u64,
    secret: [u8; SECRET_BYTES],
}

impl CheckedTicket {
    pub(crate) const fn new(ticket: Ticket, end: u64, secret: [u8; SECRET_BYTES]) -> Self {
        Self { ticket, end, secret }
    }

    /// Proves to the holder that a shard answers which knows the secret.
    #[must_use]
    pub fn answer(
        &self,
        own: &[u8; CHALLENGE_BYTES],
        said: &HandshakeTranscript<'_>,
        welcome: &[u8],
    ) -> [u8; PROOF_BYTES] {
        sum(&self.secret, Purpose::Shard, &[said.challenge, own, said.hello, welcome])
    }
}

impl core::fmt::Debug for CheckedTicket {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "CheckedTicket({:?})", self.ticket)
    }
}
