//! Path of a slice through all layers, from a submitted batch to its results: client, host, driver and verbs.
//!
//! A host writes to a shard of this process over the null device. Their connection is set up as usual, over TCP; after
//! that the shard sleeps, as one-sided writes do not concern it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_client::{Config, Local, PeerAddress, Place, Request, SegmentTarget};
use kvplane_engine::{HostConfig, Initiator, Listen, Pacing, RdmaDevices, Region, Shard, ShardConfig, ShardHandle};
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::{Status, Version};
use kvplane_soft_verbs::null_verbs;
use kvplane_store::service::{Identity, SegmentInfo};
use kvplane_transport::{RdmaCounters, RdmaOptions};

use super::bed::{SliceCost, region};
use crate::Failure;

/// Number of slices of one batch, if it has several.
const BATCH: usize = 128;
const DEADLINE: Duration = Duration::from_secs(30);
const CLUSTER: &str = "bench";

/// Shape of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Requests of one slice each, to ranges that do not touch.
    Scattered,
    /// One request, cut into slices.
    Range,
    /// One slice.
    One,
}

/// Client and the memory that it writes from and to.
pub(super) struct Whole {
    initiator: Initiator,
    requests: Vec<Request>,
    /// Number of slices of one batch.
    batch: usize,
    _memory: Arc<Region>,
    _shard: ShardHandle,
}

impl Whole {
    pub(super) fn new(shape: Shape, slice_bytes: usize) -> Result<Self, Failure> {
        let devices = RdmaDevices {
            verbs: null_verbs(),
            names: Vec::new(),
            preferred: 0,
            near: Arc::default(),
            options: RdmaOptions::default(),
        };
        let host = HostConfig { rdma: Some(devices), ..HostConfig::default() };
        let shard = serve(&host)?;
        let batch = if shape == Shape::One { 1 } else { BATCH };
        let bytes = batch * slice_bytes;
        let (ours, theirs) = (region(bytes)?, region(bytes)?);
        let (address, segment_bytes) = (theirs.address(), bytes as u64);
        let info =
            SegmentInfo { address, bytes: segment_bytes, writable: true, shareable: false, remote_accessible: true };
        let segment = shard.register(info, theirs)?;
        let slice = slice_bytes as u64;
        let config = Config { cluster: CLUSTER.to_owned(), slice_bytes: slice, ..Config::default() };
        let mut initiator = Initiator::new(config, &host, Pacing::Park)?;
        let buffer = initiator.add_buffer(Arc::clone(&ours));
        let peer = initiator.open_peer(PeerAddress::native(shard.address(), None));
        let request = |offset: u64, bytes: u64| {
            let target = SegmentTarget { peer, segment, offset, shareable: false, place: Place::UNKNOWN };
            Request::Write(target, Local { buffer, offset, bytes })
        };
        let requests = match shape {
            Shape::Range | Shape::One => vec![request(0, segment_bytes)],
            // From the end to the start: none continues the one before.
            Shape::Scattered => (0..BATCH as u64).rev().map(|at| request(at * slice, slice)).collect(),
        };
        let mut whole = Self { initiator, requests, batch, _memory: ours, _shard: shard };
        whole.warm_up()?;
        Ok(whole)
    }

    /// Runs until all writes go over the device.
    fn warm_up(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + DEADLINE;
        let mut settled = 0;
        while settled < 16 {
            let before = self.initiator.host_counters().rdma_copies;
            // Parked, so that polling rounds are not counted.
            let batch = self.initiator.submit(&self.requests, DEADLINE)?;
            self.initiator.wait(batch)?;
            self.initiator.release(batch);
            let all = self.initiator.host_counters().rdma_copies == before + self.batch as u64;
            settled = if all { settled + 1 } else { 0 };
            if Instant::now() > until {
                return Err(format!("slices do not go over the device: {:?}", self.initiator.last_problem()).into());
            }
        }
        Ok(())
    }

    fn batch(&mut self) -> Result<(), Failure> {
        let batch = self.initiator.submit(&self.requests, DEADLINE)?;
        while !self.initiator.is_complete(batch) {
            self.initiator.poll()?;
        }
        while self.initiator.host().poll_done().is_some() {}
        let results = self.initiator.results(batch);
        if let Some(failed) = results.iter().find(|result| result.status != Status::Ok) {
            return Err(format!("a slice failed: {}", failed.status).into());
        }
        self.initiator.release(batch);
        Ok(())
    }

    /// Writes this number of slices, rounded up to whole batches.
    pub(super) fn run(&mut self, slices: u64) -> Result<SliceCost, Failure> {
        let before = *self.initiator.host().rdma().counters();
        let start = Instant::now();
        for _ in 0..slices.div_ceil(self.batch as u64) {
            self.batch()?;
        }
        let elapsed = start.elapsed();
        let after = *self.initiator.host().rdma().counters();
        let counters = RdmaCounters {
            requests: after.requests - before.requests,
            doorbells: after.doorbells - before.doorbells,
            signalled: after.signalled - before.signalled,
            ..RdmaCounters::default()
        };
        Ok(SliceCost { elapsed, counters })
    }
}

/// Starts a shard that has memory and sleeps.
fn serve(host: &HostConfig) -> Result<ShardHandle, Failure> {
    let identity = Identity {
        cluster: CLUSTER.to_owned(),
        node: NodeId(1),
        incarnation: Incarnation(1),
        shard: ShardId(0),
        segment_name: "bench".to_owned(),
    };
    Ok(Shard::start(ShardConfig {
        identity,
        core: None,
        pacing: Pacing::Park,
        listen: Listen { tcp: ([127, 0, 0, 1], 0).into(), shm: None, mooncake: None, handed: None },
        pool: None,
        store: None,
        first_version: Version(1),
        host: host.clone(),
    })?)
}
