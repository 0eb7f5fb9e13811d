//! Tiers of shards: their disks, which outlive processes, the effects of crashes and power failures on them, and the
//! promises about their objects.

use std::collections::BTreeMap;

use kvplane_proto::Digest;
use kvplane_proto::Status;
use kvplane_proto::ids::{NodeId, ShardId};
use kvplane_proto::rng::Rng;
use kvplane_store::service::Tiering;
use kvplane_store::service::{PutAck, Service, TierPolicy, WritePolicy, tenant_of_tail};
use kvplane_tier::{
    BlockOp, Event as TierEvent, Identity, OpId, OpenError, OpenOptions, RecoveryReport, Tier, TierConfig,
};

use crate::world::World;
use crate::world::check::ledger::Use;
use crate::world::check::results::What;
use crate::world::check::{Rule, broken};
use crate::world::faults::disk::{Disk, DiskFaults, FlippedByte, IncarnationMemory};
use crate::world::queue::Event;
use crate::world::scenario::{MS, Mischief, US};

/// Name of the tier in the ledger of a pool, where connections have their numbers.
const TIER: u32 = u32::MAX;
/// Deadline of a get of the audit.
const AUDIT_NS: u64 = 3_000 * MS;

/// Parameters of tiers, drawn from a seed.
#[derive(Clone, Debug)]
pub(crate) struct TierScenario {
    pub(crate) config: TierConfig,
    pub(crate) policy: TierPolicy,
    pub(crate) faults: DiskFaults,
    /// A crash of a node may be a power failure.
    pub(crate) power: bool,
    pub(crate) latency_ns: u64,
    /// Chance that a node is started without its disks. Only with a chance above 0 do nodes report their disks.
    pub(crate) without: f64,
}

impl core::fmt::Display for TierScenario {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { config, policy, faults, power, without, .. } = self;
        write!(f, "{} segments, {policy:?}, {faults:?}, power fails: {power}, ", config.segments)?;
        write!(f, "incarnations without disks: {without:.2}")
    }
}

/// Tier state of a shard's incarnation.
pub(crate) struct IncarnationTier {
    staging: Vec<u8>,
    flipped: Vec<FlippedByte>,
    ops: BTreeMap<u64, (BlockOp, u64)>,
    pub(crate) opened: bool,
}

impl TierScenario {
    pub(crate) fn draw(rng: &mut Rng, object_bytes: u64, keys: usize) -> Self {
        let block_bytes = if rng.chance(0.5) { 512 } else { 4096 };
        let large = object_bytes > 32 << 10;
        let config = TierConfig {
            block_bytes,
            segment_bytes: if large { 256 << 10 } else { 96 << 10 },
            // Disks small enough for reclaim give no promises.
            segments: if rng.chance(0.6) { 64 } else { 6 + rng.below(12) as u32 },
            footer_page_bytes: 4096,
            chunk_bytes: 64 << 10,
            max_object_bytes: object_bytes as u32,
            max_key_bytes: 128,
            memory_align_bytes: 256,
            extent_bytes: if rng.chance(0.5) { 4096 } else { 16 << 10 },
            footer_pages: 2,
            max_records: 4 * keys as u32 + 16,
            hash_seed: 0,
            group_bytes: 16 << 10,
            group_delay_ns: 200 * US,
            groups: 2 + rng.below(4) as u32,
            sync_interval_ns: 20 * MS,
            durable_writes: rng.chance(0.3),
            max_reads: 4,
            max_waiters: 32,
            max_op_bytes: 16 << 10,
            ops_in_flight: [4, 3, 1, 2],
            scan_bytes: 16 << 10,
            scan_buffers: 2,
            copy_bytes: (object_bytes as u32).next_multiple_of(4096) * 2,
            max_moves: 3,
            reinsert_percent: 50,
            hot_hits: rng.below(3) as u8,
            free_segments_low: 3,
            max_bad_segments: 3,
        };
        let write = match rng.below(5) {
            0 => WritePolicy::Back { within_ns: 50 * MS },
            1 => WritePolicy::Selective { times: 2 },
            _ => WritePolicy::Through,
        };
        let ack = [PutAck::Durable, PutAck::Durable, PutAck::Buffered, PutAck::Memory][rng.below(4) as usize];
        let policy = TierPolicy {
            write,
            ack,
            promote_times: 1 + rng.below(3) as u8,
            backlog_percent: 50,
            prefetch_percent: if rng.chance(0.3) { 30 } else { 0 },
            prefetch_on_exists: rng.chance(0.7),
            bytes_per_day: 0,
            scrub_bytes_per_s: if rng.chance(0.3) { 16 << 20 } else { 0 },
        };
        let latency_ns = [20 * US, 200 * US, 2 * MS][rng.below(3) as usize];
        let faults = draw_faults(rng);
        let power = ack == PutAck::Durable && rng.chance(0.7);
        let without = if rng.chance(0.3) { 0.5 * rng.unit() } else { 0.0 };
        Self { config, policy, faults, power, latency_ns, without }
    }

