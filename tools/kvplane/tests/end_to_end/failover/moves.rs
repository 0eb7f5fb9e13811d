//! Tests of orderly changes of membership: nodes join and leave, and objects stay where clients find them.

use std::time::{Duration, Instant};

use kvplane::Client;

use crate::support::{Process, Way, Workplace, health, http_ask, text, wait_until};

/// Number and length of the objects.
const OBJECTS: u64 = 2000;
const BYTES: usize = 6000;
/// Number of objects of a drained node.
const DRAINED: u64 = 200;

fn value(key: u64) -> Vec<u8> {
    (0..BYTES as u64).map(|at| (key.wrapping_mul(0x9e37_79b9) ^ at ^ at >> 8) as u8).collect()
}

fn name(key: u64) -> String {
    format!("moved-{key}")
}

fn control(place: &Workplace) -> Process {
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state)]));
    control.wait_for("metrics on");
    control
}

fn node(place: &Workplace, number: u64) -> Process {
    let number = number.to_string();
    let arguments = ["node", "--pool", "64M", "--shards", "2", "--node-id", &number, "--drain", "60"];
    let node = Process::start(place.command(&arguments));
    node.wait_for("node ");
    node
}

fn members(control: &Process, count: u64) {
    let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
    assert_eq!(there, Some(()), "{count} members");
}

/// Outcome of gets.
#[derive(Default)]
struct GetCounts {
    asked: u64,
    hits: u64,
}

impl GetCounts {
    /// Gets every object once.
    fn sweep(&mut self, client: &mut Client) -> u64 {
        let before = self.hits;
        for key in 0..OBJECTS {
            self.asked += 1;
            if let Some(bytes) = client.get(name(key).as_bytes()).expect("a get in time") {
                assert_eq!(bytes, value(key), "{}", name(key));
                self.hits += 1;
            }
        }
        self.hits - before
    }

    /// Sweeps until `done`, and at least for this time.
    fn sweep_until(&mut self, client: &mut Client, least: Duration, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while start.elapsed() < least || !done() {
            self.sweep(client);
            assert!(start.elapsed() < Duration::from_secs(100), "it takes too long");
        }
    }

    fn rate(&self) -> f64 {
        self.hits as f64 / self.asked as f64
    }
}

