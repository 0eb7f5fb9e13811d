//! Control plane and node of a replay that kills the control plane in the middle.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::command::Failure;
use crate::command::process::child::ChildProcess;

/// A control plane, which may be killed and started again on its state, and a node.
pub(super) struct OwnCluster {
    pub(super) cluster: String,
    pub(super) runtime_directory: PathBuf,
    directory: PathBuf,
    address: String,
    control: Option<ChildProcess>,
    node: Option<ChildProcess>,
}

/// Times of a kill and of the restart, since an instant.
#[derive(Clone, Copy, Debug)]
pub(super) struct KillTimes {
    pub(super) killed: Duration,
    pub(super) ready: Duration,
}

impl OwnCluster {
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
    fn child(&self, words: &[&str], ready: &'static str) -> Result<(ChildProcess, String), Failure> {
        let mut command = ChildProcess::command()?;
        command.args(words).args(["--cluster", &self.cluster, "--runtime-directory"]);
        command.arg(&self.runtime_directory).stdin(Stdio::null());
        let name = words.first().copied().unwrap_or_default();
        let prefix = name.to_owned();
        let show = move |line: &str| eprintln!("{prefix} | {line}");
        ChildProcess::start(name, &mut command, move |line| line.contains(ready), show)
    }

    /// Kills the control plane with SIGKILL, and starts another one on its state. Returns the times since `start`.
    pub(super) fn kill_and_restart(&mut self, start: Instant) -> Result<KillTimes, Failure> {
        let killed = start.elapsed();
        drop(self.control.take());
        self.start_control()?;
        Ok(KillTimes { killed, ready: start.elapsed() })
    }
}

impl Drop for OwnCluster {
    fn drop(&mut self) {
        drop((self.node.take(), self.control.take()));
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
