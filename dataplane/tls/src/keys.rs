//! Certificates in the form that TLS needs, and the keychain that connections take them from, which can be updated.

use core::fmt;
use core::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::verify::OfRole;
use crate::{TlsError, TlsPart};

/// ALPN protocol, so that a control port and a data port are never mistaken for each other.
const PROTOCOL_NAME: &[u8] = b"kvplane-data/1";
/// Roles whose certificates may open data connections: all. Their rights there follow from their tickets.
const ROLES: [&str; 5] = ["node", "client", "admin", "scheduler", "control"];

/// TLS mode of data connections over TCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DataTls {
    /// No TLS. A peer that requires it is rejected.
    #[default]
    Off,
    /// Peers that connect may choose. This process connects without TLS, and with TLS to a peer that requires it.
    Offer,
    /// TLS always. Plain connections are rejected and never opened.
    Require,
}

impl DataTls {
    /// Returns the word for the mode.
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

/// Error of a word that is no TLS mode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownTlsMode {
    /// The word.
    pub word: String,
}

impl fmt::Display for UnknownTlsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = &self.word;
        write!(f, "{word:?} is not a TLS mode: use off, offer or require")
    }
}

impl core::error::Error for UnknownTlsMode {}

impl FromStr for DataTls {
    type Err = UnknownTlsMode;

    fn from_str(text: &str) -> Result<Self, UnknownTlsMode> {
        let all = [Self::Off, Self::Offer, Self::Require];
        let found = all.into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| UnknownTlsMode { word: text.to_owned() })
    }
}

/// An identity in PEM.
#[derive(Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Material {
    /// Name of the cluster, which its certificates contain.
    pub cluster: String,
    pub certificate_pem: String,
    /// Private key of the certificate.
    pub key_pem: String,
    /// Certificates of the authority; several while one replaces another.
    pub trust_pem: String,
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key must never reach a log.
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
    /// Prepares an identity for handshakes.
    ///
    /// # Errors
    /// Returns an error if a certificate or the key is unusable, or if they do not belong together.
    pub fn new(material: &Material) -> Result<Self, TlsError> {
        let unusable = |part, why: &dyn fmt::Display| TlsError::Unusable { part, detail: why.to_string() };
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(material.trust_pem.as_bytes()) {
            let authority = authority.map_err(|e| unusable(TlsPart::Authority, &e))?;
            roots.add(authority).map_err(|e| unusable(TlsPart::Authority, &e))?;
        }
        let certificates: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(material.certificate_pem.as_bytes()).collect();
        let certificates = certificates.map_err(|e| unusable(TlsPart::Certificate, &e))?;
        let key = PrivateKeyDer::from_pem_slice(material.key_pem.as_bytes());
        let key = key.map_err(|e| unusable(TlsPart::Key, &e))?;
        let (roots, provider) = (Arc::new(roots), provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|e| unusable(TlsPart::Authority, &e))?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| unusable(TlsPart::Version, &e))?
            .with_client_cert_verifier(Arc::clone(&verifier))
            .with_single_cert(certificates.clone(), key.clone_key())
            .map_err(|e| unusable(TlsPart::Pair, &e))?;
        // Connections are few and long-lived: no sessions are resumed, so each handshake presents a certificate that is
        // valid now.
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![PROTOCOL_NAME.to_vec()];
        server.enable_secret_extraction = true;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| unusable(TlsPart::Version, &e))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(OfRole(verifier)))
            .with_client_auth_cert(certificates, key)
            .map_err(|e| unusable(TlsPart::Pair, &e))?;
        client.resumption = rustls::client::Resumption::disabled();
        client.alpn_protocols = vec![PROTOCOL_NAME.to_vec()];
        client.enable_secret_extraction = true;
        Ok(Self { client: Arc::new(client), server: Arc::new(server), cluster: material.cluster.clone() })
    }

    /// Returns the name in the certificate of a server of this role.
    pub(crate) fn server_name(&self, role: &str) -> Result<ServerName<'static>, TlsError> {
        let name = format!("{role}.{}.kvplane", self.cluster);
        let failed =
            |why: InvalidDnsNameError| TlsError::ClusterName { cluster: self.cluster.clone(), detail: why.to_string() };
        ServerName::try_from(name).map_err(failed)
    }

    /// Returns true if a valid certificate is one of this cluster.
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

/// Returns the ciphers of data connections: those with instructions in the processors, and one for processors without.
fn provider() -> Arc<CryptoProvider> {
    let suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider { cipher_suites: suites, ..default_provider() })
}

/// Keychain of a process: its TLS mode and its present identity. New connections use the latest identity, existing ones
/// keep theirs.
pub struct Keychain {
    mode: DataTls,
    server_role: &'static str,
    current: RwLock<Option<(Material, Arc<Keys>)>>,
}

impl Keychain {
    /// Creates an empty keychain: until [`Self::set`], no TLS connection can be established. `server_role` is the role
    /// in the certificates of the servers that this process connects to.
    #[must_use]
    pub const fn new(mode: DataTls, server_role: &'static str) -> Self {
        Self { mode, server_role, current: RwLock::new(None) }
    }

    /// Returns the TLS mode.
    #[must_use]
    pub const fn mode(&self) -> DataTls {
        self.mode
    }

    /// Returns the role in the certificates of the servers that this process connects to.
    #[must_use]
    pub const fn server_role(&self) -> &'static str {
        self.server_role
    }

    /// Sets the identity. Returns false if it was set already.
    ///
    /// # Errors
    /// Returns an error if the identity is unusable; the previous one stays.
    pub fn set(&self, material: Material) -> Result<bool, TlsError> {
        if self.current.read().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|(had, _)| *had == material)
        {
            return Ok(false);
        }
        let keys = Arc::new(Keys::new(&material)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some((material, keys));
        Ok(true)
    }

    /// Returns the identity for the next connection.
    ///
    /// # Errors
    /// Returns an error if no identity was set.
    pub fn keys(&self) -> Result<Arc<Keys>, TlsError> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let keys = current.as_ref().map(|(_, keys)| Arc::clone(keys));
        keys.ok_or(TlsError::NoCertificate)
    }
}

impl fmt::Debug for Keychain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keychain({}, servers are {}s)", self.mode, self.server_role)
    }
}
