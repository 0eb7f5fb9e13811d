//! Requests to former owners, and the handling of their answers.

use std::collections::BTreeMap;

use kvplane_proto::ids::RequestId;
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{KeyPage, SizeReply};
use kvplane_proto::{Digest, Status};

use super::Migration;
use super::imports::{Call, Imports, Object, Waiter};
use super::objects::End;
use super::sources::ListedObject;
use crate::service::fetches::{Fetch, FetchDone, Want};
use crate::service::local::LocalStore;
use crate::service::shard::deferrals::{DeferredItem, Replies};
use crate::service::types::PeerKey;

/// Most waiters for one object.
const WAITERS_MOST: usize = 1024;
/// Most objects that requests wait for, and most requests about them in flight.
const ASKS_MOST: usize = 4096;
/// Most objects of one request for sizes.
const TOGETHER: usize = 1024;

impl Migration {
    /// Returns the next request to a former owner, if there is one; polled until `None` in every round. The answer goes
    /// to [`Self::fetched`].
    pub(in crate::service) fn poll(&mut self, local: &mut LocalStore) -> Option<Fetch> {
        if let Some(fetch) = self.imports.ready.pop_front() {
            return Some(fetch);
        }
        // While new slots are not durable they are not served, and their objects could not be imported.
        if local.heard_epoch() != local.shard.ownership.epoch() {
            return None;
        }
        if let Some(fetch) = self.next_report(local) {
            return Some(fetch);
        }
        if self.imports.sources.is_empty() {
            return None;
        }
        self.imports.pace.allow(local.shard.now_ns);
        let sources: Vec<u32> = self.imports.sources.keys().copied().collect();
        let next = sources.into_iter().find_map(|source| {
            let (imports, shard) = (&mut self.imports, &mut local.shard);
            let next = imports.next_drop(shard, source).or_else(|| imports.next_changes(shard, source));
            let next = next.or_else(|| self.next_object(local, source));
            let next = next.or_else(|| self.imports.next_page(&mut local.shard, source));
            if next.is_none() {
                // Its last objects may have gone to another source together with their slot.
                self.check_source(local, source);
            }
            next
        });
        // An import that was found to be complete is reported at once: nothing else may happen here for long.
        next.or_else(|| self.next_report(local))
    }

    /// Returns the next report that is due to a former owner from which everything was imported.
    fn next_report(&mut self, local: &mut LocalStore) -> Option<Fetch> {
        let Imports { calls, sources, .. } = &mut self.imports;
        let is_source = |key: ShardKey| sources.values().any(|source| source.key == key);
        self.reports.next(&mut local.shard, calls, is_source)
    }

    /// Handles the answer of a former owner, or the failure to get one. No I/O writes to the object's extent any more.
    /// Returns false if the answer belongs to no request of this component.
    pub(in crate::service) fn fetched(&mut self, local: &mut LocalStore, token: u64, done: FetchDone) -> bool {
        let now_ns = local.shard.now_ns;
        let Some(call) = self.imports.calls.remove(&token) else { return false };
        match (call, done) {
            (Call::Sizes { source, items }, FetchDone::Sizes(told)) => self.sizes_told(local, source, items, &told),
            (Call::Sizes { source, items }, _) => {
                self.imports.mute(source, now_ns);
                self.sizes_told(local, source, items, &[]);
            }
            (Call::Describe(digest), FetchDone::Page(page)) => self.described(local, digest, &page),
            (Call::Describe(digest) | Call::Object(digest), FetchDone::Failed(Status::Stale | Status::NotFound)) => {
                self.object_ended(local, digest, End::Settled);
            }
            (Call::Describe(digest), _) => {
                if let Some(source) = self.imports.objects.get(&digest).map(|object| object.source) {
                    self.imports.mute(source, now_ns);
                }
                self.object_ended(local, digest, End::Failed);
            }
            (Call::Object(digest), FetchDone::Object(bytes, checksum)) => {
                self.object_came(local, digest, bytes, checksum);
            }
            (Call::Object(digest), FetchDone::Failed(Status::Busy)) => self.object_ended(local, digest, End::Busy),
            (Call::Object(digest), _) => self.object_ended(local, digest, End::Failed),
            (Call::Changes(source), FetchDone::Page(page)) => self.changes_told(local, source, &page),
            // A peer of an earlier version knows nothing of changes.
            (Call::Changes(source), done) => {
                self.changes_not_told(local, source, done == FetchDone::Failed(Status::BadRequest));
            }
            (Call::List(source), FetchDone::Page(page)) => self.listed(local, source, &page),
            (Call::List(source), _) => self.not_listed(source, now_ns),
            (Call::Drop { source, digests }, done) => {
                self.dropped_there(local, source, &digests, done == FetchDone::Dropped);
            }
            (Call::EndExports { source, epoch }, done) => {
                self.reports.answered(source, epoch, done == FetchDone::Dropped, now_ns);
            }
        }
        true
    }

