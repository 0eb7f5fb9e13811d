//! Tests of kept memory: the first map decides which objects of the former process are served.

mod handovers;
mod images;

use std::sync::Arc;

use kvplane_proto::Status;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Version};
use kvplane_proto::map::{ClusterMap, Former, Member, SlotOwners};

use super::rig::{CHECKSUM, POOL_BYTES, Rig, config, digest, identity, member};
use crate::image::{ImageContents, ImageOrigin};
use crate::service::{Discard, FormerImage, Identity, KeptReport, MapStanding, Path, PoolBytes, Service, VoidCause};
use crate::store::{PoolSums, TakeBackError};
use crate::{Extent, Store, StoreConfig};

/// Pool whose bytes always have the checksum that peers state.
#[derive(Debug)]
struct Pool;

impl PoolSums for Pool {
    fn checksum(&self, _: u64, _: u64) -> u64 {
        CHECKSUM
    }
}

impl PoolBytes for Pool {
    fn read(&self, _: u64, into: &mut [u8]) {
        into.fill(0);
    }

    fn bytes(&self) -> u64 {
        POOL_BYTES
    }
}

const STATE: u64 = 7;

const fn standing(since: u64) -> MapStanding {
    MapStanding { state: STATE, since: Epoch(since), kept: Epoch(0) }
}

/// Returns a service that keeps its memory and follows no map yet, of an incarnation whose versions begin here.
fn start(first_version: u64, found: Option<FormerImage>) -> Rig {
    let mut rig = Rig::new();
    let store = Store::new(config(POOL_BYTES), Version(first_version)).expect("the test's limits are valid");
    rig.service = Service::new(identity(), store);
    rig.service.control().keep_memory(Ok(found), Arc::new(Pool));
    rig
}

/// Puts an object into each slot from 1 to 3, by the map of epoch 5, and returns the image of the end.
fn ended() -> FormerImage {
    let mut rig = start(1, None);
    rig.service.own(Epoch(5), standing(4), |_| true);
    let peer = rig.join(Path::Stream);
    (1..=3).for_each(|key| assert_eq!(rig.put(peer, key, 100).status(), Status::Ok));
    rig.service.control().image_memory(&Pool, false).expect("memory is kept")
}

/// Returns which of the objects exist, by asking a peer.
fn exist(rig: &mut Rig) -> Vec<u8> {
    let peer = rig.join(Path::Stream);
    (1..=3).filter(|key| rig.exists(peer, *key)).collect()
}

#[test]
fn objects_are_served_again_if_no_slot_has_changed_hands() {
    let found = ended();
    assert_eq!((found.origin.epoch, found.origin.state, found.contents.objects.len()), (Epoch(5), STATE, 3));
    let mut rig = start(1000, Some(found.clone()));
    assert!(rig.service.inspect().awaits_map() && rig.service.inspect().kept().is_none());
    assert!(rig.service.control().image_memory(&Pool, false).is_none(), "the former image still counts");
    // A map without slots decides nothing: the node waits for its share.
    rig.service.own(Epoch(6), standing(4), |_| false);
    assert!(rig.service.inspect().awaits_map());
    rig.service.own(Epoch(7), standing(4), |_| true);
    let report = KeptReport { objects: 3, bytes: 300, ..KeptReport::default() };
    assert_eq!((rig.service.control().poll_kept(), rig.service.control().poll_kept()), (Some(report), None));
    assert_eq!(exist(&mut rig), [1, 2, 3]);
    let peer = rig.join(Path::Stream);
    let get = rig.get(peer, 2);
    assert_eq!((get.status(), get.header.payload_bytes), (Status::Ok, 100));
    rig.service.sent(get.payload.expect("the object's bytes").1);
    // The next image has the same objects, of the same versions.
    let again = rig.service.control().image_memory(&Pool, false).expect("memory is kept");
    assert_eq!((again.origin.epoch, again.contents.objects.len()), (Epoch(7), 3));
    let versions = |image: &FormerImage| {
        let mut versions: Vec<_> =
            image.contents.objects.iter().map(|object| (object.digest, object.version)).collect();
        versions.sort_unstable();
        versions
    };
    assert_eq!(versions(&again), versions(&found));
    rig.store().check();
}

