//! Damage of records at rest: bytes of records on disks change. A byte changes only where another node has the object
//! on its disk with good bytes, so that no object may be lost, or stay damaged once all faults are over and disks were
//! scrubbed.

use kvplane_proto::Digest;
use kvplane_proto::checksum::payload_checksum;
use kvplane_store::service::TierOrder;

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::faults::disk::DiskRecord;

/// Rate of a scrub after the faults, in bytes a second.
const SCRUB_BYTES_PER_S: u64 = 1 << 30;

/// Bytes of a record's head before its own checksum.
const HEAD_FIELDS_BYTES: u64 = 100;

/// Byte of a record that is not as it was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DamagedByte {
    incarnation: usize,
    digest: Digest,
    /// Sequence of the record.
    sequence: u64,
    offset: u64,
    /// The shard has had another role in the object's slot since, so the record may be gone: a new owner imports the
    /// object and drops this one, and a replica of it is recorded only once the export is over.
    has_moved: bool,
}

impl World {
    /// Damages a byte of a record of a node.
    pub(crate) fn damage_record(&mut self, node: usize, drawn: u64) {
        let Some(incarnation) = self.shard_of(node, drawn) else { return };
        let (lineage, keys) = (self.lineage(incarnation), self.scenario.keys);
        // The first one from any key on: each look reads a disk.
        let first = self.streams.faults.below(keys as u64) as usize;
        let digests = (first..first + keys).map(|key| self.shadow.digest(key % keys));
        let mut may_damage = digests
            .filter(|digest| self.has_another_record(incarnation, *digest))
            .filter_map(|digest| Some((digest, self.whole_record(incarnation, digest)?)));
        let Some((digest, record)) = may_damage.next() else { return };
        let rng = &mut self.streams.faults;
        let offset = match rng.chance(0.8) {
            true => record.payload_at + rng.below(record.payload_bytes),
            // Behind the fields by which this module finds the record again: checksums, and the name.
            false => record.head_at + HEAD_FIELDS_BYTES + rng.below(record.head_bytes - HEAD_FIELDS_BYTES),
        };
        let bit = rng.below(8) as u32;
        if let Some(disk) = self.disks.get_mut(&lineage) {
            disk.damage(offset, 1 << bit);
        }
        let DiskRecord { sequence, .. } = record;
        self.damaged_bytes.push(DamagedByte { incarnation, digest, sequence, offset, has_moved: false });
        self.statistics.flips += 1;
        self.detail(offset, || {
            format!("incarnation {incarnation}: byte {offset} of its disk, in {digest}, is damaged")
        });
    }

    /// Returns the record of an object, or of a replica, that a shard's tier has and that is whole on its disk.
    fn whole_record(&self, incarnation: usize, digest: Digest) -> Option<DiskRecord> {
        let view = self.incarnations[incarnation].service.inspect().ssd_record(digest)?;
        let (disk, tier) = (self.disks.get(&self.lineage(incarnation))?, self.scenario.tier.as_ref()?);
        let record = disk.newest_record(digest, tier.config.block_bytes, None)?;
        let is_whole = (record.version, record.checksum) == (view.version.0, view.checksum)
            && payload_checksum(disk.bytes(record.payload_at, record.payload_bytes)) == view.checksum;
        let is_damaged = self.damaged_bytes.iter().any(|byte| byte.is_of(incarnation, digest, record.sequence));
        (is_whole && !is_damaged).then_some(record)
    }

    /// Returns true if another shard has a whole record of the same bytes: one as the owner, which knows of the
    /// replica, and the other as its replica owner.
    fn has_another_record(&self, incarnation: usize, digest: Digest) -> bool {
        let (at, slot) = (&self.incarnations[incarnation], digest.slot());
        let is_owner = |of: usize| self.incarnations[of].service.inspect().serves(slot);
        let fits = |of: usize| {
            let service = &self.incarnations[of].service;
            match is_owner(of) {
                true => !service.store().objects().copies(digest).at.is_empty(),
                false => service.inspect().second_since(slot).is_some(),
            }
        };
        if !fits(incarnation) {
            return false;
        }
        let Some(own) = self.whole_record(incarnation, digest) else { return false };
        let is_other = |other: usize| {
            let there = &self.incarnations[other];
            there.alive
                && self.nodes[there.node].up
                && there.node != at.node
                && is_owner(other) != is_owner(incarnation)
                && fits(other)
                && self.whole_record(other, digest).is_some_and(|record| record.checksum == own.checksum)
        };
        (0..self.incarnations.len()).any(is_other)
    }

    /// Notes that a shard has another role than before in the slots of objects for which `moved` returns true.
    pub(crate) fn note_moved_records(&mut self, incarnation: usize, moved: impl Fn(Digest) -> bool) {
        let is_moved = |byte: &&mut DamagedByte| byte.incarnation == incarnation && moved(byte.digest);
        self.damaged_bytes.iter_mut().filter(is_moved).for_each(|byte| byte.has_moved = true);
    }

    /// Has all disks scrubbed, in scenarios with damaged records.
    pub(crate) fn scrub_disks(&mut self) {
        if !self.scenario.scrubs_disks {
            return;
        }
        let now_ns = self.now_ns;
        for index in 0..self.incarnations.len() {
            let at = &mut self.incarnations[index];
            if let Some(tier) = at.service.tier_mut().filter(|_| at.alive) {
                tier.order(TierOrder::Verify { bytes_per_s: SCRUB_BYTES_PER_S }, now_ns);
                // A shard at rest has no other reason to look at its tier.
                self.drain_service(index, None);
            }
        }
    }

    /// Checks, where disks were scrubbed, that no record is left whose byte was damaged.
    pub(crate) fn check_records(&mut self) {
        let (mut repaired, mut left) = (0, None);
        for at in self.incarnations.iter().filter(|at| at.alive) {
            repaired += at.service.inspect().repairs().records.repaired;
        }
        self.statistics.repaired += repaired;
        for byte in &self.damaged_bytes {
            let at = &self.incarnations[byte.incarnation];
            if !at.alive || !self.scenario.scrubs_disks {
                continue;
            }
            let (inspected, slot) = (at.service.inspect(), byte.digest.slot());
            let Some(view) = inspected.ssd_record(byte.digest) else {
                let is_promised = self.doubled.keys().any(|key| self.shadow.digest(*key) == byte.digest);
                if is_promised && !byte.has_moved && (inspected.serves(slot) || inspected.second_since(slot).is_some())
                {
                    left = Some(format!("{byte:?}: the record is gone: {:?}", inspected.repairs()));
                }
                continue;
            };
            let (Some(disk), Some(tier)) = (self.disks.get(&self.lineage(byte.incarnation)), &self.scenario.tier)
            else {
                continue;
            };
            let newer = disk.newest_record(byte.digest, tier.config.block_bytes, Some(byte.sequence));
            if newer.is_none() {
                let repairs = inspected.repairs();
                let offset = byte.offset;
                left = Some(format!(
                    "byte {offset} of incarnation {}, of {view:?}, is damaged after the scrub: {repairs:?}",
                    byte.incarnation
                ));
            }
        }
        if let Some(what) = left {
            self.violate(broken(Rule::Lost, what));
        }
    }
}

impl DamagedByte {
    fn is_of(&self, incarnation: usize, digest: Digest, sequence: u64) -> bool {
        (self.incarnation, self.digest, self.sequence) == (incarnation, digest, sequence)
    }
}
