//! Reclaim: frees the segment that was filled first. Hot and pinned records are rewritten at the end of the log, the
//! others are evicted.
//!
//! The segment's footer lists its records, the index determines which of them are live, the policy decides which are
//! rewritten. The segment is free once the copies are durable and no read of it is in flight. If it has no footer, all
//! its records are evicted.
//!
//! A record that stays is read into the copy area, verified, and appended like any other. A turn of reclaim takes less
//! of the log than it frees, whatever the records are: records that do not fit are evicted.

mod moves;
mod policy;

use crate::config::{Layout, TierConfig};
use crate::contents::{Contents, Entry, SegmentState};
use crate::device::Owner;
use crate::format::{FooterEntry, FooterPage, Kind, UNIT_BYTES};
use crate::log::{
    Barrier, EndedRead, FooterWindow, Log, Need, NextPage, NoRoom, Purpose, ReadJob, Record, Waiter, segment_room,
};
use crate::memory::Memory;
use crate::ops::{Fault, Priority};
use crate::slots::SlotId;
use crate::types::{Event, Miss};
use kvplane_proto::narrowing::{length_u32, to_u32};
use moves::{Move, MoveState, Moves};
use policy::{Candidate, ReclaimPolicy, Verdict};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// A window of the footer is being read.
    Reading,
    /// The entries of a window are being processed; the next one is at (page, entry).
    Listing(u32, u32),
    /// All entries are processed; copies are in flight.
    Copying,
    /// Waits for a flush.
    Flushing,
    /// Waits for reads of the segment.
    Draining,
}

/// Segment being reclaimed.
#[derive(Debug)]
struct Victim {
    segment: u32,
    window: FooterWindow,
    stage: Stage,
    /// True if the live records that it had at first fit into its budget.
    mostly_dead: bool,
    budget_bytes: u64,
    /// Records of the segment that may still be rewritten.
    budget_records: u32,
    /// Bytes that its copies took of the log, as [`crate::log::Writer::log_taken`] counts.
    taken: u64,
}

impl Victim {
    /// Returns true if another copy may take `cost`, of a segment that frees `room`. A turn leaves a 16th of that, so
    /// that reclaim makes progress whatever the padding; hot records leave a quarter, so that pinned ones find the
    /// rest.
    const fn allows(&self, cost: u64, pinned: bool, room: u64) -> bool {
        let most = if pinned { room - room.div_ceil(16) } else { room - room.div_ceil(4) };
        self.taken + cost <= most
    }
}

/// Counters of reclaim, since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReclaimCounts {
    pub(crate) reclaims: u64,
    /// Records rewritten.
    pub(crate) reinserted: u64,
    /// Bytes of their payloads.
    pub(crate) reinserted_bytes: u64,
}

/// Reclaim of segments.
#[derive(Debug)]
pub(crate) struct Reclaim {
    policy: ReclaimPolicy,
    victim: Option<Victim>,
    moves: Moves,
    /// Number of the first move when processing paused for room.
    waits_for: Option<u64>,
    /// Number of free segments that a caller requested,
    wanted_free: u32,
    /// and the turns left to reach it.
    turns_left: u32,
    /// Buffer for the current page of the footer.
    page: Vec<u8>,
    counts: ReclaimCounts,
}

impl Reclaim {
    pub(crate) fn new(config: &TierConfig) -> Self {
        let budget_bytes = config.segment_bytes / 100 * u64::from(config.reinsert_percent);
        Self {
            policy: ReclaimPolicy { hot_hits: config.hot_hits, budget_bytes },
            victim: None,
            moves: Moves::new(config),
            waits_for: None,
            wanted_free: 0,
            turns_left: 0,
            page: vec![0; config.footer_page_bytes as usize],
            counts: ReclaimCounts::default(),
        }
    }

    pub(crate) const fn counts(&self) -> &ReclaimCounts {
        &self.counts
    }

    /// Returns true if a segment is being reclaimed.
    pub(crate) const fn is_active(&self) -> bool {
        self.victim.is_some()
    }

    /// Returns true if records are being read that are to be appended to the open group.
    pub(crate) fn is_reading(&self) -> bool {
        self.moves.is_reading()
    }

    /// Requests free segments; see [`crate::Tier::reclaim_until`].
    pub(crate) fn want_free(&mut self, free_segments: u32, config: &TierConfig) {
        self.wanted_free = free_segments.min(config.segments / 2);
        // Twice round the device: records that were hot the first time are not the second.
        self.turns_left = 2 * config.segments;
    }

