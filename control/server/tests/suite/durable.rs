//! Tests of the durable state: a child is killed with SIGKILL and restarted on the same state.

use crate::support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::ClusterMap;
use kvplane_rpc::message::*;
use kvplane_rpc::{Authority, ClientConfig, ClusterName, LocalCluster, RefusalCode, Role};
use kvplane_server::{ControlConfig, ControlServer, STATE_FILE};
use support::{Scratch, beat, client, enter, join, run};

const STATE: &str = "KVPLANE_TEST_STATE_DIRECTORY";
const LISTEN: &str = "KVPLANE_TEST_LISTEN";

fn config(state: &Path) -> ControlConfig {
    let mut config = ControlConfig::new("test");
    config.state_directory = Some(state.to_owned());
    // Members may offer their map if there is no state, and the tests do not wait for that.
    config.cluster.adoption_wait_ns = Some(0);
    config
}

/// Not a test: the child process of one. Without its variable it does nothing.
#[test]
fn child_control_plane() {
    let Some(state) = std::env::var_os(STATE) else { return };
    let mut config = config(Path::new(&state));
    config.listen = std::env::var(LISTEN).expect("set with the other").parse().expect("an address");
    let control = ControlServer::start(config).expect("a control plane");
    println!("\nlistens {}", control.address());
    // The parent kills this process; if the parent has died, the pipe closes.
    let _ = std::io::stdin().read_line(&mut String::new());
}

pub(crate) struct KilledControl(Child);

impl Drop for KilledControl {
    fn drop(&mut self) {
        // SIGKILL: no handler runs, nothing is flushed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(crate) fn spawn(state: &Path, listen: SocketAddr) -> (KilledControl, LocalCluster) {
    let mut child = Command::new(std::env::current_exe().expect("our own path"))
        .args(["--exact", "durable::child_control_plane", "--nocapture"])
        .env(STATE, state)
        .env(LISTEN, listen.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let child = KilledControl(child);
    let address = output
        .lines()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("listens ")?.parse().ok())
        .expect("it says where it listens");
    let name = ClusterName::new("test").expect("a good name");
    let authority = Authority::load_or_generate(state, &name).expect("it is there");
    let roles = [Role::Node, Role::Client, Role::Admin];
    let identities = roles.map(|role| (role, authority.issue(role).expect("an identity"))).to_vec();
    (child, LocalCluster::new(name, address, authority.trust().clone(), identities))
}

async fn map(local: &LocalCluster) -> (ClusterMap, u64) {
    let client = client(local, Role::Client).await;
    let state_id = client.welcome().await.expect("connected").state_id;
    (client.call(&GetMap).await.expect("a map").map, state_id)
}

#[test]
fn map_and_epoch_survive_a_kill() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let (child, local) = spawn(&state, ANYWHERE);
        let node = client(&local, Role::Node).await;
        enter(&node, 1, 1).await;
        enter(&node, 2, 5).await;
        node.call(&Leave { node: 2, incarnation: Some(5) }).await.expect("it leaves");
        enter(&node, 3, 1).await;
        let owner = SegmentOwner::Node { node: NodeId(1), incarnation: Incarnation(1) };
        let address = local.control;
        let segment = Segment { name: "s".to_owned(), owner, kind: SegmentKind::Dram, bytes: 1, address, ttl_ns: 0 };
        node.call(&RegisterSegment { segment: segment.clone() }).await.expect("registered");
        let (before, state_id) = map(&local).await;
        assert_eq!(before.members.len(), 2);
        drop(child);

        let (_child, local) = spawn(&state, ANYWHERE);
        let (after, same_state) = map(&local).await;
        assert_eq!((after, same_state), (before.clone(), state_id));
        let node = client(&local, Role::Node).await;
        let found = node.call(&GetSegment { name: "s".to_owned() }).await.expect("it is there");
        assert_eq!(found.segment, segment);
        node.call(&beat(1, 1)).await.expect("a member goes on without joining again");
        enter(&node, 4, 1).await;
        assert!(map(&local).await.0.epoch > before.epoch, "the epoch goes on from where it was");
    });
}

