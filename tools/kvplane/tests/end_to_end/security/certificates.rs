//! Tests of a cluster with certificates from an operator: no process uses a runtime directory, and each presents a
//! certificate that `kvplane ctl cert` issued.

use crate::support::{Outcome, Process, Workplace, finish, wait_until};

/// Runs `kvplane ctl cert` with these arguments.
pub(crate) fn cert(place: &Workplace, arguments: &[&str]) -> Outcome {
    finish(place.bare(&[&["ctl", "--cluster", &place.cluster, "cert"], arguments].concat()), &[])
}

pub(crate) fn issue(place: &Workplace, out: &str, role: &str, more: &[&str]) {
    let (authority, out) = (place.path("ca"), place.path(out));
    let fixed = ["issue", role, "--authority", authority.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let said = cert(place, &[&fixed, more].concat()).text();
    assert!(said.contains(role), "{said}");
}

/// Runs `kvplane ctl` with the certificates of this directory.
pub(crate) fn ctl(place: &Workplace, control: &impl ToString, identity: &str, arguments: &[&str]) -> Outcome {
    let (at, identity) = (control.to_string(), place.path(identity));
    let whom = ["--control", &at, "--identity", identity.to_str().unwrap()];
    finish(place.bare(&[&["ctl", "--cluster", &place.cluster][..], arguments, &whom].concat()), &[])
}

fn control(place: &Workplace) -> Process {
    let (state, identity, run) = (place.path("state"), place.path("plane"), place.runtime());
    let control = Process::start(place.bare(&[
        "control",
        "--cluster",
        &place.cluster,
        "--state",
        state.to_str().unwrap(),
        "--identity",
        identity.to_str().unwrap(),
        "--runtime-directory",
        run.to_str().unwrap(),
    ]));
    control.wait_for("(QUIC)");
    control
}

pub(crate) fn node(place: &Workplace, control: &impl ToString, identity: &str, number: &str) -> Process {
    let (at, identity, run) = (control.to_string(), place.path(identity), place.runtime());
    Process::start(place.bare(&[
        "node",
        "--cluster",
        &place.cluster,
        "--pool",
        "16M",
        "--shards",
        "1",
        "--node-id",
        number,
        "--control",
        &at,
        "--identity",
        identity.to_str().unwrap(),
        "--runtime-directory",
        run.to_str().unwrap(),
    ]))
}

pub(crate) fn authority(place: &Workplace) -> String {
    place.path("ca").to_str().unwrap().to_owned()
}

#[test]
fn a_cluster_of_issued_certificates_lets_in_whom_they_say() {
    let place = Workplace::new("issued");
    cert(&place, &["init", "--authority", &authority(&place)]).well();
    cert(&place, &["init", "--authority", &authority(&place)]).failed(1, &["has an authority already"]);
    issue(&place, "plane", "control", &[]);
    issue(&place, "seven", "node", &["--node-id", "7"]);
    issue(&place, "people", "client", &["--days", "2"]);
    issue(&place, "people", "admin", &[]);
    let plane = control(&place);
    let at = plane.quic();
    let serving = node(&place, &at, "seven", "7");
    serving.wait_for("node 7 with");
    node(&place, &at, "seven", "8").wait_for("may not speak for node 8");

    ctl(&place, &at, "people", &["put", "a", file(&place)]).well();
    assert_eq!(ctl(&place, &at, "people", &["get", "a"]).well(), b"issued");
    let status = ctl(&place, &at, "people", &["status"]).text();
    assert!(status.lines().any(|line| line.trim_start().starts_with("7 ")), "{status}");
    // No identity is left in the runtime directory for other processes of this user.
    let local = finish(place.command(&["ctl", "status"]), &[]);
    local.failed(1, &["left no identity of role admin", "--identity"]);
    // A node's certificate is not an operator's, and the error for a directory without one names the missing file.
    ctl(&place, &at, "seven", &["status"]).failed(1, &["admin.pem"]);
    // An admin's certificate allows all of an operator's commands; an error for another role names the allowed ones.
    issue(&place, "ops", "admin", &[]);
    issue(&place, "apps", "client", &[]);
    issue(&place, "placing", "scheduler", &[]);
    ctl(&place, &at, "ops", &["put", "b", file(&place)]).well();
    assert_eq!(ctl(&place, &at, "ops", &["get", "b", "--data-tls", "offer"]).well(), b"issued");
    let needed = ["role admin or scheduler", "admin.pem or scheduler.pem", "client.pem", "cert issue admin"];
    ctl(&place, &at, "apps", &["status"]).failed(1, &needed);
    ctl(&place, &at, "placing", &["put", "c", file(&place)]).failed(1, &["role client or admin", "scheduler.pem"]);
    ctl(&place, &at, "placing", &["status"]).well();
    // Clients may follow events of objects.
    let followed = ctl(&place, &at, "apps", &["events", "--count", "2"]).text();
    assert_eq!(followed.matches(" stored ").count(), 2, "{followed}");
    // A node may drain itself, although it may not list the objects that are left.
    issue(&place, "eight", "node", &["--node-id", "8"]);
    let heir = node(&place, &at, "eight", "8");
    heir.wait_for("node 8 with");
    ctl(&place, &at, "seven", &["drain", "8"]).failed(1, &["may not speak for node 8"]);
    let drained = ctl(&place, &at, "seven", &["drain", "7"]).text();
    assert!(drained.contains("is draining"), "{drained}");
    ctl(&place, &at, "seven", &["drain", "7", "--wait", "5"]).failed(1, &["an admin's; the drain continues"]);
    // An address without an identity is incomplete.
    finish(place.bare(&["ctl", "--control", "127.0.0.1:9", "status"]), &[]).failed(2, &["--identity"]);
}

fn file(place: &Workplace) -> &'static str {
    // The leaked path lives as long as the test.
    Box::leak(place.file("value", b"issued").to_str().unwrap().to_owned().into_boxed_str())
}

#[test]
fn a_new_authority_key_replaces_a_leaked_one() {
    let place = Workplace::new("rotated");
    let ca = authority(&place);
    cert(&place, &["init", "--authority", &ca]).well();
    issue(&place, "plane", "control", &[]);
    issue(&place, "old", "admin", &[]);
    let mut plane = control(&place);
    let at = plane.quic();
    ctl(&place, &at, "old", &["status"]).well();

    cert(&place, &["rotate", "--authority", &ca]).well();
    cert(&place, &["rotate", "--authority", &ca]).failed(1, &["retire"]);
    issue(&place, "new", "admin", &[]);
    issue(&place, "plane", "control", &[]);
    // The control plane reloads its certificate, and then only clients with the new ca.pem accept it.
    let status = |identity: &str| ctl(&place, &at, identity, &["status"]).status.success();
    assert!(wait_until(|| (status("new") && !status("old")).then_some(())).is_some(), "{:?}", plane.said());
    std::fs::copy(place.path("ca").join("ca.pem"), place.path("old").join("ca.pem")).unwrap();
    ctl(&place, &at, "old", &["status"]).well();

    cert(&place, &["retire", "--authority", &ca]).well();
    issue(&place, "plane", "control", &[]);
    assert!(wait_until(|| (!status("old")).then_some(())).is_some(), "{:?}", plane.said());
    assert!(status("new"), "{:?}", plane.said());
    plane.assert_alive();
}
