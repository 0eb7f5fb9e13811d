//! What is asked of former owners next, and what becomes of the answers.

use std::collections::BTreeMap;

use kvplane_proto::message::KeyPage;
use kvplane_proto::message::PageQuery;
use kvplane_proto::{Digest, Status};

use super::super::Service;
use super::super::objects::CommittedObject;
use super::changes;
use super::imports::{Call, Fetch, FetchDone, ListedObject, Object, Source, Want};
use crate::CommitError;

/// Objects of one request to drop them.
const DROPS: usize = 1024;
/// The walk goes on when fewer than so many objects wait to be fetched.
const QUEUED: usize = 64;
/// How long nobody waits for a source that did not answer.
const MUTED_NS: u64 = 1_000_000_000;
/// Between two attempts in the background: doubles up to the second.
const RETRY_NS: u64 = 100_000_000;
const RETRY_MOST_NS: u64 = 5_000_000_000;

/// How the way of an object from its former owner ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It is here, or there is nothing to bring.
    Settled,
    /// Its source did not give it. The walk is to find it once more.
    Failed,
    /// There was no room for it for the moment, here or in its source's memory. The walk is to find it once more.
    Busy,
}

impl Source {
    /// It did not answer, or not as it should: the next attempt is later. Many requests that fail by one outage are one
    /// failure.
    pub(super) fn failed(&mut self, now_ns: u64) {
        if now_ns < self.retry_ns {
            return;
        }
        self.failures += 1;
        self.retry_ns = now_ns.saturating_add((RETRY_NS << self.failures.min(10)).min(RETRY_MOST_NS));
    }

    /// An object could not be taken over: the walk finds it once more.
    pub(super) fn look_again(&mut self, now_ns: u64) {
        self.again = true;
        self.failed(now_ns);
    }

    fn is_done(&self) -> bool {
        self.walked
            && self.changes.is_none()
            && !self.asking
            && self.queue.is_empty()
            && self.drops.is_empty()
            && !self.dropping
            && self.open == 0
            && self.unwritten.is_empty()
    }
}

impl Service {
    /// The next question to a former owner, if there is any; to be called until there is none, in every round. Its
    /// answer goes to [`Self::fetched`].
    pub fn poll_fetch(&mut self, now_ns: u64) -> Option<Fetch> {
        self.now_ns = self.now_ns.max(now_ns);
        if let Some(fetch) = self.next_copy() {
            return Some(fetch);
        }
        if self.moves.imports.sources.is_empty() {
            return self.moves.imports.ready.pop_front();
        }
        if let Some(fetch) = self.moves.imports.ready.pop_front() {
            return Some(fetch);
        }
        // Slots that are not served yet, as that is not written down: their objects could not be taken over.
        if self.heard_epoch() != self.ownership.epoch() {
            return None;
        }
        self.allow();
        let sources: Vec<u32> = self.moves.imports.sources.keys().copied().collect();
        sources.into_iter().find_map(|source| {
            let next = self.next_drop(source).or_else(|| self.next_changes(source));
            let next = next.or_else(|| self.next_object(source)).or_else(|| self.next_page(source));
            if next.is_none() {
                // What it waited for may have gone to another source with its slot.
                self.check_source(source);
            }
            next
        })
    }

    /// When [`Self::poll_fetch`] may have something that it has not now.
    pub(in crate::service) fn moves_timeout(&self) -> Option<u64> {
        let imports = &self.moves.imports;
        let rate = imports.limits.bytes_per_s;
        let waits = |source: &Source| {
            let retry = (source.retry_ns > self.now_ns).then_some(source.retry_ns);
            let debt = u64::try_from(1 - imports.allowance_bytes).unwrap_or(0);
            let paced = (!source.queue.is_empty() && debt > 0 && rate > 0)
                .then(|| imports.allowed_ns.saturating_add(debt.saturating_mul(1_000_000_000) / rate + 1));
            [retry, paced].into_iter().flatten().filter(|at_ns| *at_ns > self.now_ns).min()
        };
        imports.sources.values().filter_map(waits).min()
    }

    /// Time has passed: more may be fetched.
    fn allow(&mut self) {
        let imports = &mut self.moves.imports;
        let rate = imports.limits.bytes_per_s;
        let passed_ns = self.now_ns.saturating_sub(imports.allowed_ns);
        let more = u128::from(passed_ns) * u128::from(rate) / 1_000_000_000;
        if more > 0 {
            // What was not used is not kept for long.
            let most = i64::try_from(rate / 20).unwrap_or(i64::MAX).max(1);
            let sum = i128::from(imports.allowance_bytes) + i128::try_from(more).unwrap_or(i128::MAX / 2);
            imports.allowance_bytes = i64::try_from(sum).unwrap_or(i64::MAX).min(most);
            imports.allowed_ns = self.now_ns;
        }
    }

