//! Latency of requests, by operation and tier, and slow operations broken down by step.
//!
//! A request's latency runs from the arrival of its frame to the departure of its reply. The time that a reply's
//! payload takes to be sent beyond that depends on the reader, and shows in the slow operations only. Counting is an
//! addition to a plain number of the shard. A request that is answered in the round in which it was received, as nearly
//! all are, has no measurable latency by the host's clock. For these the host reads the clock at the end of one round
//! in [`SAMPLE`], and all requests counted since the last reading get that latency: one reading for many requests.

use std::collections::VecDeque;

use kvplane_proto::frame::Header;
use kvplane_proto::histogram::Histogram;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{Digest, Status};

use crate::service::types::Output;

mod by_tenant;
mod popular;
#[cfg(test)]
mod tests;

use by_tenant::ByTenant;
pub use by_tenant::{TENANTS_TIMED, TenantOperation, TenantTimes, TimedTenant};
use popular::Popular;
pub use popular::{HOT_KEPT, HotObject, HotObjects};

/// Requests of a kind that share one reading of the clock, once enough were measured.
const SAMPLE: u32 = 16;
/// Slow operations that are kept: the latest.
pub const SLOW_KEPT: usize = 64;
/// Default latency from which an operation is slow.
pub const SLOW_AFTER_NS: u64 = 10_000_000;

/// Operations of each class of [`TenantOperation`].
const GETS: u64 = kinds(&[Operation::Get, Operation::GetRange, Operation::Lookup]);
const PUTS: u64 = kinds(&[Operation::Put, Operation::Commit, Operation::Seal]);

/// Exclusive upper bound of the numbers of operations that are timed.
const KINDS: usize = 64;
const PLACES: usize = 2 * KINDS;

/// Breakdown of a request's time until its reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Timing {
    /// Time at which its frame arrived.
    pub arrived_ns: u64,
    /// Time until its payload was received, after that.
    pub receive_ns: u64,
    /// Time spent waiting for the SSD, including queueing.
    pub ssd_ns: u64,
    /// True if it waited for the SSD.
    pub ssd: bool,
}

/// Request that exceeded the latency limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SlowOperation {
    pub operation: Operation,
    pub status: Status,
    /// Object of the request, where it is known; of several, the first that was.
    pub digest: Option<Digest>,
    /// Bytes of the payload of the request or the reply; over shared memory, of the object.
    pub bytes: u64,
    /// Time at which its frame arrived, by the host's clock.
    pub arrived_ns: u64,
    /// Total latency.
    pub total_ns: u64,
    /// Time of that to receive its payload: the network and the peer.
    pub receive_ns: u64,
    /// Time of that waiting for the SSD, including queueing.
    pub ssd_ns: u64,
    /// Time of that to send the reply's payload: the network and the peer.
    pub send_ns: u64,
}

/// Latency of the requests of one operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct OperationTimes {
    pub operation: Operation,
    /// True for those that waited for the SSD.
    pub ssd: bool,
    /// Latency histogram.
    pub times: Histogram,
    /// Requests that were not answered with `Ok`.
    pub failed: u64,
}

/// Latency statistics of a shard's requests.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceTimes {
    /// Operations that occurred.
    pub operations: Vec<OperationTimes>,
    /// Requests for objects of tenants, if there are others than the default tenant.
    pub tenants: Vec<TenantTimes>,
    /// Hot objects, by gets.
    pub hot: HotObjects,
    /// Items in requests, by operation.
    pub items: Vec<(Operation, u64)>,
    /// Slow requests so far.
    pub slow_count: u64,
    /// Latest slow requests, oldest first.
    pub slow: Vec<SlowOperation>,
    /// Latency from which a request is slow, in nanoseconds.
    pub slow_after_ns: u64,
}

/// Recorder of latencies.
#[derive(Debug)]
pub(in crate::service) struct ServiceTimer {
    /// Requests that were answered in the round of their arrival and are not in the histogram yet. None of them waited
    /// for the SSD.
    fast: [u32; KINDS],
    /// Number of those that share one reading of the clock.
    share: [u32; KINDS],
    /// Latency by the last reading.
    last_ns: [u64; KINDS],
    failed: [u64; PLACES],
    items: [u64; KINDS],
    times: Vec<Histogram>,
    pub(in crate::service) tenants: ByTenant,
    pub(in crate::service) popular: Popular,
    /// Kinds whose `fast` grew in this round, and the arrival time of their requests.
    round: u64,
    round_arrived_ns: u64,
    /// True if the clock is to be read at the end of this round.
    due: bool,
    slow: VecDeque<SlowOperation>,
    slow_count: u64,
    slow_after_ns: u64,
}

