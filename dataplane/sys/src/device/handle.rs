//! Devices in use: the retained primary context of each, and the guard that makes it current around driver calls.

use super::driver::{Driver, Previous, RawContext};
use super::{DeviceError, DeviceId, DeviceInfo, Family, ascend, cuda, hip};
use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

/// True in a forked child of a process that uses a driver.
static FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Device whose context this thread has made current, for the time of a call or of a [`Device::hold`].
    static CURRENT: Cell<Option<DeviceId>> = const { Cell::new(None) };
}

/// Devices whose context is retained.
static OPEN: Mutex<Vec<(DeviceId, Weak<Device>)>> = Mutex::new(Vec::new());

/// Returns the driver of a family, and loads it first if need be.
pub(super) fn driver(family: Family) -> Result<&'static dyn Driver, DeviceError> {
    check_process()?;
    let driver: &'static dyn Driver = match family {
        Family::Cuda => cuda::library()?,
        Family::Hip => hip::library()?,
        Family::Npu => ascend::library()?,
    };
    debug_assert_eq!(driver.family(), family, "each family has its own library");
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler stores one atomic flag, which is allowed in a child of a process with threads.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(note_fork)) };
    });
    Ok(driver)
}

extern "C" fn note_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Returns an error in a forked child.
pub(super) fn check_process() -> Result<(), DeviceError> {
    if FORKED.load(Ordering::Relaxed) { Err(DeviceError::Forked) } else { Ok(()) }
}

/// Loads every driver that is installed and returns the visible devices of each family, or the reason why there are
/// none. For an operator's request; nothing on the data path calls it.
#[must_use]
pub fn open_families() -> Vec<(Family, Result<Vec<DeviceInfo>, DeviceError>)> {
    Family::ALL.into_iter().map(|family| (family, driver(family).map(|driver| driver.devices().to_vec()))).collect()
}

/// One device with its primary context, which is released with the last clone of the `Arc`. Any thread may use it.
pub struct Device {
    driver: &'static dyn Driver,
    info: DeviceInfo,
    context: RawContext,
}

impl Device {
    /// Retains the primary context of a device. All callers of this process share one.
    ///
    /// # Errors
    /// When the driver is missing or has no such device, or rejects it; in a forked child.
    pub fn open(id: DeviceId) -> Result<Arc<Self>, DeviceError> {
        let driver = driver(id.family)?;
        let devices = driver.devices();
        let info = devices.get(usize::from(id.ordinal)).ok_or(DeviceError::NoDevice { id, visible: devices.len() })?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.iter().find(|(other, _)| *other == id).and_then(|(_, device)| device.upgrade()) {
            return Ok(device);
        }
        let context = driver.retain(id.ordinal)?;
        let device = Arc::new(Self { driver, info: info.clone(), context });
        open.retain(|(other, device)| *other != id && device.strong_count() > 0);
        open.push((id, Arc::downgrade(&device)));
        Ok(device)
    }

    /// Returns the identity.
    #[must_use]
    pub const fn id(&self) -> DeviceId {
        self.info.id
    }

    /// Returns the properties.
    #[must_use]
    pub const fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Makes the writes of a NIC into this device's memory visible to kernels that are launched afterwards. No effect
    /// on a device that orders them itself.
    ///
    /// # Errors
    /// When the device is lost; in a forked child.
    pub fn flush_writes(&self) -> Result<(), DeviceError> {
        if !self.info.needs_flush {
            return Ok(());
        }
        self.with(|driver, ordinal| driver.flush_writes(ordinal))
    }

    /// Makes this device's context current for all calls of its memory and queues in `work`, instead of once for each.
    /// If it cannot be made current, they return the error. To be called around the caller's own code only: other code
    /// on the thread would see this context.
    pub fn hold<T>(&self, work: impl FnOnce() -> T) -> T {
        let _context = self.enter();
        work()
    }

    /// Calls the driver with this device's context current on the thread, and restores the former one afterwards.
    pub(super) fn with<T>(
        &self,
        work: impl FnOnce(&'static dyn Driver, u16) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let _context = self.enter()?;
        work(self.driver, self.info.id.ordinal)
    }

    /// Calls the driver for what needs no context.
    pub(super) fn without_context<T>(
        &self,
        work: impl FnOnce(&'static dyn Driver) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        check_process()?;
        work(self.driver)
    }

    /// Makes the context current until the drop; `None` if it is so already.
    fn enter(&self) -> Result<Option<CurrentContext>, DeviceError> {
        check_process()?;
        if CURRENT.get() == Some(self.info.id) {
            return Ok(None);
        }
        let previous = self.driver.enter(self.info.id.ordinal, self.context)?;
        let capture_mode = self.driver.captures().relax();
        let outer = CURRENT.replace(Some(self.info.id));
        Ok(Some(CurrentContext { driver: self.driver, previous: Some(previous), capture_mode, outer }))
    }
}

/// Context that this thread has made current, until the drop.
struct CurrentContext {
    driver: &'static dyn Driver,
    previous: Option<Previous>,
    /// Former mode of this thread for captures of streams.
    capture_mode: Option<i32>,
    /// Device whose context was current before, if this thread's work had made it so.
    outer: Option<DeviceId>,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
        if let Some(mode) = self.capture_mode {
            self.driver.captures().restore(mode);
        }
        if let Some(previous) = self.previous.take() {
            self.driver.leave(previous);
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.info.id).finish()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if check_process().is_ok() {
            self.driver.release(self.info.id.ordinal, self.context);
        }
    }
}
