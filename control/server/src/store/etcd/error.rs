//! Errors of changing and of reading the state in etcd.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use kvplane_cluster::{RecordError, RecordKey};
use kvplane_etcd::GatewayError;

/// Reason why a change of the state in etcd was not confirmed; the turn is over then.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum EtcdChangeError {
    /// The thread of the etcd client has ended.
    ThreadEnded,
    /// There was no answer in time; the change may be carried out nevertheless.
    Late { waited: Duration },
    /// The turn that the change belongs to has ended.
    TurnOver,
    /// This control plane does not lead at present.
    NotLeading,
    /// The stored leader is another control plane.
    OtherLeader,
    /// etcd did not answer, or refused; the change may be carried out nevertheless.
    Gateway(GatewayError),
}

impl fmt::Display for EtcdChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThreadEnded => f.write_str("the etcd thread has ended"),
            Self::Late { waited } => write!(f, "etcd did not answer within {} ms", waited.as_millis()),
            Self::TurnOver => f.write_str("that turn of leadership is over"),
            Self::NotLeading => f.write_str("another control plane may lead"),
            Self::OtherLeader => f.write_str("another control plane leads"),
            Self::Gateway(error) => error.fmt(f),
        }
    }
}

impl Error for EtcdChangeError {}

/// Reason why the state stored in etcd is unusable.
#[derive(Debug)]
pub(super) enum StoredStateError {
    /// A record is damaged.
    Record { key: String, source: RecordError },
    /// A record is stored under the key of another.
    OtherKey { found: RecordKey },
    /// The length of a batch is not a number of parts.
    Parts { text: String },
    /// The ticket time is not a number of seconds.
    TicketTime { text: String },
    /// The keys have the layout of another version.
    Format {
        found: String,
        /// Format that this program reads.
        supported: &'static str,
    },
    /// The identity of the state is not a number.
    Identity { text: String },
    /// A batch lacks parts.
    MissingParts { parts: usize, found: usize },
    /// A batch cannot be decoded.
    Batch,
}

impl fmt::Display for StoredStateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Record { key, source } => write!(f, "{key}: {source}"),
            Self::OtherKey { found } => write!(f, "a record is stored under the key of another: {found:?}"),
            Self::Parts { text } => write!(f, "{text:?} is not a number of parts"),
            Self::TicketTime { text } => write!(f, "the ticket time {text:?} is not a number of seconds"),
            Self::Format { found, supported } => {
                write!(f, "it has format {found:?}, this program reads {supported}: use the version that wrote it")
            }
            Self::Identity { text } => write!(f, "{text:?} is not the identity of a state"),
            Self::MissingParts { parts, found } => write!(f, "a stored batch of {parts} parts has only {found}"),
            Self::Batch => f.write_str("a stored batch is damaged"),
        }
    }
}

impl Error for StoredStateError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Record { source, .. } => Some(source),
            _ => None,
        }
    }
}
