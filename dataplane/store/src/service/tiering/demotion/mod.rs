//! Demotion from memory to the SSD: objects are pinned until they are written, and written as the policy says.
//!
//! An object that is to be written is pinned until then, so that it is not evicted unwritten. The backlog is bounded by
//! a part of the pool ([`Backlog`]), and the writes by the budget of a day ([`Budget`]).

mod backlog;
mod budget;
mod dirty;
mod requests;
mod retries;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};
use kvplane_tier::{Ack, Memory, Miss, Put, PutError, RecordView, Span, Token};

use self::backlog::Backlog;
pub use self::budget::Admission;
pub(super) use self::budget::Budget;
use self::dirty::DirtyObject;
pub(in crate::service) use self::requests::{MoveProgress, may_put_without_ssd};
use self::retries::Retries;
use super::fair::FairQueue;
use super::policy::WritePolicy;
use super::ssd::Ssd;
use crate::Replica;
use crate::entry::Entry;
use crate::service::shard::Shard;
use crate::service::shard::deferrals::DeferredItem;
use crate::service::shard::effects::Effect;
use crate::service::shard::tail::{is_hard_pinned, is_of, set_priority, tail_within, tenant_of_tail};

/// Most bytes passed to the tier in one round: computing their checksums takes time, in which the shard serves no
/// request and the device idles.
const ROUND_BYTES: u64 = 1 << 20;

/// Objects whose quota had no room for them that are remembered.
const OVER_QUOTA_MOST: usize = 256;

/// Write in flight in the tier.
#[derive(Debug)]
struct WriteCall {
    object: DirtyObject,
    /// True while the tier reads its bytes.
    lent: bool,
    /// True until the tier has reported the outcome.
    unwritten: bool,
    failed: bool,
}

/// Objects being demoted from memory to the SSD.
#[derive(Debug)]
pub(in crate::service) struct Demotion {
    backlog: Backlog,
    /// Objects whose write may be delayed.
    dirty: VecDeque<DirtyObject>,
    /// Objects to be written next, in proportion to the weights of their tenants.
    writes: FairQueue<DirtyObject>,
    /// Objects whose write failed.
    retries: Retries,
    /// Objects that were not written lately because of their tenants' quotas, oldest first.
    over_quota: VecDeque<(Digest, Version)>,
    calls: BTreeMap<u64, WriteCall>,
    /// Objects that are delayed, queued, being written or to be retried.
    writing: BTreeSet<(Digest, Version)>,
    /// True if a put found no room: writes are not delayed then.
    pressed: bool,
    /// Replicas in memory that became objects of this shard, and were never written here.
    inherited: VecDeque<Digest>,
    /// Replicas in memory that are to be recorded.
    replicas: VecDeque<Digest>,
    /// True when the shard stops: writes are not delayed any more.
    closing: bool,
    pub(super) budget: Budget,
}

impl Demotion {
    pub(in crate::service) fn new(bytes_per_day: u64, most_bytes: u64, most: usize) -> Self {
        Self {
            backlog: Backlog::new(most_bytes, most),
            dirty: VecDeque::new(),
            writes: FairQueue::default(),
            retries: Retries::default(),
            over_quota: VecDeque::new(),
            calls: BTreeMap::new(),
            writing: BTreeSet::new(),
            pressed: false,
            inherited: VecDeque::new(),
            replicas: VecDeque::new(),
            closing: false,
            budget: Budget::new(bytes_per_day),
        }
    }

    /// Returns the number and bytes of the objects that wait to be written or are being written.
    pub(in crate::service) const fn backlog(&self) -> (usize, u64) {
        (self.backlog.objects(), self.backlog.bytes())
    }

    /// Stops delaying writes. Returns true if none is left.
    pub(in crate::service) fn close(&mut self) -> bool {
        self.closing = true;
        self.backlog.objects() == 0 && self.calls.is_empty()
    }

    /// Returns the time of the next delayed write, or retry.
    pub(in crate::service) fn poll_timeout(&self, ssd: &Ssd) -> Option<u64> {
        let dirty = match ssd.policy.write {
            WritePolicy::Back { within_ns } => {
                self.dirty.front().map(|object| object.since_ns.saturating_add(within_ns))
            }
            _ => None,
        };
        dirty.into_iter().chain(self.retries.poll_timeout()).min()
    }

