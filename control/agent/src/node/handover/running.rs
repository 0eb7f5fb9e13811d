//! Side of the running process: the socket for requests of operators and of a successor, and the link to the successor
//! that takes over.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvplane_cluster::handover::{RunningEnd, RunningInput, RunningStep};
use kvplane_engine::MappedMemory;
use kvplane_sys::unix;
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::message::{check_user, expect, receive, send, text};
use super::{
    Handover, HandoverError, HandoverRefusal, NodeShape, PREPARATION, REPLY, UpgradeReport, socket_path, sockets_of,
};
use crate::error::Error;
use crate::link::software;
use crate::node::{Node, NodeConfig};

/// Limit of connections at once.
const CONNECTIONS: usize = 8;
/// Limit of requests that wait for the process.
const REQUESTS: usize = 8;

/// Request that a running node received.
#[derive(Debug)]
pub enum HandoverRequest {
    /// An operator wants the node to start this program as its successor, or the same one again.
    Upgrade {
        /// Program; `None` for the one that this process was started as.
        program: Option<PathBuf>,
        /// Time for a drain of the node where its memory cannot be handed over; `None` for no drain.
        or_drain: Option<Duration>,
        /// Operator, who waits for the outcome.
        operator: Operator,
    },
    /// A successor was refused.
    Refused {
        /// Reason, with what to do.
        why: String,
        /// True if another attempt is refused, too ([`HandoverRefusal::is_lasting`]).
        is_lasting: bool,
        /// Process of that successor.
        pid: u32,
    },
    /// A successor is ready to take over.
    Take(SuccessorLink),
}

/// Operator who waits for the outcome of an upgrade.
#[derive(Debug)]
pub struct Operator(UnixStream);

impl Operator {
    /// Returns true if the operator does not wait any more: it has ended, or its time is over.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        // An operator says nothing after its request, so whatever there is to read is the end.
        let found = self.0.set_nonblocking(true).and_then(|()| (&self.0).read(&mut [0]));
        let is_waiting = found.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        !(is_waiting && self.0.set_nonblocking(false).is_ok())
    }

    /// Tells the operator why there was no upgrade.
    pub fn refuse(&self, why: &str) {
        // The operator may have gone.
        let _ = send(&self.0, &json!({ "refused": why }), &[], REPLY);
    }

    /// Tells the operator that the node was drained instead, and why; its process ends.
    pub fn drained(&self, why: &str) {
        let _ = send(&self.0, &json!({ "kind": "drained", "why": why }), &[], REPLY);
    }

    /// Tells the operator about the upgrade.
    pub fn report(&self, report: &UpgradeReport) {
        let _ = send(&self.0, &report.message(), &[], REPLY);
    }
}

/// Link to a successor that is ready to take over.
#[derive(Debug)]
pub struct SuccessorLink {
    stream: UnixStream,
    software: String,
    end: RunningEnd,
    /// Cleared when the successor is gone.
    claimed: SuccessorClaim,
}

/// Mark that a successor prepares to take over; there is one at a time.
#[derive(Debug)]
struct SuccessorClaim(Arc<AtomicBool>);

impl Drop for SuccessorClaim {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl SuccessorLink {
    /// Refuses to hand over.
    pub fn refuse(mut self, why: &str) {
        self.end.handle(RunningInput::CannotStop);
        let _ = send(&self.stream, &json!({ "refused": why }), &[], REPLY);
        drop(self.claimed);
    }

