//! Loading the driver into a test, and the test's hold on it.

use libc::{c_char, c_int, c_void};
use std::ffi::{CStr, CString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names of the built libraries in cargo's folders.
const CUDA: &str = "libkvplane_fake_cuda.so";
const HIP: &str = "libkvplane_fake_hip.so";

/// Reason why the driver cannot be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FakeDriverError {
    /// No built library beside the test's program.
    NotBuilt {
        /// Name of the library.
        file: &'static str,
        /// Folder of the test's program.
        folder: PathBuf,
    },
    /// The loader rejected it.
    Loader(String),
}

impl fmt::Display for FakeDriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt { file, folder } => {
                write!(f, "{file} is not in {}; build the packages kvplane-fake-*", folder.display())
            }
            Self::Loader(text) => write!(f, "the fake driver cannot be loaded: {text}"),
        }
    }
}

impl std::error::Error for FakeDriverError {}

/// Counters of the driver in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Retained references of primary contexts.
    pub contexts: u64,
    /// Allocations of device memory.
    pub allocations: u64,
    /// Pinned ranges of host memory.
    pub pinned: u64,
    /// Streams, those without a creator not counted.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Calls that needed a current context and had none.
    pub without_context: u64,
    /// Copies from or to host memory that was not pinned.
    pub unpinned: u64,
    /// Bytes of all copies.
    pub copied_bytes: u64,
    /// Calls of all functions.
    pub calls: u64,
}

/// Functions of the loaded library that control it.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    handle: *mut c_void,
}

// SAFETY: the handle is only used for symbol lookups, which the loader allows from any thread.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

/// Loads CUDA's driver into this process, once, and returns its control. To be called before the product looks for it.
///
/// # Errors
/// When the library was not built, or the loader rejects it.
pub fn load_cuda() -> Result<Control, FakeDriverError> {
    static LOADED: OnceLock<Control> = OnceLock::new();
    open(&LOADED, CUDA)
}

/// Loads HIP's runtime into this process, like [`load_cuda`].
///
/// # Errors
/// When the library was not built, or the loader rejects it.
pub fn load_hip() -> Result<Control, FakeDriverError> {
    static LOADED: OnceLock<Control> = OnceLock::new();
    open(&LOADED, HIP)
}

fn open(loaded: &OnceLock<Control>, name: &'static str) -> Result<Control, FakeDriverError> {
    if let Some(control) = loaded.get() {
        return Ok(*control);
    }
    let path = file(name)?;
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| FakeDriverError::Loader(error.to_string()))?;
    // SAFETY: the path ends with a zero byte; the library has no constructors.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: the loader keeps the text of this thread's last error until its next call here.
        let text = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned();
        return Err(FakeDriverError::Loader(text));
    }
    Ok(*loaded.get_or_init(|| Control { handle }))
}

/// Returns a directory that has the drivers under their names, for another process's `LD_LIBRARY_PATH`.
///
/// # Errors
/// When the library was not built, or the directory cannot be written.
pub fn directory() -> Result<PathBuf, FakeDriverError> {
    let failed = |error: std::io::Error| FakeDriverError::Loader(error.to_string());
    let mut folder = PathBuf::new();
    for (name, link) in [(CUDA, "libcuda.so.1"), (HIP, "libamdhip64.so")] {
        let file = file(name)?;
        folder = file.parent().unwrap_or(Path::new("/")).join("fake-devices");
        std::fs::create_dir_all(&folder).map_err(failed)?;
        if let Err(error) = std::os::unix::fs::symlink(&file, folder.join(link))
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            return Err(failed(error));
        }
    }
    Ok(folder)
}

/// Finds a built library beside the running program.
fn file(name: &'static str) -> Result<PathBuf, FakeDriverError> {
    let program = std::env::current_exe().map_err(|error| FakeDriverError::Loader(error.to_string()))?;
    let folders = program.ancestors().skip(1).take(2);
    let mut files = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    let folder = || program.parent().unwrap_or(Path::new("/")).to_owned();
    files.find(|file| file.exists()).ok_or_else(|| FakeDriverError::NotBuilt { file: name, folder: folder() })
}

impl Control {
    /// Returns a function of the library.
    ///
    /// # Safety
    /// `F` is the type of a function pointer with the signature of that function.
    unsafe fn function<F: Copy>(self, name: &CStr) -> F {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
        // SAFETY: the library stays loaded; the name ends with a zero byte.
        let symbol = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is exported");
        // SAFETY: by this function's contract.
        unsafe { std::mem::transmute_copy(&symbol) }
    }

