//! HIP's runtime library and, for dma-buf descriptors, HSA's: loaded at run time.
//!
//! HIP has a current device for each thread where CUDA has a stack of contexts, so entering a device notes the one that
//! was current, and leaving restores it. The runtime retains the primary contexts by itself.

mod library;

pub(super) use library::library;

use self::library::{DmaBufs, Functions, IpcHandle, PointerAttributes};
use super::captures::Captures;
use super::driver::{Direction, Driver, HANDLE_BYTES, Previous, RawContext, RawCopy, RawEvent, RawStream};
use super::{Allocation, DeviceError, DeviceId, DeviceInfo, Family, MemoryKind};
use libc::{c_int, c_void};
use std::ffi::CStr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NO_DEVICE: c_int = 100;
const ECC_NOT_CORRECTABLE: c_int = 214;
const NOT_READY: c_int = 600;
const ILLEGAL_ADDRESS: c_int = 700;
const CONTEXT_IS_DESTROYED: c_int = 709;
const LAUNCH_FAILURE: c_int = 719;
/// Codes of faults of a kernel, after which its device answers nothing else: a launch that took too long, an assertion.
const KERNEL_FAULTS: [c_int; 2] = [702, 710];
const NOT_SUPPORTED: c_int = 801;
const UNKNOWN: c_int = 999;

const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;
const HOST_PORTABLE: u32 = 1;
const IPC_LAZY_PEER_ACCESS: u32 = 1;
/// `HIP_POINTER_ATTRIBUTE_BUFFER_ID`.
const POINTER_BUFFER_ID: c_int = 7;
/// First version whose memory types count from "unregistered", which made a device's 2 instead of 1.
const NEW_TYPES: c_int = 60_000_000;

/// The loaded libraries and the devices that they show.
pub(crate) struct Hip {
    functions: Functions,
    dma_bufs: Option<DmaBufs>,
    devices: Vec<DeviceInfo>,
    /// Number by which this version describes device memory.
    device_type: c_int,
}

/// Returns the identity of a HIP device.
const fn id(ordinal: u16) -> DeviceId {
    DeviceId { family: Family::Hip, ordinal }
}

impl Hip {
    /// Initializes the runtime and lists its devices.
    fn new(functions: Functions, dma_bufs: Option<DmaBufs>) -> Result<Self, DeviceError> {
        let mut hip = Self { functions, dma_bufs, devices: Vec::new(), device_type: 2 };
        // SAFETY: the flags are to be 0.
        hip.check(0, "hipInit", unsafe { (hip.functions.init)(0) })?;
        let (mut version, mut count): (c_int, c_int) = (0, 0);
        // SAFETY: the runtime stores one integer.
        hip.check(0, "hipRuntimeGetVersion", unsafe { (hip.functions.version)(&raw mut version) })?;
        if version < NEW_TYPES {
            hip.device_type = 1;
        }
        // SAFETY: the runtime stores one integer.
        hip.check(0, "hipGetDeviceCount", unsafe { (hip.functions.device_count)(&raw mut count) })?;
        let count = u16::try_from(count).unwrap_or(0);
        hip.devices = (0..count).map(|ordinal| hip.info(ordinal)).collect::<Result<_, _>>()?;
        Ok(hip)
    }

    fn info(&self, ordinal: u16) -> Result<DeviceInfo, DeviceError> {
        let (mut name, mut address) = ([0_u8; 256], [0_u8; 32]);
        // SAFETY: the runtime stores at most the given length, with a zero byte at the end.
        let code = unsafe { (self.functions.device_name)(name.as_mut_ptr().cast(), 256, c_int::from(ordinal)) };
        self.check(ordinal, "hipDeviceGetName", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.functions.device_pci)(address.as_mut_ptr().cast(), 32, c_int::from(ordinal)) };
        self.check(ordinal, "hipDeviceGetPCIBusId", code)?;
        let text = |bytes: &[u8]| {
            CStr::from_bytes_until_nul(bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
        };
        Ok(DeviceInfo {
            id: id(ordinal),
            name: text(&name),
            pci_address: text(&address).to_lowercase(),
            // Numbers of attributes differ between versions; each device has an engine for either direction.
            copy_engines: 2,
            dma_buf: self.dma_bufs.is_some(),
            host_node: None,
            needs_flush: false,
            hides_writes: false,
        })
    }