    /// Gives the handover to the successor. Once this has succeeded, the successor serves, and this process must not:
    /// neither the memory nor the ports are its own.
    ///
    /// # Errors
    /// When the successor is gone, or does not answer: then it does not serve.
    pub fn give(&mut self, handover: &Handover) -> Result<(), HandoverError> {
        let mut input = RunningInput::Stopped;
        loop {
            let done = match (self.end.handle(input), input) {
                (RunningStep::Pass, _) => self.pass(handover).map(|()| RunningInput::Passed),
                (RunningStep::Wait, RunningInput::Passed) => {
                    let taken = receive(&self.stream, 0, REPLY).and_then(|(message, _)| expect(&message, "taken"));
                    taken.map(|()| RunningInput::Taken)
                }
                (RunningStep::Go, _) => {
                    send(&self.stream, &json!({ "kind": "go" }), &[], REPLY).map(|()| RunningInput::Went)
                }
                (RunningStep::Wait, RunningInput::Went) => return Ok(()),
                (..) => Err(HandoverError::Closed),
            };
            input = match done {
                Ok(next) => next,
                Err(error) => {
                    self.end.handle(RunningInput::Lost);
                    return Err(error);
                }
            };
        }
    }

    /// Sends the claim of the memory's directory, if it has one, and the listeners of each shard.
    fn pass(&self, handover: &Handover) -> Result<(), HandoverError> {
        let stream = &self.stream;
        let shards = handover.listeners.len();
        let incarnation = handover.incarnation().map_or(0, |incarnation| incarnation.0);
        let stopped_ns = handover.stopped_ns;
        let claim = json!({ "kind": "claim", "shards": shards, "stopped_ns": stopped_ns, "incarnation": incarnation });
        let lock: Vec<_> = handover.claim.iter().map(|claim| claim.lock()).collect();
        send(stream, &claim, &lock, REPLY)?;
        for (shard, listeners) in handover.listeners.iter().enumerate() {
            let fds: Vec<_> =
                [Some(listeners.tcp.as_fd()), listeners.shm.as_ref().map(AsFd::as_fd)].into_iter().flatten().collect();
            send(stream, &json!({ "kind": "listeners", "shard": shard }), &fds, REPLY)?;
        }
        Ok(())
    }

    /// Waits until the successor serves.
    ///
    /// # Errors
    /// When it ended instead, or takes longer.
    pub fn wait_until_serving(&self, within: Duration) -> Result<UpgradeReport, HandoverError> {
        let (message, _) = receive(&self.stream, 0, within)?;
        UpgradeReport::of(&message, software().to_owned(), self.software.clone())
    }

