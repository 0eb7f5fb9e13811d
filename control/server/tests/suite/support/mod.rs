//! Shared parts of the tests of a running control plane.

#![allow(dead_code, unreachable_pub)] // Not every test file uses everything.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::map::{Member, ShardAddress};
use kvplane_proto::rng::Rng;
use kvplane_rpc::message::{Heartbeat, Join, Load};
use kvplane_rpc::{Client, ClientConfig, LocalCluster, Role};
use kvplane_server::{ConductorConfig, ControlConfig, ControlHandle, ControlServer};
use serde_json::Value;

/// A directory that is removed with the test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvplane-server-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a test on a runtime, with a limit on its time.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        tokio::time::timeout(Duration::from_secs(30), test).await.expect("the test hangs");
    });
}

/// Starts a control plane with a Conductor and HTTP on loopback; `change` changes its settings before. Returns the
/// address of its HTTP, too.
pub fn start(cluster: &str, change: impl FnOnce(&mut ControlConfig)) -> (ControlHandle, SocketAddr) {
    let mut config = ControlConfig::new(cluster);
    config.http_listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    config.conductor = Some(ConductorConfig::default());
    change(&mut config);
    let control = ControlServer::start(config).expect("a control plane");
    let http = control.http_address().expect("it listens");
    (control, http)
}

pub async fn client(local: &LocalCluster, role: Role) -> Client {
    let config = ClientConfig::local(local, role, "test").expect("an identity");
    Client::connect(&config, Rng::new(1, "test")).await.expect("a connection").0
}

pub fn join(node: u64, incarnation: u64) -> Join {
    let port = 7000 + u16::try_from(node).expect("a small id");
    let member = Member {
        node: NodeId(node),
        incarnation: Incarnation(incarnation),
        weight: 1,
        failure_domain: format!("rack-{node}"),
        host: "test".to_owned(),
        shards: vec![ShardAddress { tcp: SocketAddr::from(([127, 0, 0, 1], port)), shm: None }],
    };
    Join { member, capacity_bytes: 1 << 30, version: "0.1.0".to_owned() }
}

pub fn beat(node: u64, incarnation: u64) -> Heartbeat {
    let load = Load { objects: 3, used_bytes: 4096, capacity_bytes: 8192 };
    Heartbeat { node, incarnation, load }
}

/// Joins and sends the first heartbeat.
pub async fn enter(client: &Client, node: u64, incarnation: u64) {
    client.call(&join(node, incarnation)).await.expect("a good member");
    client.call(&beat(node, incarnation)).await.expect("a member");
}

/// Sends `request` and returns the whole answer.
pub fn raw_http(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    // The server may refuse and close before everything is written.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

/// Returns status line and body of a GET.
pub fn get(address: SocketAddr, path: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    let answer = raw_http(address, request.as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").expect("a whole answer");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

/// Posts JSON, off this thread, which the control plane's peers need meanwhile. Returns the status and the answer.
pub async fn post_json(http: SocketAddr, path: &'static str, body: Value) -> (String, Value) {
    let send = move || post_as(http, path, "application/json", body.to_string().as_bytes());
    let (status, body) = tokio::task::spawn_blocking(send).await.expect("sent");
    (status["HTTP/1.1 ".len()..].to_owned(), serde_json::from_slice(&body).expect("JSON"))
}

/// Sends `body`, and returns the status and the answer's bytes.
pub fn post_as(address: SocketAddr, path: &str, kind: &str, body: &[u8]) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let bytes = body.len();
    let head = format!("POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: {kind}\r\nContent-Length: {bytes}\r\n\r\n");
    let _ = stream.write_all(&[head.as_bytes(), body].concat());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("a whole answer");
    let status = String::from_utf8_lossy(&answer[..end]).lines().next().unwrap_or_default().to_owned();
    (status, answer[end + 4..].to_vec())
}

/// Encodes a value as MessagePack with the longest forms: readers accept any.
pub fn pack(value: &serde_json::Value) -> Vec<u8> {
    use serde_json::Value;
    let counted = |tag: u8, count: usize| [&[tag][..], &(count as u32).to_be_bytes()].concat();
    match value {
        Value::Null => vec![0xc0],
        Value::Bool(is) => vec![0xc2 + u8::from(*is)],
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => [&[0xcf][..], &number.to_be_bytes()].concat(),
            (None, Some(number)) => [&[0xd3][..], &number.to_be_bytes()].concat(),
            (None, None) => [&[0xcb][..], &number.as_f64().expect("a number").to_be_bytes()].concat(),
        },
        Value::String(text) => [counted(0xdb, text.len()), text.clone().into_bytes()].concat(),
        Value::Array(values) => {
            values.iter().fold(counted(0xdd, values.len()), |out, value| [out, pack(value)].concat())
        }
        Value::Object(fields) => fields.iter().fold(counted(0xdf, fields.len()), |out, (name, value)| {
            [out, pack(&Value::String(name.clone())), pack(value)].concat()
        }),
    }
}
