//! Blocks in their runs: lookup of a block, comparison of a prompt with a run, creation and eviction of runs.
//!
//! The cost of a change is proportional to the number of its blocks. A run grows in place while its holders fit into
//! its header. The holders of stretches of a run are in `blocks/coverage.rs`.

mod coverage;
mod snapshot;

use super::arena::{Arena, UNIT};
use super::contexts::Salt;
use super::run::{Dense, FREE, Record, RunHeader, Runs};
use super::table::Table;
use super::{ContextId, FIRST, IndexStats};

pub(super) use coverage::stretch;

/// Number of blocks whose table entries are prefetched together: as many cache lines as a core loads concurrently.
const AHEAD: usize = 16;
/// Maximum number of blocks reserved behind a chain that grows block by block.
const GROWTH: usize = 64;

/// Blocks, and the runs that they are in.
pub(super) struct Blocks {
    max_blocks: usize,
    table: Table,
    arena: Arena,
    runs: Runs,
    /// Run at which the search for a cold run continues (CLOCK hand).
    hand: usize,
    count: usize,
    forgotten: usize,
}

impl Blocks {
    /// Creates an empty set with capacity for `max_blocks` blocks of `max_holders` holders.
    pub(super) fn new(max_blocks: usize, max_holders: usize) -> Self {
        let arena_blocks = max_blocks.next_multiple_of(UNIT);
        Self {
            max_blocks,
            table: Table::new(arena_blocks),
            arena: Arena::new(arena_blocks),
            runs: Runs::new(max_holders),
            hand: 0,
            count: 0,
            forgotten: 0,
        }
    }

    pub(super) fn stats(&self) -> IndexStats {
        let (table, arena, runs) = (self.table.bytes(), self.arena.bytes(), self.runs.bytes());
        let share = |bytes: usize, of: usize, all: usize| (bytes as u128 * of as u128 / all.max(1) as u128) as usize;
        let all = self.max_blocks;
        let headers = self.runs.used() * size_of::<RunHeader>();
        let holders = runs.saturating_sub(self.runs.places() * size_of::<RunHeader>());
        IndexStats {
            blocks: self.count,
            runs: self.runs.used(),
            records: self.runs.held(),
            forgotten_blocks: self.forgotten,
            used_bytes: share(table, self.count, all) + share(arena, self.arena.used_blocks(), all) + headers + holders,
            reserved_bytes: table + arena + runs,
        }
    }

    /// Returns the number of blocks evicted for lack of room, in total.
    pub(super) const fn forgotten(&self) -> usize {
        self.forgotten
    }

    /// Returns the number of run headers, used or not.
    pub(super) fn places(&self) -> usize {
        self.runs.places()
    }

    pub(super) fn run(&self, run: u32) -> &RunHeader {
        self.runs.get(run)
    }

    pub(super) fn run_mut(&mut self, run: u32) -> &mut RunHeader {
        self.runs.get_mut(run)
    }

    /// Returns the records of holders of stretches of a run.
    pub(super) fn records(&self, run: u32) -> &[Record] {
        self.runs.records(run)
    }

    /// Returns the holders of a whole run, if they are a bitset.
    pub(super) fn dense(&self, run: u32) -> Option<&Dense> {
        self.runs.dense(run)
    }

    /// Returns the run and the offset of the block with `key`.
    pub(super) fn locate(&self, context: ContextId, key: u64) -> Option<(u32, u16)> {
        let place = self.table.find(key, |place| {
            if place & FIRST == 0 {
                self.arena.key(place as usize) == key
            } else {
                self.runs.get(place & !FIRST).first == key
            }
        })?;
        let (run, offset) = if place & FIRST == 0 {
            let run = self.arena.run_of(place);
            (run, (place - self.runs.get(run).start) as u16)
        } else {
            (place & !FIRST, 0)
        };
        (self.runs.get(run).context == context.0).then_some((run, offset))
    }

