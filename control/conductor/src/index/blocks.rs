//! Blocks in their runs: lookup of a block, comparison of a prompt with a run, creation and eviction of runs.
//!
//! The cost of a change is proportional to the number of its blocks. A run grows in place while its holders are few.
//! The holders of stretches of a run are in `blocks/coverage.rs`.

mod coverage;
mod snapshot;

use super::arena::{Arena, UNIT};
use super::contexts::Salt;
use super::recent::RecentRuns;
use super::run::{Dense, FREE, NO_RUN, Record, RunHeader, Runs};
use super::table::Table;
use super::{FIRST, IndexStats};

pub(super) use coverage::stretch;

/// Number of blocks whose table entries are prefetched together: as many cache lines as a core loads concurrently.
const AHEAD: usize = 16;
/// Maximum number of blocks reserved behind a chain that grows block by block.
const GROWTH: usize = 64;

/// Blocks, and the runs that they are in.
pub(super) struct Blocks {
    max_blocks: usize,
    /// Seed of the salts of contexts.
    seed: u64,
    table: Table,
    recent: RecentRuns,
    arena: Arena,
    runs: Runs,
    /// Run at which the search for a cold run continues (CLOCK hand).
    hand: usize,
    count: usize,
    forgotten: usize,
}

impl Blocks {
    /// Creates an empty set with capacity for `max_blocks` blocks of `max_holders` holders; the salts of contexts
    /// follow from `seed`.
    pub(super) fn new(max_blocks: usize, max_holders: usize, seed: u64) -> Self {
        let arena_blocks = max_blocks.next_multiple_of(UNIT);
        Self {
            max_blocks,
            seed,
            table: Table::new(arena_blocks),
            recent: RecentRuns::new(arena_blocks),
            arena: Arena::new(arena_blocks),
            runs: Runs::new(max_holders),
            hand: 0,
            count: 0,
            forgotten: 0,
        }
    }

