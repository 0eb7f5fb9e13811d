//! Copies between processes: the child is this test binary again, in the role that its environment names.

use kvplane_sys::process_memory::{read, word, write};
use kvplane_sys::{CrossError, CrossProcessRange, HugePages, IoBuf, Region, RegionOptions};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

const PART: &str = "KVPLANE_SYS_TEST_MEMORY";
const BYTES: usize = (3 << 20) + 777;

fn memory(bytes: usize) -> Arc<Region> {
    Region::allocate(&RegionOptions { huge: HugePages::Never, ..RegionOptions::new("test", bytes) }).expect("memory")
}

/// Returns the byte that belongs at an offset.
fn pattern(seed: u64, at: u64) -> u8 {
    let word = (seed ^ (at / 8)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (word ^ (word >> 29)).to_le_bytes()[(at % 8) as usize]
}

fn fill(region: &Region, seed: u64) {
    region.fill_with(0, region.bytes(), &mut |at, part| {
        part.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(seed, at + i as u64));
    });
}

fn wrong(region: &Region, offset: usize, bytes: usize, expected: impl Fn(u64) -> u8) -> Option<u64> {
    let mut first = None;
    region.read_with(offset, bytes, &mut |at, part| {
        let here = part.iter().enumerate().find(|(i, byte)| **byte != expected(at + *i as u64));
        first = first.or(here.map(|(i, _)| at + i as u64));
    });
    first
}

struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
    address: u64,
}

impl Peer {
    fn start(part: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("our own path"))
            .args(["process_memory::the_other_process", "--exact", "--nocapture"])
            .env(PART, part)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let input = child.stdin.take().expect("its input");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let mut peer = Self { child, input, output, address: 0 };
        peer.address = peer.line().parse().expect("an address");
        peer
    }

    /// Returns the child's next message; the test harness's own lines are skipped.
    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).expect("a line"), 0, "the child ended early");
            // The harness may have printed the test's name before, on the same line.
            if let Some((_, said)) = line.split_once("SAY ") {
                return said.trim().to_owned();
            }
        }
    }

    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test of its own: the child's role.
#[test]
fn the_other_process() {
    let Ok(part) = std::env::var(PART) else { return };
    let region = memory(BYTES);
    fill(&region, 1);
    if let Some(target) = part.strip_prefix("stranger ") {
        // SAFETY: plain call; no other thread of this process depends on the user id.
        assert_eq!(unsafe { libc::setuid(65_534) }, 0);
        let (pid, address) = target.split_once(' ').expect("two numbers");
        let found = word(pid.parse().expect("a pid"), address.parse().expect("an address"));
        println!("SAY {}", u64::from(matches!(found, Err(CrossError::Denied))));
        return;
    }
    if part == "closed" {
        // SAFETY: plain call with plain numbers.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }, 0);
    }
    println!("SAY {}", region.address());
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
    // The parent has completed its writes by now.
    println!("SAY {:?}", wrong(&region, 0, BYTES, |at| pattern(2, at)));
    let _ = std::io::stdin().read_line(&mut line);
}

#[test]
fn bytes_cross_both_ways_in_many_ranges() {
    let mut peer = Peer::start("open");
    let ours = memory(BYTES);
    // Lengths around page and call limits: more ranges than one call takes.
    let mut crossings = Vec::new();
    let mut at = 0;
    for number in 0.. {
        let bytes = [1, 4095, 4096, 64, 1000][number % 5].min(BYTES - at);
        if bytes == 0 {
            break;
        }
        crossings
            .push(CrossProcessRange { local: IoBuf::new(ours.clone(), at, bytes), address: peer.address + at as u64 });
        at += bytes;
    }
    assert!(crossings.len() > 1024, "{} ranges", crossings.len());
    read(peer.pid(), &crossings).expect("our own child");
    assert_eq!(wrong(&ours, 0, BYTES, |at| pattern(1, at)), None);
    let mut first = [0; 8];
    ours.copy_out(0, &mut first);
    assert_eq!(word(peer.pid(), peer.address).expect("our own child"), u64::from_ne_bytes(first));
    fill(&ours, 2);
    crossings.reverse();
    write(peer.pid(), &crossings).expect("our own child");
    writeln!(peer.input).expect("the child listens");
    assert_eq!(peer.line(), "None", "the child found every byte");
    read(peer.pid(), &[]).expect("nothing to do");
}

#[test]
fn unmapped_ranges_fault_and_later_ranges_are_not_copied() {
    let peer = Peer::start("open");
    let ours = memory(12288);
    fill(&ours, 5);
    let part = |at: usize, address| CrossProcessRange { local: IoBuf::new(ours.clone(), at, 4096), address };
    for bad in [0, 4096, u64::MAX - 100, 1 << 62] {
        let list = [part(0, peer.address), part(4096, bad), part(8192, peer.address)];
        assert!(matches!(read(peer.pid(), &list), Err(CrossError::Fault)), "{bad:#x}");
        assert!(matches!(word(peer.pid(), bad), Err(CrossError::Fault)));
    }
    assert_eq!(wrong(&ours, 0, 4096, |at| pattern(1, at)), None, "the range before it was read");
    assert_eq!(wrong(&ours, 8192, 4096, |at| pattern(5, 8192 + at)), None, "the range behind it was not");
}

#[test]
fn a_dead_process_is_reported_as_gone() {
    let mut peer = Peer::start("open");
    let ours = memory(4096);
    let list = [CrossProcessRange { local: IoBuf::whole(ours), address: peer.address }];
    read(peer.pid(), &list).expect("our own child");
    peer.child.kill().expect("our own child");
    peer.child.wait().expect("our own child");
    assert!(matches!(read(peer.pid(), &list), Err(CrossError::Gone)));
}

#[test]
fn forbidden_copies_are_denied() {
    let ours = memory(4096);
    // SAFETY: plain query.
    if unsafe { libc::geteuid() } == 0 {
        // Root may copy from any process; a child running as `nobody` may not copy from this one.
        let peer = Peer::start(&format!("stranger {} {}", std::process::id(), ours.address()));
        assert_eq!(peer.address, 1, "the stranger was denied");
        return;
    }
    let peer = Peer::start("closed");
    let list = [CrossProcessRange { local: IoBuf::whole(ours), address: peer.address }];
    match read(peer.pid(), &list) {
        Ok(()) => println!("skipped: this user may trace any process (CAP_SYS_PTRACE)"),
        Err(CrossError::Denied) => assert!(matches!(write(peer.pid(), &list), Err(CrossError::Denied))),
        Err(error) => panic!("{error}"),
    }
}
