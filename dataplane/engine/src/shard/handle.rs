//! Handle of a running shard. Its methods may be called from any thread.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvplane_proto::SegmentId;
use kvplane_proto::ids::Incarnation;
use kvplane_proto::map::SlotOwners;
use kvplane_store::service::{SegmentInfo, TierOrder};
use kvplane_sys::device::DeviceMemory;
use kvplane_sys::{Doorbell, PageKind, Producer, Region};
use kvplane_ticket::{Credential, TicketKey};

use super::command::{Command, SegmentMemory};
use super::error::{ShardEnd, ShardError, ShardStartError};
use super::limits::ANSWER_DEADLINE;
use super::listeners::{ShardListeners, listen_unix, when_free};
use super::snapshot::{self, ShardSnapshot};
use super::thread::StartFacts;
use crate::host::{MappedMemory, ShardHost};

/// Time between two attempts to send to a full mailbox.
const MAILBOX_RETRY: Duration = Duration::from_micros(100);

/// Time between two looks at what the shared tier has taken.
const SETTLE_STEP: Duration = Duration::from_millis(5);

/// Parts of a shard that has ended for another process.
#[derive(Debug)]
pub struct HandedShard {
    /// Its listeners for peers.
    pub listeners: ShardListeners,
    /// Its memory, which stays mapped.
    pub memory: Arc<MappedMemory>,
    /// Number of objects in the image of its memory; `None` if it left no image.
    pub objects: Option<u64>,
}

/// Running shard. Dropping the handle ends its thread.
pub struct ShardHandle {
    mailbox: Mutex<Option<Producer<Command>>>,
    doorbell: Doorbell,
    thread: Mutex<Option<JoinHandle<io::Result<Option<u64>>>>>,
    facts: StartFacts,
    shm: Mutex<Option<PathBuf>>,
}

impl ShardHandle {
    pub(super) fn new(
        mailbox: Producer<Command>,
        doorbell: Doorbell,
        thread: JoinHandle<io::Result<Option<u64>>>,
        facts: StartFacts,
        shm: Option<PathBuf>,
    ) -> Self {
        let (mailbox, thread, shm) = (Mutex::new(Some(mailbox)), Mutex::new(Some(thread)), Mutex::new(shm));
        Self { mailbox, doorbell, thread, facts, shm }
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.facts.address
    }

    /// Returns the address on which it listens for stock Mooncake engines.
    #[must_use]
    pub const fn mooncake(&self) -> Option<SocketAddr> {
        self.facts.mooncake
    }

