//! Processes that are stopped (SIGSTOP): in the middle of a copy to local memory, and as owners of memory to be read.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_transfer::{
    Error, Opcode, RegisterOptions, SegmentHandle, SubmitOptions, TaskState, TransferEngineConfig, TransferRequest,
    Transport,
};

use crate::rig::{PATIENCE, Side, TestBytes as _, Way, byte, check, fill, region};

const BYTES: usize = 4 << 20;
const WRITES: &str = "KVPLANE_TEST_WRITES";
const OWNS: &str = "KVPLANE_TEST_OWNS";
/// Bytes that the writer writes, and those in the owner's two regions.
const WRITTEN: u64 = 51;
const OWNED: [u64; 2] = [61, 62];

/// Ends this process when its parent ends.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// Body of the writer, not a test of its own: writes to its parent's memory forever, also after it was refused.
#[test]
fn the_writer() {
    let Ok(part) = std::env::var(WRITES) else { return };
    end_with_parent();
    let (name, address) = part.split_once(' ').unwrap();
    let address: u64 = address.parse().unwrap();
    let side = Side::new(TransferEngineConfig { slice_bytes: BYTES as u64, ..Way::Shm.config() }, BYTES);
    fill(&side.region, 0, BYTES, WRITTEN);
    let peer = side.engine.open_segment(name).unwrap();
    println!("\nready");
    loop {
        let write = side.request(Opcode::Write, 0, (peer, address), BYTES);
        if let Ok(batch) = side.engine.submit(&[write], &SubmitOptions::default()) {
            batch.wait();
        }
    }
}

/// Body of the owner, not a test of its own: has two regions.
#[test]
fn the_owner() {
    if std::env::var(OWNS).is_err() {
        return;
    }
    let side = Side::new(Way::Shm.config(), BYTES);
    let second = region(BYTES);
    fill(&side.region, 0, BYTES, OWNED[0]);
    fill(&second, 0, BYTES, OWNED[1]);
    side.engine.register(Arc::clone(&second), &RegisterOptions::default()).unwrap();
    println!("\nready {} {} {}", side.engine.name(), side.region.address(), second.address());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Process of this program in another role; killed when dropped.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Other {
    fn start(role: &str, (name, value): (&str, &str)) -> (Self, Vec<String>) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", role, "--nocapture"])
            .env(name, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        let line = lines.map_while(Result::ok).find(|line| line.starts_with("ready")).expect("it starts");
        (Self(child), line.split(' ').skip(1).map(str::to_owned).collect())
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success(), "{kill}");
    }

    /// Stops the process; returns when all its threads have stopped.
    fn stop(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.0.id());
        until("it stops", || {
            std::fs::read_dir(&tasks).unwrap().all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
                stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
            })
        });
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}: in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the writer's bytes are at both ends of the range that was filled otherwise.
fn until_written(side: &Side) {
    for at in [0, BYTES - 64] {
        until("the writer writes", || {
            let mut good = true;
            side.region.read_with(at, 64, &mut |offset, part| {
                let mut expected = (0..part.len()).map(|index| byte(WRITTEN, at as u64 + offset + index as u64));
                good &= part.iter().all(|&found| Some(found) == expected.next());
            });
            good
        });
    }
}

#[test]
fn memory_used_by_a_stopped_process_is_unregistered_when_released() {
    for killed in [false, true] {
        let quiet_deadline = Duration::from_millis(300);
        let owner = Side::new(TransferEngineConfig { quiet_deadline, ..Way::Shm.config() }, BYTES);
        let address = owner.region.address();
        let (mut writer, _) =
            Other::start("stopped::the_writer", (WRITES, &format!("{} {address}", owner.engine.name())));
        let mut attempts = 0;
        let error = loop {
            fill(&owner.region, 0, BYTES, 52);
            until_written(&owner);
            writer.stop();
            match owner.engine.unregister(address) {
                Err(error) => break error,
                // Stopped between two copies. It asks for the description of the memory again.
                Ok(()) => {
                    owner.engine.register(owner.region.clone(), &RegisterOptions::default()).unwrap();
                    writer.signal("CONT");
                }
            }
            attempts += 1;
            assert!(attempts < 200, "never stopped in the middle of a copy");
        };
        let (text, pid) = (error.to_string(), writer.0.id().to_string());
        assert!(matches!(error, Error::MemoryHeld { .. }), "{text}");
        assert!(text.contains(&pid) && text.contains("unregister again"), "{text}");
        assert_eq!(error.code(), -4);
        // The memory stays in place, and cannot be reused, while this lasts.
        assert!(matches!(owner.engine.unregister(address), Err(Error::MemoryHeld { .. })));
        let error = owner.engine.register(owner.region.clone(), &RegisterOptions::default()).unwrap_err();
        assert!(matches!(error, Error::AddressOverlapped { leaving: true, .. }), "{error}");
        assert!(owner.engine.segment_info(SegmentHandle::LOCAL).unwrap().buffers.is_empty());
        let copy = owner.request(Opcode::Write, 0, (SegmentHandle::LOCAL, address + 4096), 100);
        assert_eq!(owner.engine.submit(&[copy], &SubmitOptions::default()).unwrap_err().code(), -3);
        if killed {
            writer.0.kill().unwrap();
        } else {
            writer.signal("CONT");
        }
        until("it lets go", || owner.engine.unregister(address).is_ok());
        fill(&owner.region, 0, BYTES, 53);
        std::thread::sleep(Duration::from_millis(50));
        check(&owner.region, 0, BYTES, 53);
        assert_eq!(owner.engine.unregister(address).unwrap_err().code(), -3);
        owner.engine.register(owner.region.clone(), &RegisterOptions::default()).unwrap();
        if !killed {
            until_written(&owner);
        }
    }
}

