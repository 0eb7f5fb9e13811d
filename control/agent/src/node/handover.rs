//! Handover: a running node process passes its memory and its listeners to a new process of the same node, its
//! *successor*, over a Unix socket in the runtime directory. The memory is memfds, or files in a directory, whose claim
//! passes, too.
//!
//! ```text
//! successor                                    running process
//!    | hello: shape, image formats that it reads  -->  refused, if the shapes or formats do not match
//!    | <-- offer, and descriptors of each shard's memory, which the successor maps; the running one serves
//!    | hand over                                  -->  waits for migrations; stops its shards: they write images
//!    | <-- the claim of a directory, and the listeners of each shard
//!    | taken                                      -->
//!    | <-- go                                          serves no more, whatever happens now
//!    | serving                                    -->  ends
//! ```
//!
//! Which step follows which, and which process may serve, is decided by [`kvplane_cluster::handover`].
//!
//! Until `go`, the running process serves again if the successor ends, from the images that it wrote; a successor that
//! does not receive `go` ends. So at most one of them serves. From `go` on, a crash of the successor is that of any
//! node: memfds end with it, and the next start is empty; files in a directory are served by the next start on the
//! host, until the successor has marked them as in use.
//!
//! The control plane knows the identity of memory in a directory, and says whether its objects count. Of memfds they
//! count if no other incarnation was a member since the one that handed over ([`Handover::is_void`]).
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
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvplane_cluster::Moves;
use kvplane_engine::{MappedMemory, MappedMemoryError, ShardListeners, image_bytes_most};
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_rpc::RuntimeDirectory;
use kvplane_sys::{MemoryDirectory, MemoryFileError};

use super::{Node, NodeConfig, incarnation};
use crate::error::Error;
use crate::link::ControlLink;

pub use operator::{UpgradeOrder, UpgradeOutcome, UpgradeReport, upgrade};
pub use running::{HandoverRequest, HandoverSocket, Operator, SuccessorLink};
pub use shape::{HandoverRefusal, NodeShape};
pub use successor::Succession;

/// Version of the messages.
const PROTOCOL: u32 = 1;

/// Longest wait for a message that its sender has ready.
const REPLY: Duration = Duration::from_secs(5);
/// Longest time for which a node that still serves writes what its successor needs of the shared tier.
const SETTLE: Duration = Duration::from_secs(5);
/// Longest time that a successor may take to map the memory, and that it waits for migrations of the running process.
const PREPARATION: Duration = Duration::from_secs(600);
/// Longest wait for the control plane's reply before the shards stop.
const CONTROL_REPLY: Duration = Duration::from_secs(2);

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
    /// The running process did not report the outcome of an upgrade in time.
    NoOutcome { after: Duration },
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
    /// A shard has no memory of its own.
    NoMemory { shard: usize },
}

impl fmt::Display for HandoverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRunning { node, path } => write!(
                f,
                "node {node} does not run on this host for this user: {} has no listener; run this on the node's host, \
                 as its user, with its --cluster and --runtime-directory (a node of `kvplane dev` is not upgraded)",
                path.display()
            ),
            Self::Socket { path, source } => write!(f, "{}: {source}", path.display()),
            Self::OtherUser { uid } => write!(f, "the other process belongs to user {uid}: use that of the node"),
            Self::Stream { action, source } => write!(f, "cannot {action}: {source}"),
            Self::Closed => f.write_str("the other process ended, or hung up"),
            Self::Silent => f.write_str("the other process did not answer in time"),
            Self::NoOutcome { after } => write!(
                f,
                "the node did not report the outcome within {} s: it gives the upgrade up when it sees that nobody \
                 waits, unless its memory was being handed over; its log has the outcome",
                after.as_secs()
            ),
            Self::Malformed { what } => write!(f, "the other process sent a malformed message: {what}"),
            Self::Refused { text } => write!(f, "the running process refuses: {text}"),
            Self::Unfit(refusal) => refusal.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::File(error) => error.fmt(f),
            Self::Stopped => f.write_str("the node stopped for a handover, which failed: start it again"),
            Self::NoImage { shard } => {
                write!(f, "shard {shard} has ended without an image of its memory: the log of the node has the reason")
            }
            Self::NoMemory { shard } => write!(f, "shard {shard} has no memory that another process could take over"),
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