    /// Returns the parameters with large disks that do what they report, written through.
    pub(crate) fn honest(mut self, rng: &mut Rng) -> Self {
        self.config.segments = 64;
        self.policy.write =
            if rng.chance(0.8) { WritePolicy::Through } else { WritePolicy::Back { within_ns: 50 * MS } };
        self.policy.ack = if rng.chance(0.5) { PutAck::Buffered } else { PutAck::Memory };
        self.policy.scrub_bytes_per_s = 0;
        (self.faults, self.power, self.without) = (DiskFaults::default(), false, 0.0);
        self
    }

    /// Adjusts the parameters so that a host's bug matters.
    pub(crate) fn suit(&mut self, mischief: Mischief) {
        self.policy = TierPolicy { write: WritePolicy::Through, ack: PutAck::Buffered, ..self.policy };
        (self.faults, self.power) = (DiskFaults::default(), false);
        match mischief {
            Mischief::SkipFlush => (self.policy.ack, self.power) = (PutAck::Durable, true),
            Mischief::TrustDisk => self.faults.corrupt_read = 0.1,
            Mischief::HideDisks => self.without = 0.4,
            _ => {}
        }
    }

    /// Returns true if its disks are small enough to be filled.
    pub(crate) const fn may_reclaim(&self) -> bool {
        self.config.segments < 64
    }

    /// Returns true if an acknowledged put survives every crash of this scenario.
    pub(crate) fn promises(&self) -> bool {
        self.policy.write == WritePolicy::Through && self.policy.ack != PutAck::Memory && !self.faults.any()
    }
}

/// Draws the faults of disks: half of the disks are honest; the others fail in one or a few ways.
fn draw_faults(rng: &mut Rng) -> DiskFaults {
    if rng.chance(0.5) {
        return DiskFaults::default();
    }
    let mut maybe = |chance: f64| if rng.chance(0.35) { chance * rng.unit() } else { 0.0 };
    DiskFaults {
        read_error: maybe(0.02),
        write_error: maybe(0.01),
        short: maybe(0.02),
        corrupt_write: maybe(0.05),
        corrupt_read: maybe(0.05),
        lost: maybe(0.02),
        misdirected: maybe(0.02),
        bad_range: maybe(0.01),
        spares: false,
    }
}

impl World {
    /// Returns the lineage that keeps a shard's objects over its incarnations: its disk, if it has one, else only the
    /// incarnation itself.
    pub(crate) fn lineage(&self, incarnation: usize) -> usize {
        let at = &self.incarnations[incarnation];
        let lasts = at.tier.is_some() || self.scenario.kept.is_some();
        if lasts { at.node * 256 + usize::from(at.shard) } else { (1 << 20) + incarnation }
    }

