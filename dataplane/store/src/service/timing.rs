//! How long requests took, by operation and tier, and the slow ones step by step.
//!
//! A request's time runs from its frame's arrival to its answer's departure; a payload that takes longer to leave than
//! that is the reader's doing and shows in the slow operations only. Counting is an addition to a plain number of the
//! shard's own. What is answered in the round in which it came, which is nearly everything, has no time of its own by
//! the host's clock. Of those the host reads the clock at the end of one round in [`SAMPLE`], and what was counted
//! since then gets that time: one reading for many requests.

use std::collections::VecDeque;

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::sched::Histogram;
use kvplane_proto::{Digest, Status};

use super::Service;
use super::types::Output;

#[cfg(test)]
mod tests;

/// How many requests of a kind share one reading of the clock, once there were enough to know better.
const SAMPLE: u32 = 16;
/// Slow operations that are remembered: the latest.
pub const SLOW_KEPT: usize = 64;
/// What is slow where nobody says otherwise.
pub const SLOW_AFTER_NS: u64 = 10_000_000;

/// Numbers of operations that are timed are below this.
const KINDS: usize = 64;
const PLACES: usize = 2 * KINDS;

/// Where the time of a request went until its answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Timing {
    /// When its frame arrived.
    pub arrived_ns: u64,
    /// How long its payload took to arrive after that.
    pub receive_ns: u64,
    /// How long the SSD took, with the wait for its turn.
    pub ssd_ns: u64,
    /// Whether it waited for the SSD.
    pub ssd: bool,
}

/// A request that took long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowOperation {
    /// What was asked.
    pub operation: Operation,
    /// How it ended.
    pub status: Status,
    /// Of which object, where it waited for the SSD.
    pub digest: Option<Digest>,
    /// Bytes of the answer's payload.
    pub bytes: u64,
    /// When its frame arrived, by the host's clock.
    pub arrived_ns: u64,
    /// All of it.
    pub total_ns: u64,
    /// Of that, its payload's arrival: the network and the peer.
    pub receive_ns: u64,
    /// The SSD, with the wait for its turn.
    pub ssd_ns: u64,
    /// The answer's payload leaving: the network and the peer.
    pub send_ns: u64,
}

/// Requests of one kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OperationTimes {
    /// What was asked.
    pub operation: Operation,
    /// Whether they waited for the SSD.
    pub ssd: bool,
    /// How long they took.
    pub times: Histogram,
    /// Those that were not answered with `Ok`.
    pub failed: u64,
}

/// What a shard knows of the times of its requests.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceTimes {
    /// Those kinds that there were.
    pub operations: Vec<OperationTimes>,
    /// Items that requests named, by kind.
    pub items: Vec<(Operation, u64)>,
    /// Requests that were slow so far.
    pub slow_count: u64,
    /// The latest of them, oldest first.
    pub slow: Vec<SlowOperation>,
    /// From when on a request is slow.
    pub slow_after_ns: u64,
}

/// The counting side.
#[derive(Debug)]
pub(super) struct Timed {
    /// Answered in the round of their arrival, and not yet in the histogram.
    fast: [u32; PLACES],
    /// How many of those share a reading.
    share: [u32; PLACES],
    /// The last reading.
    last_ns: [u64; PLACES],
    failed: [u64; PLACES],
    items: [u64; KINDS],
    times: Vec<Histogram>,
    /// Which of `fast` grew in this round, and when what they answered came.
    round: u128,
    round_arrived_ns: u64,
    /// Whether this round's end wants the clock.
    due: bool,
    slow: VecDeque<SlowOperation>,
    slow_count: u64,
    slow_after_ns: u64,
}

const _: () = assert!(PLACES <= u128::BITS as usize);

const fn place(operation: Operation, ssd: bool) -> usize {
    (operation as usize & (KINDS - 1)) * 2 + ssd as usize
}

impl Timed {
    pub(super) fn new() -> Self {
        Self {
            fast: [0; PLACES],
            share: [1; PLACES],
            last_ns: [0; PLACES],
            failed: [0; PLACES],
            items: [0; KINDS],
            times: vec![Histogram::new(); PLACES],
            round: 0,
            round_arrived_ns: 0,
            due: false,
            slow: VecDeque::with_capacity(SLOW_KEPT),
            slow_count: 0,
            slow_after_ns: SLOW_AFTER_NS,
        }
    }

    pub(super) const fn asked(&mut self, operation: Operation, items: u32) {
        self.items[operation as usize & (KINDS - 1)] += items as u64;
    }

    /// An answer leaves.
    #[inline]
    fn answered(&mut self, header: &Header, timing: &Timing, digest: Option<Digest>, now_ns: u64) {
        let Kind::Reply(operation) = header.kind else { return };
        let place = place(operation, timing.ssd);
        self.failed[place] += u64::from(header.status != Status::Ok);
        if now_ns == timing.arrived_ns {
            self.fast[place] += 1;
            self.due |= self.fast[place] >= self.share[place];
            self.round |= 1 << place;
            self.round_arrived_ns = now_ns;
        } else {
            self.took(header, operation, timing, digest, now_ns);
        }
    }

    #[cold]
    fn took(&mut self, header: &Header, operation: Operation, timing: &Timing, digest: Option<Digest>, now_ns: u64) {
        let total_ns = now_ns.saturating_sub(timing.arrived_ns);
        self.times[place(operation, timing.ssd)].add(total_ns);
        if total_ns >= self.slow_after_ns {
            self.remember(SlowOperation {
                operation,
                status: header.status,
                digest,
                bytes: header.payload_bytes,
                arrived_ns: timing.arrived_ns,
                total_ns,
                receive_ns: timing.receive_ns,
                ssd_ns: timing.ssd_ns,
                send_ns: 0,
            });
        }
    }

