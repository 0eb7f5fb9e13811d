//! Tests of the metadata stores against servers that speak just enough of each protocol: values are found after a put,
//! errors are reported, and no call waits forever.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvplane_mooncake::{Environment, Metadata, MetadataStore};
use serde_json::{Value, json};

type Map = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// Serves each connection with `serve` until the test's process ends; returns the address.
fn server(serve: impl Fn(&TcpStream, &Map) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        let map = Map::default();
        for stream in listener.incoming().flatten() {
            serve(&stream, &map);
        }
    });
    address
}

fn open(text: &str, environment: &Environment) -> Box<dyn MetadataStore> {
    Metadata::parse(text).expect("a good address").open(environment).expect("a store")
}

fn keys_are_put_found_and_removed(store: &dyn MetadataStore) {
    let key = "mooncake/ram/host name+&=%é:1";
    assert_eq!(store.get(key), Ok(None));
    let value = json!({ "buffers": [], "name": "line\r\nbreak \u{1f980}" }).to_string();
    store.put(key, &value).expect("put");
    assert_eq!(store.get(key), Ok(Some(value)));
    store.put(key, "{}").expect("replaced");
    assert_eq!(store.get(key), Ok(Some("{}".to_owned())));
    assert_eq!(store.get("mooncake/ram/other"), Ok(None));
    assert_eq!(store.remove(key), Ok(true));
    assert_eq!(store.remove(key), Ok(false));
    assert_eq!(store.get(key), Ok(None));
}

/// Reads the first line and the body of an HTTP request.
fn http_request(stream: &TcpStream) -> Option<(String, Vec<u8>)> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((first, body))
}

fn http_answer(mut stream: &TcpStream, status: &str, body: &str) {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(format!("{head}{body}").as_bytes());
}

/// Serves the gateway's `range`, `put` and `deleterange`.
fn etcd(stream: &TcpStream, map: &Map) {
    let Some((first, body)) = http_request(stream) else { return };
    let request: Value = serde_json::from_slice(&body).expect("JSON");
    let field = |name: &str| STANDARD.decode(request[name].as_str().unwrap_or_default()).expect("base64");
    let key = String::from_utf8(field("key")).expect("text");
    let mut map = map.lock().expect("one server");
    let answer = match first.split(' ').nth(1).expect("a path") {
        "/v3/kv/range" => match map.get(&key) {
            Some(value) => json!({ "header": {}, "kvs": [{ "value": STANDARD.encode(value) }], "count": "1" }),
            None => json!({ "header": {} }),
        },
        "/v3/kv/put" => {
            map.insert(key, field("value"));
            json!({ "header": {} })
        }
        "/v3/kv/deleterange" => match map.remove(&key) {
            Some(_) => json!({ "header": {}, "deleted": "1" }),
            None => json!({ "header": {} }),
        },
        path => panic!("{path}"),
    };
    http_answer(stream, "200 OK", &answer.to_string());
}

