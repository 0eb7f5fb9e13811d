//! Adoption by a control plane without its state: it continues from the maps of living members, and assigns no slots
//! before.

use crate::support;

use kvplane_cluster::{ClusterConfig, Input, MemberState, Offer, Rejection, Reply};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member, OwnerTable};
use support::{Driver, MS, config, member};

const STATE: u64 = 77;
/// Time that members have to offer their maps to a control plane without a state.
const WAIT_NS: u64 = 500 * MS;

fn adopting() -> ClusterConfig {
    ClusterConfig { adoption_wait_ns: Some(WAIT_NS), ..config() }
}

/// Returns a cluster whose nodes own everything, with the map that they follow.
fn cluster_of(nodes: u64) -> Driver {
    let mut driver = Driver::new(config());
    for node in 1..=nodes {
        driver.admit(node, 1);
    }
    driver
}

fn offer_of(map: &ClusterMap, node: u64) -> Offer {
    let followed = map.member(NodeId(node)).expect("a member").clone();
    let member = Member { weight: 10, ..followed };
    Offer { state: STATE, map: map.clone(), member, capacity_bytes: 9, version: "v".to_owned(), devices: None }
}

fn offer(driver: &mut Driver, offer: Offer) -> Result<Reply, Rejection> {
    driver.handle(Input::Offer { offer: Box::new(offer) })
}

fn in_map(driver: &Driver) -> Vec<u64> {
    driver.in_map().into_iter().map(|(node, _)| node).collect()
}

/// Returns the owners of all slots, as node ids.
fn owners(map: &ClusterMap) -> Vec<u64> {
    let table = OwnerTable::compute(map);
    let first = |slot| map.members[usize::from(table.owners(kvplane_proto::ids::Slot(slot))[0].member)].node.0;
    (0..16_384).map(first).collect()
}

#[test]
fn map_offered_by_all_members_is_adopted_at_once_without_migration() {
    let before = cluster_of(3).published;
    let mut driver = Driver::new(adopting());
    for node in 1..=3 {
        assert!(matches!(driver.beat(node, 1), Err(Rejection::Unknown { .. })), "an unknown member");
        assert_eq!(driver.adopted, None);
        assert_eq!(offer(&mut driver, offer_of(&before, node)), Ok(Reply::Offered));
    }
    assert_eq!(driver.adopted, Some(STATE));
    let after = driver.published.clone();
    assert!(after.epoch.0 > before.epoch.0 + 1, "above any epoch of the lost state: {}", after.epoch);
    assert_eq!((&after.members, &after.former), (&before.members, &before.former));
    assert!(owners(&after) == owners(&before), "slots moved");
    for node in 1..=3 {
        assert!(matches!(driver.beat(node, 1), Ok(Reply::Alive { .. })), "it continues in its incarnation");
    }
    // The adoption is durable, and late offers change nothing.
    let mut driver = driver.restart();
    assert_eq!(driver.published.members, after.members);
    assert_eq!(offer(&mut driver, offer_of(&before, 2)), Ok(Reply::Offered));
    assert_eq!(driver.published.epoch, after.epoch);
    // Members join as usual.
    driver.admit(4, 1);
    assert!(driver.published.member(NodeId(4)).is_some());
}

#[test]
fn joins_are_rejected_while_members_may_offer() {
    let mut driver = Driver::new(adopting());
    let refused = driver.join(member(9, 1, 7900)).expect_err("too soon");
    assert!(
        matches!(refused, Rejection::Adopting { retry_after_ns } if retry_after_ns > 0 && retry_after_ns <= 100 * MS)
    );
    let devices = Input::AttachDevices { node: NodeId(9), incarnation: Incarnation(1), devices: 5 };
    assert!(matches!(driver.handle(devices), Err(Rejection::Adopting { .. })));
    driver.sleep(WAIT_NS);
    driver.admit(9, 1);
    assert_eq!((driver.published.epoch.0, in_map(&driver)), (1, vec![9]), "it is a new cluster");
    // From then on, a map of another state is of no use.
    let other = cluster_of(2).published;
    assert!(matches!(offer(&mut driver, offer_of(&other, 1)), Err(Rejection::OfferRefused { .. })));
    // Offers are also rejected without a configured wait, and after a restart with a map.
    assert!(matches!(offer(&mut cluster_of(1), offer_of(&other, 2)), Err(Rejection::OfferRefused { .. })));
}

