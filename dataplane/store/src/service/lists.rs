//! Lists: pages of a shard's keys, consistent under concurrent change.
//!
//! Objects are walked in an order that does not depend on where they are: by 32 bits of a salted mix of the digest. The
//! indexes of memory and SSD are laid out by it, so that a range of the order is a range of either table, and both are
//! read in one step. An object that exists all the while is therefore seen: in memory, on the SSD, or moving from one
//! to the other. An object can be seen twice only if the walk begins anew.
//!
//! A step looks at some thousand index entries, and the shard does other work between two steps. Names are read from
//! the pool through the host ([`Lists::drive`]), and from the SSD if only the SSD has them.

use std::collections::BTreeMap;

use kvplane_proto::frame::Header;
use kvplane_proto::ids::{RequestId, Version};
use kvplane_proto::message::{Item, KEY_PAGE_BYTES, KeyItem, ListItem, ListReply, ObjectName, Operation, Part};
use kvplane_proto::{Digest, Limits, Status};
use kvplane_tier::{GetError, RecordView};

use super::local::LocalStore;
use super::objects::Objects;
use super::replication::records::whole_record;
use super::shard::Shard;
use super::shard::answers::items_of;
use super::shard::context::RequestContext;
use super::shard::effects::ListedName;
use super::shard::rights::keeps_any;
use super::shard::tail::tenant_of;
use super::shard::tail::{TAIL_HEAD_BYTES, TailHead, tail_within};
use super::shared_objects::forget_shared;
use super::tiering::Ssd;
use super::types::{CloseReason, PeerKey, PoolBytes};
use crate::{ObjectView, Replica};

/// Index entries that one step looks at.
const STEP_PLACES: u64 = 2048;
/// Most objects of a page.
const PAGE_ITEMS: usize = 1024;
/// Most objects of a page whose names have to be read from the SSD.
const PAGE_READS: usize = 64;
/// Exclusive end of the order.
const END: u64 = 1 << 32;
/// Flags of a [`ListItem`].
const NAMES: u64 = ListItem::NAMES;
const ONE: u64 = ListItem::ONE;
const CHANGES: u64 = ListItem::CHANGES;
const REMOVES: u64 = ListItem::REMOVES;

/// Lists in flight.
#[derive(Debug, Default)]
pub(super) struct Lists {
    open: BTreeMap<u64, List>,
    next: u64,
}

/// Page in preparation.
#[derive(Debug)]
struct List {
    peer: PeerKey,
    request: RequestId,
    names: bool,
    /// True if only objects of exported slots are listed.
    fetches: bool,
    /// True if the peer repairs its copy of the only object that is listed, which may be a replica here, or there.
    repairs: bool,
    /// Only tenant whose objects are listed.
    tenant: Option<u32>,
    /// Only object that is listed.
    one: Option<Digest>,
    /// Position of the walk.
    at: u64,
    page: Vec<ListEntry>,
    page_bytes: usize,
    /// True if the page is full, except for names that are being read.
    is_full: bool,
    /// Indexes of objects whose names are still to be read, and the number of reads in flight.
    wanted: Vec<usize>,
    reading: usize,
}

/// Object of a page.
#[derive(Debug)]
struct ListEntry {
    item: KeyItem,
    tail: Vec<u8>,
    /// True if the number of replicas that its put requested is to be told.
    tells_replicas: bool,
    /// True if the object does not exist any more, or does not belong to the page.
    is_gone: bool,
}

impl ListEntry {
    fn new(digest: Digest, version: Version, bytes: u64, flags: u32) -> Self {
        let item = KeyItem::plain(digest, version, bytes, flags);
        Self { item, tail: Vec::new(), tells_replicas: false, is_gone: false }
    }

    /// Sets the tail if it belongs to the object.
    fn set_tail(&mut self, tail: Vec<u8>) {
        let Some((head, name)) = TailHead::split(&tail) else { return };
        if !is_name_of(&head, &name, self.item.digest) {
            return;
        }
        let options = head.options;
        (self.item.group, self.item.tenant) = (options.group, options.tenant);
        (self.item.soft_pin_ms, self.item.data_type) = (options.soft_pin_ms, options.data_type);
        self.item.flags |= if options.hard_pin { KeyItem::HARD_PIN } else { 0 };
        // That of an object in memory is known already, and may have changed since its put.
        if self.item.flags & KeyItem::IN_MEMORY == 0 {
            self.item.flags |= KeyItem::priority_flags(options.priority);
        }
        self.item.flags |= if self.tells_replicas { KeyItem::replica_flags(options.replicas) } else { 0 };
        // The flag of stripe heads is known without the tail.
        self.item.flags |= if options.part == Part::Stripe { KeyItem::STRIPE } else { 0 };
        (self.item.key_bytes, self.item.tenant_bytes) = (head.key_bytes, head.tenant_bytes);
        self.tail = tail;
    }
}

