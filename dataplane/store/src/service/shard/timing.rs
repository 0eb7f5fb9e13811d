//! How long requests took, by operation and tier, and the slow ones step by step.
//!
//! A request's time runs from its frame's arrival to its answer's departure; a payload that takes longer to leave than
//! that is the reader's doing and shows in the slow operations only. Counting is an addition to a plain number of the
//! shard's own. What is answered in the round in which it came, which is nearly everything, has no time of its own by
//! the host's clock. Of those the host reads the clock at the end of one round in [`SAMPLE`], and what was counted
//! since then gets that time: one reading for many requests.

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
pub use by_tenant::{TENANTS_TIMED, TenantOperation, TenantTimes, Whose};
use popular::Popular;
pub use popular::{HOT_KEPT, HotObject, HotObjects};

/// How many requests of a kind share one reading of the clock, once there were enough to know better.
const SAMPLE: u32 = 16;
/// Slow operations that are remembered: the latest.
pub const SLOW_KEPT: usize = 64;
/// What is slow where nobody says otherwise.
pub const SLOW_AFTER_NS: u64 = 10_000_000;

/// The operations of each class of [`TenantOperation`].
const GETS: u64 = kinds(&[Operation::Get, Operation::GetRange, Operation::Lookup]);
const PUTS: u64 = kinds(&[Operation::Put, Operation::Commit, Operation::Seal]);

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
    /// Of which object, where that is known; of several, the first that was.
    pub digest: Option<Digest>,
    /// Bytes of the payload, the request's or the answer's; over shared memory, of the object.
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
    /// Those about objects of tenants, where there are others than the default one.
    pub tenants: Vec<TenantTimes>,
    /// The objects that gets asked for most.
    pub hot: HotObjects,
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
pub(in crate::service) struct ServiceTimer {
    /// Answered in the round of their arrival, and not yet in the histogram. None of them waited for the SSD.
    fast: [u32; KINDS],
    /// How many of those share a reading.
    share: [u32; KINDS],
    /// The last reading.
    last_ns: [u64; KINDS],
    failed: [u64; PLACES],
    items: [u64; KINDS],
    times: Vec<Histogram>,
    pub(in crate::service) tenants: ByTenant,
    pub(in crate::service) popular: Popular,
    /// Which of `fast` grew in this round, and when what they answered came.
    round: u64,
    round_arrived_ns: u64,
    /// Whether this round's end wants the clock.
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

    /// An answer leaves in the round in which its request came.
    #[inline]
    fn answered_at_once(&mut self, header: &Header, whose: Option<Whose>, now_ns: u64) {
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

    /// An answer leaves whose request came some time ago.
    #[cold]
    fn answered(&mut self, header: &Header, late: &Late, whose: Option<Whose>, now_ns: u64) {
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
        // What was slow already, and then left slowly, is the same request.
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

    /// A round of the host is over.
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

    /// What was answered in this round and is counted for, took until now.
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

    /// A payload has left; `digest_of` says the object that it is of, if it is of one.
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

    /// From when on a request is slow; above 0.
    pub(in crate::service) fn set_slow_after(&mut self, slow_after_ns: u64) {
        self.slow_after_ns = slow_after_ns.max(1);
    }

    /// How long requests took until now.
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

/// A payload that leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeavingPayload {
    operation: Operation,
    ssd: bool,
    arrived_ns: u64,
    since_ns: u64,
    bytes: u64,
}

/// What an answer is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::service) struct About {
    /// The first object that was known of.
    pub(in crate::service) digest: Option<Digest>,
    /// Bytes of the longest payload, or object.
    pub(in crate::service) bytes: u64,
}

impl About {
    /// Of one that is known besides.
    pub(in crate::service) const fn and(self, other: Self) -> Self {
        let digest = if self.digest.is_some() { self.digest } else { other.digest };
        let bytes = if self.bytes >= other.bytes { self.bytes } else { other.bytes };
        Self { digest, bytes }
    }
}

/// An answer that waited: its number among those polled, where its time went, and what it is about.
type Late = (u64, Timing, About);

/// What waits to be polled; beside it, where the time went of what was not answered at once.
#[derive(Debug, Default)]
pub(in crate::service) struct Outputs {
    queue: VecDeque<Output>,
    /// How many were polled so far.
    polled: u64,
    /// By the number that they have when they are polled.
    late: VecDeque<Late>,
    /// Likewise, about whose objects answers are.
    owned: VecDeque<(u64, Whose)>,
    /// Whose object the next answer is about.
    pub(in crate::service) whose: Option<Whose>,
    is_late: bool,
    /// Of what is being answered, where that is late.
    timing: Timing,
    /// What that is about.
    pub(in crate::service) about: About,
    arrived_ns: u64,
    /// Of the frame that was taken last: when its request came, and whether it waited for the SSD.
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

    /// What is answered from now on came just now.
    #[inline]
    pub(in crate::service) const fn arrived(&mut self, now_ns: u64) {
        self.arrived_ns = now_ns;
        (self.is_late, self.whose, self.about) = (false, None, About { digest: None, bytes: 0 });
    }

    /// What is answered from now on came then, and its payload of so many bytes now.
    pub(in crate::service) const fn received(&mut self, arrived_ns: u64, bytes: u64, now_ns: u64) {
        self.arrived(arrived_ns);
        self.about.bytes = bytes;
        if now_ns != arrived_ns {
            self.timing = Timing { arrived_ns, receive_ns: now_ns.saturating_sub(arrived_ns), ssd_ns: 0, ssd: false };
            self.is_late = true;
        }
    }

    /// What is being answered is about this object, too.
    #[inline]
    pub(in crate::service) const fn concerns(&mut self, digest: Digest, bytes: u64) {
        self.about = self.about.and(About { digest: Some(digest), bytes });
    }

    /// What is answered from now on has waited for the SSD.
    pub(in crate::service) const fn waited(&mut self, timing: Timing, about: About, since_ns: u64, now_ns: u64) {
        self.timing = Timing { ssd: true, ssd_ns: now_ns.saturating_sub(since_ns), ..timing };
        (self.is_late, self.about) = (true, about);
    }

    /// What is answered from now on, about this object, came some time ago.
    pub(in crate::service) const fn late(&mut self, timing: Timing, digest: Digest) {
        self.timing = timing;
        (self.is_late, self.about) = (true, About { digest: Some(digest), bytes: 0 });
    }

    /// Where the time went so far of what is being answered.
    pub(in crate::service) const fn timing(&self) -> Timing {
        if self.is_late {
            return self.timing;
        }
        Timing { arrived_ns: self.arrived_ns, receive_ns: 0, ssd_ns: 0, ssd: false }
    }

    /// What to remember of the frame that was polled last, until its payload has left.
    #[inline]
    pub(in crate::service) const fn leaving(&self, header: &Header, now_ns: u64) -> LeavingPayload {
        let operation = match header.kind {
            Kind::Request(operation) | Kind::Reply(operation) => operation,
        };
        let (arrived_ns, ssd) = self.taken;
        LeavingPayload { operation, ssd, arrived_ns, since_ns: now_ns, bytes: header.payload_bytes }
    }

    /// Takes the next output, and counts it. It is counted where it lies, as it is long.
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
