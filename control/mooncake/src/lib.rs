//! x
pub mod descriptor;
pub use descriptor::{Buffer, Descriptor, DescriptorError, Native, Protocol};
