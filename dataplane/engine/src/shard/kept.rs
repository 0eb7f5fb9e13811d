//! Memory of a shard that a next process can serve: its pool is a file in memory, beside the image of the objects in
//! it. Files in a directory outlive the process, which always leaves an image; memfds pass to a successor that the
//! process hands over to, and it leaves an image only then.
//!
//! The image of the former process is checked as a whole before anything of it is used. The memory is marked as in use
//! as soon as objects in it are served, which no later process takes for an image; until then it stays as it is, so
//! that a start that fails costs nothing. The image of this process is written when its shard has ended.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::ids::NodeId;
use kvplane_store::PoolSums;
use kvplane_store::image::MemoryIdentity;
use kvplane_store::service::{Identity, ImageFile, ImageOutcome, MemoryImage, OpenImageError, PoolBytes};
use kvplane_sys::{HugePages, MemoryDirectory, MemoryFileError, Region, RegionError, RegionOptions};

use crate::host::{KeptFiles, KeptMemoryConfig, MappedMemory, ShardHost, end_accesses};

/// Longest wait at the end for accesses of the pool: by peers on this host, and by the SSD.
const ACCESSES_END: Duration = Duration::from_secs(1);

/// Reason why a shard cannot use its kept memory.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum KeptMemoryError {
    /// A file could not be used.
    File(MemoryFileError),
    /// New memory could not be allocated.
    Memory(RegionError),
    /// The memory belongs to another node, or to a node of another cluster.
    Foreign { path: PathBuf, cluster: String, node: NodeId },
}

impl fmt::Display for KeptMemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Foreign { path, cluster, node } => write!(
                f,
                "{} has the memory of node {node} of cluster {cluster:?}: name another directory, or remove its files",
                path.display()
            ),
        }
    }
}

impl std::error::Error for KeptMemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File(error) => Some(error),
            Self::Memory(error) => Some(error),
            Self::Foreign { .. } => None,
        }
    }
}

impl From<MemoryFileError> for KeptMemoryError {
    fn from(error: MemoryFileError) -> Self {
        Self::File(error)
    }
}

/// Bytes of the pool, and their checksums.
#[derive(Debug)]
struct KeptPool(Arc<Region>);

impl PoolSums for KeptPool {
    fn checksum(&self, offset: u64, bytes: u64) -> u64 {
        let mut sum = PayloadChecksum::new();
        self.0.read_with(offset as usize, bytes as usize, &mut |_, part| sum.update(part));
        sum.finish()
    }
}

impl PoolBytes for KeptPool {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.0.copy_out(offset as usize, into);
    }

    fn bytes(&self) -> u64 {
        self.0.bytes() as u64
    }
}

/// File of an image in memory, written through a mapping: hugetlbfs has no other writes.
#[derive(Debug)]
struct MappedImage {
    file: KeptFiles,
    /// Mapping of the file at its present length, since the first write.
    region: Option<Arc<Region>>,
}

impl MappedImage {
    fn map(&mut self) -> Result<&Arc<Region>, RegionError> {
        let region = match self.region.take() {
            Some(region) => region,
            None => {
                let bytes = self.file.image().bytes().map_err(RegionError::File)? as usize;
                let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-image", bytes) };
                Region::map_memory_file(self.file.image(), &options)?
            }
        };
        Ok(self.region.insert(region))
    }
}

impl ImageFile for MappedImage {
    type Error = RegionError;

    fn bytes(&self) -> Result<u64, RegionError> {
        self.file.image().bytes().map_err(RegionError::File)
    }

    fn set_bytes(&mut self, bytes: u64) -> Result<(), RegionError> {
        self.region = None;
        self.file.image().set_bytes(bytes).map_err(RegionError::File)
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), RegionError> {
        self.file.image().read_at(offset, into).map_err(RegionError::File)
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        self.map()?.copy_in(offset as usize, bytes);
        Ok(())
    }
}

/// Mark of a shard whose process leaves an image of its memory at its end.
#[derive(Clone, Debug)]
pub(super) struct ImageWish {
    is_made: Arc<AtomicBool>,
    has_successor: Arc<AtomicBool>,
}

impl ImageWish {
    fn new(is_made: bool) -> Self {
        Self { is_made: Arc::new(AtomicBool::new(is_made)), has_successor: Arc::default() }
    }

    /// Has the shard leave an image when it ends, for a successor that waits for it.
    pub(super) fn make(&self) {
        self.has_successor.store(true, Ordering::Release);
        self.is_made.store(true, Ordering::Release);
    }

    fn is_made(&self) -> bool {
        self.is_made.load(Ordering::Acquire)
    }
}

/// Files of a shard's memory.
#[derive(Debug)]
pub(super) struct KeptMemory {
    files: KeptFiles,
    /// Pool that is mapped already.
    mapped: Option<Arc<MappedMemory>>,
    image: MemoryImage,
    image_file: MappedImage,
    region: Option<Arc<KeptPool>>,
    wish: ImageWish,
    /// Keeps other processes out; none with memfds.
    directory: Option<Arc<MemoryDirectory>>,
}

