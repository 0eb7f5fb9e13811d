//! Sealed data connections through real processes: who gets in, and who is told why not.

use std::time::Duration;

use kvplane::{Client, ClientConfig, DataTls, Error, Status};

use crate::network::over_rdma;
use crate::support::{Way, Workplace, text};

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
fn a_node_that_requires_tls_serves_sealed_clients_and_tells_others_why_not() {
    let place = Workplace::new("sealed");
    let _dev = place.dev("128M", &["--shards", "2", "--data-tls", "require"]);
    exercise(&mut client(&place, DataTls::Require).unwrap(), 0);
    // Whoever seals where it is told to needs no setting.
    exercise(&mut client(&place, DataTls::Offer).unwrap(), 100);
    // Other devices carry what is asked for over a connection of this kind, too.
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

#[test]
fn a_node_that_offers_serves_both() {
    let place = Workplace::new("offered");
    let _dev = place.dev("128M", &["--shards", "1", "--data-tls", "offer"]);
    for (round, mode) in [DataTls::Off, DataTls::Offer, DataTls::Require].into_iter().enumerate() {
        exercise(&mut client(&place, mode).unwrap(), round * 100);
    }
}
