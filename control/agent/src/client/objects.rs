//! Objects by their digests, striped ones as a whole.
//!
//! A large object is stored as stripes under digests of their own, moved in parallel, and a stripe head that names
//! them. A stripe's digest follows from the object's digest, a nonce drawn for each put, and the stripe's index; so
//! stripes are spread over the cluster, and those of two versions never collide. The stripe head is a short object
//! under the object's own digest. It is put last: a striped object becomes visible when all of it is stored. The
//! stripes of a put that fails are removed again.
//!
//! The client that puts an object stripes it; every client can read it. A striped object that has lost a stripe does
//! not exist for gets, listings, existence and length queries: all of them check its stripes too. A get removes the
//! remains of such an object once the loss is certain, and a new put under its key replaces them.

mod existence;
mod head;
mod stripes;

use std::time::Duration;

use kvplane_client::{PutBook, Request, TaskResult};
use kvplane_engine::Slice;
use kvplane_proto::{Digest, Status};

use super::bounce::BounceBuffer;
use super::outcome::Got;
use super::requester::Requester;
use crate::error::Error;
pub(super) use head::{HEAD_BYTES, Head, STRIPE_LEAST_BYTES, STRIPES_MOST};

/// Objects of the cluster that a requester is connected to.
pub(super) struct Objects {
    requester: Requester,
    /// Memory for stripe heads that are read. It is never that of values, which may be in flight at the same time.
    heads: BounceBuffer,
    /// Memory of the stripe head that is put. Its put reads the stripe heads of other objects before it is repeated.
    head_value: BounceBuffer,
}

impl Objects {
    pub(super) fn new(requester: Requester) -> Self {
        let [heads, head_value] = ["kvplane-heads", "kvplane-head-value"].map(|name| BounceBuffer::new(name, 4096));
        Self { requester, heads, head_value }
    }

    pub(super) const fn requester(&self) -> &Requester {
        &self.requester
    }

    pub(super) const fn requester_mut(&mut self) -> &mut Requester {
        &mut self.requester
    }

    /// Runs `work` with another deadline of its batches.
    pub(super) fn within<T>(&mut self, deadline: Duration, work: impl FnOnce(&mut Self) -> T) -> T {
        let whole = self.requester.replace_deadline(deadline);
        let done = work(self);
        self.requester.replace_deadline(whole);
        done
    }

