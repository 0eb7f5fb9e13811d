//! Metrics of a client for its host: by rail, peer and transport.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Incarnation, NodeId};

use crate::counts::{Books, Counters, Failovers, RailCounts, SlowOperation};
use crate::network::{Endpoint, Network, is_suspect};
use crate::sched::Health;
use crate::types::{LaneId, Path, PeerId, RailDevices, Transport};

/// State of a rail, and the counts of one transport on it.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RailMetrics<'a> {
    pub peer: PeerId,
    pub path: Path,
    /// Transport of the counted slices. A rail appears once for each transport that was used on it, and once if none
    /// was.
    pub transport: Transport,
    /// Index among the rails of that path.
    pub number: usize,
    /// Devices at both ends, for a rail over RDMA.
    pub devices: Option<RailDevices>,
    pub health: Health,
    /// Measured throughput of the rail, over all its transports.
    pub bytes_per_second: u64,
    /// Measured fixed latency of the rail, over all its transports.
    pub latency_ns: u64,
    /// Bytes in flight on the rail: given with its first transport for all of them, else 0.
    pub inflight_bytes: u64,
    /// Reason why the rail does not reach the peer from this host, until a later attempt succeeds.
    pub unavailable: Option<&'a str>,
    /// Counts of this transport on the rail.
    pub counts: &'a RailCounts,
}

/// Metrics of rails, peers and transports.
#[derive(Clone, Copy)]
pub struct ClientMetrics<'a> {
    network: &'a Network,
    books: &'a Books,
}

impl<'a> ClientMetrics<'a> {
    pub(crate) const fn new(network: &'a Network, books: &'a Books) -> Self {
        Self { network, books }
    }

    /// Returns every rail of every peer, with its counts.
    pub fn rail_metrics(self) -> impl Iterator<Item = RailMetrics<'a>> {
        let groups = self.network.peers.iter().flat_map(|(peer, entry)| entry.groups.iter().map(move |g| (peer, g)));
        let rails =
            groups.flat_map(|(peer, group)| group.rails.iter().enumerate().map(move |rail| (peer, group, rail)));
        rails.flat_map(move |(peer, group, (number, &rail))| {
            let entry = &self.network.rails[rail];
            let (bulk, small) = entry.rail.inflight_bytes();
            let pages = entry.books.pages(entry.path, self.network.host.config.usual_transport(entry.path));
            pages.enumerate().map(move |(page, (transport, counts))| RailMetrics {
                peer,
                path: entry.path,
                transport,
                number,
                devices: entry.address.and_then(|address| address.rdma),
                health: entry.rail.health(),
                bytes_per_second: (entry.rail.rate().bytes_per_ns() * 1e9) as u64,
                latency_ns: entry.rail.rate().latency_ns() as u64,
                inflight_bytes: if page == 0 { bulk + small } else { 0 },
                unavailable: group.unavailable.as_ref().map(|(_, why)| why.as_str()),
                counts,
            })
        })
    }

    /// Returns the counts of the rails of closed peers, by transport.
    #[must_use]
    pub fn departed_metrics(self) -> &'a [(Transport, RailCounts)] {
        self.books.departed()
    }

    /// Returns the slices that failed over to another transport, by pair of transports.
    #[must_use]
    pub fn failovers(self) -> &'a [Failovers] {
        self.books.failovers()
    }

    /// Returns the latest slices that took longer than [`Config::slow_ns`](crate::Config::slow_ns), oldest first.
    pub fn slow_operations(self) -> impl Iterator<Item = &'a SlowOperation> {
        self.books.slow()
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counters(self) -> &'a Counters {
        &self.books.counters
    }

    /// Returns true if connections are being established: the host has to poll these even while no batch is in flight,
    /// or they will not be ready for the next one.
    #[must_use]
    pub const fn is_connecting(self) -> bool {
        self.network.lanes.are_coming()
    }

    /// Returns the lane over shared memory to a peer on this host, if it is in use, and memory may be mapped over it.
    #[must_use]
    pub fn shared_lane(self, peer: PeerId) -> Option<LaneId> {
        if !self.network.host.config.shared {
            return None;
        }
        let group = self.network.peers.get(peer.0)?.groups.iter().find(|group| group.path == Path::Shared)?;
        let lanes = group.rails.iter().flat_map(|&rail| &self.network.rails[rail].lanes);
        let ready = |&&lane: &&u32| self.network.lanes[lane].state == Endpoint::Ready;
        lanes.copied().find(|lane| ready(&lane)).map(|lane| self.network.lanes[lane].id(lane))
    }

    /// Returns the nodes of suspect peers: silent for the hedging delay while they owed a reply, and not heard since. A
    /// node appears once for each of its shards that is suspect.
    pub fn suspect_nodes(self) -> impl Iterator<Item = NodeId> {
        let suspects = self.network.peers.iter().filter(move |(peer, _)| is_suspect(self.network, *peer));
        suspects.map(|(_, entry)| entry.address.node)
    }

    /// Returns the nodes, with their incarnations, that owe replies and have been silent for this time on every
    /// connection to any of their shards, or that have been suspect for so long: requests that end earlier leave no
    /// reply that is owed.
    pub fn silent_nodes(self, for_ns: u64) -> impl Iterator<Item = (NodeId, Incarnation)> {
        let mut nodes: BTreeMap<(NodeId, Incarnation), bool> = BTreeMap::new();
        for lane in self.network.lanes.iter().filter(|lane| lane.state == Endpoint::Ready) {
            let owes = lane.owes_replies();
            let silent = lane.progress_ns.saturating_add(for_ns) <= self.network.host.now_ns;
            let Some(peer) = self.network.peers.get(lane.peer.0).filter(|_| owes || !silent) else { continue };
            let of = (peer.address.node, peer.address.incarnation);
            // A node that owes nothing and has sent something lately is alive too.
            let silent_so_far = nodes.entry(of).or_insert(true);
            *silent_so_far &= silent;
        }
        for (id, peer) in self.network.peers.iter() {
            let of = (peer.address.node, peer.address.incarnation);
            let suspicion = peer.suspicion.filter(|_| is_suspect(self.network, id));
            let since_ns = suspicion.map(|suspicion| suspicion.since_ns);
            let silent = |at_ns: u64| at_ns.saturating_add(for_ns) <= self.network.host.now_ns;
            if since_ns.is_some_and(silent) {
                nodes.entry(of).or_insert(true);
            }
            if peer.heard_ns > 0 && !silent(peer.heard_ns) {
                nodes.insert(of, false);
            }
        }
        nodes.into_iter().filter(|(of, silent)| *silent && of.0 != NodeId(0)).map(|(of, _)| of)
    }
}
