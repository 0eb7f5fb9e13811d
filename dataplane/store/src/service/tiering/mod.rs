//! Tiering: objects are demoted from memory to the shard's [`Tier`], and promoted from it.
//!
//! * [`Ssd`]: the tier, the visibility of its records, and removals.
//! * [`Demotion`]: from memory to the SSD.
//! * [`Promotion`]: from the SSD to memory.
//! * [`Reconciliation`]: the slots that are served, and whether their records on the SSD are still the newest.
//!
//! The host calls [`Tiering::drive`] with its memory and the time, and carries out the block operations. The format on
//! the device belongs to the tier.

mod counters;
mod demotion;
mod fair;
mod orders;
mod policy;
mod promotion;
pub(super) mod reconciliation;
mod snapshot;
mod ssd;

use std::collections::VecDeque;

use kvplane_tier::{BlockOp, Event, Fault, Memory, OpId, Output, RecoveryReport, Tier};

pub use self::counters::TierCounters;
pub use self::demotion::Admission;
pub(super) use self::demotion::{Demotion, MoveProgress, may_put_without_ssd};
pub use self::orders::TierOrder;
pub(super) use self::policy::Frequency;
pub use self::policy::{TierPolicy, WritePolicy};
pub(super) use self::promotion::{NotBegun, ObjectTenant, Promotion, TENANTS_KNOWN_MOST, wanted_until_ns};
pub use self::reconciliation::VoidCause;
pub(super) use self::reconciliation::{Reconciliation, SlotSources};
pub use self::snapshot::TierSnapshot;
pub use self::ssd::SsdUsage;
pub(super) use self::ssd::{RemovalCause, Ssd, WaitingReaders, break_off_events, note_exports};
use super::shard::Shard;
use super::shard::effects::Effect;
use crate::StoreConfig;

/// SSD of a shard, and the traffic between it and memory.
#[derive(Debug)]
pub struct Tiering {
    pub(super) ssd: Ssd,
    pub(super) demotion: Demotion,
    pub(super) promotion: Promotion,
    pub(super) reconciliation: Reconciliation,
    reports: Reports,
}

/// Reports to the operator.
#[derive(Debug)]
struct Reports {
    /// Number of damaged records at which the next report is due.
    damage_to_report: u64,
    recovered: Option<RecoveryReport>,
    notices: VecDeque<Event>,
}

impl Tiering {
    /// Creates a tier under a store of this configuration, whose objects must begin at multiples of the tier's
    /// alignment.
    ///
    /// # Panics
    /// If the store's units do not suit direct I/O: a mistake of the host.
    pub(super) fn new(mut tier: Tier, policy: TierPolicy, store: &StoreConfig) -> Self {
        let (unit, align) = (store.unit_bytes, u64::from(tier.config().memory_align_bytes));
        assert!(
            unit.is_multiple_of(align),
            "objects begin at multiples of {unit} bytes, but the tier needs multiples of {align}"
        );
        let (seed, other) = (store.hash_seed, tier.config().hash_seed);
        assert!(seed == other, "lists walk both indexes in one order, but their seeds differ");
        tier.set_scrub(policy.scrub_bytes_per_s);
        let part_of_pool = |percent: u8| store.pool_bytes / 100 * u64::from(percent);
        // The other half of the pins is for readers.
        let most = store.max_pins as usize / 2;
        Self {
            demotion: Demotion::new(policy.bytes_per_day, part_of_pool(policy.backlog_percent), most),
            promotion: Promotion::new(part_of_pool(policy.prefetch_percent)),
            reconciliation: Reconciliation::new(),
            reports: Reports { damage_to_report: 1, recovered: None, notices: VecDeque::new() },
            ssd: Ssd::new(tier, policy),
        }
    }

