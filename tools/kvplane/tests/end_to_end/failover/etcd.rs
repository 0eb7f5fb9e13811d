//! Tests of several control planes over a real etcd: a leader and standbys; leaders are killed and stopped, etcd is
//! killed, stopped, full and wiped, and single members of it are dead or late. Data operations continue through all of
//! it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvplane::rpc::Role;
use kvplane::rpc::conductor::{
    BlockChange, BlockTier, CacheBatch, CacheReport, CacheWanted, DeregisterInstance, InstancePart, RegisterInstance,
    ReportCache,
};
use kvplane::{Control, ControlLink, Remote};
use kvplane_etcd::Operation;

use crate::launch::{Etcd, soon};
use crate::members::{LinkedProcess, PATIENCE};
use crate::security::certificates::{authority, cert, ctl, issue, node};
use crate::support::{Process, Workplace, http_try, wait_until};

/// Cluster of two control planes and a node.
struct Cluster {
    place: Workplace,
    etcd: Etcd,
    /// The other members of etcd.
    others: Vec<Etcd>,
    planes: Vec<Process>,
    addresses: Vec<SocketAddr>,
    node: Process,
}

/// Returns the name of a state in an etcd of these members.
fn name_of(etcd: &Etcd, others: &[Etcd]) -> String {
    let addresses: Vec<_> = [etcd].into_iter().chain(others).map(|member| member.address().to_string()).collect();
    format!("etcd://{}", addresses.join(","))
}

fn plane(place: &Workplace, etcd: &str, listen: &str) -> Process {
    let (identity, run, snapshots) = (place.path("plane"), place.runtime(), place.path("snapshots"));
    let control = Process::start(place.bare(&[
        "control",
        "--conductor",
        "--conductor-snapshots",
        snapshots.to_str().unwrap(),
        "--conductor-snapshot-every",
        "1",
        "--cluster",
        &place.cluster,
        "--state",
        etcd,
        "--log",
        "info",
        "--listen",
        listen,
        "--identity",
        identity.to_str().unwrap(),
        "--runtime-directory",
        run.to_str().unwrap(),
    ]));
    control.wait_for("(QUIC)");
    control
}

