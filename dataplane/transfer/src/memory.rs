//! Registered memory of this process: registering and unregistering it, with the serving thread, the initiators and the
//! directory.

use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use kvplane_engine::{ShardHandle, node_of_region};
use kvplane_mooncake::Matrix;
use kvplane_proto::SegmentId;
use kvplane_store::service::SegmentInfo;
use kvplane_sys::device::{Backing, DeviceId};

use crate::buffers::{Buffer, Map};
use crate::config::TransferEngineConfig;
use crate::directory::Directory;
use crate::directory::announced::{BufferRecord, ToldKeys, connector};
use crate::driver::initiators::Initiators;
use crate::error::{ArgumentError, Error, RangeError};
use crate::lock;
use crate::rails::rdma::RdmaConfig;
use crate::segment::BufferInfo;

/// Polling interval of unregistering while the users of a buffer are unknown threads.
const LOOK: Duration = Duration::from_micros(200);
/// Minimum time for peers to leave each of several regions.
const QUIET_LEAST: Duration = Duration::from_millis(100);

/// Options of registering memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegisterOptions {
    /// Location of the memory: `cpu:N` for a NUMA node, `cuda:N`, `hip:N` or `npu:N` for a device, or `*` to detect it.
    /// It stays `*` if the pages are on several nodes or were never touched, or the kernel does not report it.
    pub location: String,
    /// Let peers access the memory. Otherwise it is only a source and destination of this engine's transfers.
    pub remote_accessible: bool,
    /// Let peers write to the memory, where they may access it and it is writable at all.
    pub writable: bool,
}

impl Default for RegisterOptions {
    fn default() -> Self {
        Self { location: "*".to_owned(), remote_accessible: true, writable: true }
    }
}

impl RegisterOptions {
    fn check(&self) -> Result<(), Error> {
        let node = self.location.strip_prefix("cpu:");
        let is_node = node.is_some_and(|node| node.parse::<u32>().is_ok());
        if self.location == "*" || is_node || DeviceId::parse(&self.location).is_some() {
            return Ok(());
        }
        Err(ArgumentError::Location { location: self.location.clone() }.into())
    }

    /// Rejects memory that is somewhere else.
    fn check_backing(&self, backing: &Backing) -> Result<(), Error> {
        let (location, actual) = (&self.location, backing.device().map(|memory| memory.device().id()));
        if DeviceId::parse(location) == actual || actual.is_some() && location == "*" {
            return Ok(());
        }
        Err(ArgumentError::WrongLocation { location: location.clone(), address: backing.address(), actual }.into())
    }

    /// Returns the location of memory.
    fn location_of(&self, backing: &Backing) -> String {
        match backing {
            Backing::Host(region) => {
                let found = if self.location == "*" { node_of_region(region) } else { None };
                found.map_or_else(|| self.location.clone(), |node| format!("cpu:{node}"))
            }
            Backing::Device(memory) => memory.device().id().to_string(),
        }
    }
}

/// Memory that an engine has registered, for its own transfers and for peers.
pub(crate) struct Memory {
    /// Buffers behind a lock, which is held for lookups and changes, never during a wait.
    map: RwLock<Map>,
    /// Held while the set of buffers changes, which takes several steps.
    changing: Mutex<()>,
    shard: Arc<ShardHandle>,
    directory: Arc<Directory>,
    initiators: Arc<Initiators>,
    shared_memory: bool,
    quiet_deadline: Duration,
    /// Devices to announce to stock engines; `None` if those are not served.
    stock_rdma: Option<RdmaConfig>,
}

