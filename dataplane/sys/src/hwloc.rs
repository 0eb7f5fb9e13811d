//! The machine as libhwloc sees it, in the library's own XML, where the library is present.
//!
//! Nine functions of it are used, found at run time, so its structures stay its own and nothing here depends on their
//! layout. Components that would open GPUs are switched off: looking at a machine is no reason to start a driver. So is
//! the one that binds the calling thread to every CPU in turn: others poll there.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::fmt;
use std::ptr::NonNull;

use crate::library::{Library, LibraryError};

/// The library, by the name that stands for version 2 of its interface.
const NAME: &str = "libhwloc.so.15";
/// Components that talk to accelerators' drivers or to a display, and the one that visits every CPU.
const UNWANTED: [&CStr; 7] = [c"cuda", c"nvml", c"rsmi", c"levelzero", c"opencl", c"gl", c"x86"];
/// `HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED`: CPUs that this process may not use are part of the machine.
const INCLUDE_DISALLOWED: c_ulong = 1;
/// `HWLOC_TYPE_FILTER_KEEP_IMPORTANT`: all of CPUs and memory, and devices that matter.
const KEEP_IMPORTANT: c_int = 3;
/// `HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST`.
const BLACKLIST: c_ulong = 1;

/// Why libhwloc says nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HwlocError {
    /// The library, or a function in it, is not there.
    Missing(LibraryError),
    /// The library is of another version.
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

/// Makes the table of functions, and what finds them by their names.
macro_rules! functions {
    ($($field:ident = $name:literal: $type:ty,)*) => {
        struct Functions {
            $($field: $type,)*
        }

        impl Functions {
            fn look_up(library: Library) -> Result<Self, LibraryError> {
                $(
                    let address: NonNull<c_void> = library.symbol($name)?;
                    // SAFETY: the library documents a function of this name and type since its version 2.1; a pointer
                    // to code and one to data have one size here.
                    let $field = unsafe { std::mem::transmute::<*mut c_void, $type>(address.as_ptr()) };
                )*
                Ok(Self { $($field,)* })
            }
        }
    };
}

functions! {
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

impl Functions {
    fn find(library: Library) -> Result<Self, HwlocError> {
        let found = Self::look_up(library)?;
        // SAFETY: takes nothing, tells a number.
        let version = unsafe { (found.version)() };
        if version >> 16 == 2 { Ok(found) } else { Err(HwlocError::Version(version)) }
    }
}

/// A topology that is destroyed when dropped.
struct LoadedTopology<'a> {
    functions: &'a Functions,
    topology: Topology,
}

impl Drop for LoadedTopology<'_> {
    fn drop(&mut self) {
        // SAFETY: `init` made it, and nobody else has it.
        unsafe { (self.functions.destroy)(self.topology) }
    }
}

/// Lets libhwloc look at this machine, and gives its XML (format 2). Blocks while it reads, some tens of milliseconds.
/// The library heeds its own variables, such as `HWLOC_FSROOT`.
///
/// # Errors
///
/// Says what is missing; a machine without the library is usual.
pub fn export_xml() -> Result<String, HwlocError> {
    let functions = Functions::find(Library::open(NAME)?)?;
    let mut topology: Topology = std::ptr::null_mut();
    // SAFETY: the library writes one pointer, to a topology of its own.
    check("hwloc_topology_init", unsafe { (functions.init)(&raw mut topology) })?;
    let loaded = LoadedTopology { functions: &functions, topology };
    for component in UNWANTED {
        // SAFETY: the topology is initialised and not loaded; the name ends with a zero byte. A component that the
        // library does not have is no concern of ours, so the result is not looked at.
        let _ = unsafe { (functions.set_components)(topology, BLACKLIST, component.as_ptr()) };
    }
    // SAFETY: the topology is initialised and not loaded, as all three ask.
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
