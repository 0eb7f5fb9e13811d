//! The shards that requests go to: found by address, opened on first use, left when the map drops them.
//!
//! A peer that the caller opened keeps its id until the caller closes it; one that only the map named, until the map
//! drops it. Either gives its place back when its last lane is gone, so that restarts of nodes do not add up.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::ShardId;
use kvplane_proto::limits::Limits;
use kvplane_proto::map::{ClusterMap, Owner};

use super::dispatch::{Group, RailEntry};
use super::drafts::PeerIncarnation;
use super::fences::Fences;
use super::lane::{Cause, Endpoint, Lane};
use super::metrics::RailBooks;
use super::near::{Near, Place};
use super::options::{RailAddress, RailDevices};
use super::path::{Path, PeerKind, Transport, Via};
use super::table::NOWHERE;
use super::types::{LaneId, PeerAddress, PeerId, Request};
use super::{Client, Peer};
use crate::sched::{Rail, RetryBudget};

/// What a rail is taken to serve before it was measured: memory, and a 25 Gb/s port or a fast disk.
const SAME_HOST_BYTES_PER_SECOND: u64 = 8_000_000_000;
const NETWORK_BYTES_PER_SECOND: u64 = 3_125_000_000;
/// How long a path that the peer refused is left alone.
const REFUSED_NS: u64 = 60_000_000_000;

