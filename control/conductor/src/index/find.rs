//! The question: who holds the longest beginnings of this prompt?

use super::blocks::{Blocks, stretch};
use super::holders::Holders;
use super::run::{Dense, Record, bit, slots};
use super::{ContextId, HolderId, IndexError, PrefixIndex, Tiers};

/// Records of a run that are read for all holders at once.
const SHORT: usize = 8;

/// A holder and how much it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Match {
    /// Who.
    pub holder: HolderId,
    /// Blocks from the beginning of the prompt without a gap.
    pub blocks: u32,
}

/// An answer, and room for the next: a host keeps one and asks again with it, so that nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct PrefixMatches {
    matches: Vec<Match>,
    path: Vec<Step>,
    /// Those who hold everything so far, while they are many: a bit for each.
    many: Vec<u64>,
    /// Scratch of the same size.
    both: Vec<u64>,
    /// Those among them who have a part of a run by records, and up to where.
    parts: Vec<(u16, u16)>,
    /// The same while they are few.
    few: Vec<u16>,
    /// Those who dropped out, and how much they have; the later ones have more.
    out: Vec<(u16, u32)>,
}

/// A stretch of a run on the way.
#[derive(Clone, Copy, Debug)]
struct Step {
    run: u32,
    start: u16,
    end: u16,
    /// Place in the prompt of its first block.
    at: u32,
}

/// Who holds everything so far.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alive {
    /// Nothing was looked at yet.
    All,
    /// [`PrefixMatches::many`].
    Many,
    /// [`PrefixMatches::few`].
    Few,
}

impl PrefixMatches {
    /// Holders by what they have, most first. Among equals any may be left out.
    #[must_use]
    pub fn matches(&self) -> &[Match] {
        &self.matches
    }

    /// The most that any holder has, in blocks.
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
    /// Finds up to `most` holders of the longest beginnings of `hashes` in any of `tiers`. Nobody left out has more
    /// than the last one of the answer.
    ///
    /// A block counts wherever among `tiers` it is, so a prefix may lie partly here and partly there;
    /// [`Self::blocks_within`] tells them apart.
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

    /// How many blocks of the prompt of an answer `holder` has within `tiers`, which are among those asked for.
    #[must_use]
    pub fn blocks_within(&self, found: &PrefixMatches, holder: HolderId, tiers: Tiers) -> u32 {
        let Ok(slot) = self.holders.slot(holder) else { return 0 };
        for step in &found.path {
            let reach = self.blocks.reach(step.run, slot, tiers, step.start);
            if reach < step.end {
                return step.at + u32::from(reach - step.start);
            }
        }
        found.path.last().map_or(0, |step| step.at + u32::from(step.end - step.start))
    }

    /// How many of `hashes` from the first on are held in one of `tiers` by anybody: what a pool of many nodes can
    /// give together.
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

/// The way of one question along a prompt.
struct Walk<'a> {
    blocks: &'a Blocks,
    holders: &'a Holders,
    /// Holders that are asked for.
    most: usize,
    tiers: Tiers,
    alive: Alive,
    found: &'a mut PrefixMatches,
}

impl Walk<'_> {
    /// Goes over `step`, and leaves alive who has that too.
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

    /// Whether nobody is left.
    fn is_over(&self) -> bool {
        self.alive == Alive::Few && self.found.few.is_empty()
    }

    /// Few are left, and few are on the run's list: that is read once, and not once for each of them.
    fn narrow_few(&mut self, step: Step) {
        let (blocks, tiers) = (self.blocks, self.tiers);
        let PrefixMatches { few, parts, out, .. } = &mut *self.found;
        if let [only] = blocks.records(step.run) {
            // Mostly the end of a prompt, which one has.
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

    /// A run whose holders are a list: those on it remain or drop out.
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

    /// After the many became few: as many of the others as an answer may still want, who have all up to this step.
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

    /// A run that many hold wholly.
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
            // Whoever dropped out has less than these: nobody will ask for them.
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

    /// Who among the many has a part of a step by records, and up to where.
    fn parts(&mut self, step: Step) {
        self.found.parts.clear();
        for own in by_holder(self.blocks.records(step.run)) {
            let (slot, reach) = (own[0].slot, stretch(own, self.tiers, step.start));
            if reach > step.start && bit(&self.found.many, slot) {
                self.found.parts.push((slot, reach));
            }
        }
    }

    /// Puts the answer together for a prompt of which so many blocks were passed: those still there, then those who
    /// dropped out, the last ones first.
    fn answer(self, walked: u32) {
        let (holders, most) = (self.holders, self.most);
        let PrefixMatches { matches, many, few, out, .. } = self.found;
        let whole = |slot| Match { holder: holders.holder(slot), blocks: walked };
        match self.alive {
            Alive::All => {}
            Alive::Many => matches.extend(slots(many).take(most).map(whole)),
            Alive::Few => matches.extend(few.iter().take(most).map(|slot| whole(*slot))),
        }
        debug_assert!(out.iter().all(|(_, blocks)| *blocks > 0), "who has nothing is not noted");
        if out.len() > 1 {
            out.sort_by_key(|(_, blocks)| std::cmp::Reverse(*blocks));
        }
        let rest = most - matches.len();
        matches.extend(
            out.iter().take(rest).map(|(slot, blocks)| Match { holder: holders.holder(*slot), blocks: *blocks }),
        );
    }
}

/// The records of each holder.
fn by_holder(records: &[Record]) -> impl Iterator<Item = &[Record]> {
    records.chunk_by(|one, next| one.slot == next.slot)
}
