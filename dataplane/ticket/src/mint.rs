//! Mint: issues tickets, and rotates the control plane's keys.
//!
//! Nodes know a key for a while before the first ticket is issued with it, and until the last such ticket has expired.
//! So a node that fetches the keys now and then knows the key of every ticket that it has to verify.

use crate::credential::Credential;
use crate::keys::TicketKey;
use crate::mac::SECRET_BYTES;
use crate::ticket::{Rights, Role, Ticket};

/// Contents of a ticket to be issued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named as in `Ticket`")]
pub struct Terms {
    pub role: Role,
    pub rights: Rights,
    /// Number of the only tenant whose objects the ticket is for; `None` for all tenants.
    pub tenant: Option<u32>,
    pub holder: u64,
    pub incarnation: u64,
    pub epochs: (u64, u64),
}

/// Issuer of tickets.
#[derive(Debug)]
pub struct Mint {
    cluster: String,
    /// Lifetime of a ticket, in seconds.
    lifetime: u64,
    /// Rotation period: time during which tickets are issued with one key, in seconds.
    term: u64,
    /// Key in use, and the time at which it came into use.
    present: (TicketKey, u64),
    /// Key that follows it.
    next: TicketKey,
    former: Vec<TicketKey>,
}

impl Mint {
    /// Creates a mint with new keys. `draw` fills in random bytes. Times are in seconds, `now` in ticket time.
    ///
    /// # Errors
    /// Returns the error of `draw`.
    pub fn new<E>(
        cluster: &str,
        lifetime: u64,
        term: u64,
        now: u64,
        mut draw: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let (lifetime, term) = (lifetime.max(1), term.max(1));
        let (present, next) = (drawn(&mut draw)?, drawn(&mut draw)?);
        let mut mint =
            Self { cluster: cluster.to_owned(), lifetime, term, present: (present, now), next, former: Vec::new() };
        mint.set_ends();
        Ok(mint)
    }

    /// Resumes with the keys that [`Self::keys`] returned in a former incarnation of this control plane, which nodes
    /// know, instead of new ones.
    pub fn resume(&mut self, keys: Vec<TicketKey>, now: u64) {
        let mut keys = keys.into_iter();
        if let (Some(present), Some(next)) = (keys.next(), keys.next()) {
            // The age of the present key follows from its expiry.
            let began = present.until.saturating_sub(self.term).saturating_sub(self.lifetime).min(now);
            (self.present, self.next, self.former) = ((present, began), next, keys.collect());
            self.set_ends();
        }
    }

    /// Rotates: takes the next key into use if the rotation period of the present one is over, or if `at_once`. Returns
    /// true if it did.
    ///
    /// # Errors
    /// Returns the error of `draw`; no key has changed then.
    pub fn rotate<E>(
        &mut self,
        now: u64,
        at_once: bool,
        mut draw: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        self.former.retain(|key| key.until >= now);
        if !at_once && now < self.present.1.saturating_add(self.term) {
            return Ok(false);
        }
        let next = drawn(&mut draw)?;
        let present = core::mem::replace(&mut self.next, next);
        let former = core::mem::replace(&mut self.present, (present, now)).0;
        // No further ticket is issued with it.
        self.former.push(TicketKey { until: now.saturating_add(self.lifetime), ..former });
        self.set_ends();
        Ok(true)
    }

    fn set_ends(&mut self) {
        let end = self.present.1.saturating_add(self.term).saturating_add(self.lifetime);
        self.present.0.until = end;
        self.next.until = end.saturating_add(self.term);
    }

    /// Returns the keys that nodes have to know: the key in use, the next one, and those whose tickets may still be
    /// valid.
    pub fn keys(&self) -> impl Iterator<Item = &TicketKey> {
        [&self.present.0, &self.next].into_iter().chain(&self.former)
    }

    /// Returns the key in use.
    #[must_use]
    pub const fn present(&self) -> &TicketKey {
        &self.present.0
    }

    /// Returns the lifetime of a ticket, in seconds.
    #[must_use]
    pub const fn lifetime(&self) -> u64 {
        self.lifetime
    }

    /// Issues a ticket, with its secret.
    #[must_use]
    pub fn issue(&self, terms: &Terms, now: u64) -> Credential {
        self.issue_under(&self.present.0, terms, now)
    }

    /// Issues a ticket for the peers of one tenant, see [`TicketKey::for_peers`]; nodes do not accept it.
    #[must_use]
    pub fn issue_to_peer(&self, peers_of: &str, terms: &Terms, now: u64) -> Credential {
        self.issue_under(&self.present.0.for_peers(peers_of), terms, now)
    }

    fn issue_under(&self, key: &TicketKey, terms: &Terms, now: u64) -> Credential {
        let Terms { role, rights, tenant, holder, incarnation, epochs } = *terms;
        let valid = (now, now.saturating_add(self.lifetime));
        let ticket = Ticket { key: key.id, role, rights, tenant, holder, incarnation, epochs, valid }.encode();
        Credential::new(ticket, key.secret_of(&self.cluster, &ticket))
    }
}

fn drawn<E>(draw: &mut impl FnMut(&mut [u8]) -> Result<(), E>) -> Result<TicketKey, E> {
    let (mut id, mut secret) = ([0; 8], [0; SECRET_BYTES]);
    draw(&mut id)?;
    draw(&mut secret)?;
    Ok(TicketKey { id: u64::from_le_bytes(id), secret, until: 0 })
}
