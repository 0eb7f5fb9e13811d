//! Addresses of peers: what kind of peer it is, where it listens, and the identity that it has to prove.

use std::net::{Ipv4Addr, SocketAddr};

use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

/// Kind of a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub enum PeerKind {
    /// A shard or an engine of kvplane.
    #[default]
    Native,
    /// This process. Segments are those that the host itself has registered under their ids.
    Local,
    /// A stock Mooncake engine: `tcp` is its data address, and a target's offset is an absolute address of its process.
    /// It supports reads and writes of ranges only.
    Mooncake {
        /// Version of its data protocol.
        version: u8,
    },
    /// A stock Mooncake engine whose memory is reached over RDMA.
    MooncakeRdma {
        /// Id of the host's record of the engine.
        object: u64,
    },
    /// Files of this host: a target's segment is the id of a file.
    File {
        /// Id of the group of files, assigned by the host; each group has lanes of its own.
        object: u64,
    },
}

/// Address of a shard, and the identity that it has to prove in the handshake.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PeerAddress {
    /// Kind of the peer.
    pub kind: PeerKind,
    /// Node of the shard; 0 to accept any.
    pub node: NodeId,
    /// Incarnation of the node; 0 to accept any.
    pub incarnation: Incarnation,
    /// Index of the shard within the node.
    pub shard: ShardId,
    /// Address of the data port.
    pub tcp: SocketAddr,
    /// Path of the Unix socket for shared memory, if the peer is on this host.
    pub shm: Option<String>,
}

impl PeerAddress {
    const fn of_kind(kind: PeerKind, tcp: SocketAddr) -> Self {
        Self { kind, node: NodeId(0), incarnation: Incarnation(0), shard: ShardId(0), tcp, shm: None }
    }

    /// Address of any native peer that answers at `tcp`, and at this Unix socket if it is on this host.
    #[must_use]
    pub fn native(tcp: SocketAddr, shm: Option<String>) -> Self {
        Self { shm, ..Self::of_kind(PeerKind::Native, tcp) }
    }

    /// Address of this process.
    #[must_use]
    pub const fn local() -> Self {
        Self::of_kind(PeerKind::Local, NOWHERE)
    }

    /// Address of a stock Mooncake engine.
    #[must_use]
    pub const fn mooncake(tcp: SocketAddr, version: u8) -> Self {
        Self::of_kind(PeerKind::Mooncake { version }, tcp)
    }

    /// Address of a stock Mooncake engine that is reached over RDMA; `object` is the id of the host's record of it.
    #[must_use]
    pub const fn mooncake_rdma(object: u64) -> Self {
        Self::of_kind(PeerKind::MooncakeRdma { object }, NOWHERE)
    }

    /// Address of a group of files, by the id that the host assigned.
    #[must_use]
    pub const fn file(object: u64) -> Self {
        Self::of_kind(PeerKind::File { object }, NOWHERE)
    }
}

/// Socket address of peers that are not reached over TCP.
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