#[test]
fn an_image_that_may_be_outdated_is_not_served() {
    let found = ended();
    let of = |state: u64, since: u64, kept: u64| MapStanding { state, since: Epoch(since), kept: Epoch(kept) };
    let void = |cause: VoidCause| Some(Discard::Void(cause));
    for (standing, discard, dropped) in [
        (of(8, 4, 0), void(VoidCause::OtherState), 3),
        (of(STATE, 4, 6), void(VoidCause::Moved { noted: Epoch(5), since: Epoch(6) }), 3),
        // Slots have changed hands, and the map does not say which.
        (of(STATE, 6, 0), None, 3),
        (of(STATE, 5, 5), None, 0),
    ] {
        let mut rig = start(1000, Some(found.clone()));
        rig.service.own(Epoch(7), standing, |_| true);
        let report = rig.service.inspect().kept().expect("it is decided");
        assert_eq!((report.discard, report.dropped, report.objects), (discard, dropped, 3 - dropped), "{standing:?}");
        assert_eq!(exist(&mut rig).len() as u64, 3 - dropped);
        let peer = rig.join(Path::Stream);
        assert_eq!(rig.put(peer, 9, 100).status(), Status::Ok);
        rig.store().check();
    }
    let mut rig = start(1000, Some(found.clone()));
    rig.service.own(Epoch(4), standing(4), |_| true);
    let cause = VoidCause::Newer { noted: Epoch(5), known: Epoch(4) };
    assert_eq!(rig.service.inspect().kept().expect("it is decided").discard, void(cause));
    // Versions of this incarnation would not be greater.
    let mut rig = start(1, Some(found.clone()));
    rig.service.own(Epoch(7), standing(4), |_| true);
    let discard = rig.service.inspect().kept().expect("it is decided").discard;
    assert_eq!(discard, Some(Discard::TakeBack(TakeBackError::Versions)));
    // An SSD was used meanwhile.
    let with_ssd = ImageOrigin { opening: 3, ..found.origin };
    let mut rig = start(1000, Some(FormerImage { origin: with_ssd, ..found }));
    rig.service.own(Epoch(7), standing(4), |_| true);
    assert_eq!(rig.service.inspect().kept().expect("it is decided").discard, Some(Discard::OtherOpening));
    assert!(exist(&mut rig).is_empty());
}

/// A copy of the files, put back after the node ran on: its map is as new as that of the last process.
#[test]
fn an_image_of_another_incarnation_than_the_last_member_is_not_served() {
    let found = ended();
    let last = found.origin.incarnation;
    for (member, discard, objects) in [(last, None, 3), (Incarnation(last.0 + 1), Some(Discard::OtherIncarnation), 0)] {
        let mut image = found.clone();
        image.expect_member(member);
        let mut rig = start(1000, Some(image));
        assert!(rig.service.inspect().awaits_map());
        rig.service.own(Epoch(7), standing(4), |_| true);
        let report = rig.service.inspect().kept().expect("it is decided");
        assert_eq!((report.discard, report.objects, report.dropped), (discard, objects, 3 - objects));
        assert_eq!(exist(&mut rig).len() as u64, objects);
        rig.store().check();
    }
}

