//! Files that are open as segments: opened by name, read and written like memory of a peer, and flushed on demand.
//!
//! A file that is written with direct I/O is used by the first initiator only: a write to a part of a block is a read
//! and a write of the whole block, and only a single initiator keeps such writes apart. All initiators use any other
//! file. Writes by other processes, or by other means than segments, are not coordinated at all.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use kvplane_engine::{DirectFile, FileOptions};

use super::file_name::FileName;
use crate::driver::initiators::Initiators;
use crate::error::{ArgumentError, Error};
use crate::lock;
use crate::segment::file::{FileInfo, OpenFile};
use crate::segment::table::TableLock;
use crate::segment::{Remote, SegmentHandle};

/// Open files by their identity in the file system: device and inode number.
type ByIdentity = HashMap<(u64, u64), Vec<Weak<Remote>>>;

/// Files that are open as segments, or whose transfers are still in flight.
pub(super) struct Files {
    /// True if files may be opened by name.
    allowed: bool,
    /// Keyed by identity, because one file may have several names.
    by_identity: Mutex<ByIdentity>,
}

fn named(path: &Path, error: &io::Error) -> Error {
    Error::System(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Flushes the completed writes to a file.
pub(super) fn sync(file: &OpenFile) -> Result<(), Error> {
    file.file.sync().map_err(|error| named(file.file.path(), &error))
}

impl Files {
    pub(super) fn new(allowed: bool) -> Self {
        Self { allowed, by_identity: Mutex::default() }
    }

    /// Opens a file, or returns the segment in `table` that is open already; the initiators that may use it learn it.
    ///
    /// # Errors
    /// When the name is malformed, files are not allowed, the file cannot be opened, or it is open for writing with
    /// other options.
    pub(super) fn open(
        &self,
        name: &str,
        cached: bool,
        table: &TableLock,
        initiators: &Initiators,
    ) -> Result<SegmentHandle, Error> {
        let wanted = self.file_name(name)?;
        let (name, path) = (wanted.canonical(), wanted.path());
        // Held while the file is opened, so that two threads do not open it at the same time.
        let mut files = lock(&self.by_identity);
        if cached {
            let mut table = table.write();
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
            return table.write().open(Arc::clone(same));
        }
        if let Some(other) = others.iter().find(|other| of(other).is_some_and(|options| options.writable))
            && wanted.options().writable
        {
            let (path, other) = (path.to_owned(), other.name.clone());
            return Err(ArgumentError::FileOpenTwice { path, other }.into());
        }
        let peer = table.write().peers.of_file(&name);
        for driver in initiators.users_of_file(opened.alone) {
            let added = driver.with(|core| core.add_file(&peer, Arc::clone(&opened.file)));
            added.map_err(|error| named(path, &error))?;
        }
        let remote = Arc::new(Remote::of_file(&name, peer, opened));
        files.retain(|_, remotes| {
            remotes.retain(|remote| remote.strong_count() > 0);
            !remotes.is_empty()
        });
        files.entry(identity).or_default().push(Arc::downgrade(&remote));
        table.write().open(remote)
    }

    fn file_name(&self, name: &str) -> Result<FileName, Error> {
        if !self.allowed {
            return Err(ArgumentError::FilesOff { name: name.to_owned() }.into());
        }
        FileName::parse(name)
    }

    /// Describes how a file would be read and written. Creates none.
    ///
    /// # Errors
    /// When the name is malformed, files are not allowed, or there is no such file.
    pub(super) fn explain(&self, name: &str) -> Result<String, Error> {
        let wanted = self.file_name(name)?;
        let options = FileOptions { create_bytes: None, ..wanted.options() };
        let found = FileInfo::of(&DirectFile::open(wanted.path(), options)?);
        let use_of = if found.writable { "read and written" } else { "read only" };
        let how = match found.buffered_because {
            None => "with direct I/O".to_owned(),
            Some(why) => format!("through the page cache, as {why}"),
        };
        Ok(format!("{} bytes, {use_of} {how}", found.bytes))
    }
}
