//! Puts under keys that hold the remains of a striped object that lost stripes. Gets and existence queries treat such
//! an object as missing, so a put replaces it.

use kvplane_client::{Request, TaskResult};
use kvplane_proto::{Digest, Status};

use crate::client::Client;
use crate::error::Error;

/// Returns the digest of the object that a put, or the opening of a put session, creates.
const fn made_by(request: &Request) -> Option<Digest> {
    match request {
        Request::Put(digest, ..) | Request::PutAs(digest, ..) | Request::Begin(digest, ..) => Some(*digest),
        _ => None,
    }
}

impl Client {
    /// Like [`Self::run_puts`], and repeats the puts that were refused because of the remains of a striped object.
    pub(in crate::client) fn run_new_puts(&mut self, requests: &[Request]) -> Result<Vec<TaskResult>, Error> {
        let mut results = self.run_puts(requests)?;
        self.put_over_remains(requests, &mut results)?;
        Ok(results)
    }

    /// Repeats those of the client's puts that were answered `Exists` where no complete object exists. If the owners do
    /// not answer, the results stay unchanged.
    pub(in crate::client) fn put_over_remains(
        &mut self,
        requests: &[Request],
        results: &mut [TaskResult],
    ) -> Result<(), Error> {
        let refused = (0..results.len()).filter(|at| results[*at].status == Status::Exists);
        let refused: Vec<(usize, Digest)> = refused.filter_map(|at| Some((at, made_by(&requests[at])?))).collect();
        if refused.is_empty() {
            return Ok(());
        }
        let digests: Vec<Digest> = refused.iter().map(|(_, digest)| *digest).collect();
        let Ok(there) = self.batch_exists_by_digest(&digests) else { return Ok(()) };
        let gone = refused.iter().zip(there).filter(|(_, there)| !there);
        let gone: Vec<(usize, Digest)> = gone.map(|(refused, _)| *refused).collect();
        if gone.is_empty() {
            return Ok(());
        }
        for (_, digest) in &gone {
            // If the remains cannot be removed, the put is answered `Exists` again.
            let _ = self.remove_remains(*digest);
        }
        let again: Vec<Request> = gone.iter().map(|(at, _)| requests[*at]).collect();
        for ((at, _), result) in gone.iter().zip(self.run_puts(&again)?) {
            results[*at] = result;
        }
        Ok(())
    }
}
