//! Replies that wait for removals in the tier's log.

use std::collections::BTreeMap;

use kvplane_proto::ids::Version;
use kvplane_proto::{Digest, Status};

use crate::service::shard::Shard;
use crate::service::shard::deferrals::{DeferredItem, Replies};

/// Reason for a removal, and the reply that waits for it.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum SharedRemoval {
    /// A peer removes the object.
    Requested(DeferredItem),
    /// The object was replaced by this version.
    Replaced { version: Version, told: Option<DeferredItem> },
}

/// Removals that are not in the log yet.
#[derive(Debug, Default)]
pub(super) struct Removals {
    last: u64,
    open: BTreeMap<u64, (Digest, SharedRemoval)>,
    /// Number of removals of each object.
    counts: BTreeMap<Digest, u32>,
}

impl Removals {
    /// Adds a removal; returns its token.
    pub(super) fn add(&mut self, digest: Digest, cause: SharedRemoval) -> u64 {
        self.last += 1;
        self.open.insert(self.last, (digest, cause));
        *self.counts.entry(digest).or_default() += 1;
        self.last
    }

    /// Returns true while a reply waits for the removal of an object.
    pub(super) fn has(&self, digest: Digest) -> bool {
        self.counts.contains_key(&digest)
    }

    /// Ends a removal. One that is not in the log may be undone by the next owner: the reply that waits for it fails.
    pub(super) fn end(&mut self, shard: &mut Shard, token: u64, is_written: bool) {
        let Some((digest, cause)) = self.open.remove(&token) else { return };
        if let Some(count) = self.counts.get_mut(&digest) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&digest);
            }
        }
        match cause {
            SharedRemoval::Requested(item) => shard.settle(item, |replies, _| {
                if let (Replies::Bits(_, status), false) = (replies, is_written) {
                    *status = Status::NoSpace;
                }
            }),
            SharedRemoval::Replaced { told, .. } if is_written => {
                told.into_iter().for_each(|item| shard.settle(item, |_, _| {}));
            }
            SharedRemoval::Replaced { version, told } => {
                shard.drop_version(digest, version);
                told.into_iter().for_each(|item| shard.refuse_put(item, Status::NoSpace));
            }
        }
    }
}
