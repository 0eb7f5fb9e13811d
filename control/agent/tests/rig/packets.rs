//! Packet sizes: ports with different MTUs use the shorter one, and a network with a shorter MTU than both of its ports
//! is named as a possible cause.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use kvplane::{Opcode, RdmaConfig, RdmaUse, SubmitOptions, TaskState, TransferEngineConfig};

use crate::bed::{Side, alone, config, has, region};

const BYTES: usize = 1 << 20;
/// MTU too small for the 4096-byte packets of the other ports.
const SHORT: u32 = 1500;

/// Link with a reduced MTU, until this is dropped.
struct ShortPackets {
    link: &'static str,
    before: u32,
}

impl ShortPackets {
    fn new(link: &'static str) -> Self {
        let before = fs::read_to_string(format!("/sys/class/net/{link}/mtu")).unwrap().trim().parse().unwrap();
        set_mtu(link, SHORT);
        Self { link, before }
    }
}

impl Drop for ShortPackets {
    fn drop(&mut self) {
        set_mtu(self.link, self.before);
    }
}

fn set_mtu(link: &str, mtu: u32) {
    let status = Command::new("ip").args(["link", "set", link, "mtu", &mtu.to_string()]).status().unwrap();
    assert!(status.success(), "ip link set {link} mtu {mtu}: {status}");
}

/// Creates an engine with one device and no other path.
fn side(device: usize) -> Side {
    let listen: SocketAddr = format!("10.77.0.{}:0", device + 1).parse().unwrap();
    let rdma = RdmaConfig { devices: vec![format!("rxe{device}")], ..RdmaConfig::of(RdmaUse::Require) };
    let ways = TransferEngineConfig { rdma, tcp: false, shared_memory: false, ..config() };
    Side::new(TransferEngineConfig { listen, open_to_network: true, ..ways }, region(BYTES, None))
}

fn there_and_back(ours: &Side, theirs: &Side, bytes: usize, seed: u64) {
    let peer = ours.engine.open_segment(theirs.engine.name()).unwrap();
    let request = |opcode| ours.request(opcode, 0, (peer, theirs.region.address()), bytes);
    ours.fill(0, 0, bytes, seed);
    ours.done(&[request(Opcode::Write)]);
    theirs.check(0, 0, bytes, seed);
    ours.fill(0, 0, bytes, !seed);
    ours.done(&[request(Opcode::Read)]);
    ours.check(0, 0, bytes, seed);
}

#[test]
fn ports_with_different_mtus_use_the_smaller_one() {
    let _turn = alone();
    if has("RIG_RXE", "RDMA devices").is_none_or(|count| count < 4) {
        return;
    }
    let _short = ShortPackets::new("nic1");
    let (ours, theirs) = (side(1), side(3));
    there_and_back(&ours, &theirs, BYTES, 1);
    there_and_back(&theirs, &ours, BYTES, 2);
}

#[test]
fn a_network_with_a_smaller_mtu_than_its_ports_is_named() {
    let _turn = alone();
    if has("RIG_RXE", "RDMA devices").is_none_or(|count| count < 4) {
        return;
    }
    let (ours, theirs) = (side(0), side(2));
    {
        let _short = ShortPackets::new("sw0");
        there_and_back(&ours, &theirs, 64, 1);
        let peer = ours.engine.open_segment(theirs.engine.name()).unwrap();
        let request = ours.request(Opcode::Write, 0, (peer, theirs.region.address()), BYTES);
        let options = SubmitOptions { deadline: Some(Duration::from_secs(10)), ..SubmitOptions::default() };
        let (state, problem) = ours.run(&[request], &options);
        println!("packets of 4096 bytes over a cable of {SHORT}: {state:?}, {problem}");
        assert!(matches!(state, TaskState::Failed | TaskState::Timeout), "{state:?}");
        assert!(problem.contains("MTU of 4096 bytes"), "{problem}");
    }
    there_and_back(&ours, &theirs, BYTES, 3);
}
