//! Ranks that fetch by a schedule: its guarantees, and the time until every rank has the whole object.

use std::collections::BTreeMap;

use kvplane_cluster::p2p::{
    Follow, HALVES, Hold, MAX_RANKS, ObjectName, Objects, ObjectsConfig, Parent, RankJoin, Schedule, ShardSet, half_of,
};
use proptest::prelude::*;

use super::fluid::{Fluid, SECOND, spec};
use super::swarm::{ALONE_NS, BYTES, LINK, binomial, nowhere};

/// Checks that each tree contains every rank once, is connected, has the minimum depth, and that no rank is an inner
/// node of both.
fn check(ranks: u32) {
    let schedule = Schedule::new(ranks).unwrap();
    let mut below: BTreeMap<u32, [Vec<u32>; HALVES]> = BTreeMap::new();
    for half in 0..HALVES {
        let mut roots = 0;
        for rank in 0..ranks {
            match schedule.parent(half, rank) {
                Parent::Origin => {
                    roots += 1;
                    assert_eq!(schedule.depth(half, rank), 1);
                }
                Parent::Rank(parent) => {
                    assert!(parent < ranks && parent != rank);
                    assert_eq!(schedule.depth(half, rank), schedule.depth(half, parent) + 1);
                    below.entry(parent).or_default()[half].push(rank);
                }
            }
            assert!(schedule.depth(half, rank) <= ranks.ilog2() + 1, "rank {rank} of {ranks}");
        }
        assert_eq!(roots, 1);
    }
    for rank in 0..ranks {
        let found = below.remove(&rank).unwrap_or_default();
        assert!(found.iter().filter(|children| !children.is_empty()).count() <= 1, "rank {rank} of {ranks} twice");
        for (half, mut children) in found.into_iter().enumerate() {
            assert!(children.len() <= 2);
            let mut said = schedule.children(half, rank);
            said.sort_unstable();
            children.sort_unstable();
            assert_eq!(said, children, "rank {rank} of {ranks}");
        }
    }
}

#[test]
fn every_schedule_is_two_trees_with_disjoint_inner_ranks() {
    (1..=300).chain([1000, 1023, 1024, 1025, MAX_RANKS]).for_each(check);
    assert_eq!((Schedule::new(0), Schedule::new(MAX_RANKS + 1)), (None, None));
}

proptest! {
    /// Whatever parents have and fail to deliver, each shard is fetched from its parent once available, or requested
    /// elsewhere, and from one source at a time.
    #[test]
    fn rank_requests_each_shard_once(
        (ranks, rank) in (1u32..40).prop_flat_map(|ranks| (Just(ranks), 0..ranks)),
        shards in 1u32..150,
        steps in prop::collection::vec((0u8..5, 0u32..150, 0u64..900), 0..300),
    ) {
        let schedule = Schedule::new(ranks).unwrap();
        let mut follow = Follow::new(schedule, rank, &ShardSet::full(shards), 1000, 0);
        let (mut there, mut now_ns) = (ShardSet::empty(shards), 0);
        let (mut have, mut active) = (ShardSet::empty(shards), Vec::new());
        for (what, number, wait_ns) in steps {
            now_ns += wait_ns / 10;
            match what {
                0 => {
                    there.insert(number % shards);
                    (0..HALVES).for_each(|half| follow.learn(half, there.as_words()));
                }
                1 if !active.is_empty() => {
                    let shard = active.swap_remove(number as usize % active.len());
                    follow.arrived(shard, now_ns);
                    have.insert(shard);
                }
                2 if !active.is_empty() && number % 10 == 0 => {
                    let shard = active.swap_remove(number as usize % active.len());
                    prop_assert!(follow.failed(shard));
                    active.retain(|&other| half_of(other) != half_of(shard));
                }
                3 => follow.tick(now_ns),
                _ => {}
            }
            let elsewhere: Vec<u32> = follow.elsewhere().collect();
            active.retain(|shard| !elsewhere.contains(shard));
            for half in 0..HALVES {
                while let Some(shard) = follow.next(half, now_ns) {
                    prop_assert!(there.contains(shard) && half_of(shard) == half);
                    prop_assert!(!have.contains(shard) && !active.contains(&shard) && !elsewhere.contains(&shard));
                    active.push(shard);
                }
                prop_assert!(follow.follows(half) || follow.due_ns(half).is_none());
            }
        }
        // A timeout alone ends it: missing shards are requested elsewhere.
        follow.tick(u64::MAX);
        let mut all: Vec<u32> = follow.elsewhere().chain(have.iter()).collect();
        all.sort_unstable();
        prop_assert_eq!(all, (0..shards).collect::<Vec<_>>());
    }
}

struct SwarmOutcome {
    time: f64,
    egress: f64,
    most: f64,
}