impl List {
    /// Returns true if a name has to be read from the SSD: it is requested, or the object's tenant has to be known.
    const fn wants_name(&self, elsewhere: bool) -> bool {
        elsewhere && (self.names || self.tenant.is_some())
    }

    /// Scans the next range of the order.
    fn step(&mut self, local: &LocalStore, pool: &dyn PoolBytes) {
        let store = &local.shard.store;
        if self.one.is_some() {
            self.find_one(local, pool);
            return;
        }
        let ssd = local.tiering.as_ref().map(|tiering| &tiering.ssd);
        let places = ssd.map_or(0, Ssd::places).max(store.objects().places()) as u64;
        let to = self.at.saturating_add((STEP_PLACES << 32).div_ceil(places)).min(END);
        let mut found: Vec<(u32, ListEntry, u64, bool)> = Vec::new();
        for (point, digest, view) in store.between(self.at, to) {
            if view.replica == Replica::Second {
                continue;
            }
            let mut listed = ListEntry::new(digest, view.version, view.extent.bytes, in_memory(&view));
            let on_ssd = local.on_ssd(digest).filter(|record| record.version == view.version);
            listed.item.flags |= if on_ssd.is_some() { KeyItem::ON_SSD } else { 0 };
            let elsewhere = !view.has_tail && on_ssd.is_some_and(|record| record.key_bytes > 0);
            let tail_at = if view.has_tail { view.tail_at } else { u64::MAX };
            found.push((point, listed, tail_at, elsewhere));
        }
        let records = ssd.into_iter().flat_map(|ssd| ssd.between(self.at, to).map(move |record| (ssd, record)));
        for (ssd, record) in records {
            if !store.exists(record.digest) {
                let flags = on_ssd_alone(&record);
                let mut listed = ListEntry::new(record.digest, record.version, record.payload_bytes.into(), flags);
                listed.tells_replicas = record.copied;
                found.push((ssd.point_of(record.digest), listed, u64::MAX, record.key_bytes > 0));
            }
        }
        if let Some(own) = self.tenant {
            // The tenants of the others are in their names, which are to be read anyway.
            let may_be_own =
                |digest, elsewhere| local.tenant_of(digest).known().map_or(elsewhere, |tenant| tenant == own);
            found.retain(|(_, listed, _, elsewhere)| may_be_own(listed.item.digest, *elsewhere));
        }
        if self.fetches {
            found.retain(|(_, listed, ..)| local.shard.exports.has(listed.item.digest));
        }
        found.sort_unstable_by_key(|(point, ..)| *point);
        self.at = to;
        let mut last = None;
        for (point, mut listed, tail_at, elsewhere) in found {
            // Objects with the same point stay together, because the next page begins with a point.
            let room = self.page_bytes < KEY_PAGE_BYTES && self.page.len() < PAGE_ITEMS;
            if last != Some(point) && !(room && self.wanted.len() < PAGE_READS) {
                self.at = point.into();
                self.is_full = true;
                return;
            }
            last = Some(point);
            if self.names && tail_at != u64::MAX {
                listed.set_tail(read_tail(tail_at, pool));
            }
            // A name that is still to be read may be the longest.
            let wanted = self.wants_name(elsewhere);
            let name_bytes = if wanted { Limits::NAME_BYTES } else { listed.item.name_bytes() };
            self.page_bytes += KeyItem::BYTES + name_bytes;
            if wanted {
                self.wanted.push(self.page.len());
            }
            self.page.push(listed);
        }
        let enough = self.page.len() >= PAGE_ITEMS / 2 || self.page_bytes >= KEY_PAGE_BYTES / 2;
        self.is_full = to == END || enough || !self.wanted.is_empty();
    }

