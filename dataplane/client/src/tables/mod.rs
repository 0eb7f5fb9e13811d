//! Tables: batches, their slices, and requests in flight.
//!
//! Tables manage positions, generations and entries; they make no decisions.

mod batches;
mod existence;
mod free_list;
mod put_book;
mod slice;
mod table;
mod wires;

pub use batches::Batches;
pub(crate) use existence::ExistenceBatch;
pub(crate) use free_list::FreeList;
pub use put_book::PutBook;
pub(crate) use slice::{
    HeldHandle, LEAST_LOAD_BYTES, LaneLink, NOWHERE, ReplicaUse, Resend, Slice, Times, readable, slice_id,
};
pub use slice::{SliceEvent, SliceState};
pub(crate) use table::Table;
pub(crate) use wires::{Wire, Wires};