    /// Returns true if a version of an object is in the backlog.
    pub(in crate::service) fn is_writing(&self, digest: Digest) -> bool {
        self.writing.range((digest, Version(0))..=(digest, Version(u64::MAX))).next().is_some()
    }

    /// Enqueues replicas that became objects of this shard.
    pub(in crate::service) fn inherit(&mut self, replicas: Vec<Digest>) {
        self.inherited.extend(replicas);
    }

    /// Enqueues the write of an object in memory, if the backlog has room; `told` waits for the write, and `asked` is
    /// the acknowledgement level of its put.
    fn hold(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        digest: Digest,
        told: Option<DeferredItem>,
        asked: Option<PutAck>,
    ) {
        let store = &mut shard.store;
        let object = store.peek(digest);
        let bytes = object.map_or(0, |object| object.extent.bytes);
        let wanted = ssd.fits(bytes) && (self.backlog.has_room(bytes) || ssd.policy.must_write(asked));
        let held = if wanted { store.hold(digest) } else { None };
        let Some((pin, object)) = held else {
            ssd.counters.writes_skipped += 1;
            if let (Some(item), Some(object)) = (told, store.peek(digest)) {
                write_failed(shard, digest, object.version, item);
            }
            return;
        };
        let (version, bytes, since_ns, tenant) = (object.version, object.extent.bytes, shard.now_ns, object.tenant);
        let account = store.tenants_mut().account_of_unconfigured(tenant);
        let object = DirtyObject {
            pin,
            digest,
            version,
            bytes,
            account,
            tenant,
            since_ns,
            told,
            ack: asked,
            copied: false,
            tries: 0,
        };
        self.backlog.add(bytes, account, ssd.weight_of(tenant));
        if ssd.replicas.is_open(digest.slot()) {
            ssd.replicas.note_written(digest.slot());
        }
        // What kept an earlier attempt off the SSD says nothing about this one.
        self.over_quota.retain(|one| *one != (digest, version));
        self.writing.insert((digest, version));
        match ssd.policy.write {
            WritePolicy::Back { .. } if told.is_none() && !is_for_ssd(asked) => self.dirty.push_back(object),
            _ => self.queue(ssd, object),
        }
    }

    /// Remembers that the quota of its tenant has no room for an object: a put that waits for the SSD is to be told.
    fn note_over_quota(&mut self, object: &DirtyObject) {
        if self.over_quota.len() == OVER_QUOTA_MOST {
            self.over_quota.pop_front();
        }
        self.over_quota.push_back((object.digest, object.version));
    }

    /// Enqueues a write that is not delayed, or not any more.
    fn queue(&mut self, ssd: &Ssd, object: DirtyObject) {
        self.writes.push(object.tenant, ssd.weight_of(object.tenant), object.bytes, object);
    }

    /// Enqueues the writes whose pause is over; all of them if writes stop, now or soon.
    fn end_pauses(&mut self, ssd: &Ssd, now_ns: u64) {
        let all = self.closing || ssd.is_degraded();
        while let Some(object) = self.retries.take_due(now_ns, all) {
            self.queue(ssd, object);
        }
    }

    /// Enqueues the delayed writes that are old enough, or that fill the backlog too much.
    fn wash(&mut self, ssd: &Ssd, now_ns: u64) {
        let WritePolicy::Back { within_ns } = ssd.policy.write else { return };
        while let Some(object) = self.dirty.front() {
            let old = self.closing || now_ns >= object.since_ns.saturating_add(within_ns);
            if old || self.pressed || self.backlog.is_much() && self.writes.is_empty() {
                let object = *object;
                self.dirty.pop_front();
                self.queue(ssd, object);
            } else {
                return;
            }
        }
        self.pressed = false;
    }

