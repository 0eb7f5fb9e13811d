//! Identifiers of connections of all drivers, and the role of each connection.

use kvplane_client::{LaneId, SliceId};
use kvplane_store::service::{Path, PeerKey};
use kvplane_transport::ConnectionId;

/// Connection of one of the drivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Link {
    Tcp(ConnectionId),
    Shm(ConnectionId),
    Rdma(ConnectionId),
    /// A lane to a stock engine; only our requests go over it.
    Mooncake(ConnectionId),
}

/// Number of drivers over which peers send requests: those with the lowest numbers.
const SERVING_DRIVERS: u32 = 3;

impl Link {
    const fn id(self) -> ConnectionId {
        match self {
            Self::Tcp(id) | Self::Shm(id) | Self::Rdma(id) | Self::Mooncake(id) => id,
        }
    }

    const fn driver(self) -> usize {
        match self {
            Self::Tcp(_) => 0,
            Self::Shm(_) => 1,
            Self::Rdma(_) => 2,
            Self::Mooncake(_) => 3,
        }
    }

    pub(crate) const fn path(self) -> Path {
        match self {
            Self::Tcp(_) | Self::Rdma(_) | Self::Mooncake(_) => Path::Stream,
            Self::Shm(_) => Path::Shared,
        }
    }

    /// Returns the service's key of the peer.
    ///
    /// # Panics
    /// For a lane to a stock engine, which sends the service no request.
    pub(crate) const fn peer(self) -> PeerKey {
        assert!(!matches!(self, Self::Mooncake(_)), "a stock engine is no peer of the service");
        let id = self.id();
        PeerKey { index: id.index * SERVING_DRIVERS + self.driver() as u32, generation: id.generation }
    }

    /// Returns the link of a key: the inverse of [`Self::peer`].
    pub(crate) const fn of_peer(peer: PeerKey) -> Self {
        let id = ConnectionId { index: peer.index / SERVING_DRIVERS, generation: peer.generation };
        match peer.index % SERVING_DRIVERS {
            0 => Self::Tcp(id),
            1 => Self::Shm(id),
            _ => Self::Rdma(id),
        }
    }
}

/// Role of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Role {
    /// Unknown.
    #[default]
    None,
    /// A peer sends requests to the service.
    Served,
    /// The client sends requests to a peer; with the slice whose payload is arriving.
    Lane(LaneId, Option<SliceId>),
    /// An RDMA connection for this lane is to be offered over it.
    Offering(LaneId),
    /// This RDMA connection was offered over it, and lasts as long.
    Carrier(ConnectionId),
}

/// Roles of all connections, by driver and index.
#[derive(Default)]
pub(crate) struct Roles {
    entries: [Vec<(u32, Role)>; 4],
}

impl Roles {
    pub(crate) fn set(&mut self, link: Link, role: Role) {
        let ConnectionId { index, generation } = link.id();
        let entries = &mut self.entries[link.driver()];
        if entries.len() <= index as usize {
            entries.resize(index as usize + 1, (0, Role::None));
        }
        entries[index as usize] = (generation, role);
    }

    pub(crate) fn get(&self, link: Link) -> Role {
        let ConnectionId { index, generation } = link.id();
        match self.entries[link.driver()].get(index as usize) {
            Some(&(held, role)) if held == generation => role,
            _ => Role::None,
        }
    }
}
