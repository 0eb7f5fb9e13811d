//! Scenarios: join, restart, silence, departure, an id that two nodes share by mistake, and an absent control plane.

use crate::support;

use kvplane_cluster::{
    ClientId, Cluster, ClusterConfig, Input, MemberState, Quotas, Record, Rejection, Reply, SegmentOwner,
    ShardIncarnation, StartError, TenantChange, TenantFigures,
};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use support::{Driver, MS, config, member, owned_by, records, segment};

fn stale(node: u64, given: u64, known: u64) -> Result<Reply, Rejection> {
    let (given, known) = (Incarnation(given), Incarnation(known));
    Err(Rejection::StaleIncarnation { node: NodeId(node), given, known })
}

fn ended(node: u64, incarnation: u64, state: MemberState) -> Result<Reply, Rejection> {
    Err(Rejection::Ended { node: NodeId(node), incarnation: Incarnation(incarnation), state })
}

fn leave(driver: &mut Driver, node: u64, incarnation: u64) -> Result<Reply, Rejection> {
    driver.handle(Input::Leave { node: NodeId(node), incarnation: Incarnation(incarnation) })
}

#[test]
fn the_first_heartbeat_brings_a_member_into_the_map() {
    let mut driver = Driver::new(config());
    let joined = driver.join(member(1, 5, 7000)).unwrap();
    assert!(matches!(joined, Reply::Joined { epoch: Epoch(0), heartbeat_interval_ns: ns, .. } if ns == 100 * MS));
    assert_eq!((driver.in_map(), driver.state(1)), (vec![], Some(MemberState::Joining)));
    assert_eq!(driver.beat(1, 5), Ok(Reply::Alive { epoch: Epoch(1), since: Epoch(1) }));
    assert_eq!(driver.in_map(), [(1, 5)]);
    assert_eq!(driver.beat(1, 5), Ok(Reply::Alive { epoch: Epoch(1), since: Epoch(1) }), "no change, no epoch");
}

#[test]
fn join_without_a_heartbeat_expires() {
    let mut driver = Driver::new(config());
    driver.join(member(1, 5, 7000)).unwrap();
    driver.sleep(600 * MS);
    assert_eq!((driver.state(1), driver.published.epoch), (Some(MemberState::Dead), Epoch(0)));
}

#[test]
fn silence_makes_suspect_then_dead() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.admit(2, 5);
    driver.sleep(299 * MS);
    driver.beat(2, 5).unwrap();
    assert_eq!(driver.state(1), Some(MemberState::Active));
    driver.sleep(MS);
    assert_eq!(driver.state(1), Some(MemberState::Suspect));
    assert_eq!(driver.in_map(), [(1, 5), (2, 5)], "a suspect keeps its slots");
    driver.sleep(290 * MS);
    driver.beat(2, 5).unwrap();
    driver.sleep(10 * MS);
    assert_eq!((driver.state(1), driver.in_map()), (Some(MemberState::Dead), vec![(2, 5)]));
    assert_eq!((driver.lost.as_slice(), driver.published.epoch), (&[(1, 5)][..], Epoch(3)));
    assert_eq!(driver.beat(1, 5), ended(1, 5, MemberState::Dead));
    assert_eq!(driver.join(member(1, 5, 7000)), ended(1, 5, MemberState::Dead), "its slots passed to others");
    driver.admit(1, 6);
    assert_eq!(driver.in_map(), [(1, 6), (2, 5)]);
}

#[test]
fn heartbeat_of_a_suspect_makes_no_epoch() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.sleep(400 * MS);
    assert_eq!(driver.state(1), Some(MemberState::Suspect));
    assert_eq!(driver.beat(1, 5), Ok(Reply::Alive { epoch: Epoch(1), since: Epoch(1) }));
    assert_eq!(driver.state(1), Some(MemberState::Active));
    driver.sleep(400 * MS);
    assert_eq!(driver.state(1), Some(MemberState::Suspect), "silence counts from now");
}

#[test]
fn many_deaths_at_once_make_one_epoch() {
    let mut driver = Driver::new(config());
    (1..=20).for_each(|node| driver.admit(node, 1));
    driver.sleep(600 * MS);
    assert_eq!((driver.in_map(), driver.lost.len(), driver.published.epoch), (vec![], 20, Epoch(21)));
}

