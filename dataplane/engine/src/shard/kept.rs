//! Memory of a shard that outlives its process: its pool is a file in memory, beside the image of the objects in it.
//!
//! The image of the former process is checked as a whole before anything of it is used. The memory is marked as in use
//! as soon as objects in it are served, which no later process takes for an image; until then it stays as it is, so
//! that a start that fails costs nothing. The image of this process is written when its shard has ended.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::ids::{Epoch, NodeId};
use kvplane_store::PoolSums;
use kvplane_store::image::{HEADER_BYTES, ImageHeader, ImagePhase, MemoryIdentity, PHASE_AT};
use kvplane_store::service::{Discard, FormerImage, Identity, PoolBytes};
use kvplane_sys::{HugePages, MemoryDirectory, MemoryFile, MemoryFileError, Region, RegionError, RegionOptions};

use crate::host::{KeptFiles, KeptMemoryConfig, MappedMemory, ShardHost, end_accesses};

/// Longest wait at the end for accesses of the pool: by peers on this host, and by the SSD.
const ACCESSES_END: Duration = Duration::from_secs(1);

/// Reason why a shard cannot use its kept memory.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum KeptMemoryError {
    /// A file could not be used.
    File(MemoryFileError),
    /// The memory belongs to another node, or to a node of another cluster.
    Foreign { path: PathBuf, cluster: String, node: NodeId },
}

impl fmt::Display for KeptMemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
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

/// Files of a shard's kept memory.
#[derive(Debug)]
pub(super) struct KeptMemory {
    files: KeptFiles,
    /// Pool that is mapped already.
    mapped: Option<Arc<MappedMemory>>,
    identity: MemoryIdentity,
    /// Header of the former process's image, until its objects are served or dropped.
    pending: Option<ImageHeader>,
    /// True if the former process's image does not count.
    is_discarded: bool,
    region: Option<Arc<KeptPool>>,
    /// Keeps other processes out.
    _directory: Arc<MemoryDirectory>,
}

/// Image of the former process: none if there was no process, or the reason why it does not count.
pub(super) type ImageOutcome = Result<Option<FormerImage>, Discard>;

impl KeptMemory {
    /// Opens the memory of a shard with a pool of this size and unit, and reads the image of the former process.
    ///
    /// # Errors
    /// When the files cannot be used, or belong to another node.
    pub(super) fn open(
        config: &KeptMemoryConfig,
        of: &Identity,
        pool_bytes: u64,
        unit_bytes: u64,
    ) -> Result<(Self, ImageOutcome), KeptMemoryError> {
        let (directory, mapped) = (Arc::clone(&config.directory), config.mapped.clone());
        let files = match &mapped {
            Some(mapped) => mapped.files().clone(),
            None => KeptFiles::open(&directory, of.shard.0)?,
        };
        let mut identity = MemoryIdentity {
            uuid: config.fresh_uuid,
            cluster: of.cluster.clone(),
            node: of.node,
            shard: of.shard,
            shards: config.shards,
            pool_bytes,
            unit_bytes,
        };
        let header = read_header(files.image())?;
        if let Ok(Some(ImageHeader { identity: MemoryIdentity { uuid, cluster, node, .. }, .. })) = &header {
            if (cluster, *node) != (&of.cluster, of.node) {
                let path = files.image().path().to_owned();
                return Err(KeptMemoryError::Foreign { path, cluster: cluster.clone(), node: *node });
            }
            identity.uuid = *uuid;
        }
        let mut kept =
            Self { files, mapped, identity, pending: None, is_discarded: false, region: None, _directory: directory };
        let found = match &header {
            Ok(Some(header)) => kept.read_image(header)?.map(Some),
            Ok(None) => Ok(None),
            Err(discard) => Err(*discard),
        };
        kept.is_discarded = found.is_err();
        match (&found, header) {
            (Ok(Some(_)), Ok(header)) => kept.pending = header,
            // The next process is to know whose memory it is, and that this process was killed, if it is.
            _ => kept.mark_in_use()?,
        }
        Ok((kept, found))
    }

    /// Reads the image behind a header.
    fn read_image(&self, header: &ImageHeader) -> Result<Result<FormerImage, Discard>, KeptMemoryError> {
        if let Err(error) = header.check_complete() {
            return Ok(Err(Discard::Image(error)));
        }
        if header.identity != self.identity {
            return Ok(Err(Discard::Layout));
        }
        let file_bytes = self.files.image().bytes()?;
        let length = header.contents_bytes().filter(|bytes| bytes.saturating_add(HEADER_BYTES as u64) <= file_bytes);
        let mut bytes = vec![0; length.unwrap_or(0) as usize];
        self.files.image().read_at(HEADER_BYTES as u64, &mut bytes)?;
        let contents = header.decode_contents(&bytes).map_err(Discard::Image);
        Ok(contents.map(|contents| FormerImage { origin: header.origin, contents }))
    }

    /// Maps the pool, whose contents stay as they are.
    pub(super) fn map_pool(&mut self, options: &RegionOptions) -> Result<Arc<Region>, RegionError> {
        let region = match &self.mapped {
            Some(mapped) => Arc::clone(mapped.region()),
            None => Region::map_memory_file(self.files.pool(), options)?,
        };
        self.region = Some(Arc::new(KeptPool(Arc::clone(&region))));
        Ok(region)
    }

    /// Returns the checksums of the pool's bytes.
    ///
    /// # Panics
    /// If the pool is not mapped yet.
    pub(super) fn sums(&self) -> Arc<dyn PoolSums> {
        Arc::clone(self.region.as_ref().expect("the pool is mapped")) as Arc<dyn PoolSums>
    }

