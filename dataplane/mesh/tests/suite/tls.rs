//! Meshes over TCP with TLS.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use kvplane_mesh::{Mesh, MeshConfig, MeshError, SendOutcome};
use kvplane_tls::DataTls;

use crate::certificates::{Authority, keychain};
use crate::rig::{End, Way, introduce, until};

fn config(authority: &Authority, mode: DataTls, rank: u8) -> MeshConfig {
    let mut config = Way::Tcp.config("sealed", rank, 1);
    config.tls = Some(Arc::new(keychain(mode, authority.issue("node"))));
    config
}

#[test]
fn frames_arrive_over_tls() {
    let authority = Authority::new();
    for modes in [(DataTls::Require, DataTls::Require), (DataTls::Require, DataTls::Offer)] {
        for swapped in [false, true] {
            let modes = if swapped { (modes.1, modes.0) } else { modes };
            let (mut a, mut b) = (End::new(config(&authority, modes.0, 0)), End::new(config(&authority, modes.1, 1)));
            introduce(&mut [&mut a, &mut b]);
            for bytes in [0, 5, 5000, 100_000] {
                assert_eq!((a.send(1, bytes), b.send(0, bytes)), (SendOutcome::Sent, SendOutcome::Sent));
            }
            until(&mut [&mut a, &mut b], "frames", |ends| ends.iter().all(|end| end.frames == 4));
        }
    }
}

#[test]
fn a_process_without_a_certificate_of_the_authority_gets_no_channel() {
    let authority = Authority::new();
    let strange = Authority::new();
    for stranger in [Way::Tcp.config("sealed", 1, 1), config(&strange, DataTls::Require, 1)] {
        let (mut a, mut b) = (End::new(config(&authority, DataTls::Require, 0)), End::new(stranger));
        let peers = [a.peer(), b.peer()];
        a.mesh.set_peers(&peers);
        b.mesh.set_peers(&peers);
        let mut turns = 0;
        until(&mut [&mut a, &mut b], "some turns", |_| {
            turns += 1;
            turns > 3000
        });
        assert!(a.ups.is_empty() && b.ups.is_empty());
    }
}

#[test]
fn beyond_loopback_tls_is_required() {
    let authority = Authority::new();
    for mode in [DataTls::Off, DataTls::Offer, DataTls::Require] {
        let mut config = config(&authority, mode, 0);
        (config.listen, config.announce) = (Ipv4Addr::UNSPECIFIED.into(), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let started = Mesh::start(config);
        match mode {
            DataTls::Require => assert!(started.is_ok()),
            _ => assert!(matches!(started, Err(MeshError::Unauthenticated { .. }))),
        }
    }
}
