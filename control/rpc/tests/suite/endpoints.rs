//! Tests of real endpoints on loopback: accepted and rejected callers, and the isolation of misbehaving peers.

use crate::support;

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::ids::Epoch;
use kvplane_rpc::message::*;
use kvplane_rpc::{
    Authority, CallError, Client, ClientConfig, ConnectError, Event, Identity, Limits, MapWatch, RefusalCode,
    Rejection, Role, ServeError, Server, ServerConfig, ServiceState, Trust,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use support::{Recorder, Rig, cluster, connect, limits, run, serve};

fn message(result: Result<Client, ConnectError>) -> String {
    result.expect_err("it must be refused").to_string()
}

#[test]
fn a_certificate_proves_its_role() {
    run(async {
        let rig = Rig::start().await;
        for role in Role::ALL {
            let client = rig.client(role).await;
            assert_eq!(rig.service.callers.lock().unwrap().last().unwrap().role, role);
            let status = client.call(&Status).await.expect_err("the recorder refuses");
            let allowed = matches!(role, Role::Control | Role::Scheduler | Role::Admin);
            let expected = if allowed { RefusalCode::ShuttingDown } else { RefusalCode::NotPermitted };
            assert_eq!(status.refusal(), Some(expected), "{role}");
            let load = Load::default();
            let beat = client.call(&Heartbeat { node: 1, incarnation: 1, load }).await;
            assert_eq!(beat.is_ok(), matches!(role, Role::Control | Role::Node), "{role}: {beat:?}");
        }
        assert!(rig.service.saw(Event::Called { method: "heartbeat", ok: false }));
    });
}

#[test]
fn a_stream_gives_its_items_in_order_and_then_its_end_or_a_refusal() {
    run(async {
        let rig = Rig::start().await;
        let node = rig.client(Role::Node).await;
        let mut orders = node.stream(&WatchOrders { node: 9, incarnation: 1 }).await.expect("a stream");
        for number in 0..3 {
            let order = Order::Find { digests: vec![9] };
            assert_eq!(orders.next().await.expect("an item"), NodeOrder { number, order });
        }
        assert!(orders.next().await.is_err(), "there are no more");
        // The connection stays open.
        let client = rig.client(Role::Client).await;
        let mut events = client.stream(&WatchEvents).await.expect("a stream");
        let refusal = events.next().await.expect_err("there are none");
        assert_eq!(refusal.refusal(), Some(RefusalCode::NotFound));
        let mut forbidden = client.stream(&WatchOrders { node: 9, incarnation: 1 }).await.expect("a stream");
        assert_eq!(forbidden.next().await.expect_err("not a node").refusal(), Some(RefusalCode::NotPermitted));
    });
}

#[test]
fn refusals_carry_code_and_reason() {
    run(async {
        let rig = Rig::start().await;
        let client = rig.client(Role::Client).await;
        let error = client.call(&GetSegment { name: "pool".to_owned() }).await.unwrap_err();
        assert_eq!((error.code(), error.refusal()), (6, Some(RefusalCode::NotFound)));
        assert!(error.to_string().contains("\"pool\""), "{error}");
    });
}

#[test]
fn another_authority_is_refused_on_either_side() {
    run(async {
        let rig = Rig::start().await;
        let stranger = Authority::generate(&cluster()).unwrap();
        let mut config = rig.config(Role::Node);
        config.identity = stranger.issue(Role::Node).unwrap();
        let text = message(connect(&config).await);
        assert!(text.contains("refused") && text.contains("not from its authority"), "{text}");
        rig.service.until(Event::Rejected(Rejection::Certificate)).await;

        let mut config = rig.config(Role::Node);
        config.trust = stranger.trust().clone();
        let text = message(connect(&config).await);
        assert!(text.contains("ca.pem"), "{text}");
        rig.client(Role::Node).await;
    });
}

#[test]
fn another_cluster_of_the_same_authority_is_refused() {
    run(async {
        let rig = Rig::start().await;
        let mut config = rig.config(Role::Node);
        config.cluster = kvplane_rpc::ClusterName::new("other").unwrap();
        let text = message(connect(&config).await);
        assert!(text.contains("the cluster name"), "{text}");
        rig.client(Role::Node).await;
    });
}

/// A peer of plain quinn, to break rules that the client would not.
async fn raw(
    rig: &Rig,
    identity: Option<&Identity>,
    protocol: &str,
) -> Result<quinn::Connection, quinn::ConnectionError> {
    let mut roots = rustls::RootCertStore::empty();
    let authority = CertificateDer::from_pem_slice(rig.authority.trust().pem().as_bytes()).unwrap();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let mut tls = match identity {
        None => builder.with_no_client_auth(),
        Some(identity) => {
            let chain = CertificateDer::from_pem_slice(identity.certificate_pem().as_bytes());
            let key = PrivateKeyDer::from_pem_slice(identity.key_pem().as_bytes());
            builder.with_client_auth_cert(vec![chain.unwrap()], key.unwrap()).unwrap()
        }
    };
    tls.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    endpoint.connect_with(config, rig.server.address(), "control.test.kvplane").unwrap().await
}

#[test]
fn no_certificate_and_other_versions_are_counted_and_others_are_served() {
    run(async {
        let rig = Rig::start().await;
        let node = rig.authority.issue(Role::Node).unwrap();
        assert!(raw(&rig, Some(&node), "kvplane/2").await.is_err());
        rig.service.until(Event::Rejected(Rejection::Protocol)).await;
        assert!(!rig.service.saw(Event::Rejected(Rejection::Certificate)));

        // A client's handshake ends before the server has missed its certificate.
        if let Ok(connection) = raw(&rig, None, "kvplane/1").await {
            let reason = connection.closed().await.to_string();
            assert!(reason.contains("certificate"), "{reason}");
        }
        rig.service.until(Event::Rejected(Rejection::Certificate)).await;
        rig.client(Role::Client).await.call(&ListSegments { after: None, limit: 9 }).await.expect("others are served");
    });
}

#[test]
fn an_invalid_frame_closes_only_its_own_connection() {
    run(async {
        let rig = Rig::start().await;
        let bystander = rig.client(Role::Client).await;
        let node = rig.authority.issue(Role::Node).unwrap();
        let good = kvplane_rpc::codec::encode(&GetMap).unwrap();
        let mut trailing = good.clone();
        trailing.push(0);
        let reply_kind = kvplane_rpc::codec::encode(&EmptyReply).unwrap();
        let huge = vec![b'K'; 100 << 10];
        let cases = [
            (b"GET / HTTP/1.1\r\n".to_vec(), "not of this protocol"),
            (b"KVPC".to_vec(), "shorter"),
            (b"KVPC\x02\x00\x05\x00\x00\x00\x00\x00".to_vec(), "version 2"),
            (trailing, "holds 1 bytes"),
            (reply_kind, "0x8004"),
            (huge, "above"),
        ];
        for (bytes, expected) in cases {
            let connection = raw(&rig, Some(&node), "kvplane/1").await.expect("let in");
            let (mut send, _receive) = connection.open_bi().await.unwrap();
            // The server may close the connection before everything is written.
            let _ = send.write_all(&bytes).await;
            let _ = send.finish();
            let reason = connection.closed().await.to_string();
            assert!(reason.contains(expected), "{expected:?} in {reason:?}");
        }
        let events = rig.service.events.lock().unwrap().clone();
        assert_eq!(events.iter().filter(|event| **event == Event::BadFrame).count(), 6);
        bystander.call(&GetMap).await.expect("others are served");
    });
}

#[test]
fn a_silent_stream_ends_by_the_deadline() {
    run(async {
        let short = Limits { call_deadline: Duration::from_millis(50), ..limits() };
        let rig = Rig::start_with(short).await;
        let node = rig.authority.issue(Role::Node).unwrap();
        let connection = raw(&rig, Some(&node), "kvplane/1").await.unwrap();
        let (mut send, mut receive) = connection.open_bi().await.unwrap();
        send.write_all(b"KVPC").await.unwrap();
        let error = receive.read_to_end(10).await.expect_err("the stream is given up");
        assert!(matches!(error, quinn::ReadToEndError::Read(quinn::ReadError::Reset(_))), "{error}");
    });
}

#[test]
fn connections_above_the_limit_are_refused() {
    run(async {
        let rig = Rig::start_with(Limits { connections: 2, ..limits() }).await;
        let first = rig.client(Role::Client).await;
        let _second = rig.client(Role::Client).await;
        let text = message(connect(&rig.config(Role::Client)).await);
        assert!(text.contains("refused"), "{text}");
        assert!(rig.service.saw(Event::Rejected(Rejection::Full)));
        first.close().await;
        rig.service.until(Event::Disconnected).await;
        rig.client(Role::Client).await;
    });
}

#[test]
fn a_port_in_use_is_named() {
    run(async {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let authority = Authority::generate(&cluster()).unwrap();
        let config = ServerConfig {
            listen: taken.local_addr().unwrap(),
            cluster: cluster(),
            identity: authority.issue(Role::Control).unwrap(),
            trust: authority.trust().clone(),
            reset_secret: authority.reset_secret(),
            limits: limits(),
        };
        let Err(error) = Server::start(&config, ServiceState::Serving(support::Recorder::new(1, 1))) else {
            panic!("the port is taken");
        };
        assert!(matches!(error, ServeError::Listen { .. }));
        let text = error.to_string();
        let port = taken.local_addr().unwrap().port().to_string();
        assert!(text.contains(&port) && text.contains("in use"), "{text}");
    });
}

#[test]
fn an_unreachable_address_is_an_error_by_the_deadline() {
    run(async {
        let rig = Rig::start().await;
        let unused = UdpSocket::bind("127.0.0.1:0").unwrap();
        let config = ClientConfig {
            address: unused.local_addr().unwrap(),
            limits: Limits { connect_deadline: Duration::from_millis(100), ..limits() },
            ..rig.config(Role::Node)
        };
        let ConnectError::Call(error) = connect(&config).await.unwrap_err() else {
            panic!("a call's error");
        };
        assert!(matches!(error, CallError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("is running"), "{error}");
    });
}

#[test]
fn a_watch_follows_the_map_through_a_restart() {
    run(async {
        let Rig { authority, service, server } = Rig::start().await;
        let address = server.address();
        let config = ClientConfig {
            address,
            cluster: cluster(),
            trust: Trust::from_pem(authority.trust().pem(), "test").unwrap(),
            identity: authority.issue(Role::Client).unwrap(),
            software: String::new(),
            limits: limits(),
        };
        let client = connect(&config).await.unwrap();
        let mut watch = client.watch_map();
        assert_eq!(watch.newer(None).await.epoch, Epoch(1));
        service.publish(5);
        assert_eq!(watch.newer(Some(Epoch(1))).await.epoch, Epoch(5));
        server.close(Duration::from_secs(1)).await;
        while watch.state().trouble.is_none() {
            watch.changed().await;
        }
        assert_eq!(watch.state().map.map(|map| map.epoch), Some(Epoch(5)), "the last map stays");

        // First the same state with an older map, which is ignored.
        let service = support::Recorder::new(1, 4);
        let server = serve(&authority, address, &service, limits()).await;
        while watch.state().trouble.is_some() {
            watch.changed().await;
        }
        service.until(Event::Called { method: "watch_map", ok: true }).await;
        // The older map was sent before this reply; a pause lets the watch handle it.
        assert_eq!(client.call(&GetMap).await.unwrap().map.epoch, Epoch(4));
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(watch.state().map.map(|map| map.epoch), Some(Epoch(5)), "epochs never go back");
        service.publish(6);
        assert_eq!(watch.newer(Some(Epoch(5))).await.epoch, Epoch(6));
        server.close(Duration::from_secs(1)).await;

        // Another state: its epochs start over.
        let service = support::Recorder::new(2, 1);
        let server = serve(&authority, address, &service, limits()).await;
        assert_eq!(watch.newer(Some(Epoch(6))).await.epoch, Epoch(1));
        assert_eq!(client.call(&GetMap).await.unwrap().map.epoch, Epoch(1));
        server.close(Duration::from_secs(1)).await;
    });
}

/// A node that misses a map cannot trust its memory: it gets each of them, however fast they follow, and finds those
/// that came while it was disconnected.
#[test]
fn nodes_get_every_map_and_clients_the_newest() {
    run(async {
        let Rig { authority, service, server } = Rig::start().await;
        let address = server.address();
        let connected = async |role| {
            let config = ClientConfig {
                address,
                cluster: cluster(),
                trust: Trust::from_pem(authority.trust().pem(), "test").unwrap(),
                identity: authority.issue(role).unwrap(),
                software: String::new(),
                limits: limits(),
            };
            connect(&config).await.unwrap()
        };
        let (node, client) = (connected(Role::Node).await, connected(Role::Client).await);
        let (mut of_node, mut of_client) = (node.watch_map(), client.watch_map());
        assert_eq!((of_node.newer(None).await.epoch, of_client.newer(None).await.epoch), (Epoch(1), Epoch(1)));
        // All of them are published before the server's tasks run again.
        (2..6).for_each(|epoch| service.publish(epoch));
        let recent = |watch: &MapWatch| watch.state().recent.iter().map(|map| map.epoch.0).collect::<Vec<_>>();
        while of_node.newer(None).await.epoch < Epoch(5) || of_client.newer(None).await.epoch < Epoch(5) {
            tokio::task::yield_now().await;
        }
        assert_eq!((recent(&of_node), recent(&of_client)), (vec![1, 2, 3, 4, 5], vec![1, 5]));
        server.close(Duration::from_secs(1)).await;
        while of_node.state().trouble.is_none() {
            of_node.changed().await;
        }
        service.publish(6);
        service.publish(7);
        let _server = serve(&authority, address, &service, limits()).await;
        while of_node.newer(None).await.epoch < Epoch(7) {
            tokio::task::yield_now().await;
        }
        assert_eq!(recent(&of_node), [1, 2, 3, 4, 5, 6, 7]);
        (8..100).for_each(|epoch| service.publish(epoch));
        while of_node.newer(None).await.epoch < Epoch(99) {
            tokio::task::yield_now().await;
        }
        assert_eq!(recent(&of_node), (68..100).collect::<Vec<_>>(), "the last ones");
    });
}

/// While the state may have been lost, nodes get the present map, in order to offer theirs, and clients the next one.
#[test]
fn clients_get_no_map_before_it_is_known_whether_the_state_was_lost() {
    run(async {
        let rig = Rig::start().await;
        rig.service.set_provisional(true);
        let client = connect(&rig.config(Role::Client)).await.unwrap();
        let mut clients = client.watch_map();
        rig.service.until(Event::Called { method: "watch_map", ok: true }).await;
        let node = connect(&rig.config(Role::Node)).await.unwrap();
        assert_eq!(node.watch_map().newer(None).await.epoch, Epoch(1));
        assert_eq!(clients.state().map, None);
        rig.service.publish(1001);
        assert_eq!(clients.newer(None).await.epoch, Epoch(1001), "it is the first map that the client gets");

        // The same map, once it is not provisional any more.
        rig.service.set_provisional(true);
        let mut clients = client.watch_map();
        rig.service.set_provisional(false);
        assert_eq!(clients.newer(None).await.epoch, Epoch(1001));
    });
}

/// A server whose runtime stops while a client watches its map: its socket stays open and silent.
fn beside_a_silent_server(limits: impl Fn(Limits) -> Limits, story: impl AsyncFnOnce(Client, MapWatch)) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let (vanish, vanished) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let rig = runtime.block_on(async {
            let rig = Rig::start().await;
            sender.send(rig.config(Role::Client)).unwrap();
            rig.service.until(Event::Called { method: "watch_map", ok: true }).await;
            rig
        });
        // From here on the server's runtime is not polled.
        vanish.send(()).unwrap();
        stopped.recv().unwrap();
        drop(runtime);
        drop(rig.service);
    });
    let config = receiver.recv().unwrap();
    let config = ClientConfig { limits: limits(config.limits), ..config };
    run(async {
        let client = connect(&config).await.unwrap();
        let mut watch = client.watch_map();
        watch.newer(None).await;
        vanished.recv().unwrap();
        story(client, watch).await;
    });
    stop.send(()).unwrap();
    let _ = thread.join();
}

