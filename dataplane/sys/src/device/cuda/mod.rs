//! CUDA's driver library, loaded at run time.

mod ffi;
mod library;
mod virtual_memory;

pub(super) use library::library;

use self::ffi::*;
use self::library::{Functions, VirtualMemory};
use super::captures::Captures;
use super::driver::{
    Direction, Driver, HANDLE_BYTES, Previous, RawContext, RawCopy, RawEvent, RawStream, ShareHandle, SharedPhysical,
};
use super::{Allocation, DeviceError, DeviceId, DeviceInfo, Family, MemoryKind};
use crate::region::PAGE_BYTES;
use libc::{c_int, c_void};
use std::ffi::CStr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most copies in one call; a longer batch takes several.
const BATCH: usize = 256;

/// The loaded library and the devices that it shows.
pub(crate) struct Cuda {
    functions: Functions,
    virtual_memory: Option<VirtualMemory>,
    devices: Vec<DeviceInfo>,
    /// Set when the driver has the batch call of copies, but not for its devices.
    no_batches: AtomicBool,
}

/// Returns the identity of a CUDA device.
const fn id(ordinal: u16) -> DeviceId {
    DeviceId { family: Family::Cuda, ordinal }
}

impl Cuda {
    /// Initializes the driver and lists its devices. Creates no context.
    fn new(functions: Functions, virtual_memory: Option<VirtualMemory>) -> Result<Self, DeviceError> {
        let mut cuda = Self { functions, virtual_memory, devices: Vec::new(), no_batches: AtomicBool::new(false) };
        // SAFETY: the flags are to be 0.
        match unsafe { (cuda.functions.init)(0) } {
            // Another library of the process that forked this one has initialized the driver.
            NOT_INITIALIZED => return Err(DeviceError::Forked),
            code => cuda.check(0, "cuInit", code)?,
        }
        let mut count: c_int = 0;
        // SAFETY: the driver stores one integer.
        cuda.check(0, "cuDeviceGetCount", unsafe { (cuda.functions.device_count)(&raw mut count) })?;
        let count = u16::try_from(count).unwrap_or(0);
        cuda.devices = (0..count).map(|ordinal| cuda.info(ordinal)).collect::<Result<_, _>>()?;
        Ok(cuda)
    }

    fn info(&self, ordinal: u16) -> Result<DeviceInfo, DeviceError> {
        let mut device: CUdevice = 0;
        // SAFETY: the driver stores one integer.
        let code = unsafe { (self.functions.device_get)(&raw mut device, c_int::from(ordinal)) };
        self.check(ordinal, "cuDeviceGet", code)?;
        let (mut name, mut address) = ([0_u8; 256], [0_u8; 32]);
        // SAFETY: the driver stores at most the given length, with a zero byte at the end.
        let code = unsafe { (self.functions.device_name)(name.as_mut_ptr().cast(), 256, device) };
        self.check(ordinal, "cuDeviceGetName", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.functions.device_pci)(address.as_mut_ptr().cast(), 32, device) };
        self.check(ordinal, "cuDeviceGetPCIBusId", code)?;
        let text = |bytes: &[u8]| {
            CStr::from_bytes_until_nul(bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let exports = self.functions.export_range.is_some();
        // Drivers before 11.3 have neither attribute: they order writes before each launch.
        let is_unordered = self.attribute(device, DEVICE_WRITES_ORDERING) == Some(0);
        let options = self.attribute(device, DEVICE_FLUSH_OPTIONS).unwrap_or(0);
        let flushes = options & FLUSH_BY_HOST != 0 && self.functions.flush_writes.is_some();
        Ok(DeviceInfo {
            id: id(ordinal),
            name: text(&name),
            pci_address: text(&address).to_lowercase(),
            copy_engines: self.attribute(device, DEVICE_COPY_ENGINES).and_then(|n| n.try_into().ok()).unwrap_or(1),
            dma_buf: exports && self.attribute(device, DEVICE_DMA_BUF) == Some(1),
            host_node: self.attribute(device, DEVICE_HOST_NODE).and_then(|node| node.try_into().ok()),
            needs_flush: is_unordered && flushes,
            hides_writes: is_unordered && !flushes,
        })
    }

    /// Returns an attribute; `None` if this driver does not know it.
    fn attribute(&self, device: CUdevice, attribute: c_int) -> Option<c_int> {
        let mut value: c_int = 0;
        // SAFETY: the driver stores one integer.
        let code = unsafe { (self.functions.device_attribute)(&raw mut value, attribute, device) };
        (code == SUCCESS).then_some(value)
    }

    /// Turns an error code into an error.
    fn check(&self, ordinal: u16, call: &'static str, code: CUresult) -> Result<(), DeviceError> {
        let id = id(ordinal);
        match code {
            SUCCESS => Ok(()),
            OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { id, call }),
            NO_DEVICE => Err(DeviceError::NoDevice { id, visible: 0 }),
            NOT_SUPPORTED => Err(DeviceError::Unsupported { id, what: call }),
            code if is_lost(code) || KERNEL_FAULTS.contains(&code) => Err(DeviceError::Lost { id, call, code }),
            code => Err(DeviceError::Call { id, call, code, name: self.name(code) }),
        }
    }

