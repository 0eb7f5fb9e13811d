//! Sources of an import: former owners of gained slots, and the progress of the import from each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::Slot;
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{KeyItem, KeyPage, PageQuery};

use super::changes;
use crate::service::tiering::reconciliation::changes::Changes;

/// Objects of one drop request.
const DROPS: usize = 1024;
/// Queued objects below which the next page is requested.
const QUEUED: usize = 64;
/// Time for which requests do not wait for a source that did not answer.
const MUTED_NS: u64 = 1_000_000_000;
/// Backoff between attempts in the background; doubles up to the maximum.
const RETRY_NS: u64 = 100_000_000;
const RETRY_MOST_NS: u64 = 5_000_000_000;

/// Object that a former owner has.
#[derive(Debug)]
pub(super) struct ListedObject {
    pub(super) item: KeyItem,
    pub(super) tenant: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// Backoff from a former owner that did not answer.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    retry_ns: u64,
}

impl Backoff {
    /// Backs off after a failure. Many requests that fail by one outage count as one failure.
    pub(super) fn failed(&mut self, now_ns: u64) {
        if now_ns < self.retry_ns {
            return;
        }
        self.failures += 1;
        self.retry_ns = now_ns.saturating_add((RETRY_NS << self.failures.min(10)).min(RETRY_MOST_NS));
    }

    /// Ends the backoff, as the other side answers.
    pub(super) const fn succeeded(&mut self) {
        (self.failures, self.retry_ns) = (0, 0);
    }

    /// Returns the time of the next attempt after a failure.
    pub(super) const fn retry_ns(&self) -> u64 {
        self.retry_ns
    }
}

/// Former owner of slots that were gained by one layout.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) key: ShardKey,
    /// Number of slots that are still imported from it.
    pub(super) slots: usize,
    /// Position of the walk through its objects.
    at: PageQuery,
    asking: bool,
    walked: bool,
    /// Changes that it has reported so far, and the position of the next page; `None` once it has reported all.
    changes: Option<(PageQuery, BTreeMap<Slot, Changes>)>,
    /// True if an object could not be fetched: the walk is repeated.
    again: bool,
    backoff: Backoff,
    /// Time until which requests do not wait for it.
    muted_ns: u64,
    /// Slots of which it keeps an object that cannot be imported.
    pub(super) incomplete: BTreeSet<Slot>,
    pub(super) queue: VecDeque<ListedObject>,
    /// Objects that it is to drop.
    drops: VecDeque<Digest>,
    dropping: bool,
    /// Objects in flight.
    pub(super) open: usize,
    /// Objects that are here, and that it keeps until they are on the SSD here; bounded by the SSD's backlog.
    pub(super) unwritten: BTreeSet<Digest>,
}

impl Source {
    pub(super) fn new(key: ShardKey) -> Self {
        Self {
            key,
            slots: 0,
            at: PageQuery { names: true, ..PageQuery::default() },
            asking: false,
            walked: false,
            changes: Some((PageQuery { changes: true, ..PageQuery::default() }, BTreeMap::new())),
            again: false,
            backoff: Backoff::default(),
            muted_ns: 0,
            incomplete: BTreeSet::new(),
            queue: VecDeque::new(),
            drops: VecDeque::new(),
            dropping: false,
            open: 0,
            unwritten: BTreeSet::new(),
        }
    }

    /// Backs off after a failure of the source.
    pub(super) fn failed(&mut self, now_ns: u64) {
        self.backoff.failed(now_ns);
    }

    /// Repeats the walk later, to find an object again that could not be imported.
    pub(super) fn look_again(&mut self, now_ns: u64) {
        self.again = true;
        self.failed(now_ns);
    }

    /// Returns the time of the next attempt after a failure.
    pub(super) const fn retry_ns(&self) -> u64 {
        self.backoff.retry_ns
    }

    /// Keeps requests from waiting for the source for a while.
    pub(super) const fn mute(&mut self, now_ns: u64) {
        self.muted_ns = now_ns.saturating_add(MUTED_NS);
    }

    pub(super) const fn is_muted(&self, now_ns: u64) -> bool {
        self.muted_ns > now_ns
    }

    /// Returns true while the source has not reported all changes in its slots.
    pub(super) const fn awaits_changes(&self) -> bool {
        self.changes.is_some()
    }

    /// Begins the walk again if an object of the last one could not be fetched and no fetch is in flight.
    pub(super) fn repeat_walk(&mut self) {
        if self.walked && self.again && self.queue.is_empty() && self.open == 0 {
            (self.walked, self.again) = (false, false);
        }
    }

    /// Returns true if all objects of the source are imported, or gone.
    pub(super) fn is_done(&self) -> bool {
        self.walked
            && self.changes.is_none()
            && !self.asking
            && self.queue.is_empty()
            && self.drops.is_empty()
            && !self.dropping
            && self.open == 0
            && self.unwritten.is_empty()
    }

