//! Pages of a list: which objects a shard has.
//!
//! A page is a [`ListReply`], as many [`KeyItem`]s as it says, and the names of those in the same order, each the
//! tenant's and then the key.

use super::items::{Item, KeyItem, ListItem, ListReply};
use super::put::{ObjectName, Part, PutOptions};
use crate::digest::Digest;
use crate::limits::Limits;

/// Bytes of a page that are filled at most.
pub const KEY_PAGE_BYTES: usize = 96 * 1024;

const _: () = assert!(2 * KEY_PAGE_BYTES <= Limits::BODY_BYTES);

/// One object of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyView<'a> {
    /// What is known of it.
    pub item: KeyItem,
    /// Its name; without a key where that is not known.
    pub name: ObjectName<'a>,
}

impl ListItem {
    /// Names are wanted.
    pub const NAMES: u64 = 1;
    /// Only the object of the digest is wanted.
    pub const ONE: u64 = 2;
    /// Not objects are wanted, but what was put or removed, in slots that the shard lost, since others had those. Of
    /// each slot there is an item whose digest is zeros below the slot for each owner of whom the shard knows that:
    /// the version is the epoch since which it does, the length says the node, the group the shard. Then come the
    /// digests.
    pub const CHANGES: u64 = 4;
    /// All that is listed is about to be removed, by what it is or is called: what absent owners of the slots have on
    /// their SSDs, which is not listed, is not to come back either.
    pub const REMOVES: u64 = 8;
}

/// The query for one page of a list: where it begins, and of which objects it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PageQuery {
    /// From the page before; 0 to begin.
    pub walk: u64,
    /// From the page before; 0 to begin.
    pub from: u64,
    /// See [`ListItem::NAMES`].
    pub names: bool,
    /// See [`ListItem::ONE`].
    pub one: bool,
    /// See [`ListItem::CHANGES`].
    pub changes: bool,
    /// See [`ListItem::REMOVES`].
    pub removes: bool,
}

impl PageQuery {
    /// The record that asks the owner of a digest's slot for the page.
    #[must_use]
    pub const fn item(self, digest: Digest) -> ListItem {
        let Self { walk, from, names, one, changes, removes } = self;
        let what = (names as u64 * ListItem::NAMES) | (one as u64 * ListItem::ONE);
        let flags = what | (changes as u64 * ListItem::CHANGES) | (removes as u64 * ListItem::REMOVES);
        ListItem { digest, walk, from, flags }
    }
}

impl KeyItem {
    /// It is never evicted.
    pub const HARD_PIN: u32 = 1;
    /// It is in memory.
    pub const IN_MEMORY: u32 = 2;
    /// It is on an SSD.
    pub const ON_SSD: u32 = 4;
    /// It names the stripes in which another is kept.
    pub const HEAD: u32 = 8;
    /// It is a stripe of another.
    pub const STRIPE: u32 = 16;
    /// A second owner is to have it too.
    pub const REPLICAS: u32 = 32;

    /// How it is to be kept, as its putter said.
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
            data_type,
            replace: false,
            part,
            replicas: if flags & Self::REPLICAS != 0 { 2 } else { 0 },
            wait_replicas: false,
            ack: None,
        }
    }

    /// Bytes of its name.
    #[must_use]
    pub const fn name_bytes(&self) -> usize {
        self.key_bytes as usize + self.tenant_bytes as usize
    }
}

/// A page whose body was checked.
#[derive(Clone, Copy, Debug)]
pub struct KeyPage<'a> {
    reply: ListReply,
    items: &'a [u8],
    names: &'a [u8],
}

impl<'a> KeyPage<'a> {
    /// The page in a body; `None` when it is not one.
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

    /// Where the walk is.
    #[must_use]
    pub const fn reply(&self) -> ListReply {
        self.reply
    }

    fn records(&self) -> impl Iterator<Item = KeyItem> + use<'a> {
        self.items.chunks_exact(KeyItem::BYTES).filter_map(KeyItem::decode)
    }

    /// The objects.
    pub fn keys(&self) -> impl Iterator<Item = KeyView<'a>> + use<'a> {
        let mut names = self.names;
        self.records().map_while(move |item| {
            let (name, rest) = names.split_at_checked(item.name_bytes())?;
            names = rest;
            Some(KeyView { item, name: ObjectName::split(name, item.tenant_bytes)? })
        })
    }
}
