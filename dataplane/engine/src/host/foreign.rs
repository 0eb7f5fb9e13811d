//! Stock Mooncake engines over RDMA: our devices read and write their memory, and theirs ours.
//!
//! How connections are talked about is not the host's business: it hands a [`Handshake`] to whoever can ask the peer,
//! and takes the answer when it comes, on whichever thread. Nothing here waits.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_client::{LaneId, PeerAddress, PeerKind};
use kvplane_proto::SegmentId;
use kvplane_sys::{Doorbell, Interest, Poller};
use kvplane_transport::{CloseCause, ConnectionId, ForeignDevice, ForeignHalf, ForeignPeer, RdmaError, Source, Token};

use super::Host;

/// What is known of stock engines, and how they are asked. Shared by the hosts of a process.
pub trait StockEngines: fmt::Debug + Send + Sync {
    /// The engine of this number, if it is known.
    fn peer(&self, object: u64) -> Option<Arc<ForeignPeer>>;

    /// A name for one of our devices that no other connection of ours has: a stock engine keeps one connection for
    /// each name.
    fn alias(&self, device: &str, lane: LaneId, host: u64) -> String;

    /// How many queue pairs stock engines make for a connection.
    fn queue_pairs(&self) -> usize;

    /// Asks the engine. Returns at once; the answer is given by [`Handshake::answer`].
    fn ask(&self, handshake: Handshake);
}

/// Our half of a connection, for a stock engine.
#[derive(Debug)]
pub struct Handshake {
    /// Whom to ask.
    pub peer: Arc<ForeignPeer>,
    /// Its device.
    pub peer_device: String,
    /// Our name for our device.
    pub alias: String,
    /// Our half.
    pub half: ForeignHalf,
    /// Whether it is to be told that our queue pairs are connected: it has answered before, and no answer is awaited.
    pub ready: bool,
    to: Option<(ConnectionId, Arc<Answers>)>,
}

/// A stock engine's half of a connection.
#[derive(Clone, Debug)]
pub struct StockAnswer {
    /// Its half.
    pub half: ForeignHalf,
    /// Whether it wants to be told when ours is connected.
    pub wants_ready: bool,
}

impl Handshake {
    /// Gives the host the peer's answer, or why there is none. From any thread.
    pub fn answer(mut self, answer: Result<StockAnswer, String>) {
        if let Some((id, answers)) = self.to.take() {
            answers.put(id, answer);
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        if let Some((id, answers)) = self.to.take() {
            answers.put(id, Err("nobody asked the peer".to_owned()));
        }
    }
}

/// Answers that have come and were not looked at.
#[derive(Debug)]
struct Answers {
    arrived: Mutex<Vec<(ConnectionId, Result<StockAnswer, String>)>>,
    any: AtomicBool,
    bell: Doorbell,
}

impl Answers {
    fn put(&self, id: ConnectionId, answer: Result<StockAnswer, String>) {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).push((id, answer));
        self.any.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// What a host has under way with stock engines.
pub(super) struct ForeignWork {
    engines: Arc<dyn StockEngines>,
    answers: Arc<Answers>,
    host: u64,
    /// What was asked, to be said again when our side is connected.
    asked: HashMap<ConnectionId, Handshake>,
}

impl ForeignWork {
    /// # Errors
    /// When the kernel gives no descriptor, or does not let it be watched.
    pub(super) fn new(engines: &Arc<dyn StockEngines>, poller: &Poller, host: u64) -> io::Result<Self> {
        let bell = Doorbell::new()?;
        let token = Token { source: Source::StockAnswers, index: 0, generation: 0 };
        poller.add(bell.fd(), token.to_bits(), Interest::ReadableEdge)?;
        let answers = Answers { arrived: Mutex::default(), any: AtomicBool::new(false), bell };
        Ok(Self { engines: Arc::clone(engines), answers: Arc::new(answers), host, asked: HashMap::new() })
    }