    /// Fetches an object for a request, or joins a fetch in flight. The former owner may not have the object.
    pub(in crate::service) fn fetch(
        &mut self,
        local: &mut LocalStore,
        digest: Digest,
        waiter: Waiter,
    ) -> Result<(), Status> {
        let timing = local.shard.answers.outputs.timing();
        let imports = &mut self.imports;
        if let Some(object) = imports.objects.get_mut(&digest) {
            if object.waiters.len() == WAITERS_MOST {
                return Err(Status::Busy);
            }
            object.waiters.push((waiter, timing));
            return Ok(());
        }
        if imports.objects.len() >= ASKS_MOST {
            return Err(Status::Busy);
        }
        let source = imports.source_of(digest);
        let Some(entry) = imports.sources.get_mut(&source) else { return Err(Status::NotFound) };
        entry.open += 1;
        let key = entry.key;
        let waiters = vec![(waiter, timing)];
        imports.objects.insert(digest, Object { source, extent: None, waiters, void: false, demanded: true });
        let fetch = imports.ask(&mut local.shard, key, Want::Describe(digest), Call::Describe(digest));
        imports.ready.push_back(fetch);
        Ok(())
    }

    /// Asks former owners for the sizes of objects, and defers the reply until they have answered.
    pub(in crate::service) fn ask_sizes(
        &mut self,
        local: &mut LocalStore,
        peer: PeerKey,
        request: RequestId,
        replies: Replies,
        elsewhere: Vec<(usize, Digest)>,
    ) {
        let item_at = local.shard.defer(peer, request, replies, elsewhere.len());
        let mut by_source: BTreeMap<u32, Vec<(DeferredItem, Digest)>> = BTreeMap::new();
        for (at, digest) in elsewhere {
            let source = self.imports.source_of(digest);
            by_source.entry(source).or_default().push((item_at(at), digest));
        }
        for (source, items) in by_source {
            for items in items.chunks(TOGETHER) {
                let imports = &mut self.imports;
                let full = imports.calls.len() >= ASKS_MOST;
                let Some(key) = imports.sources.get(&source).map(|source| source.key).filter(|_| !full) else {
                    items.iter().for_each(|(item, _)| local.shard.settle(*item, |_, _| {}));
                    continue;
                };
                let digests = items.iter().map(|(_, digest)| *digest).collect();
                let call = Call::Sizes { source, items: items.to_vec() };
                let fetch = imports.ask(&mut local.shard, key, Want::Sizes(digests), call);
                imports.ready.push_back(fetch);
            }
        }
    }

