//! Names, versions, layouts, leases.

use std::collections::BTreeSet;

use kvplane_cluster::p2p::{
    FetchFailure, Grant, Hold, Layout, MAX_SHARDS, ObjectError, ObjectName, ObjectSpec, Objects, ObjectsConfig,
    PeerLocation, ShardSet,
};
use proptest::prelude::*;

use super::fluid::{SECOND, spec};

fn objects() -> Objects {
    Objects::new(ObjectsConfig::default(), 0, 0)
}

fn hold(client: u64, shards: u32, origin: bool) -> Hold {
    let all = vec![(0, shards)];
    let (have, want) = if origin { (all, Vec::new()) } else { (Vec::new(), all) };
    Hold {
        client,
        segment: format!("s{client}"),
        addresses: vec![0x1000 * client],
        origin,
        have,
        want,
        ..Hold::default()
    }
}

proptest! {
    #[test]
    fn intervals_round_trip(shards in 0u32..300, picks in prop::collection::vec(0u32..300, 0..200)) {
        let mut set = ShardSet::empty(shards);
        let twin: BTreeSet<u32> = picks.iter().copied().filter(|&pick| pick < shards).collect();
        for &pick in &picks {
            let fresh = pick < shards && !set.contains(pick);
            prop_assert_eq!(set.insert(pick), fresh);
        }
        prop_assert_eq!(set.iter().collect::<Vec<_>>(), twin.iter().copied().collect::<Vec<_>>());
        prop_assert_eq!(ShardSet::of(shards, &set.intervals()), Ok(set.clone()));
        for pick in twin {
            prop_assert!(set.remove(pick));
        }
        prop_assert!(set.is_empty());
        prop_assert!(ShardSet::of(shards, &[(shards, 1)]).is_err());
    }

    /// Shards cover every byte of every buffer once, in order.
    #[test]
    fn shards_cover_every_byte_once(sizes in prop::collection::vec(0u64..1000, 0..20), shard_bytes in 1u64..300) {
        let layout = Layout::new(sizes.clone(), shard_bytes).unwrap();
        let mut at = vec![0; sizes.len()];
        for shard in 0..layout.shards() {
            let place = layout.place(shard).unwrap();
            prop_assert_eq!(at[place.buffer], place.offset);
            prop_assert!(place.bytes > 0 && place.bytes <= shard_bytes);
            at[place.buffer] += place.bytes;
            prop_assert_eq!(layout.covering(place.buffer, place.offset, place.bytes), Some((shard, 1)));
        }
        prop_assert_eq!(at, sizes);
        prop_assert_eq!(layout.place(layout.shards()), None);
    }

    /// Whatever members report, the catalog grants no member a shard that it has, or from a source that lacks it; and
    /// every served member ends up with the whole object.
    #[test]
    fn grants_are_valid_for_any_reports(
        steps in prop::collection::vec((0u8..8, 0u64..5, 0u32..40, 1u64..400_000_000), 1..200),
    ) {
        let shards = 40;
        let mut world = CatalogReply { objects: objects(), members: vec![None; 5], now_ns: 0, shards };
        world.objects.publish(0, ObjectName::new("", "o"), Some(1), spec(4000, 100)).unwrap();
        for (what, who, shard, wait_ns) in steps {
            world.step(what, who, shard, wait_ns)?;
        }
        world.finish()?;
    }
}

/// A client: its member, the shards that it has, and the grants that it received.
#[derive(Clone)]
struct Client {
    member: u64,
    have: ShardSet,
    told: Vec<Grant>,
}

struct CatalogReply {
    objects: Objects,
    members: Vec<Option<Client>>,
    now_ns: u64,
    shards: u32,
}

