//! Table of operations in flight: everything that the kernel may still access.
//!
//! Each operation owns the buffer whose address the kernel has, until its completion arrives. Its user data is the
//! table index and a generation, so that a stale completion is not mistaken for that of a newer operation with the same
//! index.

use crate::region::IoBuf;
use slab::Slab;

/// Memory of an operation to which the kernel has addresses.
pub(super) enum KernelHold {
    /// None.
    Nothing,
    /// One buffer.
    One(IoBuf),
    /// Several buffers, and the list of their addresses.
    Several(Box<Vectors>),
}

/// Buffers with the kernel's list of their addresses. The list does not move while the operation is in flight.
pub(super) struct Vectors {
    buffers: Vec<IoBuf>,
    list: Vec<libc::iovec>,
}

impl Vectors {
    pub(super) fn of(buffers: &[IoBuf]) -> Box<Self> {
        let list = buffers
            .iter()
            .map(|buffer| libc::iovec { iov_base: buffer.pointer().cast(), iov_len: buffer.bytes() })
            .collect();
        Box::new(Self { buffers: buffers.to_vec(), list })
    }

    pub(super) fn list(&self) -> (*const libc::iovec, u32) {
        (self.list.as_ptr(), self.list.len() as u32)
    }
}

impl KernelHold {
    fn bytes(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::One(buffer) => buffer.bytes(),
            Self::Several(vectors) => vectors.buffers.iter().map(IoBuf::bytes).sum(),
        }
    }
}

impl From<Option<IoBuf>> for KernelHold {
    fn from(buffer: Option<IoBuf>) -> Self {
        buffer.map_or(Self::Nothing, Self::One)
    }
}

/// An operation in flight.
pub(super) struct Operation {
    /// Token of the caller.
    pub(super) token: u64,
    generation: u32,
    /// Number of its submission queue entry, counted from the ring's start.
    pub(super) sequence: u64,
    /// Memory that it reads or writes, kept alive for the kernel.
    held: KernelHold,
}

impl Operation {
    pub(super) fn bytes(&self) -> usize {
        self.held.bytes()
    }
}

/// All operations in flight.
pub(super) struct Operations {
    slab: Slab<Operation>,
    limit: usize,
    generation: u32,
}

impl Operations {
    pub(super) fn new(limit: usize) -> Self {
        assert!(limit < u32::MAX as usize, "an index fits in half of the user data");
        Self { slab: Slab::with_capacity(limit), limit, generation: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    /// Returns the total length of the buffers that are kept alive, in bytes.
    pub(super) fn held_bytes(&self) -> usize {
        self.slab.iter().map(|(_, operation)| operation.bytes()).sum()
    }

    pub(super) fn is_full(&self) -> bool {
        self.slab.len() >= self.limit
    }

    /// Adds an operation and returns its user data. The caller has checked that there is room.
    pub(super) fn insert(&mut self, token: u64, sequence: u64, held: impl Into<KernelHold>) -> u64 {
        assert!(!self.is_full(), "room was checked before");
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let index = self.slab.insert(Operation { token, generation, sequence, held: held.into() });
        user_data(index, generation)
    }

    pub(super) fn get(&self, user_data: u64) -> Option<&Operation> {
        let operation = self.slab.get(index(user_data))?;
        (operation.generation == generation(user_data)).then_some(operation)
    }

    /// Removes an operation after its completion, with its memory.
    pub(super) fn remove(&mut self, user_data: u64) -> Option<Operation> {
        self.get(user_data)?;
        self.slab.try_remove(index(user_data))
    }

    /// Drops all operations from this submission on: the kernel never saw them.
    pub(super) fn forget_from(&mut self, sequence: u64) {
        self.slab.retain(|_, operation| operation.sequence < sequence);
    }
}

fn user_data(index: usize, generation: u32) -> u64 {
    u64::from(generation) << 32 | index as u64
}

fn index(user_data: u64) -> usize {
    (user_data & u64::from(u32::MAX)) as usize
}

fn generation(user_data: u64) -> u32 {
    (user_data >> 32) as u32
}
