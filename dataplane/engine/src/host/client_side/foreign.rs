//! Stock Mooncake engines over RDMA: our devices read and write their memory, and theirs ours.
//!
//! The host does not exchange handshakes itself: it passes a [`Handshake`] to [`StockEngines`], which reach the peer,
//! and takes the answer when it arrives, on any thread. Nothing here blocks.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvplane_client::{Client, LaneId, PeerAddress, PeerKind};
use kvplane_sys::{Doorbell, Interest, Poller};
use kvplane_transport::{CloseCause, ConnectionId, ForeignHalf, ForeignPeer, Rdma, Source, Token};

/// Directory of stock engines, and the transport of handshakes to them. Shared by the hosts of a process.
pub trait StockEngines: fmt::Debug + Send + Sync {
    /// Returns the engine of this number, if it is known.
    fn peer(&self, object: u64) -> Option<Arc<ForeignPeer>>;

    /// Returns a name for one of our devices that is unique among our connections: a stock engine keeps one connection
    /// for each name.
    fn alias(&self, device: &str, lane: LaneId, host: u64) -> String;

    /// Returns the number of queue pairs that stock engines make for a connection.
    fn queue_pairs(&self) -> usize;

    /// Sends the handshake to the engine. Returns at once; the answer is delivered by [`Handshake::answer`].
    fn ask(&self, handshake: Handshake);
}

/// Our half of a connection, for a stock engine.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Debug)]
pub struct Handshake {
    pub peer: Arc<ForeignPeer>,
    /// Device of the peer.
    pub peer_device: String,
    /// Our name for our device.
    pub alias: String,
    pub half: ForeignHalf,
    /// True if this confirms that our queue pairs are connected: the engine has answered before, and no answer is
    /// awaited.
    pub ready: bool,
    to: Option<(ConnectionId, Arc<Answers>)>,
}

/// A stock engine's half of a connection.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug)]
pub struct StockAnswer {
    pub half: ForeignHalf,
    /// True if the engine expects a confirmation when our half is connected.
    pub wants_ready: bool,
}

/// Reason why there is no answer of a stock engine.
#[derive(Debug)]
pub enum HandshakeError {
    /// The handshake was dropped unsent.
    Dropped,
    /// The engine's answer lacks the address that the connection needs.
    NoGid,
    /// The engine could not be reached, or its answer is unusable.
    Failed(Box<dyn Error + Send + Sync>),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dropped => f.write_str("the handshake was dropped before it was sent to the peer"),
            Self::NoGid => f.write_str("its handshake has no local_gid: it is a Mooncake before 0.3.11"),
            Self::Failed(source) => source.fmt(f),
        }
    }
}

impl Error for HandshakeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Dropped | Self::NoGid => None,
            Self::Failed(source) => Some(&**source),
        }
    }
}

impl Handshake {
    /// Delivers the peer's answer, or the error, to the host. May be called on any thread.
    pub fn answer(mut self, answer: Result<StockAnswer, HandshakeError>) {
        if let Some((id, answers)) = self.to.take() {
            answers.put(id, answer);
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        if let Some((id, answers)) = self.to.take() {
            answers.put(id, Err(HandshakeError::Dropped));
        }
    }
}

/// Answers that have arrived and were not handled yet.
#[derive(Debug)]
struct Answers {
    arrived: Mutex<Vec<(ConnectionId, Result<StockAnswer, HandshakeError>)>>,
    any: AtomicBool,
    bell: Doorbell,
}

impl Answers {
    fn put(&self, id: ConnectionId, answer: Result<StockAnswer, HandshakeError>) {
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
    /// Handshakes that confirm the connection of our half.
    confirmations: HashMap<ConnectionId, Handshake>,
}

impl StockOffers {
    /// Creates an empty table for the host of this number.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor, or refuses to watch it.
    pub(crate) fn new(engines: &Arc<dyn StockEngines>, poller: &Poller, host: u64) -> io::Result<Self> {
        let bell = Doorbell::new()?;
        let token = Token { source: Source::StockAnswers, index: 0, generation: 0 };
        poller.add(bell.fd(), token.to_bits(), Interest::ReadableEdge)?;
        let answers = Answers { arrived: Mutex::default(), any: AtomicBool::new(false), bell };
        Ok(Self { engines: Arc::clone(engines), answers: Arc::new(answers), host, confirmations: HashMap::new() })
    }

    /// Prepares for the host to park. Returns true if it may.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.answers.bell.prepare_sleep();
        !self.answers.any.load(Ordering::Acquire)
    }

    /// Ends the announcement of a park.
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
        let PeerKind::MooncakeRdma { object } = address.kind else { return Err(gone("not a stock engine")) };
        let devices = client.rail_of(lane).and_then(|rail| rail.rdma);
        let (own, other) = devices.map_or((0, 0), |devices| (usize::from(devices.own), usize::from(devices.peer)));
        let peer = self.engines.peer(object).ok_or_else(|| gone("the stock engine is no longer known"))?;
        let (number, peer_device) = peer.device(other).ok_or_else(|| gone("the stock engine has no RDMA device"))?;
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

    /// Takes the answers of stock engines. Returns true if there were any.
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
                Err(why) => driver.close(id, CloseCause::Setup(why.to_string())),
            }
        }
        true
    }
}
