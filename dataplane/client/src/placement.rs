//! Placement: owner and replica owners of an object, by the map in use, or by slot for a client without a map.

use kvplane_proto::digest::Digest;
use kvplane_proto::flags::FrameFlags;
use kvplane_proto::ids::{Epoch, ShardId, Slot};
use kvplane_proto::map::{ClusterMap, MAX_REPLICA_OWNERS, Owner, OwnerTable};
use kvplane_proto::message::Operation;

use crate::network::{Network, is_suspect};
use crate::tables::Slice;
use crate::types::{Near, PeerAddress, PeerId, PeerKind, Request};

/// Interval between requests to the host for a newer map.
const MAP_AGAIN_NS: u64 = 500_000_000;

/// Peer of each slot, for a client that has these instead of a map.
type SlotPeers = Vec<Option<PeerId>>;

/// Source of ownership: a map, or peers given by slot.
#[derive(Default)]
pub(crate) struct Placement {
    map: Option<(ClusterMap, OwnerTable)>,
    /// Peers of the map's owners, resolved on first use: one row for each member.
    owner_peers: Vec<Vec<Option<PeerId>>>,
    /// Peer that serves each slot, instead of the map's owners, and the epoch of the requests.
    sources: Option<(Epoch, SlotPeers)>,
    /// Time of the last request to the host for a newer map; reset by the next map.
    map_wanted_ns: Option<u64>,
}

impl Placement {
    /// Sets the map in use; returns false if the present one is as new or newer.
    pub(crate) fn set_map(&mut self, map: ClusterMap) -> bool {
        if self.map.as_ref().is_some_and(|(old, _)| old.epoch >= map.epoch) {
            return false;
        }
        let owners = OwnerTable::compute(&map);
        self.owner_peers = map.members.iter().map(|member| vec![None; member.shards.len()]).collect();
        self.map = Some((map, owners));
        self.map_wanted_ns = None;
        true
    }

    /// Forgets the map in use: epochs of the next map cannot be compared with its epoch.
    pub(crate) fn forget_map(&mut self) {
        self.map = None;
    }

    /// Sets the peers that serve the objects of each slot, by the map of this epoch.
    pub(crate) fn set_sources(&mut self, epoch: Epoch, sources: SlotPeers) {
        self.sources = Some((epoch, sources));
    }

    #[cfg(test)]
    pub(crate) fn map(&self) -> Option<&ClusterMap> {
        self.map.as_ref().map(|(map, _)| map)
    }

    /// Returns true if the client pulls from sources and uses no map.
    pub(crate) const fn is_of_sources(&self) -> bool {
        self.sources.is_some()
    }

    /// Returns the epoch of the map in use; 0 before the first.
    pub(crate) fn epoch(&self) -> Epoch {
        if let Some((epoch, _)) = &self.sources {
            return *epoch;
        }
        self.map.as_ref().map_or(Epoch(0), |(map, _)| map.epoch)
    }

    /// Returns true if the host should fetch a newer map, unless that was requested recently.
    pub(crate) fn wants_map(&mut self, now_ns: u64) -> bool {
        let wants = self.map_wanted_ns.is_none_or(|at_ns| now_ns >= at_ns.saturating_add(MAP_AGAIN_NS));
        if wants {
            self.map_wanted_ns = Some(now_ns);
        }
        wants
    }

    /// Returns the owner of an object.
    pub(crate) fn owner_peer(&mut self, network: &mut Network, digest: Digest) -> Option<PeerId> {
        if let Some((_, sources)) = &self.sources {
            return sources[usize::from(digest.slot().0)];
        }
        let (_, owners) = self.map.as_ref()?;
        let owner = owners.owner_of(digest)?;
        self.peer_of_owner(network, owner)
    }

    /// Returns a replica owner of an object, by its number in the order of the map.
    pub(crate) fn replica_peer(&mut self, network: &mut Network, digest: Digest, number: usize) -> Option<PeerId> {
        if self.is_of_sources() {
            return None;
        }
        let owner = *self.map.as_ref()?.1.owners(digest.slot()).get(1 + number)?;
        self.peer_of_owner(network, owner)
    }

    /// Returns the first replica owner of an object from this number on that is not known to be unreachable, or else
    /// the one with this number; with its number.
    pub(crate) fn reachable_replica(
        &mut self,
        network: &mut Network,
        digest: Digest,
        first: u8,
    ) -> Option<(u8, PeerId)> {
        let mut found = None;
        for number in first..MAX_REPLICA_OWNERS as u8 {
            let Some(peer) = self.replica_peer(network, digest, number.into()) else { break };
            if !network.is_down(peer) {
                return Some((number, peer));
            }
            found = found.or(Some((number, peer)));
        }
        found
    }

    /// Returns the first replica owner of an object whose owner is suspect that is neither suspect nor down, with its
    /// number.
    pub(crate) fn other_than_suspect(
        &mut self,
        network: &mut Network,
        digest: Digest,
        owner: PeerId,
    ) -> Option<(u8, PeerId)> {
        if !is_suspect(network, owner) {
            return None;
        }
        for number in 0..MAX_REPLICA_OWNERS as u8 {
            let other = self.replica_peer(network, digest, number.into())?;
            if other != owner && !network.is_down(other) && !is_suspect(network, other) {
                return Some((number, other));
            }
        }
        None
    }

