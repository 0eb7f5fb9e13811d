//! What a host may see of what its client did: by rail, peer and transport.

use std::collections::BTreeMap;

use kvplane_proto::ids::{Incarnation, NodeId};

use crate::counts::{Books, Counters, Failovers, RailCounts, SlowOperation};
use crate::network::{Endpoint, Network};
use crate::sched::Health;
use crate::types::{Path, PeerId, RailDevices, Transport};

/// A rail as it stands, and what one transport did on it.
#[derive(Clone, Copy, Debug)]
pub struct RailMetrics<'a> {
    /// Whose rail.
    pub peer: PeerId,
    /// Of which path.
    pub path: Path,
    /// What carried the slices that were counted. A rail is told of once for each transport that was used on it, and
    /// once when none was.
    pub transport: Transport,
    /// Its number among the rails of that path.
    pub number: usize,
    /// The devices at both ends, of a rail over RDMA.
    pub devices: Option<RailDevices>,
    /// Whether it is in use.
    pub health: Health,
    /// What it serves at the moment, by measurement: all transports of the rail.
    pub bytes_per_second: u64,
    /// Its fixed latency, by measurement: all transports of the rail.
    pub latency_ns: u64,
    /// Bytes posted and not done: with the first transport of a rail for all of them, else 0.
    pub inflight_bytes: u64,
    /// Why it does not lead to the peer from here, until it was found to again.
    pub unavailable: Option<&'a str>,
    /// What happened on it.
    pub counts: &'a RailCounts,
}

/// What rails, peers and transports did.
#[derive(Clone, Copy)]
pub struct ClientMetrics<'a> {
    network: &'a Network,
    books: &'a Books,
}

impl<'a> ClientMetrics<'a> {
    pub(crate) const fn new(network: &'a Network, books: &'a Books) -> Self {
        Self { network, books }
    }

    /// Every rail of every peer, with what it did.
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

    /// What the rails of peers that were left had counted, by transport.
    #[must_use]
    pub fn departed_metrics(self) -> &'a [(Transport, RailCounts)] {
        self.books.departed()
    }

    /// Slices that changed their transport after a failure, by the transports.
    #[must_use]
    pub fn failovers(self) -> &'a [Failovers] {
        self.books.failovers()
    }

    /// The latest slices that took longer than [`Config::slow_ns`](crate::Config::slow_ns), oldest first.
    pub fn slow_operations(self) -> impl Iterator<Item = &'a SlowOperation> {
        self.books.slow()
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(self) -> &'a Counters {
        &self.books.counters
    }

    /// Whether connections are on their way: somebody has to look after those even where no batch is open, or they are
    /// never there when one is.
    #[must_use]
    pub const fn is_connecting(self) -> bool {
        self.network.lanes.are_coming()
    }

    /// Nodes that owe answers and of which nothing was heard for so long, on any connection to any of their shards,
    /// with their incarnations.
    pub fn silent_nodes(self, for_ns: u64) -> impl Iterator<Item = (NodeId, Incarnation)> {
        let mut nodes: BTreeMap<(NodeId, Incarnation), bool> = BTreeMap::new();
        for lane in self.network.lanes.iter().filter(|lane| lane.state == Endpoint::Ready) {
            let owes = lane.load.outstanding > 0 || !lane.connection.detached.is_empty();
            let silent = lane.progress_ns.saturating_add(for_ns) <= self.network.host.now_ns;
            let Some(peer) = self.network.peers.get(lane.peer.0).filter(|_| owes || !silent) else { continue };
            let of = (peer.address.node, peer.address.incarnation);
            // One that owes nothing and was heard lately lives too.
            let silent_so_far = nodes.entry(of).or_insert(true);
            *silent_so_far &= silent;
        }
        nodes.into_iter().filter(|(of, silent)| *silent && of.0 != NodeId(0)).map(|(of, _)| of)
    }
}
