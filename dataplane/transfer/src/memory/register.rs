//! Registering and unregistering memory.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvplane_engine::Region;
use kvplane_store::service::SegmentInfo;

use crate::TransferEngine;
use crate::directory::BufferRecord;
use crate::error::Error;
use crate::memory::{Buffer, RegisterOptions};

/// How often unregistering looks whether the users have left, when it cannot wait for a certain one.
const LOOK: Duration = Duration::from_micros(200);
/// What peers have at least to leave one of several regions.
const QUIET_LEAST: Duration = Duration::from_millis(100);

impl TransferEngine {
    /// Registers memory: transfers may use it as source and destination, and peers may use it if the options say so.
    ///
    /// # Errors
    /// When it overlaps registered memory, is one region too many, or the location is malformed.
    pub fn register(&self, region: Arc<Region>, options: &RegisterOptions) -> Result<(), Error> {
        self.register_batch(&[region], options)
    }

    /// Registers several regions, or none of them when one is refused.
    ///
    /// # Errors
    /// As [`Self::register`].
    pub fn register_batch(&self, regions: &[Arc<Region>], options: &RegisterOptions) -> Result<(), Error> {
        options.check()?;
        let changing = self.registering.lock().unwrap_or_else(PoisonError::into_inner);
        for (done, region) in regions.iter().enumerate() {
            if let Err(error) = self.register_one(region, options) {
                drop(changing);
                // What else goes wrong in taking back matters less than why.
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

    /// Tells peers which buffers there are.
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

    /// Forgets the memory that was registered at this address. Returns when neither peers nor transfers of ours use it
    /// any more; the deadlines of the transfers, and that of the settings for peers, bound it.
    ///
    /// # Errors
    /// When nothing is registered there. When peers still use the memory after the time that the settings give them,
    /// or the serving thread does not answer, saying who and what to do: then the memory must stay. No new transfer
    /// uses it and it cannot be registered again, until this was called again and has returned without an error.
    pub fn unregister(&self, address: u64) -> Result<(), Error> {
        self.unregister_batch(&[address])
    }

    /// The same for several, or for none when nothing is registered at one of the addresses.
    ///
    /// # Errors
    /// As [`Self::unregister`].
    pub fn unregister_batch(&self, addresses: &[u64]) -> Result<(), Error> {
        let changing = self.registering.lock().unwrap_or_else(PoisonError::into_inner);
        let buffers = {
            let mut map = self.memory.write();
            if let Some(address) = addresses.iter().find(|&&address| !map.contains(address)) {
                return Err(Error::AddressNotRegistered(format!("no memory is registered at {address:#x}")));
            }
            let mut buffers: Vec<Arc<Buffer>> = addresses.iter().filter_map(|&address| map.leave(address)).collect();
            // An address that is named twice is there only once.
            buffers.sort_unstable_by_key(|buffer| buffer.address);
            buffers.dedup_by_key(|buffer| buffer.address);
            buffers
        };
        drop(changing);
        let mut result = match buffers.iter().any(|buffer| buffer.segment.is_some()) {
            true => self.publish(),
            false => Ok(()),
        };
        // Those who hold several of them up have the time once, not for each.
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
        // Another thread may have waited for the same, and the name be somebody else's by now.
        if self.memory.write().left(buffer) {
            self.drivers.iter().for_each(|driver| driver.remove_buffer(buffer.index));
            self.memory.write().give_back(buffer.index);
        }
        Ok(())
    }
}
