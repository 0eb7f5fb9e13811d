//! Existence of many keys at once.
//!
//! A batch is one request to each owner, which replies with one bit for each key. Keys that such a request leaves
//! unanswered, because the map changed or a shard was lost, are queried one by one.

use std::time::Instant;

use kvplane_client::Request;
use kvplane_proto::digest::KeysOf;
use kvplane_proto::{Digest, Limits, Status};

use crate::client::{Client, check_key};
use crate::error::Error;

/// Keys per request. Shards look up the first ones of a longer list while the rest is prepared.
const TOGETHER: usize = Limits::QUESTIONS_PER_FRAME;

impl Client {
    /// Returns for each key whether there is an object. Does not count as an access. Each owner gets one request for
    /// every 32,768 keys of the list.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_exists(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        keys.iter().try_for_each(|key| check_key(key.as_ref()))?;
        let tenant = self.tenant.clone();
        let mut names = KeysOf::new(&tenant);
        self.ask(keys.len(), |at| names.digest(keys[at].as_ref()))
    }

    /// Like [`Self::batch_exists`], by digests as [`Self::digest`] returns them.
    ///
    /// # Errors
    /// When an owner does not answer.
    pub fn batch_exists_by_digest(&mut self, digests: &[Digest]) -> Result<Vec<bool>, Error> {
        self.ask(digests.len(), |at| digests[at])
    }

    fn ask(&mut self, count: usize, mut digest: impl FnMut(usize) -> Digest) -> Result<Vec<bool>, Error> {
        let until = Instant::now() + self.deadline;
        self.prepare()?;
        let (mut open, mut refused, mut digests, mut heads) =
            (Vec::new(), None, Vec::with_capacity(TOGETHER.min(count)), Vec::new());
        for from in (0..count).step_by(TOGETHER) {
            digests.clear();
            digests.extend((from..count.min(from + TOGETHER)).map(&mut digest));
            match self.initiator.submit_asks(&digests, self.deadline) {
                Ok(batch) => open.push((from, batch)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
            self.initiator.poll()?;
        }
        let (mut found, mut unanswered) = (Vec::with_capacity(count), Vec::new());
        for (from, batch) in open {
            self.wait(batch)?;
            found.extend_from_slice(self.initiator.found(batch));
            heads.extend(self.initiator.found_heads(batch).iter().map(|at| from + at));
            unanswered.extend(self.initiator.unanswered(batch).into_iter().map(|(at, status)| (from + at, status)));
            self.initiator.release(batch);
        }
        match refused {
            Some(error) => Err(error.into()),
            None => {
                self.ask_for_stripes(&heads, &mut digest, &mut found)?;
                if unanswered.is_empty() { Ok(found) } else { self.ask_singly(&unanswered, digest, until, found) }
            }
        }
    }

    /// Resolves stripe heads: an object exists if all of its stripes do.
    fn ask_for_stripes(
        &mut self,
        heads: &[usize],
        digest: &mut impl FnMut(usize) -> Digest,
        found: &mut [bool],
    ) -> Result<(), Error> {
        if heads.is_empty() {
            return Ok(());
        }
        let digests: Vec<Digest> = heads.iter().map(|at| digest(*at)).collect();
        for (at, whole) in heads.iter().zip(self.are_whole(&digests)?) {
            found[*at] = whole;
        }
        Ok(())
    }

    /// Queries the keys that the batched requests left unanswered, one by one.
    fn ask_singly(
        &mut self,
        unanswered: &[(usize, Status)],
        mut digest: impl FnMut(usize) -> Digest,
        until: Instant,
        mut found: Vec<bool>,
    ) -> Result<Vec<bool>, Error> {
        if unanswered.iter().any(|(_, status)| *status == Status::DeadlineExceeded) {
            return Err(self.problem("exists".to_owned(), Status::DeadlineExceeded));
        }
        let requests: Vec<Request> = unanswered.iter().map(|(at, _)| Request::Exists(digest(*at))).collect();
        let whole = core::mem::replace(&mut self.deadline, until.saturating_duration_since(Instant::now()));
        let results = self.run(&requests).and_then(|mut results| {
            self.resolve_striped(&requests, &mut results)?;
            Ok(results)
        });
        self.deadline = whole;
        for ((at, _), result) in unanswered.iter().zip(results?) {
            found[*at] = self.present(result, "exists")?;
        }
        Ok(found)
    }
}
