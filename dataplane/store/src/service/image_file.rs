//! File of a shard's memory image, from the start of a process to its end: the former process's image is read, the
//! memory is marked as in use, and the image of this process is written.
//!
//! The order of the writes is what a crash at any moment depends on: a phase that says `Complete` is written when
//! everything else of the image is, and one that says `InUse` before any object is served.

use kvplane_proto::ids::Incarnation;

use super::kept_memory::{Discard, FormerImage, LayoutChange};
use super::types::PoolBytes;
use super::{Epoch, Service};
use crate::image::{HEADER_BYTES, ImageError, ImageHeader, ImagePhase, MemoryIdentity, PHASE_AT};

/// File of an image, as its host has it. A process that is killed leaves what it wrote before.
pub trait ImageFile {
    /// Error of the host.
    type Error;

    /// Returns the length, in bytes.
    ///
    /// # Errors
    /// When the file cannot be used.
    fn bytes(&self) -> Result<u64, Self::Error>;

    /// Sets the length to at least this many bytes, and to no more than the host rounds lengths up to.
    ///
    /// # Errors
    /// When there is no room.
    fn set_bytes(&mut self, bytes: u64) -> Result<(), Self::Error>;

    /// Reads bytes that are within the length.
    ///
    /// # Errors
    /// When the file cannot be read.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), Self::Error>;

    /// Writes bytes within the length. What one call writes is there before what the next one does.
    ///
    /// # Errors
    /// When the file cannot be written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// Reason why the file of an image cannot be used.
#[derive(Debug)]
pub enum OpenImageError<E> {
    /// The host cannot use it.
    File(E),
    /// The memory belongs to another node, or to a node of another cluster: that of this identity.
    Foreign(Box<MemoryIdentity>),
}

impl<E> From<E> for OpenImageError<E> {
    fn from(error: E) -> Self {
        Self::File(error)
    }
}

/// Image of the former process: none if there was no process, or the reason why it does not count.
pub type ImageOutcome = Result<Option<FormerImage>, Discard>;

/// Memory image of a shard in its file, as the present process has it.
#[derive(Debug)]
pub struct MemoryImage {
    identity: MemoryIdentity,
    /// Header of the former process's image, until its objects are served or dropped.
    pending: Option<ImageHeader>,
    /// True if the former process's image does not count.
    is_discarded: bool,
}

impl MemoryImage {
    /// Opens the file for memory of this identity, whose uuid is that of new memory, and reads the image of the former
    /// process. Unless that counts, the memory is in use from now on. With `has_pool`, there is a pool of a former
    /// process, so that a file without an image is not a new one.
    ///
    /// # Errors
    /// When the file cannot be used, or the memory belongs to another node.
    pub fn open<F: ImageFile>(
        file: &mut F,
        mut identity: MemoryIdentity,
        has_pool: bool,
    ) -> Result<(Self, ImageOutcome), OpenImageError<F::Error>> {
        let header = match read_header(file)? {
            Ok(None) if has_pool => Err(Discard::Image(ImageError::Magic)),
            header => header,
        };
        if let Ok(Some(ImageHeader { identity: theirs, .. })) = &header {
            if (&theirs.cluster, theirs.node) != (&identity.cluster, identity.node) {
                return Err(OpenImageError::Foreign(Box::new(theirs.clone())));
            }
            identity.uuid = theirs.uuid;
        }
        let mut image = Self { identity, pending: None, is_discarded: false };
        let found = match &header {
            Ok(Some(header)) => image.read(file, header)?.map(Some),
            Ok(None) => Ok(None),
            Err(discard) => Err(*discard),
        };
        image.is_discarded = found.is_err();
        match (&found, header) {
            (Ok(Some(_)), Ok(header)) => image.pending = header,
            // The next process is to know whose memory it is, and that this process was killed, if it is.
            _ => image.mark_in_use(file)?,
        }
        Ok((image, found))
    }

    /// Returns the identity of the memory.
    #[must_use]
    pub const fn uuid(&self) -> u128 {
        self.identity.uuid
    }

    /// Acts on the service's decision about the former process's objects: from then on the memory is in use. To be
    /// called after every map, before any request is served.
    ///
    /// # Errors
    /// When that cannot be recorded: the shard must not serve then, because the image would count at the next start.
    pub fn observe<F: ImageFile>(&mut self, file: &mut F, service: &Service) -> Result<(), F::Error> {
        if self.pending.is_some() && !service.inspect().awaits_map() {
            self.mark_in_use(file)?;
        }
        Ok(())
    }

