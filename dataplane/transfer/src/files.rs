//! Files of this host as segments: opened by name, read and written like memory of a peer, made durable on demand.
//!
//! A file that is written with direct I/O is used by the first initiator alone: a write of a part of a block is a read
//! of the block and a write of it, and only within one initiator are such writes kept apart. Any other file is used
//! by all of them. Other processes, and writes by other means than segments, are not kept apart at all.

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

/// What is known of a file that is a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileInfo {
    /// Its path as given.
    pub path: PathBuf,
    /// Its length when it was opened, in bytes. Transfers beyond it are refused.
    pub bytes: u64,
    /// Whether it may be written.
    pub writable: bool,
    /// Why I/O goes through the page cache; `None` where it does not.
    pub buffered_because: Option<String>,
}

/// An open file and how it was opened.
pub(crate) struct OpenFile {
    pub(crate) file: Arc<DirectFile>,
    options: FileOptions,
    /// Whether only the first initiator may use it.
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
        buffered_because: file.direct().err().map(str::to_owned),
    }
}

/// By what the file system calls a file, its device and its number there: how it is open.
type ByIdentity = HashMap<(u64, u64), Vec<Weak<Remote>>>;

/// The files that are segments, or were and are still being moved.
#[derive(Default)]
pub(crate) struct Files {
    /// By what the file system calls them, as one file may have several names.
    by_identity: Mutex<ByIdentity>,
}

fn named(path: &Path, error: &io::Error) -> Error {
    Error::System(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

impl TransferEngine {
    /// Opens a file, or finds it open.
    pub(crate) fn open_file(&self, name: &str, cached: bool) -> Result<SegmentHandle, Error> {
        let wanted = self.file_name(name)?;
        let (name, path) = (wanted.canonical(), wanted.path());
        // Held while the file is opened, so that two threads do not open it side by side.
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
            let why = "what two ways of writing put into one block would be lost; close that, or add ?readonly";
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

    /// Makes durable what was written to a file segment by batches that are done. Blocks as long as the device takes;
    /// transfers go on meanwhile.
    ///
    /// # Errors
    /// When the handle is not open or no file's, or the device could not: then nothing is known of what was written
    /// since the last time.
    pub fn sync_segment(&self, handle: SegmentHandle) -> Result<(), Error> {
        let remote = self.segments.read().get(handle).cloned();
        match remote.as_deref() {
            Some(Remote { file: Some(file), .. }) => file.file.sync().map_err(|error| named(file.file.path(), &error)),
            Some(_) => Err(Error::Argument(format!("segment {} is memory, not a file", handle.to_bits()))),
            None if handle == SegmentHandle::LOCAL => {
                Err(Error::Argument("our own segment is memory, not a file".to_owned()))
            }
            None => Err(unknown(handle)),
        }
    }

    /// How a file would be moved. Makes none.
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
