//! The SSD under the store: operations of the service's tier on their way to its device, and their completions.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvplane_store::service::{Admission, Service, TierPolicy, Tiering};
use kvplane_sys::{HugePages, Interest, Poller, Region, RegionOptions, cpu};
use kvplane_tier::{Event, Identity, OpenError, OpenOptions, Tier, TierConfig};
use kvplane_transport::{Nvme, NvmeCounters, Part, Source, TierMemory, Token};

use super::reports::Reports;

/// Blocks of a tier: what every device can, whatever its own are.
const BLOCK_BYTES: u32 = 4096;
/// The least that a shard's part of a device may be: some segments of the smallest size.
pub const PART_LEAST_BYTES: u64 = 24 << 20;
/// How long completions are gone through before the host looks at its peers again, in nanoseconds.
const ROUND_NS: u64 = 1_000_000;
/// How long one step of waiting for the device is.
pub(crate) const STEP: Duration = Duration::from_millis(20);

/// A tier for a shard.
#[derive(Clone, Debug)]
pub struct TierSetup {
    /// Its part of a device.
    pub part: Part,
    /// How memory and SSD work together.
    pub policy: TierPolicy,
    /// How long objects are on average: the index has room for so many as fill the part.
    pub object_bytes: u32,
    /// Whose it is: a device of anybody else is refused.
    pub identity: Identity,
    /// A random number: the uuid of the device, should it be blank.
    pub fresh_uuid: u128,
}

/// What to do about a device that is shorter than it was.
const SHORTER: &str = "give it the size that it had, and as many shards and SSDs; if it was cut, what was there is \
                       lost: remove the file, or wipe the device (blkdiscard -z), to start anew";
/// And about one that was made for other shards.
const OTHERWISE: &str = "start with as many shards and SSDs, and with the size, that it was made with";

/// The device of a host's tier.
pub struct TierDevice {
    nvme: Nvme,
    /// Whether it is known how opening it has ended.
    is_open: bool,
    /// How many of the driver's remarks were taken.
    told: usize,
    notices: VecDeque<TierNotice>,
    /// Which device it is, once that was read.
    device: Option<u128>,
}

/// Something about a tier for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TierNotice {
    /// Whether the operator should do something about it.
    pub is_trouble: bool,
    /// What there is to say.
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
    /// Gives the service a tier on this device.
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
                "{path} gives {bytes} bytes to each shard, fewer than {PART_LEAST_BYTES}: give it more, or fewer \
                 shards; what a file that was cut off has lost does not come back"
            );
            return Err(invalid(text));
        }
        let mut config = TierConfig::for_device(bytes, BLOCK_BYTES).with_object_bytes(setup.object_bytes);
        config.hash_seed = service.store().map_or(0, |store| store.config().hash_seed);
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
        let options = OpenOptions { identity, expected_uuid: None, format_blank: Some(fresh_uuid) };
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

    /// Takes what the device has done, lets the tier work, and gives the device what is next.
    pub(crate) fn drive(&mut self, service: &mut Service, reports: &mut Reports, now_ns: u64) -> io::Result<bool> {
        let nvme = &mut self.nvme;
        let mut progress = nvme.poll()?;
        // What recovery reads takes time to go through: the rest waits for the next round, peers do not.
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
            // Whoever opens it wants to know first how that ended.
            while self.is_open
                && let Some(event) = service.tier_mut().and_then(Tiering::poll_notice)
            {
                self.note(&event, reports);
            }
            self.tell_admission(service);
            self.tell_harm(service);
        }
        self.tell_voided(service);
        Ok(progress)
    }

    /// Goes through what the tier has said while it opens: nothing as long as that goes on.
    ///
    /// # Errors
    /// When the device is another's or damaged: says what to do.
    pub(crate) fn take_opening(&mut self, service: &mut Service, reports: &Reports) -> Result<Option<()>, String> {
        while let Some(event) = service.tier_mut().and_then(Tiering::poll_notice) {
            let path = self.path();
            match event {
                Event::Refused(error @ OpenError::OtherLayout { field, found, expected }) => {
                    let shorter = field == "segments" && expected < found;
                    return Err(format!("{path}: {error}; {}", if shorter { SHORTER } else { OTHERWISE }));
                }
                // A device that fails is no reason to do without the memory.
                Event::Refused(error) if error.is_fault() => {
                    self.note(&event, reports);
                    self.is_open = true;
                    return Ok(Some(()));
                }
                Event::Refused(error) => return Err(format!("{path}: {error}")),
                Event::Opened { uuid, .. } => {
                    (self.is_open, self.device) = (true, Some(uuid));
                    return Ok(Some(()));
                }
                event => self.note(&event, reports),
            }
        }
        Ok(None)
    }

    /// Says so when less is written than is wanted, and when that is over.
    fn tell_admission(&mut self, service: &mut Service) {
        let Some(admission) = service.tier_mut().and_then(Tiering::poll_admission) else { return };
        let path = self.path();
        let what = match admission {
            Admission::Full => "the bytes that may be written suffice again: all that is wanted is written",
            Admission::Selective => {
                "of the bytes that may be written a day many are used: only what was put or asked for twice is written"
            }
            Admission::Promised => {
                "the bytes that may be written a day are used up: only what was promised is written (see --ssd-budget)"
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

    /// Says so when records are found that are not whole: the first time, and whenever there are twice as many.
    fn tell_harm(&mut self, service: &mut Service) {
        let Some(harm) = service.tier_mut().and_then(Tiering::poll_harm) else { return };
        let path = self.path();
        let text = "they are misses, and can be put again; if there are more and more, replace the device";
        self.notices.push_back(TierNotice::trouble(format!("{path}: {harm} since the start: {text}")));
    }

    /// Says so when the first map of this incarnation left nothing of what the device had, or less than it had.
    fn tell_voided(&mut self, service: &mut Service) {
        let text = match (
            service.tier_mut().and_then(Tiering::poll_voided),
            service.tier_mut().and_then(Tiering::poll_slots_voided),
        ) {
            (Some(why), _) => format!("nothing of what it had counts any more, it is filled anew: {why}"),
            (None, Some(slots)) => format!(
                "what it had of {slots} slots counts no more: others owned them meanwhile, and none of them can tell \
                 what they changed there, as the last one was killed or restarted since, or was asked to remove all \
                 objects, or those of a pattern"
            ),
            (None, None) => return,
        };
        let path = self.path();
        self.notices.push_back(TierNotice::trouble(format!("{path}: {text}")));
    }

    /// Something about the tier that the operator should know.
    pub fn poll_notice(&mut self) -> Option<TierNotice> {
        self.notices.pop_front()
    }

    /// Where the device is, for people.
    pub(crate) fn path(&self) -> String {
        self.nvme.part().path().display().to_string()
    }

    /// Which device it is, once it is open.
    #[must_use]
    pub const fn device(&self) -> Option<u128> {
        self.device
    }

    /// What the device did.
    #[must_use]
    pub fn counters(&self) -> NvmeCounters {
        self.nvme.counters()
    }

    /// Whether completions come only to a host that polls for them.
    pub(crate) fn must_be_polled(&self) -> bool {
        self.nvme.must_be_polled()
    }
}

fn alone(path: &str, why: &dyn std::fmt::Display, problem: Option<&str>) -> String {
    let problem = problem.map_or_else(String::new, |problem| format!(" ({problem})"));
    format!("{path}: {why}; memory alone is used for what is new{problem}")
}
