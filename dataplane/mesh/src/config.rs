//! Settings of a mesh.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use kvplane_sys::verbs::Device;
use kvplane_tls::{DataTls, Keychain};

use crate::error::MeshError;
use crate::hello::WORLD_BYTES;
use crate::ring::{LINE_BYTES, least_capacity};

/// Limit of processes of a world.
pub const MAX_RANKS: usize = 64;
/// Limit of the longest payload, in bytes.
const PAYLOAD_BYTES: usize = 1 << 20;
/// Payloads of the longest kind that a ring has room for where memory allows: enough to keep both sides busy, and few
/// enough for the caches.
const PAYLOADS_IN_FLIGHT: usize = 8;

/// Settings of a mesh.
pub struct MeshConfig {
    /// Name of the world, 1 to 255 bytes: processes of another one are refused.
    pub world: String,
    /// Rank of this process, below [`MAX_RANKS`].
    pub rank: u8,
    /// Incarnation of this process: a number that no former process of its rank had.
    pub incarnation: u64,
    /// Address to listen on for peers of other hosts; any free port.
    pub listen: IpAddr,
    /// Address to announce to peers, where it differs from [`Self::listen`].
    pub announce: Option<IpAddr>,
    /// Allow an address beyond loopback although [`Self::tls`] is not required there: a process that reaches the port
    /// can then take part as any rank.
    pub open_to_network: bool,
    /// Use shared memory with peers of this host, over Unix sockets.
    pub shared_memory: bool,
    /// Use TCP.
    pub tcp: bool,
    /// RDMA devices to use with peers that TCP reaches; empty: none. The best one is first.
    pub rdma: Vec<Device>,
    /// Certificates for connections over TCP, of the keychain's role. Frames over RDMA are not encrypted, as elsewhere
    /// in kvplane.
    pub tls: Option<Arc<Keychain>>,
    /// Send checksums with frames over TCP and RDMA, which the receiver verifies.
    pub checksum: bool,
    /// Longest payload of a frame in bytes, the same in all processes of the world: a multiple of 64, at most 1 MiB.
    pub payload_bytes: usize,
    /// Most bytes of memory for channels; with more peers, each has less. Memory that was never used takes none.
    pub window_bytes: usize,
    /// Directory of the Unix socket; `None` takes the user's runtime directory.
    pub runtime_directory: Option<PathBuf>,
}

impl MeshConfig {
    /// Returns settings for a process of a world, on loopback and shared memory.
    #[must_use]
    pub fn new(world: impl Into<String>, rank: u8, incarnation: u64) -> Self {
        Self {
            world: world.into(),
            rank,
            incarnation,
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            announce: None,
            open_to_network: false,
            shared_memory: true,
            tcp: true,
            rdma: Vec::new(),
            tls: None,
            checksum: true,
            payload_bytes: 128 << 10,
            window_bytes: 256 << 20,
            runtime_directory: None,
        }
    }

    /// # Errors
    /// When a setting is invalid; the error names it and the reason.
    pub(crate) fn check(&self) -> Result<(), MeshError> {
        if usize::from(self.rank) >= MAX_RANKS {
            return Err(MeshError::RankBeyondLimit { rank: self.rank, limit: MAX_RANKS });
        }
        if !(1..=WORLD_BYTES).contains(&self.world.len()) {
            return Err(MeshError::WorldName { bytes: self.world.len(), limit: WORLD_BYTES });
        }
        let bytes = self.payload_bytes;
        if !bytes.is_multiple_of(LINE_BYTES) || !(LINE_BYTES..=PAYLOAD_BYTES).contains(&bytes) {
            return Err(MeshError::PayloadBytes { bytes, limit: PAYLOAD_BYTES });
        }
        let least = 2 * (MAX_RANKS - 1) * least_capacity(bytes);
        if self.window_bytes < least {
            return Err(MeshError::WindowBytes { bytes: self.window_bytes, least });
        }
        if !self.tcp && !self.shared_memory {
            return Err(MeshError::NoLane);
        }
        if !self.tcp && !self.rdma.is_empty() {
            return Err(MeshError::RdmaWithoutTcp);
        }
        let listen = SocketAddr::new(self.listen, 0);
        let required = self.tls.as_ref().is_some_and(|keychain| keychain.mode() == DataTls::Require);
        if self.tcp && !self.listen.is_loopback() && !required && !self.open_to_network {
            return Err(MeshError::Unauthenticated { listen });
        }
        if self.tcp && self.announced().is_unspecified() {
            return Err(MeshError::NotAnnounced { listen });
        }
        Ok(())
    }

    /// Returns the address that peers connect to.
    pub(crate) fn announced(&self) -> IpAddr {
        self.announce.unwrap_or(self.listen)
    }

    /// Returns the capacity of each of the two rings of a channel, with this many peers.
    pub(crate) fn ring_bytes(&self, peers: usize) -> usize {
        let least = least_capacity(self.payload_bytes);
        let most = (PAYLOADS_IN_FLIGHT * self.payload_bytes).next_power_of_two().max(least);
        let share = self.window_bytes / (2 * peers.max(1));
        // Rounded down to a power of two.
        (1 << share.max(1).ilog2()).clamp(least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixty_four_peers_stay_within_the_memory() {
        for payload_bytes in [64, 4096, 128 << 10, 1 << 20] {
            let mut config = MeshConfig { payload_bytes, ..MeshConfig::new("world", 0, 1) };
            config.window_bytes = 2 * 63 * least_capacity(payload_bytes);
            config.check().expect("just enough");
            for peers in 1..MAX_RANKS {
                let ring_bytes = config.ring_bytes(peers);
                assert!(ring_bytes >= least_capacity(payload_bytes));
                assert!(2 * peers * ring_bytes <= config.window_bytes, "{peers} peers, {payload_bytes}");
            }
            config.window_bytes -= 1;
            assert!(matches!(config.check(), Err(MeshError::WindowBytes { .. })));
        }
        let config = MeshConfig::new("world", 0, 1);
        assert_eq!((config.ring_bytes(1), config.ring_bytes(7), config.ring_bytes(63)), (1 << 20, 1 << 20, 1 << 20));
    }

    #[test]
    fn wrong_settings_are_named() {
        let with = |change: fn(&mut MeshConfig)| {
            let mut config = MeshConfig::new("world", 0, 1);
            change(&mut config);
            config.check().expect_err("refused").to_string()
        };
        assert!(with(|config| config.rank = 64).contains("at most 64"));
        assert!(with(|config| config.world.clear()).contains("name"));
        assert!(with(|config| config.payload_bytes = 100).contains("multiple of 64"));
        assert!(with(|config| (config.tcp, config.shared_memory) = (false, false)).contains("both off"));
        assert!(with(|config| config.listen = [10, 0, 0, 1].into()).contains("beyond loopback"));
        let any = with(|config| (config.listen, config.open_to_network) = ([0, 0, 0, 0].into(), true));
        assert!(any.contains("all addresses"));
    }
}