    fn check(&self, ordinal: u16, call: &'static str, code: c_int) -> Result<(), DeviceError> {
        let id = id(ordinal);
        match code {
            SUCCESS => Ok(()),
            OUT_OF_MEMORY => Err(DeviceError::OutOfMemory { id, call }),
            NO_DEVICE => Err(DeviceError::NoDevice { id, visible: 0 }),
            NOT_SUPPORTED => Err(DeviceError::Unsupported { id, what: call }),
            ECC_NOT_CORRECTABLE | ILLEGAL_ADDRESS | CONTEXT_IS_DESTROYED | LAUNCH_FAILURE | UNKNOWN => {
                Err(DeviceError::Lost { id, call, code })
            }
            code if KERNEL_FAULTS.contains(&code) => Err(DeviceError::Lost { id, call, code }),
            code => Err(DeviceError::Call { id, call, code, name: self.name(code) }),
        }
    }

    fn name(&self, code: c_int) -> String {
        // SAFETY: the runtime returns a constant string.
        let text = unsafe { (self.functions.error_name)(code) };
        if text.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: a constant string of the runtime, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Returns the number that distinguishes allocations at one address; 0 if this version has none.
    fn buffer_id(&self, address: u64) -> u64 {
        let mut buffer_id = 0_u64;
        let Some(attribute) = self.functions.pointer_attribute else { return 0 };
        // SAFETY: the runtime stores one number of 64 bits for this attribute.
        let code = unsafe { attribute((&raw mut buffer_id).cast(), POINTER_BUFFER_ID, address as *mut c_void) };
        if code == SUCCESS { buffer_id } else { 0 }
    }
}

impl Driver for Hip {
    fn family(&self) -> Family {
        Family::Hip
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn describe(&self, address: u64) -> Result<Option<Allocation>, DeviceError> {
        let mut found = PointerAttributes::default();
        // SAFETY: the runtime stores one record.
        let code = unsafe { (self.functions.pointer_attributes)(&raw mut found, address as *const c_void) };
        // An address that the runtime does not know.
        if code == INVALID_VALUE {
            return Ok(None);
        }
        self.check(0, "hipPointerGetAttributes", code)?;
        let Ok(ordinal) = u16::try_from(found.device) else { return Ok(None) };
        let kind = match found.kind {
            _ if found.managed != 0 => MemoryKind::Managed(id(ordinal)),
            kind if kind == self.device_type => MemoryKind::Device(id(ordinal)),
            _ => return Ok(None),
        };
        let (mut base, mut bytes): (*mut c_void, usize) = (ptr::null_mut(), 0);
        // SAFETY: the runtime stores one address and one length.
        let code = unsafe { (self.functions.address_range)(&raw mut base, &raw mut bytes, address as *mut c_void) };
        self.check(ordinal, "hipMemGetAddressRange", code)?;
        let is_device = matches!(kind, MemoryKind::Device(_));
        let (base, bytes, buffer_id) = (base as u64, bytes as u64, self.buffer_id(address));
        Ok(Some(Allocation { kind, base, bytes, buffer_id, rdma: is_device, handle: is_device }))
    }

    fn retain(&self, ordinal: u16) -> Result<RawContext, DeviceError> {
        Ok(RawContext(u64::from(ordinal)))
    }

    fn release(&self, _ordinal: u16, _context: RawContext) {}

    fn enter(&self, ordinal: u16, _context: RawContext) -> Result<Previous, DeviceError> {
        let mut previous: c_int = 0;
        // SAFETY: the runtime stores one integer.
        self.check(ordinal, "hipGetDevice", unsafe { (self.functions.get_device)(&raw mut previous) })?;
        if previous != c_int::from(ordinal) {
            // SAFETY: takes a number.
            self.check(ordinal, "hipSetDevice", unsafe { (self.functions.set_device)(c_int::from(ordinal)) })?;
        }
        Ok(Previous((previous != c_int::from(ordinal)).then_some(previous as u64)))
    }

    fn leave(&self, previous: Previous) {
        if let Previous(Some(previous)) = previous {
            // SAFETY: takes a number.
            let _ = unsafe { (self.functions.set_device)(previous as c_int) };
        }
    }

    fn captures(&self) -> Captures {
        Captures { exchange: self.functions.capture_mode, is_capturing: self.functions.is_capturing }
    }

    fn create_stream(&self, ordinal: u16) -> Result<RawStream, DeviceError> {
        let mut stream: *mut c_void = ptr::null_mut();
        // SAFETY: the runtime stores one pointer.
        let code = unsafe { (self.functions.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check(ordinal, "hipStreamCreateWithFlags", code)?;
        Ok(RawStream(stream as u64))
    }

    fn destroy_stream(&self, stream: RawStream) {
        // SAFETY: a stream of this runtime, destroyed once.
        let _ = unsafe { (self.functions.stream_destroy)(stream.0 as *mut c_void) };
    }

    fn synchronize(&self, ordinal: u16, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: a live stream.
        let code = unsafe { (self.functions.stream_synchronize)(stream.0 as *mut c_void) };
        self.check(ordinal, "hipStreamSynchronize", code)
    }

    fn device_of_stream(&self, ordinal: u16, stream: RawStream) -> Result<u16, DeviceError> {
        let Some(stream_device) = self.functions.stream_device else { return Ok(ordinal) };
        let mut device: c_int = 0;
        // SAFETY: the caller's word that the stream is live; the runtime stores one integer.
        let code = unsafe { stream_device(stream.0 as *mut c_void, &raw mut device) };
        self.check(ordinal, "hipStreamGetDevice", code)?;
        Ok(u16::try_from(device).unwrap_or(ordinal))
    }

    fn wait(&self, ordinal: u16, stream: RawStream, event: RawEvent) -> Result<(), DeviceError> {
        // SAFETY: a live stream and a live event.
        let code = unsafe { (self.functions.stream_wait)(stream.0 as *mut c_void, event.0 as *mut c_void, 0) };
        self.check(ordinal, "hipStreamWaitEvent", code)
    }

    fn create_event(&self, ordinal: u16) -> Result<RawEvent, DeviceError> {
        let mut event: *mut c_void = ptr::null_mut();
        // SAFETY: the runtime stores one pointer.
        let code = unsafe { (self.functions.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.check(ordinal, "hipEventCreateWithFlags", code)?;
        Ok(RawEvent(event as u64))
    }

    fn destroy_event(&self, event: RawEvent) {
        // SAFETY: an event of this runtime, destroyed once.
        let _ = unsafe { (self.functions.event_destroy)(event.0 as *mut c_void) };
    }

    fn record(&self, ordinal: u16, event: RawEvent, stream: RawStream) -> Result<(), DeviceError> {
        // SAFETY: a live event; the stream is ours and live, or a caller's, whose word for that is its contract.
        let code = unsafe { (self.functions.event_record)(event.0 as *mut c_void, stream.0 as *mut c_void) };
        self.check(ordinal, "hipEventRecord", code)
    }

    fn is_done(&self, ordinal: u16, event: RawEvent) -> Result<bool, DeviceError> {
        // SAFETY: a live event.
        match unsafe { (self.functions.event_query)(event.0 as *mut c_void) } {
            NOT_READY => Ok(false),
            // As in CUDA: a later call tells.
            code if Captures::forbids(code) => Ok(false),
            code => self.check(ordinal, "hipEventQuery", code).map(|()| true),
        }
    }

    unsafe fn copy(&self, ordinal: u16, stream: RawStream, copies: &[RawCopy]) -> Result<(), DeviceError> {
        for &RawCopy { to, from, bytes, direction } in copies {
            let kind = match direction {
                Direction::ToDevice => 1,
                Direction::ToHost => 2,
                Direction::Between => 3,
            };
            let (to, from, stream) = (to as *mut c_void, from as *const c_void, stream.0 as *mut c_void);
            // SAFETY: by this function's contract.
            let code = unsafe { (self.functions.copy)(to, from, bytes, kind, stream) };
            self.check(ordinal, "hipMemcpyAsync", code)?;
        }
        Ok(())
    }

    fn allocate(&self, ordinal: u16, bytes: u64) -> Result<u64, DeviceError> {
        let mut address: *mut c_void = ptr::null_mut();
        // SAFETY: the runtime stores one address.
        let code = unsafe { (self.functions.allocate)(&raw mut address, bytes as usize) };
        self.check(ordinal, "hipMalloc", code)?;
        Ok(address as u64)
    }

    fn free(&self, address: u64) {
        // SAFETY: allocated before, freed once.
        let _ = unsafe { (self.functions.free)(address as *mut c_void) };
    }

    unsafe fn pin(&self, ordinal: u16, address: u64, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: by this function's contract.
        let code = unsafe { (self.functions.host_register)(address as *mut c_void, bytes, HOST_PORTABLE) };
        self.check(ordinal, "hipHostRegister", code)
    }

    fn unpin(&self, address: u64) {
        // SAFETY: registered before, once.
        let _ = unsafe { (self.functions.host_unregister)(address as *mut c_void) };
    }

    fn export_dma_buf(&self, ordinal: u16, address: u64, bytes: u64) -> Result<(OwnedFd, u64), DeviceError> {
        let id = id(ordinal);
        let dma_bufs = self.dma_bufs.as_ref();
        let dma_bufs = dma_bufs.ok_or(DeviceError::Unsupported { id, what: "dma-buf descriptors: no HSA runtime" })?;
        let (mut fd, mut offset): (c_int, u64) = (-1, 0);
        // SAFETY: the runtime stores one descriptor and one offset.
        let code = unsafe { (dma_bufs.export)(address as *const c_void, bytes as usize, &raw mut fd, &raw mut offset) };
        if code != SUCCESS || fd < 0 {
            let (call, name) = ("hsa_amd_portable_export_dmabuf", "an HSA status".to_owned());
            return Err(DeviceError::Call { id, call, code, name });
        }
        // SAFETY: a new descriptor, which belongs to the caller.
        Ok((unsafe { OwnedFd::from_raw_fd(fd) }, offset))
    }

    fn flush_writes(&self, _ordinal: u16) -> Result<(), DeviceError> {
        Ok(())
    }

    fn share(&self, ordinal: u16, base: u64) -> Result<[u8; HANDLE_BYTES], DeviceError> {
        let mut handle = IpcHandle([0; HANDLE_BYTES]);
        // SAFETY: the runtime stores one handle.
        let code = unsafe { (self.functions.ipc_get)(&raw mut handle, base as *mut c_void) };
        self.check(ordinal, "hipIpcGetMemHandle", code)?;
        Ok(handle.0)
    }

    fn map(&self, ordinal: u16, handle: &[u8; HANDLE_BYTES]) -> Result<u64, DeviceError> {
        let mut address: *mut c_void = ptr::null_mut();
        // SAFETY: the runtime stores one address, and checks the handle.
        let code = unsafe { (self.functions.ipc_open)(&raw mut address, IpcHandle(*handle), IPC_LAZY_PEER_ACCESS) };
        self.check(ordinal, "hipIpcOpenMemHandle", code)?;
        Ok(address as u64)
    }

    fn unmap(&self, address: u64) {
        // SAFETY: opened before, closed once.
        let _ = unsafe { (self.functions.ipc_close)(address as *mut c_void) };
    }
}
