//! Initiators of an engine: the sets of connections that its threads send requests over, with their progress threads.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use kvplane_engine::{DeviceRegistration, HostConfig, Initiator, Region};
use kvplane_sys::device::{DeviceError, DeviceId, DeviceMemory};
use kvplane_ticket::Credential;

use super::Driver;
use crate::config::{self, TransferEngineConfig};
use crate::directory::stock::Stock;
use crate::error::Error;
use crate::lock;
use crate::metrics::Metrics;
use crate::segment::peers::Departures;

/// Initiators of one engine, with their drivers: each thread that submits stays with one of them.
pub(crate) struct Initiators {
    drivers: Vec<Arc<Driver>>,
    /// Progress threads, until they are stopped.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Number of batches so far.
    batches: AtomicU64,
}

impl Initiators {
    /// Starts as many as the settings say. They close the peers that are counted as departed.
    ///
    /// # Errors
    /// When the kernel refuses a resource.
    pub(crate) fn start(
        config: &TransferEngineConfig,
        host: &HostConfig,
        stock: &Arc<Stock>,
        departures: &Departures,
    ) -> Result<Self, Error> {
        let mut started = Self { drivers: Vec::new(), threads: Mutex::default(), batches: AtomicU64::new(0) };
        for number in 0..config.initiators {
            let client = config::client(config, true)?;
            let host = HostConfig { stock: Some((Arc::clone(stock) as _, number as u64)), ..host.clone() };
            let initiator = Initiator::new(client, &host, config.pacing)?;
            let driver = Driver::new(initiator, config, departures.clone())?;
            lock(&started.threads).push(driver.start_progress(number)?);
            started.drivers.push(driver);
        }
        Ok(started)
    }

    /// Cancels all batches in flight, waits for them, and ends the progress threads. No batch may be submitted any
    /// more.
    pub(crate) fn stop(&self) {
        self.drivers.iter().for_each(|driver| driver.stop());
        for thread in lock(&self.threads).drain(..) {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }

    /// Returns the initiator of the calling thread.
    pub(crate) fn of_thread(&self) -> &Arc<Driver> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        &self.drivers[NUMBER.with(|&number| number) % self.drivers.len()]
    }

    /// Returns the first initiator, which has the files that only one may use.
    pub(crate) fn first(&self) -> &Arc<Driver> {
        &self.drivers[0]
    }

    /// Returns the initiators that use a file: the first one if it must be `alone`, else all.
    pub(crate) fn users_of_file(&self, alone: bool) -> &[Arc<Driver>] {
        if alone { &self.drivers[..1] } else { &self.drivers }
    }

    /// Counts another batch, and returns its id.
    pub(crate) fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Closes unreferenced peers, as far as that is possible at once.
    pub(crate) fn settle(&self) {
        self.drivers.iter().for_each(|driver| driver.poll());
    }

    /// Sets the ticket that connections prove from now on.
    pub(crate) fn set_credential(&self, credential: &Arc<Credential>) {
        self.drivers.iter().for_each(|driver| driver.set_credential(credential));
    }

    /// Adds a buffer under this index to all initiators.
    pub(crate) fn set_buffer(&self, index: u32, region: &Arc<Region>, location: &str) {
        self.drivers.iter().for_each(|driver| driver.set_buffer(index, region, location));
    }

    /// Adds device memory under this index to all initiators, or to none if one refuses.
    ///
    /// # Errors
    /// When the host has too little memory to pin, or the device is lost.
    pub(crate) fn set_device_buffer(&self, index: u32, memory: &Arc<DeviceMemory>) -> Result<(), DeviceError> {
        let result = self.drivers.iter().try_for_each(|driver| driver.set_device_buffer(index, memory));
        if result.is_err() {
            self.remove_buffer(index);
        }
        result
    }

    /// Ends the copies within this process from and to a device of which no buffer is left.
    pub(crate) fn close_copies(&self, device: DeviceId) {
        self.drivers.iter().for_each(|driver| driver.copies.close(device));
    }

    /// Removes the buffer under this index, which no batch uses any more, from all initiators.
    pub(crate) fn remove_buffer(&self, index: u32) {
        self.drivers.iter().for_each(|driver| driver.remove_buffer(index));
    }

    /// Returns the names of the RDMA devices, by their indices.
    pub(crate) fn devices(&self) -> Vec<String> {
        self.drivers.first().map_or_else(Vec::new, |driver| driver.with(|core| core.devices()))
    }

    /// Returns the registrations of device memory with the RDMA devices of the first initiator; those of the others are
    /// alike.
    pub(crate) fn device_registrations(&self) -> Vec<DeviceRegistration> {
        self.drivers.first().map_or_else(Vec::new, |driver| driver.with(|core| core.device_registrations()))
    }

    /// Adds the counters of all initiators to the metrics of the engine with this name. Interrupts each for a moment.
    pub(crate) fn add_to(&self, metrics: &mut Metrics, engine: &str) {
        metrics.batches += self.batches.load(Ordering::Relaxed);
        for (number, driver) in self.drivers.iter().enumerate() {
            metrics.in_flight += driver.in_flight();
            driver.copies.add_to(metrics, number, engine);
            driver.with(|core| {
                metrics.zero_copy.add(&core.zero_copy());
                metrics.peer_memory.add(&core.peer_memory());
                for (device, counters) in core.staging() {
                    metrics.staging.entry(device).or_default().add(&counters);
                }
                metrics.registrations.extend(core.device_registrations());
                let devices = core.devices();
                let Some((client, names)) = core.books() else { return };
                // A peer without a name is being closed.
                metrics.add(number, client, &devices, &|peer| names.get(&peer).cloned().unwrap_or_default());
            });
        }
    }
}

impl Drop for Initiators {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use kvplane_mooncake::{Caller, Environment};

    use super::*;
    use crate::directory::lookup::Lookup;

    #[test]
    fn a_thread_stays_with_its_initiator_and_batches_have_ids_of_their_own() {
        let config = TransferEngineConfig { initiators: 3, ..TransferEngineConfig::default() };
        let lookup = Arc::new(Lookup::new(Caller::new(&Environment::default()), None, false));
        let stock = Arc::new(Stock::new(lookup, "own", 1, 1));
        let started = Initiators::start(&config, &HostConfig::default(), &stock, &Departures::default()).unwrap();
        let mine = Arc::as_ptr(started.of_thread());
        assert!((0..10).all(|_| Arc::as_ptr(started.of_thread()) == mine));
        let mut used = std::collections::BTreeSet::from([mine as usize]);
        std::thread::scope(|scope| {
            // Threads of other tests draw numbers, too.
            let used_by = |_| scope.spawn(|| Arc::as_ptr(started.of_thread()) as usize);
            let threads: Vec<_> = (0..32).map(used_by).collect();
            used.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        });
        assert!(used.len() > 1 && used.len() <= 3, "{} initiators are used", used.len());
        assert_eq!((started.users_of_file(true).len(), started.users_of_file(false).len()), (1, 3));
        assert_eq!([started.next_batch(), started.next_batch()], [1, 2]);
        let mut metrics = Metrics::default();
        started.add_to(&mut metrics, "own");
        assert_eq!((metrics.batches, metrics.in_flight), (2, 0));
        started.stop();
        started.stop();
    }
}
