//! Copies within this process: carried out on the submitting thread, and counted as a transport of their own.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_client::sched::Health;
use kvplane_client::{RailCounts, Transport};
use kvplane_engine::{IoBuf, Region, cpu};
use kvplane_proto::Status;
use kvplane_sys::device::{
    Backing, CopyQueue, Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, StreamHandle,
};

use crate::buffers::Buffer;
use crate::lock;
use crate::metrics::{Metrics, RailSnapshot, SlowTransfer};

/// Number of slow copies that are kept, the latest ones.
const SLOW_KEPT: usize = 64;

/// Copy within local memory.
pub(crate) struct Copy {
    pub(crate) to: (Arc<Buffer>, u64),
    pub(crate) from: (Arc<Buffer>, u64),
    pub(crate) bytes: u64,
}

/// Slow copy.
#[derive(Clone, Copy)]
struct Slow {
    bytes: u64,
    queue_ns: u64,
    service_ns: u64,
}

#[derive(Default)]
struct Books {
    counts: RailCounts,
    slow: VecDeque<Slow>,
}

/// Copies by the threads that share one initiator. The lock of the books is held while a batch is counted, never during
/// a copy.
pub(crate) struct Copies {
    books: Mutex<Books>,
    /// Queue of each device in use. Its own lock is held during its copies, which are done in order in any case: a copy
    /// that waits for a caller's stream delays no other device's.
    queues: Mutex<BTreeMap<DeviceId, Arc<Mutex<CopyQueue>>>>,
    slow_ns: u64,
}

impl Copy {
    /// Returns the device that carries it out, if one side is a device's.
    fn device(&self) -> Option<&Arc<Device>> {
        let memory = self.to.0.backing.device().or_else(|| self.from.0.backing.device());
        memory.map(|memory| memory.device())
    }

    /// Carries out a copy within memory of the host.
    fn carry_out(&self) {
        let ((to, to_at), (from, from_at)) = (&self.to, &self.from);
        if let (Backing::Host(to), Backing::Host(from)) = (&to.backing, &from.backing) {
            Region::copy_between(to, *to_at as usize, from, *from_at as usize, self.bytes as usize);
        }
    }

    /// Returns the copy for a device, after a check that its memory is still there.
    fn for_device(&self) -> Result<Option<DeviceCopy>, DeviceError> {
        let ((to, to_at), (from, from_at)) = (&self.to, &self.from);
        for memory in [&to.backing, &from.backing].into_iter().filter_map(Backing::device) {
            memory.check()?;
        }
        let host = |region: &Arc<Region>, at: u64| IoBuf::new(Arc::clone(region), at as usize, self.bytes as usize);
        let range = |memory: &Arc<DeviceMemory>, at: u64| DeviceRange::new(memory, at, self.bytes);
        Ok(match (&to.backing, &from.backing) {
            (Backing::Host(_), Backing::Host(_)) => None,
            (Backing::Host(to), Backing::Device(from)) => {
                Some(DeviceCopy::ToHost { from: range(from, *from_at), to: host(to, *to_at) })
            }
            (Backing::Device(to), Backing::Host(from)) => {
                Some(DeviceCopy::ToDevice { from: host(from, *from_at), to: range(to, *to_at) })
            }
            (Backing::Device(to), Backing::Device(from)) => {
                Some(DeviceCopy::Between { from: range(from, *from_at), to: range(to, *to_at) })
            }
        })
    }
}

impl Copies {
    pub(crate) fn new(slow_ns: u64) -> Self {
        Self { books: Mutex::default(), queues: Mutex::default(), slow_ns }
    }

