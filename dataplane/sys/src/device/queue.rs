//! Queue of asynchronous copies on one device: a stream, and an event behind each batch.
//!
//! Batches are done in order. Their owner polls, as it polls any other queue; no call waits for the device, except when
//! a queue with copies in flight is dropped. The queue holds the memory of each copy until the copy is done. If the
//! device is lost, nobody can tell any more whether its copy engines still write, so that memory is never released.

use super::driver::{Direction, Driver, RawCopy, RawEvent, RawStream};
use super::{Device, DeviceError, DeviceId, DeviceMemory, Family};
use crate::region::IoBuf;
use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::sync::Arc;

/// Number of a batch of copies on its queue, in order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyTicket(pub u64);

/// Stream of a caller, whose operations copies wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle {
    /// Vendor interface that the stream belongs to.
    pub family: Family,
    /// Handle as the vendor's interface returns it: a pointer, or one of its special values.
    pub raw: u64,
}

impl StreamHandle {
    /// CUDA's legacy default stream, which waits for all streams of its context that were not created otherwise: the
    /// stream of callers that name none.
    pub const CUDA_DEFAULT: Self = Self { family: Family::Cuda, raw: 1 };

    /// Returns the stream of callers that name none. That of CUDA and HIP waits for all streams of its context that
    /// were not created otherwise; that of Ascend does not wait for any other.
    #[must_use]
    pub const fn default_of(family: Family) -> Self {
        match family {
            Family::Cuda => Self::CUDA_DEFAULT,
            Family::Hip | Family::Npu => Self { family, raw: 0 },
        }
    }

    /// Returns the caller's stream if it is of this family, and the default one otherwise.
    #[must_use]
    pub fn or_default(stream: Option<Self>, family: Family) -> Self {
        stream.filter(|stream| stream.family == family).unwrap_or(Self::default_of(family))
    }
}

/// Range of a [`DeviceMemory`].
#[derive(Clone, Debug)]
pub struct DeviceRange {
    memory: Arc<DeviceMemory>,
    offset: u64,
    bytes: u64,
}

impl DeviceRange {
    /// Creates a range.
    ///
    /// # Panics
    /// When it exceeds the memory.
    #[must_use]
    pub fn new(memory: &Arc<DeviceMemory>, offset: u64, bytes: u64) -> Self {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= memory.bytes()), "{bytes} bytes at {offset} of {}", memory.bytes());
        Self { memory: Arc::clone(memory), offset, bytes }
    }

    /// Returns the part of `bytes` bytes at offset `from`.
    ///
    /// # Panics
    /// When it is not inside the range.
    #[must_use]
    pub fn slice(&self, from: u64, bytes: u64) -> Self {
        let end = from.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {from} of {}", self.bytes);
        Self { memory: Arc::clone(&self.memory), offset: self.offset + from, bytes }
    }

    /// Returns the memory that the range is in.
    #[must_use]
    pub const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the first address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.offset
    }
}

/// Copy between host and device, or inside a device. Both sides have one length.
#[derive(Clone, Debug)]
pub enum DeviceCopy {
    /// From the device to the host.
    ToHost {
        /// Source.
        from: DeviceRange,
        /// Destination; as fast as the bus only if it is pinned.
        to: IoBuf,
    },
    /// From the host to the device.
    ToDevice {
        /// Source.
        from: IoBuf,
        /// Destination.
        to: DeviceRange,
    },
    /// Between two ranges of device memory.
    Between {
        /// Source.
        from: DeviceRange,
        /// Destination.
        to: DeviceRange,
    },
}

impl DeviceCopy {
    /// Returns the ranges of device memory that it reads or writes.
    pub fn ranges(&self) -> impl Iterator<Item = &DeviceRange> {
        let (first, second) = match self {
            Self::ToHost { from: range, .. } | Self::ToDevice { to: range, .. } => (range, None),
            Self::Between { from, to } => (from, Some(to)),
        };
        std::iter::once(first).chain(second)
    }

