//! Owners of a slot: weighted rendezvous hashing, with the same result on every machine.
//!
//! For a slot, every member draws a number `h` in (0, 1) from (slot, node id) and scores `weight / -ln(h)`. The member
//! with the highest score owns the slot, the next ones hold its further replicas (highest random weight: Thaler and
//! Ravishankar, 1998; the logarithmic form that makes shares proportional to weights: Schindelhauer and Schomaker,
//! 2005). A member that joins or leaves moves only the slots that it wins or owned. The incarnation takes no part, so a
//! restart moves nothing. Shares are those of a random draw: among `n` equal members they differ from the mean by about
//! `sqrt(n / 16384)` (one standard deviation).
//!
//! **No floating point**: libm may differ between machines, and two readers that disagree about an owner disagree about
//! the location of an object. `L = -log2(h)` is an integer with 57 fraction bits, and two scores are compared without
//! division, `w_a * L_b > w_b * L_a`, in 128 bits. `L` is found by repeated squaring, one bit per square, always
//! rounded up: it is at least the true value and less than 2^-56 above it. A winner among `n` equal members has `L`
//! near `1/n`, so even at the member limit its relative error is below 2^-43; equal scores go to the lower node id.
//!
//! Most members are rejected without a logarithm: `-log2(h) >= (1 - h) / ln 2`, so a member whose score would lose even
//! with 23/16 `(1 - h)` for its `L` loses. As `L` is rounded up, this never changes the winner. Most other members are
//! compared by bounds that follow from the leading bits of their `h`, which does not change the winner either.

use std::collections::BTreeMap;

use super::{ClusterMap, MAX_MEMBERS, Owner};
use crate::digest::Digest;
use crate::ids::{NodeId, SLOTS, ShardId, Slot};
use crate::rng::mix64;

/// Separates the draw that picks a shard from the draw that picks a member.
const SHARD_SALT: u64 = 0x5348_4152_4453_4c54;

/// Fraction bits of `L`. The largest, 64 for `h = 2^-64`, still fits a word.
const FRACTION_BITS: u32 = 57;

/// Bits behind the leading one of a number that suffice, nearly always, to order two scores.
const COARSE_BITS: u32 = 10;

/// `log2(1 + i / 2^COARSE_BITS)`, rounded down like all of `-L`, hence at most [`SLACK`] below the true value.
static COARSE: [u64; (1 << COARSE_BITS) + 1] = {
    let mut logs = [1 << FRACTION_BITS; (1 << COARSE_BITS) + 1];
    let mut index = 0;
    while index < 1 << COARSE_BITS {
        let hash = 1 << 63 | (index as u64) << (63 - COARSE_BITS);
        logs[index] = (1 << FRACTION_BITS) - negative_log2(hash);
        index += 1;
    }
    logs
};

/// Most by which a logarithm differs from the true value, 2^-56, in units of the last fraction bit.
const SLACK: u64 = 2;

/// Owners of every slot, computed from one cluster map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerTable {
    /// Owners per slot: see [`owners_per_slot`].
    per_slot: usize,
    /// `SLOTS * per_slot` owners, grouped by slot, the owner first and then the replica owners.
    owners: Vec<Owner>,
}

/// Properties of a member with a weight that the draw needs.
struct Candidate {
    member: u16,
    node: NodeId,
    weight: u32,
    shards: u16,
    domain: u16,
    seed: u64,
}

/// Score of a member in the draw of one slot.
#[derive(Clone, Copy)]
pub(super) struct Score {
    pub(super) weight: u32,
    /// `-log2(h)`.
    pub(super) log: u64,
    pub(super) node: NodeId,
}

impl Score {
    /// Returns true if `weight / log` is greater than the rival's, or equal under a lower node id.
    pub(super) fn beats(&self, rival: &Self) -> bool {
        let mine = u128::from(self.weight) * u128::from(rival.log);
        let theirs = u128::from(rival.weight) * u128::from(self.log);
        mine > theirs || mine == theirs && self.node < rival.node
    }
}

