//! Turns of a shard's writes: neither uploads nor removals keep checkpoint and manifest from the store, and a manifest
//! that releases slots comes after all of their removals.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, ShardId, Slot};
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Version};
use kvplane_shared::format::{Manifest, Stream};
use kvplane_shared::{HeldObject, MapChange, NewObject, OpId, Operation, Outcome, SharedConfig, SharedTier};
use kvplane_tier::SlotSet;

const MS: u64 = 1_000_000;

struct Bed {
    tier: SharedTier,
    stream: Stream,
    now_ns: u64,
    in_flight: Vec<(OpId, Operation)>,
    /// Writes that the store has, by the last part of their names, with their bytes.
    written: Vec<(String, Arc<Vec<u8>>)>,
}

impl Bed {
    fn new() -> Self {
        let shard = ShardKey { node: NodeId(1), incarnation: Incarnation(2), shard: ShardId(0) };
        let config = SharedConfig { pack_bytes: 64 << 10, flush_ns: MS, ..SharedConfig::default() };
        let stream = Stream { cluster: 5, state: 9, shard };
        let tier = SharedTier::new(config, 5, shard);
        let mut bed = Self { tier, stream, now_ns: MS, in_flight: Vec::new(), written: Vec::new() };
        bed.follow(1, 0..8);
        bed
    }

    fn follow(&mut self, epoch: u64, slots: core::ops::Range<u16>) {
        let mut owned = SlotSet::none();
        for slot in slots {
            owned.insert(Slot(slot));
        }
        let (state, epoch, members) = (self.stream.state, Epoch(epoch), BTreeSet::new());
        let change = MapChange { state, epoch, since: epoch, owned, missed: false, sources: Vec::new(), members };
        self.tier.follow(change, self.now_ns);
    }

    /// Completes what is in flight, and begins what is due.
    fn round(&mut self) {
        self.now_ns += 10 * MS;
        for (id, operation) in core::mem::take(&mut self.in_flight) {
            let outcome = match &operation {
                Operation::Stat { .. } => Outcome::Written { at_ms: 1 },
                Operation::List { .. } => Outcome::Listed(Vec::new()),
                _ => Outcome::Done,
            };
            if let Operation::Put { name, bytes } = operation {
                let last = name.rsplit('/').next().unwrap_or_default().to_owned();
                self.written.push((last, bytes));
            }
            self.tier.complete(self.now_ns, id, Ok(outcome));
        }
        while self.tier.step(self.now_ns, &|_, _| HeldObject::Absent) {}
        while let Some(begun) = self.tier.poll(self.now_ns) {
            self.in_flight.push(begun);
        }
    }

    fn upload(&mut self, number: u64) {
        let digest = Digest(u128::from(number % 8) << 114 | u128::from(number));
        let object = NewObject {
            digest,
            version: Version(number),
            bytes: 8,
            checksum: 0,
            tail: b"",
            tenant: 0,
            is_head: false,
            is_replicated: false,
        };
        self.tier.push(&object, |into| into.fill(1), self.now_ns).expect("there is room");
    }

    fn manifests(&self) -> Vec<(usize, Manifest)> {
        let all = self.written.iter().enumerate().filter(|(_, (name, _))| name.starts_with("manifest-"));
        let decoded = all.filter_map(|(at, (name, bytes))| {
            let number = u64::from_str_radix(name.strip_prefix("manifest-")?, 16).ok()?;
            Some((at, Manifest::decode(self.stream, number, bytes).ok()?))
        });
        decoded.collect()
    }
}

#[test]
fn a_stream_of_uploads_does_not_keep_the_manifest_from_the_store() {
    let mut bed = Bed::new();
    for number in 0..20 {
        // At the end of each write another pack is due.
        bed.upload(number);
        bed.round();
    }
    let named: Vec<u64> = bed.manifests().iter().map(|(_, manifest)| manifest.owned.count()).collect();
    assert!(named.contains(&8), "{named:?} after {:?}", bed.written.iter().map(|(name, _)| name).collect::<Vec<_>>());
}

#[test]
fn a_manifest_that_releases_slots_comes_after_their_removals() {
    let mut bed = Bed::new();
    (0..8).for_each(|number| bed.upload(number));
    (0..10).for_each(|_| bed.round());
    // One pack is on its way, the next has a removal, and half of the slots are lost.
    bed.upload(8);
    bed.round();
    let removed = Digest(7 << 114 | 7);
    bed.tier.remove(removed, 1);
    bed.follow(2, 0..4);
    (0..10).for_each(|_| bed.round());
    let (at, manifest) = bed.manifests().into_iter().find(|(_, one)| one.epoch == Epoch(2)).expect("a manifest");
    assert_eq!(manifest.released.count(), 4);
    let packs = bed.written[..at].iter().filter(|(name, _)| name.starts_with("pack-")).count();
    assert_eq!((packs as u64, manifest.upto), (3, 3), "the removal's pack is the third");
}

#[test]
fn an_import_of_the_same_bytes_stays_in_the_tier_and_takes_its_version_along() {
    let mut bed = Bed::new();
    bed.upload(1);
    (0..5).for_each(|_| bed.round());
    let digest = Digest(1 << 114 | 1);
    let [same, other] = [1, 2].map(|byte| payload_checksum(&[byte; 8]));
    let version_of = |bed: &Bed| bed.tier.locate(digest).map(|view| view.version);
    assert!(!bed.tier.note_import(digest, 8, other, Version(98)), "it is replaced");
    assert!(!bed.tier.note_import(Digest(1 << 114 | 2), 8, same, Version(98)), "the tier has no such object");
    assert_eq!(version_of(&bed), Some(Version(1)));
    assert!(bed.tier.note_import(digest, 8, same, Version(99)));
    assert_eq!(version_of(&bed), Some(Version(99)));
    bed.tier.remove(digest, 1);
    assert!(!bed.tier.note_import(digest, 8, same, Version(100)), "its removal is on its way");
}
