//! Mesh: ordered, bounded channels of frames between the processes of a world.
//!
//! A *world* is the processes of one job, numbered by rank. [`Mesh`] has a *channel* with each of those that
//! [`Mesh::set_peers`] lists: frames of a head of 64 bytes and a payload, both ways, in order, each delivered once or
//! not at all. Processes of one host share memory ([`Mesh::send`] is one copy, without a system call); others are
//! reached by the drivers of the transfer engine, over TCP, with TLS, and over RDMA. The mesh does not interpret frames
//! and knows nothing of groups.
//!
//! * A channel lives with one connection, and its memory is made for it. Frames of a former channel are never
//!   delivered, whatever a process that was stopped writes when it continues.
//! * Memory in flight is bounded; [`SendOutcome::Full`] says that the peer has to take frames first.
//! * The end of a peer's process is seen at once ([`MeshEvent::Down`]); one that is only silent is not noticed here.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use kvplane_mesh::{HEAD_BYTES, Mesh, MeshConfig, MeshEvent, Peer, SendOutcome};
//!
//! let mut mesh = Mesh::start(MeshConfig::new("job 7", 1, 1))?;
//! println!("my address: {}", mesh.address());
//! let peer = Peer { rank: 0, incarnation: 1, address: "kvplane-mesh://127.0.0.1:7501/host".to_owned() };
//! mesh.set_peers(&[peer]);
//! loop {
//!     match mesh.poll() {
//!         Some(MeshEvent::Up(rank)) => assert_eq!(mesh.send(rank, &[7; HEAD_BYTES], &[]), SendOutcome::Sent),
//!         Some(MeshEvent::Frame(frame)) => println!("{} bytes of rank {}", frame.payload.bytes(), frame.from),
//!         Some(MeshEvent::Down { rank, cause }) => println!("rank {rank}: {cause}"),
//!         None => mesh.wait(Instant::now() + Duration::from_secs(1)),
//!     }
//! }
//! # Ok::<(), kvplane_mesh::MeshError>(())
//! ```

#![forbid(unsafe_code)]

mod address;
mod config;
mod connections;
mod counters;
mod error;
mod hello;
mod local;
mod mesh;
mod network;
mod peers;
mod ring;
mod shared;
mod streamed;

pub use config::{MAX_RANKS, MeshConfig};
pub use counters::{LaneTraffic, MeshCounters, Traffic};
pub use error::{DownCause, MeshError};
pub use mesh::{Frame, HEAD_BYTES, Mesh, MeshEvent, PayloadPart, SendOutcome};
pub use peers::{Channels, Peer};
