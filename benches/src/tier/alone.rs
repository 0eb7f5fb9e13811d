//! Tier on a file without a node around it: a closed loop of gets or puts, with exactly the requested queue depth.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::Digest;
use kvplane_proto::ids::{NodeId, ShardId, Version};
use kvplane_proto::rng::Rng;
use kvplane_sys::{HugePages, Interest, Poller, Region, RegionOptions, cpu};
use kvplane_tier::{
    Ack, Event, Get, Identity, OpenOptions, Output, Priority, Put, PutError, Span, Tier, TierConfig, Token,
};
use kvplane_transport::{IoChoice, Nvme, Part, Ssd, TierMemory};

use super::figures::Figures;
use crate::Failure;

const BLOCK_BYTES: u32 = 4096;
/// Bytes of puts in one round.
const ROUND_BYTES: u32 = 1 << 20;
/// Longest wait of a round: the tier's own timers fire sooner.
const STEP: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn region(name: &str, bytes: usize) -> Result<Arc<Region>, Failure> {
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new(name, bytes) };
    Ok(Region::allocate(&options)?)
}

/// Tier, its driver, and a pool with a place for each call in flight.
pub(crate) struct Alone {
    pub(crate) tier: Tier,
    pub(crate) nvme: Nvme,
    /// Memory of the process when pool and staging area existed and were pinned, but the tier did not exist.
    pub(crate) anonymous_bytes: u64,
    pool: Arc<Region>,
    poller: Poller,
    /// Completed calls by token; `false` for a failure.
    ended: Vec<(u64, bool)>,
    /// Payloads that the pool owns again.
    released: Vec<u64>,
}

impl Alone {
    /// Opens or creates a tier on a file. It accepts calls, even during recovery.
    pub(crate) fn open(
        path: &Path,
        file_bytes: u64,
        pool_bytes: usize,
        change: impl FnOnce(&mut TierConfig),
    ) -> Result<Self, Failure> {
        let ssd = Arc::new(Ssd::open(path, Some(file_bytes), IoChoice::Auto)?);
        let part = Part::new(&ssd, 0, 1);
        let mut config = TierConfig::for_device(part.bytes(), BLOCK_BYTES);
        config.durable_writes = part.offers().durable_writes;
        change(&mut config);
        let pool = region("bench-pool", pool_bytes)?;
        let staging = region("bench-staging", config.staging_bytes() as usize)?;
        let identity = Identity { cluster: 1, node: NodeId(1), shard: ShardId(0) };
        let options = OpenOptions { identity, expected_uuid: None, format_blank: Some(7), tenant_of: |_| 0 };
        let nvme = Nvme::new(part, TierMemory::new(Arc::clone(&pool), staging))?;
        let poller = Poller::new()?;
        for fd in nvme.fds() {
            poller.add(fd, 0, Interest::Readable)?;
        }
        let anonymous_bytes = anonymous_bytes()?;
        let tier = Tier::open(config, options)?;
        let mut alone = Self { tier, nvme, anonymous_bytes, pool, poller, ended: Vec::new(), released: Vec::new() };
        let until = Instant::now() + PATIENCE;
        while !alone.round()? {
            if Instant::now() > until {
                return Err("the tier does not open".into());
            }
        }
        Ok(alone)
    }

    /// Drives all parts once, and waits if there was no progress. Returns true if the tier has been opened.
    pub(crate) fn round(&mut self) -> Result<bool, Failure> {
        let (mut opened, mut progress) = (false, self.nvme.poll()?);
        while let Some((id, result)) = self.nvme.poll_done() {
            self.tier.complete(cpu::monotonic_ns(), id, result, self.nvme.memory());
        }
        let now_ns = cpu::monotonic_ns();
        while let Some(output) = self.tier.poll_output(now_ns, self.nvme.memory()) {
            progress = true;
            match output {
                Output::Block(op) => self.nvme.start(op),
                Output::Event(Event::Opened { .. }) => opened = true,
                Output::Event(Event::Refused(error)) => return Err(error.to_string().into()),
                Output::Event(Event::Degraded(reason)) => return Err(reason.to_string().into()),
                Output::Event(Event::Got { token, .. } | Event::Stored { token, .. }) => {
                    self.ended.push((token.0, true));
                }
                Output::Event(Event::Missed { token, .. } | Event::StoreFailed { token, .. }) => {
                    self.ended.push((token.0, false));
                }
                Output::Event(Event::Released { token }) => self.released.push(token.0),
                Output::Event(_) => {}
            }
        }
        self.nvme.flush()?;
        if !progress && !self.nvme.must_be_polled() {
            self.poller.wait(STEP, &mut Vec::new())?;
        }
        Ok(opened)
    }

    /// Returns true if the one call in flight has completed.
    pub(crate) fn take_ended(&mut self) -> Result<bool, Failure> {
        match self.ended.pop() {
            Some((_, true)) => Ok(true),
            Some((_, false)) => Err("a call failed".into()),
            None => Ok(false),
        }
    }

