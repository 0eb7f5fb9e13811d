//! Coverage of runs: the stretches of a run that each holder has.
//!
//! A run is cut where many holders end at the same block, so that a common head of all prompts becomes a run of its
//! own. A run without holders is removed.

use super::super::Tiers;
use super::super::contexts::Salt;
use super::super::holders::Holders;
use super::super::run::{DENSE_AT, Dense, FREE, Record, TIERS, bit};
use super::{Blocks, FIRST};

impl Blocks {
    /// Notes that a holder has a stretch of a run.
    pub(in super::super) fn cover(&mut self, run: u32, mut record: Record, holders: &Holders) {
        if self.runs.has_bit(run, record.slot, record.tier) {
            return;
        }
        let same = |old: &Record| (old.slot, old.tier) == (record.slot, record.tier);
        let mut place = self.runs.first_of(run, record.slot, record.tier);
        while self.runs.records(run).get(place).is_some_and(|old| same(old) && old.end < record.start) {
            place += 1;
        }
        let mut absorbed = 0;
        let (slot, tier) = (record.slot, record.tier);
        while let Some(old) = self.runs.records(run).get(place + absorbed).copied() {
            if (old.slot, old.tier) != (slot, tier) || old.start > record.end {
                break;
            }
            (record.start, record.end) = (record.start.min(old.start), record.end.max(old.end));
            absorbed += 1;
        }
        let whole = record.start == 0 && record.end == self.runs.get(run).len;
        (1..absorbed).for_each(|_| self.runs.take(run, place + 1));
        if absorbed == 0 {
            self.runs.insert(run, place, record);
        } else {
            self.runs.set(run, place, record);
        }
        if whole && self.runs.set_bit(run, slot, tier) {
            self.runs.take(run, place);
        }
        if self.runs.records(run).len() >= DENSE_AT {
            self.crowded(run, holders);
        }
    }

    /// Inserts a record of a snapshot as [`Self::cover`] does, but without cutting the run.
    pub(super) fn cover_whole(&mut self, run: u32, record: Record) {
        let place = self.runs.first_of(run, record.slot, record.tier);
        let own = self.runs.records(run)[place..].iter();
        let before = own.take_while(|old| (old.slot, old.tier, old.start) < (record.slot, record.tier, record.start));
        let place = place + before.count();
        self.runs.insert(run, place, record);
        if self.runs.records(run).len() >= DENSE_AT {
            self.runs.make_dense(run);
        }
    }

    /// Compacts a run with many records: holders of the whole run become bits, and if many have only the front, the run
    /// is cut.
    fn crowded(&mut self, run: u32, holders: &Holders) {
        let len = self.runs.get(run).len;
        let whole = |record: &&Record| record.start == 0 && record.end == len;
        if self.runs.records(run).iter().filter(whole).count() >= DENSE_AT / 2 {
            self.runs.make_dense(run);
        }
        let fronts = self.runs.records(run).iter().filter(|record| record.start == 0 && record.end < len);
        let mut ends: Vec<u16> = fronts.map(|record| record.end).collect();
        if ends.len() >= DENSE_AT / 2 {
            ends.sort_unstable();
            let middle = ends[ends.len() / 2];
            self.cut(run, middle, holders);
        }
    }

    /// Cuts a run in two; the blocks from `at` on move to a new run. Does nothing if there is no room for it: the
    /// holders then stay a list.
    fn cut(&mut self, run: u32, at: u16, holders: &Holders) {
        let header = *self.runs.get(run);
        let blocks = usize::from(header.len - at);
        let Some((start, cap)) = self.arena.allocate(blocks) else { return };
        if cap < blocks {
            self.arena.free(start, cap);
            return;
        }
        let tail = self.runs.add(header.context, start, cap);
        let from = header.start as usize + usize::from(at);
        self.arena.copy(from, start as usize, blocks);
        let salt = Salt::of(self.seed, header.context);
        for (block, hash) in self.arena.hashes(start, blocks).iter().enumerate() {
            let new = if block == 0 { FIRST | tail } else { start + block as u32 };
            self.table.replace(salt.key(*hash), (from + block) as u32, new);
        }
        let moved = self.runs.get_mut(tail);
        moved.len = blocks as u16;
        moved.first = self.arena.hash(start as usize);
        let is_branch_moved = header.branch > at;
        if is_branch_moved {
            (moved.branch, moved.next) = (header.branch - at, header.next);
        }
        let front = self.runs.get_mut(run);
        front.len = at;
        if is_branch_moved {
            (front.branch, front.next) = (at, tail);
        }
        self.share(run, tail, at, header.len, holders);
        self.trim(run);
    }

    /// Divides the holders of a run between its two parts after a cut at `at`.
    fn share(&mut self, run: u32, tail: u32, at: u16, len: u16, holders: &Holders) {
        let mut place = 0;
        while let Some(record) = self.runs.records(run).get(place).copied() {
            let front = Record { end: record.end.min(at), ..record };
            if record.end > at && holders.is_registered(record.slot) {
                let back = Record { start: record.start.max(at) - at, end: record.end - at, ..record };
                let end = self.runs.records(tail).len();
                self.runs.insert(tail, end, back);
            }
            if front.start < front.end {
                self.runs.set(run, place, front);
                place += 1;
            } else {
                self.runs.take(run, place);
            }
        }
        for tier in 0..TIERS {
            for slot in self.runs.slots_of(run, tier) {
                if holders.is_registered(slot) && !self.runs.set_bit(tail, slot, tier as u16) {
                    let record = Record { slot, tier: tier as u16, start: 0, end: len - at };
                    let place = self.runs.first_of(tail, slot, tier as u16);
                    self.runs.insert(tail, place, record);
                    if self.runs.records(tail).len() >= DENSE_AT {
                        self.runs.make_dense(tail);
                    }
                }
            }
        }
        if self.runs.records(run).len() >= DENSE_AT {
            self.runs.make_dense(run);
        }
        if !self.runs.is_held(tail) {
            self.release(tail);
        }
    }

