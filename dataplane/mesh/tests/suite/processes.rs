//! Peers that are processes of their own: killed in the middle of long frames, stopped and continued.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvplane_mesh::{DownCause, Peer, SendOutcome};

use crate::rig::{End, Way};

const ROLE: &str = "KVPLANE_TEST_FLOODS";
const WAYS: [Way; 2] = [Way::Shm, Way::Tcp];

/// Body of the other process, not a test of its own: rank `rank` sends long frames to the parent forever. It ends with
/// its parent.
#[test]
fn the_flood() {
    let Ok(role) = std::env::var(ROLE) else { return };
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let mut words = role.split(' ');
    let mut word = || words.next().expect("a word").to_owned();
    let way = WAYS.into_iter().find(|way| format!("{way:?}") == role.split(' ').next().unwrap_or("")).expect("a way");
    let (_, rank, parent, address) = (word(), word(), word(), word());
    let mut end = End::new(way.config("processes", rank.parse().expect("a rank"), 3));
    let to: u8 = parent.parse().expect("a rank");
    end.mesh.set_peers(&[Peer { rank: to, incarnation: 1, address }]);
    println!("\nlistens {}", end.mesh.address());
    let mut bytes = 0;
    loop {
        while end.send(to, bytes) == SendOutcome::Sent {
            bytes = (bytes + 7919) % (end.mesh.payload_limit() + 1);
        }
        if !end.take() {
            end.mesh.wait(Instant::now() + Duration::from_secs(5));
        }
    }
}

/// Another process; killed when dropped.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Other {
    fn start(way: Way, rank: u8, parent: &End) -> (Self, Peer) {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "processes::the_flood", "--nocapture"])
            .env(ROLE, format!("{way:?} {rank} {} {}", parent.rank, parent.mesh.address()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(child.stdout.as_mut().expect("piped")).lines();
        let line = lines.map_while(Result::ok).find(|line| line.starts_with("listens ")).expect("it starts");
        let address = line.split(' ').nth(1).expect("an address").to_owned();
        (Self(child), Peer { rank, incarnation: 3, address })
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success(), "{kill}");
    }
}

#[test]
fn a_process_that_is_killed_is_seen_and_its_whole_frames_only_are_delivered() {
    for way in WAYS {
        for rank in [0, 2] {
            let mut end = End::new(way.config("processes", 1, 1));
            let (mut other, peer) = Other::start(way, rank, &end);
            end.mesh.set_peers(&[peer]);
            end.until("frames", |end| end.frames > 200);
            other.0.kill().expect("it lives");
            end.until("its end", |end| !end.downs.is_empty());
            assert_eq!(end.downs, [(rank, DownCause::Ended)], "{way:?}");
            end.until("the refusal", |end| end.mesh.channels().refused == 1 << rank);
            assert_eq!(end.send(rank, 0), SendOutcome::Down);
        }
    }
}

#[test]
fn a_process_that_is_stopped_and_continued_corrupts_nothing() {
    for way in WAYS {
        for rank in [0, 2] {
            let mut end = End::new(way.config("processes", 1, 1));
            let (other, peer) = Other::start(way, rank, &end);
            end.mesh.set_peers(core::slice::from_ref(&peer));
            end.until("frames", |end| end.frames > 200);
            for round in 0..4 {
                other.signal("STOP");
                // Everything that it has sent is taken; then it is silent, and not gone.
                let (mut silent, mut frames) = (0, end.frames);
                end.until("silence", |end| {
                    silent = if end.frames > frames { 0 } else { silent + 1 };
                    frames = end.frames;
                    silent > 4
                });
                assert_eq!((end.downs.len(), end.mesh.channels().open), (0, 1 << rank), "{way:?}");
                let ups = end.ups.len();
                if round % 2 == 1 {
                    // Meanwhile its channel is dropped, and it is listed again.
                    end.mesh.set_peers(&[]);
                    end.mesh.set_peers(core::slice::from_ref(&peer));
                }
                other.signal("CONT");
                let frames = end.frames;
                let ups = ups + round % 2;
                end.until("more frames", |end| end.frames > frames + 100 && end.ups.len() == ups);
            }
            assert!(end.downs.is_empty(), "{:?}", end.downs);
        }
    }
}