    /// Decides if a node starts without its disks. Their objects are then void: the node may remove and replace them.
    pub(crate) fn leaves_disks(&mut self, node: usize) -> bool {
        let chance = self.scenario.tier.as_ref().map_or(0.0, |tier| tier.without);
        if chance == 0.0 || !self.streams.without.chance(chance) {
            return false;
        }
        for shard in 0..usize::from(self.scenario.shards) {
            self.shadow.promises_void(node * 256 + shard, |_| true);
        }
        self.statistics.without += 1;
        true
    }

    /// Returns the identity of a node's disks, as reported before it joins; `None` without disks.
    pub(crate) fn disks_of(&self, node: usize) -> Option<u128> {
        // Where no node starts without its disks, the report matters only for nodes that die together. A lost state has
        // forgotten the reports of absent nodes.
        if let Some(kept) = self.scenario.kept {
            return (!kept.of_processes).then_some(node as u128 + 1);
        }
        let forgets = self.scenario.chances.weights[crate::world::faults::Fault::LoseControl as usize] > 0;
        let tells = self.scenario.returns && !forgets;
        self.scenario.tier.as_ref().filter(|tier| tier.without > 0.0 || tells)?;
        (!self.nodes[node].without && !self.scenario.has(Mischief::HideDisks)).then_some(node as u128 + 1)
    }

    /// Opens the disk of a shard's new incarnation.
    pub(crate) fn open_tier(&mut self, node: usize, shard: u16, service: &mut Service) -> Option<IncarnationTier> {
        let scenario = self.scenario.tier.clone().filter(|_| !self.nodes[node].without)?;
        let config = scenario.config;
        let (seed, key) = (self.scenario.seed, node * 256 + usize::from(shard));
        let (skip_flush, drop_tombstones) =
            (self.scenario.has(Mischief::SkipFlush), self.scenario.has(Mischief::DropTombstones));
        self.disks.entry(key).or_insert_with(|| {
            let rng = Rng::new(seed ^ (key as u64) << 48, "disk");
            let mut disk = Disk::new(config.device_bytes(), config.segment_bytes, rng, scenario.faults);
            (disk.skip_flush, disk.drop_tombstones) = (skip_flush, drop_tombstones);
            disk
        });
        let identity = Identity { cluster: 1, node: NodeId(node as u64 + 1), shard: ShardId(shard) };
        let (format_blank, expected_uuid) = (Some(key as u128 + 1), None);
        let options = OpenOptions { identity, expected_uuid, format_blank, tenant_of: tenant_of_tail };
        let staging = vec![0xa5; config.staging_bytes() as usize];
        let hash_seed = service.store().config().hash_seed;
        let tier = Tier::open(TierConfig { hash_seed, ..config }, options).expect("the scenario's tier is valid");
        service.attach_tier(tier, scenario.policy);
        Some(IncarnationTier { staging, flipped: Vec::new(), ops: BTreeMap::new(), opened: false })
    }

    /// Returns true if all of a node's shards have opened their disks.
    pub(crate) fn tiers_opened(&self, node: usize) -> bool {
        self.nodes[node]
            .shards
            .iter()
            .all(|incarnation| self.incarnations[*incarnation].tier.as_ref().is_none_or(|tier| tier.opened))
    }

