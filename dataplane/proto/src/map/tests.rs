//! Properties of maps: encodings round-trip, damage is detected, shares follow weights, and a change of members moves
//! no more slots than necessary.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use proptest::prelude::*;

use super::rendezvous::{Score, coarse_bounds, least_log2, negative_log2};
use super::*;
use crate::digest::Digest;
use crate::ids::{Epoch, Incarnation, NodeId, SLOTS, ShardId, Slot};
use crate::rng::mix64;

fn shard(port: u16) -> ShardAddress {
    ShardAddress { tcp: SocketAddr::from(([192, 0, 2, 1], port)), shm: None }
}

fn member(node: u64, weight: u32, domain: &str, shards: u16) -> Member {
    Member {
        node: NodeId(node),
        incarnation: Incarnation(1),
        weight,
        failure_domain: domain.to_owned(),
        host: "boot-1".to_owned(),
        shards: (0..shards).map(|index| shard(7000 + index)).collect(),
    }
}

fn map(replicas: u8, members: Vec<Member>) -> ClusterMap {
    ClusterMap { epoch: Epoch(7), replicas, members, former: None }
}

fn slots() -> impl Iterator<Item = Slot> {
    (0..SLOTS as u16).map(Slot)
}

/// Returns the nodes that own a slot, the owner first.
fn nodes(map: &ClusterMap, table: &OwnerTable, slot: Slot) -> Vec<NodeId> {
    table.owners(slot).iter().map(|owner| map.members[usize::from(owner.member)].node).collect()
}

fn first_owner_counts(map: &ClusterMap) -> Vec<usize> {
    let table = OwnerTable::compute(map);
    let mut counts = vec![0; map.members.len()];
    for slot in slots() {
        counts[usize::from(table.owners(slot)[0].member)] += 1;
    }
    counts
}

prop_compose! {
    fn any_address()(v6: bool, ip: u128, port: u16, flow: u32, scope: u32) -> SocketAddr {
        if v6 {
            std::net::SocketAddrV6::new(ip.into(), port, flow, scope).into()
        } else {
            SocketAddr::from(((ip as u32).to_le_bytes(), port))
        }
    }
}

prop_compose! {
    fn any_shard()(tcp in any_address(), shm in proptest::option::of("[a-zé/]{0,50}")) -> ShardAddress {
        ShardAddress { tcp, shm }
    }
}

prop_compose! {
    fn any_member()(
        node: u64, incarnation: u64, weight: u32,
        failure_domain in "[a-z0-9é]{0,60}", host in "[a-z0-9-]{0,64}",
        shards in prop::collection::vec(any_shard(), 1..5),
    ) -> Member {
        Member { node: NodeId(node), incarnation: Incarnation(incarnation), weight, failure_domain, host, shards }
    }
}

prop_compose! {
    fn any_former()(
        since: u64, from: u64,
        claims in prop::collection::btree_map(any::<u64>(), (any::<u64>(), any::<u32>(), 0..257u16), 0..5),
        began in prop::collection::btree_map(any::<u64>(), any::<u64>(), 0..5),
        restarts in prop::option::of(
            (any::<u64>(), any::<u64>(), prop::collection::btree_map(any::<u64>(), any::<u64>(), 0..5)),
        ),
    ) -> Former {
        let claim = |(node, (incarnation, weight, shards))| {
            Claim { node: NodeId(node), incarnation: Incarnation(incarnation), weight, shards }
        };
        Former {
            since: Epoch(since),
            from: Epoch(from),
            claims: claims.into_iter().map(claim).collect(),
            began: began.into_iter().map(|(node, incarnation)| (NodeId(node), Incarnation(incarnation))).collect(),
            restarts: restarts.map(|(at, from, incarnations)| Restarts {
                at: Epoch(at),
                from: Epoch(from),
                incarnations: incarnations.into_iter().map(|(node, now)| (NodeId(node), Incarnation(now))).collect(),
            }),
        }
    }
}

prop_compose! {
    fn any_map(most: usize)(
        epoch: u64, replicas in 1..=MAX_REPLICAS, former in prop::option::of(any_former()),
        members in prop::collection::btree_map(any::<u64>(), any_member(), 0..most),
    ) -> ClusterMap {
        let members = members.into_iter().map(|(node, member)| Member { node: NodeId(node), ..member }).collect();
        ClusterMap { epoch: Epoch(epoch), replicas, members, former }
    }
}

