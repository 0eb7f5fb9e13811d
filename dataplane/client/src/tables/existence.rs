//! Existence queries of many objects: one request for each owner, and one slice for all of its objects.
//!
//! A result, a slice and a route for each object would cost more than to look the object up. Instead the digests are
//! sorted by owner, and each owner's part of the list is one request. The reply has one bit for each object.
//!
//! Such a request is never retried: if its shard does not own all of its objects, or is unreachable, the request fails,
//! and the caller queries each of its objects separately ([`Batches::unanswered`](crate::Batches::unanswered)). So this
//! module is independent of map changes.

use kvplane_proto::digest::{DIGEST_BYTES, Digest};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::Bitmap;
use kvplane_proto::status::Status;

use crate::types::{PeerId, Request, TaskResult};

/// Existence queries of a batch.
pub(crate) struct ExistenceBatch {
    /// Digests in wire format, grouped by owner.
    list: Vec<[u8; DIGEST_BYTES]>,
    /// Position of each digest in the caller's list; empty if the order is the same.
    places: Vec<u32>,
    /// Number of digests of each request.
    parts: Vec<u32>,
    /// Result for each of the caller's positions: true if the object exists.
    found: Vec<bool>,
    /// Positions in the caller's list of existing objects that are stripe heads.
    heads: Vec<usize>,
}

impl ExistenceBatch {
    pub(crate) const fn new() -> Self {
        Self { list: Vec::new(), places: Vec::new(), parts: Vec::new(), found: Vec::new(), heads: Vec::new() }
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.places.clear();
        self.parts.clear();
        self.found.clear();
        self.heads.clear();
    }

    /// Returns true if its allocations are small enough to be kept for reuse.
    pub(crate) const fn is_worth_keeping(&self) -> bool {
        self.list.capacity() <= Limits::QUESTIONS_PER_FRAME && self.places.capacity() <= Limits::QUESTIONS_PER_FRAME
    }

    /// Returns the position in the caller's list of a position in ours.
    fn place(&self, at: usize) -> usize {
        self.places.get(at).map_or(at, |place| *place as usize)
    }

    /// Sorts digests by owner, and creates a request for each owner's part.
    pub(crate) fn fill(
        &mut self,
        digests: &[Digest],
        mut owner_of: impl FnMut(Digest) -> Option<PeerId>,
    ) -> Vec<Request> {
        self.clear();
        let mut requests = Vec::new();
        let Some(&first) = digests.first() else { return requests };
        let owner = owner_of(first);
        let alike = digests.iter().take_while(|digest| owner_of(**digest) == owner).count();
        if alike == digests.len() {
            self.list.extend(digests.iter().map(|digest| digest.to_bytes()));
            push_requests(digests.iter().copied(), 0, digests.len(), &mut requests);
        } else {
            self.sort_by_owner(digests, owner_of, &mut requests);
        }
        let count = |request: &Request| if let Request::Asks(_, _, count) = request { *count } else { 0 };
        self.parts.extend(requests.iter().map(count));
        self.found.resize(digests.len(), false);
        requests
    }

    /// Counting sort: there are few owners and many objects.
    fn sort_by_owner(
        &mut self,
        digests: &[Digest],
        owner_of: impl FnMut(Digest) -> Option<PeerId>,
        requests: &mut Vec<Request>,
    ) {
        let owners: Vec<Option<PeerId>> = digests.iter().copied().map(owner_of).collect();
        // Digests without an owner come last.
        let peers = owners.iter().flatten().map(|peer| peer.0 as usize + 1).max().unwrap_or(0);
        let bin = |owner: Option<PeerId>| owner.map_or(peers, |peer| peer.0 as usize);
        let mut counts = vec![0_u32; peers + 1];
        owners.iter().for_each(|owner| counts[bin(*owner)] += 1);
        let mut next = Vec::with_capacity(counts.len());
        let mut sum = 0;
        for count in &counts {
            next.push(sum);
            sum += count;
        }
        self.places.resize(digests.len(), 0);
        for (place, owner) in (0..).zip(&owners) {
            let at = &mut next[bin(*owner)];
            self.places[*at as usize] = place;
            *at += 1;
        }
        let listed = |at: usize| digests[self.places[at] as usize];
        self.list.extend((0..digests.len()).map(|at| listed(at).to_bytes()));
        let mut from = 0;
        for count in counts.into_iter().map(|count| count as usize).filter(|count| *count > 0) {
            push_requests((from..from + count).map(listed), from, count, requests);
            from += count;
        }
    }

    /// Returns so many digests from this position on, in wire format.
    pub(crate) fn part(&self, from: u32, count: u32) -> &[u8] {
        self.list[from as usize..(from + count) as usize].as_flattened()
    }

    /// Returns the result for each of the caller's positions.
    pub(crate) fn found(&self) -> &[bool] {
        &self.found
    }

    /// Returns the caller's positions of existing objects that are stripe heads.
    pub(crate) fn heads(&self) -> &[usize] {
        &self.heads
    }

    /// Returns the caller's positions of the objects whose request failed, with the reason.
    pub(crate) fn unanswered(&self, results: &[TaskResult]) -> Vec<(usize, Status)> {
        let (mut unanswered, mut from) = (Vec::new(), 0);
        for (result, count) in results.iter().zip(&self.parts) {
            let until = from + *count as usize;
            if result.status != Status::Ok {
                unanswered.extend((from..until).map(|at| (self.place(at), result.status)));
            }
            from = until;
        }
        unanswered
    }

    /// Records the reply for the objects from position `from` on: which exist, and which of those are stripe heads.
    pub(crate) fn answer(&mut self, from: usize, there: &Bitmap<'_>, heads: Option<&Bitmap<'_>>) {
        if let Some(heads) = heads {
            let heads = (0..there.len()).filter(|at| heads.get(*at) && there.get(*at));
            self.heads.extend(heads.map(|at| self.places.get(from + at).map_or(from + at, |place| *place as usize)));
        }
        if self.places.is_empty() {
            there.copy_to(&mut self.found[from..from + there.len()]);
            return;
        }
        for (at, place) in self.places[from..from + there.len()].iter().enumerate() {
            self.found[*place as usize] = there.get(at);
        }
    }
}

/// Appends requests for one owner's part of a list, each as long as a frame allows.
fn push_requests(digests: impl Iterator<Item = Digest>, from: usize, count: usize, requests: &mut Vec<Request>) {
    let most = Limits::QUESTIONS_PER_FRAME;
    for (at, digest) in digests.enumerate().step_by(most) {
        requests.push(Request::Asks(digest, (from + at) as u32, most.min(count - at) as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_grouped_by_owner_and_those_without_one_come_last() {
        let digests: Vec<Digest> = (0..9_u128).map(Digest).collect();
        let mut batch = ExistenceBatch::new();
        let owner_of = |digest: Digest| [Some(PeerId(4)), None, Some(PeerId(1))][digest.0 as usize % 3];
        let requests = batch.fill(&digests, owner_of);
        let asked = [Request::Asks(Digest(2), 0, 3), Request::Asks(Digest(0), 3, 3), Request::Asks(Digest(1), 6, 3)];
        assert_eq!(requests, asked);
        assert_eq!(batch.part(3, 1), Digest(0).to_bytes());
        let results = [Status::Ok, Status::Ok, Status::NoOwner].map(TaskResult::of);
        let unanswered = [1, 4, 7].map(|at| (at, Status::NoOwner));
        assert_eq!(batch.unanswered(&results), unanswered);
    }
}
