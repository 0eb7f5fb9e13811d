//! Reclaim: the segment that was filled first gives way. What is hot or pinned is appended once more, the rest goes.
//!
//! The segment's footer says what is in it, the index says what of that still counts, the policy says what stays. The
//! segment is free when the copies are durable and nobody reads from it. It has no footer: everything in it goes.

use super::Tier;
use super::commit::Barrier;
use super::moves::Moves;
use super::recover::FooterWindow;
use super::start::Phase;
use crate::format::{FooterEntry, FooterPage, Kind, UNIT_BYTES};
use crate::index::Entry;
use crate::memory::Memory;
use crate::ops::{Fault, Owner};
use crate::policy::{Candidate, Verdict};
use crate::segments::{SegmentEvent, SegmentState};
use crate::types::Event;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// A window of the footer is being read.
    Reading,
    /// The entries of a window are gone through; the next one is at (page, entry).
    Listing(u32, u32),
    /// All is listed; copies are under way.
    Copying,
    /// A flush is waited for.
    Flushing,
    /// Readers are waited for.
    Draining,
}

#[derive(Debug)]
struct Victim {
    segment: u32,
    window: FooterWindow,
    stage: Stage,
    budget_bytes: u64,
    /// How many more records of it may be written again.
    budget_records: u32,
    /// What its copies took of the log, as [`Tier::log_taken`] counts.
    taken: u64,
}

/// Reclaim.
#[derive(Debug)]
pub(super) struct Reclaim {
    victim: Option<Victim>,
    pub(super) moves: Moves,
    /// The first move when listing had to wait for one to be over.
    waits_for: Option<u64>,
    /// So many segments are to be free, because somebody asked for it,
    wanted_free: u32,
    /// within so many turns.
    turns_left: u32,
}

impl Reclaim {
    pub(super) fn new(max_moves: u32) -> Self {
        Self { victim: None, moves: Moves::new(max_moves), waits_for: None, wanted_free: 0, turns_left: 0 }
    }

    pub(super) const fn is_active(&self) -> bool {
        self.victim.is_some()
    }

    fn progress(&self) -> Option<(u32, Stage)> {
        self.victim.as_ref().map(|victim| (victim.segment, victim.stage))
    }
}

impl Tier {
    /// Reclaims until so many segments are free, or all that is left is what reclaim would keep. 0 ends that. More than
    /// half of the segments cannot be asked for: what is kept needs room. Nothing is wanted of a tier that takes no
    /// writes: it makes no room.
    pub fn reclaim_until(&mut self, free_segments: u32) {
        let most = if self.writable() { self.config.segments / 2 } else { 0 };
        self.reclaim.wanted_free = free_segments.min(most);
        // Twice round: what was hot the first time is not the second.
        self.reclaim.turns_left = 2 * self.config.segments;
    }

    /// Segments that somebody wants to be free; 0 when there are as many, or nobody asked.
    #[must_use]
    pub const fn wanted_free_segments(&self) -> u32 {
        self.reclaim.wanted_free
    }

    /// No more writes: nobody waits for room any more.
    pub(super) const fn give_up_reclaim(&mut self) {
        self.reclaim.wanted_free = 0;
    }

    pub(super) fn reclaim_work(&mut self, now_ns: u64, memory: &mut dyn Memory) {
        if self.phase != Phase::Running || !self.writable() {
            return;
        }
        self.append_moves(now_ns, memory);
        // As far as it goes without the device: when it stops, something is under way that calls for the next turn.
        loop {
            let before = self.reclaim.progress();
            self.reclaim_step(memory);
            if self.reclaim.progress() == before {
                return;
            }
        }
    }

    fn reclaim_step(&mut self, memory: &mut dyn Memory) {
        let Some(victim) = &self.reclaim.victim else { return self.choose_victim(memory) };
        match victim.stage {
            Stage::Listing(page, entry) if self.may_list() => self.list(page, entry, memory),
            Stage::Copying if self.reclaim.moves.is_empty() => {
                self.set_stage(Stage::Flushing);
                self.after_flush(Barrier::Victim);
            }
            Stage::Draining if self.segments[victim.segment].reads == 0 => self.release_victim(),
            _ => {}
        }
    }

    /// Whether a move is over since listing had to wait, and events have room.
    fn may_list(&self) -> bool {
        self.reclaim.waits_for != Some(self.reclaim.moves.first()) && !self.is_clogged()
    }

