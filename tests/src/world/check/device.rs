//! Checks of device pools: objects keep their names when they move, and at rest each has its bytes, wherever it is.

use kvplane_proto::Digest;
use kvplane_store::service::{Memory, MemoryExtent, copy_of};

use super::shadow::Shadow;
use super::{Rule, broken};
use crate::world::World;

impl World {
    /// Checks that an object, once it has a tail, has the name and the priority of its key.
    pub(crate) fn check_name(&mut self, incarnation: usize, digest: Digest) {
        let at = &self.incarnations[incarnation];
        let (Some(view), Some(key)) = (at.service.store().peek(digest), self.shadow.key(digest)) else { return };
        if !view.has_tail {
            return;
        }
        let (tail_at, priority) = (Some(view.tail_at), view.priority);
        let (_, _, name) = copy_of(digest, view.extent.bytes, view.is_head, tail_at, priority, 2, &at.pool);
        if name != Shadow::name(key).as_bytes() {
            let what = format!("incarnation {incarnation}: key {key} has lost its name, and has {name:?}: {view:?}");
            self.violate(broken(Rule::Bytes, what));
        }
        if priority != Shadow::priority(key) {
            let what = format!("incarnation {incarnation}: key {key} has another priority: {view:?}");
            self.violate(broken(Rule::Bytes, what));
        }
    }

    /// Checks, at rest, the bytes of every object of a shard with a device pool, and that no copy is in flight.
    pub(crate) fn check_device(&mut self, incarnation: usize) {
        let at = &self.incarnations[incarnation];
        let Some(device) = &at.device else { return };
        if !device.is_idle() {
            let what = format!(
                "incarnation {incarnation}: {} copies of its device are in flight, {} ranges lent",
                device.in_flight(),
                device.memory.ledger.len()
            );
            self.violate(broken(Rule::Leak, what));
            return;
        }
        for key in 0..self.scenario.keys {
            let at = &self.incarnations[incarnation];
            let Some(view) = at.service.store().peek(self.shadow.digest(key)) else { continue };
            let memory = if view.is_on_device { Memory::DevicePool } else { Memory::Pool };
            let extent = MemoryExtent { memory, offset: view.extent.offset, bytes: view.extent.bytes };
            let checked = self.shadow.check_read(key, view.version.0, &at.written(view.version.0, extent));
            self.require(checked);
        }
    }

    /// Counts what a shard's device pool did.
    pub(crate) fn count_device(&mut self, incarnation: usize) {
        let at = &self.incarnations[incarnation];
        let Some(device) = &at.device else { return };
        let (stats, counters) = (at.service.store().stats().device, at.service.inspect().counters());
        let counts = &mut self.statistics.device;
        counts.promotions += stats.promotions;
        counts.demotions += stats.demotions;
        counts.recalls += counters.recalls;
        counts.gets += counters.device_gets;
        counts.cut_off += device.moves().len() as u64;
    }
}
