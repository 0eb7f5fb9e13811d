//! Loading the driver into a test, and the test's hold on it. With `KVPLANE_GPU` in the environment, the driver is the
//! machine's own, and tests that need abilities of the one for tests are skipped.

use crate::loader::{FakeDriverError, function, open_library};
use crate::machine::{self, Machine, Vendor};
use libc::{c_char, c_int, c_void};
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names of the built libraries in cargo's folders.
const CUDA: &str = "libkvplane_fake_cuda.so";
const HIP: &str = "libkvplane_fake_hip.so";
const NPU: &str = "libkvplane_fake_npu.so";

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
    /// Physical allocations and reservations of the virtual-memory interface.
    pub mapped: u64,
}

/// Type of handles that a physical allocation is created for, as the driver numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleType {
    /// Descriptor.
    Descriptor = 1,
    /// Fabric handle.
    Fabric = 8,
}

/// Functions of the loaded library that control it.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    handle: *mut c_void,
    /// The machine's own driver, if that is the loaded one.
    machine: Option<Machine>,
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
    open(&LOADED, CUDA, Vendor::Cuda)
}

/// Loads HIP's runtime into this process, like [`load_cuda`].
///
/// # Errors
/// When the library was not built, or the loader rejects it.
pub fn load_hip() -> Result<Control, FakeDriverError> {
    static LOADED: OnceLock<Control> = OnceLock::new();
    open(&LOADED, HIP, Vendor::Hip)
}

/// Loads AscendCL into this process, like [`load_cuda`].
///
/// # Errors
/// When the library was not built, or the loader rejects it.
pub fn load_npu() -> Result<Control, FakeDriverError> {
    static LOADED: OnceLock<Control> = OnceLock::new();
    open(&LOADED, NPU, Vendor::Npu)
}

fn open(loaded: &OnceLock<Control>, name: &'static str, vendor: Vendor) -> Result<Control, FakeDriverError> {
    if let Some(control) = loaded.get() {
        return Ok(*control);
    }
    if machine::is_wanted() {
        let machine = Machine::open(vendor)?;
        return Ok(*loaded.get_or_init(|| Control { handle: machine.handle(), machine: Some(machine) }));
    }
    let path = file(name)?;
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|error| FakeDriverError::Loader(error.to_string()))?;
    let handle = open_library(&path)?;
    Ok(*loaded.get_or_init(|| Control { handle, machine: None }))
}

/// Returns true, and prints a line for the list of skipped tests, if tests are to use the machine's own drivers and it
/// lacks this one.
#[must_use]
pub fn is_missing(load: fn() -> Result<Control, FakeDriverError>) -> bool {
    let error = if machine::is_wanted() { load().err() } else { None };
    if let Some(error) = &error {
        println!("skipped: {error}");
    }
    error.is_some()
}

