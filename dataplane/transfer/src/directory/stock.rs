//! Client side of stock Mooncake engines over RDMA: their descriptions, and the handshakes with them.
//!
//! A stock engine keeps one connection for each device of a peer, by the device's name, and a new connection of the
//! same name replaces the old one. Therefore each connection of this engine uses a name of its own: the device's, with
//! a suffix that identifies the process and the connection. Handshakes block, so they run on threads of their own.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use kvplane_client::LaneId;
use kvplane_engine::{
    ForeignBuffer, ForeignHalf, ForeignPeer, Gid, Handshake, HandshakeError, StockAnswer, StockEngines,
};
use kvplane_mooncake::{Descriptor, RdmaHandshake, nic_path};

use super::lookup::Lookup;
use crate::error::Error;
use crate::lock;

/// Number of handshake threads.
const THREADS: usize = 4;
/// Limit of handshakes that wait for a thread.
const WAITING: usize = 4096;
/// Number of engines remembered before unreferenced ones are removed.
const FORGET_AT: usize = 64;

/// Stock engines that are reached over RDMA.
pub(crate) struct Stock {
    known: Mutex<KnownPeer>,
    line: Arc<Line>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    unique: u64,
    queue_pairs: usize,
}

#[derive(Default)]
struct KnownPeer {
    by_name: HashMap<String, u64>,
    by_number: HashMap<u64, Arc<ForeignPeer>>,
    last: u64,
}

/// State shared with the threads.
struct Line {
    lookup: Arc<Lookup>,
    name: String,
    waiting: Mutex<VecDeque<Handshake>>,
    more: Condvar,
    stopping: AtomicBool,
}

impl Stock {
    /// Creates the client side of an engine with this name. `unique` is the number of its incarnation, `queue_pairs`
    /// that of the queue pairs of a connection.
    pub(crate) fn new(lookup: Arc<Lookup>, name: &str, unique: u64, queue_pairs: usize) -> Self {
        let line = Line {
            lookup,
            name: name.to_owned(),
            waiting: Mutex::default(),
            more: Condvar::new(),
            stopping: AtomicBool::new(false),
        };
        Self { known: Mutex::default(), line: Arc::new(line), threads: Mutex::default(), unique, queue_pairs }
    }

    /// Records the description of a stock engine; returns its number, its record, and the generation of its buffers.
    ///
    /// # Errors
    /// When its RDMA description is malformed.
    pub(crate) fn learn(&self, descriptor: &Descriptor) -> Result<(u64, Arc<ForeignPeer>, u32), Error> {
        let said = descriptor.rdma()?;
        // With two networks, the one for handshakes has a name of its own.
        let name = match descriptor.rdma_server_name.as_str() {
            "" => &descriptor.name,
            name => name,
        };
        let buffers = descriptor.buffers.iter().zip(&said.keys).map(|(buffer, keys)| ForeignBuffer {
            address: buffer.address,
            bytes: buffer.length,
            keys: keys.iter().map(|key| key.remote).collect(),
        });
        let devices = said.devices.iter().map(|device| device.name.clone()).collect();
        let mut known = lock(&self.known);
        let number = known.number_of(name);
        let peer = Arc::clone(known.by_number.entry(number).or_insert_with(|| Arc::new(ForeignPeer::new(name))));
        drop(known);
        let generation = peer.learn(devices, buffers.collect());
        Ok((number, peer, generation))
    }

    /// Starts the threads, at the first handshake.
    fn start(&self) {
        let mut threads = lock(&self.threads);
        while threads.len() < THREADS {
            let line = Arc::clone(&self.line);
            let name = format!("kvp-rdma-{}", threads.len());
            // With fewer threads it takes longer; without any, handshakes end with the lane's deadline.
            let Ok(thread) = std::thread::Builder::new().name(name).spawn(move || line.work()) else { return };
            threads.push(thread);
        }
    }
}

impl KnownPeer {
    fn number_of(&mut self, name: &str) -> u64 {
        if let Some(&number) = self.by_name.get(name) {
            return number;
        }
        if self.by_name.len() >= FORGET_AT {
            self.by_number.retain(|_, peer| Arc::strong_count(peer) > 1);
            let left = &self.by_number;
            self.by_name.retain(|_, number| left.contains_key(number));
        }
        self.last += 1;
        self.by_name.insert(name.to_owned(), self.last);
        self.last
    }
}

impl Line {
    fn work(&self) {
        loop {
            let handshake = {
                let mut waiting = lock(&self.waiting);
                loop {
                    if self.stopping.load(Ordering::Acquire) {
                        return;
                    }
                    if let Some(first) = waiting.pop_front() {
                        break first;
                    }
                    waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let answer = self.ask(&handshake);
            handshake.answer(answer);
        }
    }

    fn ask(&self, handshake: &Handshake) -> Result<StockAnswer, HandshakeError> {
        let peer = handshake.peer.name();
        let request = RdmaHandshake {
            local_path: nic_path(&self.name, &handshake.alias),
            local_lid: handshake.half.lid,
            local_gid: Some(handshake.half.gid.0),
            peer_path: nic_path(peer, &handshake.peer_device),
            queue_pairs: handshake.half.queue_pairs.clone(),
            ready: Some(handshake.ready),
            refusal: String::new(),
        };
        let reply = self.lookup.connect(peer, &request).map_err(|error| HandshakeError::Failed(error.into()))?;
        let gid = reply.local_gid.map(Gid);
        let gid = gid.ok_or(HandshakeError::NoGid);
        // The reply to the final message, which reports the connection as ready, is ignored.
        let gid = if handshake.ready { gid.unwrap_or_default() } else { gid? };
        let half = ForeignHalf { queue_pairs: reply.queue_pairs, gid, lid: reply.local_lid };
        Ok(StockAnswer { half, wants_ready: reply.ready.is_some() })
    }
}

impl StockEngines for Stock {
    fn peer(&self, object: u64) -> Option<Arc<ForeignPeer>> {
        lock(&self.known).by_number.get(&object).cloned()
    }

    fn alias(&self, device: &str, lane: LaneId, host: u64) -> String {
        format!("{device}~{:08x}.{host}.{}", self.unique as u32, lane.index)
    }

    fn queue_pairs(&self) -> usize {
        self.queue_pairs
    }

    fn ask(&self, handshake: Handshake) {
        self.start();
        let mut waiting = lock(&self.line.waiting);
        // A handshake over the limit is dropped, which fails it.
        if waiting.len() < WAITING {
            waiting.push_back(handshake);
            self.line.more.notify_one();
        }
    }
}

impl std::fmt::Debug for Stock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stock").field("known", &lock(&self.known).by_name.len()).finish_non_exhaustive()
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        {
            let _waiting = lock(&self.line.waiting);
            self.line.stopping.store(true, Ordering::Release);
        }
        self.line.more.notify_all();
        for thread in core::mem::take(&mut *lock(&self.threads)) {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}
