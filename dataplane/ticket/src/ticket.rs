//! What a ticket says, and its bytes.

use core::fmt;

/// Bytes of a ticket.
pub const TICKET_BYTES: usize = 80;

const FORMAT: u8 = 1;
/// Bit of the flags: only for the tenant that it names.
const OF_TENANT: u8 = 1;

/// Who holds a ticket, as its certificate proved to the control plane.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
#[repr(u8)]
pub enum Role {
    /// A storage node.
    Node = 1,
    /// A client.
    Client = 2,
    /// An operator, or the control plane itself.
    Admin = 3,
}

impl Role {
    /// The word for it in logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Client => "client",
            Self::Admin => "admin",
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Node),
            2 => Some(Self::Client),
            3 => Some(Self::Admin),
            _ => None,
        }
    }
}

/// What the holder may ask.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rights(u8);

impl Rights {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// To look at objects and segments.
    pub const READ: Self = Self(1);
    /// To put, to remove, to write.
    pub const WRITE: Self = Self(2);
    /// To fetch what was in slots that moved: for the nodes that own them now.
    pub const FETCH: Self = Self(4);
    const ALL: u8 = 7;

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of these are among them.
    #[must_use]
    pub const fn has(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// As a number.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }
}

impl fmt::Debug for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [(Self::READ, "read"), (Self::WRITE, "write"), (Self::FETCH, "fetch")];
        let words: Vec<&str> = named.into_iter().filter(|(right, _)| self.has(*right)).map(|(_, word)| word).collect();
        write!(f, "Rights({})", words.join(" "))
    }
}

/// What a ticket says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Under which key it was made.
    pub key: u64,
    /// Who holds it.
    pub role: Role,
    /// What that one may ask.
    pub rights: Rights,
    /// The only tenant whose objects it is for, by number; without, all tenants'.
    pub tenant: Option<u32>,
    /// A number of the holder: drawn at its start, or a node's.
    pub holder: u64,
    /// The holder's incarnation, where it is a node: 0 for others, whose number is their incarnation's.
    pub incarnation: u64,
    /// The epochs of the cluster map for which it is good, the first and the last.
    pub epochs: (u64, u64),
    /// From when to when it is good, in seconds of the control plane's ticket time.
    pub valid: (u64, u64),
}

/// Why bytes are no ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TicketError {
    /// Another length.
    Length(usize),
    /// Another format, or a field with a value that means nothing.
    Field(&'static str),
}

impl fmt::Display for TicketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "a ticket has {TICKET_BYTES} bytes, not {bytes}"),
            Self::Field(what) => write!(f, "a ticket whose {what} means nothing to this build"),
        }
    }
}

impl std::error::Error for TicketError {}

impl Ticket {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; TICKET_BYTES] {
        let mut out = [0; TICKET_BYTES];
        let flags = if self.tenant.is_some() { OF_TENANT } else { 0 };
        out[..4].copy_from_slice(&[FORMAT, self.role as u8, self.rights.0, flags]);
        out[4..8].copy_from_slice(&self.tenant.unwrap_or(0).to_le_bytes());
        let words = [
            self.key,
            self.holder,
            self.incarnation,
            self.epochs.0,
            self.epochs.1,
            self.valid.0,
            self.valid.1,
            // For what is to come.
            0,
            0,
        ];
        for (place, word) in out[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Reads it back. That it was made by the control plane is not known by that: see [`crate::Keys::check`].
    ///
    /// # Errors
    /// When the bytes are not those of a ticket of this format.
    pub fn decode(bytes: &[u8]) -> Result<Self, TicketError> {
        let fixed: &[u8; TICKET_BYTES] = bytes.try_into().map_err(|_| TicketError::Length(bytes.len()))?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&fixed[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if fixed[0] != FORMAT {
            return Err(TicketError::Field("format"));
        }
        let role = Role::from_code(fixed[1]).ok_or(TicketError::Field("role"))?;
        if fixed[2] & !Rights::ALL != 0 {
            return Err(TicketError::Field("rights"));
        }
        let number = u32::from_le_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]);
        let tenant = match (fixed[3], number) {
            (0, 0) => None,
            (OF_TENANT, number) => Some(number),
            _ => return Err(TicketError::Field("tenant")),
        };
        if word(64) != 0 || word(72) != 0 {
            return Err(TicketError::Field("rest"));
        }
        Ok(Self {
            key: word(8),
            role,
            rights: Rights(fixed[2]),
            tenant,
            holder: word(16),
            incarnation: word(24),
            epochs: (word(32), word(40)),
            valid: (word(48), word(56)),
        })
    }
}
