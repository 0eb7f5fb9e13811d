//! Segments of peers: opened by name, identified by handle, their buffers found by address.
//!
//! A peer's description of its memory is cached. It is requested again when an address is not found in it, and when a
//! transfer shows that the peer's memory has changed: after a restart, or after it unregistered some.

pub(crate) mod open;
pub(crate) mod peers;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kvplane_client::{PeerKind, Place};
use kvplane_engine::ForeignPeer;
use kvplane_mooncake::Buffer;
use kvplane_proto::SegmentId;
use kvplane_proto::message::{RegionDescriptor, SegmentDescriptor};

use crate::error::Error;
use crate::files::{FileInfo, OpenFile};
use crate::segment::peers::{Peer, Peers};

/// Limit of open segments of one engine.
const OPEN_SEGMENTS: usize = 65_536;

/// Handle of an open segment. Handles are never reused within an engine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SegmentHandle(u32);

impl SegmentHandle {
    /// Memory of this engine.
    pub const LOCAL: Self = Self(0);

    /// Returns the handle as a number: 0 for [`Self::LOCAL`], from 1 on for others.
    #[must_use]
    pub const fn to_bits(self) -> u32 {
        self.0
    }

    /// Converts a number back, the inverse of [`Self::to_bits`]. An unknown number is rejected where it is used.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }
}

/// Buffer of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BufferInfo {
    /// Address in its process.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// True if peers on its host can map it.
    pub shareable: bool,
    /// Location as announced by its owner; `None` if unknown.
    pub location: Option<String>,
}

/// Description of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentInfo {
    /// Name.
    pub name: String,
    /// Buffers by address. A file is one buffer that begins at 0.
    pub buffers: Vec<BufferInfo>,
    /// Properties of the file, if it is one.
    pub file: Option<FileInfo>,
}

/// Segment of a peer, as the peer described it.
pub(crate) struct Remote {
    pub(crate) name: String,
    /// Peer id of the initiators, the same for all descriptions of this peer.
    pub(crate) peer: Arc<Peer>,
    /// File, if it is one.
    pub(crate) file: Option<OpenFile>,
    /// Regions, sorted by address.
    pub(crate) regions: Vec<RegionDescriptor>,
    /// Location of each region, as far as the peer announced it.
    places: Vec<Place>,
    /// Connection state in the initiators, if it is a stock engine over RDMA: kept alive by this.
    _known: Option<Arc<ForeignPeer>>,
    /// Set when a transfer found the description outdated.
    pub(crate) stale: AtomicBool,
}

impl Remote {
    pub(crate) fn new(
        name: &str,
        peer: Arc<Peer>,
        description: &[u8],
        place: impl Fn(u64) -> Place,
    ) -> Result<Self, Error> {
        let mut regions = SegmentDescriptor::decode(description)
            .map_err(|error| Error::Argument(format!("the description of segment {name} is malformed: {error}")))?
            .regions;
        regions.sort_unstable_by_key(|region| region.address);
        let places = regions.iter().map(|region| place(region.segment.to_bits())).collect();
        Ok(Self { places, ..Self::with(name, peer, regions) })
    }

    /// Creates the segment of a peer that has described nothing yet.
    pub(crate) fn unknown(name: &str, peer: Arc<Peer>) -> Self {
        Self::with(name, peer, Vec::new())
    }

    fn with(name: &str, peer: Arc<Peer>, regions: Vec<RegionDescriptor>) -> Self {
        let places = Vec::new();
        Self { name: name.to_owned(), peer, file: None, regions, places, _known: None, stale: AtomicBool::new(false) }
    }

    /// Creates the segment of a file: one region that begins at 0.
    pub(crate) fn of_file(name: &str, peer: Arc<Peer>, file: OpenFile) -> Self {
        let region = RegionDescriptor {
            // Each initiator has its own id for the file.
            segment: SegmentId::from_bits(0),
            address: 0,
            bytes: file.file.bytes(),
            shareable: false,
            writable: file.file.writable(),
        };
        Self { file: Some(file), ..Self::with(name, peer, vec![region]) }
    }

    /// Creates the segment of a peer whose protocol names memory by address only.
    pub(crate) fn foreign(name: &str, peer: Arc<Peer>, buffers: &[Buffer]) -> Self {
        let region = |buffer: &Buffer| RegionDescriptor {
            segment: SegmentId::from_bits(0),
            address: buffer.address,
            bytes: buffer.length,
            shareable: false,
            writable: true,
        };
        let mut regions: Vec<RegionDescriptor> = buffers.iter().map(region).collect();
        regions.sort_unstable_by_key(|region| region.address);
        Self::with(name, peer, regions)
    }