/// A killed process sends no close frame: its peer must detect it by itself.
#[test]
fn a_server_that_vanishes_is_noticed() {
    beside_a_silent_server(
        |limits| limits,
        async |client, mut watch| {
            while watch.state().trouble.is_none() {
                watch.changed().await;
            }
            let error = client.call(&GetMap).await.unwrap_err();
            assert!(error.code() >= 100, "{error}");
        },
    );
}

/// A prober sends a request, and does not wait an hour for a sign of the server.
#[test]
fn a_probe_detects_a_server_that_vanished() {
    let hour = Duration::from_secs(3600);
    beside_a_silent_server(
        |limits| Limits { idle_timeout: hour, keep_alive_interval: hour / 4, ..limits },
        async |client, mut watch| {
            let error = client.probe(Duration::from_millis(100)).await.unwrap_err();
            assert!(matches!(error, CallError::Deadline { .. }), "{error}");
            while watch.state().trouble.is_none() {
                watch.changed().await;
            }
            client.probe(hour).await.expect("there is no connection to ask on");
        },
    );
}

#[test]
fn a_standby_closes_connections_with_the_reason() {
    run(async {
        let rig = Rig::start().await;
        let client = rig.client(Role::Node).await;
        let alive = Heartbeat { node: 1, incarnation: 1, load: Load::default() };
        client.call(&alive).await.expect("it serves");
        rig.server.stand(ServiceState::StandingBy("another one leads: 192.0.2.1:7".to_owned()));
        // Present callers are closed with the reason, and so are new ones.
        let error = client.call(&alive).await.expect_err("it stands by").to_string();
        assert!(error.contains("another one leads: 192.0.2.1:7"), "{error}");
        let error = message(connect(&rig.config(Role::Node)).await);
        assert!(error.contains("another one leads: 192.0.2.1:7"), "{error}");
        rig.server.stand(ServiceState::Serving(rig.service.clone()));
        rig.client(Role::Node).await.call(&alive).await.expect("it serves again");
    });
}