/// A member that stops before it has slots leaves the former image, which names it: it was the last member.
#[test]
fn a_pending_image_names_the_incarnation_that_has_joined() {
    let found = ended();
    let mut rig = start(1000, Some(found.clone()));
    assert_eq!(rig.service.inspect().image_heir(), None, "it may not have joined");
    rig.service.own(Epoch(6), standing(4), |_| false);
    assert_eq!(rig.service.inspect().image_heir(), Some(identity().incarnation));
    // A void image stays void.
    let mut rig = start(1000, Some(FormerImage { is_void: true, ..found }));
    rig.service.own(Epoch(6), standing(4), |_| false);
    assert_eq!(rig.service.inspect().image_heir(), None);
}

#[test]
fn objects_of_slots_that_others_have_now_are_dropped() {
    let mut rig = start(1000, Some(ended()));
    rig.service.own(Epoch(7), standing(4), |slot| slot != 2);
    let report = rig.service.inspect().kept().expect("it is decided");
    assert_eq!((report.objects, report.dropped, report.discard), (2, 1, None));
    rig.service.own(Epoch(8), standing(8), |_| true);
    assert_eq!(exist(&mut rig), [1, 3]);
}

#[test]
fn objects_beyond_the_limit_of_objects_are_counted() {
    let (mut rig, found) = (Rig::new(), ended());
    let limits = StoreConfig { max_objects: 2, ..config(POOL_BYTES) };
    rig.service = Service::new(identity(), Store::new(limits, Version(1000)).expect("the test's limits are valid"));
    rig.service.control().keep_memory(Ok(Some(found)), Arc::new(Pool));
    rig.service.own(Epoch(7), standing(4), |slot| slot != 2);
    let report = rig.service.inspect().kept().expect("it is decided");
    assert_eq!((report.objects, report.dropped, report.left_out, report.damaged), (2, 1, 0, 0));
    let limits = StoreConfig { max_objects: 2, ..config(POOL_BYTES) };
    rig.service = Service::new(identity(), Store::new(limits, Version(1000)).expect("the test's limits are valid"));
    rig.service.control().keep_memory(Ok(Some(ended())), Arc::new(Pool));
    rig.service.own(Epoch(7), standing(4), |_| true);
    let report = rig.service.inspect().kept().expect("it is decided");
    assert_eq!((report.objects, report.bytes, report.dropped, report.left_out), (2, 200, 0, 1));
    // Objects that nobody accessed since go first.
    assert_eq!(exist(&mut rig), [2, 3]);
    rig.store().check();
}

#[test]
fn a_damaged_tail_drops_its_object() {
    let mut found = ended();
    found.contents.objects[1].tail.bytes = 30;
    found.contents.objects[1].tail.checksum = 1;
    found.contents.objects[2].tail.bytes = 30;
    found.contents.objects[2].tail.offset = u64::MAX;
    let mut rig = start(1000, Some(found));
    rig.service.own(Epoch(7), standing(4), |_| true);
    let report = rig.service.inspect().kept().expect("it is decided");
    assert_eq!((report.objects, report.damaged), (1, 2));
}

/// Pool whose bytes have changed since they were put.
#[derive(Debug)]
struct DamagedPool;

impl PoolSums for DamagedPool {
    fn checksum(&self, _: u64, _: u64) -> u64 {
        !CHECKSUM
    }
}

#[test]
fn damage_is_reported_when_it_is_found_and_whenever_it_has_doubled() {
    let mut rig = start(1000, None);
    rig.service.control().keep_memory(Ok(Some(ended())), Arc::new(DamagedPool));
    assert_eq!(rig.service.control().poll_kept_damage(), None, "nothing is decided");
    rig.service.own(Epoch(7), standing(4), |_| true);
    assert_eq!(rig.service.control().poll_kept_damage(), None, "no byte was read");
    let peer = rig.join(Path::Stream);
    for (key, told) in [(1, Some(1)), (2, Some(2)), (3, None)] {
        assert_ne!(rig.get(peer, key).status(), Status::Ok);
        let told_once = [rig.service.control().poll_kept_damage(), rig.service.control().poll_kept_damage()];
        assert_eq!(told_once, [told, None], "{key}");
    }
    assert_eq!(rig.service.inspect().kept().map(|report| report.damaged), Some(3));
    // It is not counted as damage of this process.
    assert_eq!((rig.service.inspect().repairs().damaged, rig.service.control().poll_repairs()), (0, None));
}