#[test]
fn a_restart_in_place_is_one_epoch_and_makes_the_old_incarnation_stale() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.join(member(1, 6, 7000)).unwrap();
    assert_eq!((driver.in_map(), driver.published.epoch), (vec![(1, 6)], Epoch(2)));
    assert_eq!(driver.beat(1, 5), stale(1, 5, 6));
    assert_eq!(driver.join(member(1, 5, 7000)), stale(1, 5, 6));
    assert_eq!(leave(&mut driver, 1, 5), stale(1, 5, 6));
    let counters = driver.cluster.counters();
    assert_eq!((counters.stale, counters.rejections, counters.joins), (3, 3, 2));
}

#[test]
fn the_same_join_twice_is_one_join() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    assert!(matches!(driver.join(member(1, 5, 7000)), Ok(Reply::Joined { epoch: Epoch(1), .. })));
    let (node, incarnation) = (NodeId(1), Incarnation(5));
    assert_eq!(driver.join(member(1, 5, 7001)), Err(Rejection::IncarnationReused { node, incarnation }));
    assert_eq!(driver.cluster.counters().joins, 1);
}

#[test]
fn second_live_node_with_the_same_id_is_rejected() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.sleep(100 * MS);
    let refused = driver.join(member(1, 9, 8000)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "node id 1 is in use by a live node on host \"boot-1\" at 192.0.2.1:7000: choose another id, or try again in \
         200 ms if that one was stopped"
    );
    driver.beat(1, 5).unwrap();
    driver.sleep(299 * MS);
    assert!(driver.join(member(1, 9, 8000)).is_err(), "the other one continues to send heartbeats");
    driver.sleep(MS);
    driver.join(member(1, 9, 8000)).unwrap();
    assert_eq!(driver.in_map(), [(1, 9)]);
}

#[test]
fn unknown_member_must_join() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    let unknown =
        |node, incarnation| Err(Rejection::Unknown { node: NodeId(node), incarnation: Incarnation(incarnation) });
    assert_eq!(driver.beat(2, 5), unknown(2, 5));
    assert_eq!(driver.beat(1, 6), unknown(1, 6), "a later incarnation must join too");
    assert_eq!(leave(&mut driver, 2, 5), unknown(2, 5));
}

#[test]
fn leave_takes_effect_at_once_and_is_idempotent() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    assert_eq!(leave(&mut driver, 1, 5), Ok(Reply::Left { epoch: Epoch(2) }));
    assert_eq!(leave(&mut driver, 1, 5), Ok(Reply::Left { epoch: Epoch(2) }));
    assert_eq!((driver.in_map(), driver.lost.len(), driver.cluster.counters().leaves), (vec![], 0, 1));
    assert_eq!(driver.beat(1, 5), ended(1, 5, MemberState::Left));
}

#[test]
fn dead_member_has_no_load_and_can_be_removed() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.sleep(600 * MS);
    let load = |driver: &Driver| driver.cluster.members().next().and_then(|view| view.load);
    assert_eq!((driver.state(1), load(&driver)), (Some(MemberState::Dead), None));
    leave(&mut driver, 1, 5).unwrap();
    assert_eq!((driver.state(1), driver.lost.len()), (Some(MemberState::Left), 1));
    assert_eq!(driver.beat(1, 5), ended(1, 5, MemberState::Left));
    driver.admit(1, 6);
    assert_eq!(driver.in_map(), [(1, 6)]);
}

#[test]
fn a_restarted_control_plane_keeps_members_and_gives_them_grace() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.admit(2, 5);
    driver.sleep(500 * MS);
    let before = driver.published.clone();
    let mut driver = driver.restart();
    assert_eq!(driver.published, before);
    driver.sleep(1000 * MS);
    driver.beat(1, 5).unwrap();
    driver.sleep(299 * MS);
    assert_eq!(driver.state(2), Some(MemberState::Active), "silence counts from the end of the grace");
    driver.sleep(MS);
    assert_eq!(driver.state(2), Some(MemberState::Suspect));
    driver.beat(1, 5).unwrap();
    driver.sleep(300 * MS);
    assert_eq!(driver.in_map(), [(1, 5)]);
}

#[test]
fn after_a_restart_of_all_a_node_may_come_back_on_another_port() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    let mut driver = driver.restart();
    driver.join(member(1, 6, 8000)).unwrap();
    assert_eq!(driver.in_map(), [(1, 6)]);
}

