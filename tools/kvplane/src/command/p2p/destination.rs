//! The directory that an object is fetched into: one get at a time, and what else is there.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::super::Failure;
use super::files::{FILES, at};
use super::say;

/// Makes the directory where there is none, and keeps other gets out until the file is dropped or this process ends.
pub(super) fn lock(directory: &Path) -> Result<File, Failure> {
    fs::create_dir_all(directory).map_err(at(directory))?;
    let file = File::open(directory).map_err(at(directory))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let who = holder(&file).map_or("another process".to_owned(), |process| format!("process {process}"));
            let what = "fetches into it: wait until that has ended, or give another directory";
            Err(at(directory)(format!("{who} {what}")))
        }
        // Such as NFS, where directories have no locks. Partial files are an object's own: versions do not mix.
        Err(TryLockError::Error(error)) => {
            say(&at(directory)(format!("not locked ({error}): let no other get write there")).to_string());
            Ok(file)
        }
    }
}

/// Which process has locked a file, where the kernel tells.
fn holder(file: &File) -> Option<u32> {
    let found = file.metadata().ok()?;
    let (dev, inode) = (found.dev(), found.ino());
    let (major, minor) = ((dev >> 8) & 0xfff | (dev >> 32) & !0xfff, dev & 0xff | (dev >> 12) & !0xff);
    let locked = format!("{major:02x}:{minor:02x}:{inode}");
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // "1: FLOCK ADVISORY WRITE 1234 fd:01:5678 0 EOF"; those who wait have "->" before the kind.
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, process, place, ..] = words[..] else { return None };
        // 0: it cannot be seen from here.
        process.parse().ok().filter(|&process| place == locked && process > 0)
    })
}

/// Says which files are there that the object does not have: of a former version, or somebody's own. They stay.
pub(super) fn say_what_else(directory: &Path, files: &BTreeSet<&Path>, object: &str, version: u64) {
    let (mut others, mut looked, mut first) = (0, 0, None);
    let mut directories = vec![directory.to_owned()];
    // A word to whoever watches, which is not worth to look at all of a big tree.
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
    let text = format!("what is no file of {object:?} version {version} stays: {others}{or_more}, such as {other:?}");
    say(&at(directory)(text).to_string());
}
