//! Scheduling of a swarm: selects receiver, source and shard of each grant.
//!
//! Of the shards that a source has and a receiver lacks, the rarest goes first. An origin sends each shard once, and
//! again only when no other member has it or is fetching it. One member of a host fetches a shard from another host,
//! and the others fetch it from that member. Slow members are the last choice. If there are many candidates, only some
//! are considered: the work for a grant is bounded independently of the number of members.

use std::collections::BTreeSet;

use super::counts::ShardCounts;
use super::member::Member;
use super::pace::Pace;
use super::roster::Roster;

/// Candidates that are considered for one grant.
const LOOKED_AT: usize = 24;
/// Shards that are weighed for one pair of members.
const WEIGHED: u32 = 256;

/// Score of a grant; less is better.
type Score = (bool, u32, u8, u32, u64);

/// Grant to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) receiver: u64,
    pub(super) source: u64,
    pub(super) shard: u32,
}

/// Inputs of a choice. Ties are broken at random.
pub(super) struct Chooser<'a> {
    pub(super) roster: &'a Roster,
    pub(super) counts: &'a ShardCounts,
    pub(super) pace: &'a Pace,
    pub(super) now_ns: u64,
    /// Random number.
    pub(super) chance: u64,
}

impl Chooser<'_> {
    /// Returns the best grant to a receiver from a source in `free`.
    pub(super) fn source_for(&self, receiver: u64, free: &BTreeSet<u64>) -> Option<Choice> {
        self.choose(free, |source| (receiver, source))
    }

    /// Returns the best grant from a source to one of these receivers.
    pub(super) fn receiver_for(&self, source: u64, receivers: &BTreeSet<u64>) -> Option<Choice> {
        self.choose(receivers, |receiver| (receiver, source))
    }

    fn choose(&self, among: &BTreeSet<u64>, pair: impl Fn(u64) -> (u64, u64)) -> Option<Choice> {
        let first = self.roster.number_at(self.chance);
        let mut best: Option<(Score, Choice)> = None;
        for &other in among.range(first..).chain(among.range(..first)).take(LOOKED_AT) {
            let (receiver, source) = pair(other);
            if let Some((score, shard)) = self.weigh(receiver, source)
                && best.as_ref().is_none_or(|(least, _)| score < *least)
            {
                best = Some((score, Choice { receiver, source, shard }));
            }
        }
        best.map(|(_, choice)| choice)
    }

    fn weigh(&self, receiver: u64, source: u64) -> Option<(Score, u32)> {
        if receiver == source {
            return None;
        }
        let (to, from) = (self.roster.get(receiver)?, self.roster.get(source)?);
        let banned = to.bans.get(&source).is_some_and(|&(until_ns, _)| until_ns > self.now_ns);
        if banned || !self.may_serve(from) || !self.may_fetch(to) {
            return None;
        }
        let slow_receiver = self.pace.is_slow(to.fetched.ns());
        // A slow receiver must not get the only copy, nor occupy more than one place of a source.
        if slow_receiver && (from.serving.range((receiver, 0)..=(receiver, u32::MAX)).next().is_some()) {
            return None;
        }
        let (copies, shard) = self.rarest(to, source, from)?;
        // A source without a measured upload may be as slow as its downloads.
        let slow = slow_receiver || self.pace.is_slow(from.served.ns().or(from.fetched.ns()));
        // Sources with the fewest uploads, and receivers with the fewest downloads, go first.
        let load = from.serves() + to.fetching();
        Some(((slow, copies, distance(to, from), load, u64::from(from.have.count())), shard))
    }

    /// Returns the rarest shard that `from` has and `to` lacks, with its number of copies.
    fn rarest(&self, to: &Member, source: u64, from: &Member) -> Option<(u32, u32)> {
        let words = from.have.words();
        let far = distance(to, from) > 0;
        let shared_host = far && self.roster.shares_host(to);
        let mut best: Option<(u32, u32)> = None;
        let (mut weighed, turn) = (0, (self.chance >> 32) as u32 % 64);
        for step in 0..words {
            let index = (step + self.chance as usize % words) % words;
            let mut bits = from.have.word(index) & to.need.word(index);
            if from.origin {
                bits &= self.counts.unseeded().word(index);
            }
            // Ties are broken at random, or all receivers would fetch the same shard.
            bits = bits.rotate_right(turn);
            while bits != 0 {
                let shard = index as u32 * 64 + (bits.trailing_zeros() + turn) % 64;
                bits &= bits - 1;
                let is_here = shared_host && self.roster.comes_to_host(to, shard);
                let again = to.coming.get(&shard).is_some_and(|coming| coming.from == source);
                if is_here || again {
                    continue;
                }
                weighed += 1;
                let copies = self.counts.of(shard);
                if best.is_none_or(|(least, _)| copies < least) {
                    best = Some((copies, shard));
                }
            }
            if weighed >= WEIGHED || best.is_some_and(|(copies, _)| copies == 0) {
                break;
            }
        }
        best
    }

    /// Returns true if other members may fetch from a member now.
    pub(super) fn may_serve(&self, member: &Member) -> bool {
        member.is_source()
            && !member.have.is_empty()
            && member.serves() < self.pace.places()
            && member.serving.len() < 4 * self.pace.places() as usize
            && !member.up.is_blocked(self.now_ns)
    }

    /// Returns true if a member may get another grant now.
    pub(super) fn may_fetch(&self, member: &Member) -> bool {
        !member.leaving
            && !member.need.is_empty()
            && member.fetching() < self.pace.places()
            && member.coming.len() < 2 * self.pace.places() as usize
            && !member.down.is_blocked(self.now_ns)
    }
}

/// Distance of two members: 0 on the same host, 1 in the same rack, else 2.
fn distance(a: &Member, b: &Member) -> u8 {
    let same = |a: &str, b: &str| !a.is_empty() && a == b;
    match (same(&a.place.host, &b.place.host), same(&a.place.rack, &b.place.rack)) {
        (true, _) => 0,
        (false, true) => 1,
        (false, false) => 2,
    }
}
