//! Client side of the data path (sans-IO): batches of requests go in, frames and copies come out.
//!
//! A [batch](Batches) is validated as a whole and split into *tasks* (one for each request) and *slices* (one for each
//! object, several for a large range of a segment; adjacent requests share slices). A slice is routed to the owner of
//! its key, queued there, and bound to a *lane* (connection) of the *rail* that is estimated to complete it first. It
//! is retried on other lanes within its budget of attempts, and completes exactly once. A batch completes with its last
//! task.
//!
//! The host feeds the [`Client`] with frames, connection events, finished copies and time, and drains
//! [`Client::poll_output`].
//!
//! Quiescence: when a task completes, no I/O touches its memory any more. A put is answered after the shard has
//! received the whole payload. A slice whose deadline passes while it is in flight completes only after its lane was
//! reset and the host has reported that all I/O of the lane has ended ([`Client::lane_gone`]).
//!
//! Order: a request that a peer has received on a lost lane, but not executed, is never executed after a later request
//! of this client: the client fences the lane first (`network/fences`).
//!
//! Layers, each of which owns the one below and does not know those above: `client` is the interface to the host;
//! `router` decides where slices go, and handles their outcomes (with `placement` and `replicas`); `traffic` enqueues
//! slices, binds them to lanes, and takes them off again; `network` has the peers and their connections. A `sender`
//! writes the frames of one lane.
//!
//! Out of scope: sockets, memory (only [`Local`] refers to it), clocks (`now_ns` is an argument), and the choice of
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

pub use client::direct::may_copy;
pub use client::{Carrier, Client, ClientMetrics, LaneEvent, RailMetrics, SourcePeers, check_requests};
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
