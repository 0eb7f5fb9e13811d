//! The machine's own driver in the place of the one for tests: what a test does with a device beside the product. With
//! `KVPLANE_GPU` in the environment, the suites of device memory run on it.

use crate::loader::{FakeDriverError, function, open_library};
use libc::{c_int, c_uint, c_void};
use std::ffi::CStr;
use std::ptr;

/// Longest row of operations that make later ones of a stream late.
const LATE: u64 = 20_000;
/// Estimate of the time of one of them, in nanoseconds.
const OPERATION_NS: u64 = 2_000;
/// Byte that memory has before a kernel writes it.
const BEFORE: u8 = 0xEE;

/// Vendor of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    Cuda,
    Hip,
    Npu,
}

impl Vendor {
    /// Returns the library; `None` for a vendor whose own driver tests do not use yet.
    const fn library(self) -> Option<&'static CStr> {
        match self {
            Self::Cuda => Some(c"libcuda.so.1"),
            Self::Hip => Some(c"libamdhip64.so"),
            Self::Npu => None,
        }
    }

    /// Returns the name of the function that does `what` in this vendor's library.
    const fn name(self, cuda: &'static CStr, hip: &'static CStr) -> &'static CStr {
        match self {
            Self::Cuda => cuda,
            Self::Hip | Self::Npu => hip,
        }
    }
}

/// Driver of this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    handle: *mut c_void,
    vendor: Vendor,
}

/// Returns true if tests are to use the machine's own drivers.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os("KVPLANE_GPU").is_some_and(|value| !value.is_empty())
}

fn check(name: &CStr, code: c_int) {
    assert_eq!(code, 0, "{name:?} of the machine's driver returned an error");
}

impl Machine {
    /// Loads and initializes the driver.
    ///
    /// # Errors
    /// When it is not installed, or does not answer.
    pub(crate) fn open(vendor: Vendor) -> Result<Self, FakeDriverError> {
        let unknown = || FakeDriverError::Loader("tests use no machine's own driver of that vendor".to_owned());
        let machine = Self { handle: open_library(vendor.library().ok_or_else(unknown)?)?, vendor };
        // SAFETY: the signature of both functions.
        let code = unsafe { machine.function::<unsafe extern "C" fn(c_uint) -> c_int>(c"cuInit", c"hipInit")(0) };
        if code == 0 { Ok(machine) } else { Err(FakeDriverError::Loader(format!("the driver returned {code}"))) }
    }

    /// Returns the number of visible devices.
    pub(crate) fn devices(self) -> u16 {
        let mut count: c_int = 0;
        // SAFETY: the signature of both functions, and a place for the number.
        unsafe {
            let ask: unsafe extern "C" fn(*mut c_int) -> c_int =
                self.function(c"cuDeviceGetCount", c"hipGetDeviceCount");
            check(c"count of devices", ask(&raw mut count));
        }
        count as u16
    }

    /// Returns the handle of the library.
    pub(crate) const fn handle(self) -> *mut c_void {
        self.handle
    }

    /// Returns a function of the library by the name that its vendor gives it.
    ///
    /// # Safety
    /// `F` is the type of a function pointer with the signature of both functions.
    unsafe fn function<F: Copy>(self, cuda: &'static CStr, hip: &'static CStr) -> F {
        // SAFETY: by this function's contract.
        unsafe { function(self.handle, self.vendor.name(cuda, hip)) }
    }

    /// Runs `work` with the primary context of a device current on this thread.
    fn within<T>(self, device: c_int, work: impl FnOnce() -> T) -> T {
        if self.vendor == Vendor::Hip {
            // SAFETY: the signature of the function.
            let set: unsafe extern "C" fn(c_int) -> c_int = unsafe { function(self.handle, c"hipSetDevice") };
            // SAFETY: no arguments that could be invalid.
            check(c"hipSetDevice", unsafe { set(device) });
            return work();
        }
        let mut context = ptr::null_mut();
        // SAFETY: the signatures of the functions, and places that live during the calls. The reference is kept: what
        // a test has allocated is the context's.
        unsafe {
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                function(self.handle, c"cuDevicePrimaryCtxRetain");
            check(c"cuDevicePrimaryCtxRetain", retain(&raw mut context, device));
            let push: unsafe extern "C" fn(*mut c_void) -> c_int = function(self.handle, c"cuCtxPushCurrent_v2");
            check(c"cuCtxPushCurrent_v2", push(context));
        }
        let result = work();
        // SAFETY: as above.
        unsafe {
            let pop: unsafe extern "C" fn(*mut *mut c_void) -> c_int = function(self.handle, c"cuCtxPopCurrent_v2");
            check(c"cuCtxPopCurrent_v2", pop(&raw mut context));
        }
        result
    }

    /// Returns the device whose memory is at an address. HIP's copies find it by themselves.
    fn device_of(self, address: u64) -> c_int {
        let mut device: c_int = 0;
        if self.vendor == Vendor::Cuda {
            let ordinal = 9;
            // SAFETY: the signature of the function, and a place of the attribute's type.
            unsafe {
                let ask: unsafe extern "C" fn(*mut c_int, c_int, u64) -> c_int =
                    function(self.handle, c"cuPointerGetAttribute");
                check(c"cuPointerGetAttribute", ask(&raw mut device, ordinal, address));
            }
        }
        device
    }

