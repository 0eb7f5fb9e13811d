//! Engines of two processes: found by handshake, over both transports, until one is killed.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvplane_transfer::{Opcode, SubmitOptions, TaskState};

use crate::network;
use crate::rig::{Side, Way, check, fill};

const BYTES: usize = 4 << 20;
const ROLE: &str = "KVPLANE_TEST_SERVES";

/// Body of the other process, not a test of its own. It serves until its input ends.
#[test]
fn the_other_process() {
    let Ok(way) = std::env::var(ROLE) else { return };
    let way = Way::all().into_iter().find(|one| format!("{one:?}") == way).unwrap();
    let side = Side::serving(way.config(), BYTES);
    fill(&side.region, 0, BYTES, 31);
    println!("\nserves {} {}", side.engine.name(), side.region.address());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

fn other_process(way: Way) -> (Child, String, u64) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::the_other_process", "--nocapture"])
        .env(ROLE, format!("{way:?}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let line = lines.map_while(Result::ok).find(|line| line.starts_with("serves ")).expect("it serves");
    let words: Vec<&str> = line.split(' ').collect();
    let (name, address) = (words[1].to_owned(), words[2].parse().unwrap());
    (child, name, address)
}

#[test]
fn another_process_is_read_and_written_until_it_is_killed() {
    // Software devices exist within one process.
    for way in Way::all().into_iter().filter(|way| *way != Way::Rdma || network::verbs().is_none()) {
        let (mut child, name, there) = other_process(way);
        let a = Side::new(way.config(), BYTES);
        let peer = a.engine.open_segment(&name).unwrap();
        assert_eq!(a.engine.segment_info(peer).unwrap().buffers[0].address, there);
        let run = |opcode, local, remote: usize, bytes| {
            let request = a.request(opcode, local, (peer, there + remote as u64), bytes);
            a.engine.submit(&[request], &SubmitOptions::default()).unwrap().wait()
        };
        assert_eq!(run(Opcode::Read, 0, 0, BYTES).state, TaskState::Completed);
        check(&a.region, 0, BYTES, 31);
        fill(&a.region, 0, BYTES / 2, 32);
        assert_eq!(run(Opcode::Write, 0, 1, BYTES / 2).state, TaskState::Completed);
        fill(&a.region, 0, BYTES, 33);
        assert_eq!(run(Opcode::Read, BYTES / 2, 1, BYTES / 2).state, TaskState::Completed);
        check(&a.region, BYTES / 2, BYTES / 2, 32);
        // Killed with transfers in flight: every batch ends, and nothing accesses its memory afterwards.
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let a = &a;
                scope.spawn(move || {
                    let part = BYTES / 4;
                    let read = a.request(Opcode::Read, thread * part, (peer, there), part);
                    let options = SubmitOptions { deadline: Some(Duration::from_secs(5)), ..SubmitOptions::default() };
                    let mut seed = thread as u64;
                    loop {
                        let outcome = a.engine.submit(&[read], &options).map(|batch| batch.wait().state);
                        seed += 100;
                        fill(&a.region, thread * part, part, seed);
                        std::thread::sleep(Duration::from_micros(200));
                        check(&a.region, thread * part, part, seed);
                        if outcome.ok() != Some(TaskState::Completed) {
                            break;
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(50));
            child.kill().unwrap();
        });
        child.wait().unwrap();
        assert!(a.engine.segments().open_no_cache(&name).unwrap_err().code() < 0);
    }
}
