//! `kvplane dev`: runs a control plane and one node in one process, on loopback.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::command::Failure;
use crate::command::control;
use crate::command::control::failures::FailureDeadlines;
use crate::command::node::Shape;
use crate::command::process::log::{Level, Log};
use crate::command::process::stop::{self, Stop};

/// Run a control plane and one storage node in one process.
#[derive(Args)]
pub(crate) struct Dev {
    /// TOML file with settings; its keys are the names of these flags. A flag on the command line overrides the file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the cluster, by which local clients find it.
    #[arg(long, default_value = "dev")]
    cluster: String,
    #[command(flatten)]
    http: control::Http,
    /// Address that the control plane listens on (QUIC with mutual TLS).
    #[arg(long, default_value = "127.0.0.1:0")]
    control: SocketAddr,
    /// Directory of the cluster state. Default: PATH.control beside the file that --ssd names, or the directory that
    /// --keep-memory names, else the state is in memory and ends with the process, and with it the validity of objects
    /// on SSD devices.
    #[arg(long)]
    state: Option<PathBuf>,
    /// Stop when standard input ends: for a parent process that may be killed.
    #[arg(long)]
    end_with_stdin: bool,
    #[command(flatten)]
    log: Log,
    #[command(flatten)]
    shape: Shape,
}

impl Dev {
    pub(crate) fn run(mut self) -> Result<(), Failure> {
        self.log.begin(Level::Warn)?;
        // The only node of its cluster needs no number of its own, but an SSD requires the same number at every start.
        self.shape.or_node_id(1);
        let beside = if self.state.is_none() { self.shape.state_beside_objects() } else { None };
        // Checked here because the later error would name a directory that the user did not give.
        if let Some(parent) = beside.as_ref().and_then(|path| path.parent())
            && !parent.as_os_str().is_empty()
            && !parent.is_dir()
        {
            return Err(
                format!("--ssd: directory {} does not exist: create it, or name another", parent.display()).into()
            );
        }
        let made = beside.clone().filter(|path| !path.exists());
        let state = self.state.clone().or(beside);
        let setup = control::Setup {
            cluster: &self.cluster,
            listen: self.control,
            state,
            etcd: None,
            identity: None,
            replicas: 1,
            runtime_directory: self.shape.runtime_directory.as_ref(),
            // Slots have one owner, which no other member replaces.
            failures: FailureDeadlines::default(),
            // Control plane and node are one process on loopback: tickets are not needed.
            tickets: None,
            // The only member ends with the process: no map can be adopted.
            adoption_wait: None,
            stop_when_idle: None,
        };
        let mut stop = Stop::listen()?;
        let mut plane = control::start(setup, &self.http)?;
        let runtime_directory = self.shape.runtime_directory.clone();
        let local = kvplane::Control::Local { cluster: self.cluster.clone(), runtime_directory };
        let started = self.shape.start(&self.cluster, local, Duration::ZERO, &mut stop);
        if started.is_err() {
            // A state created for an SSD that was refused is removed again.
            drop(plane);
            made.iter().for_each(|path| drop(std::fs::remove_dir_all(path)));
            return started.map(|_| ());
        }
        let Some(serving) = started? else { return Ok(()) };
        announce!("control plane of {:?} on {} (QUIC)", self.cluster, plane.address());
        self.http.announce(&plane);
        announce!("ready: clients of this user find it by --cluster {}; Ctrl-C stops it", self.cluster);
        let orphaned = self.end_with_stdin.then(stop::parent_gone);
        stop.wait(|| {
            if orphaned.as_ref().is_some_and(|gone| gone.load(std::sync::atomic::Ordering::Relaxed)) {
                return Err("standard input has ended: stopping, as --end-with-stdin says".into());
            }
            serving.node.check()?;
            control::watch(&mut plane)
        })?;
        // The node leaves first, while the control plane still runs.
        drop(serving);
        Ok(())
    }
}
