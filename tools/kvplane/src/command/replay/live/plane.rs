//! Control plane and node of a replay that kills the control plane in the middle.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::command::Failure;

/// Time limit for a process to be ready.
const READY: Duration = Duration::from_secs(60);

/// A child process that is killed when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls are harmless if the process has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A control plane, which may be killed and started again on its state, and a node.
pub(super) struct OwnPlane {
    pub(super) cluster: String,
    pub(super) runtime_directory: PathBuf,
    directory: PathBuf,
    address: String,
    control: Option<Process>,
    node: Option<Process>,
}

/// Times of a kill and of the restart, since an instant.
#[derive(Clone, Copy, Debug)]
pub(super) struct KillTimes {
    pub(super) killed: Duration,
    pub(super) ready: Duration,
}

impl OwnPlane {
    /// Starts both, with everything that they keep in a new directory within `place`, and `pool` bytes of memory.
    pub(super) fn start(place: &Path, pool: u64) -> Result<Self, Failure> {
        let directory = place.join(format!("kvplane-replay-{}", std::process::id()));
        std::fs::create_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let (cluster, runtime_directory) = ("replay".to_owned(), directory.join("run"));
        let address = "127.0.0.1:0".to_owned();
        let mut plane = Self { cluster, runtime_directory, directory, address, control: None, node: None };
        plane.start_control()?;
        let (node, _) = plane.child(&["node", "--shards", "1", "--pool", &pool.to_string()], " for objects")?;
        plane.node = Some(node);
        Ok(plane)
    }

    fn start_control(&mut self) -> Result<(), Failure> {
        let state = self.directory.join("state");
        let state = state.to_str().ok_or("the directory is not UTF-8")?;
        let words = ["control", "--conductor", "--conductor-snapshot-every", "1", "--no-tickets", "--state", state];
        let (control, said) = self.child(&[&words[..], &["--listen", &self.address]].concat(), "control plane of ")?;
        // It listens where it did before.
        if let Some(address) = said.split_once(" on ").and_then(|(_, rest)| rest.split(' ').next()) {
            address.clone_into(&mut self.address);
        }
        self.control = Some(control);
        Ok(())
    }

    /// Starts a child, and waits until it prints a line that contains `ready`; returns that line.
    fn child(&self, words: &[&str], ready: &'static str) -> Result<(Process, String), Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(words)
            .args(["--cluster", &self.cluster, "--runtime-directory"])
            .arg(&self.runtime_directory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("its output is piped")?;
        let (process, what) = (Process(child), words.first().copied().unwrap_or_default().to_owned());
        let (tell, told) = mpsc::channel();
        // The thread lives as long as the output; reading it keeps the child from blocking on a full pipe.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if line.contains(ready) {
                    let _ = tell.send(line.clone());
                }
                eprintln!("{what} | {line}");
            }
        });
        let words = words.first().copied().unwrap_or_default();
        let said = told.recv_timeout(READY).map_err(|_| format!("kvplane {words} was not ready within {READY:?}"))?;
        Ok((process, said))
    }

    /// Kills the control plane with SIGKILL, and starts another one on its state. Returns the times since `start`.
    pub(super) fn kill_and_restart(&mut self, start: Instant) -> Result<KillTimes, Failure> {
        let killed = start.elapsed();
        drop(self.control.take());
        self.start_control()?;
        Ok(KillTimes { killed, ready: start.elapsed() })
    }
}

impl Drop for OwnPlane {
    fn drop(&mut self) {
        drop((self.node.take(), self.control.take()));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