impl KeptMemory {
    /// Opens the memory of a shard with a pool of these options and this unit, and reads the image of the former
    /// process.
    ///
    /// # Errors
    /// When the files cannot be used, or belong to another node; when there is too little memory.
    pub(super) fn open(
        config: &KeptMemoryConfig,
        of: &Identity,
        options: &RegionOptions,
        unit_bytes: u64,
    ) -> Result<(Self, ImageOutcome), KeptMemoryError> {
        let (files, mapped) = match (&config.mapped, &config.directory) {
            (Some(mapped), _) => (mapped.files().clone(), Some(Arc::clone(mapped))),
            // Mapped once it is known whose memory it is: that sets the length of the pool.
            (None, Some(directory)) => (KeptFiles::open(directory, of.shard.0)?, None),
            (None, None) => {
                let memory = Arc::new(MappedMemory::allocate(of.shard.0, options).map_err(KeptMemoryError::Memory)?);
                (memory.files().clone(), Some(memory))
            }
        };
        let identity = MemoryIdentity {
            uuid: config.fresh_uuid,
            cluster: of.cluster.clone(),
            node: of.node,
            shard: of.shard,
            shards: config.shards,
            pool_bytes: options.bytes as u64,
            unit_bytes,
        };
        let has_pool = config.directory.is_some() && mapped.is_none() && files.pool().bytes()? > 0;
        let path = files.image().path().to_owned();
        let mut image_file = MappedImage { file: files.clone(), region: None };
        let (image, mut found) =
            MemoryImage::open(&mut image_file, identity, has_pool).map_err(|error| match error {
                OpenImageError::Foreign(theirs) => {
                    KeptMemoryError::Foreign { path: path.clone(), cluster: theirs.cluster, node: theirs.node }
                }
                OpenImageError::File(RegionError::File(error)) => KeptMemoryError::File(error),
                OpenImageError::File(other) => KeptMemoryError::File(MemoryFileError::Io {
                    action: "map",
                    path: path.clone(),
                    source: io::Error::other(other.to_string()),
                }),
            })?;
        if let Ok(Some(former)) = &mut found {
            former.is_void |= config.is_void;
            config.last_member.iter().for_each(|last| former.expect_member(*last));
        }
        let directory = config.directory.clone();
        let wish = ImageWish::new(directory.is_some());
        Ok((Self { files, mapped, image, image_file, region: None, wish, directory }, found))
    }

    /// Maps the pool, whose contents stay as they are.
    pub(super) fn map_pool(&mut self, options: &RegionOptions) -> Result<Arc<MappedMemory>, RegionError> {
        let memory = match &self.mapped {
            Some(mapped) => Arc::clone(mapped),
            None => Arc::new(MappedMemory::open(self.files.clone(), options)?),
        };
        self.region = Some(Arc::new(KeptPool(Arc::clone(memory.region()))));
        Ok(memory)
    }

    /// Returns true if a successor waits for the end of the shard.
    pub(super) fn has_successor(&self) -> bool {
        self.wish.has_successor.load(Ordering::Acquire)
    }

    /// Returns the mark by which the shard leaves an image.
    pub(super) fn wish(&self) -> ImageWish {
        self.wish.clone()
    }

    /// Returns the checksums of the pool's bytes.
    ///
    /// # Panics
    /// If the pool is not mapped yet.
    pub(super) fn sums(&self) -> Arc<dyn PoolSums> {
        Arc::clone(self.region.as_ref().expect("the pool is mapped")) as Arc<dyn PoolSums>
    }

    /// Returns the identity of memory that outlives processes; `None` for memfds.
    pub(super) fn lasting_uuid(&self) -> Option<u128> {
        self.directory.as_ref().map(|_| self.image.uuid())
    }

    /// Acts on the service's decision about the former process's objects: from then on the memory is in use. To be
    /// called after every map, before any request is served.
    ///
    /// # Errors
    /// When that cannot be recorded: the shard must not serve then, because the image would count at the next start.
    pub(super) fn observe(&mut self, host: &mut ShardHost, name: &str) -> io::Result<()> {
        self.image.observe(&mut self.image_file, host.service()).map_err(io::Error::other)?;
        let Some(report) = host.service().control().poll_kept() else { return Ok(()) };
        match report.discard {
            Some(discard) => tracing::warn!("{name}: memory is empty, nothing of it was kept: {discard}"),
            None => tracing::info!(
                "{name}: kept {} objects, {} bytes; dropped {} whose slots others had or have, {} beyond the limit of \
                 objects (--max-objects), {} damaged ones",
                report.objects,
                report.bytes,
                report.dropped,
                report.left_out,
                report.damaged
            ),
        }
        if report.withheld_bytes > 0 {
            tracing::warn!(
                "{name}: {} bytes of memory are not used: a process that had mapped them was in the middle of an \
                 access when a former process of this node ended; empty the directory of kept memory to get them back",
                report.withheld_bytes
            );
        }
        Ok(())
    }

    /// Writes the image of a shard that has ended, if the next process can have it. Returns the number of its objects;
    /// `None` if there is no image.
    pub(super) fn close(&mut self, host: &mut ShardHost, name: &str) -> Option<u64> {
        if !self.wish.is_made() {
            return None;
        }
        let lends = !end_accesses(host, ACCESSES_END);
        if lends {
            tracing::warn!("{name}: a process on this host, or the SSD, did not let go of memory within a second");
        }
        let pool = self.region.as_ref()?;
        match self.image.close(&mut self.image_file, host.service(), &**pool, lends) {
            Ok(objects) => objects.inspect(|objects| {
                tracing::info!("{name}: the image of {objects} objects in memory is written");
            }),
            Err(error) => {
                tracing::error!("{name}: memory is lost, its image could not be written: {error}");
                None
            }
        }
    }
}
