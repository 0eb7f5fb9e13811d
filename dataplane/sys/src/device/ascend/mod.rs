//! AscendCL, the runtime library of Huawei's CANN, loaded at run time: copies through pinned memory of the host.
//!
//! A thread has one current context. `aclrtSetDevice` retains the default context of a device, which all threads of the
//! process share, and `aclrtResetDevice` releases it. The library refuses to make no context current, so a thread that
//! had none keeps the one of the last call here, until that is released.
//!
//! By default a stream goes on after a failed operation, and events behind it are reached: the bytes of a failed copy
//! would count as copied. So each stream here stops at a failure. The library extends that to all streams of the
//! context, as it does for programs that set it themselves.
//!
//! Nothing is exported: NICs do not access the memory directly, and other processes do not map it.

mod library;

pub(super) use library::library;

use self::library::*;
use super::driver::{Direction, Driver, HANDLE_BYTES, Previous, RawContext, RawCopy, RawEvent, RawStream};
use super::{Allocation, DeviceError, DeviceId, DeviceInfo, Family, MemoryKind};
use libc::{c_int, c_void};
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Most copies in one call; a longer batch takes several.
const BATCH: usize = 256;

/// Last version of Linux on which the library cannot pin memory that it did not allocate.
const LAST_WITHOUT_PINNING: (u32, u32) = (5, 10);

/// The loaded library and the devices that it shows.
pub(crate) struct Ascend {
    functions: Functions,
    devices: Vec<DeviceInfo>,
    can_pin: bool,
    /// Pairs of devices of which the first may access memory of the second.
    links: Mutex<BTreeSet<[u16; 2]>>,
}

/// Returns the identity of an Ascend device.
const fn id(ordinal: u16) -> DeviceId {
    DeviceId { family: Family::Npu, ordinal }
}

impl Ascend {
    /// Initializes the library and lists its devices. Creates no context.
    fn new(functions: Functions) -> Result<Self, DeviceError> {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let can_pin = kernel_version(&release).is_none_or(|version| version > LAST_WITHOUT_PINNING);
        let mut ascend = Self { functions, devices: Vec::new(), can_pin, links: Mutex::default() };
        // SAFETY: no configuration is given. The library is never finalized, as that would end its use by others.
        match unsafe { (ascend.functions.init)(ptr::null()) } {
            REPEATED_INITIALIZE => {}
            code => ascend.check(0, "aclInit", code)?,
        }
        let mut count = 0_u32;
        // SAFETY: the library stores one integer.
        ascend.check(0, "aclrtGetDeviceCount", unsafe { (ascend.functions.device_count)(&raw mut count) })?;
        let count = u16::try_from(count).unwrap_or(0);
        ascend.devices = (0..count).map(|ordinal| ascend.info(ordinal)).collect();
        Ok(ascend)
    }

    fn info(&self, ordinal: u16) -> DeviceInfo {
        // SAFETY: takes nothing; all devices of a host are of one product.
        let name = unsafe { (self.functions.soc_name)() };
        let name = if name.is_null() {
            "Ascend".to_owned()
        } else {
            // SAFETY: a constant string of the library, which is never unloaded.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        let mut address = [0_u8; 32];
        let found = self.functions.device_pci.is_some_and(|device_pci| {
            // SAFETY: the library stores at most the given length, with a zero byte at the end.
            unsafe { device_pci(i32::from(ordinal), address.as_mut_ptr().cast(), 32) == SUCCESS }
        });
        let address = CStr::from_bytes_until_nul(&address).ok().filter(|_| found);
        DeviceInfo {
            id: id(ordinal),
            name,
            pci_address: address.map(|address| address.to_string_lossy().to_lowercase()).unwrap_or_default(),
            // The library does not say; each device has an engine for either direction.
            copy_engines: 2,
            dma_buf: false,
            host_node: None,
            needs_flush: false,
            hides_writes: false,
        }
    }

    /// Turns an error code into an error. All callers but the first have made a context current, so one that is not
    /// there is lost.
    fn check(&self, ordinal: u16, call: &'static str, code: Code) -> Result<(), DeviceError> {
        let id = id(ordinal);
        match code {
            SUCCESS => Ok(()),
            BAD_ALLOC | MEMORY_ALLOCATION | DEVICE_OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { id, call }),
            INVALID_DEVICE | NO_DEVICE => Err(DeviceError::NoDevice { id, visible: self.devices.len() }),
            FEATURE_NOT_SUPPORTED => Err(DeviceError::Unsupported { id, what: call }),
            CONTEXT_NULL | DEVICE_TASK_ABORT | STREAM_ABORT => Err(DeviceError::Lost { id, call, code }),
            code if FAULTS.contains(&code) => Err(DeviceError::Lost { id, call, code }),
            code => Err(DeviceError::Call { id, call, code, name: name(code).to_owned() }),
        }
    }