/// Two threads that unregister the same memory both return when it is released.
#[test]
fn concurrent_unregistrations_both_wait() {
    let side = Side::new(Way::Shm.config(), BYTES);
    for _ in 0..50 {
        let outcomes = std::thread::scope(|scope| {
            let both = [0, 1].map(|_| scope.spawn(|| side.engine.unregister(side.region.address())));
            both.map(|thread| thread.join().unwrap())
        });
        assert!(outcomes.iter().any(Result::is_ok), "{outcomes:?}");
        // Too late for the second: there was nothing registered any more.
        assert!(outcomes.iter().flat_map(|outcome| outcome.as_ref().err()).all(|error| error.code() == -3));
        side.engine.register(side.region.clone(), &RegisterOptions::default()).unwrap();
    }
}

fn owner() -> (Other, String, [u64; 2]) {
    let (other, words) = Other::start("stopped::the_owner", (OWNS, "yes"));
    (other, words[0].clone(), [1, 2].map(|word: usize| words[word].parse().unwrap()))
}

fn read(a: &Side, peer: SegmentHandle, there: u64) -> TransferRequest {
    a.request(Opcode::Read, 0, (peer, there), BYTES)
}

/// A stopped owner's memory cannot be mapped, which delays no other peer.
#[test]
fn other_peers_are_not_delayed_by_a_stopped_owner() {
    let (stopped, name, [there, _]) = owner();
    let a = Side::new(TransferEngineConfig { cma: false, tcp: false, ..Way::Shm.config() }, BYTES);
    let b = Side::new(Way::Shm.config(), BYTES);
    let [slow, quick] = [&name[..], b.engine.name()].map(|name| a.engine.open_segment(name).unwrap());
    fill(&b.region, 0, BYTES, 63);
    stopped.stop();
    let waiting = a.engine.submit(&[read(&a, slow, there)], &SubmitOptions::default()).unwrap();
    let mine = Side::new(Way::Shm.config(), 4096);
    a.engine.register(mine.region.clone(), &RegisterOptions::default()).unwrap();
    for block in 0..10 {
        let at = b.region.address() + block * 4096;
        let request = TransferRequest { source: mine.region.address(), length: 4096, ..read(&a, quick, at) };
        let batch = a.engine.submit(&[request], &SubmitOptions::default()).unwrap();
        assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
    }
    assert!(!waiting.is_done(), "the others were held up until the stopped one was given up: {:?}", waiting.problem());
    assert_eq!(waiting.wait().state, TaskState::Failed);
    assert!(waiting.problem().is_some_and(|why| why.contains("stopped")), "{:?}", waiting.problem());
}

#[test]
fn a_late_reply_of_a_stopped_owner_is_not_taken_for_another_memorys() {
    let (stopped, name, [first, second]) = owner();
    let a = Side::new(TransferEngineConfig { cma: false, tcp: true, ..Way::Shm.config() }, BYTES);
    let peer = a.engine.open_segment(&name).unwrap();
    stopped.stop();
    let waiting = a.engine.submit(&[read(&a, peer, first)], &SubmitOptions::default()).unwrap();
    // After an attempt to map the memory in vain, TCP is used.
    until("another path is taken", || {
        waiting.poll();
        a.engine.metrics().rails.iter().any(|rail| rail.transport == Transport::Shm && rail.retries > 0)
    });
    assert!(!waiting.is_done());
    stopped.signal("CONT");
    assert_eq!(waiting.wait().state, TaskState::Completed, "{:?}", waiting.problem());
    check(&a.region, 0, BYTES, OWNED[0]);
    // The late reply has arrived by now; it does not belong to the second request.
    let shared = || {
        let rails = a.engine.metrics().rails;
        rails.iter().filter(|rail| rail.transport == Transport::Shm).map(|rail| rail.bytes).sum::<u64>()
    };
    assert_eq!(shared(), 0);
    let batch = a.engine.submit(&[read(&a, peer, second)], &SubmitOptions::default()).unwrap();
    assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
    check(&a.region, 0, BYTES, OWNED[1]);
    assert_eq!(shared(), BYTES as u64, "the second was mapped");
    let batch = a.engine.submit(&[read(&a, peer, first)], &SubmitOptions::default()).unwrap();
    assert_eq!(batch.wait().state, TaskState::Completed, "{:?}", batch.problem());
    check(&a.region, 0, BYTES, OWNED[0]);
}
