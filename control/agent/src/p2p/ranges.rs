//! Range reads of an object, from peers that hold all of the buffer, without becoming a member that holds it.
//!
//! Readers are not registered: a peer that leaves cuts them off. Therefore the read verifies afterwards that all peers
//! used are still members. Those that are have held the same memory all the time; bytes from others are read again.
//! Then shards that were read completely are compared with their hashes ([`super::checks`]): a peer that served wrong
//! bytes is not used any more, and everything is read again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvplane_cluster::reshard::Copy;
use kvplane_engine::Region;
use kvplane_proto::Status;
use kvplane_rpc::p2p::{DescribeObject, LocateObject, ObjectPlace};
use kvplane_sys::interrupt;
use kvplane_transfer::{Opcode, SubmitOptions, TaskState, TransferRequest};

use super::checks::ContentCheck;
use super::fetch::Sources;
use super::get::USUAL;
use super::{Object, P2pStore, StoreState, is_away, is_unknown};
use crate::error::Error;

/// Limit of copies in one batch.
const BATCH: usize = 4096;
/// Limit of bytes in one batch; longer copies are split, so that several peers share them.
const BATCH_BYTES: u64 = 64 << 20;
/// Deadline of a batch at one peer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Backoff between lookups while there are no peers.
const AGAIN: Duration = Duration::from_millis(200);
/// Rounds over all peers that a batch may fail without a deadline of the call: longer than a dead peer stays in the
/// catalog.
const ROUNDS: u32 = 40;
/// Lookups that may find no peer without a deadline of the call: a peer may only have missed its renewals for a moment.
/// 3 s in all.
const HOPELESS: u32 = 15;
/// Attempts to read everything again because a shard did not match its hash.
const ATTEMPTS: u32 = 8;

/// Options of a range read.
#[derive(Default)]
pub struct ReadOptions<'a> {
    /// Deadline of the call. Until then the call waits for peers: they may be restarting. Without one, the call takes
    /// at most an hour, and waits 3 s if no peer holds the buffer, 8 s if those that do serve nothing.
    pub deadline: Option<Duration>,
    /// Callback with the bytes of each batch that has arrived, called by threads of the call. Bytes that are read again
    /// count again.
    pub each: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl std::fmt::Debug for ReadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadOptions({:?})", self.deadline)
    }
}

impl ReadOptions<'_> {
    /// Returns the deadline of a call that begins now.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.deadline.unwrap_or(USUAL)
    }
}

/// Result of a range read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBytes {
    /// Total number of bytes.
    pub bytes: u64,
    /// Bytes of shards that were read completely and match their hashes.
    pub checked: u64,
}

/// Peers that served wrong bytes in this call, by segment name, each with the shard.
pub(super) type Wrong = BTreeMap<String, u32>;

/// Read of one buffer of an object into local memory.
pub(super) struct Reader<'a> {
    pub(super) shared: &'a StoreState,
    pub(super) sources: &'a Sources,
    pub(super) object: &'a Object,
    pub(super) buffer: usize,
    pub(super) memory: &'a Arc<Region>,
    pub(super) until: Instant,
    /// True if the caller gave a deadline, until which the read waits for peers.
    pub(super) patient: bool,
    /// Set by other threads to stop the read early.
    pub(super) stop: &'a AtomicBool,
    pub(super) each: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl P2pStore {
    /// Reads ranges of an object's buffer into memory, from peers that hold all of the buffer, nearest first. Unlike
    /// with [`Self::get_replica`], peers cannot fetch the ranges from this process. Hashes cover whole shards, so only
    /// shards whose bytes are all among the ranges are verified. A peer whose shard is wrong is not used any more.
    ///
    /// # Errors
    /// When a range is not within the buffer or the memory, two overlap in memory, no peer is left, or the deadline has
    /// passed.
    pub fn read_ranges(
        &self,
        object: &Object,
        buffer: usize,
        copies: &[Copy],
        memory: &Arc<Region>,
        options: &ReadOptions<'_>,
    ) -> Result<ReadBytes, Error> {
        let size = object.layout.sizes().get(buffer).copied().unwrap_or(0);
        let within = |first: u64, bytes: u64, end: u64| first.checked_add(bytes).is_some_and(|last| last <= end);
        if let Some(copy) = copies.iter().find(|copy| !within(copy.source_offset, copy.bytes, size)) {
            let what = format!("{} bytes from {} on", copy.bytes, copy.source_offset);
            return Err(Error::Argument(format!("buffer {buffer} of {:?} has {size} bytes, not {what}", object.name)));
        }
        if let Some(copy) = copies.iter().find(|copy| !within(copy.target_offset, copy.bytes, memory.bytes() as u64)) {
            let what = format!("{} bytes from {} on", copy.bytes, copy.target_offset);
            return Err(Error::Argument(format!("the memory has {} bytes, not {what}", memory.bytes())));
        }
        self.shared.with_memory(memory, |sources| {
            let reader = Reader {
                shared: &self.shared,
                sources,
                object,
                buffer,
                memory,
                until: options.until(),
                patient: options.deadline.is_some(),
                stop: &AtomicBool::new(false),
                each: options.each,
            };
            reader.read(|| copies.iter().copied())
        })
    }
}