    /// Carries out copies one after the other, and reports the bytes or the failure of each to `done`; `start_ns` is
    /// the time of their submission. Those of a device wait for `stream`. Returns the text of the last error.
    pub(crate) fn carry_out(
        &self,
        copies: &[Copy],
        start_ns: u64,
        stream: Option<StreamHandle>,
        done: impl Fn(usize, Result<u64, Status>),
    ) -> Option<String> {
        if copies.is_empty() {
            return None;
        }
        let mut marks_ns = Vec::with_capacity(copies.len() + 1);
        marks_ns.push(cpu::monotonic_ns());
        let (mut problem, mut failed) = (None, HashSet::new());
        while let Some(copy) = copies.get(marks_ns.len() - 1) {
            let first = marks_ns.len() - 1;
            let Some(device) = copy.device() else {
                copy.carry_out();
                marks_ns.push(cpu::monotonic_ns());
                continue;
            };
            // Consecutive ones of a device go together.
            let is_alike = |copy: &&Copy| copy.device().is_some_and(|other| other.id() == device.id());
            let count = copies[first..].iter().take_while(is_alike).count();
            if let Err(error) = self.carry_out_on(device, &copies[first..first + count], stream) {
                problem = Some(error.to_string());
                failed.extend(first..first + count);
            }
            marks_ns.resize(marks_ns.len() + count, cpu::monotonic_ns());
        }
        let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        let Books { counts, slow } = &mut *books;
        for (copy, marks_ns) in copies.iter().zip(marks_ns.windows(2)) {
            let (queue_ns, service_ns) = (marks_ns[0].saturating_sub(start_ns), marks_ns[1] - marks_ns[0]);
            counts.operations += 1;
            counts.bytes += copy.bytes;
            counts.queue.add(queue_ns);
            counts.service.add(service_ns);
            if queue_ns + service_ns >= self.slow_ns {
                counts.slow += 1;
                if slow.len() == SLOW_KEPT {
                    slow.pop_front();
                }
                slow.push_back(Slow { bytes: copy.bytes, queue_ns, service_ns });
            }
        }
        drop(books);
        for (number, copy) in copies.iter().enumerate() {
            done(number, if failed.contains(&number) { Err(Status::DeviceFailed) } else { Ok(copy.bytes) });
        }
        problem
    }

    /// Carries out copies on a device, as one batch, and waits for them.
    fn carry_out_on(
        &self,
        device: &Arc<Device>,
        copies: &[Copy],
        stream: Option<StreamHandle>,
    ) -> Result<(), DeviceError> {
        let copies: Vec<DeviceCopy> =
            copies.iter().filter_map(|copy| copy.for_device().transpose()).collect::<Result<_, _>>()?;
        let queue = self.queue(device)?;
        let mut queue = lock(&queue);
        queue.wait_for(StreamHandle::or_default(stream, device.id().family))?;
        let ticket = queue.copy(copies)?;
        while queue.poll()? <= ticket {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Returns the queue of a device, which it opens for the first copy.
    fn queue(&self, device: &Arc<Device>) -> Result<Arc<Mutex<CopyQueue>>, DeviceError> {
        Ok(match lock(&self.queues).entry(device.id()) {
            Entry::Occupied(entry) => Arc::clone(entry.get()),
            Entry::Vacant(entry) => Arc::clone(entry.insert(Arc::new(Mutex::new(CopyQueue::new(device)?)))),
        })
    }

    /// Closes the queue of a device of which no memory is registered any more.
    pub(crate) fn close(&self, device: DeviceId) {
        lock(&self.queues).remove(&device);
    }

    /// Adds the copies, if there were any, to an engine's metrics, with the engine itself as the peer.
    pub(crate) fn add_to(&self, metrics: &mut Metrics, initiator: usize, engine: &str) {
        let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = &books.counts;
        if counts.is_empty() {
            return;
        }
        let rate = u128::from(counts.bytes) * 1_000_000_000 / u128::from(counts.service.sum_ns().max(1));
        metrics.rails.push(RailSnapshot {
            bytes_per_second: u64::try_from(rate).unwrap_or(u64::MAX),
            ..RailSnapshot::new(initiator, engine.to_owned(), Transport::Local, Health::Healthy, counts)
        });
        metrics.slow.extend(books.slow.iter().map(|slow| SlowTransfer {
            peer: engine.to_owned(),
            transport: Transport::Local,
            bytes: slow.bytes,
            earlier_ns: 0,
            queue_ns: slow.queue_ns,
            lane_ns: 0,
            service_ns: slow.service_ns,
            attempts: 0,
            status: Status::Ok,
        }));
    }
}
