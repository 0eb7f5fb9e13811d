//! SSD tier of the store: operations of the service's tier on their way to its device, and their completions.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvplane_store::service::{Admission, Service, TierPolicy, Tiering, tenant_of_tail};
use kvplane_sys::{HugePages, Interest, Poller, Region, RegionOptions, cpu};
use kvplane_tier::{Event, Identity, OpenError, OpenOptions, Priority, Tier, TierConfig};
use kvplane_transport::{Nvme, NvmeCounters, Part, Source, TierMemory, Token};

use super::reports::Reports;

/// Block size of a tier: every device supports it, whatever its own is.
const BLOCK_BYTES: u32 = 4096;
/// Least size of a shard's part of a device: some segments of the smallest size.
pub const PART_LEAST_BYTES: u64 = 24 << 20;
/// Time for processing completions before the host serves its peers again, in nanoseconds.
const ROUND_NS: u64 = 1_000_000;
/// Duration of one step of waiting for the device.
pub(crate) const STEP: Duration = Duration::from_millis(20);

/// Settings of a shard's tier.
#[derive(Clone, Debug)]
pub struct TierSetup {
    /// Part of a device that the tier uses.
    pub part: Part,
    /// Policy of demotion and promotion between memory and SSD.
    pub policy: TierPolicy,
    /// Average size of an object: the index has room for as many objects as fill the part.
    pub object_bytes: u32,
    /// Identity of the owner: a device with another identity is refused.
    pub identity: Identity,
    /// Random number: the uuid of the device if it is blank.
    pub fresh_uuid: u128,
}

/// Advice for a device that is shorter than it was.
const SHORTER: &str = "restore its former size, and start with as many shards and SSDs as before; if it was truncated, \
                       its objects are lost: remove the file, or wipe the device (blkdiscard -z), to start anew";
/// Advice for a device that was formatted for other shards or another size.
const OTHERWISE: &str = "start with as many shards and SSDs as it was formatted for, and with the same size";

/// Reason why the device of a tier was not opened.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum TierOpenError {
    /// The ring to the device failed.
    Device { path: PathBuf, source: io::Error },
    /// The host cannot wait for the device.
    Wait(io::Error),
    /// The device belongs to another owner, is of another format, or is damaged.
    Refused { path: PathBuf, source: OpenError },
    /// The device did not answer in time.
    Silent {
        path: PathBuf,
        /// Time that the caller waited.
        waited: Duration,
    },
}

impl fmt::Display for TierOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Wait(source) => source.fmt(f),
            Self::Refused { path, source } => {
                write!(f, "{}: {source}", path.display())?;
                match source {
                    OpenError::OtherLayout { field: "segments", found, expected } if expected < found => {
                        write!(f, "; {SHORTER}")
                    }
                    OpenError::OtherLayout { .. } => write!(f, "; {OTHERWISE}"),
                    _ => Ok(()),
                }
            }
            Self::Silent { path, waited } => {
                write!(f, "{} did not answer within {} s: check the device", path.display(), waited.as_secs())
            }
        }
    }
}

impl Error for TierOpenError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Device { source, .. } | Self::Wait(source) => Some(source),
            Self::Refused { source, .. } => Some(source),
            Self::Silent { .. } => None,
        }
    }
}

/// Device of a host's tier.
pub struct TierDevice {
    nvme: Nvme,
    /// True if the result of opening is known.
    is_open: bool,
    /// Number of the driver's remarks that were taken.
    told: usize,
    notices: VecDeque<TierNotice>,
    /// Uuid of the device, once it was read.
    device: Option<u128>,
}

/// Notice about a tier for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TierNotice {
    /// True if the operator should act on it.
    pub is_trouble: bool,
    /// Text of the notice.
    pub text: String,
}

impl TierNotice {
    const fn trouble(text: String) -> Self {
        Self { is_trouble: true, text }
    }

    const fn report(text: String) -> Self {
        Self { is_trouble: false, text }
    }
}

