//! Striped objects: a large object is stored as stripes under digests of their own, moved in parallel, and a stripe
//! head that names them.
//!
//! A stripe's digest follows from the object's digest, a nonce drawn for each put, and the stripe's index; so stripes
//! are spread over the cluster, and those of two versions never collide. The stripe head is a short object under the
//! object's own digest. It is put last: a striped object becomes visible when all of it is stored. The stripes of a put
//! that fails are removed again.
//!
//! The client that puts an object stripes it; every client can read it. A striped object that has lost a stripe does
//! not exist for gets, listings, existence and length queries: all of them check its stripes too. A get removes the
//! remains of such an object once the loss is certain, and a new put under its key replaces them.

mod puts;
mod remains;

use std::time::Duration;

use kvplane_client::{Local, Request, TaskResult};
use kvplane_proto::{Digest, Status, Version};

use super::{Buffer, Client, Got, Slice};
use crate::error::Error;
use crate::{Region, RegionOptions};

/// Magic number of a stripe head.
const MAGIC: [u8; 8] = *b"KVPSTRP1";
/// Length of a stripe head: the magic number and four words.
pub(super) const HEAD_BYTES: usize = 40;
/// Minimum stripe size; only the last stripe of an object may be shorter.
pub(super) const STRIPE_LEAST_BYTES: u64 = 1 << 20;
/// Maximum number of stripes of one object.
pub(super) const STRIPES_MOST: u64 = 1 << 16;
/// Attempts to read a striped object that is replaced meanwhile.
const TRIES: usize = 4;
/// Existence queries per batch when the stripes of objects are checked.
const STRIPES_TOGETHER: usize = 1 << 16;
/// Longest wait of a get for the certainty that a stripe is lost: a node in recovery does not confirm that before
/// recovery is complete, and a later get may ask again.
const CERTAIN: Duration = Duration::from_millis(100);

/// Content of a stripe head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    /// Length of the object in bytes.
    pub(super) bytes: u64,
    pub(super) stripe_bytes: u64,
    nonce: u128,
}

impl Head {
    pub(super) fn new(bytes: u64, stripe_bytes: u64, nonce: u128) -> Self {
        Self { bytes, stripe_bytes, nonce }
    }

    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        out[16..24].copy_from_slice(&self.stripe_bytes.to_le_bytes());
        out[24..40].copy_from_slice(&self.nonce.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]));
        let nonce = u128::from(word(32)) << 64 | u128::from(word(24));
        let head = Self::new(word(8), word(16), nonce);
        let whole = bytes[..8] == MAGIC && head.stripe_bytes > 0 && head.bytes > 0;
        (whole && head.stripes() <= STRIPES_MOST).then_some(head)
    }

    pub(super) const fn stripes(&self) -> u64 {
        self.bytes.div_ceil(self.stripe_bytes)
    }

    /// Returns the offset and length of a stripe in the object.
    pub(super) fn place(&self, stripe: u64) -> (u64, u64) {
        let offset = stripe * self.stripe_bytes;
        (offset, self.stripe_bytes.min(self.bytes - offset))
    }

    /// Returns the digest of a stripe.
    pub(super) fn digest(&self, object: Digest, stripe: u64) -> Digest {
        let mut name = [0; 40];
        name[..16].copy_from_slice(&object.0.to_le_bytes());
        name[16..32].copy_from_slice(&self.nonce.to_le_bytes());
        name[32..].copy_from_slice(&stripe.to_le_bytes());
        Digest::of(b"\0stripes", &name)
    }

    pub(super) fn digests(self, object: Digest) -> impl Iterator<Item = Digest> {
        (0..self.stripes()).map(move |stripe| self.digest(object, stripe))
    }
}

/// Decides which objects are striped, and holds the memory for stripe heads.
pub(super) struct Striping {
    pub(super) stripe_bytes: u64,
    /// Length of the shortest object that a shard has refused as too long.
    refused_bytes: u64,
    heads: Option<Buffer>,
}

impl Striping {
    pub(super) const fn new(stripe_bytes: u64) -> Self {
        Self { stripe_bytes, refused_bytes: u64::MAX, heads: None }
    }

    const fn is_striped(&self, bytes: u64) -> bool {
        bytes > self.stripe_bytes || bytes >= self.refused_bytes && bytes > STRIPE_LEAST_BYTES
    }

