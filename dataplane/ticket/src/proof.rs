//! Challenge of a shard, and the proofs of both sides.

use crate::mac::{CHALLENGE_BYTES, PROOF_BYTES, Purpose, SECRET_BYTES, is_sum, sum};
use crate::ticket::{TICKET_BYTES, Ticket};

/// Challenge of a shard.
pub type Challenge = [u8; CHALLENGE_BYTES];

/// Handshake on a connection before the proof, which the proof covers.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct HandshakeTranscript<'a> {
    pub challenge: &'a Challenge,
    /// Body of the hello as it was sent: the cluster, node, incarnation and shard that the client expects, and the ids
    /// of the client and of the connection.
    pub hello: &'a [u8],
}

/// Proof that the client holds the ticket in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Proof {
    /// Nonce of the holder, against shards that repeat a challenge.
    pub own: [u8; CHALLENGE_BYTES],
    /// HMAC under the ticket's secret.
    pub mac: [u8; PROOF_BYTES],
    pub ticket: [u8; TICKET_BYTES],
}

impl Proof {
    /// Length of a proof with its ticket, in bytes.
    pub const BYTES: usize = CHALLENGE_BYTES + PROOF_BYTES + TICKET_BYTES;

    /// Encodes the proof.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        [&self.own[..], &self.mac, &self.ticket].concat()
    }

    /// Decodes a proof; `None` if the bytes have another length.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (own, rest) = bytes.split_first_chunk()?;
        let (mac, rest) = rest.split_first_chunk()?;
        Some(Self { own: *own, mac: *mac, ticket: rest.try_into().ok()? })
    }

    /// Returns true if the proof was made with this secret.
    pub(crate) fn is_of(&self, secret: &[u8; SECRET_BYTES], said: &HandshakeTranscript<'_>) -> bool {
        is_sum(secret, Purpose::Holder, &[said.challenge, &self.own, said.hello, &self.ticket], &self.mac)
    }
}

/// A ticket whose holder has proven its identity.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct CheckedTicket {
    pub ticket: Ticket,
    /// Expiry in seconds of the verifier's time, which differs from that in the ticket if the ticket is on another time
    /// line.
    pub end: u64,
    secret: [u8; SECRET_BYTES],
}

impl CheckedTicket {
    pub(crate) const fn new(ticket: Ticket, end: u64, secret: [u8; SECRET_BYTES]) -> Self {
        Self { ticket, end, secret }
    }

    /// Returns the proof that this shard knows the secret too, for the holder to verify.
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
