//! Files in memory: on tmpfs or hugetlbfs, where their contents outlive the process that maps them, until the host
//! restarts; or memfds, which end with the last process that has their descriptors.
//!
//! A [`MemoryDirectory`] belongs to one process at a time: it is locked by `flock`, and the lock ends with the process,
//! however that terminates. Its files have mode 0600, so that only processes of the same user can shorten them. A memfd
//! has no name that a process could open.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::private_files::{FileError, private_directory};
use crate::region::{Region, memfd};

/// `statfs` types of the file systems whose files are memory.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x958458f6;

/// Unit in which the kernel counts the space of a file, in bytes.
const STAT_BLOCK_BYTES: u64 = 512;

/// Size of plain pages, in bytes.
const PAGE_BYTES: usize = 4096;

/// Name of the file whose lock is that of the directory.
const LOCK: &str = "lock";

/// Error of a directory or file in memory.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum MemoryFileError {
    /// The directory is not private.
    Directory(FileError),
    /// The directory is on a file system whose files are not memory.
    NotMemory { path: PathBuf },
    /// Another process has claimed the directory.
    InUse { path: PathBuf },
    /// The descriptor that another process passed is not that of the directory's lock.
    OtherLock { path: PathBuf },
    /// The descriptor that another process passed is not that of a file in memory of this user.
    NotHanded { path: PathBuf },
    /// A file has another owner, or other users may access it.
    NotPrivate { path: PathBuf },
    /// The file system has too little room.
    NoRoom { path: PathBuf, bytes: u64, source: io::Error },
    /// The file system is read-only.
    ReadOnly { path: PathBuf },
    /// The operating system refused.
    Io {
        /// Attempted action, as a verb phrase.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl fmt::Display for MemoryFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(error) => error.fmt(f),
            Self::NotMemory { path } => write!(
                f,
                "{} is not in memory: name a directory on tmpfs (below /dev/shm, for example) or on hugetlbfs",
                path.display()
            ),
            Self::InUse { path } => write!(
                f,
                "another process uses the memory in {}: end that process, or name another directory",
                path.display()
            ),
            Self::OtherLock { path } => write!(
                f,
                "the process that handed over has another directory than {}: its lock is another file",
                path.display()
            ),
            Self::NotHanded { path } => {
                write!(
                    f,
                    "the descriptor that was handed over for {} is not of a private file in memory",
                    path.display()
                )
            }
            Self::NotPrivate { path } => {
                write!(f, "{} belongs to another user, or others may access it: remove it", path.display())
            }
            Self::NoRoom { path, bytes, source } => write!(
                f,
                "{} cannot have {bytes} bytes: {source}; make the file system larger (mount -o remount,size=), or \
                 reserve more huge pages",
                path.display()
            ),
            Self::ReadOnly { path } => write!(
                f,
                "the file system of {} is read-only: mount it for writing (mount -o remount,rw), or name another \
                 directory",
                path.display()
            ),
            Self::Io { action, path, source } => write!(f, "cannot {action} {}: {source}", path.display()),
        }
    }
}

impl std::error::Error for MemoryFileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Directory(error) => Some(error),
            Self::NoRoom { source, .. } | Self::Io { source, .. } => Some(source),
            Self::NotMemory { .. } | Self::InUse { .. } | Self::NotPrivate { .. } => None,
            Self::OtherLock { .. } | Self::NotHanded { .. } | Self::ReadOnly { .. } => None,
        }
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MemoryFileError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::ReadOnlyFilesystem => MemoryFileError::ReadOnly { path },
        _ => MemoryFileError::Io { action, path, source },
    }
}

/// Directory on tmpfs or hugetlbfs that this process has claimed.
#[derive(Debug)]
pub struct MemoryDirectory {
    path: PathBuf,
    /// Descriptor that holds the lock.
    lock: File,
}