    /// Lets a tier work; returns true if there was anything to do.
    pub(crate) fn drive_tier(&mut self, incarnation: usize) -> bool {
        if !self.incarnations[incarnation].alive || self.incarnations[incarnation].tier.is_none() {
            return false;
        }
        let (mut started, now_ns, trusting) = (Vec::new(), self.now_ns, self.scenario.has(Mischief::TrustDisk));
        let progress = self.incarnations[incarnation]
            .with_tier(trusting, |service, memory| service.drive_tier(now_ns, memory, &mut |op| started.push(op)));
        // Some are reads to places that others have just left.
        self.check_moves(incarnation);
        for op in started {
            self.start_op(incarnation, op);
        }
        while let Some(notice) = self.incarnations[incarnation].service.tier_mut().and_then(Tiering::poll_notice) {
            self.detail(incarnation as u64, || format!("incarnation {incarnation}: {notice:?}"));
            match notice {
                TierEvent::Opened { .. } => {
                    self.incarnations[incarnation].tier.iter_mut().for_each(|tier| tier.opened = true);
                }
                // Like a real node: it reports the error and ends. It comes back later.
                TierEvent::Refused(error) => {
                    self.incarnations[incarnation].refused = true;
                    self.wipe_spoilt(incarnation, error);
                }
                TierEvent::Degraded(_) => self.statistics.degraded += 1,
                TierEvent::Recovered(report) => {
                    self.statistics.recovered += u64::from(report.objects);
                    self.check_recovered(incarnation, &report);
                    if report.given_up > 0 {
                        let lineage = self.lineage(incarnation);
                        self.shadow.promises_void(lineage, |_| true);
                    }
                }
                _ => {}
            }
        }
        if self.incarnations[incarnation].refused && !self.incarnations[incarnation].ending {
            self.incarnations[incarnation].ending = true;
            self.after(MS, Event::TierRefused(incarnation));
        }
        progress
    }

    /// Checks recovery: an honest disk has lost no removal, and no object is given up for one.
    fn check_recovered(&mut self, incarnation: usize, report: &RecoveryReport) {
        let honest = self.scenario.tier.as_ref().is_some_and(|tier| !tier.faults.any());
        let drops = self.scenario.has(Mischief::DropTombstones);
        if honest && !drops && report.lost_removals > 0 {
            let what = format!(
                "incarnation {incarnation} reports lost removals that its disk has, or that were not durable: {report}"
            );
            self.violate(broken(Rule::Durable, what));
        }
    }

    /// Replaces a disk that cannot be opened: a failing disk may lose both superblocks, write elsewhere while it is
    /// formatted, or have a bad range where it must be blank before that.
    fn wipe_spoilt(&mut self, incarnation: usize, error: OpenError) {
        let fails = self.scenario.tier.as_ref().is_some_and(|tier| tier.faults.any());
        let lineage = self.lineage(incarnation);
        let spoilt = match error {
            OpenError::NotBlank { .. } => true,
            OpenError::Unreadable => self.disks.get(&lineage).is_some_and(|disk| !disk.is_formatted()),
            _ => false,
        };
        if fails && spoilt {
            self.disks.get_mut(&lineage).into_iter().for_each(Disk::wipe);
            self.shadow.promises_void(lineage, |_| true);
        }
    }

    fn start_op(&mut self, incarnation: usize, op: BlockOp) {
        let (lineage, bits) = (self.lineage(incarnation), op.id.to_bits());
        let written = self.disks[&lineage].written();
        for piece in pool_pieces(&op) {
            let lent = self.incarnations[incarnation].ledger.lend(TIER, usage(&op), piece.offset, piece.bytes.into());
            self.require(lent);
        }
        if let Some(tier) = &mut self.incarnations[incarnation].tier {
            tier.ops.insert(bits, (op, written));
        }
        let latency_ns = self.scenario.tier.as_ref().map_or(0, |tier| tier.latency_ns);
        let wait_ns = 1 + self.streams.disk.below(2 * latency_ns);
        self.after(wait_ns, Event::Disk(incarnation, bits));
    }