    /// Returns the number of `hashes` that match `run` consecutively, the first of them at `offset`. With rolling
    /// hashes, a matching block proves those before it.
    pub(super) fn matching(&self, run: u32, offset: u16, salt: Salt, hashes: &[u64]) -> u16 {
        let header = self.runs.get(run);
        let rest = usize::from(header.len - offset);
        if rest <= hashes.len() && salt.key(hashes[rest - 1]) == header.last {
            return rest as u16;
        }
        let keys = self.arena.keys(header.start + u32::from(offset), rest.min(hashes.len()));
        let agrees = |at: usize| keys[at] == salt.key(hashes[at]);
        // Last block that is known to match, and first one that may not.
        let (mut same, mut other) = (0, keys.len());
        if rest > other && agrees(other - 1) {
            return other as u16;
        }
        // Most prompts diverge from a run where the previous one did.
        let branch = usize::from(header.branch).wrapping_sub(usize::from(offset));
        if (1..keys.len()).contains(&branch) {
            if agrees(branch - 1) {
                same = branch - 1;
                if !agrees(branch) {
                    return branch as u16;
                }
                same = same.max(branch);
            } else {
                other = branch - 1;
            }
        }
        while other - same > 1 {
            let middle = usize::midpoint(same, other);
            if agrees(middle) {
                same = middle;
            } else {
                other = middle;
            }
        }
        same as u16 + 1
    }

    /// Returns the stretch of `run` around `offset` that `hashes` name consecutively, in ascending or descending order,
    /// and the number of these hashes.
    pub(super) fn neighbours(&self, run: u32, offset: u16, salt: Salt, hashes: &[u64]) -> (u16, u16, usize) {
        let header = self.runs.get(run);
        let key = |at: u16| self.arena.key(header.start as usize + usize::from(at));
        let up = hashes[1..].iter().zip(offset + 1..header.len).take_while(|(hash, at)| key(*at) == salt.key(**hash));
        let up = up.count();
        if up > 0 {
            return (offset, offset + up as u16 + 1, up + 1);
        }
        let down = hashes[1..].iter().zip((0..offset).rev()).take_while(|(hash, at)| key(*at) == salt.key(**hash));
        let down = down.count();
        (offset - down as u16, offset + 1, down + 1)
    }

    /// Creates blocks for the first of `hashes`, which are not in the index; they extend the run of `before` if that is
    /// its end. Returns the run and the stretch of it; `None` if there is no room at all.
    pub(super) fn extend(
        &mut self,
        context: ContextId,
        before: Option<(u32, u16)>,
        salt: Salt,
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
                    // A later lookup of this key compares with it.
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
        self.count += usize::from(header.len - start);
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

    /// Frees the unused end of a run's extent.
    fn trim(&mut self, run: u32) {
        let header = self.runs.get_mut(run);
        let keep = usize::from(header.len).next_multiple_of(UNIT);
        let (start, spare) = (header.start + keep as u32, header.cap() - keep);
        header.set_cap(keep);
        self.arena.free(start, spare);
    }

    /// Removes blocks of the run whose keys begin at `start` from the table. `whole` is the run if its first block is
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

    /// Removes a run with all its blocks.
    fn release(&mut self, run: u32) {
        let header = *self.runs.get(run);
        self.unlist(header.start, 0..header.len, Some(run));
        self.count -= usize::from(header.len);
        self.arena.free(header.start, header.cap());
        self.runs.remove(run);
    }

    /// Evicts runs until the number of records is within its limit.
    pub(super) fn make_room(&mut self, max_records: usize) {
        while self.runs.held() > max_records && self.forget_coldest() {}
    }

    /// Evicts a run that was not stored since the hand last passed it (CLOCK). Returns false if there is none.
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
            self.forgotten += usize::from(header.len);
            self.release(run);
            return true;
        }
        false
    }
}
