//! Shared tier of a shard: the shell around its components.
//!
//! The host calls [`SharedTier::poll`] until it returns no operation, carries the operations out, and reports each with
//! [`SharedTier::complete`]; [`SharedTier::step`] does work that takes time in small parts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvplane_proto::Digest;
use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, Slot, Version};
use kvplane_proto::map::ShardKey;
use kvplane_tier::SlotSet;

use crate::cleanup;
use crate::clock::StoreClock;
use crate::config::{
    CLEAN_EVERY_NS, DELETES_MOST, READ_BYTES_MOST, READS_MOST, STEP_ENTRIES, STEP_SLOTS, SWEEP_EVERY_NS, SharedConfig,
};
use crate::format::{Entry, EntryKind, PackRow, Stream};
use crate::health::Health;
use crate::index::{Index, PackState, view_of};
use crate::log::{Log, SlotStates};
use crate::packer::Packer;
use crate::sources::{TakenSlots, Takeovers, Wait};
use crate::types::{
    GetRange, HeldObject, MapChange, NewObject, OpId, Operation, Outcome, Refusal, SharedEvent, SharedView, StoreError,
    VoidReason,
};

/// Counters of a shard's shared tier.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SharedStats {
    /// Objects of the index, packs that have them, and the packs' bytes.
    pub objects: u64,
    pub packs: u64,
    pub pack_bytes: u64,
    /// Objects and bytes of packs that were written.
    pub uploaded: u64,
    pub uploaded_bytes: u64,
    pub packs_written: u64,
    /// Objects that were not uploaded because the pack was full or the store failed.
    pub skipped: u64,
    pub reads: u64,
    pub read_bytes: u64,
    /// Reads that failed, and reads whose bytes differ from their checksums.
    pub read_failures: u64,
    pub damaged: u64,
    /// Reads that were not tried because the store fails.
    pub reads_skipped: u64,
    pub removals: u64,
    /// Removals that the store did not take.
    pub removals_unwritten: u64,
    pub write_failures: u64,
    /// Failures because access was denied, and because the store was throttled.
    pub denied: u64,
    pub throttled: u64,
    /// Deletions that the store did not carry out; they are tried again.
    pub deletions_failed: u64,
    /// Packs that were dropped because of their age, or for lack of room.
    pub packs_dropped: u64,
    pub taken_over: u64,
    pub slots_void: u64,
    /// Owned slots whose contents are complete.
    pub slots_valid: u64,
    /// 1 while the store fails.
    pub failing: u64,
}

/// Read of an object in flight.
#[derive(Clone, Copy, Debug)]
struct ReadCall {
    token: u64,
    entry: Entry,
    pack: PackRow,
    /// True if the first read did not return what was written: one may have been damaged on its way.
    is_second: bool,
}

impl ReadCall {
    /// Returns the bytes of the object, with its tail.
    fn bytes(&self) -> u64 {
        u64::from(self.entry.bytes) + u64::from(self.entry.tail_bytes)
    }
}

/// Purpose of an operation in flight.
#[derive(Debug)]
enum Purpose {
    ClockPut,
    ClockStat,
    Pack,
    Checkpoint,
    Manifest,
    Delete(String),
    Source(u64),
    Read(ReadCall),
    /// Read by which the tier finds out whether the store works again.
    Probe,
    /// List of the stream of a pack that a read did not find.
    Look(PackRow),
    Clean,
}

/// Operations on the store.
#[derive(Debug, Default)]
struct Operations {
    last: u64,
    /// Purposes of those in flight, with the number of the stream's use in which each began.
    in_flight: BTreeMap<OpId, (Purpose, u64)>,
    queue: VecDeque<(OpId, Operation)>,
    /// Number of the use of a stream; operations of earlier uses do not count.
    generation: u64,
    is_writing: bool,
    is_deleting: bool,
    is_probing: bool,
    is_looking: bool,
    reads: usize,
    read_bytes: u64,
}

impl Operations {
    fn begin(&mut self, purpose: Purpose, operation: Operation) {
        self.last += 1;
        let id = OpId(self.last);
        self.in_flight.insert(id, (purpose, self.generation));
        self.queue.push_back((id, operation));
    }

    fn begin_writing(&mut self, purpose: Purpose, operation: Operation) {
        self.is_writing = true;
        self.begin(purpose, operation);
    }

    fn begin_read(&mut self, call: ReadCall, of: Stream) {
        let ReadCall { entry, pack, .. } = &call;
        let bytes = call.bytes();
        self.reads += 1;
        self.read_bytes += bytes;
        let range = GetRange::Bounded { offset: entry.offset.into(), bytes, checked: entry.bytes.into() };
        let name = of.of(pack.shard).pack(pack.number);
        self.begin(Purpose::Read(call), Operation::Get { name, range });
    }
}

