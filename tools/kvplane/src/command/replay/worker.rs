//! Client of a replay: takes the next request, checks existence, gets and verifies the prefix, puts the rest.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvplane::{Buffer, Client, ClientConfig, ControlLink, HugePages, Put, Region, RegionOptions, Slice};
use kvplane_tools::latencies::Latencies;
use kvplane_tools::pattern;
use kvplane_tools::trace::{HitCounts, Request};

use super::run::ClientsState;
use crate::command::Failure;

/// Counters of a client.
pub(super) struct Tally {
    pub(super) exists: Latencies,
    pub(super) get: Latencies,
    pub(super) put: Latencies,
    pub(super) exists_items: u64,
    pub(super) get_items: u64,
    pub(super) stored: u64,
    pub(super) hits: HitCounts,
    pub(super) bytes_wrong: u64,
    /// Payload bytes that each transport moved.
    pub(super) carried: BTreeMap<String, u64>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            exists: Latencies::new(),
            get: Latencies::new(),
            put: Latencies::new(),
            exists_items: 0,
            get_items: 0,
            stored: 0,
            hits: HitCounts::default(),
            bytes_wrong: 0,
            carried: BTreeMap::new(),
        }
    }
}

impl Tally {
    pub(super) fn merge(&mut self, other: &Self) {
        self.exists.merge(&other.exists);
        self.get.merge(&other.get);
        self.put.merge(&other.put);
        self.exists_items += other.exists_items;
        self.get_items += other.get_items;
        self.stored += other.stored;
        self.hits.blocks += other.hits.blocks;
        self.hits.hit_blocks += other.hits.hit_blocks;
        self.hits.tokens += other.hits.tokens;
        self.hits.hit_tokens += other.hits.hit_tokens;
        self.bytes_wrong += other.bytes_wrong;
        for (transport, bytes) in &other.carried {
            *self.carried.entry(transport.clone()).or_default() += bytes;
        }
    }
}

pub(super) struct Worker {
    client: Client,
    buffer: Buffer,
    block_bytes: usize,
    keys: Vec<String>,
    tally: Tally,
}

impl Worker {
    pub(super) fn new(
        config: &ClientConfig,
        link: ControlLink,
        block_bytes: u64,
        longest: usize,
    ) -> Result<Self, Failure> {
        let mut client = Client::connect_with(config, link)?;
        let block_bytes = usize::try_from(block_bytes)?;
        let bytes = block_bytes.checked_mul(longest).ok_or("blocks of this size do not fit into memory")?;
        let options =
            RegionOptions { huge: HugePages::Try, prefault: true, ..RegionOptions::new("replay-blocks", bytes) };
        let buffer = client.register(Region::allocate(&options)?);
        Ok(Self { client, buffer, block_bytes, keys: Vec::new(), tally: Tally::default() })
    }

