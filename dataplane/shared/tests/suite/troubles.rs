//! Troubles of the store that pass: answers of another store, reads with other bytes, failures without callers, and
//! deletions that are refused. Nothing that is still in the store is given up for them.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Slot};
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Version};
use kvplane_shared::{
    GetRange, HeldObject, ListedObject, MapChange, NewObject, Operation, Outcome, SharedConfig, SharedEvent,
    SharedTier, SlotSource, SourceRule, StoreError, VoidReason,
};
use kvplane_tier::SlotSet;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

/// Trouble of operations of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    None,
    /// There is no such object, whatever it is.
    NoObjects,
    /// The bucket is missing.
    Absent,
    /// This many reads return other bytes.
    OtherBytes(u32),
    RefusesDeletions,
}

struct Bed {
    tier: SharedTier,
    now_ns: u64,
    objects: BTreeMap<String, Vec<u8>>,
    trouble: Trouble,
    gets: u32,
    deletions: Vec<String>,
    events: Vec<SharedEvent>,
}

impl Bed {
    fn new(config: SharedConfig) -> Self {
        let mut bed = Self::of(2, config, BTreeMap::new(), Trouble::None);
        bed.run(10 * MS);
        bed
    }

    /// Creates an incarnation of the shard that takes its slot over from the one before, if there was one.
    fn of(incarnation: u64, config: SharedConfig, objects: BTreeMap<String, Vec<u8>>, trouble: Trouble) -> Self {
        let key = |incarnation| ShardKey { node: NodeId(1), incarnation: Incarnation(incarnation), shard: ShardId(0) };
        let shard = key(incarnation);
        let tier = SharedTier::new(SharedConfig { pack_bytes: 64 << 10, flush_ns: MS, ..config }, 5, shard);
        let (deletions, events) = (Vec::new(), Vec::new());
        let mut bed = Self { tier, now_ns: MS, objects, trouble, gets: 0, deletions, events };
        let mut owned = SlotSet::none();
        owned.insert(Slot(0));
        let slots = BTreeMap::from([(Epoch(1), owned.clone())]);
        let former = SlotSource { owner: key(incarnation - 1), slots, rule: SourceRule::Restarted };
        let sources = if incarnation > 2 { vec![former] } else { Vec::new() };
        let (epoch, members) = (Epoch(incarnation), BTreeSet::new());
        let change = MapChange { state: 9, epoch, since: Epoch(1), owned, missed: false, sources, members };
        bed.tier.follow(change, bed.now_ns);
        bed
    }

    fn carry_out(&mut self, operation: Operation) -> Result<Outcome, StoreError> {
        if self.trouble == Trouble::Absent {
            return Err(StoreError::Absent { reason: "no bucket".to_owned() });
        }
        match operation {
            Operation::Put { name, bytes } => {
                self.objects.insert(name, bytes.to_vec());
                Ok(Outcome::Done)
            }
            Operation::Get { .. } if self.trouble == Trouble::NoObjects => Err(StoreError::NotFound),
            Operation::Get { name, range } => {
                self.gets += 1;
                let mut bytes = self.objects.get(&name).ok_or(StoreError::NotFound)?.clone();
                let mut checked = 0;
                if let GetRange::Bounded { offset, bytes: count, checked: first } = range {
                    let end = offset + count;
                    let found = (bytes.len() as u64).min(end).saturating_sub(offset);
                    let part = bytes.get(offset as usize..end as usize).map(<[u8]>::to_vec);
                    bytes = part.ok_or(StoreError::Short { expected: count, found })?;
                    checked = first as usize;
                }
                if let Trouble::OtherBytes(left) = self.trouble {
                    bytes[0] ^= 1;
                    self.trouble = if left > 1 { Trouble::OtherBytes(left - 1) } else { Trouble::None };
                }
                let checksum = payload_checksum(&bytes[..checked]);
                Ok(Outcome::Bytes { bytes, checksum })
            }
            Operation::List { prefix } => {
                let below = self.objects.iter().filter(|(name, _)| name.starts_with(&prefix));
                let listed = below.map(|(name, bytes)| ListedObject {
                    name: name.clone(),
                    bytes: bytes.len() as u64,
                    written_ms: 1,
                });
                Ok(Outcome::Listed(listed.collect()))
            }
            Operation::Stat { .. } => Ok(Outcome::Written { at_ms: 1 }),
            Operation::Delete { name } => {
                self.deletions.push(name.clone());
                if self.trouble == Trouble::RefusesDeletions {
                    return Err(StoreError::Denied { reason: "no deletions".to_owned() });
                }
                self.objects.remove(&name);
                Ok(Outcome::Done)
            }
        }
    }

