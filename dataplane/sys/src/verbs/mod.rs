//! Verbs: remote direct memory access through libibverbs, which is found at run time, or through devices of software.
//!
//! [`Verbs`] is the source: the library of this machine, [`Loopback`] devices inside this process, or a `null` device
//! that does nothing quickly. Behind each is the same table of C functions, so all code above is the same.
//! From it come [`Device`]s, an open [`Context`], a [`ProtectionDomain`], [`MemoryRegion`]s, [`CompletionQueue`]s and
//! [`QueuePair`]s; each holds what it was made of, so they may be dropped in any order.
//!
//! ```
//! use kvplane_sys::verbs::{Access, Entry, Loopback, ProtectionDomain, SoftPort, Verbs};
//! use kvplane_sys::{IoBuf, Region, RegionOptions};
//!
//! let fabric = Loopback::new(&[SoftPort::default()]);
//! let context = Verbs::loopback(&fabric).device("loop0")?.open()?;
//! let domain = ProtectionDomain::new(&context)?;
//! let region = Region::allocate(&RegionOptions::new("example", 4096))?;
//! let memory = domain.register(&IoBuf::whole(region), Access::REMOTE)?;
//! assert_eq!(memory.bytes(), 4096);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Invariant: a device never touches memory that is not registered, and registered memory is neither deregistered nor
//! unmapped while a request on it is posted: requests hold their registrations until a completion retires them or the
//! device has forgotten their queue pair. Only registered memory can be posted:
//!
//! ```compile_fail,E0308
//! # use kvplane_sys::verbs::{Operation, Payload, QueuePair, Request};
//! fn post(queue_pair: &mut QueuePair, bytes: &[u8]) {
//!     let request = Request::new(1, Operation::Send, Payload::Pieces(&[bytes]));
//!     queue_pair.push(&request).unwrap();
//! }
//! ```
//!
//! A piece does not outlive the handle that it was cut from (the request holds a handle of its own):
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
//! A completion is not kept beyond the next poll of its queue, when the same number may mean another request:
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
//! It decides nothing: no retries, no routes, no sizes.

mod channel;
mod completion;
mod completion_queue;
mod connection;
mod context;
mod device;
mod error;
mod events;
mod ffi;
mod gid;
mod library;
mod memory;
mod port;
mod queue_pair;
mod receive_queue;
mod send_queue;
mod slots;
mod soft;
mod states;
#[cfg(test)]
mod tests;

pub use channel::CompletionChannel;
pub use completion::{Completion, Entry, Polled, QueueId, Status};
pub use completion_queue::CompletionQueue;
pub use connection::{Connection, PeerAccess, QueuePairOptions, Route};
pub use context::{Context, DeviceLimits};
pub use device::{Device, Verbs};
pub use error::{PostError, Refusal, VerbsError};
pub use events::AsyncEvent;
pub use gid::{Gid, GidEntry, GidKind};
pub use memory::{Access, MemoryRegion, Piece, ProtectionDomain, memlock_limit_bytes};
pub use port::{LinkLayer, Mtu, PortAttributes, PortState};
pub use queue_pair::QueuePair;
pub use receive_queue::SharedReceiveQueue;
pub use send_queue::{Operation, Payload, Remote, Request};
pub use slots::Retired;
pub use soft::{Loopback, SoftPort};
pub use states::QueueState;
