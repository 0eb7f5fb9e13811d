//! Passthrough access to the NVMe namespace behind a claimed block device: detection, validation, and opening.
//!
//! A command addresses blocks of the whole namespace and bypasses everything that the kernel knows of it: partitions,
//! its page cache, other processes that have it open. So commands are used only behind a device that this process has
//! claimed, the start of a partition is added, and any unexpected property disables them.

mod error;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::claim::ClaimedFile;
use crate::file::BLOCK_BYTES;

pub use error::NamespaceError;

/// `NVME_IOCTL_ID`: `_IO('N', 0x40)`.
const NAMESPACE_ID: libc::Ioctl = 0x4e40;
/// `NVME_IOCTL_ADMIN_CMD`: `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
const ADMIN_COMMAND: libc::Ioctl = 0xc048_4e41_u32 as libc::Ioctl;
const IDENTIFY: u8 = 6;
const IDENTIFY_BYTES: usize = 4096;
/// Limit of blocks of one command.
const BLOCKS_MOST: u64 = 1 << 16;
/// Least useful command size in bytes. The block layer, which merges and splits requests, serves drives with smaller
/// commands better.
const COMMAND_BYTES_LEAST: u32 = 64 << 10;
/// Unit of sizes in sysfs, in bytes.
const SECTOR_BYTES: u64 = 512;

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    words_2_3: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_length: u32,
    length: u32,
    words_10_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

/// A namespace for passthrough commands.
#[derive(Debug)]
pub struct NvmeNamespace {
    device: File,
    name: String,
    id: u32,
    block_bytes: u64,
    /// Start of the claimed device in the namespace, in blocks; its length is `blocks`.
    first_block: u64,
    blocks: u64,
    command_bytes_most: u32,
}

/// Decoded identify data of a namespace.
#[derive(Debug, PartialEq, Eq)]
struct NamespaceInfo {
    blocks: u64,
    block_bytes: u64,
    metadata_bytes: u16,
    protection: u8,
}

impl NvmeNamespace {
    /// Returns the namespace behind a claimed device; `None` if it is not an NVMe drive.
    ///
    /// # Errors
    /// The reason why commands cannot be used.
    pub fn behind(claimed: &ClaimedFile) -> Result<Option<Self>, NamespaceError> {
        if !claimed.is_device() {
            return Ok(None);
        }
        let (major, minor) = claimed.device();
        let Some(place) = SysfsProperties::of(Path::new("/sys"), major, minor)? else { return Ok(None) };
        if !claimed.file().writable() {
            return Err(NamespaceError::ReadOnly);
        }
        Self::open(claimed, &place).map(Some)
    }

    fn open(claimed: &ClaimedFile, place: &SysfsProperties) -> Result<Self, NamespaceError> {
        let path = Path::new("/dev").join(&place.generic);
        let failed = |action| {
            let path = path.clone();
            move |source| NamespaceError::Device { path, action, source }
        };
        let device = File::options().read(true).write(true).open(&path).map_err(failed("opening"))?;
        let metadata = device.metadata().map_err(failed("examining"))?;
        if !metadata.file_type().is_char_device() || number(metadata.rdev()) != place.number {
            return Err(NamespaceError::OtherDevice { path, number: place.number.clone() });
        }
        let id = namespace_id(device.as_fd()).map_err(failed("querying its namespace"))?;
        let block_id = namespace_id(claimed.file().fd()).map_err(|source| NamespaceError::BlockDevice { source })?;
        if id != block_id {
            return Err(NamespaceError::OtherNamespace { path, id, block_id });
        }
        let described = describe(&identify(&device, id).map_err(failed("identifying"))?);
        let (first_block, blocks) = place.check(&described, claimed.file().bytes())?;
        let command_bytes_most = place.command_bytes_most(described.block_bytes);
        if command_bytes_most < COMMAND_BYTES_LEAST {
            return Err(NamespaceError::SmallCommands { bytes: command_bytes_most });
        }
        Ok(Self {
            device,
            name: path.display().to_string(),
            id,
            block_bytes: described.block_bytes,
            first_block,
            blocks,
            command_bytes_most,
        })
    }

