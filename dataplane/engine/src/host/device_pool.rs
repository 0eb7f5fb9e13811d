//! Device pool of a shard's store: its memory, and the copies of moves between it and the pool.
//!
//! The service decides which objects move ([`Service::device_moves`]). The copies are asynchronous, between the pinned
//! pool and the device, one batch for each direction and round; their events are polled. Bytes that come back are
//! checked before the object is theirs. A device that fails a copy is not used any more.

use std::collections::VecDeque;
use std::sync::Arc;

use kvplane_store::PoolMove;
use kvplane_store::service::{DEVICE_OBJECT_BYTES, MoveId, MoveOutcome, Service};
use kvplane_sys::device::{
    CopyQueue, CopyTicket, Device, DeviceCopy, DeviceError, DeviceId, DeviceMemory, DeviceRange, PinnedRegion,
};
use kvplane_sys::{IoBuf, Region};

use super::fetch::checksum_of;
use crate::staging::STAGE_BYTES;

const _: () = assert!(*DEVICE_OBJECT_BYTES.end() <= STAGE_BYTES as u64, "gets of the device pool are staged whole");

/// Settings of a shard's device pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePoolConfig {
    /// Device.
    pub device: DeviceId,
    /// Memory to allocate on it, in bytes.
    pub bytes: u64,
}

/// Copies of one direction.
struct Lane {
    queue: CopyQueue,
    /// Moves of this round.
    pending: Vec<(MoveId, PoolMove)>,
    in_flight: VecDeque<(CopyTicket, Vec<(MoveId, PoolMove)>)>,
}

impl Lane {
    fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self { queue: CopyQueue::new(device)?, pending: Vec::new(), in_flight: VecDeque::new() })
    }

    /// Returns the moves whose copies are done.
    ///
    /// # Errors
    /// If the device is lost: none will ever be done.
    fn poll(&mut self) -> Result<Vec<(MoveId, PoolMove)>, DeviceError> {
        if self.in_flight.is_empty() {
            return Ok(Vec::new());
        }
        let open = self.queue.poll()?;
        let ended = self.in_flight.partition_point(|(ticket, _)| *ticket < open);
        Ok(self.in_flight.drain(..ended).flat_map(|(_, moves)| moves).collect())
    }

    /// Submits the copies of the pending moves as one batch.
    ///
    /// # Errors
    /// If the driver rejects them.
    fn submit(&mut self, copy: impl Fn(&PoolMove) -> DeviceCopy) -> Result<(), DeviceError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let ticket = self.queue.copy(self.pending.iter().map(|(_, one)| copy(one)).collect())?;
        self.in_flight.push_back((ticket, std::mem::take(&mut self.pending)));
        Ok(())
    }

    /// Removes and returns the moves that are not done.
    fn take_all(&mut self) -> Vec<(MoveId, PoolMove)> {
        let pending = std::mem::take(&mut self.pending);
        self.in_flight.drain(..).flat_map(|(_, moves)| moves).chain(pending).collect()
    }
}

/// Memory of a device pool, and the copies between it and the pool.
pub struct DevicePool {
    // Before the memory, so that their drop has waited for the copies when it is freed.
    to_device: Lane,
    to_pool: Lane,
    memory: Arc<DeviceMemory>,
    /// Pool, which the copy engines access directly.
    pool: PinnedRegion,
    is_lost: bool,
}

impl DevicePool {
    /// Allocates the memory, and pins the pool.
    ///
    /// # Errors
    /// If there is no such device, it has too little memory left, or the pool cannot be pinned.
    pub fn open(config: DevicePoolConfig, pool: &Arc<Region>) -> Result<Self, DeviceError> {
        let device = Device::open(config.device)?;
        Ok(Self {
            to_device: Lane::new(&device)?,
            to_pool: Lane::new(&device)?,
            memory: DeviceMemory::allocate(&device, config.bytes)?,
            pool: PinnedRegion::new(&device, Arc::clone(pool))?,
            is_lost: false,
        })
    }

    /// Returns the memory.
    pub(super) const fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Takes the copies that are done, and begins those of further moves. Returns true if there was any progress.
    pub(super) fn drive(&mut self, service: &mut Service, now_ns: u64) -> bool {
        if self.is_lost {
            return false;
        }
        let mut progress = false;
        for is_promotion in [true, false] {
            match self.lane(is_promotion).poll() {
                Ok(done) => {
                    progress |= !done.is_empty();
                    for (id, one) in done {
                        let outcome = self.finish(&one);
                        service.device_moves().finish(id, outcome, now_ns);
                    }
                }
                Err(error) => return self.lose(service, Some(&error), now_ns),
            }
        }
        while let Some((id, one)) = service.device_moves().poll(now_ns) {
            self.lane(one.is_promotion).pending.push((id, one));
            progress = true;
        }
        let Self { to_device, to_pool, memory, pool, .. } = self;
        let on_device = |at, bytes| DeviceRange::new(memory, at, bytes);
        let in_pool = |at: u64, bytes: u64| IoBuf::new(Arc::clone(pool.region()), at as usize, bytes as usize);
        let promoted = to_device.submit(|one| DeviceCopy::ToDevice {
            from: in_pool(one.from, one.bytes),
            to: on_device(one.to, one.bytes),
        });
        let demoted = to_pool
            .submit(|one| DeviceCopy::ToHost { from: on_device(one.from, one.bytes), to: in_pool(one.to, one.bytes) });
        if let Err(error) = promoted.and(demoted) {
            return self.lose(service, Some(&error), now_ns);
        }
        // A get may have found the device lost.
        if service.inspect().lost_device_pool() { self.lose(service, None, now_ns) } else { progress }
    }

    const fn lane(&mut self, is_promotion: bool) -> &mut Lane {
        if is_promotion { &mut self.to_device } else { &mut self.to_pool }
    }

    /// Finishes a move whose bytes were copied: checks those that came from the device, and copies the tail.
    fn finish(&self, one: &PoolMove) -> MoveOutcome {
        let region = self.pool.region();
        // Writers that compute no checksums state 0.
        let is_checked = !one.is_promotion && one.checksum != 0;
        if is_checked && checksum_of(region, one.to, one.bytes) != one.checksum {
            return MoveOutcome::Corrupt;
        }
        if let Some(tail) = one.tail {
            Region::copy_between(region, tail.to as usize, region, tail.from as usize, tail.bytes as usize);
        }
        MoveOutcome::Copied
    }

    /// Gives the pool up. Returns true: something has changed.
    fn lose(&mut self, service: &mut Service, error: Option<&DeviceError>, now_ns: u64) -> bool {
        self.is_lost = true;
        service.device_moves().lose();
        for lane in [&mut self.to_device, &mut self.to_pool] {
            lane.take_all()
                .into_iter()
                .for_each(|(id, _)| service.device_moves().finish(id, MoveOutcome::Lost, now_ns));
        }
        let lost = service.store().stats().device.lost;
        let id = self.memory.device().id();
        let why = error.map_or_else(|| "a get of it failed".to_owned(), ToString::to_string);
        tracing::error!(
            "the device pool on {id} is lost with {lost} objects, and is not used until the node is restarted: {why}"
        );
        true
    }

    /// Returns true if copies are in flight: no event announces their end.
    pub(super) fn must_be_polled(&self) -> bool {
        !self.to_device.in_flight.is_empty() || !self.to_pool.in_flight.is_empty()
    }
}
