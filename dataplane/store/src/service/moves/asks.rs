//! Questions of peers about objects that may still be with a former owner.

use std::collections::BTreeMap;

use kvplane_proto::ids::RequestId;
use kvplane_proto::message::SizeReply;
use kvplane_proto::{Digest, Status};

use super::super::Service;
use super::super::context::RequestContext;
use super::super::deferred::{Replies, Slot};
use super::super::tiered::Waiter;
use super::super::types::PeerKey;
use super::imports::{Call, Object, Want};

/// How many may wait for one object.
const WAITERS_MOST: usize = 1024;
/// Objects that somebody waits for, and questions about them.
const ASKS_MOST: usize = 4096;
/// Objects of one question.
const TOGETHER: usize = 1024;

impl Service {
    /// True where a former owner may have the object, and can be asked. For a peer whose ticket is for one tenant,
    /// objects are fetched before anything is said of them.
    pub(in crate::service) fn may_be_elsewhere(&self, context: &RequestContext, digest: Digest) -> bool {
        !context.fetches && context.tenant.is_none() && self.is_fetchable(digest)
    }

    /// Whether what is not here can be fetched from a former owner, for whomever.
    pub(in crate::service) fn is_fetchable(&self, digest: Digest) -> bool {
        let imports = &self.moves.imports;
        if imports.sources.is_empty() {
            return false;
        }
        let source = imports.sources.get(&imports.source_of(digest));
        source.is_some_and(|source| source.muted_ns <= self.now_ns) && !imports.masks.contains(&digest)
    }

    /// Whether an object may yet come from a former owner.
    pub(in crate::service) fn is_coming(&self, digest: Digest) -> bool {
        let imports = &self.moves.imports;
        imports.sources.contains_key(&imports.source_of(digest)) && !imports.masks.contains(&digest)
    }

    /// Those of these objects that may be with former owners.
    pub(in crate::service) fn elsewhere(
        &self,
        context: &RequestContext,
        missing: impl Iterator<Item = (usize, Digest)>,
    ) -> Vec<(usize, Digest)> {
        if self.moves.imports.sources.is_empty() {
            return Vec::new();
        }
        missing.filter(|(_, digest)| self.may_be_elsewhere(context, *digest)).collect()
    }

    /// Fetches an object for somebody, or joins those who wait for it. It may be elsewhere.
    pub(in crate::service) fn fetch_for(&mut self, digest: Digest, waiter: Waiter) -> Result<(), Status> {
        let timing = self.answers.outputs.timing();
        let imports = &mut self.moves.imports;
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
        imports.objects.insert(digest, Object { source, place: None, waiters, void: false, demanded: true });
        let fetch = imports.ask(key, Want::Describe(digest), Call::Describe(digest));
        imports.ready.push_back(fetch);
        Ok(())
    }

    /// Asks former owners about objects, and keeps the answer until they have told.
    pub(in crate::service) fn ask_former(
        &mut self,
        peer: PeerKey,
        request: RequestId,
        replies: Replies,
        elsewhere: Vec<(usize, Digest)>,
    ) {
        let slot_of = self.defer(peer, request, replies, elsewhere.len());
        let mut by_source: BTreeMap<u32, Vec<(Slot, Digest)>> = BTreeMap::new();
        for (at, digest) in elsewhere {
            let source = self.moves.imports.source_of(digest);
            by_source.entry(source).or_default().push((slot_of(at), digest));
        }
        for (source, items) in by_source {
            for items in items.chunks(TOGETHER) {
                let imports = &mut self.moves.imports;
                let full = imports.calls.len() >= ASKS_MOST;
                let Some(key) = imports.sources.get(&source).map(|source| source.key).filter(|_| !full) else {
                    items.iter().for_each(|(slot, _)| self.settle(*slot, |_, _| {}));
                    continue;
                };
                let digests = items.iter().map(|(_, digest)| *digest).collect();
                let fetch = imports.ask(key, Want::Sizes(digests), Call::Sizes { source, items: items.to_vec() });
                imports.ready.push_back(fetch);
            }
        }
    }

    /// A former owner has told, or has not. What happened here meanwhile counts more.
    pub(super) fn sizes_told(&mut self, source: u32, items: Vec<(Slot, Digest)>, told: &[(Status, u64)]) {
        let nothing = (Status::NotFound, 0);
        for (at, (slot, digest)) in items.into_iter().enumerate() {
            let here = self.in_memory_or_on_ssd(digest).map(|(bytes, is_head)| {
                let status = if is_head { Status::Striped } else { Status::Ok };
                (status, bytes)
            });
            let imports = &self.moves.imports;
            let counts = imports.source_of(digest) == source && !imports.masks.contains(&digest);
            let there = told.get(at).copied().filter(|_| counts).unwrap_or(nothing);
            let known = here.or_else(|| matches!(there.0, Status::Ok | Status::Striped).then_some(there));
            self.moves.counters.misses += u64::from(known.is_none());
            self.settle(slot, |replies, item| match (replies, known) {
                (Replies::Found(bits, _), Some(_)) => bits[item] = true,
                (Replies::Sizes(replies), Some((status, bytes))) => replies[item] = SizeReply { status, bytes },
                _ => {}
            });
        }
    }
}
