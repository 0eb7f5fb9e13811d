//! Reports of complete imports to former owners, which then end their exports of these slots.
//!
//! A report is repeated until the former owner has answered it, or a map ends the import's validity: a slot left or
//! changed hands, or one of both began another incarnation. It names the epoch of the newest map, by which the import
//! is still this shard's last one: an export that began later belongs to another import. A former owner of an earlier
//! version takes a report for the drop of objects that it does not have.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Epoch, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use super::imports::Call;
use super::sources::Backoff;
use crate::service::fetches::{Fetch, Want};
use crate::service::shard::Shard;

/// Slots that were imported from one former owner, and that it may still export.
#[derive(Debug, Default)]
struct Report {
    /// Slots, each with the epoch of the map by which it was complete.
    slots: BTreeMap<Slot, Epoch>,
    is_in_flight: bool,
    backoff: Backoff,
}

/// Reports that former owners have not answered.
#[derive(Debug, Default)]
pub(super) struct Reports {
    open: BTreeMap<ShardKey, Report>,
}

impl Reports {
    /// Adds slots of which everything was imported from this former owner by the map of this epoch.
    pub(super) fn add(&mut self, source: ShardKey, slots: impl Iterator<Item = Slot>, epoch: Epoch) {
        let mut slots = slots.map(|slot| (slot, epoch)).peekable();
        if slots.peek().is_some() {
            self.open.entry(source).or_default().slots.extend(slots);
        }
    }

    /// Returns the former owners of which a report is not answered.
    pub(super) fn sources(&self) -> impl Iterator<Item = ShardKey> + '_ {
        self.open.keys().copied()
    }

    /// Follows a map after epoch `heard`: forgets the slots that are not `owned` any more, or were gained again, and
    /// former owners that are gone.
    pub(super) fn follow(
        &mut self,
        heard: Epoch,
        missed: bool,
        owned: &dyn Fn(u16) -> bool,
        owners: Option<&SlotOwners>,
    ) {
        let owners = owners.filter(|_| !missed);
        self.open.retain(|source, report| {
            let Some(owners) = owners.filter(|owners| owners.address(*source).is_some()) else { return false };
            report.slots.retain(|slot, _| owned(slot.0) && !owners.slot_has_changed(*slot, heard));
            !report.slots.is_empty()
        });
    }

    /// Returns the next report that is due, by the newest map.
    pub(super) fn next(&mut self, shard: &mut Shard, calls: &mut BTreeMap<u64, Call>) -> Option<Fetch> {
        let now_ns = shard.now_ns;
        let is_due = |report: &Report| !report.is_in_flight && report.backoff.retry_ns() <= now_ns;
        let (source, report) = self.open.iter_mut().find(|(_, report)| is_due(report))?;
        report.is_in_flight = true;
        let (slots, epoch) = (report.slots.keys().copied().collect::<Vec<_>>(), shard.ownership.epoch());
        let token = shard.new_fetch_token();
        calls.insert(token, Call::EndExports { source: *source, slots: slots.clone(), epoch });
        Some(Fetch { token, source: *source, want: Want::EndExports(slots, epoch) })
    }

    /// Handles the answer to a report of this epoch, or the failure to get one.
    pub(super) fn answered(&mut self, source: ShardKey, slots: &[Slot], epoch: Epoch, done: bool, now_ns: u64) {
        let Some(report) = self.open.get_mut(&source) else { return };
        report.is_in_flight = false;
        if !done {
            report.backoff.failed(now_ns);
            return;
        }
        report.backoff.succeeded();
        for slot in slots {
            // Imported again since the report was sent, it is to be reported again.
            if report.slots.get(slot).is_some_and(|complete| *complete <= epoch) {
                report.slots.remove(slot);
            }
        }
        if report.slots.is_empty() {
            self.open.remove(&source);
        }
    }

    /// Returns the time of the next report that waits for a backoff.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        let waiting = self.open.values().filter(|report| !report.is_in_flight);
        waiting.map(|report| report.backoff.retry_ns()).filter(|retry_ns| *retry_ns > now_ns).min()
    }
}