    /// Runs the tier for some time.
    fn run(&mut self, time_ns: u64) {
        let until_ns = self.now_ns + time_ns;
        while self.now_ns < until_ns {
            self.now_ns += time_ns.div_ceil(100);
            while self.tier.step(self.now_ns, &|_, _| HeldObject::Absent) {}
            while let Some((id, operation)) = self.tier.poll(self.now_ns) {
                let result = self.carry_out(operation);
                self.tier.complete(self.now_ns, id, result);
            }
            self.events.extend(std::iter::from_fn(|| self.tier.poll_event()));
        }
    }

    fn upload(&mut self, key: u64) {
        let tail: &[u8] = b"tail";
        let (digest, bytes) = (Digest(u128::from(key)), 64);
        let object = NewObject {
            digest,
            version: Version(key),
            bytes,
            checksum: 0,
            tail,
            tenant: 0,
            is_head: false,
            is_replicated: false,
        };
        self.tier.push(&object, |into| into.fill(7), self.now_ns).expect("there is room");
        self.run(10 * MS);
    }

    /// Reads an object; returns true if it is found.
    fn reads(&mut self, key: u64) -> bool {
        self.events.clear();
        if self.tier.read(Digest(u128::from(key)), 1, self.now_ns).is_err() {
            return false;
        }
        self.run(10 * MS);
        let of_read = |event: &&SharedEvent| matches!(event, SharedEvent::Read { .. } | SharedEvent::Missed { .. });
        matches!(self.events.iter().find(of_read), Some(SharedEvent::Read { .. }))
    }

    fn is_failing(&self) -> bool {
        self.tier.stats().failing == 1
    }
}

#[test]
fn packs_that_are_not_found_for_a_moment_stay() {
    let mut bed = Bed::new(SharedConfig::default());
    (1..4).for_each(|key| bed.upload(key));
    for trouble in [Trouble::NoObjects, Trouble::Absent] {
        bed.trouble = trouble;
        (0..8).for_each(|_| assert!(!bed.reads(1)));
        bed.run(SECOND);
        bed.trouble = Trouble::None;
        bed.run(60 * SECOND);
        (1..4).for_each(|key| assert!(bed.reads(key), "object {key} after {trouble:?}"));
        assert_eq!(bed.tier.stats().objects, 3);
    }
    // A pack that the store's list lacks, too, is gone.
    let pack = bed.objects.keys().find(|name| name.ends_with("/pack-0000000000000001")).expect("a pack").clone();
    bed.objects.remove(&pack);
    assert!(!bed.reads(1));
    bed.run(60 * SECOND);
    assert_eq!((bed.reads(1), bed.reads(2), bed.reads(3)), (false, true, true));
    assert_eq!(bed.tier.stats().objects, 2, "its objects are given up");
}

#[test]
fn a_store_that_failed_is_found_to_work_without_a_caller() {
    let mut bed = Bed::new(SharedConfig::default());
    bed.upload(1);
    bed.trouble = Trouble::Absent;
    (0..3).for_each(|_| assert!(!bed.reads(1)));
    assert!(bed.is_failing());
    bed.run(100 * SECOND);
    assert!(bed.is_failing());
    bed.trouble = Trouble::None;
    bed.events.clear();
    bed.run(60 * SECOND);
    assert!(!bed.is_failing() && bed.events.contains(&SharedEvent::Works), "{:?}", bed.events);
    assert!(bed.tier.poll_timeout().is_some_and(|at_ns| at_ns > bed.now_ns - SECOND), "no busy loop of probes");
}