impl MemoryDirectory {
    /// Claims a directory; a missing one is created, with mode 0700.
    ///
    /// # Errors
    /// When another process has claimed it, it is not private, or not in memory.
    pub fn claim(path: &Path) -> Result<Self, MemoryFileError> {
        private_directory(path).map_err(MemoryFileError::Directory)?;
        let opened = File::open(path).map_err(failed("open", path))?;
        if !is_memory(opened.as_fd()) {
            return Err(MemoryFileError::NotMemory { path: path.to_owned() });
        }
        let lock = open(&path.join(LOCK))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), lock }),
            Err(TryLockError::WouldBlock) => Err(MemoryFileError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(failed("lock", path)(error)),
        }
    }

    /// Shares the claim of another process, which has passed its descriptor of the lock ([`Self::lock`]): the claim
    /// lasts until both have ended, so no third process can claim the directory in between.
    ///
    /// # Errors
    /// When the descriptor is that of another file, or holds no lock while a third process does.
    pub fn adopt(path: &Path, lock: OwnedFd) -> Result<Self, MemoryFileError> {
        private_directory(path).map_err(MemoryFileError::Directory)?;
        let lock = File::from(lock);
        let passed = lock.metadata().map_err(failed("look at", path))?;
        let named = open(&path.join(LOCK))?.metadata().map_err(failed("look at", path))?;
        if (passed.dev(), passed.ino()) != (named.dev(), named.ino()) {
            return Err(MemoryFileError::OtherLock { path: path.to_owned() });
        }
        // Locks belong to the open file, which both processes have: this succeeds if the other one holds it.
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), lock }),
            Err(TryLockError::WouldBlock) => Err(MemoryFileError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => Err(failed("lock", path)(error)),
        }
    }

    /// Returns the descriptor that holds the lock.
    #[must_use]
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Returns the bytes that the file system has left; `None` if it has no limit of its own.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn free_bytes(&self) -> Result<Option<u64>, MemoryFileError> {
        let status = stat_of(self.lock.as_fd()).map_err(failed("look at", &self.path))?;
        let block_bytes = u64::try_from(status.f_bsize).unwrap_or(0);
        Ok((status.f_blocks > 0).then(|| status.f_bavail.saturating_mul(block_bytes)))
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file of the directory; a missing one is created, without any bytes.
    ///
    /// # Errors
    /// When it cannot be opened, or is not private.
    pub fn open(&self, name: &str) -> Result<MemoryFile, MemoryFileError> {
        let path = self.path.join(name);
        let file = open(&path)?;
        let page_bytes = page_bytes(file.as_fd()).map_err(failed("look at", &path))?;
        Ok(MemoryFile { file, path, page_bytes })
    }

    /// Removes the files for whose names `is_unused` returns true.
    ///
    /// # Errors
    /// When the directory cannot be read, or a file not be removed.
    pub fn remove_if(&self, is_unused: impl Fn(&str) -> bool) -> Result<(), MemoryFileError> {
        for entry in fs::read_dir(&self.path).map_err(failed("read", &self.path))? {
            let path = entry.map_err(failed("read", &self.path))?.path();
            if path.file_name().and_then(|name| name.to_str()).is_some_and(&is_unused) {
                fs::remove_file(&path).map_err(failed("remove", &path))?;
            }
        }
        Ok(())
    }
}

/// File in memory: in a directory, or a memfd. Reads copy; writes need a mapping
/// ([`crate::Region::map_memory_file`]), as hugetlbfs has no others.
#[derive(Debug)]
pub struct MemoryFile {
    file: File,
    path: PathBuf,
    page_bytes: usize,
}