    pub(crate) const fn wanted_free(&self) -> u32 {
        self.wanted_free
    }

    /// Cancels the request for free segments, as no more writes are possible.
    pub(crate) const fn give_up(&mut self) {
        self.wanted_free = 0;
    }

    fn progress(&self) -> Option<(u32, Stage)> {
        self.victim.as_ref().map(|victim| (victim.segment, victim.stage))
    }

    pub(crate) fn work(&mut self, now_ns: u64, log: &mut Log, memory: &mut dyn Memory) {
        if !log.contents.is_running() || !log.device.is_writable() {
            return;
        }
        self.append_copies(now_ns, log, memory);
        // Steps run until the next one depends on the device: then an operation is in flight whose completion calls
        // this again.
        loop {
            let before = self.progress();
            self.step(log, memory);
            if self.progress() == before {
                return;
            }
        }
    }

    fn step(&mut self, log: &mut Log, memory: &mut dyn Memory) {
        let Some(victim) = &self.victim else { return self.choose_victim(log, memory) };
        match victim.stage {
            Stage::Listing(page, entry) if self.may_list(log) => self.list(page, entry, log, memory),
            Stage::Copying if self.moves.is_empty() => {
                self.set_stage(Stage::Flushing);
                log.after_flush(Barrier::Victim);
            }
            Stage::Draining if log.contents.segments[victim.segment].reads == 0 => self.release_victim(log),
            _ => {}
        }
    }

    /// Returns true if events have room, and a move has ended since processing paused.
    fn may_list(&self, log: &Log) -> bool {
        self.waits_for != Some(self.moves.first()) && !log.events.is_clogged()
    }

    const fn set_stage(&mut self, stage: Stage) {
        if let Some(victim) = &mut self.victim {
            victim.stage = stage;
        }
    }

    /// Picks the oldest segment if few are free, or the index is nearly full.
    fn choose_victim(&mut self, log: &mut Log, memory: &mut dyn Memory) {
        let Log { device, contents, writer, .. } = log;
        let config = device.config();
        let crowded = contents.index.len() >= config.max_records - config.max_records / 32;
        let free = contents.segments.free_count();
        if free >= self.wanted_free || self.turns_left == 0 {
            self.wanted_free = 0;
        }
        let few = free < config.free_segments_low.max(self.wanted_free);
        let preparing = contents.generations.is_preparing() && !crowded;
        if preparing || !(crowded || few) {
            return;
        }
        let Some(segment) = contents.segments.oldest() else {
            self.wanted_free = 0;
            return;
        };
        let state = contents.segments[segment].state;
        if crowded && state == SegmentState::Open && writer.may_seal() {
            // All live records are in the open segment, and no more puts would come to fill it.
            return writer.leave_segment(device, contents, memory);
        }
        let is_written = contents.segments[segment].groups == 0;
        if !matches!(state, SegmentState::Sealed | SegmentState::Retired) || !is_written {
            return;
        }
        contents.segments.reclaim_oldest();
        self.turns_left = self.turns_left.saturating_sub(1);
        // Each turn makes room in a full index, and in full footers, however short or hot the records are.
        let listed = Layout::entries_most(config);
        let most = u64::from(if crowded { contents.segments[segment].live_records } else { listed });
        let budget_records = to_u32(most * u64::from(config.reinsert_percent) / 100);
        let window = FooterWindow::begin(segment, device.layout().scans, config);
        let (stage, budget_bytes) = (Stage::Reading, self.policy.budget_bytes);
        // A full index needs room for records, which dead ones do not take.
        let mostly_dead = !crowded && self.policy.is_mostly_dead(contents.segments[segment].live_bytes);
        self.victim = Some(Victim { segment, window, stage, mostly_dead, budget_bytes, budget_records, taken: 0 });
        self.counts.reclaims += 1;
        if state == SegmentState::Retired {
            return self.drop_victim(log);
        }
        window.read(Owner::Victim, &mut log.device);
    }

    /// Handles a window of the victim's footer that was read.
    pub(crate) fn victim_filled(&mut self, result: Result<(), Fault>, log: &mut Log) {
        let Some(victim) = &mut self.victim else { return };
        victim.stage = Stage::Listing(victim.window.first(), 0);
        if let Err(fault) = result {
            log.contents.count_harm(Miss::Fault(fault));
            self.drop_victim(log);
        }
    }

