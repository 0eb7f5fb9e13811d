//! Statistics of one run or many, for the developer.

use std::fmt;

use kvplane_proto::Status;

/// Number of statuses that are counted.
const STATUSES: usize = 32;
const _: () = assert!(Status::ALL.len() <= STATUSES);

/// Counts of what device pools did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceCounts {
    /// Objects that moved into device pools.
    pub promotions: u64,
    /// Objects that moved out of them.
    pub demotions: u64,
    /// Objects that had to move out for a peer or a replica.
    pub recalls: u64,
    /// Gets of objects in them.
    pub gets: u64,
    /// Devices that hosts gave up.
    pub lost: u64,
    /// Objects that came back damaged.
    pub damaged: u64,
    /// Moves that were in flight when their node was killed.
    pub cut_off: u64,
}

impl DeviceCounts {
    fn add(&mut self, other: &Self) {
        self.promotions += other.promotions;
        self.demotions += other.demotions;
        self.recalls += other.recalls;
        self.gets += other.gets;
        self.lost += other.lost;
        self.damaged += other.damaged;
        self.cut_off += other.cut_off;
    }
}

/// Counts of what far pools did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FarCounts {
    /// Objects that moved from DRAM to far memory.
    pub demotions: u64,
    /// Objects that moved back.
    pub promotions: u64,
    /// Gets of objects in far memory.
    pub hits: u64,
    /// Objects that were evicted from it.
    pub evictions: u64,
    /// Bits of objects that flipped in it.
    pub flips: u64,
}

impl FarCounts {
    fn add(&mut self, other: &Self) {
        self.demotions += other.demotions;
        self.promotions += other.promotions;
        self.hits += other.hits;
        self.evictions += other.evictions;
        self.flips += other.flips;
    }
}

/// Counts of what became of kept memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryCounts {
    /// Images of memory that were written.
    pub images: u64,
    /// Processes that were killed while they wrote one.
    pub cut_off: u64,
    /// Starts of shards whose former process had left no image that counts.
    pub discarded: u64,
    /// Images that were damaged, or replaced by others, while no process had them.
    pub spoilt: u64,
    /// Objects that were there when their process ended in order, and had to be served by the next one.
    pub taken_back: u64,
    /// Successors that took over.
    pub upgrades: u64,
    /// Processes that served again because their successor had ended.
    pub resumed: u64,
    /// Successors that were refused.
    pub refused: u64,
    /// Handovers in which a process was killed.
    pub killed: u64,
}

impl MemoryCounts {
    fn add(&mut self, other: &Self) {
        self.images += other.images;
        self.cut_off += other.cut_off;
        self.discarded += other.discarded;
        self.spoilt += other.spoilt;
        self.taken_back += other.taken_back;
        self.upgrades += other.upgrades;
        self.resumed += other.resumed;
        self.refused += other.refused;
        self.killed += other.killed;
    }
}

/// Counts of what quotas of SSD bytes did, at the last incarnations of shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QuotaCounts {
    /// Bytes of records that were evicted for a quota.
    pub evicted_bytes: u64,
    /// Records that were not written because of a quota.
    pub refused: u64,
}

/// Counts of what happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Batches that completed.
    pub batches: u64,
    /// Gets that returned an object.
    pub hits: u64,
    /// Puts that were acknowledged.
    pub puts: u64,
    /// Faults that were injected, besides lost, late, doubled and damaged messages.
    pub faults: u64,
    /// Payloads that did not match their checksum, at the last incarnations of clients.
    pub corrupt: u64,
    /// Frames that no request was waiting for any more, at the last incarnations of clients.
    pub stale_frames: u64,
    /// Versions that became visible.
    pub commits: u64,
    /// Objects evicted.
    pub evictions: u64,
    /// Objects that shards imported from former owners of their slots.
    pub imports: u64,
    /// Times that the report of a new owner ended exports.
    pub ended_exports: u64,
    /// Replicas that replica owners took.
    pub copies: u64,
    /// Objects that were replicated because they were hot, at the last incarnations of shards.
    pub hot: u64,
    /// Gets that the last incarnations of clients sent to replica owners to spread load.
    pub chosen: u64,
    /// Objects that were acknowledged with two replicas, where only faults take objects away.
    pub doubled: u64,
    /// Maps published.
    pub epochs: u64,
    /// Times that a control plane without its state adopted a map of its members.
    pub adoptions: u64,
    /// Operations of disks.
    pub disk_ops: u64,
    /// Disks whose process or power failed.
    pub crashes: u64,
    /// Incarnations of nodes that were started without their disks.
    pub without: u64,
    /// Objects recovered from disks.
    pub recovered: u64,
    /// Slots that came back to disks: reconciled ones, and void ones.
    pub kept: (u64, u64),
    /// Times that a node missed maps of which the next does not name the owners of its slots meanwhile.
    pub missed: u64,
    /// Times that a tier stopped taking writes.
    pub degraded: u64,
    /// Acknowledged objects that were read after the last crash.
    pub audited: u64,
    /// Bits of objects that flipped in memory.
    pub flips: u64,
    /// Damaged objects that the last incarnations of shards repaired.
    pub repaired: u64,
    /// Device pools.
    pub device: DeviceCounts,
    /// Far pools.
    pub far: FarCounts,
    /// Kept memory.
    pub memory: MemoryCounts,
    /// Quotas of SSD bytes.
    pub quota: QuotaCounts,
    /// Requests by their outcome.
    statuses: [u64; STATUSES],
}

