//! Sources: the former owners from which an importer pulls the objects of its new slots, and the replica owners to
//! which an owner sends replicas, each with its peer.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{SLOTS, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};

use crate::client::{Client, SourcePeers};
use crate::types::{PeerAddress, PeerId, PeerKind};

/// Former owners and replica owners with an open peer.
#[derive(Debug, Default)]
pub struct Sources {
    /// Boot id of the importer's host; empty if unknown.
    host: String,
    peers: BTreeMap<ShardKey, PeerId>,
}

impl Sources {
    /// Returns the sources, none yet, of an importer on `host` (a boot id; empty if unknown): a former owner on the
    /// same host is reached over shared memory.
    #[must_use]
    pub const fn new(host: String) -> Self {
        Self { host, peers: BTreeMap::new() }
    }

    /// Returns the peer of a shard; `None` unless it is at present the source, or a replica owner, of any slot, or is
    /// to end its exports.
    #[must_use]
    pub fn peer(&self, source: &ShardKey) -> Option<PeerId> {
        self.peers.get(source).copied()
    }

    /// Makes `client` pull each slot from the shard that `source_of` returns, and opens the peers of the shards that
    /// `keepers_of` returns, for replicas, and those of `former` owners that are to end their exports; at the addresses
    /// of this map. Closes the peers that are no longer named.
    pub fn follow<'a>(
        &mut self,
        client: &mut Client,
        owners: &SlotOwners,
        source_of: impl Fn(Slot) -> Option<ShardKey>,
        keepers_of: impl Fn(Slot) -> &'a [ShardKey],
        former: impl Iterator<Item = ShardKey>,
        now_ns: u64,
    ) {
        let (host, mut peers) = (&self.host, BTreeMap::new());
        let mut peer_of = |client: &mut Client, key: ShardKey| {
            // Thousands of slots have few different owners.
            if let Some(peer) = peers.get(&key) {
                return Some(*peer);
            }
            let (its_host, address) = owners.address(key)?;
            let near = !host.is_empty() && *host == its_host;
            let address = PeerAddress {
                kind: PeerKind::Native,
                node: key.node,
                incarnation: key.incarnation,
                shard: key.shard,
                tcp: address.tcp,
                shm: address.shm.clone().filter(|_| near),
            };
            let peer = client.open_peer(address);
            peers.insert(key, peer);
            Some(peer)
        };
        let sources = SourcePeers::each(|slot| peer_of(client, source_of(slot)?));
        let mut others: BTreeSet<ShardKey> = former.collect();
        others.extend(slots().flat_map(&keepers_of));
        for other in others {
            peer_of(client, other);
        }
        client.set_sources(SourcePeers { epoch: owners.epoch, sources }, now_ns);
        for (key, peer) in std::mem::replace(&mut self.peers, peers) {
            if !self.peers.contains_key(&key) {
                client.close_peer(peer, now_ns);
            }
        }
    }
}

fn slots() -> impl Iterator<Item = Slot> {
    (0..SLOTS as u16).map(Slot)
}
