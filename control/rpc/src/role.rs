//! Roles, cluster names, and how a certificate carries both.
//!
//! A certificate names its role and its cluster in one DNS name, `ROLE.CLUSTER.kvplane`. A server learns a caller's
//! role by asking which of the four names the caller's certificate is valid for, so that no certificate parser of
//! ours is needed.

use std::fmt;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use crate::identity::IdentityError;

/// Longest cluster name: with a role and our suffix it stays below a DNS label's and a file name's limits.
pub(crate) const CLUSTER_NAME_BYTES: usize = 40;

/// What the holder of a certificate may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The control plane itself.
    Control,
    /// Joins, sends heartbeats, owns slots.
    Node,
    /// Reads the map, registers memory.
    Client,
    /// Reads the status, removes members.
    Admin,
}

impl Role {
    /// All roles, in declaration order.
    pub const ALL: [Self; 4] = [Self::Control, Self::Node, Self::Client, Self::Admin];

    /// The word in certificates and file names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Node => "node",
            Self::Client => "client",
            Self::Admin => "admin",
        }
    }

    /// The role with that word.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name of a cluster: 1 to 40 of `a-z`, `0-9` and `-`, not at either end a `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterName(String);

impl ClusterName {
    /// Checks `name`.
    ///
    /// # Errors
    /// [`IdentityError::ClusterName`] when a DNS label may not look like that.
    pub fn new(name: &str) -> Result<Self, IdentityError> {
        let letters = name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'));
        let length = (1..=CLUSTER_NAME_BYTES).contains(&name.len());
        if !letters || !length || name.starts_with('-') || name.ends_with('-') {
            return Err(IdentityError::ClusterName(name.chars().take(64).collect()));
        }
        Ok(Self(name.to_owned()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The DNS name in the certificate of `role`.
    pub(crate) fn dns_name(&self, role: Role) -> String {
        format!("{role}.{}.kvplane", self.0)
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The role that a verified certificate proves in `cluster`; none for another cluster's.
pub(crate) fn role_of(certificate: &CertificateDer<'_>, cluster: &ClusterName) -> Option<Role> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    Role::ALL.into_iter().find(|role| {
        ServerName::try_from(cluster.dns_name(*role)).is_ok_and(|name| verify_server_name(&parsed, &name).is_ok())
    })
}