    fn next_drop(&mut self, source: u32) -> Option<Fetch> {
        let now_ns = self.now_ns;
        let imports = &mut self.moves.imports;
        let entry = imports.sources.get_mut(&source)?;
        if entry.dropping || entry.drops.is_empty() || entry.retry_ns > now_ns {
            return None;
        }
        let count = entry.drops.len().min(DROPS);
        let mut digests: Vec<Digest> = entry.drops.drain(..count).collect();
        digests.retain(|digest| imports.source_of(*digest) == source);
        let entry = imports.sources.get_mut(&source)?;
        if digests.is_empty() {
            return None;
        }
        entry.dropping = true;
        let key = entry.key;
        Some(imports.ask(key, Want::Drop(digests.clone()), Call::Drop { source, digests }))
    }

    fn next_page(&mut self, source: u32) -> Option<Fetch> {
        let now_ns = self.now_ns;
        let imports = &mut self.moves.imports;
        let entry = imports.sources.get_mut(&source)?;
        let wait = entry.asking
            || entry.walked
            || entry.changes.is_some()
            || entry.queue.len() >= QUEUED
            || entry.retry_ns > now_ns;
        if wait || imports.limits.bytes_per_s == 0 {
            return None;
        }
        entry.asking = true;
        let (key, at) = (entry.key, entry.at);
        let digest = imports.digest_of(source)?;
        Some(imports.ask(key, Want::List(digest, at), Call::List(source)))
    }

    /// Asks what changed in the slots of a source, before anything is fetched of them.
    fn next_changes(&mut self, source: u32) -> Option<Fetch> {
        let now_ns = self.now_ns;
        let imports = &mut self.moves.imports;
        let entry = imports.sources.get_mut(&source).filter(|entry| !entry.asking && entry.retry_ns <= now_ns)?;
        let (key, at) = (entry.key, entry.changes.as_ref()?.0);
        entry.asking = true;
        let digest = imports.digest_of(source)?;
        Some(imports.ask(key, Want::List(digest, at), Call::Changes(source)))
    }

    /// A source has told some of what changed in its slots, or all.
    fn changes_told(&mut self, source: u32, page: &[u8]) {
        let Some(entry) = self.moves.imports.sources.get_mut(&source) else { return };
        let (Some(page), Some((at, told))) = (KeyPage::decode(page), &mut entry.changes) else {
            self.changes_not_told(source, true);
            return;
        };
        // It is there, whatever failed before.
        (entry.asking, entry.failures, entry.retry_ns) = (false, 0, 0);
        changes::take_items(told, page.keys().map(|key| key.item));
        let reply = page.reply();
        *at = PageQuery { walk: reply.walk, from: reply.next, ..*at };
        if reply.next == 0 {
            self.changes_known(source);
        }
    }

    /// A source did not tell what changed: it is asked again, from the beginning, unless it never will.
    fn changes_not_told(&mut self, source: u32, never: bool) {
        let now_ns = self.now_ns;
        let Some(entry) = self.moves.imports.sources.get_mut(&source) else { return };
        entry.asking = false;
        let begin = PageQuery { changes: true, ..PageQuery::default() };
        entry.changes = Some((begin, BTreeMap::new()));
        entry.failed(now_ns);
        if never {
            self.changes_known(source);
        }
    }

    /// All that a source knows of changes has come.
    fn changes_known(&mut self, source: u32) {
        let me = self.ownership.key();
        let imports = &mut self.moves.imports;
        let slots: Vec<_> = imports.slots_of(source).collect();
        let Some((_, mut told)) = imports.sources.get_mut(&source).and_then(|entry| entry.changes.take()) else {
            return;
        };
        // It tells of all that left it, also to others.
        told.retain(|slot, _| slots.binary_search(slot).is_ok());
        self.resolve_doubt(&slots, &told);
        self.moves.witness.inherit(told, me);
        self.check_source(source);
    }

