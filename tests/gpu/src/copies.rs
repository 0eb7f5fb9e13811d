//! Plain copies of the driver: what the rates of the product are compared with.

use std::sync::Arc;
use std::time::Instant;

use kvplane::device::{CopyQueue, Device, DeviceCopy, DeviceMemory, DeviceRange, PinnedRegion};
use kvplane::{IoBuf, Region, RegionOptions};

use crate::Error;
use crate::rates::{Rate, median};

/// Memory on both sides of plain copies.
pub(crate) struct PlainCopies {
    queue: CopyQueue,
    host: Arc<Region>,
    _pin: PinnedRegion,
}

impl PlainCopies {
    /// Creates a queue of the device, and pinned memory of the host.
    pub(crate) fn new(device: &Arc<Device>, bytes: u64) -> Result<Self, Error> {
        let host = Region::allocate(&RegionOptions::new("plain copies", bytes as usize))?;
        let pin = PinnedRegion::new(device, Arc::clone(&host))?;
        Ok(Self { queue: CopyQueue::new(device)?, host, _pin: pin })
    }

    /// Measures copies to the host.
    pub(crate) fn measure_to_host(&mut self, from: &Arc<DeviceMemory>, bytes: u64) -> Result<Rate, Error> {
        let to = IoBuf::new(Arc::clone(&self.host), 0, bytes as usize);
        self.measure(bytes, &DeviceCopy::ToHost { from: DeviceRange::new(from, 0, bytes), to })
    }

    /// Measures copies to the device.
    pub(crate) fn measure_to_device(&mut self, to: &Arc<DeviceMemory>, bytes: u64) -> Result<Rate, Error> {
        let from = IoBuf::new(Arc::clone(&self.host), 0, bytes as usize);
        self.measure(bytes, &DeviceCopy::ToDevice { from, to: DeviceRange::new(to, 0, bytes) })
    }

    /// Measures copies between two ranges of device memory.
    pub(crate) fn measure_between(
        &mut self,
        from: &Arc<DeviceMemory>,
        to: &Arc<DeviceMemory>,
        bytes: u64,
    ) -> Result<Rate, Error> {
        let (from, to) = (DeviceRange::new(from, 0, bytes), DeviceRange::new(to, 0, bytes));
        self.measure(bytes, &DeviceCopy::Between { from, to })
    }

    fn measure(&mut self, bytes: u64, copy: &DeviceCopy) -> Result<Rate, Error> {
        median(bytes, |_| {
            let began = Instant::now();
            let ticket = self.queue.copy(vec![copy.clone()])?;
            while self.queue.poll()? <= ticket {
                std::hint::spin_loop();
            }
            Ok(began.elapsed())
        })
    }
}