    fn set_stage(&mut self, stage: Stage) {
        if let Some(victim) = &mut self.reclaim.victim {
            victim.stage = stage;
        }
    }

    /// The oldest segment gives way when few are free, or the index is nearly full.
    fn choose_victim(&mut self, memory: &mut dyn Memory) {
        let crowded = self.index.len() >= self.config.max_records - self.config.max_records / 32;
        let free = self.segments.free_count();
        if free >= self.reclaim.wanted_free || self.reclaim.turns_left == 0 {
            self.reclaim.wanted_free = 0;
        }
        let few = free < self.config.free_segments_low.max(self.reclaim.wanted_free);
        let preparing = self.generations.is_preparing() && !crowded;
        if preparing || !(crowded || few) {
            return;
        }
        let Some(segment) = self.segments.filled.front().copied() else {
            self.reclaim.wanted_free = 0;
            return;
        };
        let state = self.segments[segment].state;
        if crowded && state == SegmentState::Open && self.may_seal() {
            // All that the index has is in here, and nothing more would come to fill it.
            self.close_group(memory);
            return self.fill_segment();
        }
        if !matches!(state, SegmentState::Sealed | SegmentState::Retired) || self.segments[segment].groups > 0 {
            return;
        }
        self.segments.filled.pop_front();
        self.reclaim.turns_left = self.reclaim.turns_left.saturating_sub(1);
        self.segments.step(segment, SegmentEvent::Reclaim);
        let most = self.config.scan_bytes / self.config.footer_page_bytes;
        let window = FooterWindow { first: 0, count: most.min(self.config.footer_pages), pages: 0 };
        let budget_bytes = self.policy.budget_bytes;
        let live = self.segments[segment].live_records;
        // However short the records are, and however hot: each turn makes room in a full index, and in full footers.
        let listed = FooterPage::capacity(self.config.footer_page_bytes) * self.config.footer_pages;
        let most = u64::from(if crowded { live } else { listed });
        let budget_records = (most * u64::from(self.config.reinsert_percent) / 100) as u32;
        let stage = Stage::Reading;
        self.reclaim.victim = Some(Victim { segment, window, stage, budget_bytes, budget_records, taken: 0 });
        self.stats.reclaims += 1;
        if state == SegmentState::Retired {
            return self.drop_victim();
        }
        self.read_window(segment, window, Owner::Victim, self.layout.scans);
    }

    pub(super) fn victim_filled(&mut self, result: Result<(), Fault>) {
        let Some(victim) = &mut self.reclaim.victim else { return };
        victim.stage = Stage::Listing(victim.window.first, 0);
        if result.is_err() {
            self.stats.read_faults += 1;
            self.drop_victim();
        }
    }

    /// Without a footer nobody knows what is in the segment but the index: it loses all of it.
    fn drop_victim(&mut self) {
        let Some(victim) = &self.reclaim.victim else { return };
        let segment = victim.segment;
        let (start, end) = (self.segment_at(segment), self.segment_at(segment + 1));
        let before = self.segments[segment].live_bytes;
        let (generation, untracked) = (self.segments[segment].generation, &mut self.untracked);
        let dropped = self.index.retain(|entry| {
            let stays = entry.is_removed() || entry.offset() < start || entry.offset() >= end;
            if !stays {
                untracked.reclaimed(generation, entry.digest());
            }
            stays
        });
        self.stats.live_bytes -= before;
        (self.segments[segment].live_bytes, self.segments[segment].live_records) = (0, 0);
        self.stats.evicted += u64::from(dropped);
        if dropped > 0 {
            self.events.push_back(Event::Forgotten { objects: dropped });
        }
        self.set_stage(Stage::Copying);
    }

