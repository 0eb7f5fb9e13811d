//! Memory of a shard in files that another process can take over: in a directory, where they outlive processes, or
//! memfds, which end with the last process that has them. The process that is to take over maps them beforehand:
//! mapping many pages takes longer than clients are to wait.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use kvplane_store::image::{HEADER_BYTES, ImageError, ImageHeader, MemoryIdentity};
use kvplane_store::service::Identity;
use kvplane_sys::{MemoryDirectory, MemoryFile, MemoryFileError, Region, RegionError, RegionOptions};

/// Reason why the memory of a running process cannot be taken over.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum MappedMemoryError {
    /// A file cannot be used.
    File(MemoryFileError),
    /// The pool cannot be mapped.
    Map(RegionError),
    /// The header of the image is not one that this program knows.
    Image(ImageError),
    /// The file of the image has no header yet.
    NoHeader,
    /// The memory is that of another node, or has another shape than this process would give it.
    Shape { theirs: Box<MemoryIdentity>, ours: Box<MemoryIdentity> },
}

impl fmt::Display for MappedMemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Map(error) => error.fmt(f),
            Self::Image(error) => error.fmt(f),
            Self::NoHeader => f.write_str("the running process has not described its memory yet"),
            Self::Shape { theirs, ours } => {
                let shape = |f: &mut fmt::Formatter<'_>, of: &MemoryIdentity| {
                    let MemoryIdentity { cluster, node, shard, shards, pool_bytes, unit_bytes, .. } = of;
                    write!(
                        f,
                        "shard {shard} of {shards} of node {node} of cluster {cluster:?} with {pool_bytes} bytes in \
                         units of {unit_bytes}"
                    )
                };
                f.write_str("the memory of the running process is that of ")?;
                shape(f, theirs)?;
                f.write_str(", not that of ")?;
                shape(f, ours)
            }
        }
    }
}

impl std::error::Error for MappedMemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File(error) => Some(error),
            Self::Map(error) => Some(error),
            Self::Image(error) => Some(error),
            Self::NoHeader | Self::Shape { .. } => None,
        }
    }
}

impl From<MemoryFileError> for MappedMemoryError {
    fn from(error: MemoryFileError) -> Self {
        Self::File(error)
    }
}

/// Files of a shard's memory: its pool, and the image of the objects in it.
#[derive(Clone, Debug)]
pub struct KeptFiles {
    pool: Arc<MemoryFile>,
    image: Arc<MemoryFile>,
}

impl KeptFiles {
    /// Opens the files of a shard; missing ones are created, without any bytes.
    ///
    /// # Errors
    /// When they cannot be opened, or are not private.
    pub fn open(directory: &MemoryDirectory, shard: u16) -> Result<Self, MemoryFileError> {
        let image = Arc::new(directory.open(&format!("shard-{shard}.image"))?);
        Ok(Self { pool: Arc::new(directory.open(&format!("shard-{shard}.pool"))?), image })
    }

    /// Returns the memfds of a shard whose pool was allocated anew.
    fn of_pool(shard: u16, pool: &Region) -> Result<Self, MemoryFileError> {
        let image = Arc::new(MemoryFile::create(&memfd_name(shard, "image"))?);
        Ok(Self { pool: Arc::new(MemoryFile::of_region(pool, &memfd_name(shard, "pool"))?), image })
    }

    /// Adopts the descriptors of a process that has the files: those of a directory, or memfds without one.
    ///
    /// # Errors
    /// When they are not those of private files in memory.
    pub fn adopt(directory: Option<&Path>, shard: u16, pool: OwnedFd, image: OwnedFd) -> Result<Self, MemoryFileError> {
        let path = |kind: &str| match directory {
            Some(directory) => directory.join(format!("shard-{shard}.{kind}")),
            None => MemoryFile::memfd_path(&memfd_name(shard, kind)),
        };
        let pool = Arc::new(MemoryFile::adopt(pool, path("pool"))?);
        Ok(Self { pool, image: Arc::new(MemoryFile::adopt(image, path("image"))?) })
    }

    /// Returns the file of the pool.
    #[must_use]
    pub fn pool(&self) -> &MemoryFile {
        &self.pool
    }

    /// Returns the file of the image.
    #[must_use]
    pub fn image(&self) -> &MemoryFile {
        &self.image
    }
}

fn memfd_name(shard: u16, kind: &str) -> String {
    format!("kvplane-{kind}-{shard}")
}

/// Memory of a shard that this process has mapped. That of a running process is only to be accessed once that process
/// has handed it over.
#[derive(Debug)]
pub struct MappedMemory {
    files: KeptFiles,
    region: Arc<Region>,
}

impl MappedMemory {
    /// Allocates memory for a shard, in memfds.
    ///
    /// # Errors
    /// When there is too little of it, or the kernel refuses.
    pub(crate) fn allocate(shard: u16, options: &RegionOptions) -> Result<Self, RegionError> {
        let region = Region::allocate(options)?;
        let files = KeptFiles::of_pool(shard, &region).map_err(RegionError::File)?;
        Ok(Self { files, region })
    }

    /// Maps the pool of a shard whose files belong to this process; what it contains stays as it is.
    pub(crate) fn open(files: KeptFiles, options: &RegionOptions) -> Result<Self, RegionError> {
        let region = Region::map_memory_file(&files.pool, options)?;
        Ok(Self { files, region })
    }

    /// Maps the pool of a shard of a running process that this process is to serve, one of `shards`, in units of this
    /// size ([`crate::shard::unit_bytes`]).
    ///
    /// # Errors
    /// When the memory is not what that shard would have, or cannot be mapped. The running process is not disturbed.
    pub fn map(
        files: KeptFiles,
        of: &Identity,
        shards: u16,
        unit_bytes: u64,
        options: &RegionOptions,
    ) -> Result<Self, MappedMemoryError> {
        let mut header = vec![0; HEADER_BYTES];
        if files.image.bytes()? < HEADER_BYTES as u64 {
            return Err(MappedMemoryError::NoHeader);
        }
        files.image.read_at(0, &mut header)?;
        let theirs = ImageHeader::decode(&header).map_err(MappedMemoryError::Image)?.identity;
        let ours = MemoryIdentity {
            uuid: theirs.uuid,
            cluster: of.cluster.clone(),
            node: of.node,
            shard: of.shard,
            shards,
            pool_bytes: options.bytes as u64,
            unit_bytes,
        };
        let file_bytes = ours.pool_bytes.next_multiple_of(files.pool.page_bytes() as u64);
        // Mapping sets the length of a file that has another one.
        if theirs != ours || files.pool.bytes()? != file_bytes {
            return Err(MappedMemoryError::Shape { theirs: Box::new(theirs), ours: Box::new(ours) });
        }
        Self::open(files, options).map_err(MappedMemoryError::Map)
    }

    /// Returns the files.
    #[must_use]
    pub const fn files(&self) -> &KeptFiles {
        &self.files
    }

    pub(crate) const fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

/// Bytes that the file of an image needs at most, for this number of objects.
#[must_use]
pub const fn image_bytes_most(objects: u64) -> u64 {
    HEADER_BYTES as u64 + objects.saturating_mul(kvplane_store::image::OBJECT_BYTES as u64)
}
