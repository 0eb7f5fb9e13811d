//! Random histories. The driver of `support` checks on every call that epochs grow by one, that a call publishes at
//! most one, that a map is durable before it is published, and that the store alone restores the same state; this
//! module generates the histories, and checks the invariants over a restart at any point.

use crate::support;

use kvplane_cluster::{ClientId, Input, MemberState, SegmentOwner};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member};
use proptest::prelude::*;
use support::{Driver, MS, config, member, owned_by, segment};

#[derive(Clone, Copy, Debug)]
enum Step {
    Join {
        node: u64,
        incarnation: u64,
        port: u16,
    },
    Beat {
        node: u64,
        incarnation: u64,
    },
    Settled {
        node: u64,
        incarnation: u64,
        epoch: u64,
    },
    Leave {
        node: u64,
        incarnation: u64,
    },
    Drain {
        node: u64,
        incarnation: Option<u64>,
    },
    Undrain {
        node: u64,
        incarnation: Option<u64>,
    },
    Register {
        owner: SegmentOwner,
        name: u8,
        ttl_ms: u64,
    },
    Unregister {
        owner: SegmentOwner,
        name: u8,
    },
    ClientBeat {
        client: u64,
    },
    Sleep {
        ms: u64,
    },
    /// Time jumps without a tick: the driver was stopped.
    Stall {
        ms: u64,
    },
    Restart,
}

fn any_owner() -> impl Strategy<Value = SegmentOwner> {
    prop_oneof![
        (0u64..6, 1u64..4).prop_map(|(node, incarnation)| owned_by(node, incarnation)),
        (0u64..3).prop_map(|client| SegmentOwner::Client { client: ClientId(client) }),
    ]
}

/// Incarnations of a node, the last two of which are of one line.
fn any_incarnation() -> impl Strategy<Value = u64> {
    const LINE: u64 = 1 << 20;
    prop_oneof![3 => 1u64..4, 1 => LINE..LINE + 2]
}

fn any_step() -> impl Strategy<Value = Step> {
    let incarnation = || (0u64..6, any_incarnation());
    prop_oneof![
        6 => (incarnation(), 7000u16..7002)
            .prop_map(|((node, incarnation), port)| Step::Join { node, incarnation, port }),
        12 => incarnation().prop_map(|(node, incarnation)| Step::Beat { node, incarnation }),
        8 => (incarnation(), 0u64..12)
            .prop_map(|((node, incarnation), epoch)| Step::Settled { node, incarnation, epoch }),
        2 => incarnation().prop_map(|(node, incarnation)| Step::Leave { node, incarnation }),
        2 => (0u64..6, prop::option::of(any_incarnation()))
            .prop_map(|(node, incarnation)| Step::Drain { node, incarnation }),
        2 => (0u64..6, prop::option::of(any_incarnation()))
            .prop_map(|(node, incarnation)| Step::Undrain { node, incarnation }),
        4 => (any_owner(), 0u8..8, 0u64..3000).prop_map(|(owner, name, ttl_ms)| Step::Register { owner, name, ttl_ms }),
        2 => (any_owner(), 0u8..8).prop_map(|(owner, name)| Step::Unregister { owner, name }),
        2 => (0u64..3).prop_map(|client| Step::ClientBeat { client }),
        6 => (0u64..250).prop_map(|ms| Step::Sleep { ms }),
        1 => prop_oneof![0u64..2000, Just(u64::MAX / MS)].prop_map(|ms| Step::Stall { ms }),
        1 => Just(Step::Restart),
    ]
}

/// Returns the incarnation of a node that is draining.
fn draining(driver: &Driver, node: u64) -> Option<Incarnation> {
    let of = driver.cluster.members().find(|view| view.member.node.0 == node);
    of.filter(|view| view.state == MemberState::Draining).map(|view| view.member.incarnation)
}

