//! Lists: which objects are there, page by page, under concurrent change.
//!
//! Objects are walked in an order that has nothing to do with where they are: by 32 bits of a salted mix of the digest.
//! Memory's index and the SSD's are laid out by it, so a piece of the order is a piece of either table, and both are
//! looked at in one step. So whoever is there all the while is seen: in memory, on the SSD, or going from one to the
//! other. An object may be seen again only if the walk begins anew.
//!
//! A step looks at some thousand places, and between two steps the shard does whatever else there is. Names are read
//! from the pool by the host's leave ([`Service::drive_lists`]), and from the SSD where only that has them.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{Item, KEY_PAGE_BYTES, KeyItem, ListItem, ListReply, ObjectName, Operation, Part};
use kvplane_proto::rng::mix64;
use kvplane_proto::{Digest, Limits, Status};
use kvplane_tier::RecordView;

use super::Service;
use super::answers::items_of;
use super::context::RequestContext;
use super::tail::{TAIL_HEAD_BYTES, TailHead, tail_within};
use super::tenants::tenant_of;
use super::types::{CloseReason, PayloadTo, PeerKey};
use crate::{ObjectView, Replica};

/// Places of an index that one step looks at.
const STEP_PLACES: u64 = 2048;
/// A page is answered after so many objects.
const PAGE_ITEMS: usize = 1024;
/// Of these, so many may have names that are on the SSD only.
const PAGE_READS: usize = 64;
/// One beyond the last point.
const END: u64 = 1 << 32;
/// Flags of a [`ListItem`].
const NAMES: u64 = ListItem::NAMES;
const ONE: u64 = ListItem::ONE;
const CHANGES: u64 = ListItem::CHANGES;
const REMOVES: u64 = ListItem::REMOVES;

/// The pool's memory, to look at.
pub trait PoolBytes {
    /// Copies out what lies at `offset`.
    fn read(&self, offset: u64, into: &mut [u8]);
    /// How long it is.
    fn bytes(&self) -> u64;
}

/// Lists under way.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub(super) open: BTreeMap<u64, List>,
    next: u64,
}

/// One answer that is being made.
#[derive(Debug)]
pub(super) struct List {
    peer: PeerKey,
    request: RequestId,
    names: bool,
    /// Whether only what left with its slot is wanted.
    fetches: bool,
    /// Only this tenant's objects.
    tenant: Option<u32>,
    /// The only object that is wanted.
    one: Option<Digest>,
    /// How far it has come.
    at: u64,
    pub(super) page: Vec<ListEntry>,
    page_bytes: usize,
    /// Whether the page is full, but for names that are being read.
    is_full: bool,
    /// Names that are to be read or are being read.
    pub(super) wanted: Vec<usize>,
    pub(super) reading: usize,
}

/// An object of a page.
#[derive(Debug)]
pub(super) struct ListEntry {
    pub(super) item: KeyItem,
    tail: Vec<u8>,
    /// It is no more.
    pub(super) is_gone: bool,
}

impl ListEntry {
    fn new(digest: Digest, version: kvplane_proto::Version, bytes: u64, flags: u32) -> Self {
        let item = KeyItem {
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
        };
        Self { item, tail: Vec::new(), is_gone: false }
    }

    /// Takes a tail, if it is the object's.
    pub(super) fn set_tail(&mut self, tail: Vec<u8>) {
        let Some((head, name)) = TailHead::split(&tail) else { return };
        if !is_name_of(&head, &name, self.item.digest) {
            return;
        }
        let options = head.options;
        (self.item.group, self.item.tenant) = (options.group, options.tenant);
        (self.item.soft_pin_ms, self.item.data_type) = (options.soft_pin_ms, options.data_type);
        self.item.flags |= if options.hard_pin { KeyItem::HARD_PIN } else { 0 };
        // Whether it names stripes is known without its tail.
        self.item.flags |= if options.part == Part::Stripe { KeyItem::STRIPE } else { 0 };
        (self.item.key_bytes, self.item.tenant_bytes) = (head.key_bytes, head.tenant_bytes);
        self.tail = tail;
    }
}

