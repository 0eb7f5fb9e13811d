//! Registrations of device memory with one RDMA device.
//!
//! Memory is registered through a dma-buf descriptor: as a whole or, where that crosses boundaries between mappings of
//! the device's memory, in pieces. If that is refused it is registered by its address, through the kernel's module for
//! peer memory. If that is refused too, its bytes are staged.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use kvplane_sys::device::{DeviceId, DeviceMemory, MemoryKind};
use kvplane_sys::verbs::{Access, DmaBuf, MemoryRegion, ProtectionDomain, VerbsError};

/// Shortest piece: no mapping of device memory is shorter.
const PIECE_BYTES_LEAST: u64 = 2 << 20;
/// Largest number of pieces of one registration.
const PIECES_MOST: u64 = 65_536;

/// Kind of an obstacle to the registration of device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObstacleKind {
    /// The memory is managed: its pages move.
    Managed,
    /// The driver says that no RDMA device may access the memory.
    NotCapable,
    /// The memory was freed, or its device is lost.
    Gone,
    /// The driver exports no dma-buf descriptor of the memory.
    NoDescriptor,
    /// The kernel or the RDMA device refuses the registration.
    Refused,
    /// The limit of registrations is reached.
    Limit,
}

impl ObstacleKind {
    /// Returns its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Managed => "managed",
            Self::NotCapable => "not_capable",
            Self::Gone => "gone",
            Self::NoDescriptor => "no_descriptor",
            Self::Refused => "refused",
            Self::Limit => "limit",
        }
    }
}

/// Obstacle to the registration of device memory, or to its preferred form.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegistrationObstacle {
    /// Kind.
    pub kind: ObstacleKind,
    /// Error of the driver or of the kernel, for people.
    pub detail: String,
}

impl RegistrationObstacle {
    pub(in crate::rdma) fn new(kind: ObstacleKind, detail: impl fmt::Display) -> Self {
        Self { kind, detail: detail.to_string() }
    }
}

/// Way in which an RDMA device accesses device memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RegistrationPath {
    /// Directly, through a dma-buf descriptor that is registered in so many pieces.
    DmaBuf {
        /// Number of pieces; 1 if the memory is registered as a whole.
        pieces: usize,
    },
    /// Directly, through the kernel's module for peer memory, because of an obstacle to a dma-buf.
    PeerMemory(RegistrationObstacle),
    /// Not at all, because of an obstacle: bytes pass through pinned memory of the host.
    Staged(RegistrationObstacle),
}

impl RegistrationPath {
    /// Returns its name in metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::DmaBuf { pieces: 0 | 1 } => "dma_buf",
            Self::DmaBuf { .. } => "dma_buf_pieces",
            Self::PeerMemory(_) => "peer_memory",
            Self::Staged(_) => "staged",
        }
    }

    /// Returns the obstacle to a preferred way, if there was one.
    #[must_use]
    pub const fn obstacle(&self) -> Option<&RegistrationObstacle> {
        match self {
            Self::DmaBuf { .. } => None,
            Self::PeerMemory(obstacle) | Self::Staged(obstacle) => Some(obstacle),
        }
    }
}

impl fmt::Display for RegistrationPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DmaBuf { pieces: 0 | 1 } => f.write_str("dma-buf"),
            Self::DmaBuf { pieces } => write!(f, "dma-buf in {pieces} pieces"),
            Self::PeerMemory(obstacle) => write!(f, "peer memory, as no dma-buf can be used: {}", obstacle.detail),
            Self::Staged(obstacle) => write!(f, "staged: {}", obstacle.detail),
        }
    }
}

/// Device memory with its dma-buf descriptor, for the registrations with all RDMA devices; or the obstacle to one. The
/// descriptor is closed when this is dropped.
pub(in crate::rdma) struct ExportedMemory {
    memory: Arc<DeviceMemory>,
    buffer: Result<DmaBuf, RegistrationObstacle>,
}

impl ExportedMemory {
    /// Exports the descriptor, if the memory can be registered at all.
    pub(in crate::rdma) fn new(memory: &Arc<DeviceMemory>) -> Self {
        Self { memory: Arc::clone(memory), buffer: export(memory) }
    }

    /// Returns the memory.
    pub(in crate::rdma) const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }
}

fn export(memory: &Arc<DeviceMemory>) -> Result<DmaBuf, RegistrationObstacle> {
    let obstacle = |kind, detail: &dyn fmt::Display| RegistrationObstacle::new(kind, detail);
    let id = memory.device().id();
    let allocation = memory.allocation();
    if matches!(allocation.kind, MemoryKind::Managed(_)) {
        let words = format!("it is managed memory of {id}, whose pages move");
        return Err(obstacle(ObstacleKind::Managed, &words));
    }
    memory.check().map_err(|error| obstacle(ObstacleKind::Gone, &error))?;
    if !allocation.rdma {
        let words = format!("the driver of {id} lets no RDMA device access this allocation");
        return Err(obstacle(ObstacleKind::NotCapable, &words));
    }
    if memory.device().info().hides_writes {
        let words = format!("kernels of {id} may not see an RDMA device's writes, and its driver has no flush");
        return Err(obstacle(ObstacleKind::NotCapable, &words));
    }
    DmaBuf::export(memory).map_err(|error| {
        obstacle(if error.is_lost() { ObstacleKind::Gone } else { ObstacleKind::NoDescriptor }, &error)
    })
}

