//! Handover: a running node process passes its kept memory, its listeners and the claim of its memory's directory to a
//! new process of the same node, its *successor*, over a Unix socket in the runtime directory.
//!
//! ```text
//! successor                                    running process
//!    | hello: shape, image formats that it reads  -->  refused, if the shapes or formats do not match
//!    | <-- offer, and descriptors of each shard's memory, which the successor maps; the running one serves
//!    | hand over                                  -->  waits for migrations; stops its shards: they write images
//!    | <-- the claim, and the listeners of each shard
//!    | taken                                      -->
//!    | <-- go                                          serves no more, whatever happens now
//!    | serving                                    -->  ends
//! ```
//!
//! Which step follows which, and which process may serve, is decided by [`kvplane_cluster::handover`].
//!
//! Until `go`, the running process serves again if the successor ends, from the images that it wrote; a successor that
//! does not receive `go` ends. So at most one of them serves. From `go` on, a crash of the successor is that of a node
//! whose memory is kept: until it has marked the memory as in use, the next start on the host serves the images.
//!
//! Connections wait in the listeners meanwhile, which are never closed.
//!
//! Only processes of the same user are answered. Messages are JSON, so that versions may add members to them; the
//! descriptors travel with the first byte of a message.

mod message;
mod operator;
mod running;
mod shape;
mod successor;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvplane_engine::{MappedMemory, MappedMemoryError, ShardListeners, image_bytes_most};
use kvplane_proto::ids::NodeId;
use kvplane_rpc::RuntimeDirectory;
use kvplane_sys::{MemoryDirectory, MemoryFileError};

use super::{Node, NodeConfig};
use crate::error::Error;

pub use operator::{UpgradeReport, upgrade};
pub use running::{HandoverRequest, HandoverSocket, Operator, SuccessorLink};
pub use shape::{HandoverRefusal, NodeShape};
pub use successor::Succession;

/// Version of the messages.
const PROTOCOL: u32 = 1;

/// Longest wait for a message that its sender has ready.
const REPLY: Duration = Duration::from_secs(5);
/// Longest time that a successor may take to map the memory, and that it waits for migrations of the running process.
const PREPARATION: Duration = Duration::from_secs(600);

/// Reason why a handover did not take place.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum HandoverError {
    /// No process of the node runs on this host, for this user.
    NotRunning { node: NodeId, path: PathBuf },
    /// The socket of the node cannot be used.
    Socket { path: PathBuf, source: io::Error },
    /// The other process belongs to another user.
    OtherUser { uid: u32 },
    /// A message could not be sent or received.
    Stream { action: &'static str, source: io::Error },
    /// The other process ended, or hung up.
    Closed,
    /// The other process did not answer in time.
    Silent,
    /// A message is not what it is to be.
    Malformed { what: &'static str },
    /// The running process refused.
    Refused { text: String },
    /// The running process does not fit.
    Unfit(HandoverRefusal),
    /// The memory of the running process cannot be mapped.
    Memory(MappedMemoryError),
    /// The directory of kept memory cannot be used.
    File(MemoryFileError),
    /// The node stopped for a handover that failed.
    Stopped,
    /// A shard left no image.
    NoImage { shard: usize },
}

impl fmt::Display for HandoverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRunning { node, path } => write!(
                f,
                "node {node} does not run on this host for this user: {} has no listener; run this on the node's host, \
                 as its user, with its --cluster and --runtime-directory",
                path.display()
            ),
            Self::Socket { path, source } => write!(f, "{}: {source}", path.display()),
            Self::OtherUser { uid } => write!(f, "the other process belongs to user {uid}: use that of the node"),
            Self::Stream { action, source } => write!(f, "cannot {action}: {source}"),
            Self::Closed => f.write_str("the other process ended, or hung up"),
            Self::Silent => f.write_str("the other process did not answer in time"),
            Self::Malformed { what } => write!(f, "the other process sent a malformed message: {what}"),
            Self::Refused { text } => write!(f, "the running process refuses: {text}"),
            Self::Unfit(refusal) => refusal.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::File(error) => error.fmt(f),
            Self::Stopped => f.write_str("the node stopped for a handover, which failed: start it again"),
            Self::NoImage { shard } => {
                write!(f, "shard {shard} has ended without an image of its memory: the log of the node has the reason")
            }
        }
    }
}