impl TierDevice {
    /// Attaches a tier on this device to the service.
    pub(crate) fn new(
        setup: &TierSetup,
        service: &mut Service,
        pool: &Arc<Region>,
        poller: &Poller,
    ) -> io::Result<Self> {
        let path = setup.part.path().display();
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let bytes = setup.part.bytes();
        if bytes < PART_LEAST_BYTES {
            let text = format!(
                "{path} gives {bytes} bytes to each shard, fewer than {PART_LEAST_BYTES}: enlarge it, or start fewer \
                 shards; objects in the lost part of a truncated file do not come back"
            );
            return Err(invalid(text));
        }
        let mut config = TierConfig::for_device(bytes, BLOCK_BYTES).with_object_bytes(setup.object_bytes);
        config.hash_seed = service.store().config().hash_seed;
        config.durable_writes = setup.part.offers().durable_writes;
        if let Some(most) = setup.part.offers().command_bytes_most {
            config.max_op_bytes = config.max_op_bytes.min(most);
        }
        let options = RegionOptions {
            huge: HugePages::Never,
            ..RegionOptions::new("kvplane-tier", config.staging_bytes() as usize)
        };
        let staging = Region::allocate(&options).map_err(io::Error::other)?;
        let (identity, fresh_uuid) = (setup.identity, setup.fresh_uuid);
        let (format_blank, expected_uuid) = (Some(fresh_uuid), None);
        let options = OpenOptions { identity, expected_uuid, format_blank, tenant_of: tenant_of_tail };
        let tier = Tier::open(config, options).map_err(|error| invalid(format!("{path}: {error}")))?;
        let nvme = Nvme::new(setup.part.clone(), TierMemory::new(Arc::clone(pool), staging))?;
        let token = Token { source: Source::Tier, index: 0, generation: 0 };
        for fd in nvme.fds() {
            poller.add(fd, token.to_bits(), Interest::Readable)?;
        }
        service.attach_tier(tier, setup.policy);
        let mut device = Self { nvme, is_open: false, told: 0, notices: VecDeque::new(), device: None };
        device.take_remarks();
        Ok(device)
    }

    fn take_remarks(&mut self) {
        let path = self.nvme.part().path().display();
        let new =
            self.nvme.remarks()[self.told..].iter().map(|remark| TierNotice::trouble(format!("{path}: {remark}")));
        self.notices.extend(new);
        self.told = self.nvme.remarks().len();
    }

    /// Handles completions of the device, runs the tier, and submits its next operations.
    pub(crate) fn drive(&mut self, service: &mut Service, reports: &mut Reports, now_ns: u64) -> io::Result<bool> {
        let nvme = &mut self.nvme;
        let mut progress = nvme.poll()?;
        // Processing the reads of recovery takes time: the rest waits for the next round, so that peers are served in
        // between.
        let until_ns = cpu::monotonic_ns() + ROUND_NS;
        while cpu::monotonic_ns() < until_ns
            && let Some((id, result)) = nvme.poll_done()
        {
            progress = true;
            if let Some(tier) = service.tier_mut() {
                tier.completed(now_ns, id, result, nvme.memory());
            }
        }
        let mut started = Vec::new();
        progress |= service.drive_tier(now_ns, nvme.memory(), &mut |op| started.push(op));
        started.into_iter().for_each(|op| nvme.start(op));
        nvme.flush()?;
        self.take_remarks();
        if progress {
            if let Some(problem) = self.nvme.take_problem() {
                reports.problem(problem);
            }
            // The caller that opens the device must get the result of that first.
            while self.is_open
                && let Some(event) = service.tier_mut().and_then(Tiering::poll_notice)
            {
                self.note(&event, reports);
            }
            self.tell_admission(service);
            self.report_damage(service);
        }
        self.tell_voided(service);
        Ok(progress)
    }

    /// Handles the tier's events while it opens; returns `None` as long as that is in progress.
    ///
    /// # Errors
    /// If the device belongs to another owner or is damaged: the text gives the next step.
    pub(crate) fn take_opening(
        &mut self,
        service: &mut Service,
        reports: &Reports,
    ) -> Result<Option<()>, TierOpenError> {
        while let Some(event) = service.tier_mut().and_then(Tiering::poll_notice) {
            match event {
                // A device that fails does not keep the node from serving from memory.
                Event::Refused(error) if error.is_fault() => {
                    self.note(&event, reports);
                    self.is_open = true;
                    return Ok(Some(()));
                }
                Event::Refused(source) => return Err(TierOpenError::Refused { path: self.path_buf(), source }),
                Event::Opened { uuid, .. } => {
                    (self.is_open, self.device) = (true, Some(uuid));
                    return Ok(Some(()));
                }
                event => self.note(&event, reports),
            }
        }
        Ok(None)
    }

