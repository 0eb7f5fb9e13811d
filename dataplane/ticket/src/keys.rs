//! Keys that tickets are issued and verified with.

use core::fmt;

use crate::mac::{Purpose, SECRET_BYTES, sum};
use crate::proof::{CheckedTicket, HandshakeTranscript, Proof};
use crate::ticket::{Ticket, TicketError};
use crate::time::TimeLine;

/// Most keys that a verifier keeps: the present one, former ones whose tickets may still be valid, and those of a
/// control plane that has taken over.
pub const MOST_KEYS: usize = 8;

/// A key of the control plane.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "bincode", derive(bincode::Encode, bincode::Decode))]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TicketKey {
    /// Number of the key, drawn at random; tickets refer to it.
    pub id: u64,
    pub secret: [u8; SECRET_BYTES],
    /// Expiry of the last ticket under this key, in seconds of the control plane's ticket time.
    pub until: u64,
}

impl fmt::Debug for TicketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketKey({:#x}, until {})", self.id, self.until)
    }
}

impl TicketKey {
    /// Derives the key that the peers of one tenant share to admit each other. It reveals neither this key nor that of
    /// another tenant: its holders, and no others, can issue tickets that those peers accept.
    #[must_use]
    pub fn for_peers(&self, tenant: &str) -> Self {
        Self { secret: sum(&self.secret, Purpose::Peers, &[tenant.as_bytes()]), ..*self }
    }

    /// Returns the secret of a ticket, which only its holder and the holders of this key can know.
    pub(crate) fn secret_of(&self, cluster: &str, ticket: &[u8]) -> [u8; SECRET_BYTES] {
        sum(&self.secret, Purpose::Secret, &[cluster.as_bytes(), ticket])
    }
}

/// Reason to reject a proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProofError {
    /// The ticket is malformed.
    Malformed(TicketError),
    /// The ticket was issued with a key that is not known here.
    NoKey(u64),
    /// The ticket or the proof was not made by the control plane and the holder.
    Invalid,
}

/// Keys that a shard has received.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    keys: Vec<(TicketKey, TimeLine)>,
}

impl Keys {
    /// Adds keys that the control plane published, on the time line of its ticket time. Known keys that it does not
    /// list stay, on their own time lines, as long as tickets under them may be valid, because a control plane that
    /// took over has keys of its own. Beyond [`MOST_KEYS`], the keys that expire first are dropped. `now` is the
    /// verifier's time in seconds.
    pub fn learn(&mut self, keys: impl IntoIterator<Item = TicketKey>, line: TimeLine, now: u64) {
        for key in keys {
            self.keys.retain(|(known, _)| known.id != key.id);
            self.keys.push((key, line));
        }
        self.keys.retain(|(key, line)| line.local(key.until) >= now);
        self.keys.sort_by_key(|(key, line)| core::cmp::Reverse(line.local(key.until)));
        self.keys.truncate(MOST_KEYS);
    }

    /// Returns the time line of the first of these keys that is known, if any.
    #[must_use]
    pub fn line_of(&self, keys: &[TicketKey]) -> Option<TimeLine> {
        let line = |told: &TicketKey| self.keys.iter().find(|(known, _)| known.id == told.id).map(|(_, line)| *line);
        keys.iter().find_map(line)
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns true if there are no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Verifies that the sender of this proof holds the ticket in it. Does not check times and epochs.
    ///
    /// # Errors
    /// Returns the reason to reject the proof.
    pub fn check(
        &self,
        cluster: &str,
        said: &HandshakeTranscript<'_>,
        proof: &Proof,
    ) -> Result<CheckedTicket, ProofError> {
        let ticket = Ticket::decode(&proof.ticket).map_err(ProofError::Malformed)?;
        let known = self.keys.iter().find(|(key, _)| key.id == ticket.key);
        let (key, line) = known.ok_or(ProofError::NoKey(ticket.key))?;
        let secret = key.secret_of(cluster, &proof.ticket);
        if !proof.is_of(&secret, said) {
            return Err(ProofError::Invalid);
        }
        Ok(CheckedTicket::new(ticket, line.local(ticket.valid.1), secret))
    }
}