#[test]
fn golden_map_bytes() {
    let mut first = member(3, 100, "rack-a", 1);
    first.shards[0].shm = Some("/run/s0".to_owned());
    let mut second = member(9, 0, "", 0);
    second.incarnation = Incarnation(0x0102_0304);
    let mut bytes = Vec::new();
    map(2, vec![first, second]).encode(&mut bytes);
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, GOLDEN_MAP, "the encoding changed: that needs a new format number");
}
const GOLDEN_MAP: &str = concat!(
    "4b56434d010002000200070000000000000003000000000000000100000000000000640000000100",
    "067261636b2d6106626f6f742d3104c0000201581b01072f72756e2f733009000000000000000403",
    "0201000000000000000000000006626f6f742d31f44b17a8e4f0d754",
);

#[test]
fn golden_owners() {
    // Locations of objects depend on these owners: another draw needs another map format.
    let map = map(2, vec![member(1, 1, "a", 4), member(2, 2, "b", 4), member(3, 3, "c", 4)]);
    let table = OwnerTable::compute(&map);
    let found: Vec<(u16, u16)> = [0, 1, 2, 8191, 16_383]
        .iter()
        .flat_map(|&slot| table.owners(Slot(slot)))
        .map(|owner| (owner.member, owner.shard.0))
        .collect();
    assert_eq!(found, GOLDEN_OWNERS);
}
const GOLDEN_OWNERS: [(u16, u16); 10] =
    [(2, 0), (1, 3), (2, 1), (1, 3), (1, 1), (0, 1), (2, 3), (0, 1), (0, 3), (2, 1)];

/// More owners than failure domains cannot be had, except that two processes of one domain are two owners.
#[test]
fn a_slot_has_no_more_owners_than_there_are_failure_domains() {
    for (replicas, domains, owners) in [
        (8, "abcdefgh", 8),
        (8, "abc", 3),
        (3, "aabbc", 3),
        (3, "aabb", 2),
        (3, "aaa", 2),
        (2, "aaa", 2),
        (1, "aaa", 1),
        (3, "a", 1),
    ] {
        let members = domains.chars().zip(1..).map(|(domain, node)| member(node, 1, &domain.to_string(), 1)).collect();
        let map = map(replicas, members);
        let (table, slot_owners) = (OwnerTable::compute(&map), SlotOwners::of(&map));
        assert_eq!(table.per_slot(), owners, "{replicas} replicas in {domains}");
        for slot in [0, 77, 16_383].map(Slot) {
            let all: Vec<NodeId> = slot_owners.owner(slot).into_iter().map(|owner| owner.node).collect();
            let others = slot_owners.replica_owners(slot).iter().map(|owner| owner.node);
            assert_eq!(all.into_iter().chain(others).collect::<Vec<_>>(), nodes(&map, &table, slot));
        }
    }
}

#[test]
fn logarithm_is_exact_at_powers_and_close_between() {
    let one = 1u64 << 57;
    assert_eq!(negative_log2(1), 64 * one);
    assert_eq!(negative_log2(1 << 63), one);
    assert_eq!(negative_log2(1 << 40), 24 * one);
    assert_eq!(negative_log2(u64::MAX), 1);
}

#[test]
fn equal_scores_go_to_the_lower_node_id() {
    let score = |weight, log, node| Score { weight, log, node: NodeId(node) };
    assert!(score(2, 6, 1).beats(&score(1, 3, 2)) && !score(1, 3, 2).beats(&score(2, 6, 1)));
    assert!(score(2, 5, 2).beats(&score(1, 3, 1)) && !score(1, 3, 1).beats(&score(2, 5, 2)));
    assert!(!score(1, 1 << 63, 1).beats(&score(u32::MAX, 1, 2)));
}

#[test]
fn the_greatest_score_wins_with_coarse_bounds() {
    let members: Vec<Member> = (1..=12).map(|node| member(node, 1 + (node as u32 * 7) % 5, "", 1)).collect();
    let table = OwnerTable::compute(&map(1, members.clone()));
    for slot in slots() {
        let scores: Vec<Score> = members
            .iter()
            .map(|member| {
                let hash = mix64(mix64(member.node.0) ^ u64::from(slot.0)).max(1);
                Score { weight: member.weight, log: negative_log2(hash), node: member.node }
            })
            .collect();
        let best = (1..scores.len()).fold(0, |best, at| if scores[at].beats(&scores[best]) { at } else { best });
        assert_eq!(usize::from(table.owners(slot)[0].member), best, "slot {slot}");
    }
}