    /// The host is about to park. Whether it may.
    pub(super) fn prepare_sleep(&self) -> bool {
        self.answers.bell.prepare_sleep();
        !self.answers.any.load(Ordering::Acquire)
    }

    pub(super) fn awake(&self) {
        self.answers.bell.awake();
    }
}

impl Host {
    /// Starts a lane to a stock engine.
    pub(super) fn connect_foreign(&mut self, lane: LaneId, address: &PeerAddress) -> Result<ConnectionId, CloseCause> {
        let gone = |why: &str| CloseCause::Setup(why.to_owned());
        let PeerKind::MooncakeRdma { object } = address.kind else { return Err(gone("it is no stock engine")) };
        let devices = self.client.as_ref().and_then(|client| client.rail_of(lane)).and_then(|rail| rail.rdma);
        let (own, other) = devices.map_or((0, 0), |devices| (usize::from(devices.own), usize::from(devices.peer)));
        let work = self.foreign_work.as_mut().ok_or_else(|| gone("stock engines are not asked over RDMA here"))?;
        let peer = work.engines.peer(object).ok_or_else(|| gone("the stock engine is not known any more"))?;
        let (number, peer_device) = peer.device(other).ok_or_else(|| gone("the stock engine names no device"))?;
        let name = self.rdma_work.driver.device_names().nth(own).unwrap_or_default();
        let alias = work.engines.alias(name, lane, work.host);
        let queue_pairs = work.engines.queue_pairs();
        let offered = self.rdma_work.driver.offer_foreign(own, Arc::clone(&peer), number, queue_pairs);
        let (id, half) = offered.map_err(|error| CloseCause::Setup(error.to_string()))?;
        let handshake = |to, ready| Handshake {
            peer: Arc::clone(&peer),
            peer_device: peer_device.clone(),
            alias: alias.clone(),
            half: half.clone(),
            ready,
            to,
        };
        work.asked.insert(id, handshake(None, true));
        work.engines.ask(handshake(Some((id, Arc::clone(&work.answers))), false));
        Ok(id)
    }

    /// Takes what stock engines have answered. Whether there was anything.
    pub(super) fn take_foreign_answers(&mut self) -> bool {
        let Some(work) = &mut self.foreign_work else { return false };
        if !work.answers.any.swap(false, Ordering::Acquire) {
            return false;
        }
        let arrived = core::mem::take(&mut *work.answers.arrived.lock().unwrap_or_else(PoisonError::into_inner));
        for (id, answer) in arrived {
            let asked = work.asked.remove(&id);
            match answer {
                Ok(answer) => {
                    self.rdma_work.driver.complete_foreign(id, &answer.half);
                    let asked = asked.filter(|_| answer.wants_ready && self.rdma_work.driver.rail(id).is_some());
                    if let Some(asked) = asked {
                        work.engines.ask(asked);
                    }
                }
                Err(why) => self.rdma_work.driver.close(id, CloseCause::Setup(why)),
            }
        }
        true
    }

    /// A stock engine asks for a connection; see [`kvplane_transport::Rdma::accept_foreign`].
    ///
    /// # Errors
    /// As there.
    pub fn accept_foreign(&mut self, device: &str, from: &str, half: &ForeignHalf) -> Result<ForeignHalf, RdmaError> {
        self.rdma_work.driver.accept_foreign(device, from, half)
    }

    /// Whether a stock engine is connected from this device of its with these queue pairs.
    #[must_use]
    pub fn has_foreign(&self, device: &str, from: &str, queue_pairs: &[u32]) -> bool {
        self.rdma_work.driver.has_foreign(device, from, queue_pairs)
    }

    /// The RDMA devices, by position, as stock engines are told of them.
    #[must_use]
    pub fn foreign_devices(&self) -> Vec<ForeignDevice> {
        self.rdma_work.driver.foreign_devices()
    }

    /// The local and the remote key of a segment on each device; none for one that refused it.
    pub fn foreign_keys(&mut self, segment: SegmentId) -> Vec<Option<(u32, u32)>> {
        self.rdma_work.driver.foreign_keys(segment)
    }
}
