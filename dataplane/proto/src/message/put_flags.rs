//! Flags of a put on the wire, and what they say: the acknowledgement level, and the object's role among stripes.

/// Bits of [`PutItem::flags`](super::PutItem::flags).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutFlags(pub(super) u8);

impl PutFlags {
    /// An existing object is replaced. Without this flag it is left as it is.
    pub const REPLACE: Self = Self(1);
    /// The object is never evicted.
    pub const HARD_PIN: Self = Self(2);
    /// The object is a stripe head: it only names the stripes of a large object.
    pub const HEAD: Self = Self(4);
    /// The object is a stripe of a large object.
    pub const STRIPE: Self = Self(8);
    /// The reply waits until replica owners have the object, or until the replication has failed: see
    /// [`PutItem::waits`](super::PutItem::waits).
    pub const WAIT_REPLICAS: Self = Self(64);
    /// Field of two bits with the acknowledgement level: the number of a [`PutAck`], or 0.
    const ACK: u8 = 0x30;
    const KNOWN: u8 =
        Self::REPLACE.0 | Self::HARD_PIN.0 | Self::HEAD.0 | Self::STRIPE.0 | Self::WAIT_REPLICAS.0 | Self::ACK;

    /// Returns the flags with these bits, or `None` if one of them is unknown.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !Self::KNOWN == 0 { Some(Self(bits)) } else { None }
    }

    /// Wire form.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns true if all of these flags are set.
    #[must_use]
    pub const fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Returns the role of the object among stripes; a head, if both flags are set.
    #[must_use]
    pub const fn part(self) -> Part {
        match (self.has(Self::HEAD), self.has(Self::STRIPE)) {
            (true, _) => Part::Head,
            (false, true) => Part::Stripe,
            (false, false) => Part::None,
        }
    }

    /// Returns the acknowledgement level, or `None` if it is left to the node.
    #[must_use]
    pub const fn ack(self) -> Option<PutAck> {
        match (self.0 & Self::ACK) >> Self::ACK.trailing_zeros() {
            1 => Some(PutAck::Memory),
            2 => Some(PutAck::Buffered),
            3 => Some(PutAck::Durable),
            _ => None,
        }
    }

    pub(super) const fn with_ack(self, ack: Option<PutAck>) -> Self {
        let number = match ack {
            None => 0,
            Some(PutAck::Memory) => 1,
            Some(PutAck::Buffered) => 2,
            Some(PutAck::Durable) => 3,
        };
        Self(self.0 & !Self::ACK | number << Self::ACK.trailing_zeros())
    }

    pub(super) const fn with(self, flags: Self, set: bool) -> Self {
        if set { Self(self.0 | flags.0) } else { self }
    }
}

/// Reserved bytes: 0 until a later version gives them a meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Zeros;

impl Zeros {
    /// Number of reserved bytes in a [`PutItem`](super::PutItem).
    pub const BYTES: usize = 16;
}

/// Acknowledgement level: the state of an object in which its put is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PutAck {
    /// In memory.
    Memory,
    /// Written to the SSD: the object survives the process.
    Buffered,
    /// Flushed on the SSD: the object survives a power failure.
    Durable,
}

/// Role of an object in a striped object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Part {
    /// A whole object, stored without stripes.
    #[default]
    None,
    /// The stripe head, which names the stripes.
    Head,
    /// A stripe.
    Stripe,
}
