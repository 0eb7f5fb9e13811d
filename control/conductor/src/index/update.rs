//! What events change: coverage of runs, new runs, and runs that nobody holds any more.
//!
//! The cost of an event is in proportion to the blocks it names. A run grows in place while its holders fit in its
//! header; it is cut where many holders end at the same block, so that a head that all prompts share becomes a run of
//! its own. Whoever is retired disappears at once from all answers and is swept out of the runs a few at a time.

use super::arena::UNIT;
use super::run::{DENSE_AT, FREE, Record, TIERS};
use super::{ContextId, FIRST, HolderId, IndexError, PrefixIndex, RemovalOutcome, StoreOutcome, Tier};

/// Runs that an update sweeps while somebody was retired.
const SWEEP: usize = 64;
/// Blocks whose entries of the table are asked for at the same time: as many lines as a core waits for at once.
const AHEAD: usize = 16;
/// The most blocks set aside behind a chain that grows a block at a time.
const GROWTH: usize = 64;

impl PrefixIndex {
    /// `holder` has the blocks `hashes` in `tier`. Rolling hashes in the order of the prompt; `parent` is that of the
    /// block before the first, if there is one, and only helps to keep blocks together.
    ///
    /// When the index is full, the runs longest not stored go; [`StoreOutcome::forgotten_blocks`] counts their blocks.
    ///
    /// # Errors
    /// Unknown context or holder: nothing changes.
    pub fn stored(
        &mut self,
        context: ContextId,
        holder: HolderId,
        tier: Tier,
        parent: Option<u64>,
        hashes: &[u64],
    ) -> Result<StoreOutcome, IndexError> {
        let salt = self.salt(context)?;
        let slot = self.slot(holder)?;
        self.sweep(SWEEP);
        let forgotten = self.forgotten_blocks;
        let (mut at, mut new_blocks) = (0, 0);
        let mut before = parent.map(|hash| salt.key(hash)).and_then(|key| self.locate(context, key));
        while at < hashes.len() {
            let key = salt.key(hashes[at]);
            if let Some((run, offset)) = self.locate(context, key) {
                let blocks = self.matching(run, offset, salt, &hashes[at..]);
                let header = self.runs.get_mut(run);
                header.touch();
                if offset + blocks < header.len && at + usize::from(blocks) < hashes.len() {
                    header.branch = offset + blocks;
                }
                self.cover(run, Record { slot, tier: tier as u16, start: offset, end: offset + blocks });
                at += usize::from(blocks);
                before = Some((run, offset + blocks - 1));
            } else {
                let Some((run, start, end)) = self.extend(context, before, salt, &hashes[at..]) else { break };
                self.cover(run, Record { slot, tier: tier as u16, start, end });
                at += usize::from(end - start);
                new_blocks += usize::from(end - start);
                before = Some((run, end - 1));
            }
            // A cut may have moved the end of what was just covered.
            if before.is_some_and(|(run, offset)| offset >= self.runs.get(run).len) {
                before = self.locate(context, salt.key(hashes[at - 1]));
            }
        }
        self.make_room();
        Ok(StoreOutcome { new_blocks, forgotten_blocks: self.forgotten_blocks - forgotten })
    }

    /// `holder` no longer has the blocks `hashes` in `tier`. What it did not have is counted and left.
    ///
    /// # Errors
    /// Unknown context or holder: nothing changes.
    pub fn removed(
        &mut self,
        context: ContextId,
        holder: HolderId,
        tier: Tier,
        hashes: &[u64],
    ) -> Result<RemovalOutcome, IndexError> {
        let salt = self.salt(context)?;
        let slot = self.slot(holder)?;
        self.sweep(SWEEP);
        let mut outcome = RemovalOutcome::default();
        let mut at = 0;
        while at < hashes.len() {
            let Some((run, offset)) = self.locate(context, salt.key(hashes[at])) else {
                outcome.unknown_blocks += 1;
                at += 1;
                continue;
            };
            let (start, end, count) = self.neighbours(run, offset, salt, &hashes[at..]);
            outcome.removed_blocks += self.uncover(run, slot, tier as u16, start, end);
            at += count;
        }
        Ok(outcome)
    }

