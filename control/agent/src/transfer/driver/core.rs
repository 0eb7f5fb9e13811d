//! What is behind a driver's lock: the initiator, and which batch is which.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvplane_engine::{DirectFile, Initiator, Region};
use kvplane_proto::client::{Client, PeerId, Request};
use kvplane_proto::{SegmentId, Status};

use super::{Command, Driver, Work};
use crate::transfer::batch::State;
use crate::transfer::peers::{Departures, Peer};

/// Connections to peers that are left are reset in one round, and mostly gone in the next: nobody may drive after that.
const LEAVING_ROUNDS: u32 = 2;

/// A peer as the initiator knows it.
struct Known {
    peer: Weak<Peer>,
    id: PeerId,
    /// The initiator's id for the file, where the peer stands for one.
    file: Option<SegmentId>,
}

impl Known {
    fn open(initiator: &mut Initiator, peer: &Arc<Peer>) -> Self {
        Self { peer: Arc::downgrade(peer), id: initiator.open_peer(peer.address.clone()), file: None }
    }
}

/// The initiator and its batches; whoever has the lock drives it.
pub(in crate::transfer) struct Core {
    /// `None` when the kernel failed it: then nothing is in flight and nothing can be.
    initiator: Option<Initiator>,
    /// Batches in flight by the index of their ids.
    batches: Vec<Option<Arc<State>>>,
    /// What was taken from the inbox and not done yet.
    pub(super) todo: VecDeque<Command>,
    /// The batch that begins or ends at the moment: it is not to be lost where that panics.
    in_hand: Option<Arc<State>>,
    /// The peers that were asked, by their numbers.
    peers: HashMap<u64, Known>,
    /// Whom a batch asks, by position, while it begins.
    asked: Vec<(PeerId, Option<SegmentId>)>,
    departures: Departures,
    /// Of those, how many were looked at.
    departed: u64,
    failure: String,
}

impl Core {
    pub(super) fn new(initiator: Initiator, departures: Departures) -> Self {
        Self {
            initiator: Some(initiator),
            batches: Vec::new(),
            todo: VecDeque::new(),
            in_hand: None,
            peers: HashMap::new(),
            asked: Vec::new(),
            departures,
            departed: 0,
            failure: String::new(),
        }
    }

    /// Does what was taken from the inbox.
    pub(super) fn obey(&mut self, driver: &Driver) {
        while let Some(command) = self.todo.pop_front() {
            match command {
                Command::Submit(state, work) => self.begin(driver, &state, work),
                Command::Cancel(state) => self.cancel(&state),
            }
        }
    }

    pub(super) fn begin(&mut self, driver: &Driver, state: &Arc<State>, mut work: Work) {
        self.in_hand = Some(Arc::clone(state));
        let Some(initiator) = &mut self.initiator else {
            self.in_hand = None;
            state.fail(Status::Unreachable);
            driver.done(state, Some(&self.failure));
            return;
        };
        self.asked.clear();
        for remote in &*state.remotes() {
            let known = self.peers.entry(remote.peer.number).or_insert_with(|| Known::open(initiator, &remote.peer));
            self.asked.push((known.id, known.file));
        }
        for request in &mut work.requests {
            match request {
                Request::Read(target, _) | Request::Write(target, _) => {
                    let (peer, file) = self.asked[target.peer.0 as usize];
                    (target.peer, target.segment) = (peer, file.unwrap_or(target.segment));
                }
                Request::OpenSegment(peer) => *peer = self.asked[peer.0 as usize].0,
                _ => {}
            }
        }
        state.start();
        match initiator.submit_with(&work.requests, &work.options) {
            Ok(batch) => {
                let index = batch.index as usize;
                if self.batches.len() <= index {
                    self.batches.resize(index + 1, None);
                }
                let _ = state.place.set(batch);
                self.batches[index] = self.in_hand.take();
            }
            Err(error) => {
                self.in_hand = None;
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

    fn after(&mut self, driver: &Driver, mut result: std::io::Result<()>) {
        let mut rounds = 0;
        while result.is_ok() {
            self.reap(driver);
            // What ended may have been the last to hold a peer.
            if self.leave_departed() {
                rounds = LEAVING_ROUNDS;
            }
            if rounds == 0 {
                return;
            }
            rounds -= 1;
            result = self.initiator.as_mut().map_or(Ok(()), |initiator| initiator.poll().map(|_| ()));
        }
        if let Err(error) = result {
            self.fail(driver, &error.to_string());
        }
    }

    /// Closes the peers that nobody holds any more; whether it looked for some.
    fn leave_departed(&mut self) -> bool {
        let (departed, Some(initiator)) = (self.departures.count(), &mut self.initiator) else { return false };
        if departed == self.departed {
            return false;
        }
        self.departed = departed;
        self.peers.retain(|_, known| {
            let held = known.peer.strong_count() > 0;
            if !held {
                initiator.close_peer(known.id);
                if let Some(file) = known.file {
                    initiator.host().close_file(file);
                }
            }
            held
        });
        true
    }

    /// Lets batches ask for this file.
    ///
    /// # Errors
    /// When it is one too many, or nothing can be asked any more.
    pub(in crate::transfer) fn add_file(&mut self, peer: &Arc<Peer>, file: Arc<DirectFile>) -> std::io::Result<()> {
        let initiator = self.initiator.as_mut().ok_or_else(|| std::io::Error::other(self.failure.clone()))?;
        let file = initiator.host().add_file(file)?;
        let known = Known { file: Some(file), ..Known::open(initiator, peer) };
        self.peers.insert(peer.number, known);
        Ok(())
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
            self.in_hand = Some(Arc::clone(&state));
            if state.wants_description
                && let Some(description) = initiator.take_description(batch)
            {
                let _ = state.description.set(description);
            }
            initiator.release(batch);
            self.in_hand = None;
            driver.done(&state, initiator.last_problem());
        }
    }

    /// The kernel failed us, or we did. Dropping the initiator ends all I/O, so that batches can be told.
    pub(super) fn fail(&mut self, driver: &Driver, why: &str) {
        self.failure = driver.broken.get_or_init(|| format!("the engine cannot go on: {why}")).clone();
        // Taken first: should its end panic too, it is not there any more when this is tried again.
        drop(self.initiator.take());
        let todo = self.todo.drain(..).filter_map(|command| match command {
            Command::Submit(state, _) => Some(state),
            Command::Cancel(_) => None,
        });
        for state in self.batches.drain(..).flatten().chain(self.in_hand.take()).chain(todo) {
            state.fail(Status::Unreachable);
            driver.done(&state, Some(&self.failure));
        }
    }

    /// The initiator's books, and the names of its peers; none when it failed.
    pub(in crate::transfer) fn books(&mut self) -> Option<(&Client, HashMap<PeerId, String>)> {
        let name = |known: &Known| Some((known.id, known.peer.upgrade()?.name()));
        Some((self.initiator.as_mut()?.books(), self.peers.values().filter_map(name).collect()))
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
