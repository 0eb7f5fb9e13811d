//! Engines that claim the same host but do not see each other's sockets, as in two containers: at the path there is no
//! socket, a dead one, another engine's, or one that never answers.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use kvplane_transfer::{
    Opcode, RailSnapshot, SegmentHandle, SubmitOptions, TaskState, TransferEngineConfig, Transport,
};

use crate::rig::{Side, Way, check, fill};

const BYTES: usize = 1 << 20;

/// Creates an engine with a socket directory of its own; returns it with that socket.
fn side(name: &str) -> (Side, PathBuf) {
    let directory = std::env::temp_dir().join(format!("kvplane-namespaces-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    let runtime_directory = Some(directory.clone());
    let side = Side::new(TransferEngineConfig { tcp: true, runtime_directory, ..Way::Shm.config() }, BYTES);
    let mut entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let socket = entries.find(|path| path.extension().is_some_and(|ending| ending == "shm")).expect("a socket");
    (side, socket)
}

fn shared(side: &Side) -> RailSnapshot {
    let mut rails = side.engine.metrics().rails;
    let at = rails.iter().position(|rail| rail.transport == Transport::Shm).expect("a way that was tried");
    rails.swap_remove(at)
}

fn read(a: &Side, b: &Side, peer: SegmentHandle, seed: u64) {
    fill(&b.region, 0, BYTES, seed);
    let request = a.request(Opcode::Read, 0, (peer, b.region.address()), BYTES);
    let batch = a.engine.submit(&[request], &SubmitOptions::default()).unwrap();
    assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
    check(&a.region, 0, BYTES, seed);
}

#[test]
fn a_socket_that_does_not_lead_to_the_peer_fails_over_to_another_path() {
    for what in ["nothing", "nobody", "somebody"] {
        let (b, socket) = side(what);
        let (other, others) = side("other");
        std::fs::remove_file(&socket).unwrap();
        match what {
            "nobody" => drop(UnixListener::bind(&socket).unwrap()),
            "somebody" => std::fs::rename(others, &socket).unwrap(),
            _ => {}
        }
        fill(&other.region, 0, BYTES, 70);
        let a = Side::new(TransferEngineConfig { tcp: true, ..Way::Shm.config() }, BYTES);
        let peer = a.engine.open_segment(b.engine.name()).unwrap();
        (71..75).for_each(|seed| read(&a, &b, peer, seed));
        let way = shared(&a);
        // Counted, not retried for a while, and not counted as an operation.
        assert_eq!((way.unavailable, way.operations), (1, 0), "{what}");
        assert!(way.reason.is_some(), "{what}");
        assert_eq!(a.engine.metrics().rails.iter().map(|rail| rail.pauses).sum::<u64>(), 0, "{what}");
        let choices = a.engine.explain(b.engine.name()).unwrap().choices;
        let choice = |transport| choices.iter().find(|choice| choice.transport == transport).unwrap();
        assert!(!choice("shm").usable && !choice("cma").usable && choice("tcp").usable, "{what}: {choices:?}");
        let reason = &choice("shm").reason;
        let why = if what == "nothing" { "not visible from here" } else { "does not lead to the peer" };
        assert!(reason.contains(why), "{what}: {reason}");
        println!("{what}: {reason}");
    }
}

/// Connecting to a process that never answers delays no other peer.
#[test]
fn other_peers_are_not_delayed_by_a_connection_setup() {
    let (b, socket) = side("silent");
    std::fs::remove_file(&socket).unwrap();
    let silent = UnixListener::bind(&socket).unwrap();
    let a = Side::new(TransferEngineConfig { tcp: true, ..Way::Shm.config() }, BYTES);
    let c = Side::new(Way::Shm.config(), BYTES);
    let quick = a.engine.open_segment(c.engine.name()).unwrap();
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| a.engine.open_segment(b.engine.name()));
        let (mut caller, _) = silent.accept().unwrap();
        read(&a, &c, quick, 76);
        caller.set_nonblocking(true).unwrap();
        let found = caller.read(&mut [0; 8]).map_err(|error| error.kind());
        assert_eq!(found, Err(ErrorKind::WouldBlock), "the others were held up until it was given up");
        let slow = opened.join().unwrap().expect("over TCP");
        read(&a, &b, slow, 77);
    });
}
