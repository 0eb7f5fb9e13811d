//! Files for direct I/O: opened with O_DIRECT if the file system and the file's length allow it.
//!
//! Direct I/O moves whole blocks between the device and aligned memory. If it is refused, or the length is not a whole
//! number of blocks, the file is opened through the page cache instead, and [`DirectFile::direct`] returns the reason.

use std::error::Error;
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::region::IoBuf;

/// Block size of direct I/O: memory, offset and length are multiples of it. Larger than most devices require, so it
/// suits all of them.
pub const BLOCK_BYTES: usize = 4096;

/// Options of opening a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// True to open it for writing.
    pub writable: bool,
    /// Creates a missing file with this length. An existing file keeps its length.
    pub create_bytes: Option<u64>,
    /// True to try direct I/O.
    pub direct: bool,
}

/// Reason why I/O goes through the page cache.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum BufferedReason {
    /// The options do not request direct I/O.
    NotRequested,
    /// The length is not a whole number of blocks.
    PartialBlock { bytes: u64 },
    /// The file system refuses to open the file for direct I/O.
    Refused { source: io::Error },
    /// The file system opens the file for direct I/O and fails to read it.
    ReadFailed { source: io::Error },
}

impl fmt::Display for BufferedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRequested => f.write_str("direct I/O was not requested"),
            Self::PartialBlock { bytes } => {
                write!(f, "its length of {bytes} bytes is not a multiple of {BLOCK_BYTES}")
            }
            Self::Refused { source } => write!(f, "the file system refuses direct I/O: {source}"),
            Self::ReadFailed { source } => write!(f, "direct reads fail: {source}"),
        }
    }
}

impl Error for BufferedReason {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused { source } | Self::ReadFailed { source } => Some(source),
            Self::NotRequested | Self::PartialBlock { .. } => None,
        }
    }
}

/// An open file of fixed length.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    writable: bool,
    buffered_because: Option<BufferedReason>,
}

impl DirectFile {
    /// Opens a file, with direct I/O if possible.
    ///
    /// # Errors
    /// When it cannot be opened or created, is neither a regular file nor a block device, or is empty: names the path.
    pub fn open(path: &Path, options: FileOptions) -> io::Result<Self> {
        Self::open_as(path, options, false)
    }

    /// Opens an existing file of which the caller uses whole blocks only: a partial block at the end does not prevent
    /// direct I/O.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub(crate) fn open_whole_blocks(path: &Path, writable: bool) -> io::Result<Self> {
        Self::open_as(path, FileOptions { writable, create_bytes: None, direct: true }, true)
    }

    fn open_as(path: &Path, options: FileOptions, whole_blocks: bool) -> io::Result<Self> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut how = OpenOptions::new();
        how.read(true).write(options.writable);
        if let (Some(bytes), false) = (options.create_bytes, path.exists()) {
            make(path, bytes).map_err(named)?;
        }
        // Checked before the open, because opening a named pipe waits for its other end.
        check_kind(&path.metadata().map_err(named)?).map_err(named)?;
        let file = how.open(path).map_err(named)?;
        let bytes = length(&file).map_err(named)?;
        if bytes == 0 {
            let text = format!("{} is empty: give the file a length, or check the device", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let used = if whole_blocks { bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64 } else { bytes };
        let (file, buffered_because) = match direct(path, &how, options.direct, used) {
            Ok(direct) => (direct, None),
            Err(why) => (file, Some(why)),
        };
        Ok(Self { file, path: path.to_owned(), bytes, writable: options.writable, buffered_because })
    }

    /// Returns the length at the time of opening, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if the file is open for writing.
    #[must_use]
    pub const fn writable(&self) -> bool {
        self.writable
    }

    /// Returns the path under which the file was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns Ok if I/O bypasses the page cache; the error gives the reason why not.
    ///
    /// # Errors
    /// The reason.
    pub fn direct(&self) -> Result<(), &BufferedReason> {
        self.buffered_because.as_ref().map_or(Ok(()), Err)
    }

    /// Returns the identity of the file, independent of its name: its device and its number there.
    ///
    /// # Errors
    /// When the file system does not report it.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = self.file.metadata()?;
        Ok(match metadata.file_type().is_block_device() {
            // Several names may refer to one device.
            true => (u64::MAX, metadata.rdev()),
            false => (metadata.dev(), metadata.ino()),
        })
    }

    /// Returns the descriptor, for a ring.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Makes completed writes durable.
    ///
    /// # Errors
    /// When the device reports a failure.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Returns true if a buffer at this file offset is suitable for direct I/O: address, offset and length in whole blocks.
#[must_use]
pub fn is_aligned(buffer: &IoBuf, offset: u64) -> bool {
    let block = BLOCK_BYTES as u64;
    let address = buffer.pointer().addr();
    address.is_multiple_of(BLOCK_BYTES) && buffer.bytes().is_multiple_of(BLOCK_BYTES) && offset.is_multiple_of(block)
}

/// Creates a file of this length that survives a crash as soon as this returns; an existing file of the same name,
/// created concurrently, is accepted.
fn make(path: &Path, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a file of 0 bytes holds no segment"));
    }
    let made = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(made) => made,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(error),
    };
    if let Err(error) = made.set_len(bytes).and_then(|()| made.sync_all()) {
        // An empty file would obstruct the next attempt.
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    sync_directory(path);
    Ok(())
}

/// Makes the directory entry of a new file durable.
pub(crate) fn sync_directory(path: &Path) {
    if let Ok(directory) = File::open(directory_of(path)) {
        // Some file systems do not support fsync of a directory.
        let _ = directory.sync_all();
    }
}

/// Returns the directory of a file. A bare name has an empty parent, which cannot be opened.
fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn check_kind(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a block device"))
}

fn length(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    check_kind(&metadata)?;
    if metadata.file_type().is_file() {
        return Ok(metadata.len());
    }
    // The length of a device is the position of its end.
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

fn direct(path: &Path, how: &OpenOptions, wanted: bool, bytes: u64) -> Result<File, BufferedReason> {
    if !wanted {
        return Err(BufferedReason::NotRequested);
    }
    if !bytes.is_multiple_of(BLOCK_BYTES as u64) {
        return Err(BufferedReason::PartialBlock { bytes });
    }
    let mut how = how.clone();
    let opened = how.custom_flags(libc::O_DIRECT | libc::O_CLOEXEC).open(path);
    let file = opened.map_err(|source| BufferedReason::Refused { source })?;
    // Some file systems accept the flag and reject the I/O: one aligned read tests it.
    let mut probe = vec![0u8; 2 * BLOCK_BYTES];
    let skip = probe.as_ptr().align_offset(BLOCK_BYTES);
    match file.read_at(&mut probe[skip..skip + BLOCK_BYTES], 0) {
        Ok(_) => Ok(file),
        Err(source) => Err(BufferedReason::ReadFailed { source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_bare_name_is_the_current_one() {
        for (path, directory) in [("ssd", "."), ("./ssd", "."), ("a/ssd", "a"), ("/ssd", "/")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory), "{path}");
        }
    }
}
