//! The fast path of one thread: an initiator of its own, driven by nobody else.
//!
//! What [`TransferEngine`](crate::TransferEngine) does for many threads costs a lock and some counting; a thread that
//! only ever asks for itself, such as a benchmark's, does without.

use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{PeerId, PeerKind, Place, Request, SegmentTarget, TaskResult};
use kvplane_engine::{Buffer, Slice};
use kvplane_engine::{Initiator, Region};
use kvplane_proto::message::{RegionDescriptor, SegmentDescriptor};
use kvplane_proto::{BatchId, Status};

use crate::config::{self, TransferEngineConfig};
use crate::directory::Directory;
use crate::error::Error;
use crate::files::file_name::is_file;
use crate::metrics::Metrics;
use crate::rails::near::Theirs;

/// An opened segment.
#[derive(Clone, Debug)]
pub struct Segment {
    peer: PeerId,
    /// Its regions, in order of registration.
    pub regions: Vec<RegionDescriptor>,
    /// Where each of them is, as far as its owner told.
    places: Vec<Place>,
}

/// One transfer: between a part of registered memory and a range of a segment's region.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The caller's memory.
    pub local: Slice,
    /// Which region of the segment.
    pub region: usize,
    /// Where in it.
    pub offset: u64,
    /// Into the segment, or out of it.
    pub write: bool,
}

/// Asks peers, from one thread.
pub struct Session {
    initiator: Initiator,
    directory: Arc<Directory>,
}

impl Session {
    pub(crate) fn new(config: &TransferEngineConfig, directory: Arc<Directory>) -> Result<Self, Error> {
        let initiator = Initiator::new(config::client(config, false)?, &config::host(config)?, config.pacing)?;
        Ok(Self { initiator, directory })
    }

    /// Registers memory to transfer from and into.
    pub fn register(&mut self, region: Arc<Region>) -> Buffer {
        let index = self.initiator.add_buffer(Arc::clone(&region));
        Buffer::new(region, index)
    }

    /// Opens the segment of the engine at this address.
    ///
    /// # Errors
    /// When the name is no address, or nobody answers there.
    pub fn open_segment(&mut self, name: &str, deadline: Duration) -> Result<Segment, Error> {
        if is_file(name) {
            return Err(Error::Argument(format!("{name} is a file: the engine opens it, not a session")));
        }
        let found = self.directory.find(name, deadline)?;
        let (address, theirs) = (self.directory.address_of(&found, deadline)?, Theirs::of(&found));
        if address.kind != PeerKind::Native {
            return Err(Error::Argument(format!("{name} speaks another protocol than ours: not from a session")));
        }
        let peer = self.initiator.open_peer_near(address, theirs.near.clone());
        let batch = self.initiator.submit(&[Request::OpenSegment(peer)], deadline)?;
        self.initiator.wait(batch)?;
        let status = self.initiator.results(batch)[0].status;
        let description = self.initiator.take_description(batch).unwrap_or_default();
        self.initiator.release(batch);
        if status != Status::Ok {
            let cause = self.initiator.last_problem().map(str::to_owned);
            return Err(Error::Status { what: format!("open segment {name}"), status, cause });
        }
        let descriptor = SegmentDescriptor::decode(&description)
            .map_err(|error| Error::Argument(format!("the segment {name} described itself wrongly: {error}")))?;
        let places = descriptor.regions.iter().map(|region| theirs.place(region.segment.to_bits())).collect();
        Ok(Segment { peer, regions: descriptor.regions, places })
    }

    /// Starts transfers as one batch; validated as a whole before any has an effect.
    ///
    /// # Errors
    /// When one is malformed or names a region that the segment does not have.
    pub fn submit(&mut self, segment: &Segment, transfers: &[Transfer], deadline: Duration) -> Result<BatchId, Error> {
        let requests: Result<Vec<Request>, Error> = transfers.iter().map(|one| request(segment, one)).collect();
        Ok(self.initiator.submit(&requests?, deadline)?)
    }

    /// Waits for a batch to complete and returns its results in order. Nothing touches its memory afterwards.
    ///
    /// # Errors
    /// When the kernel fails us; never for the transfers' own outcomes.
    pub fn wait(&mut self, batch: BatchId) -> Result<Vec<TaskResult>, Error> {
        self.initiator.wait(batch)?;
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        Ok(results)
    }

    /// What this session counted, its rails without the names of their peers.
    pub fn metrics(&mut self) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.zero_copy.add(&self.initiator.host_counters().zero_copy);
        let devices = self.initiator.device_names();
        metrics.add(0, self.initiator.books(), &devices, &|_| String::new());
        metrics
    }

    /// Runs transfers as one batch; an error when any failed.
    ///
    /// # Errors
    /// When one is malformed or fails: names it and says why.
    pub fn run(&mut self, segment: &Segment, transfers: &[Transfer], deadline: Duration) -> Result<(), Error> {
        let batch = self.submit(segment, transfers, deadline)?;
        self.initiator.wait(batch)?;
        let failed = self.initiator.results(batch).iter().enumerate().find(|(_, r)| r.status != Status::Ok);
        let failed = failed.map(|(index, result)| (index, result.status));
        self.initiator.release(batch);
        match failed {
            None => Ok(()),
            Some((index, status)) => {
                let cause = self.initiator.last_problem().map(str::to_owned);
                Err(Error::Status { what: format!("transfer {index} of {}", transfers.len()), status, cause })
            }
        }
    }
}

fn request(segment: &Segment, transfer: &Transfer) -> Result<Request, Error> {
    let region = segment.regions.get(transfer.region).ok_or_else(|| {
        Error::Argument(format!("region {} of a segment of {}", transfer.region, segment.regions.len()))
    })?;
    let target = SegmentTarget {
        peer: segment.peer,
        segment: region.segment,
        offset: transfer.offset,
        shareable: region.shareable,
        place: segment.places[transfer.region],
    };
    Ok(match transfer.write {
        true => Request::Write(target, transfer.local.local()),
        false => Request::Read(target, transfer.local.local()),
    })
}
