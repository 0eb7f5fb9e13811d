//! Contents of a ticket, and their encoding.

use core::fmt;

/// Length of a ticket in bytes.
pub const TICKET_BYTES: usize = 80;

const FORMAT: u8 = 1;
/// Bit of the flags: the ticket is for one tenant only.
const OF_TENANT: u8 = 1;

/// Role of the holder, as its certificate proved to the control plane.
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
    /// Returns the word for the role in logs.
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

/// Rights of the holder.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rights(u8);

impl Rights {
    /// No rights.
    pub const NONE: Self = Self(0);
    /// Read objects and segments.
    pub const READ: Self = Self(1);
    /// Put, remove and write.
    pub const WRITE: Self = Self(2);
    /// Import slots that moved: for nodes that are their new owners.
    pub const FETCH: Self = Self(4);
    const ALL: u8 = 7;

    /// Returns the union of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if all of these rights are included.
    #[must_use]
    pub const fn has(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// Returns the wire form.
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

/// Contents of a ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Ticket {
    /// Number of the key that the ticket was issued with.
    pub key: u64,
    pub role: Role,
    pub rights: Rights,
    /// Number of the only tenant whose objects the ticket is for; `None` for all tenants.
    pub tenant: Option<u32>,
    /// Number of the holder: random, drawn at the start of its process, or the id of a node.
    pub holder: u64,
    /// Incarnation of the holder, if it is a node; 0 for other holders, whose number changes with every start.
    pub incarnation: u64,
    /// First and last epoch of the cluster map for which the ticket is valid.
    pub epochs: (u64, u64),
    /// First and last second in which the ticket is valid, in the control plane's ticket time.
    pub valid: (u64, u64),
}

/// Error of a malformed ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TicketError {
    /// The bytes have another length.
    Length(usize),
    /// The ticket has another format, or a field with an invalid value.
    Field(&'static str),
}

impl fmt::Display for TicketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "a ticket has {TICKET_BYTES} bytes, not {bytes}"),
            Self::Field(what) => write!(f, "a ticket whose {what} is invalid or unknown to this build"),
        }
    }
}

impl std::error::Error for TicketError {}

impl Ticket {
    /// Encodes the ticket.
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
            // Reserved for later versions.
            0,
            0,
        ];
        for (place, word) in out[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Decodes a ticket. Does not verify that the control plane issued it: see [`crate::Keys::check`].
    ///
    /// # Errors
    /// Returns an error if the bytes are not a ticket of this format.
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