    /// Runs queries and removals of objects as one batch and returns their results in order.
    pub(super) fn query(&mut self, requests: &[Request]) -> Result<Vec<TaskResult>, Error> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let mut results = self.requester.run(requests)?;
        self.resolve_striped(requests, &mut results)?;
        Ok(results)
    }

    /// Returns true if there is an object.
    pub(super) fn exists(&mut self, digest: Digest) -> Result<bool, Error> {
        let result = self.query(&[Request::Exists(digest)])?.pop();
        result.map_or(Ok(false), |result| self.requester.present(result, "exists"))
    }

    /// Returns the length of an object; `None` if there is none.
    pub(super) fn size(&mut self, digest: Digest) -> Result<Option<u64>, Error> {
        let Some(result) = self.query(&[Request::Size(digest)])?.pop() else { return Ok(None) };
        Ok(self.requester.present(result, "size")?.then_some(result.bytes))
    }

    /// Runs gets into slices of memory as one batch; one outcome for each.
    pub(super) fn get_into(
        &mut self,
        gets: &[Request],
        slices: impl Iterator<Item = Slice>,
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        let results = self.requester.run(gets)?;
        Ok(self.finish_gets(gets, results, slices))
    }

    /// Returns the outcomes of gets, after those of striped objects have been read too.
    pub(super) fn finish_gets(
        &mut self,
        gets: &[Request],
        results: Vec<TaskResult>,
        slices: impl Iterator<Item = Slice>,
    ) -> Vec<Result<Option<Got>, Error>> {
        let outcome = |((result, get), slice): ((TaskResult, &Request), Slice)| match (result.status, get) {
            (Status::Striped, Request::Get(digest, _)) => self.get_striped(*digest, slice),
            _ => self.got(result, slice),
        };
        results.into_iter().zip(gets).zip(slices).map(outcome).collect()
    }

    fn got(&self, result: TaskResult, slice: Slice) -> Result<Option<Got>, Error> {
        match result.status {
            Status::Ok => Ok(Some(Got { bytes: result.bytes, version: result.version })),
            Status::NotFound => Ok(None),
            Status::BufferTooSmall => {
                let what = format!("get of {} bytes into {}", result.bytes, slice.local().bytes);
                Err(self.requester.problem(what, Status::BufferTooSmall))
            }
            status => Err(self.requester.problem("get".to_owned(), status)),
        }
    }

    /// Returns a copy of an object, received through a bounce buffer; `None` if there is none. `get` builds the get of
    /// the object into a slice.
    pub(super) fn get_copy(
        &mut self,
        get: impl Fn(Slice) -> Result<Request, Error>,
        values: &mut BounceBuffer,
    ) -> Result<Option<Vec<u8>>, Error> {
        let mut bounce = values.at_least(0, &mut self.requester)?;
        // An object may be replaced by a longer one between two attempts; repeatedly, that is not to be expected.
        for _ in 0..4 {
            let whole = bounce.slice(0, bounce.region().bytes());
            let request = get(whole)?;
            let result = self.requester.run_one(request)?;
            if result.status == Status::BufferTooSmall {
                let bytes = usize::try_from(result.bytes).unwrap_or(usize::MAX);
                bounce = values.at_least(bytes, &mut self.requester)?;
                continue;
            }
            let got = match (result.status, request) {
                (Status::Striped, Request::Get(digest, _)) => {
                    let Some(head) = self.head_of(digest)? else { continue };
                    let bytes = usize::try_from(head.bytes).unwrap_or(usize::MAX);
                    bounce = values.at_least(bytes, &mut self.requester)?;
                    match self.get_striped(digest, bounce.slice(0, bounce.region().bytes())) {
                        // Replaced by a longer object meanwhile.
                        Err(why) if why.status() == Some(Status::BufferTooSmall) => continue,
                        got => got?,
                    }
                }
                _ => self.got(result, whole)?,
            };
            let Some(got) = got else { return Ok(None) };
            let mut value = vec![0; got.bytes as usize];
            bounce.region().copy_out(0, &mut value);
            return Ok(Some(value));
        }
        Err(self.requester.problem("get".to_owned(), Status::BufferTooSmall))
    }

    /// Runs the puts of a book as one batch, and repeats those that were refused because of the remains of a striped
    /// object that lost stripes. Gets and existence queries treat such an object as missing, so a put replaces it.
    pub(super) fn put_new(&mut self, requests: &[Request], book: &PutBook) -> Result<Vec<TaskResult>, Error> {
        let mut results = self.requester.run_puts(requests, book)?;
        self.put_over_remains(requests, book, &mut results)?;
        Ok(results)
    }

    /// Repeats those of the puts that were answered `Exists` where no complete object exists. If the owners do not
    /// answer, the results stay unchanged.
    pub(super) fn put_over_remains(
        &mut self,
        requests: &[Request],
        book: &PutBook,
        results: &mut [TaskResult],
    ) -> Result<(), Error> {
        let refused = (0..results.len()).filter(|at| results[*at].status == Status::Exists);
        let refused: Vec<(usize, Digest)> = refused.filter_map(|at| Some((at, made_by(&requests[at])?))).collect();
        if refused.is_empty() {
            return Ok(());
        }
        let Ok(there) = self.exist(refused.len(), |at| refused[at].1) else { return Ok(()) };
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
        for ((at, _), result) in gone.iter().zip(self.requester.run_puts(&again, book)?) {
            results[*at] = result;
        }
        Ok(())
    }
}

/// Returns the digest of the object that a put, or the opening of a put session, creates.
const fn made_by(request: &Request) -> Option<Digest> {
    match request {
        Request::Put(digest, ..) | Request::PutAs(digest, ..) | Request::Begin(digest, ..) => Some(*digest),
        _ => None,
    }
}