#[test]
fn stopped_control_plane_expels_no_member() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    driver.now_ns += 3_600_000 * MS;
    driver.handle(Input::Tick).unwrap();
    assert_eq!((driver.state(1), driver.cluster.counters().late_calls), (Some(MemberState::Active), 1));
    driver.beat(1, 5).unwrap();
    driver.sleep(600 * MS);
    assert_eq!(driver.state(1), Some(MemberState::Dead), "from then on silence counts");
}

#[test]
fn other_replicas_after_a_restart_make_an_epoch() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    let driver = Driver::start(ClusterConfig { replicas: 2, ..config() }, driver.store, driver.now_ns);
    assert_eq!((driver.published.epoch, driver.published.replicas), (Epoch(2), 2));
}

#[test]
fn ended_incarnations_are_forgotten_beyond_their_limit() {
    let mut config = config();
    config.limits.ended_incarnations = 2;
    let mut driver = Driver::new(config);
    for node in [3, 1, 2] {
        driver.admit(node, 5);
        leave(&mut driver, node, 5).unwrap();
    }
    assert_eq!((driver.state(3), driver.state(1), driver.store.len()), (None, Some(MemberState::Left), 4));
}

#[test]
fn a_full_cluster_refuses_newcomers_but_not_restarts() {
    let mut config = config();
    config.limits.members = 1;
    let mut driver = Driver::new(config);
    driver.admit(1, 5);
    assert_eq!(driver.join(member(2, 5, 7000)), Err(Rejection::TooManyMembers { limit: 1 }));
    driver.join(member(1, 6, 7000)).unwrap();
    leave(&mut driver, 1, 6).unwrap();
    driver.admit(2, 5);
}

#[test]
fn segments_of_a_member_go_with_its_incarnation() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    let register = |driver: &mut Driver, name, incarnation| {
        driver.handle(Input::RegisterSegment { segment: segment(name, owned_by(1, incarnation), 0) })
    };
    register(&mut driver, "a", 5).unwrap();
    register(&mut driver, "b", 5).unwrap();
    assert_eq!(register(&mut driver, "c", 4), stale(1, 4, 5));
    let mut driver = driver.restart();
    assert_eq!(driver.cluster.segments().count(), 2);
    let page = driver.handle(Input::ListSegments { after: None, limit: 1 });
    assert!(matches!(page, Ok(Reply::Segments { segments, more: true }) if segments[0].name == "a"));
    let page = driver.handle(Input::ListSegments { after: Some("a".to_owned()), limit: 9 });
    assert!(matches!(page, Ok(Reply::Segments { segments, more: false }) if segments.len() == 1));
    let intruder = SegmentOwner::Client { client: ClientId(1) };
    let taken = driver.handle(Input::UnregisterSegment { owner: intruder, name: "a".to_owned() }).unwrap_err();
    assert_eq!(taken.to_string(), "segment \"a\" belongs to node 1 (incarnation 5): choose another name");
    driver.handle(Input::UnregisterSegment { owner: owned_by(1, 5), name: "a".to_owned() }).unwrap();
    assert!(driver.cluster.segment("a").is_none() && driver.cluster.segment("b").is_some());
    driver.join(member(1, 6, 7000)).unwrap();
    assert_eq!(driver.cluster.segments().count(), 0);
    register(&mut driver, "b", 6).unwrap();
    driver.sleep(600 * MS);
    assert_eq!(driver.cluster.segments().count(), 0);
    assert_eq!(register(&mut driver, "b", 6), ended(1, 6, MemberState::Dead));
}

#[test]
fn stored_segments_of_an_incarnation_that_is_over_are_dropped_at_the_start() {
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    for (name, incarnation) in [("old", 4), ("new", 5)] {
        let record = Record::Segment(segment(name, owned_by(1, incarnation), 0));
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        driver.store.insert(record.key().to_bytes(), bytes);
    }
    let driver = driver.restart();
    assert!(driver.cluster.segment("old").is_none() && driver.cluster.segment("new").is_some());
}