    /// Returns the copy as the driver takes it.
    fn raw(&self) -> RawCopy {
        let (to, from, [bytes, other], direction) = match self {
            Self::ToHost { from, to } => {
                (address_of(to), from.address(), [from.bytes, to.bytes() as u64], Direction::ToHost)
            }
            Self::ToDevice { from, to } => {
                (to.address(), address_of(from), [to.bytes, from.bytes() as u64], Direction::ToDevice)
            }
            Self::Between { from, to } => (to.address(), from.address(), [to.bytes, from.bytes], Direction::Between),
        };
        assert_eq!(bytes, other, "both sides of a copy have one length");
        RawCopy { to, from, bytes: bytes as usize, direction }
    }
}

fn address_of(buffer: &IoBuf) -> u64 {
    buffer.region().address() + buffer.offset() as u64
}

/// Batch in flight.
struct Batch {
    ticket: CopyTicket,
    event: RawEvent,
    copies: Vec<DeviceCopy>,
}

/// Queue of copies of one device. One thread uses it at a time.
pub struct CopyQueue {
    device: Arc<Device>,
    stream: RawStream,
    in_flight: VecDeque<Batch>,
    /// Events that are in no batch.
    events: Vec<RawEvent>,
    /// Memory of one batch's copies for the driver.
    raw: Vec<RawCopy>,
    next: u64,
    /// Set when the device is lost.
    lost: bool,
}

impl CopyQueue {
    /// Creates a queue with a stream of its own.
    ///
    /// # Errors
    /// When the device is lost or out of memory; in a forked child.
    pub fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        let stream = device.with(|driver, ordinal| driver.create_stream(ordinal))?;
        Ok(Self {
            device: Arc::clone(device),
            stream,
            in_flight: VecDeque::new(),
            events: Vec::new(),
            raw: Vec::new(),
            next: 0,
            lost: false,
        })
    }

    /// Returns the device.
    #[must_use]
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the number of batches in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Makes later copies wait, on the device, for everything that a caller has enqueued on its stream so far. The
    /// stream may be of another device of this one's family.
    ///
    /// # Errors
    /// When the stream is not of this device's family, or its driver does not know it, or it is being captured into a
    /// graph, or a device is lost.
    pub fn wait_for(&mut self, stream: StreamHandle) -> Result<(), DeviceError> {
        let id = self.device.id();
        if stream.family != id.family {
            return Err(DeviceError::Unsupported { id, what: "streams of another vendor" });
        }
        let raw = RawStream(stream.raw);
        let refused = match self.wait_on_own(raw) {
            Err(refused @ DeviceError::Call { .. }) => refused,
            result => return result,
        };
        // Events are recorded in the context of their stream.
        let ordinal = self.device.with(|driver, ordinal| driver.device_of_stream(ordinal, raw))?;
        if ordinal == id.ordinal {
            return Err(refused);
        }
        let other = Device::open(DeviceId { ordinal, ..id })?;
        self.wait_on_other(&other, raw)
    }

    /// Waits for a stream of this device.
    fn wait_on_own(&mut self, stream: RawStream) -> Result<(), DeviceError> {
        let (device, ours, events) = (&self.device, self.stream, &mut self.events);
        device.with(|driver, ordinal| {
            let event = take_event(events, driver, ordinal)?;
            let waits = record_callers(driver, ordinal, event, stream).and_then(|()| driver.wait(ordinal, ours, event));
            // The wait holds on to the recorded point, so the event can be recorded again at once.
            events.push(event);
            waits
        })
    }

    /// Waits for a stream of another device.
    fn wait_on_other(&self, other: &Device, stream: RawStream) -> Result<(), DeviceError> {
        let event = other.with(|driver, ordinal| {
            let event = driver.create_event(ordinal)?;
            let recorded = record_callers(driver, ordinal, event, stream);
            recorded.map(|()| event).inspect_err(|_| driver.destroy_event(event))
        })?;
        let waits = self.device.with(|driver, ordinal| driver.wait(ordinal, self.stream, event));
        // The driver keeps what the wait needs.
        other.with(|driver, _| {
            driver.destroy_event(event);
            Ok(())
        })?;
        waits
    }

    /// Enqueues a batch of copies.
    ///
    /// # Errors
    /// When the driver rejects the copies. Some of them may have been done; none is in flight any more, unless the
    /// device is lost.
    ///
    /// # Panics
    /// When the sides of a copy differ in length.
    pub fn copy(&mut self, copies: Vec<DeviceCopy>) -> Result<CopyTicket, DeviceError> {
        self.raw.clear();
        self.raw.extend(copies.iter().map(DeviceCopy::raw));
        let ticket = CopyTicket(self.next);
        let Self { device, stream, events, raw, .. } = self;
        let result = device.with(|driver, ordinal| {
            let event = take_event(events, driver, ordinal)?;
            // SAFETY: the batch holds the memory until its event is done.
            let enqueued = unsafe { driver.copy(ordinal, *stream, raw) };
            let recorded = enqueued.and_then(|()| driver.record(ordinal, event, *stream));
            if let Err(error) = recorded {
                events.push(event);
                // Some may be in flight.
                return driver.synchronize(ordinal, *stream).map_err(DeviceError::into_lost).and(Err(error));
            }
            Ok(event)
        });
        match result {
            Ok(event) => {
                self.in_flight.push_back(Batch { ticket, event, copies });
                self.next += 1;
                Ok(ticket)
            }
            Err(error) => {
                self.note(&error);
                if self.lost {
                    mem::forget(copies);
                }
                Err(error)
            }
        }
    }

    /// Retires batches that are done and returns the number up to which all are: every ticket below it is done.
    ///
    /// # Errors
    /// When the device is lost; no batch in flight will ever be done then.
    pub fn poll(&mut self) -> Result<CopyTicket, DeviceError> {
        if !self.in_flight.is_empty() {
            let Self { device, in_flight, events, .. } = self;
            let result = device.with(|driver, ordinal| retire(in_flight, events, driver, ordinal));
            // A context that cannot be entered or queried any more tells nothing of its copies, whatever the code.
            result.map_err(DeviceError::into_lost).inspect_err(|error| self.note(error))?;
        }
        Ok(self.in_flight.front().map_or(CopyTicket(self.next), |batch| batch.ticket))
    }

    fn note(&mut self, error: &DeviceError) {
        self.lost |= error.is_lost();
    }
}

