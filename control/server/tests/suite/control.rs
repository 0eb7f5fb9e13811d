//! Tests of a running control plane over real connections: membership, map, segments, roles, local discovery, start
//! errors.

use crate::support;

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_rpc::message::*;
use kvplane_rpc::{RefusalCode, Role, RuntimeDirectory};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer, MetadataLimits};
use support::{Scratch, beat, client, enter, join, run};

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

fn start(config: ControlConfig) -> ControlHandle {
    ControlServer::start(config).expect("a control plane")
}

fn refusal(config: ControlConfig) -> String {
    ControlServer::start(config).expect_err("it must not start").to_string()
}

#[test]
fn a_node_joins_is_seen_and_leaves() {
    let control = start(ControlConfig::new("test"));
    run(async {
        let node = client(control.local(), Role::Node).await;
        let watcher = client(control.local(), Role::Client).await;
        let mut watch = watcher.watch_map();
        let first = watch.newer(None).await;
        assert!(first.members.is_empty());

        let joined = node.call(&join(1, 1)).await.expect("a good member");
        assert!(joined.heartbeat_interval_ns < joined.heartbeat_deadline_ns);
        node.call(&beat(1, 1)).await.expect("a member");
        let map = watch.newer(Some(first.epoch)).await;
        assert_eq!(map.members.iter().map(|m| m.node).collect::<Vec<_>>(), [NodeId(1)]);
        assert_eq!(watcher.call(&GetMap).await.expect("a map").map, *map);

        let admin = client(control.local(), Role::Admin).await;
        let status = admin.call(&Status).await.expect("an admin may");
        assert_eq!((status.cluster.as_str(), status.epoch), ("test", map.epoch.0));
        let member = &status.members[0];
        assert_eq!((member.node, member.state.as_str(), member.shards), (1, "active", 1));
        assert_eq!(member.load, Some(beat(1, 1).load));

        let stale = node.call(&beat(1, 9)).await.expect_err("no such incarnation");
        assert_eq!(stale.refusal(), Some(RefusalCode::UnknownMember));
        let nameless = Leave { node: 1, incarnation: None };
        let error = node.call(&nameless).await.expect_err("a node says which incarnation");
        assert_eq!(error.refusal(), Some(RefusalCode::BadRequest));
        admin.call(&nameless).await.expect("an admin removes members");
        let map = watch.newer(Some(map.epoch)).await;
        assert!(map.members.is_empty());
        assert_eq!(admin.call(&Status).await.expect("an admin may").members, [], "it is no member any more");
        let ended = node.call(&beat(1, 1)).await.expect_err("that incarnation is over");
        assert_eq!(ended.refusal(), Some(RefusalCode::IncarnationEnded));
    });
    control.shutdown(Duration::from_secs(5)).expect("it stops");
}

#[test]
fn a_silent_node_is_lost() {
    let mut config = ControlConfig::new("test");
    config.cluster.heartbeat_interval_ns = 20_000_000;
    (config.cluster.unanswered_after_ns, config.cluster.suspect_after_ns) = (40_000_000, 40_000_000);
    config.cluster.heartbeat_deadline_ns = 60_000_000;
    config.cluster.restart_grace_ns = 20_000_000;
    let control = start(config);
    run(async {
        let node = client(control.local(), Role::Node).await;
        enter(&node, 1, 1).await;
        let mut watch = node.watch_map();
        let mut known = None;
        loop {
            let map = watch.newer(known).await;
            // The node may be expelled before the watch begins; an epoch above 1 proves that it was a member.
            if map.members.is_empty() && map.epoch > Epoch(1) {
                break;
            }
            known = Some(map.epoch);
        }
        let admin = client(control.local(), Role::Admin).await;
        let dead = &admin.call(&Status).await.expect("an admin may").members[0];
        assert_eq!((dead.state.as_str(), dead.load, dead.capacity_bytes), ("dead", None, 0), "nothing is left of it");
        admin.call(&Leave { node: 1, incarnation: None }).await.expect("an admin takes the dead out, too");
        assert_eq!(admin.call(&Status).await.expect("an admin may").members, []);
    });
}

fn segment(name: &str, owner: SegmentOwner) -> RegisterSegment {
    let address = SocketAddr::from(([127, 0, 0, 1], 7001));
    let ttl_ns = if matches!(owner, SegmentOwner::Client { .. }) { 60_000_000_000 } else { 0 };
    let segment = Segment { name: name.to_owned(), owner, kind: SegmentKind::Dram, bytes: 64, address, ttl_ns };
    RegisterSegment { segment }
}

