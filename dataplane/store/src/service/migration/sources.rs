//! Former owners of slots that came, and how far each of them has been asked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::ids::Slot;
use kvplane_proto::map::ShardKey;
use kvplane_proto::message::{KeyItem, KeyPage, PageQuery};

use super::changes;
use crate::service::tiering::reconciliation::changes::Changes;

/// Objects of one request to drop them.
const DROPS: usize = 1024;
/// The walk goes on when fewer than so many objects wait to be fetched.
const QUEUED: usize = 64;
/// How long nobody waits for a source that did not answer.
const MUTED_NS: u64 = 1_000_000_000;
/// Between two attempts in the background: doubles up to the second.
const RETRY_NS: u64 = 100_000_000;
const RETRY_MOST_NS: u64 = 5_000_000_000;

/// An object that a former owner has.
#[derive(Debug)]
pub(super) struct ListedObject {
    pub(super) item: KeyItem,
    pub(super) tenant: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// When a former owner that did not answer is asked again.
#[derive(Debug, Default)]
struct Backoff {
    failures: u32,
    retry_ns: u64,
    /// Until then nobody waits for it.
    muted_ns: u64,
}

/// A former owner, of slots that came by one layout.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) key: ShardKey,
    /// How many slots are still its own.
    pub(super) slots: usize,
    /// Where the walk through what it has is.
    at: PageQuery,
    asking: bool,
    walked: bool,
    /// What it told of changes in its slots so far, and where it goes on with that; nothing when it has told all.
    changes: Option<(PageQuery, BTreeMap<Slot, Changes>)>,
    /// Something could not be fetched: once more, when the walk is over.
    again: bool,
    backoff: Backoff,
    pub(super) queue: VecDeque<ListedObject>,
    /// What it is to drop.
    drops: VecDeque<Digest>,
    dropping: bool,
    /// Objects on their way.
    pub(super) open: usize,
    /// Objects that are here, and that it keeps until the SSD here has them; not more than may wait for that.
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
            queue: VecDeque::new(),
            drops: VecDeque::new(),
            dropping: false,
            open: 0,
            unwritten: BTreeSet::new(),
        }
    }

    /// It did not answer, or not as it should: the next attempt is later. Many requests that fail by one outage are one
    /// failure.
    pub(super) fn failed(&mut self, now_ns: u64) {
        let backoff = &mut self.backoff;
        if now_ns < backoff.retry_ns {
            return;
        }
        backoff.failures += 1;
        backoff.retry_ns = now_ns.saturating_add((RETRY_NS << backoff.failures.min(10)).min(RETRY_MOST_NS));
    }

    /// An object could not be taken over: the walk finds it once more.
    pub(super) fn look_again(&mut self, now_ns: u64) {
        self.again = true;
        self.failed(now_ns);
    }

    /// When it is to be asked again, where it did not answer.
    pub(super) const fn retry_ns(&self) -> u64 {
        self.backoff.retry_ns
    }

    /// For a while nobody waits for it.
    pub(super) const fn mute(&mut self, now_ns: u64) {
        self.backoff.muted_ns = now_ns.saturating_add(MUTED_NS);
    }

    pub(super) const fn is_muted(&self, now_ns: u64) -> bool {
        self.backoff.muted_ns > now_ns
    }

    /// True while it has not told all that changed in its slots.
    pub(super) const fn awaits_changes(&self) -> bool {
        self.changes.is_some()
    }

    /// The walk begins anew, where something of the last one could not be fetched and nothing is fetched any more.
    pub(super) fn repeat_walk(&mut self) {
        if self.walked && self.again && self.queue.is_empty() && self.open == 0 {
            (self.walked, self.again) = (false, false);
        }
    }

    /// True when all of it is here, or gone.
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

    /// It is to drop an object.
    pub(super) fn drop_object(&mut self, digest: Digest) {
        self.drops.push_back(digest);
    }

    /// The objects that it is to be asked to drop next, of those that `is_its`; none while it is asked already.
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

    /// It has dropped objects, or has not answered: then it is asked again.
    pub(super) fn dropped(&mut self, digests: &[Digest], done: bool, now_ns: u64) {
        self.dropping = false;
        if !done {
            self.failed(now_ns);
            self.drops.extend(digests);
        }
    }

    /// The page that it is to be asked for next of what it has.
    pub(super) fn next_page(&mut self, now_ns: u64) -> Option<PageQuery> {
        let wait = self.asking
            || self.walked
            || self.changes.is_some()
            || self.queue.len() >= QUEUED
            || self.backoff.retry_ns > now_ns;
        self.asking |= !wait;
        (!wait).then_some(self.at)
    }

    /// The page that it is to be asked for next of what changed in its slots, before anything is fetched of them.
    pub(super) fn next_changes(&mut self, now_ns: u64) -> Option<PageQuery> {
        if self.asking || self.backoff.retry_ns > now_ns {
            return None;
        }
        let at = self.changes.as_ref()?.0;
        self.asking = true;
        Some(at)
    }

    /// It has told some of what changed, or all: true then. `None` for a page that is none, or that nobody awaits.
    pub(super) fn take_changes(&mut self, page: &[u8]) -> Option<bool> {
        let (page, (at, told)) = (KeyPage::decode(page)?, self.changes.as_mut()?);
        // It is there, whatever failed before.
        self.asking = false;
        (self.backoff.failures, self.backoff.retry_ns) = (0, 0);
        changes::take_items(told, page.keys().map(|key| key.item));
        let reply = page.reply();
        *at = PageQuery { walk: reply.walk, from: reply.next, ..*at };
        Some(reply.next == 0)
    }

    /// It did not tell what changed: it is asked again, from the beginning.
    pub(super) fn restart_changes(&mut self, now_ns: u64) {
        self.asking = false;
        let begin = PageQuery { changes: true, ..PageQuery::default() };
        self.changes = Some((begin, BTreeMap::new()));
        self.failed(now_ns);
    }

    /// All that it knows of changes.
    pub(super) fn end_changes(&mut self) -> Option<BTreeMap<Slot, Changes>> {
        Some(self.changes.take()?.1)
    }

    /// It has told some of what it has; false where that is no page.
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

    /// It did not tell what it has.
    pub(super) fn restart_walk(&mut self, now_ns: u64) {
        self.asking = false;
        // From the beginning: where it was may mean nothing any more.
        self.at = PageQuery { walk: 0, from: 0, ..self.at };
        self.failed(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

    use super::*;

    /// A source that did not answer for a second is not left alone for five because sixteen objects were on their way.
    #[test]
    fn requests_that_fail_together_put_off_the_next_attempt_once() {
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