    /// Returns the identity of the memory.
    pub(super) const fn uuid(&self) -> u128 {
        self.identity.uuid
    }

    /// Acts on the service's decision about the former process's objects: from then on the memory is in use. To be
    /// called after every map, before any request is served.
    ///
    /// # Errors
    /// When that cannot be recorded: the shard must not serve then, because the image would count at the next start.
    pub(super) fn observe(&mut self, host: &mut ShardHost, name: &str) -> io::Result<()> {
        let service = host.service();
        if self.pending.is_some() && !service.inspect().awaits_map() {
            self.mark_in_use().map_err(io::Error::other)?;
        }
        let Some(report) = host.service().control().poll_kept() else { return Ok(()) };
        match report.discard {
            Some(discard) => tracing::warn!("{name}: memory is empty, nothing of it was kept: {discard}"),
            None => tracing::info!(
                "{name}: kept {} objects, {} bytes; dropped {} whose slots others had or have, {} damaged ones",
                report.objects,
                report.bytes,
                report.dropped,
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

    /// Writes the image of a shard that has ended, for the next process. Returns the number of its objects; `None` if
    /// there is no image.
    pub(super) fn close(&mut self, host: &mut ShardHost, name: &str) -> Option<u64> {
        let lends = !end_accesses(host, ACCESSES_END);
        if lends {
            tracing::warn!("{name}: a process on this host, or the SSD, did not let go of memory within a second");
        }
        let pool = self.region.as_ref()?;
        // A start that failed: the next one is to say why memory is empty.
        if self.is_discarded && host.service().inspect().served_epoch() == Epoch(0) {
            return None;
        }
        let opening = host.service().inspect().ssd_opening();
        let written = match host.service().control().image_memory(&**pool, lends) {
            Some(image) => self.write(&image).map(|()| image.contents.objects.len() as u64),
            None => self.keep_pending(opening),
        };
        match written {
            Ok(objects) => {
                tracing::info!("{name}: the image of {objects} objects in memory is written");
                Some(objects)
            }
            Err(error) => {
                tracing::error!("{name}: memory is lost, its image could not be written: {error}");
                None
            }
        }
    }

    /// Records that the former process's image still counts after this opening of the SSD.
    fn keep_pending(&self, opening: u64) -> Result<u64, RegionError> {
        let Some(mut header) = self.pending.clone() else { return Ok(0) };
        if opening != 0 && header.origin.opening != opening {
            header.origin.opening = opening;
            let region = self.map_image()?;
            self.replace_header(&region, header.clone());
        }
        Ok(header.objects())
    }

    fn write(&self, image: &FormerImage) -> Result<(), RegionError> {
        let FormerImage { origin, contents } = image;
        let bytes = HEADER_BYTES as u64 + contents.encoded_bytes();
        self.files.image().set_bytes(bytes).map_err(RegionError::File)?;
        let region = self.map_image()?;
        region.copy_in(PHASE_AT, &(ImagePhase::Writing as u32).to_le_bytes());
        let mut at = HEADER_BYTES;
        let checksum = contents.encode(|piece| {
            region.copy_in(at, piece);
            at += piece.len();
        });
        self.replace_header(&region, ImageHeader::of(self.identity.clone(), *origin, contents, checksum));
        Ok(())
    }

    /// Replaces the header by that of a complete image; its phase is written last.
    fn replace_header(&self, region: &Region, mut header: ImageHeader) {
        let set = |phase: ImagePhase| region.copy_in(PHASE_AT, &(phase as u32).to_le_bytes());
        set(ImagePhase::Writing);
        header.phase = ImagePhase::Writing;
        region.copy_in(0, &header.encode());
        set(ImagePhase::Complete);
    }

    /// Records that the memory is in use, and gives the memory of the former image back.
    fn mark_in_use(&mut self) -> Result<(), MemoryFileError> {
        if self.files.image().bytes()? < HEADER_BYTES as u64 {
            self.files.image().set_bytes(HEADER_BYTES as u64)?;
        }
        let region = self.map_image().map_err(|error| match error {
            RegionError::File(error) => error,
            other => MemoryFileError::Io {
                action: "map",
                path: self.files.image().path().to_owned(),
                source: io::Error::other(other.to_string()),
            },
        })?;
        region.copy_in(PHASE_AT, &(ImagePhase::InUse as u32).to_le_bytes());
        region.copy_in(0, &ImageHeader::in_use(self.identity.clone()).encode());
        drop(region);
        self.pending = None;
        self.files.image().set_bytes(HEADER_BYTES as u64)
    }

    /// Maps the file of the image, at its present length.
    fn map_image(&self) -> Result<Arc<Region>, RegionError> {
        let bytes = self.files.image().bytes().map_err(RegionError::File)? as usize;
        let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("kvplane-image", bytes) };
        Region::map_memory_file(self.files.image(), &options)
    }
}

/// Reads the header of an image: none in a new file.
fn read_header(image: &MemoryFile) -> Result<Result<Option<ImageHeader>, Discard>, MemoryFileError> {
    let bytes = image.bytes()?;
    let mut header = vec![0; HEADER_BYTES];
    if bytes < HEADER_BYTES as u64 {
        return Ok(Ok(None));
    }
    image.read_at(0, &mut header)?;
    // A process that was killed while it began a new file.
    if header.iter().all(|byte| *byte == 0) {
        return Ok(Ok(None));
    }
    Ok(ImageHeader::decode(&header).map(Some).map_err(Discard::Image))
}
