//! Open devices: limits, ports, addresses and events.

use crate::verbs::device::provider::Functions;
use crate::verbs::error::VerbsError;
use crate::verbs::events::AsyncEvent;
use crate::verbs::ffi::*;
use crate::verbs::gid::{self, GidEntry};
use crate::verbs::port::PortAttributes;
use libc::c_int;
use std::fmt;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Limits and capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Number of ports, which are numbered from 1.
    pub ports: u8,
    /// Limit of queue pairs.
    pub queue_pairs: u32,
    /// Limit of requests in one queue.
    pub queue_depth: u32,
    /// Limit of scatter/gather entries of one request.
    pub pieces: u32,
    /// Limit of entries of one completion queue.
    pub completion_entries: u32,
    /// Limit of requests in one shared receive queue; 0 if those are not supported.
    pub shared_depth: u32,
    /// Limit of reads that a queue pair serves concurrently.
    pub reads_served: u8,
    /// Limit of reads that a queue pair has in flight.
    pub reads_started: u8,
    /// Largest memory region, in bytes.
    pub memory_bytes: u64,
    /// True if memory can be registered without pinning it (on-demand paging), for reliable connections in both
    /// directions.
    pub on_demand: bool,
    /// True if relaxed ordering can be requested (a device without support ignores it).
    pub relaxed_ordering: bool,
    /// True if the library registers dma-bufs. Support by the device shows when it is tried.
    pub dma_buf: bool,
    /// Vendor of the device.
    pub vendor_id: u32,
}

/// An open device. Objects created on it keep it open. Any thread may use it.
pub struct Context {
    raw: NonNull<ibv_context>,
    functions: &'static Functions,
    name: String,
    sysfs_path: String,
    limits: DeviceLimits,
}