impl Memory {
    /// Creates the memory of an engine with these settings, none of it registered.
    pub(crate) fn new(
        config: &TransferEngineConfig,
        shard: &Arc<ShardHandle>,
        directory: &Arc<Directory>,
        initiators: &Arc<Initiators>,
    ) -> Self {
        Self {
            map: RwLock::default(),
            changing: Mutex::new(()),
            shard: Arc::clone(shard),
            directory: Arc::clone(directory),
            initiators: Arc::clone(initiators),
            shared_memory: config.shared_memory,
            quiet_deadline: config.quiet_deadline,
            stock_rdma: config.stock_peers.then(|| config.rdma.clone()),
        }
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Map> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the buffers by address, as a segment has them.
    pub(crate) fn buffers(&self) -> Vec<BufferInfo> {
        let buffer = |buffer: &Arc<Buffer>| BufferInfo {
            address: buffer.address,
            bytes: buffer.bytes,
            shareable: self.shared_memory && buffer.shareable().is_some(),
            location: Some(buffer.location.clone()),
        };
        self.read().iter().map(buffer).collect()
    }

    /// Registers regions, or none of them when one is rejected.
    ///
    /// # Errors
    /// When one overlaps registered memory, the limit of regions is reached, or the location is malformed.
    pub(crate) fn register(&self, regions: &[Backing], options: &RegisterOptions) -> Result<(), Error> {
        options.check()?;
        regions.iter().try_for_each(|backing| options.check_backing(backing))?;
        let changing = lock(&self.changing);
        for (done, region) in regions.iter().enumerate() {
            if let Err(error) = self.register_one(region, options) {
                drop(changing);
                // The original error is reported, not that of the rollback.
                for earlier in &regions[..done] {
                    let _ = self.unregister(&[earlier.address()]);
                }
                return Err(error);
            }
        }
        drop(changing);
        if options.remote_accessible
            && let Err(error) = self.publish()
        {
            let addresses: Vec<u64> = regions.iter().map(Backing::address).collect();
            let _ = self.unregister(&addresses);
            return Err(error);
        }
        Ok(())
    }

    /// Announces the memory over RDMA to stock engines: see
    /// [`TransferEngine::announce_rdma`](crate::TransferEngine::announce_rdma).
    ///
    /// # Errors
    /// When stock engines are not served, no device is usable, or the matrix is malformed or names a device that does
    /// not exist.
    pub(crate) fn announce_rdma(&self, matrix: Option<&str>) -> Result<(), Error> {
        let Some(rdma) = &self.stock_rdma else {
            return Err(ArgumentError::NoStockPeers.into());
        };
        rdma.usable().map_err(ArgumentError::RdmaUnusable)?;
        let matrix = matrix.filter(|text| !text.trim().is_empty()).map(Matrix::decode).transpose();
        let matrix = matrix.map_err(ArgumentError::StockMatrix)?;
        let devices = self.shard.stock_devices()?;
        if let Some(matrix) = &matrix {
            let is_there = |name: &str| devices.iter().any(|device| device.name == name);
            if let Some(gone) = matrix.devices().iter().find(|name| !is_there(name)) {
                let devices = devices.iter().map(|device| device.name.clone()).collect();
                return Err(ArgumentError::StockMatrixDevice { device: gone.to_string(), devices }.into());
            }
        }
        let connector = connector(Arc::downgrade(&self.shard), self.directory.name().to_owned());
        self.directory.publication().announce_rdma(matrix, connector);
        self.publish()
    }

    /// Publishes the buffers to peers.
    fn publish(&self) -> Result<(), Error> {
        let told = |buffer: &Arc<Buffer>| {
            let (address, bytes, location) = (buffer.address, buffer.bytes, buffer.location.clone());
            // Stock engines cannot use memory of a device here; those of this project get the list from the shard.
            buffer.segment.filter(|_| buffer.backing.region().is_some()).map(|segment| BufferRecord {
                address,
                bytes,
                segment,
                location,
            })
        };
        self.directory.publication().publish(|| {
            let buffers: Vec<BufferRecord> = self.read().iter().filter_map(told).collect();
            let keys = self.told_keys(&buffers)?;
            Ok((buffers, keys))
        })
    }

    /// Returns the devices and keys to announce, if RDMA is announced to stock engines.
    ///
    /// # Errors
    /// When the serving thread does not answer.
    fn told_keys(&self, told: &[BufferRecord]) -> Result<Option<ToldKeys>, Error> {
        if !self.directory.publication().announces_rdma() {
            return Ok(None);
        }
        let segments = told.iter().map(|one| one.segment).collect();
        Ok(Some(ToldKeys { devices: self.shard.stock_devices()?, keys: self.shard.stock_keys(segments)? }))
    }

    fn register_one(&self, backing: &Backing, options: &RegisterOptions) -> Result<(), Error> {
        let (address, bytes) = (backing.address(), backing.bytes());
        let index = self.write().reserve(address, bytes)?;
        let info = SegmentInfo {
            address,
            bytes,
            writable: options.writable && backing.writable(),
            shareable: self.shared_memory && backing.region().is_some_and(|region| region.fd().is_some()),
            remote_accessible: true,
        };
        match self.register_with_owners(index, info, backing, options) {
            Ok(segment) => {
                self.write().insert(backing.clone(), options.location_of(backing), index, segment);
                Ok(())
            }
            Err(error) => {
                self.write().give_back(index);
                Err(error)
            }
        }
    }

    /// Registers memory with the initiators, and with the serving thread if peers may use it.
    fn register_with_owners(
        &self,
        index: u32,
        info: SegmentInfo,
        backing: &Backing,
        options: &RegisterOptions,
    ) -> Result<Option<SegmentId>, Error> {
        match backing {
            Backing::Host(region) => {
                let shared = || self.shard.register(info, Arc::clone(region));
                let segment = options.remote_accessible.then(shared).transpose()?;
                self.initiators.set_buffer(index, region, &options.location);
                Ok(segment)
            }
            Backing::Device(memory) => {
                self.initiators.set_device_buffer(index, memory)?;
                let shared = || self.shard.register_device(info, Arc::clone(memory));
                let segment = options.remote_accessible.then(shared).transpose();
                if segment.is_err() {
                    self.initiators.remove_buffer(index);
                }
                Ok(segment?)
            }
        }
    }

    /// Unregisters the memory at these addresses, or none when nothing is registered at one of them. Returns when
    /// neither peers nor local transfers use it any more: see
    /// [`TransferEngine::unregister`](crate::TransferEngine::unregister).
    ///
    /// # Errors
    /// When nothing is registered there, or the memory must not be freed yet.
    pub(crate) fn unregister(&self, addresses: &[u64]) -> Result<(), Error> {
        let changing = lock(&self.changing);
        let buffers = {
            let mut map = self.write();
            if let Some(address) = addresses.iter().find(|&&address| !map.contains(address)) {
                return Err(RangeError::NoBuffer { address: *address }.into());
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
        let until = Instant::now() + self.quiet_deadline;
        for buffer in &buffers {
            let left = until.saturating_duration_since(Instant::now());
            let outcome = self.wait_until_unused(buffer, left.max(QUIET_LEAST.min(self.quiet_deadline)));
            result = result.and(outcome);
        }
        result
    }

    fn wait_until_unused(&self, buffer: &Arc<Buffer>, within: Duration) -> Result<(), Error> {
        let outcome = buffer.segment.map_or(Ok(()), |segment| self.shard.unregister_within(segment, within));
        while buffer.is_used() {
            self.initiators.settle();
            if buffer.is_used() {
                std::thread::sleep(LOOK);
            }
        }
        if let Err(error) = outcome {
            let (bytes, address) = (buffer.bytes, buffer.address);
            return Err(Error::MemoryHeld { address, bytes, why: error });
        }
        // Another thread may have waited for the same buffer, and the index belong to a new one by now.
        if self.write().left(buffer) {
            self.initiators.remove_buffer(buffer.index);
            self.write().give_back(buffer.index);
            let device = buffer.backing.device().map(|memory| memory.device().id());
            if let Some(device) = device.filter(|device| !self.read().uses(*device)) {
                self.initiators.close_copies(device);
            }
        }
        Ok(())
    }
}
