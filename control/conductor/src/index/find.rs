//! The question: who holds the longest beginnings of this prompt?

use super::run::{Dense, Record, TIERS, bit, slots};
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
    /// Blocks that the walk passed.
    walked: u32,
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
        self.walked = 0;
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
        let salt = self.salt(context)?;
        found.clear();
        let mut alive = Alive::All;
        let mut at = 0;
        while let Some(hash) = hashes.get(at) {
            let Some((run, start)) = self.locate(context, salt.key(*hash)) else { break };
            let end = start + self.matching(run, start, salt, &hashes[at..]);
            let step = Step { run, start, end, at: at as u32 };
            alive = self.narrow(alive, step, most, tiers, found);
            found.path.push(step);
            if alive == Alive::Few && found.few.is_empty() {
                break;
            }
            at += usize::from(end - start);
        }
        found.walked = at as u32;
        self.answer(alive, most, found);
        Ok(())
    }

    /// How many blocks of the prompt of an answer `holder` has within `tiers`, which are among those asked for.
    #[must_use]
    pub fn blocks_within(&self, found: &PrefixMatches, holder: HolderId, tiers: Tiers) -> u32 {
        let Ok(slot) = self.slot(holder) else { return 0 };
        for step in &found.path {
            let reach = self.reach(step.run, slot, tiers, step.start);
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
        let salt = self.salt(context)?;
        let mut at = 0;
        while let Some(hash) = hashes.get(at) {
            let Some((run, start)) = self.locate(context, salt.key(*hash)) else { break };
            let end = start + self.matching(run, start, salt, &hashes[at..]);
            let reach = self.reach_together(run, tiers, start);
            at += usize::from(reach.min(end) - start);
            if reach < end {
                break;
            }
        }
        Ok(at as u32)
    }

    /// Up to where `slot` has the run from `start` on without a gap.
    fn reach(&self, run: u32, slot: u16, tiers: Tiers, start: u16) -> u16 {
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

    /// Up to where anybody has the run from `start` on without a gap.
    fn reach_together(&self, run: u32, tiers: Tiers, start: u16) -> u16 {
        let whole = |dense: &Dense| {
            let tier = |tier: usize| {
                tiers.has(tier as u16) && dense.full[tier].iter().zip(&self.live).any(|(set, live)| set & live != 0)
            };
            (0..TIERS).any(tier)
        };
        if self.runs.dense(run).is_some_and(whole) {
            return self.runs.get(run).len;
        }
        let live = self.runs.records(run).iter().filter(|record| self.live_bit(record.slot));
        let mut live: Vec<Record> = live.copied().collect();
        live.sort_unstable_by_key(|record| record.start);
        stretch(&live, tiers, start)
    }

    /// Leaves alive who has `step` too.
    fn narrow(&self, alive: Alive, step: Step, most: usize, tiers: Tiers, found: &mut PrefixMatches) -> Alive {
        match (alive, self.runs.dense(step.run)) {
            (Alive::Few, None) if self.runs.records(step.run).len() <= SHORT => {
                self.narrow_few(step, tiers, found);
                Alive::Few
            }
            (Alive::Few, _) => {
                let out = &mut found.out;
                found.few.retain(|slot| {
                    let reach = self.reach(step.run, *slot, tiers, step.start);
                    if reach < step.end {
                        out.push((*slot, step.at + u32::from(reach - step.start)));
                    }
                    reach >= step.end
                });
                Alive::Few
            }
            (_, Some(dense)) => self.narrow_dense(alive, step, dense, most, tiers, found),
            (_, None) => {
                self.narrow_list(alive, step, tiers, found);
                self.fill(alive, step, most, found);
                Alive::Few
            }
        }
    }

    /// Few are left, and few are on the run's list: that is read once, and not once for each of them.
    fn narrow_few(&self, step: Step, tiers: Tiers, found: &mut PrefixMatches) {
        let PrefixMatches { few, parts, out, .. } = found;
        if let [only] = self.runs.records(step.run) {
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
        parts.extend(by_holder(self.runs.records(step.run)).map(reaches));
        few.retain(|slot| {
            let reach = parts.iter().find(|(other, _)| other == slot).map_or(step.start, |(_, reach)| *reach);
            if reach < step.end {
                out.push((*slot, step.at + u32::from(reach - step.start)));
            }
            reach >= step.end
        });
    }

    /// A run whose holders are a list: those on it remain or drop out.
    fn narrow_list(&self, alive: Alive, step: Step, tiers: Tiers, found: &mut PrefixMatches) {
        for own in by_holder(self.runs.records(step.run)) {
            let slot = own[0].slot;
            let counts = match alive {
                Alive::All => self.live_bit(slot),
                _ => bit(&found.many, slot),
            };
            if !counts {
                continue;
            }
            let reach = stretch(own, tiers, step.start);
            if reach >= step.end {
                found.few.push(slot);
            } else if reach > step.start {
                found.out.push((slot, step.at + u32::from(reach - step.start)));
            }
        }
    }

    /// After the many became few: as many of the others as an answer may still want, who have all up to this step.
    fn fill(&self, alive: Alive, step: Step, most: usize, found: &mut PrefixMatches) {
        if alive != Alive::Many {
            return;
        }
        let have = found.few.len() + found.out.len();
        if have >= most {
            return;
        }
        let (few, out) = (&found.few, &found.out);
        let known = |slot: &u16| few.contains(slot) || out.iter().any(|(other, _)| other == slot);
        let others: Vec<u16> = slots(&found.many).filter(|slot| !known(slot)).take(most - have).collect();
        found.out.extend(others.into_iter().map(|slot| (slot, step.at)));
    }

    #[allow(clippy::too_many_arguments, reason = "one step of a walk: what it is on, what is asked, what is found")]
    fn narrow_dense(
        &self,
        alive: Alive,
        step: Step,
        dense: &Dense,
        most: usize,
        tiers: Tiers,
        found: &mut PrefixMatches,
    ) -> Alive {
        if alive == Alive::All {
            found.many.extend_from_slice(&self.live);
        }
        let mut both: Vec<u64> = std::mem::take(&mut found.both);
        both.clear();
        both.resize(found.many.len(), 0);
        for (_, full) in dense.full.iter().enumerate().filter(|(tier, _)| tiers.has(*tier as u16)) {
            both.iter_mut().zip(full).for_each(|(word, full)| *word |= full);
        }
        both.iter_mut().zip(&found.many).for_each(|(word, many)| *word &= many);
        self.parts(step, tiers, found);
        for &(slot, reach) in &found.parts {
            if reach >= step.end {
                both[usize::from(slot) / 64] |= 1 << (slot % 64);
            } else if !bit(&both, slot) {
                found.out.push((slot, step.at + u32::from(reach - step.start)));
            }
        }
        if both.iter().map(|word| word.count_ones() as usize).sum::<usize>() >= most {
            // Whoever dropped out has less than these: nobody will ask for them.
            found.out.clear();
            found.both = std::mem::replace(&mut found.many, both);
            return Alive::Many;
        }
        found.few.extend(slots(&both));
        found.both = both;
        if alive == Alive::Many {
            self.fill(alive, step, most, found);
        }
        Alive::Few
    }

    /// Who among the many has a part of a step by records, and up to where.
    fn parts(&self, step: Step, tiers: Tiers, found: &mut PrefixMatches) {
        found.parts.clear();
        for own in by_holder(self.runs.records(step.run)) {
            let (slot, reach) = (own[0].slot, stretch(own, tiers, step.start));
            if reach > step.start && bit(&found.many, slot) {
                found.parts.push((slot, reach));
            }
        }
    }

    /// Puts the answer together: those still there, then those who dropped out, the last ones first.
    fn answer(&self, alive: Alive, most: usize, found: &mut PrefixMatches) {
        let PrefixMatches { matches, many, few, out, walked, .. } = found;
        let whole = |slot| Match { holder: self.holder(slot), blocks: *walked };
        match alive {
            Alive::All => {}
            Alive::Many => matches.extend(slots(many).take(most).map(whole)),
            Alive::Few => matches.extend(few.iter().take(most).map(|slot| whole(*slot))),
        }
        debug_assert!(out.iter().all(|(_, blocks)| *blocks > 0), "who has nothing is not noted");
        if out.len() > 1 {
            out.sort_by_key(|(_, blocks)| std::cmp::Reverse(*blocks));
        }
        let rest = most - matches.len();
        matches
            .extend(out.iter().take(rest).map(|(slot, blocks)| Match { holder: self.holder(*slot), blocks: *blocks }));
    }
}

/// The records of each holder.
fn by_holder(records: &[Record]) -> impl Iterator<Item = &[Record]> {
    records.chunk_by(|one, next| one.slot == next.slot)
}

/// Up to where records, each with its beginning in order within a tier, reach from `start` without a gap.
fn stretch(records: &[Record], tiers: Tiers, start: u16) -> u16 {
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
