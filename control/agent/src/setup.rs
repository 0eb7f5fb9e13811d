//! Setup by what programs written for Mooncake pass: the address of a master, possibly a name, possibly nothing.
//!
//! On this host, the control planes of the same user are found in the runtime directory. The one that listens on the
//! given address is taken or, if the address is Mooncake's default, the only one. A control plane on another host
//! requires certificates.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;

use kvplane_rpc::{LocalError, RuntimeDirectory};

use crate::which::{Control, Remote};

/// Default port of Mooncake's master.
const DEFAULT_PORT: u16 = 50_051;
/// Default cluster of certificates.
const DEFAULT_CLUSTER: &str = "kvplane";

/// Reason why a setup has no control plane, or no address to serve on.
#[derive(Debug)]
#[non_exhaustive]
pub enum SetupError {
    /// The text is a URL.
    Url {
        /// The text.
        text: String,
    },
    /// The text is not an address, or its name is not known.
    Address {
        /// The text.
        text: String,
        /// Error of the resolver.
        source: io::Error,
    },
    /// The text has no address in it.
    NoAddress {
        /// The text.
        text: String,
    },
    /// The control plane is on another host, and there are no certificates.
    OtherHost {
        /// Address of the control plane.
        address: SocketAddr,
    },
    /// No control plane of this user runs on this host.
    NoneHere {
        /// Address that was given.
        address: String,
        /// Directory that was searched.
        directory: PathBuf,
    },
    /// This user's control planes on this host listen on other addresses.
    OthersHere {
        /// Address that was given.
        address: String,
        /// Clusters and addresses of those that were found.
        found: Vec<(String, SocketAddr)>,
    },
    /// The runtime directory cannot be used.
    Directory(LocalError),
    /// No address of this host leads to the control plane.
    NoRoute {
        /// Address of the control plane.
        far: SocketAddr,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url { text } => {
                write!(f, "{text:?}: give the addresses of the control planes, host:port,host:port")
            }
            Self::Address { text, source } => write!(f, "{text:?} is not an address: {source}"),
            Self::NoAddress { text } => write!(f, "{text:?} contains no address"),
            Self::OtherHost { address } => write!(
                f,
                "the control plane at {address} is on another host: set KVPLANE_CERTS to the folder that `kvplane ctl \
                 cert` made, with ca.pem, client.pem and client.key"
            ),
            Self::NoneHere { address, directory } => write!(
                f,
                "no control plane at {address}: none of this user runs on this host ({} names none); start `kvplane \
                 dev`, or set KVPLANE_CERTS for one that has certificates",
                directory.display()
            ),
            Self::OthersHere { address, found } => write!(
                f,
                "no control plane at {address}; this user's are {}: name one of these addresses, or set \
                 KVPLANE_CLUSTER",
                found.iter().map(|(name, at)| format!("{name} at {at}")).collect::<Vec<_>>().join(", ")
            ),
            Self::Directory(error) => error.fmt(f),
            Self::NoRoute { far, source } => write!(
                f,
                "no address of this host leads to the control plane at {far}: {source}; name one as the local hostname"
            ),
        }
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Address { source, .. } | Self::NoRoute { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Identification of the control plane of a setup; nothing set means the user's only one on this host.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Addresses, `host:port,host:port`; a port that is left out is Mooncake's.
    pub master: Option<String>,
    /// Name of the cluster.
    pub cluster: Option<String>,
    /// Directory with certificates, for a control plane on another host.
    pub certificates: Option<PathBuf>,
    /// Runtime directory, if not the user's.
    pub runtime_directory: Option<PathBuf>,
}

impl Setup {
    /// Fills in missing fields from the environment: `KVPLANE_CLUSTER`, `KVPLANE_CERTS`.
    #[must_use]
    pub fn completed(mut self) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        self.master = self.master.filter(|master| !master.is_empty());
        self.cluster = self.cluster.or_else(|| variable("KVPLANE_CLUSTER"));
        self.certificates = self.certificates.or_else(|| variable("KVPLANE_CERTS").map(PathBuf::from));
        self
    }

    /// Returns the given address, for messages.
    #[must_use]
    pub fn shown(&self) -> String {
        self.master.clone().unwrap_or_else(|| format!("127.0.0.1:{DEFAULT_PORT}"))
    }