    /// Returns the peer of an owner by the map in use.
    fn peer_of_owner(&mut self, network: &mut Network, owner: Owner) -> Option<PeerId> {
        let (map, _) = self.map.as_ref()?;
        let (member, shard) = (usize::from(owner.member), usize::from(owner.shard.0));
        if let Some(peer) = self.owner_peers[member][shard] {
            return Some(peer);
        }
        let address = address_of(map, member, shard, &network.host.config.host)?;
        let peer = network.peer_at(address, &[], Near::default());
        self.owner_peers[member][shard] = Some(peer);
        Some(peer)
    }

    /// Returns true if the map in use names a peer.
    pub(crate) fn names(&self, network: &Network, peer: PeerId) -> bool {
        let Some((map, _)) = &self.map else { return false };
        let address = &network.peers[peer.0].address;
        let member = map.members.binary_search_by_key(&address.node, |member| member.node);
        let shard = usize::from(address.shard.0);
        let named = member.ok().and_then(|member| address_of(map, member, shard, &network.host.config.host));
        named.as_ref() == Some(address)
    }

    /// Returns the number of replica owners of a slot by the map in use.
    pub(crate) fn replica_owners(&self, slot: Slot) -> usize {
        self.map.as_ref().map_or(0, |(_, owners)| owners.owners(slot).len().saturating_sub(1))
    }

    /// Returns the epoch by which a slice's request is routed, and the replica flags of its frame. A shard replicates
    /// and migrates by the map of its batch: by the newest map another shard may own the slot.
    pub(crate) fn routing_of(&self, slice: &Slice, of_batch: impl FnOnce() -> Epoch) -> (Epoch, FrameFlags) {
        match slice.request {
            Request::PutCopy(..) | Request::DropCopy(..) => (of_batch(), FrameFlags::REPLICATE),
            Request::GetCopy(..) | Request::ListCopy(..) => (of_batch(), FrameFlags::READ_REPLICA),
            Request::EndExport(..) => (of_batch(), FrameFlags::NONE),
            Request::Remove(_) | Request::RemoveHead(_) if self.is_of_sources() => (of_batch(), FrameFlags::NONE),
            _ if slice.is_of_replica() => (self.epoch(), FrameFlags::READ_REPLICA),
            _ => (self.epoch(), FrameFlags::NONE),
        }
    }

    /// Returns the flags that request replica leases, if the client spreads its gets, and the names of all replica
    /// owners. Nodes of versions that do not know the latter are not in a map with more than two replicas.
    pub(crate) fn replica_flags(&self, operation: Operation, spread: bool) -> FrameFlags {
        let gets = matches!(operation, Operation::Get | Operation::GetRange | Operation::Lookup);
        let puts = matches!(operation, Operation::Put | Operation::Commit | Operation::Seal);
        let replicas = self.map.as_ref().filter(|_| !self.is_of_sources()).map_or(1, |(map, _)| map.replicas);
        let leases = FrameFlags::NONE.with(FrameFlags::REPLICA_LEASE, gets && replicas > 1 && spread);
        leases.with(FrameFlags::REPLICA_OWNERS, (gets || puts) && replicas > 2)
    }

    /// Returns true if another owner may take over the object of a request. A segment has no other owner, nor does a
    /// request to a former owner.
    pub(crate) const fn has_successors(&self, request: &Request, fetches: bool) -> bool {
        request.peer().is_none() && !self.is_of_sources() && !fetches
    }

    /// Returns true if a request is never retried: a shard that replicates or migrates decides on the next step itself.
    pub(crate) const fn is_tried_once(&self, request: &Request) -> bool {
        match request {
            Request::PutCopy(..) | Request::GetCopy(..) | Request::ListCopy(..) => true,
            Request::DropCopy(..) | Request::EndExport(..) => true,
            Request::Remove(_) | Request::RemoveHead(_) => self.is_of_sources(),
            _ => false,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostSide;
    use crate::tests::rig::map;
    use crate::types::Config;

    #[test]
    fn owners_are_found_once_and_follow_the_map() {
        let mut network = Network::new(HostSide::new(Config::default()));
        let (mut placement, digest) = (Placement::default(), Digest::of(b"", b"key"));
        assert_eq!((placement.owner_peer(&mut network, digest), placement.epoch()), (None, Epoch(0)));
        assert!(placement.set_map(map(7, 2, 1)) && !placement.set_map(map(7, 1, 1)));
        let owner = placement.owner_peer(&mut network, digest);
        assert_eq!((owner.is_some(), placement.owner_peer(&mut network, digest)), (true, owner));
        assert_eq!((network.peers.len(), placement.epoch()), (1, Epoch(7)));
        placement.set_sources(Epoch(9), vec![None; usize::from(kvplane_proto::ids::SLOTS as u16)]);
        assert_eq!((placement.owner_peer(&mut network, digest), placement.epoch()), (None, Epoch(9)));
    }

    #[test]
    fn a_newer_map_is_requested_again_after_a_while() {
        let mut placement = Placement::default();
        let asked = [0, 1, MAP_AGAIN_NS - 1, MAP_AGAIN_NS, MAP_AGAIN_NS + 1].map(|at_ns| placement.wants_map(at_ns));
        assert_eq!(asked, [true, false, false, true, false]);
    }
}
