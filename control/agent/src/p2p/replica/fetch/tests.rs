//! Tests of the fetch: outcomes of orders, restarts, and the schedule of a rank.

use super::*;
use crate::p2p::replica::ranks::Ranks;

const SHARDS: u32 = 4;

fn spec() -> Arc<ObjectSpec> {
    let layout = kvplane_cluster::p2p::Layout::new(vec![u64::from(SHARDS) * 8], 8).unwrap();
    Arc::new(ObjectSpec { layout, hashes: (0..u128::from(SHARDS)).collect(), about: Vec::new() })
}

fn fetch() -> Fetch {
    Fetch::new(spec(), ShardSet::empty(SHARDS), ShardSet::full(SHARDS))
}

fn order(shard: u32, source: u64) -> ShardOrder {
    ShardOrder { shard, source, segment: format!("s{source}"), address: 0 }
}

fn news(fetch: &Fetch) -> News {
    fetch.take_news(Instant::now(), Instant::now())
}

fn failure(shard: u32, source: u64, corrupt: bool) -> FetchFailure {
    FetchFailure { shard, source, corrupt }
}

#[test]
fn arrived_shards_are_present_and_reported_once() {
    let fetch = fetch();
    fetch.order(order(2, 7));
    let taken = fetch.next_order().unwrap();
    assert_eq!(taken, order(2, 7));
    assert_eq!(fetch.complete(&taken, Ok(8)), None);
    assert_eq!((fetch.counts(), fetch.fetched_bytes()), ((1, 3), 8));
    let first = news(&fetch);
    assert_eq!((first.got.as_slice(), first.missing), (&[2][..], 3));
    assert!(news(&fetch).got.is_empty());
    fetch.keep_news(first);
    assert_eq!(news(&fetch).got, [2]);
    // A repeated order is reported again, without another fetch.
    fetch.order(order(2, 8));
    fetch.order(order(3, 8));
    assert_eq!(fetch.next_order(), Some(order(3, 8)));
    assert_eq!(news(&fetch).got, [2]);
}

#[test]
fn a_replaced_order_hides_the_failure_of_the_former_peer() {
    let fetch = fetch();
    fetch.order(order(1, 7));
    let taken = fetch.next_order().unwrap();
    fetch.order(order(1, 8));
    let next = fetch.complete(&taken, Err(Trouble::Source("it left".to_owned()))).unwrap();
    assert_eq!(next, order(1, 8));
    assert!(news(&fetch).failed.is_empty());
    assert_eq!(fetch.complete(&next, Err(Trouble::Corrupt)), None);
    assert_eq!(news(&fetch).failed, [failure(1, 8, true)]);
    assert_eq!(fetch.trouble().as_deref(), Some("shard 1 from s8 does not match its hash"));
}

#[test]
fn wrong_bytes_are_reported_and_the_replacing_order_is_kept() {
    let fetch = fetch();
    fetch.order(order(1, 7));
    let taken = fetch.next_order().unwrap();
    fetch.order(order(1, 8));
    assert_eq!(fetch.complete(&taken, Err(Trouble::Corrupt)), None);
    assert_eq!(news(&fetch).failed, [failure(1, 7, true)]);
    assert_eq!(fetch.next_order(), Some(order(1, 8)));
}

#[test]
fn a_stopped_fetch_has_no_orders_until_it_restarts() {
    let fetch = fetch();
    fetch.order(order(0, 7));
    fetch.stop();
    assert_eq!(fetch.next_order(), None);
    // Shard 1 has the right bytes in memory; shard 3 is not wanted.
    let wanted = ShardSet::of(SHARDS, &[(0, 3)]).unwrap();
    assert_eq!(fetch.restart(wanted, &[9, 1, 9, 3]).intervals(), [(0, 1), (2, 1)]);
    assert_eq!((fetch.counts(), news(&fetch).got), ((1, 2), vec![1]));
    assert_eq!(fetch.announced(), (vec![(1, 1)], vec![(0, 1), (2, 1)]));
    fetch.withdraw();
    assert_eq!(fetch.announced(), (vec![(1, 1)], vec![]));
}

fn rank() -> Fetch {
    let (have, want, mut fetch) = (ShardSet::empty(SHARDS), ShardSet::full(SHARDS), fetch());
    let ranks = Ranks::new(1, 2);
    let follow = ranks.follow(&want, Duration::from_secs(3600)).unwrap();
    fetch.follow_schedule(follow, Seat::new(&ranks, &have).unwrap());
    fetch
}

fn parent(member: u64) -> RankParent {
    RankParent { member, segment: format!("s{member}").into(), addresses: vec![1000], board: None }
}

#[test]
fn a_rank_fetches_from_its_parent_and_the_rest_elsewhere() {
    let fetch = rank();
    assert!(matches!(fetch.await_parent(0, Duration::ZERO), ParentState::Unknown));
    fetch.set_parent(0, Some(parent(5)));
    assert!(matches!(fetch.await_parent(0, Duration::ZERO), ParentState::Known(found) if found.member == 5));
    assert_eq!(fetch.room(0, Duration::ZERO), FetchRoom::Free);
    fetch.learn(0, &[u64::MAX], None);
    assert_eq!(fetch.room(0, Duration::ZERO), FetchRoom::Full);
    let first = fetch.next_order().unwrap();
    assert_eq!((first.shard, first.source, first.address), (0, 5, 1000));
    assert_eq!(fetch.complete(&first, Ok(8)), None);
    // The arrival ordered the next shard of the half.
    let second = fetch.next_order().unwrap();
    assert_eq!((second.shard, second.address), (2, 1016));
    // Its failure leaves the parent: the rest of the half comes from elsewhere, and the catalog hears of it there.
    assert_eq!(fetch.complete(&second, Err(Trouble::Corrupt)), None);
    assert!(!fetch.is_followed(0) && fetch.is_followed(1));
    assert_eq!(fetch.announced(), (vec![(0, 1)], vec![(2, 1)]));
    let (want, failed) = fetch.elsewhere().unwrap();
    assert_eq!((want.intervals(), failed), (vec![(2, 1)], vec![failure(2, 5, true)]));
    fetch.leave_parent(1);
    assert_eq!(fetch.room(1, Duration::ZERO), FetchRoom::Ended);
    fetch.stop();
    assert!(fetch.elsewhere().is_none());
}
