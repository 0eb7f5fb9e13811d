//! Paths to a peer: how a lane or a copy moves its bytes.

/// Path of a connected lane: how it moves payloads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Path {
    /// Payloads follow their frames on a TCP stream.
    Stream,
    /// RDMA: as a stream, but a device moves payloads into place, and accesses segments without their owner's help. See
    /// [`Via`].
    Rdma,
    /// The peer is on this host: frames travel over shared memory, and the client copies the bytes. See [`Via`].
    Shared,
    /// This process itself: no frames travel.
    Local,
    /// Data port of a stock Mooncake engine. Its driver translates our frames to that protocol and back.
    Mooncake,
    /// Memory of a stock Mooncake engine, which a device of ours reads and writes.
    MooncakeRdma,
    /// Files of this host, through io_uring.
    File,
}

impl Path {
    /// Every path.
    pub const ALL: &[Self] =
        &[Self::Stream, Self::Rdma, Self::Shared, Self::Local, Self::Mooncake, Self::MooncakeRdma, Self::File];

    /// Returns the name in settings, logs and counters.
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

    /// Returns true if lanes of this path begin with a handshake: the peer speaks our protocol.
    pub(crate) const fn is_greeted(self) -> bool {
        matches!(self, Self::Stream | Self::Rdma | Self::Shared)
    }

    /// Returns true if the peer executes writes in the order of their frames: a payload is not written before the
    /// frames in front of it are executed. Where the client writes by itself, only the reply to a frame confirms that
    /// it was executed.
    pub(crate) const fn writes_in_order(self) -> bool {
        matches!(self, Self::Stream)
    }
}

/// Transport to a peer: a path, further distinguished by how bytes move over it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Transport {
    /// Our own protocol over TCP.
    Tcp,
    /// Our own protocol over RDMA, where devices move the bytes.
    Rdma,
    /// Copies through a mapping of the peer's memory.
    Shm,
    /// Copies by the kernel between the processes (CMA).
    Cma,
    /// Copies within this process.
    Local,
    /// TCP protocol of stock Mooncake engines.
    Mooncake,
    /// RDMA access to the memory of stock Mooncake engines.
    MooncakeRdma,
    /// Files of this host.
    File,
}

impl Transport {
    /// Every transport.
    pub const ALL: &[Self] =
        &[Self::Tcp, Self::Rdma, Self::Shm, Self::Cma, Self::Local, Self::Mooncake, Self::MooncakeRdma, Self::File];

    /// Returns the transport of a slice on this path; `via` matters on the shared path only.
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

    /// Returns the name in settings, logs and counters.
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

/// Way of copying a range of a segment without the help of its owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Via {
    /// Through a mapping of the region in this process.
    Map,
    /// By the kernel, between the processes (`process_vm_readv` and its counterpart): works for any memory of the peer.
    Cma,
    /// Within this process, which owns the segment.
    Own,
    /// By an RDMA device, asynchronously.
    Rdma,
}

impl Via {
    /// Returns the name in settings, logs and counters.
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
