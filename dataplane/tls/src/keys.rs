//! Certificates as TLS wants them, and where connections take them from: they may be others tomorrow.

use core::fmt;
use core::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::TlsError;
use crate::verify::OfRole;

/// The protocol in ALPN: a control port and a data port are never taken for each other.
const PROTOCOL_NAME: &[u8] = b"kvplane-data/1";
/// Roles whose certificates may open data connections: all. What they may do there, their tickets say.
const ROLES: [&str; 5] = ["node", "client", "admin", "scheduler", "control"];

/// Whether data connections over TCP are sealed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DataTls {
    /// Never. A peer that wants it is refused.
    #[default]
    Off,
    /// Peers that connect may choose. We connect plainly, and with TLS where a peer has said that it must be.
    Offer,
    /// Always. Plain connections are refused, and none is made.
    Require,
}

impl DataTls {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Offer => "offer",
            Self::Require => "require",
        }
    }
}

impl fmt::Display for DataTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DataTls {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Off, Self::Offer, Self::Require];
        let found = all.into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| format!("{text:?} is none of off, offer and require"))
    }
}

/// An identity in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Material {
    /// Name of the cluster, which certificates carry.
    pub cluster: String,
    /// Our certificate.
    pub certificate_pem: String,
    /// Its key: a secret.
    pub key_pem: String,
    /// The authority's certificates; several while one takes over from another.
    pub trust_pem: String,
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key never reaches a log.
        write!(f, "Material(cluster {:?})", self.cluster)
    }
}

/// An identity, ready for handshakes.
pub struct Keys {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
    cluster: String,
}

impl Keys {
    /// Makes them.
    ///
    /// # Errors
    /// When a certificate or the key cannot be used, or they do not belong together.
    pub fn new(material: &Material) -> Result<Self, TlsError> {
        let unusable =
            |what: &str, why: &dyn fmt::Display| TlsError::new(format!("{what} cannot be used for TLS: {why}"));
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(material.trust_pem.as_bytes()) {
            let authority = authority.map_err(|e| unusable("the authority's certificate", &e))?;
            roots.add(authority).map_err(|e| unusable("the authority's certificate", &e))?;
        }
        let certificates: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(material.certificate_pem.as_bytes()).collect();
        let certificates = certificates.map_err(|e| unusable("our certificate", &e))?;
        let key = PrivateKeyDer::from_pem_slice(material.key_pem.as_bytes());
        let key = key.map_err(|e| unusable("the key of our certificate", &e))?;
        let (roots, provider) = (Arc::new(roots), provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|e| unusable("the authority's certificate", &e))?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| unusable("TLS 1.3", &e))?
            .with_client_cert_verifier(Arc::clone(&verifier))
            .with_single_cert(certificates.clone(), key.clone_key())
            .map_err(|e| unusable("our certificate with its key", &e))?;
        // Connections are few and long: nothing is resumed, so that each shows a certificate that is good now.
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![PROTOCOL_NAME.to_vec()];
        server.enable_secret_extraction = true;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| unusable("TLS 1.3", &e))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(OfRole(verifier)))
            .with_client_auth_cert(certificates, key)
            .map_err(|e| unusable("our certificate with its key", &e))?;
        client.resumption = rustls::client::Resumption::disabled();
        client.alpn_protocols = vec![PROTOCOL_NAME.to_vec()];
        client.enable_secret_extraction = true;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), cluster: material.cluster.clone() })
    }

    /// The name that the certificate of a server of this role carries.
    pub(crate) fn server_name(&self, role: &str) -> Result<ServerName<'static>, TlsError> {
        let name = format!("{role}.{}.kvplane", self.cluster);
        ServerName::try_from(name).map_err(|e| TlsError::new(format!("{:?} cannot name a cluster: {e}", self.cluster)))
    }

    /// Whether a certificate that is good is one of this cluster.
    pub(crate) fn is_ours(&self, certificate: &CertificateDer<'_>) -> bool {
        ParsedCertificate::try_from(certificate).is_ok_and(|parsed| {
            let mut names = ROLES.iter().filter_map(|role| self.server_name(role).ok());
            names.any(|name| verify_server_name(&parsed, &name).is_ok())
        })
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys(cluster {:?})", self.cluster)
    }
}

/// The ciphers of data connections: what processors have instructions for, and one for those that have none.
fn provider() -> Arc<CryptoProvider> {
    let suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider { cipher_suites: suites, ..default_provider() })
}

/// What data connections of a process are sealed with. New connections take what was set last, the others keep what
/// they have.
pub struct Keychain {
    mode: DataTls,
    server_role: &'static str,
    current: RwLock<Option<(Material, Arc<Keys>)>>,
}

impl Keychain {
    /// An empty one: until [`Self::set`], no connection can be sealed. `server_role` is the role in the certificates of
    /// those whom we connect to.
    #[must_use]
    pub const fn new(mode: DataTls, server_role: &'static str) -> Self {
        Self { mode, server_role, current: RwLock::new(None) }
    }

    /// Whether connections are sealed.
    #[must_use]
    pub const fn mode(&self) -> DataTls {
        self.mode
    }

    /// The role in the certificates of those whom we connect to.
    #[must_use]
    pub const fn server_role(&self) -> &'static str {
        self.server_role
    }

    /// Takes another identity. Whether it was another one.
    ///
    /// # Errors
    /// When it cannot be used; what was set before stays.
    pub fn set(&self, material: Material) -> Result<bool, TlsError> {
        if self.current.read().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|(had, _)| *had == material)
        {
            return Ok(false);
        }
        let keys = Arc::new(Keys::new(&material)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some((material, keys));
        Ok(true)
    }

    /// What the next connection is sealed with.
    ///
    /// # Errors
    /// When nothing was set.
    pub fn keys(&self) -> Result<Arc<Keys>, TlsError> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let keys = current.as_ref().map(|(_, keys)| Arc::clone(keys));
        keys.ok_or_else(|| TlsError::new("this process has no certificate for data connections yet"))
    }
}

impl fmt::Debug for Keychain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keychain({}, servers are {}s)", self.mode, self.server_role)
    }
}
