//! Registering and unregistering memory.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvplane_engine::Region;
use kvplane_store::service::SegmentInfo;

use crate::TransferEngine;
use crate::directory::BufferRecord;
use crate::error::Error;
use crate::memory::{Buffer, RegisterOptions};

/// Polling interval of unregistering while the users of a buffer are unknown threads.
const LOOK: Duration = Duration::from_micros(200);
/// Minimum time for peers to leave each of several regions.
const QUIET_LEAST: Duration = Duration::from_millis(100);

impl TransferEngine {
    /// Registers memory: transfers can use it as source and destination, and peers can access it if the options permit.
    ///
    /// # Errors
    /// When it overlaps registered memory, the limit of regions is reached, or the location is malformed.
    pub fn register(&self, region: Arc<Region>, options: &RegisterOptions) -> Result<(), Error> {
        self.register_batch(&[region], options)
    }

    /// Registers several regions, or none of them when one is rejected.
    ///
    /// # Errors
    /// Errors of [`Self::register`].
    pub fn register_batch(&self, regions: &[Arc<Region>], options: &RegisterOptions) -> Result<(), Error> {
        options.check()?;
        let changing = self.registering.lock().unwrap_or_else(PoisonError::into_inner);
        for (done, region) in regions.iter().enumerate() {
            if let Err(error) = self.register_one(region, options) {
                drop(changing);
                // The original error is reported, not that of the rollback.
                for earlier in &regions[..done] {
                    let _ = self.unregister(earlier.address());
                }
                return Err(error);
            }
        }
        drop(changing);
        if options.remote_accessible
            && let Err(error) = self.publish()
        {
            let addresses: Vec<u64> = regions.iter().map(|region| region.address()).collect();
            let _ = self.unregister_batch(&addresses);
            return Err(error);
        }
        Ok(())
    }

    /// Publishes the buffers to peers.
    pub(crate) fn publish(&self) -> Result<(), Error> {
        let told = |buffer: &Arc<Buffer>| {
            let (address, bytes, location) = (buffer.address, buffer.bytes, buffer.location.clone());
            buffer.segment.map(|segment| BufferRecord { address, bytes, segment, location })
        };
        self.directory.publish(|| {
            let buffers: Vec<BufferRecord> = self.memory.read().iter().filter_map(told).collect();
            let keys = self.told_keys(&buffers)?;
            Ok((buffers, keys))
        })
    }

    fn register_one(&self, region: &Arc<Region>, options: &RegisterOptions) -> Result<(), Error> {
        let (address, bytes) = (region.address(), region.bytes() as u64);
        let index = self.memory.write().reserve(address, bytes)?;
        let info = SegmentInfo {
            address,
            bytes,
            writable: options.writable && region.writable(),
            shareable: self.config.shared_memory && region.fd().is_some(),
            remote_accessible: true,
        };
        let segment = match options.remote_accessible {
            true => match self.shard.register(info, Arc::clone(region)) {
                Ok(segment) => Some(segment),
                Err(error) => {
                    self.memory.write().give_back(index);
                    return Err(error.into());
                }
            },
            false => None,
        };
        self.drivers.iter().for_each(|driver| driver.set_buffer(index, region, &options.location));
        self.memory.write().insert(Arc::clone(region), options.location_of(region), index, segment);
        Ok(())
    }

    /// Unregisters the memory at this address. Returns when neither peers nor local transfers use it any more; the wait
    /// is bounded by the transfers' deadlines and by
    /// [`TransferEngineConfig::quiet_deadline`](crate::TransferEngineConfig::quiet_deadline).
    ///
    /// # Errors
    /// When nothing is registered there. When peers still use the memory after that deadline, or the serving thread
    /// does not answer; the error names them and the next step: the memory must not be freed then. No new transfer uses
    /// it, and it cannot be registered again, until this was called again and has succeeded.
    pub fn unregister(&self, address: u64) -> Result<(), Error> {
        self.unregister_batch(&[address])
    }

    /// Unregisters several regions, or none when nothing is registered at one of the addresses.
    ///
    /// # Errors
    /// Errors of [`Self::unregister`].
    pub fn unregister_batch(&self, addresses: &[u64]) -> Result<(), Error> {
        let changing = self.registering.lock().unwrap_or_else(PoisonError::into_inner);
        let buffers = {
            let mut map = self.memory.write();
            if let Some(address) = addresses.iter().find(|&&address| !map.contains(address)) {
                return Err(Error::AddressNotRegistered(format!("no memory is registered at {address:#x}")));
            }
            let mut buffers: Vec<Arc<Buffer>> = addresses.iter().filter_map(|&address| map.leave(address)).collect();
            // A repeated address counts once.
            buffers.sort_unstable_by_key(|buffer| buffer.address);
            buffers.dedup_by_key(|buffer| buffer.address);
            buffers
        };
        drop(changing);
        let mut result = match buffers.iter().any(|buffer| buffer.segment.is_some()) {
            true => self.publish(),
            false => Ok(()),
        };
        // Peers that hold several regions get the time once, not for each region.
        let until = Instant::now() + self.config.quiet_deadline;
        for buffer in &buffers {
            let left = until.saturating_duration_since(Instant::now());
            let outcome = self.see_off(buffer, left.max(QUIET_LEAST.min(self.config.quiet_deadline)));
            result = result.and(outcome);
        }
        result
    }

    fn see_off(&self, buffer: &Arc<Buffer>, within: Duration) -> Result<(), Error> {
        let outcome = buffer.segment.map_or(Ok(()), |segment| self.shard.unregister_within(segment, within));
        while buffer.is_used() {
            self.drivers.iter().for_each(|driver| driver.poll());
            if buffer.is_used() {
                std::thread::sleep(LOOK);
            }
        }
        if let Err(error) = outcome {
            let (bytes, address) = (buffer.bytes, buffer.address);
            return Err(Error::MemoryHeld { address, bytes, why: error });
        }
        // Another thread may have waited for the same buffer, and the index belong to a new one by now.
        if self.memory.write().left(buffer) {
            self.drivers.iter().for_each(|driver| driver.remove_buffer(buffer.index));
            self.memory.write().give_back(buffer.index);
        }
        Ok(())
    }
}
