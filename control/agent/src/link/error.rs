//! Errors of the control link itself; those of calls are errors of the control plane.

use std::fmt;
use std::time::Duration;

use kvplane_rpc::Role;

/// Reason why a control link is not established, or accepts no call.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ControlLinkError {
    /// No control plane is named, or too many are.
    Addresses {
        /// Number of addresses that are named.
        addresses: usize,
        /// Greatest number of control planes of a cluster.
        most: usize,
    },
    /// The control plane on this host has published no identity of the needed role.
    NoIdentity {
        /// Name of the cluster.
        cluster: String,
        /// Role that is needed.
        role: Role,
    },
    /// The attempts to contact the control planes have ended without an answer or an error of any of them.
    NoContact,
    /// The control plane has welcomed this process and sent no cluster map.
    NoFirstMap {
        /// Time that the link waited for the map.
        after: Duration,
    },
    /// The link accepts no further call: too many wait, or its thread has ended.
    Calls {
        /// Limit of calls that wait.
        limit: usize,
    },
}

impl fmt::Display for ControlLinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Addresses { addresses, most } => {
                write!(f, "a cluster has 1 to {most} control planes, not {addresses}")
            }
            Self::NoIdentity { cluster, role } => write!(
                f,
                "the control plane of {cluster:?} left no identity of role {role}: name the control plane and the \
                 identity (--control and --identity)"
            ),
            Self::NoContact => f.write_str("no control plane could be contacted"),
            Self::NoFirstMap { after } => write!(f, "received no cluster map within {} s", after.as_secs()),
            Self::Calls { limit } => {
                write!(f, "{limit} calls wait for the control plane already, or its thread has ended")
            }
        }
    }
}

impl std::error::Error for ControlLinkError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_what_is_missing() {
        let says = |error: ControlLinkError, text: &str| assert_eq!(error.to_string(), text);
        says(ControlLinkError::Addresses { addresses: 9, most: 8 }, "a cluster has 1 to 8 control planes, not 9");
        let map = ControlLinkError::NoFirstMap { after: Duration::from_secs(5) };
        says(map, "received no cluster map within 5 s");
        let identity = ControlLinkError::NoIdentity { cluster: "dev".to_owned(), role: Role::Node };
        says(
            identity,
            "the control plane of \"dev\" left no identity of role node: name the control plane and the identity \
             (--control and --identity)",
        );
    }
}
