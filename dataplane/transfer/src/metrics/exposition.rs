//! Exposition of metrics to scrapers: monotonic series for a bounded number of peers, with exact sums.
//!
//! The first peers seen get series of their own; all others are combined in the peer `other`. A peer that is gone keeps
//! its series until another peer needs the place. Whatever happens in between, the series of a transport add up to its
//! total, as far as they are shown: `other` is the difference.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_client::sched::Health;
use kvplane_client::{RailCounts, Transport};

use super::{Metrics, RailSnapshot};

/// Number of peers with series of their own.
const PEERS: usize = 32;

/// Key of a series: the transport, and the rail by the name of its device or its index.
pub(super) type Key = (Transport, String);

/// Counters of a series: those of former rails, and those of the present rails since the series began.
#[derive(Default)]
struct Series {
    before: RailCounts,
    from: RailCounts,
    last: RailCounts,
}

impl Series {
    fn shown(&self) -> RailCounts {
        let mut shown = self.last.beyond(&self.from);
        shown.add(&self.before);
        shown
    }

    /// Ends the present rails: new ones count from zero.
    fn end(&mut self) {
        self.before = self.shown();
        (self.from, self.last) = (RailCounts::default(), RailCounts::default());
    }

    fn see(&mut self, now: RailCounts) {
        let last = &self.last;
        if now.operations < last.operations || now.bytes < last.bytes || now.failovers < last.failovers {
            self.end();
        }
        self.last = now;
    }
}

#[derive(Default)]
struct Peer {
    name: String,
    series: BTreeMap<Key, Series>,
}

/// Present state of a rail, over all initiators.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Now {
    pub(super) inflight_bytes: u64,
    /// Number of initiators for which it is paused.
    pub(super) paused: u64,
    /// Measured bandwidth, for the initiator with the highest.
    pub(super) bytes_per_second: u64,
}

/// Series as shown in one scrape.
pub(crate) struct SeriesView {
    pub(super) peer: String,
    pub(super) transport: Transport,
    /// `all` for the peers that share a series.
    pub(super) rail: String,
    pub(super) counts: RailCounts,
    /// Present state; `None` for a peer that is gone.
    pub(super) now: Option<Now>,
}

/// State kept from one scrape to the next.
#[derive(Default)]
pub(crate) struct Exposition {
    peers: Vec<Peer>,
    /// Peers counted in `other`.
    others: BTreeSet<String>,
    /// Counters shown by peers that lost their series.
    forgotten: BTreeMap<Transport, RailCounts>,
}

/// Rails of one peer, over all initiators.
type Rails = BTreeMap<Key, (RailCounts, Now)>;

impl Exposition {
    /// Updates the series from the present counters; returns the series to show.
    pub(crate) fn scrape(&mut self, metrics: &Metrics) -> Vec<SeriesView> {
        let mut peers: BTreeMap<&str, Rails> = BTreeMap::new();
        let mut rest: BTreeMap<Transport, (RailCounts, Now)> = BTreeMap::new();
        for (transport, counts) in &metrics.departed {
            rest.entry(*transport).or_default().0.add(counts);
        }
        for rail in &metrics.rails {
            let counts = rail.counts();
            rest.entry(rail.transport).or_default().0.add(&counts);
            let (sum, now) = peers.entry(&rail.peer).or_default().entry((rail.transport, rail.label())).or_default();
            sum.add(&counts);
            now.add(rail);
        }
        // A peer that is being closed has no name any more.
        peers.remove("");
        self.give_places(&peers);
        let mut shown = Vec::new();
        for peer in &mut self.peers {
            peer.see(peers.remove(&*peer.name), &mut shown);
        }
        let series = shown.iter().map(|one| (one.transport, &one.counts));
        for (transport, counts) in series.chain(self.forgotten.iter().map(|(transport, counts)| (*transport, counts))) {
            let sum = &mut rest.entry(transport).or_default().0;
            *sum = sum.beyond(counts);
        }
        for ((transport, _), (_, now)) in peers.values().flatten() {
            let sum = &mut rest.entry(*transport).or_default().1;
            sum.inflight_bytes += now.inflight_bytes;
            sum.paused += now.paused;
            sum.bytes_per_second = sum.bytes_per_second.max(now.bytes_per_second);
        }
        self.others = peers.into_keys().map(str::to_owned).collect();
        let shared = rest.into_iter().filter(|(_, (counts, now))| !counts.is_empty() || *now != Now::default());
        shown.extend(shared.map(|(transport, (counts, now))| SeriesView {
            peer: "other".to_owned(),
            transport,
            rail: "all".to_owned(),
            counts,
            now: Some(now),
        }));
        shown
    }