/// Memory and descriptors of a node whose shards have ended: a process that has them may serve its memory at its ports.
/// While any process has them, connections wait, and no other process of this host can have the ports or claim the
/// memory.
#[derive(Debug)]
pub struct Handover {
    /// Claim of the directory of the memory; none if the memory is memfds.
    pub(super) claim: Option<Arc<MemoryDirectory>>,
    /// Listeners of each shard.
    pub(super) listeners: Vec<Arc<ShardListeners>>,
    /// Memory of each shard.
    pub(super) memory: Vec<Arc<MappedMemory>>,
    line: Mutex<Line>,
    /// Time at which the shards began to end, of the host's monotonic clock, in nanoseconds.
    stopped_ns: u64,
}

/// Incarnations that had the memory of a handover, one after the other.
#[derive(Debug)]
struct Line {
    /// The one that handed over, and those that this process began since.
    incarnations: Vec<Incarnation>,
    /// True if another one was a member since.
    is_void: bool,
}

impl Line {
    fn of(incarnation: Incarnation) -> Mutex<Self> {
        Mutex::new(Self { incarnations: vec![incarnation], is_void: false })
    }

    /// Adds the incarnation that is to serve the memory next, while `last` was the node's last member. Returns it: it
    /// is `next`, a new one, unless it continues the one that handed over. That is so at the first attempt only,
    /// because an incarnation that may have served is not begun again.
    fn extend(&mut self, next: Incarnation, last: Option<Incarnation>) -> Incarnation {
        self.is_void |= last.is_some_and(|last| !self.incarnations.contains(&last));
        let successor = match &self.incarnations[..] {
            [only] if !self.is_void && last == Some(*only) => only.successor(),
            _ => None,
        };
        let next = successor.unwrap_or(next);
        self.incarnations.push(next);
        next
    }
}

/// Incarnation that serves memory that was handed over.
#[derive(Clone, Copy, Debug)]
pub(super) struct NextIncarnation {
    /// Its number.
    pub(super) number: Incarnation,
    /// True if none of the memory's objects count.
    pub(super) is_void: bool,
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
    /// Stops a node for a successor: waits until no slot migrates from or to it, for at most `most`, while it serves;
    /// then ends its shards, which leave images of their memory. The node stays a member until its
    /// successor joins. An error before that leaves the node as it is; after a later one it has stopped
    /// ([`Node::check`]).
    ///
    /// # Errors
    /// [`HandoverError::Unfit`] if the node cannot hand over now.
    pub fn of(node: &Node, most: Duration) -> Result<Self, Error> {
        check_room(node)?;
        if let Ok(moves) = node.announce_end(CONTROL_REPLY) {
            check_drain(node, moves)?;
        }
        let left = node.finish_moves(most, most)?;
        if left > 0 {
            return Err(HandoverError::Unfit(HandoverRefusal::Moves { slots: left, after: most }).into());
        }
        kvplane_engine::settle_shared_tier(&node.shards, SETTLE);
        // Until its successor has joined, the node does not serve, as it would by its last map: so the control plane
        // has to reply.
        match node.announce_end(CONTROL_REPLY) {
            Ok(moves) => check_drain(node, moves)?,
            Err(error) => {
                return Err(HandoverError::Unfit(HandoverRefusal::ControlAway { why: error.to_string() }).into());
            }
        }
        node.end_membership();
        let stopped_ns = kvplane_engine::cpu::monotonic_ns();
        let shards: Vec<_> = std::thread::scope(|scope| {
            let ends: Vec<_> = node.shards.iter().map(|shard| scope.spawn(|| shard.hand_over())).collect();
            ends.into_iter().map(|end| end.join().map_err(|_| HandoverError::Closed)).collect()
        });
        let (mut listeners, mut memory) = (Vec::with_capacity(shards.len()), Vec::with_capacity(shards.len()));
        for (shard, handed) in shards.into_iter().enumerate() {
            let handed = handed??.ok_or(HandoverError::NoMemory { shard })?;
            if handed.objects.is_none() {
                tracing::error!("{}", HandoverError::NoImage { shard });
            }
            listeners.push(Arc::new(handed.listeners));
            memory.push(handed.memory);
        }
        Ok(Self { claim: node.claim.clone(), listeners, memory, line: Line::of(node.incarnation()), stopped_ns })
    }

