//! Resharding of checkpoints: converts one parallel layout to another, as copies of bytes.
//!
//! A [`Placement`] maps ranks to boxes of tensors; it contains no addresses. [`Plan::new`] cuts each box that a target
//! rank needs along the boxes of the source, so that each of its bytes comes from exactly one place, and alternates
//! between ranks that have the same box. The result is regular: a few strided [`Overlap`]s, which [`Plan::copies`]
//! converts to copies of contiguous bytes, merging neighbours.
//!
//! Bytes are only copied: nothing is cast, transposed or repacked. A box lies in memory in row-major order; the caller
//! supplies its address.

mod copies;
mod dtype;
mod error;
mod placement;
mod plan;
mod tensor_box;
mod whole;

pub use copies::{Copies, Copy, Overlap, Step};
pub use dtype::Dtype;
pub use error::ReshardError;
pub use placement::{Fragment, MAX_DIMENSIONS, MAX_FRAGMENTS, Part, Placement, Tensor};
pub use plan::Plan;
pub use tensor_box::{BoxError, TensorBox};
pub use whole::{Piece, whole_shards};