    /// Assigns series to new peers, while there are free places.
    fn give_places(&mut self, peers: &BTreeMap<&str, Rails>) {
        let known: BTreeSet<String> = self.peers.iter().map(|peer| peer.name.clone()).collect();
        let new = peers
            .iter()
            .filter(|(name, rails)| !known.contains(**name) && rails.values().any(|(counts, _)| !counts.is_empty()));
        for (name, rails) in new {
            if self.peers.len() == PEERS {
                let gone = self.peers.iter().position(|peer| !peers.contains_key(&*peer.name));
                let Some(gone) = gone else { return };
                for ((transport, _), series) in self.peers.remove(gone).series {
                    self.forgotten.entry(transport).or_default().add(&series.shown());
                }
            }
            let mut peer = Peer { name: (*name).to_owned(), ..Peer::default() };
            if self.others.contains(*name) {
                // Its counts so far were shown in `other`, and stay there.
                for (key, (counts, _)) in rails {
                    let series = Series { from: counts.clone(), last: counts.clone(), ..Series::default() };
                    peer.series.insert(key.clone(), series);
                }
            }
            self.peers.push(peer);
        }
    }
}

impl Peer {
    fn see(&mut self, rails: Option<Rails>, shown: &mut Vec<SeriesView>) {
        let mut rails = rails.unwrap_or_default();
        for (key, series) in &mut self.series {
            if !rails.contains_key(key) {
                series.end();
            }
        }
        for (key, (counts, _)) in &mut rails {
            self.series.entry(key.clone()).or_default().see(core::mem::take(counts));
        }
        shown.extend(self.series.iter().map(|(key, series)| SeriesView {
            peer: self.name.clone(),
            transport: key.0,
            rail: key.1.clone(),
            counts: series.shown(),
            now: rails.get(key).map(|(_, now)| *now),
        }));
    }
}

