//! Shared state of the queues: atomics, cells, and what else two threads touch.
//!
//! Normally these are the types of the standard library and of this crate. With `--cfg loom`, in which `cargo x loom`
//! builds this crate, they are those of loom, which runs a model once for every order of accesses that the memory model
//! allows, and reports races of plain accesses and threads that wait forever.

#[cfg(loom)]
mod modelled;

#[cfg(loom)]
pub(super) use loom::{
    cell::UnsafeCell,
    sync::Arc,
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
};
#[cfg(loom)]
pub(super) use modelled::{Event, Region};

#[cfg(not(loom))]
pub(super) use super::event::Event;
#[cfg(not(loom))]
pub(super) use crate::region::Region;
#[cfg(not(loom))]
pub(super) use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence},
};

/// A cell that is accessed through closures, as loom's is.
#[cfg(not(loom))]
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Passes the value's address to `f`, which only reads.
    #[inline(always)]
    pub(super) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Passes the value's address to `f`, which may write.
    #[inline(always)]
    pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