/// A killed control plane sends no close frames. Its successor resets the connections, so that callers wait neither for
/// the idle timeout nor until a call is overdue.
#[test]
fn a_restarted_server_resets_its_predecessors_connections() {
    let authority = Authority::generate(&cluster()).expect("an authority");
    let hour = Duration::from_secs(3600);
    let limits = Limits { call_deadline: hour, idle_timeout: hour, keep_alive_interval: hour / 4, ..limits() };
    let mut server = ServerConfig {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        cluster: cluster(),
        identity: authority.issue(Role::Control).expect("an identity"),
        trust: authority.trust().clone(),
        reset_secret: authority.reset_secret(),
        limits,
    };
    let new_runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let start = |config: &ServerConfig| Server::start(config, ServiceState::Serving(Recorder::new(1, 1)));
    let first = new_runtime();
    let killed = first.block_on(async { start(&server) }).expect("a server");
    server.listen = killed.address();
    server.identity = authority.issue(Role::Control).expect("another identity");
    let config = ClientConfig {
        address: server.listen,
        cluster: cluster(),
        trust: authority.trust().clone(),
        identity: authority.issue(Role::Node).expect("an identity"),
        software: String::new(),
        limits,
    };
    let admin = ClientConfig { identity: authority.issue(Role::Admin).expect("an identity"), ..config.clone() };
    let (connected, client_connected) = tokio::sync::oneshot::channel();
    let (restarted, server_restarted) = tokio::sync::oneshot::channel();
    let caller = std::thread::spawn(move || {
        run(async {
            let client = connect(&admin).await.expect("a connection");
            let (reader, node) =
                (connect(&config).await.expect("a connection"), connect(&config).await.expect("a connection"));
            let beat = Heartbeat { node: 1, incarnation: 1, load: Load::default() };
            connected.send(()).expect("the test waits");
            server_restarted.await.expect("it restarts");
            let error = client.call(&RotateTickets).await.expect_err("the first server may have carried it out");
            assert!(matches!(error, CallError::Lost { .. }), "{error}");
            client.call(&RotateTickets).await.expect("there is a server");
            reader.call(&GetMap).await.expect("an idempotent call is retried");
            node.call(&beat).await.expect("a report of present state is retried");
        });
    });
    first.block_on(client_connected).expect("it connects");
    // Queued packets are lost, as the runtime does not send them any more.
    drop(first);
    drop(killed);
    run(async {
        let server = start(&server).expect("the port is free");
        restarted.send(()).expect("the caller waits");
        while !caller.is_finished() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        drop(server);
    });
    caller.join().expect("the caller heard of it");
}
