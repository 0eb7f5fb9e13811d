//! Libraries of drivers, opened at run time, and their functions.

use libc::c_void;
use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;

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
            Self::Loader(text) => write!(f, "the driver cannot be loaded: {text}"),
        }
    }
}

impl std::error::Error for FakeDriverError {}

/// Loads a library of a driver, which has no constructors.
pub(crate) fn open_library(path: &CStr) -> Result<*mut c_void, FakeDriverError> {
    // SAFETY: the path ends with a zero byte.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: the loader keeps the text of this thread's last error until its next call here.
        let text = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned();
        return Err(FakeDriverError::Loader(text));
    }
    Ok(handle)
}

/// Returns a function of a library.
///
/// # Safety
/// `F` is the type of a function pointer with the signature of that function, and the library stays loaded.
pub(crate) unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    // SAFETY: the library stays loaded; the name ends with a zero byte.
    let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?} is exported");
    // SAFETY: by this function's contract.
    unsafe { std::mem::transmute_copy(&symbol) }
}
