//! Checks of a completed batch: allowed results, and correct bytes.

use kvplane_client::{SegmentTarget, TaskResult};
use kvplane_proto::Status;
use kvplane_proto::ids::BatchId;
use kvplane_proto::rng::mix64;

use crate::world::World;
use crate::world::check::{CheckResult, Rule, broken};
use crate::world::cluster::node::ShardIncarnation;
use crate::world::scenario::MS;

/// Tolerance of a batch's deadline: resets end I/O, and copies are not interrupted.
const GRACE_NS: u64 = 50 * MS;

/// Most time in which objects are read that two nodes have, where [`crate::world::Scenario::of_silence`] hedges gets:
/// the hedging delays of a get that goes to both owners, a handshake, and the slowness of the World.
const SOON_NS: u64 = 250 * MS;

/// Kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Get {
        capacity: u64,
    },
    Put {
        write: usize,
        bytes: u64,
        replace: bool,
    },
    /// Write to cells of a segment.
    Write {
        write: usize,
        bytes: u64,
        target: SegmentTarget,
    },
    Exists,
    Size,
    Remove,
}

/// Request of a batch, with its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackedTask {
    pub(crate) key: usize,
    pub(crate) what: What,
    pub(crate) offset: Option<u64>,
}

/// Batch that was submitted and is not complete.
pub(crate) struct OpenBatch {
    pub(crate) asked: Vec<TrackedTask>,
    pub(crate) started_ns: u64,
    pub(crate) deadline_ns: u64,
    pub(crate) cancelled: bool,
    /// Number of the client's gets that had failed over to replica owners at its submission.
    pub(crate) fell_over: u64,
}

impl World {
    /// Checks a batch that the client reports as complete.
    pub(crate) fn batch_done(&mut self, client: usize, batch: BatchId) {
        let Some(open) = self.clients[client].batches.remove(&batch) else {
            self.violate(broken(Rule::Batch, format!("client {client}: {batch:?} completed, which is not open")));
            return;
        };
        let host = &mut self.clients[client];
        let complete = host.client.batches().is_complete(batch);
        let results = host.client.batches().results(batch).to_vec();
        if !complete || results.len() != open.asked.len() {
            let what = format!("{batch:?} of {} requests completed with {} results", open.asked.len(), results.len());
            self.violate(broken(Rule::Batch, what));
            return;
        }
        host.client.release(batch);
        let late_ns = self.now_ns.saturating_sub(open.deadline_ns.max(self.clients[client].halted_ns));
        if late_ns > GRACE_NS {
            self.violate(broken(Rule::Deadline, format!("{batch:?} completed {} ms too late", late_ns / MS)));
        }
        self.statistics.batches += 1;
        let is_soon = self.check_is_soon(client, &open);
        self.require(is_soon);
        for (asked, result) in open.asked.iter().zip(&results) {
            let word = result.status as u64 ^ mix64(result.bytes) ^ mix64(!result.version.0);
            self.detail(word, || format!("client {client} {asked:?} -> {result:?}"));
            self.statistics.outcome(result.status);
            let let_in = self.check_ticket(client, result.status);
            self.require(let_in);
            if let What::Write { write, .. } = asked.what {
                self.cells_written(write, result.status == Status::Ok);
            }
            let checked = self.check_result(client, &open, asked, result);
            self.require(checked);
            if let Some(offset) = asked.offset {
                let taken = self.clients[client].memory.take_back(offset);
                self.require(taken);
            }
        }
    }

    /// Checks that a batch which only reads objects of two nodes is complete soon, although one of them may be silent.
    fn check_is_soon(&self, client: usize, open: &OpenBatch) -> CheckResult {
        let took_ns = self.now_ns.saturating_sub(open.started_ns);
        let reads = |asked: &TrackedTask| {
            let doubled = self.doubled.get(&asked.key).is_some_and(|doubled_ns| *doubled_ns < open.started_ns);
            doubled && matches!(asked.what, What::Get { .. } | What::Exists | What::Size)
        };
        let concerns = self.scenario.answers && !open.cancelled && open.asked.iter().all(reads);
        if !concerns || took_ns <= SOON_NS || self.moved_ns >= open.started_ns {
            return Ok(());
        }
        let what = format!("client {client} waited {} ms for {:?}, which two nodes have", took_ns / MS, open.asked);
        Err(broken(Rule::Deadline, what))
    }