impl StoreState {
    /// Runs an operation that reads into memory, which is registered meanwhile.
    pub(super) fn with_memory<T>(
        &self,
        memory: &Arc<Region>,
        act: impl FnOnce(&Sources) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if !memory.writable() {
            return Err(Error::Argument(format!("the memory at {:#x} cannot be written", memory.address())));
        }
        let memory = std::slice::from_ref(memory);
        self.memory.take(&self.engine, memory, true)?;
        let sources = Sources::default();
        let result = act(&sources);
        sources.close(self);
        self.memory.give_back(&self.engine, memory)?;
        result
    }
}

/// Batches of copies, in order.
pub(super) struct Batches<I: Iterator<Item = Copy>> {
    copies: I,
    rest: Option<Copy>,
}

impl<I: Iterator<Item = Copy>> Batches<I> {
    pub(super) const fn of(copies: I) -> Self {
        Self { copies, rest: None }
    }
}

impl<I: Iterator<Item = Copy>> Iterator for Batches<I> {
    type Item = Vec<Copy>;

    fn next(&mut self) -> Option<Vec<Copy>> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Some(mut copy) = self.rest.take().or_else(|| self.copies.next()) else { break };
            let now = copy.bytes.min(BATCH_BYTES - bytes);
            if now < copy.bytes {
                self.rest = Some(Copy {
                    source_offset: copy.source_offset + now,
                    target_offset: copy.target_offset + now,
                    bytes: copy.bytes - now,
                });
                copy.bytes = now;
            }
            bytes += now;
            batch.push(copy);
        }
        (!batch.is_empty()).then_some(batch)
    }
}