#[test]
fn segments_of_a_client_live_by_its_heartbeats() {
    let mut driver = Driver::new(config());
    let client = ClientId(0xc1);
    let owner = SegmentOwner::Client { client };
    driver.handle(Input::RegisterSegment { segment: segment("x", owner, 500 * MS) }).unwrap();
    driver.sleep(400 * MS);
    assert_eq!(driver.handle(Input::ClientHeartbeat { client }), Ok(Reply::Renewed { segments: 1 }));
    driver.sleep(499 * MS);
    assert!(driver.cluster.segment("x").is_some());
    driver.sleep(MS);
    assert!(driver.cluster.segment("x").is_none());
    assert_eq!(driver.handle(Input::ClientHeartbeat { client }), Err(Rejection::UnknownClient { client }));
    let endless = Input::RegisterSegment { segment: segment("x", owner, 5001 * MS) };
    let (least_ns, most_ns) = (1, 5000 * MS);
    assert_eq!(driver.handle(endless), Err(Rejection::SegmentTtl { ttl_ns: 5001 * MS, least_ns, most_ns }));
}

#[test]
fn the_catalog_is_bounded() {
    let mut config = config();
    (config.limits.segments, config.limits.segments_per_owner) = (3, 2);
    let mut driver = Driver::new(config);
    let mut register = |client, name: &str| {
        let owner = SegmentOwner::Client { client: ClientId(client) };
        driver.handle(Input::RegisterSegment { segment: segment(name, owner, MS) })
    };
    register(1, "a").unwrap();
    register(1, "b").unwrap();
    register(1, "b").unwrap();
    assert_eq!(register(1, "c"), Err(Rejection::TooManySegments { limit: 2 }));
    register(2, "c").unwrap();
    assert_eq!(register(2, "d"), Err(Rejection::TooManySegments { limit: 3 }));
    assert_eq!(register(3, ""), Err(Rejection::SegmentName { bytes: 0 }));
    assert_eq!(register(3, &"n".repeat(256)), Err(Rejection::SegmentName { bytes: 256 }));
}

#[test]
fn contradictions_at_the_start_are_named() {
    let refuse = |config: ClusterConfig, records| Cluster::new(config, records, 0).err().unwrap();
    let hasty = ClusterConfig { heartbeat_deadline_ns: 299 * MS, suspect_after_ns: 200 * MS, ..config() };
    assert_eq!(
        refuse(hasty, vec![]).to_string(),
        "settings: heartbeat_deadline_ns is 299000000; with the other settings it must be 300000000 to \
         9223372036854775807"
    );
    let mut driver = Driver::new(config());
    driver.admit(1, 5);
    let stored = records(&driver.store);
    assert!(matches!(
        refuse(ClusterConfig { cluster: "other".to_owned(), ..config() }, stored.clone()),
        StartError::OtherCluster { stored, .. } if stored == "test"
    ));
    // The member, and the epoch since which slots have their owners.
    assert_eq!(refuse(config(), stored[1..].to_vec()), StartError::NoHeader { records: 2 });
}

#[test]
#[should_panic(expected = "outputs were not taken")]
fn a_driver_that_skips_outputs_is_stopped() {
    let mut cluster = Cluster::new(config(), [], 0).unwrap();
    let _ = cluster.handle(Input::Tick, 0);
}

#[test]
fn devices_count_only_while_every_incarnation_has_them() {
    let mut driver = Driver::new(config());
    let attach = |driver: &mut Driver, incarnation: u64, devices: u128| {
        let input = Input::AttachDevices { node: NodeId(1), incarnation: Incarnation(incarnation), devices };
        match driver.handle(input) {
            Ok(Reply::DevicesKept { since }) => since,
            other => panic!("{other:?}"),
        }
    };
    // The first incarnation with devices: whether older records on them are valid is unknown.
    let since = attach(&mut driver, 5, 7);
    driver.admit(1, 5);
    assert!(since <= driver.cluster.map().epoch, "records of this incarnation are of a valid map");
    let noted = driver.cluster.map().epoch;
    // Incarnations with the same devices, among them one that never joined, and a killed control plane in between.
    assert_eq!(attach(&mut driver, 6, 7), since);
    let mut driver = Driver::start(config(), driver.store, driver.now_ns);
    assert_eq!(attach(&mut driver, 7, 7), since);
    driver.admit(1, 7);
    assert!(noted >= since);
    // An incarnation that reports no devices: from then on the devices count as new.
    driver.admit(1, 8);
    let noted = driver.cluster.map().epoch;
    let since = attach(&mut driver, 9, 7);
    assert!(since > noted, "{since} after {noted}");
    driver.admit(1, 9);
    let noted = driver.cluster.map().epoch;
    assert!(since <= noted);
    // Other devices count as new too, and so do the first ones after them.
    let since = attach(&mut driver, 10, 8);
    assert!(since > noted);
    driver.admit(1, 10);
    let noted = driver.cluster.map().epoch;
    assert!(attach(&mut driver, 11, 7) > noted);
    // The report of an ended incarnation is rejected.
    let late = Input::AttachDevices { node: NodeId(1), incarnation: Incarnation(9), devices: 8 };
    assert!(matches!(driver.handle(late), Err(Rejection::StaleIncarnation { .. })));
}

