//! Selection of the control plane that a command calls: the one of this user on this host, or remote ones with
//! certificates from files.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use kvplane::{Control, Remote};

/// Remote control planes.
#[derive(Args, Clone)]
pub(crate) struct Which {
    /// Addresses of the cluster's control planes, separated by commas. Default: the control plane of this user on this
    /// host.
    #[arg(long = "control", value_name = "ADDRESS,...", value_delimiter = ',', requires = "identity", global = true)]
    addresses: Vec<SocketAddr>,
    /// Directory with ca.pem and the certificates and keys that `kvplane ctl cert` issued.
    #[arg(long, value_name = "DIRECTORY", requires = "addresses", global = true)]
    identity: Option<PathBuf>,
}

impl Which {
    pub(crate) fn control(&self, cluster: &str, runtime_directory: Option<PathBuf>) -> Control {
        let cluster = cluster.to_owned();
        match &self.identity {
            Some(identity) => {
                Control::Remote(Remote { cluster, addresses: self.addresses.clone(), identity: identity.clone() })
            }
            None => Control::Local { cluster, runtime_directory },
        }
    }
}
