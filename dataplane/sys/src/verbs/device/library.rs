//! Function table of libibverbs, loaded at run time: the same binary starts on machines without it.
//!
//! The library is opened once and stays loaded, because its providers keep threads and handlers. Symbols are looked up
//! in the version whose structs `ffi` describes, so that an incompatible library is rejected, not misread.

use crate::library;
use crate::verbs::device::provider::{Functions, ProvidedDevices, VerbsProvider};
use crate::verbs::error::VerbsError;
use crate::verbs::ffi::*;
use libc::{c_int, c_void};
use std::ffi::CStr;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// Name of the library in every distribution.
const LIBRARY: &str = "libibverbs.so.1";
/// First symbol version with extended contexts, to which most symbols belong.
const V1_1: &CStr = c"IBVERBS_1.1";

/// The loaded library, with the functions that only a library has: the list of devices.
pub(crate) struct Library {
    functions: Functions,
    get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
}

// SAFETY: these are the functions and the devices of libibverbs. Contexts opened from a list hold their devices
// themselves.
unsafe impl VerbsProvider for &'static Library {
    fn name(&self) -> &'static str {
        "libibverbs"
    }

    fn functions(&self) -> &'static Functions {
        &self.functions
    }

    fn devices(&self) -> Result<ProvidedDevices, VerbsError> {
        let list = DeviceList::get(self)?;
        Ok(ProvidedDevices { devices: list.devices().collect(), owner: Arc::new(list) })
    }
}

/// Device list of the library, freed with the last of its devices.
struct DeviceList {
    library: &'static Library,
    list: NonNull<*mut ibv_device>,
    count: usize,
}

// SAFETY: the list is never written after its creation, and the library frees it on any thread.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl DeviceList {
    fn get(library: &'static Library) -> Result<Self, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the library writes one number and returns a list that the caller frees, or null.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        match NonNull::new(list) {
            Some(list) => Ok(Self { library, list, count: usize::try_from(count).unwrap_or(0) }),
            None => Err(VerbsError::NoKernelSupport { source: io::Error::last_os_error() }),
        }
    }

    fn devices(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        // SAFETY: the list has `count` entries, which live as long as the list.
        let list = unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) };
        list.iter().filter_map(|device| NonNull::new(*device))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: freed once, by its owner, when no device of it is left.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

/// Returns the library of this process. Opened by the first call; if it was missing, the next call tries again.
pub(crate) fn library() -> Result<&'static Library, VerbsError> {
    static LOADED: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LOADED.get() {
        return Ok(library);
    }
    let library = load(LIBRARY)?;
    Ok(LOADED.get_or_init(|| library))
}

fn load(name: &str) -> Result<Library, VerbsError> {
    let handle = library::Library::open(name).map_err(|error| VerbsError::NoLibrary { detail: error.to_string() })?;
    let v1_0 = c"IBVERBS_1.0";
    // SAFETY: each symbol is looked up in the version whose signature is in the struct.
    unsafe {
        Ok(Library {
            functions: Functions {
                open_device: need(handle, c"ibv_open_device", V1_1)?,
                close_device: need(handle, c"ibv_close_device", V1_1)?,
                query_device: need(handle, c"ibv_query_device", V1_1)?,
                query_port: need(handle, c"ibv_query_port", V1_1)?,
                query_gid_table: find(handle, c"_ibv_query_gid_table", c"IBVERBS_1.11"),
                alloc_pd: need(handle, c"ibv_alloc_pd", V1_1)?,
                dealloc_pd: need(handle, c"ibv_dealloc_pd", V1_1)?,
                reg_mr: need(handle, c"ibv_reg_mr", V1_1)?,
                reg_mr_iova2: find(handle, c"ibv_reg_mr_iova2", c"IBVERBS_1.8"),
                reg_dmabuf_mr: find(handle, c"ibv_reg_dmabuf_mr", c"IBVERBS_1.12"),
                dereg_mr: need(handle, c"ibv_dereg_mr", V1_1)?,
                create_comp_channel: need(handle, c"ibv_create_comp_channel", v1_0)?,
                destroy_comp_channel: need(handle, c"ibv_destroy_comp_channel", v1_0)?,
                create_cq: need(handle, c"ibv_create_cq", V1_1)?,
                destroy_cq: need(handle, c"ibv_destroy_cq", V1_1)?,
                get_cq_event: need(handle, c"ibv_get_cq_event", V1_1)?,
                ack_cq_events: need(handle, c"ibv_ack_cq_events", V1_1)?,
                create_srq: need(handle, c"ibv_create_srq", V1_1)?,
                destroy_srq: need(handle, c"ibv_destroy_srq", V1_1)?,
                create_qp: need(handle, c"ibv_create_qp", V1_1)?,
                modify_qp: need(handle, c"ibv_modify_qp", V1_1)?,
                destroy_qp: need(handle, c"ibv_destroy_qp", V1_1)?,
                get_async_event: need(handle, c"ibv_get_async_event", V1_1)?,
                ack_async_event: need(handle, c"ibv_ack_async_event", V1_1)?,
            },
            get_device_list: need(handle, c"ibv_get_device_list", V1_1)?,
            free_device_list: need(handle, c"ibv_free_device_list", V1_1)?,
        })
    }
}

/// Returns a symbol as a function pointer.
///
/// # Safety
/// `F` is the type of a function pointer with the symbol's signature in this version.
unsafe fn find<F: Copy>(handle: library::Library, name: &CStr, version: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    let symbol = handle.symbol_version(name, version)?;
    // SAFETY: `F` is a function pointer of the right signature, by this function's contract.
    Some(unsafe { std::mem::transmute_copy(&symbol) })
}

/// Returns a required symbol as a function pointer, see `find`.
///
/// # Safety
/// See `find`.
unsafe fn need<F: Copy>(handle: library::Library, name: &CStr, version: &CStr) -> Result<F, VerbsError> {
    // SAFETY: by this function's contract.
    unsafe { find(handle, name, version) }.ok_or_else(|| VerbsError::MissingSymbol {
        symbol: format!("{}@{}", name.to_string_lossy(), version.to_string_lossy()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        let Err(error) = load("libibverbs-of-another-planet.so.1") else { panic!("there is no such library") };
        let text = error.to_string();
        assert!(text.contains("libibverbs-of-another-planet.so.1") && text.contains("install"), "{text}");
    }

    #[test]
    fn a_library_without_verbs_is_rejected() {
        let Err(error) = load("libc.so.6") else { panic!("libc has no verbs") };
        assert!(error.to_string().contains("ibv_open_device@IBVERBS_1.1"), "{error}");
    }
}
