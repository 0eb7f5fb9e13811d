//! Hardware topology from libhwloc, exported as the library's own XML, if the library is installed.
//!
//! Nine of its functions are used, loaded at run time, so its structures stay opaque and this code does not depend on
//! their layout. Components that would open GPUs are disabled, because reading the topology must not start a driver. So
//! is the component that binds the calling thread to every CPU in turn, because other threads poll there.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::fmt;

use crate::library::{Library, LibraryError, functions};

/// Library name of version 2 of the interface.
const NAME: &str = "libhwloc.so.15";
/// Disabled components: those that talk to accelerator drivers or to a display, and the one that visits every CPU.
const UNWANTED: [&CStr; 7] = [c"cuda", c"nvml", c"rsmi", c"levelzero", c"opencl", c"gl", c"x86"];
/// `HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED`: includes CPUs that this process may not use.
const INCLUDE_DISALLOWED: c_ulong = 1;
/// `HWLOC_TYPE_FILTER_KEEP_IMPORTANT`: all CPUs and memory, and the important devices.
const KEEP_IMPORTANT: c_int = 3;
/// `HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST`.
const BLACKLIST: c_ulong = 1;

/// Error of the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HwlocError {
    /// The library, or a function in it, is missing.
    Missing(LibraryError),
    /// The library has another interface version.
    Version(u32),
    /// A call failed.
    Call(&'static str),
}

impl fmt::Display for HwlocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(error) => write!(f, "libhwloc is not used: {error}"),
            Self::Version(version) => {
                write!(f, "libhwloc is not used: its interface is {version:#x}, and only version 2 is understood")
            }
            Self::Call(name) => write!(f, "libhwloc is not used: {name} failed"),
        }
    }
}

impl std::error::Error for HwlocError {}

impl From<LibraryError> for HwlocError {
    fn from(error: LibraryError) -> Self {
        Self::Missing(error)
    }
}

type Topology = *mut c_void;

functions! {
    /// Functions of the library, documented since its version 2.1.
    struct Functions {
        version = c"hwloc_get_api_version": unsafe extern "C" fn() -> c_uint,
        init = c"hwloc_topology_init": unsafe extern "C" fn(*mut Topology) -> c_int,
        set_flags = c"hwloc_topology_set_flags": unsafe extern "C" fn(Topology, c_ulong) -> c_int,
        set_filter = c"hwloc_topology_set_all_types_filter": unsafe extern "C" fn(Topology, c_int) -> c_int,
        set_components = c"hwloc_topology_set_components":
            unsafe extern "C" fn(Topology, c_ulong, *const c_char) -> c_int,
        load = c"hwloc_topology_load": unsafe extern "C" fn(Topology) -> c_int,
        export = c"hwloc_topology_export_xmlbuffer":
            unsafe extern "C" fn(Topology, *mut *mut c_char, *mut c_int, c_ulong) -> c_int,
        free_buffer = c"hwloc_free_xmlbuffer": unsafe extern "C" fn(Topology, *mut c_char),
        destroy = c"hwloc_topology_destroy": unsafe extern "C" fn(Topology),
    }
    optional {}
}

impl Functions {
    fn find(library: Library) -> Result<Self, HwlocError> {
        let found = Self::look_up(library).map_err(|(_, error)| error)?;
        // SAFETY: takes no arguments and returns a number.
        let version = unsafe { (found.version)() };
        if version >> 16 == 2 { Ok(found) } else { Err(HwlocError::Version(version)) }
    }
}

/// Topology that is destroyed on drop.
struct LoadedTopology<'a> {
    functions: &'a Functions,
    topology: Topology,
}

impl Drop for LoadedTopology<'_> {
    fn drop(&mut self) {
        // SAFETY: `init` created it, and this is its only owner.
        unsafe { (self.functions.destroy)(self.topology) }
    }
}

/// Detects this machine's topology with libhwloc and returns its XML (format 2). Blocks for some tens of milliseconds.
/// The library honors its environment variables, such as `HWLOC_FSROOT`.
///
/// # Errors
///
/// Names the missing library or function, or the failed call; a machine without the library is common.
pub fn export_xml() -> Result<String, HwlocError> {
    let functions = Functions::find(Library::open(NAME)?)?;
    let mut topology: Topology = std::ptr::null_mut();
    // SAFETY: the library writes one pointer, to a topology of its own.
    check("hwloc_topology_init", unsafe { (functions.init)(&raw mut topology) })?;
    let loaded = LoadedTopology { functions: &functions, topology };
    for component in UNWANTED {
        // SAFETY: the topology is initialized and not loaded; the name ends with a zero byte. The result is ignored,
        // because the library may lack the component.
        let _ = unsafe { (functions.set_components)(topology, BLACKLIST, component.as_ptr()) };
    }
    // SAFETY: the topology is initialized and not loaded, as all three calls require.
    unsafe {
        check("hwloc_topology_set_flags", (functions.set_flags)(topology, INCLUDE_DISALLOWED))?;
        check("hwloc_topology_set_all_types_filter", (functions.set_filter)(topology, KEEP_IMPORTANT))?;
        check("hwloc_topology_load", (functions.load)(topology))?;
    }
    export(&loaded)
}

fn export(loaded: &LoadedTopology<'_>) -> Result<String, HwlocError> {
    let LoadedTopology { functions, topology } = loaded;
    let (mut buffer, mut length): (*mut c_char, c_int) = (std::ptr::null_mut(), 0);
    // SAFETY: the topology is loaded; the library writes a pointer to a buffer of its own, and its length.
    let result = unsafe { (functions.export)(*topology, &raw mut buffer, &raw mut length, 0) };
    check("hwloc_topology_export_xmlbuffer", result)?;
    if buffer.is_null() {
        return Err(HwlocError::Call("hwloc_topology_export_xmlbuffer"));
    }
    // SAFETY: the buffer holds a text that ends with a zero byte, until it is freed below.
    let text = unsafe { CStr::from_ptr(buffer) }.to_string_lossy().into_owned();
    // SAFETY: the buffer is the library's, of this topology, and not used any more.
    unsafe { (functions.free_buffer)(*topology, buffer) };
    Ok(text)
}

fn check(name: &'static str, result: c_int) -> Result<(), HwlocError> {
    if result == 0 { Ok(()) } else { Err(HwlocError::Call(name)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_writes_xml_or_is_missing() {
        match export_xml() {
            Ok(xml) => {
                assert!(xml.contains("<topology version=\"2"), "{}", &xml[..xml.len().min(200)]);
                assert!(xml.contains("type=\"PU\""));
            }
            Err(error) => println!("skipped: {error}"),
        }
    }
}