    /// Returns the current context of this thread.
    fn current(&self) -> Option<u64> {
        let mut context = ptr::null_mut();
        // SAFETY: the library stores one pointer.
        let code = unsafe { (self.functions.get_context)(&raw mut context) };
        (code == SUCCESS && !context.is_null()).then_some(context as u64)
    }

    /// Returns the kind of the memory at an address; `None` for the host's and for unknown addresses.
    fn kind(&self, address: u64) -> Result<Option<MemoryKind>, DeviceError> {
        let mut found = PointerAttributes::default();
        // SAFETY: the library stores one record.
        match unsafe { (self.functions.pointer_attributes)(address as *const c_void, &raw mut found) } {
            PARAM_INVALID | CONTEXT_NULL => return Ok(None),
            code => self.check(0, "aclrtPointerGetAttributes", code)?,
        }
        let Ok(ordinal) = u16::try_from(found.location.id) else { return Ok(None) };
        Ok(match found.location.kind {
            DEVICE => Some(MemoryKind::Device(id(ordinal))),
            MANAGED => Some(MemoryKind::Managed(id(ordinal))),
            _ => None,
        })
    }

    /// Lets a device access the memory of another one that is at one of these addresses. Its context is current.
    fn link(&self, ordinal: u16, sides: [u64; 2]) -> Result<(), DeviceError> {
        for address in sides {
            let Some(MemoryKind::Device(DeviceId { ordinal: other, .. })) = self.kind(address)? else { continue };
            let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
            if other == ordinal || links.contains(&[ordinal, other]) {
                continue;
            }
            // SAFETY: takes two numbers; the flags are to be 0.
            let code = unsafe { (self.functions.peer_access)(i32::from(other), 0) };
            self.check(ordinal, "aclrtDeviceEnablePeerAccess", code)?;
            links.insert([ordinal, other]);
        }
        Ok(())
    }