    pub(super) fn stats(&self) -> IndexStats {
        let (table, arena, runs) = (self.table.bytes(), self.arena.bytes(), self.runs.bytes() + self.recent.bytes());
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

    /// Returns the run and the offset of a block in the context of `salt`.
    pub(super) fn locate(&self, salt: Salt, hash: u64) -> Option<(u32, u16)> {
        let mut found = None;
        self.table.find(salt.key(hash), |place| {
            found = if place & FIRST == 0 {
                (self.arena.hash(place as usize) == hash).then(|| self.locate_inside(salt, place)).flatten()
            } else {
                self.has_first(place & !FIRST, salt, hash).then_some((place & !FIRST, 0))
            };
            found.is_some()
        });
        found
    }

    /// Returns the run and the offset of a block where a prompt begins, or goes on after another run. It is mostly the
    /// first of its run.
    #[inline]
    pub(super) fn enter(&self, salt: Salt, hash: u64) -> Option<(u32, u16)> {
        let guess = self.recent.guess(salt.key(hash));
        if self.is_guess_right(guess, salt, hash) { Some((guess, 0)) } else { self.locate(salt, hash) }
    }

    /// Returns true if `run` begins with a block in the context of `salt`.
    fn has_first(&self, run: u32, salt: Salt, hash: u64) -> bool {
        let header = self.runs.get(run);
        header.first == hash && header.context == salt.context()
    }

    /// Returns the run and the offset of a block inside a run, if the run is in the context of `salt`.
    fn locate_inside(&self, salt: Salt, block: u32) -> Option<(u32, u16)> {
        let start = self.arena.start_of(block);
        let is_run = |place: u32| {
            let run = place & !FIRST;
            place & FIRST != 0 && (self.runs.get(run).start, self.runs.get(run).context) == (start, salt.context())
        };
        let first = self.table.find(salt.key(self.arena.hash(start as usize)), is_run)?;
        Some((first & !FIRST, (block - start) as u16))
    }

    /// Returns the number of `hashes` that match `run` consecutively, the first of them at `offset`, and the run that
    /// begins with the hash after them, if that is known without a lookup. With rolling hashes, a matching block proves
    /// those before it.
    ///
    /// The guesses of the header are read together, before any of them decides: one after the other, each would be
    /// waited for.
    #[inline]
    pub(super) fn follow(&self, run: u32, offset: u16, salt: Salt, hashes: &[u64]) -> (u16, Option<u32>) {
        let header = self.runs.get(run);
        let rest = usize::from(header.len - offset);
        let own = self.arena.hashes(header.start + u32::from(offset), rest.min(hashes.len()));
        let agrees = |at: usize| own[at] == hashes[at];
        let end = own.len();
        if rest == hashes.len() && agrees(end - 1) {
            // Mostly the end of a prompt that was stored.
            return (end as u16, None);
        }
        // Most prompts leave the run where the previous one did, or have all of it.
        let branch = usize::from(header.branch).wrapping_sub(usize::from(offset));
        let is_branch = (1..=end).contains(&branch);
        let (to_end, to_branch) = (agrees(end - 1), is_branch && agrees(branch - 1));
        let goes_on = hashes.get(branch).is_some_and(|hash| self.is_guess_right(header.next, salt, *hash));
        if to_branch && goes_on {
            return (branch as u16, Some(header.next));
        }
        if to_end {
            return (end as u16, None);
        }
        // Last block that is known to match, and first one that does not.
        let (mut same, mut other) = (0, end - 1);
        if to_branch {
            // The last block does not match, so the branch is before it.
            if !agrees(branch) {
                return (branch as u16, None);
            }
            same = branch;
        } else if is_branch {
            other = branch - 1;
        }
        while other - same > 1 {
            let middle = usize::midpoint(same, other);
            if agrees(middle) {
                same = middle;
            } else {
                other = middle;
            }
        }
        (same as u16 + 1, None)
    }

    /// Returns true if a guessed run, [`NO_RUN`] for none, begins with a block in the context of `salt`.
    fn is_guess_right(&self, guess: u32, salt: Salt, hash: u64) -> bool {
        guess != NO_RUN && self.has_first(guess, salt, hash)
    }

    /// Notes that a prompt was stored of which a block is the first of `run`.
    pub(super) fn note_first(&mut self, run: u32, salt: Salt) {
        self.recent.set(salt.key(self.runs.get(run).first), run, self.runs.used());
    }

    /// Notes that a prompt left the run of `before` after that block, and went on at the beginning of `next`.
    pub(super) fn note_branch(&mut self, before: (u32, u16), next: u32) {
        let header = self.runs.get_mut(before.0);
        (header.branch, header.next) = (before.1 + 1, next);
    }

    /// Returns the stretch of `run` around `offset` that `hashes` name consecutively, in ascending or descending order,
    /// and the number of these hashes.
    pub(super) fn neighbours(&self, run: u32, offset: u16, hashes: &[u64]) -> (u16, u16, usize) {
        let header = self.runs.get(run);
        let own = self.arena.hashes(header.start, usize::from(header.len));
        let (down, up) = own.split_at(usize::from(offset));
        let count = up[1..].iter().zip(&hashes[1..]).take_while(|(own, hash)| own == hash).count();
        if count > 0 {
            return (offset, offset + count as u16 + 1, count + 1);
        }
        let count = down.iter().rev().zip(&hashes[1..]).take_while(|(own, hash)| own == hash).count();
        (offset - count as u16, offset + 1, count + 1)
    }

    /// Creates blocks for the first of `hashes`, which are not in the index; they extend the run of `before` if that is
    /// its end. Returns the run and the stretch of it; `None` if there is no room at all.
    pub(super) fn extend(&mut self, salt: Salt, before: Option<(u32, u16)>, hashes: &[u64]) -> Option<(u32, u16, u16)> {
        let end = before.filter(|(run, offset)| *offset + 1 == self.runs.get(*run).len);
        let grown = end.map(|(run, _)| (run, *self.runs.get(run)));
        let (run, start) = match grown {
            Some((run, header)) if usize::from(header.len) < header.cap() && self.runs.is_short(run) => {
                (run, header.len)
            }
            _ => {
                let spare = grown.map_or(0, |(_, header)| usize::from(header.len).min(GROWTH));
                (self.new_run(salt, hashes.len().max(spare))?, 0)
            }
        };
        let mut header = *self.runs.get(run);
        let cap = header.cap();
        'blocks: for hashes in hashes.chunks(AHEAD) {
            for (key, hash) in self.keys_ahead(salt, hashes).into_iter().zip(hashes.iter().copied()) {
                let full = usize::from(header.len) == cap;
                if full || (header.len > start && self.locate(salt, hash).is_some()) {
                    break 'blocks;
                }
                let block = header.start + u32::from(header.len);
                self.arena.set(block as usize, hash);
                if header.len == 0 {
                    // A later lookup of this block compares with it.
                    self.runs.get_mut(run).first = hash;
                }
                self.table.insert(key, if header.len == 0 { FIRST | run } else { block });
                header.len += 1;
            }
        }
        let kept = self.runs.get_mut(run);
        kept.len = header.len;
        kept.touch();
        self.count += usize::from(header.len - start);
        if start == 0 && cap > usize::from(header.len).max(GROWTH) {
            self.trim(run);
        }
        Some((run, start, header.len))
    }

    /// Returns the keys of up to [`AHEAD`] hashes, whose entries are prefetched; the rest is 0.
    fn keys_ahead(&self, salt: Salt, hashes: &[u64]) -> [u64; AHEAD] {
        let mut keys = [0; AHEAD];
        keys.iter_mut().zip(hashes).for_each(|(key, hash)| *key = salt.key(*hash));
        self.table.look_ahead(&keys[..hashes.len()]);
        keys
    }

    fn new_run(&mut self, salt: Salt, blocks: usize) -> Option<u32> {
        loop {
            if let Some((start, cap)) = self.arena.allocate(blocks) {
                return Some(self.runs.add(salt.context(), start, cap));
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

    /// Removes blocks of a run from the table.
    fn unlist(&mut self, run: u32, blocks: std::ops::Range<u16>) {
        let header = *self.runs.get(run);
        let salt = Salt::of(self.seed, header.context);
        let places = header.start + u32::from(blocks.start)..header.start + u32::from(blocks.end);
        for from in places.clone().step_by(AHEAD) {
            let hashes = self.arena.hashes(from, AHEAD.min((places.end - from) as usize));
            let count = hashes.len();
            for (place, key) in (from..).zip(self.keys_ahead(salt, hashes).into_iter().take(count)) {
                self.table.remove(key, if place == header.start { FIRST | run } else { place });
            }
        }
    }

    /// Removes a run with all its blocks.
    fn release(&mut self, run: u32) {
        let header = *self.runs.get(run);
        self.unlist(run, 0..header.len);
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
