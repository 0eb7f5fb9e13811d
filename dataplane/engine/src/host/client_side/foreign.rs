//! Stock Mooncake engines over RDMA: our devices read and write their memory, and theirs ours.
//!
//! How connections are agreed on is not the host's business: it hands a [`Handshake`] to [`StockEngines`], which reach
//! the peer, and takes the answer when it comes, on whichever thread. Nothing here waits.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_client::{Client, LaneId, PeerAddress, PeerKind};
use kvplane_sys::{Doorbell, Interest, Poller};
use kvplane_transport::{CloseCause, ConnectionId, ForeignHalf, ForeignPeer, Rdma, Source, Token};

/// What is known of stock engines, and the way to them. Shared by the hosts of a process.
pub trait StockEngines: fmt::Debug + Send + Sync {
    /// The engine of this number, if it is known.
    fn peer(&self, object: u64) -> Option<Arc<ForeignPeer>>;

    /// A name for one of our devices that no other connection of ours has: a stock engine keeps one connection for
    /// each name.
    fn alias(&self, device: &str, lane: LaneId, host: u64) -> String;

    /// How many queue pairs stock engines make for a connection.
    fn queue_pairs(&self) -> usize;

    /// Sends the handshake to the engine. Returns at once; the answer is given by [`Handshake::answer`].
    fn ask(&self, handshake: Handshake);
}

/// Our half of a connection, for a stock engine.
#[derive(Debug)]
pub struct Handshake {
    /// The engine.
    pub peer: Arc<ForeignPeer>,
    /// Its device.
    pub peer_device: String,
    /// Our name for our device.
    pub alias: String,
    /// Our half.
    pub half: ForeignHalf,
    /// Whether this says that our queue pairs are connected: the engine has answered before, and no answer is awaited.
    pub ready: bool,
    to: Option<(ConnectionId, Arc<Answers>)>,
}

/// A stock engine's half of a connection.
#[derive(Clone, Debug)]
pub struct StockAnswer {
    /// Its half.
    pub half: ForeignHalf,
    /// Whether it wants to know when ours is connected.
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

/// Connections that were offered to stock engines, and their answers.
pub(crate) struct StockOffers {
    engines: Arc<dyn StockEngines>,
    answers: Arc<Answers>,
    host: u64,
    /// What to say when our side of a connection is connected.
    confirmations: HashMap<ConnectionId, Handshake>,
}

impl StockOffers {
    /// No offers yet, of the host of this number.
    ///
    /// # Errors
    /// When the kernel gives no descriptor, or does not let it be watched.
    pub(crate) fn new(engines: &Arc<dyn StockEngines>, poller: &Poller, host: u64) -> io::Result<Self> {
        let bell = Doorbell::new()?;
        let token = Token { source: Source::StockAnswers, index: 0, generation: 0 };
        poller.add(bell.fd(), token.to_bits(), Interest::ReadableEdge)?;
        let answers = Answers { arrived: Mutex::default(), any: AtomicBool::new(false), bell };
        Ok(Self { engines: Arc::clone(engines), answers: Arc::new(answers), host, confirmations: HashMap::new() })
    }

    /// The host is about to park. Whether it may.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.answers.bell.prepare_sleep();
        !self.answers.any.load(Ordering::Acquire)
    }

    /// The host does not park any more.
    pub(crate) fn awake(&self) {
        self.answers.bell.awake();
    }

    /// Starts a lane to a stock engine.
    pub(crate) fn connect(
        &mut self,
        driver: &mut Rdma,
        client: &Client,
        lane: LaneId,
        address: &PeerAddress,
    ) -> Result<ConnectionId, CloseCause> {
        let gone = |why: &str| CloseCause::Setup(why.to_owned());
        let PeerKind::MooncakeRdma { object } = address.kind else { return Err(gone("it is no stock engine")) };
        let devices = client.rail_of(lane).and_then(|rail| rail.rdma);
        let (own, other) = devices.map_or((0, 0), |devices| (usize::from(devices.own), usize::from(devices.peer)));
        let peer = self.engines.peer(object).ok_or_else(|| gone("the stock engine is not known any more"))?;
        let (number, peer_device) = peer.device(other).ok_or_else(|| gone("the stock engine names no device"))?;
        let name = driver.device_names().nth(own).unwrap_or_default();
        let alias = self.engines.alias(name, lane, self.host);
        let queue_pairs = self.engines.queue_pairs();
        let offered = driver.offer_foreign(own, Arc::clone(&peer), number, queue_pairs);
        let (id, half) = offered.map_err(|error| CloseCause::Setup(error.to_string()))?;
        let handshake = |to, ready| Handshake {
            peer: Arc::clone(&peer),
            peer_device: peer_device.clone(),
            alias: alias.clone(),
            half: half.clone(),
            ready,
            to,
        };
        self.confirmations.insert(id, handshake(None, true));
        self.engines.ask(handshake(Some((id, Arc::clone(&self.answers))), false));
        Ok(id)
    }

    /// Takes what stock engines have answered. Whether there was anything.
    pub(crate) fn take_answers(&mut self, driver: &mut Rdma) -> bool {
        if !self.answers.any.swap(false, Ordering::Acquire) {
            return false;
        }
        let arrived = core::mem::take(&mut *self.answers.arrived.lock().unwrap_or_else(PoisonError::into_inner));
        for (id, answer) in arrived {
            let confirmation = self.confirmations.remove(&id);
            match answer {
                Ok(answer) => {
                    driver.complete_foreign(id, &answer.half);
                    let confirmation = confirmation.filter(|_| answer.wants_ready && driver.rail(id).is_some());
                    if let Some(confirmation) = confirmation {
                        self.engines.ask(confirmation);
                    }
                }
                Err(why) => driver.close(id, CloseCause::Setup(why)),
            }
        }
        true
    }
}