impl CatalogReply {
    fn step(&mut self, what: u8, who: u64, shard: u32, wait_ns: u64) -> Result<(), TestCaseError> {
        self.now_ns += wait_ns;
        let (now_ns, at) = (self.now_ns, who as usize);
        for client in 0..5 {
            self.objects.renew(now_ns, client);
        }
        self.objects.tick(now_ns);
        self.take()?;
        match (what, self.members[at].clone()) {
            (0, None) => self.join(who, who == 0)?,
            (1 | 2, Some(client)) => {
                // The oldest grant is carried out, or another shard arrives from elsewhere.
                let shard =
                    if what == 1 { client.told.first().map_or(shard, |grant| grant.order.shard) } else { shard };
                self.got(at, shard);
            }
            (3, Some(client)) => {
                if let Some(grant) = client.told.first().cloned() {
                    let failed =
                        [FetchFailure { shard: grant.order.shard, source: grant.order.source, corrupt: false }];
                    self.members[at].as_mut().unwrap().told.remove(0);
                    self.objects.report(now_ns, who, client.member, &[], &failed).unwrap();
                }
            }
            (4, Some(client)) => {
                self.objects.release(now_ns, who, client.member, false).unwrap();
                self.members[at] = None;
            }
            (5, Some(client)) => {
                // An invalid report does no harm.
                let failed = [FetchFailure { shard, source: 999, corrupt: true }];
                let got = [(u32::MAX, 3), (shard, u32::MAX)];
                self.objects.report(now_ns, who, client.member, &got, &failed).unwrap();
                prop_assert!(self.objects.report(now_ns, who + 1, client.member, &[], &[]).is_err());
            }
            _ => {}
        }
        self.take()
    }

    fn join(&mut self, who: u64, origin: bool) -> Result<(), TestCaseError> {
        let digest = spec(4000, 100).digest();
        // The object may have been forgotten meanwhile.
        self.objects.publish(self.now_ns, ObjectName::new("", "o"), Some(1), spec(4000, 100)).unwrap();
        let member = self
            .objects
            .hold(self.now_ns, ObjectName::new("", "o"), 1, digest, hold(who, self.shards, origin))
            .unwrap();
        let have = if origin { ShardSet::full(self.shards) } else { ShardSet::empty(self.shards) };
        self.members[who as usize] = Some(Client { member, have, told: Vec::new() });
        self.take()
    }

    fn got(&mut self, at: usize, shard: u32) {
        let client = self.members[at].as_mut().unwrap();
        client.have.insert(shard);
        client.told.retain(|grant| grant.order.shard != shard);
        let member = client.member;
        self.objects.report(self.now_ns, at as u64, member, &[(shard, 1)], &[]).unwrap();
    }

    fn take(&mut self) -> Result<(), TestCaseError> {
        for grant in self.objects.poll_grants() {
            let source = self.members.iter().flatten().find(|client| client.member == grant.order.source);
            if let Some(source) = source {
                prop_assert!(source.have.contains(grant.order.shard), "{grant:?} from a source that lacks it");
            }
            let Some(client) = self.members[grant.client as usize].as_mut() else { continue };
            if client.member == grant.order.member {
                prop_assert!(!client.have.contains(grant.order.shard), "{grant:?} to a member that has it");
                // The previous grant of the shard is aborted.
                client.told.retain(|other| other.order.shard != grant.order.shard);
                client.told.push(grant);
            }
        }
        Ok(())
    }

    /// With an origin present, and all grants carried out, every member has the whole object.
    fn finish(mut self) -> Result<(), TestCaseError> {
        if self.members[0].is_none() {
            self.join(0, true)?;
        }
        let mut patience = 5_000;
        while self.members.iter().flatten().any(|client| client.have.count() < self.shards) {
            patience -= 1;
            prop_assert!(patience > 0, "a member gets no grant");
            let told = (0..5).find_map(|at| Some((at, self.members[at].as_ref()?.told.first()?.order.shard)));
            match told {
                Some((at, shard)) => self.got(at, shard),
                None => {
                    self.now_ns += SECOND / 10;
                    for client in 0..5 {
                        self.objects.renew(self.now_ns, client);
                    }
                    self.objects.tick(self.now_ns);
                }
            }
            self.take()?;
        }
        Ok(())
    }
}