fn spread(ranks: u32, shards: u64) -> SwarmOutcome {
    let mut fluid = Fluid::new(BYTES, shards, 1);
    let origin = fluid.join(LINK, true, nowhere());
    for rank in 0..ranks {
        fluid.join_rank(LINK, rank, ranks);
    }
    let done_ns = fluid.run(600 * SECOND).expect("all ranks are done");
    let sent = |member: &u64| fluid.peers[member].sent_bytes / BYTES as f64;
    let most = fluid.peers.keys().filter(|&&member| member != origin).map(sent).fold(0.0, f64::max);
    let time = done_ns as f64 / binomial(u64::from(ranks), shards);
    println!(
        "{ranks} ranks, {shards} shards: {time:.3} x the bound, {:.3} x the fluid one, egress {:.3}, most {most:.3}",
        done_ns as f64 / ALONE_NS,
        sent(&origin),
    );
    SwarmOutcome { time, egress: sent(&origin), most }
}

#[test]
fn many_ranks_take_little_longer_than_one() {
    let cases = [(1, 64), (2, 64), (3, 128), (8, 128), (16, 256), (64, 256), (1000, 128), (1000, 256)];
    for (ranks, shards) in cases {
        let found = spread(ranks, shards);
        assert!(found.time <= 1.25, "{ranks} ranks: {:.3} x the bound", found.time);
        assert!(found.egress <= 1.3, "{ranks} ranks: the origin sent {:.3} x the object", found.egress);
        assert!(found.most <= 1.1, "{ranks} ranks: one sent {:.3} x the object", found.most);
    }
}

/// Runs ranks with a fault: one does not join, is killed, or stops; or a source has corrupt bytes.
fn trouble(what: &str, change: impl FnOnce(&mut Fluid, u64, &[u64]), missing: Option<u32>, most: f64) {
    let mut fluid = Fluid::new(BYTES, 256, 3);
    let origin = fluid.join(LINK, true, nowhere());
    let ranks = (0..16).filter(|&rank| Some(rank) != missing);
    let members: Vec<u64> = ranks.map(|rank| fluid.join_rank(LINK, rank, 16)).collect();
    change(&mut fluid, origin, &members);
    let done_ns = fluid.run(120 * SECOND).expect("all other ranks are done");
    let times = done_ns as f64 / ALONE_NS;
    println!(
        "{what}: {times:.3} x the fluid bound, the origin sent {:.3}",
        fluid.peers[&origin].sent_bytes / BYTES as f64
    );
    assert!(times <= most, "{what}: {times:.3} x the bound");
}

#[test]
fn missing_or_killed_rank_delays_the_others_little() {
    let half_way = (0.5 * ALONE_NS) as u64;
    for missing in [3, 7, 8, 15] {
        trouble(&format!("rank {missing} is missing"), |_, _, _| {}, Some(missing), 2.5);
    }
    for killed in [3, 7, 8] {
        let change = |fluid: &mut Fluid, _: u64, members: &[u64]| fluid.kill_at(half_way, members[killed]);
        trouble(&format!("rank {killed} is killed"), change, None, 1.4);
        let change = |fluid: &mut Fluid, _: u64, members: &[u64]| fluid.freeze_at(half_way, members[killed]);
        trouble(&format!("the host of rank {killed} stops"), change, None, 2.5);
    }
    let change = |fluid: &mut Fluid, origin: u64, _: &[u64]| fluid.kill_at((1.1 * ALONE_NS) as u64, origin);
    trouble("the origin is killed", change, None, 1.3);
}

/// A slow rank delays the ranks below it until they leave it.
#[test]
fn slow_rank_is_left() {
    let slow = super::fluid::Link { up: LINK.up / 10.0, down: LINK.down };
    let mut fluid = Fluid::new(BYTES, 256, 4);
    fluid.join(LINK, true, nowhere());
    for rank in 0..16 {
        fluid.join_rank(if rank == 7 { slow } else { LINK }, rank, 16);
    }
    let done_ns = fluid.run(120 * SECOND).expect("all ranks are done");
    println!("a rank sends slowly: {:.3} x the fluid bound", done_ns as f64 / ALONE_NS);
    assert!(done_ns as f64 <= 3.0 * ALONE_NS, "{:.3} x the bound", done_ns as f64 / ALONE_NS);
}