#[test]
fn clients_wait_for_the_map_while_members_may_offer_theirs() {
    // Members offer: clients wait until a map is adopted.
    let before = cluster_of(2).published;
    let mut driver = Driver::new(adopting());
    assert!(driver.cluster.awaits_offers());
    offer(&mut driver, offer_of(&before, 1)).expect("taken");
    driver.sleep(WAIT_NS - 1);
    assert!(driver.cluster.awaits_offers(), "node 2 may offer a newer one");
    offer(&mut driver, offer_of(&before, 2)).expect("taken");
    assert_eq!((driver.adopted, driver.cluster.awaits_offers()), (Some(STATE), false));
    // No member offers: clients wait until the wait is over, without a node that joins. A later offer is adopted
    // nevertheless.
    let mut driver = Driver::new(adopting());
    driver.sleep(WAIT_NS - 1);
    assert!(driver.cluster.awaits_offers());
    driver.sleep(1);
    assert!(!driver.cluster.awaits_offers() && driver.cluster.poll_timeout().is_none());
    for node in 1..=2 {
        offer(&mut driver, offer_of(&before, node)).expect("taken");
    }
    assert_eq!(driver.adopted, Some(STATE));
    // A new cluster, and one that has its state, keep no client waiting.
    let mut none = Driver::new(ClusterConfig { adoption_wait_ns: Some(0), ..config() });
    assert!(!none.cluster.awaits_offers() && !Driver::new(config()).cluster.awaits_offers());
    none.admit(1, 1);
    assert!(!driver.restart().cluster.awaits_offers());
}

#[test]
fn newest_map_is_adopted_and_silent_members_have_their_grace() {
    let mut lost = cluster_of(2);
    let older = lost.published.clone();
    lost.admit(3, 1);
    let newer = lost.published.clone();
    let mut driver = Driver::new(adopting());
    offer(&mut driver, offer_of(&older, 1)).expect("taken");
    offer(&mut driver, offer_of(&newer, 2)).expect("taken");
    assert_eq!(driver.adopted, None, "node 3 may still offer");
    assert!(matches!(driver.join(member(9, 1, 7900)), Err(Rejection::Adopting { .. })), "offers are adopted");
    driver.sleep(600 * MS);
    assert_eq!((driver.adopted, in_map(&driver)), (Some(STATE), vec![1, 2, 3]));
    assert!(owners(&driver.published) == owners(&newer), "slots moved");
    // A silent member is expelled after its grace.
    for _ in 0..20 {
        driver.sleep(100 * MS);
        driver.beat(1, 1).expect("alive");
        driver.beat(2, 1).expect("alive");
    }
    assert_eq!(in_map(&driver), [1, 2]);
    // It joins again as usual.
    driver.admit(3, 2);
}

#[test]
fn restart_of_a_member_during_adoption_is_accepted() {
    let before = cluster_of(2).published;
    let mut driver = Driver::new(adopting());
    offer(&mut driver, offer_of(&before, 1)).expect("taken");
    assert!(matches!(driver.join(member(2, 2, 7200)), Err(Rejection::Adopting { .. })));
    assert_eq!(driver.adopted, Some(STATE), "no other member can offer a map");
    driver.join(member(2, 2, 7200)).expect("it restarts");
    driver.beat(2, 2).expect("alive");
    assert!(owners(&driver.published) == owners(&before), "it keeps its slots");
    assert!(matches!(driver.beat(2, 1), Err(Rejection::StaleIncarnation { .. })));
}

