//! `kvplane control`: the control plane as a process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvplane::rpc::RuntimeDirectory;
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};

use super::{Failure, stop};

/// How long a stopping control plane may take.
const SHUTDOWN: Duration = Duration::from_secs(3);

/// The control plane.
#[derive(Args)]
pub(crate) struct Control {
    /// Name of the cluster.
    #[arg(long, default_value = "kvplane")]
    cluster: String,
    /// Address for QUIC; mutual TLS is always on.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Loopback address for /health, /metrics and /get_all_segments.
    #[arg(long, default_value = "127.0.0.1:0")]
    http: SocketAddr,
    /// Directory of the state and of the authority's key; it survives a kill.
    #[arg(long)]
    state: PathBuf,
    /// Copies of each object, best effort.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    replicas: u8,
    /// Directory for identities of local processes, instead of the user's runtime directory.
    #[arg(long)]
    runtime_directory: Option<PathBuf>,
}

pub(crate) fn start(
    cluster: &str,
    listen: SocketAddr,
    http: SocketAddr,
    state: Option<PathBuf>,
    replicas: u8,
    runtime_directory: Option<&PathBuf>,
) -> Result<ControlHandle, Failure> {
    let publish = match runtime_directory {
        Some(path) => RuntimeDirectory::at(path),
        None => RuntimeDirectory::of_user()?,
    };
    let mut config = ControlConfig::new(cluster);
    config.cluster.replicas = replicas;
    config.listen = listen;
    config.http_listen = Some(http);
    config.state_directory = state;
    config.publish = Some(publish);
    Ok(ControlServer::start(config)?)
}

/// Fails when the control plane has ended by itself.
pub(crate) fn watch(control: &mut ControlHandle) -> Result<(), Failure> {
    match control.ended_within(Duration::ZERO) {
        None => Ok(()),
        Some(Ok(())) => Err("the control plane ended by itself".into()),
        Some(Err(error)) => Err(error.into()),
    }
}

impl Control {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let state = Some(self.state.clone());
        let runtime = self.runtime_directory.as_ref();
        let mut control = start(&self.cluster, self.listen, self.http, state, self.replicas, runtime)?;
        println!("control plane of {:?} on {} (QUIC)", self.cluster, control.address());
        if let Some(http) = control.http_address() {
            println!("health and metrics on http://{http}/health and /metrics");
        }
        stop::wait(|| watch(&mut control))?;
        Ok(control.shutdown(SHUTDOWN)?)
    }
}
