//! Batches that are started now and finished later, on the caller's own thread.

use kvplane_client::{PutBook, Request};
use kvplane_engine::Slice;
use kvplane_proto::message::PutOptions;
use kvplane_proto::{BatchId, Status};

use super::namespace::{Namespace, check_options};
use super::objects::Objects;
use super::outcome::{Got, Put};
use crate::error::Error;

/// Limit of open batches of one client.
const OPEN_BATCHES: usize = 256;

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

/// Batch whose outcome has not been fetched yet.
pub(super) struct PendingBatch {
    batch: BatchId,
    /// Requests, to follow up gets of striped objects, and to repeat puts that meet the remains of one.
    requests: Vec<Request>,
    slices: Vec<Slice>,
    /// Names and options of puts; `None` for gets.
    puts: Option<PutBook>,
}

/// Open batches of a client, in flight at the same time: [`Client::batches`](super::Client::batches). Every call of the
/// client that waits drives them to completion.
pub struct OpenBatches<'a> {
    pub(super) objects: &'a mut Objects,
    pub(super) namespace: &'a Namespace,
    /// Batches in the order of their starts.
    pub(super) pending: &'a mut Vec<PendingBatch>,
}

impl OpenBatches<'_> {
    /// Starts many gets and returns at once. The memory is in use until the batch is finished.
    ///
    /// # Errors
    /// When the batch as a whole is malformed, or too many batches are open: fetch the outcome of one first.
    pub fn start_gets(&mut self, items: &[(impl AsRef<[u8]>, Slice)]) -> Result<Open, Error> {
        let mut requests = Vec::with_capacity(items.len());
        for (key, slice) in items {
            requests.push(self.namespace.get(key.as_ref(), *slice)?);
        }
        self.start(requests, items, None)
    }

    /// Starts many puts, as [`Self::start_gets`] starts gets. Each object goes in one piece: an object too long for
    /// that fails with [`Status::TooLarge`] and needs [`Client::batch_put_from`](super::Client::batch_put_from).
    ///
    /// # Errors
    /// Errors of [`Self::start_gets`].
    pub fn start_puts(&mut self, items: &[(impl AsRef<[u8]>, Slice)], options: &PutOptions) -> Result<Open, Error> {
        check_options(options)?;
        let (mut puts, mut requests) = (PutBook::new(), Vec::with_capacity(items.len()));
        for (key, slice) in items {
            requests.push(self.namespace.put(&mut puts, key.as_ref(), slice.local(), options)?);
        }
        self.start(requests, items, Some(puts))
    }

    /// Waits until a started batch is finished; `None` when no batch is open. Each batch finishes by the client's
    /// deadline.
    ///
    /// # Errors
    /// When the kernel fails; never for the outcomes themselves.
    pub fn next_finished(&mut self) -> Result<Option<(Open, BatchOutcome)>, Error> {
        if self.pending.is_empty() {
            return Ok(None);
        }
        loop {
            let requester = self.objects.requester_mut();
            if let Some(at) = self.pending.iter().position(|open| requester.initiator().is_complete(open.batch)) {
                let finished = self.pending.remove(at);
                return Ok(Some((Open(finished.batch), self.finish(finished)?)));
            }
            requester.round()?;
        }
    }

    /// Returns the number of started batches whose outcome has not been fetched.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.pending.len()
    }

    fn start(
        &mut self,
        requests: Vec<Request>,
        items: &[(impl AsRef<[u8]>, Slice)],
        puts: Option<PutBook>,
    ) -> Result<Open, Error> {
        if self.pending.len() >= OPEN_BATCHES {
            let what = format!("{OPEN_BATCHES} batches are open, which is the limit: fetch the outcome of one first");
            return Err(Error::Status { what, status: Status::Busy, cause: None });
        }
        let batch = self.objects.requester_mut().submit(&requests, puts.as_ref().unwrap_or(&PutBook::new()))?;
        let slices = items.iter().map(|(_, slice)| *slice).collect();
        self.pending.push(PendingBatch { batch, requests, slices, puts });
        Ok(Open(batch))
    }

    fn finish(&mut self, finished: PendingBatch) -> Result<BatchOutcome, Error> {
        let PendingBatch { batch, requests, slices, puts } = finished;
        let requester = self.objects.requester_mut();
        let mut results = requester.take_results(batch);
        requester.forget_completions();
        let Some(puts) = puts else {
            return Ok(BatchOutcome::Gets(self.objects.finish_gets(&requests, results, slices.into_iter())));
        };
        self.objects.put_over_remains(&requests, &puts, &mut results)?;
        let requester = self.objects.requester();
        let stored =
            results.into_iter().zip(slices).map(|(result, slice)| requester.stored(result, slice.local().bytes));
        Ok(BatchOutcome::Puts(stored.collect()))
    }
}