    /// Returns the device name, for logs.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the largest transfer of one command, in bytes: whole pages.
    #[must_use]
    pub const fn command_bytes_most(&self) -> u32 {
        self.command_bytes_most
    }

    pub(crate) const fn id(&self) -> u32 {
        self.id
    }

    /// Returns the blocks of a range of the claimed device: the first, and their number.
    ///
    /// # Panics
    /// When the range is not block-aligned, exceeds the size of a command, or is outside of the device.
    pub(crate) fn blocks_of(&self, offset: u64, bytes: u64) -> (u64, u32) {
        let whole = offset.is_multiple_of(self.block_bytes) && bytes.is_multiple_of(self.block_bytes);
        assert!(
            whole && bytes > 0 && bytes <= self.command_bytes_most.into(),
            "a command for {bytes} bytes at {offset}"
        );
        let (first, blocks) = (offset / self.block_bytes, bytes / self.block_bytes);
        assert!(first + blocks <= self.blocks, "{bytes} bytes at {offset} of {} blocks", self.blocks);
        (self.first_block + first, blocks as u32)
    }
}

impl AsFd for NvmeNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// Properties of the device in sysfs.
#[derive(Debug)]
struct SysfsProperties {
    /// Name of the namespace's character device, and its device number.
    generic: String,
    number: String,
    /// Start of the claimed device in the whole one, and length of the whole, in sectors.
    start: u64,
    sectors: u64,
    block_bytes: u64,
    request_bytes_most: u64,
    pieces_most: u64,
}

impl SysfsProperties {
    /// Reads the properties of the block device with this number; `None` if it is not an NVMe drive.
    fn of(sys: &Path, major: u64, minor: u64) -> Result<Option<Self>, NamespaceError> {
        let link = sys.join(format!("dev/block/{major}:{minor}"));
        let device = fs::canonicalize(&link).map_err(|source| NamespaceError::Property { path: link, source })?;
        let is_part = device.join("partition").exists();
        let (whole, start) = match (is_part, device.parent()) {
            (true, Some(whole)) => (whole.to_owned(), read(&device.join("start"))?),
            _ => (device, 0),
        };
        let name = whole.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(generic) = generic_of(&name) else { return Ok(None) };
        let entry = sys.join("class/nvme-generic").join(&generic);
        // Both belong to the same controller, or to the same subsystem of several.
        let parent = |of: PathBuf| fs::canonicalize(of.join("device")).ok();
        if parent(entry.clone()).is_none() || parent(entry.clone()) != parent(whole.clone()) {
            return Err(NamespaceError::NoGeneric { name, generic });
        }
        if fs::read_to_string(whole.join("queue/zoned")).is_ok_and(|zoned| zoned.trim() != "none") {
            return Err(NamespaceError::Zoned { name });
        }
        Ok(Some(Self {
            number: text(&entry.join("dev"))?,
            generic,
            start,
            sectors: read(&whole.join("size"))?,
            block_bytes: read(&whole.join("queue/logical_block_size"))?,
            request_bytes_most: read(&whole.join("queue/max_hw_sectors_kb"))? << 10,
            pieces_most: read(&whole.join("queue/max_segments"))?,
        }))
    }

