//! Existence of many objects at once.

use std::time::Instant;

use kvplane_client::Request;
use kvplane_proto::{Digest, Status};

use super::Objects;
use crate::client::requester::Answers;
use crate::error::Error;

impl Objects {
    /// Returns for each of `count` digests whether there is an object. Keys that the batched requests leave unanswered,
    /// because the map changed or a shard was lost, are queried one by one.
    pub(in crate::client) fn exist(
        &mut self,
        count: usize,
        mut digest: impl FnMut(usize) -> Digest,
    ) -> Result<Vec<bool>, Error> {
        let until = Instant::now() + self.requester.deadline();
        let Answers { mut found, heads, unanswered } = self.requester.ask(count, &mut digest)?;
        self.ask_for_stripes(&heads, &mut digest, &mut found)?;
        if unanswered.is_empty() { Ok(found) } else { self.ask_singly(&unanswered, digest, until, found) }
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

    fn ask_singly(
        &mut self,
        unanswered: &[(usize, Status)],
        mut digest: impl FnMut(usize) -> Digest,
        until: Instant,
        mut found: Vec<bool>,
    ) -> Result<Vec<bool>, Error> {
        if unanswered.iter().any(|(_, status)| *status == Status::DeadlineExceeded) {
            return Err(self.requester.problem("exists".to_owned(), Status::DeadlineExceeded));
        }
        let requests: Vec<Request> = unanswered.iter().map(|(at, _)| Request::Exists(digest(*at))).collect();
        let left = until.saturating_duration_since(Instant::now());
        let results = self.within(left, |objects| objects.query(&requests))?;
        for ((at, _), result) in unanswered.iter().zip(results) {
            found[*at] = self.requester.present(result, "exists")?;
        }
        Ok(found)
    }
}