    /// Notes that a holder no longer has a stretch of a run; returns the number of its blocks that it had.
    pub(in super::super) fn uncover(&mut self, run: u32, slot: u16, tier: u16, start: u16, end: u16) -> usize {
        let len = self.runs.get(run).len;
        if self.runs.clear_bit(run, slot, tier) {
            let place = self.runs.first_of(run, slot, tier);
            self.runs.insert(run, place, Record { slot, tier, start: 0, end: len });
        }
        let mut place = self.runs.first_of(run, slot, tier);
        let mut blocks = 0;
        while let Some(old) = self.runs.records(run).get(place).copied() {
            if (old.slot, old.tier) != (slot, tier) || old.start >= end {
                break;
            }
            if old.end <= start {
                place += 1;
                continue;
            }
            blocks += usize::from(old.end.min(end) - old.start.max(start));
            let (front, back) = (Record { end: start, ..old }, Record { start: end, ..old });
            match (old.start < start, end < old.end) {
                (true, true) => {
                    self.runs.set(run, place, front);
                    self.runs.insert(run, place + 1, back);
                    break;
                }
                (true, false) => {
                    self.runs.set(run, place, front);
                    place += 1;
                }
                (false, true) => {
                    self.runs.set(run, place, back);
                    break;
                }
                (false, false) => self.runs.take(run, place),
            }
        }
        self.settle(run, end == len);
        blocks
    }

    /// Removes the run, or its end, if it has no holder any more.
    fn settle(&mut self, run: u32, at_end: bool) {
        if !self.runs.is_held(run) {
            self.release(run);
        } else if at_end && self.runs.dense(run).is_none() {
            let end = self.runs.records(run).iter().map(|record| record.end).max().unwrap_or(0);
            let header = *self.runs.get(run);
            self.unlist(run, end..header.len);
            self.count -= usize::from(header.len - end);
            if end < header.len {
                let header = self.runs.get_mut(run);
                header.len = end;
                if usize::from(end) <= header.cap() / 2 {
                    self.trim(run);
                }
            }
        }
    }

    /// Removes the retired holders from a run.
    pub(in super::super) fn sweep_run(&mut self, run: u32, holders: &Holders) {
        if self.runs.get(run).context == FREE {
            return;
        }
        let mut place = 0;
        while let Some(record) = self.runs.records(run).get(place).copied() {
            if holders.is_registered(record.slot) {
                place += 1;
            } else {
                self.runs.take(run, place);
            }
        }
        if self.runs.dense(run).is_some() {
            for slot in holders.retired() {
                for tier in 0..TIERS as u16 {
                    self.runs.clear_bit(run, slot, tier);
                }
            }
        }
        self.settle(run, true);
    }

    /// Returns the end of the contiguous stretch that `slot` has from `start` on.
    pub(in super::super) fn reach(&self, run: u32, slot: u16, tiers: Tiers, start: u16) -> u16 {
        if let Some(dense) = self.runs.dense(run)
            && (0..TIERS as u16).any(|tier| tiers.has(tier) && bit(&dense.full[usize::from(tier)], slot))
        {
            return self.runs.get(run).len;
        }
        let records = self.runs.records(run);
        let from = self.runs.first_of(run, slot, 0);
        let own = &records[from..];
        let own = &own[..own.iter().take_while(|record| record.slot == slot).count()];
        stretch(own, tiers, start)
    }

    /// Returns the end of the contiguous stretch from `start` on that all holders have together.
    pub(in super::super) fn reach_together(&self, run: u32, tiers: Tiers, start: u16, holders: &Holders) -> u16 {
        let whole = |dense: &Dense| {
            let tier = |tier: usize| {
                tiers.has(tier as u16) && dense.full[tier].iter().zip(holders.live()).any(|(set, live)| set & live != 0)
            };
            (0..TIERS).any(tier)
        };
        if self.runs.dense(run).is_some_and(whole) {
            return self.runs.get(run).len;
        }
        let live = self.runs.records(run).iter().filter(|record| holders.is_live(record.slot));
        let mut live: Vec<Record> = live.copied().collect();
        live.sort_unstable_by_key(|record| record.start);
        stretch(&live, tiers, start)
    }
}

/// Returns the end of the contiguous stretch from `start` on that records cover; within a tier they must be sorted by
/// start.
pub(in super::super) fn stretch(records: &[Record], tiers: Tiers, start: u16) -> u16 {
    if let [only] = records {
        let counts = tiers.has(only.tier) && only.start <= start;
        return if counts { only.end.max(start) } else { start };
    }
    let mut reach = start;
    loop {
        let further = |record: &&Record| tiers.has(record.tier) && record.start <= reach && record.end > reach;
        match records.iter().filter(further).map(|record| record.end).max() {
            Some(end) => reach = end,
            None => return reach,
        }
    }
}