impl Reader<'_> {
    /// Reads copies that lie within the buffer and the memory, and verifies the shards that are complete.
    pub(super) fn read<I: Iterator<Item = Copy>>(&self, copies: impl Fn() -> I) -> Result<ReadBytes, Error> {
        let (mut wrong, mut attempts) = (Wrong::new(), 0);
        loop {
            let (mut served, mut places, mut total) = (Vec::new(), Vec::new(), 0);
            for (number, batch) in Batches::of(copies()).enumerate() {
                let bytes = batch.iter().map(|copy| copy.bytes).sum();
                served.push(self.bring(&batch, number, &mut places, &wrong)?);
                total += bytes;
                if let Some(each) = self.each {
                    each(bytes);
                }
            }
            if served.is_empty() {
                return Ok(ReadBytes::default());
            }
            if self.are_members(&served.iter().map(|place| place.member).collect())? {
                match self.check(&copies, &served)? {
                    ContentCheck::Right(checked) => return Ok(ReadBytes { bytes: total, checked }),
                    ContentCheck::Wrong(shard, sources) => {
                        wrong.extend(sources.into_iter().map(|segment| (segment, shard)));
                        attempts += 1;
                        if attempts >= ATTEMPTS {
                            let why = format!("shard {shard} was read {attempts} times and never matched its hash");
                            return Err(self.given_up(&why, None));
                        }
                    }
                }
            }
            if Instant::now() >= self.until {
                let why = "some peers left or had wrong bytes: deadline exceeded";
                return Err(self.given_up(why, told(&wrong)));
            }
        }
    }

    /// Reads one batch from one of the peers; returns that peer.
    fn bring(
        &self,
        batch: &[Copy],
        number: usize,
        places: &mut Vec<ObjectPlace>,
        wrong: &Wrong,
    ) -> Result<ObjectPlace, Error> {
        let (mut trouble, mut rounds): (Option<String>, u32) = (None, 0);
        loop {
            if places.is_empty() {
                if trouble.is_some() {
                    rounds += 1;
                    if rounds > ROUNDS && !self.patient {
                        return Err(self.given_up(&hasty("no peer that holds it serves it"), trouble));
                    }
                    interrupt::sleep(AGAIN);
                }
                *places = self.locate(trouble.clone().or_else(|| told(wrong)).as_deref(), wrong)?;
            }
            // Equally near peers are used in turn.
            let near = places.iter().take_while(|place| place.distance == places[0].distance).count();
            let at = (self.shared.client as usize).wrapping_add(number) % near;
            match self.ask(batch, &places[at]) {
                Ok(()) => return Ok(places[at].clone()),
                Err(why) => {
                    let place = places.remove(at);
                    self.sources.doubt(self.shared, &place.segment);
                    trouble = Some(format!("{}: {why}", place.segment));
                }
            }
            if self.is_stopped() {
                return Err(Error::interrupted());
            }
            if Instant::now() >= self.until {
                return Err(self.given_up("deadline exceeded", trouble));
            }
        }
    }

    /// Returns true if the call was interrupted, or stopped by another of its threads.
    fn is_stopped(&self) -> bool {
        interrupt::ended() || self.stop.load(Ordering::Relaxed)
    }

    /// Reads copies from one peer, and waits.
    pub(super) fn ask(&self, batch: &[Copy], place: &ObjectPlace) -> Result<(), String> {
        let target = self.sources.handle(self.shared, &place.segment).map_err(|error| error.to_string())?;
        let request = |copy: &Copy| TransferRequest {
            opcode: Opcode::Read,
            source: self.memory.address() + copy.target_offset,
            target,
            target_offset: place.address.wrapping_add(copy.source_offset),
            length: copy.bytes,
        };
        let requests: Vec<TransferRequest> = batch.iter().map(request).collect();
        let left = self.until.saturating_duration_since(Instant::now());
        let options = SubmitOptions { deadline: Some(left.min(PATIENCE)), ..SubmitOptions::default() };
        let batch = self.shared.engine.submit(&requests, &options).map_err(|error| error.to_string())?;
        let status = loop {
            match batch.wait_for(interrupt::LOOK) {
                Some(status) => break status,
                None if self.is_stopped() => batch.cancel(),
                None => {}
            }
        };
        match status.state {
            TaskState::Completed => Ok(()),
            state => Err(batch.problem().map_or_else(|| format!("{state:?}"), str::to_owned)),
        }
    }

    /// Returns the peers that hold the buffer; at least one. Waits a limited time for one.
    fn locate(&self, trouble: Option<&str>, wrong: &Wrong) -> Result<Vec<ObjectPlace>, Error> {
        let config = &self.shared.config;
        let mut times = 0;
        loop {
            let call = LocateObject {
                client: self.shared.client,
                tenant: config.tenant.clone(),
                name: self.object.name.clone(),
                version: self.object.version,
                buffer: u32::try_from(self.buffer).unwrap_or(u32::MAX),
                host: config.host.clone(),
                rack: config.rack.clone(),
            };
            match self.shared.link.call(call) {
                Ok(mut found) if !found.places.is_empty() && (times == 0 || self.is_same()?) => {
                    found.places.retain(|place| !wrong.contains_key(&place.segment));
                    if !found.places.is_empty() {
                        return Ok(found.places);
                    }
                    return Err(self.given_up("all peers that hold it have wrong bytes", told(wrong)));
                }
                Ok(_) => times += 1,
                Err(error) if is_unknown(&error) => times += 1,
                Err(error) if is_away(&error) => {}
                Err(error) => return Err(error),
            }
            let trouble = trouble.map(str::to_owned);
            if times >= HOPELESS && !self.patient {
                return Err(self.given_up(&hasty("no peer holds all of it any more"), trouble));
            }
            if Instant::now() + AGAIN >= self.until {
                let why =
                    if times > 0 { "deadline exceeded, and no peer holds all of it" } else { "deadline exceeded" };
                return Err(self.given_up(why, trouble));
            }
            interrupt::sleep(AGAIN);
            if self.is_stopped() {
                return Err(Error::interrupted());
            }
        }
    }

    /// Checks that the catalog still has the same object: after all members have left, its version may be assigned to
    /// another. Returns false if the catalog does not answer now.
    fn is_same(&self) -> Result<bool, Error> {
        match self.shared.find(&self.object.name, Some(self.object.version)) {
            Ok(now) if now.spec.digest() == self.object.spec.digest() => Ok(true),
            Ok(_) => Err(self.given_up("another object has its name and version now: look it up again", None)),
            Err(error) if is_away(&error) || is_unknown(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns true if all of these members still hold the object, and none is excluded for wrong bytes.
    fn are_members(&self, served: &BTreeSet<u64>) -> Result<bool, Error> {
        loop {
            let call = DescribeObject {
                tenant: self.shared.config.tenant.clone(),
                name: self.object.name.clone(),
                version: Some(self.object.version),
            };
            match self.shared.link.call(call) {
                Ok(found) => {
                    let good = found.members.into_iter().filter(|member| member.excluded.is_empty());
                    return Ok(served.is_subset(&good.map(|member| member.member).collect()));
                }
                Err(error) if is_unknown(&error) => return Ok(false),
                Err(error) if is_away(&error) && Instant::now() + AGAIN < self.until && interrupt::sleep(AGAIN) => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn given_up(&self, why: &str, cause: Option<String>) -> Error {
        let Object { name, version, .. } = self.object;
        let what = format!("object {name:?} version {version}: buffer {} is not read: {why}", self.buffer);
        Error::Status { what, status: Status::NotFound, cause }
    }
}

/// Completes the reason of a failure whose caller gave no deadline.
fn hasty(why: &str) -> String {
    format!("{why}; no deadline was given: with one, the call waits until then")
}

/// Describes the peers with wrong bytes, for error messages.
fn told(wrong: &Wrong) -> Option<String> {
    let one = |(segment, shard): (&String, &u32)| format!("shard {shard} from {segment} does not match its hash");
    (!wrong.is_empty()).then(|| wrong.iter().map(one).collect::<Vec<String>>().join("; "))
}