    /// Records that a shard refused an object as too long: later objects of that length are striped at once.
    pub(super) fn refused(&mut self, bytes: u64) {
        self.refused_bytes = self.refused_bytes.min(bytes);
    }
}

impl Client {
    /// Returns true if an object of so many bytes is striped.
    pub(super) const fn is_striped(&self, bytes: u64) -> bool {
        self.striping.is_striped(bytes)
    }

    /// Returns memory for stripe heads. It is never that of values, which may be in flight at the same time.
    pub(super) fn room_for_heads(&mut self, heads: usize) -> Result<Buffer, Error> {
        let bytes = HEAD_BYTES * heads.max(1);
        let had = self.striping.heads.take();
        let new = || RegionOptions::new("kvplane-heads", bytes.max(4096).next_power_of_two());
        let room = self.room(had, bytes, new)?;
        self.striping.heads = Some(room.clone());
        Ok(room)
    }

    /// Returns the existing buffer if it has at least `bytes`, else a new one in its place.
    pub(super) fn room(
        &mut self,
        had: Option<Buffer>,
        bytes: usize,
        new: impl Fn() -> RegionOptions,
    ) -> Result<Buffer, Error> {
        match had {
            Some(room) if room.region().bytes() >= bytes => return Ok(room),
            Some(old) => self.unregister(old),
            None => {}
        }
        Ok(self.register(Region::allocate(&new())?))
    }

    /// Returns the stripe head of an object; `None` where there is none.
    pub(super) fn head_of(&mut self, digest: Digest) -> Result<Option<Head>, Error> {
        Ok(self.heads_of(&[digest])?.pop().flatten().map(|(head, _)| head))
    }

    /// Returns stripe heads and their versions; `None` for an object that is not a stripe head.
    pub(super) fn heads_of(&mut self, digests: &[Digest]) -> Result<Vec<Option<(Head, Version)>>, Error> {
        let bounce = self.room_for_heads(digests.len())?;
        let local = |at: usize| bounce.slice(at * HEAD_BYTES, HEAD_BYTES).local();
        let asked = digests.iter().enumerate();
        let requests: Vec<Request> = asked.map(|(at, digest)| Request::GetHead(*digest, local(at))).collect();
        let results = if requests.is_empty() { Vec::new() } else { self.run(&requests)? };
        let heads = results.into_iter().enumerate().map(|(at, result)| match (result.status, result.bytes) {
            (Status::Ok, bytes) if bytes == HEAD_BYTES as u64 => {
                let mut head = [0; HEAD_BYTES];
                bounce.region().copy_out(at * HEAD_BYTES, &mut head);
                Ok(Head::decode(&head).map(|head| (head, result.version)))
            }
            (Status::Ok | Status::NotFound | Status::BufferTooSmall, _) => Ok(None),
            (status, _) => Err(self.problem("get of a stripe head".to_owned(), status)),
        });
        heads.collect()
    }

