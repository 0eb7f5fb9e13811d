//! Tests of HTTP: its pages, its refusals, and that misbehaving peers are counted and isolated.

use crate::support;

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::message::*;
use kvplane_rpc::{Authority, Client, ClientConfig, ClusterName, Role};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer, MetadataLimits};
use support::{client, enter, get, raw_http, run};

fn start() -> (ControlHandle, SocketAddr) {
    support::start("test", |config| config.conductor = None)
}

#[test]
fn health_metrics_and_segments_show_the_cluster() {
    let (control, http) = start();
    assert_eq!(get(http, "/get_all_segments").1, "");
    run(async {
        let node = client(control.local(), Role::Node).await;
        enter(&node, 7, 1).await;
        let owner = SegmentOwner::Node { node: NodeId(7), incarnation: Incarnation(1) };
        for name in ["pool-b", "pool-a"] {
            let (name, kind, address) = (name.to_owned(), SegmentKind::Dram, http);
            let segment = Segment { name, owner, kind, bytes: 1, address, ttl_ns: 0 };
            node.call(&RegisterSegment { segment }).await.expect("registered");
        }
    });
    let (status, health) = get(http, "/health");
    assert_eq!(status, "HTTP/1.1 200 OK");
    for part in ["\"status\":\"ok\"", "\"cluster\":\"test\"", "\"epoch\":1", "\"members\":1"] {
        assert!(health.contains(part), "{part} in {health}");
    }
    assert_eq!(get(http, "/get_all_segments").1, "pool-a\npool-b\n");
    let (status, metrics) = get(http, "/metrics");
    assert_eq!(status, "HTTP/1.1 200 OK");
    for line in [
        "kvplane_cluster_epoch 1",
        "kvplane_members{state=\"active\"} 1",
        "kvplane_members{state=\"dead\"} 0",
        "kvplane_node_objects{node=\"7\"} 3",
        "kvplane_node_used_bytes{node=\"7\"} 4096",
        "kvplane_node_capacity_bytes{node=\"7\"} 8192",
        "kvplane_rpc_calls_total{method=\"join\",result=\"ok\"} 1",
        "kvplane_rpc_rejected_connections_total{reason=\"certificate\"} 0",
        "kvplane_http_requests_total{path=\"/get_all_segments\",status=\"200\"} 2",
        "# TYPE kvplane_uptime_seconds gauge",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
}

#[test]
fn unserved_paths_and_malformed_requests_are_refused() {
    let (_control, http) = start();
    let (status, body) = get(http, "/secret");
    assert_eq!(status, "HTTP/1.1 404 Not Found");
    assert!(body.contains("/get_all_segments"), "{body}");
    let cases: [(&[u8], &str); 4] = [
        (b"DELETE /health HTTP/1.1\r\nHost: a\r\n\r\n", "HTTP/1.1 405"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", "HTTP/1.1 413"),
        (b"\x16\x03\x01 not http\r\n\r\n", "HTTP/1.1 400"),
        (b"GET /health HTTP/1.1\r\nA: \x01\r\n\r\n", "HTTP/1.1 400"),
    ];
    for (request, expected) in cases {
        let answer = raw_http(http, request);
        assert!(answer.starts_with(expected), "{expected}: {answer:?}");
    }
    let mut long = b"GET /health HTTP/1.1\r\nA: ".to_vec();
    long.resize(64 << 10, b'a');
    let answer = raw_http(http, &long);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer:?}");
    assert_eq!(get(http, "/health").0, "HTTP/1.1 200 OK");
}

#[test]
fn half_open_requests_do_not_keep_others_out() {
    let (_control, http) = start();
    let idle: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(http).expect("it listens");
            stream.write_all(b"GET /hea").expect("sent");
            stream
        })
        .collect();
    assert_eq!(get(http, "/health").0, "HTTP/1.1 200 OK");
    drop(idle);
}

/// Returns whether the server has not closed a connection.
fn is_open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("it can be asked");
    stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// Clients that connect and send nothing, or do not complete their requests, lock out no probe, also before the server
/// closes them.
#[test]
fn probes_are_answered_beside_connections_that_say_nothing_and_requests_that_do_not_end() {
    let mut config = ControlConfig::new("test");
    config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    config.mooncake_metadata = Some(MetadataLimits::default());
    let control = ControlServer::start(config).expect("a control plane");
    let http = control.http_address().expect("it listens");
    let put = "PUT /metadata?key=a HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n";
    for (said, count) in [("", 96), ("GET /hea", 96), (put, 80)] {
        // A slow machine may need longer than the server's deadline, but not every time.
        let answered = (0..5).any(|_| {
            let mut streams: Vec<TcpStream> = Vec::new();
            for _ in 0..count {
                let mut stream = TcpStream::connect(http).expect("it listens");
                stream.write_all(said.as_bytes()).expect("sent");
                streams.push(stream);
            }
            let well = |path| get(http, path).0 == "HTTP/1.1 200 OK";
            well("/health") && well("/metrics") && streams.iter().all(is_open)
        });
        assert!(answered, "beside {count} connections that have said {said:?}");
    }
}

#[test]
fn strangers_are_counted_and_members_are_served() {
    let (control, http) = start();
    run(async {
        let name = ClusterName::new("test").expect("a good name");
        let stranger = Authority::generate(&name).expect("an authority");
        let mut config = ClientConfig::local(control.local(), Role::Node, "test").expect("an identity");
        config.identity = stranger.issue(Role::Node).expect("an identity");
        let rng = kvplane_proto::rng::Rng::new(1, "test");
        let error = Client::connect(&config, rng).await.expect_err("a stranger");
        let address = control.address().to_string();
        assert!(error.to_string().contains(&format!("at {address} refused")), "{error}");
        let member = client(control.local(), Role::Client).await;
        member.call(&GetMap).await.expect("others are served");
        let refused = member.call(&Status).await.expect_err("not an admin");
        assert_eq!(refused.code(), 2);
    });
    let metrics = get(http, "/metrics").1;
    for line in [
        "kvplane_rpc_rejected_connections_total{reason=\"certificate\"} 1",
        "kvplane_rpc_calls_total{method=\"status\",result=\"refused\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
}
