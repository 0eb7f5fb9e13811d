//! Engines connected over NICs: every byte crosses the cable, and an unplugged cable fails batches but corrupts no
//! bytes.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use kvplane::{Opcode, SubmitOptions, TaskState, TransferEngineConfig};

use crate::bed::{PATIENCE, Side, alone, cable, config, has, region};
use crate::sysfs::read;

const BYTES: usize = 4 << 20;

/// Returns two engines, each on the address of one NIC.
fn pair() -> Option<(Side, Side)> {
    has("RIG_RXE", "pair of NICs").filter(|&count| count > 1)?;
    let on = |address: &str| {
        let listen: SocketAddr = address.parse().unwrap();
        let config = TransferEngineConfig { listen, open_to_network: true, shared_memory: false, ..config() };
        Side::new(config, region(BYTES, None))
    };
    Some((on("10.77.0.1:0"), on("10.77.0.2:0")))
}

fn sent(nic: usize) -> u64 {
    read(Path::new(&format!("/sys/class/net/nic{nic}/statistics/tx_bytes"))).parse().unwrap()
}

#[test]
fn bytes_cross_the_cable_in_both_directions() {
    let _turn = alone();
    let Some((a, b)) = pair() else { return };
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    let before = [sent(0), sent(1)];
    a.fill(0, 0, BYTES, 1);
    let write = |at: usize| a.request(Opcode::Write, at as u64, (peer, b.region.address() + at as u64), BYTES / 8);
    let writes: Vec<_> = (0..BYTES).step_by(BYTES / 8).map(write).collect();
    a.done(&writes);
    b.check(0, 0, BYTES, 1);
    b.fill(0, 0, BYTES, 2);
    a.done(&[a.request(Opcode::Read, 0, (peer, b.region.address()), BYTES)]);
    a.check(0, 0, BYTES, 2);
    for (nic, before) in before.into_iter().enumerate() {
        assert!(sent(nic) - before >= BYTES as u64, "nic{nic} has sent only {} bytes", sent(nic) - before);
    }
}

#[test]
fn batches_over_an_unplugged_cable_end_by_their_deadline() {
    let _turn = alone();
    let Some((a, b)) = pair() else { return };
    if !Path::new("/sys/class/net/sw0").exists() {
        println!("skipped: these NICs have no cable that can be pulled");
        return;
    }
    let peer = a.engine.open_segment(b.engine.name()).unwrap();
    a.fill(0, 0, BYTES, 3);
    let whole = a.request(Opcode::Write, 0, (peer, b.region.address()), BYTES);
    a.done(&[whole]);
    cable("down");
    let options = SubmitOptions { deadline: Some(Duration::from_secs(2)), ..SubmitOptions::default() };
    let (state, problem) = a.run(&[whole], &options);
    cable("up");
    assert!(matches!(state, TaskState::Timeout | TaskState::Failed), "{state:?} without a cable: {problem}");
    a.fill(0, 0, BYTES, 4);
    let start = Instant::now();
    loop {
        let options = SubmitOptions { deadline: Some(Duration::from_secs(5)), ..SubmitOptions::default() };
        let (state, problem) = a.run(&[whole], &options);
        if state == TaskState::Completed {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "the cable is back, and still: {problem}");
    }
    b.check(0, 0, BYTES, 4);
    // Bytes that were sent before the deadline, and never arrived, must not arrive now. The kernel would retransmit
    // them.
    std::thread::sleep(Duration::from_secs(4));
    b.check(0, 0, BYTES, 4);
}