const _: () = assert!(KINDS <= u64::BITS as usize);

const fn kind_of(operation: Operation) -> usize {
    operation as usize & (KINDS - 1)
}

const fn kinds(operations: &[Operation]) -> u64 {
    let (mut all, mut at) = (0, 0);
    while at < operations.len() {
        all |= 1 << kind_of(operations[at]);
        at += 1;
    }
    all
}

const fn place(operation: Operation, ssd: bool) -> usize {
    kind_of(operation) * 2 + ssd as usize
}

impl ServiceTimer {
    pub(in crate::service) fn new() -> Self {
        Self {
            fast: [0; KINDS],
            share: [1; KINDS],
            last_ns: [0; KINDS],
            failed: [0; PLACES],
            items: [0; KINDS],
            times: vec![Histogram::new(); PLACES],
            tenants: ByTenant::default(),
            popular: Popular::default(),
            round: 0,
            round_arrived_ns: 0,
            due: false,
            slow: VecDeque::with_capacity(SLOW_KEPT),
            slow_count: 0,
            slow_after_ns: SLOW_AFTER_NS,
        }
    }

    pub(in crate::service) const fn asked(&mut self, operation: Operation, items: u32) {
        self.items[kind_of(operation)] += items as u64;
    }

    /// Records a reply that is sent in the round in which its request was received.
    #[inline]
    fn answered_at_once(&mut self, header: &Header, whose: Option<TimedTenant>, now_ns: u64) {
        let Kind::Reply(operation) = header.kind else { return };
        let kind = kind_of(operation);
        if header.status != Status::Ok {
            self.failed[2 * kind] += 1;
        }
        if let (Some(whose), Some(operation)) = (whose, TenantOperation::of(operation)) {
            self.tenants.at_once(whose, operation);
        }
        self.fast[kind] += 1;
        self.due |= self.fast[kind] >= self.share[kind];
        self.round |= 1 << kind;
        self.round_arrived_ns = now_ns;
    }

    /// Records a reply whose request was received in an earlier round.
    #[cold]
    fn answered(&mut self, header: &Header, late: &Late, whose: Option<TimedTenant>, now_ns: u64) {
        let Kind::Reply(operation) = header.kind else { return };
        let (_, timing, about) = late;
        if let (Some(whose), Some(operation)) = (whose, TenantOperation::of(operation)) {
            self.tenants.after(whose, operation, timing.ssd, now_ns.saturating_sub(timing.arrived_ns));
        }
        self.failed[place(operation, timing.ssd)] += u64::from(header.status != Status::Ok);
        self.took(header, operation, timing, *about, now_ns);
    }

