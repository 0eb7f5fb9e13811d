//! Access of the control plane's HTTP paths to objects: a client of this process, created at the first request.
//!
//! Its identity is the client certificate that local processes find in the runtime directory or, where the authority's
//! key is kept elsewhere, the one beside the control plane's own certificate. Without such a certificate there is no
//! access.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kvplane::{Client, ClientConfig, Control, Remote};
use kvplane::{Error, Status};
use kvplane_server::{Objects, ObjectsError, Pin, PinOutcome, PinResult};

use crate::command::ctl::keys::name_of;

/// Address and identity with which the cluster's objects are accessed.
pub(super) struct ClusterArguments {
    cluster: String,
    who: Who,
    /// Address that this control plane listens on, once it is known.
    address: OnceLock<SocketAddr>,
}

enum Who {
    /// Client identity of the runtime directory; `None` means the user's.
    Published(Option<PathBuf>),
    /// Client identity in this directory.
    Certified(PathBuf),
}

/// Files of the client certificate that a control plane with certificates of its own needs for access to objects.
const CERTIFICATE: [&str; 2] = ["client.pem", "client.key"];

impl ClusterArguments {
    /// Creates the access of a control plane with this runtime directory, or with this directory of certificates;
    /// `None` if the latter has no client certificate.
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

    /// Sets the address that the control plane listens on.
    pub(super) fn listens(&self, address: SocketAddr) {
        // A wildcard address includes loopback.
        let ip = match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let _ = self.address.set(SocketAddr::new(ip, address.port()));
    }

    fn client(&self, tenant: &str) -> Result<Client, ObjectsError> {
        let control = match (&self.who, self.address.get()) {
            (Who::Published(runtime_directory), _) => {
                Control::Local { cluster: self.cluster.clone(), runtime_directory: runtime_directory.clone() }
            }
            (Who::Certified(identity), Some(address)) => Control::Remote(Remote {
                cluster: self.cluster.clone(),
                addresses: vec![*address],
                identity: identity.clone(),
            }),
            (Who::Certified(_), None) => {
                return Err(ObjectsError::NotListening);
            }
        };
        let config = ClientConfig { control, tenant: tenant.to_owned(), ..ClientConfig::local(&self.cluster) };
        Client::connect(&config).map_err(client_error)
    }
}

/// Returns the outcome of a pin that concerns a whole retention or group, or whose arguments were refused.
fn pin_outcome(result: Result<PinOutcome, Error>) -> Result<PinOutcome, ObjectsError> {
    match result {
        Ok(outcome) => Ok(outcome),
        Err(error) if error.status() == Some(Status::PinLimit) => Ok(PinOutcome::Full(error.to_string())),
        Err(error @ Error::Argument(_)) => Ok(PinOutcome::Wrong(error.to_string())),
        Err(error) => Err(client_error(error)),
    }
}

/// Returns the outcome for each key.
fn pinned_each(keys: &[String], results: impl IntoIterator<Item = Result<bool, Error>>) -> PinOutcome {
    let pinned = |result: Result<bool, Error>| match result {
        Ok(true) => PinResult::Yes,
        Ok(false) => PinResult::NotFound,
        Err(error) => PinResult::Failed(error.to_string()),
    };
    PinOutcome::Each(keys.iter().cloned().zip(results.into_iter().map(pinned)).collect())
}

fn client_error(error: kvplane::Error) -> ObjectsError {
    ObjectsError::Client(Box::new(error))
}

impl Objects for ClusterArguments {
    fn keys(&self, tenant: &str, most: usize) -> Result<(Vec<String>, bool), ObjectsError> {
        let mut client = self.client(tenant)?;
        let (mut cursor, mut keys) = (None, Vec::new());
        loop {
            let page = client.keys().list(cursor).map_err(client_error)?;
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

    fn remove_all(&self, tenant: Option<&str>) -> Result<u64, ObjectsError> {
        let mut client = self.client(tenant.unwrap_or_default())?;
        client.keys().remove_all(tenant.is_none()).map_err(client_error)
    }

    fn pin(&self, tenant: &str, pin: &Pin) -> Result<PinOutcome, ObjectsError> {
        let mut client = self.client(tenant)?;
        let mut pins = client.keys().pins();
        pin_outcome(match pin {
            Pin::Soft { keys, ttl: Some(ttl) } => {
                pins.soft_pin(keys, *ttl).map(|there| pinned_each(keys, there.into_iter().map(Ok)))
            }
            Pin::Soft { keys, ttl: None } => {
                pins.soft_unpin(keys).map(|there| pinned_each(keys, there.into_iter().map(Ok)))
            }
            Pin::Retain { retention, keys, ttl } => {
                pins.retain(*retention, keys, *ttl).map(|results| pinned_each(keys, results))
            }
            Pin::Group { group, ttl } => pins.retain_group(*group, *ttl).map(PinOutcome::Count),
            Pin::Renew { retention, ttl } => pins.renew(*retention, *ttl).map(PinOutcome::Count),
            Pin::Release { retention } => pins.release(*retention).map(PinOutcome::Count),
            Pin::Priority { keys, priority } => {
                pins.set_priority(keys, *priority).map(|there| pinned_each(keys, there.into_iter().map(Ok)))
            }
        })
    }
}