impl Statistics {
    /// Counts the outcome of a request.
    pub(crate) fn outcome(&mut self, status: Status) {
        self.statuses[status as usize] += 1;
    }

    /// Returns the number of requests with this outcome.
    #[must_use]
    pub fn with_status(&self, status: Status) -> u64 {
        self.statuses[status as usize]
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.batches += other.batches;
        self.hits += other.hits;
        self.puts += other.puts;
        self.faults += other.faults;
        self.corrupt += other.corrupt;
        self.stale_frames += other.stale_frames;
        self.commits += other.commits;
        self.flips += other.flips;
        self.repaired += other.repaired;
        self.imports += other.imports;
        self.ended_exports += other.ended_exports;
        self.copies += other.copies;
        self.hot += other.hot;
        self.chosen += other.chosen;
        self.doubled += other.doubled;
        self.evictions += other.evictions;
        self.epochs += other.epochs;
        self.adoptions += other.adoptions;
        self.disk_ops += other.disk_ops;
        self.crashes += other.crashes;
        self.without += other.without;
        self.recovered += other.recovered;
        self.kept = (self.kept.0 + other.kept.0, self.kept.1 + other.kept.1);
        self.missed += other.missed;
        self.degraded += other.degraded;
        self.audited += other.audited;
        self.device.add(&other.device);
        self.far.add(&other.far);
        self.memory.add(&other.memory);
        self.quota.evicted_bytes += other.quota.evicted_bytes;
        self.quota.refused += other.quota.refused;
        for (mine, theirs) in self.statuses.iter_mut().zip(other.statuses) {
            *mine += theirs;
        }
    }
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            batches,
            hits,
            puts,
            faults,
            corrupt,
            stale_frames,
            commits,
            imports,
            ended_exports,
            copies,
            chosen,
            evictions,
            epochs,
            ..
        } = self;
        write!(f, "{batches} batches, {hits} objects read, {puts} puts acknowledged, {commits} versions, ")?;
        write!(f, "{imports} objects imported, {ended_exports} reports that ended exports, {copies} replicated, ")?;
        write!(f, "{chosen} gets sent to replica owners, ")?;
        write!(f, "{evictions} evictions, {epochs} epochs, {faults} faults, {corrupt} corrupt payloads, ")?;
        writeln!(f, "{stale_frames} stale frames, {} times maps were missed", self.missed)?;
        if self.disk_ops > 0 {
            let Self { disk_ops, crashes, without, recovered, kept, degraded, audited, .. } = self;
            write!(
                f,
                "{disk_ops} operations of disks, {crashes} crashes with them, {without} incarnations without them, "
            )?;
            write!(f, "{recovered} objects recovered, {} slots reconciled and {} void, ", kept.0, kept.1)?;
            writeln!(f, "{degraded} tiers without writes, {audited} promises audited after the last crash")?;
        }
        if self.device.promotions > 0 {
            let DeviceCounts { promotions, demotions, recalls, gets, lost, damaged, cut_off } = self.device;
            write!(f, "{promotions} promotions, {demotions} demotions, {recalls} recalls, {gets} gets of devices, ")?;
            writeln!(f, "{lost} lost devices, {damaged} damaged objects, {cut_off} moves of killed nodes")?;
        }
        if self.far.demotions > 0 {
            let FarCounts { demotions, promotions, hits, evictions, flips } = self.far;
            write!(f, "{demotions} demotions to far memory, {promotions} promotions, {hits} gets of it, ")?;
            writeln!(f, "{evictions} evictions from it, {flips} bits flipped in it")?;
        }
        if self.memory.images > 0 {
            let MemoryCounts { images, cut_off, discarded, spoilt, taken_back, upgrades, resumed, refused, killed } =
                self.memory;
            write!(f, "{images} images, {cut_off} cut off, {spoilt} damaged, {discarded} starts without one, ")?;
            write!(f, "{taken_back} objects taken back, {upgrades} upgrades, {resumed} that resumed, ")?;
            writeln!(f, "{refused} refused, {killed} with kills")?;
        }
        f.write_str("requests by outcome:")?;
        for &status in Status::ALL {
            if self.with_status(status) > 0 {
                write!(f, " {status:?} {}", self.with_status(status))?;
            }
        }
        Ok(())
    }
}
