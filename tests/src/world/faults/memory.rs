//! Damage of memory at rest: bits of objects in pools flip. A bit flips only where another node has the object with
//! good bytes, so that no object may be lost, or stay damaged once all faults are over.

use kvplane_proto::Digest;
use kvplane_store::service::MemoryExtent;
use kvplane_store::{ObjectView, Replica};

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::cluster::node::ShardIncarnation;
use crate::world::far::PoolCopy;

/// Byte of an object that is not as it was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlippedBit {
    digest: Digest,
    version: u64,
    offset: u64,
    /// Byte that was written.
    written: u8,
}

impl FlippedBit {
    /// Follows its byte, if a copy moves it.
    pub(crate) const fn follow(&mut self, copy: &PoolCopy) {
        if self.offset >= copy.from && self.offset < copy.from + copy.bytes {
            self.offset = self.offset - copy.from + copy.to;
        }
    }
}

impl ShardIncarnation {
    /// Returns the bytes of an extent of the pool, in which this version of an object is, as they were written.
    pub(crate) fn undamaged(&self, version: u64, extent: MemoryExtent) -> Vec<u8> {
        let mut bytes = self.bytes(extent.offset, extent.bytes);
        for flip in self.flips.iter().filter(|flip| flip.version == version) {
            let at = flip.offset.checked_sub(extent.offset).filter(|at| *at < extent.bytes);
            at.into_iter().for_each(|at| bytes[at as usize] = flip.written);
        }
        bytes
    }

    /// Returns the bits of its objects that have flipped and are not repaired.
    fn flipped(&self) -> impl Iterator<Item = &FlippedBit> {
        let is_there = |flip: &&FlippedBit| {
            let view = self.service.store().peek(flip.digest);
            view.is_some_and(|view| view.version.0 == flip.version)
                && self.pool.read()[flip.offset as usize] != flip.written
        };
        self.flips.iter().filter(is_there)
    }

    fn has_flipped(&self, digest: Digest) -> bool {
        self.flipped().any(|flip| flip.digest == digest)
    }

    fn view(&self, digest: Digest) -> Option<ObjectView> {
        self.service.store().peek(digest).filter(|view| !view.is_on_device && !self.has_flipped(digest))
    }
}

impl World {
    /// Flips a bit of an object of a node.
    pub(crate) fn flip_bit(&mut self, node: usize, drawn: u64) {
        let Some(incarnation) = self.shard_of(node, drawn) else { return };
        let digests = (0..self.scenario.keys).map(|key| self.shadow.digest(key));
        let may_flip: Vec<Digest> = digests.filter(|digest| self.has_another(incarnation, *digest)).collect();
        if may_flip.is_empty() {
            return;
        }
        let rng = &mut self.streams.faults;
        let digest = may_flip[rng.below(may_flip.len() as u64) as usize];
        let at = &mut self.incarnations[incarnation];
        let Some(view) = at.view(digest) else { return };
        let offset = view.extent.offset + rng.below(view.extent.bytes);
        let bit = rng.below(8);
        let written = at.pool.bytes(offset, 1)[0];
        at.flips.push(FlippedBit { digest, version: view.version.0, offset, written });
        at.pool.copy_in(offset, &[written ^ 1 << bit]);
        self.statistics.flips += 1;
        self.statistics.far.flips += u64::from(view.is_far);
        self.detail(offset, || format!("incarnation {incarnation}: bit {bit} of byte {offset} of {digest} flips"));
    }

    /// Returns true if a shard has an object with good bytes, and another one has it too: one as the owner, which knows
    /// of the replica, and the other as its replica owner.
    fn has_another(&self, incarnation: usize, digest: Digest) -> bool {
        let at = &self.incarnations[incarnation];
        let Some(view) = at.view(digest) else { return false };
        let bytes = at.bytes(view.extent.offset, view.extent.bytes);
        let slot = digest.slot();
        let fits = |one: &ShardIncarnation, view: &ObjectView| match view.replica {
            Replica::Second => one.service.inspect().second_since(slot).is_some(),
            _ => one.service.inspect().serves(slot) && !view.copies.at.is_empty(),
        };
        let is_other = |other: &ShardIncarnation| {
            let is_live = other.alive && self.nodes[other.node].up && other.node != at.node;
            is_live
                && other.view(digest).is_some_and(|there| {
                    (view.replica == Replica::Second) != (there.replica == Replica::Second)
                        && fits(other, &there)
                        && other.bytes(there.extent.offset, there.extent.bytes) == bytes
                })
        };
        fits(at, &view) && self.incarnations.iter().any(is_other)
    }

    /// Checks, where shards scrub their memory, that all damage is repaired.
    pub(crate) fn check_memory(&mut self, incarnation: usize) {
        let at = &self.incarnations[incarnation];
        let repairs = at.service.inspect().repairs();
        self.statistics.repaired += repairs.repaired;
        let flipped = at.flipped().next().copied().filter(|_| self.scenario.scrub_bytes_per_s > 0);
        if let Some(flip) = flipped {
            let what = format!("incarnation {incarnation} has {flip:?}, although all faults are over: {repairs:?}");
            self.violate(broken(Rule::Lost, what));
        }
    }
}