    fn took(&mut self, header: &Header, operation: Operation, timing: &Timing, about: About, now_ns: u64) {
        let total_ns = now_ns.saturating_sub(timing.arrived_ns);
        self.times[place(operation, timing.ssd)].add(total_ns);
        if total_ns >= self.slow_after_ns {
            self.remember(SlowOperation {
                operation,
                status: header.status,
                digest: about.digest,
                bytes: header.payload_bytes.max(about.bytes),
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
        // A request that was slow already, and whose reply was then slow to send, is the same request.
        if let Some(known) = self
            .slow
            .back_mut()
            .filter(|known| one.send_ns > 0 && known.arrived_ns == one.arrived_ns && known.operation == one.operation)
        {
            self.slow_count -= 1;
            (known.total_ns, known.send_ns) = (one.total_ns, one.send_ns);
            known.digest = known.digest.or(one.digest);
            return;
        }
        if self.slow.len() == SLOW_KEPT {
            self.slow.pop_front();
        }
        self.slow.push_back(one);
    }

    /// Ends a round of the host.
    #[inline]
    pub(in crate::service) fn round_over(&mut self, clock: impl FnOnce() -> u64) {
        if self.round == 0 {
            return;
        }
        if self.due {
            self.settle(clock());
        }
        self.round = 0;
    }

    /// Records, for every kind of operation answered in this round, the time from the round's arrival until now, and
    /// clears the round.
    #[cold]
    fn settle(&mut self, now_ns: u64) {
        let took_ns = now_ns.saturating_sub(self.round_arrived_ns);
        let answered = [GETS, PUTS].map(|class| self.round & class != 0);
        self.tenants.settle(answered, took_ns);
        while self.round != 0 {
            let kind = self.round.trailing_zeros() as usize;
            self.round &= self.round - 1;
            self.times[2 * kind].add_many(took_ns, self.fast[kind].into());
            self.fast[kind] = 0;
            self.last_ns[kind] = took_ns;
            self.share[kind] = (self.share[kind] * 2).min(SAMPLE);
        }
        self.due = false;
    }

    /// Records that a payload was sent; `digest_of` returns its object, if it belongs to one.
    #[inline]
    pub(in crate::service) fn left(
        &mut self,
        leaving: &LeavingPayload,
        now_ns: u64,
        digest_of: impl FnOnce() -> Option<Digest>,
    ) {
        if now_ns.saturating_sub(leaving.since_ns) >= self.slow_after_ns {
            self.left_slowly(leaving, digest_of(), now_ns);
        }
    }

    #[cold]
    fn left_slowly(&mut self, leaving: &LeavingPayload, digest: Option<Digest>, now_ns: u64) {
        let before_ns = leaving.since_ns.saturating_sub(leaving.arrived_ns);
        self.remember(SlowOperation {
            operation: leaving.operation,
            status: Status::Ok,
            digest,
            bytes: leaving.bytes,
            arrived_ns: leaving.arrived_ns,
            total_ns: now_ns.saturating_sub(leaving.arrived_ns),
            receive_ns: 0,
            ssd_ns: if leaving.ssd { before_ns } else { 0 },
            send_ns: now_ns.saturating_sub(leaving.since_ns),
        });
    }

    /// Sets the latency from which a request is slow; above 0.
    pub(in crate::service) fn set_slow_after(&mut self, slow_after_ns: u64) {
        self.slow_after_ns = slow_after_ns.max(1);
    }

    /// Returns the statistics as of now.
    pub(in crate::service) fn snapshot(&self, now_ns: u64) -> ServiceTimes {
        let mut operations = Vec::new();
        for (operation, ssd) in Operation::ALL.iter().flat_map(|operation| [(*operation, false), (*operation, true)]) {
            let place = place(operation, ssd);
            let mut times = self.times[place].clone();
            let kind = kind_of(operation);
            if !ssd && self.fast[kind] > 0 {
                times.add_many(self.last_ns[kind], self.fast[kind].into());
            }
            if times.count() > 0 {
                operations.push(OperationTimes { operation, ssd, times, failed: self.failed[place] });
            }
        }
        let items = Operation::ALL.iter().map(|operation| (*operation, self.items[kind_of(*operation)]));
        ServiceTimes {
            operations,
            tenants: self.tenants.snapshot(),
            hot: self.popular.hottest(now_ns),
            items: items.filter(|(_, items)| *items > 0).collect(),
            slow_count: self.slow_count,
            slow: self.slow.iter().copied().collect(),
            slow_after_ns: self.slow_after_ns,
        }
    }
}

/// Timing state of a payload that is being sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeavingPayload {
    operation: Operation,
    ssd: bool,
    arrived_ns: u64,
    since_ns: u64,
    bytes: u64,
}

/// Subject of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct About {
    /// First object that was known.
    pub(in crate::service) digest: Option<Digest>,
    /// Bytes of the longest payload, or object.
    pub(in crate::service) bytes: u64,
}

impl About {
    /// Merges with the subject of a further item.
    pub(in crate::service) const fn and(self, other: Self) -> Self {
        let digest = if self.digest.is_some() { self.digest } else { other.digest };
        let bytes = if self.bytes >= other.bytes { self.bytes } else { other.bytes };
        Self { digest, bytes }
    }
}

/// Reply that waited: its number among the outputs polled, the breakdown of its time, and its subject.
type Late = (u64, Timing, About);

/// Queue of outputs to be polled, with the timing of replies that were not given at once.
#[derive(Debug, Default)]
pub(in crate::service) struct Outputs {
    queue: VecDeque<Output>,
    /// Number of outputs polled so far.
    polled: u64,
    /// Late replies, by their number when they are polled.
    late: VecDeque<Late>,
    /// Tenants of the objects that replies are about, by the same number.
    owned: VecDeque<(u64, TimedTenant)>,
    /// Tenant of the object that the next reply is about.
    pub(in crate::service) whose: Option<TimedTenant>,
    is_late: bool,
    /// Timing of the request that is being answered, if it is late.
    timing: Timing,
    /// Subject of the request that is being answered.
    pub(in crate::service) about: About,
    arrived_ns: u64,
    /// Of the frame that was taken last: the arrival time of its request, and whether it waited for the SSD.
    taken: (u64, bool),
}

impl Outputs {
    #[inline]
    pub(in crate::service) fn push_back(&mut self, output: Output) {
        if self.is_late && matches!(output, Output::Frame { .. }) {
            self.late.push_back((self.polled + self.queue.len() as u64, self.timing, self.about));
        }
        if self.whose.is_some()
            && matches!(output, Output::Frame { .. })
            && let Some(whose) = self.whose.take()
        {
            self.owned.push_back((self.polled + self.queue.len() as u64, whose));
        }
        self.queue.push_back(output);
    }

