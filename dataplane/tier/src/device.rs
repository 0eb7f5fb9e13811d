//! Device of a tier: its layout and that of the staging area, the jobs in flight on it, and whether it takes writes.
//!
//! This is the lowest component: all code that reads or writes the device gets it as an argument. A job's [`Owner`]
//! states its purpose; the shell dispatches its completion accordingly.

mod jobs;

pub(crate) use jobs::{Job, Owner};

use crate::config::{Layout, TierConfig};
use crate::format::{FIRST_SEGMENT_OFFSET, Shape};
use crate::ops::{Action, BlockOp, Fault, OpId, Pieces, Priority};
use crate::types::errors::{OpenError, Reason};
use jobs::Jobs;
use kvplane_proto::narrowing::to_u32;

/// Segment headers that are read, or zeroed, at a time.
pub(crate) const HEADER_PLACES: u32 = 16;

/// The device of a tier.
#[derive(Debug)]
pub(crate) struct Device {
    config: TierConfig,
    layout: Layout,
    /// Uuid of the device; 0 until it is known.
    uuid: u128,
    jobs: Jobs,
    degraded: Option<Reason>,
}

impl Device {
    /// Creates a device with valid limits; nothing else is known of it.
    pub(crate) fn new(config: TierConfig) -> Self {
        let jobs = Layout::reads_most(&config) + config.groups + config.scan_buffers + 2 * HEADER_PLACES + 12;
        Self {
            layout: Layout::of(&config),
            uuid: 0,
            jobs: Jobs::new(jobs, config.ops_in_flight, config.max_op_bytes),
            degraded: None,
            config,
        }
    }

    pub(crate) const fn config(&self) -> &TierConfig {
        &self.config
    }

    /// Returns the layout of the staging area.
    pub(crate) const fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) const fn uuid(&self) -> u128 {
        self.uuid
    }

    /// Sets the uuid of the device.
    pub(crate) const fn identify(&mut self, uuid: u128) {
        self.uuid = uuid;
    }

    /// Returns the reason why no writes are taken, if there is one.
    pub(crate) const fn degraded(&self) -> Option<Reason> {
        self.degraded
    }

    pub(crate) const fn is_writable(&self) -> bool {
        self.degraded.is_none()
    }

    pub(crate) const fn is_gone(&self) -> bool {
        matches!(self.degraded, Some(Reason::Gone))
    }

    /// Returns true if records can be read: the device is neither gone nor refused.
    pub(crate) const fn is_readable(&self) -> bool {
        !matches!(self.degraded, Some(Reason::Gone | Reason::Refused(_)))
    }

    /// Returns true if the device is blank and stays so.
    pub(crate) fn is_blank(&self) -> bool {
        self.degraded == Some(Reason::Refused(OpenError::Unwritable))
    }

    /// Stops all writes; returns false if the device had this or a worse reason before.
    pub(crate) fn degrade(&mut self, reason: Reason) -> bool {
        let is_worse = self.degraded.is_none() || reason == Reason::Gone && self.degraded != Some(Reason::Gone);
        if is_worse {
            self.degraded = Some(reason);
        }
        is_worse
    }

    /// Refuses the device.
    pub(crate) const fn refuse(&mut self, error: OpenError) {
        self.degraded = Some(Reason::Refused(error));
    }

    pub(crate) const fn block(&self) -> u64 {
        self.config.block_bytes as u64
    }

    /// Returns the segment that contains this offset of the device.
    pub(crate) fn segment_of(&self, offset: u64) -> u32 {
        to_u32((offset - FIRST_SEGMENT_OFFSET) / self.config.segment_bytes)
    }

    /// Returns the offset of a segment.
    pub(crate) const fn segment_at(&self, segment: u32) -> u64 {
        FIRST_SEGMENT_OFFSET + segment as u64 * self.config.segment_bytes
    }

    /// Returns the offset of a page of a segment's footer.
    pub(crate) const fn page_at(&self, segment: u32, page: u32) -> u64 {
        self.segment_at(segment + 1) - (page as u64 + 1) * self.config.footer_page_bytes as u64
    }

    /// Returns the bytes of a record of this shape.
    pub(crate) const fn record_bytes(&self, shape: Shape) -> u64 {
        shape.record_bytes(self.config.chunk_bytes, self.config.block_bytes)
    }

    /// Returns the number of headers that are read at a time, each into a block of the scan area.
    pub(crate) fn header_places(&self) -> u32 {
        let area = u64::from(self.config.scan_bytes) * u64::from(self.config.scan_buffers);
        to_u32(u64::from(HEADER_PLACES).min(area / self.block()))
    }

    pub(crate) fn read(&mut self, owner: Owner, offset: u64, pieces: Pieces, priority: Priority) {
        self.jobs.submit(Job { owner, action: Action::Read, offset, pieces, priority });
    }

    pub(crate) fn write(&mut self, owner: Owner, offset: u64, pieces: Pieces) {
        self.submit_write(owner, offset, pieces, false);
    }

    /// Writes data that must be durable when the write completes.
    pub(crate) fn write_durably(&mut self, owner: Owner, offset: u64, pieces: Pieces) {
        self.submit_write(owner, offset, pieces, true);
    }

    fn submit_write(&mut self, owner: Owner, offset: u64, pieces: Pieces, durable: bool) {
        let (action, priority) = (Action::Write { durable }, Priority::Commit);
        self.jobs.submit(Job { owner, action, offset, pieces, priority });
    }

    pub(crate) fn flush(&mut self) {
        let (action, pieces, priority) = (Action::Flush, Pieces::default(), Priority::Commit);
        self.jobs.submit(Job { owner: Owner::Flush, action, offset: 0, pieces, priority });
    }

    /// Returns the next operation for the host.
    pub(crate) fn next_op(&mut self) -> Option<BlockOp> {
        self.jobs.next()
    }

    /// Completes an operation; returns the owner of its job if the job is complete with it.
    pub(crate) fn complete(&mut self, id: OpId, result: Result<u32, Fault>) -> Option<(Owner, Result<(), Fault>)> {
        self.jobs.complete(id, result)
    }

    /// Returns the number of completions of unknown operations.
    pub(crate) const fn stale_completions(&self) -> u64 {
        self.jobs.stale()
    }

    /// Returns true if no job is in flight.
    pub(crate) const fn is_idle(&self) -> bool {
        self.jobs.is_idle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> Device {
        Device::new(TierConfig::for_device(1 << 30, 4096))
    }

    #[test]
    fn a_degraded_device_stays_degraded_and_a_gone_one_is_worse() {
        let mut device = device();
        assert!(device.is_writable() && device.is_readable());
        assert!(device.degrade(Reason::NoSpace));
        assert!(!device.degrade(Reason::DeviceReadOnly), "it was so before");
        assert_eq!((device.degraded(), device.is_readable()), (Some(Reason::NoSpace), true));
        assert!(device.degrade(Reason::Gone) && !device.degrade(Reason::Gone));
        assert!(!device.degrade(Reason::NoSpace) && device.is_gone() && !device.is_readable());
    }

    #[test]
    fn offsets_map_to_their_segments_and_footers_end_them() {
        let device = device();
        let config = device.config();
        for segment in [0, 1, config.segments - 1] {
            let (start, end) = (device.segment_at(segment), device.segment_at(segment + 1));
            assert_eq!((device.segment_of(start), device.segment_of(end - 1)), (segment, segment));
            assert_eq!(device.page_at(segment, 0), end - u64::from(config.footer_page_bytes));
        }
        assert_eq!(device.segment_at(config.segments), config.device_bytes());
    }
}