    /// Creates the segment of a stock engine over RDMA. The ids of its buffers are of this generation.
    pub(crate) fn stock_rdma(
        name: &str,
        peer: Arc<Peer>,
        buffers: &[Buffer],
        known: Arc<ForeignPeer>,
        generation: u32,
    ) -> Self {
        let region = |(index, buffer): (usize, &Buffer)| RegionDescriptor {
            segment: SegmentId { index: index as u32, generation },
            address: buffer.address,
            bytes: buffer.length,
            shareable: false,
            writable: true,
        };
        let mut regions: Vec<RegionDescriptor> = buffers.iter().enumerate().map(region).collect();
        regions.sort_unstable_by_key(|region| region.address);
        Self { _known: Some(known), ..Self::with(name, peer, regions) }
    }

    /// Returns the region that contains a range, the position of the range as the peer's protocol expresses it (offset
    /// or address), and the region's location.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Option<(&RegionDescriptor, u64, Place)> {
        let after = self.regions.partition_point(|region| region.address <= address);
        let position = after.checked_sub(1)?;
        let region = self.regions.get(position)?;
        let place = self.places.get(position).copied().unwrap_or_default();
        let offset = address - region.address;
        let end = offset.checked_add(bytes)?;
        let absolute = matches!(self.peer.address.kind, PeerKind::Mooncake { .. });
        (end <= region.bytes).then_some((region, if absolute { address } else { offset }, place))
    }

    pub(crate) fn info(&self) -> SegmentInfo {
        let buffer = |region: &RegionDescriptor| BufferInfo {
            address: region.address,
            bytes: region.bytes,
            shareable: region.shareable,
            location: None,
        };
        let buffers = self.regions.iter().map(buffer).collect();
        SegmentInfo { name: self.name.clone(), buffers, file: self.file.as_ref().map(OpenFile::info) }
    }

    pub(crate) fn set_stale(&self) {
        // A file has no owner to request a description from.
        self.stale.store(self.file.is_none(), Ordering::Relaxed);
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed)
    }
}

struct Open {
    remote: Arc<Remote>,
    /// Number of opens without a close.
    times: usize,
}

/// Table of open segments.
#[derive(Default)]
pub(crate) struct Table {
    by_name: HashMap<String, SegmentHandle>,
    by_handle: HashMap<SegmentHandle, Open>,
    last: u32,
    pub(crate) peers: Peers,
}

impl Table {
    pub(crate) fn get(&self, handle: SegmentHandle) -> Option<&Arc<Remote>> {
        self.by_handle.get(&handle).map(|open| &open.remote)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<(SegmentHandle, &Arc<Remote>)> {
        let handle = *self.by_name.get(name)?;
        Some((handle, self.get(handle)?))
    }

    /// Counts another user of an open segment.
    pub(crate) fn reopen(&mut self, handle: SegmentHandle) {
        if let Some(open) = self.by_handle.get_mut(&handle) {
            open.times += 1;
        }
    }

    /// Opens a segment, or updates the description of an open one and counts another user.
    ///
    /// # Errors
    /// When the limit of open segments is reached.
    pub(crate) fn open(&mut self, remote: Arc<Remote>) -> Result<SegmentHandle, Error> {
        if let Some(&handle) = self.by_name.get(&remote.name) {
            self.renew(handle, remote);
            self.reopen(handle);
            return Ok(handle);
        }
        if self.by_handle.len() >= OPEN_SEGMENTS || self.last == i32::MAX as u32 {
            return Err(Error::TooManyRequests(format!(
                "{} segments are open already: close some",
                self.by_handle.len()
            )));
        }
        self.last += 1;
        let handle = SegmentHandle(self.last);
        self.by_name.insert(remote.name.clone(), handle);
        self.by_handle.insert(handle, Open { remote, times: 1 });
        Ok(handle)
    }

    /// Replaces the description of a segment.
    pub(crate) fn renew(&mut self, handle: SegmentHandle, remote: Arc<Remote>) {
        if let Some(open) = self.by_handle.get_mut(&handle) {
            open.remote = remote;
        }
    }

    /// Removes one user; the last one closes the segment. Returns false for a handle that is not open.
    pub(crate) fn close(&mut self, handle: SegmentHandle) -> bool {
        let Some(open) = self.by_handle.get_mut(&handle) else { return false };
        open.times -= 1;
        if open.times == 0 {
            self.by_name.remove(&open.remote.name);
            self.by_handle.remove(&handle);
        }
        true
    }

    /// Returns the handles of all open segments.
    pub(crate) fn handles(&self) -> Vec<SegmentHandle> {
        self.by_handle.keys().copied().collect()
    }
}

/// Table behind its lock, which is never held during a wait.
#[derive(Default)]
pub(crate) struct Segments {
    table: RwLock<Table>,
}

impl Segments {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}
