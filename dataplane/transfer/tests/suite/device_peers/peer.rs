//! Other process: an engine with memory of a device, which the test reads, writes and controls.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use std::time::Duration;

use kvplane_fake_devices::{Control, HandleType};
use kvplane_sys::device::{Device, DeviceId, DeviceMemory};
use kvplane_transfer::{Error, RegisterOptions, TransferEngine, TransferEngineConfig};

use super::{BYTES, pattern};
use crate::rig::{Way, driver};

const ROLE: &str = "KVPLANE_TEST_DEVICE";

/// Memory of the other process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Allocated as a whole.
    Allocated,
    /// Mapped by the virtual-memory interface.
    Mapped,
    /// Mapped by it, and created for fabric handles only.
    Fabric,
    /// Allocated, and only to be read by peers.
    ReadOnly,
}

const KINDS: [Kind; 4] = [Kind::Allocated, Kind::Mapped, Kind::Fabric, Kind::ReadOnly];

/// Transport over shared memory, with TCP for what it does not carry.
pub(super) fn config() -> TransferEngineConfig {
    TransferEngineConfig { tcp: true, ..Way::Shm.config() }
}

/// Body of the other process, not a test of its own. It obeys until its input ends.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [device, kind, quiet_ms] = role.split(' ').collect::<Vec<_>>()[..] else { panic!("{role:?} is no role") };
    let quiet_deadline = Duration::from_millis(quiet_ms.parse().unwrap());
    let id = DeviceId::parse(device).unwrap();
    let kind = KINDS.into_iter().find(|one| format!("{one:?}") == kind).unwrap();
    let fake = driver(id);
    match kind {
        Kind::Mapped => fake.set_virtual(HandleType::Descriptor),
        Kind::Fabric => fake.set_virtual(HandleType::Fabric),
        Kind::Allocated | Kind::ReadOnly => {}
    }
    let engine = TransferEngine::start(TransferEngineConfig { quiet_deadline, ..config() }).unwrap();
    let memory = DeviceMemory::allocate(&Device::open(id).unwrap(), BYTES).unwrap();
    let options = RegisterOptions { writable: kind != Kind::ReadOnly, ..RegisterOptions::default() };
    engine.register(memory.clone(), &options).unwrap();
    let address = memory.address();
    println!("\nserves {} {address}", engine.name());
    for line in std::io::stdin().lines() {
        println!("answers {}", obey(&line.unwrap(), fake, id, &engine, address));
    }
}

/// Carries out a command.
fn obey(line: &str, fake: Control, id: DeviceId, engine: &TransferEngine, address: u64) -> String {
    let mut words = line.split(' ');
    let command = words.next().unwrap();
    let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    match (command, &numbers[..]) {
        ("fill", &[offset, bytes, seed]) => fake.write(address + offset, &pattern(seed, bytes)),
        ("check", &[offset, bytes, seed]) => {
            let found = fake.read(address + offset, bytes);
            let wrong = found.iter().zip(pattern(seed, bytes)).position(|(found, expected)| *found != expected);
            return format!("{wrong:?}");
        }
        ("replace", []) => {
            fake.free(address);
            assert_eq!(fake.allocate(usize::from(id.ordinal), BYTES), address, "the address is used again");
        }
        ("unregister", []) => engine.unregister(address).unwrap(),
        ("held", []) => assert!(matches!(engine.unregister(address), Err(Error::MemoryHeld { .. }))),
        ("fail", &[code]) => fake.fail("cuIpcGetMemHandle", 0, code as i32),
        ("staged", []) => {
            let staging = engine.snapshot().unwrap().staging;
            return staging.values().map(|one| one.to_host_bytes + one.to_device_bytes).sum::<u64>().to_string();
        }
        other => panic!("{other:?}"),
    }
    "done".to_owned()
}

/// The other process, as the test has it.
pub(super) struct Peer {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    pub(super) name: String,
    pub(super) address: u64,
}

impl Peer {
    /// Starts it with memory of this kind.
    pub(super) fn start(id: DeviceId, kind: Kind) -> Self {
        Self::start_with(id, kind, config().quiet_deadline)
    }

    /// Starts it with memory of this kind, which is unregistered in that time or not at all.
    pub(super) fn start_with(id: DeviceId, kind: Kind, quiet_deadline: Duration) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "device_peers::peer::the_other_process", "--nocapture"])
            .env(ROLE, format!("{id} {kind:?} {}", quiet_deadline.as_millis()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.by_ref().map_while(Result::ok).find(|line| line.starts_with("serves ")).expect("it serves");
        let words: Vec<&str> = line.split(' ').collect();
        let (name, address) = (words[1].to_owned(), words[2].parse().unwrap());
        Self { child, input, lines, name, address }
    }

    /// Has it carry out a command; returns its answer.
    pub(super) fn tell(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        let answers = self.lines.by_ref().map_while(Result::ok);
        let answer = answers.filter_map(|line| line.strip_prefix("answers ").map(str::to_owned)).next();
        answer.unwrap_or_else(|| panic!("no answer to {command}"))
    }

    /// Checks bytes of its memory.
    pub(super) fn check(&mut self, offset: u64, bytes: u64, seed: u64) {
        let wrong = self.tell(&format!("check {offset} {bytes} {seed}"));
        assert_eq!(wrong, "None", "first wrong byte of {bytes} at {offset} of the peer, seed {seed:#x}");
    }

    pub(super) fn fill(&mut self, offset: u64, bytes: u64, seed: u64) {
        assert_eq!(self.tell(&format!("fill {offset} {bytes} {seed}")), "done");
    }

    /// Returns the bytes that it has staged.
    pub(super) fn staged(&mut self) -> u64 {
        self.tell("staged").parse().unwrap()
    }

    /// Kills it, and waits for its end.
    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Its input is still open, so it would not end by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
