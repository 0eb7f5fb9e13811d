//! Peers: the shards that requests go to, found by address, opened on first use, and closed when the map drops them.
//!
//! A peer that the caller opened keeps its id until the caller closes it; one that only the map names, until the map
//! drops it. Either frees its entry when its last lane is gone, so that restarts of nodes do not accumulate entries.

use core::ops::{Index, IndexMut};
use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::limits::Limits;

use super::fences::Fences;
use super::group::Group;
use crate::sched::{RetryBudget, Tail};
use crate::tables::FreeList;
use crate::types::{Near, PeerAddress, PeerId, PeerIncarnation};

/// A shard, and the paths to it in the order of preference: shared memory, if any, first.
pub(crate) struct Peer {
    pub(crate) address: PeerAddress,
    pub(crate) groups: Vec<Group>,
    /// Distinguishes the peer from all others that had its entry or have the same address.
    pub(crate) incarnation: PeerIncarnation,
    /// Distances of the peer's devices from its memory, if the peer has reported them.
    pub(crate) near: Near,
    pub(crate) retries: RetryBudget,
    pub(crate) fences: Fences,
    /// Latency tail of its gets.
    pub(crate) tail: Tail,
    /// Time of the last frame that arrived from it.
    pub(crate) heard_ns: u64,
    /// Suspicion of it, if there is one.
    pub(crate) suspicion: Option<Suspicion>,
    /// True if the caller opened it: it stays until the caller closes it. Others come and go with the maps.
    pub(crate) pinned: bool,
    /// True after it was closed: its entry is freed when its last lane is gone.
    pub(crate) departed: bool,
}

/// Time for which a peer is suspect that owes no reply any more, in longest hedging delays: then it is tried again.
const SUSPECT_HEDGES: u64 = 4;

/// Suspicion of a peer: it was silent for the hedging delay while it owed a reply, and nothing has arrived from it
/// since.
///
/// Requests that a replica owner can answer go there first, and are hedged to the suspect. A suspicion decides nothing
/// else: a wrong one costs a round trip for objects without a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Suspicion {
    /// Time at which it began.
    pub(crate) since_ns: u64,
    /// Time until which it lasts, even if the peer owes no reply.
    pub(crate) until_ns: u64,
}

impl Suspicion {
    /// Returns a suspicion from now on, or the one before with a new end; `hedge_ns` is the longest hedging delay.
    fn renewed(before: Option<Self>, now_ns: u64, hedge_ns: u64) -> Self {
        let since_ns = before.map_or(now_ns, |before| before.since_ns);
        Self { since_ns, until_ns: now_ns.saturating_add(hedge_ns.saturating_mul(SUSPECT_HEDGES)) }
    }
}

impl Peer {
    /// Records a frame that has arrived from it: it is alive.
    #[inline]
    pub(crate) const fn heard(&mut self, now_ns: u64) {
        (self.heard_ns, self.suspicion) = (now_ns, None);
    }

    /// Makes it suspect, as it has owed a reply for so long, unless something has arrived from it meanwhile.
    pub(crate) fn suspect(&mut self, for_ns: u64, now_ns: u64, hedge_ns: u64) {
        if self.heard_ns.saturating_add(for_ns) <= now_ns {
            self.suspicion = Some(Suspicion::renewed(self.suspicion, now_ns, hedge_ns));
        }
    }

    /// Returns the most rails of one of its paths.
    pub(crate) fn most_rails(&self) -> usize {
        self.groups.iter().map(|group| group.rails.len()).max().unwrap_or(1)
    }
}

/// All peers, by their ids and by their addresses.
pub(crate) struct Peers {
    list: FreeList<Peer>,
    index: BTreeMap<PeerAddress, PeerId>,
    /// Number of incarnations so far.
    incarnations: u32,
    /// Unacknowledged fences of closed peers, oldest first.
    left_fences: VecDeque<(PeerAddress, Fences)>,
}

impl Peers {
    pub(crate) const fn new() -> Self {
        Self { list: FreeList::new(), index: BTreeMap::new(), incarnations: 0, left_fences: VecDeque::new() }
    }

    /// Returns the peer at an address, if it is known.
    pub(crate) fn find(&self, address: &PeerAddress) -> Option<PeerId> {
        self.index.get(address).copied()
    }

