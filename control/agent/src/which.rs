//! Which control plane, and who we are there: found on this host, or named with certificates from files.
//!
//! Of several control planes one leads, and only that one welcomes anybody. So all are asked at the same time, and who
//! welcomes first is it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvplane_rpc::message::Welcome;
use kvplane_rpc::{
    CallError, Client, ClientConfig, ClusterName, ConnectError, Identity, IdentityError, Limits, Role,
    RuntimeDirectory, Trust,
};
use tokio::task::JoinSet;

use crate::data_tls::DataTlsIdentity;
use crate::error::Error;
use crate::link::{reconnections, software};

/// Which control plane to use.
#[derive(Clone, Debug)]
pub enum Control {
    /// The one that a process of this user left in the user's runtime directory, by its cluster's name.
    Local {
        /// The cluster.
        cluster: String,
        /// Another runtime directory than the user's.
        runtime_directory: Option<std::path::PathBuf>,
    },
    /// This one.
    Explicit(Box<ClientConfig>),
    /// One of these, whichever leads, with certificates from files; they are read again for every new connection.
    Remote(Remote),
}

/// Control planes elsewhere, and who we are there.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The cluster.
    pub cluster: String,
    /// Where its control planes listen.
    pub addresses: Vec<SocketAddr>,
    /// A directory with `ca.pem`, and `ROLE.pem` and `ROLE.key` for the role that is needed.
    pub identity: PathBuf,
}

/// Most control planes of a cluster.
const ADDRESSES: usize = 8;

impl Remote {
    /// A certificate of this role is in the identity's directory.
    fn has(&self, role: Role) -> bool {
        self.identity.join(format!("{role}.pem")).exists()
    }

    /// Why none of these roles can be had.
    fn without(&self, wanted: &[Role]) -> Error {
        let found = Role::ALL.into_iter().filter(|role| self.has(*role)).collect();
        Error::NoCertificate { directory: self.identity.clone(), wanted: wanted.to_vec(), found }
    }

    fn resolve(&self, role: Role) -> Result<Vec<ClientConfig>, Error> {
        if !self.has(role) {
            return Err(self.without(&[role]));
        }
        let argument = |error: IdentityError| Error::Argument(error.to_string());
        if !(1..=ADDRESSES).contains(&self.addresses.len()) {
            let found = self.addresses.len();
            return Err(Error::Argument(format!("a cluster has 1 to {ADDRESSES} control planes, not {found}")));
        }
        let config = ClientConfig {
            address: self.addresses[0],
            cluster: ClusterName::new(&self.cluster).map_err(argument)?,
            trust: Trust::read(&self.identity.join("ca.pem")).map_err(argument)?,
            identity: Identity::read(&self.identity, role.name()).map_err(argument)?,
            software: software().to_owned(),
            limits: if self.addresses.len() > 1 { SEVERAL } else { Limits::DEFAULT },
        };
        Ok(self.addresses.iter().map(|address| ClientConfig { address: *address, ..config.clone() }).collect())
    }
}

/// Where another control plane may take over, a silent one is given up sooner.
const SEVERAL: Limits = Limits {
    call_deadline: Duration::from_secs(2),
    connect_deadline: Duration::from_secs(2),
    idle_timeout: Duration::from_millis(2_500),
    keep_alive_interval: Duration::from_millis(500),
    ..Limits::DEFAULT
};

impl Control {
    /// The cluster's name.
    pub(crate) fn cluster(&self) -> &str {
        match self {
            Self::Local { cluster, .. } => cluster,
            Self::Explicit(config) => config.cluster.as_str(),
            Self::Remote(remote) => &remote.cluster,
        }
    }

    /// The first of these roles of which there is a certificate for us: what may be done in several roles needs no more
    /// than one of them.
    ///
    /// # Errors
    /// [`Error::NoCertificate`] where there is a directory of certificates, and none of these roles in it.
    pub fn role_among(&self, roles: &[Role]) -> Result<Role, Error> {
        let usual = roles.first().copied().unwrap_or(Role::Client);
        match self {
            // Its identity is given, and its role in it.
            Self::Explicit(_) => Ok(usual),
            Self::Remote(remote) => {
                roles.iter().copied().find(|role| remote.has(*role)).ok_or_else(|| remote.without(roles))
            }
            // What cannot be found is said by whoever connects.
            Self::Local { .. } => Ok(roles.iter().copied().find(|role| self.resolve(*role).is_ok()).unwrap_or(usual)),
        }
    }

    /// Every control plane that it may be; never none.
    pub(crate) fn resolve(&self, role: Role) -> Result<Vec<ClientConfig>, Error> {
        match self {
            Self::Explicit(config) => Ok(vec![(**config).clone()]),
            Self::Remote(remote) => remote.resolve(role),
            Self::Local { cluster, runtime_directory } => {
                let name = ClusterName::new(cluster).map_err(|error| Error::Argument(error.to_string()))?;
                let directory = match runtime_directory {
                    Some(path) => RuntimeDirectory::at(path),
                    None => RuntimeDirectory::of_user()?,
                };
                let local = directory.discover(&name)?;
                let config = ClientConfig::local(&local, role, software()).ok_or_else(|| {
                    Error::Argument(format!(
                        "the control plane of {cluster:?} left no identity of role {role}: say which control plane and \
                         whose identity (--control and --identity)"
                    ))
                })?;
                Ok(vec![config])
            }
        }
    }
}

/// Where a line may lead, and how it was found.
pub(crate) struct Line {
    configs: Vec<ClientConfig>,
    control: Control,
    role: Role,
}

impl Line {
    /// A line to this control plane, in this role.
    pub(crate) fn to(control: &Control, role: Role) -> Result<Self, Error> {
        Ok(Self { configs: control.resolve(role)?, control: control.clone(), role })
    }

    /// Who we are on it.
    pub(crate) fn sealing(&self) -> DataTlsIdentity {
        DataTlsIdentity::new(self.control.clone(), self.role)
    }

    /// The only tenant that our certificate is for, if it is for one: `default` for the one without a name.
    pub(crate) fn tenant(&self) -> Option<String> {
        self.configs.first().and_then(|config| config.identity.tenant(&config.cluster))
    }

    /// Where the first of them listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.configs[0].address
    }

    /// Where else to look, when the control plane may be elsewhere, or another, or we be somebody else by now.
    pub(crate) fn moved(&self) -> Option<Self> {
        // While none is published, the old one may still come back where it was.
        let found = Self::to(&self.control, self.role).ok()?;
        let known = |config: &ClientConfig| {
            (config.address, config.trust.pem().to_owned(), config.identity.certificate_pem().to_owned())
        };
        let differs = !found.configs.iter().map(known).eq(self.configs.iter().map(known));
        (differs || found.configs.len() > 1).then_some(found)
    }

    /// Whoever welcomes us first; else what the last one said that was heard.
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
                // One that is there and refuses says more than one that cannot be reached.
                Ok(Err(error)) if heard.is_none() || !is_unreachable(&error) => heard = Some(error),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        Err(heard.map_or_else(|| Error::Argument("no control plane was asked".to_owned()), Error::from))
    }
}

const fn is_unreachable(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Call(CallError::Unreachable { .. } | CallError::Deadline { .. }))
}