    fn name(&self, code: CUresult) -> String {
        let mut text = ptr::null();
        // SAFETY: the driver stores a pointer to a constant string, or null for an unknown code.
        let known = unsafe { (self.functions.error_name)(code, &raw mut text) } == SUCCESS && !text.is_null();
        if !known {
            return "an unknown error".to_owned();
        }
        // SAFETY: a constant string of the driver, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Enqueues copies by the driver's batch call, as many as it takes; returns their number.
    ///
    /// # Safety
    /// See [`Driver::copy`].
    unsafe fn copy_batch(&self, ordinal: u16, stream: RawStream, copies: &[RawCopy]) -> Result<usize, DeviceError> {
        let Some(batch) = self.functions.copy_batch else { return Ok(0) };
        if self.no_batches.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut enqueued = 0;
        let mut attributes = CopyAttributes { order: ORDER_STREAM, ..CopyAttributes::default() };
        for part in copies.chunks(BATCH) {
            let mut to: [u64; BATCH] = [0; BATCH];
            let (mut from, mut bytes) = ([0_u64; BATCH], [0_usize; BATCH]);
            for (index, copy) in part.iter().enumerate() {
                (to[index], from[index], bytes[index]) = (copy.to, copy.from, copy.bytes);
            }
            let (mut first, mut failed) = (0_usize, 0_usize);
            // SAFETY: three arrays of `part.len()` elements, one attribute for all from the first on; the memory by
            // this function's contract.
            let code = unsafe {
                batch(
                    to.as_mut_ptr(),
                    from.as_mut_ptr(),
                    bytes.as_mut_ptr(),
                    part.len(),
                    &raw mut attributes,
                    &raw mut first,
                    1,
                    &raw mut failed,
                    stream.0 as CUstream,
                )
            };
            if code == NOT_SUPPORTED {
                self.no_batches.store(true, Ordering::Relaxed);
                break;
            }
            self.check(ordinal, "cuMemcpyBatchAsync", code)?;
            enqueued += part.len();
        }
        Ok(enqueued)
    }
}

/// Returns true for codes after which the context answers nothing else.
const fn is_lost(code: CUresult) -> bool {
    matches!(
        code,
        DEINITIALIZED
            | DEVICE_UNAVAILABLE
            | ECC_UNCORRECTABLE
            | NVLINK_UNCORRECTABLE
            | ILLEGAL_ADDRESS
            | CONTEXT_IS_DESTROYED
            | HARDWARE_STACK_ERROR
            | LAUNCH_FAILED
            | UNKNOWN
    )
}

impl Driver for Cuda {
    fn family(&self) -> Family {
        Family::Cuda
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn describe(&self, address: u64) -> Result<Option<Allocation>, DeviceError> {
        const PLACES: usize = 8;
        let (mut kind, mut managed, mut ordinal) = (0 as c_int, 0 as c_int, -2 as c_int);
        let (mut base, mut bytes, mut buffer_id) = (0_u64, 0_usize, 0_u64);
        let (mut legacy, mut rdma) = (0 as c_int, 0 as c_int);
        let mut wanted = [
            POINTER_MEMORY_TYPE,
            POINTER_IS_MANAGED,
            POINTER_DEVICE_ORDINAL,
            POINTER_RANGE_START,
            POINTER_RANGE_SIZE,
            POINTER_BUFFER_ID,
            POINTER_IS_LEGACY_IPC_CAPABLE,
            POINTER_IS_RDMA_CAPABLE,
        ];
        let mut places: [*mut c_void; PLACES] = [
            (&raw mut kind).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut base).cast(),
            (&raw mut bytes).cast(),
            (&raw mut buffer_id).cast(),
            (&raw mut legacy).cast(),
            (&raw mut rdma).cast(),
        ];
        let mut ask = |count: usize| {
            // SAFETY: as many places as attributes, each of the attribute's type; flags are stored as one byte or an
            // int.
            unsafe {
                (self.functions.pointer_attributes)(count as u32, wanted.as_mut_ptr(), places.as_mut_ptr(), address)
            }
        };
        let mut code = ask(PLACES);
        // A driver before 11.3 does not know the last one. Registration finds out there.
        if code == INVALID_VALUE {
            code = ask(PLACES - 1);
            rdma = 1;
        }
        // An address that no context knows: some versions say so by an error, others by an ordinal below 0.
        if matches!(code, INVALID_VALUE | INVALID_CONTEXT | NOT_INITIALIZED) {
            return Ok(None);
        }
        self.check(0, "cuPointerGetAttributes", code)?;
        let Ok(ordinal) = u16::try_from(ordinal) else { return Ok(None) };
        let kind = match kind {
            _ if managed & 0xff != 0 => MemoryKind::Managed(id(ordinal)),
            MEMORY_DEVICE => MemoryKind::Device(id(ordinal)),
            _ => return Ok(None),
        };
        let (rdma, handle) = (rdma & 0xff != 0, legacy & 0xff != 0);
        Ok(Some(Allocation { kind, base, bytes: bytes as u64, buffer_id, rdma, handle }))
    }