    /// Finds one object.
    fn find_one(&mut self, local: &LocalStore, pool: &dyn PoolBytes) {
        (self.at, self.is_full) = (END, true);
        let Some(digest) = self.one else { return };
        let record = if self.repairs { whole_record(local, digest) } else { local.on_ssd(digest) };
        let view = local.shard.peek(digest);
        let of_another =
            self.tenant.is_some_and(|own| local.tenant_of(digest).known().is_some_and(|tenant| tenant != own));
        let copy = view.is_some_and(|view| view.replica == Replica::Second);
        let is_listed = if self.repairs { keeps_any(&local.shard, digest) } else { !copy && local.shard.keeps(digest) };
        if of_another || !is_listed {
            return;
        }
        let (mut listed, elsewhere) = match (view, record) {
            (Some(view), _) => {
                let mut listed = ListEntry::new(digest, view.version, view.extent.bytes, in_memory(&view));
                listed.tells_replicas = self.repairs && view.replica == Replica::Second;
                if self.names && view.has_tail {
                    listed.set_tail(read_tail(view.tail_at, pool));
                }
                (listed, !view.has_tail && record.is_some_and(|record| record.key_bytes > 0))
            }
            (None, Some(record)) => {
                let bytes = record.payload_bytes.into();
                let mut listed = ListEntry::new(digest, record.version, bytes, on_ssd_alone(&record));
                listed.tells_replicas = self.repairs || record.copied;
                (listed, record.key_bytes > 0)
            }
            (None, None) => return,
        };
        if self.tenant.is_some() && local.tenant_of(digest).known().is_none() && !elsewhere {
            return;
        }
        listed.item.flags |= if record.is_some() { KeyItem::ON_SSD } else { 0 };
        if self.wants_name(elsewhere) {
            self.wanted.push(0);
        }
        self.page.push(listed);
    }

    /// Begins to read names of the page, as far as the tier accepts reads. Returns true if there was any progress.
    fn read_names(&mut self, number: u64, local: &mut LocalStore) -> bool {
        let Some(tiering) = &mut local.tiering else { return false };
        let mut progress = false;
        while let Some(&at) = self.wanted.last() {
            match tiering.promotion.read_name(&mut tiering.ssd, (number, at), self.page[at].item.digest) {
                Ok(()) => self.reading += 1,
                Err(GetError::Busy) => return progress,
                Err(_) => self.page[at].is_gone = true,
            }
            self.wanted.pop();
            progress = true;
        }
        progress
    }

    fn answer(self, shard: &mut Shard) {
        let next = if self.at == END { 0 } else { self.at };
        let here: Vec<ListEntry> = self.page.into_iter().filter(|listed| !listed.is_gone).collect();
        let reply = ListReply { walk: shard.walk_tag(), next, items: here.len() as u64 };
        shard.answers.items(self.peer, Operation::List, self.request, 1, |body| {
            reply.encode(body);
            here.iter().for_each(|listed| listed.item.encode(body));
            let names = here.iter().map(|listed| listed.tail.get(TAIL_HEAD_BYTES..).unwrap_or_default());
            names.for_each(|name| body.extend_from_slice(name));
        });
    }

