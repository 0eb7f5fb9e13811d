//! Reads some bytes of an object from who has all of the buffer that they are in, without becoming one of its holders.
//!
//! Nobody is told that somebody reads: who goes cuts readers off. So it is looked afterwards whether all who were asked
//! are still holders. Those who are have held the same memory all the time; what came from others is read again. Then
//! shards all of whose bytes were read are compared with their hashes ([`super::checks`]): who served wrong ones is
//! asked no more, and everything is read again.

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

/// Copies in one batch.
const BATCH: usize = 4096;
/// Bytes in one batch; longer copies are cut, so that several sources share them.
const BATCH_BYTES: u64 = 64 << 20;
/// How long one source may take for a batch.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two questions for sources where there are none.
const AGAIN: Duration = Duration::from_millis(200);
/// How often all are asked for a batch in vain, where no deadline says how long: longer than who is gone stays in the
/// catalog.
const ROUNDS: u32 = 40;
/// How often there must be no source before it is believed: it may only not have been heard for a moment. 3 s, where no
/// deadline says how long.
const HOPELESS: u32 = 15;
/// How often everything is read again because a shard was wrong.
const ATTEMPTS: u32 = 8;

/// How parts of objects are read.
#[derive(Default)]
pub struct ReadOptions<'a> {
    /// How long it may take. Until then a source is waited for where there is none: it may be starting again. Without
    /// one it is an hour, and 3 s where nobody holds the buffer, 8 s where those who do serve nothing.
    pub deadline: Option<Duration>,
    /// Called with the bytes of each batch that has arrived, by threads of the call. What is read again counts again.
    pub each: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl std::fmt::Debug for ReadOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReadOptions({:?})", self.deadline)
    }
}

impl ReadOptions<'_> {
    /// When time is up for a call that begins now.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.deadline.unwrap_or(USUAL)
    }
}

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBytes {
    /// All bytes.
    pub bytes: u64,
    /// Those of them that are of shards which were read as a whole, and match their hashes.
    pub checked: u64,
}

/// Sources whose bytes were found wrong in this call, by the names they serve under; and the shard for each.
pub(super) type Wrong = BTreeMap<String, u32>;

/// One buffer of an object that is read into memory of ours.
pub(super) struct Reader<'a> {
    pub(super) shared: &'a StoreState,
    pub(super) sources: &'a Sources,
    pub(super) object: &'a Object,
    pub(super) buffer: usize,
    pub(super) memory: &'a Arc<Region>,
    pub(super) until: Instant,
    /// Whether sources are waited for until then, for the caller said until when.
    pub(super) patient: bool,
    /// Set by others when it is to end early.
    pub(super) stop: &'a AtomicBool,
    pub(super) each: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl P2pStore {
    /// Reads ranges of an object's buffer into memory, from those who hold all of the buffer, nearest first. Unlike
    /// [`Self::get_replica`], nobody can fetch them here; and hashes are those of whole shards, so what is compared
    /// with them are those shards all of whose bytes are among the ranges. A source whose shard is wrong is asked no
    /// more.
    ///
    /// # Errors
    /// When a range is not within the buffer or the memory, two overlap in memory, no source is left, or time is up.
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
    /// Does something with memory that can be read into.
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
    /// Reads copies that lie within the buffer and the memory, and checks what can be checked.
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
                let why = "some of those who were read from went or had wrong bytes, and time is up";
                return Err(self.given_up(why, told(&wrong)));
            }
        }
    }

    /// Has one batch brought by one of the places: by which.
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
                        return Err(self.given_up(&hasty("nobody who holds it serves it"), trouble));
                    }
                    interrupt::sleep(AGAIN);
                }
                *places = self.locate(trouble.clone().or_else(|| told(wrong)).as_deref(), wrong)?;
            }
            // Those that are equally near in turn.
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
                return Err(self.given_up("time is up", trouble));
            }
        }
    }

    /// Whether whoever waits for this, on this thread or another one, does not any more.
    fn is_stopped(&self) -> bool {
        interrupt::ended() || self.stop.load(Ordering::Relaxed)
    }

    /// Has copies carried out by a source, and waits.
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

    /// Who may be asked now; at least one. Waits a little for one to be there.
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
                    return Err(self.given_up("all who hold it have wrong bytes", told(wrong)));
                }
                Ok(_) => times += 1,
                Err(error) if is_unknown(&error) => times += 1,
                Err(error) if is_away(&error) => {}
                Err(error) => return Err(error),
            }
            let trouble = trouble.map(str::to_owned);
            if times >= HOPELESS && !self.patient {
                return Err(self.given_up(&hasty("nobody holds all of it any more"), trouble));
            }
            if Instant::now() + AGAIN >= self.until {
                let why = if times > 0 { "time is up, and nobody holds all of it" } else { "time is up" };
                return Err(self.given_up(why, trouble));
            }
            interrupt::sleep(AGAIN);
            if self.is_stopped() {
                return Err(Error::interrupted());
            }
        }
    }

    /// Makes sure that the object is the one that it was: a catalog that everybody had left gives its number anew. Not
    /// so where that cannot be asked now.
    fn is_same(&self) -> Result<bool, Error> {
        match self.shared.find(&self.object.name, Some(self.object.version)) {
            Ok(now) if now.spec.digest() == self.object.spec.digest() => Ok(true),
            Ok(_) => {
                Err(self.given_up("it went, and another object has its name and version now: find it again", None))
            }
            Err(error) if is_away(&error) || is_unknown(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether all of them hold the object still, and nobody found their bytes wrong.
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

/// Why a call ended whose caller did not say how long to wait.
fn hasty(why: &str) -> String {
    format!("{why}; no deadline was given: with one, sources are waited for until then")
}

/// Who has wrong bytes, for people.
fn told(wrong: &Wrong) -> Option<String> {
    let one = |(segment, shard): (&String, &u32)| format!("shard {shard} from {segment} does not match its hash");
    (!wrong.is_empty()).then(|| wrong.iter().map(one).collect::<Vec<String>>().join("; "))
}
