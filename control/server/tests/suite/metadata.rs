//! Tests of Mooncake's metadata server, with this project's client of such servers and by hand.

use crate::support;

use std::net::SocketAddr;

use kvplane_mooncake::{Environment, Metadata, MetadataStore, keys};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer, MetadataLimits, StartError};
use support::{get, raw_http};

fn start(metadata: Option<MetadataLimits>) -> (ControlHandle, SocketAddr) {
    let mut config = ControlConfig::new("test");
    config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    config.mooncake_metadata = metadata;
    let control = ControlServer::start(config).expect("a control plane");
    let http = control.http_address().expect("it listens");
    (control, http)
}

fn store(http: SocketAddr) -> Box<dyn MetadataStore> {
    let metadata = Metadata::parse(&format!("http://{http}/metadata")).expect("an address");
    metadata.open(&Environment::default()).expect("a store")
}

#[test]
fn engines_find_each_other() {
    let (_control, http) = start(Some(MetadataLimits::default()));
    let store = store(http);
    let (meta, segment) = (keys::rpc_meta("", "node a:1+é"), keys::segment("blue", "node"));
    // The port of an engine's daemon, as far as this server can probe it.
    let daemon = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = daemon.local_addr().expect("bound").port();
    let value = keys::RpcMeta { host: "127.0.0.1".to_owned(), port }.encode();
    assert_eq!(store.get(&meta), Ok(None));
    store.put(&meta, &value).expect("put");
    store.put(&meta, &value).expect("the same again");
    let error = store.put(&meta, "{}").expect_err("another engine of that name").to_string();
    assert!(error.contains("400: Duplicate rpc_meta key not allowed"), "{error}");
    assert_eq!(store.get(&meta), Ok(Some(value)));
    drop(daemon);
    let next = keys::RpcMeta { host: "localhost".to_owned(), port: 1 }.encode();
    store.put(&meta, &next).expect("its predecessor is gone");
    assert_eq!(store.get(&meta), Ok(Some(next)));
    for text in ["{}", "{\"name\":\"node\"}"] {
        store.put(&segment, text).expect("a segment is replaced");
        assert_eq!(store.get(&segment), Ok(Some(text.to_owned())));
    }
    assert_eq!((store.remove(&meta), store.remove(&meta)), (Ok(true), Ok(false)));
    let metrics = get(http, "/metrics").1;
    let line = "kvplane_http_requests_total{path=\"/metadata\",status=\"404\"} 2";
    assert!(metrics.lines().any(|found| found == line), "{metrics}");
}

#[test]
fn requests_and_answers_are_as_stock_servers_have_them() {
    let (_control, http) = start(Some(MetadataLimits::default()));
    let ask = |request: &str| {
        let answer = raw_http(http, request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").expect("a whole answer");
        (head.split(' ').nth(1).expect("a status").to_owned(), body.to_owned())
    };
    let put = "PUT /metadata?key=%20a%2Fb HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
               Content-Length: 2\r\n\r\n{}";
    let cases = [
        ("GET /metadata?key=a%2Fb HTTP/1.1\r\nHost: a\r\n\r\n", "404", "metadata not found"),
        (put, "200", "metadata updated"),
        (put, "200", "metadata unchanged"),
        ("GET /metadata?key=a%2Fb%20 HTTP/1.1\r\nHost: a\r\n\r\n", "200", "{}"),
        ("GET /metadata HTTP/1.1\r\nHost: a\r\n\r\n", "400", "the query must have a key\n"),
        ("GET /metadata?key=%20 HTTP/1.1\r\nHost: a\r\n\r\n", "400", "the query must have a key\n"),
        (
            "POST /metadata?key=a HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
            "405",
            "only GET, PUT and DELETE are served here\n",
        ),
        ("DELETE /metadata?key=a%2Fb HTTP/1.1\r\nHost: a\r\n\r\n", "200", "metadata deleted"),
        ("DELETE /metadata?key=a%2Fb HTTP/1.1\r\nHost: a\r\n\r\n", "404", "metadata not found"),
    ];
    for (request, status, body) in cases {
        assert_eq!(ask(request), (status.to_owned(), body.to_owned()), "{request}");
    }
    assert!(get(http, "/secret").1.contains("/metadata"));
}

#[test]
fn limits_are_answered() {
    let limits = MetadataLimits { keys: 1, key_bytes: 40, value_bytes: 100, bytes: 1000 };
    let (_control, http) = start(Some(limits));
    let store = store(http);
    store.put("a", &"x".repeat(100)).expect("room");
    let error = store.put("a", &"x".repeat(101)).expect_err("too long").to_string();
    assert!(error.contains("413"), "{error}");
    let error = store.put("b", "").expect_err("too many").to_string();
    assert!(error.contains("507"), "{error}");
    let error = store.get(&"k".repeat(41)).expect_err("too long").to_string();
    assert!(error.contains("400"), "{error}");
}

#[test]
fn it_is_off_by_default_and_needs_http() {
    let (_control, http) = start(None);
    let (status, body) = get(http, "/metadata?key=a");
    assert!(status.contains("404") && !body.contains("/metadata"), "{status} {body}");
    let mut config = ControlConfig::new("test");
    config.mooncake_metadata = Some(MetadataLimits::default());
    assert!(matches!(ControlServer::start(config), Err(StartError::MetadataWithoutHttp)));
}

#[test]
fn many_engines_at_once_lose_nothing() {
    let (_control, http) = start(Some(MetadataLimits::default()));
    std::thread::scope(|scope| {
        for engine in 0..8 {
            scope.spawn(move || {
                let store = store(http);
                for round in 0..20 {
                    let (key, value) = (format!("mooncake/ram/{engine}"), format!("{engine} {round}"));
                    store.put(&key, &value).expect("put");
                    assert_eq!(store.get(&key), Ok(Some(value)));
                }
            });
        }
    });
}