    /// Enqueues copies by the library's batch call. Returns false if it does not take these.
    ///
    /// # Safety
    /// See [`Driver::copy`].
    unsafe fn copy_batch(&self, ordinal: u16, stream: RawStream, copies: &[RawCopy]) -> Result<bool, DeviceError> {
        let Some((batch, first)) = self.functions.copy_batch.zip(copies.first()) else { return Ok(false) };
        let [host, device] = [MemLocation { id: 0, kind: HOST }, MemLocation { id: ordinal.into(), kind: DEVICE }];
        let (to, from) = match first.direction {
            Direction::ToDevice => (device, host),
            Direction::ToHost => (host, device),
            Direction::Between => return Ok(false),
        };
        let mut attributes = CopyAttributes { to, from, ..CopyAttributes::default() };
        // One call takes copies of one direction, and none without bytes.
        if copies.len() < 2 || copies.iter().any(|copy| copy.direction != first.direction || copy.bytes == 0) {
            return Ok(false);
        }
        for part in copies.chunks(BATCH) {
            let (mut to, mut from) = ([0_u64; BATCH], [0_u64; BATCH]);
            let mut bytes = [0_usize; BATCH];
            for (index, copy) in part.iter().enumerate() {
                (to[index], from[index], bytes[index]) = (copy.to, copy.from, copy.bytes);
            }
            let (mut first, mut failed, mut most) = (0_usize, 0_usize, bytes);
            // SAFETY: four arrays of `part.len()` elements, one attribute for all from the first on; the memory by this
            // function's contract.
            let code = unsafe {
                batch(
                    to.as_mut_ptr(),
                    most.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    part.len(),
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    &raw mut failed,
                    stream.0 as *mut c_void,
                )
            };
            match code {
                // The product has no batches, or one of the copies is of managed memory, which they do not take. A copy
                // that is enqueued once more is the same copy.
                FEATURE_NOT_SUPPORTED | PARAM_INVALID => return Ok(false),
                code => self.check(ordinal, "aclrtMemcpyBatchAsync", code)?,
            }
        }
        Ok(true)
    }
}

/// Returns the name of a code that is not a kind of error of its own.
const fn name(code: Code) -> &'static str {
    match code {
        100_000 => "ACL_ERROR_INVALID_PARAM",
        100_001 => "ACL_ERROR_UNINITIALIZE",
        107_000 => "ACL_ERROR_RT_PARAM_INVALID",
        107_003 => "ACL_ERROR_RT_STREAM_CONTEXT",
        107_017 => "ACL_ERROR_RT_INVALID_HANDLE",
        207_005 => "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL",
        207_006 => "ACL_ERROR_RT_NO_PERMISSION",
        207_007 => "ACL_ERROR_RT_NO_EVENT_RESOURCE",
        207_008 => "ACL_ERROR_RT_NO_STREAM_RESOURCE",
        500_000 => "ACL_ERROR_INTERNAL_ERROR",
        507_000 => "ACL_ERROR_RT_INTERNAL_ERROR",
        507_899 => "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
        507_910 => "ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        507_911 => "ACL_ERROR_HOST_MEMORY_NOT_REGISTERED",
        _ => "an error of AscendCL",
    }
}

/// Returns the first two numbers of a kernel's release.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.trim().split(['.', '-']).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

