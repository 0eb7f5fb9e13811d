//! Object listing, page by page, and removal of listed objects.
//!
//! A listing walks from shard to shard, and through each shard in an order unrelated to keys. Every object that exists
//! from the first page to the last is listed at least once; more than once only if a shard restarts or the owners
//! change meanwhile, because the listing then starts over. Objects that are put or removed meanwhile may or may not be
//! listed. Patterns are matched on the client, to keep that work off the shards.
//!
//! Objects put without their keys ([`super::ClientConfig::keep_keys`]), and stripes of any tenant, are listed without
//! tenant and key. A removal by tenant or by pattern never touches them, because their tenant is unknown.

mod pins;

use kvplane_client::Request;
use kvplane_proto::message::{KeyItem, KeyPage, KeyView, ObjectPriority, PageQuery, Part};
use kvplane_proto::{Digest, Epoch, Limits, Status, Version};
use regex::bytes::{Regex, RegexBuilder};

pub use pins::Pins;

use super::namespace::Namespace;
use super::objects::Objects;
use super::owners::owners_since;
use crate::error::{ArgumentError, Error};

/// Limit on the memory of a compiled pattern and of its lazy DFA, in bytes.
const PATTERN_BYTES: usize = 1 << 20;

/// Object as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyInfo {
    /// Digest, by which shards know the object.
    pub digest: Digest,
    /// The tenant's name.
    pub tenant: Vec<u8>,
    /// Key; empty if the object was put without it.
    pub key: Vec<u8>,
    /// Version.
    pub version: Version,
    /// Length in bytes.
    pub bytes: u64,
    /// Group that the object belongs to; 0 for none.
    pub group: u64,
    /// Data type, as numbered by the application that put the object.
    pub data_type: u8,
    /// Duration of its soft pin, in milliseconds.
    pub soft_pin_ms: u32,
    /// True if the object is never evicted.
    pub hard_pin: bool,
    /// True if a retention keeps it.
    pub retained: bool,
    /// Rank among the tenant's objects when memory is needed.
    pub priority: ObjectPriority,
    /// True if the object is in memory.
    pub in_memory: bool,
    /// True if the object is on an SSD.
    pub on_ssd: bool,
    part: Part,
}

impl KeyInfo {
    fn of(view: &KeyView<'_>) -> Self {
        let item = view.item;
        Self {
            digest: item.digest,
            tenant: view.name.tenant.to_vec(),
            key: view.name.key.to_vec(),
            version: item.version,
            bytes: item.bytes,
            group: item.group,
            data_type: item.data_type,
            soft_pin_ms: item.soft_pin_ms,
            hard_pin: item.flags & KeyItem::HARD_PIN != 0,
            retained: item.flags & KeyItem::RETAINED != 0,
            priority: item.priority(),
            in_memory: item.flags & KeyItem::IN_MEMORY != 0,
            on_ssd: item.flags & KeyItem::ON_SSD != 0,
            part: match item.flags & (KeyItem::HEAD | KeyItem::STRIPE) {
                0 => Part::None,
                KeyItem::STRIPE => Part::Stripe,
                _ => Part::Head,
            },
        }
    }

    /// Returns true for an object that this tenant stored under a key. An entry without a key may belong to any tenant:
    /// its tenant field is meaningless.
    fn is_named_of(&self, tenant: &[u8]) -> bool {
        !self.key.is_empty() && self.part != Part::Stripe && self.tenant == tenant
    }
}

/// Position at which a listing continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListCursor {
    /// Epoch since which the owners are those that were queried so far.
    epoch: Epoch,
    /// Index of the shard, in the order of `Owners::one_slot_each`.
    shard: usize,
    from: u64,
    walk: u64,
}

/// Page of a listing.
#[derive(Clone, Debug, Default)]
pub struct ListPage {
    /// Objects: none to about a thousand.
    pub keys: Vec<KeyInfo>,
    /// Cursor of the next page; `None` after the last page.
    pub next: Option<ListCursor>,
}

/// Keys of a client's tenant, listed and removed by pattern: [`Client::keys`](super::Client::keys).
pub struct Keys<'a> {
    pub(super) objects: &'a mut Objects,
    pub(super) namespace: &'a Namespace,
}

impl<'a> Keys<'a> {
    /// Returns the pins of objects that are set after their puts: soft pins, and retentions.
    #[must_use]
    pub const fn pins(self) -> Pins<'a> {
        Pins { objects: self.objects, namespace: self.namespace }
    }
}

