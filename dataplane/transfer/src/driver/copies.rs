//! Copies within this process: carried out on the submitting thread, and counted as a transport of their own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_client::sched::Health;
use kvplane_client::{RailCounts, Transport};
use kvplane_engine::{Region, cpu};
use kvplane_proto::Status;

use crate::buffers::Buffer;
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

/// Copies by the threads that share one initiator. The lock is held while a batch is counted, never during a copy.
pub(crate) struct Copies {
    books: Mutex<Books>,
    slow_ns: u64,
}

impl Copies {
    pub(crate) fn new(slow_ns: u64) -> Self {
        Self { books: Mutex::default(), slow_ns }
    }

    /// Carries out copies one after the other, and reports each to `done`; `start_ns` is the time of their submission.
    pub(crate) fn carry_out(&self, copies: &[Copy], start_ns: u64, done: impl Fn(usize, u64)) {
        if copies.is_empty() {
            return;
        }
        let mut marks_ns = Vec::with_capacity(copies.len() + 1);
        marks_ns.push(cpu::monotonic_ns());
        for copy in copies {
            let ((to, to_at), (from, from_at)) = (&copy.to, &copy.from);
            Region::copy_between(&to.region, *to_at as usize, &from.region, *from_at as usize, copy.bytes as usize);
            marks_ns.push(cpu::monotonic_ns());
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
        copies.iter().enumerate().for_each(|(number, copy)| done(number, copy.bytes));
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