/// A member in the draw of one slot, with bounds on its `L`.
#[derive(Clone, Copy)]
struct Contender {
    index: usize,
    hash: u64,
    best: Score,
    worst: Score,
}

impl Contender {
    fn new(index: usize, candidate: &Candidate, hash: u64) -> Self {
        let score = |log| Score { weight: candidate.weight, log, node: candidate.node };
        Self { index, hash, best: score(least_log2(hash)), worst: score(u64::MAX) }
    }

    fn may_beat(&self, rival: &Self) -> bool {
        self.best.beats(&rival.worst)
    }

    /// Tightens the bounds.
    fn refine(&mut self) {
        if self.worst.log == u64::MAX {
            let (least, most) = coarse_bounds(self.hash);
            self.worst.log = most;
            self.best.log = self.best.log.max(least);
        }
    }

    fn beats(&mut self, rival: &mut Self) -> bool {
        rival.refine();
        if !self.may_beat(rival) {
            return false;
        }
        self.refine();
        if !self.may_beat(rival) || self.worst.beats(&rival.best) {
            return self.may_beat(rival);
        }
        for one in [&mut *self, rival] {
            let log = negative_log2(one.hash);
            (one.best.log, one.worst.log) = (log, log);
        }
        self.may_beat(rival)
    }
}

impl OwnerTable {
    /// Draws the owners of all slots. Costs one hash per slot, member and replica.
    ///
    /// Owners of one slot are distinct members in distinct failure domains. With a single domain a slot still has two
    /// owners if there are two members, which protects from the end of one process. Without a member of positive weight
    /// the table is empty.
    ///
    /// # Panics
    /// If the map has more members than a valid one.
    #[must_use]
    pub fn compute(map: &ClusterMap) -> Self {
        assert!(map.members.len() <= MAX_MEMBERS, "owners of a map with {} members", map.members.len());
        let (candidates, domains) = candidates(map);
        let per_slot = owners_per_slot(map.replicas, candidates.len(), domains);
        let mut owners = Vec::with_capacity(SLOTS * per_slot);
        let mut draw = Draw { candidates: &candidates, chosen: Vec::new(), used: vec![false; domains] };
        for slot in 0..SLOTS as u64 {
            draw.chosen.clear();
            draw.used.fill(false);
            for _ in 0..per_slot {
                let candidate = &candidates[draw.next(slot)];
                owners.push(Owner { member: candidate.member, shard: candidate.shard_of(slot) });
            }
        }
        Self { per_slot, owners }
    }

    /// Returns the owners of a slot, the owner first and then the replica owners; empty if no member owns slots, or if
    /// the number is not that of a slot.
    #[must_use]
    pub fn owners(&self, slot: Slot) -> &[Owner] {
        let start = usize::from(slot.0) * self.per_slot;
        self.owners.get(start..start + self.per_slot).unwrap_or(&[])
    }

    /// Returns the number of owners that each slot has.
    #[must_use]
    pub const fn per_slot(&self) -> usize {
        self.per_slot
    }

    /// Returns the owner of an object.
    #[must_use]
    pub fn owner_of(&self, digest: Digest) -> Option<Owner> {
        self.owners(digest.slot()).first().copied()
    }
}

/// Returns the number of owners of each slot: the map's replicas, but no more than failure domains, nor than
/// candidates. Two candidates are two owners, even in one domain.
fn owners_per_slot(replicas: u8, candidates: usize, domains: usize) -> usize {
    usize::from(replicas).min(domains.max(2)).min(candidates)
}

/// Returns the members that can own slots, and the number of failure domains among them.
fn candidates(map: &ClusterMap) -> (Vec<Candidate>, usize) {
    let mut domains = BTreeMap::new();
    let mut candidates = Vec::with_capacity(map.members.len());
    for (index, member) in map.members.iter().enumerate() {
        if member.weight == 0 || member.shards.is_empty() {
            continue;
        }
        let next = crate::narrowing::length_u16(domains.len());
        candidates.push(Candidate {
            member: crate::narrowing::length_u16(index),
            node: member.node,
            weight: member.weight,
            shards: crate::narrowing::length_u16(member.shards.len()),
            domain: *domains.entry(member.failure_domain.as_str()).or_insert(next),
            seed: mix64(member.node.0),
        });
    }
    (candidates, domains.len())
}