impl Keys<'_> {
    /// Returns the next page of the objects of this client's tenant; `None` starts a listing.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn list(&mut self, cursor: Option<ListCursor>) -> Result<ListPage, Error> {
        let mut page = self.list_all(cursor, false)?;
        // The default tenant's empty name also matches objects without a name, whose tenant is unknown.
        let tenant = self.namespace.tenant();
        page.keys.retain(|key| key.tenant == tenant && key.part != Part::Stripe);
        let mut heads: Vec<&mut KeyInfo> = page.keys.iter_mut().filter(|key| key.part == Part::Head).collect();
        let digests: Vec<Digest> = heads.iter().map(|key| key.digest).collect();
        for (key, bytes) in heads.iter_mut().zip(self.objects.striped_bytes(&digests)?) {
            key.bytes = bytes;
        }
        page.keys.retain(|key| key.bytes > 0);
        Ok(page)
    }

    /// Returns the next page of the objects of all tenants, with names. `removes` announces that the listed objects are
    /// to be removed: objects of nodes that are away must not return either.
    fn list_all(&mut self, cursor: Option<ListCursor>, removes: bool) -> Result<ListPage, Error> {
        let requester = self.objects.requester_mut();
        requester.follow_map();
        let owners = requester.owners()?;
        let slots = owners.one_slot_each();
        let begin = ListCursor { epoch: owners.since(), shard: 0, from: 0, walk: 0 };
        let at = cursor.filter(|cursor| cursor.epoch == begin.epoch).unwrap_or(begin);
        let Some(slot) = slots.get(at.shard) else { return Ok(ListPage::default()) };
        let digest = slot.first_digest();
        let from = PageQuery { walk: at.walk, from: at.from, names: true, removes, ..PageQuery::default() };
        let (mut status, mut body) = requester.list(digest, from)?;
        if removes && status == Status::BadRequest {
            // A node of an earlier version: it discards its objects after it was away.
            (status, body) = requester.list(digest, PageQuery { removes: false, ..from })?;
        }
        if status == Status::Stale {
            // The shard's order has changed: list this shard from the start.
            return Ok(ListPage { keys: Vec::new(), next: Some(ListCursor { from: 0, walk: 0, ..at }) });
        }
        let page = body.as_deref().filter(|_| status == Status::Ok).and_then(KeyPage::decode);
        let Some(page) = page else { return Err(requester.problem("list".to_owned(), status)) };
        let reply = page.reply();
        requester.follow_map();
        let next = match reply.next {
            // Owners changed during the request: a shard that was listed before may now own objects of another.
            _ if requester.map().is_ok_and(|now| owners_since(&now) != at.epoch) => Some(at),
            0 if at.shard + 1 < slots.len() => Some(ListCursor { shard: at.shard + 1, from: 0, walk: 0, ..at }),
            0 => None,
            from => Some(ListCursor { from, walk: reply.walk, ..at }),
        };
        Ok(ListPage { keys: page.keys().map(|view| KeyInfo::of(&view)).collect(), next })
    }

    /// Removes the objects of this client's tenant whose keys match a pattern; returns their number. Keys are bytes,
    /// and a pattern may match any byte (`(?-u)`). Objects stored without keys are never removed, and objects put
    /// meanwhile may or may not be.
    ///
    /// # Errors
    /// When the pattern is malformed or too large, or a shard does not answer.
    pub fn remove_matching(&mut self, pattern: &str) -> Result<u64, Error> {
        let pattern = compile(pattern)?;
        self.remove_listed(|tenant, key| key.is_named_of(tenant) && pattern.is_match(&key.key))
    }

    /// Removes all objects of this client's tenant that were stored with their keys, or with `of_all` those of all
    /// tenants and those without names; returns their number.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn remove_all(&mut self, of_all: bool) -> Result<u64, Error> {
        self.remove_listed(|tenant, key| of_all || key.is_named_of(tenant))
    }

    /// Removes the listed objects that `chosen` accepts, page by page.
    fn remove_listed(&mut self, chosen: impl Fn(&[u8], &KeyInfo) -> bool) -> Result<u64, Error> {
        let (mut cursor, mut removed) = (None, 0);
        loop {
            let page = self.list_all(cursor, true)?;
            let chosen: Vec<&KeyInfo> = page.keys.iter().filter(|key| chosen(self.namespace.tenant(), key)).collect();
            let requests: Vec<Request> = chosen.iter().map(|key| Request::Remove(key.digest)).collect();
            for (result, key) in self.objects.query(&requests)?.into_iter().zip(chosen) {
                // A stripe is a part of an object that is counted already.
                removed += u64::from(self.objects.requester().present(result, "remove")? && key.part != Part::Stripe);
            }
            match page.next {
                Some(next) => cursor = Some(next),
                None => return Ok(removed),
            }
        }
    }
}

/// Compiles a pattern, whose matching time is linear in the length of the key.
fn compile(pattern: &str) -> Result<Regex, ArgumentError> {
    if pattern.len() > Limits::KEY_BYTES {
        return Err(ArgumentError::PatternLength { bytes: pattern.len() });
    }
    let built = RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).dfa_size_limit(PATTERN_BYTES).build();
    built.map_err(ArgumentError::Pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_that_explode_are_refused_and_others_match_bytes() {
        assert!(compile("(").is_err() && compile(&"a".repeat(5000)).is_err());
        let error = compile("((a{100}){100}){100}").expect_err("a pattern of a million letters").to_string();
        assert!(error.contains("limit"), "{error}");
        assert!(compile("^(a+)+$").expect("it is linear here").is_match(b"aaaaaaaaaaaaaaaaaaaaaaaa"));
        assert!(!compile("^(a+)+$").expect("it is linear here").is_match(b"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"));
        assert!(compile(r"(?-u)\xff").expect("bytes").is_match(&[1, 0xff]));
    }
}