/// Returns true if the answer to a probe is that of a store that works: one without the clock, if none was written.
fn is_clock(answer: &Result<Outcome, StoreError>, is_written: bool) -> bool {
    match answer {
        Ok(Outcome::Bytes { bytes, .. }) => bytes == CLOCK,
        Err(StoreError::NotFound) => !is_written,
        _ => false,
    }
}

/// Times of periodic work.
#[derive(Debug, Default)]
struct Schedule {
    sweep_ns: u64,
    clean_ns: u64,
    /// Time of the next deletion, after one that failed.
    delete_ns: u64,
    /// True once it was reported that the index is full, until it has room again.
    is_index_full: bool,
    /// True if the checkpoint that is being made, or a manifest that names it, is the first one without some dropped
    /// packs: their objects count until the store has both, so that changes of them wait for removals.
    is_dropping: bool,
    /// Position of the removal of objects of dropped packs; `None` while there is nothing to do.
    sweep: Option<Option<Digest>>,
    /// Members by the newest map.
    members: BTreeSet<(NodeId, Incarnation)>,
}

/// Shared tier of a shard.
#[derive(Debug)]
pub struct SharedTier {
    config: SharedConfig,
    stream: Stream,
    epoch: Epoch,
    since: Epoch,
    slots: SlotStates,
    index: Index,
    packer: Packer,
    log: Log,
    takeovers: Takeovers,
    clock: StoreClock,
    /// Health for writes, and for reads.
    health: [Health; 2],
    operations: Operations,
    schedule: Schedule,
    events: VecDeque<SharedEvent>,
    stats: SharedStats,
}

/// Contents of a stream's clock, an object whose time of writing counts.
const CLOCK: &[u8] = b"kvplane";

const WRITES: usize = 0;
const READS: usize = 1;

impl SharedTier {
    /// Creates the tier of a shard, without slots.
    #[must_use]
    pub fn new(config: SharedConfig, cluster: u128, shard: ShardKey) -> Self {
        Self {
            config,
            stream: Stream { cluster, state: 0, shard },
            epoch: Epoch(0),
            since: Epoch(0),
            slots: SlotStates::new(),
            index: Index::default(),
            packer: Packer::default(),
            log: Log::default(),
            takeovers: Takeovers::default(),
            clock: StoreClock::default(),
            health: [Health::new(0), Health::new(2)],
            operations: Operations::default(),
            schedule: Schedule::default(),
            events: VecDeque::new(),
            stats: SharedStats::default(),
        }
    }

