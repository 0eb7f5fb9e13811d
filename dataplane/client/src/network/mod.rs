//! Network of a client: peers, the rails of their paths, the lanes of those, and the queues for them.
//!
//! This layer knows slices by their positions only; the layers above decide where they go.

mod choose;
mod connect;
mod fences;
mod group;
mod handshake;
mod lane;
mod lanes;
mod locality;
mod peers;
mod rails;

use std::collections::VecDeque;

use kvplane_proto::frame::Header;
use kvplane_proto::message::Operation;

pub(crate) use choose::{SMALL_WINDOW_BYTES, is_suspect};
pub(crate) use fences::{connection_number, is_change};
pub(crate) use group::{Ask, Group};
pub(crate) use handshake::{Handshakes, Refusal, check_peer};
pub(crate) use lane::{Cause, Lane};
pub use lane::{Endpoint, EndpointEvent};
pub(crate) use lanes::Lanes;
pub(crate) use locality::{Locality, Places};
pub(crate) use peers::Peers;
pub(crate) use rails::{RailEntry, Rails};

use crate::counts::RailBooks;
use handshake::hello;
use locality::{DeviceBuffers, SameNode};

use crate::host::HostSide;
use crate::sched::Rail;
use crate::types::{LaneId, Near, Path, PeerAddress, PeerId, PeerKind, RailAddress, RailDevices, Request};

/// Assumed rates of a rail before it is measured: memory, and a 25 Gb/s port or a fast disk.
const SAME_HOST_BYTES_PER_SECOND: u64 = 8_000_000_000;
const NETWORK_BYTES_PER_SECOND: u64 = 3_125_000_000;

/// Peers, rails and lanes.
pub(crate) struct Network {
    pub(crate) host: HostSide,
    pub(crate) handshakes: Handshakes,
    pub(crate) peers: Peers,
    pub(crate) rails: Rails,
    pub(crate) lanes: Lanes,
    pub(crate) locality: Locality,
    /// The host's buffers of device memory, which only RDMA devices access.
    pub(crate) device_buffers: DeviceBuffers,
    /// Groups with queued slices that may have room now: peer, and number.
    dirty_groups: VecDeque<(u32, u8)>,
}

impl Network {
    pub(crate) fn new(host: HostSide) -> Self {
        Self {
            host,
            handshakes: Handshakes::default(),
            peers: Peers::new(),
            rails: Rails::new(),
            lanes: Lanes::new(),
            locality: Locality::default(),
            device_buffers: DeviceBuffers::default(),
            dirty_groups: VecDeque::new(),
        }
    }

    /// Returns the peer at this address, with paths over these rails, or over devices with this locality. A known peer
    /// keeps its present rails.
    pub(crate) fn peer_at(&mut self, address: PeerAddress, rails: &[RailAddress], near: Near) -> PeerId {
        if let Some(peer) = self.peers.find(&address) {
            return peer;
        }
        let (kind, tcp, is_near) = (address.kind, address.tcp, address.shm.is_some());
        let peer = self.peers.add(address, near);
        let several = self.host.config.lanes.max(1);
        match kind {
            PeerKind::Native => {
                if (self.host.config.shared || self.host.config.cma) && is_near {
                    self.add_group(peer, Path::Shared, &[], 1);
                }
                let (rdma, plain): (Vec<_>, Vec<_>) = rails.iter().copied().partition(|rail| rail.rdma.is_some());
                let rdma = if rdma.is_empty() { self.rdma_rails(tcp, peer) } else { rdma };
                if !rdma.is_empty() {
                    self.add_group(peer, Path::Rdma, &rdma, several);
                }
                // A peer without another path is reached by streams even if these are disabled.
                if self.host.config.stream || self.peers[peer.0].groups.is_empty() {
                    self.add_group(peer, Path::Stream, &plain, several);
                }
            }
            PeerKind::Local => self.add_group(peer, Path::Local, &[], 1),
            PeerKind::Mooncake { .. } => self.add_group(peer, Path::Mooncake, rails, several),
            PeerKind::MooncakeRdma { .. } => {
                let rails = self.rdma_rails(tcp, peer);
                self.add_group(peer, Path::MooncakeRdma, &rails, several);
            }
            PeerKind::File { .. } => self.add_group(peer, Path::File, &[], 1),
        }
        peer
    }

    /// Returns the rails from our devices to the peer's.
    fn rdma_rails(&self, tcp: std::net::SocketAddr, peer: PeerId) -> Vec<RailAddress> {
        let pairs = self.locality.near().pairs(self.host.config.rdma.len(), &self.peers[peer.0].near);
        let rail = |devices: RailDevices| {
            let speed = self.host.config.rdma[usize::from(devices.own)];
            let bytes_per_second = if speed == 0 { NETWORK_BYTES_PER_SECOND } else { speed };
            RailAddress { local: None, tcp, bytes_per_second, tier: 0, rdma: Some(devices) }
        };
        pairs.into_iter().map(rail).collect()
    }