#[test]
fn a_lost_state_is_adopted_from_members() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let (child, local) = spawn(&state, ANYWHERE);
        let node = client(&local, Role::Node).await;
        enter(&node, 1, 1).await;
        enter(&node, 2, 1).await;
        let (before, state_id) = map(&local).await;
        drop(child);
        fs::remove_file(state.join(STATE_FILE)).expect("it is there");

        let (child, local) = spawn(&state, ANYWHERE);
        let (node, other) = (client(&local, Role::Node).await, client(&local, Role::Client).await);
        assert_ne!(other.welcome().await.expect("connected").state_id, state_id);
        // A watcher that was welcomed with the empty state is closed and welcomed with the adopted one before its map.
        let mut watch = other.watch_map();
        watch.newer(None).await;
        for id in [1, 2] {
            let unknown = node.call(&beat(id, 1)).await.expect_err("it is not known");
            assert_eq!(unknown.refusal(), Some(RefusalCode::UnknownMember));
            let offer = OfferMap { join: join(id, 1), state: state_id, map: before.clone(), devices: 0, since: 0 };
            node.call(&offer).await.expect("it is taken");
        }
        node.call(&beat(1, 1)).await.expect("a member goes on without joining again");
        let (after, same_state) = map(&local).await;
        assert_eq!((&after.members, same_state), (&before.members, state_id));
        assert!(after.epoch > before.epoch, "no epoch is published twice");
        while watch.state().map.is_none_or(|map| map.epoch != after.epoch) {
            watch.changed().await;
        }
        assert_eq!(watch.state().state_id, state_id);
        drop(child);

        let (_child, local) = spawn(&state, ANYWHERE);
        assert_eq!(map(&local).await, (after, state_id), "it was made durable");
    });
}

#[test]
fn a_client_outlives_a_killed_control_plane() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let (child, local) = spawn(&state, ANYWHERE);
        let mut config = ClientConfig::local(&local, Role::Node, "test").expect("an identity");
        config.limits.idle_timeout = Duration::from_millis(500);
        config.limits.keep_alive_interval = Duration::from_millis(100);
        config.limits.call_deadline = Duration::from_millis(500);
        let rng = kvplane_proto::rng::Rng::new(1, "test");
        let (client, _) = kvplane_rpc::Client::connect(&config, rng).await.expect("connected");
        let mut watch = client.watch_map();
        watch.newer(None).await;
        drop(child);
        while watch.state().trouble.is_none() {
            watch.changed().await;
        }
        let error = client.call(&GetMap).await.expect_err("nobody is there");
        assert!(error.code() >= 100, "{error}");
        assert!(watch.state().map.is_some(), "the last map stays");

        let (_child, _) = spawn(&state, local.control);
        while watch.state().trouble.is_some() {
            watch.changed().await;
        }
        enter(&client, 1, 1).await;
        assert_eq!(watch.newer(Some(Epoch(0))).await.members.len(), 1, "the watch goes on");
    });
}

#[test]
fn a_state_in_use_is_named() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    let control = ControlServer::start(config(&state)).expect("a control plane");
    let text = ControlServer::start(config(&state)).expect_err("refused").to_string();
    let file = state.join(STATE_FILE).display().to_string();
    assert!(text.contains(&file) && text.contains("in use"), "{text}");
    drop(control);
    ControlServer::start(config(&state)).expect("free again");
}

#[test]
fn another_clusters_state_and_damage_are_named() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    drop(ControlServer::start(config(&state)).expect("a control plane"));
    let mut other = config(&state);
    other.cluster.cluster = "other".to_owned();
    let text = ControlServer::start(other).expect_err("refused").to_string();
    assert!(text.contains("other"), "{text}");

    let file = state.join(STATE_FILE);
    fs::write(&file, b"not a database").expect("writable");
    let text = ControlServer::start(config(&state)).expect_err("refused").to_string();
    assert!(text.contains(&file.display().to_string()), "{text}");
}

#[test]
fn a_state_directory_open_to_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    fs::create_dir(&state).expect("new");
    fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).expect("ours");
    let text = ControlServer::start(config(&state)).expect_err("refused").to_string();
    assert!(text.contains("755") && text.contains("chmod 700"), "{text}");
}