impl MemoryFile {
    /// Creates a memfd of this name, without any bytes.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn create(name: &str) -> Result<Self, MemoryFileError> {
        let path = Self::memfd_path(name);
        let fd = memfd::create(name, false).map_err(failed("create", &path))?;
        Self::adopt(fd, path)
    }

    /// Returns the file of a shared region, whose memfd has this name.
    ///
    /// # Errors
    /// When the region is private, or its file is not a private one in memory; when the process has too many
    /// descriptors.
    pub fn of_region(region: &Region, name: &str) -> Result<Self, MemoryFileError> {
        let path = Self::memfd_path(name);
        let Some(fd) = region.fd() else { return Err(MemoryFileError::NotHanded { path }) };
        let fd = fd.try_clone_to_owned().map_err(failed("keep", &path))?;
        Self::adopt(fd, path)
    }

    /// Returns the path by which errors name a memfd.
    #[must_use]
    pub fn memfd_path(name: &str) -> PathBuf {
        PathBuf::from(format!("memfd:{name}"))
    }

    /// Adopts the descriptor of a file that another process of this user has opened, or of a memfd. The path names it
    /// in errors.
    ///
    /// # Errors
    /// When it is not a private file in memory, of this user.
    pub fn adopt(fd: OwnedFd, path: PathBuf) -> Result<Self, MemoryFileError> {
        let file = File::from(fd);
        let found = file.metadata().map_err(failed("look at", &path))?;
        // Nobody can open a file without a name, whatever its mode.
        let is_private = is_private_file(&found) || is_nameless_file(&found);
        if !is_private || !is_memory(file.as_fd()) {
            return Err(MemoryFileError::NotHanded { path });
        }
        let page_bytes = page_bytes(file.as_fd()).map_err(failed("look at", &path))?;
        Ok(Self { file, path, page_bytes })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size of its pages: lengths are multiples of it.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Returns the length of the file, in bytes.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn bytes(&self) -> Result<u64, MemoryFileError> {
        Ok(self.file.metadata().map_err(failed("look at", &self.path))?.len())
    }

    /// Sets the length of the file, in whole pages. A longer file has zeros behind its former end, and no memory there
    /// yet ([`Self::allocate`]).
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_bytes(&self, bytes: u64) -> Result<(), MemoryFileError> {
        let whole = bytes.next_multiple_of(self.page_bytes as u64);
        crate::claim::check_limit(whole).map_err(failed("set the length of", &self.path))?;
        self.file.set_len(whole).map_err(failed("set the length of", &self.path))
    }

    /// Allocates memory for all of the file, which keeps its contents: no later access can lack a page.
    ///
    /// # Errors
    /// When the file system has too little room.
    pub fn allocate(&self) -> Result<(), MemoryFileError> {
        let found = self.file.metadata().map_err(failed("look at", &self.path))?;
        let bytes = found.len();
        // Looking at each page takes seconds where there are many.
        if found.blocks().saturating_mul(STAT_BLOCK_BYTES) >= bytes {
            return Ok(());
        }
        let length = i64::try_from(bytes).unwrap_or(i64::MAX);
        loop {
            // SAFETY: plain call on an open descriptor.
            if length == 0 || unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, length) } == 0 {
                return Ok(());
            }
            let source = io::Error::last_os_error();
            if source.kind() != io::ErrorKind::Interrupted {
                return Err(MemoryFileError::NoRoom { path: self.path.clone(), bytes, source });
            }
        }
    }

    /// Reads the bytes at `offset`.
    ///
    /// # Errors
    /// When the file ends earlier, or cannot be read.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryFileError> {
        self.file.read_exact_at(into, offset).map_err(failed("read", &self.path))
    }

    /// Returns the descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Opens a private file for reading and writing; a missing one is created.
fn open(path: &Path) -> Result<File, MemoryFileError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path).map_err(failed("open", path))?;
    let found = file.metadata().map_err(failed("look at", path))?;
    if !is_private_file(&found) {
        return Err(MemoryFileError::NotPrivate { path: path.to_owned() });
    }
    Ok(file)
}

/// Returns true for a file that belongs to this user, and that no other one may access.
fn is_private_file(found: &fs::Metadata) -> bool {
    found.is_file() && found.uid() == crate::cpu::effective_uid() && found.mode() & 0o077 == 0
}

/// Returns true for a file of this user that no directory has: a memfd.
fn is_nameless_file(found: &fs::Metadata) -> bool {
    found.is_file() && found.uid() == crate::cpu::effective_uid() && found.nlink() == 0
}

fn stat_of(fd: BorrowedFd<'_>) -> io::Result<libc::statfs> {
    let mut status = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the kernel fills a structure of this function.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), status.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all-zero is a valid `statfs`, and the kernel has filled it.
    Ok(unsafe { status.assume_init() })
}

/// Returns true if a file or directory is on tmpfs or hugetlbfs.
pub(crate) fn is_memory(fd: BorrowedFd<'_>) -> bool {
    stat_of(fd).is_ok_and(|status| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&status.f_type))
}