    /// Returns the time of the next action.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let timeouts = [self.ssd.poll_timeout(), self.demotion.poll_timeout(&self.ssd), self.promotion.poll_timeout()];
        timeouts.into_iter().flatten().min()
    }

    /// Lets the tier work: passes it queued requests, and passes device operations to `start`. Returns true if there
    /// was any progress.
    pub(super) fn drive(
        &mut self,
        shard: &mut Shard,
        sources: &SlotSources<'_>,
        memory: &mut dyn Memory,
        start: &mut dyn FnMut(BlockOp),
    ) -> bool {
        let Self { ssd, demotion, promotion, reconciliation, .. } = self;
        demotion.budget.charge_up_to(ssd.tier.written_bytes(), shard.now_ns);
        promotion.expire_prefetched(ssd, shard);
        let mut progress = ssd.sweep_void(shard);
        if ssd.sweep.take_ended() {
            reconciliation.note_sweep();
        }
        progress |= reconciliation.go_on(ssd, shard, sources, &|digest| demotion.is_writing(digest));
        progress |= reconciliation.write_note(ssd, shard, memory);
        let replicas = ssd.open_replicas(shard, |slot| reconciliation.is_noted(slot));
        demotion.keep_replicas(replicas);
        progress |= ssd.give_removals(shard, memory);
        progress |= demotion.give_writes(ssd, shard, memory);
        progress |= promotion.read_tails(ssd, shard);
        while let Some(output) = self.ssd.tier.poll_output(shard.now_ns, memory) {
            progress = true;
            match output {
                Output::Block(op) => start(op),
                Output::Event(event) => self.handle(event, shard, memory),
            }
        }
        progress |= self.promotion.begin_queued(&mut self.ssd, shard);
        // The tier may just have freed space without an event: requests that wait for it would not be retried
        // otherwise.
        progress || self.ssd.give_removals(shard, memory) | self.demotion.give_writes(&mut self.ssd, shard, memory)
    }

    /// Handles the completion of a block operation.
    pub fn completed(&mut self, now_ns: u64, id: OpId, result: Result<u32, Fault>, memory: &mut dyn Memory) {
        self.ssd.tier.complete(now_ns, id, result, memory);
    }

    fn handle(&mut self, event: Event, shard: &mut Shard, memory: &mut dyn Memory) {
        let Self { ssd, demotion, promotion, reconciliation, reports } = self;
        match event {
            Event::Opened { .. } | Event::Refused(_) | Event::Degraded(_) => reports.notices.push_back(event),
            Event::OwnershipNoted => reconciliation.noted(ssd, shard),
            Event::Recovered(report) => {
                reports.recovered = Some(report);
                reports.notices.push_back(event);
                ssd::break_off_events(shard);
                shard.effects.note(Effect::RecordsChanged);
            }
            Event::Stored { token, .. } => demotion.written(ssd, shard, token, true),
            Event::StoreFailed { token, .. } => demotion.written(ssd, shard, token, false),
            Event::Released { token } => demotion.released(ssd, shard, token),
            Event::Got { token, version, checksum } => {
                promotion.read_done(ssd, shard, token, Some((version, checksum)));
            }
            Event::Key { token, version } => promotion.key_read(ssd, shard, token, version, memory),
            Event::Missed { token, record, .. } => promotion.missed(ssd, shard, token, &record, memory),
            Event::Removed { token } => ssd.removed(shard, token, true),
            Event::RemoveFailed { token, .. } => ssd.removed(shard, token, false),
            Event::Quarantined { record, miss } => {
                demotion.quarantined(ssd, shard, &record, miss);
                ssd.record_damaged(shard, &record, Vec::new());
            }
            Event::Evicted { digest, .. } => {
                ssd.counters.reclaimed += 1;
                shard.store.objects_mut().orphan_detached(digest);
                ssd.tell_of(shard, digest);
            }
            Event::Forgotten { objects } => {
                ssd.counters.reclaimed += u64::from(objects);
                shard.store.objects_mut().detached_mut().doubt_all();
                ssd::break_off_events(shard);
            }
        }
    }

    /// Flushes delayed writes, as the shard is about to stop. Returns true once all is written.
    pub fn close(&mut self) -> bool {
        // Reads in flight do not matter any more, and recovery begins anew at the next start.
        self.demotion.close() && self.ssd.removals.is_idle() || self.ssd.is_degraded()
    }
}
