//! Exclusive claim of a file or block device: opened or created with its space allocated, and locked.
//!
//! A file is locked by `flock`, a block device by an exclusive open, which also prevents mounting it. The lock ends
//! with the process, however that terminates.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::file::{BLOCK_BYTES, DirectFile, sync_directory};

/// A file or device claimed by this process.
#[derive(Debug)]
pub struct ClaimedFile {
    file: DirectFile,
    /// Descriptor that holds the lock.
    guard: File,
    bytes: u64,
    device: (u64, u64),
    is_device: bool,
    remarks: Vec<String>,
}

impl ClaimedFile {
    /// Claims a file or device; a missing file is created, with all its `bytes` allocated. At most `bytes` of an
    /// existing one are used, or all of it without `bytes`. Only whole blocks count, so that all of it can be accessed
    /// with direct I/O.
    ///
    /// # Errors
    /// When another process has claimed it, it is neither a file nor a device, its length is unsuitable, there is not
    /// enough space, or it cannot be opened: names the path and the next step.
    pub fn open(path: &Path, bytes: Option<u64>) -> io::Result<Self> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut remarks = Vec::new();
        if path.is_dir() {
            return Err(named(invalid("it is a directory: name a file in it".to_owned())));
        }
        if let Some(bytes) = bytes.filter(|bytes| *bytes < BLOCK_BYTES as u64) {
            return Err(named(invalid(format!("a size of {bytes} bytes is less than a block of {BLOCK_BYTES}"))));
        }
        let bytes = bytes.map(|asked| whole_blocks(asked, path, "the size of", &mut remarks));
        let found = path.metadata().ok();
        let is_device = found.as_ref().is_some_and(|metadata| metadata.file_type().is_block_device());
        if !is_device {
            check_limit(bytes.or(found.map(|metadata| metadata.len())).unwrap_or(0)).map_err(named)?;
        }
        let (guard, writable) = if is_device { open_device(path) } else { open_file(path, bytes) }.map_err(named)?;
        if !writable {
            remarks.push(format!("{} is read-only: existing objects are served, none are added", path.display()));
        }
        // The lock is held by now: no other claimant creates the file or changes its length.
        if !is_device {
            fit(&guard, path, bytes, &mut remarks).map_err(named)?;
        }
        let file = DirectFile::open_whole_blocks(path, writable)?;
        if !is_same(&guard, &file).map_err(named)? {
            return Err(named(replaced()));
        }
        if let Err(why) = file.direct() {
            remarks.push(format!("{} goes through the page cache: {why}", path.display()));
        }
        let usable = bytes.map_or(file.bytes(), |bytes| bytes.min(file.bytes()));
        if is_device && bytes.is_some_and(|bytes| bytes > file.bytes()) {
            let text = format!("the device has only {} bytes: leave the size out", file.bytes());
            return Err(named(invalid(text)));
        }
        let metadata = guard.metadata().map_err(named)?;
        let number = if is_device { metadata.rdev() } else { metadata.dev() };
        let device = (u64::from(libc::major(number)), u64::from(libc::minor(number)));
        let bytes = whole_blocks(usable, path, "its length of", &mut remarks);
        Ok(Self { file, guard, bytes, device, is_device, remarks })
    }

    /// Returns the file itself.
    #[must_use]
    pub const fn file(&self) -> &DirectFile {
        &self.file
    }

    /// Reads at `offset` through the page cache, to inspect the contents before use.
    ///
    /// # Errors
    /// When it cannot be read, or ends earlier.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.guard.read_exact_at(into, offset)
    }

    /// Returns the usable bytes: whole blocks.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if it is a block device.
    #[must_use]
    pub const fn is_device(&self) -> bool {
        self.is_device
    }

    /// Returns the major and minor number of the device: itself, or the one that the file is on.
    #[must_use]
    pub const fn device(&self) -> (u64, u64) {
        self.device
    }

    /// Returns remarks for the operator, for example that direct I/O is not available.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }
}