/// Returns the size of the pages of a file in memory.
fn page_bytes(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let status = stat_of(fd)?;
    let huge = usize::try_from(status.f_bsize).ok().filter(|unit| unit.is_power_of_two());
    Ok(huge.filter(|_| status.f_type == HUGETLBFS_MAGIC).unwrap_or(PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HugePages, RegionOptions};

    /// Directory in memory that is removed with the test.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            Self(PathBuf::from(format!("/dev/shm/kvplane-{name}-{}", std::process::id())))
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn options(bytes: usize) -> RegionOptions {
        RegionOptions { shared: true, prefault: true, huge: HugePages::Try, ..RegionOptions::new("kept", bytes) }
    }

    #[test]
    fn a_read_only_file_system_is_named_with_what_to_do() {
        let read_only = io::Error::from(io::ErrorKind::ReadOnlyFilesystem);
        let said = failed("open", Path::new("/run/memory/lock"))(read_only).to_string();
        assert!(said.contains("/run/memory/lock is read-only: mount it for writing"), "{said}");
        let other = failed("open", Path::new("/run/memory/lock"))(io::ErrorKind::NotFound.into()).to_string();
        assert!(other.starts_with("cannot open /run/memory/lock: "), "{other}");
    }

    #[test]
    fn a_directory_belongs_to_one_process() {
        let place = Place::new("claim");
        let claimed = MemoryDirectory::claim(&place.0).expect("a directory");
        assert!(matches!(MemoryDirectory::claim(&place.0), Err(MemoryFileError::InUse { .. })));
        drop(claimed);
        MemoryDirectory::claim(&place.0).expect("it is free again");
        assert!(matches!(MemoryDirectory::claim(Path::new("/proc/self")), Err(MemoryFileError::Directory(_))));
    }

    #[test]
    fn a_claim_is_shared_by_its_descriptor() {
        let place = Place::new("adopt");
        let first = MemoryDirectory::claim(&place.0).expect("a directory");
        assert!(first.free_bytes().expect("a file system").is_none_or(|bytes| bytes > 0));
        let passed = || first.lock().try_clone_to_owned().expect("a descriptor");
        let second = MemoryDirectory::adopt(&place.0, passed()).expect("shared");
        let third = passed();
        drop(first);
        assert!(matches!(MemoryDirectory::claim(&place.0), Err(MemoryFileError::InUse { .. })));
        drop(second);
        assert!(matches!(MemoryDirectory::claim(&place.0), Err(MemoryFileError::InUse { .. })), "one is left");
        drop(third);
        let again = MemoryDirectory::claim(&place.0).expect("it is free again");
        // A descriptor of another file, and one that does not hold the lock.
        let other = again.open("pool").expect("a file").fd().try_clone_to_owned().expect("a descriptor");
        assert!(matches!(MemoryDirectory::adopt(&place.0, other), Err(MemoryFileError::OtherLock { .. })));
        let unlocked = OwnedFd::from(File::open(place.0.join(LOCK)).expect("a file"));
        assert!(matches!(MemoryDirectory::adopt(&place.0, unlocked), Err(MemoryFileError::InUse { .. })));
    }

    #[test]
    fn a_file_is_adopted_by_its_descriptor_if_it_is_private_memory() {
        let place = Place::new("adopt-file");
        let directory = MemoryDirectory::claim(&place.0).expect("a directory");
        let file = directory.open("pool").expect("a file");
        file.set_bytes(8192).expect("a length");
        let passed = || file.fd().try_clone_to_owned().expect("a descriptor");
        let adopted = MemoryFile::adopt(passed(), file.path().to_owned()).expect("a file");
        assert_eq!(adopted.bytes().expect("a length"), 8192);
        let path = place.0.join("pool");
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("open to others");
        assert!(matches!(MemoryFile::adopt(passed(), path.clone()), Err(MemoryFileError::NotHanded { .. })));
        let null = OwnedFd::from(File::open("/dev/null").expect("a device"));
        assert!(matches!(MemoryFile::adopt(null, path), Err(MemoryFileError::NotHanded { .. })));
    }

    #[test]
    fn memfds_are_adopted_whatever_their_mode_and_keep_their_seals() {
        let region = Region::allocate(&options(3 << 20)).expect("a region");
        region.copy_in(5, b"bytes");
        let pool = MemoryFile::of_region(&region, "kept").expect("a file");
        let passed = pool.fd().try_clone_to_owned().expect("a descriptor");
        let adopted = MemoryFile::adopt(passed, pool.path().to_owned()).expect("a file");
        assert_eq!(adopted.page_bytes(), pool.page_bytes());
        let mapped = Region::map_memory_file(&adopted, &options(3 << 20)).expect("a mapping");
        drop((region, pool));
        let mut bytes = [0; 5];
        mapped.copy_out(5, &mut bytes);
        assert_eq!(&bytes, b"bytes");
        assert!(adopted.set_bytes(1 << 20).is_err() && adopted.set_bytes(8 << 20).is_err(), "its seals stay");
        // Peers of the host map it as they map that of the first process.
        let shown = mapped.fd().expect("a descriptor").try_clone_to_owned().expect("a descriptor");
        Region::map_shared(shown, 3 << 20, true).expect("sealed");
        // A file for an image grows and shrinks.
        let image = MemoryFile::create("image").expect("a file");
        for bytes in [8192, 1 << 20, 4096] {
            image.set_bytes(bytes).expect("a length");
            assert_eq!(image.bytes().expect("a length"), bytes);
        }
        let private = Region::allocate(&RegionOptions::new("private", 4096)).expect("a region");
        assert!(matches!(MemoryFile::of_region(&private, "x"), Err(MemoryFileError::NotHanded { .. })));
    }

    #[test]
    fn a_directory_on_a_disk_is_refused() {
        let target = std::env::current_exe().expect("a program").with_file_name("kvplane-memory-on-disk");
        if private_directory(&target).is_ok() && !is_memory(File::open(&target).expect("a directory").as_fd()) {
            assert!(matches!(MemoryDirectory::claim(&target), Err(MemoryFileError::NotMemory { .. })));
        }
        let _ = fs::remove_dir(&target);
    }

    #[test]
    fn contents_outlive_the_mapping() {
        let place = Place::new("contents");
        let bytes = (5 << 20) + 12_345;
        {
            let directory = MemoryDirectory::claim(&place.0).expect("a directory");
            let file = directory.open("pool").expect("a file");
            let region = Region::map_memory_file(&file, &options(bytes)).expect("memory");
            assert_eq!((region.bytes(), region.writable()), (bytes, true));
            region.copy_in(bytes - 5, b"kept!");
            let peer = region.fd().expect("shared").try_clone_to_owned().expect("a descriptor");
            let seen = Region::map_pool(peer, bytes).expect("a pool of the same user");
            let mut found = [0; 5];
            seen.copy_out(bytes - 5, &mut found);
            assert_eq!(&found, b"kept!");
            let peer = region.fd().expect("shared").try_clone_to_owned().expect("a descriptor");
            assert!(matches!(Region::map_shared(peer, bytes, true), Err(crate::RegionError::NotSealed)));
        }
        let directory = MemoryDirectory::claim(&place.0).expect("a directory");
        let file = directory.open("pool").expect("a file");
        let region = Region::map_memory_file(&file, &options(bytes)).expect("memory");
        let mut found = [0; 5];
        region.copy_out(bytes - 5, &mut found);
        assert_eq!(&found, b"kept!");
        file.read_at(bytes as u64 - 5, &mut found).expect("in the file");
        assert_eq!(&found, b"kept!");
        directory.remove_if(|name| name == "pool").expect("removed");
        assert_eq!(directory.open("pool").expect("a file").bytes().expect("its length"), 0);
    }

    #[test]
    fn too_large_a_file_is_an_error() {
        let place = Place::new("large");
        let directory = MemoryDirectory::claim(&place.0).expect("a directory");
        let file = directory.open("pool").expect("a file");
        file.set_bytes(1 << 50).expect("no memory yet");
        assert!(matches!(file.allocate(), Err(MemoryFileError::NoRoom { .. })));
        assert!(file.read_at(0, &mut [0; 8]).is_ok(), "zeros");
    }
}