    /// Reads a striped object into memory.
    pub(super) fn get_striped(&mut self, digest: Digest, slice: Slice) -> Result<Option<Got>, Error> {
        for _ in 0..TRIES {
            let Some((head, version)) = self.heads_of(&[digest])?.pop().flatten() else { return Ok(None) };
            if head.bytes > slice.local().bytes {
                let what = format!("get of {} bytes into {}", head.bytes, slice.local().bytes);
                return Err(self.problem(what, Status::BufferTooSmall));
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
    pub(super) fn get_striped_range(
        &mut self,
        digest: Digest,
        offset: u64,
        into: Local,
    ) -> Result<Option<Version>, Error> {
        for _ in 0..TRIES {
            let Some((head, version)) = self.heads_of(&[digest])?.pop().flatten() else { return Ok(None) };
            let Some(end) = offset.checked_add(into.bytes).filter(|end| *end <= head.bytes) else {
                let what = format!("get of {} bytes at {offset} of an object of {}", into.bytes, head.bytes);
                return Err(self.problem(what, Status::OutOfRange));
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
    pub(super) fn remove_remains(&mut self, digest: Digest) -> Result<(), Error> {
        let Some((head, version)) = self.heads_of(&[digest])?.pop().flatten() else { return Ok(()) };
        let stripes: Vec<Digest> = head.digests(digest).collect();
        let requests: Vec<Request> = stripes.iter().copied().map(Request::Exists).collect();
        let results = self.run(&requests)?;
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
        let soon = self.deadline.min(CERTAIN);
        let whole = core::mem::replace(&mut self.deadline, soon);
        let certain = self.is_gone(lost);
        self.deadline = whole;
        if !certain.unwrap_or(false) {
            return;
        }
        let removed = self.run_one(Request::RemoveHeadOf(digest, version));
        if removed.is_ok_and(|removed| removed.status == Status::Ok) {
            let _ = self.remove_stripes(digest, head);
        }
    }

    /// Runs gets of stripes; returns the first stripe that is missing, or `None` if all succeeded.
    fn first_lost(&mut self, requests: &[Request]) -> Result<Option<Digest>, Error> {
        let results = self.run(requests)?;
        let lost = requests.iter().zip(&results).find(|(_, result)| result.status == Status::NotFound);
        if let Some((Request::Get(stripe, _) | Request::GetRange(stripe, ..), _)) = lost {
            return Ok(Some(*stripe));
        }
        let failed = results.iter().find(|result| result.status != Status::Ok);
        match failed {
            Some(result) => Err(self.problem("get of a stripe".to_owned(), result.status)),
            None => Ok(None),
        }
    }

    /// Removes a stripe head and its stripes. Returns true if the stripe head existed.
    fn remove_head(&mut self, digest: Digest, head: &Head) -> Result<bool, Error> {
        let result = self.run_one(Request::RemoveHead(digest))?;
        let removed = self.present(result, "remove")?;
        self.remove_stripes(digest, head)?;
        Ok(removed)
    }

    pub(super) fn remove_stripes(&mut self, digest: Digest, head: &Head) -> Result<(), Error> {
        let requests: Vec<Request> = head.digests(digest).map(Request::Remove).collect();
        for result in self.run(&requests)? {
            self.present(result, "remove of a stripe")?;
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
            for ((at, _), result) in part.iter().zip(self.run(&requests)?) {
                if !self.present(result, "exists of a stripe")? {
                    heads[*at] = None;
                }
            }
        }
        Ok(heads)
    }

    /// Returns for each stripe head whether all of its stripes exist.
    pub(super) fn are_whole(&mut self, digests: &[Digest]) -> Result<Vec<bool>, Error> {
        Ok(self.whole_heads(digests)?.into_iter().map(|head| head.is_some()).collect())
    }

    /// Completes the results of queries and removals of striped objects.
    pub(super) fn resolve_striped(&mut self, requests: &[Request], results: &mut [TaskResult]) -> Result<(), Error> {
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

    /// Returns the digests of a striped object's stripe head and stripes; `None` if the object is gone.
    pub(super) fn parts_of_striped(&mut self, digest: Digest) -> Result<Option<Vec<Digest>>, Error> {
        let parts = |head: Head| core::iter::once(digest).chain(head.digests(digest)).collect();
        Ok(self.head_of(digest)?.map(parts))
    }

    /// Returns the lengths of striped objects by their digests; 0 for an object that no longer exists.
    pub(super) fn striped_bytes(&mut self, digests: &[Digest]) -> Result<Vec<u64>, Error> {
        let heads = self.whole_heads(digests)?;
        Ok(heads.into_iter().map(|head| head.map_or(0, |head| head.bytes)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_tile_their_object_and_have_distinct_digests() {
        let head = Head::new(1000, 300, 7);
        let places: Vec<_> = (0..head.stripes()).map(|stripe| head.place(stripe)).collect();
        assert_eq!(places, [(0, 300), (300, 300), (600, 300), (900, 100)]);
        assert_eq!(Head::decode(&head.encode()), Some(head));
        assert_eq!(Head::decode(&[0; HEAD_BYTES]), None);
        assert_eq!(Head::decode(&Head::new(0, 300, 7).encode()), None);
        assert_eq!(Head::decode(&Head::new(u64::MAX, 1, 7).encode()), None);
        let mut all: Vec<Digest> = head.digests(Digest(5)).chain(head.digests(Digest(6))).collect();
        all.extend(Head::new(1000, 300, 8).digests(Digest(5)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 12);
    }
}
