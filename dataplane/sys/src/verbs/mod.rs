//! Verbs: RDMA through libibverbs, which is loaded at run time.
//!
//! [`Verbs`] is the source of devices: the library of this machine. With the feature `verbs-provider`, which tests and
//! benchmarks turn on and no shipped binary does, another crate may provide devices by the same table of C functions
//! (the module `provider`), so the code above is the same. Those of tests are `kvplane_soft_verbs`.
//!
//! A source provides [`Device`]s, an open [`Context`], a [`ProtectionDomain`], [`MemoryRegion`]s, [`CompletionQueue`]s
//! and [`QueuePair`]s; each holds the objects that it was created from, so they may be dropped in any order.
//!
//! ```
//! use kvplane_soft_verbs::{Loopback, SoftPort};
//! use kvplane_sys::verbs::*;
//! use kvplane_sys::{IoBuf, Region, RegionOptions};
//!
//! struct End { queue_pair: QueuePair, queue: CompletionQueue, memory: MemoryRegion, gid: GidEntry }
//!
//! fn end(device: &Device) -> Result<End, Box<dyn std::error::Error>> {
//!     let context = device.open()?;
//!     let gid = context.gids(context.active_port()?.port)?[0];
//!     let domain = ProtectionDomain::new(&context)?;
//!     let region = Region::allocate(&RegionOptions::new("example", 4096))?;
//!     let memory = domain.register(&IoBuf::whole(region), Access::REMOTE)?;
//!     let queue = CompletionQueue::new(&context, 256, None)?;
//!     let queue_pair = QueuePair::new(&domain, &queue, None, &QueuePairOptions::default())?;
//!     Ok(End { queue_pair, queue, memory, gid })
//! }
//!
//! fn connect(from: &mut End, to: &End) -> Result<(), VerbsError> {
//!     let route = Route {
//!         gid: Some(to.gid.gid),
//!         gid_index: from.gid.index as u8,
//!         lid: 0,
//!         hop_limit: 64,
//!         traffic_class: 0,
//!         service_level: 0,
//!     };
//!     from.queue_pair.connect(&Connection {
//!         port: 1,
//!         pkey_index: 0,
//!         access: PeerAccess { write: true, read: true },
//!         path_mtu: Mtu::Bytes1024,
//!         route,
//!         peer_qp_num: to.queue_pair.qp_num(),
//!         peer_packet_number: 7,
//!         packet_number: 7,
//!         reads_served: 8,
//!         reads_started: 8,
//!         not_ready_timer: 12,
//!         timeout: 14,
//!         retries: 7,
//!         not_ready_retries: 7,
//!     })
//! }
//!
//! let fabric = Loopback::new(&[SoftPort::default(); 2]);
//! let devices = fabric.verbs().devices()?;
//! let (mut ours, mut theirs) = (end(&devices[0])?, end(&devices[1])?);
//! connect(&mut ours, &theirs)?;
//! connect(&mut theirs, &ours)?;
//!
//! let to = Remote { address: theirs.memory.address(), key: theirs.memory.remote_key() };
//! for token in 0..3 {
//!     let pieces = [ours.memory.piece(64 * token as usize, 64).expect("inside")];
//!     ours.queue_pair.push(&Request::new(token, Operation::Write { to }, Payload::Pieces(&pieces)))?;
//! }
//! assert_eq!(ours.queue_pair.flush(true)?, 3, "one doorbell, one completion");
//!
//! let (mut entries, mut done) = (Entry::many(16), Vec::new());
//! for completion in ours.queue.poll(&mut entries)? {
//!     ours.queue_pair.retire(&completion, |retired| done.push((retired.token, retired.status)));
//! }
//! assert_eq!(done, [(0, Status::Success), (1, Status::Success), (2, Status::Success)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: a device never accesses memory that is not registered, and registered memory is neither deregistered nor
//! unmapped while a request on it is posted: requests hold their registrations until a completion retires them or the
//! device has destroyed their queue pair. Only registered memory can be posted:
//!
//! ```compile_fail,E0308
//! # use kvplane_sys::verbs::{Operation, Payload, QueuePair, Request};
//! fn post(queue_pair: &mut QueuePair, bytes: &[u8]) {
//!     let request = Request::new(1, Operation::Send, Payload::Pieces(&[bytes]));
//!     queue_pair.push(&request).unwrap();
//! }
//! ```
//!
//! A piece does not outlive the handle that it was taken from (the request holds a handle of its own):
//!
//! ```compile_fail,E0505
//! # use kvplane_sys::verbs::{MemoryRegion, Operation, Payload, QueuePair, Request};
//! fn post(queue_pair: &mut QueuePair, memory: MemoryRegion) {
//!     let piece = memory.piece(0, 8).unwrap();
//!     drop(memory);
//!     queue_pair.push(&Request::new(1, Operation::Send, Payload::Pieces(&[piece]))).unwrap();
//! }
//! ```
//!
//! A queue pair belongs to one thread at a time:
//!
//! ```compile_fail,E0277
//! fn shared<T: Sync>() {}
//! shared::<kvplane_sys::verbs::QueuePair>();
//! ```
//!
//! A completion is not kept beyond the next poll of its queue, when the same id may denote another request:
//!
//! ```compile_fail,E0499
//! # use kvplane_sys::verbs::{CompletionQueue, Entry, QueuePair};
//! fn late(queue: &mut CompletionQueue, entries: &mut [Entry], more: &mut [Entry], queue_pair: &mut QueuePair) {
//!     let early = queue.poll(entries).unwrap().next().unwrap();
//!     queue.poll(more).unwrap();
//!     queue_pair.retire(&early, |_| ());
//! }
//! ```
//!
//! The module makes no decisions: no retries, no routes, no sizes.

mod channel;
mod completion;
mod completion_queue;
mod device;
mod device_memory;
mod error;
mod ffi;
mod memory;
mod queue_pair;
#[cfg(test)]
mod tests;

use device::{context, events, gid, port};
use queue_pair::{connection, one_sided, receive_queue, send_queue, slots, states};

pub use channel::CompletionChannel;
pub use completion::{Completion, Entry, PollResult, QueueId, Status};
pub use completion_queue::CompletionQueue;
pub use connection::{Connection, PeerAccess, QueuePairOptions, Route};
pub use context::{Context, DeviceLimits};
pub use device::{Device, Verbs};
pub use device_memory::DmaBuf;
pub use error::{PostError, Refusal, VerbsError};
pub use events::AsyncEvent;
pub use gid::{Gid, GidEntry, GidKind};
pub use memory::{Access, MemoryRegion, Piece, ProtectionDomain, memlock_limit_bytes};
pub use one_sided::{OneSided, OneSidedRun};
pub use port::{LinkLayer, Mtu, PortAttributes, PortState};
pub use queue_pair::QueuePair;
pub use receive_queue::SharedReceiveQueue;
pub use send_queue::{Operation, Payload, Remote, Request};
pub use slots::RetiredRequest;
pub use states::QueueState;

/// Interface through which another crate provides verbs: the C structs, the function table, and copies as devices make
/// them. For tests and benchmarks, behind the feature `verbs-provider`.
#[cfg(feature = "verbs-provider")]
pub mod provider {
    pub use super::device::provider::{Functions, ProvidedDevices, VerbsProvider};
    pub use super::ffi::*;
    pub use crate::copy::copy_bytes;
}