    fn retain(&self, ordinal: u16) -> Result<RawContext, DeviceError> {
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: the driver stores one pointer.
        let code = unsafe { (self.functions.primary_retain)(&raw mut context, c_int::from(ordinal)) };
        self.check(ordinal, "cuDevicePrimaryCtxRetain", code)?;
        Ok(RawContext(context as u64))
    }

    fn release(&self, ordinal: u16, _context: RawContext) {
        // SAFETY: released once for each retain. A driver that has shut down answers with an error.
        let _ = unsafe { (self.functions.primary_release)(c_int::from(ordinal)) };
    }

    fn enter(&self, ordinal: u16, context: RawContext) -> Result<Previous, DeviceError> {
        // SAFETY: a retained context.
        let code = unsafe { (self.functions.context_push)(context.0 as CUcontext) };
        self.check(ordinal, "cuCtxPushCurrent", code)?;
        Ok(Previous(None))
    }

    fn leave(&self, _previous: Previous) {
        let mut popped: CUcontext = ptr::null_mut();
        // SAFETY: the driver stores one pointer; this thread pushed a context before.
        let _ = unsafe { (self.functions.context_pop)(&raw mut popped) };
    }

    fn captures(&self) -> Captures {
        Captures { exchange: self.functions.capture_mode, is_capturing: self.functions.is_capturing }
    }

