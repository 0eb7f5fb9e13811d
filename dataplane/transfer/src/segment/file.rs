//! File that is open as a segment.

use std::path::PathBuf;
use std::sync::Arc;

use kvplane_engine::{DirectFile, FileOptions};

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

impl FileInfo {
    pub(crate) fn of(file: &DirectFile) -> Self {
        Self {
            path: file.path().to_owned(),
            bytes: file.bytes(),
            writable: file.writable(),
            buffered_because: file.direct().err().map(ToString::to_string),
        }
    }
}

/// Open file and its options.
pub(crate) struct OpenFile {
    pub(crate) file: Arc<DirectFile>,
    /// Options of the open, without the length of a new file.
    pub(crate) options: FileOptions,
    /// True if only the first initiator may use it.
    pub(crate) alone: bool,
}

impl OpenFile {
    pub(crate) fn new(file: Arc<DirectFile>, options: FileOptions) -> Self {
        let alone = file.writable() && file.direct().is_ok();
        Self { file, options: FileOptions { create_bytes: None, ..options }, alone }
    }

    pub(crate) fn info(&self) -> FileInfo {
        FileInfo::of(&self.file)
    }
}
