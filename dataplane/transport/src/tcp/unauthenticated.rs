//! Limits on unauthenticated connections: per address and in total, and with short frames only.
//!
//! At a limit, a new connection replaces the oldest unauthenticated one: of the same address, or of all. A flood of
//! silent connections therefore costs a bounded amount of memory, and a peer that authenticates at once is accepted
//! nevertheless. The service limits how long a connection may stay unauthenticated.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};

use kvplane_proto::frame::{FrameError, Header};

use crate::types::ConnectionId;

/// Limits of unauthenticated connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnauthenticatedLimits {
    /// Connections from one IPv4 address, or from one IPv6 network of 64 bits.
    pub of_address: usize,
    /// Connections in total.
    pub total: usize,
    /// Bytes of a frame's body; payloads are not allowed.
    pub body_bytes: usize,
}

impl Default for UnauthenticatedLimits {
    fn default() -> Self {
        Self { of_address: 512, total: 2048, body_bytes: 1024 }
    }
}

/// Unauthenticated connections.
pub(super) struct UnauthenticatedConnections {
    limits: UnauthenticatedLimits,
    /// Connections in order of arrival; some are authenticated by now, or gone.
    queue: VecDeque<(ConnectionId, IpAddr)>,
    /// Unauthenticated connections by index: generation and address.
    here: HashMap<u32, (u32, IpAddr)>,
    of_address: HashMap<IpAddr, usize>,
    /// Connections closed to make room for others.
    replaced: u64,
}

impl UnauthenticatedConnections {
    pub(super) fn new(limits: UnauthenticatedLimits) -> Self {
        Self { limits, queue: VecDeque::new(), here: HashMap::new(), of_address: HashMap::new(), replaced: 0 }
    }

    /// Adds a connection; returns the one to close for it, if a limit is exceeded.
    pub(super) fn add(&mut self, id: ConnectionId, address: IpAddr) -> Option<ConnectionId> {
        let network = network_of(address);
        let count = self.of_address.entry(network).or_insert(0);
        *count += 1;
        let over = *count > self.limits.of_address;
        self.here.insert(id.index, (id.generation, network));
        self.queue.push_back((id, network));
        if self.queue.len() > 2 * self.limits.total + 64 {
            let here = &self.here;
            self.queue
                .retain(|(id, _)| here.get(&id.index).is_some_and(|(generation, _)| *generation == id.generation));
        }
        let gone = if over {
            self.oldest(Some(network))
        } else if self.here.len() > self.limits.total {
            self.oldest(None)
        } else {
            None
        };
        self.replaced += u64::from(gone.is_some());
        gone
    }

    /// Checks a frame's header: an unauthenticated connection may send only short bodies, and no payload.
    pub(super) fn check(&self, id: ConnectionId, header: &Header) -> Result<(), FrameError> {
        let (body_bytes, limit) = (header.body_bytes as usize, self.limits.body_bytes);
        if self.has(id) && (body_bytes > limit || header.payload_bytes > 0) {
            let value = header.payload_bytes.max(body_bytes as u64);
            return Err(FrameError::TooLong { field: "first frame", value, limit: limit as u64 });
        }
        Ok(())
    }

    /// Returns the oldest unauthenticated connection, of one address or of all.
    fn oldest(&mut self, of: Option<IpAddr>) -> Option<ConnectionId> {
        while let Some((id, _)) = self.queue.front()
            && !self.has(*id)
        {
            self.queue.pop_front();
        }
        let fits = |(id, network): &&(ConnectionId, IpAddr)| of.is_none_or(|of| of == *network) && self.has(*id);
        self.queue.iter().find(fits).map(|(id, _)| *id)
    }

    /// Returns true if the connection is unauthenticated.
    fn has(&self, id: ConnectionId) -> bool {
        self.here.get(&id.index).is_some_and(|(generation, _)| *generation == id.generation)
    }

    /// Removes a connection that has authenticated, or is gone.
    pub(super) fn remove(&mut self, id: ConnectionId) {
        if !self.has(id) {
            return;
        }
        if let Some((_, network)) = self.here.remove(&id.index)
            && let Some(count) = self.of_address.get_mut(&network)
        {
            *count -= 1;
            if *count == 0 {
                self.of_address.remove(&network);
            }
        }
    }

    /// Returns the number of unauthenticated connections.
    pub(super) fn len(&self) -> usize {
        self.here.len()
    }

    /// Returns the number of connections closed to make room for others.
    pub(super) const fn replaced(&self) -> u64 {
        self.replaced
    }
}

/// Returns the part of an address that its holder cannot choose.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> ConnectionId {
        ConnectionId { index, generation: 1 }
    }

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn at_a_limit_the_oldest_of_its_address_or_of_all_is_closed() {
        let limits = UnauthenticatedLimits { of_address: 2, total: 4, ..UnauthenticatedLimits::default() };
        let mut unauthenticated = UnauthenticatedConnections::new(limits);
        assert_eq!(unauthenticated.add(id(0), address(1)), None);
        assert_eq!(unauthenticated.add(id(1), address(2)), None);
        assert_eq!(unauthenticated.add(id(2), address(2)), None);
        assert_eq!(unauthenticated.add(id(3), address(2)), Some(id(1)), "the third from that address");
        unauthenticated.remove(id(1));
        assert_eq!(unauthenticated.add(id(4), address(3)), None);
        assert_eq!(unauthenticated.add(id(5), address(4)), Some(id(0)), "the fifth in total");
        unauthenticated.remove(id(0));
        // An authenticated connection does not count any more.
        unauthenticated.remove(id(2));
        assert_eq!(unauthenticated.add(id(6), address(2)), None);
        assert_eq!((unauthenticated.len(), unauthenticated.of_address.len()), (4, 3));
    }

    #[test]
    fn memory_for_unauthenticated_connections_is_bounded() {
        let limits = UnauthenticatedLimits { of_address: 8, total: 16, ..UnauthenticatedLimits::default() };
        let mut unauthenticated = UnauthenticatedConnections::new(limits);
        for round in 0..10_000u32 {
            let id = ConnectionId { index: round % 50, generation: round };
            let gone = unauthenticated.add(id, address((round % 7) as u8));
            gone.into_iter().for_each(|gone| unauthenticated.remove(gone));
            if round % 3 == 0 {
                unauthenticated.remove(id);
            }
            assert!(unauthenticated.len() <= 16 && unauthenticated.queue.len() <= 2 * 16 + 65);
        }
    }

    #[test]
    fn a_network_of_version_6_is_one_address() {
        let of = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2:ffff::"));
        assert_ne!(of("2001:db8:1:2::"), of("2001:db8:1:3::"));
        assert_eq!(of("::ffff:10.0.0.1"), address(1));
    }
}