/// A member whose reply was lost requests to join, after other members have offered the map that contains it.
#[test]
fn member_of_an_adopted_map_may_join_again_in_its_incarnation() {
    let before = cluster_of(2).published;
    let mut driver = Driver::new(adopting());
    let again = || member(2, 1, before.member(NodeId(2)).expect("a member").shards[0].tcp.port());
    offer(&mut driver, offer_of(&before, 1)).expect("taken");
    assert!(matches!(driver.join(again()), Err(Rejection::Adopting { .. })));
    assert_eq!(driver.adopted, Some(STATE));
    for _ in 0..2 {
        assert!(matches!(driver.join(again()), Ok(Reply::Joined { .. })), "it is the incarnation that the map names");
    }
    driver.beat(2, 1).expect("alive");
    let elsewhere = driver.join(member(2, 1, 7999));
    assert!(matches!(elsewhere, Err(Rejection::IncarnationReused { .. })), "{elsewhere:?}");
    assert!(owners(&driver.published) == owners(&before), "nothing moves");
    // The offered devices are durable.
    let mut driver = driver.restart();
    assert!(matches!(driver.join(again()), Ok(Reply::Joined { .. })));
}

#[test]
fn invalid_offers_are_rejected() {
    let before = cluster_of(2).published;
    let mut driver = Driver::new(adopting());
    let good = offer_of(&before, 1);
    let other_incarnation = Member { incarnation: Incarnation(5), ..good.member.clone() };
    let stranger = member(8, 1, 7800);
    let late = ClusterMap { epoch: Epoch(u64::MAX / 2), ..before.clone() };
    let disordered = ClusterMap { members: before.members.iter().rev().cloned().collect(), ..before.clone() };
    for bad in [
        Offer { member: other_incarnation, ..good.clone() },
        Offer { member: stranger, ..good.clone() },
        Offer { map: late, ..good.clone() },
        Offer { map: disordered, ..good.clone() },
        Offer { state: 0, ..good.clone() },
        Offer { version: "v".repeat(1000), ..good.clone() },
    ] {
        assert!(offer(&mut driver, bad.clone()).is_err(), "{bad:?}");
    }
    driver.sleep(5000 * MS);
    assert_eq!((driver.adopted, driver.published.epoch.0), (None, 0));
}

#[test]
fn state_with_the_most_followers_is_adopted() {
    let before = cluster_of(3).published;
    let mut driver = Driver::new(adopting());
    // A member that was away since an earlier loss follows a map of a greater epoch, of another state.
    let mut elsewhere = offer_of(&ClusterMap { epoch: Epoch(9_000), ..cluster_of(1).published }, 1);
    elsewhere.state = STATE + 1;
    offer(&mut driver, elsewhere).expect("taken");
    // It was the only member of its map, so that no further offer of that state can come.
    assert_eq!(driver.adopted, Some(STATE + 1));
    let mut driver = Driver::new(adopting());
    for node in [2, 3] {
        offer(&mut driver, offer_of(&before, node)).expect("taken");
    }
    let mut elsewhere = offer_of(&ClusterMap { epoch: Epoch(9_000), ..before.clone() }, 1);
    elsewhere.state = STATE + 1;
    offer(&mut driver, elsewhere).expect("taken");
    assert_eq!((driver.adopted, in_map(&driver)), (Some(STATE), vec![1, 2, 3]));
}

#[test]
fn offered_devices_are_adopted() {
    let before = cluster_of(1).published;
    let mut driver = Driver::new(adopting());
    offer(&mut driver, Offer { devices: Some((5, Epoch(1))), ..offer_of(&before, 1) }).expect("taken");
    assert_eq!(driver.adopted, Some(STATE));
    assert_eq!(driver.cluster.snapshot().len(), driver.store.len());
    let devices = Input::AttachDevices { node: NodeId(1), incarnation: Incarnation(2), devices: 5 };
    assert_eq!(driver.handle(devices), Ok(Reply::DevicesKept { since: Epoch(1) }), "records on them are valid");
    let state = |driver: &Driver| driver.cluster.members().map(|view| view.state).collect::<Vec<_>>();
    assert_eq!(state(&driver), [MemberState::Active]);
}