    /// Returns the path of its Unix socket.
    #[must_use]
    pub fn shm(&self) -> Option<PathBuf> {
        self.shm.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the kind of pages of its pool.
    #[must_use]
    pub const fn page_kind(&self) -> Option<PageKind> {
        self.facts.page_kind
    }

    /// Registers memory, which peers may use from now on.
    ///
    /// # Errors
    /// If the service refuses it, or the shard does not answer.
    pub fn register(&self, info: SegmentInfo, region: Arc<Region>) -> Result<SegmentId, ShardError> {
        self.register_memory(info, SegmentMemory::Host(region))
    }

    /// Registers memory of a device, which peers may use from now on: its bytes pass through pinned memory of the host.
    ///
    /// # Errors
    /// If the service refuses it, the host has too little memory to pin, the device is lost, or the shard does not
    /// answer.
    pub fn register_device(&self, info: SegmentInfo, memory: Arc<DeviceMemory>) -> Result<SegmentId, ShardError> {
        self.register_memory(info, SegmentMemory::Device(memory))
    }

    fn register_memory(&self, info: SegmentInfo, memory: SegmentMemory) -> Result<SegmentId, ShardError> {
        let (answer, wait) = sync_channel(1);
        self.send(Command::Register { info, memory, answer })?;
        self.wait_for(&wait, ANSWER_DEADLINE)?
    }

    /// Unregisters memory; returns when it is no longer in use. See [`Self::unregister_within`].
    ///
    /// # Errors
    /// See [`Self::unregister_within`], after ten seconds.
    pub fn unregister(&self, segment: SegmentId) -> Result<(), ShardError> {
        self.unregister_within(segment, ANSWER_DEADLINE)
    }

    /// Unregisters memory; returns when it is no longer in use, or after about this time. It may be called again after
    /// any error, and waits again for the remaining users; no new ones are admitted.
    ///
    /// # Errors
    /// [`ShardError::Held`] if peers still use the memory: a process on this host that was stopped in the middle of a
    /// copy has that effect. Any other error if the shard does not answer; the memory must then be assumed to be in
    /// use.
    pub fn unregister_within(&self, segment: SegmentId, within: Duration) -> Result<(), ShardError> {
        let (answer, wait) = sync_channel(1);
        let until = Instant::now() + ANSWER_DEADLINE;
        // If the call gave up because of a full mailbox, the segment would stay open to peers for good.
        while let Err(error) = self.send(Command::Unregister { segment, within, answer: answer.clone() }) {
            if !matches!(error, ShardError::Busy) || Instant::now() >= until {
                return Err(error);
            }
            std::thread::sleep(MAILBOX_RETRY);
        }
        self.wait_for(&wait, within.saturating_add(ANSWER_DEADLINE))?
    }

    /// Returns the uuid of what keeps the shard's objects beyond its process: the device of its tier, or else its
    /// memory. `None` if nothing does, or if the device could not be read.
    #[must_use]
    pub const fn device(&self) -> Option<u128> {
        self.facts.device
    }

    /// Listens for peers on this host at this path too.
    ///
    /// # Errors
    /// If another process listens there, or the shard's mailbox is full.
    pub fn listen_shm(&self, path: PathBuf) -> Result<(), ShardError> {
        let listener = when_free(|| listen_unix(&path)).map_err(ShardStartError::Resource)?;
        *self.shm.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
        self.send(Command::ListenShm { listener })
    }

    /// Starts a new incarnation: objects are dropped, connections closed, and no slot is owned until the next
    /// [`Self::follow_owners`].
    ///
    /// # Errors
    /// If its mailbox is full.
    pub fn begin_incarnation(&self, incarnation: Incarnation) -> Result<(), ShardError> {
        self.send(Command::BeginIncarnation { incarnation })
    }

    /// Sends the owners of the slots, by a map of this cluster state.
    ///
    /// # Errors
    /// If its mailbox is full.
    pub fn follow_owners(&self, state: u64, owners: Arc<SlotOwners>) -> Result<(), ShardError> {
        self.send(Command::Follow { state, owners })
    }

    /// Sends an order to its tier; returns false if it has none.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn order_tier(&self, order: TierOrder) -> Result<bool, ShardError> {
        self.ask(ANSWER_DEADLINE, move |host| {
            let now_ns = host.now_ns();
            host.service().tier_mut().map(|tier| tier.order(order, now_ns)).is_some()
        })
    }

