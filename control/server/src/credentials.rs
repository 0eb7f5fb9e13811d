//! The control plane's certificates: where they come from, and that they may be replaced while it runs.
//!
//! With the authority's key at hand, the control plane issues its own identity, and those of processes of the same
//! user. Where an operator keeps that key elsewhere, there is a directory with what was issued, and nothing is issued
//! here.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvplane_rpc::{Authority, ClusterName, Identity, IdentityError, ResetSecret, Role, Trust};

/// How often files are looked at.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Roles that processes of the same user may take.
const LOCAL: [Role; 4] = [Role::Node, Role::Client, Role::Scheduler, Role::Admin];

/// Where certificates come from.
pub(crate) enum Source {
    /// A key that is as old as the process.
    Process(Box<Authority>),
    /// The directory of an authority with its key.
    Authority(PathBuf),
    /// A directory with the control plane's identity.
    Issued(PathBuf),
}

/// What a control plane shows, whom it trusts, and what it leaves to others.
pub(crate) struct Credentials {
    pub(crate) identity: Identity,
    pub(crate) trust: Trust,
    pub(crate) local: Vec<(Role, Identity)>,
    pub(crate) reset_secret: ResetSecret,
}

impl Credentials {
    fn of(authority: &Authority) -> Result<Self, IdentityError> {
        let local: Result<_, IdentityError> =
            LOCAL.into_iter().map(|role| Ok((role, authority.issue(role)?))).collect();
        Ok(Self {
            identity: authority.issue(Role::Control)?,
            trust: authority.trust().clone(),
            local: local?,
            reset_secret: authority.reset_secret(),
        })
    }
}

impl Source {
    /// What there is now.
    pub(crate) fn read(&self, cluster: &ClusterName) -> Result<Credentials, IdentityError> {
        match self {
            Self::Process(authority) => Credentials::of(authority),
            Self::Authority(directory) => Credentials::of(&Authority::load_or_generate(directory, cluster)?),
            Self::Issued(directory) => {
                let identity = Identity::read(directory, Role::Control.name())?;
                let reset_secret = identity.reset_secret();
                Ok(Credentials {
                    identity,
                    trust: Trust::read(&directory.join("ca.pem"))?,
                    local: Vec::new(),
                    reset_secret,
                })
            }
        }
    }

    /// What tells one state of the files from another.
    pub(crate) fn mark(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        let read = |directory: &Path, name: &str| std::fs::read(directory.join(name)).ok();
        match self {
            Self::Process(_) => None,
            Self::Authority(directory) => Some((read(directory, "ca.pem")?, Vec::new())),
            Self::Issued(directory) => Some((read(directory, "ca.pem")?, read(directory, "control.pem")?)),
        }
    }
}
