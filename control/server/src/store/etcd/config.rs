//! Configuration of the state in etcd, and its errors.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use kvplane_etcd::{Certificates, CertificatesError};

/// Most endpoints of one etcd cluster.
const ENDPOINTS: usize = 16;
/// etcd's port for clients.
const PORT: u16 = 2379;
/// Default prefix of all keys.
const PREFIX: &str = "/kvplane/";

/// Place of the state in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `HOST:PORT` of each member of the etcd cluster.
    pub endpoints: Vec<String>,
    /// Prefix of all keys.
    pub prefix: String,
    /// Directory with `ca.pem`, and `client.pem` with `client.key` if etcd authenticates its clients; enables TLS.
    pub certificates: Option<PathBuf>,
    /// Address at which callers reach this control plane, for messages; none for the address it listens on.
    pub advertise: Option<SocketAddr>,
}

/// Error of the state in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum EtcdConfigError {
    /// The text does not name an etcd cluster.
    Text {
        text: String,
        /// The reason, as a predicate of the text.
        reason: &'static str,
    },
    /// An endpoint beyond loopback is configured without TLS.
    Open(String),
    /// The certificates are unusable.
    Certificates(CertificatesError),
    /// No endpoint answers.
    Silent(String),
    /// The stored state is unusable.
    Failed(String),
    /// The etcd thread could not be started.
    Thread(String),
}

impl fmt::Display for EtcdConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text { text, reason } => write!(
                f,
                "{text:?} {reason}: the state in etcd is named etcd://HOST:PORT,HOST:PORT, or with a prefix of keys \
                 etcd://HOST:PORT/PREFIX/"
            ),
            Self::Open(endpoint) => write!(
                f,
                "etcd at {endpoint} would be used without TLS beyond loopback, where the network could read \
                 the ticket keys: give a directory with ca.pem, client.pem and client.key (--etcd-certs)"
            ),
            Self::Certificates(error) => write!(f, "certificates for etcd: {error}"),
            Self::Silent(reason) => write!(f, "etcd does not answer: {reason}"),
            Self::Failed(reason) => write!(f, "the state in etcd: {reason}"),
            Self::Thread(reason) => write!(f, "cannot start the etcd thread: {reason}"),
        }
    }
}

impl std::error::Error for EtcdConfigError {}

impl EtcdConfig {
    /// Returns true if the text names an etcd cluster rather than a directory.
    #[must_use]
    pub fn is_one(text: &str) -> bool {
        text.starts_with("etcd://")
    }

    /// Parses `etcd://HOST:PORT,HOST:PORT/PREFIX/`; ports and prefix may be left out.
    ///
    /// # Errors
    /// When the text is not of that form, or an endpoint is beyond loopback and there are no certificates.
    pub fn parse(text: &str, certificates: Option<PathBuf>) -> Result<Self, EtcdConfigError> {
        let wrong = |reason| EtcdConfigError::Text { text: text.to_owned(), reason };
        let rest = text.strip_prefix("etcd://").ok_or_else(|| wrong("has another scheme"))?;
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = match path.trim_matches('/') {
            "" => PREFIX.to_owned(),
            path if path.len() > 256 || !path.bytes().all(|byte| byte.is_ascii_graphic()) => {
                return Err(wrong("has a prefix that is longer than 256 bytes or not plain text"));
            }
            path => format!("/{path}/"),
        };
        let endpoints: Vec<String> = hosts
            .split([',', ';'])
            .map(with_port)
            .collect::<Option<_>>()
            .ok_or_else(|| wrong("has an endpoint that is no HOST:PORT"))?;
        if !(1..=ENDPOINTS).contains(&endpoints.len()) {
            return Err(wrong("has more than 16 endpoints"));
        }
        if certificates.is_none()
            && let Some(open) = endpoints.iter().find(|endpoint| !is_loopback(endpoint))
        {
            return Err(EtcdConfigError::Open(open.clone()));
        }
        Ok(Self { endpoints, prefix, certificates, advertise: None })
    }

    pub(super) fn read_certificates(&self) -> Result<Option<Certificates>, EtcdConfigError> {
        let read = self.certificates.as_deref().map(Certificates::read);
        read.transpose().map_err(EtcdConfigError::Certificates)
    }
}

fn with_port(endpoint: &str) -> Option<String> {
    let graphic = !endpoint.is_empty() && endpoint.bytes().all(|byte| byte.is_ascii_graphic());
    if !graphic || endpoint.contains(['@', '?', '#']) {
        return None;
    }
    if endpoint.parse::<SocketAddr>().is_ok() {
        return Some(endpoint.to_owned());
    }
    match endpoint.split_once(':') {
        None => Some(format!("{endpoint}:{PORT}")),
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => {
            Some(endpoint.to_owned())
        }
        Some(_) => None,
    }
}

fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    host == "localhost" || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_etcd_are_read_or_refused_with_reasons() {
        let parse = |text: &str| EtcdConfig::parse(text, None);
        let found = parse("etcd://127.0.0.1:23790,localhost/a/b").expect("good");
        assert_eq!(
            (found.endpoints, found.prefix.as_str()),
            (vec!["127.0.0.1:23790".to_owned(), "localhost:2379".to_owned()], "/a/b/")
        );
        assert_eq!(parse("etcd://[::1]:5").expect("good").prefix, PREFIX);
        for (text, part) in [
            ("redis://a", "another scheme"),
            ("etcd://", "no HOST:PORT"),
            ("etcd://a:b", "no HOST:PORT"),
            ("etcd://127.0.0.1:1,,127.0.0.1:2", "no HOST:PORT"),
            ("etcd://me:secret@127.0.0.1", "no HOST:PORT"),
            ("etcd://192.0.2.1:2379", "without TLS beyond loopback"),
            ("etcd://etcd.example", "without TLS beyond loopback"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(EtcdConfig::parse("etcd://192.0.2.1", Some("certs".into())).is_ok());
    }
}