    /// Sets the longest random delay of copies in nanoseconds, their rate in bytes a second (0: no limit), and the seed
    /// of the delays.
    pub fn set_copies(self, delay_ns: u64, rate: u64, seed: u64) {
        // SAFETY: the signature of the export.
        let set: extern "C" fn(u64, u64, u64) = unsafe { self.function(c"kvplane_fake_set") };
        set(delay_ns, rate, seed);
    }

    /// Makes one call of a driver function return `code`: the one after `passes` more.
    pub fn fail(self, function: &str, passes: u64, code: i32) {
        let name = CString::new(function).expect("a name without a zero byte");
        // SAFETY: the signature of the export.
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = unsafe { self.function(c"kvplane_fake_fail") };
        // SAFETY: a string.
        unsafe { fail(name.as_ptr(), passes, code) };
    }

    /// Makes every call of a device return `code`; 0 brings it back.
    pub fn lose(self, device: usize, code: i32) {
        // SAFETY: the signature of the export.
        let lose: extern "C" fn(usize, c_int) = unsafe { self.function(c"kvplane_fake_lose") };
        lose(device, code);
    }

    /// Allocates device memory as another library of the program would.
    #[must_use]
    pub fn allocate(self, device: usize, bytes: u64) -> u64 {
        // SAFETY: the signature of the export.
        let allocate: extern "C" fn(usize, u64) -> u64 = unsafe { self.function(c"kvplane_fake_allocate") };
        allocate(device, bytes)
    }

    /// Allocates managed memory as another library of the program would.
    #[must_use]
    pub fn allocate_managed(self, device: usize, bytes: u64) -> u64 {
        // SAFETY: the signature of the export.
        let allocate: extern "C" fn(usize, u64) -> u64 = unsafe { self.function(c"kvplane_fake_managed") };
        allocate(device, bytes)
    }

    /// Frees an allocation.
    ///
    /// # Panics
    /// When there is none at the address.
    pub fn free(self, address: u64) {
        // SAFETY: the signature of the export.
        let free: extern "C" fn(u64) -> c_int = unsafe { self.function(c"kvplane_fake_free") };
        assert_eq!(free(address), 1, "an allocation begins at {address:#x}");
    }

    /// Creates a stream as another library of the program would.
    #[must_use]
    pub fn stream(self, device: usize) -> u64 {
        // SAFETY: the signature of the export.
        let stream: extern "C" fn(usize) -> u64 = unsafe { self.function(c"kvplane_fake_stream") };
        stream(device)
    }

    /// Launches a kernel on a stream that fills device memory with [`Self::pattern`] after a delay.
    pub fn fill(self, stream: u64, to: u64, bytes: u64, seed: u64, delay_ns: u64) {
        // SAFETY: the signature of the export.
        let fill: extern "C" fn(usize, u64, u64, u64, u64, u64) -> c_int =
            unsafe { self.function(c"kvplane_fake_fill") };
        assert_eq!(fill(0, stream, to, bytes, seed, delay_ns), 0, "stream {stream:#x} exists");
    }

    /// Returns the bytes that a kernel of this seed writes.
    #[must_use]
    pub fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
        (0..bytes).map(|offset| crate::streams::pattern(seed, offset)).collect()
    }

    /// Reads device memory at once, behind the back of the product.
    ///
    /// # Panics
    /// When no allocation covers the range.
    #[must_use]
    pub fn read(self, address: u64, bytes: u64) -> Vec<u8> {
        let mut read = vec![0; bytes as usize];
        assert_eq!(self.access(address, &mut read, false), 1, "{bytes} bytes at {address:#x} are allocated");
        read
    }

    /// Writes device memory at once, behind the back of the product.
    ///
    /// # Panics
    /// When no allocation covers the range.
    pub fn write(self, address: u64, bytes: &[u8]) {
        let mut written = bytes.to_vec();
        assert_eq!(self.access(address, &mut written, true), 1, "{} bytes at {address:#x} are allocated", bytes.len());
    }

    fn access(self, address: u64, host: &mut [u8], is_write: bool) -> c_int {
        // SAFETY: the signature of the export.
        let access: unsafe extern "C" fn(u64, *mut u8, u64, c_int) -> c_int =
            unsafe { self.function(c"kvplane_fake_access") };
        // SAFETY: a slice of this length.
        unsafe { access(address, host.as_mut_ptr(), host.len() as u64, c_int::from(is_write)) }
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(self) -> Counters {
        let mut values = [0_u64; 9];
        // SAFETY: the signature of the export.
        let read: unsafe extern "C" fn(*mut u64) = unsafe { self.function(c"kvplane_fake_counters") };
        // SAFETY: nine values.
        unsafe { read(values.as_mut_ptr()) };
        let [contexts, allocations, pinned, streams, events, without_context, unpinned, copied_bytes, calls] = values;
        Counters { contexts, allocations, pinned, streams, events, without_context, unpinned, copied_bytes, calls }
    }
}