#[test]
fn an_object_is_given_up_only_if_a_second_read_is_no_better() {
    let mut bed = Bed::new(SharedConfig::default());
    bed.upload(1);
    bed.trouble = Trouble::OtherBytes(1);
    let before = bed.gets;
    assert!(bed.reads(1), "the second read is whole");
    assert_eq!((bed.gets - before, bed.tier.stats().damaged), (2, 0));
    bed.trouble = Trouble::OtherBytes(2);
    assert!(!bed.reads(1));
    bed.trouble = Trouble::None;
    bed.run(SECOND);
    assert_eq!((bed.tier.stats().damaged, bed.reads(1)), (1, false), "it is given up");
}

#[test]
fn a_pack_that_was_shortened_is_damaged_and_the_others_are_read_on() {
    let mut bed = Bed::new(SharedConfig::default());
    // Each has a pack of its own.
    (1..9).for_each(|key| bed.upload(key));
    let name = |key: u64| format!("/pack-{key:016}");
    for (key, length) in [(1, 70), (2, 0), (3, 70), (4, 1)] {
        let pack = bed.objects.iter_mut().find(|(of, _)| of.ends_with(&name(key))).expect("a pack").1;
        pack.truncate(length);
    }
    for key in 1..5 {
        let before = bed.gets;
        assert!(!bed.reads(key) && bed.gets - before == 2, "object {key} is read twice");
        assert!(!bed.is_failing() && bed.reads(key + 4), "the store works after object {key}");
    }
    bed.run(SECOND);
    assert_eq!((bed.tier.stats().damaged, bed.tier.stats().objects), (4, 4), "they are given up");
    let before = bed.gets;
    assert!((1..5).all(|key| !bed.reads(key)) && bed.gets == before);
}

#[test]
fn deletions_that_fail_are_tried_again_and_damage_is_reported_by_doublings() {
    let mut bed = Bed::new(SharedConfig { most_bytes: 1, ..SharedConfig::default() });
    bed.trouble = Trouble::RefusesDeletions;
    for key in 1..4 {
        bed.upload(key);
        bed.run(30 * SECOND);
    }
    let (refused, first) = (bed.tier.stats().deletions_failed, bed.deletions.first().cloned().expect("a deletion"));
    assert!(refused > 1 && bed.objects.contains_key(&first), "{:?}", bed.deletions);
    bed.trouble = Trouble::None;
    bed.run(120 * SECOND);
    assert!(!bed.objects.contains_key(&first), "{:?}", bed.deletions);
    assert!(bed.objects.keys().filter(|name| name.contains("/pack-")).count() <= 1, "{:?}", bed.objects.keys());
    let mut bed = Bed::new(SharedConfig::default());
    (1..10).for_each(|key| bed.upload(key));
    let mut told = Vec::new();
    for key in 1..10 {
        bed.trouble = Trouble::OtherBytes(2);
        assert!(!bed.reads(key));
        told.extend(bed.events.iter().filter_map(|event| match event {
            SharedEvent::Damaged { count, .. } => Some(*count),
            _ => None,
        }));
    }
    assert_eq!(told, [1, 2, 4, 8]);
}

#[test]
fn a_full_index_is_reported_once() {
    let mut bed = Bed::new(SharedConfig { most_objects: 2, ..SharedConfig::default() });
    (1..3).for_each(|key| bed.upload(key));
    let (tail, version): (&[u8], _) = (b"", Version(9));
    let (bytes, checksum, tenant, is_head, is_replicated) = (8, 0, 0, false, false);
    for key in 5..8 {
        let digest = Digest(key);
        let object = NewObject { digest, version, bytes, checksum, tail, tenant, is_head, is_replicated };
        assert!(bed.tier.push(&object, |_| {}, bed.now_ns).is_err());
    }
    bed.run(SECOND);
    let told = bed.events.iter().filter(|event| matches!(event, SharedEvent::IndexFull { objects: 2 }));
    assert_eq!((told.count(), bed.tier.stats().skipped), (1, 3));
}

