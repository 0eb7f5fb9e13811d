//! Puts: the name of an object and the options it is stored with.
//!
//! A body of puts is its [`PutItem`]s followed by their names, in the same order and without separators. A name is the
//! tenant's name and the key, from which the digest is computed, so the shard can verify that a name belongs to its
//! object.

use super::items::{Item, Items, PutItem, decode_items};
use super::priority::ObjectPriority;
use super::put_flags::{Part, PutAck, PutFlags, Zeros};
use crate::digest::Digest;
use crate::limits::Limits;

/// Options that an object is stored with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PutOptions {
    /// Number of the tenant that the object is charged to, by [`crate::digest::tenant_number`]. The client fills in its
    /// own tenant.
    pub tenant: u32,
    /// Group of the object; 0 for none.
    pub group: u64,
    /// Soft pin: time in milliseconds during which other objects are evicted first, at most [`Limits::SOFT_PIN_MS`]; 0
    /// for none.
    pub soft_pin_ms: u32,
    /// True if the object is never evicted.
    pub hard_pin: bool,
    /// Rank among the objects of its tenant when memory is needed: a lower one is evicted before.
    pub priority: ObjectPriority,
    /// Data type, a number chosen by the caller.
    pub data_type: u8,
    /// True if an existing object is replaced. Otherwise it is left as it is.
    pub replace: bool,
    /// Role of the object in a large object that is stored in stripes; set by clients that stripe.
    pub part: Part,
    /// Number of replicas, the owner's included, up to [`Limits::REPLICAS`]; 0 and 1 mean one. More than one is best
    /// effort, and an object has at most as many as its slot has owners.
    pub replicas: u8,
    /// Number of replicas, the owner's included, that the reply of the put waits for, or until it is clear that there
    /// are not so many; 0 and 1 for none but the owner's. More than `replicas` means `replicas`.
    pub wait_replicas: u8,
    /// Acknowledgement level; `None` leaves it to the node's policy. A level that needs the SSD writes the object
    /// through to it at once, whatever the node's policy, and fails as [`crate::Status::NoSsd`] on a node without an
    /// SSD. A put that is answered `Exists` promises nothing.
    pub ack: Option<PutAck>,
}

impl PutOptions {
    /// Default soft pin: half an hour, as in Mooncake.
    pub const SOFT_PIN_MS: u32 = 1_800_000;
}

impl PutItem {
    /// Returns a put of `bytes` bytes under a digest, without name and options.
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
            priority: ObjectPriority::NORMAL,
            waits: 0,
            zeros: Zeros,
        }
    }

    /// Returns a put of an object with this name, which is within the limits.
    #[must_use]
    pub fn named(name: &ObjectName<'_>, bytes: u64, options: &PutOptions) -> Self {
        debug_assert!(name.is_within_limits());
        Self {
            key_bytes: crate::narrowing::length_u16(name.key.len()),
            tenant_bytes: crate::narrowing::length_u8(name.tenant.len()),
            ..Self::plain(name.digest(), bytes).with_options(options)
        }
    }

    /// Returns the put with these options.
    #[must_use]
    pub const fn with_options(self, options: &PutOptions) -> Self {
        let PutOptions { tenant, group, soft_pin_ms, hard_pin, data_type, replace, part, .. } = *options;
        let PutOptions { replicas, wait_replicas, ack, priority, .. } = *options;
        let flags = PutFlags(0).with(PutFlags::REPLACE, replace).with(PutFlags::HARD_PIN, hard_pin);
        let flags = flags.with(PutFlags::HEAD, matches!(part, Part::Head));
        let flags = flags.with(PutFlags::STRIPE, matches!(part, Part::Stripe)).with_ack(ack);
        let most = Limits::REPLICAS;
        let flags = flags.with(PutFlags::WAIT_REPLICAS, wait_replicas > 1);
        let replicas = if replicas > most { most } else { replicas };
        let waits = if wait_replicas > 1 && wait_replicas < replicas { wait_replicas } else { 0 };
        Self { tenant, group, soft_pin_ms, data_type, flags, replicas, priority, waits, ..self }
    }

    /// Returns the options of the put.
    #[must_use]
    pub const fn options(&self) -> PutOptions {
        PutOptions {
            tenant: self.tenant,
            group: self.group,
            soft_pin_ms: self.soft_pin_ms,
            hard_pin: self.flags.has(PutFlags::HARD_PIN),
            priority: self.priority,
            data_type: self.data_type,
            replace: self.flags.has(PutFlags::REPLACE),
            part: self.flags.part(),
            replicas: self.replicas,
            wait_replicas: match (self.flags.has(PutFlags::WAIT_REPLICAS), self.waits) {
                (false, _) => 0,
                (true, 0) => self.replicas,
                (true, waits) => waits,
            },
            ack: self.flags.ack(),
        }
    }

    /// Returns the length of the object's name in bytes.
    #[must_use]
    pub const fn name_bytes(&self) -> usize {
        self.key_bytes as usize + self.tenant_bytes as usize
    }
}

/// Name of an object: tenant and key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectName<'a> {
    /// Name of the tenant; empty for the default tenant.
    pub tenant: &'a [u8],
    /// The key; empty if the object has no name.
    pub key: &'a [u8],
}

impl<'a> ObjectName<'a> {
    /// The empty name, of an object that is known by its digest only.
    pub const NONE: Self = Self { tenant: &[], key: &[] };

    /// Returns the digest of the object.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(self.tenant, self.key)
    }

    /// Returns true if the name is within the limits of the wire.
    #[must_use]
    pub const fn is_within_limits(&self) -> bool {
        self.tenant.len() <= Limits::NAME_BYTES && self.key.len() <= Limits::KEY_BYTES
    }

    /// Splits bytes that begin with the tenant's name.
    #[must_use]
    pub fn split(bytes: &'a [u8], tenant_bytes: u8) -> Option<Self> {
        let (tenant, key) = bytes.split_at_checked(tenant_bytes.into())?;
        Some(Self { tenant, key })
    }
}

/// Iterator over the puts of a validated body, with their names.
#[derive(Clone, Debug)]
pub struct Puts<'a> {
    items: Items<'a, PutItem>,
    names: &'a [u8],
}

/// Decodes a body of `items` puts. Returns `None` if the body has another length, a record is invalid or a name exceeds
/// the limits.
#[must_use]
pub fn decode_puts(body: &[u8], items: u32) -> Option<Puts<'_>> {
    let (records, names) = body.split_at_checked((items as usize).checked_mul(PutItem::BYTES)?)?;
    let items = decode_items::<PutItem>(records, items)?;
    let meant = |item: &PutItem| {
        // A tenant's name without a key is not a name.
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