#[test]
fn equal_members_share_within_six_percent() {
    let members = (1..=8).map(|node| member(node, 1 << 20, &format!("rack-{node}"), 4)).collect();
    for count in first_owner_counts(&map(1, members)) {
        assert!((1925..=2171).contains(&count), "{count} of 16384 slots for one of 8 members");
    }
}

#[test]
fn shares_follow_weights_within_four_percent() {
    let members: Vec<Member> = (1..=4).map(|node| member(node, 10 * node as u32, "", 1)).collect();
    for (index, count) in first_owner_counts(&map(1, members)).into_iter().enumerate() {
        let due = SLOTS as f64 * (index + 1) as f64 / 10.0;
        assert!((count as f64 / due - 1.0).abs() < 0.04, "{count} slots where {due} are due");
    }
}

#[test]
fn shards_of_a_member_share_its_slots() {
    let table = OwnerTable::compute(&map(1, vec![member(5, 1, "", 8)]));
    let mut counts = [0; 8];
    for slot in slots() {
        counts[usize::from(table.owners(slot)[0].shard.0)] += 1;
    }
    assert!(counts.iter().all(|count| (1900..=2200).contains(count)), "{counts:?}");
}

#[test]
fn members_without_weight_own_no_slots() {
    let table = OwnerTable::compute(&map(3, vec![member(1, 0, "a", 2), member(2, 5, "b", 1)]));
    assert!(slots().all(|slot| table.owners(slot) == [Owner { member: 1, shard: ShardId(0) }]));
    let none = OwnerTable::compute(&map(3, vec![member(1, 0, "a", 2)]));
    assert_eq!(none.owner_of(Digest::of(b"", b"key")), None);
    assert_eq!(table.owners(Slot(SLOTS as u16)), []);
}

#[test]
fn validation_names_the_numbers() {
    let refuse = |map: ClusterMap| map.validate().unwrap_err().to_string();
    assert_eq!(refuse(map(0, vec![])), "a cluster keeps 1 to 8 replicas per slot, not 0");
    assert_eq!(
        refuse(map(1, vec![member(4, 1, "", 1), member(4, 1, "", 1)])),
        "node 4 comes after node 4: members must ascend by node id"
    );
    assert_eq!(refuse(map(1, vec![member(4, 1, "", 257)])), "node 4 has 257 shards; a member has at most 256");
    assert_eq!(
        refuse(map(1, vec![member(4, 2, "", 0)])),
        "node 4 has weight 2 but no shard: list its shards or set weight 0"
    );
    assert_eq!(
        refuse(map(1, vec![member(4, 0, &"d".repeat(129), 0)])),
        "the failure domain of node 4 is 129 bytes long, over the limit of 128"
    );
    let many = (0..4097).map(|node| member(node, 0, "", 0)).collect();
    assert_eq!(refuse(map(1, many)), "4097 members are more than the 4096 a cluster map holds");
    let wide = (0..257).map(|node| member(node, 1, "", 256)).collect();
    assert_eq!(refuse(map(1, wide)), "65792 shards are more than the 65536 a cluster map holds");
}

#[test]
fn a_count_beyond_the_bytes_reserves_nothing() {
    let mut bytes = Vec::new();
    map(1, vec![]).encode(&mut bytes);
    bytes.truncate(bytes.len() - 8);
    bytes[8..10].copy_from_slice(&4096u16.to_le_bytes());
    codec::seal(&mut bytes, 0);
    let wanted = codec::DecodeError::Truncated { wanted_bytes: 4096 * 24, left_bytes: 0 };
    assert_eq!(ClusterMap::decode(&bytes), Err(MapError::Decode(wanted)));

    let mut bytes = Vec::new();
    map(1, vec![member(1, 0, "", 0)]).encode(&mut bytes);
    bytes.truncate(bytes.len() - 8);
    // Behind the seal, the map's fields and the member's node, incarnation and weight.
    bytes[38..40].copy_from_slice(&256u16.to_le_bytes());
    codec::seal(&mut bytes, 0);
    let wanted = codec::DecodeError::Truncated { wanted_bytes: 256 * 8, left_bytes: 0 };
    assert_eq!(ClusterMap::decode(&bytes), Err(MapError::Decode(wanted)));
}