impl Client {
    /// The peer at this address; the same one when it is known already.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        self.open_peer_over(address, &[])
    }

    /// The peer at this address, reached over these rails (at most [`Limits::RAILS`]; further ones are not used); its
    /// own address names it and is not used beside them. A peer that is known already keeps the rails that it has.
    pub fn open_peer_over(&mut self, address: PeerAddress, rails: &[RailAddress]) -> PeerId {
        let peer = self.peer_at(address, &rails[..rails.len().min(Limits::RAILS)], Near::default());
        self.peers[peer.0 as usize].pinned = true;
        peer
    }

    /// The peer at this address, whose devices are this near to its memory: see [`Near::pairs`]. A peer that is known
    /// already keeps what it has.
    pub fn open_peer_near(&mut self, address: PeerAddress, near: Near) -> PeerId {
        let peer = self.peer_at(address, &[], near);
        self.peers[peer.0 as usize].pinned = true;
        peer
    }

    /// Says where a buffer of the host's is, by the host's number of the place.
    pub fn set_buffer_place(&mut self, buffer: u32, place: Place) {
        let index = buffer as usize;
        if index >= self.places.len() {
            if place == Place::UNKNOWN {
                return;
            }
            self.places.resize(index + 1, Place::UNKNOWN);
        }
        self.places[index] = place;
    }

    /// Leaves a peer that the caller opened. What is still asked of its segments ends with
    /// [`Status::Stale`](kvplane_proto::status::Status::Stale), as soon as nothing touches its memory any more. The id
    /// means nothing from now on, and another peer may get it; a peer that the map in use names as well stays for that.
    /// False for an id that the caller has not open.
    pub fn close_peer(&mut self, peer: PeerId, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        let index = peer.0 as usize;
        let Some(entry) = self.peers.get_mut(index).filter(|entry| entry.pinned) else { return false };
        entry.pinned = false;
        let entry = &self.peers[index];
        if self.map.as_ref().is_some_and(|(map, _)| self.names(map, entry)) {
            return true;
        }
        let slices = &self.slices;
        let parked = self.timers.take_parked(|id| {
            slices.get(id.index, id.generation).is_some_and(|slice| slice.request.peer() == Some(peer))
        });
        self.depart(index);
        for id in parked {
            self.route(id);
        }
        true
    }

    fn peer_at(&mut self, address: PeerAddress, rails: &[RailAddress], near: Near) -> PeerId {
        if let Some(&peer) = self.peer_index.get(&address) {
            return peer;
        }
        self.incarnations = self.incarnations.checked_add(1).expect("2^32 peers");
        let peer = PeerId(self.peers.add(Peer {
            incarnation: PeerIncarnation(self.incarnations),
            near,
            ..Peer::new(address.clone())
        }));
        self.take_left_fences(peer);
        let several = self.config.lanes.max(1);
        match address.kind {
            PeerKind::Native => {
                if (self.config.shared || self.config.cma) && address.shm.is_some() {
                    self.add_group(peer, Path::Shared, &[], 1);
                }
                let (rdma, plain): (Vec<_>, Vec<_>) = rails.iter().copied().partition(|rail| rail.rdma.is_some());
                let rdma = if rdma.is_empty() { self.rdma_rails(address.tcp, peer) } else { rdma };
                if !rdma.is_empty() {
                    self.add_group(peer, Path::Rdma, &rdma, several);
                }
                // A peer that offers nothing else is reached by streams even where only that was asked for.
                if self.config.stream || self.peers[peer.0 as usize].groups.is_empty() {
                    self.add_group(peer, Path::Stream, &plain, several);
                }
            }
            PeerKind::Local => self.add_group(peer, Path::Local, &[], 1),
            PeerKind::Mooncake { .. } => self.add_group(peer, Path::Mooncake, rails, several),
            PeerKind::MooncakeRdma { .. } => {
                let rails = self.rdma_rails(address.tcp, peer);
                self.add_group(peer, Path::MooncakeRdma, &rails, several);
            }
            PeerKind::File { .. } => self.add_group(peer, Path::File, &[], 1),
        }
        self.peer_index.insert(address, peer);
        peer
    }

    /// The rails from our devices to the peer's.
    fn rdma_rails(&self, tcp: std::net::SocketAddr, peer: PeerId) -> Vec<RailAddress> {
        let pairs = self.near.pairs(self.config.rdma.len(), &self.peers[peer.0 as usize].near);
        let rail = |devices: RailDevices| {
            let speed = self.config.rdma[usize::from(devices.own)];
            let bytes_per_second = if speed == 0 { NETWORK_BYTES_PER_SECOND } else { speed };
            RailAddress { local: None, tcp, bytes_per_second, tier: 0, rdma: Some(devices) }
        };
        pairs.into_iter().map(rail).collect()
    }

    /// Which RDMA devices this host has (see [`Config::rdma`](super::Config::rdma)), and how near they are to its
    /// memory. For peers that are opened from now on.
    pub fn set_rdma(&mut self, bytes_per_second: Vec<u64>, near: Near) {
        self.config.rdma = bytes_per_second;
        self.near = near;
    }

    /// The peer said that it does not do what this lane is for: for a while its path is not tried, and what waited for
    /// it goes elsewhere, or ends where there is no other. The host reports the lane gone after that.
    pub fn path_refused(&mut self, lane: LaneId, why: &str, now_ns: u64) {
        self.now_ns = now_ns;
        let Some(entry) = self.current(lane) else { return };
        let rail = entry.rail as usize;
        let rail = &mut self.rails[rail];
        let (peer, group) = (rail.peer as usize, usize::from(rail.group));
        rail.books.of(Transport::of(rail.path, Via::Rdma)).unavailable += 1;
        self.peers[peer].groups[group].unavailable = Some((now_ns.saturating_add(REFUSED_NS), why.to_owned()));
    }

    /// Opens the rails of a path, with `lanes` lanes each; without `addresses` there is one, to the peer's own.
    fn add_group(&mut self, peer: PeerId, path: Path, addresses: &[RailAddress], lanes: u16) {
        let number = self.peers[peer.0 as usize].groups.len() as u8;
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
            let lanes = (0..lanes).map(|lane| self.add_lane(peer, rail, path, first + lane)).collect();
            self.rails[rail as usize].lanes = lanes;
            rails.push(rail);
        }
        self.peers[peer.0 as usize].groups.push(Group::new(path, rails));
    }

    fn add_lane(&mut self, peer: PeerId, rail: u32, path: Path, number: u16) -> u32 {
        self.lanes.take(|| Lane::new(peer, rail, path, number), |lane| lane.renew(peer, rail, path, number))
    }

    /// Every lane of a peer.
    pub(super) fn lanes_of(&self, peer: usize) -> Vec<u32> {
        let rails = self.peers[peer].groups.iter().flat_map(|group| &group.rails);
        rails.flat_map(|&rail| self.rails[rail as usize].lanes.iter().copied()).collect()
    }

    /// The way that a lane takes, where its peer was opened with several: the host connects from that address.
    #[must_use]
    pub fn rail_of(&self, lane: LaneId) -> Option<&RailAddress> {
        let entry = self.lanes.get(lane.index as usize).filter(|entry| entry.generation == lane.generation)?;
        self.rails[entry.rail as usize].address.as_ref()
    }

    pub(super) fn owner_peer(&mut self, digest: Digest) -> Option<PeerId> {
        if let Some((_, sources)) = &self.sources {
            return sources[usize::from(digest.slot().0)];
        }
        let (_, owners) = self.map.as_ref()?;
        let owner = owners.owner_of(digest)?;
        self.peer_of_owner(owner)
    }

    /// The peer of an owner by the map in use.
    pub(super) fn peer_of_owner(&mut self, owner: Owner) -> Option<PeerId> {
        let (map, _) = self.map.as_ref()?;
        let (member, shard) = (usize::from(owner.member), usize::from(owner.shard.0));
        if let Some(peer) = self.owner_peers[member][shard] {
            return Some(peer);
        }
        let address = address_of(map, member, shard, &self.config.host)?;
        let peer = self.peer_at(address, &[], Near::default());
        self.owner_peers[member][shard] = Some(peer);
        Some(peer)
    }

    /// Leaves the shards that the map in use does not name any more: lanes are reset, what was queued goes elsewhere.
    pub(super) fn leave_departed(&mut self) {
        for index in 0..self.peers.len() {
            let peer = &self.peers[index];
            if peer.pinned || peer.departed || self.map.as_ref().is_some_and(|(map, _)| self.names(map, peer)) {
                continue;
            }
            self.depart(index);
        }
    }

    /// Nobody asks this peer any more: what is on its lanes and what waits for them is sent on its way again.
    fn depart(&mut self, index: usize) {
        self.peers[index].departed = true;
        self.peer_index.remove(&self.peers[index].address);
        for lane in self.lanes_of(index) {
            self.reset_lane(lane, Cause::Withdrawn);
        }
        self.leave_fences(index);
        for number in 0..self.peers[index].groups.len() {
            for slice in self.drain_group(index, number) {
                self.route(super::table::slice_id(slice, self.slices.generation(slice)));
            }
        }
        self.reclaim(PeerId(index as u32));
    }

    /// Whether a segment is asked for of a peer that was left.
    pub(super) fn asks_departed(&self, request: &Request) -> bool {
        request.peer().is_some_and(|peer| self.peers[peer.0 as usize].departed)
    }

    fn names(&self, map: &ClusterMap, peer: &Peer) -> bool {
        let member = map.members.binary_search_by_key(&peer.address.node, |member| member.node);
        let named = member
            .ok()
            .and_then(|member| address_of(map, member, usize::from(peer.address.shard.0), &self.config.host));
        named.as_ref() == Some(&peer.address)
    }

    /// Frees the place of a departed peer once nothing is left on its lanes.
    pub(super) fn reclaim(&mut self, peer: PeerId) {
        let lanes = self.lanes_of(peer.0 as usize);
        let quiet = lanes.iter().all(|&lane| {
            let lane = &self.lanes[lane as usize];
            lane.state == Endpoint::Idle && lane.list.first == NOWHERE
        });
        let entry = &mut self.peers[peer.0 as usize];
        let waits = entry.groups.iter().any(|group| !group.is_empty());
        if !entry.departed || entry.groups.is_empty() || !quiet || waits {
            return;
        }
        for group in core::mem::take(&mut entry.groups) {
            group.rails.iter().for_each(|&rail| self.keep_books(rail));
            self.rails.give_back(group.rails);
        }
        for &lane in &lanes {
            self.set_alarm(lane, None);
        }
        self.lanes.give_back(lanes);
        self.forget_slow(peer);
        self.peers.give_back([peer.0]);
    }
}

impl Peer {
    fn new(address: PeerAddress) -> Self {
        let retries = RetryBudget::new(Limits::RETRY_BURST);
        let fences = Fences::default();
        let (near, incarnation) = (Near::default(), PeerIncarnation(0));
        Self {
            address,
            groups: Vec::new(),
            incarnation,
            near,
            retries,
            fences,
            tail_ns: 0,
            pinned: false,
            departed: false,
        }
    }
}

fn address_of(map: &ClusterMap, member: usize, shard: usize, host: &str) -> Option<PeerAddress> {
    let member = map.members.get(member)?;
    let address = member.shards.get(shard)?;
    Some(PeerAddress {
        kind: PeerKind::Native,
        node: member.node,
        incarnation: member.incarnation,
        shard: ShardId(shard as u16),
        tcp: address.tcp,
        shm: address.shm.clone().filter(|_| !host.is_empty() && member.host == host),
    })
}
