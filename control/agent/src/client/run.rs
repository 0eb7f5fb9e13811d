//! Execution of batches: submit, wait on the caller's thread, and cancel when that wait is interrupted.

use std::time::Duration;

use kvplane_client::{PutBook, Request, TaskResult};
use kvplane_proto::BatchId;
use kvplane_sys::interrupt;

use super::{Client, MAP_LOOK};
use crate::error::Error;

impl Client {
    /// Submits a batch, for callers that keep several open.
    pub(crate) fn submit(&mut self, requests: &[Request], puts: &PutBook) -> Result<BatchId, Error> {
        self.prepare()?;
        Ok(self.initiator.submit_puts(requests, puts, self.deadline)?)
    }

    /// Runs the puts of the client's book as one batch.
    pub(super) fn run_puts(&mut self, requests: &[Request]) -> Result<Vec<TaskResult>, Error> {
        self.prepare()?;
        let batch = self.initiator.submit_puts(requests, &self.puts, self.deadline)?;
        self.wait(batch)?;
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        Ok(results)
    }

    /// Runs requests as one batch and returns their results in order.
    ///
    /// # Errors
    /// When a request is malformed, or the kernel fails; never for the outcomes of the requests themselves.
    pub fn run(&mut self, requests: &[Request]) -> Result<Vec<TaskResult>, Error> {
        self.prepare()?;
        let batch = self.initiator.submit(requests, self.deadline)?;
        self.wait(batch)?;
        let results = self.initiator.results(batch).to_vec();
        self.initiator.release(batch);
        Ok(results)
    }

    pub(super) fn run_one(&mut self, request: Request) -> Result<TaskResult, Error> {
        self.prepare()?;
        let batch = self.initiator.submit(&[request], self.deadline)?;
        self.wait(batch)?;
        let result = self.initiator.results(batch)[0];
        self.initiator.release(batch);
        Ok(result)
    }

    /// Prepares a submission: switches to the newest map, and fails once the caller's waits were interrupted.
    pub(super) fn prepare(&mut self) -> Result<(), Error> {
        self.follow_map();
        if interrupt::is_ended() { Err(Error::interrupted()) } else { Ok(()) }
    }

    /// Returns the length of the next poll round, at most `longest`. Shorter while requests need a newer map, which the
    /// control link is then probed for.
    pub(super) fn look_for_map(&mut self, longest: Duration) -> Duration {
        if !self.initiator.take_map_wanted() {
            return longest;
        }
        self.link.probe();
        MAP_LOOK.min(longest)
    }

    pub(super) fn wait(&mut self, batch: BatchId) -> Result<(), Error> {
        let mut withdrawn = false;
        while !self.initiator.is_complete(batch) {
            // After failures, a newer map may be all that the batch waits for.
            let longest = self.look_for_map(Duration::from_millis(50));
            self.initiator.round(longest, || false)?;
            self.follow_map();
            self.report_silence();
            if !withdrawn && interrupt::ended() {
                // The batch completes when nothing accesses its memory any more.
                self.initiator.cancel(batch);
                withdrawn = true;
            }
        }
        while self.initiator.poll_done().is_some() {}
        Ok(())
    }
}
