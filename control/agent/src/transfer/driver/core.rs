//! What is behind a driver's lock: the initiator, and which batch is which.

use std::sync::Arc;
use std::time::Duration;

use kvplane_engine::{Initiator, Region};
use kvplane_proto::Status;
use kvplane_proto::client::{PeerId, Request, SegmentTarget as Target};

use super::{Driver, Work};
use crate::transfer::batch::State;

/// The initiator and its batches; whoever has the lock drives it.
pub(in crate::transfer) struct Core {
    /// `None` when the kernel failed it: then nothing is in flight and nothing can be.
    initiator: Option<Initiator>,
    /// Batches in flight by the index of their ids.
    batches: Vec<Option<Arc<State>>>,
    /// What the initiator calls the peers, by [`crate::transfer::segment::Remote::peer`].
    peers: Vec<Option<PeerId>>,
    failure: String,
}

impl Core {
    pub(super) const fn new(initiator: Initiator) -> Self {
        Self { initiator: Some(initiator), batches: Vec::new(), peers: Vec::new(), failure: String::new() }
    }

    pub(super) fn begin(&mut self, driver: &Driver, state: &Arc<State>, mut work: Work) {
        let Some(initiator) = &mut self.initiator else {
            state.fail(Status::Unreachable);
            driver.done(state, Some(&self.failure));
            return;
        };
        for remote in state.remotes() {
            let index = remote.peer as usize;
            if self.peers.len() <= index {
                self.peers.resize(index + 1, None);
            }
            self.peers[index].get_or_insert_with(|| initiator.open_peer(remote.address.clone()));
        }
        for request in &mut work.requests {
            let (Request::Read(Target { peer, .. }, _)
            | Request::Write(Target { peer, .. }, _)
            | Request::OpenSegment(peer)) = request
            else {
                continue;
            };
            *peer = self.peers[peer.0 as usize].expect("the peers of a batch were just opened");
        }
        state.start();
        match initiator.submit_by(&work.requests, work.deadline_ns) {
            Ok(batch) => {
                let index = batch.index as usize;
                if self.batches.len() <= index {
                    self.batches.resize(index + 1, None);
                }
                let _ = state.place.set(batch);
                self.batches[index] = Some(Arc::clone(state));
            }
            Err(error) => {
                state.fail(Status::BadRequest);
                driver.done(state, Some(&error.to_string()));
            }
        }
    }

    pub(super) fn cancel(&mut self, state: &State) {
        if let (Some(&batch), Some(initiator)) = (state.place.get(), &mut self.initiator)
            && !state.is_done()
        {
            initiator.cancel(batch);
        }
    }

    pub(super) fn cancel_all(&mut self) {
        for state in self.batches.clone().into_iter().flatten() {
            self.cancel(&state);
        }
    }

    /// One round that waits for nothing.
    pub(super) fn post(&mut self, driver: &Driver) {
        let result = self.initiator.as_mut().map_or(Ok(()), |initiator| initiator.poll().map(|_| ()));
        self.after(driver, result);
    }

    /// One round that waits when there is nothing to do, by the engine's pacing.
    pub(super) fn round(&mut self, driver: &Driver, longest: Duration, pending: impl FnOnce() -> bool) {
        let result = self.initiator.as_mut().map_or(Ok(()), |initiator| initiator.round(longest, pending));
        self.after(driver, result);
    }

    fn after(&mut self, driver: &Driver, result: std::io::Result<()>) {
        match result {
            Ok(()) => self.reap(driver),
            Err(error) => self.fail(driver, &error),
        }
    }

    fn reap(&mut self, driver: &Driver) {
        let Some(initiator) = &mut self.initiator else { return };
        while let Some((batch, task, result)) = initiator.poll_finished() {
            if let Some(Some(state)) = self.batches.get(batch.index as usize) {
                state.part_ended(task, result.status, result.bytes);
            }
        }
        while let Some(batch) = initiator.poll_done() {
            let Some(state) = self.batches.get_mut(batch.index as usize).and_then(Option::take) else { continue };
            if state.wants_description
                && let Some(description) = initiator.take_description(batch)
            {
                let _ = state.description.set(description);
            }
            initiator.release(batch);
            driver.done(&state, initiator.last_problem());
        }
    }

    /// The kernel failed us. Dropping the initiator ends all I/O, so that batches can be told.
    fn fail(&mut self, driver: &Driver, error: &std::io::Error) {
        self.failure = format!("the engine cannot go on: {error}");
        self.initiator = None;
        for state in self.batches.drain(..).flatten() {
            state.fail(Status::Unreachable);
            driver.done(&state, Some(&self.failure));
        }
    }

    pub(super) fn set_buffer(&mut self, index: u32, region: &Arc<Region>) {
        if let Some(initiator) = &mut self.initiator {
            initiator.set_buffer(index, Arc::clone(region));
        }
    }

    pub(super) fn remove_buffer(&mut self, index: u32) {
        if let Some(initiator) = &mut self.initiator {
            initiator.remove_buffer(index);
        }
    }
}
