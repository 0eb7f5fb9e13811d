//! Member of a store's clients: a client with its buffers, and the puts and gets of single values that use them.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::Arc;

use kvplane::device::Backing;
use kvplane::{Buffer, Client, DeviceBuffer, Got, HugePages, PoolReadCounters, Region, RegionOptions, Slice};

use crate::memory::{Entry, Memory};
use crate::outcome::{NOT_FOUND, failed, store_code};
use crate::store::arguments::KeepOptions;

/// Size of the bounce buffer of plain gets, in bytes.
const BOUNCE_BYTES: usize = 1 << 20;

/// Memory that a client knows.
enum KnownBuffer {
    Host(Buffer),
    Device(DeviceBuffer),
}

impl KnownBuffer {
    /// Registers memory with a client.
    fn new(client: &mut Client, backing: &Backing) -> Result<Self, kvplane::Error> {
        Ok(match backing {
            Backing::Host(region) => Self::Host(client.register(Arc::clone(region))),
            Backing::Device(memory) => Self::Device(client.register_device(Arc::clone(memory))?),
        })
    }

    fn slice(&self, offset: u64, bytes: u64) -> Slice {
        match self {
            Self::Host(buffer) => buffer.slice(offset as usize, bytes as usize),
            Self::Device(buffer) => buffer.slice(offset, bytes),
        }
    }

    fn unregister(self, client: &mut Client) {
        match self {
            Self::Host(buffer) => client.unregister(buffer),
            Self::Device(buffer) => client.unregister_device(buffer),
        }
    }
}

/// Client, and the registered memory that it knows.
pub(crate) struct Member {
    pub(crate) client: Client,
    known: HashMap<u64, KnownBuffer>,
    generation: u64,
    bounce: Option<Buffer>,
    /// Counters of its gets into memory of devices, as far as they were taken.
    taken: PoolReadCounters,
}

impl Member {
    /// Creates a member that knows no memory; `generation` is that of the registered memory now.
    pub(crate) fn new(client: Client, generation: u64) -> Self {
        Self { client, known: HashMap::new(), generation, bounce: None, taken: PoolReadCounters::default() }
    }

    /// Adds to `sum` what has changed since the last call in the counters of its gets into memory of devices; `is_gone`
    /// tells that it has pinned nothing any more.
    pub(crate) fn count_reads(&mut self, sum: &mut PoolReadCounters, is_gone: bool) {
        let mut now = self.client.metrics().pool_reads;
        now.pinned_bytes = if is_gone { 0 } else { now.pinned_bytes };
        let before = core::mem::replace(&mut self.taken, now);
        sum.bytes += now.bytes - before.bytes;
        sum.copied_reads += now.copied_reads - before.copied_reads;
        sum.refused += now.refused - before.refused;
        sum.pinned_bytes = sum.pinned_bytes + now.pinned_bytes - before.pinned_bytes;
    }

    /// Returns a range of registered memory as a slice of this client, or the code of an error.
    pub(crate) fn slice(&mut self, entry: &Entry, address: u64, bytes: u64) -> Result<Slice, i64> {
        let known = match self.known.entry(entry.id) {
            Slot::Occupied(known) => known.into_mut(),
            Slot::Vacant(slot) => {
                let known = KnownBuffer::new(&mut self.client, &entry.backing);
                slot.insert(known.map_err(|error| store_code(&error))?)
            }
        };
        Ok(known.slice(address - entry.address, bytes))
    }

    /// Returns the bounce buffer of this client.
    pub(crate) fn bounce(&mut self) -> Result<Buffer, kvplane::Error> {
        if let Some(bounce) = &self.bounce {
            return Ok(bounce.clone());
        }
        let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("kvplane-get", BOUNCE_BYTES) };
        let bounce = self.client.register(Region::allocate(&options)?);
        self.bounce = Some(bounce.clone());
        Ok(bounce)
    }

    /// Drops the buffers whose memory was unregistered since the last call.
    pub(crate) fn forget_gone(&mut self, memory: &Memory) {
        let generation = memory.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let gone: Vec<u64> = self.known.keys().copied().filter(|id| !memory.contains(*id)).collect();
        for id in gone {
            if let Some(buffer) = self.known.remove(&id) {
                buffer.unregister(&mut self.client);
            }
        }
    }

    /// Stores a copy of a value.
    pub(crate) fn put_copied(&mut self, key: &[u8], value: &[u8], keeping: &KeepOptions) -> i64 {
        let options = keeping.with(&mut self.client);
        self.client.put_with(key, value, options).map_or_else(|error| store_code(&error), |_| 0)
    }

    /// Stores a value from memory that is registered for this call.
    pub(crate) fn put_region(&mut self, key: &[u8], region: Arc<Region>, bytes: u64, keeping: &KeepOptions) -> i64 {
        let buffer = self.client.register(region);
        let options = keeping.with(&mut self.client);
        let put = self.client.put_from_with(key, buffer.slice(0, bytes as usize), options);
        self.client.unregister(buffer);
        put.map_or_else(|error| store_code(&error), |_| 0)
    }

    /// Reads an object into memory that is registered for this call.
    pub(crate) fn get_region(
        &mut self,
        key: &[u8],
        region: Arc<Region>,
        bytes: u64,
    ) -> Result<Option<Got>, kvplane::Error> {
        let buffer = self.client.register(region);
        let got = self.client.get_into(key, buffer.slice(0, bytes as usize));
        self.client.unregister(buffer);
        got
    }

    /// Returns the bytes of a short object; `None` for a long one.
    pub(crate) fn get_short(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, i64> {
        let bounce = self.bounce().map_err(|error| store_code(&error))?;
        let whole = bounce.slice(0, bounce.region().bytes());
        match self.client.get_into(key, whole) {
            Ok(Some(got)) => {
                let mut value = vec![0; got.bytes as usize];
                bounce.region().copy_out(0, &mut value);
                Ok(Some(value))
            }
            Ok(None) => Err(failed(NOT_FOUND, "no such object")),
            Err(error) if error.status() == Some(kvplane::Status::BufferTooSmall) => Ok(None),
            Err(error) => Err(store_code(&error)),
        }
    }
}
