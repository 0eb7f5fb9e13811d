//! Directory: publishes this engine under its name, and looks up the names of peers.
//!
//! Peer to peer, a segment's name is the address of its engine's handshake daemon. With central metadata it is an
//! arbitrary name, and the metadata store has its descriptor and the daemon's address. In both cases stock Mooncake
//! engines can read the descriptor; an additional key in it is for engines that speak the native protocol.

pub(crate) mod announced;
pub(crate) mod courier;
pub(crate) mod direct;
pub(crate) mod own_address;
pub(crate) mod stock;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvplane_client::PeerAddress;
use kvplane_engine::{ForeignDevice, NearDevices, StockKeys, cpu};
use kvplane_mooncake::descriptor::RDMA;
use kvplane_mooncake::{
    Buffer, Caller, Connector, Daemon, DaemonConfig, Descriptor, Listening, Matrix, Metadata, MetadataStore, Native,
    Notice, NoticeLimits, PublishedEngine, keys, names,
};
use kvplane_proto::{NodeId, SegmentId, Status};

use crate::config::TransferEngineConfig;
use crate::directory::stock::Stock;
use crate::error::Error;
use crate::lock;

/// Time for an engine to prove that it lives when another claims its name.
const LIVING: Duration = Duration::from_secs(1);

/// Directory of one engine.
pub(crate) struct Directory {
    caller: Caller,
    store: Option<Arc<dyn MetadataStore>>,
    /// Prefix of the keys in the metadata store.
    prefix: String,
    name: String,
    address: SocketAddr,
    /// Published descriptor, without the buffers.
    template: Descriptor,
    published: Arc<PublishedEngine>,
    shared_memory: bool,
    tcp: bool,
    /// Use the native protocol with peers that offer it.
    native: bool,
    /// NUMA distance of the RDMA devices, and the locations of memory.
    near: Arc<NearDevices>,
    /// True if stock engines can be reached over RDMA, as this engine has devices.
    rdma: bool,
    stock: Arc<Stock>,
    /// Set when RDMA is announced to stock engines, with the matrix to announce.
    announced: Mutex<Option<Option<Matrix>>>,
    /// Serializes publications, so that the last one stays.
    publishing: Mutex<()>,
    /// True if only peers that prove a ticket are opened.
    is_guarded: bool,
    /// Handshake daemon; it answers until it is dropped.
    _daemon: Mutex<Option<Daemon>>,
}

/// Buffer as published.
pub(crate) struct BufferRecord {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Segment id in the native protocol.
    pub(crate) segment: SegmentId,
    /// Location of the memory.
    pub(crate) location: String,
}