/// Returns a directory that has the drivers under their names, for another process's `LD_LIBRARY_PATH`.
///
/// # Errors
/// When the library was not built, or the directory cannot be written.
pub fn directory() -> Result<PathBuf, FakeDriverError> {
    let failed = |error: std::io::Error| FakeDriverError::Loader(error.to_string());
    let mut folder = PathBuf::new();
    for (name, link) in [(CUDA, "libcuda.so.1"), (HIP, "libamdhip64.so"), (NPU, "libascendcl.so")] {
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

/// Finds the library that was built last beside the running program: one that an earlier build left is older.
fn file(name: &'static str) -> Result<PathBuf, FakeDriverError> {
    let program = std::env::current_exe().map_err(|error| FakeDriverError::Loader(error.to_string()))?;
    let folders = program.ancestors().skip(1).take(2);
    let files = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    let folder = || program.parent().unwrap_or(Path::new("/")).to_owned();
    let built = files.filter_map(|file| Some((file.metadata().ok()?.modified().ok()?, file)));
    let last = built.max_by_key(|(time, _)| *time);
    last.map(|(_, file)| file).ok_or_else(|| FakeDriverError::NotBuilt { file: name, folder: folder() })
}

impl Control {
    /// Returns a function of the library.
    ///
    /// # Safety
    /// Condition of [`function`].
    unsafe fn function<F: Copy>(self, name: &CStr) -> F {
        // SAFETY: by this function's contract.
        unsafe { function(self.handle, name) }
    }

    /// Returns true if the driver is the machine's own.
    #[must_use]
    pub const fn is_the_machines(self) -> bool {
        self.machine.is_some()
    }

    /// Returns the ordinal of the device that a test takes as its device `number`: the same, but for a machine that has
    /// fewer.
    #[must_use]
    pub fn ordinal(self, number: u16) -> u16 {
        self.machine.map_or(number, |machine| number % machine.devices().max(1))
    }

    /// Returns true on the machine's own driver, which lacks what a test needs, and prints a line for the list of
    /// skipped tests.
    #[must_use]
    pub fn skips(self, need: &str) -> bool {
        if self.is_the_machines() {
            println!("skipped: it needs {need}: only over the driver for tests");
        }
        self.is_the_machines()
    }

    /// Sets the longest random delay of copies in nanoseconds, their rate in bytes a second (0: no limit), and the seed
    /// of the delays. No effect on the machine's own driver.
    pub fn set_copies(self, delay_ns: u64, rate: u64, seed: u64) {
        if self.is_the_machines() {
            return;
        }
        // SAFETY: the signature of the export.
        let set: extern "C" fn(u64, u64, u64) = unsafe { self.function(c"kvplane_fake_set") };
        set(delay_ns, rate, seed);
    }

    /// Models copy engines of this rate in bytes a second: copies take their time and move no bytes. 0 ends it. No copy
    /// may be in flight.
    pub fn model_engines(self, rate: u64) {
        // SAFETY: the signature of the export.
        let set: extern "C" fn(u64) = unsafe { self.function(c"kvplane_fake_engines") };
        set(rate);
    }

    /// Makes one call of a driver function return `code`: the one after `passes` more.
    ///
    /// # Panics
    /// On the machine's own driver.
    pub fn fail(self, function: &str, passes: u64, code: i32) {
        assert!(!self.is_the_machines(), "errors are injected by the driver for tests only");
        let name = CString::new(function).expect("a name without a zero byte");
        // SAFETY: the signature of the export.
        let fail: unsafe extern "C" fn(*const c_char, u64, c_int) = unsafe { self.function(c"kvplane_fake_fail") };
        // SAFETY: a string.
        unsafe { fail(name.as_ptr(), passes, code) };
    }

    /// Makes every call of a device return `code`; 0 brings it back.
    ///
    /// # Panics
    /// On the machine's own driver.
    pub fn lose(self, device: usize, code: i32) {
        assert!(!self.is_the_machines(), "devices are lost by the driver for tests only");
        // SAFETY: the signature of the export.
        let lose: extern "C" fn(usize, c_int) = unsafe { self.function(c"kvplane_fake_lose") };
        lose(device, code);
    }

    /// Allocates device memory as another library of the program would.
    #[must_use]
    pub fn allocate(self, device: usize, bytes: u64) -> u64 {
        if let Some(machine) = self.machine {
            return machine.allocate(device, bytes, false);
        }
        // SAFETY: the signature of the export.
        let allocate: extern "C" fn(usize, u64) -> u64 = unsafe { self.function(c"kvplane_fake_allocate") };
        allocate(device, bytes)
    }

    /// Allocates managed memory as another library of the program would.
    #[must_use]
    pub fn allocate_managed(self, device: usize, bytes: u64) -> u64 {
        if let Some(machine) = self.machine {
            return machine.allocate(device, bytes, true);
        }
        // SAFETY: the signature of the export.
        let allocate: extern "C" fn(usize, u64) -> u64 = unsafe { self.function(c"kvplane_fake_managed") };
        allocate(device, bytes)
    }

    /// Maps so many physical allocations one behind the other by the virtual-memory interface, as another library of
    /// the program would; [`Self::free`] ends that. They are created for one type of handles, or none.
    #[must_use]
    pub fn map(self, device: usize, count: u64, each_bytes: u64, handles: Option<HandleType>) -> u64 {
        // SAFETY: the signature of the export.
        let map: extern "C" fn(usize, u64, u64, c_int) -> u64 = unsafe { self.function(c"kvplane_fake_map") };
        map(device, count, each_bytes, handles.map_or(0, |kind| kind as c_int))
    }

    /// Makes later allocations mappings of the virtual-memory interface that were created for this type of handles, as
    /// some allocators of programs do.
    pub fn set_virtual(self, handles: HandleType) {
        // SAFETY: the signature of the export.
        let set: extern "C" fn(c_int, c_int) = unsafe { self.function(c"kvplane_fake_set_virtual") };
        set(1, handles as c_int);
    }

    /// Frees an allocation.
    ///
    /// # Panics
    /// When there is none at the address.
    pub fn free(self, address: u64) {
        if let Some(machine) = self.machine {
            return machine.free(address);
        }
        // SAFETY: the signature of the export.
        let free: extern "C" fn(u64) -> c_int = unsafe { self.function(c"kvplane_fake_free") };
        assert_eq!(free(address), 1, "an allocation begins at {address:#x}");
    }

    /// Creates a stream as another library of the program would.
    #[must_use]
    pub fn stream(self, device: usize) -> u64 {
        if let Some(machine) = self.machine {
            return machine.stream(device);
        }
        // SAFETY: the signature of the export.
        let stream: extern "C" fn(usize) -> u64 = unsafe { self.function(c"kvplane_fake_stream") };
        stream(device)
    }

    /// Launches a kernel on a stream that fills device memory with [`Self::pattern`] after a delay.
    pub fn fill(self, stream: u64, to: u64, bytes: u64, seed: u64, delay_ns: u64) {
        if let Some(machine) = self.machine {
            return machine.fill(stream, to, &Self::pattern(seed, bytes), delay_ns);
        }
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

    /// Captures a stream into a graph while `body` runs. Returns the number of calls that have ended the capture.
    ///
    /// # Panics
    /// On the machine's own driver.
    pub fn capture(self, stream: u64, body: impl FnOnce()) -> u64 {
        assert!(!self.is_the_machines(), "captures are observed by the driver for tests only");
        // SAFETY: the signature of the export.
        let capture: extern "C" fn(u64) -> u64 = unsafe { self.function(c"kvplane_fake_capture") };
        let before = capture(stream);
        body();
        capture(0) - before
    }

    /// Returns the mode of this thread for captures of streams: 0, unless a library has changed it.
    #[must_use]
    pub fn capture_mode(self) -> i32 {
        // SAFETY: the signature of the export.
        let mode: extern "C" fn() -> c_int = unsafe { self.function(c"kvplane_fake_capture_mode") };
        mode()
    }

    /// Takes from all devices the means to flush a NIC's writes. To be called before the product opens the driver.
    ///
    /// # Panics
    /// On the machine's own driver.
    pub fn forbid_flushes(self) {
        assert!(!self.is_the_machines(), "only devices of the driver for tests have no flush");
        // SAFETY: the signature of the export.
        let set: extern "C" fn(c_int) = unsafe { self.function(c"kvplane_fake_flush_options") };
        set(0);
    }

    /// Damages all memory of a device, as a faulty one would.
    ///
    /// # Panics
    /// On the machine's own driver.
    pub fn damage(self, device: usize) {
        assert!(!self.is_the_machines(), "memory is damaged by the driver for tests only");
        // SAFETY: the signature of the export.
        let damage: extern "C" fn(usize) = unsafe { self.function(c"kvplane_fake_damage") };
        damage(device);
    }

    fn access(self, address: u64, host: &mut [u8], is_write: bool) -> c_int {
        if let Some(machine) = self.machine {
            // SAFETY: a slice of this length.
            unsafe { machine.access(address, host.as_mut_ptr(), host.len(), is_write) };
            return 1;
        }
        // SAFETY: the signature of the export.
        let access: unsafe extern "C" fn(u64, *mut u8, u64, c_int) -> c_int =
            unsafe { self.function(c"kvplane_fake_access") };
        // SAFETY: a slice of this length.
        unsafe { access(address, host.as_mut_ptr(), host.len() as u64, c_int::from(is_write)) }
    }

    /// Returns the number of calls of a driver function so far; 0 for the machine's own driver, which counts none.
    #[must_use]
    pub fn calls(self, function: &str) -> u64 {
        let name = CString::new(function).expect("a name without a zero byte");
        if self.is_the_machines() {
            return 0;
        }
        // SAFETY: the signature of the export.
        let calls: unsafe extern "C" fn(*const c_char) -> u64 = unsafe { self.function(c"kvplane_fake_calls") };
        // SAFETY: a string.
        unsafe { calls(name.as_ptr()) }
    }

    /// Returns the counters; zeros for the machine's own driver, which has none.
    #[must_use]
    pub fn counters(self) -> Counters {
        if self.is_the_machines() {
            return Counters::default();
        }
        let mut values = [0_u64; 10];
        // SAFETY: the signature of the export.
        let read: unsafe extern "C" fn(*mut u64) = unsafe { self.function(c"kvplane_fake_counters") };
        // SAFETY: ten values.
        unsafe { read(values.as_mut_ptr()) };
        let [contexts, allocations, pinned, streams, events, without_context, unpinned, copied_bytes, calls, mapped] =
            values;
        Counters {
            contexts,
            allocations,
            pinned,
            streams,
            events,
            without_context,
            unpinned,
            copied_bytes,
            calls,
            mapped,
        }
    }
}