    /// Discovers the control plane. Names are resolved, which may take as long as the resolver's timeout.
    ///
    /// # Errors
    /// The reason why there is none, and the next step.
    pub fn find(&self) -> Result<Control, SetupError> {
        if let Some(identity) = &self.certificates {
            let addresses = self.addresses()?;
            let cluster = self.cluster.clone().unwrap_or_else(|| DEFAULT_CLUSTER.to_owned());
            return Ok(Control::Remote(Remote { cluster, addresses, identity: identity.clone() }));
        }
        let runtime_directory = self.runtime_directory.clone();
        if let Some(cluster) = &self.cluster {
            return Ok(Control::Local { cluster: cluster.clone(), runtime_directory });
        }
        let addresses = self.addresses()?;
        if let Some(far) = addresses.iter().find(|address| !Control::is_of_this_host(**address)) {
            return Err(SetupError::OtherHost { address: *far });
        }
        let directory = match &self.runtime_directory {
            Some(path) => path.clone(),
            None => RuntimeDirectory::of_user().map_err(SetupError::Directory)?.path().to_owned(),
        };
        let found = Control::published(Some(&directory)).map_err(SetupError::Directory)?;
        let at_address = |(_, listening): &&(String, SocketAddr)| {
            addresses.iter().any(|wanted| Control::is_reached_at(*wanted, *listening))
        };
        let named = found.iter().find(at_address);
        let is_default = addresses.iter().all(|address| address.port() == DEFAULT_PORT);
        match (named, &found[..]) {
            (Some((cluster, _)), _) => Ok(Control::Local { cluster: cluster.clone(), runtime_directory }),
            (None, [(cluster, _)]) if is_default => Ok(Control::Local { cluster: cluster.clone(), runtime_directory }),
            (None, []) => Err(SetupError::NoneHere { address: self.shown(), directory }),
            (None, _) => Err(SetupError::OthersHere { address: self.shown(), found }),
        }
    }

    fn addresses(&self) -> Result<Vec<SocketAddr>, SetupError> {
        let text = self.shown();
        let mut all = Vec::new();
        for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            if one.contains("://") {
                return Err(SetupError::Url { text: one.to_owned() });
            }
            let with_port = if one.parse::<SocketAddr>().is_ok() || has_port(one) {
                one.to_owned()
            } else {
                format!("{one}:{DEFAULT_PORT}")
            };
            let found =
                with_port.to_socket_addrs().map_err(|source| SetupError::Address { text: one.to_owned(), source })?;
            // A control plane listens on one address; all addresses of a name are tried.
            all.extend(found);
        }
        if all.is_empty() { Err(SetupError::NoAddress { text }) } else { Ok(all) }
    }
}

fn has_port(text: &str) -> bool {
    text.rsplit_once(':')
        .is_some_and(|(host, port)| port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')))
}

/// Returns the address on which a node of this process serves clients of a control plane: loopback if the control
/// plane is there, else the address of `host`, as Mooncake's users name it, if that belongs to this host, or that of
/// the route to the control plane.
///
/// # Errors
/// [`SetupError::NoRoute`] when no address leads there.
pub fn served_on(control: &Control, host: &str) -> Result<IpAddr, SetupError> {
    let addresses = match control {
        Control::Remote(remote) => remote.addresses.clone(),
        Control::Explicit(config) => vec![config.address],
        Control::Local { cluster, runtime_directory } => {
            let found = Control::published(runtime_directory.as_deref()).unwrap_or_default();
            found.into_iter().filter(|(name, _)| name == cluster).map(|(_, address)| address).collect()
        }
    };
    let Some(far) = addresses.into_iter().find(|address| !address.ip().is_loopback()) else {
        return Ok(Ipv4Addr::LOCALHOST.into());
    };
    if let Some(named) = addresses_of(host).into_iter().find(|ip| is_ours(*ip) && ip.is_ipv4() == far.is_ipv4()) {
        return Ok(named);
    }
    // Nothing is sent: connecting a UDP socket only looks up the route.
    let any: SocketAddr = if far.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
    let towards = UdpSocket::bind(any).and_then(|socket| socket.connect(far).and_then(|()| socket.local_addr()));
    towards.map(|address| address.ip()).map_err(|source| SetupError::NoRoute { far, source })
}

/// Returns the addresses of a host, `host` or `host:port`.
fn addresses_of(host: &str) -> Vec<IpAddr> {
    let bare = match host.rsplit_once(':') {
        Some((bare, port)) if port.parse::<u16>().is_ok() && (!bare.contains(':') || bare.ends_with(']')) => bare,
        _ => host,
    };
    let bare = bare.trim_start_matches('[').trim_end_matches(']');
    if bare.is_empty() || bare == "localhost" {
        return Vec::new();
    }
    (bare, 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect()).unwrap_or_default()
}

/// Returns true if other hosts reach this host at an address.
fn is_ours(ip: IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && UdpSocket::bind((ip, 0)).is_ok()
}
