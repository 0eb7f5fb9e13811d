//! Memory and SSD together: what is put is written to the shard's [`Tier`], what memory has not is read from it.
//!
//! * [`Ssd`]: the tier, which of its records may be given, and removals.
//! * [`Demotion`]: from memory to the SSD.
//! * [`Promotion`]: from the SSD to memory.
//! * [`Reconciliation`]: which slots are served, and whether what the SSD has of them is still the newest.
//!
//! The host gives memory and time with [`Tiering::drive`] and carries out the block operations. Not here: what stands
//! on the device, which is the tier's.

mod counters;
mod demotion;
mod orders;
mod policy;
mod promotion;
pub(super) mod reconciliation;
mod ssd;

use std::collections::VecDeque;

use kvplane_tier::{BlockOp, Event, Fault, Memory, OpId, Output, RecoveryReport, Tier};

pub use self::counters::{TierCounters, TierSnapshot};
pub use self::demotion::Admission;
pub(super) use self::demotion::{Demotion, MoveProgress, may_put_without_ssd};
pub use self::orders::TierOrder;
pub use self::policy::{TierPolicy, WritePolicy};
pub(super) use self::promotion::{NotBegun, ObjectTenant, Promotion, TENANTS_KNOWN_MOST};
pub use self::reconciliation::VoidCause;
pub(super) use self::reconciliation::{Reconciliation, SlotSources};
pub(super) use self::ssd::{Ssd, Strike};
use super::shard::Shard;
use super::shard::effects::Effect;
use crate::StoreConfig;

/// The SSD of a shard, and what goes on between it and memory.
#[derive(Debug)]
pub struct Tiering {
    pub(super) ssd: Ssd,
    pub(super) demotion: Demotion,
    pub(super) promotion: Promotion,
    pub(super) reconciliation: Reconciliation,
    reports: Reports,
}

/// What the operator is to be told.
#[derive(Debug)]
struct Reports {
    /// The operator is told with so many records that are not whole.
    harm_to_tell: u64,
    recovered: Option<RecoveryReport>,
    notices: VecDeque<Event>,
}

impl Tiering {
    /// A tier under a store of this configuration, whose objects must begin at multiples of the tier's alignment.
    ///
    /// # Panics
    /// When the store's units do not suit direct I/O: a mistake of the host's.
    pub(super) fn new(mut tier: Tier, policy: TierPolicy, store: &StoreConfig) -> Self {
        let (unit, align) = (store.unit_bytes, u64::from(tier.config().memory_align_bytes));
        assert!(unit.is_multiple_of(align), "objects at multiples of {unit} for a tier that wants {align}");
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
            reports: Reports { harm_to_tell: 1, recovered: None, notices: VecDeque::new() },
            ssd: Ssd::new(tier, policy),
        }
    }

    /// When the next thing is to happen by itself.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let timeouts =
            [self.ssd.tier.poll_timeout(), self.demotion.poll_timeout(&self.ssd), self.promotion.poll_timeout()];
        timeouts.into_iter().flatten().min()
    }

    /// Lets the tier work: gives it what waits, and `start` what the device is to do. True where there was anything.
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
        // The tier may have made room by itself just now, without telling of anything: what waits for it has no other
        // occasion.
        progress || self.ssd.give_removals(shard, memory) | self.demotion.give_writes(&mut self.ssd, shard, memory)
    }

    /// A block operation is over.
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
            Event::Missed { token, .. } => promotion.missed(ssd, shard, token, memory),
            Event::Removed { token } => ssd.removed(shard, token, true),
            Event::RemoveFailed { token, .. } => ssd.removed(shard, token, false),
            Event::Quarantined { digest, miss } => {
                ssd.tell_of(shard, digest);
                demotion.quarantined(ssd, shard, digest, miss);
            }
            Event::Evicted { digest, .. } => {
                ssd.counters.reclaimed += 1;
                ssd.tell_of(shard, digest);
            }
            Event::Forgotten { objects } => {
                ssd.counters.reclaimed += u64::from(objects);
                ssd::break_off_events(shard);
            }
        }
    }

    /// Writes what may wait, as the shard is about to end. True once all is written.
    pub fn close(&mut self) -> bool {
        // Reads go on being of use to nobody; recovery begins anew.
        self.demotion.close() && self.ssd.removals.is_idle() || self.ssd.is_degraded()
    }
}