#[test]
fn a_successor_finds_what_was_uploaded_once_the_store_answers_again() {
    let config = SharedConfig::default();
    let mut bed = Bed::new(config);
    (1..4).for_each(|key| bed.upload(key));
    bed.run(SECOND);
    assert!(bed.tier.settle(bed.now_ns), "a manifest names them");
    let mut next = Bed::of(3, config, core::mem::take(&mut bed.objects), Trouble::Absent);
    next.run(600 * SECOND);
    assert_eq!((next.tier.stats().objects, next.tier.stats().slots_void), (0, 0), "it waits");
    next.trouble = Trouble::None;
    next.run(60 * SECOND);
    (1..4).for_each(|key| assert!(next.reads(key), "object {key}"));
    assert!(next.tier.settle(next.now_ns), "the one after it finds them, too");
}

/// Objects of the store after so many uploads, with a manifest that names them.
fn uploaded(count: u64) -> BTreeMap<String, Vec<u8>> {
    let mut bed = Bed::new(SharedConfig::default());
    (1..=count).for_each(|key| bed.upload(key));
    bed.run(SECOND);
    assert!(bed.tier.settle(bed.now_ns), "a manifest names them");
    bed.objects
}

fn pack_of(objects: &BTreeMap<String, Vec<u8>>, number: u64) -> String {
    let last = format!("/pack-{number:016x}");
    objects.keys().find(|name| name.ends_with(&last)).expect("a pack").clone()
}

#[test]
fn a_successor_names_the_pack_that_it_waits_for_and_that_makes_everything_void() {
    let config = SharedConfig::default();
    let mut objects = uploaded(4);
    let name = pack_of(&objects, 2);
    let pack = objects.remove(&name).expect("it was there");
    let mut next = Bed::of(3, config, objects.clone(), Trouble::None);
    next.run(SECOND);
    let waits = SharedEvent::Waiting { slots: 1, name: name.clone(), error: StoreError::NotFound };
    assert_eq!(next.events, [waits], "at once");
    next.run(60 * SECOND);
    let void = |reason| SharedEvent::Void { slots: 1, reason };
    let missing = VoidReason::Missing { name: name.clone() };
    assert!(missing.is_fault_of_store());
    assert_eq!(next.events[1..], [void(missing)], "and nothing else");
    assert!((1..5).all(|key| !next.reads(key)));
    // The end of a pack is not what was written, or is cut off: nothing is waited for.
    let mut other = pack.clone();
    *other.last_mut().expect("a pack") ^= 1;
    for damaged in [other, pack[..pack.len() / 2].to_vec(), Vec::new()] {
        objects.insert(name.clone(), damaged);
        let mut next = Bed::of(3, config, objects.clone(), Trouble::None);
        next.run(SECOND);
        assert_eq!(next.events, [void(VoidReason::Damaged { name: name.clone() })]);
        assert_eq!((next.tier.stats().damaged, next.tier.stats().slots_void), (1, 1));
        assert!((1..5).all(|key| !next.reads(key)));
    }
    // A store that fails is waited for, too.
    objects.insert(name, pack);
    let mut next = Bed::of(3, config, objects, Trouble::Absent);
    next.run(600 * SECOND);
    let is_wait = |event: &&SharedEvent| matches!(event, SharedEvent::Waiting { error: StoreError::Absent { .. }, .. });
    assert_eq!(next.events.iter().filter(is_wait).count(), 1, "{:?}", next.events);
}

#[test]
fn a_pack_of_the_checkpoint_that_is_missing_costs_its_objects_only() {
    let mut objects = uploaded(80);
    let name = pack_of(&objects, 1);
    objects.remove(&name);
    let mut next = Bed::of(3, SharedConfig::default(), objects, Trouble::None);
    next.run(SECOND);
    assert_eq!(next.events, [SharedEvent::TakenOver { slots: 1, objects: 80 }]);
    assert!(!next.reads(1) && (2..81).all(|key| next.reads(key)));
}