    /// Adds a notice when the write budget restricts demotion, and when it no longer does.
    fn tell_admission(&mut self, service: &mut Service) {
        let Some(admission) = service.tier_mut().and_then(Tiering::poll_admission) else { return };
        let path = self.path();
        let what = match admission {
            Admission::Full => "the daily write budget suffices again: all demotions are made",
            Admission::Selective => {
                "much of the daily write budget is used: only objects that were put or requested twice are written"
            }
            Admission::Promised => {
                "the daily write budget is used up: only writes promised to callers are made (see --ssd-budget)"
            }
        };
        let text = format!("{path}: {what}");
        self.notices.push_back(TierNotice { is_trouble: admission != Admission::Full, text });
    }

    fn note(&mut self, event: &Event, reports: &Reports) {
        let path = self.path();
        self.notices.push_back(match event {
            Event::Recovered(report) => {
                let text = format!("{path}: {report}");
                TierNotice {
                    is_trouble: report.given_up > 0 || report.unreadable_windows > 0 || report.missing_segments > 0,
                    text,
                }
            }
            Event::Degraded(reason) => TierNotice::trouble(alone(&path, reason, reports.last_problem())),
            Event::Refused(error) => TierNotice::trouble(alone(&path, error, reports.last_problem())),
            other => TierNotice::report(format!("{path}: {other:?}")),
        });
    }

    /// Adds a notice when records are found that are not whole: the first time, and whenever their number has doubled.
    fn report_damage(&mut self, service: &mut Service) {
        let Some(damage) = service.tier_mut().and_then(Tiering::poll_damage) else { return };
        let path = self.path();
        let text = "what no other owner of the slot has is a miss and can be put again; if their number keeps growing, \
                    replace the device";
        self.notices.push_back(TierNotice::trouble(format!("{path}: {damage} since the start: {text}")));
    }

    /// Adds a notice when the first map of this incarnation made all of the device's records void, or some of them.
    fn tell_voided(&mut self, service: &mut Service) {
        let text = match (
            service.tier_mut().and_then(Tiering::poll_voided),
            service.tier_mut().and_then(Tiering::poll_slots_voided),
        ) {
            (Some(why), _) => format!("all its records are void, it is filled anew: {why}"),
            (None, Some(slots)) => format!(
                "its records of {slots} slots are void: other shards owned them meanwhile, and none of them can report \
                 its changes, because the last owner was killed or restarted since, or removed all objects or those \
                 that match a pattern"
            ),
            (None, None) => return,
        };
        let path = self.path();
        self.notices.push_back(TierNotice::trouble(format!("{path}: {text}")));
    }

    /// Returns a notice about the tier for the operator.
    pub fn poll_notice(&mut self) -> Option<TierNotice> {
        self.notices.pop_front()
    }

    /// Returns the path of the device, for people.
    pub(crate) fn path(&self) -> String {
        self.nvme.part().path().display().to_string()
    }

    /// Returns the path of the whole device, for errors.
    pub(crate) fn path_buf(&self) -> PathBuf {
        self.nvme.part().path().to_owned()
    }

    /// Returns the uuid of the device, once it is open.
    #[must_use]
    pub const fn device(&self) -> Option<u128> {
        self.device
    }

    /// Returns the counters of the device.
    #[must_use]
    pub fn counters(&self) -> NvmeCounters {
        self.nvme.counters()
    }

    /// Returns true while operations other than those in the background are in flight: the device may read and write
    /// the pool.
    pub(crate) fn uses_pool(&self) -> bool {
        let background = Priority::Background as usize;
        let priorities = self.counters().priorities;
        priorities.iter().enumerate().any(|(priority, one)| priority != background && one.in_flight > 0)
    }

    /// Returns true if completions arrive only if the host polls for them.
    pub(crate) fn must_be_polled(&self) -> bool {
        self.nvme.must_be_polled()
    }
}

fn alone(path: &str, why: &dyn std::fmt::Display, problem: Option<&str>) -> String {
    let problem = problem.map_or_else(String::new, |problem| format!(" ({problem})"));
    format!("{path}: {why}; new objects are kept in memory only{problem}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_layout_names_the_next_step() {
        let refused = |field, found, expected| {
            let source = OpenError::OtherLayout { field, found, expected };
            let text = TierOpenError::Refused { path: "/dev/ssd".into(), source }.to_string();
            assert!(text.starts_with("/dev/ssd: "), "{text}");
            text
        };
        assert!(refused("segments", 10, 5).ends_with(SHORTER));
        assert!(refused("segments", 5, 10).ends_with(OTHERWISE));
        assert!(refused("segment_bytes", 10, 5).ends_with(OTHERWISE));
        let damaged = TierOpenError::Refused { path: "/dev/ssd".into(), source: OpenError::Damaged }.to_string();
        assert_eq!(damaged, format!("/dev/ssd: {}", OpenError::Damaged));
    }
}