/// A slot that another node had meanwhile is not served from memory, as nobody compares it; one that stayed is.
#[test]
fn a_new_layout_keeps_the_slots_that_stayed() {
    let identity = |incarnation: u64| Identity {
        node: NodeId(1),
        shard: ShardId(0),
        incarnation: Incarnation(incarnation),
        ..identity()
    };
    let claim = |member: &Member| kvplane_proto::map::Claim {
        node: member.node,
        incarnation: member.incarnation,
        weight: member.weight,
        shards: 1,
    };
    let began = |members: &[Member]| members.iter().map(|member| (member.node, member.incarnation)).collect();
    let two = [member(1, 1), member(2, 1)];
    let first = ClusterMap { epoch: Epoch(5), replicas: 1, members: two.to_vec(), former: None };
    let store = |version: u64| Store::new(config(POOL_BYTES), Version(version)).expect("limits");
    let mut rig = Rig::new();
    rig.service = Service::new(identity(1), store(1));
    rig.service.control().keep_memory(Ok(None), Arc::new(Pool));
    rig.service.follow(STATE, &SlotOwners::of(&first));
    let mut found = FormerImage {
        is_void: false,
        origin: ImageOrigin { incarnation: Incarnation(1), state: STATE, epoch: Epoch(5), opening: 0 },
        contents: ImageContents::default(),
    };
    let owners = SlotOwners::of(&first);
    let mine =
        |owners: &SlotOwners, key: u8| owners.owner(digest(key).slot()).is_some_and(|owner| owner.node == NodeId(1));
    let keys: Vec<u8> = (1..60).filter(|key| mine(&owners, *key)).take(8).collect();
    for (at, key) in keys.iter().enumerate() {
        found.contents.objects.push(crate::image::KeptObject {
            digest: digest(*key),
            version: Version(1),
            checksum: CHECKSUM,
            extent: Extent { offset: 512 * at as u64, bytes: 300 },
            extra_granules: 0,
            tail: crate::image::TailPlace::default(),
            tenant: 0,
            group: 0,
            soft_pin_ns: 0,
            priority: kvplane_proto::message::ObjectPriority::NORMAL,
            hard_pin: false,
            head: false,
            wanted: false,
            protected: false,
            lent: false,
            replica: false,
            copies: 1,
            at: kvplane_proto::map::ReplicaSet::NONE,
        });
    }
    // A third node joins by epoch 6, while node 1 is away for a moment, and takes some of its slots.
    let three = [member(1, 2), member(2, 1), member(3, 1)];
    let former = Former {
        since: Epoch(6),
        from: Epoch(5),
        claims: two.iter().map(claim).collect(),
        began: began(&three),
        restarts: None,
    };
    let next = ClusterMap { epoch: Epoch(6), replicas: 1, members: three.to_vec(), former: Some(former) };
    let owners = SlotOwners::of(&next);
    let mut rig = Rig::new();
    rig.service = Service::new(identity(2), store(1000));
    rig.service.control().keep_memory(Ok(Some(found)), Arc::new(Pool));
    rig.service.follow(STATE, &owners);
    let stayed: Vec<u8> = keys.iter().copied().filter(|key| mine(&owners, *key)).collect();
    assert!(!stayed.is_empty() && stayed.len() < keys.len(), "some slots move: {stayed:?} of {keys:?}");
    let report = rig.service.inspect().kept().expect("it is decided");
    assert_eq!((report.objects, report.dropped), (stayed.len() as u64, (keys.len() - stayed.len()) as u64));
    assert!(stayed.iter().all(|key| rig.store().exists(digest(*key))));
    rig.store().check();
}
