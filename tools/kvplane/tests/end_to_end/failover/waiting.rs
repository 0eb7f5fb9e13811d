//! Tests of nodes that start before their control plane, and of the control plane's HTTP port without a client's
//! certificate.

use std::os::unix::fs::DirBuilderExt;

use crate::security::certificates::{authority, cert, ctl, issue, node};
use crate::support::{Process, Workplace, finish, http_ask, http_get, text};

fn control(place: &Workplace, listen: &str) -> Process {
    let (state, identity, run) = (place.path("state"), place.path("plane"), place.runtime());
    let process = Process::start(place.bare(&[
        "control",
        "--cluster",
        &place.cluster,
        "--listen",
        listen,
        "--state",
        text(&state),
        "--identity",
        text(&identity),
        "--runtime-directory",
        text(&run),
    ]));
    process.wait_for("(QUIC)");
    process
}

#[test]
fn a_node_waits_for_a_control_plane_that_starts_after_it() {
    let place = Workplace::new("waiting");
    cert(&place, &["init", "--authority", &authority(&place)]).well();
    issue(&place, "plane", "control", &[]);
    issue(&place, "seven", "node", &["--node-id", "7"]);
    // A port that was free just now.
    let at = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (identity, run) = (place.path("seven"), place.runtime());
    let (address, identity) = (at.to_string(), identity.to_str().unwrap());
    let fixed = ["node", "--cluster", &place.cluster, "--pool", "16M", "--shards", "1", "--node-id", "7"];
    let whom = ["--control", &address, "--identity", identity, "--runtime-directory", run.to_str().unwrap()];
    let of = |more: &[&str]| place.bare(&[&fixed[..], &whom[..], more].concat());
    // Without the flag, the node does not wait.
    finish(of(&[]), &[]).failed(1, &[&address]);
    // A waiting node can be stopped.
    let mut waiting = Process::start(of(&["--wait-control", "600"]));
    waiting.wait_for("trying again for up to");
    assert!(waiting.stop().success());
    let mut waiting = Process::start(of(&["--wait-control", "600"]));
    waiting.wait_for("trying again for up to");
    let _plane = control(&place, &address);
    waiting.wait_for("node 7 with");
    // A restart from other ports right after a kill: the former incarnation is taken for alive for some seconds yet.
    waiting.kill();
    finish(of(&[]), &[]).failed(1, &["node id 7 is in use", "try again in"]);
    let again = Process::start(of(&["--wait-control", "600"]));
    again.wait_for("node id 7 is in use");
    again.wait_for("node 7 with");
    // A living node with the number is not waited for that long.
    let elsewhere = place.path("elsewhere");
    std::fs::DirBuilder::new().mode(0o700).create(&elsewhere).unwrap();
    let whom = ["--control", &address, "--identity", identity, "--runtime-directory", text(&elsewhere)];
    let second = place.bare(&[&fixed[..], &whom[..], &["--wait-control", "600"]].concat());
    let refused = finish(second, &[]);
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert_eq!(refused.stderr.matches("node id 7 is in use").count(), 2, "at first, and at last: {}", refused.stderr);
}

#[test]
fn http_accesses_objects_only_with_a_clients_certificate() {
    let place = Workplace::new("http-objects");
    cert(&place, &["init", "--authority", &authority(&place)]).well();
    issue(&place, "plane", "control", &[]);
    issue(&place, "seven", "node", &["--node-id", "7"]);
    issue(&place, "people", "client", &[]);
    let mut plane = control(&place, "127.0.0.1:0");
    plane.wait_for("are answered 501");
    let remove = |plane: &Process| http_ask(plane.http(), "POST", "/api/v1/remove_all", "");
    let (status, said) = http_get(plane.http(), "/get_all_keys");
    assert!(status == 501 && said.contains("client.pem"), "{status} {said}");
    assert_eq!(remove(&plane).0, 501);
    plane.stop();
    // With a client's certificate both paths work.
    issue(&place, "plane", "client", &[]);
    let plane = control(&place, "127.0.0.1:0");
    let at = plane.quic();
    let serving = node(&place, &at, "seven", "7");
    serving.wait_for("node 7 with");
    let file = place.file("value", b"1");
    ctl(&place, &at, "people", &["put", "a", text(&file)]).well();
    assert_eq!(http_get(plane.http(), "/get_all_keys"), (200, "a\n".to_owned()));
    let (status, said) = remove(&plane);
    assert!(status == 200 && said.contains("\"removed_count\":1"), "{status} {said}");
}
