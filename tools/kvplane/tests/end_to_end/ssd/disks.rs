//! Disks with injected faults: a file with a write cache and power failures, and block devices over files. Devices that
//! this machine does not allow are skipped, with a line that gives the reason.

use std::collections::VecDeque;
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvplane_proto::rng::Rng;

use crate::ssd::fuse::{Backing, Mount};

pub(crate) const EIO: i32 = 5;
pub(crate) const ENOSPC: i32 = 28;
pub(crate) const EROFS: i32 = 30;

/// Atomic write unit: a sector survives a power failure whole or not at all.
const SECTOR: usize = 512;
/// Duration of a flush.
const FLUSH: Duration = Duration::from_millis(4);

/// Injected faults.
#[derive(Default)]
pub(crate) struct Faults {
    /// Reads of this range fail.
    pub(crate) unreadable: Option<Range<u64>>,
    /// Error number of every write.
    pub(crate) writes: Option<i32>,
    /// Error number of every flush.
    pub(crate) flushes: Option<i32>,
    /// Flushes are acknowledged but not done.
    pub(crate) lies: bool,
    /// Writes from this offset on are acknowledged but not done.
    pub(crate) lost: Option<u64>,
}

struct State {
    /// Bytes that a flush made durable, and writes since then, in order.
    durable: Vec<u8>,
    pending: VecDeque<(usize, Vec<u8>)>,
    /// Bytes that reads return.
    now: Vec<u8>,
    faults: Faults,
    flushes: u64,
    /// Number of flushed writes.
    flushed: u64,
}

struct CachedWrite(Mutex<State>);

impl CachedWrite {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl Backing for CachedWrite {
    fn bytes(&self) -> u64 {
        self.state().now.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), i32> {
        let state = self.state();
        let end = offset + into.len() as u64;
        if state.faults.unreadable.as_ref().is_some_and(|bad| offset < bad.end && bad.start < end) {
            return Err(EIO);
        }
        into.copy_from_slice(state.now.get(offset as usize..end as usize).ok_or(EIO)?);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), i32> {
        let mut state = self.state();
        if let Some(error) = state.faults.writes {
            return Err(error);
        }
        if state.faults.lost.is_some_and(|lost| offset >= lost) {
            return Ok(());
        }
        let at = offset as usize;
        state.now.get_mut(at..at + from.len()).ok_or(ENOSPC)?.copy_from_slice(from);
        state.pending.push_back((at, from.to_vec()));
        Ok(())
    }

    fn sync(&self) -> Result<(), i32> {
        let mut state = self.state();
        if let Some(error) = state.faults.flushes {
            return Err(error);
        }
        state.flushes += 1;
        if state.faults.lies {
            return Ok(());
        }
        // Writes that arrive during the flush are not covered.
        let upto = state.flushed + state.pending.len() as u64;
        drop(state);
        std::thread::sleep(FLUSH);
        state = self.state();
        while state.flushed < upto
            && let Some((at, bytes)) = state.pending.pop_front()
        {
            state.durable[at..at + bytes.len()].copy_from_slice(&bytes);
            state.flushed += 1;
        }
        Ok(())
    }
}

/// File with a write cache.
pub(crate) struct Disk {
    cached: Arc<CachedWrite>,
    mount: Mount,
}

impl Disk {
    /// Creates a blank disk in this directory.
    pub(crate) fn new(directory: &Path, bytes: usize) -> Option<Self> {
        let (durable, now) = (vec![0; bytes], vec![0; bytes]);
        let state = State { durable, pending: VecDeque::new(), now, faults: Faults::default(), flushes: 0, flushed: 0 };
        let cached = Arc::new(CachedWrite(Mutex::new(state)));
        let backing: Arc<dyn Backing> = Arc::<CachedWrite>::clone(&cached);
        match Mount::new(&directory.join("mount"), &backing) {
            Ok(mount) => Some(Self { cached, mount }),
            Err(why) => skipped("a file system of our own", &why),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.mount.file()
    }

    pub(crate) fn set(&self, faults: Faults) {
        self.cached.state().faults = faults;
    }

    /// Returns the number of flushes.
    pub(crate) fn flushes(&self) -> u64 {
        self.cached.state().flushes
    }

    /// Fails the power, and loses all unflushed writes; returns their number.
    pub(crate) fn lose_unflushed(&self) -> usize {
        self.settle(|_| KeptBytes::Nothing)
    }

    /// Fails the power: flushed writes stay; each unflushed write stays, is lost, or is torn. Returns the number of
    /// unflushed writes.
    pub(crate) fn cut(&self, rng: &mut Rng) -> usize {
        // Sometimes all writes since the flush are lost, or none.
        let lost_percent = [0, 30, 70, 100, 100][rng.below(5) as usize];
        self.settle(|sectors| match rng.below(100) {
            percent if percent < lost_percent => KeptBytes::Nothing,
            _ if rng.below(4) == 0 => KeptBytes::Sectors((0..sectors).map(|_| rng.below(2) == 0).collect()),
            _ => KeptBytes::All,
        })
    }

    fn settle(&self, mut kept: impl FnMut(usize) -> KeptBytes) -> usize {
        let mut state = self.cached.state();
        let pending: Vec<_> = state.pending.drain(..).collect();
        state.flushed += pending.len() as u64;
        for (at, bytes) in &pending {
            let kept = kept(bytes.len().div_ceil(SECTOR));
            for (sector, part) in bytes.chunks(SECTOR).enumerate() {
                let stays = match &kept {
                    KeptBytes::All => true,
                    KeptBytes::Nothing => false,
                    KeptBytes::Sectors(which) => which[sector],
                };
                if stays {
                    let at = at + sector * SECTOR;
                    state.durable[at..at + part.len()].copy_from_slice(part);
                }
            }
        }
        let State { durable, now, .. } = &mut *state;
        now.copy_from_slice(durable);
        pending.len()
    }
}

/// Part of an unflushed write that is kept.
enum KeptBytes {
    All,
    Nothing,
    Sectors(Vec<bool>),
}

/// Block device over a file, removed on drop.
pub(crate) struct Loop {
    pub(crate) device: String,
    file: PathBuf,
}

impl Loop {
    /// Creates a device over a file of this length, which is created if it is missing.
    pub(crate) fn over(file: PathBuf, bytes: u64, options: &[&str]) -> Option<Self> {
        let made = std::fs::File::options().write(true).create(true).truncate(false).open(&file).unwrap();
        made.set_len(bytes).unwrap();
        let device = run("losetup", &[options, &["--find", "--show", file.to_str().unwrap()]].concat());
        match device {
            Ok(device) => Some(Self { device: device.trim().to_owned(), file }),
            Err(why) => skipped("a block device over a file", &why),
        }
    }