    /// Writes the image of a shard that has ended, for the next process; the former process's image stays if no map has
    /// decided about it. With `lends`, other processes may still access the pool. Returns the number of objects; `None`
    /// if a start has failed whose successor is to say why memory is empty.
    ///
    /// # Errors
    /// When the image could not be written: it does not count then.
    pub fn close<F: ImageFile>(
        &self,
        file: &mut F,
        service: &mut Service,
        pool: &dyn PoolBytes,
        lends: bool,
    ) -> Result<Option<u64>, F::Error> {
        if self.is_discarded && service.inspect().served_epoch() == Epoch(0) {
            return Ok(None);
        }
        let (opening, heir) = (service.inspect().ssd_opening(), service.inspect().image_heir());
        match service.control().image_memory(pool, lends) {
            Some(image) => self.write(file, &image).map(|()| Some(image.contents.objects.len() as u64)),
            None => self.keep_pending(file, opening, heir).map(Some),
        }
    }

    /// Reads the image behind a header.
    fn read<F: ImageFile>(&self, file: &F, header: &ImageHeader) -> Result<Result<FormerImage, Discard>, F::Error> {
        if let Err(error) = header.check_complete() {
            return Ok(Err(Discard::Image(error)));
        }
        if let Some(change) = LayoutChange::between(&header.identity, &self.identity) {
            return Ok(Err(Discard::Layout(change)));
        }
        let file_bytes = file.bytes()?;
        let length = header.contents_bytes().filter(|bytes| bytes.saturating_add(HEADER_BYTES as u64) <= file_bytes);
        let mut bytes = vec![0; length.unwrap_or(0) as usize];
        file.read_at(HEADER_BYTES as u64, &mut bytes)?;
        let contents = header.decode_contents(&bytes).map_err(Discard::Image);
        Ok(contents.map(|contents| FormerImage { origin: header.origin, contents, is_void: false }))
    }

    fn write<F: ImageFile>(&self, file: &mut F, image: &FormerImage) -> Result<(), F::Error> {
        let FormerImage { origin, contents, .. } = image;
        file.set_bytes(HEADER_BYTES as u64 + contents.encoded_bytes())?;
        write_phase(file, ImagePhase::Writing)?;
        let (mut at, mut written) = (HEADER_BYTES as u64, Ok(()));
        let checksum = contents.encode(|piece| {
            if written.is_ok() {
                written = file.write_at(at, piece);
            }
            at += piece.len() as u64;
        });
        written?;
        replace_header(file, ImageHeader::of(self.identity.clone(), *origin, contents, checksum))
    }

    /// Records that the former process's image still counts after this opening of the SSD, and after this incarnation.
    fn keep_pending<F: ImageFile>(
        &self,
        file: &mut F,
        opening: u64,
        heir: Option<Incarnation>,
    ) -> Result<u64, F::Error> {
        let Some(mut header) = self.pending.clone() else { return Ok(0) };
        let objects = header.objects();
        let mut origin = header.origin;
        origin.opening = if opening == 0 { origin.opening } else { opening };
        origin.incarnation = heir.unwrap_or(origin.incarnation);
        if origin != header.origin {
            header.origin = origin;
            replace_header(file, header)?;
        }
        Ok(objects)
    }

    /// Records that the memory is in use, and gives the memory of the former image back.
    fn mark_in_use<F: ImageFile>(&mut self, file: &mut F) -> Result<(), F::Error> {
        if file.bytes()? < HEADER_BYTES as u64 {
            file.set_bytes(HEADER_BYTES as u64)?;
        }
        write_phase(file, ImagePhase::InUse)?;
        file.write_at(0, &ImageHeader::in_use(self.identity.clone()).encode())?;
        self.pending = None;
        file.set_bytes(HEADER_BYTES as u64)
    }
}

fn write_phase<F: ImageFile>(file: &mut F, phase: ImagePhase) -> Result<(), F::Error> {
    file.write_at(PHASE_AT as u64, &(phase as u32).to_le_bytes())
}

/// Replaces the header by that of a complete image; its phase is written last.
fn replace_header<F: ImageFile>(file: &mut F, mut header: ImageHeader) -> Result<(), F::Error> {
    write_phase(file, ImagePhase::Writing)?;
    header.phase = ImagePhase::Writing;
    file.write_at(0, &header.encode())?;
    write_phase(file, ImagePhase::Complete)
}

/// Reads the header of an image: none in a new file.
fn read_header<F: ImageFile>(file: &F) -> Result<Result<Option<ImageHeader>, Discard>, F::Error> {
    if file.bytes()? < HEADER_BYTES as u64 {
        return Ok(Ok(None));
    }
    let mut header = vec![0; HEADER_BYTES];
    file.read_at(0, &mut header)?;
    // A process that was killed while it began a new file.
    if header.iter().all(|byte| *byte == 0) {
        return Ok(Ok(None));
    }
    Ok(ImageHeader::decode(&header).map(Some).map_err(Discard::Image))
}