/// Corrupt bytes are reported to the catalog, which excludes their source; it believes only a rank that was to fetch
/// there.
#[test]
fn only_followers_of_a_source_are_believed_about_it() {
    let mut fluid = Fluid::new(BYTES, 64, 5);
    let bad = fluid.join(LINK, true, nowhere());
    fluid.join(LINK, true, nowhere());
    fluid.corrupt = Some(bad);
    for rank in 0..4 {
        fluid.join_rank(LINK, rank, 4);
    }
    fluid.run(60 * SECOND).expect("all ranks are done");
    let (rows, lost) = fluid.objects.describe(ObjectName::new("", "o"), Some(1)).unwrap();
    let excluded: Vec<u64> = rows.iter().filter(|row| !row.excluded.is_empty()).map(|row| row.member).collect();
    assert_eq!((excluded, lost), (vec![bad], 0));

    let mut catalog = Catalog::new();
    let [first, second] = [0, 1].map(|rank| catalog.rank(rank, 2));
    let failure = |source| [kvplane_cluster::p2p::FetchFailure { shard: 0, source, corrupt: true }];
    // Of two ranks, rank 0 fetches even shards from rank 1.
    catalog.objects.want(0, first, first, &[(0, 1)], &failure(catalog.origin)).unwrap();
    catalog.objects.want(0, second, second, &[], &failure(first)).unwrap();
    assert!(catalog.excluded().is_empty());
    catalog.objects.want(0, first, first, &[], &failure(second)).unwrap();
    assert_eq!(catalog.excluded(), [second]);
}

/// Catalog with an origin; clients and members have the same numbers.
struct Catalog {
    objects: Objects,
    origin: u64,
}

impl Catalog {
    fn new() -> Self {
        let mut objects = Objects::new(ObjectsConfig::default(), 0, 0);
        objects.publish(0, ObjectName::new("", "o"), Some(1), spec(400, 100)).unwrap();
        let mut catalog = Self { objects, origin: 0 };
        catalog.origin = catalog.member(vec![(0, 4)]);
        catalog
    }

    fn member(&mut self, have: Vec<(u32, u32)>) -> u64 {
        let digest = spec(400, 100).digest();
        let origin = !have.is_empty();
        // The catalog assigns consecutive numbers, and this test's clients are to have the same.
        let client = if self.origin == 0 { 2 } else { self.next() };
        let hold =
            Hold { client, segment: format!("s{client}"), addresses: vec![client], origin, have, ..Hold::default() };
        let member = self.objects.hold(0, ObjectName::new("", "o"), 1, digest, hold).unwrap();
        assert_eq!(member, client);
        member
    }

    fn next(&self) -> u64 {
        let rows = self.objects.describe(ObjectName::new("", "o"), None).unwrap().0;
        rows.iter().map(|row| row.member).max().unwrap() + 1
    }

    fn rank(&mut self, rank: u32, ranks: u32) -> u64 {
        let member = self.member(Vec::new());
        for half in 0..HALVES {
            self.parent(member, rank, ranks, half);
        }
        member
    }

    fn parent(&mut self, member: u64, rank: u32, ranks: u32, half: usize) -> Option<u64> {
        let join = RankJoin { job: "j".to_owned(), rank, ranks, board: 9 };
        let parent = self.objects.join_ranks(member, member, &join, half).unwrap();
        parent.map(|parent| parent.member)
    }

    fn excluded(&self) -> Vec<u64> {
        let rows = self.objects.describe(ObjectName::new("", "o"), None).unwrap().0;
        rows.iter().filter(|row| !row.excluded.is_empty()).map(|row| row.member).collect()
    }
}

#[test]
fn ranks_find_their_parents_without_grants() {
    let mut catalog = Catalog::new();
    let first = catalog.rank(0, 2);
    // In the even half rank 1 is the parent of rank 0, and has not joined yet; in the odd half it is the other way
    // round.
    assert_eq!(catalog.parent(first, 0, 2, 0), None);
    assert_eq!(catalog.parent(first, 0, 2, 1), Some(catalog.origin));
    let second = catalog.rank(1, 2);
    assert_eq!(catalog.parent(first, 0, 2, 0), Some(second));
    assert_eq!(catalog.parent(second, 1, 2, 1), Some(first));
    assert!(catalog.objects.poll_grants().is_empty());
    let join = |ranks, rank| RankJoin { job: "j".to_owned(), rank, ranks, board: 9 };
    for (join, half, words) in
        [(join(3, 0), 0, "job \"j\" has 2 ranks"), (join(2, 2), 0, "rank 2 of 2"), (join(2, 0), 2, "half 2")]
    {
        let error = catalog.objects.join_ranks(first, first, &join, half).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // A leaving rank waits for its children: rank 0 is to fetch both even shards from rank 1.
    assert_eq!(catalog.objects.release(0, second, second, true), Ok(2));
    catalog.objects.report(0, first, first, &[(0, 1)], &[]).unwrap();
    assert_eq!(catalog.objects.release(0, second, second, true), Ok(1));
    // Shards that a child requests elsewhere are not waited for, and are granted.
    catalog.objects.want(0, first, first, &[(2, 1)], &[]).unwrap();
    assert_eq!(
        catalog.objects.poll_grants().iter().map(|grant| grant.order.source).collect::<Vec<_>>(),
        [catalog.origin]
    );
    assert_eq!(catalog.objects.release(0, second, second, true), Ok(0));
    assert_eq!(catalog.parent(first, 0, 2, 0), None);
    assert!(catalog.objects.want(0, first, first, &[(4, 1)], &[]).is_err());
}