#[test]
fn lookup_by_node_and_owner() {
    let map = map(1, vec![member(3, 1, "", 2), member(8, 1, "", 1)]);
    assert_eq!(map.member(NodeId(8)).map(|member| member.shards.len()), Some(1));
    assert_eq!(map.member(NodeId(4)), None);
    let (member, address) = map.locate(Owner { member: 0, shard: ShardId(1) }).unwrap();
    assert_eq!((member.node, address.tcp.port()), (NodeId(3), 7001));
    assert_eq!(map.locate(Owner { member: 1, shard: ShardId(1) }), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn maps_survive_the_round_trip(map in any_map(12)) {
        let mut bytes = vec![0xaa];
        map.encode(&mut bytes);
        prop_assert_eq!(ClusterMap::decode(&bytes[1..]), Ok(map));
    }

    #[test]
    fn any_damage_is_noticed(map in any_map(4), at: prop::sample::Index, flip in 1u8..) {
        let mut bytes = Vec::new();
        map.encode(&mut bytes);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(ClusterMap::decode(&bytes).is_err());
        prop_assert!(ClusterMap::decode(&bytes[..at]).is_err());
    }

    /// Arbitrary contents under a valid seal, as a hostile or faulty peer can send.
    #[test]
    fn arbitrary_bytes_never_panic(contents in prop::collection::vec(any::<u8>(), 0..600), count in 0u16..6) {
        let _ = ClusterMap::decode(&contents);
        let mut sealed = Vec::new();
        let start = codec::begin(&mut sealed, u32::from_le_bytes(*b"KVCM"), 1);
        sealed.extend_from_slice(&[1, 0]);
        sealed.extend_from_slice(&count.to_le_bytes());
        sealed.extend_from_slice(&contents);
        codec::seal(&mut sealed, start);
        if let Ok(map) = ClusterMap::decode(&sealed) {
            let mut again = Vec::new();
            map.encode(&mut again);
            prop_assert_eq!(again, sealed);
        }
    }

    #[test]
    fn the_quick_bounds_hold_the_logarithm(hash in 1u64.., shift in 0u32..64, step in 0u64..1 << 10, off in 0u64..3) {
        // Also next to the steps of the table, where its bounds are tightest.
        let beside = ((1 << 63 | step << 53).saturating_add(off) - 1) >> shift;
        for hash in [hash >> shift, !(hash >> shift), beside] {
            let hash = hash.max(1);
            let log = negative_log2(hash);
            prop_assert!(least_log2(hash) <= log);
            let (least, most) = coarse_bounds(hash);
            prop_assert!(least <= log && log <= most);
            prop_assert!(most - least < 1 << 48, "{most} is far from {least}");
            let real = -(hash as f64 / 2f64.powi(64)).log2();
            prop_assert!((log as f64 / 2f64.powi(57) - real).abs() < 1e-12);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn shares_follow_any_weights(
        weights in prop::collection::btree_map(any::<u64>(), 1u32..1000, 2..10),
    ) {
        let total: f64 = weights.values().map(|&weight| f64::from(weight)).sum();
        let members = weights.iter().map(|(&node, &weight)| member(node, weight, "", 1)).collect();
        for (count, &weight) in first_owner_counts(&map(1, members)).into_iter().zip(weights.values()) {
            let share = f64::from(weight) / total;
            let due = SLOTS as f64 * share;
            // Six standard deviations of the binomial distribution.
            let slack = 6.0 * (due * (1.0 - share)).sqrt() + 6.0;
            prop_assert!((count as f64 - due).abs() <= slack, "{} slots, {} due", count, due);
        }
    }

    /// After a member leaves, a slot keeps all its other owners, in order; only a replacement is new.
    #[test]
    fn a_departure_moves_only_the_slots_of_the_member(
        ids in prop::collection::btree_set(any::<u64>(), 4..10), gone: prop::sample::Index, weight in 1u32..5,
    ) {
        let gone = *ids.iter().nth(gone.index(ids.len())).unwrap();
        let members: Vec<Member> =
            ids.iter().map(|&node| member(node, if node == gone { weight } else { 1 }, &node.to_string(), 2)).collect();
        let before = map(3, members.clone());
        let after = map(3, members.into_iter().filter(|member| member.node.0 != gone).collect());
        let (old, new) = (OwnerTable::compute(&before), OwnerTable::compute(&after));
        for slot in slots() {
            let mut kept = nodes(&before, &old, slot);
            kept.retain(|node| node.0 != gone);
            let now = nodes(&after, &new, slot);
            prop_assert_eq!(&now[..kept.len()], &kept[..]);
        }
    }

    #[test]
    fn order_of_members_does_not_matter(map in any_map(8), seed: u64) {
        let mut shuffled = map.clone();
        let mut rng = crate::rng::Rng::new(seed, "shuffle");
        for index in (1..shuffled.members.len()).rev() {
            shuffled.members.swap(index, rng.below(index as u64 + 1) as usize);
        }
        let (one, two) = (OwnerTable::compute(&map), OwnerTable::compute(&shuffled));
        for slot in slots() {
            prop_assert_eq!(nodes(&map, &one, slot), nodes(&shuffled, &two, slot));
        }
    }

    #[test]
    fn a_restart_moves_nothing(map in any_map(8), incarnations: u64) {
        let mut restarted = map.clone();
        restarted.epoch = Epoch(incarnations);
        for member in &mut restarted.members {
            member.incarnation = Incarnation(member.incarnation.0.wrapping_add(incarnations));
        }
        prop_assert_eq!(OwnerTable::compute(&map), OwnerTable::compute(&restarted));
    }

    #[test]
    fn owners_are_distinct_and_spread(domains in prop::collection::vec(0u8..5, 1..10), replicas in 1..=MAX_REPLICAS) {
        let members = domains.iter().enumerate().map(|(n, d)| member(n as u64, 1, &d.to_string(), 1)).collect();
        let map = map(replicas, members);
        let table = OwnerTable::compute(&map);
        let there: BTreeSet<u8> = domains.iter().copied().collect();
        let copies = usize::from(replicas).min(there.len().max(2)).min(domains.len());
        for slot in slots() {
            let owners = nodes(&map, &table, slot);
            prop_assert_eq!(owners.iter().collect::<BTreeSet<_>>().len(), copies);
            let spread: BTreeSet<u8> = owners.iter().map(|node| domains[node.0 as usize]).collect();
            prop_assert_eq!(spread.len(), copies.min(there.len()));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The former owners follow from the two layouts, and only owners that have not restarted may import from them.
    #[test]
    fn former_owners_follow_from_the_former_layout(
        before in prop::collection::btree_map(1..12u64, 1..4u32, 1..6),
        came in 20..30u64,
        restarted in any::<prop::sample::Index>(),
    ) {
        let members: Vec<Member> = before.iter().map(|(&node, &weight)| member(node, weight, "rack", 2)).collect();
        let claims = members.iter().map(|member| Claim {
            node: member.node, incarnation: member.incarnation, weight: member.weight, shards: 2,
        }).collect();
        let old = map(1, members.clone());
        let mut members = members;
        members.push(member(came, 2, "rack", 2));
        let began = members.iter().map(|member| (member.node, member.incarnation)).collect();
        let again = restarted.index(members.len());
        members[again].incarnation = Incarnation(2);
        let again = members[again].node;
        let former = Former { since: Epoch(7), from: Epoch(3), claims, began, restarts: None };
        let new = ClusterMap { former: Some(former), ..map(1, members) };
        let owners = SlotOwners::of(&new);
        let (old_table, new_table) = (OwnerTable::compute(&old), OwnerTable::compute(&new));
        prop_assert_eq!((owners.since, owners.from), (Epoch(7), Epoch(3)));
        for slot in slots() {
            let (from, to) = (nodes(&old, &old_table, slot)[0], nodes(&new, &new_table, slot)[0]);
            let shard = old_table.owners(slot)[0].shard;
            let expected = (from != again && to != again)
                .then_some(ShardKey { node: from, incarnation: Incarnation(1), shard });
            prop_assert_eq!(owners.former(slot), expected);
            let owner = owners.owner(slot).expect("there are members");
            prop_assert_eq!(owner.node, to);
            prop_assert!(owners.address(owner).is_some());
        }
    }
}
