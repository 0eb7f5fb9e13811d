//! Credential of a holder: the ticket, and the secret that belongs to it.

use core::fmt;

use crate::mac::{CHALLENGE_BYTES, PROOF_BYTES, Purpose, SECRET_BYTES, is_sum, sum};
use crate::proof::{HandshakeTranscript, Proof};
use crate::ticket::{TICKET_BYTES, Ticket, TicketError};

/// A ticket and its secret. The secret is known to the holder only.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    ticket: [u8; TICKET_BYTES],
    secret: [u8; SECRET_BYTES],
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({:?})", Ticket::decode(&self.ticket))
    }
}

impl Credential {
    pub(crate) const fn new(ticket: [u8; TICKET_BYTES], secret: [u8; SECRET_BYTES]) -> Self {
        Self { ticket, secret }
    }

    /// Assembles the ticket and the secret that the control plane issued.
    ///
    /// # Errors
    /// Returns an error if one of them is malformed.
    pub fn from_parts(ticket: &[u8], secret: &[u8]) -> Result<Self, TicketError> {
        Ticket::decode(ticket)?;
        let ticket = ticket.try_into().map_err(|_| TicketError::Length(ticket.len()))?;
        let secret = secret.try_into().map_err(|_| TicketError::Field("secret"))?;
        Ok(Self { ticket, secret })
    }

    /// Returns the ticket and the secret, for the control plane to send to the holder.
    #[must_use]
    pub const fn parts(&self) -> (&[u8; TICKET_BYTES], &[u8; SECRET_BYTES]) {
        (&self.ticket, &self.secret)
    }

    /// Returns a nonce for [`Self::prove`] that is unique for each `count` of this client.
    #[must_use]
    pub fn number(&self, asker: u64, count: u64) -> [u8; CHALLENGE_BYTES] {
        sum(&self.secret, Purpose::Challenge, &[&asker.to_le_bytes(), &count.to_le_bytes()])
    }

    /// Proves to a shard that the client is the holder of the ticket. `own` is a nonce that was not used before.
    #[must_use]
    pub fn prove(&self, own: [u8; CHALLENGE_BYTES], said: &HandshakeTranscript<'_>) -> Proof {
        let mac = sum(&self.secret, Purpose::Holder, &[said.challenge, &own, said.hello, &self.ticket]);
        Proof { own, mac, ticket: self.ticket }
    }

    /// Returns true if the shard that answered knows the secret too. `own` is the nonce of the proof that it answers.
    #[must_use]
    pub fn is_answered(
        &self,
        own: &[u8; CHALLENGE_BYTES],
        said: &HandshakeTranscript<'_>,
        welcome: &[u8],
        answer: &[u8; PROOF_BYTES],
    ) -> bool {
        is_sum(&self.secret, Purpose::Shard, &[said.challenge, own, said.hello, welcome], answer)
    }
}