    /// Begins to fetch an object in the background.
    fn next_object(&mut self, source: u32) -> Option<Fetch> {
        let now_ns = self.now_ns;
        loop {
            let imports = &mut self.moves.imports;
            let limits = imports.limits;
            let full = imports.pulls >= limits.objects || imports.pull_bytes >= limits.bytes;
            if full || imports.allowance_bytes <= 0 {
                return None;
            }
            let entry = imports.sources.get_mut(&source).filter(|source| source.retry_ns <= now_ns)?;
            let listed = entry.queue.pop_front()?;
            let digest = listed.item.digest;
            let gone = imports.source_of(digest) != source || imports.masks.contains(&digest);
            if gone || imports.objects.contains_key(&digest) {
                self.check_source(source);
                continue;
            }
            if self.on_ssd(digest).is_some() {
                self.drop_there(source, digest);
                continue;
            }
            if self.may_move(listed.item.bytes) == Err(Status::Busy) {
                // The SSD has enough to write: the object waits where it is, and the walk with it.
                self.moves.imports.sources.get_mut(&source)?.queue.push_front(listed);
                return None;
            }
            if self.store.as_ref().is_some_and(|store| store.exists(digest)) {
                self.keep_moved(source, digest);
                continue;
            }
            let imports = &mut self.moves.imports;
            imports.sources.get_mut(&source)?.open += 1;
            let object = Object { source, place: None, waiters: Vec::new(), void: false, demanded: false };
            imports.objects.insert(digest, object);
            if let Some(fetch) = self.begin_object(&listed) {
                return Some(fetch);
            }
        }
    }

    /// Has a source drop what is not wanted any more.
    pub(super) fn drop_there(&mut self, source: u32, digest: Digest) {
        if let Some(source) = self.moves.imports.sources.get_mut(&source) {
            source.drops.push_back(digest);
        }
    }

    /// A former owner has answered, or has not. Nothing writes to the object's place any more.
    pub fn fetched(&mut self, token: u64, done: FetchDone, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let Some(call) = self.moves.imports.calls.remove(&token) else { return };
        match (call, done) {
            (Call::Sizes { source, items }, FetchDone::Sizes(told)) => self.sizes_told(source, items, &told),
            (Call::Sizes { source, items }, _) => {
                self.mute(source);
                self.sizes_told(source, items, &[]);
            }
            (Call::Describe(digest), FetchDone::Page(page)) => self.described(digest, &page),
            (Call::Describe(digest), FetchDone::Failed(Status::Stale | Status::NotFound)) => {
                self.object_ended(digest, End::Settled);
            }
            (Call::Describe(digest), _) => {
                if let Some(source) = self.moves.imports.objects.get(&digest).map(|object| object.source) {
                    self.mute(source);
                }
                self.object_ended(digest, End::Failed);
            }
            (Call::Object(digest), FetchDone::Object(bytes, checksum)) => self.object_came(digest, bytes, checksum),
            (Call::Object(digest), FetchDone::Failed(Status::Stale | Status::NotFound)) => {
                self.object_ended(digest, End::Settled);
            }
            (Call::Object(digest), FetchDone::Failed(Status::Busy)) => self.object_ended(digest, End::Busy),
            (Call::Object(digest), _) => self.object_ended(digest, End::Failed),
            (Call::Changes(source), FetchDone::Page(page)) => self.changes_told(source, &page),
            // One of an earlier version knows nothing of changes.
            (Call::Changes(source), done) => {
                self.changes_not_told(source, done == FetchDone::Failed(Status::BadRequest));
            }
            (Call::List(source), FetchDone::Page(page)) => self.listed(source, &page),
            (Call::List(source), _) => self.not_listed(source),
            (Call::Drop { source, digests }, FetchDone::Dropped) => self.dropped_there(source, &digests, true),
            (Call::Drop { source, digests }, _) => self.dropped_there(source, &digests, false),
            (Call::Copy(digest), done) => self.pushed(digest, &done),
            (Call::DropCopies { second, digests }, done) => self.copies_dropped(token, second, &digests, &done),
        }
    }

    /// A source did not answer: for a while nobody waits for it.
    fn mute(&mut self, source: u32) {
        let until_ns = self.now_ns.saturating_add(MUTED_NS);
        if let Some(source) = self.moves.imports.sources.get_mut(&source) {
            source.muted_ns = until_ns;
        }
    }

    fn described(&mut self, digest: Digest, page: &[u8]) {
        let page = KeyPage::decode(page);
        let key = page.as_ref().and_then(|page| page.keys().find(|key| key.item.digest == digest));
        let void = self.moves.imports.objects.get(&digest).is_none_or(|object| object.void);
        let Some(key) = key.filter(|_| !void) else {
            self.object_ended(digest, End::Settled);
            return;
        };
        let listed = ListedObject { item: key.item, tenant: key.name.tenant.to_vec(), key: key.name.key.to_vec() };
        if let Some(fetch) = self.begin_object(&listed) {
            self.moves.imports.ready.push_back(fetch);
        }
    }

