//! Who fetches which shard from whom.
//!
//! Of what a source has and a receiver lacks, the rarest shard goes first. Sources that brought the object give each
//! shard away once, and again only when no other has it or is about to. Of a host's members one fetches a shard from
//! elsewhere, and the others from it. Those that have proved slow come last. Where there are many to look at, some are
//! looked at: the work for a grant has a limit that does not depend on their number.

use std::collections::BTreeSet;

use super::member::Member;
use super::swarm::Swarm;

/// Members that are looked at for one grant.
const LOOKED_AT: usize = 24;
/// Shards that are weighed for one pair.
const WEIGHED: u32 = 256;
/// A member is slow that takes so many times as long as is usual.
const SLOW: u64 = 3;

/// How good a grant would be; less is better.
type Score = (bool, u32, u8, u32, u64);

/// A grant to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) receiver: u64,
    pub(super) source: u64,
    pub(super) shard: u32,
}

impl Swarm {
    /// The best source for a receiver, and what to fetch from it.
    pub(super) fn choose_source(&mut self, receiver: u64, now_ns: u64) -> Option<Choice> {
        let start = self.rng.next_u64();
        let free = &self.free;
        self.choose(free, start, now_ns, |source| (receiver, source))
    }

    /// The best receiver for a source, and what it fetches.
    pub(super) fn choose_receiver(&mut self, source: u64, now_ns: u64) -> Option<Choice> {
        let start = self.rng.next_u64();
        let hungry = &self.hungry;
        self.choose(hungry, start, now_ns, |receiver| (receiver, source))
    }

    fn choose(
        &self,
        among: &BTreeSet<u64>,
        start: u64,
        now_ns: u64,
        pair: impl Fn(u64) -> (u64, u64),
    ) -> Option<Choice> {
        let first = self.first + start % (self.last + 1 - self.first).max(1);
        let mut best: Option<(Score, Choice)> = None;
        for &other in among.range(first..).chain(among.range(..first)).take(LOOKED_AT) {
            let (receiver, source) = pair(other);
            if let Some((score, shard)) = self.weigh(receiver, source, start, now_ns)
                && best.as_ref().is_none_or(|(least, _)| score < *least)
            {
                best = Some((score, Choice { receiver, source, shard }));
            }
        }
        best.map(|(_, choice)| choice)
    }

    fn weigh(&self, receiver: u64, source: u64, start: u64, now_ns: u64) -> Option<(Score, u32)> {
        if receiver == source {
            return None;
        }
        let (to, from) = (self.members.get(&receiver)?, self.members.get(&source)?);
        let banned = to.bans.get(&source).is_some_and(|&(until_ns, _)| until_ns > now_ns);
        if banned || !self.may_serve(from, now_ns) || !self.may_fetch(to, now_ns) {
            return None;
        }
        let slow_receiver = self.is_slow(to.fetched.ns());
        // Who is slow must not be where the only copy is, nor have more than one of a source's places.
        if slow_receiver && (from.serving.range((receiver, 0)..=(receiver, u32::MAX)).next().is_some()) {
            return None;
        }
        let (copies, shard) = self.rarest(to, (source, from), start)?;
        // Who has served nobody yet may be as slow as it fetches.
        let slow = slow_receiver || self.is_slow(from.served.ns().or(from.fetched.ns()));
        // Sources that have the least to do, and receivers that have the least coming.
        let load = from.serves() + to.fetching();
        Some(((slow, copies, distance(to, from), load, u64::from(from.have.count())), shard))
    }

    /// Of what one has and the other lacks, a shard that the fewest have.
    fn rarest(&self, to: &Member, (source, from): (u64, &Member), start: u64) -> Option<(u32, u32)> {
        let words = from.have.words();
        let far = distance(to, from) > 0;
        let shared_host = far && self.hosts.get(&to.place.host).is_some_and(|on_host| on_host.len() > 1);
        let mut best: Option<(u32, u32)> = None;
        let (mut weighed, turn) = (0, (start >> 32) as u32 % 64);
        for step in 0..words {
            let index = (step + start as usize % words) % words;
            let mut bits = from.have.word(index) & to.need.word(index);
            if from.origin {
                bits &= self.unseeded.word(index);
            }
            // Among equals chance decides, or all would fetch the same.
            bits = bits.rotate_right(turn);
            while bits != 0 {
                let shard = index as u32 * 64 + (bits.trailing_zeros() + turn) % 64;
                bits &= bits - 1;
                let is_here = shared_host && self.comes_to_host(to, shard);
                let again = to.coming.get(&shard).is_some_and(|coming| coming.from == source);
                if is_here || again {
                    continue;
                }
                weighed += 1;
                let copies = self.copies[shard as usize];
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

    /// Whether another member of the same host has a shard or is about to.
    fn comes_to_host(&self, to: &Member, shard: u32) -> bool {
        let on_host = self.hosts.get(&to.place.host).into_iter().flatten();
        on_host.filter_map(|number| self.members.get(number)).any(|other| {
            !std::ptr::eq(other, to)
                && other.is_source()
                && (other.have.contains(shard) || other.coming.get(&shard).is_some_and(|coming| !coming.late))
        })
    }

    fn is_slow(&self, took_ns: Option<u64>) -> bool {
        matches!((took_ns, self.typical.ns()), (Some(took), Some(usual)) if took > SLOW * usual)
    }

    pub(super) fn may_serve(&self, member: &Member, now_ns: u64) -> bool {
        member.is_source()
            && !member.have.is_empty()
            && member.serves() < self.places()
            && member.serving.len() < 4 * self.places() as usize
            && !member.up.is_blocked(now_ns)
    }

    pub(super) fn may_fetch(&self, member: &Member, now_ns: u64) -> bool {
        !member.leaving
            && !member.need.is_empty()
            && member.fetching() < self.places()
            && member.coming.len() < 2 * self.places() as usize
            && !member.down.is_blocked(now_ns)
    }
}

/// 0 on the same host, 1 in the same rack, else 2.
fn distance(a: &Member, b: &Member) -> u8 {
    let same = |a: &str, b: &str| !a.is_empty() && a == b;
    match (same(&a.place.host, &b.place.host), same(&a.place.rack, &b.place.rack)) {
        (true, _) => 0,
        (false, true) => 1,
        (false, false) => 2,
    }
}
