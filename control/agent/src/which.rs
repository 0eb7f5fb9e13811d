//! Discovery of the control plane and of this process's identity: found on this host, or configured with certificate
//! files.
//!
//! Only the leader among several control planes welcomes clients. Therefore all of them are contacted in parallel, and
//! the first that welcomes the client is used.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvplane_rpc::message::Welcome;
use kvplane_rpc::{
    CallError, Client, ClientConfig, ClusterName, ConnectError, Identity, Limits, LocalError, Role, RuntimeDirectory,
    Trust,
};
use tokio::task::JoinSet;

use crate::data_tls::DataTlsIdentity;
use crate::error::Error;
use crate::link::{ControlLinkError, reconnections, software};

/// Control plane to use.
#[derive(Clone, Debug)]
pub enum Control {
    /// Control plane of this cluster that this user runs on this host, found in the user's runtime directory.
    Local {
        /// Name of the cluster.
        cluster: String,
        /// Runtime directory, if not the user's.
        runtime_directory: Option<std::path::PathBuf>,
    },
    /// Control plane at a given address, with a given identity.
    Explicit(Box<ClientConfig>),
    /// Whichever of these control planes leads, with certificates from files; the files are read again for every new
    /// connection.
    Remote(Remote),
}

/// Remote control planes, and this process's identity there.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Name of the cluster.
    pub cluster: String,
    /// Addresses of the control planes.
    pub addresses: Vec<SocketAddr>,
    /// Directory with `ca.pem`, and with `ROLE.pem` and `ROLE.key` of the needed role.
    pub identity: PathBuf,
}

/// Maximum number of control planes of a cluster.
const ADDRESSES: usize = 8;

impl Remote {
    /// Returns true if the identity directory has a certificate of this role.
    fn has(&self, role: Role) -> bool {
        self.identity.join(format!("{role}.pem")).exists()
    }

    /// Builds the error for a directory that has none of these roles.
    fn without(&self, wanted: &[Role]) -> Error {
        let found = Role::ALL.into_iter().filter(|role| self.has(*role)).collect();
        Error::NoCertificate { directory: self.identity.clone(), wanted: wanted.to_vec(), found }
    }

    fn resolve(&self, role: Role) -> Result<Vec<ClientConfig>, Error> {
        if !self.has(role) {
            return Err(self.without(&[role]));
        }
        if !(1..=ADDRESSES).contains(&self.addresses.len()) {
            return Err(ControlLinkError::Addresses { addresses: self.addresses.len(), most: ADDRESSES }.into());
        }
        let config = ClientConfig {
            address: self.addresses[0],
            cluster: ClusterName::new(&self.cluster)?,
            trust: Trust::read(&self.identity.join("ca.pem"))?,
            identity: Identity::read(&self.identity, role.name())?,
            software: software().to_owned(),
            limits: if self.addresses.len() > 1 { SEVERAL } else { Limits::DEFAULT },
        };
        Ok(self.addresses.iter().map(|address| ClientConfig { address: *address, ..config.clone() }).collect())
    }
}

/// Limits for clusters with standbys: a control plane that does not answer is given up sooner, because another may take
/// over.
const SEVERAL: Limits = Limits {
    call_deadline: Duration::from_secs(2),
    connect_deadline: Duration::from_secs(2),
    idle_timeout: Duration::from_millis(2_500),
    keep_alive_interval: Duration::from_millis(500),
    ..Limits::DEFAULT
};