impl List {
    /// Whether a name is to be read that is on the SSD: it is wanted, or it says whose the object is.
    const fn wants_name(&self, elsewhere: bool) -> bool {
        elsewhere && (self.names || self.tenant.is_some())
    }

    /// A name was read: the object belongs to the page if it is of the tenant that is asked for.
    pub(super) fn take_name(&mut self, at: usize, version: kvplane_proto::Version, tail: Vec<u8>) {
        let listed = &mut self.page[at];
        listed.item.version = version;
        let tail_of = |tail| TailHead::split(tail).filter(|(head, name)| is_name_of(head, name, listed.item.digest));
        let tenant = tail_of(&tail).map(|(head, name)| tenant_of(&head, &name));
        listed.is_gone |= self.tenant.is_some_and(|own| tenant != Some(own));
        if self.names {
            listed.set_tail(tail);
        }
    }
}

impl Service {
    pub(super) fn list(
        &mut self,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<PayloadTo, CloseReason> {
        let mut items = items_of::<ListItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a list of not one item"));
        };
        let asked = match self.may_ask(context, item.digest) {
            // Any slot says which shard is meant, whether or not it is still on its way, and whoever has an object
            // there.
            Err(Status::Stale | Status::Unauthorized) if item.flags & ONE == 0 => Ok(()),
            asked => asked,
        };
        let status = if let Err(status) = asked {
            status
        } else if item.flags & !(NAMES | ONE | if context.fetches { CHANGES } else { REMOVES }) != 0
            || item.from >= END
            || (item.walk == 0) != (item.from == 0)
        {
            Status::BadRequest
        } else if item.walk != 0
            && item.walk != if item.flags & CHANGES == 0 { self.walk_tag() } else { self.changes_tag() }
        {
            // Of another incarnation, in which another order was walked.
            Status::Stale
        } else if item.flags & CHANGES != 0 {
            self.answer_changes(context.peer, header, item.from);
            return Ok(PayloadTo::Discard);
        } else if self.lists.open.len() >= Limits::LISTS || self.finds_more(context, item.flags) {
            Status::Busy
        } else {
            if item.flags & REMOVES != 0 {
                self.forget_absent();
            }
            self.lists.next += 1;
            let list = List {
                peer: context.peer,
                request: header.request,
                names: item.flags & NAMES != 0,
                fetches: context.fetches,
                tenant: context.tenant,
                one: (item.flags & ONE != 0).then_some(item.digest),
                at: item.from,
                page: Vec::new(),
                page_bytes: ListReply::BYTES,
                is_full: false,
                wanted: Vec::new(),
                reading: 0,
            };
            self.lists.open.insert(self.lists.next, list);
            return Ok(PayloadTo::Discard);
        };
        self.refuse(context.peer, Operation::List, header.request, status);
        Ok(PayloadTo::Discard)
    }

    /// Whether a list could miss objects that the SSD still finds, as after a start, or that are being compared. A
    /// removal of all that is listed would leave them, and say that it is done. Whoever fetches asks for each object
    /// again when it is wanted.
    fn finds_more(&self, context: &RequestContext, flags: u64) -> bool {
        let in_doubt = || self.compares() || flags & REMOVES != 0 && self.awaits_changes();
        flags & ONE == 0 && !context.fetches && (self.tier_recovers() || in_doubt())
    }

