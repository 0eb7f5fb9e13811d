//! Destination directory of a fetch: allows one get at a time, or one reshard at a time for each file, and reports
//! foreign files.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::super::Failure;
use super::files::{FILES, at};
use super::names::part_name;
use super::say;

/// Creates the directory if it is missing, and locks it exclusively until the returned file is dropped or the process
/// ends.
pub(super) fn lock(directory: &Path) -> Result<File, Failure> {
    locked(directory, File::try_lock)
}

/// Like [`lock`], but shared with other callers of this function: each of them locks the files that it writes
/// ([`Out`]).
pub(super) fn share(directory: &Path) -> Result<File, Failure> {
    locked(directory, File::try_lock_shared)
}

fn locked(directory: &Path, lock: impl Fn(&File) -> Result<(), TryLockError>) -> Result<File, Failure> {
    fs::create_dir_all(directory).map_err(at(directory))?;
    let file = File::open(directory).map_err(at(directory))?;
    match lock(&file) {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(at(directory)(format!("{}, or give another directory", busy(&file)))),
        // Some file systems, such as NFS, have no locks on directories. The names of partial files contain object and
        // version, so versions do not mix.
        Err(TryLockError::Error(error)) => {
            say(&at(directory)(format!("not locked ({error}): run no other get into this directory")).to_string());
            Ok(file)
        }
    }
}

fn busy(file: &File) -> String {
    let who = holder(file).map_or("another process".to_owned(), |process| format!("process {process}"));
    format!("{who} fetches into it: wait until it has ended")
}

/// Locked output file, under a temporary name until it is complete.
pub(super) struct Out {
    pub(super) file: File,
    part: PathBuf,
    path: PathBuf,
}

impl Out {
    /// Creates the file, empty.
    pub(super) fn create(path: PathBuf) -> Result<Self, Failure> {
        // The object's name is empty, which no real object's is: two processes that write the same file conflict,
        // whatever their objects.
        let name = part_name("", 0, Path::new(path.file_name().unwrap_or(OsStr::new(""))));
        let part = path.with_file_name(name);
        loop {
            let file = File::options().write(true).create(true).truncate(false).open(&part).map_err(at(&part))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(at(&path)(busy(&file))),
                // File locks are missing as for the directory, which has been reported.
                Err(TryLockError::Error(_)) => {}
            }
            // The previous holder of the lock may have renamed or removed the file since it was opened.
            if is_at(&file, &part).map_err(at(&part))? {
                file.set_len(0).map_err(at(&part))?;
                return Ok(Self { file, part, path });
            }
        }
    }

    /// Renames the file to its final name.
    pub(super) fn finish(self) -> Result<(), Failure> {
        self.file.sync_all().map_err(at(&self.part))?;
        fs::rename(&self.part, &self.path).map_err(at(&self.path))
    }

    pub(super) fn part(&self) -> &Path {
        &self.part
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        // An incomplete file is removed; the lock is still held.
        if is_at(&self.file, &self.part).is_ok_and(|is| is) {
            let _ = fs::remove_file(&self.part);
        }
    }
}

/// Returns true if `file` is the one with this path.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the process that has locked a file, if the kernel shows it.
fn holder(file: &File) -> Option<u32> {
    let found = file.metadata().ok()?;
    let (dev, inode) = (found.dev(), found.ino());
    let (major, minor) = ((dev >> 8) & 0xfff | (dev >> 32) & !0xfff, dev & 0xff | (dev >> 12) & !0xff);
    let locked = format!("{major:02x}:{minor:02x}:{inode}");
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK ADVISORY WRITE 1234 fd:01:5678 0 EOF"; waiting processes have "->" before the kind.
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, process, place, ..] = words[..] else { return None };
        // Process 0 is one that is not visible in this PID namespace.
        process.parse().ok().filter(|&process| place == locked && process > 0)
    })
}

/// Reports files in the directory that the object does not have: those of a former version, or the user's own. They
/// stay.
pub(super) fn say_what_else(directory: &Path, files: &BTreeSet<&Path>, object: &str, version: u64) {
    let (mut others, mut looked, mut first) = (0, 0, None);
    let mut directories = vec![directory.to_owned()];
    // The report is a hint; it does not justify reading all of a large tree.
    while let Some(entries) = directories.pop().filter(|_| looked < FILES).map(fs::read_dir) {
        for entry in entries.into_iter().flatten().flatten().take(FILES) {
            looked += 1;
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                directories.push(path);
            } else if !files.contains(path.as_path()) {
                others += 1;
                first = first.filter(|first: &PathBuf| *first < path).or(Some(path));
            }
        }
    }
    let Some(first) = first else { return };
    let other = first.strip_prefix(directory).unwrap_or(&first);
    let or_more = if looked < FILES { "" } else { " or more" };
    let text =
        format!("files that do not belong to {object:?} version {version} stay: {others}{or_more}, such as {other:?}");
    say(&at(directory)(text).to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshards_share_a_directory_and_no_file() {
        let directory = std::env::temp_dir().join(format!("kvplane-destination-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        let path = directory.join("tp0.bin");
        let both = (share(&directory).unwrap(), share(&directory).unwrap());
        assert!(lock(&directory).unwrap_err().to_string().contains("fetches into it"));
        let first = Out::create(path.clone()).unwrap();
        let error = Out::create(path.clone()).err().expect("it is being written").to_string();
        assert!(error.contains("tp0.bin: ") && error.contains("wait until it has ended"), "{error}");
        Out::create(directory.join("tp1.bin")).unwrap().finish().unwrap();
        // An aborted write leaves no file, and the file of a killed process is written anew.
        let part = first.part().to_owned();
        drop(first);
        assert!(!part.exists());
        fs::write(&part, "left").unwrap();
        Out::create(path.clone()).unwrap().finish().unwrap();
        assert_eq!((fs::read(&path).unwrap().len(), part.exists()), (0, false));
        drop(both);
        let alone = lock(&directory).unwrap();
        assert!(share(&directory).is_err());
        drop(alone);
        fs::remove_dir_all(&directory).unwrap();
    }
}
