//! Reader: reads copies of one buffer of an object, from the peers that the catalog names, until all bytes are right.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvplane_cluster::reshard::Copy;
use kvplane_engine::Region;
use kvplane_proto::Status;
use kvplane_rpc::p2p::ObjectPlace;
use kvplane_sys::interrupt;
use kvplane_transfer::{Opcode, SubmitOptions, TaskState, TransferEngine, TransferRequest};

use super::batches::Batches;
use super::checks::{Content, ContentCheck};
use super::options::{ReadBytes, ReadOptions};
use crate::error::Error;
use crate::p2p::catalog::{Catalog, Object, is_unknown};
use crate::p2p::sources::Sources;

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

/// Peers that served wrong bytes in this call, by segment name, each with the shard.
type Wrong = BTreeMap<String, u32>;

/// Reads of one call into local memory, which is registered meanwhile.
pub(in crate::p2p) struct RangeReads<'a> {
    catalog: &'a Catalog,
    sources: Sources<'a>,
    memory: &'a Arc<Region>,
    until: Instant,
    /// True if the caller gave a deadline, until which the reads wait for peers.
    patient: bool,
    /// Set to end all reads early.
    stop: AtomicBool,
    each: Option<&'a (dyn Fn(u64) + Sync)>,
}

impl<'a> RangeReads<'a> {
    /// Creates the reads of a call that begins now.
    pub(in crate::p2p) fn new(
        catalog: &'a Catalog,
        engine: &'a TransferEngine,
        memory: &'a Arc<Region>,
        options: &ReadOptions<'a>,
    ) -> Self {
        let (sources, stop) = (Sources::new(engine), AtomicBool::new(false));
        let (until, patient) = (options.until(), options.deadline.is_some());
        Self { catalog, sources, memory, until, patient, stop, each: options.each }
    }

    /// Reads copies that lie within the buffer and the memory, and verifies the shards that are complete.
    ///
    /// # Errors
    /// When no peer is left, the deadline has passed, or the call is stopped or interrupted.
    pub(in crate::p2p) fn read<I: Iterator<Item = Copy>>(
        &self,
        object: &Object,
        buffer: usize,
        copies: impl Fn() -> I,
    ) -> Result<ReadBytes, Error> {
        Reader { reads: self, object, buffer }.read(copies)
    }

    /// Ends all reads of the call: those that have not ended fail as interrupted.
    pub(in crate::p2p) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Returns true if the reads of the call are to end.
    pub(in crate::p2p) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Reason why one peer did not serve a batch.
#[derive(Debug)]
enum ServeError {
    /// The peer's segment is not open, or the reads could not be submitted.
    Submit(Error),
    /// The batch failed with a connection.
    Connection { problem: String },
    /// The batch ended in this state.
    Ended { state: TaskState },
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submit(error) => write!(f, "{error}"),
            Self::Connection { problem } => f.write_str(problem),
            Self::Ended { state } => write!(f, "{state:?}"),
        }
    }
}

impl std::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Submit(error) => Some(error),
            _ => None,
        }
    }
}

/// Read of one buffer of an object.
struct Reader<'a> {
    reads: &'a RangeReads<'a>,
    object: &'a Object,
    buffer: usize,
}

