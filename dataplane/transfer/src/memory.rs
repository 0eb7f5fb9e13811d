//! Registered memory of this process, found by address.
//!
//! A batch counts as a user of each buffer it touches from before it starts until nothing touches the memory any
//! more; unregistering waits for the users to leave.

pub(crate) mod copies;
pub(crate) mod register;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvplane_engine::{Region, node_of_region};
use kvplane_proto::SegmentId;

use crate::error::Error;

/// The most buffers that one engine registers, whether peers may use them or not.
const BUFFERS: usize = 65_536;

/// How memory is registered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterOptions {
    /// Where the memory is: `cpu:N` for a NUMA node, or `*` to find out on which its pages are. It stays `*` where
    /// they are on several or were never touched, or the kernel does not say.
    pub location: String,
    /// Whether peers may use it. Without, it is only a source and destination of transfers of ours.
    pub remote_accessible: bool,
    /// Whether peers may write to it, where they may use it and the memory is writable at all.
    pub writable: bool,
}

impl Default for RegisterOptions {
    fn default() -> Self {
        Self { location: "*".to_owned(), remote_accessible: true, writable: true }
    }
}

impl RegisterOptions {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let node = self.location.strip_prefix("cpu:");
        if self.location == "*" || node.is_some_and(|node| node.parse::<u32>().is_ok()) {
            return Ok(());
        }
        Err(Error::Argument(format!("the location {:?} is neither * nor cpu:N", self.location)))
    }
}

impl RegisterOptions {
    /// Where a region is.
    pub(crate) fn location_of(&self, region: &Region) -> String {
        let found = if self.location == "*" { node_of_region(region) } else { None };
        found.map_or_else(|| self.location.clone(), |node| format!("cpu:{node}"))
    }
}

/// A registered buffer.
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) region: Arc<Region>,
    /// Where it is, as its owner said or the kernel.
    pub(crate) location: String,
    /// Its name in every initiator.
    pub(crate) index: u32,
    /// Its name for peers, if they may use it.
    pub(crate) segment: Option<SegmentId>,
    /// Batches that use it.
    users: AtomicUsize,
}

impl Buffer {
    pub(crate) fn enter(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self) {
        // Release: what the user did to the memory is before what follows its being unregistered.
        self.users.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn is_used(&self) -> bool {
        self.users.load(Ordering::Acquire) > 0
    }
}

/// The buffers by address, and which names are free.
#[derive(Default)]
pub(crate) struct Map {
    by_address: BTreeMap<u64, Arc<Buffer>>,
    /// Those that are being unregistered: no new user finds them, and their memory is not free yet.
    leaving: BTreeMap<u64, Arc<Buffer>>,
    /// Names given so far, and those that came back.
    named: u32,
    free: Vec<u32>,
}

impl Map {
    /// The buffer that holds a range, and where in it the range begins.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<(&Arc<Buffer>, u64)> {
        let (_, buffer) = self.by_address.range(..=address).next_back()?;
        let offset = address - buffer.address;
        let end = offset.checked_add(bytes)?;
        (end <= buffer.bytes).then_some((buffer, offset))
    }

    /// A name for a range, which must be free of others.
    ///
    /// # Errors
    /// When it is empty, overlaps a buffer, or is one too many.
    pub(crate) fn reserve(&mut self, address: u64, bytes: u64) -> Result<u32, Error> {
        if bytes == 0 {
            return Err(Error::Argument(format!("memory of 0 bytes at {address:#x} cannot be registered")));
        }
        let last = address.checked_add(bytes - 1).ok_or_else(|| {
            Error::Argument(format!("memory of {bytes} bytes at {address:#x} ends beyond the address space"))
        })?;
        for (buffers, leaving) in [(&self.by_address, false), (&self.leaving, true)] {
            if let Some((_, other)) = buffers.range(..=last).next_back()
                && other.address + (other.bytes - 1) >= address
            {
                return Err(Error::AddressOverlapped {
                    address,
                    bytes,
                    other_address: other.address,
                    other_bytes: other.bytes,
                    leaving,
                });
            }
        }
        if self.by_address.len() + self.leaving.len() >= BUFFERS {
            return Err(Error::TooManyRequests(format!("{BUFFERS} buffers are registered already: the limit")));
        }
        Ok(self.free.pop().unwrap_or_else(|| {
            self.named += 1;
            self.named - 1
        }))
    }

    /// The buffer that begins at this address is unregistered: no new user finds it. Its memory and its name are taken
    /// until [`Self::left`]. One that is on its way out is given again.
    pub(crate) fn leave(&mut self, address: u64) -> Option<Arc<Buffer>> {
        if let Some(buffer) = self.by_address.remove(&address) {
            self.leaving.insert(address, buffer);
        }
        self.leaving.get(&address).cloned()
    }

    /// Nothing uses a buffer any more. Of several who waited for that, the first is told so.
    pub(crate) fn left(&mut self, buffer: &Arc<Buffer>) -> bool {
        if !self.leaving.get(&buffer.address).is_some_and(|other| Arc::ptr_eq(other, buffer)) {
            return false;
        }
        self.leaving.remove(&buffer.address);
        true
    }

    /// Gives a name back that nothing uses.
    pub(crate) fn give_back(&mut self, index: u32) {
        self.free.push(index);
    }

    pub(crate) fn insert(&mut self, region: Arc<Region>, location: String, index: u32, segment: Option<SegmentId>) {
        let (address, bytes) = (region.address(), region.bytes() as u64);
        let buffer = Buffer { address, bytes, region, location, index, segment, users: AtomicUsize::new(0) };
        self.by_address.insert(address, Arc::new(buffer));
    }

    /// Whether a buffer begins at this address, if only one that is on its way out.
    pub(crate) fn contains(&self, address: u64) -> bool {
        self.by_address.contains_key(&address) || self.leaving.contains_key(&address)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Buffer>> {
        self.by_address.values()
    }
}

/// The map behind its lock. It is held for looking up and for changing, never while anything is waited for.
#[derive(Default)]
pub(crate) struct Memory {
    map: RwLock<Map>,
}

impl Memory {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Map> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }
}
