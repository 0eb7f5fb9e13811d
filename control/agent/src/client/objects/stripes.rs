//! Striped objects: gets, removals and queries of objects that have a stripe head.

use std::time::Duration;

use kvplane_client::{Local, Request, TaskResult};
use kvplane_engine::Slice;
use kvplane_proto::message::{KeyPage, PageQuery};
use kvplane_proto::{Digest, Status, Version};

use super::{HEAD_BYTES, Head, Objects};
use crate::client::outcome::Got;
use crate::error::Error;

/// Attempts to read a striped object that is replaced meanwhile.
const TRIES: usize = 4;
/// Existence queries per batch when the stripes of objects are checked.
const STRIPES_TOGETHER: usize = 1 << 16;
/// Longest wait of a get for the certainty that a stripe is lost: a node in recovery does not confirm that before
/// recovery is complete, and a later get may ask again.
const CERTAIN: Duration = Duration::from_millis(100);

impl Objects {
    /// Returns the stripe head of an object; `None` where there is none.
    pub(in crate::client) fn head_of(&mut self, digest: Digest) -> Result<Option<Head>, Error> {
        Ok(self.heads_of(&[digest])?.pop().flatten().map(|(head, _)| head))
    }

    /// Returns stripe heads and their versions; `None` for an object that is not a stripe head.
    pub(in crate::client) fn heads_of(&mut self, digests: &[Digest]) -> Result<Vec<Option<(Head, Version)>>, Error> {
        let bounce = self.heads.at_least(HEAD_BYTES * digests.len().max(1), &mut self.requester)?;
        let local = |at: usize| bounce.slice(at * HEAD_BYTES, HEAD_BYTES).local();
        let asked = digests.iter().enumerate();
        let requests: Vec<Request> = asked.map(|(at, digest)| Request::GetHead(*digest, local(at))).collect();
        let results = if requests.is_empty() { Vec::new() } else { self.requester.run(&requests)? };
        let heads = results.into_iter().enumerate().map(|(at, result)| match (result.status, result.bytes) {
            (Status::Ok, bytes) if bytes == HEAD_BYTES as u64 => {
                let mut head = [0; HEAD_BYTES];
                bounce.region().copy_out(at * HEAD_BYTES, &mut head);
                Ok(Head::decode(&head).map(|head| (head, result.version)))
            }
            (Status::Ok | Status::NotFound | Status::BufferTooSmall, _) => Ok(None),
            (status, _) => Err(self.requester.problem("get of a stripe head".to_owned(), status)),
        });
        heads.collect()
    }

