//! Opening segments of others, and keeping what is known of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_engine::cpu;
use kvplane_proto::Status;
use kvplane_proto::client::{PeerId, Request};

use super::TransferEngine;
use super::batch::{Batch, Parts, State};
use super::driver::Work;
use super::segment::{BufferInfo, Remote, SegmentHandle, SegmentInfo, address_of};
use crate::error::Error;

/// How long a peer has to describe its segment.
const DESCRIBE: Duration = Duration::from_secs(5);

impl TransferEngine {
    /// Opens the segment of the engine with this name; ours is [`SegmentHandle::LOCAL`]. One that is open already is
    /// given again, without asking its owner.
    ///
    /// # Errors
    /// When the name is no address, or nobody answers there.
    pub fn open_segment(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if name == self.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        {
            let mut table = self.segments.write();
            if let Some((handle, remote)) = table.by_name(name)
                && !remote.is_stale()
            {
                table.reopen(handle);
                return Ok(handle);
            }
        }
        self.open_segment_no_cache(name)
    }

    /// The same, asking its owner in any case.
    ///
    /// # Errors
    /// As [`Self::open_segment`].
    pub fn open_segment_no_cache(&self, name: &str) -> Result<SegmentHandle, Error> {
        let name = name.trim_start_matches('/');
        if name == self.name() {
            return Ok(SegmentHandle::LOCAL);
        }
        let remote = self.describe(name, DESCRIBE)?;
        self.segments.write().open(Arc::new(remote))
    }

    /// Takes back one opening; the last one's going forgets the segment. Batches that are in flight go on.
    ///
    /// # Errors
    /// When the handle is not open.
    pub fn close_segment(&self, handle: SegmentHandle) -> Result<(), Error> {
        match handle == SegmentHandle::LOCAL || self.segments.write().close(handle) {
            true => Ok(()),
            false => Err(unknown(handle)),
        }
    }

    /// What is known of a segment, without asking its owner.
    ///
    /// # Errors
    /// When the handle is not open.
    pub fn segment_info(&self, handle: SegmentHandle) -> Result<SegmentInfo, Error> {
        if handle == SegmentHandle::LOCAL {
            let map = self.memory.read();
            let shared_memory = self.config.shared_memory;
            let buffers = map.iter().map(|buffer| BufferInfo {
                address: buffer.address,
                bytes: buffer.bytes,
                shareable: shared_memory && buffer.region.fd().is_some(),
                location: Some(buffer.location.clone()),
            });
            return Ok(SegmentInfo { name: self.name(), buffers: buffers.collect() });
        }
        self.segments.read().get(handle).map(|remote| remote.info()).ok_or_else(|| unknown(handle))
    }

    /// Asks the owners of all open segments what they hold now.
    ///
    /// # Errors
    /// The first owner's that does not answer; the others are asked nevertheless.
    pub fn sync_segments(&self) -> Result<(), Error> {
        let names = self.segments.read().names();
        let mut result = Ok(());
        for name in names {
            let Some((handle, _)) = self.segments.read().by_name(&name).map(|(handle, remote)| (handle, remote.peer))
            else {
                continue;
            };
            result = result.and(self.refresh(handle));
        }
        result
    }

    /// Asks a segment's owner again what it holds.
    pub(super) fn refresh(&self, handle: SegmentHandle) -> Result<(), Error> {
        let name = self.segments.read().get(handle).map(|remote| remote.name.clone());
        let name = name.ok_or_else(|| unknown(handle))?;
        let remote = self.describe(&name, DESCRIBE)?;
        self.segments.write().renew(handle, Arc::new(remote));
        Ok(())
    }

    /// Whether somebody answers under this name, and how soon.
    ///
    /// # Errors
    /// When the name is no address, or nobody answers there within `timeout`.
    pub fn probe(&self, name: &str, timeout: Duration) -> Result<Duration, Error> {
        let start = Instant::now();
        let name = name.trim_start_matches('/');
        if name != self.name() {
            self.describe(name, timeout)?;
        }
        Ok(start.elapsed())
    }

    fn describe(&self, name: &str, timeout: Duration) -> Result<Remote, Error> {
        let address = address_of(name, &self.directory, self.config.shared_memory)?;
        let peer = self.segments.write().peer(&address);
        let asked = Remote::unknown(name, peer, address.clone());
        let driver = self.driver();
        driver.admit(1)?;
        let parts =
            Parts { tasks: 1, slices: 1, remotes: vec![Arc::new(asked)], wants_description: true, ..Parts::default() };
        let state = Arc::new(State::new(self.next_batch(), parts));
        let deadline_ns = cpu::monotonic_ns().saturating_add(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        driver.submit(&state, Work { requests: vec![Request::OpenSegment(PeerId(peer))], deadline_ns });
        let batch = Batch::new(state, Arc::clone(driver));
        batch.wait();
        let status = batch.task_status(0).outcome.unwrap_or(Status::Cancelled);
        if status != Status::Ok {
            let cause = batch.problem().map(str::to_owned);
            return Err(Error::Status { what: format!("open segment {name}"), status, cause });
        }
        Remote::new(name, peer, address, batch.state().description.get().map_or(&[], Vec::as_slice))
    }
}

pub(super) fn unknown(handle: SegmentHandle) -> Error {
    Error::Argument(format!("segment {} is not open", handle.to_bits()))
}
