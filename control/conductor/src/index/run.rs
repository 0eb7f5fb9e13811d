//! Runs: sequences of blocks that were stored in one go, with the holders of their stretches.
//!
//! The header of a run takes half a cache line, with its first hash and the record of its holder if there is one. A
//! record states that a holder has blocks `start..end` of the run in a tier. A few records are a list in
//! [`Lists`]; more spill into a vector; if many holders have the whole run, they are a bitset per tier.

use super::arena::{MOST_UNITS, UNIT};
use super::lists::{Lists, MOST};

/// Number of tiers.
pub(super) const TIERS: usize = 5;
/// Number of records in a spill from which holders of the whole run become bits.
pub(super) const DENSE_AT: usize = 8;
/// Value of a header's count if its records are a spill.
const SPILLED: usize = MOST + 1;
/// Value of [`RunHeader::next`] without a run.
pub(super) const NO_RUN: u32 = u32::MAX;
/// Headers or spills that are reserved together, at least; then a sixteenth of those that there are.
const GROWTH: usize = 16;

/// Stretch `start..end` of a run that a holder has in a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub slot: u16,
    pub tier: u16,
    pub start: u16,
    pub end: u16,
}

impl Record {
    fn order(self) -> (u16, u16) {
        (self.slot, self.tier)
    }
}

/// Header of a run.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(super) struct RunHeader {
    /// Hash of the first block.
    pub first: u64,
    /// Run in which the last stored prompt went on after it left this one: a guess of where others go on. The run may
    /// have been replaced since. [`NO_RUN`] for none.
    pub next: u32,
    /// Index of its first block in the arena.
    pub start: u32,
    /// Number of its blocks.
    pub len: u16,
    /// Offset at which the last stored prompt left the run: a guess of where others leave it. It may be beyond the end.
    pub branch: u16,
    /// Context of its blocks; [`FREE`] if the header is unused.
    pub context: u16,
    /// Capacity in units, number of records, and the flag of the CLOCK hand.
    packed: u16,
    /// The record, if there is one; if there are more, `start` and `end` are the number of their list or spill.
    record: Record,
}

const _: () = assert!(size_of::<RunHeader>() == 32);

/// Layout of [`RunHeader`]'s packed word: the bit that is set when the run is stored, the position of the record count,
/// and the position of the units.
const TOUCHED: u16 = 1;
const COUNT_AT: u16 = 1;
const COUNT_MASK: u16 = 7;
const UNITS_AT: u16 = 4;

const _: () = assert!(SPILLED <= COUNT_MASK as usize && MOST_UNITS < 1 << (16 - UNITS_AT));

impl RunHeader {
    /// Returns the capacity in blocks.
    pub(super) fn cap(&self) -> usize {
        usize::from(self.packed >> UNITS_AT) * UNIT
    }

    pub(super) fn set_cap(&mut self, blocks: usize) {
        self.packed = self.packed & ((1 << UNITS_AT) - 1) | ((blocks / UNIT) as u16) << UNITS_AT;
    }

    /// Marks the run as stored recently.
    pub(super) fn touch(&mut self) {
        self.packed |= TOUCHED;
    }

    /// Returns true if the run was stored since the last call.
    pub(super) fn take_touched(&mut self) -> bool {
        let touched = self.packed & TOUCHED != 0;
        self.packed &= !TOUCHED;
        touched
    }

    /// Returns the number of records in the header or in a list, or [`SPILLED`].
    fn count(&self) -> usize {
        usize::from(self.packed >> COUNT_AT & COUNT_MASK)
    }

    fn set_count(&mut self, count: usize) {
        self.packed = self.packed & !(COUNT_MASK << COUNT_AT) | (count as u16) << COUNT_AT;
    }

    /// Returns the number of the list or spill with the records.
    fn more(&self) -> u32 {
        u32::from(self.record.start) << 16 | u32::from(self.record.end)
    }

