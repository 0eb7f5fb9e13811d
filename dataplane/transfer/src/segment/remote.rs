//! Segment of a peer as it was described: its buffers, and the peer to ask for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvplane_client::{PeerKind, Place};
use kvplane_engine::ForeignPeer;
use kvplane_mooncake::Buffer;
use kvplane_proto::SegmentId;
use kvplane_proto::message::{RegionDescriptor, SegmentDescriptor};

use super::file::OpenFile;
use super::peers::Peer;
use super::{BufferInfo, SegmentInfo};
use crate::error::{ArgumentError, Error};

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
            .map_err(|why| ArgumentError::Description { name: name.to_owned(), why })?
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
