//! Private files: written atomically, readable only by their owner.
//!
//! Keys and the files that name them are secrets, so a file is created with mode 0600 under a temporary name in the
//! same directory, synced, and renamed over its target. A reader rejects a secret that other users may read, and reads
//! at most a given number of bytes.

use std::env;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::cpu::effective_uid;

/// Most readings of a file that is replaced each time: a file that is replaced that often has a living writer, but no
/// reader waits for it for ever.
const READ_ATTEMPTS: u32 = 100;

/// Error of a private file or directory.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum FileError {
    /// The operating system refused.
    Io {
        /// Attempted action, as a verb phrase.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The file exceeds the size limit of its kind.
    TooLarge { path: PathBuf, limit_bytes: u64 },
    /// The directory or file belongs to another user, or is accessible to other users.
    NotPrivate {
        path: PathBuf,
        /// Its owner or mode, and the next step.
        detail: String,
    },
    /// `XDG_RUNTIME_DIR` is not an absolute path.
    Environment { path: PathBuf },
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { action, path, source } => {
                write!(f, "cannot {action} {}: {source}", path.display())
            }
            Self::TooLarge { path, limit_bytes } => {
                write!(f, "{} is longer than {limit_bytes} bytes: it is not a kvplane file", path.display())
            }
            Self::Environment { path } => {
                write!(f, "XDG_RUNTIME_DIR is {}, which is not an absolute path", path.display())
            }
            Self::NotPrivate { path, detail } => {
                write!(f, "{} is not private: {detail}", path.display())
            }
        }
    }
}

impl std::error::Error for FileError {}

/// Returns a closure for `map_err` that turns an error of the system into a [`FileError::Io`].
pub fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { action, path, source }
}

/// Returns the user's directory for sockets and files of local processes: `$XDG_RUNTIME_DIR/kvplane`, else
/// `/run/user/UID/kvplane`, else `/tmp/kvplane-UID`. It may not exist yet ([`private_directory`]).
///
/// # Errors
/// When the environment variable is not an absolute path.
pub fn runtime_directory() -> Result<PathBuf, FileError> {
    if let Some(path) = env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        return if path.is_absolute() { Ok(path.join("kvplane")) } else { Err(FileError::Environment { path }) };
    }
    let user = effective_uid();
    let session = PathBuf::from(format!("/run/user/{user}"));
    if session.is_dir() { Ok(session.join("kvplane")) } else { Ok(PathBuf::from(format!("/tmp/kvplane-{user}"))) }
}

/// Creates `path` with mode 0700, or accepts an existing directory of this user that is not accessible to others.
///
/// # Errors
/// When it cannot be created, is not a directory (nor is a symbolic link), belongs to another user or is accessible to
/// other users.
pub fn private_directory(path: &Path) -> Result<(), FileError> {
    made_private_directory(path).map(|_| ())
}

/// Creates or accepts a directory like [`private_directory`]; returns true if it was created.
///
/// # Errors
/// See [`private_directory`].
pub fn made_private_directory(path: &Path) -> Result<bool, FileError> {
    let made = match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(io_error("create the directory", path)(error)),
    };
    let found = fs::symlink_metadata(path).map_err(io_error("look at", path))?;
    let user = effective_uid();
    let not_private = |detail: String| Err(FileError::NotPrivate { path: path.to_owned(), detail });
    if !found.is_dir() {
        return not_private("it is not a directory; remove it".to_owned());
    }
    if found.uid() != user {
        return not_private(format!("user {} owns it and we are user {user}", found.uid()));
    }
    if found.mode() & 0o077 != 0 {
        let mode = found.mode() & 0o777;
        return not_private(format!("its mode is {mode:03o}; run chmod 700 on it"));
    }
    Ok(made)
}

/// Writes `content` to `path` atomically with mode 0600: a reader sees either the old file or the new one, also after a
/// crash.
///
/// # Errors
/// When the file system reports an error.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), FileError> {
    replace(path, content, |_| Ok(())).map(drop)
}

/// Writes like [`write_private`]; the file is locked before the rename, and until the returned handle is dropped, so
/// that a reader can tell whether the writer is alive ([`read_locked`]).
///
/// # Errors
/// See [`write_private`].
pub fn write_locked(path: &Path, content: &[u8]) -> Result<File, FileError> {
    replace(path, content, File::lock)
}

