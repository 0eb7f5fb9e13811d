//! Uploads: objects that are worth it are copied from memory into the pack that the tier fills.

use std::collections::{BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_shared::{NewObject, Refusal, SharedTier, UploadPolicy};

use crate::Replica;
use crate::service::shard::Shard;
use crate::service::shard::tail::{is_of, set_priority, tail_within};
use crate::service::tiering::{Frequency, Ssd};
use crate::service::types::PoolMemory;

/// Most objects that wait to be uploaded.
const QUEUED_MOST: usize = 8192;
/// Most bytes copied in one round, in which the shard serves no request.
const ROUND_BYTES: u64 = 1 << 20;
/// Time for which an object waits to be in memory: it was just read from the SSD.
const WAIT_NS: u64 = 1_000_000_000;
/// Time between two looks for an object that is being read from the SSD.
const PAUSE_NS: u64 = 20_000_000;

/// Objects that wait to be uploaded.
#[derive(Debug)]
pub(super) struct Uploads {
    policy: UploadPolicy,
    /// Estimate of how often each object was read lately.
    frequency: Frequency,
    /// Objects, with the time until which each waits.
    queue: VecDeque<(Digest, u64)>,
    queued: BTreeSet<Digest>,
    /// Time until which nothing is tried.
    paused_until_ns: u64,
    /// Bytes for which the tier had no room: its packs are being written, or the store fails. The end of a write wakes
    /// the host.
    lacked_bytes: Option<u64>,
    /// Objects that were not uploaded because too many waited, or because they left memory first.
    skipped: u64,
}

impl Uploads {
    pub(super) fn new(policy: UploadPolicy) -> Self {
        Self {
            policy,
            frequency: Frequency::new(),
            queue: VecDeque::new(),
            queued: BTreeSet::new(),
            paused_until_ns: 0,
            lacked_bytes: None,
            skipped: 0,
        }
    }

    /// Counts a get, and returns true if the object is worth an upload.
    pub(super) fn is_worth_it(&mut self, digest: Digest) -> bool {
        match self.policy {
            UploadPolicy::Read { times } => self.frequency.see(digest) >= times,
            UploadPolicy::All => true,
        }
    }

    /// Counts a put.
    pub(super) fn note_put(&mut self, digest: Digest, now_ns: u64) {
        if self.policy == UploadPolicy::All {
            self.want(digest, now_ns);
        }
    }

    /// Enqueues an object.
    pub(super) fn want(&mut self, digest: Digest, now_ns: u64) {
        if self.queue.len() >= QUEUED_MOST {
            self.skipped += u64::from(!self.queued.contains(&digest));
        } else if self.queued.insert(digest) {
            self.queue.push_back((digest, now_ns.saturating_add(WAIT_NS)));
        }
    }

    /// Returns the number of objects that were not uploaded because too many waited, or because they left memory first.
    pub(super) const fn skipped(&self) -> u64 {
        self.skipped
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.queued.clear();
        self.lacked_bytes = None;
    }

    /// Returns the time of the next attempt.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        (!self.queue.is_empty() && self.lacked_bytes.is_none()).then_some(self.paused_until_ns)
    }

    /// Copies some objects into the pack. Returns true if there was any progress.
    pub(super) fn drive(
        &mut self,
        tier: &mut SharedTier,
        shard: &mut Shard,
        ssd: Option<&Ssd>,
        memory: &dyn PoolMemory,
    ) -> bool {
        let (now_ns, mut bytes, mut progress) = (shard.now_ns, 0, false);
        if now_ns < self.paused_until_ns || self.lacked_bytes.is_some_and(|bytes| !tier.has_room(bytes)) {
            return false;
        }
        self.lacked_bytes = None;
        for _ in 0..self.queue.len() {
            if bytes >= ROUND_BYTES {
                return true;
            }
            let Some((digest, until_ns)) = self.queue.pop_front() else { break };
            let Some(object) = shard.peek(digest) else {
                if now_ns < until_ns {
                    // It is being read from the SSD.
                    self.queue.push_back((digest, until_ns));
                    self.paused_until_ns = now_ns.saturating_add(PAUSE_NS);
                } else {
                    self.queued.remove(&digest);
                    self.skipped += 1;
                }
                continue;
            };
            // Of an object with several replicas the owner uploads its own.
            let is_mine = object.replica != Replica::Second && shard.ownership.owns(digest) && !object.is_on_device;
            // Until the tail of an object from the SSD was read, its name is not known.
            let is_named = || object.has_tail || ssd.is_none_or(|ssd| !has_name(ssd, digest));
            let length = u32::try_from(object.extent.bytes).unwrap_or(u32::MAX);
            if !is_mine || !tier.wants(digest, object.version, length.into()) || !is_named() {
                self.queued.remove(&digest);
                continue;
            }
            let mut tail = match object.has_tail {
                true => tail_within(object.tail_at, memory.bytes(), |at, into| memory.read(at, into)),
                false => Vec::new(),
            };
            // A process that has mapped the pool may have corrupted it.
            if !tail.is_empty() && !is_of(&tail, digest) {
                self.queued.remove(&digest);
                continue;
            }
            set_priority(&mut tail, object.priority);
            let needed_bytes = u64::from(length) + tail.len() as u64;
            if needed_bytes > tier.config().object_bytes_most() {
                self.queued.remove(&digest);
                continue;
            }
            if !tier.has_room(needed_bytes) {
                self.queue.push_front((digest, until_ns.max(now_ns.saturating_add(WAIT_NS))));
                self.lacked_bytes = Some(needed_bytes);
                return progress;
            }
            let new = NewObject {
                digest,
                version: object.version,
                bytes: length,
                checksum: object.checksum,
                tail: &tail,
                tenant: object.tenant,
                is_head: object.is_head,
                is_replicated: shard.store.objects().replica(digest).is_owed_a_copy(),
            };
            let pushed = tier.push(&new, |into| memory.read(object.extent.offset, into), now_ns);
            self.queued.remove(&digest);
            progress = true;
            bytes += u64::from(length);
            if pushed == Err(Refusal::Corrupt) {
                // The bytes differ from what their writer stated: the object must not be returned.
                shard.counters.corrupt += 1;
                shard.drop_version(digest, object.version);
            }
        }
        progress
    }
}

/// Returns true if the SSD has a name of an object.
fn has_name(ssd: &Ssd, digest: Digest) -> bool {
    ssd.locate(digest).is_some_and(|record| record.key_bytes > 0)
}