    pub(super) fn run(mut self, shared: &ClientsState<'_>) -> Result<Tally, Failure> {
        loop {
            let index = shared.next.fetch_add(1, Ordering::Relaxed) as usize;
            let Some(request) = shared.trace.requests.get(index) else { return Ok(self.counted()) };
            if shared.failed.load(Ordering::Relaxed) {
                return Ok(self.counted());
            }
            wait_for_arrival(shared, request);
            let (hits, moved) =
                self.serve(request, shared).map_err(|error| format!("request {}: {error}", index + 1))?;
            shared.blocks.fetch_add(request.blocks.len() as u64, Ordering::Relaxed);
            shared.hit_blocks.fetch_add(hits as u64, Ordering::Relaxed);
            shared.bytes.fetch_add(moved, Ordering::Relaxed);
            shared.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the counters, with the bytes of each transport.
    fn counted(mut self) -> Tally {
        let metrics = self.client.metrics();
        let rails = metrics.rails.iter().map(|rail| (rail.transport, rail.bytes));
        let departed = metrics.departed.iter().map(|(transport, counts)| (*transport, counts.bytes));
        for (transport, bytes) in rails.chain(departed) {
            *self.tally.carried.entry(transport.name().to_owned()).or_default() += bytes;
        }
        self.tally
    }

    /// Serves one request; returns the length of the prefix that existed and was intact, and the bytes moved.
    fn serve(&mut self, request: &Request, shared: &ClientsState<'_>) -> Result<(usize, u64), Failure> {
        self.keys.clear();
        // The block size in the key keeps runs with blocks of different sizes apart in one store.
        let bytes = self.block_bytes;
        self.keys.extend(request.blocks.iter().map(|block| format!("block-{bytes}-{block}")));
        let start = Instant::now();
        let there = match shared.ahead {
            true => self.client.batch_exists_ahead(&self.keys)?,
            false => self.client.batch_exists(&self.keys)?,
        };
        self.tally.exists.record(start.elapsed().as_nanos() as u64);
        self.tally.exists_items += there.len() as u64;
        let prefix = there.iter().take_while(|&&there| there).count();
        if prefix > 0 && !shared.pause.is_zero() {
            std::thread::sleep(shared.pause);
        }
        let hits = self.get(prefix)?;
        let stored = self.put(hits)?;
        self.tally.hits.add(request, hits);
        Ok((hits, (hits as u64 + stored) * self.block_bytes as u64))
    }

    fn slice(&self, block: usize) -> Slice {
        self.buffer.slice(block * self.block_bytes, self.block_bytes)
    }

    /// Gets the first blocks and verifies them; returns the number of blocks without a gap. With several clients, some
    /// may have been evicted since the exists.
    fn get(&mut self, prefix: usize) -> Result<usize, Failure> {
        if prefix == 0 {
            return Ok(0);
        }
        let slices: Vec<Slice> = (0..prefix).map(|at| self.slice(at)).collect();
        let items: Vec<(&str, Slice)> = self.keys[..prefix].iter().map(String::as_str).zip(slices).collect();
        let start = Instant::now();
        let got = self.client.batch_get_into(&items)?;
        self.tally.get.record(start.elapsed().as_nanos() as u64);
        let mut hits = 0;
        let mut broken = false;
        for (at, outcome) in got.into_iter().enumerate() {
            match outcome? {
                Some(got) => {
                    self.tally.get_items += 1;
                    self.check(at, got.bytes)?;
                    hits += usize::from(!broken);
                }
                None => broken = true,
            }
        }
        Ok(hits)
    }

    fn check(&mut self, at: usize, bytes: u64) -> Result<(), Failure> {
        if bytes != self.block_bytes as u64 {
            self.tally.bytes_wrong += self.block_bytes as u64;
            return Ok(());
        }
        let seed = pattern::seed_of(self.client.digest(self.keys[at].as_bytes())?);
        let mut wrong = 0;
        self.buffer.region().read_with(at * self.block_bytes, self.block_bytes, &mut |offset, part| {
            if let Err(mismatch) = pattern::check(seed, offset, part) {
                wrong += mismatch.wrong_bytes;
            }
        });
        self.tally.bytes_wrong += wrong;
        Ok(())
    }

    /// Puts the blocks after the prefix; returns the number of new ones.
    fn put(&mut self, from: usize) -> Result<u64, Failure> {
        if from == self.keys.len() {
            return Ok(0);
        }
        for at in from..self.keys.len() {
            let seed = pattern::seed_of(self.client.digest(self.keys[at].as_bytes())?);
            self.buffer.region().fill_with(at * self.block_bytes, self.block_bytes, &mut |offset, part| {
                pattern::fill(seed, offset, part);
            });
        }
        let slices: Vec<Slice> = (from..self.keys.len()).map(|at| self.slice(at)).collect();
        let items: Vec<(&str, Slice)> = self.keys[from..].iter().map(String::as_str).zip(slices).collect();
        let start = Instant::now();
        let outcomes = self.client.batch_put_from(&items)?;
        self.tally.put.record(start.elapsed().as_nanos() as u64);
        let mut stored = 0;
        for outcome in outcomes {
            stored += u64::from(matches!(outcome?, Put::Stored(_)));
        }
        self.tally.stored += stored;
        Ok(stored)
    }
}

/// Waits until a request's arrival time, at the speed of the replay.
fn wait_for_arrival(shared: &ClientsState<'_>, request: &Request) {
    let Some(speed) = shared.speed else { return };
    let first_ms = shared.trace.requests.first().map_or(0, |first| first.timestamp_ms);
    let at_s = request.timestamp_ms.saturating_sub(first_ms) as f64 / 1000.0 / speed;
    let left = Duration::try_from_secs_f64(at_s).unwrap_or(Duration::MAX).saturating_sub(shared.elapsed());
    std::thread::sleep(left);
}