impl Now {
    fn add(&mut self, rail: &RailSnapshot) {
        self.inflight_bytes += rail.inflight_bytes;
        self.paused += u64::from(rail.health == Health::Paused);
        self.bytes_per_second = self.bytes_per_second.max(rail.bytes_per_second);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(operations: u64) -> RailCounts {
        let mut counts = RailCounts { operations, bytes: operations * 10, ..RailCounts::default() };
        (0..operations).for_each(|number| counts.service.add(1000 * (1 + number)));
        counts
    }

    fn metrics(rails: &[(&str, Transport, u64)], departed: u64) -> Metrics {
        let rail = |&(peer, transport, operations): &(&str, Transport, u64)| {
            RailSnapshot::new(0, peer.to_owned(), transport, Health::Healthy, &counts(operations))
        };
        let departed = Some((Transport::Tcp, counts(departed))).filter(|_| departed > 0);
        Metrics {
            rails: rails.iter().map(rail).collect(),
            departed: departed.into_iter().collect(),
            ..Metrics::default()
        }
    }

    fn look(exposition: &mut Exposition, metrics: &Metrics) -> Vec<(String, Transport, u64)> {
        let shown = exposition.scrape(metrics).into_iter();
        shown.map(|one| (one.peer, one.transport, one.counts.operations)).collect()
    }

    #[test]
    fn a_peer_that_comes_back_continues_its_series() {
        use Transport::{Cma, Shm, Tcp};
        let mut exposition = Exposition::default();
        let a = |operations| ("a".to_owned(), Tcp, operations);
        let other = |operations| ("other".to_owned(), Tcp, operations);
        assert_eq!(look(&mut exposition, &metrics(&[("a", Tcp, 5)], 0)), [a(5)]);
        // Two more operations before it left.
        assert_eq!(look(&mut exposition, &metrics(&[], 7)), [a(5), other(2)]);
        assert_eq!(look(&mut exposition, &metrics(&[("a", Tcp, 3)], 7)), [a(8), other(2)]);
        // A new incarnation between two scrapes.
        assert_eq!(look(&mut exposition, &metrics(&[("a", Tcp, 1)], 10)), [a(9), other(2)]);
        // A peer without a name is being closed.
        let shown = look(&mut exposition, &metrics(&[("", Tcp, 1), ("b", Shm, 1), ("b", Cma, 2)], 10));
        assert_eq!(shown, [a(9), ("b".to_owned(), Shm, 1), ("b".to_owned(), Cma, 2), other(2)]);
    }

    #[test]
    fn rails_over_devices_are_labelled_by_their_device() {
        let mut seen = metrics(&[("a", Transport::Rdma, 1), ("a", Transport::Rdma, 2), ("a", Transport::Tcp, 3)], 0);
        (seen.rails[0].device, seen.rails[1].device) = (Some("mlx5_0".to_owned()), Some("mlx5_1".to_owned()));
        let shown = Exposition::default().scrape(&seen).into_iter().map(|one| (one.rail, one.counts.operations));
        let wanted = [("0", 3), ("mlx5_0", 1), ("mlx5_1", 2)].map(|(rail, count)| (rail.to_owned(), count));
        assert_eq!(shown.collect::<std::collections::BTreeSet<_>>(), wanted.into());
    }

    #[test]
    fn peers_beyond_the_limit_share_a_series_until_one_is_free() {
        let names: Vec<String> = (0..PEERS + 3).map(|number| format!("peer-{number:03}")).collect();
        let all = |operations| names.iter().map(|name| (name.as_str(), Transport::Tcp, operations)).collect::<Vec<_>>();
        let mut exposition = Exposition::default();
        let shown = look(&mut exposition, &metrics(&all(2), 0));
        assert_eq!((shown.len(), &shown[PEERS]), (PEERS + 1, &("other".to_owned(), Transport::Tcp, 6)));
        // The first peer is gone: one of the others takes its place, and starts from zero there.
        let shown = look(&mut exposition, &metrics(&all(3)[1..], 2));
        assert_eq!(shown[PEERS - 1], (names[PEERS].clone(), Transport::Tcp, 0));
        assert_eq!(shown[PEERS], ("other".to_owned(), Transport::Tcp, 9));
        let shown = look(&mut exposition, &metrics(&all(4)[1..], 2));
        assert_eq!(shown[PEERS - 1], (names[PEERS].clone(), Transport::Tcp, 1));
        assert_eq!(shown[PEERS], ("other".to_owned(), Transport::Tcp, 11));
    }

    proptest! {
        /// Peers count, leave and come back, more of them than have places, with scrapes in between.
        #[test]
        fn series_are_monotonic_and_add_up(steps in prop::collection::vec((0..PEERS * 2, 0u64..4, 0..4), 1..300)) {
            let names: Vec<String> = (0..PEERS * 2).map(|number| number.to_string()).collect();
            let (mut live, mut departed, mut total) = (BTreeMap::new(), 0, 0);
            let mut exposition = Exposition::default();
            let mut before: BTreeMap<String, u64> = BTreeMap::new();
            let mut forgotten = 0;
            for (peer, operations, what) in steps {
                match what {
                    0 => departed += live.remove(&peer).unwrap_or(0),
                    _ => {
                        *live.entry(peer).or_insert(0) += operations;
                        total += operations;
                    }
                }
                if what < 2 {
                    continue;
                }
                let rails: Vec<_> = live.iter().map(|(peer, count)| (&*names[*peer], Transport::Tcp, *count)).collect();
                let shown = look(&mut exposition, &metrics(&rails, departed));
                prop_assert!(shown.len() <= PEERS + 1);
                let now: BTreeMap<String, u64> = shown.into_iter().map(|(peer, _, count)| (peer, count)).collect();
                for (peer, count) in &before {
                    match now.get(peer) {
                        Some(grown) => prop_assert!(grown >= count, "{peer}: {count}, then {grown}"),
                        None => forgotten += count,
                    }
                }
                prop_assert_eq!(now.values().sum::<u64>() + forgotten, total);
                before = now;
            }
        }
    }
}