    /// Handles the answer, or the failure, of a request for sizes. Changes made here meanwhile take precedence.
    fn sizes_told(
        &mut self,
        local: &mut LocalStore,
        source: u32,
        items: Vec<(DeferredItem, Digest)>,
        told: &[(Status, u64)],
    ) {
        let nothing = (Status::NotFound, 0);
        for (at, (item, digest)) in items.into_iter().enumerate() {
            let here = local.size_of(digest).map(|(bytes, is_head)| {
                let status = if is_head { Status::Striped } else { Status::Ok };
                (status, bytes)
            });
            let counts = self.imports.is_current(source, digest);
            let there = told.get(at).copied().filter(|_| counts).unwrap_or(nothing);
            let known = here.or_else(|| matches!(there.0, Status::Ok | Status::Striped).then_some(there));
            self.counters.misses += u64::from(known.is_none());
            local.shard.settle(item, |replies, item| match (replies, known) {
                (Replies::Found(bits, _), Some(_)) => bits[item] = true,
                (Replies::Sizes(replies), Some((status, bytes))) => replies[item] = SizeReply { status, bytes },
                _ => {}
            });
        }
    }

    /// Handles a page of the changes in a source's slots.
    fn changes_told(&mut self, local: &mut LocalStore, source: u32, page: &[u8]) {
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        match entry.take_changes(page) {
            Some(true) => self.changes_known(local, source),
            Some(false) => {}
            None => self.changes_not_told(local, source, true),
        }
    }

    /// Handles a failure to get changes: they are requested again from the beginning, unless the source will `never`
    /// tell them.
    fn changes_not_told(&mut self, local: &mut LocalStore, source: u32, never: bool) {
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        entry.restart_changes(local.shard.now_ns);
        if never {
            self.changes_known(local, source);
        }
    }

    /// Acts on the changes of a source once all were received.
    fn changes_known(&mut self, local: &mut LocalStore, source: u32) {
        let imports = &mut self.imports;
        let slots: Vec<_> = imports.slots_of(source).collect();
        let Some(mut told) = imports.sources.get_mut(&source).and_then(|entry| entry.end_changes()) else { return };
        // The source also tells changes of slots that went to other owners.
        told.retain(|slot, _| slots.binary_search(slot).is_ok());
        local.compare_slots(&slots, &told);
        self.witness.inherit(told, local.shard.ownership.key());
        self.check_source(local, source);
    }

    fn described(&mut self, local: &mut LocalStore, digest: Digest, page: &[u8]) {
        let Some(page) = KeyPage::decode(page) else { return self.object_ended(local, digest, End::Failed) };
        let key = page.keys().find(|key| key.item.digest == digest);
        let void = self.imports.objects.get(&digest).is_none_or(|object| object.void);
        let Some(key) = key.filter(|_| !void) else {
            self.object_ended(local, digest, End::Settled);
            return;
        };
        let listed = ListedObject { item: key.item, tenant: key.name.tenant.to_vec(), key: key.name.key.to_vec() };
        if let Some(fetch) = self.begin_object(local, &listed) {
            self.imports.ready.push_back(fetch);
        }
    }

    fn listed(&mut self, local: &LocalStore, source: u32, page: &[u8]) {
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        if entry.take_page(page) {
            self.check_source(local, source);
        } else {
            self.not_listed(source, local.shard.now_ns);
        }
    }

    fn not_listed(&mut self, source: u32, now_ns: u64) {
        if let Some(entry) = self.imports.sources.get_mut(&source) {
            entry.restart_walk(now_ns);
        }
    }

    /// Handles the outcome of a drop request: dropped objects cannot be imported any more.
    fn dropped_there(&mut self, local: &LocalStore, source: u32, digests: &[Digest], done: bool) {
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        entry.dropped(digests, done, local.shard.now_ns);
        if done {
            self.imports.unmask(digests);
        }
        self.check_source(local, source);
    }

    /// Ends the import from a source if all its objects are imported, or gone. The source is to end its exports, unless
    /// it keeps an object that cannot be imported.
    pub(super) fn check_source(&mut self, local: &LocalStore, source: u32) {
        let Some(entry) = self.imports.sources.get_mut(&source) else { return };
        entry.repeat_walk();
        if entry.is_done() {
            let (key, incomplete) = (entry.key, core::mem::take(&mut entry.incomplete));
            self.witness.end_absence(self.imports.slots_of(source), key);
            self.reports.add(key, self.imports.slots_of(source), incomplete, local.shard.ownership.epoch());
            self.imports.forget(source);
        }
    }
}