/// Rounds `bytes` down to whole blocks; adds a remark if that changes it.
fn whole_blocks(bytes: u64, path: &Path, what: &str, remarks: &mut Vec<String>) -> u64 {
    let whole = bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    if whole != bytes {
        let path = path.display();
        remarks.push(format!("{path}: {what} {bytes} bytes is rounded down to {whole}, whole blocks of {BLOCK_BYTES}"));
    }
    whole
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn taken() -> io::Error {
    let text = "it is in use by another process, or named twice: end that process, or name another path";
    io::Error::new(io::ErrorKind::ResourceBusy, text)
}

/// Returns true if the locked file is the used one: it may have been replaced between the two opens.
fn is_same(guard: &File, file: &DirectFile) -> io::Result<bool> {
    let used = File::from(file.fd().try_clone_to_owned()?).metadata()?;
    let locked = guard.metadata()?;
    Ok((used.dev(), used.ino()) == (locked.dev(), locked.ino()))
}

fn replaced() -> io::Error {
    let text = "another file replaced it while it was opened: start again when it is not being replaced";
    io::Error::new(io::ErrorKind::ResourceBusy, text)
}

/// Returns true if it may be possible to open it for reading: a read-only device fails with "permission denied".
fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied)
}

/// Checks the limit of file sizes (`ulimit -f`): a write beyond it raises a signal instead of returning an error.
pub(crate) fn check_limit(bytes: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure belongs to this function, and has the type that the call expects.
    if unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0 && limit.rlim_cur < bytes {
        let most = limit.rlim_cur;
        let text =
            format!("{bytes} bytes are above the limit of file sizes, {most}: raise it (ulimit -f), or use less");
        return Err(invalid(text));
    }
    Ok(())
}

fn open_device(path: &Path) -> io::Result<(File, bool)> {
    let number = path.metadata()?.rdev();
    let read_only = format!("/sys/dev/block/{}:{}/ro", libc::major(number), libc::minor(number));
    // A read-only device can be opened for writing, but rejects writes.
    let is_writable = std::fs::read_to_string(read_only).map_or(true, |text| text.trim() != "1");
    let mut how = OpenOptions::new();
    how.read(true).custom_flags(libc::O_EXCL | libc::O_CLOEXEC);
    let opened = match how.clone().write(is_writable).open(path) {
        Err(error) if is_read_only(&error) => how.open(path).map(|file| (file, false)).or(Err(error)),
        opened => opened.map(|file| (file, is_writable)),
    };
    opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => io::Error::new(
            io::ErrorKind::ResourceBusy,
            "it is in use: mounted, part of a volume, or another process's; free it, or name another path",
        ),
        _ => error,
    })
}

fn open_file(path: &Path, bytes: Option<u64>) -> io::Result<(File, bool)> {
    if bytes.is_none() && !path.exists() {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "there is no such file: give a size to make it, PATH:SIZE",
        ));
    }
    let mut how = OpenOptions::new();
    how.read(true).mode(0o600);
    // Nonblocking, because opening a named pipe would wait for its other end.
    how.custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
    let opened = match how.clone().write(true).create(bytes.is_some()).open(path) {
        Err(error) if is_read_only(&error) => how.open(path).map(|file| (file, false)).or(Err(error)),
        opened => opened.map(|file| (file, true)),
    };
    let (file, writable) = opened?;
    if !file.metadata()?.is_file() {
        return Err(invalid("neither a regular file nor a block device".to_owned()));
    }
    match file.try_lock() {
        Ok(()) => Ok((file, writable)),
        Err(TryLockError::WouldBlock) => Err(taken()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Allocates the space of a new file; rejects an existing one that is shorter than requested.
fn fit(file: &File, path: &Path, bytes: Option<u64>, remarks: &mut Vec<String>) -> io::Result<()> {
    let has = file.metadata()?.len();
    match bytes {
        Some(bytes) if has == 0 => make(file, path, bytes, remarks),
        Some(bytes) if has < bytes => Err(invalid(format!(
            "it has {has} bytes, {bytes} were requested: if it was created shorter, leave the size out; if it was \
             truncated, remove it to start anew"
        ))),
        None if has == 0 => Err(invalid("it is empty: give a size, PATH:SIZE".to_owned())),
        _ => Ok(()),
    }
}

fn make(file: &File, path: &Path, bytes: u64, remarks: &mut Vec<String>) -> io::Result<()> {
    let allocated = match allocate(file, bytes) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            remarks
                .push(format!("no space is preallocated for {}: the file system does not support it", path.display()));
            file.set_len(bytes)
        }
        allocated => allocated,
    };
    if let Err(error) = allocated.and_then(|()| file.sync_all()) {
        // The partly allocated file would obstruct the next attempt.
        let _ = std::fs::remove_file(path);
        return Err(match error.kind() {
            io::ErrorKind::StorageFull => {
                io::Error::new(error.kind(), format!("no space for {bytes} bytes: make room, or give a smaller size"))
            }
            _ => error,
        });
    }
    sync_directory(path);
    Ok(())
}

fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let too_many = |_| invalid(format!("a size of {bytes} bytes is more than a file can have: give less"));
    let length = libc::off_t::try_from(bytes).map_err(too_many)?;
    loop {
        // SAFETY: passes no memory; the descriptor is open as long as the file.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("kvplane-claim-{name}-{}", std::process::id())))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn refusal(path: &Path, bytes: Option<u64>) -> String {
        ClaimedFile::open(path, bytes).expect_err("refused").to_string()
    }

    #[test]
    fn a_file_is_created_with_its_space_and_claimed_exclusively() {
        let scratch = Scratch::new("made");
        let claimed = ClaimedFile::open(&scratch.0, Some((1 << 20) + 5)).expect("made");
        assert_eq!(claimed.bytes(), 1 << 20);
        assert!(claimed.remarks().iter().any(|remark| remark.contains("1048581 bytes is rounded down to 1048576")));
        let metadata = scratch.0.metadata().expect("it is there");
        assert!(metadata.blocks() * 512 >= 1 << 20, "space is set aside");
        assert!(refusal(&scratch.0, None).contains("in use by another process"));
        drop(claimed);
        assert_eq!(ClaimedFile::open(&scratch.0, None).expect("free again").bytes(), 1 << 20);
        assert_eq!(ClaimedFile::open(&scratch.0, Some(8192)).expect("a part").bytes(), 8192);
        assert!(refusal(&scratch.0, Some(2 << 20)).contains("1048576 bytes, 2097152 were requested"));
    }

    #[test]
    fn a_partial_block_at_the_end_is_not_used() {
        let scratch = Scratch::new("odd");
        std::fs::write(&scratch.0, vec![7; (64 << 10) + 100]).expect("written");
        let odd = ClaimedFile::open(&scratch.0, None).expect("opened");
        assert_eq!(odd.bytes(), 64 << 10);
        assert!(odd.remarks().iter().any(|remark| remark.contains("its length of 65636 bytes is rounded down")));
        let is_direct = odd.file().direct().is_ok();
        drop(odd);
        File::options().write(true).open(&scratch.0).and_then(|file| file.set_len(64 << 10)).expect("cut");
        let whole = ClaimedFile::open(&scratch.0, None).expect("opened");
        assert_eq!(whole.file().direct().is_ok(), is_direct, "direct I/O does not depend on the last block");
    }

    #[test]
    fn a_file_that_replaced_the_locked_one_is_detected() {
        let scratch = Scratch::new("replaced");
        std::fs::write(&scratch.0, vec![7; 64 << 10]).expect("written");
        let (guard, writable) = open_file(&scratch.0, None).expect("locked");
        let file = DirectFile::open_whole_blocks(&scratch.0, writable).expect("opened");
        assert!(is_same(&guard, &file).expect("looked at"));
        std::fs::remove_file(&scratch.0).expect("removed");
        std::fs::write(&scratch.0, vec![8; 64 << 10]).expect("written");
        let file = DirectFile::open_whole_blocks(&scratch.0, writable).expect("opened");
        assert!(!is_same(&guard, &file).expect("looked at"), "the lock is on the other");
    }

    #[test]
    fn unsuitable_paths_are_rejected_with_a_reason() {
        let scratch = Scratch::new("refused");
        assert!(refusal(&std::env::temp_dir(), Some(1 << 20)).contains("is a directory"));
        assert!(refusal(&scratch.0, None).contains("give a size"));
        assert!(refusal(&scratch.0, Some(100)).contains("less than a block"));
        assert!(!scratch.0.exists(), "nothing is left");
        refusal(&scratch.0, Some(1 << 60));
        assert!(!scratch.0.exists(), "nothing is left");
        assert!(refusal(Path::new("/dev/null"), None).contains("neither a regular file nor a block device"));
    }
}
