//! Pages of a list of a shard's objects.
//!
//! A page is a [`ListReply`], as many [`KeyItem`]s as it states, and the names of these in the same order, each the
//! tenant's name followed by the key.

use super::items::{Item, KeyItem, ListItem, ListReply};
use super::priority::ObjectPriority;
use super::put::{ObjectName, PutOptions};
use super::put_flags::Part;
use crate::digest::Digest;
use crate::ids::Version;
use crate::limits::Limits;

/// Most bytes of a page.
pub const KEY_PAGE_BYTES: usize = 96 * 1024;

const _: () = assert!(2 * KEY_PAGE_BYTES <= Limits::BODY_BYTES);

/// One object of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyView<'a> {
    /// Record of the object.
    pub item: KeyItem,
    /// Name of the object; without a key if the key is unknown.
    pub name: ObjectName<'a>,
}

impl ListItem {
    /// The reply includes names.
    pub const NAMES: u64 = 1;
    /// The reply includes only the object of this digest.
    pub const ONE: u64 = 2;
    /// The reply lists changes instead of objects: the digests that were put or removed in slots that left the shard,
    /// during the absence of former owners. For each slot, and for each owner whose absence the shard knows of, it
    /// begins with an item whose digest is zeros below the slot: the version is the epoch since which the shard knows
    /// all changes, the length is the node of that owner, the group its shard. The changed digests follow.
    pub const CHANGES: u64 = 4;
    /// The listed objects are about to be removed by pattern. So objects that absent owners of the slots hold on their
    /// SSDs, which the list does not include, must not come back either.
    pub const REMOVES: u64 = 8;
}

/// Query for one page of a list: its position and the selection of objects.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageQuery {
    /// [`ListReply::walk`] of the previous page; 0 for the first page.
    pub walk: u64,
    /// [`ListReply::next`] of the previous page; 0 for the first page.
    pub from: u64,
    pub names: bool,
    pub one: bool,
    pub changes: bool,
    pub removes: bool,
}

impl PageQuery {
    /// Returns the request record for the owner of the digest's slot.
    #[must_use]
    pub const fn item(self, digest: Digest) -> ListItem {
        let Self { walk, from, names, one, changes, removes } = self;
        let what = (names as u64 * ListItem::NAMES) | (one as u64 * ListItem::ONE);
        let flags = what | (changes as u64 * ListItem::CHANGES) | (removes as u64 * ListItem::REMOVES);
        ListItem { digest, walk, from, flags }
    }
}

impl KeyItem {
    /// The object is never evicted (hard pin).
    pub const HARD_PIN: u32 = 1;
    /// The object is in memory.
    pub const IN_MEMORY: u32 = 2;
    /// The object is on the SSD.
    pub const ON_SSD: u32 = 4;
    /// The object is a stripe head.
    pub const HEAD: u32 = 8;
    /// The object is a stripe.
    pub const STRIPE: u32 = 16;
    /// The object is to be replicated: it has two replicas, or more by [`Self::replica_flags`].
    pub const REPLICAS: u32 = 32;
    /// A retention keeps the object from being evicted.
    pub const RETAINED: u32 = 64;
    /// Lowest of the four bits with the object's priority, in two's complement.
    const PRIORITY_AT: u32 = 8;
    /// Lowest of the three bits with the number of the object's replicas beyond two.
    const FURTHER_AT: u32 = 12;

    /// Returns the item of an object of `bytes` bytes without group, tenant, pin and name.
    #[must_use]
    pub const fn plain(digest: Digest, version: Version, bytes: u64, flags: u32) -> Self {
        Self {
            digest,
            version,
            bytes,
            group: 0,
            tenant: 0,
            soft_pin_ms: 0,
            key_bytes: 0,
            tenant_bytes: 0,
            data_type: 0,
            flags,
        }
    }

    /// Returns the bits of [`KeyItem::flags`] for an object that is to have so many replicas, the owner's included.
    #[must_use]
    pub const fn replica_flags(replicas: u8) -> u32 {
        match replicas {
            0 | 1 => 0,
            _ => Self::REPLICAS | ((replicas - 2) as u32 & 7) << Self::FURTHER_AT,
        }
    }

    /// Returns the number of replicas that the object is to have, the owner's included; 0 if it is not replicated.
    #[must_use]
    pub const fn replicas(&self) -> u8 {
        let further = (self.flags >> Self::FURTHER_AT & 7) as u8;
        if self.flags & Self::REPLICAS != 0 { 2 + further } else { 0 }
    }

    /// Returns the bits of [`KeyItem::flags`] for an object of this priority.
    #[must_use]
    pub const fn priority_flags(priority: ObjectPriority) -> u32 {
        (priority.nibble() as u32) << Self::PRIORITY_AT
    }

    /// Returns the priority of the object.
    #[must_use]
    pub const fn priority(&self) -> ObjectPriority {
        ObjectPriority::from_nibble((self.flags >> Self::PRIORITY_AT & 0xf) as u8)
    }

    /// Returns the put options that the object was stored with.
    #[must_use]
    pub const fn options(&self) -> PutOptions {
        let Self { tenant, group, soft_pin_ms, data_type, flags, .. } = *self;
        let part = match (flags & Self::HEAD != 0, flags & Self::STRIPE != 0) {
            (true, _) => Part::Head,
            (false, true) => Part::Stripe,
            (false, false) => Part::None,
        };
        PutOptions {
            tenant,
            group,
            soft_pin_ms,
            hard_pin: flags & Self::HARD_PIN != 0,
            priority: self.priority(),
            data_type,
            replace: false,
            part,
            replicas: self.replicas(),
            wait_replicas: 0,
            ack: None,
        }
    }

    /// Returns the length of the object's name in bytes.
    #[must_use]
    pub const fn name_bytes(&self) -> usize {
        self.key_bytes as usize + self.tenant_bytes as usize
    }
}

/// A page whose body was validated.
#[derive(Clone, Copy, Debug)]
pub struct KeyPage<'a> {
    reply: ListReply,
    items: &'a [u8],
    names: &'a [u8],
}

impl<'a> KeyPage<'a> {
    /// Decodes a page; `None` if the body is malformed.
    #[must_use]
    pub fn decode(body: &'a [u8]) -> Option<Self> {
        let (head, rest) = body.split_at_checked(ListReply::BYTES)?;
        let reply = ListReply::decode(head)?;
        let bytes = usize::try_from(reply.items).ok()?.checked_mul(KeyItem::BYTES)?;
        let (items, names) = rest.split_at_checked(bytes)?;
        let page = Self { reply, items, names };
        let named: usize = page.records().map(|item| item.name_bytes()).sum();
        (named == names.len()).then_some(page)
    }

    /// Returns the head of the page, with the position of the next page.
    #[must_use]
    pub const fn reply(&self) -> ListReply {
        self.reply
    }

    fn records(&self) -> impl Iterator<Item = KeyItem> + use<'a> {
        self.items.chunks_exact(KeyItem::BYTES).filter_map(KeyItem::decode)
    }

    /// Returns the objects of the page.
    pub fn keys(&self) -> impl Iterator<Item = KeyView<'a>> + use<'a> {
        let mut names = self.names;
        self.records().map_while(move |item| {
            let (name, rest) = names.split_at_checked(item.name_bytes())?;
            names = rest;
            Some(KeyView { item, name: ObjectName::split(name, item.tenant_bytes)? })
        })
    }
}
