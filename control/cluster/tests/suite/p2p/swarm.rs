//! Speed and fairness of swarms: time until every member has the whole object, and bytes that each member sends.

use kvplane_cluster::p2p::{Layout, ObjectName, PeerLocation};

use super::fluid::{Fluid, Link, SECOND};

const MIB: u64 = 1 << 20;
pub(crate) const BYTES: u64 = 64 * MIB;
/// 200 Mbit/s.
const RATE: f64 = 25e6;
pub(crate) const LINK: Link = Link { up: RATE, down: RATE };
/// Duration of a transfer of the object over one link.
pub(crate) const ALONE_NS: f64 = BYTES as f64 / RATE * 1e9;

pub(crate) fn nowhere() -> PeerLocation {
    PeerLocation::default()
}

/// Returns the lower bound of the time with equal links and whole shards.
pub(crate) fn binomial(receivers: u64, shards: u64) -> f64 {
    let rounds = shards + u64::from((receivers + 1).next_power_of_two().ilog2()) - 1;
    rounds as f64 / shards as f64 * ALONE_NS
}

struct SwarmOutcome {
    /// Ratio to the bound.
    time: f64,
    /// Bytes that the origin sent, in objects.
    egress: f64,
    /// Maximum that a receiver sent, in objects.
    most: f64,
}

fn spread(receivers: u64, shards: u64, seed: u64) -> SwarmOutcome {
    let mut fluid = Fluid::new(BYTES, shards, seed);
    let origin = fluid.join(LINK, true, nowhere());
    for _ in 0..receivers {
        fluid.join(LINK, false, nowhere());
    }
    let done_ns = fluid.run(600 * SECOND).expect("all members are done");
    let sent = |member: &u64| fluid.peers[member].sent_bytes / BYTES as f64;
    let most = fluid.peers.keys().filter(|&&member| member != origin).map(sent).fold(0.0, f64::max);
    let found = SwarmOutcome { time: done_ns as f64 / binomial(receivers, shards), egress: sent(&origin), most };
    println!(
        "{receivers} receivers, {shards} shards: {:.3} x the bound, {:.3} x the fluid one, egress {:.3}, most {:.3}",
        found.time,
        done_ns as f64 / ALONE_NS,
        found.egress,
        found.most
    );
    found
}

#[test]
fn many_receivers_take_little_longer_than_one() {
    for (receivers, shards) in [(1, 64), (2, 64), (3, 128), (8, 128), (16, 256), (64, 256)] {
        let found = spread(receivers, shards, receivers);
        assert!(found.time <= 1.25, "{receivers} receivers: {:.3} x the bound", found.time);
        assert!(found.egress <= 1.3, "{receivers} receivers: the origin sent {:.3} x the object", found.egress);
        assert!(found.most <= 2.0, "{receivers} receivers: one sent {:.3} x the object", found.most);
    }
}

/// Object without a given shard size: it takes little longer than its transfer over one link.
#[test]
fn default_shard_size_is_close_to_the_link_bound() {
    for receivers in [2, 8, 16] {
        let shards = BYTES / Layout::fitting_shard_bytes(&[BYTES]);
        let time = spread(receivers, shards, receivers).time * binomial(receivers, shards) / ALONE_NS;
        assert!(time <= 1.2, "{receivers} receivers, {shards} shards: {time:.3} x the object's bytes");
    }
}

#[test]
fn a_thousand_receivers_take_little_longer_than_one() {
    let found = spread(1000, 128, 3);
    assert!(found.time <= 1.25, "{:.3} x the bound", found.time);
    assert!(found.egress <= 1.3 && found.most <= 2.0, "origin {:.3}, most {:.3}", found.egress, found.most);
}

#[test]
fn swarm_completes_without_its_origin() {
    let mut fluid = Fluid::new(BYTES, 256, 5);
    let origin = fluid.join(LINK, true, nowhere());
    for _ in 0..16 {
        fluid.join(LINK, false, nowhere());
    }
    // The origin has sent the whole object once, and a little more.
    fluid.kill_at((1.1 * ALONE_NS) as u64, origin);
    let done_ns = fluid.run(60 * SECOND).expect("all members are done");
    assert!(done_ns as f64 <= 1.3 * ALONE_NS, "{:.3} x the bound", done_ns as f64 / ALONE_NS);
}

#[test]
fn killed_source_delays_the_others_little() {
    let mut fluid = Fluid::new(BYTES, 256, 6);
    fluid.join(LINK, true, nowhere());
    let members: Vec<u64> = (0..16).map(|_| fluid.join(LINK, false, nowhere())).collect();
    fluid.kill_at((0.5 * ALONE_NS) as u64, members[3]);
    let done_ns = fluid.run(60 * SECOND).expect("all other members are done");
    println!("a peer is killed: {:.3} x the fluid bound", done_ns as f64 / ALONE_NS);
    assert!(done_ns as f64 <= 1.3 * ALONE_NS, "{:.3} x the bound", done_ns as f64 / ALONE_NS);
}