    /// Passes queued writes to the tier, as far as it accepts them. Returns true if there was any progress.
    pub(in crate::service) fn give_writes(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        memory: &mut dyn Memory,
    ) -> bool {
        let now_ns = shard.now_ns;
        let (mut progress, mut bytes) = (false, 0);
        self.end_pauses(ssd, now_ns);
        self.wash(ssd, now_ns);
        self.write_inherited(ssd, shard);
        self.write_replicas(ssd, shard);
        while bytes < ROUND_BYTES {
            let store = &mut shard.store;
            // A waiting removal may concern an earlier object of the same key.
            let waits = self.writes.front().copied().filter(|_| ssd.removals.len() == 0);
            let Some(mut object) = waits else { break };
            if !store.pinned(object.pin).is_some_and(Entry::is_live) {
                self.writes.pop();
                self.let_go_of_gone(ssd, shard, object);
                continue;
            }
            let held = store.held(object.pin).expect("a pin that the shard holds");
            let durable = ssd.policy.ack_of(object.ack) == PutAck::Durable;
            let ack = if durable { Ack::Durable } else { Ack::Buffered };
            let token = ssd.new_token();
            let read = |at, into: &mut [u8]| memory.read(Span::pool(at, into.len() as u32), into);
            let tail = match held.has_tail {
                true => tail_within(held.tail_at, store.config().host_bytes(), read),
                false => Vec::new(),
            };
            // A process that has mapped the pool may have corrupted it: under another name the object would be charged
            // and listed as another's.
            let mut tail = if is_of(&tail, object.digest) { tail } else { Vec::new() };
            set_priority(&mut tail, held.priority);
            // A replica is to be replicated again once this shard owns it.
            object.copied = store.objects().replica(object.digest) != Replica::None;
            let put = Put {
                digest: object.digest,
                key: &tail,
                tenant: tenant_of_tail(&tail),
                version: held.version,
                payload: Span::pool(held.extent.offset, held.extent.bytes as u32),
                checksum: Some(held.checksum),
                pinned: is_hard_pinned(&tail),
                hits: held.priority.number().max(0).cast_unsigned(),
                names_parts: held.is_head,
                copied: object.copied,
                ack,
                token,
            };
            let taken = ssd.tier.put(now_ns, &put, memory);
            if matches!(taken, Err(PutError::Busy | PutError::Full)) {
                ssd.counters.writes_put_off += 1;
                break;
            }
            progress = true;
            bytes += object.bytes;
            self.writes.pop();
            match taken {
                Ok(accepted) => {
                    ssd.counters.writes += 1;
                    ssd.counters.write_bytes += object.bytes;
                    let call = WriteCall { object, lent: accepted.lent, unwritten: true, failed: false };
                    self.calls.insert(token.0, call);
                }
                Err(PutError::Quota { .. }) => {
                    ssd.counters.writes_over_quota += 1;
                    self.note_over_quota(&object);
                    if let Some(item) = object.told.take() {
                        shard.drop_version(object.digest, object.version);
                        shard.refuse_put(item, Status::QuotaExceeded);
                    }
                    self.let_go(ssd, shard, &object, false);
                }
                Err(error) => {
                    ssd.counters.writes_failed += 1;
                    if matches!(error, PutError::Checksum { .. }) {
                        // The bytes differ from what their writer stated: the object must not be returned. One whose
                        // put waits for the write is dropped with it.
                        shard.counters.corrupt += 1;
                        let (digest, version) = (object.digest, object.version);
                        shard.effects.note(Effect::Damaged { digest, version });
                    }
                    self.let_go(ssd, shard, &object, false);
                }
            }
        }
        progress
    }

    /// Handles the outcome of a write.
    pub(in crate::service) fn written(&mut self, ssd: &mut Ssd, shard: &mut Shard, token: Token, good: bool) {
        let Some(call) = self.calls.get_mut(&token.0) else { return };
        (call.unwritten, call.failed) = (false, !good);
        let (told, over) = (call.object.told.take(), !call.lent);
        let (digest, version) = (call.object.digest, call.object.version);
        ssd.tell_of(shard, digest);
        if let Some(item) = told {
            if good {
                shard.settle(item, |_, _| {});
            } else {
                write_failed(shard, digest, version, item);
            }
        }
        if over {
            self.end_write(ssd, shard, token);
        }
    }

    /// Handles the release of an object's bytes by the tier.
    pub(in crate::service) fn released(&mut self, ssd: &mut Ssd, shard: &mut Shard, token: Token) {
        let Some(call) = self.calls.get_mut(&token.0) else { return };
        call.lent = false;
        if !call.unwritten {
            self.end_write(ssd, shard, token);
        }
    }