    /// Makes reads beyond this offset fail from now on.
    pub(crate) fn lose_from(&self, bytes: u64) {
        std::fs::File::options().write(true).open(&self.file).unwrap().set_len(bytes).unwrap();
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("losetup", &["--detach", &self.device]);
    }
}

/// Device-mapper device with a table, removed on drop.
pub(crate) struct MappedDevice {
    name: String,
    pub(crate) device: String,
}

impl MappedDevice {
    pub(crate) fn new(table: &str) -> Option<Self> {
        let name = format!("kvplane-test-{}", std::process::id());
        if let Err(why) = run("dmsetup", &["create", &name, "--noudevsync", "--table", table]) {
            return skipped("a mapped device", &why);
        }
        // Without udev there is no name below /dev/mapper, only the kernel's own.
        let device = run("dmsetup", &["info", "--columns", "--noheadings", "-o", "blkdevname", &name]).unwrap();
        Some(Self { name, device: format!("/dev/{}", device.trim()) })
    }

    /// Loads another table.
    pub(crate) fn load(&self, table: &str) {
        for words in [&["suspend", "--noudevsync"][..], &["load", "--table", table], &["resume", "--noudevsync"]] {
            run("dmsetup", &[&words[..1], &[&self.name], &words[1..]].concat()).unwrap();
        }
    }
}

impl Drop for MappedDevice {
    fn drop(&mut self) {
        let _ = run("dmsetup", &["remove", "--force", "--noudevsync", "--retry", &self.name]);
    }
}

/// Small ext4, unmounted on drop.
pub(crate) struct SmallFileSystem {
    pub(crate) directory: PathBuf,
    _device: Loop,
}

impl SmallFileSystem {
    pub(crate) fn new(directory: &Path, bytes: u64) -> Option<Self> {
        let device = Loop::over(directory.join("image"), bytes, &[])?;
        let at = directory.join("small");
        std::fs::create_dir(&at).unwrap();
        let made = run("mkfs.ext4", &["-q", "-F", &device.device]);
        let mounted = made.and_then(|_| run("mount", &[&device.device, at.to_str().unwrap()]));
        match mounted {
            Ok(_) => Some(Self { directory: at, _device: device }),
            Err(why) => skipped("a small file system", &why),
        }
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let _ = run("umount", &["--lazy", self.directory.to_str().unwrap()]);
    }
}

/// Runs a program; returns its output, or the reason of its failure.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let done = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim()))
}

pub(crate) fn skipped<T>(what: &str, why: &str) -> Option<T> {
    println!("skipped: {what}: {why}");
    None
}

/// Blanks a drive of the rig: leftovers of other tests are no tier, or another one.
pub(crate) fn wipe(drive: &str) {
    if run("blkdiscard", &["-z", drive]).is_ok() {
        return;
    }
    let mut drive = std::fs::OpenOptions::new().write(true).open(drive).unwrap();
    let bytes = drive.seek(SeekFrom::End(0)).unwrap();
    for at in (0..bytes).step_by(1 << 20) {
        let now = (bytes - at).min(1 << 20) as usize;
        drive.write_all_at(&vec![0; now], at).unwrap();
    }
    drive.sync_all().unwrap();
}
