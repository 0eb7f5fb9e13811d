//! File system with one file, served by this process over `/dev/fuse`: requests of the kernel go to a [`Backing`]. So
//! faults of disks can be injected on any kernel, below a real process that is not aware of it.
//!
//! Mounting needs root and `mount`, which gets the connection as its standard input.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Name of the file.
pub(crate) const NAME: &str = "disk";

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Length of the longest read or write.
const MOST: u32 = 1 << 20;
const HEADER: usize = 40;
/// Number of serving threads: writes continue during a flush.
const THREADS: usize = 3;

/// Time limit for the kernel to end the connection after unmounting.
const UNMOUNTED: Duration = Duration::from_secs(5);

const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;

/// Content of the file. Errors are the kernel's numbers.
pub(crate) trait Backing: Send + Sync + 'static {
    fn bytes(&self) -> u64;
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), i32>;
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), i32>;
    fn sync(&self) -> Result<(), i32>;
}

/// Mounted file system, unmounted on drop.
pub(crate) struct Mount {
    at: PathBuf,
    threads: Vec<JoinHandle<()>>,
}

impl Mount {
    /// Mounts the file system on this directory, which is created.
    ///
    /// # Errors
    /// Fails if this machine does not allow it, with the reason.
    pub(crate) fn new(at: &Path, backing: &Arc<dyn Backing>) -> Result<Self, String> {
        let connection = File::options().read(true).write(true).open("/dev/fuse").map_err(|error| error.to_string())?;
        std::fs::create_dir(at).map_err(|error| error.to_string())?;
        let given = connection.try_clone().map_err(|error| error.to_string())?;
        let mount = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=40000,user_id=0,group_id=0,allow_other", "kvplane"])
            .arg(at)
            .stdin(Stdio::from(given))
            .output();
        let mount = mount.map_err(|error| error.to_string())?;
        if !mount.status.success() {
            return Err(String::from_utf8_lossy(&mount.stderr).trim().to_owned());
        }
        let mut threads = Vec::new();
        for _ in 0..THREADS {
            let connection = connection.try_clone().map_err(|error| error.to_string())?;
            let backing = Arc::clone(backing);
            threads.push(std::thread::spawn(move || serve(connection, &*backing)));
        }
        Ok(Self { at: at.to_owned(), threads })
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.at.join(NAME)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
        // A mount namespace that another process created meanwhile has the mount too, for as long as it lives. The
        // threads then end with this process, without further requests.
        let until = Instant::now() + UNMOUNTED;
        while Instant::now() < until && self.threads.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Request without its header.
struct Request<'a> {
    operation: u32,
    node: u64,
    body: &'a [u8],
}

impl Request<'_> {
    fn word(&self, at: usize) -> u32 {
        self.body.get(at..at + 4).map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
    }

    fn long(&self, at: usize) -> u64 {
        u64::from(self.word(at)) | u64::from(self.word(at + 4)) << 32
    }
}

/// Serves requests until the file system is unmounted.
fn serve(mut connection: File, backing: &dyn Backing) {
    let mut buffer = vec![0; MOST as usize + (64 << 10)];
    loop {
        let length = match connection.read(&mut buffer) {
            Ok(length) if length >= HEADER => length,
            // The request was cancelled before it was read.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::NotFound) => continue,
            _ => return,
        };
        let word = |at: usize| u32::from_le_bytes(buffer[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(buffer[at..at + 8].try_into().unwrap());
        let request = Request { operation: word(4), node: long(16), body: &buffer[HEADER..length] };
        let Some(answer) = answer(&request, backing) else { continue };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let mut reply = Vec::with_capacity(16 + body.len());
        reply.extend(((16 + body.len()) as u32).to_le_bytes());
        reply.extend(error.to_le_bytes());
        reply.extend(long(8).to_le_bytes());
        reply.extend(body);
        // The requester may have ended.
        let _ = connection.write(&reply);
    }
}

/// Answers a request; `None` if it has no reply.
fn answer(request: &Request<'_>, backing: &dyn Backing) -> Option<Result<Vec<u8>, i32>> {
    let answer = match request.operation {
        // Forget, interrupt, destroy, forget several.
        2 | 36 | 38 | 42 => return None,
        1 => lookup(request, backing),
        // Attributes, and setting them, which changes nothing.
        3 | 4 => Ok([&1u64.to_le_bytes()[..], &[0; 8], &attributes(request.node, backing)].concat()),
        // Open, of a file past the page cache, and of the directory.
        14 => Ok(longs(&[0, 1])),
        27 => Ok(longs(&[0, 0])),
        15 => {
            let mut bytes = vec![0; request.word(16).min(MOST) as usize];
            let left = backing.bytes().saturating_sub(request.long(8));
            bytes.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            backing.read(request.long(8), &mut bytes).map(|()| bytes)
        }
        16 => {
            let bytes = request.word(16);
            let from = request.body.get(40..40 + bytes as usize).unwrap_or(&[]);
            backing.write(request.long(8), from).map(|()| longs(&[bytes.into()]))
        }
        17 => Ok([longs(&[1 << 20, 1 << 20, 1 << 20, 100, 100]), words(&[4096, 255, 4096, 0]), vec![0; 24]].concat()),
        20 => backing.sync().map(|()| Vec::new()),
        // An empty directory; release, flush, and release of the directory.
        18 | 25 | 28 | 29 => Ok(Vec::new()),
        26 => Ok(welcome(request)),
        // Features that the kernel can do without: allocating space, extended attributes, access checks.
        _ => Err(ENOSYS),
    };
    Some(answer)
}

fn words(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(all: &[u64]) -> Vec<u8> {
    all.iter().flat_map(|long| long.to_le_bytes()).collect()
}

/// Negotiates version 7.31: asynchronous direct I/O, long writes, many pages.
fn welcome(request: &Request<'_>) -> Vec<u8> {
    let wanted = 1 | 1 << 5 | 1 << 15 | 1 << 22;
    let flags = request.word(12) & wanted;
    [words(&[7, 31, 1 << 20, flags, 12 << 16 | 16, MOST, 1, MOST / 4096]), vec![0; 32]].concat()
}

fn lookup(request: &Request<'_>, backing: &dyn Backing) -> Result<Vec<u8>, i32> {
    if request.node != ROOT || request.body.strip_suffix(&[0]) != Some(NAME.as_bytes()) {
        return Err(ENOENT);
    }
    Ok([longs(&[FILE, 0, 1, 1, 0]), attributes(FILE, backing)].concat())
}

fn attributes(node: u64, backing: &dyn Backing) -> Vec<u8> {
    let bytes = if node == FILE { backing.bytes() } else { 0 };
    let mode = if node == FILE { 0o100_600 } else { 0o40_755 };
    [longs(&[node, bytes, bytes / 512, 0, 0, 0]), words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0])].concat()
}
