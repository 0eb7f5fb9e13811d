//! Paths to peers, as far as descriptors tell them: the protocol that a peer is reached by, and its address.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_client::PeerAddress;
use kvplane_engine::cpu;
use kvplane_mooncake::descriptor::RDMA;
use kvplane_mooncake::{Descriptor, Native, names};
use kvplane_proto::{NodeId, Status};

use super::stock::Stock;
use crate::config::TransferEngineConfig;
use crate::error::{Error, PublishedError};

/// Paths that this engine may use to its peers.
pub(crate) struct Paths {
    shared_memory: bool,
    tcp: bool,
    /// Use the native protocol with peers that offer it.
    native: bool,
    /// True if stock engines can be reached over RDMA, as this engine has devices.
    rdma: bool,
    stock: Arc<Stock>,
}

impl Paths {
    /// Creates the paths that the settings allow; `rdma` if this engine has devices.
    pub(crate) const fn new(config: &TransferEngineConfig, rdma: bool, stock: Arc<Stock>) -> Self {
        let TransferEngineConfig { shared_memory, tcp, native, .. } = *config;
        Self { shared_memory, tcp, native, rdma, stock }
    }

    /// Returns the stock engines that are reached over RDMA.
    pub(crate) const fn stock(&self) -> &Arc<Stock> {
        &self.stock
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
        if self.rdma && descriptor.protocol.includes(RDMA) {
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

/// Returns true if an engine runs on this host.
pub(crate) fn is_here(native: &Native) -> bool {
    !native.host.is_empty() && cpu::boot_id().is_ok_and(|host| host == native.host)
}

fn resolve(host: &str, port: u16, limit: Duration) -> Result<SocketAddr, Error> {
    let mut peer = names::Peer::parse(host, port).map_err(PublishedError::Address)?;
    // A port in the name is that of the handshake daemon.
    peer.port = port;
    let unknown =
        |why: String| Error::Status { what: format!("resolve {host}"), status: Status::Unreachable, cause: Some(why) };
    let found = kvplane_mooncake::resolve(&peer, Instant::now() + limit).map_err(|error| unknown(error.to_string()))?;
    found.into_iter().next().ok_or_else(|| unknown("it has no address".to_owned()))
}

#[cfg(test)]
mod tests {
    use kvplane_client::PeerKind;
    use kvplane_mooncake::{Caller, Environment};

    use super::*;
    use crate::directory::lookup::Lookup;

    #[test]
    fn name_resolution_is_bounded_by_its_limit() {
        let found = resolve("localhost:7", 5, Duration::from_secs(60)).expect("every machine has it");
        assert_eq!((found.ip().is_loopback(), found.port()), (true, 5));
        assert_eq!(resolve("::1", 6, Duration::ZERO).expect("an address").to_string(), "[::1]:6");
        let error = resolve("localhost", 5, Duration::ZERO).expect_err("no time").to_string();
        assert!(error.contains("deadline"), "{error}");
    }

    #[test]
    fn the_settings_decide_the_protocol_of_a_peer() {
        let lookup = Arc::new(Lookup::new(Caller::new(&Environment::default()), None, false));
        let stock = Arc::new(Stock::new(lookup, "own", 1, 1));
        let paths = |config: TransferEngineConfig| Paths::new(&config, false, Arc::clone(&stock));
        let default = TransferEngineConfig::default;
        let mut peer = Descriptor::tcp("127.0.0.1:9", "127.0.0.1", 8);
        let address_of = |paths: &Paths, peer: &Descriptor| paths.address_of(peer, Duration::ZERO);
        let plain = address_of(&paths(default()), &peer).expect("it offers TCP");
        assert!(matches!(plain.kind, PeerKind::Mooncake { .. }) && plain.tcp.port() == 8, "{plain:?}");
        peer.native = Some(Native {
            tcp: Some(([127, 0, 0, 1], 7).into()),
            shm: "/no/such/socket".to_owned(),
            host: cpu::boot_id().unwrap_or_default(),
            pid: 1,
            incarnation: 5,
            regions: Vec::new(),
            rails: None,
            other: serde_json::Map::new(),
        });
        let native = address_of(&paths(default()), &peer).expect("it offers the native protocol");
        assert_eq!((native.kind, native.node, native.tcp.port()), (PeerKind::Native, NodeId(5), 7));
        assert_eq!(native.shm.as_deref(), Some("/no/such/socket"), "connecting finds out that it is not there");
        let unshared = TransferEngineConfig { shared_memory: false, ..default() };
        assert_eq!(address_of(&paths(unshared), &peer).expect("reached over TCP").shm, None);
        let never = TransferEngineConfig { native: false, ..default() };
        assert_eq!(address_of(&paths(never.clone()), &peer).expect("it offers TCP").kind, plain.kind);
        peer.tcp_data_port = 0;
        let error = address_of(&paths(never), &peer).expect_err("no TCP").to_string();
        assert!(error.contains("no RDMA device in use here"), "{error}");
    }
}