#[test]
fn segments_are_registered_found_and_withdrawn() {
    let control = start(ControlConfig::new("test"));
    run(async {
        let node = client(control.local(), Role::Node).await;
        enter(&node, 1, 1).await;
        let client = client(control.local(), Role::Client).await;
        let (of_node, of_client) = (
            SegmentOwner::Node { node: NodeId(1), incarnation: Incarnation(1) },
            SegmentOwner::Client { client: ClientId(77) },
        );
        let error = client.call(&segment("b", of_node)).await.expect_err("not its memory");
        assert_eq!(error.refusal(), Some(RefusalCode::NotPermitted));
        node.call(&segment("b", of_node)).await.expect("its own memory");
        client.call(&segment("a", of_client)).await.expect("its own memory");
        let error = client.call(&segment("b", of_client)).await.expect_err("the name is taken");
        assert_eq!(error.refusal(), Some(RefusalCode::AlreadyExists));

        let renewed = client.call(&RenewSegments { client: 77 }).await.expect("it has one");
        assert_eq!(renewed.segments, 1);
        let error = client.call(&RenewSegments { client: 78 }).await.expect_err("it has none");
        assert_eq!(error.refusal(), Some(RefusalCode::UnknownClient));

        let page = client.call(&ListSegments { after: None, limit: 1 }).await.expect("a page");
        assert_eq!((page.segments[0].name.as_str(), page.more), ("a", true));
        let after = Some("a".to_owned());
        let page = client.call(&ListSegments { after, limit: u32::MAX }).await.expect("a page");
        assert_eq!((page.segments[0].name.as_str(), page.more), ("b", false));
        let found = client.call(&GetSegment { name: "b".to_owned() }).await.expect("it is there");
        assert_eq!(found.segment, segment("b", of_node).segment);

        let withdraw = UnregisterSegment { owner: of_client, name: "a".to_owned() };
        client.call(&withdraw).await.expect("its own");
        let error = client.call(&GetSegment { name: "a".to_owned() }).await.expect_err("gone");
        assert_eq!(error.refusal(), Some(RefusalCode::NotFound));
    });
}

#[test]
fn local_processes_find_it_while_it_runs() {
    let scratch = Scratch::new();
    let directory = RuntimeDirectory::at(scratch.path().join("run"));
    let name = kvplane_rpc::ClusterName::new("test").expect("a good name");
    let mut config = ControlConfig::new("test");
    config.publish = Some(directory.clone());
    let control = start(config.clone());
    run(async {
        let found = directory.discover(&name).expect("published");
        assert_eq!(found.control, control.address());
        client(&found, Role::Client).await.call(&GetMap).await.expect("served");
    });
    let text = refusal(config.clone());
    assert!(text.contains("already runs"), "{text}");
    drop(control);
    assert!(directory.discover(&name).is_err(), "the file goes with it");
    start(config);
}

#[test]
fn ports_in_use_are_named() {
    let udp = UdpSocket::bind(SocketAddr::from(LOOPBACK)).expect("a port");
    let mut config = ControlConfig::new("test");
    config.listen = udp.local_addr().expect("bound");
    let text = refusal(config);
    let port = udp.local_addr().expect("bound").port().to_string();
    assert!(text.contains(&port) && text.contains("UDP") && text.contains("choose another"), "{text}");

    let tcp = TcpListener::bind(SocketAddr::from(LOOPBACK)).expect("a port");
    let mut config = ControlConfig::new("test");
    config.http_listen = Some(tcp.local_addr().expect("bound"));
    let text = refusal(config);
    let port = tcp.local_addr().expect("bound").port().to_string();
    assert!(text.contains(&port) && text.contains("TCP") && text.contains("choose another"), "{text}");
}

#[test]
fn senseless_settings_are_refused() {
    let mut config = ControlConfig::new("test");
    config.http_listen = Some(SocketAddr::from(([0, 0, 0, 0], 0)));
    let text = refusal(config.clone());
    assert!(text.contains("0.0.0.0") && text.contains("authentication"), "{text}");
    config.http_without_authentication_anywhere = true;
    let text = refusal(config.clone());
    assert!(text.contains("--http-token-file"), "there is nothing that may be open: {text}");
    config.mooncake_metadata = Some(MetadataLimits::default());
    start(config);

    let text = refusal(ControlConfig::new("Not A Name"));
    assert!(text.contains("Not A Name"), "{text}");
    let mut config = ControlConfig::new("test");
    config.cluster.replicas = 0;
    let text = refusal(config);
    assert!(text.contains("replicas is 0"), "{text}");
    let mut config = ControlConfig::new("test");
    config.limits.idle_timeout = Duration::from_secs(1);
    let text = refusal(config);
    assert!(text.contains("idle_timeout"), "{text}");
}

#[test]
fn a_dropped_handle_frees_the_port() {
    let control = start(ControlConfig::new("test"));
    let mut config = ControlConfig::new("test");
    config.listen = control.address();
    drop(control);
    let control = start(config);
    control.shutdown(Duration::from_secs(5)).expect("it stops");
}
