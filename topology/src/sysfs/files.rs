//! Reading files and directories of sysfs and procfs: missing, unreadable or malformed ones are `None`, or empty.

use crate::cpulist::{self, CpuSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

/// Most bytes read of one file; sysfs attributes are at most a page, CPU lists a few pages.
pub const MAX_FILE_BYTES: u64 = 64 << 10;
/// Most entries read of one directory.
pub const MAX_ENTRIES: usize = 16_384;
/// Longest name or address that is kept.
const MAX_WORD_BYTES: usize = 512;

/// Reads the start of a file as text; `None` if it cannot be read or is not text.
pub(super) fn read_text(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Reads a number from a file; `None` also for the kernel's `-1`, which means unknown in every file read here.
pub(super) fn read_number<T: TryFrom<i64>>(path: &Path) -> Option<T> {
    T::try_from(read_text(path)?.trim().parse::<i64>().ok()?).ok()
}

/// Reads a short text from a file, without surrounding white space; `None` if it is empty.
pub(super) fn read_word(path: &Path) -> Option<String> {
    let text = read_text(path)?;
    let word = text.trim();
    (!word.is_empty() && word.len() <= MAX_WORD_BYTES).then(|| word.to_owned())
}

/// Returns the last component of a link's target.
pub(super) fn link_name(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.file_name()?.to_str().map(str::to_owned)
}

pub(super) fn read_cpus(path: &Path) -> Option<CpuSet> {
    cpulist::parse(&read_text(path)?).ok()
}

/// Returns the names in a directory, sorted; empty if it cannot be read. Names that are not UTF-8 are left out.
pub(super) fn children(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let names = entries.take(MAX_ENTRIES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

/// Returns the numbers N of the entries `<prefix>N`, ascending.
pub(super) fn numbered_children(directory: &Path, prefix: &str) -> Vec<u32> {
    let names = children(directory);
    let number = |name: &String| name.strip_prefix(prefix)?.parse().ok();
    let mut numbers: Vec<u32> = names.iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}