    /// Adds a peer without paths. It inherits the unacknowledged fences of a closed peer at its address.
    pub(crate) fn add(&mut self, address: PeerAddress, near: Near) -> PeerId {
        self.incarnations = self.incarnations.checked_add(1).expect("fewer than 2^32 peers in the life of a client");
        let left = self.left_fences.iter().position(|(of, _)| *of == address);
        let left = left.and_then(|position| self.left_fences.remove(position));
        let peer = PeerId(self.list.add(Peer {
            address: address.clone(),
            groups: Vec::new(),
            incarnation: PeerIncarnation(self.incarnations),
            near,
            retries: RetryBudget::new(Limits::RETRY_BURST),
            fences: left.map_or_else(Fences::default, |(_, fences)| fences),
            tail: Tail::default(),
            heard_ns: 0,
            suspicion: None,
            pinned: false,
            departed: false,
        }));
        self.index.insert(address, peer);
        peer
    }

    /// Closes a peer: its address is free for another.
    pub(crate) fn depart(&mut self, peer: PeerId) {
        let entry = &mut self.list[peer.0 as usize];
        entry.departed = true;
        self.index.remove(&entry.address);
    }

    /// Keeps the unacknowledged fences of a closed peer, for when it is opened again.
    pub(crate) fn leave_fences(&mut self, peer: PeerId) {
        let entry = &mut self.list[peer.0 as usize];
        let fences = core::mem::take(&mut entry.fences);
        if fences.is_empty() {
            return;
        }
        if self.left_fences.len() >= Limits::FENCED_PEERS {
            self.left_fences.pop_front();
        }
        self.left_fences.push_back((entry.address.clone(), fences));
    }

    /// Frees the entry of a closed peer.
    pub(crate) fn give_back(&mut self, peer: PeerId) {
        self.list.give_back([peer.0]);
    }

    pub(crate) fn get(&self, peer: u32) -> Option<&Peer> {
        self.list.get(peer as usize)
    }

    pub(crate) fn get_mut(&mut self, peer: u32) -> Option<&mut Peer> {
        self.list.get_mut(peer as usize)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (PeerId, &Peer)> {
        (0..).map(PeerId).zip(self.list.iter())
    }

    pub(crate) fn len(&self) -> u32 {
        self.list.len() as u32
    }

    /// Changes the addresses of the closed peers whose fences are kept.
    #[cfg(test)]
    pub(crate) fn move_left(&mut self) {
        self.left_fences.iter_mut().for_each(|(address, _)| address.node.0 += 1);
    }

    #[cfg(test)]
    pub(crate) fn left_fences(&self) -> usize {
        self.left_fences.len()
    }

    #[cfg(test)]
    pub(crate) fn addresses(&self) -> usize {
        self.index.len()
    }
}

impl Index<u32> for Peers {
    type Output = Peer;

    #[inline]
    fn index(&self, peer: u32) -> &Peer {
        &self.list[peer as usize]
    }
}

impl IndexMut<u32> for Peers {
    #[inline]
    fn index_mut(&mut self, peer: u32) -> &mut Peer {
        &mut self.list[peer as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspicion_that_is_renewed_keeps_its_beginning() {
        let first = Suspicion::renewed(None, 100, 10);
        assert_eq!(first, Suspicion { since_ns: 100, until_ns: 140 });
        assert_eq!(Suspicion::renewed(Some(first), 150, 10), Suspicion { since_ns: 100, until_ns: 190 });
    }

    #[test]
    fn a_reopened_peer_has_a_new_incarnation_and_inherits_fences() {
        let mut peers = Peers::new();
        let address = PeerAddress::file(1);
        let first = peers.add(address.clone(), Near::default());
        peers[first.0].fences.add(9);
        assert_eq!(peers.find(&address), Some(first));
        peers.depart(first);
        peers.leave_fences(first);
        assert_eq!((peers.find(&address), peers.left_fences()), (None, 1));
        let other = peers.add(PeerAddress::file(2), Near::default());
        assert!(peers[other.0].fences.is_empty());
        let second = peers.add(address.clone(), Near::default());
        assert_eq!((peers.find(&address), peers.left_fences()), (Some(second), 0));
        assert!(!peers[second.0].fences.is_empty());
        assert_ne!(peers[first.0].incarnation, peers[second.0].incarnation);
    }
}