    fn remember(&mut self, one: SlowOperation) {
        self.slow_count += 1;
        // What was slow already, and then left slowly, is the same request.
        if let Some(known) = self
            .slow
            .back_mut()
            .filter(|known| one.send_ns > 0 && known.arrived_ns == one.arrived_ns && known.operation == one.operation)
        {
            self.slow_count -= 1;
            (known.total_ns, known.send_ns) = (one.total_ns, one.send_ns);
            return;
        }
        if self.slow.len() == SLOW_KEPT {
            self.slow.pop_front();
        }
        self.slow.push_back(one);
    }

    fn round_over(&mut self, clock: impl FnOnce() -> u64) {
        if self.due {
            let took_ns = clock().saturating_sub(self.round_arrived_ns);
            while self.round != 0 {
                let place = self.round.trailing_zeros() as usize;
                self.round &= self.round - 1;
                self.times[place].add_many(took_ns, self.fast[place].into());
                self.fast[place] = 0;
                self.last_ns[place] = took_ns;
                self.share[place] = (self.share[place] * 2).min(SAMPLE);
            }
            self.due = false;
        }
        self.round = 0;
    }

    fn snapshot(&self) -> ServiceTimes {
        let mut operations = Vec::new();
        for (operation, ssd) in Operation::ALL.iter().flat_map(|operation| [(*operation, false), (*operation, true)]) {
            let place = place(operation, ssd);
            let mut times = self.times[place].clone();
            if self.fast[place] > 0 {
                times.add_many(self.last_ns[place], self.fast[place].into());
            }
            if times.count() > 0 {
                operations.push(OperationTimes { operation, ssd, times, failed: self.failed[place] });
            }
        }
        let items = Operation::ALL.iter().map(|operation| (*operation, self.items[*operation as usize & (KINDS - 1)]));
        ServiceTimes {
            operations,
            items: items.filter(|(_, items)| *items > 0).collect(),
            slow_count: self.slow_count,
            slow: self.slow.iter().copied().collect(),
            slow_after_ns: self.slow_after_ns,
        }
    }
}

/// A payload that leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaving {
    operation: Operation,
    ssd_ns: u64,
    receive_ns: u64,
    arrived_ns: u64,
    since_ns: u64,
    bytes: u64,
}

/// What waits to be polled, each with where its time went.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    queue: VecDeque<(Output, Timing, Option<Digest>)>,
    /// Of what is being answered.
    pub(super) timing: Timing,
    pub(super) digest: Option<Digest>,
}

impl Outputs {
    pub(super) fn push_back(&mut self, output: Output) {
        self.queue.push_back((output, self.timing, self.digest));
    }

    /// What is answered from now on came just now.
    pub(super) const fn arrived(&mut self, now_ns: u64) {
        self.timing = Timing { arrived_ns: now_ns, receive_ns: 0, ssd_ns: 0, ssd: false };
        self.digest = None;
    }

    /// What is answered from now on has waited for the SSD.
    pub(super) const fn waited(&mut self, timing: Timing, digest: Option<Digest>, since_ns: u64, now_ns: u64) {
        self.timing = Timing { ssd: true, ssd_ns: now_ns.saturating_sub(since_ns), ..timing };
        self.digest = digest;
    }
}

impl Service {
    /// The next output, counted.
    pub(super) fn take_output(&mut self) -> Option<Output> {
        let (output, timing, digest) = self.outputs.queue.pop_front()?;
        if let Output::Frame { header, .. } = &output {
            self.timed.answered(header, &timing, digest, self.now_ns);
            self.taken = timing;
        }
        Some(output)
    }

    /// A round of the host is over and what it answered has left; `clock` is read now and then.
    #[inline]
    pub fn round_over(&mut self, clock: impl FnOnce() -> u64) {
        if self.timed.round != 0 {
            self.timed.round_over(clock);
        }
    }

    /// What to remember of the frame that was polled last, until its payload has left.
    #[must_use]
    pub const fn leaving(&self, header: &Header, now_ns: u64) -> Leaving {
        let Timing { arrived_ns, receive_ns, ssd_ns, .. } = self.taken;
        let operation = match header.kind {
            Kind::Request(operation) | Kind::Reply(operation) => operation,
        };
        Leaving { operation, ssd_ns, receive_ns, arrived_ns, since_ns: now_ns, bytes: header.payload_bytes }
    }

    /// A payload has left.
    #[inline]
    pub fn left(&mut self, leaving: &Leaving, now_ns: u64) {
        let send_ns = now_ns.saturating_sub(leaving.since_ns);
        if send_ns >= self.timed.slow_after_ns {
            self.timed.remember(SlowOperation {
                operation: leaving.operation,
                status: Status::Ok,
                digest: None,
                bytes: leaving.bytes,
                arrived_ns: leaving.arrived_ns,
                total_ns: now_ns.saturating_sub(leaving.arrived_ns),
                receive_ns: leaving.receive_ns,
                ssd_ns: leaving.ssd_ns,
                send_ns,
            });
        }
    }

    /// From when on a request is slow; above 0.
    pub fn set_slow_after(&mut self, slow_after_ns: u64) {
        self.timed.slow_after_ns = slow_after_ns.max(1);
    }

    /// How long requests took so far.
    #[must_use]
    pub fn times(&self) -> ServiceTimes {
        self.timed.snapshot()
    }
}