    /// Waits until everything is written, including footers.
    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        while !self.tier.is_idle() {
            self.round()?;
            if Instant::now() > until {
                return Err("the tier did not finish its work in time".into());
            }
        }
        Ok(())
    }

    pub(crate) fn until_recovered(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        while !self.tier.is_recovered() {
            self.round()?;
            if Instant::now() > until {
                return Err("recovery does not end".into());
            }
        }
        Ok(())
    }

    /// Puts objects of `bytes` with these numbers, as fast as they are taken.
    pub(crate) fn fill(&mut self, keys: core::ops::Range<u64>, bytes: u32) -> Result<(), Failure> {
        let depth = (self.pool.bytes() / place_bytes(bytes)).min(2048);
        let mut next = keys.start;
        self.puts(depth, bytes, Ack::Buffered, &mut |_| {
            next += 1;
            (next <= keys.end).then_some(next - 1)
        })?;
        Ok(())
    }

    /// Puts objects for this time.
    pub(crate) fn put_for(
        &mut self,
        time: Duration,
        depth: usize,
        bytes: u32,
        ack: Ack,
        first_key: &mut u64,
    ) -> Result<Figures, Failure> {
        self.puts(depth, bytes, ack, &mut |since| {
            *first_key += 1;
            (since < time).then_some(*first_key)
        })
    }

    /// Keeps `depth` puts in flight while `next` returns keys.
    fn puts(
        &mut self,
        depth: usize,
        bytes: u32,
        ack: Ack,
        next: &mut dyn FnMut(Duration) -> Option<u64>,
    ) -> Result<Figures, Failure> {
        let mut state: Vec<(Instant, bool, bool)> = vec![(Instant::now(), false, false); depth];
        let (mut free, mut busy, mut over): (Vec<usize>, usize, bool) = ((0..depth).collect(), 0, false);
        let (start, cpu_ns, mut samples) = (Instant::now(), cpu::thread_cpu_ns(), Vec::new());
        let mut waiting = None;
        while !over || busy > 0 {
            // Like a shard: submitted puts are sent before the next are prepared.
            let mut given = 0;
            while let Some(place) = free.last().copied()
                && !over
                && given < ROUND_BYTES
            {
                let Some(key) = waiting.take().or_else(|| next(start.elapsed())) else {
                    over = true;
                    break;
                };
                let Some(lent) = self.begin_put(place, key, bytes, ack)? else {
                    waiting = Some(key);
                    break;
                };
                state[place] = (Instant::now(), false, !lent);
                free.pop();
                busy += 1;
                given += bytes;
            }
            self.round()?;
            for (token, good) in self.ended.drain(..) {
                if !good {
                    return Err("a put failed".into());
                }
                let place = &mut state[token as usize];
                samples.push(place.0.elapsed().as_nanos() as u64);
                place.1 = true;
                if place.2 {
                    free.push(token as usize);
                    busy -= 1;
                }
            }
            for token in self.released.drain(..) {
                let place = &mut state[token as usize];
                place.2 = true;
                if place.1 {
                    free.push(token as usize);
                    busy -= 1;
                }
            }
        }
        Ok(Figures::of(samples, bytes.into(), start.elapsed(), cpu::thread_cpu_ns() - cpu_ns))
    }

    /// Starts a put with a unique payload. Returns true if the payload is lent; `None` if there is no space now.
    fn begin_put(&mut self, place: usize, key: u64, bytes: u32, ack: Ack) -> Result<Option<bool>, Failure> {
        let at = place * place_bytes(bytes);
        self.pool.copy_in(at, &key.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        let put = Put {
            digest: digest(key),
            key: &[],
            tenant: 0,
            version: Version(key + 1),
            payload: Span::pool(at as u64, bytes),
            checksum: None,
            pinned: false,
            hits: 0,
            names_parts: false,
            copied: false,
            ack,
            token: Token(place as u64),
        };
        match self.tier.put(cpu::monotonic_ns(), &put, self.nvme.memory()) {
            Ok(accepted) => Ok(Some(accepted.lent)),
            Err(PutError::Busy | PutError::Full) => Ok(None),
            Err(error) => Err(error.to_string().into()),
        }
    }

    /// Keeps `depth` gets of random objects in flight for this time.
    pub(crate) fn get_for(
        &mut self,
        time: Duration,
        depth: usize,
        bytes: u32,
        keys: core::ops::Range<u64>,
        rng: &mut Rng,
    ) -> Result<Figures, Failure> {
        let each = place_bytes(bytes);
        let mut since = vec![Instant::now(); depth];
        let mut free: Vec<usize> = (0..depth).collect();
        let (start, cpu_ns, mut samples) = (Instant::now(), cpu::thread_cpu_ns(), Vec::new());
        loop {
            let over = start.elapsed() >= time;
            if over && free.len() == depth {
                break;
            }
            while let Some(place) = free.last().copied()
                && !over
            {
                let key = keys.start + rng.below(keys.end - keys.start);
                let destination = Span::pool((place * each) as u64, bytes);
                let token = Token(place as u64);
                let get = Get { digest: digest(key), destination, priority: Priority::Get, token };
                self.tier.get(&get).map_err(|error| format!("object {key}: {error}"))?;
                since[place] = Instant::now();
                free.pop();
            }
            self.round()?;
            for (token, good) in self.ended.drain(..) {
                if !good {
                    return Err("a get gave nothing".into());
                }
                samples.push(since[token as usize].elapsed().as_nanos() as u64);
                free.push(token as usize);
            }
        }
        Ok(Figures::of(samples, bytes.into(), start.elapsed(), cpu::thread_cpu_ns() - cpu_ns))
    }
}

pub(crate) fn digest(key: u64) -> Digest {
    Digest::of(b"bench", &key.to_le_bytes())
}

const fn place_bytes(bytes: u32) -> usize {
    (bytes as usize).next_multiple_of(4096)
}

/// Returns the anonymous memory of this process, in bytes.
pub(crate) fn anonymous_bytes() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}
