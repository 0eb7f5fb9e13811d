//! Resharding: what of a checkpoint that one parallel layout wrote goes where under another, as copies of bytes.
//!
//! A [`Placement`] says which rank has which box of which tensor; it names no addresses. [`Plan::new`] cuts each box
//! that a rank is to have along the boxes that the source has, so that each of its bytes comes from exactly one place,
//! and takes from ranks that have the same box in turn. What comes out is regular: a few strided [`Overlap`]s, which
//! [`Plan::copies`] turns into copies of contiguous bytes, neighbours merged.
//!
//! Bytes are only copied: nothing is cast, transposed or packed differently. A box lies in memory row by row, and where
//! that is, the caller says.

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
pub use tensor_box::TensorBox;
pub use whole::{Piece, whole_shards};
