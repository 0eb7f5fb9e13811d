//! What the kernel may still touch: the table of in-flight operations.
//!
//! Each operation owns the buffers and the message headers whose addresses the kernel has, until its last
//! completion arrives. Its user data is the table index and a generation, so that a cancellation that arrives late
//! misses the operation that took the index over.

use crate::region::IoBuf;
use slab::Slab;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Most buffers one send may gather.
pub const MAX_VECTORS: usize = 64;

/// User data of our own cancellations; an index in the table is always smaller.
pub(super) const INTERNAL: u64 = u64::MAX;

/// A heap value that the kernel has the address of. A `Box` would assert on every move that nobody else points to it.
#[derive(Debug)]
pub(super) struct Stable<T>(NonNull<T>);

impl<T> Stable<T> {
    pub(super) fn new(value: T) -> Self {
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    pub(super) fn pointer(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Deref for Stable<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: allocated in `new`, freed only in `drop`; the kernel only reads it.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Stable<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; writing happens before the address is given to the kernel.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for Stable<T> {
    fn drop(&mut self) {
        // SAFETY: came from Box::leak in `new`, and is dropped once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// The header, vectors and buffers of one gathering send.
pub(super) struct Message {
    header: libc::msghdr,
    vectors: [libc::iovec; MAX_VECTORS],
    buffers: Vec<IoBuf>,
}

impl Message {
    fn empty() -> Stable<Self> {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Stable::new(Self {
            // SAFETY: all-zero is a valid msghdr: no name, no vectors, no control data.
            header: unsafe { std::mem::zeroed() },
            vectors: [nothing; MAX_VECTORS],
            buffers: Vec::with_capacity(MAX_VECTORS),
        })
    }

    fn fill(message: &mut Stable<Self>, buffers: &[IoBuf]) {
        assert!(buffers.len() <= MAX_VECTORS, "{} buffers in one send", buffers.len());
        message.buffers.extend_from_slice(buffers);
        for (vector, buffer) in message.vectors.iter_mut().zip(buffers) {
            *vector = libc::iovec { iov_base: buffer.pointer().cast(), iov_len: buffer.bytes() };
        }
        let place = message.pointer();
        // SAFETY: `place` is our live allocation; the addresses are taken without making a reference, so that the one
        // for the vectors stays good while the header is written.
        unsafe {
            (*place).header.msg_iov = (&raw mut (*place).vectors).cast();
            (*place).header.msg_iovlen = buffers.len();
        }
    }

    /// The address of the header, for the kernel.
    pub(super) fn header(message: &Stable<Self>) -> *const libc::msghdr {
        // SAFETY: takes the address of a field of a live allocation, without a reference.
        unsafe { &raw const (*message.pointer()).header }
    }
}

/// What an operation keeps alive.
pub(super) enum Holds {
    /// Nothing: the kernel has no address of ours.
    Nothing,
    /// Nothing, and its results are descriptors that we own.
    Sockets,
    /// The buffer it reads or writes.
    Buffer(#[expect(dead_code, reason = "held for the kernel")] IoBuf),
    /// A gathering send.
    Message(Stable<Message>),
    /// The address it connects to.
    Address(#[expect(dead_code, reason = "held for the kernel")] Stable<libc::sockaddr_storage>),
}

/// One operation in flight.
pub(super) struct Operation {
    /// The caller's name for it.
    pub(super) token: u64,
    generation: u32,
    /// Which submission queue entry carries it, counted from the ring's start.
    pub(super) sequence: u64,
    /// What it keeps alive.
    pub(super) holds: Holds,
}

/// All operations in flight.
pub(super) struct Operations {
    slab: Slab<Operation>,
    limit: usize,
    generation: u32,
    spare: Vec<Stable<Message>>,
}

impl Operations {
    pub(super) fn new(limit: usize) -> Self {
        assert!(limit < u32::MAX as usize, "an index fits in half of the user data");
        Self { slab: Slab::with_capacity(limit), limit, generation: 0, spare: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.slab.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.slab.len() >= self.limit
    }

    /// Adds an operation and returns its user data. There must be room.
    pub(super) fn insert(&mut self, token: u64, sequence: u64, holds: Holds) -> u64 {
        assert!(!self.is_full(), "room was checked before");
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let index = self.slab.insert(Operation { token, generation, sequence, holds });
        user_data(index, generation)
    }

    pub(super) fn get(&self, user_data: u64) -> Option<&Operation> {
        let operation = self.slab.get(index(user_data))?;
        (operation.generation == generation(user_data)).then_some(operation)
    }

    /// Forgets an operation after its last completion and frees what it held.
    pub(super) fn remove(&mut self, user_data: u64) {
        if self.get(user_data).is_none() {
            return;
        }
        let operation = self.slab.remove(index(user_data));
        if let Holds::Message(mut message) = operation.holds {
            message.buffers.clear();
            self.spare.push(message);
        }
    }

    /// A message that gathers these buffers; headers are recycled.
    pub(super) fn message(&mut self, buffers: &[IoBuf]) -> Stable<Message> {
        let mut message = self.spare.pop().unwrap_or_else(Message::empty);
        Message::fill(&mut message, buffers);
        message
    }

    /// Forgets all operations from this submission on: the kernel never saw them.
    pub(super) fn forget_from(&mut self, sequence: u64) {
        self.slab.retain(|_, operation| operation.sequence < sequence);
    }

    /// The user data of every operation of a token.
    pub(super) fn of_token(&self, token: u64) -> impl Iterator<Item = u64> + '_ {
        let named = self.slab.iter().filter(move |(_, operation)| operation.token == token);
        named.map(|(index, operation)| user_data(index, operation.generation))
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
