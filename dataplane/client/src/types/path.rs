//! Ways to a peer: what kind it is, and how a lane or a copy moves its bytes.

use std::net::{Ipv4Addr, SocketAddr};

use kvplane_proto::ids::{Incarnation, NodeId, ShardId};

use super::PeerAddress;

/// How a connected lane moves payloads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Path {
    /// Payloads follow their frames.
    Stream,
    /// As a stream, but a device moves the bytes: payloads into place, and segments without their owner's help. See
    /// [`Via`].
    Rdma,
    /// The peer is on this host: control frames travel, bytes are copied by whoever asks. See [`Via`].
    Shared,
    /// This very process: nothing travels.
    Local,
    /// The data port of a stock Mooncake engine. Its driver turns our frames into that protocol and back.
    Mooncake,
    /// The memory of a stock Mooncake engine, which a device of ours reads and writes by itself.
    MooncakeRdma,
    /// Files of this host, through the kernel's queue.
    File,
}

impl Path {
    /// Every path.
    pub const ALL: &[Self] =
        &[Self::Stream, Self::Rdma, Self::Shared, Self::Local, Self::Mooncake, Self::MooncakeRdma, Self::File];

    /// Its name in settings, logs and counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stream => "tcp",
            Self::Rdma => "rdma",
            Self::Shared => "shm",
            Self::Local => "local",
            Self::Mooncake => "mooncake",
            Self::MooncakeRdma => "mooncake-rdma",
            Self::File => "file",
        }
    }

    /// Whether the peer is greeted: it runs our protocol.
    pub(crate) const fn is_greeted(self) -> bool {
        matches!(self, Self::Stream | Self::Rdma | Self::Shared)
    }

    /// Whether ranges are written in the order of the frames: what follows a frame is not written before the peer has
    /// carried that out. Where we write ourselves, only the frame's answer says that it has.
    pub(crate) const fn writes_in_order(self) -> bool {
        matches!(self, Self::Stream)
    }
}

/// What carries bytes to a peer: a path, told apart by how bytes move over it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Transport {
    /// Our own protocol over TCP.
    Tcp,
    /// The same with devices that move the bytes.
    Rdma,
    /// Copies through a mapping of the peer's memory.
    Shm,
    /// The kernel's copies between the processes.
    Cma,
    /// Copies within this process.
    Local,
    /// The TCP protocol of stock Mooncake engines.
    Mooncake,
    /// Devices, in the memory of stock Mooncake engines.
    MooncakeRdma,
    /// Files of this host.
    File,
}

impl Transport {
    /// Every transport.
    pub const ALL: &[Self] =
        &[Self::Tcp, Self::Rdma, Self::Shm, Self::Cma, Self::Local, Self::Mooncake, Self::MooncakeRdma, Self::File];

    /// What carries a slice on this path; `via` matters on the shared one only.
    #[must_use]
    pub const fn of(path: Path, via: Via) -> Self {
        match (path, via) {
            (Path::Stream, _) => Self::Tcp,
            (Path::Rdma, _) => Self::Rdma,
            (Path::Shared, Via::Cma) => Self::Cma,
            (Path::Shared, _) => Self::Shm,
            (Path::Local, _) => Self::Local,
            (Path::Mooncake, _) => Self::Mooncake,
            (Path::MooncakeRdma, _) => Self::MooncakeRdma,
            (Path::File, _) => Self::File,
        }
    }

    /// Its name in settings, logs and counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Local => "local",
            Self::Mooncake => "mooncake",
            Self::MooncakeRdma => "mooncake-rdma",
            Self::File => "file",
        }
    }
}

/// What a peer is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Default)]
pub enum PeerKind {
    /// A shard or an engine of ours.
    #[default]
    Native,
    /// This process. Segments are what the host itself has under their ids.
    Local,
    /// A stock Mooncake engine: `tcp` is its data address, and a target's offset is an absolute address of its
    /// process. It reads and writes ranges, nothing else.
    Mooncake {
        /// Of its data protocol.
        version: u8,
    },
    /// A stock Mooncake engine whose memory our devices reach.
    MooncakeRdma {
        /// The host's name for what is known of it.
        object: u64,
    },
    /// Files of this host: a target's segment names one.
    File {
        /// The host's name for the group of files, so that groups have lanes of their own.
        object: u64,
    },
}

/// How a range of a segment is copied without the help of whoever owns it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Via {
    /// The region is mapped here too.
    Map,
    /// The kernel copies between the processes (`process_vm_readv` and its sibling): any memory of the peer will do.
    Cma,
    /// It is this process's own.
    Own,
    /// A device reads and writes it: it takes its time.
    Rdma,
}

impl Via {
    /// Its name in settings, logs and counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Cma => "cma",
            Self::Own => "local",
            Self::Rdma => "rdma",
        }
    }
}

impl PeerAddress {
    const fn of_kind(kind: PeerKind, tcp: SocketAddr) -> Self {
        Self { kind, node: NodeId(0), incarnation: Incarnation(0), shard: ShardId(0), tcp, shm: None }
    }

    /// Whoever of ours answers at this address, and at this Unix socket where it is on this host.
    #[must_use]
    pub fn native(tcp: SocketAddr, shm: Option<String>) -> Self {
        Self { shm, ..Self::of_kind(PeerKind::Native, tcp) }
    }

    /// This process.
    #[must_use]
    pub const fn local() -> Self {
        Self::of_kind(PeerKind::Local, NOWHERE)
    }

    /// A stock Mooncake engine.
    #[must_use]
    pub const fn mooncake(tcp: SocketAddr, version: u8) -> Self {
        Self::of_kind(PeerKind::Mooncake { version }, tcp)
    }

    /// A stock Mooncake engine that devices reach, by the host's name for what is known of it.
    #[must_use]
    pub const fn mooncake_rdma(object: u64) -> Self {
        Self::of_kind(PeerKind::MooncakeRdma { object }, NOWHERE)
    }

    /// A group of files, by the host's name for it.
    #[must_use]
    pub const fn file(object: u64) -> Self {
        Self::of_kind(PeerKind::File { object }, NOWHERE)
    }
}

/// The address of what is not reached over a network.
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
