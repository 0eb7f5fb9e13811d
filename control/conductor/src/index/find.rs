//! Lookup of the holders of the longest prefixes of a prompt.

use super::blocks::{Blocks, stretch};
use super::holders::Holders;
use super::run::{Dense, Record, bit, slots};
use super::{ContextId, HolderId, IndexError, PrefixIndex, Tiers};

/// Maximum number of a run's records that are read once for all holders.
const SHORT: usize = 8;

/// Holder of a prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Match {
    /// Id of the holder.
    pub holder: HolderId,
    /// Number of blocks from the beginning of the prompt, without a gap.
    pub blocks: u32,
}

/// Result of a lookup, with scratch memory for the next one: a host reuses it, so that lookups allocate nothing.
#[derive(Clone, Debug, Default)]
pub struct PrefixMatches {
    matches: Vec<Match>,
    path: Vec<Step>,
    /// Holders of the whole prefix so far, while they are many: a bitset. Once they are few: those of the many that
    /// dropped out at the beginning of that step, which have [`Self::shared`] blocks.
    many: Vec<u64>,
    /// Number of blocks of the holders that are left in `many`.
    shared: u32,
    /// Scratch bitset of the same size.
    both: Vec<u64>,
    /// Holders of a part of a run by records, and the end of that part.
    parts: Vec<(u16, u16)>,
    /// Holders of the whole prefix so far, once they are few.
    few: Vec<u16>,
    /// Holders that dropped out within or after the step at which the many became few, with their number of blocks;
    /// those of a later step have more.
    out: Vec<(u16, u32)>,
}

/// Stretch of a run on the walk.
#[derive(Clone, Copy, Debug)]
struct Step {
    run: u32,
    start: u16,
    end: u16,
    /// Index in the prompt of its first block.
    at: u32,
}

/// Representation of the holders of the whole prefix so far.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alive {
    /// All holders: no run was visited yet.
    All,
    /// [`PrefixMatches::many`].
    Many,
    /// [`PrefixMatches::few`].
    Few,
}

impl PrefixMatches {
    /// Returns the holders, those with the most blocks first. Among equals, any may be omitted.
    #[must_use]
    pub fn matches(&self) -> &[Match] {
        &self.matches
    }

    /// Returns the maximum number of blocks of a holder.
    #[must_use]
    pub fn best_blocks(&self) -> u32 {
        self.matches.first().map_or(0, |best| best.blocks)
    }

    fn clear(&mut self) {
        self.matches.clear();
        self.path.clear();
        self.many.clear();
        self.few.clear();
        self.out.clear();
    }
}

impl PrefixIndex {
    /// Finds up to `most` holders of the longest prefixes of `hashes` in any of `tiers`. No omitted holder has more
    /// blocks than the last one of the result.
    ///
    /// A block counts in any of `tiers`, so a prefix may be spread over several tiers; [`Self::blocks_within`] tells
    /// them apart.
    ///
    /// # Errors
    /// When the context is unknown.
    pub fn find(
        &self,
        context: ContextId,
        hashes: &[u64],
        most: usize,
        tiers: Tiers,
        found: &mut PrefixMatches,
    ) -> Result<(), IndexError> {
        let salt = self.contexts.salt(context)?;
        found.clear();
        let mut walk = Walk { blocks: &self.blocks, holders: &self.holders, most, tiers, alive: Alive::All, found };
        let mut at = 0;
        let mut place = hashes.first().and_then(|hash| self.blocks.enter(salt, *hash));
        while let Some((run, start)) = place {
            let (blocks, next) = self.blocks.follow(run, start, salt, &hashes[at..]);
            walk.pass(Step { run, start, end: start + blocks, at: at as u32 });
            if walk.is_over() {
                break;
            }
            at += usize::from(blocks);
            place = match next {
                Some(next) => Some((next, 0)),
                None => hashes.get(at).and_then(|hash| self.blocks.enter(salt, *hash)),
            };
        }
        walk.answer(at as u32);
        Ok(())
    }

    /// Returns the number of blocks of the prompt of a result that `holder` has within `tiers`, a subset of those of
    /// the lookup.
    #[must_use]
    pub fn blocks_within(&self, found: &PrefixMatches, holder: HolderId, tiers: Tiers) -> u32 {
        let Some(slot) = self.holders.slot(holder).ok().filter(|slot| self.holders.is_live(*slot)) else { return 0 };
        for step in &found.path {
            let reach = self.blocks.reach(step.run, slot, tiers, step.start);
            if reach < step.end {
                return step.at + u32::from(reach - step.start);
            }
        }
        found.path.last().map_or(0, |step| step.at + u32::from(step.end - step.start))
    }