/// Records an event behind what a caller has enqueued on its stream.
fn record_callers(driver: &dyn Driver, ordinal: u16, event: RawEvent, stream: RawStream) -> Result<(), DeviceError> {
    if driver.captures().includes(stream) {
        let id = DeviceId { family: driver.family(), ordinal };
        return Err(DeviceError::Unsupported { id, what: "streams that are being captured into a graph" });
    }
    driver.record(ordinal, event, stream)
}

/// Returns an event that is in no batch.
fn take_event(events: &mut Vec<RawEvent>, driver: &dyn Driver, ordinal: u16) -> Result<RawEvent, DeviceError> {
    events.pop().map_or_else(|| driver.create_event(ordinal), Ok)
}

/// Releases the batches at the front whose event is done.
fn retire(
    in_flight: &mut VecDeque<Batch>,
    events: &mut Vec<RawEvent>,
    driver: &dyn Driver,
    ordinal: u16,
) -> Result<(), DeviceError> {
    while let Some(batch) = in_flight.front() {
        if !driver.is_done(ordinal, batch.event)? {
            break;
        }
        events.extend(in_flight.pop_front().map(|batch| batch.event));
    }
    Ok(())
}

impl fmt::Debug for CopyQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyQueue").field("device", &self.device).field("in_flight", &self.in_flight.len()).finish()
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        let Self { device, stream, in_flight, events, .. } = self;
        let ended = device.with(|driver, ordinal| {
            let ended = if in_flight.is_empty() { Ok(()) } else { driver.synchronize(ordinal, *stream) };
            let batches = in_flight.iter().map(|batch| batch.event);
            batches.chain(events.drain(..)).for_each(|event| driver.destroy_event(event));
            driver.destroy_stream(*stream);
            ended
        });
        if ended.is_err() {
            mem::take(in_flight).into_iter().for_each(|batch| mem::forget(batch.copies));
        }
    }
}
