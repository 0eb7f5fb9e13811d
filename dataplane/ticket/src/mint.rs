//! Where tickets are made: the control plane's keys, and their succession.
//!
//! A key is known to nodes for a while before the first ticket is made with it, and until the last such ticket has
//! ended. So a node that asks for the keys now and then knows every key that it is shown.

use crate::credential::Credential;
use crate::keys::TicketKey;
use crate::mac::SECRET_BYTES;
use crate::ticket::{Rights, Role, Ticket};

/// For whom a ticket is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Who holds it.
    pub role: Role,
    /// What that one may ask.
    pub rights: Rights,
    /// The only tenant whose objects it is for, by number; without, all tenants'.
    pub tenant: Option<u32>,
    /// See [`Ticket::holder`].
    pub holder: u64,
    /// See [`Ticket::incarnation`].
    pub incarnation: u64,
    /// See [`Ticket::epochs`].
    pub epochs: (u64, u64),
}

/// Makes tickets.
#[derive(Debug)]
pub struct Mint {
    cluster: String,
    /// How long a ticket is good, in seconds.
    lifetime: u64,
    /// How long tickets are made with one key, in seconds.
    term: u64,
    /// The key in use, and when it came into use.
    present: (TicketKey, u64),
    /// The one after it.
    next: TicketKey,
    former: Vec<TicketKey>,
}

impl Mint {
    /// A mint with keys of its own. `draw` gives random bytes. Times are in seconds, `now` by the ticket time.
    ///
    /// # Errors
    /// Whatever `draw` fails with.
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

    /// With the keys that [`Self::keys`] gave in a former incarnation of this control plane, which nodes know, in place
    /// of new ones.
    pub fn resume(&mut self, keys: Vec<TicketKey>, now: u64) {
        let mut keys = keys.into_iter();
        if let (Some(present), Some(next)) = (keys.next(), keys.next()) {
            // It is as old as its end says.
            let began = present.until.saturating_sub(self.term).saturating_sub(self.lifetime).min(now);
            (self.present, self.next, self.former) = ((present, began), next, keys.collect());
            self.set_ends();
        }
    }

    /// Takes the next key into use if the present one's term is over, or `at_once`; true when it did.
    ///
    /// # Errors
    /// Whatever `draw` fails with; nothing has changed then.
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
        // No ticket is made with it any more.
        self.former.push(TicketKey { until: now.saturating_add(self.lifetime), ..former });
        self.set_ends();
        Ok(true)
    }

    fn set_ends(&mut self) {
        let end = self.present.1.saturating_add(self.term).saturating_add(self.lifetime);
        self.present.0.until = end;
        self.next.until = end.saturating_add(self.term);
    }

    /// What nodes are to know: the key in use, the one after it, and those whose tickets may still be good.
    pub fn keys(&self) -> impl Iterator<Item = &TicketKey> {
        [&self.present.0, &self.next].into_iter().chain(&self.former)
    }

    /// The key in use.
    #[must_use]
    pub const fn present(&self) -> &TicketKey {
        &self.present.0
    }

    /// How long a ticket is good, in seconds.
    #[must_use]
    pub const fn lifetime(&self) -> u64 {
        self.lifetime
    }

    /// A ticket, with its secret.
    #[must_use]
    pub fn issue(&self, terms: &Terms, now: u64) -> Credential {
        self.issue_under(&self.present.0, terms, now)
    }

    /// A ticket for the peers of one tenant, see [`TicketKey::for_peers`]; nodes do not believe it.
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
