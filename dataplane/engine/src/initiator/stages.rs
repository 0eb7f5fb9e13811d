//! Stages of the devices of one initiator: one for each device on which it has buffers.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_proto::Status;
use kvplane_sys::device::{Device, DeviceError, DeviceId, StreamHandle};

use crate::buffers::FIRST_BUFFER;
use crate::host::ClientHost;
use crate::staging::{Stage, StagingCounters};

/// Owner of copies of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Piece, between its chunk and the device.
    Piece(usize),
    /// Read of a peer's pool.
    Read(usize),
}

/// Stage of a device, and its place among the initiator's buffers.
pub(super) struct DeviceStage {
    pub(super) device: Arc<Device>,
    pub(super) stage: Stage<Step>,
    /// Index of its region.
    pub(super) buffer: u32,
    /// Number of buffers on the device.
    buffers: usize,
}

/// Stages by device.
#[derive(Default)]
pub(super) struct DeviceStages {
    open: BTreeMap<DeviceId, DeviceStage>,
    /// Counters of stages that were closed.
    closed: BTreeMap<DeviceId, StagingCounters>,
}

impl DeviceStages {
    /// Counts a buffer on a device, whose stage is opened for the first one.
    ///
    /// # Errors
    /// If the stage cannot be made, or there are too many devices.
    pub(super) fn add_buffer(&mut self, host: &mut ClientHost, device: &Arc<Device>) -> Result<(), DeviceError> {
        let id = device.id();
        if !self.open.contains_key(&id) {
            let is_free = |index: &u32| self.open.values().all(|entry| entry.buffer != *index);
            let too_many = DeviceError::Unsupported { id, what: "staging beside 16 other devices" };
            let buffer = (0..FIRST_BUFFER).find(is_free).ok_or(too_many)?;
            let stage = Stage::open(device)?;
            host.set_buffer(buffer, Arc::clone(stage.region()), "*");
            self.open.insert(id, DeviceStage { device: Arc::clone(device), stage, buffer, buffers: 0 });
        }
        self.get_mut(id).buffers += 1;
        Ok(())
    }

    /// Takes back a buffer on a device. Closes the stages of devices that have none any more.
    pub(super) fn remove_buffer(&mut self, host: &mut ClientHost, device: DeviceId) {
        if let Some(entry) = self.open.get_mut(&device) {
            entry.buffers -= 1;
        }
        let Self { open, closed } = self;
        open.retain(|id, entry| {
            let is_used = entry.buffers > 0 || !entry.stage.is_idle();
            if !is_used {
                host.remove_buffer(entry.buffer);
                host.same_host().peer_memory().close_device(*id);
                entry.stage.take_retired(true).iter().for_each(|region| host.forget(region));
                closed.entry(*id).or_default().add(entry.stage.counters());
            }
            is_used
        });
        if !open.keys().any(|id| id.family == device.family) {
            host.same_host().close_family(device.family);
        }
    }

    /// Returns the stage of a device with buffers.
    ///
    /// # Panics
    /// If there is none: a batch keeps the buffers that it uses.
    pub(super) fn get(&self, device: DeviceId) -> &DeviceStage {
        self.open.get(&device).expect("a device with buffers has a stage")
    }

    /// Returns the stage of a device with buffers, to be changed.
    ///
    /// # Panics
    /// See [`Self::get`].
    pub(super) fn get_mut(&mut self, device: DeviceId) -> &mut DeviceStage {
        self.open.get_mut(&device).expect("a device with buffers has a stage")
    }

    /// Returns the stage of a device, if it is open.
    pub(super) fn find(&mut self, device: DeviceId) -> Option<&mut DeviceStage> {
        self.open.get_mut(&device)
    }

    /// Returns the devices.
    pub(super) fn devices(&self) -> Vec<Arc<Device>> {
        self.open.values().map(|entry| Arc::clone(&entry.device)).collect()
    }

    /// Makes later copies of a device, in one direction, wait for everything that a caller has enqueued on its stream.
    ///
    /// # Errors
    /// If the stream is not of this device's family, or the device is lost.
    pub(super) fn wait_for(&mut self, id: DeviceId, stream: StreamHandle, is_sent: bool) -> Result<(), DeviceError> {
        self.get_mut(id).stage.wait_for(stream, is_sent)
    }

    /// Returns true if copies are in flight: no event announces their end.
    pub(super) fn is_busy(&self) -> bool {
        self.open.values().any(|entry| entry.stage.is_busy())
    }

    /// Submits copies, and passes on the regions and the problems of all stages.
    pub(super) fn flush(&mut self, host: &mut ClientHost, now_ns: u64) {
        for entry in self.open.values_mut() {
            entry.stage.flush(now_ns);
            entry.stage.take_retired(false).iter().for_each(|region| host.forget(region));
            if let Some(problem) = entry.stage.take_problem() {
                host.note_problem(&problem);
            }
        }
    }

    /// Returns the pieces and reads whose copies are done, or have failed.
    pub(super) fn poll(&mut self, now_ns: u64) -> Vec<(Step, Result<(), Status>)> {
        let mut copied = Vec::new();
        for entry in self.open.values_mut() {
            if entry.stage.poll(now_ns) {
                copied.extend(std::iter::from_fn(|| entry.stage.poll_done()));
            }
        }
        copied
    }

    /// Returns the counters of each device that was used.
    pub(super) fn counters(&self) -> BTreeMap<DeviceId, StagingCounters> {
        let mut counters = self.closed.clone();
        for (id, entry) in &self.open {
            counters.entry(*id).or_default().add(entry.stage.counters());
        }
        counters
    }
}