// SAFETY: contexts of verbs may be used from several threads at the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn new(
        name: &str,
        sysfs_path: &str,
        raw: NonNull<ibv_context>,
        functions: &'static Functions,
    ) -> Result<Arc<Self>, VerbsError> {
        let limits = DeviceLimits {
            ports: 0,
            queue_pairs: 0,
            queue_depth: 0,
            pieces: 0,
            completion_entries: 0,
            shared_depth: 0,
            reads_served: 0,
            reads_started: 0,
            memory_bytes: 0,
            on_demand: false,
            relaxed_ordering: functions.reg_mr_iova2.is_some(),
            dma_buf: functions.reg_dmabuf_mr.is_some(),
            vendor_id: 0,
        };
        // From here on, dropping the context closes the device.
        let mut context = Self { raw, functions, name: name.to_owned(), sysfs_path: sysfs_path.to_owned(), limits };
        context.query_limits()?;
        set_nonblocking(context.async_fd()).map_err(|source| context.refused("make events nonblocking", source))?;
        Ok(Arc::new(context))
    }

    fn query_limits(&mut self) -> Result<(), VerbsError> {
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and the library fills the struct, for which all-zero is valid.
        let (result, attributes) = unsafe {
            let result = (self.functions().query_device)(self.raw.as_ptr(), attributes.as_mut_ptr());
            (result, attributes.assume_init())
        };
        if result != 0 {
            return Err(self.refused("report its limits", io::Error::from_raw_os_error(result)));
        }
        let count = |value: c_int| u32::try_from(value).unwrap_or(0);
        let small = |value: c_int| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        self.limits = DeviceLimits {
            ports: attributes.phys_port_cnt,
            queue_pairs: count(attributes.max_qp),
            queue_depth: count(attributes.max_qp_wr),
            pieces: count(attributes.max_sge),
            completion_entries: count(attributes.max_cqe),
            shared_depth: if attributes.max_srq > 0 { count(attributes.max_srq_wr) } else { 0 },
            reads_served: small(attributes.max_qp_rd_atom),
            reads_started: small(attributes.max_qp_init_rd_atom),
            memory_bytes: attributes.max_mr_size,
            on_demand: self.query_on_demand(),
            vendor_id: attributes.vendor_id,
            ..self.limits
        };
        Ok(())
    }

    fn query_on_demand(&self) -> bool {
        let Some((query, _)) = self.extension(offset_of!(verbs_context, query_device_ex), |extended| {
            // SAFETY: the field lies inside the size that the context states; see `extension`.
            unsafe { (*extended).query_device_ex }
        }) else {
            return false;
        };
        let mut attributes = MaybeUninit::<ibv_device_attr_ex>::zeroed();
        // SAFETY: the library fills at most the passed size; all-zero is valid.
        let (result, attributes) = unsafe {
            let place = attributes.as_mut_ptr();
            let result = query(self.raw.as_ptr(), std::ptr::null(), place, size_of::<ibv_device_attr_ex>());
            (result, attributes.assume_init())
        };
        result == 0
            && attributes.odp_general_caps & ODP_SUPPORT != 0
            && attributes.odp_rc_caps & ODP_RC_ALL == ODP_RC_ALL
    }

    /// Returns a function of the context's extension, if the context has one that is large enough.
    fn extension<F>(&self, offset: usize, field: impl Fn(*const verbs_context) -> Option<F>) -> Option<(F, usize)> {
        // SAFETY: the context is open; the two fields are plain data.
        let extended = unsafe { (*self.raw.as_ptr()).abi_compat } == EXTENDED;
        if !extended {
            return None;
        }
        let start = self.raw.as_ptr().cast::<u8>().wrapping_sub(offset_of!(verbs_context, context));
        let start = start.cast::<verbs_context>();
        // SAFETY: an extended context is at the end of a verbs_context, directly behind its size.
        let size = unsafe { (*start).size };
        let reaches = size >= size_of::<verbs_context>() - offset;
        if reaches { field(start).map(|function| (function, size)) } else { None }
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    pub(crate) fn refused(&self, what: impl Into<String>, source: io::Error) -> VerbsError {
        VerbsError::Refused { device: self.name.clone(), what: what.into(), source }
    }

    pub(crate) fn limit(&self, what: &'static str, wanted: u64, offered: u64) -> Result<(), VerbsError> {
        if wanted <= offered {
            return Ok(());
        }
        Err(VerbsError::Limit { device: self.name.clone(), what, wanted, offered })
    }

    /// Returns the device name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limits and capabilities of the device.
    #[must_use]
    pub fn limits(&self) -> DeviceLimits {
        self.limits
    }

    /// Queries a port's current state, speed and addresses. Ports are numbered from 1.
    ///
    /// # Errors
    /// When the port does not exist, or the device is gone.
    pub fn port(&self, port: u8) -> Result<PortAttributes, VerbsError> {
        let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
        let place = attributes.as_mut_ptr();
        let sized = self.extension(offset_of!(verbs_context, query_port), |extended| {
            // SAFETY: the field lies inside the size that the context states; see `extension`.
            unsafe { (*extended).query_port }
        });
        // SAFETY: the library fills at most the passed size, or the compatible front of it; all-zero is valid.
        let (result, attributes) = unsafe {
            let result = match sized {
                Some((query, _)) => query(self.raw.as_ptr(), port, place, size_of::<ibv_port_attr>()),
                None => (self.functions().query_port)(self.raw.as_ptr(), port, place),
            };
            (result, attributes.assume_init())
        };
        match result {
            0 => Ok(PortAttributes::from_raw(port, &attributes)),
            error => Err(self.refused(format!("describe port {port}"), io::Error::from_raw_os_error(error.abs()))),
        }
    }

    /// Returns the first active port.
    ///
    /// # Errors
    /// When none is active; the error names each port's state.
    pub fn active_port(&self) -> Result<PortAttributes, VerbsError> {
        let mut states = Vec::new();
        for number in 1..=self.limits.ports {
            let port = self.port(number)?;
            if port.is_active() {
                return Ok(port);
            }
            states.push(format!("port {number} is {:?}", port.state));
        }
        let ports = if states.is_empty() { "it has none".to_owned() } else { states.join(", ") };
        Err(VerbsError::NoActivePort { device: self.name.clone(), ports })
    }

    /// Returns the usable addresses of a port, best first: RoCE v2 on IPv4, RoCE v2 on IPv6, RoCE v1, link-local ones.
    ///
    /// # Errors
    /// When there is none.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        let mut entries = self.gid_table(port)?;
        gid::rank_entries(&mut entries);
        if entries.is_empty() {
            return Err(VerbsError::NoGid { device: self.name.clone(), port });
        }
        Ok(entries)
    }

    fn gid_table(&self, port: u8) -> Result<Vec<GidEntry>, VerbsError> {
        if let Some(query) = self.functions().query_gid_table {
            let total: usize =
                (1..=self.limits.ports).filter_map(|port| self.port(port).ok()).map(|port| port.gids as usize).sum();
            let nothing = ibv_gid_entry { gid: [0; 2], gid_index: 0, port_num: 0, gid_type: 0, ndev_ifindex: 0 };
            let mut raw = vec![nothing; total];
            // SAFETY: the library writes at most as many entries as the array has.
            let count = unsafe { query(self.raw.as_ptr(), raw.as_mut_ptr(), raw.len(), 0, size_of::<ibv_gid_entry>()) };
            if let Ok(count) = usize::try_from(count) {
                let of_port = raw[..count.min(total)].iter().filter(|entry| entry.port_num == u32::from(port));
                return Ok(of_port.filter_map(GidEntry::from_raw).collect());
            }
        }
        // Fallback for libraries before rdma-core 32, or a kernel that refused.
        Ok(gid::from_sysfs(std::path::Path::new(&self.sysfs_path), port))
    }

    /// Returns the next asynchronous event of the device, if any. Any thread may call it; each event is returned once.
    ///
    /// # Errors
    /// When the device's event file cannot be read: the device is gone.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        let mut raw = ibv_async_event { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: the library fills one event; its descriptor is nonblocking.
        let result = unsafe { (self.functions().get_async_event)(self.raw.as_ptr(), &raw mut raw) };
        if result != 0 {
            let source = io::Error::last_os_error();
            return match source.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(self.refused("report its events", source)),
            };
        }
        // SAFETY: an event's element lives until the event is acknowledged: destroying it waits for that.
        let event = unsafe { AsyncEvent::from_raw(&raw) };
        // SAFETY: the event was just taken, and is acknowledged once.
        unsafe { (self.functions().ack_async_event)(&raw mut raw) };
        Ok(Some(event))
    }

    fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open; the field is plain data.
        unsafe { (*self.raw.as_ptr()).async_fd }
    }
}

/// Readable when [`Context::next_event`] has an event; nonblocking, for a [`Poller`](crate::Poller).
impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the context, which the borrow holds.
        unsafe { BorrowedFd::borrow_raw(self.async_fd()) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: objects created on it held an Arc of it, so none is left; closed once.
        unsafe { (self.functions().close_device)(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.name).finish()
    }
}

/// Makes a descriptor nonblocking.
pub(crate) fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: changes a flag of a descriptor that its owner keeps open meanwhile.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