#[test]
fn the_use_of_members_that_are_dead_or_have_not_reported_is_unknown() {
    let mut driver = Driver::new(config());
    for member in [member(1, 1, 7000), member(2, 1, 7001)] {
        let node = member.node.0;
        driver.join(member).unwrap();
        driver.beat(node, 1).unwrap();
    }
    let mut quotas = Quotas::default();
    let report = |quotas: &mut Quotas, node: u64, incarnation: u64| {
        quotas.sync(ShardIncarnation { node, incarnation, shard: 0 }, 100, Vec::new(), [].into_iter(), true);
    };
    let unknown = |quotas: &Quotas, driver: &Driver| -> Vec<u64> {
        quotas.unreported(&driver.cluster).into_iter().map(|node| node.0).collect()
    };
    assert_eq!(unknown(&quotas, &driver), [1, 2], "the control plane has just started");
    report(&mut quotas, 1, 1);
    assert_eq!(unknown(&quotas, &driver), [2]);
    report(&mut quotas, 2, 1);
    assert_eq!(unknown(&quotas, &driver), []);
    driver.join(member(1, 2, 7000)).ok();
    while driver.state(2) != Some(MemberState::Dead) {
        driver.sleep(100 * MS);
    }
    report(&mut quotas, 1, 2);
    assert!(unknown(&quotas, &driver).contains(&2), "it may come back with records");
}

#[test]
fn reports_from_before_a_tenant_was_removed_do_not_say_that_it_has_no_records() {
    let mut cluster = Cluster::new(config(), [], 0).unwrap();
    let handle = |cluster: &mut Cluster, input: Input| {
        while cluster.poll_output().is_some() {}
        cluster.handle(input, 0).unwrap();
        while cluster.poll_output().is_some() {}
    };
    for member in [member(1, 1, 7000), member(2, 1, 7001)] {
        handle(&mut cluster, Input::Join { member, capacity_bytes: 1 << 30, version: String::new() });
    }
    let (name, number) = ("acme".to_owned(), tenant_number(b"acme"));
    let set = Input::SetTenant { change: TenantChange { name: name.clone(), ..TenantChange::default() } };
    let remove = Input::RemoveTenant { name: name.clone() };
    let mut quotas = Quotas::of_ssds();
    // Returns the lease that the shard of a node gets.
    let report = |quotas: &mut Quotas, cluster: &Cluster, node: u64, lease_bytes: Option<u64>| {
        let who = ShardIncarnation { node, incarnation: 1, shard: 0 };
        let uses = vec![TenantFigures { number, lease_bytes, ..TenantFigures::default() }];
        let leases = quotas.sync_ssd(who, 1 << 30, uses, cluster);
        leases.into_iter().find(|lease| lease.number == number).map(|lease| lease.bytes)
    };
    handle(&mut cluster, set.clone());
    handle(&mut cluster, remove.clone());
    for node in [1, 2] {
        assert_eq!(report(&mut quotas, &cluster, node, None), Some(Some(0)));
    }
    assert!(quotas.freed_tenants(&cluster).is_empty(), "they did not have these leases");
    // Both have evicted its records, and the first is no longer limited when the tenant is removed again.
    for node in [1, 2] {
        report(&mut quotas, &cluster, node, Some(0));
    }
    assert_eq!(quotas.freed_tenants(&cluster), std::slice::from_ref(&name));
    handle(&mut cluster, set);
    assert_eq!(report(&mut quotas, &cluster, 1, Some(0)), None);
    handle(&mut cluster, remove);
    assert!(quotas.freed_tenants(&cluster).is_empty());
    // The second was answered nothing else meanwhile.
    report(&mut quotas, &cluster, 1, None);
    report(&mut quotas, &cluster, 1, Some(0));
    assert_eq!(quotas.freed_tenants(&cluster), [name]);
}