    /// Makes blocks of the first of `hashes`, which nobody has, after `before` where that is the end of a run. Says
    /// which run and which part of it; nothing when there is no room at all.
    fn extend(
        &mut self,
        context: ContextId,
        before: Option<(u32, u16)>,
        salt: super::Salt,
        hashes: &[u64],
    ) -> Option<(u32, u16, u16)> {
        let end = before.filter(|(run, offset)| *offset + 1 == self.runs.get(*run).len);
        let grown = end.map(|(run, _)| (run, *self.runs.get(run)));
        let (run, start) = match grown {
            Some((run, header)) if usize::from(header.len) < header.cap() && self.runs.is_inline(run) => {
                (run, header.len)
            }
            _ => {
                let spare = grown.map_or(0, |(_, header)| usize::from(header.len).min(GROWTH));
                (self.new_run(context, hashes.len().max(spare))?, 0)
            }
        };
        let mut header = *self.runs.get(run);
        let cap = header.cap();
        'blocks: for hashes in hashes.chunks(AHEAD) {
            let mut keys = [0; AHEAD];
            keys.iter_mut().zip(hashes).for_each(|(key, hash)| *key = salt.key(*hash));
            let keys = &keys[..hashes.len()];
            self.table.look_ahead(keys);
            for key in keys.iter().copied() {
                let full = usize::from(header.len) == cap;
                if full || (header.len > start && self.locate(context, key).is_some()) {
                    break 'blocks;
                }
                let block = header.start + u32::from(header.len);
                self.arena.set(block as usize, key);
                if header.len == 0 {
                    header.first = key;
                    // Needed for the comparison when it is looked for again.
                    self.runs.get_mut(run).first = key;
                }
                self.table.insert(key, if header.len == 0 { FIRST | run } else { block });
                header.len += 1;
                header.last = key;
            }
        }
        let kept = self.runs.get_mut(run);
        (kept.first, kept.last, kept.len) = (header.first, header.last, header.len);
        kept.touch();
        self.blocks += usize::from(header.len - start);
        if start == 0 && cap > usize::from(header.len).max(GROWTH) {
            self.trim(run);
        }
        Some((run, start, header.len))
    }

    fn new_run(&mut self, context: ContextId, blocks: usize) -> Option<u32> {
        loop {
            let id = self.runs.next_id();
            if let Some((start, cap)) = self.arena.allocate(blocks, id) {
                return Some(self.runs.add(context.0, start, cap));
            }
            if !self.forget_coldest() {
                return None;
            }
        }
    }

    /// Gives back what a run does not use of its extent.
    fn trim(&mut self, run: u32) {
        let header = self.runs.get_mut(run);
        let keep = usize::from(header.len).next_multiple_of(UNIT);
        let (start, spare) = (header.start + keep as u32, header.cap() - keep);
        header.set_cap(keep);
        self.arena.free(start, spare);
    }

    /// Notes that a holder has a stretch of a run.
    fn cover(&mut self, run: u32, mut record: Record) {
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
            self.crowded(run);
        }
    }

    /// [`Self::cover`] without cutting: what a snapshot says is put back as it was.
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

    /// Many hold something of a run: who holds all becomes a bit, and where many have only the front, it is cut.
    fn crowded(&mut self, run: u32) {
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
            self.cut(run, middle);
        }
    }

    /// Makes two runs of one. The part from `at` on moves. Without room for it nothing happens: the holders then stay a
    /// list.
    fn cut(&mut self, run: u32, at: u16) {
        let header = *self.runs.get(run);
        let blocks = usize::from(header.len - at);
        let tail = self.runs.next_id();
        let Some((start, cap)) = self.arena.allocate(blocks, tail) else { return };
        if cap < blocks {
            self.arena.free(start, cap);
            return;
        }
        let tail = self.runs.add(header.context, start, cap);
        let from = header.start as usize + usize::from(at);
        self.arena.copy(from, start as usize, blocks);
        for block in 0..blocks {
            let new = if block == 0 { FIRST | tail } else { start + block as u32 };
            self.table.replace(self.arena.key(start as usize + block), (from + block) as u32, new);
        }
        let moved = self.runs.get_mut(tail);
        moved.len = blocks as u16;
        moved.last = header.last;
        moved.first = self.arena.key(start as usize);
        let front = self.runs.get_mut(run);
        front.len = at;
        front.last = self.arena.key(from - 1);
        self.share(run, tail, at, header.len);
        self.trim(run);
    }

    /// After a cut at `at`: gives each part its share of the holders.
    fn share(&mut self, run: u32, tail: u32, at: u16, len: u16) {
        let mut place = 0;
        while let Some(record) = self.runs.records(run).get(place).copied() {
            let front = Record { end: record.end.min(at), ..record };
            if record.end > at && self.live_bit(record.slot) {
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
                if self.live_bit(slot) && !self.runs.set_bit(tail, slot, tier as u16) {
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

    /// Notes that a holder has nothing of a stretch any more; says how many blocks of it that were.
    fn uncover(&mut self, run: u32, slot: u16, tier: u16, start: u16, end: u16) -> usize {
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

    /// After holders went: gives up the run, or its end, if nobody has it any more.
    fn settle(&mut self, run: u32, at_end: bool) {
        if !self.runs.is_held(run) {
            self.release(run);
        } else if at_end && self.runs.dense(run).is_none() {
            let end = self.runs.records(run).iter().map(|record| record.end).max().unwrap_or(0);
            let header = *self.runs.get(run);
            self.unlist(header.start, end..header.len, None);
            self.blocks -= usize::from(header.len - end);
            if end < header.len {
                let header = self.runs.get_mut(run);
                header.len = end;
                header.last = self.arena.key(header.start as usize + usize::from(end) - 1);
                if usize::from(end) <= header.cap() / 2 {
                    self.trim(run);
                }
            }
        }
    }

    /// Takes blocks of the run whose keys begin at `start` out of the table. `whole` is the run if its first one is
    /// among them.
    fn unlist(&mut self, start: u32, blocks: std::ops::Range<u16>, whole: Option<u32>) {
        let places: std::ops::Range<u32> = start + u32::from(blocks.start)..start + u32::from(blocks.end);
        for from in places.clone().step_by(AHEAD) {
            let to = places.end.min(from + AHEAD as u32);
            self.table.look_ahead(self.arena.keys(from, (to - from) as usize));
            for place in from..to {
                let old = whole.filter(|_| place == start).map_or(place, |run| FIRST | run);
                self.table.remove(self.arena.key(place as usize), old);
            }
        }
    }

    /// Gives up a run with all its blocks.
    fn release(&mut self, run: u32) {
        let header = *self.runs.get(run);
        self.unlist(header.start, 0..header.len, Some(run));
        self.blocks -= usize::from(header.len);
        self.arena.free(header.start, header.cap());
        self.runs.remove(run);
    }

    /// Keeps the number of records below its limit.
    fn make_room(&mut self) {
        while self.runs.held() > self.config.max_records && self.forget_coldest() {}
    }

    /// Gives up a run that was not stored since the hand came by last. Says whether there was one.
    fn forget_coldest(&mut self) -> bool {
        let places = self.runs.places();
        for _ in 0..2 * places {
            let run = (self.hand % places) as u32;
            self.hand += 1;
            let header = self.runs.get_mut(run);
            if header.context == FREE {
                continue;
            }
            if header.take_touched() {
                continue;
            }
            self.forgotten_blocks += usize::from(header.len);
            self.release(run);
            return true;
        }
        false
    }

    /// Takes those who were retired out of the next `runs` runs; whoever is out of all of them frees its slot.
    pub(super) fn sweep(&mut self, runs: usize) {
        if self.dying.is_empty() {
            return;
        }
        for _ in 0..runs {
            let places = self.runs.places();
            if self.broom >= places {
                self.broom = 0;
                self.finish_dying();
                if self.dying.is_empty() || places == 0 {
                    return;
                }
            }
            let run = self.broom as u32;
            self.broom += 1;
            if self.runs.get(run).context != FREE {
                self.sweep_run(run);
            }
        }
    }

    fn sweep_run(&mut self, run: u32) {
        let mut place = 0;
        while let Some(record) = self.runs.records(run).get(place).copied() {
            if self.live_bit(record.slot) {
                place += 1;
            } else {
                self.runs.take(run, place);
            }
        }
        if self.runs.dense(run).is_some() {
            for at in 0..self.dying.len() {
                let slot = self.dying[at].0;
                for tier in 0..TIERS as u16 {
                    self.runs.clear_bit(run, slot, tier);
                }
            }
        }
        self.settle(run, true);
    }
}
