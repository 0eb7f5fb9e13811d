//! Tests of a cluster beyond loopback, with certificates from files and tickets: it serves its clients, and an
//! unauthenticated peer that connects to every port of every process reads nothing, changes nothing and stops nothing.
//!
//! The cluster has a network namespace of its own, with addresses beyond loopback; a machine without namespaces skips
//! it.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use kvplane::Status;

use crate::namespaces::Space;
use crate::security::certificates::{authority, cert, issue};
use crate::support::{Outcome, Process, Workplace, finish, test_of, text, wait_until};

const PLANE: &str = "10.77.0.1";
const NODES: [&str; 2] = ["10.77.0.2", "10.77.0.3"];
const SECRET: &str = "nobody-else-may-read-this";
/// Environment variable of the process that scans.
const SCAN: &str = "KVPLANE_TEST_SCAN";

/// Creates a network namespace with some addresses.
fn network() -> Option<Space> {
    let mut script = "ip link set lo up".to_owned();
    for address in [&[PLANE], &NODES[..]].concat() {
        script += &format!(" && ip addr add {address}/32 dev lo");
    }
    Space::fresh(&script)
}

struct Cluster {
    place: Workplace,
    network: Space,
    plane: Process,
    nodes: Vec<Process>,
}

impl Cluster {
    fn start() -> Option<Self> {
        let Some(network) = network() else {
            println!("skipped: no network namespaces here (unshare --map-root-user --net, ip)");
            return None;
        };
        let place = Workplace::new("guarded");
        cert(&place, &["init", "--authority", &authority(&place)]).well();
        issue(&place, "plane", "control", &[]);
        issue(&place, "people", "client", &[]);
        issue(&place, "people", "admin", &[]);
        issue(&place, "acme", "client", &["--tenant", "acme"]);
        let (state, identity, run) = (place.path("state"), place.path("plane"), place.runtime());
        let listen = format!("{PLANE}:7400");
        let arguments = ["control", "--cluster", &place.cluster, "--listen", &listen, "--state", text(&state)];
        let more = ["--identity", text(&identity), "--runtime-directory", text(&run)];
        let plane = Process::start(network.inside(&place.bare(&[&arguments[..], &more].concat())));
        plane.wait_for("(QUIC)");
        let mut cluster = Self { place, network, plane, nodes: Vec::new() };
        for (at, address) in NODES.iter().enumerate() {
            let number = (at + 1).to_string();
            issue(&cluster.place, &number, "node", &["--node-id", &number]);
            cluster.nodes.push(cluster.node(&number, address, &listen));
        }
        for (at, node) in cluster.nodes.iter().enumerate() {
            node.wait_for(&format!("node {} with", at + 1));
        }
        Some(cluster)
    }

    fn node(&self, number: &str, address: &str, control: &str) -> Process {
        let (place, identity) = (&self.place, self.place.path(number));
        // Each node has a runtime directory of its own, so that none finds another's socket.
        let run = place.path(&format!("run-{number}"));
        let who = ["node", "--cluster", &place.cluster, "--node-id", number, "--identity", text(&identity)];
        let how = ["--control", control, "--listen", address, "--pool", "16M", "--shards", "1"];
        let ssd = format!("{}:64M", text(&place.path(&format!("ssd-{number}"))));
        // On a busy machine the first attempt may exceed its time limit.
        let more = ["--metrics-port", "0", "--runtime-directory", text(&run), "--ssd", &ssd, "--wait-control", "60"];
        Process::start(self.network.inside(&place.bare(&[&who[..], &how, &more].concat())))
    }

    fn ctl(&self, identity: &str, arguments: &[&str]) -> Outcome {
        let (control, identity) = (format!("{PLANE}:7400"), self.place.path(identity));
        let whom = ["--control", &control, "--identity", text(&identity)];
        let command = self.place.bare(&[&["ctl", "--cluster", &self.place.cluster][..], arguments, &whom].concat());
        finish(self.network.inside(&command), &[])
    }

    /// Starts this test program again inside the namespace, to scan every port there.
    fn scan(&self) -> String {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &test_of(module_path!(), "scanner"), "--nocapture"]).env(SCAN, "1");
        finish(self.network.inside(&command), &[]).text()
    }
}

