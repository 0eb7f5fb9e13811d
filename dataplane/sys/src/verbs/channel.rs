//! Completion channels: descriptors on which a thread parks until a completion queue has an event.

use super::context::{Context, set_nonblocking};
use super::error::VerbsError;
use super::ffi::*;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Channel on which armed completion queues signal new completions: a descriptor to park on. Clones refer to the same
/// channel. Any thread may use it.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<Channel>,
}

struct Channel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: channels may be used from several threads at the same time.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the queues on the channel held an Arc of it, so none is left; destroyed once.
        if unsafe { (self.context.functions().destroy_comp_channel)(self.raw.as_ptr()) } != 0 {
            mem::forget(Arc::clone(&self.context));
        }
    }
}

impl CompletionChannel {
    pub(crate) fn raw(&self) -> *mut ibv_comp_channel {
        self.inner.raw.as_ptr()
    }

    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.inner.context, context)
    }

    /// Creates a channel of the device.
    ///
    /// # Errors
    /// When there are too many open files.
    pub fn new(context: &Arc<Context>) -> Result<Self, VerbsError> {
        // SAFETY: the context is open; the library returns a new channel for this caller, or null.
        let raw = unsafe { (context.functions().create_comp_channel)(context.raw()) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(context.refused("create a completion channel", io::Error::last_os_error()));
        };
        let channel = Self { inner: Arc::new(Channel { raw, context: Arc::clone(context) }) };
        // SAFETY: the channel is alive; its descriptor does not change.
        let fd = unsafe { raw.as_ref().fd };
        set_nonblocking(fd).map_err(|source| context.refused("make a channel nonblocking", source))?;
        Ok(channel)
    }

    /// Returns the token of a queue that has signalled an event, if any. The caller arms the queue again, then polls
    /// it.
    ///
    /// # Errors
    /// When the channel cannot be read: the device is gone.
    pub fn take(&self) -> Result<Option<u64>, VerbsError> {
        let context = &self.inner.context;
        let (mut queue, mut token) = (std::ptr::null_mut(), std::ptr::null_mut());
        let raw = self.inner.raw.as_ptr();
        // SAFETY: the library writes two pointers; the descriptor is nonblocking.
        if unsafe { (context.functions().get_cq_event)(raw, &raw mut queue, &raw mut token) } != 0 {
            let source = io::Error::last_os_error();
            return match source.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(context.refused("read a completion channel", source)),
            };
        }
        // SAFETY: a queue with an unacknowledged event is alive: destroying it waits.
        unsafe { (context.functions().ack_cq_events)(queue, 1) };
        Ok(Some(token.addr() as u64))
    }
}

/// Readable when [`CompletionChannel::take`] has an event.
impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel, which the borrow holds.
        unsafe { BorrowedFd::borrow_raw(self.inner.raw.as_ref().fd) }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionChannel").field(&self.inner.context.name()).finish()
    }
}