    /// Returns the settings.
    #[must_use]
    pub const fn config(&self) -> &SharedConfig {
        &self.config
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> SharedStats {
        let (packs, pack_bytes) =
            self.index.packs().fold((0, 0), |(count, bytes), state| (count + 1, bytes + state.pack.bytes));
        SharedStats {
            objects: self.index.len() as u64,
            packs,
            pack_bytes,
            slots_valid: self.slots.valid.count(),
            failing: self.health.iter().any(Health::is_failing).into(),
            ..self.stats
        }
    }

    /// Begins another stream: nothing from before counts.
    fn begin_stream(&mut self, stream: Stream) {
        self.refuse_removals();
        self.stream = stream;
        (self.epoch, self.since) = (Epoch(0), Epoch(0));
        (self.slots, self.index, self.packer) = (SlotStates::new(), Index::default(), Packer::default());
        (self.log, self.takeovers, self.clock) = (Log::default(), Takeovers::default(), StoreClock::default());
        let operations = &mut self.operations;
        operations.generation += 1;
        (operations.is_writing, operations.is_deleting) = (false, false);
        (operations.is_probing, operations.is_looking) = (false, false);
        (self.schedule.sweep, self.schedule.is_dropping) = (None, false);
    }

    /// Begins another incarnation of the shard, which owns no slots.
    pub fn begin_incarnation(&mut self, incarnation: Incarnation) {
        let shard = ShardKey { incarnation, ..self.stream.shard };
        self.begin_stream(Stream { shard, ..self.stream });
    }

    /// Follows a map: what the store has of lost slots is released to their new owners, and gained slots are taken over
    /// from their former ones.
    pub fn follow(&mut self, change: MapChange, now_ns: u64) {
        if change.state != self.stream.state {
            self.begin_stream(Stream { state: change.state, ..self.stream });
        }
        let MapChange { epoch, since, owned, missed, sources, members, .. } = change;
        self.takeovers.follow_members(&members);
        self.schedule.members = members;
        let before = &self.slots.owned;
        let lost = if missed { before.clone() } else { before.with(&owned, |before, owned| before & !owned) };
        let gained = owned.with(before, |owned, before| owned & !before).with(&lost, |gained, lost| gained | lost);
        let gained = gained.with(&owned, |gained, owned| gained & owned);
        let is_new_layout = since != self.since || missed;
        (self.epoch, self.since) = (epoch, since);
        if !is_new_layout && lost.is_empty() && gained.is_empty() {
            return;
        }
        // No state 0: a host without a control plane's maps.
        if self.stream.state != 0 {
            self.log.want_manifest();
        }
        let slots = &mut self.slots;
        // What is left from a former ownership does not count.
        let mut useless = gained.with(&slots.all_released(), |gained, released| gained & released);
        if is_new_layout {
            // Their new owners have had a whole layout's time.
            let [now, earlier] = &mut slots.released;
            useless = useless.with(earlier, |useless, earlier| useless | earlier);
            *earlier = core::mem::replace(now, SlotSet::none());
        }
        if missed {
            // Also slots that were released before: they may have come back and gone again unseen, to an owner that
            // takes them over from here.
            let doubted = lost.with(&slots.all_released(), |lost, released| lost | released);
            useless = useless.with(&doubted, |useless, doubted| useless | doubted);
        } else {
            // Also slots that are not complete yet: their takeovers go on, and then they are released.
            slots.released[0] = slots.released[0].with(&lost, |released, lost| released | lost);
        }
        for released in &mut slots.released {
            *released = released.with(&useless, |released, useless| released & !useless);
        }
        slots.purged = slots.purged.with(&useless, |purged, useless| purged | useless);
        slots.valid = slots.valid.with(&lost, |valid, lost| valid & !lost);
        slots.owned = owned;
        slots.checkpointed = slots.checkpointed.with(&gained, |there, gained| there & !gained);
        self.log.renew(&gained);
        self.packer.lose(&lost);
        self.log.settle_after(self.packer.last_number());
        self.takeovers.lose(&useless);
        if gained.is_empty() || self.stream.state == 0 {
            return;
        }
        let mut unknown = gained.clone();
        for mut source in sources {
            for slots in source.slots.values_mut() {
                *slots = slots.with(&unknown, |slots, unknown| slots & unknown);
            }
            // A shard that has missed maps does not know what it owned meanwhile.
            if source.is_empty() || source.owner == self.stream.shard {
                continue;
            }
            unknown = unknown.with(&source.all(), |unknown, slots| unknown & !slots);
            self.takeovers.begin(source, self.stream, now_ns);
        }
        // Nobody has had the others: they are complete as soon as nothing from a former ownership is left.
        self.takeovers.begin_without(unknown);
    }

    /// Returns an object that can be read.
    #[must_use]
    pub fn locate(&self, digest: Digest) -> Option<SharedView> {
        if self.index.len() == 0 || !self.slots.valid.has(digest.slot()) || self.packer.removes(digest) {
            return None;
        }
        self.index.get(digest).map(|(entry, _)| view_of(entry))
    }

    /// Returns true if the store has an object, or may have it: it is removed and replaced only with a removal in the
    /// log.
    #[must_use]
    pub fn may_have(&self, digest: Digest) -> bool {
        let is_known = self.index.has(digest) || self.packer.has(digest) || self.packer.removes(digest);
        is_known || self.log.counts_forgotten(digest.slot())
    }

    /// Notes that the host has got an object from its former owner's memory, as this version. Returns false unless the
    /// tier has the same bytes, which then have this version, too: it stays as it is.
    pub fn note_import(&mut self, digest: Digest, bytes: u64, checksum: u64, version: Version) -> bool {
        let is_on_its_way = self.packer.has(digest) || self.packer.removes(digest);
        let is_there = !is_on_its_way && !self.log.counts_forgotten(digest.slot());
        is_there && self.index.renumber(digest, bytes, checksum, version)
    }

    /// Returns true if this many more removals can be taken.
    #[must_use]
    pub fn may_remove(&self, removals: usize) -> bool {
        self.packer.may_remove(removals)
    }

    /// Returns true if this version of an object is neither in the tier nor on its way, and could be uploaded.
    #[must_use]
    pub fn wants(&self, digest: Digest, version: Version, bytes: u64) -> bool {
        let is_mine = self.slots.owned.has(digest.slot());
        is_mine && bytes <= self.config.object_bytes_most() && !self.knows(digest, version)
    }

    /// Returns true if the tier has an object, unless it is being removed, or if this version of it is on its way.
    fn knows(&self, digest: Digest, version: Version) -> bool {
        match self.packer.version_of(digest) {
            Some(packed) => packed >= version || !self.packer.removes(digest),
            None => self.index.has(digest) && !self.packer.removes(digest),
        }
    }

    /// Returns true if a get of an object may be a reason to upload it.
    #[must_use]
    pub fn may_want(&self, digest: Digest) -> bool {
        self.slots.owned.has(digest.slot()) && !self.knows(digest, Version(u64::MAX))
    }

    /// Notes that an object was put or removed while its slot may be taken over.
    pub fn note_change(&mut self, digest: Digest) {
        if !self.takeovers.is_empty() && self.takeovers.has(digest.slot()) {
            self.takeovers.mask(digest);
        }
    }

    /// Takes an object to be uploaded, whose payload `fill` copies.
    ///
    /// # Errors
    /// If there is no room, or the bytes differ from their checksum.
    pub fn push(&mut self, object: &NewObject<'_>, fill: impl FnOnce(&mut [u8]), now_ns: u64) -> Result<(), Refusal> {
        let bytes = u64::from(object.bytes) + object.tail.len() as u64;
        let is_index_full = self.index.len() >= self.config.most_objects;
        if is_index_full && !core::mem::replace(&mut self.schedule.is_index_full, true) {
            self.events.push_back(SharedEvent::IndexFull { objects: self.index.len() as u64 });
        }
        let is_full = is_index_full || !self.packer.has_room(bytes, &self.config);
        if is_full || self.health[WRITES].is_failing() {
            self.stats.skipped += 1;
            return Err(if is_full { Refusal::Busy } else { Refusal::Paused });
        }
        if self.packer.push(object, fill, now_ns) { Ok(()) } else { Err(Refusal::Corrupt) }
    }

    /// Returns true if another object may be pushed: the open pack has room, and the store has worked and works.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        self.clock.is_known() && self.packer.has_room(bytes, &self.config) && !self.health[WRITES].is_failing()
    }