#[test]
fn objects_are_immutable_and_versions_grow() {
    let mut objects = objects();
    let (one, other) = (spec(1000, 100), spec(1001, 100));
    assert_eq!(objects.publish(0, ObjectName::new("", "a/b"), None, one.clone()), Ok(1));
    assert_eq!(objects.publish(0, ObjectName::new("", "a/b"), None, one.clone()), Ok(1), "equal contents");
    assert_eq!(objects.publish(0, ObjectName::new("", "a/b"), None, other.clone()), Ok(2));
    let differs = ObjectError::Differs { name: "a/b".to_owned(), version: 1 };
    assert_eq!(objects.publish(0, ObjectName::new("", "a/b"), Some(1), other.clone()), Err(differs.clone()));
    assert!(
        matches!(objects.find(ObjectName::new("", "a/b"), None), Err(ObjectError::NotFound { .. })),
        "no version has a member"
    );
    // The newest version that sources hold completely, or else the newest with a member.
    objects.hold(0, ObjectName::new("", "a/b"), 2, other.digest(), hold(9, 11, false)).unwrap();
    assert_eq!(objects.find(ObjectName::new("", "a/b"), None).unwrap(), (2, &other));
    let first = objects.hold(0, ObjectName::new("", "a/b"), 1, one.digest(), hold(8, 10, true)).unwrap();
    assert_eq!(objects.find(ObjectName::new("", "a/b"), None).unwrap(), (1, &one));
    objects.hold(0, ObjectName::new("", "a/b"), 2, other.digest(), hold(7, 11, true)).unwrap();
    assert_eq!(objects.find(ObjectName::new("", "a/b"), None).unwrap(), (2, &other));
    objects.release(0, 8, first, false).unwrap();
    assert_eq!(objects.find(ObjectName::new("", "a/b"), Some(1)).unwrap(), (1, &one));
    assert!(
        matches!(objects.find(ObjectName::new("t", "a/b"), None), Err(ObjectError::NotFound { .. })),
        "tenants are isolated"
    );
    // A member cannot hold it with another object's digest.
    assert_eq!(objects.hold(0, ObjectName::new("", "a/b"), 1, other.digest(), hold(1, 10, true)), Err(differs));
}

#[test]
fn malformed_publications_and_holds_are_refused_with_a_reason() {
    let mut objects = objects();
    let long = "n/".repeat(2048);
    assert_eq!(
        objects.publish(0, ObjectName::new("", &long), Some(7), spec(0, 1)),
        Ok(7),
        "4 KiB with slashes, of 0 bytes"
    );
    assert!(
        objects
            .publish(0, ObjectName::new("", &format!("{long}x")), None, spec(1, 1))
            .unwrap_err()
            .to_string()
            .contains("4097")
    );
    assert!(objects.publish(0, ObjectName::new("", ""), None, spec(1, 1)).is_err());
    assert!(objects.publish(0, ObjectName::new("", "a"), Some(0), spec(1, 1)).is_err());
    assert!(Layout::new(vec![1], 0).is_err());
    let error = Layout::new(vec![u64::from(MAX_SHARDS) + 1], 1).unwrap_err();
    assert!(error.to_string().contains("make the shards larger"), "{error}");
    assert!(Layout::new(vec![u64::MAX, u64::MAX], u64::MAX).is_err());
    let mut short = spec(10, 1);
    short.hashes.pop();
    assert!(
        objects
            .publish(0, ObjectName::new("", "a"), None, short)
            .unwrap_err()
            .to_string()
            .contains("9 hashes for 10 shards")
    );
    objects.publish(0, ObjectName::new("", "a"), None, spec(1000, 100)).unwrap();
    let digest = spec(1000, 100).digest();
    let addresses = Hold { addresses: vec![1, 2], ..hold(1, 10, true) };
    assert!(
        objects
            .hold(0, ObjectName::new("", "a"), 1, digest, addresses)
            .unwrap_err()
            .to_string()
            .contains("2 addresses")
    );
    let beyond = Hold { have: vec![(5, 6)], ..hold(1, 10, true) };
    assert!(
        objects
            .hold(0, ObjectName::new("", "a"), 1, digest, beyond)
            .unwrap_err()
            .to_string()
            .contains("6 shards from 5 on")
    );
    let label = Hold { segment: "s".repeat(257), ..hold(1, 10, true) };
    assert!(objects.hold(0, ObjectName::new("", "a"), 1, digest, label).is_err());
    assert!(matches!(objects.report(0, 1, 99, &[], &[]), Err(ObjectError::UnknownMember { member: 99 })));
}

