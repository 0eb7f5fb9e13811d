//! Numbers by which clients name put sessions.
//!
//! Every shard counts its put sessions from the start in each of its incarnations. If clients used these counts, the
//! same count would name put sessions of several shards: a client that continues after a restart, or after the object's
//! slot has migrated to another shard, would write into another of its own put sessions. So each incarnation of a shard
//! maps its counts through its own permutation of all 64-bit numbers. Two put sessions of one incarnation never have
//! the same number; two of different incarnations have it with a probability of 2^-64.

use kvplane_proto::map::ShardKey;
use kvplane_proto::rng::mix64;

use super::PutSessionId;

const ROUNDS: usize = 4;

/// Permutation by which one incarnation of a shard numbers its put sessions: a Feistel network under keys of that
/// incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Numbers([u64; ROUNDS]);

impl Numbers {
    /// Returns the permutation of this incarnation of this shard.
    #[must_use]
    pub fn of(shard: ShardKey) -> Self {
        let ShardKey { node, incarnation, shard } = shard;
        let mut word = mix64(0x6b76_6472_6166_7473);
        for part in [node.0, incarnation.0, u64::from(shard.0)] {
            word = mix64(word ^ part);
        }
        Self(core::array::from_fn(|round| mix64(word ^ mix64(round as u64))))
    }

    /// Returns the number by which clients name a put session.
    #[must_use]
    pub fn number(&self, session: PutSessionId) -> u64 {
        let PutSessionId(id) = session;
        let (mut left, mut right) = ((id >> 32) as u32, id as u32);
        for key in self.0 {
            (left, right) = (right, left ^ round(key, right));
        }
        u64::from(left) << 32 | u64::from(right)
    }

    /// Returns the put session that a number names; almost certainly one that never existed, if the number is from
    /// another incarnation.
    #[must_use]
    pub fn session(&self, number: u64) -> PutSessionId {
        let (mut left, mut right) = ((number >> 32) as u32, number as u32);
        for key in self.0.into_iter().rev() {
            (left, right) = (right ^ round(key, left), left);
        }
        PutSessionId(u64::from(left) << 32 | u64::from(right))
    }
}

fn round(key: u64, half: u32) -> u32 {
    (mix64(key ^ u64::from(half)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
    use proptest::prelude::*;

    use super::*;

    fn numbers(node: u64, incarnation: u64, shard: u16) -> Numbers {
        Numbers::of(ShardKey { node: NodeId(node), incarnation: Incarnation(incarnation), shard: ShardId(shard) })
    }

    proptest! {
        #[test]
        fn a_number_leads_back_to_its_put_session(node: u64, incarnation: u64, shard: u16, id: u64) {
            let numbers = numbers(node, incarnation, shard);
            prop_assert_eq!(numbers.session(numbers.number(PutSessionId(id))), PutSessionId(id));
            prop_assert_eq!(numbers.number(numbers.session(id)), id);
        }
    }

    #[test]
    fn no_two_put_sessions_of_any_incarnations_have_the_same_number() {
        let mut all = BTreeSet::new();
        let incarnations = (1..5)
            .flat_map(|node| (1..5).flat_map(move |incarnation| (0..4).map(move |shard| (node, incarnation, shard))));
        for (node, incarnation, shard) in incarnations {
            let numbers = numbers(node, incarnation, shard);
            for index in 0..256 {
                for generation in 1..5 {
                    assert!(all.insert(numbers.number(PutSessionId::new(index, generation))));
                }
            }
        }
        // Numbers of another incarnation do not lead to existing put sessions either.
        let (one, other) = (numbers(1, 1, 0), numbers(1, 2, 0));
        for index in 0..1024 {
            let found = other.session(one.number(PutSessionId::new(index, 1)));
            assert!(found.index() >= 1024 || found.generation() != 1, "{found:?}");
        }
    }
}
