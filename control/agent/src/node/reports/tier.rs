//! Reports of a node's SSD tiers to the control plane, after each heartbeat, and the orders that it returns.

use std::time::{Duration, Instant};

use kvplane_engine::{
    Admission, ScrubReport, ScrubState, ShardHandle, ShardSnapshot, TIER_FORMAT, TierOrder, TierSnapshot,
};
use kvplane_rpc::message::{
    self, LogSegments, Prefetches, ReportTiers, SHARDS_PER_REPORT, ScrubFigures, TierAction, TierErrors, TierGets,
    TierShard, WriteBudget,
};

use crate::error::Error;
use crate::link::ControlLink;

/// Pause of reports after the control plane failed to answer one: a control plane of an earlier version does not know
/// them.
const PAUSE: Duration = Duration::from_secs(60);
/// Limit of the text fields in a report.
const TEXT_BYTES: usize = 256;

/// State of the reports and of the orders carried out.
pub(crate) struct TierReports {
    /// Device of each shard.
    devices: Vec<String>,
    carried_out: u64,
    paused_until: Option<Instant>,
}

impl TierReports {
    /// Creates the reports for shards with these devices; none for a node without SSDs.
    pub(crate) const fn new(devices: Vec<String>) -> Self {
        Self { devices, carried_out: 0, paused_until: None }
    }

    /// Reports the state of the tiers and carries out orders; after any, reports once more. A failure affects this
    /// report only: the next heartbeat sends another.
    pub(crate) fn exchange(&mut self, link: &ControlLink, node: u64, incarnation: u64, shards: &[ShardHandle]) {
        if self.devices.is_empty() || self.paused_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        for _ in 0..2 {
            match self.report(link, node, incarnation, shards) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    let refused = matches!(&error, Error::Call(call) if call.refusal().is_some());
                    self.paused_until = (!refused).then(|| Instant::now() + PAUSE);
                    return;
                }
            }
        }
    }

    /// Reports once. Returns true if orders were received and carried out.
    fn report(
        &mut self,
        link: &ControlLink,
        node: u64,
        incarnation: u64,
        shards: &[ShardHandle],
    ) -> Result<bool, Error> {
        let mut told = Vec::new();
        for (part, handles) in shards.chunks(SHARDS_PER_REPORT).enumerate() {
            let mut all = Vec::with_capacity(handles.len());
            for (at, handle) in handles.iter().enumerate() {
                let shard = part * SHARDS_PER_REPORT + at;
                let snapshot = handle.snapshot()?;
                let device = self.devices.get(shard).map_or("", String::as_str);
                all.extend(snapshot.tier.map(|tier| describe(shard as u16, device, &snapshot, &tier)));
            }
            let carried_out = self.carried_out;
            told = link.call(ReportTiers { node, incarnation, carried_out, shards: all })?.orders;
        }
        let mut anything = false;
        for order in told.into_iter().filter(|order| order.number > self.carried_out).collect::<Vec<_>>() {
            for shard in shards {
                shard.order_tier(order_of(&order, shards.len() as u64))?;
            }
            self.carried_out = self.carried_out.max(order.number);
            anything = true;
        }
        Ok(anything)
    }
}

/// Returns a shard's part of an order for the node.
fn order_of(order: &message::TierOrder, shards: u64) -> TierOrder {
    match order.action {
        TierAction::Verify { bytes_per_s: 0 } => TierOrder::Verify { bytes_per_s: 0 },
        TierAction::Verify { bytes_per_s } => TierOrder::Verify { bytes_per_s: (bytes_per_s / shards).max(1) },
        TierAction::Reclaim { free_percent } => TierOrder::Reclaim { free_percent },
    }
}

fn short(mut text: String) -> String {
    while text.len() > TEXT_BYTES {
        text.pop();
    }
    text
}

fn describe(shard: u16, device: &str, snapshot: &ShardSnapshot, tier: &TierSnapshot) -> TierShard {
    let (stats, counters) = (&tier.stats, &tier.counters);
    let store = snapshot.store.unwrap_or_default();
    let state = match tier.degraded {
        Some(reason) => format!("degraded, memory only: {reason}"),
        None => {
            let state = if tier.is_recovered { "serving" } else { "recovering" };
            tier.voided
                .map_or_else(|| state.to_owned(), |why| format!("{state}; records found at the start are void: {why}"))
        }
    };
    let admission = match tier.admission {
        Admission::Full => "all",
        Admission::Selective => "selective",
        Admission::Promised => "promised",
    };
    TierShard {
        shard,
        device: short(device.to_owned()),
        format: TIER_FORMAT,
        state: short(state),
        objects: stats.objects.into(),
        segments: LogSegments {
            all: stats.segments,
            free: stats.free_segments,
            sealed: stats.sealed_segments,
            open: stats.open_segments,
            bad: stats.bad_segments,
            bytes_each: tier.segment_bytes,
        },
        live_bytes: stats.live_bytes,
        dead_bytes: stats.dead_bytes,
        put_bytes: stats.put_bytes,
        written_bytes: stats.written_bytes,
        gets: TierGets {
            memory_hits: store.hits,
            ssd_hits: counters.hits,
            misses: store.misses.saturating_sub(counters.hits),
        },
        prefetches: Prefetches { objects: counters.prefetches, used: counters.prefetches_used },
        errors: TierErrors {
            reads: stats.damage.unread,
            writes: stats.write_faults,
            damaged: stats.damage.damaged,
            stale: stats.damage.stale,
            misdirected: stats.damage.misdirected,
            quarantined: counters.quarantined,
            rewritten: counters.rewritten,
        },
        budget: WriteBudget {
            admission: admission.to_owned(),
            day_bytes: tier.day_bytes,
            bytes_per_day: tier.bytes_per_day,
            not_written: counters.writes_over_budget,
        },
        scrub: scrub_figures(&tier.scrub),
        wanted_free_segments: tier.wanted_free_segments,
    }
}

fn scrub_figures(scrub: &ScrubReport) -> ScrubFigures {
    let state = match scrub.state {
        ScrubState::Idle => "idle",
        ScrubState::Background => "background",
        ScrubState::Ordered => "verify",
        ScrubState::Paused => "paused",
    };
    ScrubFigures {
        state: state.to_owned(),
        bytes_per_s: scrub.bytes_per_s,
        objects: scrub.pass.objects,
        records: scrub.pass.records,
        bytes: scrub.pass.bytes,
        bad_records: scrub.pass.bad_records,
        passes: scrub.passes,
    }
}
