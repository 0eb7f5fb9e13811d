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
    /// Holders of the whole prefix so far, while they are many: a bitset.
    many: Vec<u64>,
    /// Scratch bitset of the same size.
    both: Vec<u64>,
    /// Those of them that have a part of a run by records, and the end of that part.
    parts: Vec<(u16, u16)>,
    /// Holders of the whole prefix so far, once they are few.
    few: Vec<u16>,
    /// Holders that dropped out, with their number of blocks; later ones have more.
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
        while let Some(hash) = hashes.get(at) {
            let Some((run, start)) = self.blocks.locate(context, salt.key(*hash)) else { break };
            let end = start + self.blocks.matching(run, start, salt, &hashes[at..]);
            walk.pass(Step { run, start, end, at: at as u32 });
            if walk.is_over() {
                break;
            }
            at += usize::from(end - start);
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
            let Some((run, start)) = self.blocks.locate(context, salt.key(*hash)) else { break };
            let end = start + self.blocks.matching(run, start, salt, &hashes[at..]);
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
        match (self.alive, blocks.dense(step.run)) {
            (Alive::Few, None) if blocks.records(step.run).len() <= SHORT => self.narrow_few(step),
            (Alive::Few, _) => {
                let PrefixMatches { few, out, .. } = &mut *self.found;
                few.retain(|slot| {
                    let reach = blocks.reach(step.run, *slot, tiers, step.start);
                    if reach < step.end {
                        out.push((*slot, step.at + u32::from(reach - step.start)));
                    }
                    reach >= step.end
                });
            }
            (_, Some(dense)) => self.narrow_dense(step, dense),
            (_, None) => {
                self.narrow_list(step);
                self.fill(step);
                self.alive = Alive::Few;
            }
        }
        self.found.path.push(step);
    }

    /// Returns true if no holder is left.
    fn is_over(&self) -> bool {
        self.alive == Alive::Few && self.found.few.is_empty()
    }

    /// Narrows few holders by a run with few records: the records are read once for all holders.
    fn narrow_few(&mut self, step: Step) {
        let (blocks, tiers) = (self.blocks, self.tiers);
        let PrefixMatches { few, parts, out, .. } = &mut *self.found;
        if let [only] = blocks.records(step.run) {
            // Mostly the end of a prompt, which has one holder.
            let reach = stretch(std::slice::from_ref(only), tiers, step.start);
            let is_among = few.contains(&only.slot);
            out.extend(few.iter().filter(|slot| **slot != only.slot).map(|slot| (*slot, step.at)));
            few.clear();
            if is_among && reach >= step.end {
                few.push(only.slot);
            } else if is_among {
                out.push((only.slot, step.at + u32::from(reach - step.start)));
            }
            return;
        }
        parts.clear();
        let reaches = |own: &[Record]| (own[0].slot, stretch(own, tiers, step.start));
        parts.extend(by_holder(blocks.records(step.run)).map(reaches));
        few.retain(|slot| {
            let reach = parts.iter().find(|(other, _)| other == slot).map_or(step.start, |(_, reach)| *reach);
            if reach < step.end {
                out.push((*slot, step.at + u32::from(reach - step.start)));
            }
            reach >= step.end
        });
    }

    /// Narrows the holders by a run whose holders are a list.
    fn narrow_list(&mut self, step: Step) {
        for own in by_holder(self.blocks.records(step.run)) {
            let slot = own[0].slot;
            let counts = match self.alive {
                Alive::All => self.holders.is_live(slot),
                _ => bit(&self.found.many, slot),
            };
            if !counts {
                continue;
            }
            let reach = stretch(own, self.tiers, step.start);
            if reach >= step.end {
                self.found.few.push(slot);
            } else if reach > step.start {
                self.found.out.push((slot, step.at + u32::from(reach - step.start)));
            }
        }
    }

    /// Adds dropped-out holders after the many became few: as many as the result still needs, all of which have the
    /// prefix up to this step.
    fn fill(&mut self, step: Step) {
        if self.alive != Alive::Many {
            return;
        }
        let have = self.found.few.len() + self.found.out.len();
        if have >= self.most {
            return;
        }
        let (few, out) = (&self.found.few, &self.found.out);
        let known = |slot: &u16| few.contains(slot) || out.iter().any(|(other, _)| other == slot);
        let others: Vec<u16> = slots(&self.found.many).filter(|slot| !known(slot)).take(self.most - have).collect();
        self.found.out.extend(others.into_iter().map(|slot| (slot, step.at)));
    }

    /// Narrows the holders by a run with a bitset of holders.
    fn narrow_dense(&mut self, step: Step, dense: &Dense) {
        if self.alive == Alive::All {
            self.found.many.extend_from_slice(self.holders.live());
        }
        self.parts(step);
        let (tiers, found) = (self.tiers, &mut *self.found);
        let mut both: Vec<u64> = std::mem::take(&mut found.both);
        both.clear();
        both.resize(found.many.len(), 0);
        for (_, full) in dense.full.iter().enumerate().filter(|(tier, _)| tiers.has(*tier as u16)) {
            both.iter_mut().zip(full).for_each(|(word, full)| *word |= full);
        }
        both.iter_mut().zip(&found.many).for_each(|(word, many)| *word &= many);
        for &(slot, reach) in &found.parts {
            if reach >= step.end {
                both[usize::from(slot) / 64] |= 1 << (slot % 64);
            } else if !bit(&both, slot) {
                found.out.push((slot, step.at + u32::from(reach - step.start)));
            }
        }
        if both.iter().map(|word| word.count_ones() as usize).sum::<usize>() >= self.most {
            // Holders that dropped out have fewer blocks than these, which suffice for the result.
            found.out.clear();
            found.both = std::mem::replace(&mut found.many, both);
            self.alive = Alive::Many;
            return;
        }
        found.few.extend(slots(&both));
        found.both = both;
        self.fill(step);
        self.alive = Alive::Few;
    }

    /// Collects the holders among the many that have a part of a step by records, with the end of that part.
    fn parts(&mut self, step: Step) {
        self.found.parts.clear();
        for own in by_holder(self.blocks.records(step.run)) {
            let (slot, reach) = (own[0].slot, stretch(own, self.tiers, step.start));
            if reach > step.start && bit(&self.found.many, slot) {
                self.found.parts.push((slot, reach));
            }
        }
    }

    /// Assembles the result for a prompt of which `walked` blocks were visited: the holders still alive, then those
    /// that dropped out, the last ones first.
    fn answer(self, walked: u32) {
        let (holders, most) = (self.holders, self.most);
        let PrefixMatches { matches, many, few, out, .. } = self.found;
        let whole = |slot| Match { holder: holders.holder(slot), blocks: walked };
        match self.alive {
            Alive::All => {}
            Alive::Many => matches.extend(slots(many).take(most).map(whole)),
            Alive::Few => matches.extend(few.iter().take(most).map(|slot| whole(*slot))),
        }
        debug_assert!(out.iter().all(|(_, blocks)| *blocks > 0), "holders without blocks are not recorded");
        if out.len() > 1 {
            out.sort_by_key(|(_, blocks)| std::cmp::Reverse(*blocks));
        }
        let rest = most - matches.len();
        matches.extend(
            out.iter().take(rest).map(|(slot, blocks)| Match { holder: holders.holder(*slot), blocks: *blocks }),
        );
    }
}

/// Groups records by holder.
fn by_holder(records: &[Record]) -> impl Iterator<Item = &[Record]> {
    records.chunk_by(|one, next| one.slot == next.slot)
}
