//! Optional shared libraries, loaded at run time: the binary starts without them.
//!
//! A library stays loaded for the life of the process, so its symbols stay valid.

use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;

/// Handle of a loaded library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    handle: NonNull<c_void>,
}

// SAFETY: the handle is only used for symbol lookups, which the loader allows from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Loader error about a library or a symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryError {
    message: String,
}

impl fmt::Display for LibraryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for LibraryError {}

impl Library {
    /// Loads the library of this name, with the loader's default search.
    pub(crate) fn open(name: &str) -> Result<Self, LibraryError> {
        let c_name =
            CString::new(name).map_err(|_| LibraryError { message: format!("{name:?} is not a library name") })?;
        // SAFETY: the name ends with a zero byte. Constructors of the library run, as in any program that links it.
        let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(|handle| Self { handle }).ok_or_else(last_error)
    }

    /// Loads the library that has one of these names: the one that the process has loaded already, if it has, since two
    /// copies of a driver know nothing of each other; or the first that the loader finds.
    ///
    /// # Errors
    /// Of the first name, if there is none.
    ///
    /// # Panics
    /// If there are no names.
    pub(crate) fn open_any(names: &[&CStr]) -> Result<Self, LibraryError> {
        let (first, _) = names.split_first().expect("a library has a name");
        let open = |name: &CStr| Self::open(&name.to_string_lossy());
        let loaded = names.iter().find(|name| Self::is_loaded(name));
        open(loaded.unwrap_or(first))
            .or_else(|error| names.iter().skip(1).find_map(|name| open(name).ok()).ok_or(error))
    }

    /// Returns the number of libraries that the process has loaded so far, unloaded ones included. Takes under a
    /// microsecond.
    pub(crate) fn loads() -> u64 {
        unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _size: usize, loads: *mut c_void) -> c_int {
            // SAFETY: the loader passes a record, which has this field since glibc 2.4, and the place of the caller.
            unsafe { loads.cast::<u64>().write((*info).dlpi_adds) };
            1
        }
        let mut loads = 0_u64;
        // SAFETY: the callback has the signature that is wanted, and the place lives until it returns.
        unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
        loads
    }

    /// Returns true if the process has loaded a library of this name, by whichever of its parts. For a name that it has
    /// not loaded, the loader looks for the file, which takes tens of microseconds.
    pub(crate) fn is_loaded(name: &CStr) -> bool {
        // SAFETY: the name ends with a zero byte; with this flag no library is loaded, and no constructor runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        // The count that was taken is kept: a driver library is never unloaded.
        !handle.is_null()
    }

    /// Returns the address of a function in this symbol version; `None` if the library lacks it.
    pub(crate) fn symbol_version(self, name: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is of a library that is never unloaded; the strings end with a zero byte.
        NonNull::new(unsafe { libc::dlvsym(self.handle.as_ptr(), name.as_ptr(), version.as_ptr()) })
    }

    /// Returns the address of a function.
    pub(crate) fn symbol(self, name: &CStr) -> Result<NonNull<c_void>, LibraryError> {
        // SAFETY: the handle is of a library that is never unloaded; the name ends with a zero byte.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        NonNull::new(address).ok_or_else(last_error)
    }
}

/// Required function that a library lacks, with the loader's error.
pub(crate) type Missing = (&'static CStr, LibraryError);

/// Defines a table of functions of a library and its lookup, which returns the name of a required function that is
/// missing, with the loader's error. Optional functions are those of newer versions.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $table:ident { $($field:ident = $symbol:literal: $type:ty,)* }
        optional { $($later:ident = $later_symbol:literal: $later_type:ty,)* }
    ) => {
        $(#[$meta])*
        $visibility struct $table {
            $($visibility $field: $type,)*
            $($visibility $later: Option<$later_type>,)*
        }

        impl $table {
            fn look_up(library: $crate::library::Library) -> Result<Self, $crate::library::Missing> {
                Ok(Self {
                    $($field: {
                        let address = library.symbol($symbol).map_err(|error| ($symbol, error))?;
                        // SAFETY: the library documents a function of this name and type; a pointer to code and one to
                        // data have one size here.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $type>(address.as_ptr()) }
                    },)*
                    $($later: library.symbol($later_symbol).ok().map(|address| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $later_type>(address.as_ptr()) }
                    }),)*
                })
            }
        }
    };
}

/// Returns the one value of a type in this process, which the first call makes; if that failed, the next call tries
/// again. One thread makes it, the others wait.
macro_rules! load_once {
    ($type:ty, $make:expr) => {{
        static LOADED: std::sync::OnceLock<$type> = std::sync::OnceLock::new();
        static LOADING: std::sync::Mutex<()> = std::sync::Mutex::new(());
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let _loading = LOADING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(loaded) = LOADED.get() {
            return Ok(loaded);
        }
        let loaded = $make()?;
        Ok(LOADED.get_or_init(|| loaded))
    }};
}

pub(crate) use {functions, load_once};

fn last_error() -> LibraryError {
    // SAFETY: the loader keeps the text of this thread's last error until its next call here.
    let text = unsafe {
        let text = libc::dlerror();
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    LibraryError { message: text.unwrap_or_else(|| "the loader gives no reason".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_a_missing_function_are_named() {
        let error = Library::open("libkvplane-is-not-there.so.9").unwrap_err();
        assert!(error.to_string().contains("libkvplane-is-not-there.so.9"), "{error}");
        assert!(Library::open("a\0b").is_err());
        assert!(!Library::is_loaded(c"libkvplane-is-not-there.so.9") && Library::is_loaded(c"libc.so.6"));
        let library = Library::open("libc.so.6").unwrap();
        assert!(library.symbol(c"getpid").is_ok());
        let error = library.symbol(c"no_such_function_anywhere").unwrap_err();
        assert!(error.to_string().contains("no_such_function_anywhere"), "{error}");
    }
}
