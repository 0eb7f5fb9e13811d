//! Certificate authority of a cluster: generated once, stored beside the cluster state, issues identities.
//!
//! The key signs identities and nothing else; a process that can read its file controls the cluster. The authority's
//! certificate does not expire, nor do identities that live as long as a process: a cluster whose nodes reject each
//! other on some day years from now is worse than a key that lives as long as its file. Identities written to files
//! have an expiry date.
//!
//! Rotation has two steps: [`Authority::rotate`] generates a new key and keeps trusting the old one, and
//! [`Authority::retire`] ends that trust once all identities have been reissued. So everything may be replaced without
//! a moment in which one half of a cluster rejects the other.
//! without a moment in which half of a cluster refuses the other half.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::UnixTime;
use rustls::server::ParsedCertificate;

use kvplane_sys::private_files::{read_private, write_private};

use crate::identity::role::{ClusterName, Role, Scope};
use crate::identity::{Identity, IdentityError, PEM_BYTES, Trust, malformed, provider};
use crate::quic::reset::ResetSecret;

/// Time by which an identity with an expiry date is backdated, as the clocks of hosts differ.
const BACKDATED: Duration = Duration::from_secs(3600);

/// Contents of an identity to be issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Role of the holder.
    pub role: Role,
    /// Node or tenant that the holder may act for.
    pub scope: Scope,
    /// Begin and end of validity; none for no end.
    pub valid: Option<(SystemTime, SystemTime)>,
}

impl Grant {
    /// Creates a grant of `role` for all nodes and tenants, without an end.
    #[must_use]
    pub const fn of(role: Role) -> Self {
        Self { role, scope: Scope::Any, valid: None }
    }

    /// Returns this grant, limited to `lifetime` from about `now` on.
    #[must_use]
    pub fn lasting(self, now: SystemTime, lifetime: Duration) -> Self {
        Self { valid: Some((now - BACKDATED, now + lifetime)), ..self }
    }

    fn check(&self) -> Result<(), IdentityError> {
        match (self.role, &self.scope) {
            (_, Scope::Any) | (Role::Node, Scope::Node(_)) => Ok(()),
            (Role::Client, Scope::Tenant(name)) => Scope::tenant(name).map(|_| ()),
            (role, scope) => Err(IdentityError::Issue(format!("role {role} cannot be bound to {scope}"))),
        }
    }
}

/// A cluster's certificate authority.
pub struct Authority {
    cluster: ClusterName,
    trust: Trust,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Generates an authority with a new key.
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
        if directory.join("ca.pem").exists() {
            return Self::load(directory, cluster);
        }
        // The key is written first, so a crash in between leaves a key that signed nothing.
        let authority = Self::generate(cluster)?;
        authority.write_key(directory)?;
        write_private(&directory.join("ca.pem"), authority.trust.pem().as_bytes())?;
        Ok(authority)
    }

    fn write_key(&self, directory: &Path) -> Result<(), IdentityError> {
        Ok(write_private(&directory.join("ca.key"), self.issuer.key().serialize_pem().as_bytes())?)
    }

    /// Reads `ca.pem` and `ca.key`.
    ///
    /// # Errors
    /// When either is missing or malformed, they do not belong together, or the key is open to others.
    pub fn load(directory: &Path, cluster: &ClusterName) -> Result<Self, IdentityError> {
        let (certificate_path, key_path) = (directory.join("ca.pem"), directory.join("ca.key"));
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

    /// Generates a new key, which signs from now on, and keeps trusting the former one.
    ///
    /// # Errors
    /// Errors of [`Self::load`]; also an earlier rotation that was not retired yet.
    pub fn rotate(directory: &Path, cluster: &ClusterName) -> Result<Self, IdentityError> {
        let old = Self::load(directory, cluster)?;
        if old.trust.authorities() > 1 {
            let what = directory.join("ca.pem").display().to_string();
            return Err(malformed(
                &what,
                "it trusts two authorities already: reissue all identities and retire one authority",
            ));
        }
        let new = Self::generate(cluster)?;
        let pem = format!("{}{}", new.trust.pem(), old.trust.pem());
        let certificate_path = directory.join("ca.pem");
        let new = Self { trust: Trust::from_pem(&pem, &certificate_path.display().to_string())?, ..new };
        // In this order, so that a crash in between leaves the old key, which is still trusted.
        write_private(&certificate_path, pem.as_bytes())?;
        new.write_key(directory)?;
        Ok(new)
    }

    /// Ends the trust in all authorities but the signing one.
    ///
    /// # Errors
    /// Errors of [`Self::load`].
    pub fn retire(directory: &Path, cluster: &ClusterName) -> Result<Self, IdentityError> {
        let authority = Self::load(directory, cluster)?;
        let certificate_path = directory.join("ca.pem");
        for pem in authority.trust.pems() {
            let trust = Trust::from_pem(pem, &certificate_path.display().to_string())?;
            let alone = Self { cluster: cluster.clone(), trust, issuer: Self::load(directory, cluster)?.issuer };
            if alone.check(&certificate_path).is_ok() {
                write_private(&certificate_path, alone.trust.pem().as_bytes())?;
                return Ok(alone);
            }
        }
        // Loading has verified that one of them signs.
        Err(malformed(&certificate_path.display().to_string(), "none of its certificates belongs to ca.key"))
    }

    /// Checks that an identity issued by this authority verifies against its own certificates: `ca.pem` may belong to
    /// another cluster, or not to `ca.key`.
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

    /// Returns the reset secret that derives from the authority's key, for a control plane that issues itself an
    /// identity at each start.
    #[must_use]
    pub fn reset_secret(&self) -> ResetSecret {
        ResetSecret::of_key(&self.issuer.key().serialize_der())
    }

    /// Issues an identity with `role` for all nodes and tenants, without an end.
    ///
    /// # Errors
    /// [`IdentityError::Issue`] when the system has no randomness.
    pub fn issue(&self, role: Role) -> Result<Identity, IdentityError> {
        self.grant(&Grant::of(role))
    }

    /// Issues an identity with the contents of `grant`.
    ///
    /// # Errors
    /// When the role does not go with the scope, or the system has no randomness.
    pub fn grant(&self, grant: &Grant) -> Result<Identity, IdentityError> {
        grant.check()?;
        let role = grant.role;
        let key = KeyPair::generate()?;
        let names = vec![self.cluster.dns_name(role), grant.scope.dns_name(role, &self.cluster)];
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, format!("kvplane {role}"));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match role {
            Role::Control => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            Role::Node | Role::Client | Role::Scheduler | Role::Admin => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        if let Some((from, to)) = grant.valid {
            (params.not_before, params.not_after) = (from.into(), to.into());
        }
        let certificate = params.signed_by(&key, &self.issuer)?;
        Identity::from_pem(&certificate.pem(), &key.serialize_pem(), "the new certificate")
    }

    /// Returns the certificates that peers must trust to accept this authority's identities.
    #[must_use]
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Returns the authority's cluster.
    #[must_use]
    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }
}