    /// Returns the first block of the claimed device in the namespace, and the number of its blocks.
    fn check(&self, described: &NamespaceInfo, bytes: u64) -> Result<(u64, u64), NamespaceError> {
        let NamespaceInfo { blocks, block_bytes, metadata_bytes, protection } = *described;
        if metadata_bytes != 0 || protection != 0 {
            return Err(NamespaceError::Metadata { metadata_bytes, protection });
        }
        if block_bytes != self.block_bytes || !(512..=BLOCK_BYTES as u64).contains(&block_bytes) {
            return Err(NamespaceError::BlockBytes { bytes: block_bytes, device_bytes: self.block_bytes });
        }
        let start = self.start * SECTOR_BYTES;
        let same = blocks.checked_mul(block_bytes) == Some(self.sectors * SECTOR_BYTES);
        if !same || !start.is_multiple_of(block_bytes) || start + bytes > blocks * block_bytes {
            let (sectors, start) = (self.sectors, self.start);
            return Err(NamespaceError::Size { blocks, block_bytes, sectors, start });
        }
        Ok((start / block_bytes, bytes / block_bytes))
    }

    fn command_bytes_most(&self, block_bytes: u64) -> u32 {
        // Each page may be a piece of its own, and an unaligned start takes one more.
        let pages = (self.pieces_most.saturating_sub(1)).max(1) * BLOCK_BYTES as u64;
        let most = self.request_bytes_most.min(pages).min(BLOCKS_MOST * block_bytes).min(1 << 30);
        (most / BLOCK_BYTES as u64 * BLOCK_BYTES as u64) as u32
    }
}

/// Returns the name of the generic device: ng3n1 for nvme3n1.
fn generic_of(name: &str) -> Option<String> {
    let (controller, namespace) = name.strip_prefix("nvme")?.split_once('n')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(controller) && digits(namespace)).then(|| format!("ng{controller}n{namespace}"))
}

fn text(path: &Path) -> Result<String, NamespaceError> {
    let property = |source| NamespaceError::Property { path: path.to_owned(), source };
    Ok(fs::read_to_string(path).map_err(property)?.trim().to_owned())
}

fn read(path: &Path) -> Result<u64, NamespaceError> {
    let text = text(path)?;
    text.parse().map_err(|_| NamespaceError::NotNumber { path: path.to_owned(), text })
}

fn number(device: u64) -> String {
    format!("{}:{}", libc::major(device), libc::minor(device))
}

fn namespace_id(device: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: passes no memory.
    let id = unsafe { libc::ioctl(device.as_raw_fd(), NAMESPACE_ID) };
    if id > 0 { Ok(id as u32) } else { Err(io::Error::last_os_error()) }
}