    /// Removes an object; [`SharedEvent::Removed`] says with this token when the store has the removal.
    pub fn remove(&mut self, digest: Digest, token: u64) {
        self.stats.removals += 1;
        if self.health[WRITES].is_failing() {
            self.packer.remove(digest, None);
            self.fail_removal(token);
        } else {
            self.packer.remove(digest, Some(token));
        }
    }

    fn fail_removal(&mut self, token: u64) {
        self.stats.removals_unwritten += 1;
        self.events.push_back(SharedEvent::Removed { token, is_written: false });
    }

    fn refuse_removals(&mut self) {
        self.packer.take_waiting().into_iter().for_each(|token| self.fail_removal(token));
    }

    /// Reads an object; [`SharedEvent::Read`] or [`SharedEvent::Missed`] follows with this token.
    ///
    /// # Errors
    /// If there is no such object, too many reads are in flight, or the store fails.
    pub fn read(&mut self, digest: Digest, token: u64, now_ns: u64) -> Result<(), Refusal> {
        if self.locate(digest).is_none() {
            return Err(Refusal::NotHere);
        }
        let Some((entry, pack)) = self.index.get(digest).map(|(entry, pack)| (*entry, pack)) else {
            return Err(Refusal::NotHere);
        };
        if self.health[READS].is_paused(now_ns) {
            self.stats.reads_skipped += 1;
            return Err(Refusal::Paused);
        }
        let call = ReadCall { token, entry, pack, is_second: false };
        let operations = &self.operations;
        let is_much = operations.reads > 0 && operations.read_bytes + call.bytes() > READ_BYTES_MOST;
        if operations.reads == READS_MOST || is_much {
            return Err(Refusal::Busy);
        }
        self.operations.begin_read(call, self.stream);
        Ok(())
    }

    /// Forgets all objects, as others than those that a list names may have been removed: what the store has is void.
    pub fn forget_all(&mut self) {
        let slots = &mut self.slots;
        slots.purged = slots.purged.with(&slots.owned, |purged, owned| purged | owned);
        slots.valid = SlotSet::none();
        for released in &mut slots.released {
            slots.purged = slots.purged.with(released, |purged, released| purged | released);
            *released = SlotSet::none();
        }
        slots.checkpointed = SlotSet::none();
        let owned = slots.owned.clone();
        self.log.renew(&owned);
        self.takeovers.clear();
        self.packer.lose(&owned);
        self.log.settle_after(self.packer.last_number());
        self.log.forget(&owned);
        self.takeovers.begin_without(owned);
    }

    /// Returns true while the manifest in the store is an older one: it may name slots that were lost or forgotten.
    #[must_use]
    pub const fn is_settling(&self) -> bool {
        !self.log.is_settled()
    }

    /// Returns true if the store may have objects of this shard's slots.
    #[must_use]
    pub fn has_any(&self) -> bool {
        self.index.len() > 0 || !self.packer.is_idle() || !self.takeovers.is_empty()
    }