    /// The names of these objects: of each that has one behind it in memory its place here, its tenant and its key.
    #[must_use]
    pub fn names_of(&self, digests: &[Digest], pool: &dyn PoolBytes) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        let Some(store) = &self.store else { return Vec::new() };
        let mut names = Vec::new();
        for (at, digest) in digests.iter().enumerate() {
            let Some(view) = store.peek(*digest).filter(|view| view.has_tail) else { continue };
            let tail = read_tail(view.tail_at, pool);
            // Whoever has mapped the pool may have spoilt it.
            if let Some((head, name)) = TailHead::split(&tail)
                && head.key_bytes > 0
                && name.digest() == *digest
            {
                names.push((at, name.tenant.to_vec(), name.key.to_vec()));
            }
        }
        names
    }

    /// Names the order of this incarnation of the shard; never 0.
    pub(super) fn walk_tag(&self) -> u64 {
        let seed = self.store.as_ref().map_or(0, |store| store.config().hash_seed);
        mix64(seed ^ mix64(self.ownership.identity().incarnation.0)) | 1
    }

    /// Goes on with lists: one step of each. Whether there was anything to do. The host calls it in every round.
    pub fn drive_lists(&mut self, pool: &dyn PoolBytes) -> bool {
        if self.lists.open.is_empty() {
            return false;
        }
        let ids: Vec<u64> = self.lists.open.keys().copied().collect();
        let mut progress = false;
        for id in ids {
            let Some(mut list) = self.lists.open.remove(&id) else { continue };
            if self.sessions.get_mut(list.peer).is_none() {
                progress = true;
                // What is being read for it is dropped when it comes.
                continue;
            }
            if !list.is_full {
                self.list_step(&mut list, pool);
                progress = true;
            }
            progress |= self.read_names(id, &mut list);
            if list.is_full && list.wanted.is_empty() && list.reading == 0 {
                self.answer_list(list);
            } else {
                self.lists.open.insert(id, list);
            }
        }
        progress
    }

    /// Looks at the next piece of the order.
    fn list_step(&mut self, list: &mut List, pool: &dyn PoolBytes) {
        let Some(store) = &self.store else { return };
        if list.one.is_some() {
            self.list_one(list, pool);
            return;
        }
        let places = self.tier_places().max(store.places()) as u64;
        let to = list.at.saturating_add((STEP_PLACES << 32).div_ceil(places)).min(END);
        let mut found: Vec<(u32, ListEntry, u64, bool)> = Vec::new();
        for (point, digest, view) in store.between(list.at, to) {
            if view.replica == Replica::Second {
                continue;
            }
            let mut listed = ListEntry::new(digest, view.version, view.extent.bytes, in_memory(&view));
            let on_ssd = self.on_ssd(digest).filter(|record| record.version == view.version);
            listed.item.flags |= if on_ssd.is_some() { KeyItem::ON_SSD } else { 0 };
            let elsewhere = !view.has_tail && on_ssd.is_some_and(|record| record.key_bytes > 0);
            let tail_at = if view.has_tail { view.tail_at } else { u64::MAX };
            found.push((point, listed, tail_at, elsewhere));
        }
        for record in self.tier_between(list.at, to) {
            if !store.exists(record.digest) {
                let flags = on_ssd_alone(&record);
                let listed = ListEntry::new(record.digest, record.version, record.payload_bytes.into(), flags);
                found.push((self.tier_point(record.digest), listed, u64::MAX, record.key_bytes > 0));
            }
        }
        if let Some(own) = list.tenant {
            // Whose the others are stands in their names, which are to be read anyway.
            let may_be_own = |digest, elsewhere| self.whose(digest).map_or(elsewhere, |tenant| tenant == own);
            found.retain(|(_, listed, _, elsewhere)| may_be_own(listed.item.digest, *elsewhere));
        }
        if list.fetches {
            found.retain(|(_, listed, ..)| self.moves.exports.has(listed.item.digest));
        }
        found.sort_unstable_by_key(|(point, ..)| *point);
        list.at = to;
        let mut last = None;
        for (point, mut listed, tail_at, elsewhere) in found {
            // Objects of one point go together, as the next page begins with a point.
            let room = list.page_bytes < KEY_PAGE_BYTES && list.page.len() < PAGE_ITEMS;
            if last != Some(point) && !(room && list.wanted.len() < PAGE_READS) {
                list.at = point.into();
                list.is_full = true;
                return;
            }
            last = Some(point);
            if list.names && tail_at != u64::MAX {
                listed.set_tail(read_tail(tail_at, pool));
            }
            // A name that is still to come may be the longest.
            let wanted = list.wants_name(elsewhere);
            let name_bytes = if wanted { Limits::NAME_BYTES } else { listed.item.name_bytes() };
            list.page_bytes += KeyItem::BYTES + name_bytes;
            if wanted {
                list.wanted.push(list.page.len());
            }
            list.page.push(listed);
        }
        let enough = list.page.len() >= PAGE_ITEMS / 2 || list.page_bytes >= KEY_PAGE_BYTES / 2;
        list.is_full = to == END || enough || !list.wanted.is_empty();
    }

    /// Finds one object.
    fn list_one(&self, list: &mut List, pool: &dyn PoolBytes) {
        (list.at, list.is_full) = (END, true);
        let (Some(digest), Some(store)) = (list.one, &self.store) else { return };
        let (view, record) = (store.peek(digest), self.on_ssd(digest));
        let of_another = list.tenant.is_some_and(|own| self.whose(digest).is_some_and(|tenant| tenant != own));
        let copy = view.is_some_and(|view| view.replica == Replica::Second);
        if of_another || copy || !self.keeps(digest) {
            return;
        }
        let (mut listed, elsewhere) = match (view, record) {
            (Some(view), _) => {
                let mut listed = ListEntry::new(digest, view.version, view.extent.bytes, in_memory(&view));
                if list.names && view.has_tail {
                    listed.set_tail(read_tail(view.tail_at, pool));
                }
                (listed, !view.has_tail && record.is_some_and(|record| record.key_bytes > 0))
            }
            (None, Some(record)) => {
                let bytes = record.payload_bytes.into();
                (ListEntry::new(digest, record.version, bytes, on_ssd_alone(&record)), record.key_bytes > 0)
            }
            (None, None) => return,
        };
        if list.tenant.is_some() && self.whose(digest).is_none() && !elsewhere {
            return;
        }
        listed.item.flags |= if record.is_some() { KeyItem::ON_SSD } else { 0 };
        if list.wants_name(elsewhere) {
            list.wanted.push(0);
        }
        list.page.push(listed);
    }

    /// Answers what changed in the slots that left, from a place on.
    fn answer_changes(&mut self, peer: PeerKey, header: &Header, from: u64) {
        let (items, next) = self.changes_page(from);
        let reply = ListReply { walk: self.changes_tag(), next, items: items.len() as u64 };
        self.answers.items(peer, Operation::List, header.request, 1, |body| {
            reply.encode(body);
            items.iter().for_each(|item| item.encode(body));
        });
    }

    fn answer_list(&mut self, list: List) {
        let next = if list.at == END { 0 } else { list.at };
        let here: Vec<ListEntry> = list.page.into_iter().filter(|listed| !listed.is_gone).collect();
        let reply = ListReply { walk: self.walk_tag(), next, items: here.len() as u64 };
        self.answers.items(list.peer, Operation::List, list.request, 1, |body| {
            reply.encode(body);
            here.iter().for_each(|listed| listed.item.encode(body));
            let names = here.iter().map(|listed| listed.tail.get(TAIL_HEAD_BYTES..).unwrap_or_default());
            names.for_each(|name| body.extend_from_slice(name));
        });
    }
}

/// Whether a tail may be an object's. Whoever has mapped the pool may have spoilt it.
fn is_name_of(head: &TailHead, name: &ObjectName<'_>, digest: Digest) -> bool {
    head.key_bytes == 0 || name.digest() == digest
}

/// The tail at a place of the pool; nothing where there is none.
fn read_tail(at: u64, pool: &dyn PoolBytes) -> Vec<u8> {
    tail_within(at, pool.bytes(), |at, into| pool.read(at, into))
}

/// What a page says of an object in memory.
const fn in_memory(view: &ObjectView) -> u32 {
    let wanted = view.replica.is_owed_a_copy();
    KeyItem::IN_MEMORY | if wanted { KeyItem::REPLICAS } else { 0 } | if view.is_head { KeyItem::HEAD } else { 0 }
}

/// What a page says of an object on the SSD alone.
const fn on_ssd_alone(record: &RecordView) -> u32 {
    KeyItem::ON_SSD | if record.names_parts { KeyItem::HEAD } else { 0 }
}