fn identify(device: &File, id: u32) -> io::Result<Vec<u8>> {
    let mut answer = vec![0u8; IDENTIFY_BYTES];
    let mut command = AdminCommand {
        opcode: IDENTIFY,
        namespace: id,
        address: answer.as_mut_ptr().addr() as u64,
        length: IDENTIFY_BYTES as u32,
        ..AdminCommand::default()
    };
    // SAFETY: the command has the form that the call expects; the kernel writes at most `length` bytes to the answer,
    // which outlives the call.
    let status = unsafe { libc::ioctl(device.as_raw_fd(), ADMIN_COMMAND, &raw mut command) };
    match status {
        0 => Ok(answer),
        status if status > 0 => Err(io::Error::other(format!("the drive returned status {status:#x}"))),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Decodes the namespace's size, and its current format.
fn describe(answer: &[u8]) -> NamespaceInfo {
    let format = usize::from(answer[26]);
    let format = format & 0xf | format >> 1 & 0x30;
    let at = 128 + 4 * format;
    NamespaceInfo {
        blocks: u64::from_le_bytes(core::array::from_fn(|byte| answer[byte])),
        block_bytes: 1u64.checked_shl(answer[at + 2].into()).unwrap_or(0),
        metadata_bytes: u16::from_le_bytes([answer[at], answer[at + 1]]),
        protection: answer[29] & 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(blocks: u64, format: usize, block_shift: u8, metadata: u16, protection: u8) -> Vec<u8> {
        let mut answer = vec![0; IDENTIFY_BYTES];
        answer[..8].copy_from_slice(&blocks.to_le_bytes());
        answer[26] = (format & 0xf | format >> 4 << 5) as u8;
        answer[29] = protection;
        answer[128 + 4 * format..][..2].copy_from_slice(&metadata.to_le_bytes());
        answer[128 + 4 * format + 2] = block_shift;
        answer
    }

    fn place(start: u64, sectors: u64, block_bytes: u64) -> SysfsProperties {
        let (request_bytes_most, pieces_most) = (512 << 10, 127);
        let (generic, number) = ("ng0n1".to_owned(), "240:0".to_owned());
        SysfsProperties { generic, number, start, sectors, block_bytes, request_bytes_most, pieces_most }
    }

    #[test]
    fn whole_namespaces_and_partitions_are_accepted() {
        let whole = describe(&answer(1 << 18, 4, 12, 0, 0));
        let bytes = 1 << 30;
        let accepted = |place: SysfsProperties, info, bytes| place.check(info, bytes).expect("accepted");
        assert_eq!(accepted(place(0, bytes / 512, 4096), &whole, bytes), (0, 1 << 18));
        assert_eq!(accepted(place(2048, bytes / 512, 4096), &whole, bytes - (1 << 20)), (256, (1 << 18) - 256));
        // Format numbers above 15 are split into two fields.
        let short = describe(&answer(1 << 21, 33, 9, 0, 0));
        assert_eq!(accepted(place(1, bytes / 512, 512), &short, 512), (1, 1));
    }

    #[test]
    fn unexpected_namespaces_are_rejected() {
        let bytes: u64 = 1 << 30;
        let why = |place: SysfsProperties, answer: Vec<u8>| {
            place.check(&describe(&answer), bytes).expect_err("refused").to_string()
        };
        let sectors = bytes / 512;
        let metadata = why(place(0, sectors, 4096), answer(1 << 18, 0, 12, 8, 0));
        assert!(metadata.contains("8 bytes of metadata"), "{metadata}");
        let protected = why(place(0, sectors, 4096), answer(1 << 18, 0, 12, 0, 1));
        assert!(protected.contains("protection type 1"), "{protected}");
        let other = why(place(0, sectors, 512), answer(1 << 18, 0, 12, 0, 0));
        assert!(other.contains("4096 bytes, the block device's 512"), "{other}");
        for (start, blocks) in [(0, (1 << 18) - 1), (8, 1 << 18), (7, 1 << 19), (0, u64::MAX)] {
            let size = why(place(start, sectors, 4096), answer(blocks, 0, 12, 0, 0));
            assert!(size.contains("are not"), "{size}");
        }
        why(place(0, sectors, 8192), answer(1 << 17, 0, 13, 0, 0));
        why(place(0, sectors, 4096), answer(1 << 18, 0, 200, 0, 0));
        assert_eq!(
            ["nvme0n1", "nvme12n3", "nvme0c0n1", "nvme0n1p2", "sda", "nvmen1"].map(|name| generic_of(name).is_some()),
            [true, true, false, false, false, false]
        );
    }

    #[test]
    fn a_command_moves_no_more_than_the_drive_takes() {
        assert_eq!(place(0, 1, 512).command_bytes_most(512), 126 * 4096);
        let wide = SysfsProperties { request_bytes_most: 128 << 10, pieces_most: 65_535, ..place(0, 1, 512) };
        assert_eq!(wide.command_bytes_most(512), 128 << 10);
        let endless = SysfsProperties { request_bytes_most: 1 << 40, pieces_most: u64::MAX >> 20, ..place(0, 1, 512) };
        assert_eq!(endless.command_bytes_most(512), 32 << 20);
        assert_eq!(SysfsProperties { request_bytes_most: 512, ..place(0, 1, 512) }.command_bytes_most(512), 0);
    }

    #[test]
    fn a_file_is_no_drive() {
        let path = std::env::temp_dir().join(format!("kvplane-nvme-{}", std::process::id()));
        let claimed = ClaimedFile::open(&path, Some(1 << 20)).expect("a file");
        assert!(matches!(NvmeNamespace::behind(&claimed), Ok(None)));
        std::fs::remove_file(&path).expect("removed");
    }
}
