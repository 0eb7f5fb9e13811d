//! Private files: written whole or not at all, readable by their owner alone.
//!
//! Keys and the files that name them are secrets, so a file is created with mode 0600 under a temporary name in the
//! same directory, synced, and renamed over its name. A reader refuses a secret that others may read, and reads at
//! most a stated number of bytes.

use std::env;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::cpu::effective_uid;

/// Why a private file or directory could not be used.
#[derive(Debug)]
pub enum FileError {
    /// The operating system refused.
    Io {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is longer than anything that belongs there.
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// How many bytes it may have.
        limit_bytes: u64,
    },
    /// Someone else owns the directory or file, or may read it.
    NotPrivate {
        /// Which one.
        path: PathBuf,
        /// Who owns it, its mode, and what it should be.
        detail: String,
    },
    /// `XDG_RUNTIME_DIR` is no absolute path.
    Environment {
        /// What it is.
        path: PathBuf,
    },
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { action, path, source } => {
                write!(f, "cannot {action} {}: {source}", path.display())
            }
            Self::TooLarge { path, limit_bytes } => {
                write!(f, "{} is longer than {limit_bytes} bytes: it is not ours", path.display())
            }
            Self::Environment { path } => {
                write!(f, "XDG_RUNTIME_DIR is {}, which is no absolute path", path.display())
            }
            Self::NotPrivate { path, detail } => {
                write!(f, "{} is not private: {detail}", path.display())
            }
        }
    }
}

impl std::error::Error for FileError {}

/// Makes a [`FileError::Io`] of an error of the system: for `map_err`.
pub fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { action, path, source }
}

/// The user's directory for sockets and for what local processes tell each other: `$XDG_RUNTIME_DIR/kvplane`, else
/// `/run/user/UID/kvplane`, else `/tmp/kvplane-UID`. It need not exist ([`private_directory`]).
///
/// # Errors
/// When the environment names no absolute path.
pub fn runtime_directory() -> Result<PathBuf, FileError> {
    if let Some(path) = env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        return if path.is_absolute() { Ok(path.join("kvplane")) } else { Err(FileError::Environment { path }) };
    }
    let user = effective_uid();
    let session = PathBuf::from(format!("/run/user/{user}"));
    if session.is_dir() { Ok(session.join("kvplane")) } else { Ok(PathBuf::from(format!("/tmp/kvplane-{user}"))) }
}

/// Creates `path` with mode 0700, or accepts it when it is a directory of ours that nobody else may enter.
///
/// # Errors
/// When it cannot be created, is no directory (a symbolic link counts as none), belongs to someone else or is open to
/// others.
pub fn private_directory(path: &Path) -> Result<(), FileError> {
    made_private_directory(path).map(|_| ())
}

/// As [`private_directory`]; returns whether it was created.
///
/// # Errors
/// As [`private_directory`].
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

/// Writes `content` to `path` atomically with mode 0600: a reader sees the old file or the new one, a crash leaves
/// either.
///
/// # Errors
/// Whatever the file system says.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), FileError> {
    replace(path, content, |_| Ok(())).map(drop)
}

/// As [`write_private`]; the file is locked before it has its name, and until the returned handle is dropped, so that a
/// reader sees whether the writer is alive ([`read_locked`]).
///
/// # Errors
/// As [`write_private`].
pub fn write_locked(path: &Path, content: &[u8]) -> Result<File, FileError> {
    replace(path, content, File::lock)
}

/// Replaces a file; `prepare` sees the new one before it has its name.
fn replace(path: &Path, content: &[u8], prepare: impl FnOnce(&File) -> io::Result<()>) -> Result<File, FileError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        // A left-over of a crashed process with our id may have any mode: it must not be reused.
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
        // The temporary file is worthless now; that it may be left behind is not worth a second error.
        let _ = fs::remove_file(&temporary);
        io_error("write", path)(error)
    })
}

/// Reads a text of at most `limit_bytes`.
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

/// [`read_text`] of a secret: refused when others may read it.
///
/// # Errors
/// As [`read_text`], and [`FileError::NotPrivate`].
pub fn read_private(path: &Path, limit_bytes: u64) -> Result<String, FileError> {
    private_text_of(&File::open(path).map_err(io_error("open", path))?, path, limit_bytes)
}

/// As [`read_private`]; and whether the writer of this text holds it still ([`write_locked`]). The lock of another
/// writer that took the same name since does not count.
///
/// # Errors
/// As [`read_private`].
pub fn read_locked(path: &Path, limit_bytes: u64) -> Result<(String, bool), FileError> {
    let file = File::open(path).map_err(io_error("open", path))?;
    let text = private_text_of(&file, path, limit_bytes)?;
    match file.try_lock_shared() {
        Ok(()) => Ok((text, false)),
        Err(TryLockError::WouldBlock) => Ok((text, true)),
        Err(TryLockError::Error(error)) => Err(io_error("lock", path)(error)),
    }
}

/// Refuses an open file that others than its owner may read or change; `path` is for the error.
///
/// # Errors
/// [`FileError::NotPrivate`], or that the file cannot be examined.
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
