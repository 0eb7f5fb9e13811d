//! Sources: the former owners from which an importer pulls the objects of its new slots, each with its peer.

use std::collections::BTreeMap;

use kvplane_proto::ids::Slot;
use kvplane_proto::map::{ShardKey, SlotOwners};

use crate::client::{Client, SourcePeers};
use crate::types::{PeerAddress, PeerId, PeerKind};

/// Former owners with an open peer.
#[derive(Debug, Default)]
pub struct Sources {
    peers: BTreeMap<ShardKey, PeerId>,
}

impl Sources {
    /// Returns true if this shard is at present the source of any slot.
    #[must_use]
    pub fn contains(&self, source: &ShardKey) -> bool {
        self.peers.contains_key(source)
    }

    /// Makes `client` pull each slot from the shard that `source_of` returns, and send replicas to that of `keeper_of`,
    /// at the addresses of this map. Closes the peers that are no longer named. A former owner on `host` (a boot id;
    /// empty if unknown) is reached over shared memory.
    pub fn follow(
        &mut self,
        client: &mut Client,
        owners: &SlotOwners,
        host: &str,
        source_of: impl Fn(Slot) -> Option<ShardKey>,
        keeper_of: impl Fn(Slot) -> Option<ShardKey>,
        now_ns: u64,
    ) {
        let mut peers = BTreeMap::new();
        let mut peer_of = |client: &mut Client, key: ShardKey| {
            let (its_host, address) = owners.address(key)?;
            let near = !host.is_empty() && host == its_host;
            let address = PeerAddress {
                kind: PeerKind::Native,
                node: key.node,
                incarnation: key.incarnation,
                shard: key.shard,
                tcp: address.tcp,
                shm: address.shm.clone().filter(|_| near),
            };
            Some(*peers.entry(key).or_insert_with(|| client.open_peer(address)))
        };
        let sources = SourcePeers::each(|slot| peer_of(client, source_of(slot)?));
        let replica_keepers = SourcePeers::each(|slot| peer_of(client, keeper_of(slot)?));
        client.set_sources(SourcePeers { epoch: owners.epoch, sources, replica_keepers }, now_ns);
        for (key, peer) in std::mem::replace(&mut self.peers, peers) {
            if !self.peers.contains_key(&key) {
                client.close_peer(peer, now_ns);
            }
        }
    }
}