/// Devices, and the keys of the buffers on them, as announced to stock engines over RDMA.
pub(crate) struct ToldKeys {
    pub(crate) devices: Vec<ForeignDevice>,
    /// Keys of each buffer.
    pub(crate) keys: Vec<StockKeys>,
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
        let metadata = Metadata::parse(&config.metadata).map_err(|error| Error::Argument(error.to_string()))?;
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
        let serve = |listening: Listening| listening.serve(Arc::clone(&published) as Arc<dyn kvplane_mooncake::Local>);
        let daemon = listening.map(serve).transpose()?;
        let store: Option<Arc<dyn MetadataStore>> = metadata.open(environment).map(Arc::from);
        let is_guarded = daemon.is_none();
        let stock = Stock::new(environment, store.clone(), &name, unique);
        let directory = Self {
            caller: Caller::new(environment),
            store,
            prefix: environment.cluster.clone(),
            name,
            address,
            template,
            published,
            shared_memory: config.shared_memory,
            tcp: config.tcp,
            native: config.native,
            near,
            rdma,
            stock: Arc::new(stock),
            announced: Mutex::default(),
            publishing: Mutex::new(()),
            is_guarded,
            _daemon: Mutex::new(daemon),
        };
        if let Some(store) = &directory.store {
            directory.check_name(&**store)?;
            let key = keys::rpc_meta(&directory.prefix, &directory.name);
            let meta = directory.meta();
            // Some servers do not replace a key that a former incarnation left there.
            store.remove(&key)?;
            store.put(&key, &meta.encode())?;
        }
        directory.publish(|| Ok((Vec::new(), None)))?;
        Ok(directory)
    }

    /// Returns the address of the daemon, in the form of the metadata store.
    fn meta(&self) -> keys::RpcMeta {
        keys::RpcMeta { host: self.address.ip().to_string(), port: self.address.port() }
    }

    /// Returns the daemon's address of another engine that has this name in the store, if any.
    fn other_holder(&self, store: &dyn MetadataStore) -> Result<Option<String>, Error> {
        let text = store.get(&keys::rpc_meta(&self.prefix, &self.name))?;
        // A malformed entry counts as none.
        let meta = text.and_then(|text| keys::RpcMeta::decode(text.as_bytes()).ok());
        Ok(meta.filter(|meta| *meta != self.meta()).map(|meta| daemon_at(&meta)))
    }

    /// Checks that no living engine has this name. A name that a former incarnation left in the store is taken over,
    /// but not that of a living engine: its peers would find this engine, and its entry would be removed when this
    /// engine ends.
    fn check_name(&self, store: &dyn MetadataStore) -> Result<(), Error> {
        let Some(holder) = self.other_holder(store)? else { return Ok(()) };
        let caller = Caller { timeout: self.caller.timeout.min(LIVING), ..self.caller };
        match caller.descriptor(&holder, "{}") {
            Ok(found) if found.name == self.name => Err(Error::Argument(format!(
                "the name {} belongs to a living engine at {holder}: use another name, or stop that engine first",
                self.name
            ))),
            // The holder is dead, or another engine has its port by now.
            _ => Ok(()),
        }
    }

    /// Returns the distances of the RDMA devices to memory.
    pub(crate) fn near(&self) -> &NearDevices {
        &self.near
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address of the handshake daemon.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Publishes the buffers to peers.
    ///
    /// # Errors
    /// When there are more buffers than a descriptor holds, or the metadata store refuses them.
    pub(crate) fn publish(
        &self,
        buffers: impl FnOnce() -> Result<(Vec<BufferRecord>, Option<ToldKeys>), Error>,
    ) -> Result<(), Error> {
        let _one = self.publishing.lock().unwrap_or_else(PoisonError::into_inner);
        // Looked up under the lock: the last publication has the latest buffers.
        let (buffers, keys) = buffers()?;
        let mut descriptor = self.template.clone();
        // For stock engines over TCP, the name of a buffer is the segment's name, not a location.
        descriptor.buffers = buffers.iter().map(|one| Buffer::new(&self.name, one.address, one.bytes)).collect();
        if let Some(native) = &mut descriptor.native {
            native.regions = buffers.iter().map(|one| one.segment.to_bits()).collect();
            if let Some(rails) = &mut native.rails {
                rails.buffers = buffers.iter().map(|one| self.near.place(&one.location).0).collect();
            }
        }
        if let (Some(keys), Some(matrix)) = (&keys, &*lock(&self.announced)) {
            announced::describe(&mut descriptor, &buffers, keys, matrix.as_ref());
        }
        let text = self.published.replace(&descriptor)?;
        match &self.store {
            Some(store) => Ok(store.put(&keys::segment(&self.prefix, &self.name), &text)?),
            None => Ok(()),
        }
    }

    /// Returns the descriptor of a peer's segment, within `limit` or the environment's timeout, whichever is shorter.
    ///
    /// # Errors
    /// When there is no such segment, or its descriptor is unavailable.
    pub(crate) fn find(&self, name: &str, limit: Duration) -> Result<Descriptor, Error> {
        if direct::is_direct(name) {
            return direct::descriptor_of(name);
        }
        if self.is_guarded {
            return Err(Error::Argument(format!(
                "segment {name:?} needs a handshake, which has no authentication: use a name that begins with {:?}",
                direct::SCHEME
            )));
        }
        let Some(store) = &self.store else {
            let caller = Caller { timeout: self.caller.timeout.min(limit), ..self.caller };
            return Ok(caller.descriptor(name, "{}")?);
        };
        let text = store.get_within(&keys::segment(&self.prefix, name), limit)?.ok_or_else(|| nobody(name))?;
        Ok(Descriptor::decode(text.as_bytes(), self.caller.max_message_bytes)?)
    }

    /// Returns the address of a peer's daemon.
    fn daemon_of(&self, name: &str) -> Result<String, Error> {
        daemon_of(self.store.as_deref(), &self.prefix, name)
    }

    /// Announces RDMA to stock engines from the next publication on, and accepts connections from them.
    pub(crate) fn announce_rdma(&self, matrix: Option<Matrix>, connector: Connector) {
        *lock(&self.announced) = Some(matrix);
        self.published.set_connector(connector);
    }

    pub(crate) fn announces_rdma(&self) -> bool {
        lock(&self.announced).is_some()
    }

    /// Returns the stock engines that are reached over RDMA.
    pub(crate) fn stock(&self) -> Arc<Stock> {
        Arc::clone(&self.stock)
    }

    /// Returns true if the engine of this descriptor is reached as a stock engine over RDMA.
    pub(crate) fn is_stock_rdma(&self, descriptor: &Descriptor) -> bool {
        self.rdma && self.native_of(descriptor).is_none() && descriptor.protocol.includes(RDMA)
    }

    /// Checks that a peer's daemon answers.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) fn probe(&self, name: &str) -> Result<(), Error> {
        Ok(self.caller.probe(&self.daemon_of(name)?)?)
    }

    /// Delivers a notice to a peer, or to this engine.
    ///
    /// # Errors
    /// When it was not accepted.
    pub(crate) fn notify(&self, name: &str, notice: &Notice) -> Result<(), Error> {
        if name == self.name {
            let taken = kvplane_mooncake::Local::notified(&*self.published, notice.clone());
            return taken.map_err(|error| Error::TooManyRequests(error.to_string()));
        }
        Ok(self.caller.notify(&self.daemon_of(name)?, notice)?)
    }

    pub(crate) fn take_notices(&self) -> Vec<Notice> {
        self.published.take_notices()
    }

    /// Returns the native part of a descriptor, where the native protocol is in use.
    pub(crate) fn native_of<'a>(&self, descriptor: &'a Descriptor) -> Option<&'a Native> {
        descriptor.native.as_ref().filter(|_| self.native)
    }

    /// Returns the address of the engine that a descriptor describes. A host name in it is resolved within `limit`.
    ///
    /// # Errors
    /// When it offers no supported transport.
    pub(crate) fn address_of(&self, descriptor: &Descriptor, limit: Duration) -> Result<PeerAddress, Error> {
        if let Some(native) = self.native_of(descriptor) {
            // If the socket is invisible from here, as from another container, connecting finds that out and counts it.
            let seen = self.tcp || Path::new(&native.shm).exists();
            let here = self.shared_memory && is_here(native) && !native.shm.is_empty() && seen;
            let shm = here.then(|| native.shm.clone());
            let tcp = native.tcp.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
            // The address is bound to the incarnation of the descriptor.
            return Ok(PeerAddress { node: NodeId(native.incarnation), ..PeerAddress::native(tcp, shm) });
        }
        if self.is_stock_rdma(descriptor) {
            return Ok(PeerAddress::mooncake_rdma(self.stock.learn(descriptor)?.0));
        }
        // Stock engines that announce "rdma" have no such port; engines of this project do.
        if descriptor.tcp_data_port == 0 {
            let here = if self.rdma { "" } else { ", and there is no RDMA device in use here" };
            let what =
                format!("open segment {}: it offers {:?} and no TCP{here}", descriptor.name, descriptor.protocol);
            return Err(Error::Status { what, status: Status::Unsupported, cause: None });
        }
        let host = match descriptor.tcp_data_host.as_str() {
            "" => descriptor.name.as_str(),
            host => host,
        };
        let address = resolve(host, descriptor.tcp_data_port, limit)?;
        let version = u8::try_from(descriptor.tcp_proto_version).unwrap_or(u8::MAX).clamp(1, 2);
        Ok(PeerAddress::mooncake(address, version))
    }
}

