//! Claimed file or device under a tier: detection of its capabilities, and its parts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvplane_sys::{ClaimedFile, NvmeNamespace};
use kvplane_tier::format::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock, SuperblockFound};
use kvplane_tier::{ENDS_BYTES, OpenError};

use super::passthrough::PassthroughError;

/// Alignment of parts, in bytes.
const PART_BYTES: u64 = 1 << 20;

/// I/O path of reads and writes to a device. Where the device cannot serve it, io_uring alone is used and a remark is
/// logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IoChoice {
    /// Passthrough commands if it is an NVMe drive; polled completions where the device offers them.
    #[default]
    Auto,
    /// io_uring with completions by interrupt.
    Uring,
    /// io_uring with polled completions.
    Polled,
    /// Commands by passthrough.
    Passthrough,
}

/// Capabilities of a device beyond plain reads and writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offers {
    /// Its completions can be polled.
    pub polling: bool,
    /// A single write can be made durable without a flush of everything.
    pub durable_writes: bool,
    /// Largest transfer of one NVMe command in bytes, if the device takes commands.
    pub command_bytes_most: Option<u32>,
}

/// A claimed file or device, to be divided into parts.
#[derive(Debug)]
pub struct Ssd {
    claimed: ClaimedFile,
    path: PathBuf,
    offers: Offers,
    namespace: Option<NvmeNamespace>,
    remarks: Vec<String>,
    /// A flush of the device failed, of whichever part.
    flush_failed: AtomicBool,
}

impl Ssd {
    /// Claims a file or device for this process alone. See [`ClaimedFile::open`].
    ///
    /// # Errors
    /// Errors of [`ClaimedFile::open`]; also foreign data on the device: names the path and the next step.
    pub fn open(path: &Path, bytes: Option<u64>, io: IoChoice) -> io::Result<Self> {
        let claimed = ClaimedFile::open(path, bytes)?;
        if let Some(error) = somebody_elses(&claimed) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {error}", path.display())));
        }
        let mut remarks = claimed.remarks().to_vec();
        let (mut offers, described) = detect(&claimed, Path::new("/sys/dev/block"), io);
        if io == IoChoice::Polled && !offers.polling {
            remarks.push(format!("{}: the device does not support polled completions", path.display()));
        }
        let namespace = namespace_of(&claimed, io).unwrap_or_else(|why| {
            remarks.push(format!("{}: no commands by passthrough: {why}", path.display()));
            None
        });
        offers.command_bytes_most = namespace.as_ref().map(NvmeNamespace::command_bytes_most);
        let way = match &namespace {
            Some(namespace) => {
                let most_kib = namespace.command_bytes_most() >> 10;
                format!("NVMe commands by {} of at most {most_kib} KiB", namespace.name())
            }
            None => "io_uring".to_owned(),
        };
        remarks.push(format!("{}: {} MiB, {way}, {described}", path.display(), claimed.bytes() >> 20));
        Ok(Self { claimed, path: path.to_owned(), offers, namespace, remarks, flush_failed: AtomicBool::new(false) })
    }

    /// Returns the usable bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.claimed.bytes()
    }

    /// Returns the path under which it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns remarks on how the device is used, for logs.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    pub(super) const fn namespace(&self) -> Option<&NvmeNamespace> {
        self.namespace.as_ref()
    }

    /// Records a failed flush. The writes that the device or the kernel dropped may belong to any part, and the kernel
    /// reports the failure once: the next flush of another part may succeed, and proves nothing about earlier writes.
    pub(super) fn note_failed_flush(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }

    pub(super) fn has_failed_flush(&self) -> bool {
        self.flush_failed.load(Ordering::Acquire)
    }

    pub(super) const fn claimed(&self) -> &ClaimedFile {
        &self.claimed
    }
}

/// A contiguous part of a device.
#[derive(Clone, Debug)]
pub struct Part {
    pub(super) ssd: Arc<Ssd>,
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Part {
    /// Returns part `which` of `of` equal parts.
    ///
    /// # Panics
    /// When `which` is not below `of`.
    #[must_use]
    pub fn new(ssd: &Arc<Ssd>, which: u64, of: u64) -> Self {
        assert!(which < of, "part {which} of {of}");
        let bytes = if of == 1 { ssd.bytes() } else { ssd.bytes() / of / PART_BYTES * PART_BYTES };
        Self { ssd: Arc::clone(ssd), start: which * bytes, bytes }
    }

    /// Returns the length of the part, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the capabilities of the device.
    #[must_use]
    pub fn offers(&self) -> Offers {
        self.ssd.offers
    }

    /// Returns the path of the whole device.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.ssd.path()
    }
}