    /// Evicts all records of a victim without a readable footer: the index drops them, and an event reports how many
    /// they were.
    fn drop_victim(&mut self, log: &mut Log) {
        let Some(victim) = &self.victim else { return };
        let dropped = log.contents.forget_segment(victim.segment, &log.device);
        if dropped > 0 {
            log.events.push(Event::Forgotten { objects: dropped });
        }
        self.set_stage(Stage::Copying);
    }

    /// Processes a window of the footer, as far as moves and events have room.
    fn list(&mut self, mut page: u32, mut from: u32, log: &mut Log, memory: &dyn Memory) {
        loop {
            let Some(Victim { segment, mut window, .. }) = self.victim else { return };
            let generation = log.contents.segments[segment].generation;
            let Some(found) = window.load(page, generation, &mut self.page, &log.device, memory) else {
                log.contents.count_harm(Miss::Damaged);
                return self.drop_victim(log);
            };
            let bytes = core::mem::take(&mut self.page);
            let mut paused = None;
            for (at, entry) in FooterPage::entries(&bytes, found.entries).enumerate().skip(from as usize) {
                if log.events.is_clogged() || !self.consider(segment, &entry, log) {
                    paused = Some(length_u32(at));
                    break;
                }
            }
            self.page = bytes;
            let waits = paused.is_some() && !log.events.is_clogged();
            self.waits_for = waits.then_some(self.moves.first());
            if let Some(entry) = paused {
                return self.set_stage(Stage::Listing(page, entry));
            }
            match window.after(page, log.device.config()) {
                NextPage::Here(next) => (page, from) = (next, 0),
                NextPage::None => return self.set_stage(Stage::Copying),
                NextPage::Window(next) => {
                    if let Some(victim) = &mut self.victim {
                        (victim.window, victim.stage) = (next, Stage::Reading);
                    }
                    return next.read(Owner::Victim, &mut log.device);
                }
            }
        }
    }

    /// Decides on one record; returns false if that has to wait.
    fn consider(&mut self, segment: u32, listed: &FooterEntry, log: &mut Log) -> bool {
        let offset = log.device.segment_at(segment) + u64::from(listed.unit) * UNIT_BYTES;
        let Some(entry) = log.contents.index.find(listed.digest).copied() else { return true };
        if listed.kind != Kind::Object || entry.sequence() != listed.sequence || entry.offset() != offset {
            return true;
        }
        let Some(victim) = &self.victim else { return true };
        let (mostly_dead, budget_bytes, budget_records) =
            (victim.mostly_dead, victim.budget_bytes, victim.budget_records);
        let config = log.device.config();
        let record_bytes = entry.shape().most_bytes(config.chunk_bytes, config.block_bytes);
        let within_share = log.contents.accounts.is_within_share(entry.account());
        let (hits, pinned) = (entry.hits(), entry.is_pinned());
        let candidate = Candidate { record_bytes, hits, pinned, within_share, mostly_dead, budget_bytes };
        if budget_records == 0 || self.policy.decide(&candidate) == Verdict::Drop {
            log.evict(&entry);
            return true;
        }
        if !self.begin_copy(entry, log) {
            return false;
        }
        if let Some(victim) = &mut self.victim {
            victim.budget_bytes = budget_bytes.saturating_sub(record_bytes);
            victim.budget_records = budget_records - 1;
        }
        true
    }

    /// Begins to copy a record; returns false if there is no room for it until another copy ends.
    fn begin_copy(&mut self, entry: Entry, log: &mut Log) -> bool {
        let Some(number) = self.moves.begin(entry) else { return false };
        let Some(moved) = self.moves.get(number) else { return false };
        let destination = moved.payload(log.device.layout().copies);
        log.begin_read(ReadJob::new(entry, destination, Priority::Background, Purpose::Move(number)));
        true
    }

    /// Handles a record to be copied that was read, or could not be.
    pub(crate) fn record_read(&mut self, read: &EndedRead, log: &mut Log) {
        let Purpose::Move(number) = read.purpose else { return };
        let state = if read.verified.is_ok() { MoveState::Ready(read.slot) } else { MoveState::Over };
        if read.verified.is_err() {
            log.end_read(read.slot);
        }
        let moved = self.moves.get_mut(number).map(|moved| {
            (moved.state, moved.checksum) = (state, read.verified.unwrap_or(0));
            moved.entry
        });
        if let (Some(entry), Err(miss)) = (moved, read.verified)
            && log.contents.index.find(entry.digest()).is_none()
        {
            let record = log.contents.view(&entry);
            log.events.push(Event::Quarantined { record, miss });
        }
        self.moves.drop_over();
    }

