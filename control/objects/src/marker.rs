//! Marker of a directory that is a store: a file with an identity, which is created at the first use of the directory.
//!
//! While a file system is not mounted, its mount point is an ordinary directory, and a deleted directory could be
//! created again: a pack written there would be lost to everybody else. So nothing is read from or written to a
//! directory without its marker, and a running node never creates one.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use kvplane_shared::StoreError;

/// Name of the file.
const NAME: &str = ".kvplane-shared-tier";
/// First words of the file, before the identity.
const WORDS: &str = "kvplane shared tier ";

/// Marker of the directory that a driver has opened.
#[derive(Clone, Debug)]
pub(crate) struct Marker {
    path: PathBuf,
    contents: String,
}

impl Marker {
    /// Reads the marker of a directory, and creates it in one without. `fresh` is a random number: the identity of a
    /// directory that gets its marker.
    ///
    /// # Errors
    /// If there is no such directory, or it cannot be read, or written to at its first use.
    pub(crate) fn open(directory: &Path, fresh: u64) -> io::Result<Self> {
        let path = directory.join(NAME);
        let found = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create(&path, &format!("{WORDS}{fresh:016x}\n"), fresh)?;
                fs::read_to_string(&path)
            }
            found => found,
        };
        let contents = found?;
        if !contents.starts_with(WORDS) {
            return Err(io::Error::other(format!("{NAME} is no marker of a shared tier: remove it")));
        }
        Ok(Self { path, contents })
    }

    /// Checks that the directory is the one that was opened.
    pub(crate) async fn check(&self) -> Result<(), StoreError> {
        let path = self.path.clone();
        let found = tokio::task::spawn_blocking(move || fs::read_to_string(path)).await;
        let reason = match found {
            Ok(Ok(contents)) if contents == self.contents => return Ok(()),
            Ok(Ok(_)) => format!("{NAME} in the directory is of another shared tier"),
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => format!(
                "the directory or its {NAME} is missing: mount its file system again; if the directory was deleted, \
                 create it and restart the nodes"
            ),
            Ok(Err(error)) => return Err(StoreError::Other { reason: format!("{NAME}: {error}") }),
            Err(_) => return Err(StoreError::Other { reason: "the driver ends".to_owned() }),
        };
        Err(StoreError::Absent { reason })
    }
}

/// Creates a marker with its contents at once: of several nodes that try, one succeeds.
fn create(path: &Path, contents: &str, fresh: u64) -> io::Result<()> {
    let draft = path.with_file_name(format!("{NAME}.{fresh:016x}"));
    let written = OpenOptions::new().write(true).create_new(true).open(&draft).and_then(|mut file| {
        file.write_all(contents.as_bytes())?;
        file.sync_all()
    });
    let linked = written.and_then(|()| match fs::hard_link(&draft, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // File systems without hard links.
        Err(_) if !path.exists() => fs::rename(&draft, path),
        linked => linked,
    });
    // It may have been renamed.
    let _ = fs::remove_file(&draft);
    linked
}
