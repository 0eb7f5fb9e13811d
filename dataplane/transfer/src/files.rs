//! File segments: files of this host that are opened by name, read and written like memory of a peer, and flushed on
//! demand.
//!
//! A file that is written with direct I/O is used by the first initiator only: a write to a part of a block is a read
//! and a write of the whole block, and only a single initiator keeps such writes apart. All initiators use any other
//! file. Writes by other processes, or by other means than segments, are not coordinated at all.

pub(crate) mod file_name;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvplane_engine::{DirectFile, FileOptions};

use crate::TransferEngine;
use crate::error::Error;
use crate::files::file_name::FileName;
use crate::segment::open::unknown;
use crate::segment::{Remote, SegmentHandle};

/// Properties of a file segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileInfo {
    /// Path as given.
    pub path: PathBuf,
    /// Length at the time of opening, in bytes. Transfers beyond it are rejected.
    pub bytes: u64,
    /// True if the file is open for writing.
    pub writable: bool,
    /// Reason why I/O goes through the page cache; `None` for direct I/O.
    pub buffered_because: Option<String>,
}

/// Open file and its options.
pub(crate) struct OpenFile {
    pub(crate) file: Arc<DirectFile>,
    options: FileOptions,
    /// True if only the first initiator may use it.
    pub(crate) alone: bool,
}

impl OpenFile {
    fn new(file: Arc<DirectFile>, options: FileOptions) -> Self {
        let alone = file.writable() && file.direct().is_ok();
        Self { file, options: FileOptions { create_bytes: None, ..options }, alone }
    }

    pub(crate) fn info(&self) -> FileInfo {
        info(&self.file)
    }
}

fn info(file: &DirectFile) -> FileInfo {
    FileInfo {
        path: file.path().to_owned(),
        bytes: file.bytes(),
        writable: file.writable(),
        buffered_because: file.direct().err().map(ToString::to_string),
    }
}

/// Open files by their identity in the file system: device and inode number.
type ByIdentity = HashMap<(u64, u64), Vec<Weak<Remote>>>;

/// Files that are open as segments, or whose transfers are still in flight.
#[derive(Default)]
pub(crate) struct Files {
    /// Keyed by identity, because one file may have several names.
    by_identity: Mutex<ByIdentity>,
}

fn named(path: &Path, error: &io::Error) -> Error {
    Error::System(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

impl TransferEngine {
    /// Opens a file, or returns the segment that is open already.
    pub(crate) fn open_file(&self, name: &str, cached: bool) -> Result<SegmentHandle, Error> {
        let wanted = self.file_name(name)?;
        let (name, path) = (wanted.canonical(), wanted.path());
        // Held while the file is opened, so that two threads do not open it at the same time.
        let mut files = self.files.by_identity.lock().unwrap_or_else(PoisonError::into_inner);
        if cached {
            let mut table = self.segments.write();
            if let Some((handle, _)) = table.by_name(&name) {
                table.reopen(handle);
                return Ok(handle);
            }
        }
        let file = Arc::new(DirectFile::open(path, wanted.options())?);
        let identity = file.identity().map_err(|error| named(path, &error))?;
        let opened = OpenFile::new(file, wanted.options());
        let others: Vec<Arc<Remote>> = files.get(&identity).into_iter().flatten().filter_map(Weak::upgrade).collect();
        let of = |other: &Arc<Remote>| other.file.as_ref().map(|file| file.options);
        if let Some(same) = others.iter().find(|other| of(other) == Some(opened.options)) {
            return self.segments.write().open(Arc::clone(same));
        }
        if let Some(other) = others.iter().find(|other| of(other).is_some_and(|options| options.writable))
            && wanted.options().writable
        {
            let why = "writes of two segments to one block could get lost; close that segment, or add ?readonly";
            return Err(Error::Argument(format!("{} is open as {} already: {why}", path.display(), other.name)));
        }
        let peer = self.segments.write().peers.of_file(&name);
        let users = if opened.alone { &self.drivers[..1] } else { &self.drivers[..] };
        for driver in users {
            let added = driver.with(|core| core.add_file(&peer, Arc::clone(&opened.file)));
            added.map_err(|error| named(path, &error))?;
        }
        let remote = Arc::new(Remote::of_file(&name, peer, opened));
        files.retain(|_, remotes| {
            remotes.retain(|remote| remote.strong_count() > 0);
            !remotes.is_empty()
        });
        files.entry(identity).or_default().push(Arc::downgrade(&remote));
        self.segments.write().open(remote)
    }

    fn file_name(&self, name: &str) -> Result<FileName, Error> {
        if !self.config.files {
            return Err(Error::Argument(format!("{name:?}: file segments are switched off here")));
        }
        FileName::parse(name)
    }

    /// Flushes the writes of completed batches to a file segment. Blocks as long as the device takes; transfers
    /// continue meanwhile.
    ///
    /// # Errors
    /// When the handle is not open or not a file, or the device failed: the state of all writes since the last flush is
    /// then unknown.
    pub fn sync_segment(&self, handle: SegmentHandle) -> Result<(), Error> {
        let remote = self.segments.read().get(handle).cloned();
        match remote.as_deref() {
            Some(Remote { file: Some(file), .. }) => file.file.sync().map_err(|error| named(file.file.path(), &error)),
            Some(_) => Err(Error::Argument(format!("segment {} is memory, not a file", handle.to_bits()))),
            None if handle == SegmentHandle::LOCAL => {
                Err(Error::Argument("the local segment is memory, not a file".to_owned()))
            }
            None => Err(unknown(handle)),
        }
    }

    /// Describes how a file would be read and written. Creates none.
    pub(crate) fn explain_file(&self, name: &str) -> Result<String, Error> {
        let wanted = self.file_name(name)?;
        let options = FileOptions { create_bytes: None, ..wanted.options() };
        let found = info(&DirectFile::open(wanted.path(), options)?);
        let use_of = if found.writable { "read and written" } else { "read only" };
        let how = match found.buffered_because {
            None => "with direct I/O".to_owned(),
            Some(why) => format!("through the page cache, as {why}"),
        };
        Ok(format!("{} bytes, {use_of} {how}", found.bytes))
    }
}
