//! Driver of the shared tier: a directory that many nodes see, or an S3 bucket, over the crate `object_store`.
//!
//! A [`StoreDriver`] belongs to a node and has one thread with a tokio runtime. The node's shards pass it operations
//! through [`StorePort`], which never blocks, and get each result by a queue and a wake-up. Every operation ends by a
//! deadline, retries included. Credentials, region, endpoint and encryption of S3 come from the environment (`AWS_*`),
//! as `object_store` reads them.

#![forbid(unsafe_code)]

mod errors;
mod marker;
mod operations;
mod place;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::Duration;

use kvplane_shared::port::{Store, StorePort};
use kvplane_shared::{OpId, Operation, Outcome, StoreError};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use place::OpenStore;
pub use place::{PlaceError, StorePlace};

/// Most operations that run at once; the others wait. Shards bound the operations that they have in flight.
const RUNNING_MOST: usize = 64;
/// Time that the runtime may take to end: operations on files cannot be interrupted.
const END_WAIT: Duration = Duration::from_millis(500);

/// Deadlines of operations, retries included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deadlines {
    /// Of reads, and of small writes.
    pub short: Duration,
    /// Of writes and of lists.
    pub long: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { short: Duration::from_secs(5), long: Duration::from_secs(30) }
    }
}

type Results = (OpId, Result<Outcome, StoreError>);

/// Operation with the queue that its result goes to.
struct Job {
    id: OpId,
    operation: Operation,
    port: Arc<PortState>,
    results: Sender<Results>,
}

struct PortState {
    /// Results in the queue.
    ready: AtomicUsize,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// Driver of a store, with its thread, which ends with the driver and its last port.
pub struct StoreDriver {
    place: StorePlace,
    jobs: UnboundedSender<Job>,
}

impl StoreDriver {
    /// Starts the thread of a store, which opens the store of a cluster at a place. A bucket is not asked yet: it may
    /// come later.
    ///
    /// # Errors
    /// If the place is wrong, the directory is missing or cannot get its marker, or its file system does not answer by
    /// the deadline of lists.
    pub fn open(place: &StorePlace, cluster: &str, deadlines: Deadlines) -> Result<Self, PlaceError> {
        let (jobs, queue) = unbounded_channel();
        let (opened, outcome) = sync_channel(1);
        // Operations on files that hang keep a thread each.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(RUNNING_MOST).build().map_err(PlaceError::Thread)?;
        let (wanted, cluster) = (place.clone(), cluster.to_owned());
        let thread = std::thread::Builder::new().name("kvplane-store".to_owned()).spawn(move || {
            let store = match wanted.open(&cluster, deadlines) {
                Ok(store) => store,
                Err(error) => {
                    // Nobody may wait any more.
                    let _ = opened.send(Err(error));
                    return;
                }
            };
            if opened.send(Ok(())).is_ok() {
                runtime.block_on(serve(store, queue, deadlines));
            }
            runtime.shutdown_timeout(END_WAIT);
        });
        thread.map_err(PlaceError::Thread)?;
        let silent = |_| PlaceError::Silent { place: place.to_string(), waited: deadlines.long };
        outcome.recv_timeout(deadlines.long).map_err(silent)??;
        Ok(Self { place: place.clone(), jobs })
    }
}

impl fmt::Debug for StoreDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreDriver").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Store for StoreDriver {
    fn open(&self, wake: Box<dyn Fn() + Send + Sync>) -> Box<dyn StorePort> {
        let (results, done) = channel();
        let state = Arc::new(PortState { ready: AtomicUsize::new(0), wake });
        Box::new(Port { jobs: self.jobs.clone(), state, results, done })
    }

    fn place(&self) -> String {
        self.place.to_string()
    }
}

/// Access of one shard.
struct Port {
    jobs: UnboundedSender<Job>,
    state: Arc<PortState>,
    results: Sender<Results>,
    done: Receiver<Results>,
}

impl StorePort for Port {
    fn start(&mut self, id: OpId, operation: Operation) {
        let job = Job { id, operation, port: Arc::clone(&self.state), results: self.results.clone() };
        if self.jobs.send(job).is_err() {
            let ended = StoreError::Other { reason: "the driver has ended".to_owned() };
            // The receiver is this port's own.
            let _ = self.results.send((id, Err(ended)));
            self.state.ready.fetch_add(1, Ordering::Release);
        }
    }

    fn poll(&mut self) -> Option<Results> {
        let done = self.done.try_recv().ok()?;
        self.state.ready.fetch_sub(1, Ordering::AcqRel);
        Some(done)
    }

    fn is_ready(&self) -> bool {
        self.state.ready.load(Ordering::Acquire) > 0
    }
}

/// Carries out operations until no port and no driver is left.
async fn serve(store: OpenStore, mut queue: UnboundedReceiver<Job>, deadlines: Deadlines) {
    let (running, store) = (Arc::new(Semaphore::new(RUNNING_MOST)), Arc::new(store));
    while let Some(job) = queue.recv().await {
        let (store, running) = (Arc::clone(&store), Arc::clone(&running));
        tokio::spawn(async move {
            let Job { id, operation, port, results } = job;
            let deadline = deadline_of(&operation, deadlines);
            let work = async {
                // The semaphore is never closed.
                let _permit = running.acquire().await;
                operations::carry_out(&store, operation).await
            };
            let result = tokio::time::timeout(deadline, work).await;
            let late = |_| StoreError::Deadline { waited_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX) };
            let result = result.map_err(late).and_then(|result| result);
            if results.send((id, result)).is_ok() {
                port.ready.fetch_add(1, Ordering::Release);
                (port.wake)();
            }
        });
    }
}

const fn deadline_of(operation: &Operation, deadlines: Deadlines) -> Duration {
    match operation {
        Operation::Get { .. } | Operation::Stat { .. } => deadlines.short,
        Operation::Put { .. } | Operation::List { .. } | Operation::Delete { .. } => deadlines.long,
    }
}
