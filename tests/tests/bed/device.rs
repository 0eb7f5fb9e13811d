//! Client with memory of a device, over the drivers for tests.

#![allow(dead_code, reason = "several test programs share this file, and each uses a part")]

use kvplane::device::{Device, DeviceId, DeviceMemory, Family};
use kvplane::{Client, ClientConfig, DeviceBuffer};
use kvplane_fake_devices::{Control, Counters};

/// First device of CUDA.
pub(crate) const FIRST: DeviceId = DeviceId { family: Family::Cuda, ordinal: 0 };

/// Client with memory of a device, whose copies are late.
pub(crate) struct DeviceClient {
    pub(crate) fake: Control,
    pub(crate) client: Client,
    pub(crate) memory: DeviceBuffer,
}

impl DeviceClient {
    /// Connects a client, with so many bytes of this device.
    pub(crate) fn on(id: DeviceId, bytes: u64, config: &ClientConfig) -> Self {
        let fake = match id.family {
            Family::Npu => kvplane_fake_npu::load_npu(),
            _ => kvplane_fake_cuda::load_cuda(),
        };
        let fake = fake.expect("the driver for tests");
        fake.set_copies(100_000, 0, 5);
        let device = Device::open(id).expect("a device");
        let mut client = Client::connect(config).expect("a client");
        let memory = DeviceMemory::allocate(&device, bytes).expect("device memory");
        let memory = client.register_device(memory).expect("a stage");
        Self { fake, client, memory }
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.fake.write(self.memory.memory().address() + offset, bytes);
    }

    pub(crate) fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        self.fake.read(self.memory.memory().address() + offset, bytes)
    }

    /// Ends the client, and checks that nothing of the driver is in use, and that it was never misused.
    pub(crate) fn end(self) {
        let Self { fake, client, memory } = self;
        drop((client, memory));
        assert_released(fake);
    }
}

/// Checks that nothing of the driver is in use, and that it was never misused.
pub(crate) fn assert_released(fake: Control) {
    let counters = fake.counters();
    let Counters { copied_bytes, calls, .. } = counters;
    assert_eq!(counters, Counters { copied_bytes, calls, ..Counters::default() });
}