#[test]
fn a_stranger_reads_nothing_changes_nothing_and_stops_nothing() {
    let Some(mut cluster) = Cluster::start() else { return };
    let file = cluster.place.file("value", SECRET.as_bytes());
    for number in 0..8 {
        cluster.ctl("people", &["put", &format!("key-{number}"), text(&file)]).well();
    }
    let said = cluster.scan();
    // The scan covers each node's data port, the control plane's port, and the listeners on loopback.
    assert!(said.matches("data port").count() >= 2, "{said}");
    assert!(said.contains("datagrams"), "{said}");
    for (at, node) in cluster.nodes.iter_mut().enumerate() {
        node.assert_alive();
        assert!(!node.said().iter().any(|line| line.contains("panicked")), "node {}: {:?}", at + 1, node.said());
    }
    cluster.plane.assert_alive();
    for number in 0..8 {
        assert_eq!(cluster.ctl("people", &["get", &format!("key-{number}")]).well(), SECRET.as_bytes());
    }
}

/// Run inside by [`a_stranger_reads_nothing_changes_nothing_and_stops_nothing`]; by itself it does nothing.
#[test]
fn scanner() {
    if std::env::var_os(SCAN).is_none() {
        return;
    }
    let ports = listening("/proc/net/tcp", "0A");
    assert!(!ports.is_empty(), "nobody listens");
    for at in ports {
        // The HTTP ports are for this host: they give no access to objects.
        let beyond = !at.ip().is_loopback();
        for knock in knocks() {
            let heard = knock_at(at, &knock);
            let text = String::from_utf8_lossy(&heard);
            assert!(!text.contains(SECRET), "{at} gives objects away: {text}");
            assert!(!beyond || !text.contains("key-"), "{at} gives keys away: {text}");
        }
        if beyond {
            let heard = knock_at(at, &greeting());
            let status = u16::from_le_bytes([heard[6], heard[7]]);
            assert_eq!(status, Status::Prove as u16, "{at} asks for no ticket");
            println!("data port {at}: wants a ticket");
        }
    }
    let own = UdpSocket::bind((PLANE, 0)).unwrap();
    for at in listening("/proc/net/udp", "07") {
        for knock in knocks() {
            for part in knock.chunks(1200) {
                // A full socket buffer is acceptable.
                let _ = own.send_to(part, at);
            }
        }
        println!("datagrams to {at}");
    }
}

/// Returns the listening addresses, from the kernel's table.
fn listening(table: &str, state: &str) -> Vec<SocketAddr> {
    let table = std::fs::read_to_string(table).unwrap();
    let address = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (ip, port) = words.get(1)?.split_once(':')?;
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.swap_bytes());
        let port = u16::from_str_radix(port, 16).ok()?;
        (words.get(3) == Some(&state) && !ip.is_unspecified()).then_some(SocketAddr::new(IpAddr::V4(ip), port))
    };
    table.lines().filter_map(address).collect()
}