/// Replaces a file; `prepare` is called with the new one before the rename.
fn replace(path: &Path, content: &[u8], prepare: impl FnOnce(&File) -> io::Result<()>) -> Result<File, FileError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        // A leftover of a crashed process with the same id may have any mode: it must not be reused.
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        prepare(&file)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            File::open(parent)?.sync_all()?;
        }
        Ok(file)
    })();
    written.map_err(|error| {
        // The temporary file is useless now; a failure to remove it is not reported.
        let _ = fs::remove_file(&temporary);
        io_error("write", path)(error)
    })
}

/// Reads a text file of at most `limit_bytes`.
///
/// # Errors
/// When it cannot be read, is longer, or is not UTF-8.
pub fn read_text(path: &Path, limit_bytes: u64) -> Result<String, FileError> {
    let file = File::open(path).map_err(io_error("open", path))?;
    text_of(&file, path, limit_bytes)
}

fn text_of(file: &File, path: &Path, limit_bytes: u64) -> Result<String, FileError> {
    let mut text = String::new();
    let mut limited = file.take(limit_bytes + 1);
    limited.read_to_string(&mut text).map_err(io_error("read", path))?;
    if text.len() as u64 > limit_bytes {
        return Err(FileError::TooLarge { path: path.to_owned(), limit_bytes });
    }
    Ok(text)
}

/// Reads a secret like [`read_text`]; rejected if other users may read it.
///
/// # Errors
/// See [`read_text`], and [`FileError::NotPrivate`].
pub fn read_private(path: &Path, limit_bytes: u64) -> Result<String, FileError> {
    private_text_of(&File::open(path).map_err(io_error("open", path))?, path, limit_bytes)
}

/// Reads like [`read_private`]; also returns true if the writer of this text still holds its lock ([`write_locked`]).
/// A file that is replaced meanwhile is read anew: its writer has released the former one.
///
/// # Errors
/// See [`read_private`].
pub fn read_locked(path: &Path, limit_bytes: u64) -> Result<(String, bool), FileError> {
    let mut attempts = READ_ATTEMPTS;
    loop {
        attempts -= 1;
        let file = File::open(path).map_err(io_error("open", path))?;
        let text = private_text_of(&file, path, limit_bytes)?;
        match file.try_lock_shared() {
            Ok(()) if attempts == 0 || is_at(&file, path) => return Ok((text, false)),
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok((text, true)),
            Err(TryLockError::Error(error)) => return Err(io_error("lock", path)(error)),
        }
    }
}

/// Returns true if an open file is the one at `path`.
#[must_use]
pub fn is_at(file: &File, path: &Path) -> bool {
    let identity = |found: fs::Metadata| (found.dev(), found.ino());
    let (open, named) = (file.metadata().map(identity), fs::symlink_metadata(path).map(identity));
    open.is_ok_and(|open| named.is_ok_and(|named| open == named))
}

/// Rejects an open file that users other than its owner may read or change; `path` is for the error.
///
/// # Errors
/// [`FileError::NotPrivate`], or an error if the file cannot be examined.
pub fn check_private(file: &File, path: &Path) -> Result<(), FileError> {
    let found = file.metadata().map_err(io_error("look at", path))?;
    if found.mode() & 0o077 == 0 {
        return Ok(());
    }
    let detail = format!("its mode is {:03o}; run chmod 600 on it", found.mode() & 0o777);
    Err(FileError::NotPrivate { path: path.to_owned(), detail })
}

fn private_text_of(file: &File, path: &Path, limit_bytes: u64) -> Result<String, FileError> {
    check_private(file, path)?;
    text_of(file, path, limit_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_file_that_its_living_writer_replaces_is_never_read_as_one_that_nobody_holds() {
        let directory = std::env::temp_dir().join(format!("kvplane-private-{}", std::process::id()));
        private_or_new(&directory);
        let path = directory.join("published");
        let mut held = write_locked(&path, b"0").unwrap();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..500 {
                    // The former lock is released after the new file is in place.
                    held = write_locked(&path, number.to_string().as_bytes()).unwrap();
                }
                ended.store(true, Ordering::Release);
            });
            while !ended.load(Ordering::Acquire) {
                let (text, is_held) = read_locked(&path, 100).unwrap();
                assert!(is_held, "{text} was read as stale");
            }
        });
        drop(held);
        assert_eq!(read_locked(&path, 100).unwrap(), ("499".to_owned(), false));
        fs::remove_dir_all(&directory).unwrap();
    }

    fn private_or_new(path: &Path) {
        DirBuilder::new().recursive(true).mode(0o700).create(path).unwrap();
    }
}
