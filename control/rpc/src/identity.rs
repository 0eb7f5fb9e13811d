//! Identities of processes: a certificate with its key, and the authority certificates that peers verify it against.
//!
//! Both travel and are stored as PEM text. Keys never reach a log: `Debug` shows sizes only, and a key file that other
//! users may read is rejected.

pub(crate) mod authority;
pub(crate) mod role;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use kvplane_sys::private_files::{FileError, read_private, read_text, write_private};

use crate::identity::role::{CLUSTER_NAME_BYTES, ClusterName, tenant_of};
use crate::quic::reset::ResetSecret;

/// Longest PEM file of an identity, in bytes.
pub(crate) const PEM_BYTES: u64 = 16 << 10;

/// Error of issuing, reading or writing an identity.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum IdentityError {
    /// The name is not valid for a cluster.
    ClusterName(String),
    /// The name is not valid for a tenant in a certificate.
    TenantName(String),
    /// A file of the identity could not be read or written.
    File(FileError),
    /// A certificate or key is malformed.
    Malformed {
        /// The file or certificate in question.
        what: String,
        reason: String,
    },
    /// A key could not be generated or a certificate not signed.
    Issue(String),
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClusterName(name) => write!(
                f,
                "{name:?} cannot name a cluster: use 1 to {CLUSTER_NAME_BYTES} of a-z, 0-9 and -, and no - at \
                 either end"
            ),
            Self::TenantName(name) => write!(
                f,
                "a certificate cannot name the tenant {name:?}: use 1 to {CLUSTER_NAME_BYTES} of a-z, 0-9 and -, and \
                 no - at either end, or a certificate for all tenants"
            ),
            Self::File(error) => error.fmt(f),
            Self::Malformed { what, reason } => write!(f, "{what} is unusable: {reason}"),
            Self::Issue(reason) => write!(f, "cannot issue a certificate: {reason}"),
        }
    }
}

impl std::error::Error for IdentityError {}

impl From<FileError> for IdentityError {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl From<rcgen::Error> for IdentityError {
    fn from(error: rcgen::Error) -> Self {
        Self::Issue(error.to_string())
    }
}

pub(crate) fn malformed(what: &str, reason: impl fmt::Display) -> IdentityError {
    IdentityError::Malformed { what: what.to_owned(), reason: reason.to_string() }
}

/// Returns the cryptography provider of the control protocol, named explicitly: the process-wide default may be another
/// one, or missing.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Most authorities that are trusted at once: two during a rotation.
const AUTHORITIES: usize = 4;

/// Authority certificates that a peer trusts: a cluster's authority, or several while a new one replaces an old one.
#[derive(Clone, PartialEq, Eq)]
pub struct Trust {
    pem: String,
    ders: Vec<CertificateDer<'static>>,
}

impl Trust {
    /// Reads one to four certificates in PEM; `what` names them in errors.
    ///
    /// # Errors
    /// [`IdentityError::Malformed`].
    pub fn from_pem(pem: &str, what: &str) -> Result<Self, IdentityError> {
        let ders: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).take(AUTHORITIES + 1).collect();
        let trust = Self { pem: pem.to_owned(), ders: ders.map_err(|e| malformed(what, e))? };
        if trust.ders.is_empty() || trust.ders.len() > AUTHORITIES {
            return Err(malformed(what, format!("it must hold 1 to {AUTHORITIES} certificates in PEM")));
        }
        trust.roots().map_err(|e| malformed(what, e))?;
        Ok(trust)
    }

    /// Reads `ca.pem`.
    ///
    /// # Errors
    /// When the file cannot be read or holds no certificate.
    pub fn read(path: &Path) -> Result<Self, IdentityError> {
        Self::from_pem(&read_text(path, PEM_BYTES)?, &path.display().to_string())
    }

    /// Writes `ca.pem`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<(), IdentityError> {
        Ok(write_private(&directory.join("ca.pem"), self.pem.as_bytes())?)
    }

    /// Returns the certificates in PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Returns the number of trusted authorities.
    #[must_use]
    pub fn authorities(&self) -> usize {
        self.ders.len()
    }

    pub(crate) fn roots(&self) -> Result<RootCertStore, rustls::Error> {
        let mut roots = RootCertStore::empty();
        for der in &self.ders {
            roots.add(der.clone())?;
        }
        Ok(roots)
    }

    /// Iterates over the certificates, each in PEM.
    pub(crate) fn pems(&self) -> impl Iterator<Item = &str> {
        const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
        self.pem.match_indices(BEGIN).map(|(at, _)| {
            let end = self.pem[at + BEGIN.len()..].find(BEGIN).map_or(self.pem.len(), |more| at + BEGIN.len() + more);
            &self.pem[at..end]
        })
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trust({} authorities)", self.ders.len())
    }
}

/// A certificate and its key.
pub struct Identity {
    certificate_pem: String,
    key_pem: String,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Reads a certificate and its PKCS#8 key, both in PEM; `what` names them in errors.
    ///
    /// # Errors
    /// [`IdentityError::Malformed`].
    pub fn from_pem(certificate: &str, key: &str, what: &str) -> Result<Self, IdentityError> {
        Ok(Self {
            certificate_pem: certificate.to_owned(),
            key_pem: key.to_owned(),
            certificate: CertificateDer::from_pem_slice(certificate.as_bytes())
                .map_err(|e| malformed(what, format!("no certificate: {e}")))?,
            key: PrivateKeyDer::from_pem_slice(key.as_bytes())
                .map_err(|e| malformed(what, format!("no private key: {e}")))?,
        })
    }

    /// Reads `NAME.pem` and `NAME.key`, the key with mode 0600.
    ///
    /// # Errors
    /// When a file cannot be read, the key is open to others, or either is malformed.
    pub fn read(directory: &Path, name: &str) -> Result<Self, IdentityError> {
        let certificate_path = directory.join(format!("{name}.pem"));
        let key_path = directory.join(format!("{name}.key"));
        let certificate = read_text(&certificate_path, PEM_BYTES)?;
        let key = read_private(&key_path, PEM_BYTES)?;
        Self::from_pem(&certificate, &key, &certificate_path.display().to_string())
    }

    /// Writes `NAME.key` and then `NAME.pem`, both with mode 0600.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, directory: &Path, name: &str) -> Result<(), IdentityError> {
        write_private(&directory.join(format!("{name}.key")), self.key_pem.as_bytes())?;
        write_private(&directory.join(format!("{name}.pem")), self.certificate_pem.as_bytes())?;
        Ok(())
    }

    /// Returns the certificate in PEM.
    #[must_use]
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Returns the key in PEM, which is a secret.
    #[must_use]
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// Returns the only tenant of this cluster that the certificate admits as a client: `default` for the default
    /// tenant. None if it is valid for all tenants, or is not a client's.
    #[must_use]
    pub fn tenant(&self, cluster: &ClusterName) -> Option<String> {
        tenant_of(&self.certificate, cluster)
    }

    /// Returns the reset secret that derives from the key, for a control plane whose identity is read from a file.
    #[must_use]
    pub fn reset_secret(&self) -> ResetSecret {
        ResetSecret::of_key(self.key.secret_der())
    }

    pub(crate) fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    pub(crate) fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.clone()]
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self {
            certificate_pem: self.certificate_pem.clone(),
            key_pem: self.key_pem.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone_key(),
        }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key never reaches a log.
        write!(f, "Identity({} bytes of certificate)", self.certificate.len())
    }
}
