//! Whether objects are there, of many at once: one request to each owner, and one slice for all that it is asked.
//!
//! What single requests have each for itself, a result, a slice, a route, costs more than to look the object up. Here
//! the digests are put in the order of their owners, and each owner's part of that list is a request of its own. What
//! comes back is a bit for each.
//!
//! Nothing is tried twice here: a request whose shard is not the owner of all of it, or cannot be reached, ends, and
//! whoever asked asks for each of its objects by itself ([`Client::unanswered`]). So this knows nothing of maps that
//! change meanwhile.

use kvplane_proto::digest::{DIGEST_BYTES, Digest};
use kvplane_proto::frame::Header;
use kvplane_proto::ids::BatchId;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Bitmap, Kind, Operation};
use kvplane_proto::status::Status;

use super::Client;
use super::types::{PeerId, Request, SubmitError};

/// What a batch asks of many objects.
pub(super) struct ExistenceBatch {
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
    pub(super) const fn new() -> Self {
        Self { list: Vec::new(), places: Vec::new(), parts: Vec::new(), found: Vec::new(), heads: Vec::new() }
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.places.clear();
        self.parts.clear();
        self.found.clear();
        self.heads.clear();
    }

    /// Whether its allocations are small enough to be kept for the next batch.
    pub(super) const fn is_worth_keeping(&self) -> bool {
        self.list.capacity() <= Limits::QUESTIONS_PER_FRAME && self.places.capacity() <= Limits::QUESTIONS_PER_FRAME
    }

    /// The position in the caller's list of one in ours.
    fn place(&self, at: usize) -> usize {
        self.places.get(at).map_or(at, |place| *place as usize)
    }