/// 1 TB: the size and cost of a join do not depend on the number of members.
#[test]
fn a_terabyte_of_16384_shards_works() {
    let mut objects = objects();
    let bytes: u64 = 1 << 40;
    let spec = spec(bytes, bytes / 16_384);
    let digest = spec.digest();
    objects.publish(0, ObjectName::new("", "big"), None, spec).unwrap();
    objects.hold(0, ObjectName::new("", "big"), 1, digest, hold(1, 16_384, true)).unwrap();
    for client in 2..200 {
        objects.hold(0, ObjectName::new("", "big"), 1, digest, hold(client, 16_384, false)).unwrap();
        let grants = objects.poll_grants();
        assert!(grants.len() <= 16, "{} grants for one join", grants.len());
        for grant in grants {
            assert_eq!(grant.order.address, 0x1000 + u64::from(grant.order.shard) * (bytes / 16_384));
        }
    }
}

#[test]
fn silent_members_expire_and_then_their_object() {
    let mut objects = objects();
    let digest = spec(1000, 100).digest();
    objects.publish(0, ObjectName::new("", "a"), None, spec(1000, 100)).unwrap();
    let one = objects.hold(0, ObjectName::new("", "a"), 1, digest, hold(1, 10, true)).unwrap();
    let two = objects.hold(0, ObjectName::new("", "a"), 1, digest, hold(2, 10, true)).unwrap();
    for second in 1..8 {
        assert_eq!(objects.renew(second * SECOND, 1), [one]);
        objects.tick(second * SECOND);
    }
    assert_eq!(objects.renew(8 * SECOND, 2), [] as [u64; 0], "{two} was silent");
    assert_eq!(objects.list("", "", None, 10)[0].members, 1);
    for second in 8..30 {
        objects.tick(second * SECOND);
    }
    assert!(objects.list("", "", None, 10).is_empty());
    assert_eq!(objects.due_ns(), None);
}

#[test]
fn leaving_member_waits_for_readers() {
    let mut objects = objects();
    let digest = spec(1000, 100).digest();
    objects.publish(0, ObjectName::new("", "a"), None, spec(1000, 100)).unwrap();
    let origin = objects.hold(0, ObjectName::new("", "a"), 1, digest, hold(1, 10, true)).unwrap();
    let reader = objects.hold(0, ObjectName::new("", "a"), 1, digest, hold(2, 10, false)).unwrap();
    let grants = objects.poll_grants();
    assert_eq!(objects.told(2), grants, "grants that may have been missed are repeated");
    assert_eq!(objects.release(0, 1, origin, true), Ok(grants.len()));
    for grant in &grants {
        objects.report(0, 2, reader, &[(grant.order.shard, 1)], &[]).unwrap();
    }
    assert!(objects.poll_grants().is_empty(), "no further fetch from a leaving member");
    assert_eq!(objects.release(0, 1, origin, true), Ok(0));
    assert!(matches!(objects.release(0, 1, origin, true), Err(ObjectError::UnknownMember { .. })));
    assert_eq!(
        objects.describe(ObjectName::new("", "a"), None).unwrap().1,
        10 - grants.len() as u32,
        "shards without a source"
    );
}

#[test]
fn listings_filter_by_prefix_and_page() {
    let mut objects = objects();
    for name in ["a", "b/1", "b/2", "b/3", "c"] {
        objects.publish(0, ObjectName::new("", name), None, spec(10, 1)).unwrap();
        objects.publish(0, ObjectName::new("t", name), None, spec(10, 1)).unwrap();
    }
    let names =
        |after, most| -> Vec<String> { objects.list("", "b/", after, most).into_iter().map(|row| row.name).collect() };
    assert_eq!(names(None, 2), ["b/1", "b/2"]);
    assert_eq!(names(Some(("b/2", 1)), 2), ["b/3"]);
    assert_eq!(names(Some(("b/3", 1)), 2), [] as [&str; 0]);
}

