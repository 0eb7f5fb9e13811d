//! Session: the fast path of a single thread, with an initiator that no other thread drives.
//!
//! [`TransferEngine`](crate::TransferEngine) supports many threads at the cost of a lock and some counting; a single
//! thread that only drives its own transfers, such as a benchmark's, avoids that cost.

use std::sync::Arc;
use std::time::Duration;

use kvplane_client::{PeerId, PeerKind, Place, Request, SegmentTarget, TaskResult};
use kvplane_engine::{Buffer, Slice};
use kvplane_engine::{Initiator, Region};
use kvplane_proto::message::{RegionDescriptor, SegmentDescriptor};
use kvplane_proto::{BatchId, Status};

use crate::config::{self, TransferEngineConfig};
use crate::directory::Directory;
use crate::error::{ArgumentError, Error};
use crate::metrics::Metrics;
use crate::rails::near::Theirs;
use crate::segments::file_name::is_file;

/// Open segment.
#[derive(Clone, Debug)]
pub struct Segment {
    peer: PeerId,
    /// Regions, in order of registration.
    pub regions: Vec<RegionDescriptor>,
    /// Location of each region, as far as its owner announced it.
    places: Vec<Place>,
}

/// Transfer between a part of registered memory and a range of a segment's region.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Memory of the caller.
    pub local: Slice,
    /// Index of the region in the segment.
    pub region: usize,
    /// Offset in the region.
    pub offset: u64,
    /// Direction: true writes into the segment, false reads from it.
    pub write: bool,
}

/// Initiator of one thread.
pub struct Session {
    initiator: Initiator,
    directory: Arc<Directory>,
}

impl Session {
    pub(crate) fn new(config: &TransferEngineConfig, directory: Arc<Directory>) -> Result<Self, Error> {
        let initiator = Initiator::new(config::client(config, false)?, &config::host(config)?, config.pacing)?;
        Ok(Self { initiator, directory })
    }

    /// Registers memory as source and destination of transfers.
    pub fn register(&mut self, region: Arc<Region>) -> Buffer {
        let index = self.initiator.add_buffer(Arc::clone(&region));
        Buffer::new(region, index)
    }

    /// Opens the segment of the engine at this address.
    ///
    /// # Errors
    /// When the name is no address, or no engine answers there.
    pub fn open_segment(&mut self, name: &str, deadline: Duration) -> Result<Segment, Error> {
        if is_file(name) {
            return Err(ArgumentError::FileInSession { name: name.to_owned() }.into());
        }
        let found = self.directory.find(name, deadline)?;
        let (address, theirs) = (self.directory.paths().address_of(&found, deadline)?, Theirs::of(&found));
        if address.kind != PeerKind::Native {
            return Err(ArgumentError::ForeignInSession { name: name.to_owned() }.into());
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
            .map_err(|why| ArgumentError::Description { name: name.to_owned(), why })?;
        let places = descriptor.regions.iter().map(|region| theirs.place(region.segment.to_bits())).collect();
        Ok(Segment { peer, regions: descriptor.regions, places })
    }

    /// Starts transfers as one batch; validated as a whole before any has an effect.
    ///
    /// # Errors
    /// When a transfer is malformed or names a region that the segment does not have.
    pub fn submit(&mut self, segment: &Segment, transfers: &[Transfer], deadline: Duration) -> Result<BatchId, Error> {
        let requests: Result<Vec<Request>, Error> = transfers.iter().map(|one| request(segment, one)).collect();
        Ok(self.initiator.submit(&requests?, deadline)?)
    }

    /// Waits for a batch to complete and returns its results in order. Nothing accesses its memory afterwards.
    ///
    /// # Errors
    /// When the kernel fails; never for the outcomes of the transfers themselves.
    pub fn wait(&mut self, batch: BatchId) -> Result<Vec<TaskResult>, Error> {
        self.initiator.wait(batch)?;
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        Ok(results)
    }

    /// Returns the counters of this session; rails are listed without the names of their peers.
    pub fn metrics(&mut self) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.zero_copy.add(&self.initiator.host_counters().zero_copy);
        let devices = self.initiator.device_names();
        metrics.add(0, self.initiator.books(), &devices, &|_| String::new());
        metrics
    }

    /// Runs transfers as one batch; fails when any failed.
    ///
    /// # Errors
    /// When a transfer is malformed or fails; the error names it and the reason.
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
    let (number, regions) = (transfer.region, segment.regions.len());
    let region = segment.regions.get(number).ok_or(ArgumentError::NoRegion { region: number, regions })?;
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
