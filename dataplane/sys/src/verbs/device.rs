//! Verbs providers and their devices.

pub(super) mod context;
pub(super) mod events;
pub(super) mod gid;
pub(super) mod library;
pub(super) mod port;

use super::error::VerbsError;
use super::ffi::*;
#[cfg(feature = "soft-verbs")]
use super::soft::{self, Loopback};
use context::Context;
use libc::{c_char, c_int};
use library::{Functions, Library, library};
use std::ffi::CStr;
use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Implementation of verbs.
#[derive(Clone)]
pub(crate) enum Provider {
    /// libibverbs, with the NICs of this machine.
    Library(&'static Library),
    /// Software devices inside this process.
    #[cfg(feature = "soft-verbs")]
    Soft(Loopback),
}

impl Provider {
    pub(crate) fn functions(&self) -> &'static Functions {
        match self {
            Self::Library(library) => &library.functions,
            #[cfg(feature = "soft-verbs")]
            Self::Soft(_) => &soft::FUNCTIONS,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Library(_) => "libibverbs",
            #[cfg(feature = "soft-verbs")]
            Self::Soft(fabric) if fabric.is_null() => "null",
            #[cfg(feature = "soft-verbs")]
            Self::Soft(_) => "loopback",
        }
    }

    /// Returns true if the devices have files in `/dev`, whose permissions decide who may open them.
    fn has_device_files(&self) -> bool {
        match self {
            Self::Library(_) => true,
            #[cfg(feature = "soft-verbs")]
            Self::Soft(_) => false,
        }
    }
}

/// Source of RDMA devices: the library of this machine, or software in tests. Clones refer to the same source.
#[derive(Clone)]
pub struct Verbs {
    provider: Provider,
}

impl Verbs {
    /// Opens the RDMA devices of this machine; loads libibverbs.
    ///
    /// # Errors
    /// When the library is not installed, or is too old.
    pub fn open() -> Result<Self, VerbsError> {
        Ok(Self { provider: Provider::Library(library()?) })
    }

    /// Returns the name of the source: `libibverbs`, `loopback` or `null`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.provider.name()
    }

    /// Returns the devices, in the provider's order. An empty list is not an error.
    ///
    /// # Errors
    /// When the kernel does not support verbs.
    pub fn devices(&self) -> Result<Vec<Device>, VerbsError> {
        let device = |raw, list| Device { raw, provider: self.provider.clone(), _list: list };
        match &self.provider {
            #[cfg(feature = "soft-verbs")]
            Provider::Soft(fabric) => Ok(fabric.raw_devices().map(|raw| device(raw, None)).collect()),
            Provider::Library(library) => {
                let list = Arc::new(DeviceList::get(library)?);
                Ok(list.raws().map(|raw| device(raw, Some(Arc::clone(&list)))).collect())
            }
        }
    }

    /// Returns the device with this name.
    ///
    /// # Errors
    /// When there is none; the error names the existing ones.
    pub fn device(&self, name: &str) -> Result<Device, VerbsError> {
        let mut devices = self.devices()?;
        match devices.iter().position(|device| device.name() == name) {
            Some(index) => Ok(devices.swap_remove(index)),
            None => {
                let known = devices.iter().map(|device| device.name().to_owned()).collect();
                Err(VerbsError::UnknownDevice { name: name.to_owned(), known })
            }
        }
    }
}

#[cfg(feature = "soft-verbs")]
impl Verbs {
    /// Creates a source of software devices inside this process; see [`Loopback`].
    #[must_use]
    pub fn loopback(fabric: &Loopback) -> Self {
        Self { provider: Provider::Soft(fabric.clone()) }
    }

    /// Creates a source with one device, `null0`, on which every request succeeds at once and only messages move bytes:
    /// measures the cost of our own code.
    #[must_use]
    pub fn null() -> Self {
        Self { provider: Provider::Soft(Loopback::null()) }
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Verbs").field(&self.name()).finish()
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

    fn raws(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        // SAFETY: the list has `count` entries, which live as long as the list.
        let list = unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) };
        list.iter().filter_map(|device| NonNull::new(*device))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: freed once, by its owner. Contexts opened from it hold their devices themselves.
        unsafe { (self.library.free_device_list)(self.list.as_ptr()) };
    }
}

/// A device that can be opened. Any thread may use it.
pub struct Device {
    raw: NonNull<ibv_device>,
    provider: Provider,
    _list: Option<Arc<DeviceList>>,
}

// SAFETY: the device behind it is only read, and lives as long as its list or its fabric, which this struct holds.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Returns the kernel's name of the device, such as `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> &str {
        // SAFETY: the device is alive, see above; the provider terminates its name with a zero inside the array.
        text(unsafe { &(*self.raw.as_ptr()).name })
    }

    /// Returns the sysfs path, such as `/sys/class/infiniband/mlx5_0`; empty for software devices.
    #[must_use]
    pub fn sysfs_path(&self) -> &str {
        // SAFETY: as in `name`.
        text(unsafe { &(*self.raw.as_ptr()).ibdev_path })
    }

    /// Returns the path of the device file, such as `/dev/infiniband/uverbs0`.
    #[must_use]
    pub fn file_path(&self) -> String {
        // SAFETY: as in `name`.
        format!("/dev/infiniband/{}", text(unsafe { &(*self.raw.as_ptr()).dev_name }))
    }

    /// Opens the device.
    ///
    /// # Errors
    /// When there is no permission for its file, or the device is gone or does not respond.
    pub fn open(&self) -> Result<Arc<Context>, VerbsError> {
        // SAFETY: the device is alive; the library returns a context that the caller closes, or null.
        let raw = unsafe { (self.provider.functions().open_device)(self.raw.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else {
            let source = io::Error::last_os_error();
            let (device, path) = (self.name().to_owned(), self.file_path());
            if self.provider.has_device_files() {
                // The library tries a second path if the first fails, and reports only the error of the second.
                let tried = OpenOptions::new().read(true).write(true).open(&path);
                match tried.map_err(|error| error.kind()) {
                    Err(io::ErrorKind::PermissionDenied) => return Err(VerbsError::NoPermission { device, path }),
                    Err(io::ErrorKind::NotFound) => return Err(VerbsError::NoDeviceFile { device, path }),
                    _ => {}
                }
            }
            return Err(VerbsError::Refused { device, what: format!("open {path}"), source });
        };
        Context::new(self.name(), self.sysfs_path(), raw, self.provider.clone())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name()).finish()
    }
}

fn text(array: &[c_char]) -> &str {
    // SAFETY: reads the signed bytes as bytes, with the same length.
    let bytes = unsafe { std::slice::from_raw_parts(array.as_ptr().cast::<u8>(), array.len()) };
    CStr::from_bytes_until_nul(bytes).ok().and_then(|text| text.to_str().ok()).unwrap_or("")
}