    /// Goes through a window of the footer, as far as moves and events have room.
    fn list(&mut self, mut page: u32, mut from: u32, memory: &mut dyn Memory) {
        loop {
            let Some(victim) = &self.reclaim.victim else { return };
            let (segment, mut window) = (victim.segment, victim.window);
            let Some(found) = self.load_page(segment, window, page, self.layout.scans, memory) else {
                self.stats.damaged += 1;
                return self.drop_victim();
            };
            window.pages = found.pages;
            let bytes = core::mem::take(&mut self.scratch);
            let mut paused = None;
            for (at, entry) in FooterPage::entries(&bytes, found.entries).enumerate().skip(from as usize) {
                if self.is_clogged() || !self.consider(segment, &entry) {
                    paused = Some(at as u32);
                    break;
                }
            }
            self.scratch = bytes;
            let waits = paused.is_some() && !self.is_clogged();
            self.reclaim.waits_for = waits.then_some(self.reclaim.moves.first());
            if let Some(entry) = paused {
                return self.set_stage(Stage::Listing(page, entry));
            }
            (page, from) = (page + 1, 0);
            if page == window.pages {
                return self.set_stage(Stage::Copying);
            }
            if page == window.first + window.count {
                let most = self.config.scan_bytes / self.config.footer_page_bytes;
                let window = FooterWindow { first: page, count: most.min(window.pages - page), pages: window.pages };
                if let Some(victim) = &mut self.reclaim.victim {
                    (victim.window, victim.stage) = (window, Stage::Reading);
                }
                return self.read_window(segment, window, Owner::Victim, self.layout.scans);
            }
        }
    }

    /// Decides on one record; false when it has to wait.
    fn consider(&mut self, segment: u32, listed: &FooterEntry) -> bool {
        let offset = self.segment_at(segment) + u64::from(listed.unit) * UNIT_BYTES;
        let Some(entry) = self.index.find(listed.digest).copied() else { return true };
        if listed.kind != Kind::Object || entry.sequence() != listed.sequence || entry.offset() != offset {
            return true;
        }
        let Some(victim) = &self.reclaim.victim else { return true };
        let (budget_bytes, budget_records) = (victim.budget_bytes, victim.budget_records);
        let record_bytes = entry.shape().most_bytes(self.config.chunk_bytes, self.config.block_bytes);
        let candidate = Candidate {
            digest: listed.digest,
            record_bytes,
            hits: entry.hits(),
            pinned: entry.is_pinned(),
            budget_bytes,
        };
        if budget_records == 0 || self.policy.decide(&candidate) == Verdict::Drop {
            self.evict(&entry);
            return true;
        }
        if !self.begin_move(entry) {
            return false;
        }
        if let Some(victim) = &mut self.reclaim.victim {
            victim.budget_bytes = budget_bytes - record_bytes;
            victim.budget_records = budget_records - 1;
        }
        true
    }

    /// Copies took so much more of the log.
    pub(super) const fn charge_victim(&mut self, taken: u64) {
        if let Some(victim) = &mut self.reclaim.victim {
            victim.taken += taken;
        }
    }

    /// Whether another copy may take so much. A turn leaves a 16th of what it gives back, so reclaim ends, with however
    /// much padding; what is hot leaves a quarter, so that what is pinned finds the rest.
    pub(super) fn victim_allows(&self, cost: u64, pinned: bool) -> bool {
        let room = self.segment_room();
        let most = if pinned { room - room.div_ceil(16) } else { room - room.div_ceil(4) };
        self.reclaim.victim.as_ref().is_some_and(|victim| victim.taken + cost <= most)
    }

    pub(super) fn evict(&mut self, entry: &Entry) {
        if self.forget_record(entry.digest(), entry.sequence()) {
            self.stats.evicted += 1;
            let generation = self.segments[self.segment_of(entry.offset())].generation;
            self.untracked.reclaimed(generation, entry.digest());
            let (digest, pinned) = (entry.digest(), entry.is_pinned());
            self.events.push_back(Event::Evicted { digest, pinned });
        }
    }

    pub(super) fn victim_durable(&mut self, result: Result<(), Fault>) {
        if result.is_ok() {
            self.set_stage(Stage::Draining);
        }
    }

    fn release_victim(&mut self) {
        let left = self.reclaim.victim.as_ref().map_or(0, |victim| self.segments[victim.segment].live_bytes);
        if left > 0 {
            // The footer did not list what the index knows: the device gave us a wrong one.
            self.stats.damaged += 1;
            self.drop_victim();
        }
        let Some(victim) = self.reclaim.victim.take() else { return };
        let at = &self.segments[victim.segment];
        self.generations.raise(at.generation + 1);
        if at.bad {
            self.segments.step(victim.segment, SegmentEvent::Discard);
        } else {
            self.segments.step(victim.segment, SegmentEvent::Release);
            self.segments.free.push_back(victim.segment);
        }
    }
}