impl Driver for Ascend {
    fn family(&self) -> Family {
        Family::Npu
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn describe(&self, address: u64) -> Result<Option<Allocation>, DeviceError> {
        let kind = self.kind(address)?;
        let Some((kind, DeviceId { ordinal, .. })) = kind.and_then(|kind| Some((kind, kind.device()?))) else {
            return Ok(None);
        };
        let (mut base, mut bytes): (*mut c_void, usize) = (ptr::null_mut(), 0);
        // SAFETY: the library stores one address and one length.
        let code = unsafe { (self.functions.address_range)(address as *mut c_void, &raw mut base, &raw mut bytes) };
        self.check(ordinal, "aclrtMemGetAddressRange", code)?;
        let (base, bytes) = (base as u64, bytes as u64);
        Ok(Some(Allocation { kind, base, bytes, buffer_id: 0, rdma: false, handle: false }))
    }

    fn retain(&self, ordinal: u16) -> Result<RawContext, DeviceError> {
        let previous = self.current();
        // SAFETY: takes a number.
        self.check(ordinal, "aclrtSetDevice", unsafe { (self.functions.set_device)(i32::from(ordinal)) })?;
        let context = self.current();
        if let Some(previous) = previous {
            self.leave(Previous(Some(previous)));
        }
        let Some(context) = context else {
            // SAFETY: releases what was retained above.
            let _ = unsafe { (self.functions.reset_device)(i32::from(ordinal)) };
            return Err(DeviceError::Lost { id: id(ordinal), call: "aclrtGetCurrentContext", code: CONTEXT_NULL });
        };
        Ok(RawContext(context))
    }

    fn release(&self, ordinal: u16, _context: RawContext) {
        // The links of a device end with its last context.
        self.links.lock().unwrap_or_else(PoisonError::into_inner).retain(|pair| !pair.contains(&ordinal));
        // SAFETY: released once for each retain. A library that has shut down answers with an error.
        let _ = unsafe { (self.functions.reset_device)(i32::from(ordinal)) };
    }

    fn enter(&self, ordinal: u16, context: RawContext) -> Result<Previous, DeviceError> {
        let previous = self.current();
        if previous == Some(context.0) {
            return Ok(Previous(None));
        }
        // SAFETY: a retained context, or one that the library does not know any more and refuses.
        let code = unsafe { (self.functions.set_context)(context.0 as *mut c_void) };
        self.check(ordinal, "aclrtSetCurrentContext", code)?;
        Ok(Previous(previous))
    }

    fn leave(&self, previous: Previous) {
        if let Previous(Some(context)) = previous {
            // SAFETY: the context that was current on this thread before.
            let _ = unsafe { (self.functions.set_context)(context as *mut c_void) };
        }
    }

    fn create_stream(&self, ordinal: u16) -> Result<RawStream, DeviceError> {
        let mut stream: *mut c_void = ptr::null_mut();
        // SAFETY: the library stores one pointer.
        let code = unsafe { (self.functions.stream_create)(&raw mut stream) };
        self.check(ordinal, "aclrtCreateStream", code)?;
        // SAFETY: the stream of above.
        let code = unsafe { (self.functions.stream_failure_mode)(stream, STOP_ON_FAILURE) };
        let stream = RawStream(stream as u64);
        self.check(ordinal, "aclrtSetStreamFailureMode", code).inspect_err(|_| self.destroy_stream(stream))?;
        Ok(stream)
    }

    fn destroy_stream(&self, stream: RawStream) {
        // SAFETY: a stream of this library, destroyed once.
        let _ = unsafe { (self.functions.stream_destroy)(stream.0 as *mut c_void) };
    }

    fn synchronize(&self, ordinal: u16, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: a live stream.
        let code = unsafe { (self.functions.stream_synchronize)(stream.0 as *mut c_void) };
        self.check(ordinal, "aclrtSynchronizeStream", code)
    }

    fn wait(&self, ordinal: u16, stream: RawStream, event: RawEvent) -> Result<(), DeviceError> {
        // SAFETY: a live stream and a live event.
        let code = unsafe { (self.functions.stream_wait)(stream.0 as *mut c_void, event.0 as *mut c_void) };
        self.check(ordinal, "aclrtStreamWaitEvent", code)
    }

    fn create_event(&self, ordinal: u16) -> Result<RawEvent, DeviceError> {
        let mut event: *mut c_void = ptr::null_mut();
        // SAFETY: the library stores one pointer. Events of this call can be recorded again at any time.
        let code = unsafe { (self.functions.event_create)(&raw mut event, EVENT_SYNC) };
        self.check(ordinal, "aclrtCreateEventExWithFlag", code)?;
        Ok(RawEvent(event as u64))
    }

    fn destroy_event(&self, event: RawEvent) {
        // SAFETY: an event of this library, destroyed once.
        let _ = unsafe { (self.functions.event_destroy)(event.0 as *mut c_void) };
    }

    fn record(&self, ordinal: u16, event: RawEvent, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: a live event; the stream is ours and live, or a caller's, whose word for that is its contract.
        let code = unsafe { (self.functions.event_record)(event.0 as *mut c_void, stream.0 as *mut c_void) };
        self.check(ordinal, "aclrtRecordEvent", code)
    }

    fn is_done(&self, ordinal: u16, event: RawEvent) -> Result<bool, DeviceError> {
        let mut status: c_int = 0;
        // SAFETY: a live event; the library stores one integer.
        let code = unsafe { (self.functions.event_status)(event.0 as *mut c_void, &raw mut status) };
        self.check(ordinal, "aclrtQueryEventStatus", code)?;
        Ok(status == EVENT_COMPLETE)
    }

    unsafe fn copy(&self, ordinal: u16, stream: RawStream, copies: &[RawCopy]) -> Result<(), DeviceError> {
        // SAFETY: by this function's contract.
        if unsafe { self.copy_batch(ordinal, stream, copies) }? {
            return Ok(());
        }
        // The library takes no copy without bytes.
        for &RawCopy { to, from, bytes, direction } in copies.iter().filter(|copy| copy.bytes > 0) {
            let kind = match direction {
                Direction::ToDevice => COPY_TO_DEVICE,
                Direction::ToHost => COPY_TO_HOST,
                Direction::Between => {
                    self.link(ordinal, [to, from])?;
                    COPY_BETWEEN
                }
            };
            let (to, from, stream) = (to as *mut c_void, from as *const c_void, stream.0 as *mut c_void);
            // SAFETY: by this function's contract.
            let code = unsafe { (self.functions.copy)(to, bytes, from, bytes, kind, stream) };
            self.check(ordinal, "aclrtMemcpyAsync", code)?;
        }
        Ok(())
    }

    fn allocate(&self, ordinal: u16, bytes: u64) -> Result<u64, DeviceError> {
        let mut address: *mut c_void = ptr::null_mut();
        // SAFETY: the library stores one address.
        let code = unsafe { (self.functions.allocate)(&raw mut address, bytes as usize, HUGE_FIRST) };
        self.check(ordinal, "aclrtMalloc", code)?;
        Ok(address as u64)
    }

    fn free(&self, address: u64) {
        // SAFETY: allocated before, freed once.
        let _ = unsafe { (self.functions.free)(address as *mut c_void) };
    }

    unsafe fn pin(&self, ordinal: u16, address: u64, bytes: usize) -> Result<(), DeviceError> {
        if !self.can_pin {
            let what = "pinned memory of this process on Linux 5.10 or older";
            return Err(DeviceError::Unsupported { id: id(ordinal), what });
        }
        // SAFETY: by this function's contract.
        let code = unsafe { (self.functions.host_register)(address as *mut c_void, bytes as u64, HOST_PINNED) };
        self.check(ordinal, "aclrtHostRegisterV2", code)
    }

    fn unpin(&self, address: u64) {
        // SAFETY: registered before, once.
        let _ = unsafe { (self.functions.host_unregister)(address as *mut c_void) };
    }

    fn export_dma_buf(&self, ordinal: u16, _base: u64, _bytes: u64) -> Result<(OwnedFd, u64), DeviceError> {
        Err(DeviceError::Unsupported { id: id(ordinal), what: "dma-buf descriptors" })
    }

    fn flush_writes(&self, _ordinal: u16) -> Result<(), DeviceError> {
        Ok(())
    }

    fn share(&self, ordinal: u16, _base: u64) -> Result<[u8; HANDLE_BYTES], DeviceError> {
        Err(DeviceError::Unsupported { id: id(ordinal), what: "handles for other processes" })
    }

    fn map(&self, ordinal: u16, _handle: &[u8; HANDLE_BYTES]) -> Result<u64, DeviceError> {
        Err(DeviceError::Unsupported { id: id(ordinal), what: "handles of other processes" })
    }

    fn unmap(&self, _address: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_release_tells_whether_memory_can_be_pinned() {
        for (release, pins) in [
            ("5.10.0-60.18.0.50.oe2203.aarch64\n", false),
            ("4.19.90-vhulk2211.3.0.h1912.eulerosv2r10", false),
            ("5.11.0", true),
            ("6.6-rc1", true),
        ] {
            let version = kernel_version(release).unwrap();
            assert_eq!(version > LAST_WITHOUT_PINNING, pins, "{release}");
        }
        assert_eq!(kernel_version(""), None);
    }
}