impl std::error::Error for HandoverError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Socket { source, .. } | Self::Stream { source, .. } => Some(source),
            Self::Memory(error) => Some(error),
            Self::File(error) => Some(error),
            _ => None,
        }
    }
}

impl From<MemoryFileError> for HandoverError {
    fn from(error: MemoryFileError) -> Self {
        Self::File(error)
    }
}

impl From<MappedMemoryError> for HandoverError {
    fn from(error: MappedMemoryError) -> Self {
        Self::Memory(error)
    }
}

/// Descriptors of a node whose shards have ended: a process that has them may serve its memory at its ports. While any
/// process has them, connections wait, and no other process can claim the memory.
#[derive(Debug)]
pub struct Handover {
    pub(super) claim: Arc<MemoryDirectory>,
    /// Listeners of each shard.
    pub(super) listeners: Vec<Arc<ShardListeners>>,
    /// Memory of each shard that is mapped already; empty if none is.
    pub(super) mapped: Vec<Arc<MappedMemory>>,
    /// Time at which the shards began to end, of the host's monotonic clock, in nanoseconds.
    stopped_ns: u64,
}

/// Returns the path of a running node's socket for operators and successors.
fn socket_path(directory: &Path, cluster: &str, node: NodeId) -> PathBuf {
    directory.join(format!("{cluster}.{node}.handover"))
}

/// Returns the directory of sockets, which is not created.
fn sockets_of(runtime_directory: Option<&Path>) -> Result<PathBuf, Error> {
    Ok(match runtime_directory {
        Some(path) => path.to_owned(),
        None => RuntimeDirectory::of_user()?.path().to_owned(),
    })
}

impl Handover {
    /// Stops a node for a successor: waits until no slot migrates from or to it, for `patience` without progress and at
    /// most `most`; then ends its shards, which leave images of their memory. The node stays a member until its
    /// successor joins. An error before that leaves the node as it is; after a later one it has stopped
    /// ([`Node::check`]).
    ///
    /// # Errors
    /// [`HandoverError::Unfit`] if the node cannot hand over now.
    pub fn of(node: &Node, patience: Duration, most: Duration) -> Result<Self, Error> {
        let Some(claim) = &node.claim else { return Err(HandoverError::Unfit(HandoverRefusal::NotKept).into()) };
        check_room(node, claim)?;
        let left = node.finish_moves(patience, most)?;
        if left > 0 {
            return Err(HandoverError::Unfit(HandoverRefusal::Moves { slots: left }).into());
        }
        node.end_membership();
        let stopped_ns = kvplane_engine::cpu::monotonic_ns();
        let shards: Vec<_> = std::thread::scope(|scope| {
            let ends: Vec<_> = node.shards.iter().map(|shard| scope.spawn(|| shard.hand_over())).collect();
            ends.into_iter().map(|end| end.join().map_err(|_| HandoverError::Closed)).collect()
        });
        let mut listeners = Vec::with_capacity(shards.len());
        for (shard, handed) in shards.into_iter().enumerate() {
            let handed = handed??.ok_or(HandoverError::Unfit(HandoverRefusal::NotKept))?;
            if handed.objects.is_none() {
                tracing::error!("{}", HandoverError::NoImage { shard });
            }
            listeners.push(Arc::new(handed.listeners));
        }
        Ok(Self { claim: Arc::clone(claim), listeners, mapped: Vec::new(), stopped_ns })
    }

    /// Starts a node again whose successor ended: the process that stopped it serves again.
    ///
    /// # Errors
    /// See [`Node::start`]. The handover can be used again.
    pub fn resume(&self, config: &NodeConfig) -> Result<Node, Error> {
        super::NodePlan::of(config)?.start(config, Some(self))
    }
}

/// Checks that the images fit beside the pool.
fn check_room(node: &Node, claim: &MemoryDirectory) -> Result<(), Error> {
    let objects = node.snapshots()?.iter().filter_map(|shard| Some(shard.store.as_ref()?.objects)).sum::<u64>();
    // Objects are put meanwhile, and lengths are whole pages.
    let needed = image_bytes_most(objects).saturating_add(objects.saturating_mul(8)).saturating_add(1 << 20);
    match claim.free_bytes().map_err(HandoverError::File)? {
        Some(free) if free < needed => Err(HandoverError::Unfit(HandoverRefusal::Room { free, needed }).into()),
        _ => Ok(()),
    }
}