/// Returns the messages of an unauthenticated peer: nothing, garbage, other protocols, and kvplane's with wrong
/// lengths.
fn knocks() -> Vec<Vec<u8>> {
    let mut long = greeting();
    long[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let nonsense = (0..100_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"GET /get_all_keys HTTP/1.0\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        nonsense,
        long,
        greeting()[..30].to_vec(),
        greeting().repeat(50),
    ]
}

/// Builds a hello of the data protocol.
fn greeting() -> Vec<u8> {
    use kvplane_proto::frame::{Header, VERSION};
    use kvplane_proto::ids::{Incarnation, NodeId, RequestId, ShardId};
    use kvplane_proto::message::{Hello, Kind, Operation};
    let hello = Hello {
        version_min: VERSION,
        version_max: VERSION,
        client: 1,
        connection: 1,
        node: NodeId(0),
        incarnation: Incarnation(0),
        shard: ShardId(0),
        lane: 0,
        fetches: false,
        cluster: "guarded".to_owned(),
    };
    let body = hello.encode();
    let header = Header::request(Kind::Request(Operation::Hello), RequestId::default()).with_body(&body, 1);
    [&header.encode()[..], &body].concat()
}

/// Returns all bytes that come back within a moment; a closed and a silent port are both acceptable.
fn knock_at(at: SocketAddr, said: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    let _ = stream.write_all(said);
    let (mut heard, mut part) = (Vec::new(), [0; 4096]);
    while let Ok(bytes @ 1..) = stream.read(&mut part) {
        heard.extend_from_slice(&part[..bytes]);
    }
    heard
}

/// There are more objects than memory holds: most of them are on the SSDs only.
#[test]
fn a_tenants_certificate_reaches_all_that_the_ssds_have_of_it() {
    let Some(cluster) = Cluster::start() else { return };
    let name = |number: u32| format!("block-{number}");
    let acme = |arguments: &[&str]| cluster.ctl("acme", arguments);
    for number in 0..40 {
        let file = cluster.place.file(&name(number), name(number).repeat(200_000).as_bytes());
        acme(&["put", &name(number), text(&file)]).well();
    }
    for number in 0..40 {
        assert!(acme(&["get", &name(number)]).well() == name(number).repeat(200_000).as_bytes(), "{number}");
    }
    acme(&["delete", &name(0)]).well();
    acme(&["get", &name(0)]).failed(1, &["no object"]);
    assert_eq!(acme(&["size", &name(1)]).text().trim(), (name(1).len() * 200_000).to_string());
}

#[test]
fn members_of_a_guarded_cluster_do_as_their_certificates_say() {
    let Some(cluster) = Cluster::start() else { return };
    let file = cluster.place.file("value", b"of acme");
    cluster.ctl("people", &["put", "everybodys", text(&file)]).well();
    cluster.ctl("acme", &["--tenant", "acme", "put", "own", text(&file)]).well();
    assert_eq!(cluster.ctl("acme", &["--tenant", "acme", "get", "own"]).well(), b"of acme");
    // Without --tenant, the tenant of the certificate is used; flags may stand after the command, too.
    assert_eq!(cluster.ctl("acme", &["get", "own"]).well(), b"of acme");
    cluster.ctl("acme", &["get", "everybodys"]).failed(1, &["no object"]);
    cluster.ctl("acme", &["put", "second", text(&file)]).well();
    assert_eq!(cluster.ctl("people", &["get", "second", "--tenant", "acme"]).well(), b"of acme");
    cluster.ctl("acme", &["delete-all"]).failed(1, &["all tenants", "acme"]);
    // The control plane issues no ticket for another tenant.
    let refusal = ["may not speak for the default tenant"];
    cluster.ctl("acme", &["get", "everybodys", "--tenant", "default"]).failed(1, &refusal);
    cluster.ctl("acme", &["--tenant", "default", "put", "other", text(&file)]).failed(1, &refusal);
    // `p2p put` serves its files at an address that peers on other hosts reach, and prints it; for its certificate's
    // tenant.
    let p2p = |arguments: &[&str]| {
        let (control, identity, run) =
            (format!("{PLANE}:7400"), cluster.place.path("acme"), cluster.place.path("peer"));
        let whom = ["--control", &control, "--identity", text(&identity), "--runtime-directory", text(&run)];
        let named = ["p2p", "--cluster", &cluster.place.cluster, "--no-shared-memory"];
        cluster.network.inside(&cluster.place.bare(&[&named[..], &whom, arguments].concat()))
    };
    let serving = Process::start(p2p(&["put", "a/model", text(&file), "--host", "one"]));
    let said = serving.wait_for("serves");
    assert!(said.contains(", at 10.77.0."), "{said}");
    let directory = cluster.place.path("fetched");
    finish(p2p(&["get", "a/model", text(&directory), "--host", "other"]), &[]).well();
    assert_eq!(std::fs::read(directory.join("value")).unwrap(), b"of acme");
    // The key is rotated while everything runs.
    cluster.ctl("people", &["tickets", "rotate"]).well();
    let works = || cluster.ctl("people", &["get", "everybodys"]).status.success().then_some(());
    assert!(wait_until(works).is_some());
}