    /// Opens the rails of a path, with `lanes` lanes each; without `addresses` there is one, to the peer's own address.
    fn add_group(&mut self, peer: PeerId, path: Path, addresses: &[RailAddress], lanes: u16) {
        let number = self.peers[peer.0].groups.len() as u8;
        let stated = match path {
            Path::Shared | Path::Local => SAME_HOST_BYTES_PER_SECOND,
            Path::Stream | Path::Rdma | Path::Mooncake | Path::MooncakeRdma | Path::File => NETWORK_BYTES_PER_SECOND,
        };
        let mut rails = Vec::new();
        for position in 0..addresses.len().max(1) {
            let address = addresses.get(position).copied();
            let (speed, tier) = address.map_or((stated, 0), |address| (address.bytes_per_second, address.tier));
            let entry = RailEntry {
                rail: Rail::new(speed, tier),
                peer: peer.0,
                group: number,
                lanes: Vec::new(),
                address,
                path,
                books: RailBooks::default(),
            };
            let rail = self.rails.add(entry);
            let first = position as u16 * lanes;
            let lanes = (0..lanes).map(|lane| self.lanes.add(peer, rail, path, first + lane)).collect();
            self.rails[rail].lanes = lanes;
            rails.push(rail);
        }
        self.peers[peer.0].groups.push(Group::new(path, rails));
    }

    /// Returns every lane of a peer.
    pub(crate) fn lanes_of(&self, peer: PeerId) -> Vec<u32> {
        let rails = self.peers[peer.0].groups.iter().flat_map(|group| &group.rails);
        rails.flat_map(|&rail| self.rails[rail].lanes.iter().copied()).collect()
    }

    /// Returns the network path of a lane, if its peer was opened with several: the host connects from its local
    /// address.
    pub(crate) fn rail_of(&self, lane: LaneId) -> Option<&RailAddress> {
        self.rails[self.lanes.look(lane)?.rail].address.as_ref()
    }

    /// Returns true if a request is for a segment of a closed peer.
    pub(crate) fn asks_departed(&self, request: &Request) -> bool {
        request.peer().is_some_and(|peer| self.peers[peer.0].departed)
    }

    /// Returns the hello of a lane.
    pub(crate) fn hello_of(&self, lane: u32) -> Vec<u8> {
        let entry = &self.lanes[lane];
        hello(&self.host.config, &self.peers[entry.peer.0].address, entry.number, entry.id(lane))
    }

    /// Handles a challenge. Returns the frame to send, or the reason not to use the shard.
    pub(crate) fn challenged(&mut self, lane: u32, body: &[u8]) -> Result<(Header, Vec<u8>), Refusal> {
        let hello = self.hello_of(lane);
        self.handshakes.challenged(&self.host.config, &mut self.lanes[lane].connection.challenged, &hello, body)
    }

    /// Verifies the shard's own proof. Returns the welcome without it.
    pub(crate) fn checked_welcome<'a>(
        &self,
        lane: u32,
        operation: Operation,
        body: &'a [u8],
    ) -> Result<&'a [u8], Refusal> {
        let last = self.lanes[lane].connection.challenged.as_deref();
        self.handshakes.checked_welcome(last, &self.hello_of(lane), operation, body)
    }

    /// Returns the proof of a renewed credential for a lane in use that was challenged.
    pub(crate) fn prove_again(&mut self, lane: u32) -> Option<(LaneId, Header, Vec<u8>)> {
        let entry = &self.lanes[lane];
        if entry.state != Endpoint::Ready || entry.connection.challenged.is_none() {
            return None;
        }
        let (id, hello) = (entry.id(lane), self.hello_of(lane));
        let last = &mut self.lanes[lane].connection.challenged;
        let (header, body) = self.handshakes.prove_again(&self.host.config, last, &hello)?;
        Some((id, header, body))
    }

    pub(crate) fn mark_group(&mut self, peer: u32, number: u8) {
        let group = &mut self.peers[peer].groups[usize::from(number)];
        if !group.dirty && !group.is_empty() {
            group.dirty = true;
            self.dirty_groups.push_back((peer, number));
        }
    }
    #[inline]
    pub(crate) fn mark_group_of(&mut self, lane: u32) {
        let rail = &self.rails[self.lanes[lane].rail];
        self.mark_group(rail.peer, rail.group);
    }

    /// Returns the number of groups with queued slices that may have room now.
    pub(crate) fn dirty_groups(&self) -> usize {
        self.dirty_groups.len()
    }

    /// Removes and returns the group that has waited longest; `None` if its peer was closed meanwhile.
    pub(crate) fn take_dirty_group(&mut self) -> Option<(u32, u8)> {
        let (peer, number) = self.dirty_groups.pop_front()?;
        self.peers[peer].groups.get_mut(usize::from(number))?.dirty = false;
        Some((peer, number))
    }

    /// Returns true if lanes have frames to send, or groups queued slices that may have room now.
    pub(crate) fn is_dirty(&self) -> bool {
        self.lanes.dirty() + self.dirty_groups.len() > 0
    }

    /// Returns a lane whose alarm has expired, and clears the alarm.
    pub(crate) fn due_alarm(&mut self) -> Option<u32> {
        let lane = self.host.timers.due_alarm(self.host.now_ns)?;
        self.lanes.set_alarm(&mut self.host.timers, lane, None);
        Some(lane)
    }

    /// Compares the NUMA nodes of memory at these places with those of a rail's devices; `None` on a rail without
    /// devices.
    #[inline]
    pub(crate) fn nodes_of(&self, rail: u32, peer: u32, places: Places) -> Option<SameNode> {
        let devices = self.rails[rail].address?.rdma?;
        Some(self.locality.nodes_of(devices, &self.peers[peer].near, places))
    }
}