impl Candidate {
    /// Returns this member's draw for a slot: `h * 2^64`, never 0.
    fn hash(&self, slot: u64) -> u64 {
        mix64(self.seed ^ slot).max(1)
    }

    /// Returns the shard that owns the slot if this member does: fixed by (slot, node) and the number of shards.
    fn shard_of(&self, slot: u64) -> ShardId {
        let word = mix64(self.seed ^ slot ^ SHARD_SALT);
        ShardId(crate::narrowing::low_u16(crate::narrowing::low_u64(
            (u128::from(word) * u128::from(self.shards)) >> 64,
        )))
    }
}

/// Draw of one slot: the candidates chosen so far, and the failure domains that they use.
struct Draw<'a> {
    candidates: &'a [Candidate],
    chosen: Vec<usize>,
    used: Vec<bool>,
}

impl Draw<'_> {
    /// Chooses the next owner. The caller never requests more owners than there are candidates.
    fn next(&mut self, slot: u64) -> usize {
        let best = self.best(slot).or_else(|| {
            self.used.fill(false);
            self.best(slot)
        });
        let chosen = best.expect("fewer owners are drawn than there are candidates");
        self.chosen.push(chosen);
        self.used[usize::from(self.candidates[chosen].domain)] = true;
        chosen
    }

    /// Returns the candidate with the highest score among those not chosen yet, in domains not used yet.
    fn best(&self, slot: u64) -> Option<usize> {
        let mut best: Option<Contender> = None;
        for (index, candidate) in self.candidates.iter().enumerate() {
            if self.used[usize::from(candidate.domain)] || self.chosen.contains(&index) {
                continue;
            }
            let mut contender = Contender::new(index, candidate, candidate.hash(slot));
            if best.as_mut().is_none_or(|leader| contender.beats(leader)) {
                best = Some(contender);
            }
        }
        best.map(|leader| leader.index)
    }
}

/// Returns a cheap lower bound of `negative_log2(hash)`.
pub(super) fn least_log2(hash: u64) -> u64 {
    let complement = (1u128 << 64) - u128::from(hash);
    crate::narrowing::low_u64((complement * 23) >> (4 + 64 - FRACTION_BITS))
}

/// Returns bounds of [`negative_log2`], from the adjacent logarithms in a table, widened as all of them are rounded.
pub(super) fn coarse_bounds(hash: u64) -> (u64, u64) {
    let zeros = hash.leading_zeros();
    let index = ((hash << zeros) << 1 >> (64 - COARSE_BITS)) as usize;
    let whole = u64::from(zeros + 1) << FRACTION_BITS;
    ((whole - COARSE[index + 1]).saturating_sub(SLACK), whole - COARSE[index] + SLACK)
}

/// Returns `-log2(hash / 2^64)` with [`FRACTION_BITS`] fraction bits, rounded up; `hash` is not 0.
///
/// With `m` in [1, 2), squaring doubles the logarithm, so the next bit of `log2(m)` is set if `m * m` reaches 2.
/// Products are truncated at 2^-63, an error that later bits halve again and again: in sum below 2^-61, and only ever
/// downwards.
pub(super) const fn negative_log2(hash: u64) -> u64 {
    let zeros = hash.leading_zeros();
    let mut mantissa = hash << zeros;
    let mut fraction = 0;
    let mut bit = FRACTION_BITS;
    while bit > 0 {
        bit -= 1;
        let square = (mantissa as u128) * (mantissa as u128);
        let carry = (square >> 127) as u64;
        mantissa = crate::narrowing::low_u64(square >> (63 + carry));
        fraction |= carry << bit;
    }
    ((zeros as u64 + 1) << FRACTION_BITS) - fraction
}
