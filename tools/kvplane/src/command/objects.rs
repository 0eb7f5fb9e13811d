//! The way of a control plane's HTTP paths to the objects: a client of the process, made when it is first asked.
//!
//! Who it is: the client that local processes find in the runtime directory, or, where the authority's key is
//! elsewhere, the one whose certificate lies beside the control plane's. Without that there is no way.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kvplane::{Client, ClientConfig, Control, Remote};
use kvplane_server::Objects;

use crate::command::ctl::keys::name_of;

/// Where the cluster is found.
pub(super) struct ClusterArguments {
    cluster: String,
    who: Who,
    /// Where this control plane listens, once that is known.
    address: OnceLock<SocketAddr>,
}

enum Who {
    /// Whom it left in the runtime directory: the user's, or this one.
    Published(Option<PathBuf>),
    /// Whose certificate is in this directory.
    Certified(PathBuf),
}

/// The certificate that a control plane with its own certificates needs for this.
const CERTIFICATE: [&str; 2] = ["client.pem", "client.key"];

impl ClusterArguments {
    /// The way of a control plane with this runtime directory, or these certificates of its own; none where there is no
    /// client's among those.
    pub(super) fn new(cluster: &str, runtime_directory: Option<&PathBuf>, identity: Option<&Path>) -> Option<Self> {
        let who = match identity {
            None => Who::Published(runtime_directory.cloned()),
            Some(directory) if CERTIFICATE.iter().all(|file| directory.join(file).is_file()) => {
                Who::Certified(directory.to_owned())
            }
            Some(_) => return None,
        };
        Some(Self { cluster: cluster.to_owned(), who, address: OnceLock::new() })
    }

    /// The control plane listens there.
    pub(super) fn listens(&self, address: SocketAddr) {
        // On all addresses it is on loopback, too.
        let ip = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let _ = self.address.set(SocketAddr::new(ip, address.port()));
    }

    fn client(&self, tenant: &str) -> Result<Client, String> {
        let control = match (&self.who, self.address.get()) {
            (Who::Published(runtime_directory), _) => {
                Control::Local { cluster: self.cluster.clone(), runtime_directory: runtime_directory.clone() }
            }
            (Who::Certified(identity), Some(address)) => Control::Remote(Remote {
                cluster: self.cluster.clone(),
                addresses: vec![*address],
                identity: identity.clone(),
            }),
            (Who::Certified(_), None) => return Err("the control plane does not listen yet: ask again".to_owned()),
        };
        let config = ClientConfig { control, tenant: tenant.to_owned(), ..ClientConfig::local(&self.cluster) };
        Client::connect(&config).map_err(|error| error.to_string())
    }
}

impl Objects for ClusterArguments {
    fn keys(&self, tenant: &str, most: usize) -> Result<(Vec<String>, bool), String> {
        let mut client = self.client(tenant)?;
        let (mut cursor, mut keys) = (None, Vec::new());
        loop {
            let page = client.list(cursor).map_err(|error| error.to_string())?;
            keys.extend(page.keys.iter().filter(|key| !key.key.is_empty()).map(name_of));
            if keys.len() > most {
                return Ok((keys, true));
            }
            match page.next {
                Some(next) => cursor = Some(next),
                None => return Ok((keys, false)),
            }
        }
    }

    fn remove_all(&self, tenant: Option<&str>) -> Result<u64, String> {
        let removed = self.client(tenant.unwrap_or_default())?.remove_all(tenant.is_none());
        removed.map_err(|error| error.to_string())
    }
}
