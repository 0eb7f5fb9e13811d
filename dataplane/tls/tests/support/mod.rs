//! Certificates for tests: valid ones of a cluster, and invalid ones.

use kvplane_tls::{DataTls, Keychain, Material};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};

/// An authority that signs any certificate.
pub(crate) struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Creates an authority with a new key, always under the same name.
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "test authority");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// Issues an identity of this role in this cluster, valid from the year `years.0` to the year `years.1`.
    pub(crate) fn issue_for(&self, cluster: &str, role: &str, years: (i32, i32)) -> Material {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec![format!("{role}.{cluster}.kvplane")]).expect("a name");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = (date_time_ymd(years.0, 1, 1), date_time_ymd(years.1, 1, 1));
        let certificate_pem = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        let (key_pem, trust_pem) = (key.serialize_pem(), self.pem.clone());
        Material { cluster: cluster.to_owned(), certificate_pem, key_pem, trust_pem }
    }

    /// Issues a valid identity.
    pub(crate) fn issue(&self, role: &str) -> Material {
        self.issue_for("prod", role, (2020, 4000))
    }
}

/// Returns a keychain with this identity, for connections to nodes.
pub(crate) fn keychain(mode: DataTls, material: Material) -> Keychain {
    let keychain = Keychain::new(mode, "node");
    keychain.set(material).expect("an identity that can be used");
    keychain
}
