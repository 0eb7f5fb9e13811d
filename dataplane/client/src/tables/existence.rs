//! Whether many objects are there: one request to each owner, and one slice for all of its objects.
//!
//! What single requests have each for itself, a result, a slice, a route, costs more than to look the object up. Here
//! the digests are put in the order of their owners, and each owner's part of that list is a request of its own. What
//! comes back is a bit for each.
//!
//! Nothing is tried twice here: a request whose shard is not the owner of all of it, or cannot be reached, ends, and
//! the caller asks for each of its objects by itself ([`Batches::unanswered`](crate::Batches::unanswered)). So this
//! knows nothing of maps that change meanwhile.

use kvplane_proto::digest::{DIGEST_BYTES, Digest};
use kvplane_proto::limits::Limits;
use kvplane_proto::message::Bitmap;
use kvplane_proto::status::Status;

use crate::types::{PeerId, Request, TaskResult};

/// What a batch asks of many objects.
pub(crate) struct ExistenceBatch {
    /// Digests as they travel, each owner's together.
    list: Vec<[u8; DIGEST_BYTES]>,
    /// The position of each in the caller's list; empty where that is the same.
    places: Vec<u32>,
    /// How many of them each request is about.
    parts: Vec<u32>,
    /// For each of the caller's positions, whether the object is there.
    found: Vec<bool>,
    /// The caller's positions of those that are there and name stripes.
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

    /// Whether its allocations are small enough to be kept for the next batch.
    pub(crate) const fn is_worth_keeping(&self) -> bool {
        self.list.capacity() <= Limits::QUESTIONS_PER_FRAME && self.places.capacity() <= Limits::QUESTIONS_PER_FRAME
    }

    /// The position in the caller's list of one in ours.
    fn place(&self, at: usize) -> usize {
        self.places.get(at).map_or(at, |place| *place as usize)
    }

    /// Puts digests in the order of their owners, and makes a request of each owner's part.
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

    /// A counting sort, as there are few owners and many objects.
    fn sort_by_owner(
        &mut self,
        digests: &[Digest],
        owner_of: impl FnMut(Digest) -> Option<PeerId>,
        requests: &mut Vec<Request>,
    ) {
        let owners: Vec<Option<PeerId>> = digests.iter().copied().map(owner_of).collect();
        // Nobody's are the last.
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

    /// So many digests from this place on, as they travel.
    pub(crate) fn part(&self, from: u32, count: u32) -> &[u8] {
        self.list[from as usize..(from + count) as usize].as_flattened()
    }

    /// For each of the caller's positions, whether the object is there.
    pub(crate) fn found(&self) -> &[bool] {
        &self.found
    }

    /// The caller's positions of those that are there and name stripes.
    pub(crate) fn heads(&self) -> &[usize] {
        &self.heads
    }

    /// The caller's positions of those that nobody answered for, and why, by the results of their requests.
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

    /// Takes in what is there of those from `from` on, and what of that names stripes.
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

/// Requests for a part of a list that is one owner's, each as long as a frame may be.
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
    fn each_owner_is_asked_for_its_own_and_nobody_s_come_last() {
        let digests: Vec<Digest> = (0..9_u128).map(Digest).collect();
        let mut batch = ExistenceBatch::new();
        let owner_of = |digest: Digest| [Some(PeerId(4)), None, Some(PeerId(1))][digest.0 as usize % 3];
        let requests = batch.fill(&digests, owner_of);
        let asked = [Request::Asks(Digest(2), 0, 3), Request::Asks(Digest(0), 3, 3), Request::Asks(Digest(1), 6, 3)];
        assert_eq!(requests, asked);
        assert_eq!(batch.part(3, 1), Digest(0).to_bytes());
        let result = |status| TaskResult {
            status,
            bytes: 0,
            version: kvplane_proto::ids::Version(0),
            replicas: 0,
            from_replica: false,
            incarnation: crate::types::PeerIncarnation(0),
        };
        let results = [Status::Ok, Status::Ok, Status::NoOwner].map(result);
        let unanswered = [1, 4, 7].map(|at| (at, Status::NoOwner));
        assert_eq!(batch.unanswered(&results), unanswered);
    }
}