    /// Carries out an operation of the disk.
    pub(crate) fn disk_done(&mut self, incarnation: usize, bits: u64) {
        if !self.incarnations[incarnation].alive || self.is_doomed(incarnation) {
            return;
        }
        let Some((op, given_at)) = self.incarnations[incarnation].tier.as_mut().and_then(|tier| tier.ops.remove(&bits))
        else {
            return;
        };
        let (lineage, now_ns, trusting) =
            (self.lineage(incarnation), self.now_ns, self.scenario.has(Mischief::TrustDisk));
        let Some(disk) = self.disks.get_mut(&lineage) else { return };
        let result =
            self.incarnations[incarnation].with_tier(trusting, |_, memory| disk.carry_out(&op, given_at, memory));
        for piece in pool_pieces(&op) {
            self.incarnations[incarnation].ledger.end(TIER, usage(&op), piece.offset);
        }
        self.detail(bits, || {
            format!("incarnation {incarnation}: {:?} of {} at {}: {result:?}", op.action, op.bytes, op.offset)
        });
        self.statistics.disk_ops += 1;
        self.incarnations[incarnation].with_tier(trusting, |service, memory| {
            let tier = service.tier_mut().expect("a node with a device has a tier");
            tier.completed(now_ns, OpId::from_bits(bits), result, memory);
        });
        self.drain_service(incarnation, None);
    }

    /// Returns true if the node's last operation has come: it dies right before that.
    fn is_doomed(&mut self, incarnation: usize) -> bool {
        let node = self.incarnations[incarnation].node;
        let Some(left) = &mut self.nodes[node].ops_left else { return false };
        *left = left.saturating_sub(1);
        if *left > 0 {
            return false;
        }
        if !self.may_die(node) || self.scenario.chances.at_rest && !self.is_at_rest() {
            *self.nodes[node].ops_left.get_or_insert(1) = 1;
            return false;
        }
        self.crash_node(node);
        let down_ns = 1 + self.streams.faults.below(100 * MS);
        self.after(down_ns, Event::StartNode(node));
        true
    }

    /// Ends a node whose disk could not be opened, and restarts it.
    pub(crate) fn tier_refused(&mut self, incarnation: usize) {
        if self.incarnations[incarnation].alive {
            let node = self.incarnations[incarnation].node;
            self.crash_node(node);
            self.after(10 * MS, Event::StartNode(node));
        }
    }

    /// Decides if the power fails with a node's process.
    pub(crate) fn power_fails(&mut self, node: usize) -> bool {
        let may = self.scenario.tier.as_ref().is_some_and(|tier| tier.power);
        let said = core::mem::take(&mut self.nodes[node].power_fails);
        may && (said || self.streams.disk.chance(0.5))
    }

    /// Applies the end of a process to its disk.
    pub(crate) fn cut_off_disk(&mut self, incarnation: usize, power: bool) {
        let lineage = self.lineage(incarnation);
        self.count_kept(incarnation);
        let Some(disk) = self.disks.get_mut(&lineage) else { return };
        let at = &mut self.incarnations[incarnation];
        if at.service.inspect().tier().map(Tiering::snapshot).is_some_and(|snapshot| snapshot.stats.reclaims > 0) {
            // Reclaim evicts objects without reporting them.
            self.shadow.promises_void(lineage, |_| true);
        }
        let Some(tier) = &mut at.tier else { return };
        let ops = core::mem::take(&mut tier.ops);
        let mut pool = at.pool.write();
        let memory = IncarnationMemory { pool: &mut pool, staging: &mut tier.staging, flipped: None };
        ops.values().for_each(|(op, _)| disk.cut_off(op, &memory));
        drop(pool);
        if power {
            disk.power_failure();
        }
        if disk.faults.any() || disk.lies {
            self.shadow.promises_void(lineage, |_| true);
        }
        if disk.lies {
            // A lost write at the end of the log cannot be detected.
            let lost = |digest: Digest| disk.lost_tombstones.iter().any(|lost| lost.is_of(digest));
            self.shadow.removals_void(lineage, |digest| !disk.faults.spares || power || lost(digest));
            self.removals.void();
        }
        self.statistics.crashes += 1;
    }