/// Returns the address of a peer's daemon. Without a store, that is its name.
///
/// # Errors
/// When the store has no entry.
pub(crate) fn daemon_of(store: Option<&dyn MetadataStore>, prefix: &str, name: &str) -> Result<String, Error> {
    let Some(store) = store else { return Ok(name.to_owned()) };
    let text = store.get(&keys::rpc_meta(prefix, name))?.ok_or_else(|| nobody(name))?;
    let meta = keys::RpcMeta::decode(text.as_bytes()).map_err(|error| Error::Malformed(error.to_string()))?;
    Ok(daemon_at(&meta))
}

fn daemon_at(meta: &keys::RpcMeta) -> String {
    match meta.host.contains(':') {
        true => format!("[{}]:{}", meta.host, meta.port),
        false => format!("{}:{}", meta.host, meta.port),
    }
}

/// Returns true if an engine runs on this host.
pub(crate) fn is_here(native: &Native) -> bool {
    !native.host.is_empty() && cpu::boot_id().is_ok_and(|host| host == native.host)
}

fn resolve(host: &str, port: u16, limit: Duration) -> Result<SocketAddr, Error> {
    let mut peer = names::Peer::parse(host, port).map_err(|error| Error::Malformed(error.to_string()))?;
    // A port in the name is that of the handshake daemon.
    peer.port = port;
    let unknown =
        |why: String| Error::Status { what: format!("resolve {host}"), status: Status::Unreachable, cause: Some(why) };
    let found = kvplane_mooncake::resolve(&peer, Instant::now() + limit).map_err(|error| unknown(error.to_string()))?;
    found.into_iter().next().ok_or_else(|| unknown("it has no address".to_owned()))
}

fn nobody(name: &str) -> Error {
    Error::Status { what: format!("segment {name}"), status: Status::NotFound, cause: None }
}

impl Directory {
    /// Removes this engine from the metadata store, if there is one, so that no new peer finds it. An entry that
    /// another engine put under this name meanwhile stays.
    pub(crate) fn withdraw(&self) {
        let Some(store) = &self.store else { return };
        if !matches!(self.other_holder(&**store), Ok(None)) {
            return;
        }
        for key in [keys::segment(&self.prefix, &self.name), keys::rpc_meta(&self.prefix, &self.name)] {
            // An entry that stays leads to an engine that does not answer, which peers have to handle anyway.
            let _ = store.remove(&key);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_resolution_is_bounded_by_its_limit() {
        let found = resolve("localhost:7", 5, Duration::from_secs(60)).expect("every machine has it");
        assert_eq!((found.ip().is_loopback(), found.port()), (true, 5));
        assert_eq!(resolve("::1", 6, Duration::ZERO).expect("an address").to_string(), "[::1]:6");
        let error = resolve("localhost", 5, Duration::ZERO).expect_err("no time").to_string();
        assert!(error.contains("deadline"), "{error}");
    }
}
