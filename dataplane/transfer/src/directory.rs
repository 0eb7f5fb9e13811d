//! Directory: publishes this engine under its name, and looks up the names of peers.
//!
//! Peer to peer, a segment's name is the address of its engine's handshake daemon. With central metadata it is an
//! arbitrary name, and the metadata store has its descriptor and the daemon's address. In both cases stock Mooncake
//! engines can read the descriptor; an additional key in it is for engines that speak the native protocol.

pub(crate) mod announced;
pub(crate) mod direct;
pub(crate) mod lookup;
pub(crate) mod notices;
pub(crate) mod own_address;
pub(crate) mod paths;
pub(crate) mod publication;
pub(crate) mod registry;
pub(crate) mod stock;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_engine::NearDevices;
use kvplane_mooncake::{
    Caller, Daemon, DaemonConfig, Descriptor, Listening, Local, Metadata, Native, Notice, NoticeLimits, PublishedEngine,
};
use kvplane_sys::interrupt;

use crate::config::TransferEngineConfig;
use crate::error::{ArgumentError, Error};
use lookup::Lookup;
use paths::Paths;
use publication::Publication;
use registry::Registry;
use stock::Stock;

/// Directory of one engine: its own name and what is published under it, and the lookup of its peers.
pub struct Directory {
    lookup: Arc<Lookup>,
    paths: Paths,
    /// Dropped last: its daemon answers until then.
    publication: Publication,
}

impl core::fmt::Debug for Directory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Directory").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Opens the port of the handshake daemon.
pub(crate) fn listen(config: &TransferEngineConfig) -> Result<Listening, Error> {
    let environment = &config.environment;
    let ports = match config.listen.port() {
        0 => environment.ports.clone(),
        port => port..=port,
    };
    Ok(Daemon::listen(DaemonConfig {
        address: config.listen.ip(),
        without_authentication_anywhere: config.open_to_network,
        ports,
        ..DaemonConfig::new(environment)
    })?)
}

/// Runs blocking calls to other engines or to the metadata store, which have deadlines of their own and can be
/// interrupted.
pub(crate) fn aside<T: Send + 'static>(calls: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
    interrupt::aside("kvp-ask", calls).unwrap_or_else(|| Err(Error::interrupted()))
}

impl Directory {
    /// Starts the handshake daemon, and publishes an engine without buffers.
    ///
    /// # Errors
    /// When the system refuses a thread, or the metadata store rejects the engine.
    pub(crate) fn start(
        config: &TransferEngineConfig,
        listening: Option<Listening>,
        native: Native,
        stock: Option<SocketAddr>,
        near: Arc<NearDevices>,
        rdma: bool,
    ) -> Result<Self, Error> {
        let metadata = Metadata::parse(&config.metadata).map_err(ArgumentError::Metadata)?;
        // Without handshakes, the name itself carries what they would have exchanged.
        let data = native.tcp.map_or(0, |data| data.port());
        let port = listening.as_ref().map_or(data, |listening| listening.address().port());
        let address = SocketAddr::new(config.announced(), port);
        let name = match (&metadata, &config.name, &listening) {
            (_, _, None) => direct::name_of(&native),
            (Metadata::PeerToPeer, _, _) | (_, None, _) => address.to_string(),
            (_, Some(name), _) => name.clone(),
        };
        // Without a port for stock engines, these see the buffers but have no path to them.
        let stock_port = stock.map_or(0, |stock| stock.port());
        let mut template = Descriptor::tcp(&name, &address.ip().to_string(), stock_port);
        let unique = native.incarnation;
        template.native = Some(native);
        let environment = &config.environment;
        let published = PublishedEngine::new(&template, environment.max_message_bytes, NoticeLimits::default())?;
        let published = Arc::new(published);
        let serve = |listening: Listening| listening.serve(Arc::clone(&published) as Arc<dyn Local>);
        let daemon = listening.map(serve).transpose()?;
        let store = metadata.open(environment).map(Arc::from);
        let registry = store.map(|store| Registry::new(store, &environment.cluster));
        let lookup = Arc::new(Lookup::new(Caller::new(environment), registry.clone(), daemon.is_none()));
        let stock = Stock::new(Arc::clone(&lookup), &name, unique, environment.queue_pairs);
        let directory = Self {
            lookup,
            paths: Paths::new(config, rdma, Arc::new(stock)),
            publication: Publication::new(address, registry, template, published, near, daemon),
        };
        directory.publication.enter(&directory.lookup)?;
        directory.publication.publish(|| Ok((Vec::new(), None)))?;
        Ok(directory)
    }

    /// Returns the name by which peers open the segment of this engine: peer to peer, the address of its handshake
    /// daemon, `ip:port`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.publication.name()
    }

    /// Returns the address of the handshake daemon.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.publication.address()
    }

    /// Checks that the engine of this name lives; returns the latency of its handshake daemon.
    ///
    /// # Errors
    /// When it does not.
    pub fn probe(&self, name: &str) -> Result<Duration, Error> {
        let start = Instant::now();
        let (lookup, name) = (Arc::clone(&self.lookup), name.trim_start_matches('/').to_owned());
        aside(move || lookup.probe(&name))?;
        Ok(start.elapsed())
    }

    /// Removes this engine from the metadata store, if it is in one, so that no new peer finds it. Known peers are not
    /// affected, and an entry that another engine put under this name meanwhile stays. Happens automatically when the
    /// engine is dropped.
    pub fn withdraw(&self) {
        self.publication.withdraw();
    }

    /// Returns the descriptor of a peer's segment: see [`Lookup::find`].
    pub(crate) fn find(&self, name: &str, limit: Duration) -> Result<Descriptor, Error> {
        self.lookup.find(name, limit)
    }

    /// Returns the paths to peers.
    pub(crate) const fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns what is published under this engine's name.
    pub(crate) const fn publication(&self) -> &Publication {
        &self.publication
    }

    /// Delivers a notice to a peer, or to this engine.
    ///
    /// # Errors
    /// When it was not accepted.
    pub(crate) fn notify(&self, name: &str, notice: &Notice) -> Result<(), Error> {
        if name == self.name() { self.publication.accept(notice) } else { self.lookup.notify(name, notice) }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl TransferEngineConfig {
    /// Returns the address to announce to peers.
    pub(crate) fn announced(&self) -> IpAddr {
        self.announce.unwrap_or(self.listen.ip())
    }
}
