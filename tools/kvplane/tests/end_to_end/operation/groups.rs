//! Tests of process groups as operators see them, and of a control plane that a job starts for itself.

use std::time::Duration;

use serde_json::{Value, json};

use crate::members::LinkedProcess;
use crate::support::{Process, Workplace, wait_until};

fn plane(place: &Workplace, seconds: &str) -> Process {
    let plane = Process::start(place.command(&["control", "--stop-when-idle", seconds, "--log", "info"]));
    plane.wait_for("(QUIC)");
    plane
}

#[test]
fn operators_see_worlds_with_their_processes_and_groups() {
    let place = Workplace::new("groups");
    let mut plane = plane(&place, "1");
    let control = place.control();
    let processes = [0, 1].map(|rank| LinkedProcess::attached(&control, rank, 7, 2));
    for process in &processes {
        process.fake.wait_for_view(&[0, 1]);
    }
    let list = place.run(&["ctl", "groups"]).text();
    let row = list.lines().nth(1).unwrap_or_default().split_whitespace().collect::<Vec<_>>();
    assert_eq!(row, ["job", "default", "2", "1", "0", "0", "0"], "{list}");
    let others = place.run(&["ctl", "groups", "--tenant", "acme", "--json"]).text();
    assert_eq!(serde_json::from_str::<Value>(&others).unwrap(), json!({ "worlds": [] }));
    // The state of a process is known once its peers have reported the newest roster.
    let shown = wait_until(|| {
        let text = place.run(&["ctl", "groups", "job", "--json"]).text();
        let world: Value = serde_json::from_str(&text).unwrap();
        let is_healthy = |process: &Value| process["state"] == "healthy";
        world["processes"].as_array()?.iter().all(is_healthy).then_some(world)
    });
    let world = shown.expect("the processes are healthy");
    assert_eq!(world["processes"][1]["address"], "rank-1:1");
    let group = &world["groups"][0];
    assert_eq!((&group["name"], &group["epoch"], &group["active"]), (&json!("g"), &json!(1), &json!([0, 1])));
    let text = place.run(&["ctl", "groups", "job"]).text();
    assert!(text.contains("world job of tenant default: 2 processes, 1 groups"), "{text}");
    assert!(text.contains("epoch 1, 2 of at most 4 members take part"), "{text}");
    place.run(&["ctl", "groups", "other"]).failed(1, &["there is no world \"other\""]);

    // It stays while processes report, and stops soon after the last of them.
    std::thread::sleep(Duration::from_millis(1_500));
    plane.assert_alive();
    drop(processes);
    assert!(plane.ended().success(), "{:?}", plane.said());
    assert!(plane.said().iter().any(|line| line.contains("--stop-when-idle")), "{:?}", plane.said());
    assert_eq!(place.left_over(".local"), Vec::<String>::new());
}

#[test]
fn a_control_plane_outlives_the_process_that_started_it() {
    let place = Workplace::new("detached");
    let (run, log) = (place.runtime(), place.path("log"));
    // The shell ends at once, and its session with it.
    let mut starter = std::process::Command::new("setsid");
    let script = r#""$0" control --cluster detached --stop-when-idle 3 --runtime-directory "$1" >"$2" 2>&1 &"#;
    starter.args(["sh", "-c", script, env!("CARGO_BIN_EXE_kvplane")]).args([&run, &log]);
    assert!(starter.status().expect("a shell").success());
    let control = place.control();
    wait_until(|| (!place.left_over(".local").is_empty()).then_some(())).expect("it publishes its address");
    let process = LinkedProcess::attached(&control, 0, 1, 1);
    process.fake.wait_for_view(&[0]);
    drop(process);
    let said = || std::fs::read_to_string(&log).ok().filter(|text| text.contains("the control plane stops"));
    wait_until(said).expect("it stops when nobody reports");
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let place = Workplace::new("settings");
    let control = |more: &[&str]| place.run(&[&["control"], more].concat());
    control(&[]).failed(2, &["--state"]);
    control(&["--stop-when-idle", "0"]).failed(2, &["--stop-when-idle"]);
    let shared = ["--state", "etcd://127.0.0.1:1", "--identity", "/", "--stop-when-idle", "1"];
    control(&shared).failed(1, &["stops when idle"]);
    control(&["--stop-when-idle", "1", "--group-refused-ms", "800"]).failed(1, &["--group-overdue-ms 750"]);
}