    /// Marks the following replies as belonging to a request that was received just now.
    #[inline]
    pub(in crate::service) const fn arrived(&mut self, now_ns: u64) {
        self.arrived_ns = now_ns;
        (self.is_late, self.whose, self.about) = (false, None, About { digest: None, bytes: 0 });
    }

    /// Marks the following replies as belonging to a request that was received at `arrived_ns`, and its payload of this
    /// many bytes now.
    pub(in crate::service) const fn received(&mut self, arrived_ns: u64, bytes: u64, now_ns: u64) {
        self.arrived(arrived_ns);
        self.about.bytes = bytes;
        if now_ns != arrived_ns {
            self.timing = Timing { arrived_ns, receive_ns: now_ns.saturating_sub(arrived_ns), ssd_ns: 0, ssd: false };
            self.is_late = true;
        }
    }

    /// Adds an object to the subject of the request that is being answered.
    #[inline]
    pub(in crate::service) const fn concerns(&mut self, digest: Digest, bytes: u64) {
        self.about = self.about.and(About { digest: Some(digest), bytes });
    }

    /// Marks the following replies as having waited for the SSD.
    pub(in crate::service) const fn waited(&mut self, timing: Timing, about: About, since_ns: u64, now_ns: u64) {
        self.timing = Timing { ssd: true, ssd_ns: now_ns.saturating_sub(since_ns), ..timing };
        (self.is_late, self.about) = (true, about);
    }

    /// Marks the following replies as belonging to an earlier request, about this object.
    pub(in crate::service) const fn late(&mut self, timing: Timing, digest: Digest) {
        self.timing = timing;
        (self.is_late, self.about) = (true, About { digest: Some(digest), bytes: 0 });
    }

    /// Returns the breakdown of the time so far of the request that is being answered.
    pub(in crate::service) const fn timing(&self) -> Timing {
        if self.is_late {
            return self.timing;
        }
        Timing { arrived_ns: self.arrived_ns, receive_ns: 0, ssd_ns: 0, ssd: false }
    }

    /// Returns the timing state to keep for the frame that was polled last, until its payload was sent.
    #[inline]
    pub(in crate::service) const fn leaving(&self, header: &Header, now_ns: u64) -> LeavingPayload {
        let operation = match header.kind {
            Kind::Request(operation) | Kind::Reply(operation) => operation,
        };
        let (arrived_ns, ssd) = self.taken;
        LeavingPayload { operation, ssd, arrived_ns, since_ns: now_ns, bytes: header.payload_bytes }
    }

    /// Dequeues the next output and records it. It is recorded in place because it is large.
    #[inline]
    pub(in crate::service) fn take(&mut self, timed: &mut ServiceTimer, now_ns: u64) -> Option<Output> {
        let number = self.polled;
        self.polled += 1;
        let header = match self.queue.front() {
            Some(Output::Frame { header, .. }) => header,
            Some(_) => return self.queue.pop_front(),
            None => {
                self.polled = number;
                return None;
            }
        };
        let whose = match self.owned.front() {
            Some(&(owned, whose)) if owned == number => {
                self.owned.pop_front();
                Some(whose)
            }
            _ => None,
        };
        match self.late.front() {
            Some(late) if late.0 == number => {
                self.taken = (late.1.arrived_ns, late.1.ssd);
                timed.answered(header, late, whose, now_ns);
                self.late.pop_front();
            }
            _ => {
                self.taken = (now_ns, false);
                timed.answered_at_once(header, whose, now_ns);
            }
        }
        self.queue.pop_front()
    }
}