    /// Notes that `count` records, or those of a spill, have moved to the list or spill `more`.
    fn set_more(&mut self, count: usize, more: u32) {
        self.set_count(count);
        (self.record.start, self.record.end) = ((more >> 16) as u16, more as u16);
    }

    /// Returns the number of the spill, if there is one.
    fn spill(&self) -> Option<usize> {
        (self.count() == SPILLED).then(|| self.more() as usize)
    }
}

/// Context of an unused header.
pub(super) const FREE: u16 = u16::MAX;

/// Holders of the whole run, by tier: a bitset of slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Dense {
    pub full: [Vec<u64>; TIERS],
    pub bits: u32,
}

#[derive(Default)]
struct Spill {
    list: Vec<Record>,
    dense: Option<Box<Dense>>,
}

/// All runs of an index.
pub(super) struct Runs {
    runs: Vec<RunHeader>,
    free: Vec<u32>,
    lists: Lists,
    spills: Vec<Spill>,
    free_spills: Vec<u32>,
    /// Words of a bitset of slots.
    words: usize,
    /// Number of records of all runs, where a bitset counts as its words.
    held: usize,
}

impl Runs {
    pub(super) fn new(slots: usize) -> Self {
        let words = slots.div_ceil(64);
        Self {
            runs: Vec::new(),
            free: Vec::new(),
            lists: Lists::default(),
            spills: Vec::new(),
            free_spills: Vec::new(),
            words,
            held: 0,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let spill = |spill: &Spill| {
            let bits = spill.dense.as_ref().map_or(0, |dense| {
                size_of::<Dense>() + dense.full.iter().map(|words| words.capacity() * 8).sum::<usize>()
            });
            spill.list.capacity() * size_of::<Record>() + bits
        };
        self.runs.capacity() * size_of::<RunHeader>()
            + self.lists.bytes()
            + self.spills.capacity() * size_of::<Spill>()
            + (self.free.capacity() + self.free_spills.capacity()) * size_of::<u32>()
            + self.spills.iter().map(spill).sum::<usize>()
    }

    /// Returns the number of headers, used or not.
    pub(super) fn places(&self) -> usize {
        self.runs.len()
    }

    /// Returns the number of headers in use.
    pub(super) fn used(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    #[inline]
    pub(super) fn get(&self, id: u32) -> &RunHeader {
        &self.runs[id as usize]
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut RunHeader {
        &mut self.runs[id as usize]
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u32> {
        (0..self.runs.len() as u32).filter(|id| self.get(*id).context != FREE)
    }

    pub(super) fn add(&mut self, context: u16, start: u32, cap: usize) -> u32 {
        let mut run = RunHeader {
            first: 0,
            next: NO_RUN,
            start,
            len: 0,
            branch: 0,
            context,
            packed: TOUCHED,
            record: Record::default(),
        };
        run.set_cap(cap);
        if let Some(id) = self.free.pop() {
            self.runs[id as usize] = run;
            return id;
        }
        reserve_one(&mut self.runs);
        self.runs.push(run);
        (self.runs.len() - 1) as u32
    }

    /// Removes a run and the records of its holders.
    pub(super) fn remove(&mut self, id: u32) {
        self.held -= self.records(id).len() + self.dense(id).map_or(0, |_| self.words);
        let run = &mut self.runs[id as usize];
        run.context = FREE;
        let (count, more) = (run.count(), run.more());
        run.set_count(0);
        match count {
            0 | 1 => {}
            SPILLED => self.drop_spill(more),
            count => self.lists.remove(more, count),
        }
        self.free.push(id);
    }

    fn drop_spill(&mut self, spill: u32) {
        self.spills[spill as usize] = Spill::default();
        self.free_spills.push(spill);
    }

    /// Returns true if its holders are not a spill.
    pub(super) fn is_short(&self, id: u32) -> bool {
        self.get(id).count() < SPILLED
    }

    #[inline]
    pub(super) fn records(&self, id: u32) -> &[Record] {
        let run = self.get(id);
        match run.count() {
            0 => &[],
            1 => std::slice::from_ref(&run.record),
            SPILLED => &self.spills[run.more() as usize].list,
            count => self.lists.get(run.more(), count),
        }
    }

    fn records_mut(&mut self, id: u32) -> &mut [Record] {
        let run = &mut self.runs[id as usize];
        match run.count() {
            0 => &mut [],
            1 => std::slice::from_mut(&mut run.record),
            SPILLED => &mut self.spills[run.more() as usize].list,
            count => self.lists.get_mut(run.more(), count),
        }
    }

    #[inline]
    pub(super) fn dense(&self, id: u32) -> Option<&Dense> {
        self.spills[self.get(id).spill()?].dense.as_deref()
    }

    /// Returns the index of a holder's first record in a tier, or the index at which it would be inserted.
    pub(super) fn first_of(&self, id: u32, slot: u16, tier: u16) -> usize {
        let records = self.records(id);
        if records.len() <= 8 {
            return records.iter().take_while(|record| record.order() < (slot, tier)).count();
        }
        records.partition_point(|record| record.order() < (slot, tier))
    }

    pub(super) fn set(&mut self, id: u32, at: usize, record: Record) {
        self.records_mut(id)[at] = record;
    }

    pub(super) fn insert(&mut self, id: u32, at: usize, record: Record) {
        self.held += 1;
        let run = &mut self.runs[id as usize];
        match run.count() {
            0 => {
                run.record = record;
                run.set_count(1);
            }
            SPILLED => self.spills[run.more() as usize].list.insert(at, record),
            MOST => {
                let more = run.more();
                let mut list = Vec::with_capacity(DENSE_AT);
                list.extend_from_slice(self.lists.get(more, MOST));
                list.insert(at, record);
                self.lists.remove(more, MOST);
                let spill = Spill { list, dense: None };
                let number = self.free_spills.pop().unwrap_or(self.spills.len() as u32);
                if number as usize == self.spills.len() {
                    reserve_one(&mut self.spills);
                    self.spills.push(spill);
                } else {
                    self.spills[number as usize] = spill;
                }
                self.runs[id as usize].set_more(SPILLED, number);
            }
            count => {
                let mut records = [record; MOST];
                let before = self.records(id);
                records[..at].copy_from_slice(&before[..at]);
                records[at + 1..=count].copy_from_slice(&before[at..]);
                self.replace_short(id, count, &records[..=count]);
            }
        }
    }

    pub(super) fn take(&mut self, id: u32, at: usize) {
        self.held -= 1;
        let run = &mut self.runs[id as usize];
        match run.count() {
            0 | 1 => run.set_count(0),
            SPILLED => {
                let number = run.more();
                let spill = &mut self.spills[number as usize];
                spill.list.remove(at);
                if spill.dense.is_none() && spill.list.len() <= MOST / 2 {
                    let list = std::mem::take(&mut spill.list);
                    self.drop_spill(number);
                    self.runs[id as usize].set_count(0);
                    self.replace_short(id, 0, &list);
                }
            }
            count => {
                let mut records = [Record::default(); MOST];
                let before = self.records(id);
                records[..at].copy_from_slice(&before[..at]);
                records[at..count - 1].copy_from_slice(&before[at + 1..]);
                self.replace_short(id, count, &records[..count - 1]);
            }
        }
    }

    /// Replaces the `before` records of a run, which are no spill, by `records`, which are at most [`MOST`].
    fn replace_short(&mut self, id: u32, before: usize, records: &[Record]) {
        let run = &mut self.runs[id as usize];
        if before > 1 {
            self.lists.remove(run.more(), before);
        }
        match records {
            [] => run.set_count(0),
            [only] => {
                run.record = *only;
                run.set_count(1);
            }
            _ => run.set_more(records.len(), self.lists.add(records)),
        }
    }

    /// Converts the records that cover the whole run to bits.
    pub(super) fn make_dense(&mut self, id: u32) {
        let run = self.runs[id as usize];
        let words = self.words;
        let Some(spill) = run.spill() else { return };
        let spill = &mut self.spills[spill];
        let before = spill.list.len();
        if !spill.list.iter().any(|record| record.start == 0 && record.end == run.len) {
            return;
        }
        if spill.dense.is_none() {
            self.held += words;
        }
        let dense = spill.dense.get_or_insert_default();
        spill.list.retain(|record| {
            let whole = record.start == 0 && record.end == run.len;
            if whole {
                set_bit(dense, words, record.slot, record.tier);
            }
            !whole
        });
        self.held -= before - spill.list.len();
    }

    /// Returns true if a bit states that this holder has the whole run in this tier.
    pub(super) fn has_bit(&self, id: u32, slot: u16, tier: u16) -> bool {
        self.dense(id).is_some_and(|dense| bit(&dense.full[usize::from(tier)], slot))
    }

    /// Sets the bit of a holder of the whole run; returns false if the run has no bitset.
    pub(super) fn set_bit(&mut self, id: u32, slot: u16, tier: u16) -> bool {
        let words = self.words;
        let Some(spill) = self.get(id).spill() else { return false };
        match &mut self.spills[spill].dense {
            Some(dense) => {
                set_bit(dense, words, slot, tier);
                true
            }
            None => false,
        }
    }

    /// Clears the bit of a holder of the whole run; returns true if it was set.
    pub(super) fn clear_bit(&mut self, id: u32, slot: u16, tier: u16) -> bool {
        let Some(spill) = self.get(id).spill() else { return false };
        let spill = &mut self.spills[spill];
        let Some(dense) = &mut spill.dense else { return false };
        let words = &mut dense.full[usize::from(tier)];
        if !bit(words, slot) {
            return false;
        }
        words[usize::from(slot) / 64] &= !(1 << (slot % 64));
        dense.bits -= 1;
        if dense.bits == 0 {
            spill.dense = None;
            self.held -= self.words;
        }
        true
    }

    /// Returns true if the run has a holder.
    pub(super) fn is_held(&self, id: u32) -> bool {
        !self.records(id).is_empty() || self.dense(id).is_some()
    }

    /// Returns the holders of the whole run in a tier that are bits.
    pub(super) fn slots_of(&self, id: u32, tier: usize) -> Vec<u16> {
        self.dense(id).map_or_else(Vec::new, |dense| slots(&dense.full[tier]).collect())
    }
}

/// Reserves memory for another item. Twice as much, as a vector does, would be a large part of a short run's memory.
fn reserve_one<T>(items: &mut Vec<T>) {
    if items.len() == items.capacity() {
        items.reserve_exact((items.len() / 16).max(GROWTH));
    }
}

fn set_bit(dense: &mut Dense, words: usize, slot: u16, tier: u16) {
    let full = &mut dense.full[usize::from(tier)];
    if full.is_empty() {
        *full = vec![0; words];
    }
    let (word, mask) = (usize::from(slot) / 64, 1 << (slot % 64));
    dense.bits += u32::from(full[word] & mask == 0);
    full[word] |= mask;
}

/// Returns true if `slot` is in a set; an empty slice is the empty set.
pub(super) fn bit(words: &[u64], slot: u16) -> bool {
    words.get(usize::from(slot) / 64).is_some_and(|word| word & (1 << (slot % 64)) != 0)
}

/// Returns the members of a set, ascending.
pub(super) fn slots(words: &[u64]) -> impl Iterator<Item = u16> {
    words.iter().enumerate().flat_map(|(at, word)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            (rest != 0).then(|| {
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                at as u16 * 64 + bit as u16
            })
        })
    })
}