/// Returns an error if the device holds data that is not a tier. Shards check only their own parts, and a part in the
/// middle of a partitioned disk or of a file system may well be blank, so the whole device is checked before any shard
/// formats its part.
///
/// Read errors are left to the shards to report.
fn somebody_elses(claimed: &ClaimedFile) -> Option<OpenError> {
    let bytes = claimed.bytes();
    let head = ENDS_BYTES.min(bytes);
    let mut buffer = vec![0; head as usize];
    for offset in [0, bytes - head] {
        claimed.read_at(offset, &mut buffer).ok()?;
        if offset == 0 && holds_superblock(&buffer) {
            return None;
        }
        if let Some(at) = buffer.iter().position(|byte| *byte != 0) {
            return Some(OpenError::NotBlank { offset: offset + at as u64 });
        }
    }
    None
}

/// Returns true if the head holds a superblock of any version at one of its offsets, valid or not; the shards check
/// whose it is.
fn holds_superblock(head: &[u8]) -> bool {
    SUPERBLOCK_OFFSETS.iter().any(|at| {
        let bytes = head.get(*at as usize..).and_then(<[u8]>::first_chunk::<SUPERBLOCK_BYTES>);
        let found = bytes.map(Superblock::decode);
        !matches!(found, None | Some(SuperblockFound::Blank | SuperblockFound::Foreign))
    })
}

/// Opens the NVMe namespace for passthrough commands.
fn namespace_of(claimed: &ClaimedFile, io: IoChoice) -> Result<Option<NvmeNamespace>, PassthroughError> {
    match io {
        IoChoice::Uring | IoChoice::Polled => Ok(None),
        IoChoice::Auto => Ok(NvmeNamespace::behind(claimed)?),
        IoChoice::Passthrough => NvmeNamespace::behind(claimed)?.map(Some).ok_or(PassthroughError::NotNvme),
    }
}

/// Reads the device's capabilities from sysfs, below the directory of block devices by number.
fn detect(claimed: &ClaimedFile, root: &Path, io: IoChoice) -> (Offers, String) {
    let (major, minor) = claimed.device();
    let device = root.join(format!("{major}:{minor}"));
    // A partition's queue is that of the whole device, one directory up.
    let queues = [device.join("queue"), device.join("../queue")];
    let queue = queues.iter().find(|queue| queue.is_dir());
    let says = |name: &str| {
        let text = fs::read_to_string(queue?.join(name)).ok()?;
        Some(text.trim().to_owned())
    };
    let is_one = |name: &str| says(name).as_deref() == Some("1");
    let direct = claimed.file().direct().is_ok();
    let offers = Offers {
        polling: direct && io != IoChoice::Uring && is_one("io_poll"),
        // In a file, a durable write may have to commit the file system's journal too.
        durable_writes: direct && claimed.is_device() && is_one("fua"),
        command_bytes_most: None,
    };
    let io = if direct { "direct I/O" } else { "through the page cache" };
    let polling = if offers.polling { "completions polled" } else { "completions by interrupt" };
    let durable = if offers.durable_writes { "durable by FUA" } else { "durable by fdatasync" };
    let cache = says("write_cache").unwrap_or_else(|| "unknown".to_owned());
    (offers, format!("{io}, {polling}, {durable}, write cache {cache}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_sysfs() {
        let name = format!("kvplane-detect-{}", std::process::id());
        let root = std::env::current_exe().expect("a path").with_file_name(name);
        let file = root.join("file");
        fs::create_dir_all(&root).expect("a directory");
        let claimed = ClaimedFile::open(&file, Some(1 << 20)).expect("a file");
        let (none, described) = detect(&claimed, &root, IoChoice::Auto);
        assert_eq!(none, Offers::default());
        assert!(described.contains("write cache unknown"), "{described}");
        let (major, minor) = claimed.device();
        let queue = root.join(format!("{major}:{minor}/queue"));
        fs::create_dir_all(&queue).expect("a directory");
        for (name, text) in [("io_poll", "1\n"), ("fua", "1\n"), ("write_cache", "write back\n")] {
            fs::write(queue.join(name), text).expect("written");
        }
        let (offers, described) = detect(&claimed, &root, IoChoice::Auto);
        let direct = claimed.file().direct().is_ok();
        assert_eq!(offers, Offers { polling: direct, ..Offers::default() }, "a file: no FUA");
        assert!(described.ends_with("durable by fdatasync, write cache write back"), "{described}");
        assert!(!detect(&claimed, &root, IoChoice::Uring).0.polling);
        drop(claimed);
        let wanted = Ssd::open(&file, None, IoChoice::Passthrough).expect("opened all the same");
        let remarks = wanted.remarks().concat();
        assert!(remarks.contains("no commands by passthrough: it is no NVMe drive"), "{remarks}");
        drop(wanted);
        let wanted = Ssd::open(&file, None, IoChoice::Polled).expect("opened all the same");
        let offered = wanted.offers.polling || wanted.remarks().concat().contains("does not support polled");
        assert!(offered, "{:?}", wanted.remarks());
        drop(wanted);
        fs::remove_dir_all(&root).expect("removed");
    }
}
