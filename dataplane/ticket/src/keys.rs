//! The keys that tickets are made and checked with.

use core::fmt;

use crate::mac::{Purpose, SECRET_BYTES, sum};
use crate::proof::{CheckedTicket, HandshakeTranscript, Proof};
use crate::ticket::{Ticket, TicketError};
use crate::time::TimeLine;

/// Keys that are known at the same time: the present one, those before it whose tickets may still be good, and those
/// of a control plane that has taken over.
pub const MOST_KEYS: usize = 8;

/// A key of the control plane.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketKey {
    /// Its number, drawn at random, which tickets name.
    pub id: u64,
    /// The key.
    pub secret: [u8; SECRET_BYTES],
    /// When the last ticket under it ends, in seconds of the control plane's ticket time.
    pub until: u64,
}

impl fmt::Debug for TicketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketKey({:#x}, until {})", self.id, self.until)
    }
}

impl TicketKey {
    /// The key that the peers of one tenant share to let each other in. It says nothing about this one, nor about that
    /// of another tenant: who has it can make tickets that those peers believe, and nobody else.
    #[must_use]
    pub fn for_peers(&self, tenant: &str) -> Self {
        Self { secret: sum(&self.secret, Purpose::Peers, &[tenant.as_bytes()]), ..*self }
    }

    /// What only the holder of this ticket, and who knows the key, can know.
    pub(crate) fn secret_of(&self, cluster: &str, ticket: &[u8]) -> [u8; SECRET_BYTES] {
        sum(&self.secret, Purpose::Secret, &[cluster.as_bytes(), ticket])
    }
}

/// Why a proof is not believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disbelief {
    /// The bytes are no ticket.
    Torn(TicketError),
    /// It was made with a key that is not known here.
    NoKey(u64),
    /// The ticket or the proof is not what the control plane, and its holder, would have made.
    Wrong,
}

/// The keys that a shard was given.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    keys: Vec<(TicketKey, TimeLine)>,
}

impl Keys {
    /// Takes what the control plane says are its keys, and the line of its time. Others that were known stay, on their
    /// own lines, as long as tickets under them may be good, for a control plane that took over has keys of its own. Of
    /// too many the ones that end first go. `now` is the time of who checks, in seconds.
    pub fn learn(&mut self, keys: impl IntoIterator<Item = TicketKey>, line: TimeLine, now: u64) {
        for key in keys {
            self.keys.retain(|(known, _)| known.id != key.id);
            self.keys.push((key, line));
        }
        self.keys.retain(|(key, line)| line.local(key.until) >= now);
        self.keys.sort_by_key(|(key, line)| core::cmp::Reverse(line.local(key.until)));
        self.keys.truncate(MOST_KEYS);
    }

    /// The line of the first of these keys that is known, if any.
    #[must_use]
    pub fn line_of(&self, keys: &[TicketKey]) -> Option<TimeLine> {
        let line = |told: &TicketKey| self.keys.iter().find(|(known, _)| known.id == told.id).map(|(_, line)| *line);
        keys.iter().find_map(line)
    }

    /// How many are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether this proof is of who holds the ticket in it. Times and epochs are not looked at.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn check(
        &self,
        cluster: &str,
        said: &HandshakeTranscript<'_>,
        proof: &Proof,
    ) -> Result<CheckedTicket, Disbelief> {
        let ticket = Ticket::decode(&proof.ticket).map_err(Disbelief::Torn)?;
        let known = self.keys.iter().find(|(key, _)| key.id == ticket.key);
        let (key, line) = known.ok_or(Disbelief::NoKey(ticket.key))?;
        let secret = key.secret_of(cluster, &proof.ticket);
        if !proof.is_of(&secret, said) {
            return Err(Disbelief::Wrong);
        }
        Ok(CheckedTicket::new(ticket, line.local(ticket.valid.1), secret))
    }
}
