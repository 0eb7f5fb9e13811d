//! Asynchronous batches: several are started, and completed later, on the caller's own thread.

use std::time::Duration;

use kvplane_client::{PutBook, Request, TaskResult};
use kvplane_proto::message::{ObjectName, PutOptions};
use kvplane_proto::{BatchId, Digest, Status};

use super::puts::{check_options, put_request};
use super::{Client, Got, Put, Slice};
use crate::error::Error;

/// Limit of open batches of one client.
const OPEN_BATCHES: usize = 256;

/// Longest sleep of one poll round.
const LONGEST: Duration = Duration::from_millis(50);

/// Handle of a started batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Open(BatchId);

/// Outcome of a batch: one result for each of its items, in order.
#[derive(Debug)]
pub enum BatchOutcome {
    /// Results of gets: `None` where there is no object.
    Gets(Vec<Result<Option<Got>, Error>>),
    /// Results of puts.
    Puts(Vec<Result<Put, Error>>),
}

/// Batch whose outcome has not been fetched yet. Batches are kept in the order of their starts.
pub(super) struct PendingBatch {
    batch: BatchId,
    /// Digests of gets, to follow up objects that are striped.
    digests: Vec<Digest>,
    slices: Vec<Slice>,
    /// Requests of puts, to repeat those that meet the remains of a striped object.
    puts: Option<(Vec<Request>, PutBook)>,
}

impl Client {
    /// Starts many gets and returns at once. [`Self::next_finished`], like every call that waits, drives them to
    /// completion. The memory is in use until the batch is finished.
    ///
    /// # Errors
    /// When the batch as a whole is malformed, or too many batches are open: fetch the outcome of one first.
    pub fn start_gets(&mut self, items: &[(impl AsRef<[u8]>, Slice)]) -> Result<Open, Error> {
        let mut requests = Vec::with_capacity(items.len());
        for (key, slice) in items {
            requests.push(self.get_request(key.as_ref(), *slice)?);
        }
        let batch = self.start(&requests, &PutBook::new())?;
        let digest = |request: &Request| match *request {
            Request::Get(digest, _) => Some(digest),
            _ => None,
        };
        let digests = requests.iter().filter_map(digest).collect();
        let slices = items.iter().map(|(_, slice)| *slice).collect();
        self.open.push(PendingBatch { batch, digests, slices, puts: None });
        Ok(Open(batch))
    }

    /// Starts many puts, as [`Self::start_gets`] starts gets. Each object goes in one piece: an object too long for
    /// that fails with [`Status::TooLarge`] and needs [`Self::batch_put_from`].
    ///
    /// # Errors
    /// Errors of [`Self::start_gets`].
    pub fn start_puts(&mut self, items: &[(impl AsRef<[u8]>, Slice)], options: &PutOptions) -> Result<Open, Error> {
        check_options(options)?;
        let (mut puts, mut requests) = (PutBook::new(), Vec::with_capacity(items.len()));
        for (key, slice) in items {
            let name = ObjectName { tenant: &self.tenant, key: key.as_ref() };
            requests.push(put_request(&mut puts, &name, self.keep_keys, slice.local(), options)?);
        }
        let batch = self.start(&requests, &puts)?;
        let slices = items.iter().map(|(_, slice)| *slice).collect();
        self.open.push(PendingBatch { batch, digests: Vec::new(), slices, puts: Some((requests, puts)) });
        Ok(Open(batch))
    }

    /// Waits until a started batch is finished; `None` when no batch is open. Each batch finishes by the client's
    /// deadline.
    ///
    /// # Errors
    /// When the kernel fails; never for the outcomes themselves.
    pub fn next_finished(&mut self) -> Result<Option<(Open, BatchOutcome)>, Error> {
        if self.open.is_empty() {
            return Ok(None);
        }
        loop {
            if let Some(at) = self.open.iter().position(|open| self.initiator.is_complete(open.batch)) {
                let started = self.open.remove(at);
                return Ok(Some((Open(started.batch), self.finish(started)?)));
            }
            let longest = self.look_for_map(LONGEST);
            self.initiator.round(longest, || false)?;
            self.follow_map();
        }
    }

    /// Returns the number of started batches whose outcome has not been fetched.
    #[must_use]
    pub const fn open_batches(&self) -> usize {
        self.open.len()
    }

    fn start(&mut self, requests: &[Request], puts: &PutBook) -> Result<BatchId, Error> {
        if self.open.len() >= OPEN_BATCHES {
            let what = format!("{OPEN_BATCHES} batches are open, which is the limit: fetch the outcome of one first");
            return Err(Error::Status { what, status: Status::Busy, cause: None });
        }
        self.submit(requests, puts)
    }

    fn finish(&mut self, started: PendingBatch) -> Result<BatchOutcome, Error> {
        let mut results: Vec<TaskResult> = self.initiator.results(started.batch).to_vec();
        self.initiator.release(started.batch);
        while self.initiator.poll_done().is_some() {}
        let slices = started.slices;
        if let Some((requests, puts)) = started.puts {
            self.puts = puts;
            self.put_over_remains(&requests, &mut results)?;
            let pairs = results.into_iter().zip(slices);
            return Ok(BatchOutcome::Puts(pairs.map(|(result, slice)| self.stored(result, slice)).collect()));
        }
        let pairs = results.into_iter().zip(&slices);
        let got = |((result, slice), digest): ((TaskResult, &Slice), &Digest)| match result.status {
            Status::Striped => self.get_striped(*digest, *slice),
            _ => self.got(result, *slice),
        };
        Ok(BatchOutcome::Gets(pairs.zip(&started.digests).map(got).collect()))
    }
}