    /// An object is in its place: it is taken over, unless it was put or removed here, or its slot is another's.
    fn object_came(&mut self, digest: Digest, bytes: u64, checksum: u64) {
        let Some(object) = self.moves.imports.objects.get(&digest) else { return };
        let (source, demanded) = (object.source, object.demanded);
        let Some((reservation, room)) = object.place else { return };
        let imports = &self.moves.imports;
        let current = !object.void && imports.source_of(digest) == source && !imports.masks.contains(&digest);
        if !current || bytes != room || !self.ownership.owns(digest) || self.on_ssd(digest).is_some() {
            self.object_ended(digest, if current && bytes != room { End::Failed } else { End::Settled });
            return;
        }
        let Some(store) = &mut self.store else { return };
        // The reservation is used up, whatever comes of it.
        let committed = store.commit(reservation, checksum);
        if let Some(object) = self.moves.imports.objects.get_mut(&digest) {
            object.place = None;
        }
        self.moves.imports.pulls -= 1;
        self.moves.imports.pull_bytes -= bytes;
        match committed {
            Ok(version) => {
                self.moves.counters.imported += 1;
                self.moves.counters.imported_bytes += bytes;
                self.moves.counters.fetched += u64::from(demanded);
                let made = CommittedObject { version, digest, bytes, replaces: false, is_copy: false, ack: None };
                let waits = self.waits_of(&made);
                self.make_last(&made, waits, None);
                self.keep_moved(source, digest);
            }
            // It was put here meanwhile.
            Err(error) => debug_assert_eq!(error, CommitError::Exists, "a reservation of our own"),
        }
        self.object_ended(digest, End::Settled);
    }

    /// An object is not on its way any more: those who wait for it get what there is, or are to come again where there
    /// was no room for it.
    pub(super) fn object_ended(&mut self, digest: Digest, end: End) {
        let now_ns = self.now_ns;
        let again = end != End::Settled;
        let imports = &mut self.moves.imports;
        let Some(Object { source, place, waiters, void, .. }) = imports.objects.remove(&digest) else { return };
        if let Some((reservation, bytes)) = place {
            imports.pulls -= 1;
            imports.pull_bytes -= bytes;
            if let Some(store) = &mut self.store {
                store.abort(reservation).expect("a reservation of our own");
            }
        }
        self.moves.counters.void += u64::from(void);
        self.moves.counters.failures += u64::from(again);
        if let Some(entry) = imports.sources.get_mut(&source) {
            entry.open -= 1;
            if again {
                entry.look_again(now_ns);
            }
        }
        for (waiter, timing) in waiters {
            self.answers.outputs.late(timing, digest);
            let here = self.store.as_ref().is_some_and(|store| store.exists(digest));
            if end == End::Busy && !here {
                self.turn_away(waiter, Status::Busy);
            } else {
                self.serve(digest, waiter);
            }
        }
        self.check_source(source);
    }

    fn listed(&mut self, source: u32, page: &[u8]) {
        let imports = &mut self.moves.imports;
        let Some(entry) = imports.sources.get_mut(&source) else { return };
        let Some(page) = KeyPage::decode(page) else {
            self.not_listed(source);
            return;
        };
        (entry.asking, entry.failures) = (false, 0);
        for key in page.keys() {
            entry.queue.push_back(ListedObject {
                item: key.item,
                tenant: key.name.tenant.to_vec(),
                key: key.name.key.to_vec(),
            });
        }
        let reply = page.reply();
        entry.at = PageQuery { walk: reply.walk, from: reply.next, ..entry.at };
        if reply.next == 0 {
            entry.at = PageQuery { walk: 0, ..entry.at };
            entry.walked = true;
        }
        self.check_source(source);
    }

    fn not_listed(&mut self, source: u32) {
        let now_ns = self.now_ns;
        if let Some(entry) = self.moves.imports.sources.get_mut(&source) {
            entry.asking = false;
            // From the beginning: where it was may mean nothing any more.
            entry.at = PageQuery { walk: 0, from: 0, ..entry.at };
            entry.failed(now_ns);
        }
    }

    /// A source has dropped objects: nothing of them can come back. Or it has not answered.
    fn dropped_there(&mut self, source: u32, digests: &[Digest], done: bool) {
        let now_ns = self.now_ns;
        let imports = &mut self.moves.imports;
        let Some(entry) = imports.sources.get_mut(&source) else { return };
        entry.dropping = false;
        if done {
            for digest in digests {
                imports.masks.remove(digest);
            }
        } else {
            entry.failed(now_ns);
            entry.drops.extend(digests);
        }
        self.check_source(source);
    }

    /// When all of a source is here, or gone, it is done with.
    pub(super) fn check_source(&mut self, source: u32) {
        let Some(entry) = self.moves.imports.sources.get_mut(&source) else { return };
        if entry.walked && entry.again && entry.queue.is_empty() && entry.open == 0 {
            (entry.walked, entry.again) = (false, false);
        }
        if entry.is_done() {
            let key = entry.key;
            self.moves.witness.end_absence(self.moves.imports.slots_of(source), key);
            self.moves.imports.forget(source);
        }
    }
}
