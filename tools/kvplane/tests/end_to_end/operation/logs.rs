//! Tests of logs: lines of text or JSON, at the requested level.

use crate::support::{Process, Workplace, finish, text};

#[test]
fn members_and_maps_are_logged_at_the_set_level() {
    let place = Workplace::new("logs");
    let state = place.path("state");
    let control =
        Process::start(place.command(&["control", "--state", text(&state), "--log", "info", "--log-format", "json"]));
    control.wait_for("(QUIC)");
    let mut node =
        Process::start(place.command(&["node", "--pool", "8M", "--node-id", "3", "--shards", "1", "--log", "info"]));
    node.wait_for("shard 0");
    let line = control.wait_for("a node joins");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
    assert_eq!(
        (line["level"].as_str(), line["node"].as_u64(), line["shards"].as_u64()),
        (Some("INFO"), Some(3), Some(1))
    );
    assert!(line["timestamp"].is_string() && line["target"].as_str().is_some_and(|at| at.starts_with("kvplane")));
    let line = node.wait_for("joined");
    assert!(line.contains(" INFO ") && line.contains("node=3"), "{line}");
    assert!(node.stop().success());
    control.wait_for("a node leaves");

    // Only warnings and errors are logged; the flag overrides the variable.
    let mut command = place.command(&["node", "--pool", "8M", "--node-id", "4", "--shards", "1", "--log", "warn"]);
    command.env("KVPLANE_LOG", "debug");
    let quiet = Process::start(command);
    quiet.wait_for("shard 0");
    assert!(!quiet.said().iter().any(|line| line.contains("INFO")), "{:?}", quiet.said());
    let mut control = control;
    control.kill();
    quiet.wait_for("serving by the last map");
    let mut command = place.command(&["control", "--state", text(&state)]);
    command.env("KVPLANE_LOG", "loud");
    finish(command, &[]).failed(1, &["KVPLANE_LOG=\"loud\" is not a log level"]);
}