/// The host of a source stops without notice: fetches from it become late, and are then aborted.
#[test]
fn stopped_host_delays_the_others_little() {
    let mut fluid = Fluid::new(BYTES, 256, 11);
    fluid.join(LINK, true, nowhere());
    let members: Vec<u64> = (0..16).map(|_| fluid.join(LINK, false, nowhere())).collect();
    fluid.freeze_at((0.5 * ALONE_NS) as u64, members[3]);
    let done_ns = fluid.run(60 * SECOND).expect("all other members are done");
    println!("a host stops: {:.3} x the fluid bound", done_ns as f64 / ALONE_NS);
    assert!(done_ns as f64 <= 1.3 * ALONE_NS, "{:.3} x the bound", done_ns as f64 / ALONE_NS);
}

#[test]
fn rate_limits_hold() {
    let mut fluid = Fluid::new(BYTES, 256, 12);
    let origin = fluid.join_limited(LINK, true, nowhere(), (RATE / 2.0) as u64);
    for _ in 0..4 {
        fluid.join(LINK, false, nowhere());
    }
    let done_ns = fluid.run(60 * SECOND).expect("all members are done") as f64;
    let (least, most) = (1.9 * ALONE_NS, 2.4 * ALONE_NS);
    assert!((least..most).contains(&done_ns), "{:.3} x the bound at twice its time", done_ns / ALONE_NS);
    assert!(fluid.peers[&origin].sent_bytes <= 1.1 * BYTES as f64);
}

#[test]
fn slow_member_does_not_delay_the_others() {
    let time = |slow: bool| {
        let mut fluid = Fluid::new(BYTES, 256, 7);
        fluid.join(LINK, true, nowhere());
        let members: Vec<u64> = (0..15).map(|_| fluid.join(LINK, false, nowhere())).collect();
        if slow {
            fluid.join(Link { up: RATE / 10.0, down: RATE / 10.0 }, false, nowhere());
        }
        fluid.run(120 * SECOND).expect("all members are done");
        members.iter().map(|member| fluid.peers[member].done_ns.expect("done")).max().expect("somebody")
    };
    let (without, with) = (time(false) as f64, time(true) as f64);
    println!("others: {:.3} x the fluid bound alone, {:.3} beside a slow one", without / ALONE_NS, with / ALONE_NS);
    assert!(with <= 1.05 * without, "{:.3} x", with / without);
}

#[test]
fn late_receiver_fetches_from_all_members() {
    let mut fluid = Fluid::new(BYTES, 256, 8);
    fluid.join(LINK, true, nowhere());
    for _ in 0..8 {
        fluid.join(LINK, false, nowhere());
    }
    fluid.join_at(10 * SECOND, LINK);
    let done_ns = fluid.run(60 * SECOND).expect("all members are done");
    let took = (done_ns - 10 * SECOND) as f64;
    assert!(took <= 1.2 * ALONE_NS, "{:.3} x its own link", took / ALONE_NS);
}

#[test]
fn corrupt_source_is_excluded() {
    let mut fluid = Fluid::new(BYTES, 64, 9);
    let bad = fluid.join(LINK, true, nowhere());
    fluid.corrupt = Some(bad);
    fluid.join(LINK, true, nowhere());
    for _ in 0..4 {
        fluid.join(LINK, false, nowhere());
    }
    fluid.run(60 * SECOND).expect("all members are done");
    let (rows, lost) = fluid.objects.describe(ObjectName::new("", "o"), Some(1)).expect("there");
    let row = rows.iter().find(|row| row.member == bad).expect("a member");
    assert!(row.excluded.contains("does not match its hash"), "{}", row.excluded);
    assert_eq!((rows.iter().filter(|row| !row.excluded.is_empty()).count(), lost), (1, 0));
}

/// One copy of the object is sent to a host, and its members share it.
#[test]
fn a_host_fetches_once() {
    let mut fluid = Fluid::new(BYTES, 64, 10);
    let place = |host: &str| PeerLocation { host: host.to_owned(), rack: String::new() };
    let origin = fluid.join(LINK, true, place("trainer"));
    for host in ["a", "b"] {
        for _ in 0..4 {
            fluid.join(LINK, false, place(host));
        }
    }
    fluid.run(60 * SECOND).expect("all members are done");
    assert!(fluid.peers[&origin].sent_bytes <= 1.3 * BYTES as f64);
    assert!(fluid.crossed <= 2.1 * BYTES as f64, "{} x the object came to two hosts", fluid.crossed / BYTES as f64);
}