    /// Reads a striped object into memory.
    pub(in crate::client) fn get_striped(&mut self, digest: Digest, slice: Slice) -> Result<Option<Got>, Error> {
        for _ in 0..TRIES {
            let Some((head, version)) = self.heads_of(&[digest])?.pop().flatten() else { return Ok(None) };
            if head.bytes > slice.local().bytes {
                let what = format!("get of {} bytes into {}", head.bytes, slice.local().bytes);
                return Err(self.requester.problem(what, Status::BufferTooSmall));
            }
            let requests = (0..head.stripes()).map(|stripe| {
                let (offset, bytes) = head.place(stripe);
                let local = Local { offset: slice.local().offset + offset, bytes, ..slice.local() };
                Request::Get(head.digest(digest, stripe), local)
            });
            let requests: Vec<Request> = requests.collect();
            let Some(lost) = self.first_lost(&requests)? else {
                return Ok(Some(Got { bytes: head.bytes, version }));
            };
            if self.is_still(digest, version)? {
                self.drop_broken(digest, &head, version, lost);
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Reads a range of a striped object into memory; returns the object's version.
    pub(in crate::client) fn get_striped_range(
        &mut self,
        digest: Digest,
        offset: u64,
        into: Local,
    ) -> Result<Option<Version>, Error> {
        for _ in 0..TRIES {
            let Some((head, version)) = self.heads_of(&[digest])?.pop().flatten() else { return Ok(None) };
            let Some(end) = offset.checked_add(into.bytes).filter(|end| *end <= head.bytes) else {
                let what = format!("get of {} bytes at {offset} of an object of {}", into.bytes, head.bytes);
                return Err(self.requester.problem(what, Status::OutOfRange));
            };
            let stripes = offset / head.stripe_bytes..end.div_ceil(head.stripe_bytes);
            let requests = stripes.map(|stripe| {
                let (start, bytes) = head.place(stripe);
                let (from, until) = (offset.max(start), end.min(start + bytes));
                let local = Local { offset: into.offset + (from - offset), bytes: until - from, ..into };
                Request::GetRange(head.digest(digest, stripe), from - start, local)
            });
            let requests: Vec<Request> = requests.collect();
            let Some(lost) = self.first_lost(&requests)? else { return Ok(Some(version)) };
            if self.is_still(digest, version)? {
                self.drop_broken(digest, &head, version, lost);
                return Ok(None);
            }
        }
        Ok(None)
    }

    /// Returns true while the stripe head has this version, so that a missing stripe is lost, or not recovered yet.
    fn is_still(&mut self, digest: Digest, version: Version) -> Result<bool, Error> {
        Ok(self.heads_of(&[digest])?.pop().flatten().is_none_or(|(_, now)| now == version))
    }

    /// Removes the remains of a striped object that lost stripes, if there are any.
    pub(in crate::client) fn remove_remains(&mut self, digest: Digest) -> Result<(), Error> {
        let Some((head, version)) = self.heads_of(&[digest])?.pop().flatten() else { return Ok(()) };
        let stripes: Vec<Digest> = head.digests(digest).collect();
        let requests: Vec<Request> = stripes.iter().copied().map(Request::Exists).collect();
        let results = self.requester.run(&requests)?;
        let lost = stripes.into_iter().zip(results).find(|(_, result)| result.status == Status::NotFound);
        if let Some((lost, _)) = lost
            && self.is_still(digest, version)?
        {
            self.drop_broken(digest, &head, version, lost);
        }
        Ok(())
    }

    /// Removes the remains of an object whose stripe `lost` is missing, if it is certain that the stripe is lost: a
    /// node in recovery finds its stripes one by one. Only this version of the stripe head is removed, so that no newer
    /// put is affected. Errors are ignored: the object is a miss, and the next get tries again.
    fn drop_broken(&mut self, digest: Digest, head: &Head, version: Version, lost: Digest) {
        let soon = self.requester.deadline().min(CERTAIN);
        let is_certain = self.within(soon, |objects| objects.is_gone(lost));
        if !is_certain.unwrap_or(false) {
            return;
        }
        let removed = self.requester.run_one(Request::RemoveHeadOf(digest, version));
        if removed.is_ok_and(|removed| removed.status == Status::Ok) {
            let _ = self.remove_stripes(digest, head);
        }
    }

    /// Returns true only where the owner has recovered everything that it holds and has no such object.
    fn is_gone(&mut self, digest: Digest) -> Result<bool, Error> {
        let from = PageQuery { one: true, ..PageQuery::default() };
        let (status, body) = self.requester.list(digest, from)?;
        let page = body.as_deref().filter(|_| status == Status::Ok).and_then(KeyPage::decode);
        Ok(page.is_some_and(|page| page.keys().all(|view| view.item.digest != digest)))
    }

    /// Runs gets of stripes; returns the first stripe that is missing, or `None` if all succeeded.
    fn first_lost(&mut self, requests: &[Request]) -> Result<Option<Digest>, Error> {
        let results = self.requester.run(requests)?;
        let lost = requests.iter().zip(&results).find(|(_, result)| result.status == Status::NotFound);
        if let Some((Request::Get(stripe, _) | Request::GetRange(stripe, ..), _)) = lost {
            return Ok(Some(*stripe));
        }
        let failed = results.iter().find(|result| result.status != Status::Ok);
        match failed {
            Some(result) => Err(self.requester.problem("get of a stripe".to_owned(), result.status)),
            None => Ok(None),
        }
    }

    /// Removes a stripe head and its stripes. Returns true if the stripe head existed.
    fn remove_head(&mut self, digest: Digest, head: &Head) -> Result<bool, Error> {
        let result = self.requester.run_one(Request::RemoveHead(digest))?;
        let removed = self.requester.present(result, "remove")?;
        self.remove_stripes(digest, head)?;
        Ok(removed)
    }

    pub(in crate::client) fn remove_stripes(&mut self, digest: Digest, head: &Head) -> Result<(), Error> {
        let requests: Vec<Request> = head.digests(digest).map(Request::Remove).collect();
        for result in self.requester.run(&requests)? {
            self.requester.present(result, "remove of a stripe")?;
        }
        Ok(())
    }

    /// Returns the stripe heads of objects whose stripes all exist, without reading these; `None` for objects that lack
    /// one.
    fn whole_heads(&mut self, digests: &[Digest]) -> Result<Vec<Option<Head>>, Error> {
        let heads = self.heads_of(digests)?;
        let mut heads: Vec<Option<Head>> = heads.into_iter().map(|head| Some(head?.0)).collect();
        let stripes =
            digests.iter().zip(&heads).enumerate().filter_map(|(at, (digest, head))| Some((at, *digest, (*head)?)));
        let stripes: Vec<(usize, Digest)> =
            stripes.flat_map(|(at, digest, head)| head.digests(digest).map(move |stripe| (at, stripe))).collect();
        for part in stripes.chunks(STRIPES_TOGETHER) {
            let requests: Vec<Request> = part.iter().map(|(_, stripe)| Request::Exists(*stripe)).collect();
            for ((at, _), result) in part.iter().zip(self.requester.run(&requests)?) {
                if !self.requester.present(result, "exists of a stripe")? {
                    heads[*at] = None;
                }
            }
        }
        Ok(heads)
    }

    /// Returns for each stripe head whether all of its stripes exist.
    pub(in crate::client) fn are_whole(&mut self, digests: &[Digest]) -> Result<Vec<bool>, Error> {
        Ok(self.whole_heads(digests)?.into_iter().map(|head| head.is_some()).collect())
    }

    /// Completes the results of queries and removals of striped objects.
    pub(in crate::client) fn resolve_striped(
        &mut self,
        requests: &[Request],
        results: &mut [TaskResult],
    ) -> Result<(), Error> {
        let striped: Vec<usize> = (0..results.len()).filter(|at| results[*at].status == Status::Striped).collect();
        if striped.is_empty() {
            return Ok(());
        }
        let digest_of = |request: &Request| match *request {
            Request::Size(digest) | Request::Exists(digest) | Request::Prefetch(digest) | Request::Remove(digest) => {
                digest
            }
            _ => Digest(0),
        };
        let (removals, asked): (Vec<usize>, Vec<usize>) =
            striped.into_iter().partition(|at| matches!(requests[*at], Request::Remove(_)));
        let digests = |places: &[usize]| places.iter().map(|at| digest_of(&requests[*at])).collect::<Vec<Digest>>();
        for (at, head) in asked.iter().zip(self.whole_heads(&digests(&asked))?) {
            results[*at].status = if head.is_some() { Status::Ok } else { Status::NotFound };
            results[*at].bytes = head.map_or(0, |head| head.bytes);
        }
        let digests = digests(&removals);
        for ((at, digest), head) in removals.into_iter().zip(&digests).zip(self.heads_of(&digests)?) {
            results[at].status = Status::NotFound;
            if let Some((head, _)) = head
                && self.remove_head(*digest, &head)?
            {
                results[at].status = Status::Ok;
            }
        }
        Ok(())
    }

    /// Returns how many of the first `among` stripes of an object are missing.
    pub(in crate::client) fn lost_stripes(&mut self, digest: Digest, head: &Head, among: usize) -> Result<u64, Error> {
        let requests: Vec<Request> = head.digests(digest).take(among).map(Request::Exists).collect();
        let there = self.requester.run(&requests)?;
        Ok(there.iter().filter(|result| result.status == Status::NotFound).count() as u64)
    }

    /// Writes a stripe head into registered memory, as the value of its put.
    pub(in crate::client) fn encode_head(&mut self, head: &Head) -> Result<Slice, Error> {
        let room = self.head_value.at_least(HEAD_BYTES, &mut self.requester)?;
        room.region().copy_in(0, &head.encode());
        Ok(room.slice(0, HEAD_BYTES))
    }

    /// Returns the digests of a striped object's stripe head and stripes; `None` if the object is gone.
    pub(in crate::client) fn parts_of_striped(&mut self, digest: Digest) -> Result<Option<Vec<Digest>>, Error> {
        let parts = |head: Head| core::iter::once(digest).chain(head.digests(digest)).collect();
        Ok(self.head_of(digest)?.map(parts))
    }

    /// Returns the lengths of striped objects by their digests; 0 for an object that no longer exists.
    pub(in crate::client) fn striped_bytes(&mut self, digests: &[Digest]) -> Result<Vec<u64>, Error> {
        let heads = self.whole_heads(digests)?;
        Ok(heads.into_iter().map(|head| head.map_or(0, |head| head.bytes)).collect())
    }
}