#[test]
fn hits_stay_through_a_join_and_a_leave_in_order() {
    let place = Workplace::new("moves");
    let control = control(&place);
    let mut nodes: Vec<Process> = (1..=3).map(|number| node(&place, number)).collect();
    members(&control, 3);
    let mut client = place.client(Way::Tcp);
    let mut near = place.client(Way::Shm);
    for key in 0..OBJECTS {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    let mut steady = GetCounts::default();
    assert_eq!(steady.sweep(&mut client), OBJECTS);

    // One more node joins: about a quarter of the slots migrates to it.
    let mut joined = GetCounts::default();
    let newcomer = node(&place, 4);
    members(&control, 4);
    joined.sweep_until(&mut near, Duration::from_secs(3), || true);
    assert!(client.size(name(7).as_bytes()).unwrap().is_some(), "the length of a migrating object is returned");

    // Objects removed or replaced meanwhile do not come back.
    for key in 0..20 {
        assert!(client.remove(name(key).as_bytes()).unwrap(), "{}", name(key));
        assert_eq!(client.get(name(key).as_bytes()).unwrap(), None);
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }

    // Another node leaves in order, and the others have its objects when it is gone.
    let mut left = GetCounts::default();
    nodes[0].signal("TERM");
    left.sweep_until(&mut client, Duration::from_secs(1), || health(control.http())["members"] == 3);
    let status = nodes[0].ended();
    assert!(status.success(), "{:?}", nodes[0].said());
    let said = nodes[0].said().join("\n");
    assert!(said.contains("drained: other nodes hold all objects"), "{said}");
    let mut after = GetCounts::default();
    after.sweep(&mut client);
    println!(
        "hit rate: steady {:.4}, while a node joined {:.4} ({} gets), while one left {:.4} ({} gets), after {:.4}",
        steady.rate(),
        joined.rate(),
        joined.asked,
        left.rate(),
        left.asked,
        after.rate()
    );
    assert!(joined.rate() >= 0.98 && left.rate() >= 0.98 && after.rate() >= 0.98);
    drop(newcomer);
}

/// Starts two nodes, with objects on both.
fn two_with_objects(place: &Workplace) -> (Process, Vec<Process>, Client) {
    let control = control(place);
    let nodes: Vec<Process> = (1..=2).map(|number| node(place, number)).collect();
    members(&control, 2);
    let mut client = place.client(Way::Tcp);
    for key in 0..DRAINED {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    (control, nodes, client)
}

fn all_there(client: &mut Client) {
    for key in 0..DRAINED {
        assert_eq!(client.get(name(key).as_bytes()).unwrap().as_deref(), Some(&value(key)[..]), "{}", name(key));
    }
}

#[test]
fn a_node_that_is_drained_by_the_operator_has_nothing_left() {
    let place = Workplace::new("drained");
    let (_control, _nodes, mut client) = two_with_objects(&place);
    let said = place.run(&["ctl", "drain", "2", "--wait", "30"]).text();
    assert!(said.contains("node 2 is drained"), "{said}");
    let status = place.run(&["ctl", "status"]).text();
    assert!(status.lines().any(|line| line.contains(" 2  draining ")), "{status}");
    all_there(&mut client);
    place.run(&["ctl", "drain", "1"]).failed(1, &["no node but 1 takes slots now"]);
    place.run(&["ctl", "drain", "9"]).failed(1, &["node 9 is not known"]);
    assert!(place.run(&["ctl", "tasks"]).text().contains("drain of node 2: 0 objects"));

    // The drain is cancelled: the node gets its share, with the objects in it, again.
    place.run(&["ctl", "drain", "9", "--cancel"]).failed(1, &["node 9 is not known"]);
    place.run(&["ctl", "drain", "2", "--cancel"]).well();
    let objects = || {
        let status: serde_json::Value = serde_json::from_slice(&place.run(&["ctl", "status", "--json"]).well()).ok()?;
        let members = status["members"].as_array()?;
        let of = members.iter().find(|member| member["node"] == 2)?;
        assert_eq!(of["state"], "active");
        of["objects"].as_u64().filter(|objects| *objects >= 50)
    };
    assert!(wait_until(objects).is_some(), "some objects are back with node 2");
    assert!(place.run(&["ctl", "tasks"]).text().contains("no task is in flight"));
    all_there(&mut client);
    place.run(&["ctl", "drain", "2", "--cancel"]).well();
}

#[test]
fn drain_jobs_are_created_queried_and_cancelled_as_by_mooncakes_tools() {
    let place = Workplace::new("jobs");
    let (control, _nodes, mut client) = two_with_objects(&place);
    let ask = |method: &str, path: &str, body: &str| {
        let (status, text) = http_ask(control.http(), method, path, body);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{path}: {text}"));
        (status, value)
    };
    let reported = |detail: &serde_json::Value| {
        let all = detail["segments"].as_array().unwrap();
        all.iter().all(|segment| segment["allocator_used_bytes"].as_u64() > Some(0))
    };
    let detail = wait_until(|| Some(ask("GET", "/get_segments_detail", "").1).filter(reported)).expect("both report");
    let of = |node: &str| {
        let all = detail["segments"].as_array().unwrap().iter();
        all.clone().find(|segment| segment["client_id"] == node).unwrap()["segment_name"].as_str().unwrap().to_owned()
    };
    let (first, second) = (of("1"), of("2"));
    let jobs = "/api/v1/drain_jobs";
    for (body, status) in [("{", 400), ("{}", 400), ("{\"segments\":[\"none\"]}", 404)] {
        assert_eq!(ask("POST", jobs, body).0, status, "{body}");
    }
    assert_eq!(ask("PUT", jobs, "").0, 405);
    // Both cannot drain: the first keeps its share.
    let (status, refused) = ask("POST", jobs, &format!("{{\"segments\":[\"{first}\",\"{second}\"]}}"));
    assert_eq!(status, 409, "{refused}");
    assert!(refused["error_message"].as_str().unwrap().contains("takes slots now"), "{refused}");
    assert_eq!(ask("GET", jobs, "").1["jobs"], serde_json::json!([]));

    let (status, job) = ask("POST", jobs, &format!("{{\"segments\":[\"{second}\"],\"max_concurrency\":4}}"));
    assert_eq!((status, &job["success"]), (200, &true.into()), "{job}");
    let id = job["job_id"].as_str().unwrap().to_owned();
    let query = format!("{jobs}/query?job_id={id}");
    let done = wait_until(|| (ask("GET", &query, "").1["status_name"] == "SUCCEEDED").then_some(()));
    let (_, job) = ask("GET", &query, "");
    assert_eq!((done, &job["succeeded_units"], &job["remaining_objects"]), (Some(()), &1.into(), &0.into()), "{job}");
    assert!(job["migrated_bytes"].as_u64() > Some(0), "{job}");
    assert_eq!(ask("GET", jobs, "").1["jobs"][0]["job_id"], id.as_str());
    let segment = format!("/api/v1/segments/status?segment={second}");
    let drained = wait_until(|| (ask("GET", &segment, "").1["status_name"] == "DRAINED").then_some(()));
    assert_eq!(drained, Some(()), "{}", ask("GET", &segment, "").1);

    let (status, job) = ask("POST", &format!("{jobs}/cancel?job_id={id}"), "");
    assert_eq!((status, &job["status_name"]), (200, &"CANCELED".into()), "{job}");
    for (path, status) in [("/query", 400), ("/query?job_id=drain-77.1", 404), ("/query?job_id=no", 404)] {
        let (found, said) = ask("GET", &format!("{jobs}{path}"), "");
        let code = if status == 404 { -1402 } else { -600 };
        assert_eq!((found, &said["error_code"]), (status, &code.into()), "{path}");
    }
    assert_eq!(ask("GET", &format!("{jobs}/cancel?job_id={id}"), "").0, 405);
    all_there(&mut client);
}

/// Other nodes learn from the control plane that they own the slots now: without it the node need not wait.
#[test]
fn a_node_stops_without_a_control_plane() {
    let place = Workplace::new("alone");
    let mut control = control(&place);
    let number = "1".to_owned();
    let arguments = ["node", "--pool", "64M", "--shards", "1", "--node-id", &number, "--drain", "3600"];
    let mut first = Process::start(place.command(&arguments));
    first.wait_for("node 1 with");
    let _second = node(&place, 2);
    members(&control, 2);
    let mut client = place.client(Way::Tcp);
    for key in 0..DRAINED {
        client.put(name(key).as_bytes(), &value(key)).unwrap();
    }
    control.kill();
    // The stop takes far less than the hour that `--drain` allows.
    assert!(first.stop().success());
    first.wait_for("drain failed");
}
