//! Roles, cluster names and scopes, and their encoding in certificates.
//!
//! A certificate names its role and its cluster in one DNS name, `ROLE.CLUSTER.kvplane`. A second DNS name is the
//! scope, the node or tenant that its holder may act for: `7.node.CLUSTER.kvplane` for node 7,
//! `acme.client.CLUSTER.kvplane` for the tenant acme, `*.ROLE.CLUSTER.kvplane` for all. A server checks whether a
//! certificate is valid for the name that it requires, so this crate needs no certificate parser.

use std::fmt;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use crate::identity::IdentityError;

/// Longest cluster name: with a role and the suffix it stays below the limits of a DNS label and a file name.
pub(crate) const CLUSTER_NAME_BYTES: usize = 40;

/// Role of a certificate's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The control plane itself.
    Control,
    /// Joins, sends heartbeats, owns slots.
    Node,
    /// Reads the map, registers memory.
    Client,
    /// Reads the map, the load and the events of objects; requests placements from the Conductor.
    Scheduler,
    /// Reads the status, removes members.
    Admin,
}

impl Role {
    /// All roles, in declaration order.
    pub const ALL: [Self; 5] = [Self::Control, Self::Node, Self::Client, Self::Scheduler, Self::Admin];

    /// Returns the role's name in certificates and file names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Node => "node",
            Self::Client => "client",
            Self::Scheduler => "scheduler",
            Self::Admin => "admin",
        }
    }

    /// Returns the role with this name.
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

/// The name of a cluster: 1 to 40 of `a-z`, `0-9` and `-`, without `-` at either end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterName(String);

impl ClusterName {
    /// Checks `name` and wraps it.
    ///
    /// # Errors
    /// [`IdentityError::ClusterName`] when `name` is not of that form.
    pub fn new(name: &str) -> Result<Self, IdentityError> {
        let letters = name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'));
        let length = (1..=CLUSTER_NAME_BYTES).contains(&name.len());
        if !letters || !length || name.starts_with('-') || name.ends_with('-') {
            return Err(IdentityError::ClusterName(name.chars().take(64).collect()));
        }
        Ok(Self(name.to_owned()))
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the DNS name in the certificate of `role`.
    pub(crate) fn dns_name(&self, role: Role) -> String {
        format!("{role}.{}.kvplane", self.0)
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Node or tenant that a certificate's holder may act for, beside its role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Every node and every tenant.
    #[default]
    Any,
    /// One node.
    Node(u64),
    /// One tenant, whose name has the form of a cluster name. The default tenant has the empty name in calls, and
    /// `default` in certificates.
    Tenant(String),
}

impl Scope {
    /// Returns the scope of a tenant.
    ///
    /// # Errors
    /// [`IdentityError::TenantName`] when `name` has not the form of a cluster name.
    pub fn tenant(name: &str) -> Result<Self, IdentityError> {
        match ClusterName::new(name) {
            Ok(_) => Ok(Self::Tenant(name.to_owned())),
            Err(_) => Err(IdentityError::TenantName(name.chars().take(64).collect())),
        }
    }

    /// Returns the scope's DNS name in a certificate of `role`.
    pub(crate) fn dns_name(&self, role: Role, cluster: &ClusterName) -> String {
        let whom = cluster.dns_name(role);
        match self {
            Self::Any => format!("*.{whom}"),
            Self::Node(node) => format!("{node}.{whom}"),
            Self::Tenant(tenant) => format!("{tenant}.{whom}"),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("every node and tenant"),
            Self::Node(node) => write!(f, "node {node}"),
            Self::Tenant(tenant) if tenant.is_empty() => f.write_str("the default tenant"),
            Self::Tenant(tenant) => write!(f, "tenant {tenant:?}"),
        }
    }
}

fn is_valid_for(certificate: &CertificateDer<'_>, name: String) -> bool {
    ParsedCertificate::try_from(certificate)
        .is_ok_and(|parsed| ServerName::try_from(name).is_ok_and(|name| verify_server_name(&parsed, &name).is_ok()))
}

/// Returns the role that a verified certificate proves in `cluster`; none for a certificate of another cluster, and for
/// one with two roles.
pub(crate) fn role_of(certificate: &CertificateDer<'_>, cluster: &ClusterName) -> Option<Role> {
    let mut roles = Role::ALL.into_iter().filter(|role| is_valid_for(certificate, cluster.dns_name(*role)));
    roles.next().filter(|_| roles.next().is_none())
}

/// Returns the only tenant that a certificate admits as a client, as the certificate spells it: its client names of
/// this cluster have one tenant. None if the certificate is valid for all tenants, or for none.
///
/// The certificate is not parsed: the bytes before the cluster's name are a guess, and the certificate's validity for
/// that name is the proof. A name's length precedes it in one byte, which may look like a letter, so each guess is also
/// tried without its first letter.
pub(crate) fn tenant_of(certificate: &CertificateDer<'_>, cluster: &ClusterName) -> Option<String> {
    if may_speak_for(certificate, cluster, Role::Client, &Scope::Any) {
        return None;
    }
    let suffix = format!(".{}", cluster.dns_name(Role::Client));
    let ends = certificate.windows(suffix.len()).enumerate().filter(|(_, part)| *part == suffix.as_bytes());
    let mut found = ends.filter_map(|(end, _)| {
        let of_name = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        let begin = end - certificate[..end].iter().rev().take_while(|byte| of_name(byte)).count();
        let guess = std::str::from_utf8(&certificate[begin..end]).ok()?;
        let guesses = [guess, guess.get(1..).unwrap_or_default()];
        let proven = |name: &&str| is_valid_for(certificate, format!("{name}{suffix}"));
        guesses.into_iter().filter(|name| !name.is_empty()).find(proven).map(str::to_owned)
    });
    found.next().filter(|tenant| found.all(|other| other == *tenant))
}

/// Returns true if a verified certificate lets its holder act for `scope` in `role`. The default tenant, which has the
/// empty name in calls, is `default` in certificates; a tenant whose name no certificate can carry needs a certificate
/// for all.
pub(crate) fn may_speak_for(
    certificate: &CertificateDer<'_>,
    cluster: &ClusterName,
    role: Role,
    scope: &Scope,
) -> bool {
    let default = Scope::Tenant("default".to_owned());
    let scope = match scope {
        Scope::Tenant(name) if name.is_empty() => &default,
        Scope::Tenant(name) if Scope::tenant(name).is_err() => &Scope::Any,
        scope => scope,
    };
    let name = match scope {
        // No tenant's name is this long, so only a certificate for all tenants is valid for it.
        Scope::Any => format!("{}.{}", "a".repeat(CLUSTER_NAME_BYTES + 1), cluster.dns_name(role)),
        scope => scope.dns_name(role, cluster),
    };
    is_valid_for(certificate, name)
}