/// Largest pieces that an RDMA device may accept of each device's memory: half of the shortest that it has refused.
#[derive(Default)]
pub(in crate::rdma) struct PieceSizes(HashMap<DeviceId, u64>);

/// Registration of device memory with one RDMA device.
pub(in crate::rdma) struct DeviceRegions {
    /// Pieces in the order of their addresses, without gaps; empty if there is no registration.
    pieces: Vec<MemoryRegion>,
    path: RegistrationPath,
}

impl DeviceRegions {
    /// Registers memory, in the first way that works.
    pub(in crate::rdma) fn register(
        exported: &ExportedMemory,
        domain: &ProtectionDomain,
        sizes: &mut PieceSizes,
        access: Access,
    ) -> Self {
        let obstacle = match &exported.buffer {
            Ok(buffer) => match register_buffer(buffer, &exported.memory, domain, sizes, access) {
                Ok(pieces) => return Self { path: RegistrationPath::DmaBuf { pieces: pieces.len() }, pieces },
                Err(error) => RegistrationObstacle::new(ObstacleKind::Refused, error),
            },
            Err(obstacle) => obstacle.clone(),
        };
        if !matches!(obstacle.kind, ObstacleKind::NoDescriptor | ObstacleKind::Refused) {
            return Self::refused(obstacle);
        }
        match domain.register_peer_memory(&exported.memory, access) {
            Ok(region) => Self { pieces: vec![region], path: RegistrationPath::PeerMemory(obstacle) },
            Err(error) => {
                let RegistrationObstacle { kind, detail } = obstacle;
                let detail = format!("{detail}; and as peer memory: {error}");
                Self::refused(RegistrationObstacle { kind, detail })
            }
        }
    }

    /// Returns the record of memory that is not registered because of an obstacle.
    pub(in crate::rdma) const fn refused(obstacle: RegistrationObstacle) -> Self {
        Self { pieces: Vec::new(), path: RegistrationPath::Staged(obstacle) }
    }

    /// Returns how the memory is accessed.
    pub(in crate::rdma) const fn path(&self) -> &RegistrationPath {
        &self.path
    }

    /// Returns true if the RDMA device can access the memory.
    pub(in crate::rdma) const fn is_registered(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Returns the registration if it is of the whole memory.
    pub(in crate::rdma) fn whole(&self) -> Option<&MemoryRegion> {
        if let [whole] = &self.pieces[..] { Some(whole) } else { None }
    }

    /// Returns the piece that an address is in; `None` if there is none.
    pub(in crate::rdma) fn at(&self, address: u64) -> Option<&MemoryRegion> {
        let behind = self.pieces.partition_point(|piece| piece.address() <= address);
        let piece = &self.pieces[behind.checked_sub(1)?];
        (address - piece.address() < piece.bytes() as u64).then_some(piece)
    }
}

/// Registers memory through its descriptor: as a whole, or in the largest pieces that are accepted.
fn register_buffer(
    buffer: &DmaBuf,
    memory: &DeviceMemory,
    domain: &ProtectionDomain,
    sizes: &mut PieceSizes,
    access: Access,
) -> Result<Vec<MemoryRegion>, VerbsError> {
    let (address, bytes, id) = (memory.address(), memory.bytes(), memory.device().id());
    let mut refusal = match domain.register_dma_buf(buffer, 0, bytes, access) {
        Ok(whole) => return Ok(vec![whole]),
        Err(error) if !error.is_invalid() => return Err(error),
        Err(error) => error,
    };
    let mut piece_bytes = sizes.0.get(&id).copied().unwrap_or(1 << bytes.max(2).saturating_sub(1).ilog2());
    while piece_bytes >= PIECE_BYTES_LEAST && bytes / piece_bytes <= PIECES_MOST {
        let pieces = cut(address, bytes, piece_bytes);
        let registered = pieces.map(|(from, bytes)| domain.register_dma_buf(buffer, from, bytes, access));
        match registered.collect::<Result<Vec<_>, _>>() {
            Ok(pieces) => return Ok(pieces),
            Err(error) if !error.is_invalid() => return Err(error),
            Err(error) => refusal = error,
        }
        piece_bytes /= 2;
        sizes.0.insert(id, piece_bytes.max(PIECE_BYTES_LEAST));
    }
    Err(refusal)
}

/// Returns the offset and the length of each piece of memory that is cut at the addresses that are multiples of
/// `piece_bytes`.
fn cut(address: u64, bytes: u64, piece_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let to_boundary = piece_bytes - (address + from) % piece_bytes;
        let piece = (from, to_boundary.min(bytes - from));
        from += piece.1;
        (piece.1 > 0).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_cut_at_multiples_of_the_piece() {
        let found: Vec<_> = cut((2 << 20) - 4096, (4 << 20) + 8192, 2 << 20).collect();
        assert_eq!(found, [(0, 4096), (4096, 2 << 20), ((2 << 20) + 4096, 2 << 20), ((4 << 20) + 4096, 4096)]);
        assert_eq!(cut(4 << 20, 100, 2 << 20).collect::<Vec<_>>(), [(0, 100)]);
    }
}
