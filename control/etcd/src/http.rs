//! HTTP client with a deadline and limits.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_sys::private_files::check_private;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

const JSON: &str = "application/json";
/// Maximum length of a server's error text.
const ERROR_BYTES: usize = 4096;

/// HTTP methods of this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `GET`
    Get,
    /// `PUT`, of JSON
    Put,
    /// `POST`, of JSON
    Post,
    /// `DELETE`
    Delete,
}

/// Reason for a missing answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HttpError {
    /// The deadline passed.
    Deadline {
        /// Time that the client waited.
        waited: Duration,
    },
    /// The answer is longer than allowed.
    TooLong {
        /// Maximum length.
        max_bytes: usize,
    },
    /// Any other failure, as text.
    Failed(String),
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline { waited } => write!(f, "no answer within {} ms", waited.as_millis()),
            Self::TooLong { max_bytes } => write!(f, "the answer has more than {max_bytes} bytes"),
            Self::Failed(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for HttpError {}

/// Certificate files that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificatesError {
    /// Path of the file.
    pub path: PathBuf,
    /// Reason, as text.
    pub reason: String,
}

impl fmt::Display for CertificatesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot use {}: {}", self.path.display(), self.reason)
    }
}

impl std::error::Error for CertificatesError {}

/// Trusted certificates of a client for TLS, and its own identity.
#[derive(Clone, Debug)]
pub struct Certificates(TlsConfig);

/// File of the private key, which only its owner may be able to read.
const KEY: &str = "client.key";

impl Certificates {
    /// Reads the certificates in a directory: `ca.pem`, and `client.pem` with `client.key` if the server requires
    /// client certificates.
    ///
    /// # Errors
    /// When a file is missing or malformed, or users other than its owner may read the private key.
    pub fn read(directory: &Path) -> Result<Self, CertificatesError> {
        let failed = |name: &str, reason: String| CertificatesError { path: directory.join(name), reason };
        if let Ok(key) = File::open(directory.join(KEY)) {
            check_private(&key, &directory.join(KEY)).map_err(|error| failed(KEY, error.to_string()))?;
        }
        let read = |name: &str| std::fs::read(directory.join(name)).map_err(|error| failed(name, error.to_string()));
        let certificate =
            |name: &str| Certificate::from_pem(&read(name)?).map_err(|error| failed(name, error.to_string()));
        let roots = RootCerts::new_with_certs(&[certificate("ca.pem")?]);
        let client = if directory.join("client.pem").exists() {
            let key = PrivateKey::from_pem(&read(KEY)?).map_err(|error| failed(KEY, error.to_string()))?;
            Some(ClientCert::new_with_certs(&[certificate("client.pem")?], key))
        } else {
            None
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = TlsConfig::builder()
            .root_certs(roots)
            .client_cert(client)
            .unversioned_rustls_crypto_provider(provider)
            .build();
        Ok(Self(config))
    }
}

/// HTTP client without proxies and redirects.
#[derive(Debug)]
pub struct Http {
    agent: Agent,
    max_bytes: usize,
}

impl Http {
    /// Creates a client that opens a connection for each request, and accepts answers of at most `max_bytes`.
    #[must_use]
    pub fn new(max_bytes: usize) -> Self {
        Self::with(max_bytes, 0, None)
    }

    /// Creates a client that keeps a few connections open for later requests, over TLS if there are certificates.
    #[must_use]
    pub fn kept(max_bytes: usize, certificates: Option<Certificates>) -> Self {
        Self::with(max_bytes, 4, certificates)
    }

    fn with(max_bytes: usize, idle_connections: usize, certificates: Option<Certificates>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .max_idle_connections(idle_connections)
            .max_idle_connections_per_host(idle_connections)
            .user_agent(concat!("kvplane/", env!("CARGO_PKG_VERSION")));
        let config = match certificates {
            Some(Certificates(tls)) => config.tls_config(tls).https_only(true),
            None => config,
        };
        Self { agent: config.build().new_agent(), max_bytes }
    }

    /// Sends a request; returns status and body of the answer.
    ///
    /// # Errors
    /// When there is no answer by the deadline, or it is too long.
    pub fn exchange(
        &self,
        method: Method,
        url: &str,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(u16, Vec<u8>), HttpError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HttpError::Failed("the deadline has passed".to_owned()));
        }
        let limit = Some(left);
        let answer = match method {
            Method::Get => self.agent.get(url).config().timeout_global(limit).build().call(),
            Method::Delete => self.agent.delete(url).config().timeout_global(limit).build().call(),
            Method::Put => self.agent.put(url).config().timeout_global(limit).build().content_type(JSON).send(body),
            Method::Post => self.agent.post(url).config().timeout_global(limit).build().content_type(JSON).send(body),
        };
        let mut answer = answer.map_err(|error| in_words(&error, left))?;
        let status = answer.status().as_u16();
        let max_bytes = if status == 200 { self.max_bytes } else { ERROR_BYTES };
        // One byte more than allowed, to tell an answer that just fits from one that does not.
        let body = answer.body_mut().with_config().limit(max_bytes as u64 + 1).read_to_vec();
        match body {
            Ok(body) if body.len() <= max_bytes => Ok((status, body)),
            _ if status != 200 => Ok((status, Vec::new())),
            Ok(_) | Err(ureq::Error::BodyExceedsLimit(_)) => Err(HttpError::TooLong { max_bytes }),
            Err(error) => Err(in_words(&error, left)),
        }
    }
}

fn in_words(error: &ureq::Error, waited: Duration) -> HttpError {
    match error {
        ureq::Error::Timeout(_) => HttpError::Deadline { waited },
        error => HttpError::Failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn private_key_readable_by_others_is_rejected() {
        let directory = std::env::temp_dir().join(format!("kvplane-etcd-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let key = directory.join(KEY);
        std::fs::write(&key, "").expect("a file");
        for (mode, refused) in [(0o644, true), (0o640, true), (0o600, false)] {
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).expect("our own file");
            let error = Certificates::read(&directory).expect_err("there is no certificate").to_string();
            assert_eq!(error.contains(&format!("its mode is {mode:03o}; run chmod 600 on it")), refused, "{error}");
        }
        std::fs::remove_dir_all(&directory).expect("our own directory");
    }
}
