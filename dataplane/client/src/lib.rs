//! The requesting side of the data path, without I/O: batches of requests go in, frames and copies come out.
//!
//! A [batch](Batches) is validated as a whole, split into *tasks* (one for each request) and *slices* (one for each
//! object, several for a large range of a segment; requests that touch each other share slices). A slice is routed to
//! the owner of its key, waits there for its turn, is bound to a *lane* (connection) of the *rail* that will have it
//! done first, retried on another within its budget, and completed once. A batch completes when its last task does.
//!
//! The host feeds [`Client`] frames, connection events, finished copies and time, and drains [`Client::poll_output`].
//!
//! Quiescence: a task is complete only when nothing can touch its memory any more. A reply to a put comes after the
//! whole payload was taken; a slice whose deadline passes while it is on the wire completes only after its lane was
//! reset and the host has said that all I/O of the lane has ended ([`Client::lane_gone`]).
//!
//! Order: what a peer has received on a lane that was lost, and not carried out, it never carries out after anything
//! that was asked later: it learns first that the lane is over (`network/fences`).
//!
//! Layers, each of which owns the one below and knows nothing of those above: `client` is what the host calls; `router`
//! decides where slices go, and what their outcomes mean (with `placement` and `replicas`); `traffic` puts slices into
//! queues and onto lanes, and takes them off again; `network` has the peers and their connections. A `sender` writes
//! the frames of one lane.
//!
//! Not here: sockets, memory (only [`Local`] names it), clocks (`now_ns` is an argument), and the choice of
//! transport, which the host reports when a lane is connected.

#![forbid(unsafe_code)]

mod client;
mod counts;
mod host;
mod intake;
mod network;
mod outbox;
mod placement;
mod replicas;
mod router;
pub mod sched;
mod sender;
mod sources;
mod tables;
mod timers;
mod traffic;
mod types;

#[cfg(test)]
mod tests;

pub use client::{Carrier, Client, ClientMetrics, LaneEvent, RailMetrics, SourcePeers};
pub use counts::{Counters, Failovers, RailCounts, SlowOperation};
pub use network::{Endpoint, EndpointEvent};
pub use outbox::Outbox;
pub use sources::Sources;
pub use tables::{Batches, PutBook, SliceEvent, SliceState};
pub use traffic::{Copies, RowCopy};
pub use types::{
    Config, DeviceCopy, Intent, LaneId, Local, Near, Nearness, NodeCounts, Output, Path, PayloadTo, PeerAddress,
    PeerId, PeerIncarnation, PeerKind, Place, RailAddress, RailDevices, Request, SegmentTarget, SliceId, SubmitError,
    SubmitOptions, TaskResult, Transport, Via,
};
