//! Batches that are started now and finished later, several at a time, on the caller's own thread.

use std::time::Duration;

use kvplane_client::{PutBook, Request, TaskResult};
use kvplane_proto::message::{ObjectName, PutOptions};
use kvplane_proto::{BatchId, Digest, Status};

use super::puts::{check_options, put_request};
use super::{Client, Got, Put, Slice};
use crate::error::Error;

/// Batches that one client may have open.
const OPEN_BATCHES: usize = 256;

/// The longest sleep between two looks.
const LONGEST: Duration = Duration::from_millis(50);

/// A batch that was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Open(BatchId);

/// What became of a batch: one outcome for each of its items, in order.
#[derive(Debug)]
pub enum BatchOutcome {
    /// Of gets: `None` where there is no object.
    Gets(Vec<Result<Option<Got>, Error>>),
    /// Of puts.
    Puts(Vec<Result<Put, Error>>),
}

/// A batch of which the outcome is still to be fetched, in the order of their starts.
pub(super) struct PendingBatch {
    batch: BatchId,
    /// Of gets, to follow up with what is kept in stripes.
    digests: Vec<Digest>,
    slices: Vec<Slice>,
    /// Of puts, to make those again that meet what is left of an object.
    puts: Option<(Vec<Request>, PutBook)>,
}

impl Client {
    /// Starts bringing many and does not wait: [`Self::next_finished`] does, and moves what is to be moved meanwhile.
    /// So do all calls that wait. The memory is in use until the batch is finished.
    ///
    /// # Errors
    /// When the batch as a whole is malformed, or too many are open: fetch the outcome of one first.
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

    /// Starts storing many, as [`Self::start_gets`] starts bringing them. Each in one piece: what is too long for that
    /// is refused as [`Status::TooLarge`], and is for [`Self::batch_put_from`].
    ///
    /// # Errors
    /// As there.
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

    /// Waits until a batch that was started is finished; `None` when none is open. Each ends by the client's deadline.
    ///
    /// # Errors
    /// When the kernel fails us; never for the outcomes themselves.
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

    /// Batches that were started and are not finished, or their outcome not fetched.
    #[must_use]
    pub const fn open_batches(&self) -> usize {
        self.open.len()
    }

    fn start(&mut self, requests: &[Request], puts: &PutBook) -> Result<BatchId, Error> {
        if self.open.len() >= OPEN_BATCHES {
            let what =
                format!("{OPEN_BATCHES} batches are open, the most there may be: fetch the outcome of one first");
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