    /// Returns the incarnation that served the memory last, or was to.
    fn incarnation(&self) -> Option<Incarnation> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner).incarnations.last().copied()
    }

    /// Returns true if the memory outlives the processes that have it.
    #[must_use]
    pub const fn is_kept(&self) -> bool {
        self.claim.is_some()
    }

    /// Returns true if none of the memory's objects count, because an incarnation without it was a member of the
    /// cluster since it was served: a process on another host, while the successor could not join.
    fn is_void(&self) -> bool {
        self.line.lock().unwrap_or_else(PoisonError::into_inner).is_void
    }

    /// Adds the incarnation that is to serve the memory next: one that continues the process that handed over, or
    /// `next`.
    ///
    /// # Errors
    /// When the control plane does not answer.
    pub(super) fn pass_to(
        &self,
        link: &ControlLink,
        node: NodeId,
        next: Incarnation,
    ) -> Result<NextIncarnation, Error> {
        // Processes of a version that hands directories over only do not name theirs.
        if self.is_kept() && self.incarnation().is_some_and(|former| former.0 == 0) {
            return Ok(NextIncarnation { number: next, is_void: false });
        }
        let last = incarnation::last_member(link, node)?;
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let number = line.extend(next, last);
        let is_void = line.is_void;
        drop(line);
        if is_void {
            tracing::warn!("memory is empty, nothing of it was kept: another process served node {node} meanwhile");
        }
        Ok(NextIncarnation { number, is_void })
    }

    /// Starts a node again whose successor ended: the process that stopped it serves again.
    ///
    /// # Errors
    /// See [`Node::start`]. The handover can be used again.
    pub fn resume(&self, config: &NodeConfig) -> Result<Node, Error> {
        super::NodePlan::of(config)?.start(config, Some(self))
    }
}

/// Returns the room that the images of this number of objects need beside the pool. Objects are put meanwhile, and
/// lengths are whole pages.
pub(super) const fn image_room_bytes(objects: u64) -> u64 {
    image_bytes_most(objects).saturating_add(objects.saturating_mul(8)).saturating_add(1 << 20)
}

/// Checks that a drain of the node, if there is one, goes on with the successor: one of a node with SSDs begins a new
/// line of incarnations.
fn check_drain(node: &Node, moves: Moves) -> Result<(), Error> {
    if moves.draining && !node.shape.ssds.is_empty() {
        return Err(HandoverError::Unfit(HandoverRefusal::Draining { node: node.node }).into());
    }
    Ok(())
}

/// Checks that the images fit beside the pool.
fn check_room(node: &Node) -> Result<(), Error> {
    let objects = node.snapshots()?.iter().filter_map(|shard| Some(shard.store.as_ref()?.objects)).sum::<u64>();
    let needed = image_room_bytes(objects);
    let free = match &node.claim {
        Some(claim) => claim.free_bytes().map_err(HandoverError::File)?,
        None => kvplane_sys::host_available_bytes(),
    };
    match free {
        Some(free) if free < needed => Err(HandoverError::Unfit(HandoverRefusal::Room { free, needed }).into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_unless_another_incarnation_was_a_member_since() {
        let [running, first, second, other, third] =
            [10, 20, 30, 25, 40].map(|number| Incarnation::line_from(number << 20));
        let line = || Line::of(running).into_inner().expect("a line");
        let mut at = line();
        let mut extend = |next, last| {
            let next = at.extend(next, last);
            (next, at.is_void)
        };
        let continued = running.successor().expect("its line goes on");
        assert_eq!(extend(first, Some(running)), (continued, false), "the running process was the last member");
        assert_eq!(extend(second, Some(continued)), (second, false), "the first attempt of the successor had joined");
        let mut at = line();
        assert_eq!(at.extend(first, None), first, "the control plane knows no member of the node");
        assert_eq!(at.extend(second, Some(running)), second, "the first attempt was refused");
        assert!(!at.is_void);
        let mut at = line();
        assert_eq!(at.extend(first, Some(running)), continued);
        assert_eq!(at.extend(second, Some(other)), second, "another process had joined");
        assert!(at.is_void);
        assert_eq!((at.extend(third, Some(second)), at.is_void), (third, true), "it stays so");
    }
}