/// Limits hold, and released memory is available again.
#[test]
fn limits_are_enforced() {
    let config = ObjectsConfig { objects: 2, members: 1, table_rows: 32, ..ObjectsConfig::default() };
    let mut objects = Objects::new(config, 0, 0);
    let small = ObjectSpec { about: vec![0; 16], ..spec(10, 1) };
    objects.publish(0, ObjectName::new("", "a"), None, small.clone()).unwrap();
    objects.publish(0, ObjectName::new("", "b"), None, small.clone()).unwrap();
    assert!(matches!(
        objects.publish(0, ObjectName::new("", "c"), None, small.clone()),
        Err(ObjectError::Limit { what: "objects", .. })
    ));
    objects.hold(0, ObjectName::new("", "a"), 1, small.digest(), hold(1, 10, true)).unwrap();
    assert!(matches!(
        objects.hold(0, ObjectName::new("", "a"), 1, small.digest(), hold(2, 10, true)),
        Err(ObjectError::Limit { what: "members", .. })
    ));
    for second in 1..12 {
        objects.tick(second * SECOND);
    }
    assert!(matches!(
        objects.publish(12 * SECOND, ObjectName::new("", "d"), None, spec(40, 1)),
        Err(ObjectError::Limit { .. })
    ));
    assert_eq!(objects.publish(12 * SECOND, ObjectName::new("", "e"), None, spec(29, 1)), Ok(1));
}

#[test]
fn locate_returns_the_holders_of_a_whole_buffer() {
    let mut objects = objects();
    let layout = Layout::new(vec![100, 0, 250], 100).unwrap();
    let spec = ObjectSpec { hashes: vec![0; 4], layout, about: Vec::new() };
    let digest = spec.digest();
    objects.publish(0, ObjectName::new("t", "o"), None, spec).unwrap();
    let mut join = |client: u64, host: &str, rack: &str, have: Vec<(u32, u32)>| {
        let place = PeerLocation { host: host.to_owned(), rack: rack.to_owned() };
        let addresses = (0..3).map(|buffer| 1000 * client + buffer).collect();
        let hold = Hold { client, segment: format!("s{client}"), addresses, have, place, ..Hold::default() };
        objects.hold(0, ObjectName::new("t", "o"), 1, digest, hold).unwrap()
    };
    let far = join(1, "h1", "r1", vec![(0, 4)]);
    let second_only = join(2, "h2", "r2", vec![(1, 3)]);
    let same_rack = join(3, "h3", "r", vec![(0, 4)]);
    let same_host = join(4, "h", "r", vec![(0, 1)]);
    join(5, "h", "r", vec![(1, 2)]);
    let near = PeerLocation { host: "h".to_owned(), rack: "r".to_owned() };
    let told = |objects: &Objects, buffer, client| -> Vec<(u64, u64, u8)> {
        let found = objects.locate(ObjectName::new("t", "o"), 1, buffer, &near, client).unwrap();
        found.iter().map(|place| (place.member, place.address, place.distance)).collect()
    };
    assert_eq!(told(&objects, 0, 0), [(same_host, 4000, 0), (same_rack, 3000, 1), (far, 1000, 2)]);
    // Among equals, each client gets another one first.
    assert_eq!(told(&objects, 2, 0), [(same_rack, 3002, 1), (far, 1002, 2), (second_only, 2002, 2)]);
    assert_eq!(told(&objects, 2, 1), [(same_rack, 3002, 1), (second_only, 2002, 2), (far, 1002, 2)]);
    // A leaving member is not among the locations.
    objects.release(0, 3, same_rack, true).unwrap();
    assert_eq!(told(&objects, 2, 0).first(), Some(&(far, 1002, 2)));
    assert!(objects.locate(ObjectName::new("t", "o"), 1, 3, &near, 0).is_err());
    assert!(objects.locate(ObjectName::new("t", "o"), 2, 0, &near, 0).is_err());
}