    /// Enqueues an object for the source to drop.
    pub(super) fn drop_object(&mut self, digest: Digest) {
        self.drops.push_back(digest);
    }

    /// Returns the next objects for the source to drop, of those for which `is_its` returns true; `None` while a drop
    /// is in flight.
    pub(super) fn next_drops(&mut self, now_ns: u64, is_its: impl Fn(Digest) -> bool) -> Option<Vec<Digest>> {
        if self.dropping || self.drops.is_empty() || self.backoff.retry_ns > now_ns {
            return None;
        }
        let count = self.drops.len().min(DROPS);
        let mut digests: Vec<Digest> = self.drops.drain(..count).collect();
        digests.retain(|digest| is_its(*digest));
        self.dropping = !digests.is_empty();
        self.dropping.then_some(digests)
    }

    /// Handles the outcome of a drop request; a failed one is retried.
    pub(super) fn dropped(&mut self, digests: &[Digest], done: bool, now_ns: u64) {
        self.dropping = false;
        if !done {
            self.failed(now_ns);
            self.drops.extend(digests);
        }
    }

    /// Returns the next page to request of the source's objects.
    pub(super) fn next_page(&mut self, now_ns: u64) -> Option<PageQuery> {
        let wait = self.asking
            || self.walked
            || self.changes.is_some()
            || self.queue.len() >= QUEUED
            || self.backoff.retry_ns > now_ns;
        self.asking |= !wait;
        (!wait).then_some(self.at)
    }

    /// Returns the next page to request of the changes in the source's slots, which come before any object is fetched.
    pub(super) fn next_changes(&mut self, now_ns: u64) -> Option<PageQuery> {
        if self.asking || self.backoff.retry_ns > now_ns {
            return None;
        }
        let at = self.changes.as_ref()?.0;
        self.asking = true;
        Some(at)
    }

    /// Takes a page of changes; returns true if it was the last. `None` for a malformed page, or one that was not
    /// requested.
    pub(super) fn take_changes(&mut self, page: &[u8]) -> Option<bool> {
        let (page, (at, told)) = (KeyPage::decode(page)?, self.changes.as_mut()?);
        // The source answers, whatever failed before.
        self.asking = false;
        self.backoff.succeeded();
        changes::take_items(told, page.keys().map(|key| key.item));
        let reply = page.reply();
        *at = PageQuery { walk: reply.walk, from: reply.next, ..*at };
        Some(reply.next == 0)
    }

    /// Requests the changes again from the beginning, after a failure.
    pub(super) fn restart_changes(&mut self, now_ns: u64) {
        self.asking = false;
        let begin = PageQuery { changes: true, ..PageQuery::default() };
        self.changes = Some((begin, BTreeMap::new()));
        self.failed(now_ns);
    }

    /// Returns all changes that the source has reported.
    pub(super) fn end_changes(&mut self) -> Option<BTreeMap<Slot, Changes>> {
        Some(self.changes.take()?.1)
    }

    /// Takes a page of the source's objects; false if it is malformed.
    pub(super) fn take_page(&mut self, page: &[u8]) -> bool {
        let Some(page) = KeyPage::decode(page) else { return false };
        (self.asking, self.backoff.failures) = (false, 0);
        for key in page.keys() {
            self.queue.push_back(ListedObject {
                item: key.item,
                tenant: key.name.tenant.to_vec(),
                key: key.name.key.to_vec(),
            });
        }
        let reply = page.reply();
        self.at = PageQuery { walk: reply.walk, from: reply.next, ..self.at };
        if reply.next == 0 {
            self.at = PageQuery { walk: 0, ..self.at };
            self.walked = true;
        }
        true
    }

    /// Begins the walk again after a failure to get a page.
    pub(super) fn restart_walk(&mut self, now_ns: u64) {
        self.asking = false;
        // From the beginning: the former position may not be valid any more.
        self.at = PageQuery { walk: 0, from: 0, ..self.at };
        self.failed(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    /// A source that did not answer for a second is not in backoff for five because sixteen objects were in flight.
    #[test]
    fn requests_that_fail_together_back_off_once() {
        let mut source = Source::new(ShardKey { node: NodeId(1), incarnation: Incarnation(1), shard: ShardId(0) });
        let mut waits = Vec::new();
        for _ in 0..4 {
            let now_ns = source.retry_ns();
            (0..20).for_each(|later| source.failed(now_ns + later));
            waits.push((source.retry_ns() - now_ns) / 100_000_000);
        }
        assert_eq!(waits, [2, 4, 8, 16], "tenths of a second: twice as long each time");
    }
}