    /// Counts an incarnation's reconciled and void slots.
    pub(crate) fn count_kept(&mut self, incarnation: usize) {
        let Some(snapshot) = self.incarnations[incarnation].service.inspect().tier().map(Tiering::snapshot) else {
            return;
        };
        let (compared, void) = (snapshot.counters.slots_compared, snapshot.counters.slots_voided);
        let kept = &mut self.statistics.kept;
        *kept = (kept.0 + compared, kept.1 + void);
    }

    /// Crashes all nodes once more, and checks that all promised objects exist.
    pub(crate) fn audit(&mut self) {
        let Some(tier) = self.scenario.tier.clone() else { return };
        let power = tier.power && self.streams.disk.chance(0.5);
        self.doubled.clear();
        for node in 0..self.nodes.len() {
            self.nodes[node].power_fails = power;
            self.crash_node(node);
            self.start_node(node);
        }
        let until_ns = self.now_ns + 8_000 * MS;
        self.run_until(until_ns, |_| false);
        if !tier.promises() {
            return;
        }
        let mut owners = Vec::new();
        for incarnation in 0..self.incarnations.len() {
            let lineage = self.lineage(incarnation);
            let at = &self.incarnations[incarnation];
            if !at.alive {
                continue;
            }
            if at.service.inspect().tier().map(Tiering::snapshot).is_some_and(|snapshot| snapshot.stats.reclaims > 0) {
                self.shadow.promises_void(lineage, |_| true);
            }
            owners.push(lineage);
        }
        for (key, version) in self.shadow.promised(&owners) {
            self.audit_one(key, version);
            if self.violation.is_some() {
                return;
            }
        }
    }

    /// Returns true if a shard's disk takes no writes, so that not everything works.
    pub(crate) fn tiers_degraded(&self) -> bool {
        let degraded = |incarnation: &crate::world::cluster::node::ShardIncarnation| {
            incarnation
                .service
                .inspect()
                .tier()
                .map(Tiering::snapshot)
                .is_some_and(|snapshot| snapshot.degraded.is_some())
        };
        self.incarnations.iter().any(|incarnation| incarnation.alive && degraded(incarnation))
    }

    fn audit_one(&mut self, key: usize, version: u64) {
        let client = key % self.scenario.clients;
        let Some(asked) = self.ask(client, key, What::Get { capacity: self.scenario.object_bytes }) else { return };
        let before = self.statistics.with_status(Status::Ok);
        let Some(batch) = self.submit(client, vec![asked], self.now_ns + AUDIT_NS) else { return };
        let until_ns = self.now_ns + 2 * AUDIT_NS;
        self.run_until(until_ns, |world| !world.clients[client].batches.contains_key(&batch));
        self.statistics.audited += 1;
        if self.statistics.with_status(Status::Ok) != before + 1 {
            let what = format!(
                "version {version} of key {key} was acknowledged and does not exist: {:?}",
                self.shadow.commit_of(version)
            );
            self.violate(broken(Rule::Durable, what));
        }
    }
}

fn pool_pieces(op: &BlockOp) -> impl Iterator<Item = kvplane_tier::Span> {
    op.pieces.as_slice().to_vec().into_iter().filter(|piece| piece.space == kvplane_tier::Space::Pool)
}

const fn usage(op: &BlockOp) -> Use {
    if matches!(op.action, kvplane_tier::Action::Read) { Use::Write } else { Use::Read }
}

impl crate::world::cluster::node::ShardIncarnation {
    /// Calls `act` with the service and its memory.
    fn with_tier<T>(&mut self, trusting: bool, act: impl FnOnce(&mut Service, &mut IncarnationMemory<'_>) -> T) -> T {
        let tier = self.tier.as_mut().expect("asked only with a tier");
        let flipped = trusting.then_some(&mut tier.flipped);
        let mut pool = self.pool.write();
        let mut memory = IncarnationMemory { pool: &mut pool, staging: &mut tier.staging, flipped };
        act(&mut self.service, &mut memory)
    }
}
