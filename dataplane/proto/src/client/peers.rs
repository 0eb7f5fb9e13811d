//! The shards that requests go to: found by address, opened on first use, left when the map drops them.
//!
//! A peer that the caller opened keeps its id for good. One that only the map named gives its place back when it has
//! departed and its last lane is gone, so that restarts of nodes do not add up.

use super::lane::{Cause, Endpoint, Lane};
use super::path::{Path, PeerKind};
use super::table::NOWHERE;
use super::types::{PeerAddress, PeerId};
use super::{Client, Peer};
use crate::digest::Digest;
use crate::ids::ShardId;
use crate::map::ClusterMap;

impl Client {
    /// The peer at this address; the same one when it is known already.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        let peer = self.peer_at(address);
        self.peers[peer.0 as usize].pinned = true;
        peer
    }

    fn peer_at(&mut self, address: PeerAddress) -> PeerId {
        if let Some(&peer) = self.peer_index.get(&address) {
            return peer;
        }
        let peer = self.free_peers.pop().unwrap_or_else(|| {
            let next = PeerId(u32::try_from(self.peers.len()).expect("2^32 peers"));
            self.peers.push(Peer { address: address.clone(), lanes: Vec::new(), pinned: false, departed: false });
            next
        });
        let lanes = self.lanes_for(peer, &address);
        self.peer_index.insert(address.clone(), peer);
        self.peers[peer.0 as usize] = Peer { address, lanes, pinned: false, departed: false };
        peer
    }

    fn lanes_for(&mut self, peer: PeerId, address: &PeerAddress) -> Vec<u32> {
        let several = 0..self.config.lanes.max(1);
        match address.kind {
            PeerKind::Native => {
                let mut lanes = Vec::new();
                if (self.config.shared || self.config.cma) && address.shm.is_some() {
                    lanes.push(self.add_lane(peer, Path::Shared, 0));
                }
                // A peer that offers no shared memory is reached by streams even where only that was asked for.
                if self.config.stream || lanes.is_empty() {
                    lanes.extend(several.map(|number| self.add_lane(peer, Path::Stream, number)));
                }
                lanes
            }
            PeerKind::Local => vec![self.add_lane(peer, Path::Local, 0)],
            PeerKind::Mooncake { .. } => several.map(|number| self.add_lane(peer, Path::Mooncake, number)).collect(),
            PeerKind::File { .. } => vec![self.add_lane(peer, Path::File, 0)],
        }
    }

    fn add_lane(&mut self, peer: PeerId, path: Path, number: u16) -> u32 {
        if let Some(lane) = self.free_lanes.pop() {
            self.lanes[lane as usize].renew(peer, path, number);
            return lane;
        }
        self.lanes.push(Lane::new(peer, path, number));
        self.lanes.len() as u32 - 1
    }

    pub(super) fn owner_peer(&mut self, digest: Digest) -> Option<PeerId> {
        let (map, owners) = self.map.as_ref()?;
        let owner = owners.owner_of(digest)?;
        let (member, shard) = (usize::from(owner.member), usize::from(owner.shard.0));
        if let Some(peer) = self.owner_peers[member][shard] {
            return Some(peer);
        }
        let address = address_of(map, member, shard, &self.config.host)?;
        let peer = self.peer_at(address);
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
            self.peers[index].departed = true;
            self.peer_index.remove(&self.peers[index].address);
            for position in 0..self.peers[index].lanes.len() {
                let lane = self.peers[index].lanes[position];
                self.reset_lane(lane, Cause::Withdrawn);
                if self.lanes[lane as usize].state == Endpoint::Idle {
                    self.lanes[lane as usize].queue.clear();
                    for slice in self.slices_on(lane) {
                        self.leave_lane(slice);
                        self.route(super::table::slice_id(slice, self.slices.generation(slice)));
                    }
                }
            }
            self.reclaim(PeerId(index as u32));
        }
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
        let entry = &mut self.peers[peer.0 as usize];
        let quiet = entry.lanes.iter().all(|&lane| {
            let lane = &self.lanes[lane as usize];
            lane.state == Endpoint::Idle && lane.first == NOWHERE
        });
        if !entry.departed || entry.lanes.is_empty() || !quiet {
            return;
        }
        let lanes = core::mem::take(&mut entry.lanes);
        for &lane in &lanes {
            self.set_alarm(lane, None);
        }
        self.free_lanes.extend(lanes);
        self.free_peers.push(peer);
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