    /// Sends the control plane's ticket keys, and its ticket time in seconds. Until the first keys arrive, a shard that
    /// requires tickets admits no peer.
    ///
    /// # Errors
    /// If its mailbox is full.
    pub fn learn_keys(&self, keys: Vec<TicketKey>, seconds: u64) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            let now_ns = host.now_ns();
            host.service().control().learn_keys(keys, seconds, now_ns);
        })))
    }

    /// Sends a ticket for the shard's own requests to the shards that it fetches from.
    ///
    /// # Errors
    /// If its mailbox is full.
    pub fn set_credential(&self, credential: Arc<Credential>) -> Result<(), ShardError> {
        self.send(Command::Ask(Box::new(move |host| {
            let now_ns = host.now_ns();
            if let Some(client) = host.client() {
                client.set_credential(credential, now_ns);
            }
        })))
    }

    /// Returns a snapshot of the shard.
    ///
    /// # Errors
    /// If the shard does not answer.
    pub fn snapshot(&self) -> Result<ShardSnapshot, ShardError> {
        self.ask(ANSWER_DEADLINE, snapshot::of)
    }

    pub(super) fn send(&self, command: Command) -> Result<(), ShardError> {
        let mut mailbox = self.mailbox.lock().unwrap_or_else(PoisonError::into_inner);
        let producer = mailbox.as_mut().ok_or(ShardError::Ended(ShardEnd::Stopped))?;
        if producer.peer_gone() {
            drop(mailbox);
            return Err(ShardError::Ended(self.end()));
        }
        producer.try_push(command).map_err(|_| ShardError::Busy)?;
        self.doorbell.ring();
        Ok(())
    }

    /// Runs a query on the shard's thread, and waits for its result at most this time.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        longest: Duration,
        question: impl FnOnce(&mut ShardHost) -> T + Send + 'static,
    ) -> Result<T, ShardError> {
        let (answer, wait) = sync_channel(1);
        // The caller may have given up by then.
        self.send(Command::Ask(Box::new(move |host| drop(answer.send(question(host))))))?;
        self.wait_for(&wait, longest)
    }

    fn wait_for<T>(&self, answer: &Receiver<T>, longest: Duration) -> Result<T, ShardError> {
        answer.recv_timeout(longest).map_err(|error| match error {
            RecvTimeoutError::Timeout => ShardError::Timeout,
            RecvTimeoutError::Disconnected => ShardError::Ended(self.end()),
        })
    }

    /// Returns the reason why the shard has ended on its own, if it has.
    pub fn ended(&self) -> Option<ShardError> {
        let finished = {
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            thread.as_ref().is_none_or(JoinHandle::is_finished)
        };
        finished.then(|| ShardError::Ended(self.end()))
    }

    fn end(&self) -> ShardEnd {
        self.image().map_or_else(|end| end, |_| ShardEnd::Stopped)
    }

    /// Waits for the thread. Returns the number of objects in the image that it left, if any, or how it failed.
    fn image(&self) -> Result<Option<u64>, ShardEnd> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        match thread.map(JoinHandle::join) {
            Some(Ok(Err(error))) => Err(ShardEnd::Failed(error)),
            Some(Err(_)) => Err(ShardEnd::Panicked),
            Some(Ok(Ok(objects))) => Ok(objects),
            None => Ok(None),
        }
    }

    /// Returns its memory, which another process may take over; `None` if it has none of its own.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<MappedMemory>> {
        self.facts.lasting.as_ref().map(|lasting| &lasting.memory)
    }

    /// Ends the thread, for a process that takes its memory and its listeners over, and waits for it: it leaves an
    /// image of its objects in the memory. The listeners stay open, and the socket for peers on this host stays in its
    /// place. Does nothing, and returns `None`, if it has no memory of its own.
    ///
    /// # Errors
    /// When the process has too many descriptors; then nothing changes.
    pub fn hand_over(&self) -> io::Result<Option<HandedShard>> {
        let Some(lasting) = &self.facts.lasting else { return Ok(None) };
        let listeners = lasting.listeners.try_clone()?;
        let memory = Arc::clone(&lasting.memory);
        lasting.wish.make();
        *self.shm.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.doorbell.ring();
        Ok(Some(HandedShard { listeners, memory, objects: self.image().unwrap_or(None) }))
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.doorbell.ring();
        self.end();
        if let Some(path) = self.shm.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The socket may be removed already; no thread listens on it any more either way.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Waits at most this time until the shared tier has what successors of these shards need to find the objects in it,
/// while the shards serve. Does not wait while the store fails.
pub fn settle_shared_tier(shards: &[ShardHandle], longest: Duration) {
    let settle = |host: &mut ShardHost| {
        let now_ns = host.now_ns();
        host.service().control().shared().settle(now_ns)
    };
    let until = Instant::now() + longest;
    while shards.iter().any(|shard| shard.ask(ANSWER_DEADLINE, settle).is_ok_and(|is_settled| !is_settled)) {
        if Instant::now() >= until {
            tracing::warn!("the shared tier has not taken what a successor needs to find all objects in it");
            return;
        }
        std::thread::sleep(SETTLE_STEP);
    }
}

impl Drop for ShardHandle {
    fn drop(&mut self) {
        self.stop();
    }
}