impl Control {
    /// Returns the live control planes of this user on this host: clusters and addresses, by name. They are those of
    /// the user's runtime directory, or of another one.
    ///
    /// # Errors
    /// When the user has no runtime directory.
    pub fn published(runtime_directory: Option<&Path>) -> Result<Vec<(String, SocketAddr)>, LocalError> {
        let directory = match runtime_directory {
            Some(path) => RuntimeDirectory::at(path),
            None => RuntimeDirectory::of_user()?,
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(directory.path()).into_iter().flatten().flatten() {
            let file = entry.file_name();
            let Some(name) = file.to_str().and_then(|name| name.strip_suffix(".local")) else { continue };
            let Ok(cluster) = ClusterName::new(name) else { continue };
            if let Ok(local) = directory.discover(&cluster) {
                found.push((name.to_owned(), local.control));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Returns true if an address belongs to this host: a socket can be bound to it.
    #[must_use]
    pub fn is_of_this_host(address: SocketAddr) -> bool {
        let ip = address.ip();
        ip.is_loopback() || ip.is_unspecified() || UdpSocket::bind((ip, 0)).is_ok()
    }

    /// Returns true if a control plane of this host that listens on an address is the one that is wanted at another.
    #[must_use]
    pub fn is_reached_at(wanted: SocketAddr, listening: SocketAddr) -> bool {
        let any = listening.ip().is_unspecified() || wanted.ip().is_unspecified();
        let loopback = wanted.ip().is_loopback() && listening.ip().is_loopback();
        wanted.port() == listening.port() && (any || wanted.ip() == listening.ip() || loopback)
    }

    /// Returns the name of the cluster.
    pub(crate) fn cluster(&self) -> &str {
        match self {
            Self::Local { cluster, .. } => cluster,
            Self::Explicit(config) => config.cluster.as_str(),
            Self::Remote(remote) => &remote.cluster,
        }
    }

    /// Returns the first of these roles that this process has a certificate of, for operations that any of them may
    /// perform.
    ///
    /// # Errors
    /// [`Error::NoCertificate`] where there is a directory of certificates with none of these roles in it.
    pub fn role_among(&self, roles: &[Role]) -> Result<Role, Error> {
        let usual = roles.first().copied().unwrap_or(Role::Client);
        match self {
            // The identity is given, and with it the role.
            Self::Explicit(_) => Ok(usual),
            Self::Remote(remote) => {
                roles.iter().copied().find(|role| remote.has(*role)).ok_or_else(|| remote.without(roles))
            }
            // A control plane that is not found is reported when connecting.
            Self::Local { .. } => Ok(roles.iter().copied().find(|role| self.resolve(*role).is_ok()).unwrap_or(usual)),
        }
    }

    /// Returns the configuration of every candidate control plane; at least one.
    pub(crate) fn resolve(&self, role: Role) -> Result<Vec<ClientConfig>, Error> {
        match self {
            Self::Explicit(config) => Ok(vec![(**config).clone()]),
            Self::Remote(remote) => remote.resolve(role),
            Self::Local { cluster, runtime_directory } => {
                let name = ClusterName::new(cluster)?;
                let directory = match runtime_directory {
                    Some(path) => RuntimeDirectory::at(path),
                    None => RuntimeDirectory::of_user()?,
                };
                let local = directory.discover(&name)?;
                let config = ClientConfig::local(&local, role, software());
                let config = config.ok_or_else(|| ControlLinkError::NoIdentity { cluster: cluster.clone(), role })?;
                Ok(vec![config])
            }
        }
    }
}

/// Candidate control planes of a control link, and how they were found.
pub(crate) struct Line {
    configs: Vec<ClientConfig>,
    control: Control,
    role: Role,
}

impl Line {
    /// Resolves this control plane, in this role.
    pub(crate) fn to(control: &Control, role: Role) -> Result<Self, Error> {
        Ok(Self { configs: control.resolve(role)?, control: control.clone(), role })
    }

    /// Returns the identity for data connections.
    pub(crate) fn sealing(&self) -> DataTlsIdentity {
        DataTlsIdentity::new(self.control.clone(), self.role)
    }

    /// Returns the only tenant that the certificate is bound to, if it is bound to one; `default` for the tenant
    /// without a name.
    pub(crate) fn tenant(&self) -> Option<String> {
        self.configs.first().and_then(|config| config.identity.tenant(&config.cluster))
    }

    /// Returns the address of the first candidate.
    pub(crate) fn address(&self) -> SocketAddr {
        self.configs[0].address
    }

    /// Resolves the control plane again. Returns the candidates if an address or a certificate has changed, or if there
    /// are several candidates, of which another may lead by now.
    pub(crate) fn moved(&self) -> Option<Self> {
        // While no control plane is published, the former one may still return at its address.
        let found = Self::to(&self.control, self.role).ok()?;
        let known = |config: &ClientConfig| {
            (config.address, config.trust.pem().to_owned(), config.identity.certificate_pem().to_owned())
        };
        let differs = !found.configs.iter().map(known).eq(self.configs.iter().map(known));
        (differs || found.configs.len() > 1).then_some(found)
    }

    /// Connects to the first candidate that welcomes this process. If none does, returns the most telling error.
    pub(crate) async fn seek(&self) -> Result<(Client, Welcome), Error> {
        let mut asked = JoinSet::new();
        for config in &self.configs {
            let (config, rng) = (config.clone(), reconnections()?);
            asked.spawn_local(async move { Client::connect(&config, rng).await });
        }
        let mut heard = None;
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(welcomed)) => return Ok(welcomed),
                // A refusal says more than an unreachable address.
                Ok(Err(error)) if heard.is_none() || !is_unreachable(&error) => heard = Some(error),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        Err(heard.map_or_else(|| ControlLinkError::NoContact.into(), Error::from))
    }
}

const fn is_unreachable(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Call(CallError::Unreachable { .. } | CallError::Deadline { .. }))
}
