//! Peers of the initiators: numbered, shared by all references to them, and closed after the last reference.
//!
//! A segment's description, and every batch that uses it, holds its peer. When the last of them is dropped, the peer,
//! which was replaced by a newer incarnation or whose segment was closed, is not needed any more: each initiator closes
//! it the next time that it is driven, within seconds at the latest by the progress thread.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvplane_client::{Near, PeerAddress};

/// Number of addresses remembered before unreferenced ones are removed.
const FORGET_AT: usize = 64;

/// Peer of the initiators.
pub(crate) struct Peer {
    /// Number in every initiator, unique within the engine.
    pub(crate) number: u64,
    pub(crate) address: PeerAddress,
    /// Segment name under which it was last opened.
    name: Mutex<String>,
    /// Affinity of its devices to its memory, as last announced.
    near: Mutex<Near>,
    departures: Departures,
}

impl Peer {
    pub(crate) fn name(&self) -> String {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn near(&self) -> Near {
        self.near.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Updates the affinity, for initiators that have not opened the peer yet.
    pub(crate) fn set_near(&self, near: Near) {
        *self.near.lock().unwrap_or_else(PoisonError::into_inner) = near;
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.departures.0.fetch_add(1, Ordering::Release);
    }
}

/// Number of dropped peers: a change tells an initiator to look for them.
#[derive(Clone, Default)]
pub(crate) struct Departures(Arc<AtomicU64>);

impl Departures {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Peers by address.
#[derive(Default)]
pub(crate) struct Peers {
    by_address: HashMap<PeerAddress, Weak<Peer>>,
    forget_at: usize,
    last: u64,
    departures: Departures,
}

impl Peers {
    /// Returns the peer at this address, last opened under this name.
    pub(crate) fn at(&mut self, address: &PeerAddress, name: &str) -> Arc<Peer> {
        if let Some(peer) = self.by_address.get(address).and_then(Weak::upgrade) {
            name.clone_into(&mut peer.name.lock().unwrap_or_else(PoisonError::into_inner));
            return peer;
        }
        let peer = self.add(address.clone(), name);
        if self.by_address.len() >= self.forget_at {
            self.by_address.retain(|_, peer| peer.strong_count() > 0);
            self.forget_at = FORGET_AT.max(2 * self.by_address.len());
        }
        self.by_address.insert(address.clone(), Arc::downgrade(&peer));
        peer
    }

    /// Creates the peer that represents one file.
    pub(crate) fn of_file(&mut self, name: &str) -> Arc<Peer> {
        let address = PeerAddress::file(self.last + 1);
        self.add(address, name)
    }

    fn add(&mut self, address: PeerAddress, name: &str) -> Arc<Peer> {
        self.last += 1;
        let departures = self.departures.clone();
        Arc::new(Peer {
            number: self.last,
            address,
            name: Mutex::new(name.to_owned()),
            near: Mutex::default(),
            departures,
        })
    }

    pub(crate) const fn departures(&self) -> &Departures {
        &self.departures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u64) -> PeerAddress {
        PeerAddress { node: kvplane_proto::NodeId(number), ..PeerAddress::native(([127, 0, 0, 1], 1).into(), None) }
    }

    #[test]
    fn peers_are_shared_while_referenced_and_counted_when_dropped() {
        let mut peers = Peers::default();
        let first = peers.at(&address(1), "a");
        let again = peers.at(&address(1), "b");
        assert_eq!((again.number, first.name()), (first.number, "b".to_owned()));
        drop(again);
        assert_eq!(peers.departures().count(), 0);
        let number = first.number;
        drop(first);
        assert_eq!(peers.departures().count(), 1);
        assert_ne!(peers.at(&address(1), "a").number, number, "a number is never given twice");
        for incarnation in 0..10_000 {
            drop(peers.at(&address(incarnation), "a"));
            assert!(peers.by_address.len() <= FORGET_AT);
        }
        let held: Vec<Arc<Peer>> = (0..1000).map(|incarnation| peers.at(&address(incarnation), "a")).collect();
        assert!(
            held.iter()
                .enumerate()
                .all(|(incarnation, peer)| peers.at(&address(incarnation as u64), "a").number == peer.number)
        );
    }
}
