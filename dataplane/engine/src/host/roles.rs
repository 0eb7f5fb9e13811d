//! Who is at the other end of each connection, and what is lent for payloads that leave.

use kvplane_client::{LaneId, SliceId};
use kvplane_proto::RequestId;
use kvplane_store::service::{Hold, LeavingPayload, Path, PeerKey};
use kvplane_transport::ConnectionId;

/// A connection of one of the drivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Tcp(ConnectionId),
    Shm(ConnectionId),
    Rdma(ConnectionId),
    /// To a stock engine; ours are the only requests on it.
    Mooncake(ConnectionId),
}

/// Drivers with peers that ask us: the first ones by their numbers.
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

    pub(super) const fn path(self) -> Path {
        match self {
            Self::Tcp(_) | Self::Rdma(_) | Self::Mooncake(_) => Path::Stream,
            Self::Shm(_) => Path::Shared,
        }
    }

    /// The service's name for the peer, by driver.
    ///
    /// # Panics
    /// For a lane to a stock engine, which asks the service nothing.
    pub(super) const fn peer(self) -> PeerKey {
        assert!(!matches!(self, Self::Mooncake(_)), "a stock engine is no peer of the service");
        let id = self.id();
        PeerKey { index: id.index * SERVING_DRIVERS + self.driver() as u32, generation: id.generation }
    }

    /// The inverse of [`Self::peer`].
    pub(super) const fn of_peer(peer: PeerKey) -> Self {
        let id = ConnectionId { index: peer.index / SERVING_DRIVERS, generation: peer.generation };
        match peer.index % SERVING_DRIVERS {
            0 => Self::Tcp(id),
            1 => Self::Shm(id),
            _ => Self::Rdma(id),
        }
    }
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Role {
    /// Nothing is known of it.
    #[default]
    None,
    /// A peer asks us.
    Served,
    /// We ask a peer; the slice whose payload is arriving.
    Lane(LaneId, Option<SliceId>),
    /// Over it we ask for an RDMA connection for this lane.
    Asking(LaneId),
    /// This RDMA connection was talked about on it, and lasts as long.
    Carrier(ConnectionId),
}

/// The roles of all connections, by driver and position.
#[derive(Default)]
pub(super) struct Roles {
    entries: [Vec<(u32, Role)>; 4],
}

impl Roles {
    pub(super) fn set(&mut self, link: Link, role: Role) {
        let ConnectionId { index, generation } = link.id();
        let entries = &mut self.entries[link.driver()];
        if entries.len() <= index as usize {
            entries.resize(index as usize + 1, (0, Role::None));
        }
        entries[index as usize] = (generation, role);
    }

    pub(super) fn get(&self, link: Link) -> Role {
        let ConnectionId { index, generation } = link.id();
        match self.entries[link.driver()].get(index as usize) {
            Some(&(held, role)) if held == generation => role,
            _ => Role::None,
        }
    }
}

/// What waits for a payload to have left.
#[derive(Debug)]
pub(super) enum LentPayload {
    /// What the service holds for an answer.
    Answer(Hold, LeavingPayload),
    /// The caller's memory, for this request.
    Upload(RequestId),
}

/// Requests whose payloads have not left yet, by the position of their ids; as long as the client's own table of them.
///
/// An id is not reused before its payload has left: it is free again by its answer, which is not taken before, or by
/// the end of its connection, which is reported after.
#[derive(Default)]
pub(super) struct Uploads {
    generations: Vec<Option<u32>>,
}

impl Uploads {
    pub(super) fn start(&mut self, request: RequestId) {
        let index = request.index as usize;
        if self.generations.len() <= index {
            self.generations.resize(index + 1, None);
        }
        self.generations[index] = Some(request.generation);
    }

    pub(super) fn finish(&mut self, request: RequestId) {
        assert!(self.is_unfinished(request), "the payload of {request:?} left twice");
        self.generations[request.index as usize] = None;
    }

    pub(super) fn is_unfinished(&self, request: RequestId) -> bool {
        self.generations.get(request.index as usize) == Some(&Some(request.generation))
    }
}