    /// Returns the length of the prefix of `hashes` of which each block has a holder in one of `tiers`: the prefix that
    /// a pool of many nodes can provide together.
    ///
    /// # Errors
    /// When the context is unknown.
    pub fn held_by_anybody(&self, context: ContextId, hashes: &[u64], tiers: Tiers) -> Result<u32, IndexError> {
        let salt = self.contexts.salt(context)?;
        let mut at = 0;
        while let Some(hash) = hashes.get(at) {
            let Some((run, start)) = self.blocks.enter(salt, *hash) else { break };
            let end = start + self.blocks.follow(run, start, salt, &hashes[at..]).0;
            let reach = self.blocks.reach_together(run, tiers, start, &self.holders);
            at += usize::from(reach.min(end) - start);
            if reach < end {
                break;
            }
        }
        Ok(at as u32)
    }
}

/// State of one lookup on its walk along a prompt.
struct Walk<'a> {
    blocks: &'a Blocks,
    holders: &'a Holders,
    /// Number of requested holders.
    most: usize,
    tiers: Tiers,
    alive: Alive,
    found: &'a mut PrefixMatches,
}

impl Walk<'_> {
    /// Visits `step`, and keeps alive the holders that have it too.
    fn pass(&mut self, step: Step) {
        let (blocks, tiers) = (self.blocks, self.tiers);
        let (records, dense) = (blocks.records(step.run), blocks.dense(step.run));
        match (self.alive, records, dense) {
            (_, [only], None) => self.narrow_to_one(step, only),
            (Alive::Few, _, None) if records.len() <= SHORT => self.narrow_few(step, records),
            (Alive::Few, ..) => {
                let PrefixMatches { few, out, .. } = &mut *self.found;
                few.retain(|slot| {
                    let reach = blocks.reach(step.run, *slot, tiers, step.start);
                    if reach < step.end {
                        out.push((*slot, step.at + u32::from(reach - step.start)));
                    }
                    reach >= step.end
                });
            }
            (_, _, Some(dense)) => self.narrow_dense(step, records, dense),
            (_, _, None) => self.narrow_list(step, records),
        }
        self.found.path.push(step);
    }

    /// Returns true if no holder is left.
    fn is_over(&self) -> bool {
        self.alive == Alive::Few && self.found.few.is_empty()
    }

    /// Narrows the holders by a run with one record, which is mostly the end of a prompt.
    fn narrow_to_one(&mut self, step: Step, only: &Record) {
        let reach = stretch(std::slice::from_ref(only), self.tiers, step.start);
        let PrefixMatches { many, few, out, .. } = &mut *self.found;
        let is_among = match self.alive {
            Alive::All => self.holders.is_live(only.slot),
            Alive::Many => bit(many, only.slot),
            Alive::Few => {
                let is_among = few.contains(&only.slot);
                out.extend(few.iter().filter(|slot| **slot != only.slot).map(|slot| (*slot, step.at)));
                few.clear();
                is_among
            }
        };
        let was = std::mem::replace(&mut self.alive, Alive::Few);
        if was == Alive::Many {
            self.found.shared = step.at;
        }
        if is_among {
            self.note_part(was, step, only.slot, reach);
        }
    }

    /// Narrows few holders by a run with few records: the records are read once for all holders.
    fn narrow_few(&mut self, step: Step, records: &[Record]) {
        let PrefixMatches { few, parts, out, .. } = &mut *self.found;
        parts.clear();
        parts.extend(by_holder(records).map(|own| (own[0].slot, stretch(own, self.tiers, step.start))));
        few.retain(|slot| {
            let reach = parts.iter().find(|(other, _)| other == slot).map_or(step.start, |(_, reach)| *reach);
            if reach < step.end {
                out.push((*slot, step.at + u32::from(reach - step.start)));
            }
            reach >= step.end
        });
    }

    /// Narrows all or many holders by a run whose holders are a list.
    fn narrow_list(&mut self, step: Step, records: &[Record]) {
        let was = std::mem::replace(&mut self.alive, Alive::Few);
        if was == Alive::Many {
            self.found.shared = step.at;
        }
        for own in by_holder(records) {
            let slot = own[0].slot;
            let counts = if was == Alive::All { self.holders.is_live(slot) } else { bit(&self.found.many, slot) };
            if counts {
                self.note_part(was, step, slot, stretch(own, self.tiers, step.start));
            }
        }
    }

    /// Notes that a holder of the prefix before `step`, which was one of `was`, has the step's run up to `reach`.
    fn note_part(&mut self, was: Alive, step: Step, slot: u16, reach: u16) {
        let PrefixMatches { many, few, out, .. } = &mut *self.found;
        if reach >= step.end {
            few.push(slot);
        } else if reach > step.start || was == Alive::Few {
            out.push((slot, step.at + u32::from(reach - step.start)));
        } else {
            return;
        }
        if was == Alive::Many {
            many[usize::from(slot) / 64] &= !(1 << (slot % 64));
        }
    }

    /// Narrows all or many holders by a run with a bitset of holders.
    fn narrow_dense(&mut self, step: Step, records: &[Record], dense: &Dense) {
        let (was, tiers) = (self.alive, self.tiers);
        let PrefixMatches { many, both, parts, few, out, shared, .. } = &mut *self.found;
        let before: &[u64] = if was == Alive::All { self.holders.live() } else { many };
        both.clear();
        for (_, full) in dense.full.iter().enumerate().filter(|(tier, _)| tiers.has(*tier as u16)) {
            if both.is_empty() {
                both.extend(full.iter().zip(before).map(|(full, before)| full & before));
            } else {
                both.iter_mut().zip(full.iter().zip(before)).for_each(|(word, (full, before))| *word |= full & before);
            }
        }
        // No bit in any of the tiers.
        both.resize(before.len(), 0);
        parts.clear();
        for own in by_holder(records) {
            let (slot, reach) = (own[0].slot, stretch(own, tiers, step.start));
            if reach > step.start && bit(before, slot) && !bit(both, slot) {
                if reach >= step.end {
                    both[usize::from(slot) / 64] |= 1 << (slot % 64);
                } else {
                    parts.push((slot, reach));
                }
            }
        }
        if both.iter().map(|word| word.count_ones() as usize).sum::<usize>() >= self.most {
            // Holders that dropped out have fewer blocks than these, which suffice for the result.
            std::mem::swap(many, both);
            self.alive = Alive::Many;
            return;
        }
        if was == Alive::Many {
            many.iter_mut().zip(&*both).for_each(|(word, both)| *word &= !both);
            parts.iter().for_each(|(slot, _)| many[usize::from(*slot) / 64] &= !(1 << (slot % 64)));
            *shared = step.at;
        }
        out.extend(parts.iter().map(|(slot, reach)| (*slot, step.at + u32::from(reach - step.start))));
        few.extend(slots(both));
        self.alive = Alive::Few;
    }

    /// Assembles the result for a prompt of which `walked` blocks were visited: the holders still alive, then those
    /// that dropped out, the last ones first.
    fn answer(self, walked: u32) {
        let (holders, most) = (self.holders, self.most);
        let PrefixMatches { matches, many, few, out, shared, .. } = self.found;
        let found = |slot, blocks| Match { holder: holders.holder(slot), blocks };
        // Taken bit by bit: an iterator over members costs as much as the rest of a short lookup.
        let members = |matches: &mut Vec<Match>, set: &[u64], blocks| {
            for (at, word) in set.iter().enumerate() {
                let mut rest = *word;
                while rest != 0 && matches.len() < most {
                    matches.push(found((at * 64) as u16 + rest.trailing_zeros() as u16, blocks));
                    rest &= rest - 1;
                }
            }
        };
        debug_assert!(out.iter().all(|(_, blocks)| *blocks > 0), "holders without blocks are not recorded");
        match self.alive {
            Alive::All => {}
            Alive::Many => members(matches, many, walked),
            Alive::Few => {
                matches.extend(few.iter().take(most).map(|slot| found(*slot, walked)));
                if !out.is_sorted_by_key(|(_, blocks)| *blocks) {
                    out.sort_unstable_by_key(|(_, blocks)| *blocks);
                }
                let rest = most - matches.len();
                matches.extend(out.iter().rev().take(rest).map(|(slot, blocks)| found(*slot, *blocks)));
                members(matches, many, *shared);
            }
        }
    }
}

/// Groups records by holder.
fn by_holder(records: &[Record]) -> impl Iterator<Item = &[Record]> {
    records.chunk_by(|one, next| one.slot == next.slot)
}