/// Serves `AUTH`, `SELECT`, `GET`, `SET` and `DEL`, with one map for each database.
fn redis(stream: &TcpStream, map: &Map) {
    let mut reader = BufReader::new(stream);
    let line = |reader: &mut BufReader<&TcpStream>| {
        let mut text = String::new();
        reader.read_line(&mut text).ok().filter(|&bytes| bytes > 0)?;
        Some(text.trim_end().to_owned())
    };
    let (mut known, mut database) = (false, "0".to_owned());
    while let Some(head) = line(&mut reader) {
        let count: usize = head[1..].parse().expect("an array");
        let words: Vec<Vec<u8>> = (0..count)
            .map(|_| {
                let bytes: usize = line(&mut reader).expect("a length")[1..].parse().expect("a length");
                let mut word = vec![0; bytes + 2];
                reader.read_exact(&mut word).expect("a word");
                word.truncate(bytes);
                word
            })
            .collect();
        let text = |index: usize| String::from_utf8_lossy(&words[index]).into_owned();
        let mut map = map.lock().expect("one server");
        let answer = match text(0).as_str() {
            "AUTH" => {
                known = (text(1), text(2)) == ("user".to_owned(), "secret".to_owned());
                if known { b"+OK\r\n".to_vec() } else { b"-WRONGPASS invalid\r\n".to_vec() }
            }
            _ if !known => b"-NOAUTH Authentication required.\r\n".to_vec(),
            "SELECT" => {
                database = text(1);
                b"+OK\r\n".to_vec()
            }
            "GET" => match map.get(&format!("{database} {}", text(1))) {
                Some(value) => [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat(),
                None => b"$-1\r\n".to_vec(),
            },
            "SET" => {
                map.insert(format!("{database} {}", text(1)), words[2].clone());
                b"+OK\r\n".to_vec()
            }
            "DEL" => {
                let removed = map.remove(&format!("{database} {}", text(1))).is_some();
                format!(":{}\r\n", u8::from(removed)).into_bytes()
            }
            other => panic!("{other}"),
        };
        let _ = { stream }.write_all(&answer);
    }
}

fn with_password(password: &str) -> Environment {
    Environment {
        redis_username: "user".to_owned(),
        redis_password: password.to_owned(),
        redis_database: 3,
        ..Environment::default()
    }
}

#[test]
fn etcd_keeps_keys_and_a_dead_endpoint_is_passed_over() {
    let address = server(etcd);
    let environment = Environment::default();
    keys_are_put_found_and_removed(&*open(&address, &environment));
    let dead = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("bound").to_string()
    };
    let busy = server(|stream, _| {
        let _ = http_request(stream);
        http_answer(stream, "503 Service Unavailable", "no leader");
    });
    keys_are_put_found_and_removed(&*open(&format!("etcd://{dead};{busy};{address}"), &environment));
    let error = open(&format!("etcd://{dead};{busy}"), &environment).get("a").expect_err("no leader").to_string();
    assert!(error.contains(&busy) && error.contains("503: no leader"), "{error}");
}

#[test]
fn redis_keeps_keys_for_those_it_knows() {
    let address = format!("redis://{}", server(redis));
    keys_are_put_found_and_removed(&*open(&address, &with_password("secret")));
    let error = open(&address, &with_password("guess")).get("a").expect_err("a stranger").to_string();
    assert!(error.contains("AUTH: WRONGPASS") && !error.contains("guess"), "{error}");
    let error = open(&address, &Environment::default()).put("a", "b").expect_err("a stranger").to_string();
    assert!(error.contains("NOAUTH"), "{error}");
}

#[test]
fn errors_carry_the_answer_of_the_server() {
    let address = server(|stream, _| {
        let Some((first, _)) = http_request(stream) else { return };
        match first.split(' ').next() {
            Some("GET") => http_answer(stream, "200 OK", &"x".repeat(3 << 20)),
            Some("PUT") => http_answer(stream, "400 Bad Request", "Duplicate rpc_meta key not allowed"),
            _ => http_answer(stream, "302 Found", ""),
        }
    });
    let store = open(&format!("http://{address}/metadata"), &Environment::default());
    let error = store.get("a").expect_err("too long").to_string();
    assert!(error.contains("more than 1048576 bytes"), "{error}");
    let error = store.put("mooncake/rpc_meta/a", "{}").expect_err("refused").to_string();
    assert!(error.contains("400: Duplicate rpc_meta key") && error.contains("\"mooncake/rpc_meta/a\""), "{error}");
    let error = store.remove("a").expect_err("redirects are not followed").to_string();
    assert!(error.contains("302"), "{error}");
}

#[test]
fn a_server_that_is_silent_or_speaks_something_else_is_an_error() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().map(|address| (silent, address.to_string())).expect("bound");
    let garbage = server(|mut stream, _| {
        let _ = stream.write_all(&[0xff; 64]);
    });
    let ask = |scheme: &str, address: &str| {
        let store = open(&format!("{scheme}{address}"), &Environment::default());
        let error = store.get("a").expect_err("no answer").to_string();
        assert!(error.contains(address), "{error}");
    };
    std::thread::scope(|scope| {
        for scheme in ["http://", "etcd://", "redis://"] {
            for address in [&silent.1, &garbage] {
                scope.spawn(move || ask(scheme, address));
            }
        }
    });
}