    fn end_write(&mut self, ssd: &mut Ssd, shard: &mut Shard, token: Token) {
        let Some(WriteCall { object, failed, .. }) = self.calls.remove(&token.0) else { return };
        if failed {
            // No retry of an object that is gone: replaced, removed, or dropped because its put waited for this write.
            let live = shard.store.pinned(object.pin).is_some_and(Entry::is_live);
            if live && !ssd.is_degraded() && self.retries.add(&object, shard.now_ns) {
                ssd.counters.writes_retried += 1;
                return;
            }
            ssd.counters.writes_failed += 1;
        }
        self.let_go(ssd, shard, &object, true);
    }

    /// Ends the write of an object that is gone. If it was removed after it was put, there is nothing to write, and its
    /// put succeeded.
    fn let_go_of_gone(&mut self, ssd: &Ssd, shard: &mut Shard, mut object: DirtyObject) {
        let is_removed = shard.peek(object.digest).is_none();
        if is_removed && let Some(item) = object.told.take() {
            shard.settle(item, |_, _| {});
        }
        self.let_go(ssd, shard, &object, false);
    }

    /// Ends the write of an object and unpins it.
    fn let_go(&mut self, ssd: &Ssd, shard: &mut Shard, object: &DirtyObject, good: bool) {
        let store = &mut shard.store;
        self.backlog.take(object.bytes, object.account);
        self.writing.remove(&(object.digest, object.version));
        store.unpin(object.pin).expect("a pin that the shard holds");
        if let Some(item) = object.told.filter(|_| !good) {
            write_failed(shard, object.digest, object.version, item);
        }
        let (digest, version) = (object.digest, object.version);
        let is_settled = ssd.locate(digest).is_some() || self.over_quota.contains(&(digest, version));
        shard.effects.note(Effect::Written { digest, is_settled });
    }

    /// Refuses the puts whose slot was lost while they were being written: their objects are void, and would be so too
    /// if the slot came back before the device is done.
    pub(in crate::service) fn refuse_void_puts(&mut self, shard: &mut Shard) {
        let given = self.calls.values_mut().map(|call| &mut call.object);
        let waiting = self.dirty.iter_mut().chain(self.writes.iter_mut()).chain(given);
        let ownership = &shard.ownership;
        let void: Vec<DeferredItem> =
            waiting.filter(|object| !ownership.owns(object.digest)).filter_map(|object| object.told.take()).collect();
        shard.counters.wrong_owner += void.len() as u64;
        void.into_iter().for_each(|item| shard.refuse_put(item, Status::WrongOwner));
    }

    /// Handles a damaged record that the scrubber found: the object is written again if it is in memory, with its name.
    pub(in crate::service) fn quarantined(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        record: &RecordView,
        miss: Miss,
    ) {
        ssd.counters.quarantined += 1;
        let digest = record.digest;
        if record.key_bytes > 0 && shard.peek(digest).is_some_and(|object| !object.has_tail) {
            shard.store.drop_copy(digest);
        }
        // A failing device does not recover by writes; but another location may be good.
        let lost = self.is_writing(digest) || ssd.removals.has(digest) || matches!(miss, Miss::Stale);
        if shard.store.exists(digest) && !lost {
            ssd.counters.rewritten += 1;
            self.hold(ssd, shard, digest, None, None);
        }
    }

    /// Writes an object in memory whose damaged record was repaired.
    pub(in crate::service) fn write_repaired(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) {
        if !ssd.is_degraded() && !self.is_writing(digest) {
            self.hold(ssd, shard, digest, None, Some(PutAck::Buffered));
        }
    }
}

/// Returns true if the acknowledgement of a put promises more than memory.
const fn is_for_ssd(asked: Option<PutAck>) -> bool {
    matches!(asked, Some(PutAck::Buffered | PutAck::Durable))
}

/// Fails a put whose object could not be written: the object is dropped. If it was replaced meanwhile, the client may
/// retry.
fn write_failed(shard: &mut Shard, digest: Digest, version: Version, item: DeferredItem) {
    let replaced = shard.peek(digest).is_some_and(|now| now.version > version);
    shard.drop_version(digest, version);
    shard.refuse_put(item, if replaced { Status::Busy } else { Status::NoSpace });
}
