//! Five nodes on an emulated network that delays, loses, reorders, duplicates and damages packets, collapses, resets
//! connections or leaves them half open, under the load of the outages: no byte is wrong, nothing older than what was
//! acknowledged is read, and no object that two nodes had is lost. Operations may fail while the network is impaired,
//! and all of them end by their deadline. This is the real counterpart of the network faults of the simulated World.
//!
//! `cargo x networks` runs all impairments on every node in turn.

use std::time::{Duration, Instant};

use crate::emulation::{Direction, Emulation, Impairment};
use crate::failover::cluster::{Cluster, NODES, PLANE, address};
use crate::failover::outages::{self, KEPT, ROLE, spread, told};
use crate::support::Workplace;

/// Interval of the resets.
const RESETS: Duration = Duration::from_millis(400);

/// A way in which the network is bad.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Weather {
    /// All links are slow: another continent.
    Distant,
    /// A node's packets are lost, reordered, duplicated and damaged, in both directions.
    Lossy,
    /// A node's packets are lost in one direction only.
    LossyOneWay,
    /// A node's bandwidth collapses.
    Narrow,
    /// A node's connections are reset repeatedly.
    Resets,
    /// A node's connections are reset repeatedly, and only one end of each learns of it.
    HalfOpen,
}

const ALL: [Weather; 6] =
    [Weather::Distant, Weather::Lossy, Weather::LossyOneWay, Weather::Narrow, Weather::Resets, Weather::HalfOpen];

impl Weather {
    fn name(self) -> &'static str {
        match self {
            Self::Distant => "all links delay by 15 to 25 ms",
            Self::Lossy => "2 % lost, 10 % reordered, 2 % duplicated, 1 % damaged",
            Self::LossyOneWay => "30 % of what it sends is lost",
            Self::Narrow => "1 Mbit/s",
            Self::Resets => "its connections are reset",
            Self::HalfOpen => "its connections become half open",
        }
    }

    /// Impairs the network for a while.
    fn blow(self, network: &mut Emulation, victim: usize, lasts: Duration) {
        let ms = Duration::from_millis;
        let far = Impairment { delay: ms(15), jitter: ms(10), ..Impairment::default() };
        let lossy = Impairment {
            delay: ms(1),
            lost: 0.02,
            reordered: 0.1,
            duplicated: 0.02,
            damaged: 0.01,
            ..Impairment::default()
        };
        match self {
            Self::Distant => (1..=NODES as usize).for_each(|port| network.impair(port, far)),
            Self::Lossy => network.impair(victim, lossy),
            Self::LossyOneWay => {
                let lossy = Impairment { lost: 0.3, ..Impairment::default() };
                network.impair_one_way(victim, Direction::Sent, lossy);
            }
            Self::Narrow => network.impair(victim, Impairment { rate: 125_000, ..Impairment::default() }),
            Self::Resets | Self::HalfOpen => {
                let end = Instant::now() + lasts;
                while Instant::now() < end {
                    network.reset(victim, self == Self::Resets);
                    std::thread::sleep(RESETS.min(end.saturating_duration_since(Instant::now())));
                }
                return;
            }
        }
        std::thread::sleep(lasts);
    }
}

#[test]
fn no_network_makes_bytes_wrong_or_loses_objects() {
    let (rounds, lasts) = match std::env::var("KVPLANE_NETWORK_ROUNDS") {
        Ok(count) => (count.parse().expect("a number"), Duration::from_secs(6)),
        Err(_) => (1, Duration::from_millis(1500)),
    };
    let place = Workplace::new("networks");
    let at = |port: usize| if port == 0 { PLANE.to_owned() } else { address(port as u64) };
    let Some((mut network, hub, leaves)) = Emulation::start(&place, NODES as usize, at) else { return };
    let cluster = Cluster::connected(place, hub, leaves, 2);
    let calm = Duration::from_secs(1);
    for (round, weather) in (0..rounds).flat_map(|_| ALL).enumerate() {
        let victim = 1 + round % NODES as usize;
        let load_ms = (calm + lasts + calm).as_millis();
        let mut load = cluster.beside(&outages::load(), ROLE, &format!(" {round} {load_ms} 2 tolerated"));
        load.wait_for("loads");
        std::thread::sleep(calm);
        weather.blow(&mut network, victim, lasts);
        let counters = network.mend();
        let all = told(&load);
        assert!(load.ended().success(), "{}: {:?}", weather.name(), load.said());
        let failed = all.iter().filter(|one| !one.well).count();
        let times = spread(all.iter().map(|one| one.took_us).collect());
        println!("node {victim} of {NODES}, {}: {times} ms, {failed} failed; {counters:?}", weather.name());
        assert!(all.len() - failed > 100, "only {} operations succeeded", all.len() - failed);
        cluster.whole(KEPT);
    }
    assert!(network.counters().forwarded > 0);
}
