//! What a put says about its object beside its bytes: its name, and how it is to be kept.
//!
//! A body of puts is its [`PutItem`]s and then their names, in the same order and without anything between them. A name
//! is the tenant's and the key, of which the digest is made: whoever has the name can tell whether it is the object's.

use super::items::{Item, Items, PutItem, decode_items};
use crate::digest::Digest;
use crate::limits::Limits;

/// Bits of [`PutItem::flags`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutFlags(pub(super) u8);

impl PutFlags {
    /// An object that is there is replaced, not left as it is.
    pub const REPLACE: Self = Self(1);
    /// The object is not evicted.
    pub const HARD_PIN: Self = Self(2);
    /// The object only names the stripes in which another is kept.
    pub const HEAD: Self = Self(4);
    /// The object is a stripe of another.
    pub const STRIPE: Self = Self(8);
    /// The answer waits until the replica owners have the object, or turn out not to take it.
    pub const WAIT_REPLICAS: Self = Self(64);
    /// The field of two bits that says what the put's answer waits for: [`PutAck`] by a number, or 0.
    const ACK: u8 = 0x30;
    const KNOWN: u8 =
        Self::REPLACE.0 | Self::HARD_PIN.0 | Self::HEAD.0 | Self::STRIPE.0 | Self::WAIT_REPLICAS.0 | Self::ACK;

    /// The flags with these bits, if all of them are known.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !Self::KNOWN == 0 { Some(Self(bits)) } else { None }
    }

    /// Their bits.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Whether these flags are among them.
    #[must_use]
    pub const fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// What the object is of another. A head, where it claims to be both.
    #[must_use]
    pub const fn part(self) -> Part {
        match (self.has(Self::HEAD), self.has(Self::STRIPE)) {
            (true, _) => Part::Head,
            (false, true) => Part::Stripe,
            (false, false) => Part::None,
        }
    }

    /// What the put's answer is to wait for, where that is not left to the node.
    #[must_use]
    pub const fn ack(self) -> Option<PutAck> {
        match (self.0 & Self::ACK) >> Self::ACK.trailing_zeros() {
            1 => Some(PutAck::Memory),
            2 => Some(PutAck::Buffered),
            3 => Some(PutAck::Durable),
            _ => None,
        }
    }

    const fn with_ack(self, ack: Option<PutAck>) -> Self {
        let number = match ack {
            None => 0,
            Some(PutAck::Memory) => 1,
            Some(PutAck::Buffered) => 2,
            Some(PutAck::Durable) => 3,
        };
        Self(self.0 & !Self::ACK | number << Self::ACK.trailing_zeros())
    }

    const fn with(self, flags: Self, set: bool) -> Self {
        if set { Self(self.0 | flags.0) } else { self }
    }
}

/// Bytes that are 0 until a later version gives them a meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Zeros;

impl Zeros {
    /// How many there are in a [`PutItem`].
    pub const BYTES: usize = 18;
}

/// When a put is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PutAck {
    /// When it is in memory.
    Memory,
    /// When the SSD has taken it: it outlives the process.
    Buffered,
    /// When it would outlive a power failure.
    Durable,
}

/// How an object is to be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutOptions {
    /// The tenant that it is charged to, by [`crate::digest::tenant_number`]. The client's own: it fills this in.
    pub tenant: u32,
    /// The group that it belongs to; 0 for none.
    pub group: u64,
    /// For how long it is kept before others, in milliseconds, at most [`Limits::SOFT_PIN_MS`]; 0 for not at all.
    pub soft_pin_ms: u32,
    /// Whether it is never evicted.
    pub hard_pin: bool,
    /// What it is, by the caller's numbers.
    pub data_type: u8,
    /// Whether an object that is there is replaced. Else it is left as it is.
    pub replace: bool,
    /// What it is of a large object that is kept in stripes. Clients that stripe set it.
    pub part: Part,
    /// How many owners are to have it, up to [`Limits::REPLICAS`]: 0 and 1 mean one. More than one as far as that is
    /// possible.
    pub replicas: u8,
    /// Whether the answer of the put waits until the others have it, or turn out not to take it.
    pub wait_replicas: bool,
    /// When the put is answered; `None` leaves that to the node. What asks for the SSD is written at once, whatever the
    /// node's policy, and refused as [`crate::Status::NoSsd`] where there is none. A put that is answered `Exists`
    /// promises nothing.
    pub ack: Option<PutAck>,
}

/// What an object is of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Part {
    /// Nothing: it is its own.
    #[default]
    None,
    /// It names the stripes.
    Head,
    /// It is one.
    Stripe,
}

impl PutOptions {
    /// How long a soft pin lasts where nobody has a better idea: half an hour, as Mooncake's does.
    pub const SOFT_PIN_MS: u32 = 1_800_000;
}