    fn create_stream(&self, ordinal: u16) -> Result<RawStream, DeviceError> {
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the driver stores one pointer.
        let code = unsafe { (self.functions.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check(ordinal, "cuStreamCreate", code)?;
        Ok(RawStream(stream as u64))
    }

    fn destroy_stream(&self, stream: RawStream) {
        // SAFETY: a stream of this driver, destroyed once.
        let _ = unsafe { (self.functions.stream_destroy)(stream.0 as CUstream) };
    }

    fn synchronize(&self, ordinal: u16, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: a live stream.
        self.check(ordinal, "cuStreamSynchronize", unsafe { (self.functions.stream_synchronize)(stream.0 as CUstream) })
    }

    fn device_of_stream(&self, ordinal: u16, stream: RawStream) -> Result<u16, DeviceError> {
        let (mut context, mut device): (CUcontext, CUdevice) = (ptr::null_mut(), 0);
        // SAFETY: the caller's word that the stream is live; the driver stores one pointer.
        let code = unsafe { (self.functions.stream_context)(stream.0 as CUstream, &raw mut context) };
        self.check(ordinal, "cuStreamGetCtx", code)?;
        let previous = self.enter(ordinal, RawContext(context as u64))?;
        // SAFETY: the driver stores one integer.
        let code = unsafe { (self.functions.context_device)(&raw mut device) };
        self.leave(previous);
        self.check(ordinal, "cuCtxGetDevice", code)?;
        Ok(u16::try_from(device).unwrap_or(ordinal))
    }

    fn wait(&self, ordinal: u16, stream: RawStream, event: RawEvent) -> Result<(), DeviceError> {
        // SAFETY: a live stream and a live event.
        let code = unsafe { (self.functions.stream_wait)(stream.0 as CUstream, event.0 as CUevent, 0) };
        self.check(ordinal, "cuStreamWaitEvent", code)
    }

    fn create_event(&self, ordinal: u16) -> Result<RawEvent, DeviceError> {
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: the driver stores one pointer.
        let code = unsafe { (self.functions.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.check(ordinal, "cuEventCreate", code)?;
        Ok(RawEvent(event as u64))
    }

    fn destroy_event(&self, event: RawEvent) {
        // SAFETY: an event of this driver, destroyed once.
        let _ = unsafe { (self.functions.event_destroy)(event.0 as CUevent) };
    }

    fn record(&self, ordinal: u16, event: RawEvent, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: a live event; the stream is ours and live, or a caller's, whose word for that is its contract.
        let code = unsafe { (self.functions.event_record)(event.0 as CUevent, stream.0 as CUstream) };
        self.check(ordinal, "cuEventRecord", code)
    }

    fn is_done(&self, ordinal: u16, event: RawEvent) -> Result<bool, DeviceError> {
        // SAFETY: a live event.
        match unsafe { (self.functions.event_query)(event.0 as CUevent) } {
            NOT_READY => Ok(false),
            // Only of drivers that cannot be told that this thread takes no part in captures. A later call tells.
            code if Captures::forbids(code) => Ok(false),
            code => self.check(ordinal, "cuEventQuery", code).map(|()| true),
        }
    }

    unsafe fn copy(&self, ordinal: u16, stream: RawStream, copies: &[RawCopy]) -> Result<(), DeviceError> {
        // SAFETY: by this function's contract.
        let enqueued = if copies.len() > 1 { unsafe { self.copy_batch(ordinal, stream, copies) }? } else { 0 };
        for &RawCopy { to, from, bytes, direction } in &copies[enqueued..] {
            // The driver finds the sides by their addresses.
            let _: Direction = direction;
            // SAFETY: by this function's contract.
            let code = unsafe { (self.functions.copy)(to, from, bytes, stream.0 as CUstream) };
            self.check(ordinal, "cuMemcpyAsync", code)?;
        }
        Ok(())
    }

    fn allocate(&self, ordinal: u16, bytes: u64) -> Result<u64, DeviceError> {
        let mut address = 0_u64;
        // SAFETY: the driver stores one address.
        let code = unsafe { (self.functions.allocate)(&raw mut address, bytes as usize) };
        self.check(ordinal, "cuMemAlloc", code)?;
        Ok(address)
    }

    fn free(&self, address: u64) {
        // SAFETY: allocated before, freed once.
        let _ = unsafe { (self.functions.free)(address) };
    }

    unsafe fn pin(&self, ordinal: u16, address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: by this function's contract.
        let code = unsafe { (self.functions.host_register)(address as *mut c_void, bytes, HOST_PORTABLE) };
        self.check(ordinal, "cuMemHostRegister", code)
    }

    fn unpin(&self, address: u64) {
        // SAFETY: registered before, once.
        let _ = unsafe { (self.functions.host_unregister)(address as *mut c_void) };
    }

    fn export_dma_buf(&self, ordinal: u16, base: u64, bytes: u64) -> Result<(OwnedFd, u64), DeviceError> {
        let old = DeviceError::old(Family::Cuda, c"cuMemGetHandleForAddressRange", "515 (CUDA 11.7)");
        let export = self.functions.export_range.ok_or(old)?;
        // Allocations may share a page, and the driver exports whole ones.
        let start = base - base % PAGE_BYTES as u64;
        let length = (base - start + bytes).next_multiple_of(PAGE_BYTES as u64);
        let mut fd: c_int = -1;
        // SAFETY: the driver stores one descriptor.
        let code = unsafe { export((&raw mut fd).cast(), start, length as usize, RANGE_DMA_BUF, 0) };
        self.check(ordinal, "cuMemGetHandleForAddressRange", code)?;
        // SAFETY: a new descriptor, which belongs to the caller.
        Ok((unsafe { OwnedFd::from_raw_fd(fd) }, base - start))
    }

    fn flush_writes(&self, ordinal: u16) -> Result<(), DeviceError> {
        let Some(flush) = self.functions.flush_writes else { return Ok(()) };
        // SAFETY: takes two numbers.
        let code = unsafe { flush(FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER) };
        self.check(ordinal, "cuFlushGPUDirectRDMAWrites", code)
    }

    fn share(&self, ordinal: u16, base: u64) -> Result<[u8; HANDLE_BYTES], DeviceError> {
        let mut handle = IpcHandle([0; HANDLE_BYTES]);
        // SAFETY: the driver stores one handle.
        let code = unsafe { (self.functions.ipc_get)(&raw mut handle, base) };
        self.check(ordinal, "cuIpcGetMemHandle", code)?;
        Ok(handle.0)
    }

    fn map(&self, ordinal: u16, handle: &[u8; HANDLE_BYTES]) -> Result<u64, DeviceError> {
        let mut address = 0_u64;
        // SAFETY: the driver stores one address, and checks the handle.
        let code = unsafe { (self.functions.ipc_open)(&raw mut address, IpcHandle(*handle), IPC_LAZY_PEER_ACCESS) };
        self.check(ordinal, "cuIpcOpenMemHandle", code)?;
        Ok(address)
    }

    fn unmap(&self, address: u64) {
        // SAFETY: opened before, closed once.
        let _ = unsafe { (self.functions.ipc_close)(address) };
    }

    fn share_physical(&self, ordinal: u16, address: u64) -> Result<SharedPhysical, DeviceError> {
        let virtual_memory = self.virtual_memory.as_ref().ok_or_else(|| self.without_virtual_memory(ordinal))?;
        virtual_memory.share(self, ordinal, address)
    }

    fn map_physical(&self, ordinal: u16, handle: &ShareHandle, bytes: u64) -> Result<u64, DeviceError> {
        let virtual_memory = self.virtual_memory.as_ref().ok_or_else(|| self.without_virtual_memory(ordinal))?;
        virtual_memory.map(self, ordinal, handle, bytes)
    }

    fn unmap_physical(&self, address: u64, bytes: u64) {
        if let Some(virtual_memory) = &self.virtual_memory {
            virtual_memory.unmap(address, bytes);
        }
    }
}