fn apply(mut driver: Driver, step: Step) -> Driver {
    // Rejections are part of the history: the driver checks that they change nothing durable.
    let _ = match step {
        Step::Join { node, incarnation, port } => {
            let draining = draining(&driver, node);
            let joined = driver.join(member(node, incarnation, port));
            // A drain ends by a restart, and goes on by a handover.
            let goes_on = |former: Incarnation| joined.is_err() || Incarnation(incarnation).continues(former);
            assert_eq!(
                draining.is_some_and(goes_on),
                self::draining(&driver, node).is_some(),
                "{step:?}: {draining:?}"
            );
            joined
        }
        Step::Beat { node, incarnation } => driver.beat(node, incarnation),
        Step::Leave { node, incarnation } => {
            driver.handle(Input::Leave { node: NodeId(node), incarnation: Incarnation(incarnation) })
        }
        Step::Settled { node, incarnation, epoch } => driver.handle(Input::Settled {
            node: NodeId(node),
            incarnation: Incarnation(incarnation),
            epoch: Epoch(epoch),
        }),
        Step::Drain { node, incarnation } => {
            driver.handle(Input::Drain { node: NodeId(node), incarnation: incarnation.map(Incarnation) })
        }
        Step::Undrain { node, incarnation } => {
            driver.handle(Input::Undrain { node: NodeId(node), incarnation: incarnation.map(Incarnation) })
        }
        Step::Register { owner, name, ttl_ms } => {
            let ttl_ns = if matches!(owner, SegmentOwner::Node { .. }) { 0 } else { ttl_ms * MS };
            driver.handle(Input::RegisterSegment { segment: segment(&format!("s{name}"), owner, ttl_ns) })
        }
        Step::Unregister { owner, name } => driver.handle(Input::UnregisterSegment { owner, name: format!("s{name}") }),
        Step::ClientBeat { client } => driver.handle(Input::ClientHeartbeat { client: ClientId(client) }),
        Step::Sleep { ms } => {
            driver.sleep(ms * MS);
            return driver;
        }
        Step::Stall { ms } => {
            driver.now_ns = driver.now_ns.saturating_add(ms * MS);
            return driver;
        }
        Step::Restart => return driver.restart(),
    };
    driver
}

fn check(driver: &Driver) {
    let views: Vec<_> = driver.cluster.members().collect();
    let in_map: Vec<_> = views
        .iter()
        .filter(|view| view.state.in_map())
        .map(|view| match view.shared {
            true => view.member.clone(),
            // The member is in the map, and owns nothing.
            false => Member { weight: 0, ..view.member.clone() },
        })
        .collect();
    assert_eq!(driver.published.members, in_map);
    check_former(&driver.published);
    for segment in driver.cluster.segments() {
        if let SegmentOwner::Node { node, incarnation } = segment.owner {
            let owner = views.iter().find(|view| view.member.node == node).expect("the owner is known");
            assert!(owner.state.is_live() && owner.member.incarnation == incarnation, "{segment:?} outlived its owner");
        }
    }
    let live = views.iter().any(|view| view.state.is_live());
    let at_the_end_of_time = driver.now_ns > u64::MAX / 2;
    assert!(!live || at_the_end_of_time || driver.cluster.poll_timeout().is_some(), "a live member has a deadline");
}

/// Checks that the former layout in a map is consistent with the map.
fn check_former(map: &ClusterMap) {
    let Some(former) = &map.former else { return };
    assert!(former.from <= former.since && former.since <= map.epoch, "{former:?} in epoch {}", map.epoch);
    let owners = map.members.iter().filter(|member| member.weight > 0);
    for member in owners {
        let began = former.began.iter().find(|(node, _)| *node == member.node);
        assert!(
            began.is_some_and(|(_, incarnation)| *incarnation <= member.incarnation),
            "{former:?} began with {member:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(384))]

    #[test]
    fn any_history_keeps_the_contract(steps in prop::collection::vec(any_step(), 1..120)) {
        let mut driver = Driver::new(config());
        for step in steps {
            driver = apply(driver, step);
            check(&driver);
        }
    }

    #[test]
    fn restart_at_any_point_loses_no_member(steps in prop::collection::vec(any_step(), 1..80)) {
        let mut driver = Driver::new(config());
        for step in steps {
            driver = apply(driver, step);
        }
        let published = driver.published.clone();
        let mut driver = driver.restart();
        prop_assert_eq!(&driver.published, &published);
        driver.sleep(config().restart_grace_ns);
        prop_assert_eq!(&driver.published, &published, "no member dies within the grace");
        let first: Vec<(u64, u64)> = driver.in_map();
        for &(node, incarnation) in &first {
            prop_assert!(driver.beat(node, incarnation).is_ok(), "every member continues as before");
        }
        // Shares that waited for a heartbeat of a member are assigned now.
        prop_assert_eq!(driver.in_map(), first);
    }
}