    /// Allocates device memory; returns its address.
    pub(crate) fn allocate(self, device: usize, bytes: u64, is_managed: bool) -> u64 {
        let mut address = 0;
        let is_attached_globally: c_uint = 1;
        // SAFETY: the signatures of the functions, and a place for the address.
        self.within(device as c_int, || unsafe {
            if is_managed {
                let allocate: unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int =
                    self.function(c"cuMemAllocManaged", c"hipMallocManaged");
                check(c"managed allocation", allocate(&raw mut address, bytes as usize, is_attached_globally));
            } else {
                let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int =
                    self.function(c"cuMemAlloc_v2", c"hipMalloc");
                check(c"allocation", allocate(&raw mut address, bytes as usize));
            }
        });
        address
    }

    /// Frees an allocation.
    pub(crate) fn free(self, address: u64) {
        // SAFETY: the signature of both functions; the test uses the memory no more.
        self.within(self.device_of(address), || unsafe {
            let free: unsafe extern "C" fn(u64) -> c_int = self.function(c"cuMemFree_v2", c"hipFree");
            check(c"free", free(address));
        });
    }

    /// Copies device memory out, or host memory in, and waits for that.
    ///
    /// # Safety
    /// `host` is valid for `bytes` bytes.
    pub(crate) unsafe fn access(self, address: u64, host: *mut u8, bytes: usize, is_write: bool) {
        let (to, from) = if is_write { (address, host as u64) } else { (host as u64, address) };
        // SAFETY: the signatures of the functions; the host's side by this function's contract.
        self.within(self.device_of(address), || unsafe {
            if self.vendor == Vendor::Cuda {
                let copy: unsafe extern "C" fn(u64, u64, usize) -> c_int = function(self.handle, c"cuMemcpy");
                check(c"cuMemcpy", copy(to, from, bytes));
            } else {
                let any_direction = 4;
                let copy: unsafe extern "C" fn(u64, u64, usize, c_int) -> c_int = function(self.handle, c"hipMemcpy");
                check(c"hipMemcpy", copy(to, from, bytes, any_direction));
            }
        });
    }

    /// Creates a stream.
    pub(crate) fn stream(self, device: usize) -> u64 {
        let mut stream = 0;
        // SAFETY: the signatures of the functions, and a place for the handle.
        self.within(device as c_int, || unsafe {
            if self.vendor == Vendor::Cuda {
                let create: unsafe extern "C" fn(*mut u64, c_uint) -> c_int = function(self.handle, c"cuStreamCreate");
                check(c"cuStreamCreate", create(&raw mut stream, 0));
            } else {
                let create: unsafe extern "C" fn(*mut u64) -> c_int = function(self.handle, c"hipStreamCreate");
                check(c"hipStreamCreate", create(&raw mut stream));
            }
        });
        stream
    }

    /// Enqueues, on a stream, work of about `delay_ns` and then a copy of `bytes` to device memory.
    pub(crate) fn fill(self, stream: u64, to: u64, bytes: &[u8], delay_ns: u64) {
        let length = bytes.len();
        // SAFETY: the signatures of the functions; the pinned memory is never freed, so the copy may read it later.
        self.within(self.device_of(to), || unsafe {
            let mut pinned: *mut u8 = ptr::null_mut();
            if self.vendor == Vendor::Cuda {
                let allocate: unsafe extern "C" fn(*mut *mut u8, usize) -> c_int =
                    function(self.handle, c"cuMemAllocHost_v2");
                check(c"cuMemAllocHost_v2", allocate(&raw mut pinned, length));
            } else {
                let allocate: unsafe extern "C" fn(*mut *mut u8, usize, c_uint) -> c_int =
                    function(self.handle, c"hipHostMalloc");
                check(c"hipHostMalloc", allocate(&raw mut pinned, length, 0));
            }
            ptr::copy_nonoverlapping(bytes.as_ptr(), pinned, length);
            for _ in 0..(delay_ns / OPERATION_NS).min(LATE) {
                if self.vendor == Vendor::Cuda {
                    let set: unsafe extern "C" fn(u64, u8, usize, u64) -> c_int =
                        function(self.handle, c"cuMemsetD8Async");
                    check(c"cuMemsetD8Async", set(to, BEFORE, length, stream));
                } else {
                    let set: unsafe extern "C" fn(u64, c_int, usize, u64) -> c_int =
                        function(self.handle, c"hipMemsetAsync");
                    check(c"hipMemsetAsync", set(to, c_int::from(BEFORE), length, stream));
                }
            }
            if self.vendor == Vendor::Cuda {
                let copy: unsafe extern "C" fn(u64, *const u8, usize, u64) -> c_int =
                    function(self.handle, c"cuMemcpyHtoDAsync_v2");
                check(c"cuMemcpyHtoDAsync_v2", copy(to, pinned, length, stream));
            } else {
                let to_device = 1;
                let copy: unsafe extern "C" fn(u64, *const u8, usize, c_int, u64) -> c_int =
                    function(self.handle, c"hipMemcpyAsync");
                check(c"hipMemcpyAsync", copy(to, pinned, length, to_device, stream));
            }
        });
    }
}