impl Cluster {
    fn start(name: &str, more: &[&'static str]) -> Option<Self> {
        let place = Workplace::new(name);
        let etcd = Etcd::start(&place.path("etcd"), more)?;
        Some(Self::start_on(place, etcd, Vec::new()))
    }

    /// Starts a cluster whose state is in an etcd of several members.
    fn start_on_members(name: &str, members: usize) -> Option<Self> {
        let place = Workplace::new(name);
        let mut others = Etcd::start_cluster(&place.path("etcd"), members)?;
        let etcd = others.remove(0);
        Some(Self::start_on(place, etcd, others))
    }

    fn start_on(place: Workplace, etcd: Etcd, others: Vec<Etcd>) -> Self {
        let name = name_of(&etcd, &others);
        cert(&place, &["init", "--authority", &authority(&place)]).well();
        issue(&place, "plane", "control", &[]);
        issue(&place, "node", "node", &["--node-id", "1"]);
        issue(&place, "people", "client", &[]);
        issue(&place, "people", "admin", &[]);
        let planes = vec![plane(&place, &name, "127.0.0.1:0"), plane(&place, &name, "127.0.0.1:0")];
        let addresses: Vec<SocketAddr> = planes.iter().map(Process::quic).collect();
        let at = format!("{},{}", addresses[0], addresses[1]);
        let node = node(&place, &at, "node", "1");
        node.wait_for("node 1 with");
        let cluster = Self { place, etcd, others, planes, addresses, node };
        cluster.put("first", "1");
        cluster
    }

    fn name(&self) -> String {
        name_of(&self.etcd, &self.others)
    }

    /// Returns a member of etcd.
    fn member(&mut self, number: usize) -> &mut Etcd {
        match number {
            0 => &mut self.etcd,
            number => &mut self.others[number - 1],
        }
    }

    /// Sets the quota of a tenant, which is state, until a control plane has made it durable.
    fn set_quota(&self, mebibytes: u64) {
        let quota = format!("{mebibytes}M");
        let set = || ctl(&self.place, &self.at(), "people", &["tenants", "set", "acme", "--memory", &quota]);
        let is_set = wait_until(|| set().status.success().then_some(()));
        assert_eq!(is_set, Some(()), "{:?}", set());
        let listed = ctl(&self.place, &self.at(), "people", &["tenants", "list"]).text();
        assert!(listed.contains(&format!(" {mebibytes} MiB")), "{listed}");
    }

    fn at(&self) -> String {
        format!("{},{}", self.addresses[0], self.addresses[1])
    }

    fn put(&self, key: &str, value: &str) {
        let file = self.place.file("value", value.as_bytes());
        ctl(&self.place, &self.at(), "people", &["put", key, file.to_str().unwrap()]).well();
    }

    fn assert_has(&self, key: &str, value: &str) {
        assert_eq!(ctl(&self.place, &self.at(), "people", &["get", key]).well(), value.as_bytes());
    }

    /// Returns the leader: the last of the two that reports to lead, and is alive.
    fn leader(&self) -> usize {
        let leads = |at: usize| {
            let answer = self.health(at)?;
            answer.contains(r#""role":"leader""#).then_some(at)
        };
        wait_until(|| leads(0).or_else(|| leads(1))).expect("nobody leads")
    }

    #[track_caller]
    fn wait_for_leader(&self, at: usize) {
        let leads = || self.health(at).filter(|health| health.contains(r#""role":"leader""#));
        assert!(wait_until(leads).is_some(), "{:?}", self.planes[at].said());
    }

    /// Returns the health report of one of the two, if it answers.
    fn health(&self, at: usize) -> Option<String> {
        let at = self.planes[at].http();
        // A killed control plane listens no more. One that steps down may end in the middle of a reply.
        http_try(at, "GET", "/health", "").ok().map(|(_, body)| body)
    }

    /// Asserts that the node is a member, as reported by the leader.
    fn assert_member(&self) {
        let status = || ctl(&self.place, &self.at(), "people", &["status"]);
        let is_in = || {
            let outcome = status();
            let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
            text.lines().any(|line| line.trim_start().starts_with("1 ") && line.contains("active")).then_some(())
        };
        assert!(wait_until(is_in).is_some(), "{:?}, and the node said {:?}", status(), self.node.said());
    }

    /// Returns the epoch, which must never go back.
    fn epoch(&self) -> u64 {
        let leader = self.leader();
        let health: serde_json::Value = serde_json::from_str(&self.health(leader).unwrap()).unwrap();
        health["epoch"].as_u64().unwrap()
    }
}

#[test]
fn a_standby_takes_over_from_a_killed_halted_or_stopped_leader() {
    let Some(mut cluster) = Cluster::start("turns", &[]) else { return };
    let first = cluster.leader();
    assert_eq!(first, 0, "who came first leads");
    let other = cluster.health(1).unwrap();
    let where_to = cluster.addresses[0].to_string();
    assert!(other.contains(r#""role":"standby""#) && other.contains(&where_to), "{other}");
    // The standby redirects callers to the leader.
    let sent = ctl(&cluster.place, &cluster.addresses[1], "people", &["status"]);
    sent.failed(1, &["is a standby", &where_to]);
    let before = cluster.epoch();

    // The leader is killed.
    cluster.planes[0].kill();
    let killed = Instant::now();
    cluster.wait_for_leader(1);
    println!("killed: the other leads after {} ms", killed.elapsed().as_millis());
    cluster.assert_has("first", "1");
    cluster.assert_member();
    assert!(cluster.epoch() >= before);
    cluster.put("second", "2");

    // It comes back as a standby; the other is stopped, and hands over leadership.
    let (name, at) = (cluster.name(), cluster.addresses[0].to_string());
    cluster.planes[0] = plane(&cluster.place, &name, &at);
    cluster.planes[0].wait_for("is a standby");
    let told = Instant::now();
    cluster.planes[1].signal("TERM");
    cluster.wait_for_leader(0);
    println!("told to end: the other leads after {} ms", told.elapsed().as_millis());
    assert!(cluster.planes[1].ended().success());
    cluster.assert_member();

    // A leader that is halted for a while is taken over from, and is a standby when it continues.
    let at = cluster.addresses[1].to_string();
    cluster.planes[1] = plane(&cluster.place, &name, &at);
    cluster.planes[1].wait_for("is a standby");
    cluster.planes[0].signal("STOP");
    let stopped = Instant::now();
    cluster.wait_for_leader(1);
    println!("stopped: the other leads after {} ms", stopped.elapsed().as_millis());
    cluster.planes[0].signal("CONT");
    let second = cluster.addresses[1].to_string();
    assert!(wait_until(|| cluster.health(0).filter(|health| health.contains(&second))).is_some());
    cluster.assert_member();
    cluster.assert_has("first", "1");
    cluster.assert_has("second", "2");
    assert!(cluster.epoch() >= before);
}

#[test]
fn process_groups_go_on_with_the_next_leader() {
    let Some(mut cluster) = Cluster::start("worlds", &[]) else { return };
    let control = Control::Remote(Remote {
        cluster: cluster.place.cluster.clone(),
        addresses: cluster.addresses.clone(),
        identity: cluster.place.path("people"),
    });
    let zero = LinkedProcess::attached(&control, 0, 1, 3);
    let others = [1, 2].map(|rank| LinkedProcess::attached(&control, rank, 1, 3));
    assert_eq!(zero.fake.wait_for_view(&[0, 1, 2]), 1);
    let leader = cluster.leader();
    cluster.planes[leader].kill();
    // A process that ends while nobody leads waits for the next leader.
    let [one, two] = others;
    two.link.close(PATIENCE).expect("the next leader answers");
    for process in [&zero, &one] {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 2, "the epochs continue");
    }
    // A restarted standby and a second change of the leader.
    let (name, at) = (cluster.name(), cluster.addresses[leader].to_string());
    cluster.planes[leader] = plane(&cluster.place, &name, &at);
    cluster.planes[leader].wait_for("is a standby");
    cluster.planes[1 - leader].signal("TERM");
    cluster.wait_for_leader(leader);
    one.link.close(PATIENCE).expect("the next leader answers");
    assert_eq!(zero.fake.wait_for_view(&[0]), 3);
}

#[test]
fn members_stay_while_etcd_is_away() {
    let Some(mut cluster) = Cluster::start("away", &[]) else { return };
    let before = cluster.epoch();
    // etcd is away for a moment: the leader stays.
    cluster.etcd.kill();
    let refused = ctl(&cluster.place, &cluster.at(), "people", &["tenants", "set", "acme", "--memory", "1M"]);
    refused.failed(1, &["etcd"]);
    cluster.etcd.restart();
    cluster.assert_member();
    cluster.assert_has("first", "1");
    // etcd is away for so long that the leader redirects its callers to others, which do not know a leader: puts
    // continue then.
    let client = kvplane::Client::connect(&kvplane::ClientConfig {
        control: kvplane::Control::Remote(kvplane::Remote {
            cluster: cluster.place.cluster.clone(),
            addresses: cluster.addresses.clone(),
            identity: cluster.place.path("people"),
        }),
        ..kvplane::ClientConfig::local(&cluster.place.cluster)
    });
    let mut client = client.unwrap();
    cluster.etcd.signal("STOP");
    let quiet = || {
        let (a, b) = (cluster.health(0)?, cluster.health(1)?);
        let standby = r#""role":"standby""#;
        (a.contains(standby) && b.contains(standby)).then_some(())
    };
    assert!(wait_until(quiet).is_some(), "{:?}", cluster.planes[0].said());
    client.put(b"meanwhile", b"3").unwrap();
    cluster.etcd.signal("CONT");
    cluster.assert_member();
    cluster.assert_has("meanwhile", "3");
    assert!(cluster.epoch() >= before, "no epoch is published twice");
    cluster.node.assert_alive();
}

/// One of three members of etcd is killed, stopped, or late: it continues now and then only. Whichever it is, the state
/// changes and nobody is expelled.
#[test]
fn one_of_three_members_of_etcd_may_be_dead_or_late() {
    let Some(mut cluster) = Cluster::start_on_members("three", 3) else { return };
    let before = cluster.epoch();
    let mut quota = 1;
    for number in 0..3 {
        cluster.member(number).kill();
        quota += 1;
        cluster.set_quota(quota);
        cluster.assert_has("first", "1");
        cluster.member(number).restart();

        cluster.member(number).signal("STOP");
        quota += 1;
        cluster.set_quota(quota);
        cluster.member(number).signal("CONT");

        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let member = if number == 0 { &cluster.etcd } else { &cluster.others[number - 1] };
            scope.spawn(|| {
                // A limit, so that a failed assertion ends the test.
                for _ in 0..200 {
                    if has_ended.load(Ordering::Relaxed) {
                        break;
                    }
                    member.signal("STOP");
                    std::thread::sleep(Duration::from_millis(300));
                    member.signal("CONT");
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
            for _ in 0..3 {
                quota += 1;
                cluster.set_quota(quota);
            }
            has_ended.store(true, Ordering::Relaxed);
        });
        cluster.put(&format!("after-{number}"), "2");
    }
    cluster.assert_member();
    (0..3).for_each(|number| cluster.assert_has(&format!("after-{number}"), "2"));
    assert!(cluster.epoch() >= before);
    cluster.node.assert_alive();
}

#[test]
fn the_cluster_survives_a_wiped_or_full_etcd() {
    // The quota is 16 MiB, so that etcd is soon full.
    let Some(mut cluster) = Cluster::start("wiped", &["--quota-backend-bytes", "16777216"]) else { return };
    cluster.etcd.kill();
    std::fs::remove_dir_all(cluster.etcd.directory()).unwrap();
    cluster.etcd.restart();
    // The member offers its map, and keeps its objects.
    cluster.assert_member();
    cluster.assert_has("first", "1");
    let put = || {
        let file = cluster.place.file("value", b"2");
        let put = ["put", "second", file.to_str().unwrap()];
        let is_put = ctl(&cluster.place, &cluster.at(), "people", &put).status.success();
        let got = ctl(&cluster.place, &cluster.at(), "people", &["get", "second"]);
        (is_put && got.status.success()).then(|| got.well())
    };
    assert_eq!(wait_until(put).as_deref(), Some(&b"2"[..]), "{:?}", cluster.node.said());

    let (gateway, mebibyte) = (cluster.etcd.gateway(), vec![7; 1 << 20]);
    let puts = (0..100u8).take_while(|n| gateway.put(&[*n], &mebibyte, soon()).is_ok());
    assert!(puts.count() < 100, "it is never full");
    let refused = ctl(&cluster.place, &cluster.at(), "people", &["tenants", "set", "acme", "--memory", "1M"]);
    assert!(!refused.status.success(), "{refused:?}");
    assert!(refused.stderr.contains("etcd"), "{}", refused.stderr);
    cluster.node.assert_alive();
}

#[test]
fn a_former_leader_changes_no_state() {
    let Some(cluster) = Cluster::start("fenced", &[]) else { return };
    let (gateway, base) = (cluster.etcd.gateway(), format!("/kvplane/{}/", cluster.place.cluster));
    let key = |name: &str| format!("{base}{name}").into_bytes();
    let leader = cluster.leader();
    // Another control plane takes the lead, as after a silence. It leads until the call has ended, which would find the
    // next leader otherwise, and is silent then.
    let (leads, fence) = (key("leader"), key("fence"));
    let taken = [Operation::Put(&leads, b"1 192.0.2.1:7"), Operation::Put(&fence, b"1 0")];
    gateway.transact(&[], &taken, &[], soon()).unwrap();
    let ended = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                gateway.transact(&[], &taken[..1], &[], soon()).unwrap();
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let set = ["tenants", "set", "a", "--memory", "1M"];
        let outcome = ctl(&cluster.place, &cluster.addresses[leader], "people", &set);
        ended.store(true, Ordering::Relaxed);
        outcome
    });
    assert!(!refused.status.success(), "{refused:?}");
    // No records were changed meanwhile, and one of the two leads again.
    let again = cluster.leader();
    cluster.assert_member();
    let tenants = ctl(&cluster.place, &cluster.addresses[again], "people", &["tenants", "list"]).text();
    assert!(!tenants.contains("1.0 MiB") && !tenants.lines().any(|line| line.starts_with("a ")), "{tenants}");
    cluster.assert_has("first", "1");
}

fn reporter() -> RegisterInstance {
    RegisterInstance::new("q0", "q", 16, InstancePart::Prefill)
}

fn report(seq: u64, hashes: Vec<u64>) -> ReportCache {
    let (lora, salt) = (String::new(), String::new());
    let changes = vec![BlockChange::Stored { lora, salt, tier: BlockTier::Gpu, parent: None, hashes }];
    let batch = CacheBatch { seq, kind: CacheReport::Goes, changes };
    ReportCache { tenant: String::new(), instance: "q0".to_owned(), incarnation: 1, batch }
}

/// Instances that registered over HTTP, holds and the policy are state: the next leader begins with them, and reports
/// that its prefix index is not complete yet.
#[test]
fn a_standby_that_takes_over_knows_the_conductors_instances_holds_and_policy() {
    let Some(mut cluster) = Cluster::start("desks", &[]) else { return };
    assert_eq!(cluster.leader(), 0, "who came first leads");
    let at = cluster.at();
    let register = |cluster: &Cluster, plane: usize, name: &str| {
        let body = format!(
            r#"{{"type":"vLLM","instance_id":"{name}","modelname":"m","block_size":16,"endpoint":"tcp://127.0.0.1:9"}}"#
        );
        http_try(cluster.planes[plane].http(), "POST", "/register", &body).map_or(0, |(status, _)| status)
    };
    assert_eq!((register(&cluster, 0, "e0"), register(&cluster, 0, "e1")), (200, 200));
    ctl(&cluster.place, &at, "people", &["conductor", "hold", "e1@0"]).well();
    ctl(&cluster.place, &at, "people", &["conductor", "policy", "round-robin"]).well();
    let (place, name) = (&cluster.place, cluster.place.cluster.clone());
    let remote = Remote { cluster: name, addresses: cluster.addresses.clone(), identity: place.path("people") };
    let link = ControlLink::to(&Control::Remote(remote), Role::Client).unwrap();
    link.call(reporter()).unwrap();
    link.call(report(0, vec![1, 2])).unwrap();
    let has_q0 = |bytes: Vec<u8>| bytes.windows(2).any(|name| name == b"q0");
    let kept = || {
        let files = std::fs::read_dir(place.path("snapshots")).unwrap().flatten().map(|entry| entry.path());
        let mut files = files.filter(|path| path.extension().is_none_or(|end| end != "tmp"));
        files.find(|path| std::fs::read(path).is_ok_and(has_q0))
    };
    assert!(wait_until(kept).is_some(), "a snapshot of its cache is kept");

    cluster.planes[0].kill();
    cluster.wait_for_leader(1);
    // The new leader has the snapshot of the former one, and answers nothing of it before the next report.
    let query = r#"{"model":"q","block_size":16,"seq_hashes":[1,2,3]}"#;
    let asked = || http_try(cluster.planes[1].http(), "POST", "/query_by_hash", query).unwrap().1;
    let before = asked();
    assert!(before.contains(r#""degraded":true"#) && !before.contains(r#""gpu":32"#), "{before}");
    let shown = ctl(&cluster.place, &at, "people", &["conductor", "show"]).text();
    assert!(shown.contains("degraded: unconfirmed at batch 1"), "{shown}");
    let taken = wait_until(|| link.call(report(1, vec![3])).ok());
    assert_eq!(taken.map(|taken| (taken.next, taken.wanted)), Some((2, CacheWanted::Nothing)));
    let after = asked();
    assert!(!after.contains(r#""degraded":true"#) && after.contains(r#""gpu":48"#), "{after}");
    link.call(DeregisterInstance { tenant: String::new(), instance: "q0".to_owned(), incarnation: 1 }).unwrap();

    let shown = ctl(&cluster.place, &at, "people", &["conductor", "show", "--json"]).text();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["policy"], "round-robin", "{shown}");
    let states: Vec<_> =
        shown["instances"].as_array().unwrap().iter().map(|row| (&row["instance"], &row["state"])).collect();
    assert_eq!(states.len(), 2, "{shown}");
    assert_eq!(states[1], (&"e1@0".into(), &"held".into()), "{shown}");
    let http = cluster.planes[1].http();
    let (_, services) = http_try(http, "GET", "/services", "").unwrap();
    assert_eq!(services.matches(r#""degraded":true"#).count(), 2, "{services}");
    let query = r#"{"model":"m","block_size":16,"seq_hashes":[1,2]}"#;
    let (_, answer) = http_try(http, "POST", "/query_by_hash", query).unwrap();
    assert!(answer.contains(r#""degraded":true"#), "{answer}");

    // While the state cannot be written nothing is registered; acknowledged registrations are durable.
    cluster.etcd.kill();
    let refused = || (register(&cluster, 1, "e2") != 200).then_some(());
    assert!(wait_until(refused).is_some(), "{:?}", cluster.planes[1].said());
    cluster.etcd.restart();
    let again = || (register(&cluster, 1, "e3") == 200).then_some(());
    assert!(wait_until(again).is_some(), "{:?}", cluster.planes[1].said());
}