impl Reader<'_> {
    /// Reads copies that lie within the buffer and the memory, and verifies the shards that are complete.
    fn read<I: Iterator<Item = Copy>>(&self, copies: impl Fn() -> I) -> Result<ReadBytes, Error> {
        let (mut wrong, mut attempts) = (Wrong::new(), 0);
        loop {
            let (mut served, mut places, mut total) = (Vec::new(), Vec::new(), 0);
            for (number, batch) in Batches::of(copies()).enumerate() {
                let bytes = batch.iter().map(|copy| copy.bytes).sum();
                served.push(self.bring(&batch, number, &mut places, &wrong)?);
                total += bytes;
                if let Some(each) = self.reads.each {
                    each(bytes);
                }
            }
            if served.is_empty() {
                return Ok(ReadBytes::default());
            }
            if self.are_members(&served.iter().map(|place| place.member).collect())? {
                let content = Content { object: self.object, buffer: self.buffer, memory: self.reads.memory };
                match content.check(&copies, &served, |batch, place| self.ask(batch, place).is_ok()) {
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
            if Instant::now() >= self.reads.until {
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
                    if rounds > ROUNDS && !self.reads.patient {
                        return Err(self.given_up(&hasty("no peer that holds it serves it"), trouble));
                    }
                    interrupt::sleep(AGAIN);
                }
                *places = self.locate(trouble.clone().or_else(|| told(wrong)).as_deref(), wrong)?;
            }
            // Equally near peers are used in turn.
            let near = places.iter().take_while(|place| place.distance == places[0].distance).count();
            let at = (self.reads.catalog.client() as usize).wrapping_add(number) % near;
            match self.ask(batch, &places[at]) {
                Ok(()) => return Ok(places[at].clone()),
                Err(why) => {
                    let place = places.remove(at);
                    self.reads.sources.suspect(&place.segment);
                    trouble = Some(format!("{}: {why}", place.segment));
                }
            }
            if self.is_stopped() {
                return Err(Error::interrupted());
            }
            if Instant::now() >= self.reads.until {
                return Err(self.given_up("deadline exceeded", trouble));
            }
        }
    }

    /// Returns true if the call was interrupted, or stopped by another of its threads.
    fn is_stopped(&self) -> bool {
        interrupt::ended() || self.reads.is_stopping()
    }

    /// Reads copies from one peer, and waits.
    fn ask(&self, batch: &[Copy], place: &ObjectPlace) -> Result<(), ServeError> {
        let target = self.reads.sources.handle(&place.segment).map_err(ServeError::Submit)?;
        let request = |copy: &Copy| TransferRequest {
            opcode: Opcode::Read,
            source: self.reads.memory.address() + copy.target_offset,
            target,
            target_offset: place.address.wrapping_add(copy.source_offset),
            length: copy.bytes,
        };
        let requests: Vec<TransferRequest> = batch.iter().map(request).collect();
        let left = self.reads.until.saturating_duration_since(Instant::now());
        let options = SubmitOptions { deadline: Some(left.min(PATIENCE)), ..SubmitOptions::default() };
        let batch = self.reads.sources.submit(&requests, &options).map_err(ServeError::Submit)?;
        let status = loop {
            match batch.wait_for(interrupt::LOOK) {
                Some(status) => break status,
                None if self.is_stopped() => batch.cancel(),
                None => {}
            }
        };
        match status.state {
            TaskState::Completed => Ok(()),
            state => Err(match batch.problem() {
                Some(problem) => ServeError::Connection { problem: problem.to_owned() },
                None => ServeError::Ended { state },
            }),
        }
    }

    /// Returns the peers that hold the buffer; at least one. Waits a limited time for one.
    fn locate(&self, trouble: Option<&str>, wrong: &Wrong) -> Result<Vec<ObjectPlace>, Error> {
        let mut times = 0;
        loop {
            match self.reads.catalog.locate(self.object, self.buffer) {
                Ok(mut places) if !places.is_empty() && (times == 0 || self.is_same()?) => {
                    places.retain(|place| !wrong.contains_key(&place.segment));
                    if !places.is_empty() {
                        return Ok(places);
                    }
                    return Err(self.given_up("all peers that hold it have wrong bytes", told(wrong)));
                }
                Ok(_) => times += 1,
                Err(error) if is_unknown(&error) => times += 1,
                Err(error) if error.is_unanswered() => {}
                Err(error) => return Err(error),
            }
            let trouble = trouble.map(str::to_owned);
            if times >= HOPELESS && !self.reads.patient {
                return Err(self.given_up(&hasty("no peer holds all of it any more"), trouble));
            }
            if Instant::now() + AGAIN >= self.reads.until {
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
        match self.reads.catalog.find(&self.object.name, Some(self.object.version)) {
            Ok(now) if now.spec.digest() == self.object.spec.digest() => Ok(true),
            Ok(_) => Err(self.given_up("another object has its name and version now: look it up again", None)),
            Err(error) if error.is_unanswered() || is_unknown(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns true if all of these members still hold the object, and none is excluded for wrong bytes.
    fn are_members(&self, served: &BTreeSet<u64>) -> Result<bool, Error> {
        loop {
            match self.reads.catalog.describe(&self.object.name, Some(self.object.version)) {
                Ok(found) => {
                    let good = found.members.into_iter().filter(|member| member.excluded.is_empty());
                    return Ok(served.is_subset(&good.map(|member| member.member).collect()));
                }
                Err(error) if is_unknown(&error) => return Ok(false),
                Err(error)
                    if error.is_unanswered()
                        && Instant::now() + AGAIN < self.reads.until
                        && interrupt::sleep(AGAIN) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn given_up(&self, why: &str, cause: Option<String>) -> Error {
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
