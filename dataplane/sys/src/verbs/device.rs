//! Verbs providers and their devices.

pub(super) mod context;
pub(super) mod events;
pub(super) mod gid;
pub(super) mod library;
pub(super) mod port;
pub(super) mod provider;

use super::error::VerbsError;
use super::ffi::*;
use context::Context;
use libc::c_char;
use library::library;
use provider::{Functions, VerbsProvider};
use std::any::Any;
use std::ffi::CStr;
use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Source of RDMA devices: the library of this machine, or what a test provides. Clones refer to the same source.
#[derive(Clone)]
pub struct Verbs {
    provider: Arc<dyn VerbsProvider>,
}

impl Verbs {
    /// Opens the RDMA devices of this machine; loads libibverbs.
    ///
    /// # Errors
    /// When the library is not installed, or is too old.
    pub fn open() -> Result<Self, VerbsError> {
        Ok(Self { provider: Arc::new(library()?) })
    }

    /// Creates a source of the devices of another implementation, for tests and benchmarks.
    #[cfg(feature = "verbs-provider")]
    #[must_use]
    pub fn provided_by(provider: impl VerbsProvider + 'static) -> Self {
        Self { provider: Arc::new(provider) }
    }

    /// Returns the name of the source: `libibverbs`, or that of another implementation.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.provider.name()
    }

    /// Returns the devices, in the provider's order. An empty list is not an error.
    ///
    /// # Errors
    /// When the kernel does not support verbs.
    pub fn devices(&self) -> Result<Vec<Device>, VerbsError> {
        let functions = self.provider.functions();
        let provided = self.provider.devices()?;
        let device = |raw| Device { raw, functions, _owner: Arc::clone(&provided.owner) };
        Ok(provided.devices.into_iter().map(device).collect())
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

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Verbs").field(&self.name()).finish()
    }
}

/// A device that can be opened. Any thread may use it.
pub struct Device {
    raw: NonNull<ibv_device>,
    functions: &'static Functions,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the device behind it is only read, and lives as long as its owner, which this struct holds.
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

    /// Returns the sysfs path, such as `/sys/class/infiniband/mlx5_0`; empty if the kernel does not know the device.
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
        let raw = unsafe { (self.functions.open_device)(self.raw.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else {
            let source = io::Error::last_os_error();
            let (device, path) = (self.name().to_owned(), self.file_path());
            if !self.sysfs_path().is_empty() {
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
        Context::new(self.name(), self.sysfs_path(), raw, self.functions)
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