    /// Returns true if an object may not have been found because of a migration: slots migrated meanwhile, and it is at
    /// its former or its new owner. Requests do not wait long for a slow former owner.
    fn may_be_moving(&self, key: usize, since_ns: u64) -> bool {
        let digest = self.shadow.digest(key);
        let has = |incarnation: &ShardIncarnation| {
            let (service, slot) = (&incarnation.service, digest.slot());
            let there = service.inspect().serves(slot) || service.inspect().exports(slot);
            there && service.store().peek(digest).is_some()
        };
        let live =
            || self.incarnations.iter().filter(|incarnation| incarnation.alive && self.nodes[incarnation.node].up);
        let moving = self.moved_ns >= since_ns || live().any(ShardIncarnation::imports);
        moving && live().any(has)
    }

    /// Checks an object that a get returned, of a key, into a buffer at an offset of the client's memory.
    fn check_got(
        &mut self,
        client: usize,
        open: &OpenBatch,
        (key, offset, capacity): (usize, u64, u64),
        result: &TaskResult,
    ) -> CheckResult {
        self.statistics.hits += 1;
        if result.bytes > capacity {
            return Err(broken(Rule::Bytes, format!("{} bytes were received into {capacity}", result.bytes)));
        }
        let bytes = self.clients[client].memory.peek(offset, result.bytes);
        let version = result.version.0;
        self.shadow.check_read(key, version, bytes)?;
        if self.clients[client].client.counters().second_asked == open.fell_over {
            let (at, started_ns) = ((client, key), open.started_ns);
            let inherited = self.owns_copy(key, version);
            self.removals.check_copy(&self.shadow, at, version, started_ns, self.now_ns, inherited)?;
        }
        self.removals.check_get(&self.shadow, client, key, version, open.started_ns)
    }

    fn check_result(
        &mut self,
        client: usize,
        open: &OpenBatch,
        asked: &TrackedTask,
        result: &TaskResult,
    ) -> CheckResult {
        let (key, now_ns) = (asked.key, self.now_ns);
        match (asked.what, result.status) {
            (What::Get { capacity }, Status::Ok) => {
                self.check_got(client, open, (key, asked.offset.unwrap_or(0), capacity), result)
            }
            (What::Get { capacity }, Status::BufferTooSmall) => {
                let right = result.bytes > capacity && self.shadow.has_length(key, result.bytes);
                if right { Ok(()) } else { Err(unfit(asked, result)) }
            }
            (What::Put { write, bytes, replace }, Status::Ok) => {
                self.statistics.puts += 1;
                if result.bytes != bytes {
                    return Err(unfit(asked, result));
                }
                if replace {
                    self.removals.remove_done(client, key, open.started_ns, now_ns);
                }
                if self.scenario.keeps && (result.replicas > 1 || self.scenario.kept.is_some()) {
                    self.doubled.insert(key, now_ns);
                }
                self.shadow.acked(write, result.version.0, now_ns)
            }
            (What::Size, Status::Ok) => {
                if self.shadow.has_length(key, result.bytes) {
                    Ok(())
                } else {
                    Err(unfit(asked, result))
                }
            }
            (What::Get { .. }, Status::NotFound)
                if self.doubled.get(&key).is_some_and(|doubled_ns| *doubled_ns < open.started_ns)
                    && !self.may_be_moving(key, open.started_ns) =>
            {
                Err(broken(Rule::Lost, format!("key {key} was to stay, and client {client} does not find it")))
            }
            (What::Put { .. }, Status::QuotaExceeded) if self.scenario.may_exceed(key) => Ok(()),
            (What::Get { .. }, Status::Corrupt) if self.scenario.heals => {
                Err(broken(Rule::Lost, format!("key {key} is damaged, and client {client} does not get it")))
            }
            (What::Remove, Status::Ok | Status::NotFound) => {
                self.removals.remove_done(client, key, open.started_ns, now_ns);
                Ok(())
            }
            (_, Status::DeadlineExceeded) if now_ns < open.deadline_ns => Err(unfit(asked, result)),
            (_, Status::Cancelled) if !open.cancelled => Err(unfit(asked, result)),
            (What::Write { .. }, Status::Ok | Status::Stale | Status::Unsupported)
            | (What::Put { replace: false, .. }, Status::Exists)
            | (What::Put { .. }, Status::NoSpace)
            | (What::Remove, Status::NoSpace)
            | (What::Get { .. } | What::Size | What::Exists, Status::NotFound)
            | (What::Exists, Status::Ok)
            | (
                _,
                Status::DeadlineExceeded
                | Status::Cancelled
                | Status::Busy
                | Status::Corrupt
                | Status::Unreachable
                | Status::NoOwner
                | Status::WrongOwner,
            ) => Ok(()),
            _ => Err(unfit(asked, result)),
        }
    }
}

fn unfit(asked: &TrackedTask, result: &TaskResult) -> crate::world::Violation {
    broken(Rule::Batch, format!("{asked:?} ended with {result:?}"))
}