    /// Takes in what is there of those from `from` on, and what of that names stripes.
    fn answer(&mut self, from: usize, there: &Bitmap<'_>, heads: Option<&Bitmap<'_>>) {
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

impl Client {
    /// Asks which of these objects are there, to be known by `deadline_ns`. The batch's tasks are none of the caller's:
    /// when it is complete, [`Self::found`] and [`Self::unanswered`] tell of the objects.
    ///
    /// # Errors
    /// When there are none, or too many; then nothing was done.
    pub fn submit_asks(&mut self, digests: &[Digest], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        if digests.len() > Limits::BATCH_REQUESTS {
            return Err(SubmitError::TooMany { requests: digests.len(), limit: Limits::BATCH_REQUESTS });
        }
        let mut asked = core::mem::replace(&mut self.asking, ExistenceBatch::new());
        let requests = self.by_owner(digests, &mut asked);
        asked
            .parts
            .extend(requests.iter().map(|request| if let Request::Asks(_, _, count) = request { *count } else { 0 }));
        asked.found.resize(digests.len(), false);
        self.asking = asked;
        let id = self.submit(&requests, deadline_ns, now_ns)?;
        // What the batch had is of use for the next one.
        core::mem::swap(&mut self.batches.at(id.index).existence, &mut self.asking);
        Ok(id)
    }

    /// Puts digests in the order of their owners, and makes a request of each owner's part.
    fn by_owner(&mut self, digests: &[Digest], asked: &mut ExistenceBatch) -> Vec<Request> {
        asked.clear();
        let mut requests = Vec::new();
        let Some(&first) = digests.first() else { return requests };
        let owner = self.owner_peer(first);
        let alike = digests.iter().take_while(|digest| self.owner_peer(**digest) == owner).count();
        if alike == digests.len() {
            asked.list.extend(digests.iter().map(|digest| digest.to_bytes()));
            push_requests(digests.iter().copied(), 0, digests.len(), &mut requests);
            return requests;
        }
        self.sort_by_owner(digests, asked, &mut requests);
        requests
    }

    /// A counting sort, as there are few owners and many objects.
    fn sort_by_owner(&mut self, digests: &[Digest], asked: &mut ExistenceBatch, requests: &mut Vec<Request>) {
        let owners: Vec<Option<PeerId>> = digests.iter().map(|digest| self.owner_peer(*digest)).collect();
        // Nobody's are the last.
        let bin = |owner: Option<PeerId>, peers: usize| owner.map_or(peers, |peer| peer.0 as usize);
        let peers = self.peers.len();
        let mut counts = vec![0_u32; peers + 1];
        owners.iter().for_each(|owner| counts[bin(*owner, peers)] += 1);
        let mut next = Vec::with_capacity(counts.len());
        let mut sum = 0;
        for count in &counts {
            next.push(sum);
            sum += count;
        }
        asked.places.resize(digests.len(), 0);
        for (place, owner) in (0..).zip(&owners) {
            let at = &mut next[bin(*owner, peers)];
            asked.places[*at as usize] = place;
            *at += 1;
        }
        let listed = |at: usize| digests[asked.places[at] as usize];
        asked.list.extend((0..digests.len()).map(|at| listed(at).to_bytes()));
        let mut from = 0;
        for count in counts.into_iter().map(|count| count as usize).filter(|count| *count > 0) {
            push_requests((from..from + count).map(listed), from, count, requests);
            from += count;
        }
    }

    /// Sends one request for many objects. Its slice is the first in its lane's queue.
    pub(super) fn send_asked(&mut self, lane: u32, slice: u32, from: u32, count: u32) {
        let id = self.lanes[lane as usize].id(lane);
        let request = self.open_wire(id, Operation::Exists);
        let mut header = Header::request(Kind::Request(Operation::Exists), request);
        header.deadline_us = self.deadline_us(slice);
        let batch = self.slices.at(slice).batch;
        let list = &self.batches.at(batch.index).existence.list[from as usize..(from + count) as usize];
        let start = self.outbox.mark();
        self.outbox.writer().extend_from_slice(list.as_flattened());
        let body = self.outbox.since(start);
        self.take_queued(lane, slice);
        self.join_wire(request, slice);
        self.send(id, header, body, count as usize, &[]);
    }

    /// A request for many objects has its answer. `None` when no honest peer says that.
    pub(super) fn on_asked(&mut self, slice: u32, part: (u32, u32), header: &Header, body: &[u8]) -> Option<()> {
        let (from, count) = part;
        if header.items != count {
            return None;
        }
        let (there, heads) = Bitmap::decode_two(body, count)?;
        let batch = self.slices.at(slice).batch;
        self.batches.at(batch.index).existence.answer(from as usize, &there, heads.as_ref());
        self.settle(slice, Status::Ok);
        Some(())
    }

    /// Which objects of a complete [`Self::submit_asks`] are there, by their positions; empty for a stale id. False for
    /// those that nobody answered for.
    #[must_use]
    pub fn found(&self, batch: BatchId) -> &[bool] {
        self.batches.get(batch.index, batch.generation).map_or(&[], |batch| &batch.existence.found)
    }

    /// Those of [`Self::found`] that name stripes, by their positions: whether these are there too is another question.
    #[must_use]
    pub fn found_heads(&self, batch: BatchId) -> &[usize] {
        self.batches.get(batch.index, batch.generation).map_or(&[], |batch| &batch.existence.heads)
    }

    /// The objects of a complete [`Self::submit_asks`] that nobody answered for, by their positions, and why.
    #[must_use]
    pub fn unanswered(&self, batch: BatchId) -> Vec<(usize, Status)> {
        let mut unanswered = Vec::new();
        let Some(entry) = self.batches.get(batch.index, batch.generation) else { return unanswered };
        let mut from = 0;
        for (result, count) in entry.results.iter().zip(&entry.existence.parts) {
            let until = from + *count as usize;
            if result.status != Status::Ok {
                unanswered.extend((from..until).map(|at| (entry.existence.place(at), result.status)));
            }
            from = until;
        }
        unanswered
    }
}

/// Requests for a part of a list that is one owner's, each as long as a frame may be.
fn push_requests(digests: impl Iterator<Item = Digest>, from: usize, count: usize, requests: &mut Vec<Request>) {
    let most = Limits::QUESTIONS_PER_FRAME;
    for (at, digest) in digests.enumerate().step_by(most) {
        requests.push(Request::Asks(digest, (from + at) as u32, most.min(count - at) as u32));
    }
}
