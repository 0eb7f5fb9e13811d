//! A cluster's certificate authority: made once, kept beside the state, asked for identities.
//!
//! The key signs identities and nothing else; whoever can read its file is the cluster. Certificates do not expire: a
//! cluster whose nodes refuse each other on some day years from now is worse than a key that lives as long as its
//! file. To revoke, make a new authority and reissue.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::UnixTime;
use rustls::server::ParsedCertificate;

use crate::files::{read_private, write_private};
use crate::identity::{Identity, IdentityError, PEM_BYTES, Trust, malformed, provider};
use crate::role::{ClusterName, Role};

/// A cluster's certificate authority.
pub struct Authority {
    cluster: ClusterName,
    trust: Trust,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new authority with a fresh key.
    ///
    /// # Errors
    /// [`IdentityError::Issue`] when the system has no randomness.
    pub fn generate(cluster: &ClusterName) -> Result<Self, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, format!("kvplane {cluster} authority"));
        let certificate = params.self_signed(&key)?;
        let trust = Trust::from_pem(&certificate.pem(), "the new authority")?;
        Ok(Self { cluster: cluster.clone(), trust, issuer: Issuer::new(params, key) })
    }

    /// Reads `ca.pem` and `ca.key`, or makes and writes them when neither exists.
    ///
    /// # Errors
    /// When only one of the files exists, either is malformed, or the key is open to others.
    pub fn load_or_generate(directory: &Path, cluster: &ClusterName) -> Result<Self, IdentityError> {
        let (certificate_path, key_path) = (directory.join("ca.pem"), directory.join("ca.key"));
        if !certificate_path.exists() {
            // The key is written first, so a crash in between leaves a key that signed nothing.
            let authority = Self::generate(cluster)?;
            write_private(&key_path, authority.issuer.key().serialize_pem().as_bytes())?;
            write_private(&certificate_path, authority.trust.pem().as_bytes())?;
            return Ok(authority);
        }
        let trust = Trust::read(&certificate_path)?;
        let what = key_path.display().to_string();
        let key = KeyPair::from_pem(&read_private(&key_path, PEM_BYTES)?).map_err(|e| malformed(&what, e))?;
        let mut params = CertificateParams::default();
        // Issued certificates name their issuer; this must be the name in `ca.pem`.
        params.distinguished_name.push(DnType::CommonName, format!("kvplane {cluster} authority"));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let authority = Self { cluster: cluster.clone(), trust, issuer: Issuer::new(params, key) };
        authority.check(&certificate_path)?;
        Ok(authority)
    }

    /// Whether what this authority issues is trusted through its own certificate: `ca.pem` may be another cluster's, or
    /// not belong to `ca.key`.
    fn check(&self, certificate_path: &Path) -> Result<(), IdentityError> {
        let identity = self.issue(Role::Control)?;
        let what = certificate_path.display().to_string();
        let roots = self.trust.roots().map_err(|e| malformed(&what, e))?;
        let parsed = ParsedCertificate::try_from(identity.certificate()).map_err(|e| malformed(&what, e))?;
        rustls::client::verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &roots,
            &[],
            UnixTime::now(),
            provider().signature_verification_algorithms.all,
        )
        .map_err(|e| {
            let cluster = &self.cluster;
            malformed(&what, format!("it is not the authority of cluster {cluster} with ca.key beside it: {e}"))
        })
    }

    /// A fresh identity for `role`.
    ///
    /// # Errors
    /// [`IdentityError::Issue`] when the system has no randomness.
    pub fn issue(&self, role: Role) -> Result<Identity, IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![self.cluster.dns_name(role)])?;
        params.distinguished_name.push(DnType::CommonName, format!("kvplane {role}"));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match role {
            Role::Control => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            Role::Node | Role::Client | Role::Admin => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        let certificate = params.signed_by(&key, &self.issuer)?;
        Identity::from_pem(&certificate.pem(), &key.serialize_pem(), "the new certificate")
    }

    /// What peers must trust to accept the identities of this authority.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// The cluster it speaks for.
    #[must_use]
    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }
}

/// 64 random bits from the system, for ids and seeds.
///
/// # Errors
/// [`IdentityError::Issue`] when the system has no randomness.
pub fn random_u64() -> Result<u64, IdentityError> {
    let mut bytes = [0; 8];
    provider()
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| IdentityError::Issue("the system has no randomness".to_owned()))?;
    Ok(u64::from_le_bytes(bytes))
}