    /// Appends the records that were read, in order, until there is no more room.
    fn append_copies(&mut self, now_ns: u64, log: &mut Log, memory: &mut dyn Memory) {
        for number in self.moves.numbers() {
            let Some(moved) = self.moves.get(number).copied() else { continue };
            let MoveState::Ready(slot) = moved.state else { continue };
            let before = log.writer.log_taken(&log.device);
            let state = self.place_copy(now_ns, number, &moved, slot, log, memory);
            let taken = log.writer.log_taken(&log.device) - before;
            if let Some(victim) = &mut self.victim {
                victim.taken += taken;
            }
            let Some(state) = state else { return };
            log.end_read(slot);
            if let Some(moved) = self.moves.get_mut(number) {
                moved.state = state;
            }
        }
        self.moves.drop_over();
    }

    /// Appends a record, or evicts it; returns `None` if it has to wait for room.
    fn place_copy(
        &mut self,
        now_ns: u64,
        number: u64,
        moved: &Move,
        slot: SlotId,
        log: &mut Log,
        memory: &mut dyn Memory,
    ) -> Option<MoveState> {
        let entry = &moved.entry;
        if !log.contents.is_current(entry.digest(), entry.sequence()) {
            return Some(MoveState::Over);
        }
        let need = Need::of(entry.shape(), false, &log.device);
        let pinned = log.contents.index.find(entry.digest()).is_some_and(Entry::is_pinned);
        let (cost, room) = (log.writer.log_cost(need, &log.device), segment_room(&log.device));
        let is_allowed = self.victim.as_ref().is_some_and(|victim| victim.allows(cost, pinned, room));
        let room = if is_allowed { log.make_room(now_ns, need, true, memory) } else { Err(NoRoom::Full) };
        match room {
            Err(NoRoom::Busy) => None,
            Err(NoRoom::Full) => {
                log.evict(entry);
                Some(MoveState::Over)
            }
            Ok(()) => {
                self.append_copy(number, moved, slot, pinned, log, memory);
                Some(MoveState::Appended)
            }
        }
    }

    /// Appends a record for which room was made. Whether it is pinned is taken as of now; its hits start at 0 again.
    fn append_copy(
        &mut self,
        number: u64,
        moved: &Move,
        slot: SlotId,
        pinned: bool,
        log: &mut Log,
        memory: &mut dyn Memory,
    ) {
        let Log { device, contents, writer, reads, sums, tenant_of, .. } = log;
        let Move { entry, checksum, .. } = *moved;
        let payload = moved.payload(device.layout().copies);
        let key = reads.key(slot, &entry, device, memory);
        sums.compute(payload, device.config().chunk_bytes, memory);
        let (digest, version, shape, sums) = (entry.digest(), entry.version(), entry.shape(), sums.as_slice());
        let tenant = contents.accounts.number(entry.account()).unwrap_or_else(|| tenant_of(&key));
        let record = Record { digest, version, key: &key, tenant, payload, shape, checksum, sums, pinned, hits: 0 };
        writer.append(&record, Waiter::Move(number), device, contents, memory);
        self.counts.reinserted += 1;
        self.counts.reinserted_bytes += u64::from(payload.bytes);
    }

    /// Handles the completion of a copy's group; if it failed, the index has lost its records.
    pub(crate) fn record_written(&mut self, number: u64, result: Result<(), Fault>, log: &mut Log) {
        let moved = self.moves.get_mut(number).map(|moved| {
            moved.state = MoveState::Over;
            (moved.entry.digest(), moved.entry.is_pinned())
        });
        if let (Some((digest, pinned)), Err(_)) = (moved, result)
            && log.contents.index.find(digest).is_none()
        {
            log.events.push(Event::Evicted { digest, pinned });
        }
        self.moves.drop_over();
    }

    /// Handles the flush of the victim's copies.
    pub(crate) const fn victim_durable(&mut self, result: Result<(), Fault>) {
        if result.is_ok() {
            self.set_stage(Stage::Draining);
        }
    }

    fn release_victim(&mut self, log: &mut Log) {
        let left = self.victim.as_ref().map_or(0, |victim| log.contents.segments[victim.segment].live_bytes);
        if left > 0 {
            // The footer did not list all records that the index knows: the device returned a wrong one.
            log.contents.count_harm(Miss::Damaged);
            self.drop_victim(log);
        }
        let Some(victim) = self.victim.take() else { return };
        let Contents { segments, generations, accounts, .. } = &mut log.contents;
        let generation = segments[victim.segment].generation;
        generations.raise(generation + 1);
        accounts.forget_up_to(generation);
        segments.release(victim.segment);
    }
}
