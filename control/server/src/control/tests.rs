//! Behavior when the disk fails: nothing more is published, every call is refused, and the driver ends.

use std::net::SocketAddr;
use std::sync::Arc;

use kvplane_cluster::{Cluster, ClusterConfig};
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::{Member, ShardAddress};
use kvplane_rpc::message::{GetSegment, Heartbeat, Join, Load};
use kvplane_rpc::{Caller, RefusalCode, Role, Service};

use super::Control;
use crate::cluster::ClusterHost;
use crate::p2p::P2p;
use crate::store::Store;
use crate::worlds::{StoredWorlds, Worlds, WorldsConfig};

fn join() -> Join {
    let address = SocketAddr::from(([127, 0, 0, 1], 7001));
    let member = Member {
        node: NodeId(1),
        incarnation: Incarnation(1),
        weight: 1,
        failure_domain: String::new(),
        host: String::new(),
        shards: vec![ShardAddress { tcp: address, shm: None }],
    };
    Join { member, capacity_bytes: 1, version: String::new() }
}

#[test]
fn map_that_cannot_be_made_durable_is_not_published() {
    let cluster = Cluster::new(ClusterConfig::new("test"), [], 0).expect("defaults are valid");
    let host = ClusterHost::new(cluster, Store::in_memory(1), None, false).expect("no disk");
    let host = Arc::new(host);
    let worlds = Worlds::new(WorldsConfig::default(), StoredWorlds::default(), Arc::clone(&host), 1);
    let control = Control::new(host, None, P2p::new(1, 0), worlds.expect("no disk"));
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let caller = Caller { role: Role::Node, address };
    control.join(caller, join()).expect("a good member");
    control.cluster.lock().expect("no failure").break_store();
    let mut maps = control.maps();
    maps.mark_unchanged();

    let beat = Heartbeat { node: 1, incarnation: 1, load: Load::default() };
    let refusal = control.heartbeat(caller, beat).expect_err("the member cannot be remembered");
    assert_eq!(refusal.known_code(), Some(RefusalCode::Storage));
    assert!(refusal.reason.contains("broken"), "it names the file: {refusal}");
    assert!(!maps.has_changed().expect("open"), "the map with the member stays unpublished");

    let read = control.get_segment(caller, GetSegment { name: "s".to_owned() });
    assert_eq!(read.expect_err("no more").known_code(), Some(RefusalCode::Storage));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let reason = runtime.expect("a runtime").block_on(control.cluster.run());
    assert!(reason.contains("broken"), "{reason}");
}
