//! Tests of TLS data connections between real processes: admitted clients, and errors of rejected ones.

use std::time::Duration;

use kvplane::{Client, ClientConfig, DataTls, Error, PutOptions, Status};

use crate::namespaces::on_another_host;
use crate::network::over_rdma;
use crate::support::{Process, Way, Workplace, health, text, wait_until};

fn client(place: &Workplace, data_tls: DataTls) -> Result<Client, Error> {
    let deadline = Duration::from_secs(10);
    Client::connect(&ClientConfig { data_tls, deadline, ..place.client_config(Way::Tcp) })
}

fn value(key: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 3 + key * 7 + (at >> 9)) as u8).collect()
}

fn exercise(client: &mut Client, round: usize) {
    for (key, bytes) in [1, 100, 4096, 16_384, 70_000, 1 << 20, 5 << 20].into_iter().enumerate() {
        let (name, value) = (format!("{round}-{key}"), value(key + round, bytes));
        client.put(name.as_bytes(), &value).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(client.get(name.as_bytes()).unwrap().as_deref() == Some(&value[..]), "{name}");
    }
}

#[test]
fn a_node_that_requires_tls_refuses_plain_clients_with_the_reason() {
    let place = Workplace::new("sealed");
    let _dev = place.dev("128M", &["--shards", "2", "--data-tls", "require"]);
    exercise(&mut client(&place, DataTls::Require).unwrap(), 0);
    // A client that offers TLS works without a setting of its own.
    exercise(&mut client(&place, DataTls::Offer).unwrap(), 100);
    // Over other devices, requests go over a TCP connection too.
    if !over_rdma() {
        let error = client(&place, DataTls::Off).unwrap().put(b"plain", b"bytes").unwrap_err();
        assert_eq!(error.status(), Some(Status::WantsTls), "{error}");
        assert!(error.to_string().contains("--data-tls"), "{error}");
    }
    let file = place.file("bytes", &value(3, 200_000));
    place.run(&["ctl", "--data-tls", "require", "put", "by-hand", text(&file)]).well();
    assert!(place.run(&["ctl", "get", "by-hand"]).well() == value(3, 200_000));
}

#[test]
fn a_client_that_requires_tls_uses_no_node_without() {
    if over_rdma() {
        return;
    }
    let place = Workplace::new("unsealed");
    let _dev = place.dev("64M", &["--shards", "1"]);
    exercise(&mut client(&place, DataTls::Offer).unwrap(), 0);
    let error = client(&place, DataTls::Require).unwrap().put(b"plain", b"bytes").unwrap_err();
    assert_eq!(error.status(), Some(Status::TlsFailed), "{error}");
}

/// Starts a node that shares no memory with the others: replicas go over TCP. `None` without mount namespaces.
fn node(place: &Workplace, number: usize, tls: &str) -> Option<Process> {
    let boot_id = place.file(&format!("boot-{number}"), format!("0000000{number}\n").as_bytes());
    let number = number.to_string();
    let how = ["node", "--node-id", &number, "--pool", "64M", "--shards", "1", "--data-tls", tls];
    let node = Process::start(on_another_host(&place.command(&how), &boot_id)?);
    node.wait_for(&format!("node {number} with"));
    Some(node)
}

#[test]
fn nodes_that_require_tls_replicate_only_among_each_other() {
    if over_rdma() {
        return;
    }
    let place = Workplace::new("sealed-nodes");
    let state = place.path("state");
    let control = Process::start(place.command(&["control", "--state", text(&state), "--replicas", "2"]));
    control.wait_for("metrics on");
    let members = |count: u64| {
        let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
        assert_eq!(there, Some(()), "{count} members");
    };
    let (Some(mut first), Some(second)) = (node(&place, 1, "require"), node(&place, 2, "require")) else {
        println!("skipped: no mount namespaces here (unshare --map-root-user --mount)");
        return;
    };
    members(2);
    let mut client = client(&place, DataTls::Offer).unwrap();
    let twice = PutOptions { replicas: 2, replace: true, ..PutOptions::default() };
    let put = |client: &mut Client, key: usize| {
        let (_, copies) =
            client.replicas().put(format!("{key}").as_bytes(), &value(key, 90_000), &twice).expect("a put");
        copies
    };
    for key in 0..40 {
        assert_eq!(wait_until(|| (put(&mut client, key) == 2).then_some(())), Some(()), "{key} has two copies");
    }
    first.kill();
    for key in 0..40 {
        let got = wait_until(|| client.get(format!("{key}").as_bytes()).ok().flatten());
        assert!(got.as_deref() == Some(&value(key, 90_000)[..]), "{key}");
    }
    drop(second);
    members(0);
    // Neither node accepts a plain connection of the other kind, nor opens one.
    let (_third, _fourth) = (node(&place, 3, "require"), node(&place, 4, "off"));
    members(2);
    let copies: Vec<u8> = (100..108).map(|key| put(&mut client, key)).collect();
    assert_eq!(copies, [1; 8]);
}

#[test]
fn a_node_that_offers_serves_both() {
    let place = Workplace::new("offered");
    let _dev = place.dev("128M", &["--shards", "1", "--data-tls", "offer"]);
    for (round, mode) in [DataTls::Off, DataTls::Offer, DataTls::Require].into_iter().enumerate() {
        exercise(&mut client(&place, mode).unwrap(), round * 100);
    }
}