    /// Takes a name that was read: the object belongs to the page if it is of the requested tenant.
    fn take_name(&mut self, at: usize, version: Version, tail: Vec<u8>) {
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

impl Lists {
    pub(super) fn begin(
        &mut self,
        objects: &mut Objects,
        context: &RequestContext,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        let mut items = items_of::<ListItem>(header, body)?;
        let (Some(item), None) = (items.next(), items.next()) else {
            return Err(CloseReason::Malformed("a list that is not of exactly one item"));
        };
        let asked = match objects.local.may_ask(context, item.digest) {
            // The digest only names the shard by one of its slots: the slot may still migrate, and the object under the
            // digest may belong to another tenant.
            Err(Status::Stale | Status::Unauthorized) if item.flags & ONE == 0 => Ok(()),
            asked => asked,
        };
        let walk_tag = objects.local.shard.walk_tag();
        let status = if let Err(status) = asked {
            status
        } else if context.repairs() && item.flags & ONE == 0
            || item.flags & !(NAMES | ONE | if context.fetches { CHANGES } else { REMOVES }) != 0
            || item.from >= END
            || (item.walk == 0) != (item.from == 0)
        {
            Status::BadRequest
        } else if item.walk != 0
            && item.walk != if item.flags & CHANGES == 0 { walk_tag } else { objects.migration.changes_tag(walk_tag) }
        {
            // The walk belongs to another incarnation, which has another order.
            Status::Stale
        } else if item.flags & CHANGES != 0 {
            Self::answer_changes(objects, context.peer, header, item.from);
            return Ok(());
        } else if self.open.len() >= Limits::LISTS || Self::misses_some(objects, context, item.flags) {
            Status::Busy
        } else if item.flags & REMOVES != 0 && item.from == 0 && !forget_shared(&mut objects.local) {
            // Of the objects of the shared tier there is no list: all of them count as removed, whatever it names.
            Status::Busy
        } else {
            if item.flags & REMOVES != 0 {
                objects.migration.forget_absent();
            }
            self.next += 1;
            let list = List {
                peer: context.peer,
                request: header.request,
                names: item.flags & NAMES != 0,
                fetches: context.fetches,
                repairs: context.repairs(),
                tenant: context.tenant,
                one: (item.flags & ONE != 0).then_some(item.digest),
                at: item.from,
                page: Vec::new(),
                page_bytes: ListReply::BYTES,
                is_full: false,
                wanted: Vec::new(),
                reading: 0,
            };
            self.open.insert(self.next, list);
            return Ok(());
        };
        objects.local.shard.refuse(context.peer, Operation::List, header.request, status);
        Ok(())
    }

    /// Returns true if a list could miss objects that recovery of the SSD has yet to find, or that are being
    /// reconciled. A removal of all listed objects would leave them and report completion; a new owner that imports
    /// would take the list to be complete. A new owner does not wait for reconciliation here, because it reconciles by
    /// itself.
    fn misses_some(objects: &Objects, context: &RequestContext, flags: u64) -> bool {
        let local = &objects.local;
        let is_comparing = || local.is_comparing() || flags & REMOVES != 0 && objects.migration.awaits_changes();
        flags & ONE == 0 && (local.is_recovering() || !context.fetches && is_comparing())
    }

    /// Answers a page of the changes in exported slots, from a position on.
    fn answer_changes(objects: &mut Objects, peer: PeerKey, header: &Header, from: u64) {
        let shard = &mut objects.local.shard;
        let (items, next) = objects.migration.changes_page(shard, from);
        let walk = objects.migration.changes_tag(shard.walk_tag());
        let reply = ListReply { walk, next, items: items.len() as u64 };
        shard.answers.items(peer, Operation::List, header.request, 1, |body| {
            reply.encode(body);
            items.iter().for_each(|item| item.encode(body));
        });
    }

    /// Takes a name that was read; without one, the object or its name is gone.
    pub(super) fn take_name(&mut self, name: ListedName) {
        let ListedName { list, at, read } = name;
        let Some(list) = self.open.get_mut(&list) else { return };
        list.reading -= 1;
        match read {
            Some((version, tail)) => list.take_name(at, version, tail),
            None => list.page[at].is_gone = true,
        }
    }

    /// Advances each list by one step. Returns true if there was anything to do. The host calls it in every round.
    pub(super) fn drive(&mut self, objects: &mut Objects, pool: &dyn PoolBytes) -> bool {
        if self.open.is_empty() {
            return false;
        }
        let ids: Vec<u64> = self.open.keys().copied().collect();
        let mut progress = false;
        for id in ids {
            let Some(mut list) = self.open.remove(&id) else { continue };
            if objects.local.shard.sessions.get(list.peer).is_none() {
                progress = true;
                // Names that are being read for it are dropped when they arrive.
                continue;
            }
            if !list.is_full {
                list.step(&objects.local, pool);
                progress = true;
            }
            progress |= list.read_names(id, &mut objects.local);
            if list.is_full && list.wanted.is_empty() && list.reading == 0 {
                list.answer(&mut objects.local.shard);
            } else {
                self.open.insert(id, list);
            }
        }
        progress
    }
}

/// Returns true if a tail may belong to an object. A process that has mapped the pool may have corrupted it.
fn is_name_of(head: &TailHead, name: &ObjectName<'_>, digest: Digest) -> bool {
    head.key_bytes == 0 || name.digest() == digest
}

/// Returns the tail at an offset of the pool; empty if there is none.
fn read_tail(at: u64, pool: &dyn PoolBytes) -> Vec<u8> {
    tail_within(at, pool.bytes(), |at, into| pool.read(at, into))
}

/// Returns the flags of an object in memory.
fn in_memory(view: &ObjectView) -> u32 {
    let flag = |set, flag| if set { flag } else { 0 };
    let replicas = if view.replica.is_owed_a_copy() { view.copies.replicas() } else { 0 };
    let kept = KeyItem::replica_flags(replicas) | flag(view.is_retained, KeyItem::RETAINED);
    let kept = kept | KeyItem::priority_flags(view.priority);
    KeyItem::IN_MEMORY | kept | flag(view.is_head, KeyItem::HEAD)
}

/// Returns the flags of an object that is on the SSD alone.
const fn on_ssd_alone(record: &RecordView) -> u32 {
    // How many replicas it is to have is in its tail. A new owner replicates it again.
    let replicas = if record.copied { KeyItem::replica_flags(2) } else { 0 };
    KeyItem::ON_SSD | replicas | if record.names_parts { KeyItem::HEAD } else { 0 }
}