impl PutItem {
    /// A put of so many bytes under a digest, without name or wishes.
    #[must_use]
    pub const fn plain(digest: Digest, bytes: u64) -> Self {
        Self {
            digest,
            bytes,
            group: 0,
            tenant: 0,
            soft_pin_ms: 0,
            key_bytes: 0,
            tenant_bytes: 0,
            data_type: 0,
            flags: PutFlags(0),
            replicas: 0,
            zeros: Zeros,
        }
    }

    /// A put of an object of this name, which is within the limits.
    #[must_use]
    pub fn named(name: &ObjectName<'_>, bytes: u64, options: &PutOptions) -> Self {
        debug_assert!(name.is_within_limits());
        Self {
            key_bytes: name.key.len() as u16,
            tenant_bytes: name.tenant.len() as u8,
            ..Self::plain(name.digest(), bytes).with_options(options)
        }
    }

    /// The same with these wishes.
    #[must_use]
    pub const fn with_options(self, options: &PutOptions) -> Self {
        let PutOptions { tenant, group, soft_pin_ms, hard_pin, data_type, replace, part, .. } = *options;
        let PutOptions { replicas, wait_replicas, ack, .. } = *options;
        let flags = PutFlags(0).with(PutFlags::REPLACE, replace).with(PutFlags::HARD_PIN, hard_pin);
        let flags = flags.with(PutFlags::HEAD, matches!(part, Part::Head));
        let flags = flags.with(PutFlags::STRIPE, matches!(part, Part::Stripe)).with_ack(ack);
        let most = Limits::REPLICAS;
        let flags = flags.with(PutFlags::WAIT_REPLICAS, wait_replicas);
        let replicas = if replicas > most { most } else { replicas };
        Self { tenant, group, soft_pin_ms, data_type, flags, replicas, ..self }
    }

    /// How the object is to be kept.
    #[must_use]
    pub const fn options(&self) -> PutOptions {
        PutOptions {
            tenant: self.tenant,
            group: self.group,
            soft_pin_ms: self.soft_pin_ms,
            hard_pin: self.flags.has(PutFlags::HARD_PIN),
            data_type: self.data_type,
            replace: self.flags.has(PutFlags::REPLACE),
            part: self.flags.part(),
            replicas: self.replicas,
            wait_replicas: self.flags.has(PutFlags::WAIT_REPLICAS),
            ack: self.flags.ack(),
        }
    }

    /// Bytes of its name.
    #[must_use]
    pub const fn name_bytes(&self) -> usize {
        self.key_bytes as usize + self.tenant_bytes as usize
    }
}

/// What an object is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectName<'a> {
    /// Whose it is; empty for the default tenant.
    pub tenant: &'a [u8],
    /// The key; empty where it is not told.
    pub key: &'a [u8],
}

impl<'a> ObjectName<'a> {
    /// No name.
    pub const NONE: Self = Self { tenant: &[], key: &[] };

    /// The object's digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(self.tenant, self.key)
    }

    /// Whether it can be told.
    #[must_use]
    pub const fn is_within_limits(&self) -> bool {
        self.tenant.len() <= Limits::NAME_BYTES && self.key.len() <= Limits::KEY_BYTES
    }

    /// Splits bytes in which the tenant's name comes first.
    #[must_use]
    pub fn split(bytes: &'a [u8], tenant_bytes: u8) -> Option<Self> {
        let (tenant, key) = bytes.split_at_checked(tenant_bytes.into())?;
        Some(Self { tenant, key })
    }
}

/// The puts of a checked body, with their names.
#[derive(Clone, Debug)]
pub struct Puts<'a> {
    items: Items<'a, PutItem>,
    names: &'a [u8],
}

/// The puts of a body that states `items` of them. `None` when its length says otherwise, a record has no meaning or a
/// name is over the limits.
#[must_use]
pub fn decode_puts(body: &[u8], items: u32) -> Option<Puts<'_>> {
    let (records, names) = body.split_at_checked((items as usize).checked_mul(PutItem::BYTES)?)?;
    let items = decode_items::<PutItem>(records, items)?;
    let meant = |item: &PutItem| {
        // A tenant's name alone names nothing.
        usize::from(item.key_bytes) <= Limits::KEY_BYTES
            && item.soft_pin_ms <= Limits::SOFT_PIN_MS
            && (item.key_bytes > 0 || item.tenant_bytes == 0)
    };
    let all = items.clone().all(|item| meant(&item));
    let bytes: usize = items.clone().map(|item| item.name_bytes()).sum();
    (all && bytes == names.len()).then_some(Puts { items, names })
}

impl<'a> Iterator for Puts<'a> {
    type Item = (PutItem, ObjectName<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.items.next()?;
        let (name, rest) = self.names.split_at_checked(item.name_bytes())?;
        self.names = rest;
        Some((item, ObjectName::split(name, item.tenant_bytes)?))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.items.size_hint()
    }
}

impl ExactSizeIterator for Puts<'_> {}