    /// Stops the process that has taken over, as a signal stops this one.
    ///
    /// # Errors
    /// When it has ended.
    pub fn stop(&self) -> io::Result<()> {
        unix::peer_credentials(&self.stream)?.terminate()
    }
}

/// Offer of a running node to a successor.
struct Offer {
    shape: NodeShape,
    ports: Vec<SocketAddr>,
    /// Memory of each shard.
    memory: Vec<Arc<MappedMemory>>,
    /// True while a successor prepares.
    claimed: Arc<AtomicBool>,
}

/// Socket for requests to upgrade a running node, or to hand it over. Dropping it removes the socket.
#[derive(Debug)]
pub struct HandoverSocket {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HandoverSocket {
    /// Listens for this node. Requests arrive at the receiver.
    ///
    /// # Errors
    /// When another process listens there, or the directory is unusable.
    pub fn listen(config: &NodeConfig, node: &Node) -> Result<(Self, Receiver<HandoverRequest>), Error> {
        let directory = sockets_of(config.runtime_directory.as_deref())?;
        let path = socket_path(&directory, config.control.cluster(), node.id());
        let listener = listen(&path).map_err(|source| HandoverError::Socket { path: path.clone(), source })?;
        let memory = node.shards.iter().filter_map(|shard| shard.memory().cloned()).collect();
        let claimed = Arc::new(AtomicBool::new(false));
        let offer = Arc::new(Offer { shape: node.shape.clone(), ports: node.addresses(), memory, claimed });
        let (sender, requests) = channel(REQUESTS);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("kvplane-handover".to_owned())
            .spawn(move || accept(&listener, &offer, &sender, &stopped))?;
        Ok((Self { path, stop, thread: Some(thread) }, requests))
    }
}

impl Drop for HandoverSocket {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A connection wakes the thread. If there can be none, the thread is not waited for.
        if UnixStream::connect(&self.path).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Listens at a path; replaces the socket of a dead process, but not that of a living one.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if unix::is_abandoned(path) {
        std::fs::remove_file(path)?;
    }
    UnixListener::bind(path)
}

fn accept(listener: &UnixListener, offer: &Arc<Offer>, sender: &Sender<HandoverRequest>, stop: &AtomicBool) {
    let open = Arc::new(AtomicUsize::new(0));
    while let Ok((stream, _)) = listener.accept() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        if open.load(Ordering::Relaxed) >= CONNECTIONS {
            let _ = send(&stream, &json!({ "refused": "too many connections: retry" }), &[], REPLY);
            continue;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let (offer, sender, counted) = (Arc::clone(offer), sender.clone(), Arc::clone(&open));
        let served = std::thread::Builder::new().name("kvplane-handover".to_owned()).spawn(move || {
            if let Err(error) = serve(stream, &offer, &sender) {
                tracing::warn!("a request for an upgrade was given up: {error}");
            }
            counted.fetch_sub(1, Ordering::Relaxed);
        });
        if served.is_err() {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Answers one connection up to the point at which the node itself has to act.
fn serve(stream: UnixStream, offer: &Offer, sender: &Sender<HandoverRequest>) -> Result<(), HandoverError> {
    check_user(&stream)?;
    let pid = unix::peer_credentials(&stream).map_or(0, |peer| peer.pid.unsigned_abs());
    let (message, _) = receive(&stream, 0, REPLY)?;
    match text(&message, "kind")? {
        "upgrade" => {
            let or_drain = message.get("or_drain_s").and_then(Value::as_u64).map(Duration::from_secs);
            // A drain begins when the new program has proven that it starts.
            if let Some(refusal) = offer.shape.unfit().filter(|_| or_drain.is_none()) {
                return refuse(&stream, &refusal.to_string());
            }
            let program = message.get("program").and_then(Value::as_str).map(PathBuf::from);
            let request = HandoverRequest::Upgrade { program, or_drain, operator: Operator(stream) };
            sender.blocking_send(request).map_err(|_| HandoverError::Closed)
        }
        "hello" => {
            let claimed = match offer.shape.objection(&offer.ports, &message)? {
                Some(refusal) => Err(refusal),
                None => claim(&offer.claimed).ok_or(HandoverRefusal::Busy),
            };
            let mut end = RunningEnd::default();
            let step = end.handle(RunningInput::Hello { fits: claimed.is_ok() });
            let claimed = match claimed {
                Ok(claimed) if step == RunningStep::Offer => claimed,
                Ok(_) => return Err(HandoverError::Closed),
                Err(refusal) => {
                    let (why, is_lasting) = (refusal.to_string(), refusal.is_lasting());
                    refuse(&stream, &why)?;
                    let request = HandoverRequest::Refused { why, is_lasting, pid };
                    return sender.blocking_send(request).map_err(|_| HandoverError::Closed);
                }
            };
            send(&stream, &json!({ "kind": "offer", "software": software() }), &[], REPLY)?;
            for (shard, memory) in offer.memory.iter().enumerate() {
                let fds = [memory.files().pool().fd(), memory.files().image().fd()];
                send(&stream, &json!({ "kind": "memory", "shard": shard }), &fds, REPLY)?;
            }
            expect(&receive(&stream, 0, PREPARATION)?.0, "hand over")?;
            let software = text(&message, "software")?.to_owned();
            // The node itself stops its shards.
            if end.handle(RunningInput::Ready) != RunningStep::Stop {
                return Err(HandoverError::Closed);
            }
            let link = SuccessorLink { stream, software, end, claimed };
            sender.blocking_send(HandoverRequest::Take(link)).map_err(|_| HandoverError::Closed)
        }
        _ => refuse(&stream, "this version knows no such request"),
    }
}

fn refuse(stream: &UnixStream, why: &str) -> Result<(), HandoverError> {
    send(stream, &json!({ "refused": why }), &[], REPLY)
}

fn claim(claimed: &Arc<AtomicBool>) -> Option<SuccessorClaim> {
    (!claimed.swap(true, Ordering::AcqRel)).then(|| SuccessorClaim(Arc::clone(claimed)))
}