    /// Returns true if the shard owns a slot, by the newest map.
    #[must_use]
    pub fn owns(&self, slot: Slot) -> bool {
        self.slots.owned.has(slot)
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<SharedEvent> {
        self.events.pop_front()
    }

    /// Returns the time at which [`Self::poll`] is to be called again at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        if self.stream.state == 0 {
            return None;
        }
        let pause_ns = self.health[WRITES].pause_ends().unwrap_or(0);
        let is_waiting = !self.clock.is_known() || self.packer.sealed.is_some() || self.log.is_waiting();
        let write = if is_waiting { Some(0) } else { self.packer.due_ns(&self.config) };
        let write = write.filter(|_| !self.operations.is_writing).map(|due_ns| due_ns.max(pause_ns));
        let probe = self.health[READS].probe_ns().filter(|_| !self.operations.is_probing);
        [write, probe, self.takeovers.poll_timeout(), Some(self.schedule.sweep_ns)].into_iter().flatten().min()
    }

    /// Returns the next operation for the host.
    pub fn poll(&mut self, now_ns: u64) -> Option<(OpId, Operation)> {
        if self.stream.state != 0 {
            self.begin_write(now_ns, false);
            let may_delete = !self.operations.is_deleting && now_ns >= self.schedule.delete_ns;
            if may_delete && let Some(name) = self.log.deletes.pop_front() {
                self.operations.is_deleting = true;
                self.operations.begin(Purpose::Delete(name.clone()), Operation::Delete { name });
            }
            let is_probe_due = self.health[READS].probe_ns().is_some_and(|at_ns| at_ns <= now_ns);
            if is_probe_due && !self.operations.is_probing {
                self.operations.is_probing = true;
                let (name, range) = (self.stream.clock(), GetRange::Whole);
                self.operations.begin(Purpose::Probe, Operation::Get { name, range });
            }
            if let Some((number, operation)) = self.takeovers.poll(now_ns) {
                self.operations.begin(Purpose::Source(number), operation);
            }
            self.run_schedule(now_ns);
        }
        self.operations.queue.pop_front()
    }

    /// Writes what the next owner needs to find what the store has, while the shard goes on. Returns true once it is
    /// written, or the store fails.
    pub fn settle(&mut self, now_ns: u64) -> bool {
        if self.stream.state == 0 || self.health[WRITES].is_failing() {
            return true;
        }
        self.begin_write(now_ns, true);
        let is_known = self.takeovers.is_empty() && self.clock.is_known();
        is_known && self.log.is_settled() && !self.log.is_waiting() && !self.log.is_checkpointing()
    }

    /// Writes everything that waits, as the shard stops. Returns true once nothing is left, or the store fails.
    pub fn close(&mut self, now_ns: u64) -> bool {
        if self.stream.state == 0 || self.health[WRITES].is_failing() {
            return true;
        }
        self.begin_write(now_ns, true);
        let is_written = !self.operations.is_writing && self.packer.is_idle() && self.operations.queue.is_empty();
        // The next owner has what was taken over only if this one has made it part of a checkpoint.
        let is_written = is_written && self.clock.is_known() && self.takeovers.is_empty();
        is_written && !self.log.is_waiting() && !self.log.is_checkpointing()
    }

    /// Begins the next write, if none is in flight.
    fn begin_write(&mut self, now_ns: u64, all: bool) {
        if self.operations.is_writing || self.health[WRITES].is_paused(now_ns) {
            return;
        }
        let stream = self.stream;
        if !self.clock.is_known() {
            let put = Operation::Put { name: stream.clock(), bytes: std::sync::Arc::new(CLOCK.to_vec()) };
            self.operations.begin_writing(Purpose::ClockPut, put);
            return;
        }
        if let Some(sealed) = &self.log.sealed {
            let put = Operation::Put { name: stream.checkpoint(sealed.number), bytes: sealed.bytes.clone() };
            self.operations.begin_writing(Purpose::Checkpoint, put);
            return;
        }
        if self.log.is_checkpointing() {
            return;
        }
        // A slot that is being purged is not complete, and would need another checkpoint at once.
        let is_at_rest = self.slots.purged.is_empty() && self.schedule.sweep.is_none();
        let is_checkpoint_due = self.log.is_checkpoint_due() && is_at_rest;
        // Packs and the log take turns: under a stream of uploads there would be no checkpoint otherwise. A sealed pack
        // goes first: it may have objects of slots that were lost since, which must not count on top of a checkpoint.
        let is_turn_of_log =
            self.packer.sealed.is_none() && self.log.is_its_turn() && (is_checkpoint_due || self.log.is_manifest_due());
        if !is_turn_of_log {
            if self.packer.is_due(&self.config, now_ns, all) {
                self.packer.seal(stream, self.clock.now_ms(now_ns).unwrap_or(0));
            }
            if let Some(sealed) = &self.packer.sealed {
                let put = Operation::Put { name: stream.pack(sealed.number), bytes: sealed.bytes.clone() };
                self.operations.begin_writing(Purpose::Pack, put);
                return;
            }
        }
        if is_checkpoint_due {
            self.index.leave_out_gone();
            self.schedule.is_dropping = true;
            let complete = self.slots.complete(&self.takeovers.slots());
            self.log.begin_checkpoint(&self.index, complete);
        } else if self.log.is_manifest_due() {
            let (number, manifest) = self.log.begin_manifest(&self.slots, self.epoch);
            let bytes = std::sync::Arc::new(manifest.encode(stream, number));
            self.operations.begin_writing(Purpose::Manifest, Operation::Put { name: stream.manifest(number), bytes });
        }
    }

    /// Drops packs whose time is over, or that are over the limit, and looks for streams whose owners are gone.
    fn run_schedule(&mut self, now_ns: u64) {
        if now_ns < self.schedule.sweep_ns {
            return;
        }
        self.schedule.sweep_ns = now_ns.saturating_add(SWEEP_EVERY_NS);
        self.schedule.is_index_full &= self.index.len() >= self.config.most_objects / 16 * 15;
        let Some(now_ms) = self.clock.now_ms(now_ns) else { return };
        for pack in cleanup::outdated(&self.index, &self.config, self.stream.shard, now_ms) {
            self.stats.packs_dropped += 1;
            self.index.drop_pack(pack.shard, pack.number);
            self.log.want_checkpoint();
        }
        self.delete_packs(now_ns);
        // One shard of each node looks.
        let may_clean =
            self.config.lifetime_ms > 0 && self.stream.shard.shard.0 == 0 && !self.health[READS].is_failing();
        if may_clean && now_ns >= self.schedule.clean_ns && self.slots.owned != SlotSet::none() {
            self.schedule.clean_ns = now_ns.saturating_add(CLEAN_EVERY_NS);
            self.operations.begin(Purpose::Clean, Operation::List { prefix: String::new() });
        }
    }

    /// Deletes packs of this shard that nothing is read from any more, as far as no manifest needs them; those of its
    /// former incarnations if they were dropped. Packs of others are only forgotten: a shard that still takes slots
    /// over from their streams must find them without gaps, and they are deleted with their streams, manifests first.
    fn delete_packs(&mut self, now_ns: u64) {
        if self.schedule.sweep.is_some() {
            return;
        }
        let (mine, named) = (self.stream.shard, self.log.named.1);
        let now_ms = self.clock.now_ms(now_ns).unwrap_or(0);
        let is_former = |state: &PackState| cleanup::is_of(state.pack.shard, mine) && state.pack.shard != mine;
        let is_over = |state: &&PackState| {
            let is_needed = match state.pack.shard == mine {
                true => state.pack.number > named || state.is_foreign && !state.is_gone,
                false => is_former(state) && state.is_gone && !cleanup::is_settled(&state.pack, now_ms),
            };
            state.live == 0 && !is_needed
        };
        let over: Vec<_> = self.index.packs().filter(is_over).copied().collect();
        for state in over {
            let PackRow { shard, number, .. } = state.pack;
            self.index.forget_pack(shard, number);
            if shard == mine || is_former(&state) && state.is_gone {
                self.log.deletes.push_back(self.stream.of(shard).pack(number));
            }
        }
    }

    /// Does some of the work that takes time. `held` returns what the host has of an object of a former owner, of which
    /// it gets the length and the checksum: if it has other bytes, the former owner's do not count. Returns true if
    /// there was any work.
    pub fn step(&mut self, now_ns: u64, held: &dyn Fn(&SharedView, u64) -> HeldObject) -> bool {
        let mut progress = self.takeovers.step();
        while let Some(taken) = self.takeovers.peek_done() {
            // What is left from a former ownership is removed first.
            if !taken.slots.with(&self.slots.purged, |taken, purged| taken & purged).is_empty() {
                break;
            }
            progress = true;
            if let Some(objects) = self.takeovers.take_objects() {
                self.insert_taken(objects, held);
                break;
            }
            if let Some(taken) = self.takeovers.take_done() {
                self.take_over(taken);
            }
        }
        if !self.slots.purged.is_empty() {
            progress = true;
            let some: Vec<Slot> = self.slots.purged.iter().take(STEP_SLOTS).collect();
            for slot in some {
                if self.index.purge(slot, true, STEP_ENTRIES / STEP_SLOTS) {
                    self.slots.purged.remove(slot);
                }
            }
        }
        if let Some(after) = self.schedule.sweep {
            progress = true;
            self.schedule.sweep = self.index.sweep(after, STEP_ENTRIES).map(Some);
            if self.schedule.sweep.is_none() {
                self.delete_packs(now_ns);
            }
        }
        self.log.step(&self.index, self.stream) || progress
    }

    /// Inserts objects of a former owner into the index.
    fn insert_taken(&mut self, objects: Vec<(Entry, PackRow)>, held: &dyn Fn(&SharedView, u64) -> HeldObject) {
        let mut count = 0;
        for (mut entry, pack) in objects {
            let is_newest = match held(&view_of(&entry), entry.checksum) {
                HeldObject::Absent => true,
                HeldObject::Same(version) => {
                    entry.version = version;
                    true
                }
                HeldObject::Other => false,
            };
            let is_newest = is_newest && !self.may_have(entry.digest);
            if is_newest && self.index.len() < self.config.most_objects {
                let row = self.index.add_pack(pack, pack.shard != self.stream.shard);
                self.index.insert(entry, row);
                count += 1;
            }
        }
        self.takeovers.count_objects(count);
    }

    /// Ends a takeover: the contents of its slots are complete.
    fn take_over(&mut self, taken: TakenSlots) {
        let TakenSlots { slots, found, objects } = taken;
        self.stats.damaged += u64::from(matches!(found, Err(VoidReason::Damaged { .. })));
        if slots.is_empty() {
            return;
        }
        let count = slots.count();
        match found {
            Ok(_) => {
                self.stats.taken_over += objects;
                if objects > 0 {
                    self.events.push_back(SharedEvent::TakenOver { slots: count, objects });
                }
            }
            Err(reason) => {
                self.stats.slots_void += count;
                self.events.push_back(SharedEvent::Void { slots: count, reason });
            }
        }
        let owned = slots.with(&self.slots.owned, |slots, owned| slots & owned);
        self.slots.valid = self.slots.valid.with(&owned, |valid, owned| valid | owned);
        self.takeovers.unmask(&slots);
        self.log.want_checkpoint();
    }

    /// Takes the result of an operation.
    pub fn complete(&mut self, now_ns: u64, id: OpId, result: Result<Outcome, StoreError>) {
        let Some((purpose, generation)) = self.operations.in_flight.remove(&id) else { return };
        match &result {
            Err(StoreError::Denied { .. }) => self.stats.denied += 1,
            Err(StoreError::Throttled { .. }) => self.stats.throttled += 1,
            _ => {}
        }
        if let Purpose::Read(call) = purpose {
            self.operations.reads -= 1;
            self.operations.read_bytes -= call.bytes();
            let is_current = generation == self.operations.generation;
            return self.read_done(now_ns, &call, result, is_current);
        }
        if generation != self.operations.generation {
            return;
        }
        match purpose {
            Purpose::ClockPut | Purpose::Pack | Purpose::Checkpoint | Purpose::Manifest => {
                self.operations.is_writing = false;
                match result {
                    Ok(_) => self.written(&purpose, now_ns),
                    Err(error) => self.write_failed(&purpose, error, now_ns),
                }
            }
            Purpose::ClockStat => match result {
                Ok(Outcome::Written { at_ms }) => {
                    self.operations.is_writing = false;
                    self.clock.set(at_ms, now_ns);
                }
                Ok(_) => self.operations.is_writing = false,
                Err(error) => {
                    self.operations.is_writing = false;
                    self.write_failed(&purpose, error, now_ns);
                }
            },
            Purpose::Delete(name) => {
                self.operations.is_deleting = false;
                if result.is_err() {
                    self.stats.deletions_failed += 1;
                    self.schedule.delete_ns = now_ns.saturating_add(SWEEP_EVERY_NS);
                    self.log.deletes.push_back(name);
                    // What is forgotten is deleted with the stream.
                    let excess = self.log.deletes.len().saturating_sub(DELETES_MOST);
                    self.log.deletes.drain(..excess);
                }
            }
            Purpose::Probe => {
                self.operations.is_probing = false;
                if !is_clock(&result, self.clock.is_known()) {
                    self.health[READS].failed(now_ns);
                } else if self.health[READS].worked() {
                    self.events.push_back(SharedEvent::Works);
                }
            }
            Purpose::Look(pack) => {
                self.operations.is_looking = false;
                let name = self.stream.of(pack.shard).pack(pack.number);
                // A store that answers that it has nothing of this name may have been the wrong one for a moment.
                if let Ok(Outcome::Listed(listed)) = result
                    && listed.iter().all(|one| one.name != name)
                {
                    self.index.drop_pack(pack.shard, pack.number);
                    self.log.want_checkpoint();
                }
            }
            Purpose::Source(number) => {
                if let Some(Wait { slots, name, error }) = self.takeovers.complete(number, result, now_ns) {
                    self.events.push_back(SharedEvent::Waiting { slots, name, error });
                }
            }
            Purpose::Clean => {
                if let (Ok(Outcome::Listed(listed)), Some(now_ms)) = (result, self.clock.now_ms(now_ns)) {
                    let over = cleanup::abandoned(&listed, self.stream, &self.schedule.members, &self.config, now_ms);
                    self.log.deletes.extend(over);
                }
            }
            Purpose::Read(_) => {}
        }
    }

    fn written(&mut self, purpose: &Purpose, now_ns: u64) {
        if self.health[WRITES].worked() {
            self.events.push_back(SharedEvent::Works);
        }
        match purpose {
            Purpose::ClockPut => {
                let name = self.stream.clock();
                self.operations.begin_writing(Purpose::ClockStat, Operation::Stat { name });
            }
            Purpose::Pack => self.pack_written(),
            Purpose::Checkpoint => self.log.checkpoint_written(&mut self.slots),
            Purpose::Manifest => {
                self.log.manifest_written(self.stream);
                if core::mem::take(&mut self.schedule.is_dropping) {
                    self.schedule.sweep = Some(None);
                }
                self.delete_packs(now_ns);
            }
            _ => {}
        }
        self.begin_write(now_ns, false);
    }

    fn pack_written(&mut self) {
        let Some(sealed) = self.packer.take_written() else { return };
        self.log.pack_written(sealed.number);
        self.stats.packs_written += 1;
        let bytes = sealed.bytes.len() as u64;
        let pack = PackRow { shard: self.stream.shard, number: sealed.number, bytes, written_ms: sealed.written_ms };
        let row = self.index.add_pack(pack, false);
        for entry in &sealed.entries {
            match entry.kind {
                EntryKind::Object if sealed.counts(entry) => {
                    self.stats.uploaded += 1;
                    self.stats.uploaded_bytes += u64::from(entry.bytes);
                    self.index.insert(*entry, row);
                }
                EntryKind::Removal => self.index.remove(entry.digest),
                EntryKind::Object | EntryKind::Void => {}
            }
        }
        for token in sealed.removals.into_iter().filter_map(|(_, token)| token) {
            self.events.push_back(SharedEvent::Removed { token, is_written: true });
        }
        self.packer.recycle(sealed.bytes);
    }

    fn write_failed(&mut self, purpose: &Purpose, error: StoreError, now_ns: u64) {
        self.stats.write_failures += 1;
        if matches!(purpose, Purpose::Manifest) {
            self.log.want_manifest();
        }
        if self.health[WRITES].failed(now_ns) {
            self.events.push_back(SharedEvent::Failing { error });
        }
        self.refuse_removals();
    }

    fn read_done(&mut self, now_ns: u64, call: &ReadCall, result: Result<Outcome, StoreError>, is_current: bool) {
        let ReadCall { token, entry, pack, .. } = *call;
        // It may have been removed or replaced since.
        let found = self.index.get(entry.digest).map(|(entry, pack)| (*entry, pack));
        let is_there = is_current && self.locate(entry.digest).is_some() && found == Some((entry, pack));
        match result {
            Ok(Outcome::Bytes { bytes, checksum }) => {
                if self.health[READS].worked() {
                    self.events.push_back(SharedEvent::Works);
                }
                let is_whole = bytes.len() as u64 == call.bytes()
                    && checksum == entry.checksum
                    && frame_checksum(&bytes[entry.bytes as usize..]) == entry.tail_checksum;
                if is_whole && is_there {
                    self.stats.reads += 1;
                    self.stats.read_bytes += u64::from(entry.bytes);
                    let event = SharedEvent::Read { token, version: entry.version, checksum, bytes };
                    return self.events.push_back(event);
                }
                if !is_whole && read_damaged(self, call, is_there) {
                    return;
                }
            }
            Err(StoreError::Short { .. }) => {
                self.stats.read_failures += 1;
                if read_damaged(self, call, is_there) {
                    return;
                }
            }
            Err(StoreError::NotFound) => {
                self.stats.read_failures += 1;
                if is_current && !self.operations.is_looking {
                    // All of it may be gone.
                    self.operations.is_looking = true;
                    let prefix = self.stream.of(pack.shard).prefix();
                    self.operations.begin(Purpose::Look(pack), Operation::List { prefix });
                }
            }
            Ok(_) => {}
            Err(error) => {
                self.stats.read_failures += 1;
                if self.health[READS].failed(now_ns) {
                    self.events.push_back(SharedEvent::Failing { error });
                }
            }
        }
        self.events.push_back(SharedEvent::Missed { token });
    }
}

/// Takes a read that did not return what was written: it is read once more, and given up after that. Returns true if it
/// is read once more.
fn read_damaged(tier: &mut SharedTier, call: &ReadCall, is_there: bool) -> bool {
    if is_there && !call.is_second {
        tier.operations.begin_read(ReadCall { is_second: true, ..*call }, tier.stream);
        return true;
    }
    tier.stats.damaged += 1;
    // The first time, and whenever the number has doubled.
    if tier.stats.damaged.is_power_of_two() {
        let name = tier.stream.of(call.pack.shard).pack(call.pack.number);
        tier.events.push_back(SharedEvent::Damaged { name, count: tier.stats.damaged });
    }
    if is_there {
        tier.packer.give_up(call.entry.digest);
    }
    false
}
