//! Completion queues: creation, polling, arming, and sharing by queue pairs.

use super::channel::CompletionChannel;
use super::completion::{Entry, PollResult, QueueId};
use super::context::Context;
use super::error::VerbsError;
use super::ffi::*;
use libc::c_int;
use std::fmt;
use std::io;
use std::mem;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Queue to which a device reports completed requests. Queue pairs keep it alive. One owner polls it; the owner may
/// move between threads.
pub struct CompletionQueue {
    inner: Arc<Queue>,
}

pub(crate) struct Queue {
    raw: NonNull<ibv_cq>,
    poll: PollCq,
    capacity: u32,
    /// Capacity reserved by the queue pairs on it: completions that they can have outstanding.
    promised: AtomicU32,
    places: Mutex<Places>,
    channel: Option<CompletionChannel>,
    context: Arc<Context>,
}

// SAFETY: queues may be used from several threads at the same time.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

/// Ids of queue pairs that are in use.
#[derive(Default)]
struct Places {
    generations: Vec<u16>,
    free: Vec<u16>,
}

impl CompletionQueue {
    /// Creates a queue for `entries` outstanding completions. `token` identifies it on its channel.
    ///
    /// # Errors
    /// When the device supports fewer entries, or no more queues; or the channel belongs to another device.
    pub fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<(&CompletionChannel, u64)>,
    ) -> Result<Self, VerbsError> {
        context.limit("entries of a completion queue", entries.into(), context.limits().completion_entries.into())?;
        if channel.is_some_and(|(channel, _)| !channel.is_of(context)) {
            return Err(VerbsError::NotOffered { device: context.name().to_owned(), what: "another device's channel" });
        }
        let (token, channel) = channel.map_or((0, None), |(channel, token)| (token, Some(channel.clone())));
        let raw_channel = channel.as_ref().map_or(std::ptr::null_mut(), CompletionChannel::raw);
        let token = std::ptr::without_provenance_mut(token as usize);
        let entries = entries.max(1);
        // SAFETY: context and channel are alive and stay so; the token is returned and never dereferenced.
        let raw = unsafe { (context.functions().create_cq)(context.raw(), entries as c_int, token, raw_channel, 0) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(context.refused(format!("create a queue of {entries} completions"), io::Error::last_os_error()));
        };
        // SAFETY: the queue is alive, and its function table was filled when the device was opened.
        let poll = unsafe { (*(*raw.as_ptr()).context).ops.poll_cq };
        Ok(Self {
            inner: Arc::new(Queue {
                raw,
                poll,
                capacity: entries,
                promised: AtomicU32::new(0),
                places: Mutex::default(),
                channel,
                context: Arc::clone(context),
            }),
        })
    }

    /// Polls the available completions, up to the length of `entries`. An empty result is not an error.
    ///
    /// # Errors
    /// When the queue has failed: it overflowed, or the device is gone.
    pub fn poll<'a>(&'a mut self, entries: &'a mut [Entry]) -> Result<PollResult<'a>, VerbsError> {
        let room = c_int::try_from(entries.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is alive; the device writes at most as many entries as the array has.
        let count = unsafe { (self.inner.poll)(self.inner.raw.as_ptr(), room, entries.as_mut_ptr().cast()) };
        match usize::try_from(count) {
            Ok(count) => Ok(PollResult::new(&entries[..count], &self.inner)),
            Err(_) => {
                let source = io::Error::from_raw_os_error(count.saturating_neg());
                Err(self.inner.context.refused("poll a completion queue", source))
            }
        }
    }

    /// Requests an event on the channel for the next completion. Earlier completions may not cause one: poll once more
    /// after arming, before parking.
    ///
    /// # Errors
    /// When the queue was created without a channel, or the device is gone.
    pub fn arm(&self) -> Result<(), VerbsError> {
        let queue = &*self.inner;
        if queue.channel.is_none() {
            return Err(VerbsError::NotOffered {
                device: queue.context.name().to_owned(),
                what: "events of a completion queue without a channel",
            });
        }
        // SAFETY: the queue is alive.
        let result = unsafe { ((*(*queue.raw.as_ptr()).context).ops.req_notify_cq)(queue.raw.as_ptr(), 0) };
        match result {
            0 => Ok(()),
            error => Err(queue.context.refused("arm a queue", io::Error::from_raw_os_error(error.saturating_abs()))),
        }
    }

    /// Returns the capacity in completions.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner.capacity
    }

    pub(crate) fn inner(&self) -> &Arc<Queue> {
        &self.inner
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({} entries of {})", self.inner.capacity, self.inner.context.name())
    }
}

impl Queue {
    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Allocates an id for a queue pair that can have `completions` outstanding.
    pub(crate) fn admit(&self, completions: u32) -> Result<QueueId, VerbsError> {
        let promise = |promised: u32| promised.checked_add(completions).filter(|sum| *sum <= self.capacity);
        if let Err(promised) = self.promised.fetch_update(Ordering::Relaxed, Ordering::Relaxed, promise) {
            let left = self.capacity - promised;
            self.context.limit("completions of a queue pair", completions.into(), left.into())?;
        }
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let index = places.free.pop().or_else(|| {
            let index = u16::try_from(places.generations.len()).ok()?;
            places.generations.push(0);
            Some(index)
        });
        let Some(index) = index else {
            self.promised.fetch_sub(completions, Ordering::Relaxed);
            let most = u64::from(u16::MAX) + 1;
            return Err(VerbsError::Limit {
                device: self.context.name().to_owned(),
                what: "queue pairs on one completion queue",
                wanted: most + 1,
                offered: most,
            });
        };
        Ok(QueueId { index, generation: places.generations[usize::from(index)] })
    }

    /// Frees the id of a destroyed queue pair.
    pub(crate) fn release(&self, id: QueueId, completions: u32) {
        self.promised.fetch_sub(completions, Ordering::Relaxed);
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = &mut places.generations[usize::from(id.index)];
        // An index whose generations are used up is not reused.
        if let Some(next) = generation.checked_add(1) {
            *generation = next;
            places.free.push(id.index);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the queue pairs on it held an Arc of it, so none is left; destroyed once.
        if unsafe { (self.context.functions().destroy_cq)(self.raw.as_ptr()) } != 0 {
            mem::forget((Arc::clone(&self.context), self.channel.take()));
        }
    }
}
